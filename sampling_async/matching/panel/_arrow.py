"""pyarrow as `Any`, because it has no types, and conversions between pyarrow and numpy."""

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
"""The numpy types of whole numbers by Arrow type ID: this lookup is faster than pyarrow's tests of a type."""


def arrow(numbers: NDArray[np.integer[Any]]) -> Any:
    """Return whole numbers as an Arrow array."""
    # Not by `pa.array`, which first imports pandas if it is installed.
    kind = pa.from_numpy_dtype(numbers.dtype)
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])


def booleans(column: Any) -> NDArray[np.bool_]:
    """Return the values of a column of booleans without nulls."""
    # Not by `to_numpy`, which imports pandas.
    return _bits(column.buffers()[1], column.offset, len(column))


def _bits(buffer: Any, offset: int, length: int) -> NDArray[np.bool_]:
    # Arrow packs eight values into a byte, the first in the lowest bit, and a slice may begin within a byte.
    # Offset 19: begin at byte 2, and drop the first 3 bits.
    first, offset = divmod(offset, 8)
    count = offset + length
    bits = np.frombuffer(buffer, np.uint8, (count + 7) // 8, first)
    return np.unpackbits(bits, count=count, bitorder="little")[offset:].view(bool)


def integers(column: Any) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Return the values of a column of whole numbers, without a copy, and which of them are not null.

    Returns:
        The values, in which nulls are arbitrary numbers; and whether each is a value, or None if all are.
    """
    valid, data = column.buffers()
    kind, offset, length = WHOLE[column.type.id], column.offset, len(column)
    values = np.frombuffer(data, kind, length, offset * kind.itemsize)
    return values, None if valid is None else _bits(valid, offset, length)
