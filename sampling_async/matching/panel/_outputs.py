"""What is wanted of a panel: counts of quotas, the best quotas of members, or some members of each quota."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np
from attrs import field, frozen

from sampling_async._errors import InvalidRequestError
from sampling_async.matching.panel._arrow import arrow, pa
from sampling_async.matching.panel._columns import MEMBER_CODE, member_codes
from sampling_async.matching.panel._kernel import members_in, packed

if TYPE_CHECKING:
    from attrs import Attribute
    from numpy.typing import NDArray

    from sampling_async.matching.panel._kernel import Kernel
    from sampling_async.matching.panel._plan import Block, Source

_WORD: Final = 64
_LAST: Final = np.iinfo(np.uint64).max
_MARGIN: Final = 2
_LONGEST_SEED: Final = 64
_MIDDLE: Final = np.uint64(1 << 63)
"""What makes numbers from 0 on the ones below and above 0, in the same order: Spark knows no others."""


def _positive(_: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequestError(f"{attribute.name} is a number from 1 on, not {value!r}")


def _seed(_: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, int) or value.bit_length() > _LONGEST_SEED:
        raise InvalidRequestError(f"{attribute.name} is a whole number of 64 bits at most, not {value!r:.40}")


class Collector(Protocol):
    """Takes the rows of one chunk of members after the other."""

    def begin(self, batch: Any, first: int) -> Any:
        """Take the next batch, whose first member has this place, and return it as it is to be looked at."""

    def add(self, kernel: Kernel, members: slice) -> Any | None:
        """Take the rows of some members of the batch; return what is ready to be handed out."""

    def end(self) -> Any | None:
        """Return what is left to be handed out, as a record batch."""


@frozen
class Counts:
    """How many members match each quota: whether it can be filled.

    One row a quota, the best rank first: `quota_id`, `survey_id`, `needed` (completes still wanted), `certain`
    and `possible` (members), and `shortfall` (completes that are wanted beyond one of each certain member).
    """

    needs_codes: Final = False

    @property
    def schema(self) -> Any:
        """The columns that come out."""
        return pa.schema([(name, pa.int64()) for name in _COUNTS])

    def collector(self, source: Source) -> Collector:
        """Return what makes it of rows."""
        return _Counting(source)

    def merged(self, table: Any, source: Source) -> Any:
        """Return the sum of several."""
        certain, possible = np.zeros((2, len(source.quota_ids)), dtype=np.int64)
        at = _places(table, source)
        np.add.at(certain, at, table.column("certain").to_numpy())
        np.add.at(possible, at, table.column("possible").to_numpy())
        return _counts(source, certain, possible)


_COUNTS: Final = ("quota_id", "survey_id", "needed", "certain", "possible", "shortfall")


def _counts(source: Source, certain: NDArray[np.int64], possible: NDArray[np.int64]) -> Any:
    shortfall = np.maximum(source.needed - certain, 0)
    columns = (source.quota_ids, source.survey_ids, source.needed, certain, possible, shortfall)
    return pa.record_batch([arrow(column) for column in columns], names=_COUNTS)


class _Counting:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._may = np.zeros(len(source.quota_ids), dtype=np.int64)
        self._not_certain = np.zeros(len(source.quota_ids), dtype=np.int64)

    def begin(self, batch: Any, first: int) -> Any:  # noqa: ARG002
        return batch

    def add(self, kernel: Kernel, members: slice) -> None:  # noqa: ARG002
        for block in kernel.plan.blocks:
            possible, certain = kernel.block(block)
            may = _count(possible)
            self._may[block.quotas] += may
            does = _count(certain)
            self._not_certain[block.quotas[block.unsure]] += may[block.unsure] - does

    def end(self) -> Any:
        return _counts(self._source, self._may - self._not_certain, self._not_certain)


@frozen
class TopK:
    """The best quotas of each member: as `MatchResult.select`, for everybody.

    One row a member, in the order they come: `member_code`, `quota_ids` (the certain ones first, then the
    possible ones, the best rank first) and `certain` (how many of these are certain).

    Attributes:
        n: How many at most; a bulk invite takes 100 in one request.
        one_per_survey: Take one quota of a survey, since a member takes a survey once.
    """

    n: int = field(default=20, validator=_positive)
    one_per_survey: bool = True
    needs_codes: Final = True

    @property
    def schema(self) -> Any:
        """The columns that come out."""
        return pa.schema(
            [(MEMBER_CODE, pa.string()), ("quota_ids", pa.list_(pa.int64())), ("certain", pa.int32())]
        )

    def collector(self, source: Source) -> Collector:
        """Return what makes it of rows."""
        return _Choosing(self, source)

    def merged(self, table: Any, source: Source) -> Any:  # noqa: ARG002
        """Return the rows as they are: each is of another member."""
        return table


class _Choosing:
    def __init__(self, output: TopK, source: Source) -> None:
        self._output = output
        self._quota_ids = source.quota_ids
        _, self._survey = np.unique(source.survey_ids, return_inverse=True)
        self._has_several = np.bincount(self._survey, minlength=1) > 1
        self._codes: Any = None

    def begin(self, batch: Any, first: int) -> Any:
        self._codes = member_codes(batch, first)
        return batch

    def add(self, kernel: Kernel, members: slice) -> Any:
        n, count = self._output.n, members.stop - members.start
        has_room = kernel.everybody.copy()
        words = len(has_room)
        self._untaken = np.full((len(self._has_several), words), _LAST, dtype=np.uint64)
        chosen: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
        had = np.zeros(count, dtype=np.int64)
        certain = had
        for are_certain in (True, False):
            for block in kernel.plan.blocks:
                if not has_room.any():
                    break
                quotas, rows = _ranked(kernel, block, are_certain=are_certain)
                rows &= has_room
                some = rows.any(axis=1)
                quotas, rows = quotas[some], rows[some]
                if self._output.one_per_survey:
                    self._leave_out_taken(quotas, rows)
                row, member = _members_in(rows)
                chosen.append((quotas[row], member))
                had = had + np.bincount(member, minlength=count)
                has_room = packed((had < n)[None])[0]
            if are_certain:
                certain = np.minimum(had, n)
        return self._batch(members, chosen, had, certain)

    def _leave_out_taken(self, quotas: NDArray[np.intp], rows: NDArray[np.uint64]) -> None:
        """Leave out who has a quota of the survey already."""
        for at, survey in enumerate(self._survey[quotas].tolist()):
            if self._has_several[survey]:
                rows[at] &= self._untaken[survey]
                self._untaken[survey] ^= rows[at]

    def _batch(
        self,
        members: slice,
        chosen: list[tuple[NDArray[np.intp], NDArray[np.intp]]],
        had: NDArray[np.int64],
        certain: NDArray[np.int64],
    ) -> Any:
        n = self._output.n
        quota = np.concatenate([quota for quota, _ in chosen]) if chosen else np.zeros(0, dtype=np.intp)
        member = np.concatenate([member for _, member in chosen]) if chosen else quota
        quota = quota[np.argsort(member.astype(np.uint32), kind="stable")]  # they came in the order of rank
        starts = np.cumsum(had) - had
        kept = np.arange(len(quota)) - np.repeat(starts, had) < n
        ends = np.concatenate([[0], np.cumsum(np.minimum(had, n))]).astype(np.int32)
        quota_ids = pa.ListArray.from_arrays(arrow(ends), arrow(self._quota_ids[quota[kept]]))
        codes = self._codes.slice(members.start, members.stop - members.start)
        return pa.record_batch([codes, quota_ids, arrow(certain.astype(np.int32))], schema=self._output.schema)

    def end(self) -> None:
        return None


def _ranked(kernel: Kernel, block: Block, *, are_certain: bool) -> tuple[NDArray[np.intp], NDArray[np.uint64]]:
    """Return the quotas of a block in rank order, with the members that match for certain, or may."""
    certain, others = _split(kernel, block)
    order = np.argsort(block.quotas)
    return block.quotas[order], (certain if are_certain else others)[order]


def _split(kernel: Kernel, block: Block) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the members that match the quotas of a block for certain, and the others that may."""
    possible, some_certain = kernel.block(block)
    certain = possible.copy()
    certain[block.unsure] = some_certain
    return certain, possible ^ certain


def _members_in(rows: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the members in rows, row by row: of each which row, and who."""
    word, bit = members_in(rows.reshape(-1))
    row, in_row = np.divmod(word, rows.shape[1])
    return row, in_row * _WORD + bit


Output: TypeAlias = "Counts | TopK | Sample"


@frozen
class Sample:
    """Some members of each quota, drawn at random: certain ones, and where these are too few, possible ones.

    One row a quota and member: `quota_id`, `member_code`, `certain`, and `priority`, by which they were drawn.
    Who is drawn depends on the member code, the quota and the seed only, however the panel is divided.

    Attributes:
        per_quota: How many at most. There is room for as many of each quota from the beginning.
        seed: Another one draws others.
    """

    per_quota: int = field(default=100, validator=_positive)
    seed: int = field(default=0, validator=_seed)
    needs_codes: Final = True

    @property
    def schema(self) -> Any:
        """The columns that come out."""
        return pa.schema(
            [
                ("quota_id", pa.int64()),
                (MEMBER_CODE, pa.string()),
                ("certain", pa.bool_()),
                ("priority", pa.int64()),
            ]
        )

    def collector(self, source: Source) -> Collector:
        """Return what makes it of rows."""
        return _Drawing(self, source)

    def merged(self, table: Any, source: Source) -> Any:
        """Return what would have been drawn of all."""
        quota = _places(table, source)
        certain = table.column("certain").to_numpy()
        order = np.lexsort((table.column("priority").to_numpy(), ~certain, quota))
        ordered = quota[order]
        starts = np.searchsorted(ordered, ordered)
        return table.take(arrow(order[np.arange(len(order)) - starts < self.per_quota]))


def _count(rows: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return how many members are in each row."""
    count: NDArray[np.int64] = np.bitwise_count(rows).sum(axis=1, dtype=np.int64)
    return count


def _within(
    rows: NDArray[np.uint64],
    which: NDArray[np.intp],
    starts: NDArray[np.intp],
    lengths: NDArray[np.intp],
    size: int,
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the members of rows that are among some, from a first one on; after the last comes member 0."""
    ends = starts[which] + lengths[which]
    around = ends > size
    row = np.concatenate([which, which[around]])
    first = np.concatenate([starts[which], np.zeros(around.sum(), dtype=np.intp)])
    end = np.concatenate([np.minimum(ends, size), ends[around] - size])
    words = np.maximum(-(-end // _WORD) - first // _WORD, 0)
    of = np.repeat(np.arange(len(row)), words)
    word = first[of] // _WORD + np.arange(len(of)) - np.repeat(np.cumsum(words) - words, words)
    at, bit = members_in(rows[row[of], word])
    of, member = of[at], word[at] * _WORD + bit
    kept = (member >= first[of]) & (member < end[of])
    return row[of[kept]], member[kept]


def _places(table: Any, source: Source) -> NDArray[np.intp]:
    """Return the quotas of a table's rows, by their places."""
    order = np.argsort(source.quota_ids)
    quota_ids = table.column("quota_id").to_numpy()
    places: NDArray[np.intp] = order[np.searchsorted(source.quota_ids, quota_ids, sorter=order)]
    return places


def _hashed(text: str, key: bytes) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8, key=key).digest(), "little")


