"""pyarrow, which comes without types: here it is `Any`, so that nobody else need excuse it."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

pa: Final[Any] = import_module("pyarrow")
pc: Final[Any] = import_module("pyarrow.compute")
