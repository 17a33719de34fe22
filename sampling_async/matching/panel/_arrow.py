"""pyarrow as `Any`, because it has no types: conversions to numpy, member codes, and the result's reader."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from sampling_async import InvalidRequestError
from sampling_async._protocol.requests import member_code_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


pa: Final[Any] = import_module("pyarrow")
pc: Final[Any] = import_module("pyarrow.compute")

MEMBER_CODE: Final = "member_code"
_SHORT: Final = 3  # bytes


WHOLE: Final[dict[int, Any]] = {
    kind.id: np.dtype(kind.to_pandas_dtype())
    for size in (8, 16, 32, 64)
    for kind in (getattr(pa, f"int{size}")(), getattr(pa, f"uint{size}")())
}
"""The numpy types of whole numbers by Arrow type ID: this lookup is faster than pyarrow's tests of a type."""


def arrow(numbers: NDArray[np.number[Any]]) -> Any:
    """Return numbers as an Arrow array."""
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
    """Return the whole numbers of a column, not copied, and which are not null; None if all are.

    Nulls are arbitrary numbers.
    """
    valid, data = column.buffers()
    kind, offset, length = WHOLE[column.type.id], column.offset, len(column)
    values = np.frombuffer(data, kind, length, offset * kind.itemsize)
    return values, None if valid is None else _bits(valid, offset, length)


