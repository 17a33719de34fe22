"""How a panel becomes pieces: from whatever has its members, to record batches of a good size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from sampling_async._contract.errors import InvalidRequestError
from sampling_async.matching.panel._arrow import pa

if TYPE_CHECKING:
    from collections.abc import Iterable

ROWS: Final = 2**15
"""Members read at a time: few, to need little memory; many, because each column of a batch has a fixed cost."""


def batches_of(stream: Any) -> Iterator[Any]:
    """Yield the record batches of a panel.

    Raises:
        InvalidRequestError: It is neither an Arrow stream nor an iterator of record batches.
    """
    if hasattr(stream, "__arrow_c_stream__"):
        yield from _reader_of(stream)
        return
    for batch in stream if isinstance(stream, Iterator) else (stream,):
        if not isinstance(batch, pa.RecordBatch):
            hint = ": collect() it first" if hasattr(stream, "collect") else ""
            raise InvalidRequestError(
                "a panel must be an Arrow stream (a table, a reader, a data frame) or an iterator of record "
                f"batches, not {type(batch).__name__}{hint}"
            )
        yield batch


def _reader_of(stream: Any) -> Any:
    try:
        return pa.RecordBatchReader.from_stream(stream)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as exc:
        # Their text quotes a value, which may be a member code.
        column = re.search(r"failed for column (.+) with type", str(exc))
        of = "" if column is None else f" of its column {column[1]!r}"
    raise InvalidRequestError(
        f"the panel cannot be converted to Arrow: values{of} have several types. Convert them, or leave out "
        "columns that matching does not need"
    )


def must_be_readable_twice(stream: Any) -> None:
    """Refuse a panel that is gone once it has been read.

    Raises:
        InvalidRequestError: It is one.
    """
    if not hasattr(stream, "__arrow_c_stream__") or isinstance(stream, pa.RecordBatchReader):
        raise InvalidRequestError(
            "Allocate reads the panel twice, and this one can be read only once: give a table, data "
            "frame or relation; or learn first: matcher.learn(panel).run(the same, opened again)"
        )


def sized(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches of at most `ROWS` members: large batches are cut, small ones are joined."""
    waiting: list[Any] = []
    count = 0
    for batch in batches:
        for start in range(0, len(batch), ROWS):
            piece = batch.slice(start, ROWS)
            if waiting and (count + len(piece) > ROWS or piece.schema != waiting[0].schema):
                yield _joined(waiting)
                waiting, count = [], 0
            waiting.append(piece)
            count += len(piece)
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[Any]) -> Any:
    if len(batches) == 1:
        return batches[0]
    (joined,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined
