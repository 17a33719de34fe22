"""`PanelMatcher`: a whole panel with all quotas of an index."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeAlias, TypeVar, cast

from sampling_async import InvalidRequestError, InviteRequest
from sampling_async._contract.checks import require_instance
from sampling_async.matching._index import QuotaIndex
from sampling_async.matching.panel._allocate import Allocate, Candidates
from sampling_async.matching.panel._arrow import MEMBER_CODE, is_settled, pa, settled
from sampling_async.matching.panel._columns import OTHERS, columns_of
from sampling_async.matching.panel._files import batches_of, must_be_readable_twice, sized
from sampling_async.matching.panel._kernel import CHUNK, Kernel
from sampling_async.matching.panel._plan import CompactInventory, PanelPlan
from sampling_async.matching.panel._postal import OddCodes
from sampling_async.matching.panel._prices import Terms, terms_of
from sampling_async.matching.panel._sample import PriceSample, Sample
from sampling_async.matching.panel._top_k import Counts, TopK
from sampling_async.matching.panel._workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sampling_async.matching.panel._arrow import BatchReader
    from sampling_async.matching.panel._plan import PanelColumns
    from sampling_async.matching.panel._worker import Piece

Output: TypeAlias = Counts | TopK | Sample | Allocate
"""Counts of members for each quota, the best quotas of each member, some members of each quota, or quotas for
each member that do not get more members than they can use."""


def name_of(output: object) -> str:
    return Allocate.__name__ if isinstance(output, Candidates | PriceSample) else type(output).__name__


def needs_codes(output: object) -> bool:
    return not isinstance(output, Counts)


T = TypeVar("T")

_MOST_PLANS: Final = 4


class IndexSource(Protocol):
    """What an inventory is taken from: a `QuotaIndex`, or a `LiveIndex`."""

    def snapshot(self) -> QuotaIndex:
        """Return the inventory as it is now."""
        ...


class PanelMatcher:
    """A matcher of a whole panel with all quotas of an index.

    It works in chunks, so that memory does not grow with the size of the panel.

    A panel is a stream of Arrow record batches with one row for each member. A column of answers is named after
    its question ID, such as "1001538", and has the same values as a profile: an age in years, a postal code as
    text, an answer ID, or a list of these. Null means no answer. Further columns are `member_code` (text),
    `device_type` (number), `exclude_surveys` (list of survey IDs) and `participations` (list of
    {survey_id, wave_id, status_id}). They are optional, except that `TopK` and `Sample` need `member_code`.
    Other columns are ignored. If a question has no column, no member has answered it.

    The matcher is a copy of the index at the time of its creation, without the quotas that were closed by then:
    later changes of the index have no effect on it. It can be pickled.

    Args:
        index: The inventory. A `LiveIndex` must be ready.
        output: The result wanted: `Counts()`, `TopK(n)`, `Sample(per_quota)` or `Allocate(per_member)`.
            Default: `Counts()`.

    Raises:
        InvalidRequestError: A value, room or rate of `Allocate` is out of range or not a finite number, or its
            `currency_rates` lack a currency of the inventory.
    """

    def __init__(self, index: IndexSource, output: Output | None = None) -> None:
        # Quotas of a live index close at any moment, in any thread.
        taken: object = index.snapshot() if hasattr(index, "snapshot") else index
        require_instance(taken, QuotaIndex, "index", "a QuotaIndex or a LiveIndex")
        index = cast("QuotaIndex", taken)
        output = Counts() if output is None else output
        require_instance(output, Output, "output", "one of Counts(), TopK(n), Sample(n) and Allocate(n)")
        compiled = tuple(index.quota_ids.compiled())
        market = None
        if isinstance(output, Allocate):
            market = output.market([target for _, target in compiled])
        source = CompactInventory(compiled, index.kinds, index.policy, index.recontact_lists, market)
        if isinstance(output, Allocate):
            source = source.ranked_by(output.priced(source))
        self._set_up(output, source)

    def _set_up(self, output: Output | Candidates | PriceSample, source: CompactInventory) -> None:
        self.output: Any = output
        self._source = source
        self._kernels = _Kernels(source)
        self._kept: _OfSchema[tuple[list[int], bool]] = _OfSchema()
        self._read: _OfSchema[PanelColumns] = _OfSchema()

    def terms(self) -> Terms:
        """Return the rooms and values of an `Allocate`.

        Raises:
            InvalidRequestError: The output is not `Allocate`.
        """
        self._allocation()
        source = self._source
        assert source.market is not None
        return terms_of(source.market, source.quota_ids.tolist(), source.survey_ids.tolist())

    @property
    def questions(self) -> tuple[int, ...]:
        """The IDs of the questions that the inventory asks; only columns of these matter."""
        return tuple(sorted(self._source.classes))

    @property
    def text_columns(self) -> frozenset[str]:
        """The columns that hold texts only, because a code may begin with a zero: member and postal codes."""
        return frozenset({MEMBER_CODE, *map(str, self._postal_questions)})

    @property
    def _postal_questions(self) -> tuple[int, ...]:
        return tuple(id_ for id_ in self.questions if self._source.kinds.kind_of(id_) == "postal")

    def _for(self, output: Allocate | Candidates | PriceSample, source: CompactInventory) -> PanelMatcher:
        matcher = PanelMatcher.__new__(PanelMatcher)
        matcher._set_up(output, source)  # noqa: SLF001  the same class
        return matcher

    @property
    def schema(self) -> Any:
        """The Arrow schema of the output."""
        return self.output.schema

    @property
    def part_schema(self) -> Any:
        """The Arrow schema of what `map_batches` yields: that of the output, except for `Allocate`."""
        return self._of_parts.schema

    @property
    def _of_parts(self) -> Any:
        return self.output.candidates if isinstance(self.output, Allocate) else self.output

    def run(self, stream: Any, *, workers: int | Workers = 1) -> BatchReader:
        """Match a panel; return the output as a `pyarrow.RecordBatchReader`.

        The panel is matched while the result is read, and errors in the panel are raised then.

        Args:
            stream: Any object with the Arrow C stream interface: a `pyarrow` table or reader, a Polars or
                pandas data frame, a DuckDB relation. Or an iterator of record batches.
            workers: How many processes match the panel, including this one; see `Workers`. The main module of
                the program must then do its work under `if __name__ == "__main__":`.

        Raises:
            InvalidRequestError: While the result is read: `stream` is not such a stream, or a value is not
                valid for its column; the text names the column and the row.
            ChildProcessError: While the result is read: a process ended unexpectedly.
        """
        if not isinstance(workers, Workers):
            workers = Workers(workers)
        if isinstance(self.output, Allocate):
            batches = self._allocated_by(workers, stream)
        else:
            batches = self._matched_by(workers, batches_of(stream))
        reader: BatchReader = pa.RecordBatchReader.from_batches(self.schema, batches)
        return reader

    def derive_prices(self, stream: Any, *, workers: int | Workers = 1) -> PanelMatcher:
        """Return a matcher that allocates with prices derived from a panel, read to its end; see `Allocate`.

        `run` does this by itself. Call it to use the same prices for several runs. Or call it if your panel can
        be read only once: then give it other members that are like the panel. The arguments are those of `run`.

        Raises:
            InvalidRequestError: The output is not `Allocate`; or as `run`.
        """
        return self.with_prices(self.price_sampler().run(stream, workers=workers).read_all())

    def allocate(self, candidates: Any) -> BatchReader:
        """Allocate among given candidates: found by your rules or model, or by `TopK`.

        They are an Arrow stream with the columns of `TopK` and, optionally, `invites_left` and the weights. It
        is read twice, unless the output has prices. The panel is not matched. So the lists should be long,
        about eight candidates for each quota that a member gets, and not the same for all members. Quotas that
        the index does not have are passed over.

        Raises:
            InvalidRequestError: The output is not `Allocate`; or, while the result is read, the candidates can
                be read only once, or a column is missing or wrong.
        """
        reader: BatchReader = pa.RecordBatchReader.from_batches(self.schema, self._allocated_of(candidates))
        return reader

    def _allocated_of(self, candidates: Any) -> Iterator[Any]:
        output, matcher = self._allocation(), self
        form = output.candidates
        if output.prices is None:
            must_be_readable_twice(candidates)
            batches = form.of_others(batches_of(candidates))
            matcher = self.with_prices(output.price_sample.of_candidates(batches, self._source))
        batches = form.of_others(batches_of(candidates))
        yield from matcher.output.allocated(batches, matcher._source)  # noqa: SLF001  the same class

    def price_sampler(self) -> PanelMatcher:
        """Return a matcher whose output is what `with_prices` needs, for engines that divide the panel.

        Raises:
            InvalidRequestError: The output is not `Allocate`.
        """
        return self._for(self._allocation().price_sample, self._source)

    def with_prices(self, parts: Any) -> PanelMatcher:
        """Return a matcher with prices derived from a panel, given the outputs of `price_sampler` of all parts.

        Raises:
            InvalidRequestError: The output is not `Allocate`; or as `merged`.
        """
        output = self._allocation().with_prices_of(self.price_sampler().merged(parts), self._source)
        return self._for(output, self._source.ranked_by(output.priced(self._source)))

    def _allocation(self) -> Allocate:
        if not isinstance(self.output, Allocate):
            raise InvalidRequestError(f"only Allocate(n) has prices, not {self.output!r}")
        return self.output

    def _allocated_by(self, workers: Workers, stream: Any) -> Iterator[Any]:
        if self._allocation().prices is None:
            must_be_readable_twice(stream)
            self = self.derive_prices(stream, workers=workers)  # noqa: PLW0642  the same, with prices
        candidates = self._for(self._of_parts, self._source).run(stream, workers=workers)
        yield from self.output.allocated(candidates, self._source)

    def map_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Match a part of a panel that an engine divides; yield the output of this part as record batches.

        Give the part as record batches or as an Arrow stream. For the counts, the samples or the allocation of
        the whole panel, combine the outputs of its parts with `merged`. For an allocation, derive the prices
        first: combine the outputs of `price_sampler().map_batches` with `with_prices`, which returns the
        matcher for the second step.

        Raises:
            InvalidRequestError: An allocation has no prices yet; or, while the output is read, as `run`.
        """
        if isinstance(self.output, Allocate):
            if self.output.prices is None:
                raise InvalidRequestError("this allocation has no prices yet, see PanelMatcher.with_prices")
            return self._for(self._of_parts, self._source).map_batches(batches)
        # A table can be iterated too, but by its columns.
        stream = batches if hasattr(batches, "__arrow_c_stream__") else iter(batches)
        return self._matched(self._pieces(batches_of(stream)))

    def _pieces(self, batches: Iterable[Any]) -> Iterator[Piece]:
        """Yield batches of a good size, each with the place of its first member."""
        first, odd = 0, OddCodes(self._postal_questions)
        for batch in sized(map(self._fitted, batches)):
            odd.look(batch, first)
            yield first, batch
            first += len(batch)
        if not isinstance(self.output, PriceSample):  # then the panel is read once more
            odd.log()

    def _matched(self, pieces: Iterable[Piece]) -> Iterator[Any]:
        kernel: Kernel | None = None
        collector = self.output.collector(self._source)
        for first, batch in pieces:
            columns = self._read.found(batch.schema, self._columns)
            # Another kernel only if the columns change within the panel.
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
        """Match with one process or several, and merge the outputs that are not final."""
        parts: list[Any] = []
        matched = workers._matched  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        for is_part, made in matched(self._matched, self._pieces(batches), self._planned):
            if is_part:
                parts.append(made)
            else:
                yield made
        if parts:
            yield from self.merged(parts).to_batches()

    def _planned(self, batch: Any) -> Kernel:
        """Make the plan for a panel in this process, so that the others need not make it again."""
        return self._kernels.plan(self._read.found(batch.schema, self._columns))

    def merged(self, parts: Any) -> Any:
        """Return the output of a whole panel as a `pyarrow.Table`, given the outputs of all its parts.

        Give the parts as an Arrow stream or as record batches. Quotas that this matcher does not have, because
        they have closed since, are skipped.

        Raises:
            InvalidRequestError: These are parts of another output.
        """
        schema = self.part_schema
        if not hasattr(parts, "__arrow_c_stream__"):
            parts = pa.Table.from_batches(parts, schema=schema)
        table = pa.table(parts)
        missing = [name for name in schema.names if name not in table.column_names]
        if missing and len(table):
            raise InvalidRequestError(
                f"these are no parts of {name_of(self.output)}: they have no column {', '.join(missing)}"
            )
        # Engines change types: texts become large texts, and the items of lists get other names. Of
        # a part without members, some lose the columns.
        table = schema.empty_table() if missing else table.select(schema.names).cast(schema)
        made = self.output.merged(table, self._source)
        return made if isinstance(made, pa.Table) else pa.Table.from_batches([made])

    def requests(self, stream: Any) -> Iterator[InviteRequest]:
        """Yield requests for `client.fan_out`: the best quotas of each member of a panel that matches any.

        Raises:
            InvalidRequestError: The output is neither `TopK` nor `Allocate`; or as `run`.
        """
        if not isinstance(self.output, TopK | Allocate):
            raise InvalidRequestError(
                f"requests are made from TopK(n) or Allocate(n), not from {self.output!r}"
            )
        for batch in self.run(stream):
            for code, quota_ids in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                if quota_ids:
                    yield InviteRequest(code, tuple(quota_ids))

    def _fitted(self, batch: Any) -> Any:
        """Return a batch with only the columns that matter, without string views."""
        places, are_settled = self._kept.found(batch.schema, self._used_columns)
        kept = batch.select(places)
        return kept if are_settled else settled(kept)

    def _used_columns(self, schema: Any) -> tuple[list[int], bool]:
        """Return the places of the columns that matter, and whether none of them needs `settled`."""
        if needs_codes(self.output) and MEMBER_CODE not in schema.names:
            raise InvalidRequestError(
                f"{name_of(self.output)} names members by their codes, but the panel has no column "
                f"{MEMBER_CODE!r}; it has the columns {', '.join(map(repr, schema.names[:10]))}"
            )
        others = OTHERS if needs_codes(self.output) or self._source.lists else OTHERS - {MEMBER_CODE}
        names = others.union(map(str, self._source.classes), getattr(self.output, "columns", ()))
        places = [at for at, name in enumerate(schema.names) if name in names]
        used = [schema.names[at] for at in places]
        twice = sorted(name for name in set(used) if used.count(name) > 1) if len(set(used)) < len(used) else []
        if twice:
            raise InvalidRequestError(f"the panel has several columns {twice[0]!r}: rename or drop all but one")
        return places, all(is_settled(schema.field(at).type) for at in places)

    def _columns(self, schema: Any) -> PanelColumns:
        return columns_of(schema, self._source)


class _OfSchema(Generic[T]):
    """A cache for the last schema: most batches have the same schema, and to look at one is slow."""

    def __init__(self) -> None:
        self._last: tuple[Any, T] | None = None

    def found(self, schema: Any, look: Callable[[Any], T]) -> T:
        """Return the result of `look` for a schema, from the cache if it is the last schema again."""
        # One tuple, read once: another thread may replace it, but never separate the schema from its result.
        last = self._last
        if last is None or not schema.equals(last[0]):
            last = self._last = schema, look(schema)
        return last[1]


class _Kernels:
    """A pool of kernels: planned once for panels with the same columns; each is used by one run at a time."""

    def __init__(self, source: CompactInventory) -> None:
        self._source = source
        self._planned: dict[PanelColumns, Kernel] = {}
        self._idle: list[Kernel] = []

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_idle": []}

    def plan(self, columns: PanelColumns) -> Kernel:
        """Return the kernel for some columns, copied for each run; most panels have the same columns."""
        planned = self._planned.get(columns)
        if planned is None:
            planned = Kernel(PanelPlan(self._source, columns))
            if len(self._planned) == _MOST_PLANS:
                self._planned.clear()
            self._planned[columns] = planned
        return planned

    def lend(self, columns: PanelColumns) -> Kernel:
        """Return a kernel that nobody else uses: two threads cannot share the rows of a chunk."""
        planned = self.plan(columns)
        # Pop first, then look: another thread may take the kernel between a test and a pop.
        with suppress(IndexError):
            idle = self._idle.pop()
            if idle.plan is planned.plan:
                return idle
        return planned.another()

    def take_back(self, kernel: Kernel) -> None:
        """Keep a kernel for the next run: to allocate its rows anew takes as long as to fill them."""
        if not self._idle:
            self._idle.append(kernel)


def _chunks(count: int) -> Iterator[slice]:
    # 30,000 members: round(2.93) = 3 chunks of 10,000, rounded up to whole words: 10,048, 10,048 and 9,904.
    chunks = max(1, round(count / CHUNK))
    size = -(-count // chunks)
    size += -size % 64
    for start in range(0, count, size or 1):
        yield slice(start, min(start + size, count))
