"""A panel against all quotas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from sampling_async._errors import InvalidRequestError
from sampling_async._protocol import InviteRequest
from sampling_async.matching.panel._arrow import pa
from sampling_async.matching.panel._columns import MEMBER_CODE, OTHERS, columns_of, is_settled, settled
from sampling_async.matching.panel._kernel import CHUNK, Kernel
from sampling_async.matching.panel._outputs import Counts, Output, TopK
from sampling_async.matching.panel._plan import Plan, Source
from sampling_async.matching.panel._workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sampling_async.matching._index import QuotaIndex
    from sampling_async.matching.panel._plan import Columns
    from sampling_async.matching.panel._workers import Piece

T = TypeVar("T")

_MOST_PLANS: Final = 4
_ROWS: Final = 2**15
"""Members that are read at a time: few, so that little is kept; many, since each column takes its time."""


class PanelMatcher:
    """A panel against all quotas of an index, in chunks: whatever the size of the panel, memory stays the same.

    A panel is a stream of Arrow record batches, a member a row. Columns are named after the question IDs, as
    "1001538", and hold what a profile does: an age in years, a postal code as text, an answer ID, or a list of
    these; null is no answer. Further columns, all optional but the first for `TopK` and `Sample`:
    `member_code` (text), `device_type` (number), `exclude_surveys` (list of survey IDs) and `participations`
    (list of {survey_id, wave_id, status_id}). Other columns are passed over, and a question without a column
    was not answered by anybody.

    It is as the index was when it was made, with quotas that were closed left out, and can be pickled.

    Args:
        index: The inventory.
        output: What is wanted: `Counts()`, `TopK(n)` or `Sample(per_quota)`.
    """

    def __init__(self, index: QuotaIndex, output: Output | None = None) -> None:
        self.output = Counts() if output is None else output
        compiled = tuple(index.quota_ids.compiled())
        self._source = Source(compiled, index.kinds, index.policy, index.recontact_lists)
        self._kernels = _Kernels(self._source)
        self._kept: _OfSchema[tuple[list[int], bool]] = _OfSchema()
        self._read: _OfSchema[Columns] = _OfSchema()

    @property
    def questions(self) -> tuple[int, ...]:
        """The questions that are asked: those for which a column makes a difference."""
        return tuple(sorted(self._source.classes))

    @property
    def schema(self) -> Any:
        """The Arrow schema of what comes out."""
        return self.output.schema

    def run(self, stream: Any, *, workers: int | Workers = 1) -> Any:
        """Match a panel; return what is wanted of it as a `pyarrow.RecordBatchReader`.

        Args:
            stream: Anything that speaks the Arrow C stream: a `pyarrow` table or reader, a Polars or pandas
                data frame, a DuckDB relation. Or an iterator of record batches.
            workers: Processes that match, on one machine; this is one of them. Others are started where the
                panel is worth it, so that the main module of a program must do its work under
                `if __name__ == "__main__":`. They end with the run; `Workers` keeps them for the next.

        Raises:
            InvalidRequestError: While the result is read: it is no such stream, or a column holds what it
                should not; the text tells the column and the row.
            ChildProcessError: A process ended while the result was read.
        """
        if not isinstance(workers, Workers):
            workers = Workers(workers)
        return pa.RecordBatchReader.from_batches(self.schema, self._matched_by(workers, _batches(stream)))

    def map_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Match some of a panel, as an engine hands it out; yield record batches of what is wanted of these.

        Counts and samples of parts are put together by `merged`.
        """
        return self._matched(self._pieces(batches))

    def _pieces(self, batches: Iterable[Any]) -> Iterator[Piece]:
        """Yield batches of a good size, each with the place of its first member."""
        first = 0
        for batch in _sized(map(self._fitted, batches)):
            yield first, batch
            first += len(batch)

    def _matched(self, pieces: Iterable[Piece]) -> Iterator[Any]:
        kernel: Kernel | None = None
        collector = self.output.collector(self._source)
        for first, batch in pieces:
            columns = self._read.found(batch.schema, self._columns)
            if kernel is None or kernel.plan.columns != columns:
                kernel = self._kernels.lend(columns)
            ready = collector.begin(batch, first)
            answers = kernel.answers(ready, first)
            for members in _chunks(len(ready)):
                kernel.fill(answers, members)
                made = collector.add(kernel, members)
                if made is not None:
                    yield made
        if kernel is not None:
            self._kernels.take_back(kernel)
        made = collector.end()
        if made is not None:
            yield made

    def _matched_by(self, workers: Workers, batches: Iterable[Any]) -> Iterator[Any]:
        """Match by one process or several, and put together what these say of all."""
        parts: list[Any] = []
        for is_part, made in workers.matched(self._matched, self._pieces(batches), self._plan):
            if is_part:
                parts.append(made)
            else:
                yield made
        if parts:
            yield from self.merged(parts).to_batches()

    def _plan(self, batch: Any) -> None:
        """Plan for a panel, once for all processes."""
        self._kernels.plan(self._read.found(batch.schema, self._columns))

    def merged(self, parts: Any) -> Any:
        """Return what comes of parts of a panel as what would have come of all: a `pyarrow.Table`.

        Args:
            parts: What came of them: an Arrow stream, or record batches.
        """
        if not hasattr(parts, "__arrow_c_stream__"):
            parts = pa.Table.from_batches(parts, schema=self.schema)
        # Engines hand out what they were given in types of their own: long texts, lists of other names.
        table = pa.table(parts).select(self.schema.names).cast(self.schema)
        made = self.output.merged(table, self._source)
        return made if isinstance(made, pa.Table) else pa.Table.from_batches([made])

    def requests(self, stream: Any) -> Iterator[InviteRequest]:
        """Yield what `client.fan_out` takes: each member that matches any quota, with the best ones.

        Raises:
            InvalidRequestError: The output is not `TopK`; and as `run`.
        """
        if not isinstance(self.output, TopK):
            raise InvalidRequestError(f"requests are made of TopK(n), not of {self.output!r}")
        for batch in self.run(stream):
            for code, quota_ids in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                if quota_ids:
                    yield InviteRequest(code, tuple(quota_ids))

    @property
    def _names(self) -> frozenset[str]:
        others = OTHERS if self.output.needs_codes or self._source.lists else OTHERS - {MEMBER_CODE}
        return others.union(map(str, self._source.classes))

    def _fitted(self, batch: Any) -> Any:
        """Return a batch with the columns that matter only, in types that can be taken apart."""
        places, are_settled = self._kept.found(batch.schema, self._matter)
        kept = batch.select(places)
        return kept if are_settled else settled(kept)

    def _matter(self, schema: Any) -> tuple[list[int], bool]:
        """Return the places of columns that matter, and whether all are of types that can be taken apart."""
        names = self._names
        places = [at for at, name in enumerate(schema.names) if name in names]
        return places, all(is_settled(schema.field(at).type) for at in places)

    def _columns(self, schema: Any) -> Columns:
        columns = columns_of(schema, self._source)
        if self.output.needs_codes and not columns.has_codes:
            raise InvalidRequestError(
                f"{type(self.output).__name__} tells members by their codes: the panel has no column"
                f" {MEMBER_CODE!r}; it has {', '.join(map(repr, schema.names[:10]))}"
            )
        return columns


