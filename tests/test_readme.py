"""The README's examples are run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from sampling_async.simulator import Simulator

if TYPE_CHECKING:
    from sybil.example import Example

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = list(Sybil([PythonCodeBlockParser()]).parse(ROOT / "README.md").examples())
TESTS = [example for example in EXAMPLES if "def test_" in str(example.parsed)]
SCRIPTS = [example for example in EXAMPLES if example not in TESTS]


def line_of(example: Example) -> str:
    return f"line {example.line}"


@pytest.mark.parametrize("example", SCRIPTS, ids=line_of)
def test_a_script_runs(example, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)  # one of them leaves a journal
    simulator = Simulator(seed=1, surveys=5, members=5)
    with simulator.serve() as url:
        monkeypatch.setenv("SAMPLING_BASE_URL", url)
        monkeypatch.setenv("SAMPLING_PANEL_GUID", simulator.panel_guid)
        monkeypatch.setenv("SAMPLING_API_KEY", simulator.api_key)
        example.evaluate()
    assert capsys.readouterr().out


@pytest.mark.parametrize("example", TESTS, ids=line_of)
def test_a_test_passes(example, tmp_path):
    (tmp_path / "test_example.py").write_text(str(example.parsed))
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_two_commands_are_those_that_ci_runs():
    assert 'python -m pip install -e ".[cli,simulator]" && sampling-async demo' in README
    second = "python -m pip install nox && nox"
    assert second in README
    assert second in (ROOT / ".ci" / "run").read_text()


def test_recipes_are_parts_of_those_that_are_run_on_the_engines():
    blocks = [block.partition("```")[0] for block in README.split("```py\n")[1:]]
    assert len(blocks) == 3
    recipes = [path.read_text() for path in (ROOT / "tests" / "clusters").glob("recipe_*.py")]
    for block in blocks:
        assert any(block in recipe for recipe in recipes)


def test_there_are_examples():
    assert (len(SCRIPTS), len(TESTS)) == (8, 1)
