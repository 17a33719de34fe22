"""What can be imported is what is documented."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_origin

import pytest

import sampling_async

README = (Path(__file__).parent.parent / "README.md").read_text()
PUBLIC = [name for name in sampling_async.__all__ if name != "__version__"]


def test_all_is_sorted_and_all_that_is_visible():
    # Pytest rewrites what belongs to a plugin, and leaves names with an @ behind.
    visible = {name for name in vars(sampling_async) if name.isidentifier() and not name.startswith("_")}
    visible -= {"matching", "simulator"}
    assert visible == set(PUBLIC)
    assert sampling_async.__all__ == sorted(sampling_async.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_export_is_documented(name):
    thing = getattr(sampling_async, name)
    assert re.search(rf"\b{name}\b", README), f"{name} is not in the README"
    if get_origin(thing) is Literal:
        return  # documented by the string below it, which Python does not keep
    assert inspect.getdoc(thing), name
    for attribute, member in vars(thing).items() if inspect.isclass(thing) else ():
        if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            assert inspect.getdoc(member), f"{name}.{attribute}"


def test_importing_brings_nothing_along_that_takes_long():
    heavy = {"asyncio", "html", "starlette", "uvicorn", "typer", "rich", "trio"}
    code = (
        "import sys, httpx, cattrs, anyio; before = set(sys.modules); import sampling_async; "
        f"print(sorted({heavy} & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