class _OfSchema(Generic[T]):
    """What was found of a schema, kept for the next: mostly it is the same, and to look at it takes long."""

    def __init__(self) -> None:
        self._last: tuple[Any, T] | None = None

    def found(self, schema: Any, look: Callable[[Any], T]) -> T:
        """Return what is found of a schema, for which it is looked at where that is new."""
        last = self._last
        if last is None or not schema.equals(last[0]):
            last = self._last = schema, look(schema)
        return last[1]


class _Kernels:
    """Kernels for panels: planned once for those of the same columns, and lent to one run at a time."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._planned: dict[Columns, Kernel] = {}
        self._idle: list[Kernel] = []

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_idle": []}

    def plan(self, columns: Columns) -> Kernel:
        """Return a kernel to make others of: panels mostly have the same columns as one before."""
        planned = self._planned.get(columns)
        if planned is None:
            planned = Kernel(Plan(self._source, columns))
            if len(self._planned) == _MOST_PLANS:
                self._planned.clear()
            self._planned[columns] = planned
        return planned

    def lend(self, columns: Columns) -> Kernel:
        """Return a kernel that nobody else uses: the rows of a chunk are not for two threads."""
        planned = self.plan(columns)
        with suppress(IndexError):
            idle = self._idle.pop()
            if idle.plan is planned.plan:
                return idle
        return planned.another()

    def take_back(self, kernel: Kernel) -> None:
        """Keep a kernel for the next run: to make room for its rows anew takes as long as to fill it."""
        if not self._idle:
            self._idle.append(kernel)


def _batches(stream: Any) -> Iterator[Any]:
    if hasattr(stream, "__arrow_c_stream__"):
        yield from pa.RecordBatchReader.from_stream(stream)
        return
    for batch in stream if isinstance(stream, Iterator) else (stream,):
        if not isinstance(batch, pa.RecordBatch):
            hint = ": collect() it first" if hasattr(stream, "collect") else ""
            raise InvalidRequestError(
                "a panel is an Arrow stream, such as a table, a reader or a data frame, or an iterator of"
                f" record batches, not {type(batch).__name__}{hint}"
            )
        yield batch


def _sized(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches of a good size."""
    waiting: list[Any] = []
    count = 0
    for batch in batches:
        for start in range(0, len(batch), _ROWS):
            piece = batch.slice(start, _ROWS)
            if waiting and (count + len(piece) > _ROWS or piece.schema != waiting[0].schema):
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


def _chunks(count: int) -> Iterator[slice]:
    """Yield chunks of about the same size."""
    chunks = max(1, round(count / CHUNK))
    size = -(-count // chunks)
    size += -size % 64  # whole words, but for the last one
    for start in range(0, count, size or 1):
        yield slice(start, min(start + size, count))
