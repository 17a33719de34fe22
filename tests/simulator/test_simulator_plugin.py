"""The pytest plugin and the package's lazy names."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import sampling_async.simulator as package

if TYPE_CHECKING:
    from pathlib import Path

TESTS = """
import pytest

def test_small(sampling_simulator):
    assert len(sampling_simulator.members) == 20
    assert sampling_simulator.ledger.request_count == 0

@pytest.mark.sampling_simulator(surveys=2, seed=3)
class TestMarked:
    def test_marked(self, sampling_simulator):
        assert len(sampling_simulator.inventory.surveys) == 2

    @pytest.mark.sampling_simulator(members=1)
    def test_the_closest_marker_counts(self, sampling_simulator):
        assert len(sampling_simulator.inventory.surveys) == 2
        assert len(sampling_simulator.members) == 1

@pytest.mark.xfail(raises=pytest.UsageError, strict=True)
@pytest.mark.sampling_simulator(3)
def test_positional(sampling_simulator):
    pass
"""


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)


def test_the_fixture_is_fresh_small_and_configurable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", _root())
    (tmp_path / "test_it.py").write_text(TESTS)
    plugin = "sampling_async.simulator.pytest_plugin"
    run = python("-m", "pytest", "-q", "-W", "error", "--strict-markers", "-p", plugin, cwd=tmp_path)
    assert "3 passed, 1 xfailed" in run.stdout, run.stdout + run.stderr


ASYNC_TEST = """
import pytest

{mark}
async def test_a_call(sampling_simulator):
    async with sampling_simulator.client() as client:
        result = await client.bulk_invite(next(iter(sampling_simulator.members)), [1, 2])
    assert len(result) == 2
    assert sampling_simulator.ledger.request_count == 1
"""
RUNNERS = {
    "pytest-asyncio, strict": ("pytest_asyncio", "@pytest.mark.asyncio", "asyncio_mode=strict", 1),
    "pytest-asyncio, auto": ("pytest_asyncio", "", "asyncio_mode=auto", 1),
    "anyio": ("anyio", "@pytest.mark.anyio", None, 2),  # on asyncio and on trio
    "anyio, auto": ("anyio", "", "anyio_mode=auto", 2),
}


@pytest.mark.parametrize("case", RUNNERS.values(), ids=list(RUNNERS))
def test_the_fixture_works_with_every_async_runner(case, tmp_path, monkeypatch):
    runner, mark, mode, passed = case
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", _root())
    (tmp_path / "test_it.py").write_text(ASYNC_TEST.format(mark=mark))
    plugins = {"pytest_asyncio": "pytest_asyncio.plugin", "anyio": "anyio.pytest_plugin"}
    options = ("-p", "sampling_async.simulator.pytest_plugin", "-p", plugins[runner])
    if runner == "pytest_asyncio":  # it warns if it is not configured
        options += ("-o", "asyncio_default_fixture_loop_scope=function")
    mode = ("-o", mode) if mode else ()
    run = python("-m", "pytest", "-q", "-W", "error", "--strict-markers", *options, *mode, cwd=tmp_path)
    assert f"{passed} passed" in run.stdout, run.stdout + run.stderr


def test_loading_the_plugin_loads_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", _root())
    code = (
        "import sys, sampling_async.simulator.pytest_plugin\n"
        "own = [name for name in sys.modules if name.startswith('sampling_async.simulator._')]\n"
        "print(own, 'starlette' in sys.modules, 'uvicorn' in sys.modules)"
    )
    run = python("-W", "error", "-c", code, cwd=tmp_path)
    assert run.stdout.split() == ["[]", "False", "False"], run.stderr


def test_every_exported_name_exists_and_nothing_else_shows():
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert dir(package) == sorted(package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        package.Nothing  # noqa: B018


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_the_error_without_the_extra_says_what_to_install(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", _root())
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from sampling_async.simulator import Simulator\n"
        "with Simulator(surveys=1, members=1).serve(): pass"
    )
    run = python("-c", code, cwd=tmp_path)
    assert 'pip install "sampling-async[simulator]"' in run.stderr


def _root() -> str:
    spec = package.__spec__
    assert spec is not None
    assert spec.origin is not None
    return spec.origin.rsplit("/sampling_async/", 1)[0]
