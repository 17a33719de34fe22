"""Everything that can be imported is documented, and nothing else can be imported."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Literal, get_origin

import pytest

import sampling_async

REFERENCE = "".join(
    page.read_text() for page in sorted((Path(__file__).parents[2] / "docs" / "reference").glob("*.md"))
)
PUBLIC = [name for name in sampling_async.__all__ if name != "__version__"]


def test_all_is_sorted_and_equals_dir():
    assert dir(sampling_async) == sampling_async.__all__ == sorted(sampling_async.__all__)
    used_inside = {"Any", "Final", "TYPE_CHECKING", "import_module"}
    used_inside |= {"campaign", "frames", "health", "matching", "notifications", "routing", "simulator", "sync"}
    # Pytest rewrites modules of plugins, which leaves names with an @.
    visible = {name for name in vars(sampling_async) if name.isidentifier() and not name.startswith("_")}
    assert visible - used_inside <= set(PUBLIC)


def test_a_missing_name_raises_the_usual_attribute_error():
    with pytest.raises(AttributeError, match="module 'sampling_async' has no attribute 'Client'"):
        sampling_async.Client  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Client'"):
        from sampling_async import Client  # noqa: F401, PLC0415


@pytest.mark.parametrize("name", PUBLIC)
def test_every_export_is_documented(name):
    thing = getattr(sampling_async, name)
    assert re.search(rf"^\.\. auto\w+:: sampling_async\.{name}(?:\(\))?$", REFERENCE, re.MULTILINE), (
        f"{name}: not on any page"
    )
    if get_origin(thing) is Literal:
        return  # the string below it documents it, and Python does not keep that
    assert inspect.getdoc(thing), name
    assert_members_are_documented(thing)


def assert_members_are_documented(thing):
    for attribute, member in vars(thing).items() if inspect.isclass(thing) else ():
        if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            assert inspect.getdoc(member), f"{thing.__name__}.{attribute}"


@pytest.mark.parametrize(
    "package",
    [
        "sampling_async.campaign",
        "sampling_async.health",
        "sampling_async.matching",
        "sampling_async.notifications",
        "sampling_async.routing",
        "sampling_async.simulator",
        "sampling_async.sync",
    ],
)
def test_every_export_of_the_tools_is_documented(package):
    module = import_module(package)
    for name in module.__all__:
        if package == "sampling_async.matching":
            assert_members_are_documented(getattr(module, name))
        assert re.search(rf"^\.\. [\w:]+:: {package}\.{name}(?:\(\))?$", REFERENCE, re.MULTILINE), (
            f"{name}: not on any page"
        )


@pytest.mark.parametrize(
    ("code", "others"),
    [
        (
            "import sampling_async",
            "anyio asyncio cattrs httpx jinja2 pydantic rich sampling_async._client starlette trio typer",
        ),
        (
            "import sampling_async; sampling_async.SamplingClient",
            "asyncio cattrs jinja2 opentelemetry pydantic sampling_async.sync starlette trio typer uvicorn",
        ),
        (
            "from sampling_async.matching import PanelMatcher, QuotaIndex",
            "anyio asyncio cattrs httpx pyarrow.csv pyarrow.fs pyarrow.json pyarrow.parquet",
        ),
        ("import sampling_async.sync", "sampling_async.routing"),
        ("import sampling_async._cli._commands", "starlette uvicorn"),
    ],
)
def test_what_is_slow_to_load_is_loaded_by_who_needs_it(code, others):
    code += f"; import sys; print(*set({others.split()}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_refusal_does_not_stop_the_event_loop_for_an_import():
    code = """
import sys
from sampling_async import SamplingClient
from sampling_async._contract.exchange import Reply
from sampling_async._protocol.refusals import refusal
error = refusal(Reply(400, b'{"Result": "QuotaNotFound", "ResultCode": 16.0}'))
print(error.result_code, "cattrs" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "16 False"


# Runs in a process of its own: everything public is imported where the packages of all extras are missing.
_WITHOUT_EXTRAS = """
import sys
from importlib import import_module
from importlib.metadata import requires
from pkgutil import walk_packages
import re

extras = {}
for line in requires("sampling-async"):
    if found := re.match(r"([\\w-]+).*extra == ['\\"](\\w+)", line):
        extras.setdefault(found[2], set()).add(found[1].split("-")[0])
blocked = set().union(*extras.values()) - {"sampling"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
import sampling_async

tried = 0
for each in walk_packages(sampling_async.__path__, "sampling_async."):
    if "._" in each.name or each.name.endswith("pytest_plugin"):
        continue
    try:
        module = import_module(each.name)
        names = getattr(module, "__all__", ())
    except ImportError as exc:
        names, module = (None,), exc
    for name in names:
        tried += 1
        try:
            if name is None:
                raise module
            getattr(module, name)
        except ImportError as exc:
            text = str(exc)
            extra = re.search(r'"sampling-async\\[(\\w+)\\]" \\(in a clone: "\\.\\[\\1\\]"\\)', text)
            assert extra and any(package in text for package in extras[extra[1]]), (each.name, name, text)
print(tried, sorted(blocked))
"""


def test_where_a_package_of_an_extra_is_missing_an_import_error_says_what_to_install():
    ran = subprocess.run([sys.executable, "-c", _WITHOUT_EXTRAS], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    tried, _, blocked = ran.stdout.partition(" ")
    assert int(tried) > 100
    assert {"numpy", "pyarrow", "starlette", "psycopg"} <= set(re.findall(r"\w+", blocked))
