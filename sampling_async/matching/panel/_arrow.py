"""pyarrow, which comes without types: here it is `Any`, so that nobody else need excuse it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

pa: Final[Any] = import_module("pyarrow")
pc: Final[Any] = import_module("pyarrow.compute")


def arrow(numbers: NDArray[np.integer[Any]]) -> Any:
    """Return whole numbers as an array of Arrow: `pa.array` would import pandas first, where there is one."""
    kind = pa.from_numpy_dtype(numbers.dtype)
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])