class _Drawn:
    """The members of each quota that were drawn so far, of those that match for certain or of the others.

    Attributes:
        priorities: Of each quota, the lowest ones, in order; the last number there is stands for none.
        codes: The members these are of.
    """

    def __init__(self, quotas: int, per_quota: int) -> None:
        self.priorities = np.full((quotas, per_quota), _LAST, dtype=np.uint64)
        self.codes = np.full((quotas, per_quota), "", dtype=object)

    @property
    def limits(self) -> NDArray[np.uint64]:
        """Of each quota, the priority from which on nobody is drawn any more."""
        return self.priorities[:, -1]

    def add(self, quotas: NDArray[np.intp], priorities: NDArray[np.uint64], codes: NDArray[np.object_]) -> None:
        """Draw from more members: of each quota given, one row of some."""
        both = np.concatenate([self.priorities[quotas], priorities], axis=1)
        all_codes = np.concatenate([self.codes[quotas], codes], axis=1)
        order = np.argsort(both, axis=1, kind="stable")[:, : self.priorities.shape[1]]
        self.priorities[quotas] = np.take_along_axis(both, order, axis=1)
        self.codes[quotas] = np.take_along_axis(all_codes, order, axis=1)


class _Drawing:
    """Draws members by a number of theirs, turned by a number of the quota: as on a wheel.

    So members sorted by their number are sorted for each quota too, from some place on and then from the
    beginning; and of a chunk of these, most quotas need nobody once they have drawn from many.
    """

    def __init__(self, output: Sample, source: Source) -> None:
        self._output, self._source = output, source
        self._key = output.seed.to_bytes(16, "little", signed=True)
        turns = [_hashed(str(quota_id), self._key) for quota_id in source.quota_ids.tolist()]
        self._turns = np.array(turns, dtype=np.uint64)
        self._certain = _Drawn(len(turns), output.per_quota)
        self._others = _Drawn(len(turns), output.per_quota)
        self._codes = np.zeros(0, dtype=object)
        self._hashes = np.zeros(0, dtype=np.uint64)

    def begin(self, batch: Any, first: int) -> Any:
        codes = np.array(member_codes(batch, first).to_pylist(), dtype=object)
        hashes = np.array([_hashed(code, self._key) for code in codes], dtype=np.uint64)
        order = np.argsort(hashes, kind="stable")
        self._codes, self._hashes = codes[order], hashes[order]
        return batch.take(arrow(order))

    def add(self, kernel: Kernel, members: slice) -> None:
        hashes, codes = self._hashes[members], self._codes[members]
        for block in kernel.plan.blocks:
            certain, others = _split(kernel, block)
            self._draw(self._certain, block.quotas, certain, hashes, codes)
            short = self._certain.limits[block.quotas] == _LAST
            self._draw(self._others, block.quotas[short], others[short], hashes, codes)

    def _draw(
        self,
        drawn: _Drawn,
        quotas: NDArray[np.intp],
        rows: NDArray[np.uint64],
        hashes: NDArray[np.uint64],
        codes: NDArray[np.object_],
    ) -> None:
        turns, limits, found = self._turns[quotas], drawn.limits[quotas], _count(rows)
        size, n = len(hashes), self._output.per_quota
        # From whom on, and of how many, the priority is below the limit.
        starts, ends = np.searchsorted(hashes, -turns), np.searchsorted(hashes, limits - turns)
        lengths = ends - starts + np.where(limits - turns < -turns, size, 0)  # some reach around
        lengths = np.where(limits == _LAST, size, lengths)
        # Those matching are spread evenly, so that mostly a part of these is enough.
        parts = np.minimum(lengths, _MARGIN * n * size // np.maximum(found, 1) + _WORD)
        left = np.flatnonzero((found > 0) & (lengths > 0))
        for reach in (parts, lengths):
            if not len(left):
                return
            row, member = _within(rows, left, starts, reach, size)
            priorities = hashes[member] + turns[row]
            order = np.lexsort((priorities, row))
            row, member, priorities = row[order], member[order], priorities[order]
            place = np.arange(len(row)) - np.searchsorted(row, row)
            kept = place < n
            row, member, priorities, place = row[kept], member[kept], priorities[kept], place[kept]
            hit = np.bincount(row, minlength=len(quotas))
            is_done = (hit[left] == n) | (reach[left] == lengths[left])
            done = left[is_done & (hit[left] > 0)]
            at = np.full(len(quotas), -1)
            at[done] = np.arange(len(done))
            kept = at[row] >= 0
            of = np.full((len(done), n), "", dtype=object)
            of_priorities = np.full((len(done), n), _LAST, dtype=np.uint64)
            of[at[row[kept]], place[kept]] = codes[member[kept]]
            of_priorities[at[row[kept]], place[kept]] = priorities[kept]
            drawn.add(quotas[done], of_priorities, of)
            left = left[~is_done]

    def end(self) -> Any:
        tables = [
            self._table(drawn, is_certain=is_certain)
            for drawn, is_certain in ((self._certain, True), (self._others, False))
        ]
        (batch,) = self._output.merged(
            pa.concat_tables(tables), self._source
        ).combine_chunks().to_batches() or [pa.record_batch([[], [], [], []], schema=self._output.schema)]
        return batch

    def _table(self, drawn: _Drawn, *, is_certain: bool) -> Any:
        quota, place = np.nonzero(drawn.priorities != _LAST)
        columns = [
            arrow(self._source.quota_ids[quota]),
            pa.array(drawn.codes[quota, place], pa.string()),
            pa.array(np.full(len(quota), is_certain)),
            arrow((drawn.priorities[quota, place] ^ _MIDDLE).view(np.int64)),
        ]
        return pa.table(columns, schema=self._output.schema)
