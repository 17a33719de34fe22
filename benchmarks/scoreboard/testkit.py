"""The test suite's own tools, which the scoreboard runs in volume: a service's model and sweeps."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import ModuleType

ROOT: Final = Path(__file__).resolve().parents[2]


def tool(name: str) -> ModuleType:
    """Import a module of the tests' kits, which import one another by their plain names."""
    for folder in (ROOT / "tests", ROOT / "tests" / "faults", ROOT / "tests" / "proxies"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return import_module(name)
