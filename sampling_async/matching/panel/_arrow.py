"""pyarrow, which comes without types: here it is `Any`, so that nobody else need excuse it. Numpy beside it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

pa: Final[Any] = import_module("pyarrow")
pc: Final[Any] = import_module("pyarrow.compute")


WHOLE: Final[dict[int, Any]] = {
    kind.id: np.dtype(kind.to_pandas_dtype())
    for size in (8, 16, 32, 64)
    for kind in (getattr(pa, f"int{size}")(), getattr(pa, f"uint{size}")())
}
"""The types of whole numbers by their IDs: to ask pyarrow what a type is takes longer than to look it up."""


def arrow(numbers: NDArray[np.integer[Any]]) -> Any:
    """Return whole numbers as an array of Arrow: `pa.array` would import pandas first, where there is one."""
    kind = pa.from_numpy_dtype(numbers.dtype)
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])


def booleans(column: Any) -> NDArray[np.bool_]:
    """Return the values of a column of booleans, all of which are there: `to_numpy` would import pandas."""
    return _bits(column.buffers()[1], column.offset, len(column))


def _bits(buffer: Any, offset: int, length: int) -> NDArray[np.bool_]:
    first, offset = divmod(offset, 8)
    count = offset + length
    bits = np.frombuffer(buffer, np.uint8, (count + 7) // 8, first)
    return np.unpackbits(bits, count=count, bitorder="little")[offset:].view(bool)


def integers(column: Any) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Return the numbers of a column, and which of them are there: others are anything. None is all of them."""
    valid, data = column.buffers()
    kind, offset, length = WHOLE[column.type.id], column.offset, len(column)
    values = np.frombuffer(data, kind, length, offset * kind.itemsize)
    return values, None if valid is None else _bits(valid, offset, length)
