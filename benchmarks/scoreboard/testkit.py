"""Tools of the tests that the scoreboard uses on a larger scale: a model of the service, and sweeps."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import ModuleType

ROOT: Final = Path(__file__).resolve().parents[2]


def tool(name: str) -> ModuleType:
    """Import a module of the tests. These modules import one another by their plain names."""
    tests = ROOT / "tests"
    for folder in (tests, *(each for each in tests.iterdir() if each.is_dir())):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return import_module(name)


def descriptors() -> int:
    """Return how many files and sockets this process has open."""
    gc.collect()
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0