class BatchReader(Protocol):
    """The result of `PanelMatcher.run`: a `pyarrow.RecordBatchReader`, described for type checkers.

    It can be read only once: batch by batch, as a whole, or by any library that reads an Arrow stream.
    """

    @property
    def schema(self) -> Any:
        """The names and types of the columns: a `pyarrow.Schema`."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches, each a `pyarrow.RecordBatch`."""
        ...

    def read_next_batch(self) -> Any:
        """Return the next batch; raise StopIteration after the last one."""
        ...

    def read_all(self) -> Any:
        """Return all batches not yet read as a `pyarrow.Table`."""
        ...

    def read_pandas(self, **options: Any) -> Any:
        """Return all batches not yet read as a `pandas.DataFrame`."""
        ...

    def close(self) -> None:
        """Discard the batches not yet read."""
        ...

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Export the stream to another library, by the Arrow C stream interface."""
        ...


# Types are tested by their IDs, as in `WHOLE`, which is faster: there may be hundreds of columns.
LISTS: Final = frozenset(
    kind.id for kind in (pa.list_(pa.null()), pa.large_list(pa.null()), pa.list_(pa.null(), 1))
)
_TEXTS: Final = frozenset(kind.id for kind in (pa.string(), pa.large_string(), pa.string_view()))
_VIEW: Final = pa.string_view().id
DICTIONARY: Final = pa.dictionary(pa.int32(), pa.string()).id
_UUID: Final = pa.binary(16)
_DIGITS: Final = [place for place in range(36) if place not in {8, 13, 18, 23}]
_SETTLED: Final = WHOLE.keys() | _TEXTS - {_VIEW}
_WIDE: Final = 128  # bits


def is_list(kind: Any) -> bool:
    return kind.id in LISTS


def is_text(kind: Any) -> bool:
    return kind.id in _TEXTS


def is_null(kind: Any) -> bool:
    """Return whether a column of an Arrow type can hold nothing but nulls, or lists of them."""
    return bool(pa.types.is_null(kind) or (is_list(kind) and pa.types.is_null(kind.value_type)))


def is_settled(kind: Any) -> bool:
    """Return whether a type needs no conversion by `settled`."""
    return kind.id in _SETTLED


def settled(batch: Any) -> Any:
    """Return a batch without string views, which Polars exports, narrow dictionaries, and UUIDs, as texts.

    Batches that are joined get one dictionary, whose words may be too many for a narrow index.
    """
    columns = [settled_column(column) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def settled_column(column: Any) -> Any:
    kind = column.type
    if kind.id == _VIEW:
        return column.cast(pa.string())
    if kind == _UUID:
        return _uuid_texts(column)
    if isinstance(kind, pa.BaseExtensionType):
        return settled_column(column.storage)
    if kind.id == DICTIONARY:
        return pa.DictionaryArray.from_arrays(
            column.indices.cast(pa.int64()), settled_column(column.dictionary)
        )
    if is_list(kind) and kind.value_type.id in {_VIEW, DICTIONARY}:
        values, member = flat(column)
        ends = np.cumsum(np.bincount(member, minlength=len(column)))
        return pa.LargeListArray.from_arrays(arrow(np.append(0, ends)), settled_column(values))
    return column


def _uuid_texts(column: Any) -> Any:
    # By numpy: Arrow has no such conversion, and `str(UUID(...))` takes seconds for a million members.
    digits = memoryview(column.buffers()[1])[16 * column.offset :][: 16 * len(column)].hex().encode()
    texts = np.full((len(column), 36), ord("-"), dtype=np.uint8)
    texts[:, _DIGITS] = np.frombuffer(digits, np.uint8).reshape(-1, 32)
    ends = pa.py_buffer(np.arange(0, texts.size + 1, 36, dtype=np.int64))
    made = pa.Array.from_buffers(pa.large_string(), len(column), [None, ends, pa.py_buffer(texts)])
    return pc.if_else(column.is_valid(), made, None)


def flat(column: Any) -> tuple[Any, NDArray[np.intp]]:
    """Return the values of a column of lists, and the member each value belongs to."""
    # The length of a null list is arbitrary; `flatten` leaves it out.
    lengths = integers(pc.list_value_length(column))[0] * booleans(column.is_valid())
    return column.flatten(), np.repeat(np.arange(len(column)), lengths)


def lists_of(values: Any, counts: NDArray[Any]) -> Any:
    """Return a column of lists, given the values of all, and how many each has."""
    return pa.ListArray.from_arrays(arrow(np.append(0, np.cumsum(counts)).astype(np.int32)), values)


class NotWholeError(ValueError):
    """A value of a column is not a whole number of 64 bits."""

    def __init__(self, at: int, value: object) -> None:
        super().__init__(at, value)
        self.at, self.value = at, value


def as_integers(column: Any) -> Any:
    """Return whole numbers, floats, decimals, or texts of digits as a column of 64-bit numbers.

    A value that is something else raises a NotWholeError, a column of another type a TypeError.
    """
    if column.type.id == DICTIONARY:
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_floating(kind):
        # NaN is a missing value in pandas. Arrow before 21 does not look for it in half floats.
        column = column.cast(pa.float64())
        column = pc.if_else(pc.is_nan(column), None, column)
    elif pa.types.is_decimal(kind):
        # Arrow 26 refuses all numbers of the narrow types.
        column = column.cast(pa.decimal128(kind.precision, kind.scale)) if kind.bit_width < _WIDE else column
    elif is_text(kind):
        try:
            column = pc.utf8_trim_whitespace(column)
        except pa.ArrowInvalid:
            raise TypeError("texts that are not UTF-8") from None
        column = pc.if_else(pc.equal(column, ""), None, column)
    elif kind.id not in WHOLE and not pa.types.is_null(kind):
        raise TypeError(kind)
    with suppress(pa.ArrowInvalid):
        return column.cast(pa.int64())
    if is_text(kind):  # as pandas writes whole numbers of a column with gaps to CSV
        column = pc.replace_substring_regex(column, r"^(-?[0-9]+)\.0$", r"\1")
        with suppress(pa.ArrowInvalid):
            return column.cast(pa.int64())
    at = _first_unfit(column)
    raise NotWholeError(at, column[at].as_py())


def _first_unfit(column: Any) -> int:
    """Return the place of the first value of a column that is not a whole number; there is one."""
    start, end = 0, len(column)
    while end - start > 1:
        middle = (start + end) // 2
        try:
            column.slice(start, middle - start).cast(pa.int64())
        except pa.ArrowInvalid:
            end = middle
        else:
            start = middle
    return start


def member_codes(batch: Any, first: int) -> Any:
    """Return the member codes of a batch, which begins at row `first`; each can be sent."""
    column = settled_column(batch.column(MEMBER_CODE))
    if column.type.id == DICTIONARY:
        column = column.dictionary_decode()
    if not is_text(column.type):
        raise InvalidRequestError(f"column {MEMBER_CODE!r} of the panel must hold texts, not {column.type}")
    column = column.cast(pa.string())
    if column.null_count:
        row = first + int(np.flatnonzero(booleans(column.is_null()))[0])
        raise InvalidRequestError(f"row {row} of the panel has no {MEMBER_CODE}")
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        raise InvalidRequestError(f"column {MEMBER_CODE!r} of the panel has texts that are not UTF-8") from None
    # Few: what is empty or dots is short, and control characters are not printable.
    doubtful = (integers(pc.binary_length(column))[0] < _SHORT) | ~booleans(pc.utf8_is_printable(column))
    for at in np.flatnonzero(doubtful).tolist():
        try:
            member_code_of(column[at].as_py())
        except InvalidRequestError as exc:
            raise InvalidRequestError(f"row {first + at} of the panel: {exc}") from None
    return column
