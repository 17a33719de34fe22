"""The outputs `Counts` and `TopK`: how many members match each quota, and the best quotas of each member.

And what the outputs have in common.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from attrs import field, frozen

from sampling_async._contract.checks import whole_of_31_bits
from sampling_async.matching.panel._arrow import MEMBER_CODE, arrow, integers, lists_of, member_codes, pa, pc
from sampling_async.matching.panel._kernel import members_in, packed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from sampling_async.matching.panel._kernel import Kernel
    from sampling_async.matching.panel._plan import Block, CompactInventory

_NOTHING: Final = np.zeros(0, dtype=np.intp)


class Collector(ABC):
    """Builds an output from the rows of one chunk of members after the other."""

    def begin(self, batch: Any, first: int) -> Any:  # noqa: ARG002
        """Begin a batch whose first member has this place in the panel; return the batch, perhaps reordered."""
        return batch

    @abstractmethod
    def add(self, kernel: Kernel, members: slice) -> Any | None:
        """Add the rows of some members of the batch; return a record batch if one is ready."""

    def end(self) -> Any | None:
        """Return the rest of the output as a record batch, if there is a rest."""
        return None


def count_of(rows: NDArray[np.uint64]) -> NDArray[np.int64]:
    count: NDArray[np.int64] = np.bitwise_count(rows).sum(axis=1, dtype=np.int64)
    return count


def split(kernel: Kernel, block: Block) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the members who certainly match the quotas of a block, and the others who may match them."""
    # The kernel returns certain rows for the unsure quotas only; for all others, both rows are the same.
    possible, some_certain = kernel.block(block)
    certain = possible.copy()
    certain[block.unsure] = some_certain
    # `certain` is a subset of `possible`, so that "exclusive or" is the difference.
    return certain, possible ^ certain


def pairs_of(
    lists: Any, certain: Any, source: CompactInventory
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]:
    """Return the member, the place of the quota, and whether it is certain, of each pair.

    A list has first the certain quotas; `certain` says how many. Unknown quotas are left out.
    """
    member = np.repeat(np.arange(len(lists)), np.diff(lists.offsets.to_numpy()))
    is_certain = places_within(member) < certain.to_numpy()[member]
    place = _places_of(lists.flatten().to_numpy(), source)
    known = place >= 0
    if known.all():
        return member, place, is_certain
    return member[known], place[known], is_certain[known]


def _places_of(quota_ids: NDArray[np.int64], source: CompactInventory) -> NDArray[np.intp]:
    """Return the places of quotas, -1 for unknown ones."""
    found = pc.index_in(arrow(quota_ids), value_set=arrow(source.quota_ids))
    return integers(found.fill_null(-1))[0].astype(np.intp)


def places_within(groups: NDArray[np.integer]) -> NDArray[np.intp]:
    """Return the place of each item in its group, whose items stand together: [7, 7, 4] gives [0, 1, 0]."""
    if not len(groups):
        return np.zeros(0, dtype=np.intp)
    starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
    return np.arange(len(groups)) - np.repeat(starts, np.diff(starts, append=len(groups)))


def by_member(member: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the order of pairs by their members: fewer than 65,536, in a chunk, a group and a sample."""
    # numpy sorts numbers of 16 bits by radix, seven times as fast as longer ones.
    return np.argsort(member.astype(np.uint16), kind="stable")


Pairs: TypeAlias = "tuple[NDArray[np.intp], NDArray[np.intp]]"
"""Quotas, and the member of each."""


def best_of(
    found: Sequence[Pairs], had: NDArray[np.int64], most: int
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Return the first quotas of each member, member by member, and how many of them each has.

    `had` says how many pairs each member has in `found`.
    """
    quota = np.concatenate([_NOTHING, *(quota for quota, _ in found)])
    member = np.concatenate([_NOTHING, *(member for _, member in found)])
    # A stable sort by member keeps the order of each member's pairs.
    quota = quota[by_member(member)]
    # With `had` = [3, 0, 2] and two at most: the members begin at 0, 3, 3, and the positions in a member are
    # 0 1 2 0 1, of which the third is dropped.
    kept = np.arange(len(quota)) - np.repeat(np.cumsum(had) - had, had) < most
    return quota[kept], np.minimum(had, most)


def known_rows(table: Any, source: CompactInventory) -> tuple[Any, NDArray[np.intp]]:
    """Return the rows of a table about quotas of a source, and the places of these quotas.

    Parts may know others: of a matcher from before a quota closed, for example.
    """
    places = _places_of(table.column("quota_id").to_numpy(), source)
    known = np.flatnonzero(places >= 0)
    return (table, places) if len(known) == len(places) else (table.take(arrow(known)), places[known])


@frozen
class Counts:
    """The number of members who match each quota, which shows whether it can be filled.

    There is one row for each quota, best rank first: `quota_id`, `survey_id`, `needed` (completes still
    wanted), `certain` (members who certainly match), `possible` (further members who may match), and
    `shortfall` (completes that are still wanted if each certain member gives one).
    """

    @property
    def schema(self) -> Any:
        """The Arrow schema of the output."""
        return pa.schema([(name, pa.int64()) for name in _COUNTS])

    def collector(self, source: CompactInventory) -> Collector:
        """Return a collector that counts members."""
        return _Counting(source)

    def merged(self, table: Any, source: CompactInventory) -> Any:
        """Return the counts of a whole panel: the sums of the counts of its parts."""
        certain, possible = np.zeros((2, len(source.quota_ids)), dtype=np.int64)
        table, at = known_rows(table, source)
        # `add.at`, because a quota occurs once in each part: `certain[at] += ...` would add only one of them.
        np.add.at(certain, at, table.column("certain").to_numpy())
        np.add.at(possible, at, table.column("possible").to_numpy())
        return _counts(source, certain, possible)


_COUNTS: Final = ("quota_id", "survey_id", "needed", "certain", "possible", "shortfall")


def _counts(source: CompactInventory, certain: NDArray[np.int64], possible: NDArray[np.int64]) -> Any:
    shortfall = np.maximum(source.needed - certain, 0)
    columns = (source.quota_ids, source.survey_ids, source.needed, certain, possible, shortfall)
    return pa.record_batch([arrow(column) for column in columns], names=_COUNTS)


class _Counting(Collector):
    def __init__(self, source: CompactInventory) -> None:
        self._source = source
        self._may = np.zeros(len(source.quota_ids), dtype=np.int64)
        self._not_certain = np.zeros(len(source.quota_ids), dtype=np.int64)

    def add(self, kernel: Kernel, members: slice) -> None:  # noqa: ARG002
        for block in kernel.plan.blocks:
            # `certain` has rows of the unsure quotas only: in all others, each member who may match does. So
            # count those that are not certain, and subtract at the end.
            possible, certain = kernel.block(block)
            may = count_of(possible)
            self._may[block.quotas] += may
            does = count_of(certain)
            self._not_certain[block.quotas[block.unsure]] += may[block.unsure] - does

    def end(self) -> Any:
        return _counts(self._source, self._may - self._not_certain, self._not_certain)


_WORD: Final = 64
_LAST: Final = np.iinfo(np.uint64).max


@frozen
class TopK:
    """The best quotas of each member, as `MatchResult.select` returns them for one member.

    There is one row for each member, in the order of the panel: `member_code`, `quota_ids` (first the certain,
    then the possible ones, both best rank first) and `certain` (how many of these are certain).

    Attributes:
        n: How many quotas of a member at most; a bulk invite takes 100 in one request.
        one_per_survey: Select only one quota of each survey, because a member can take a survey only once.
    """

    n: int = field(default=20, validator=whole_of_31_bits)
    one_per_survey: bool = True

    @property
    def schema(self) -> Any:
        """The Arrow schema of the output."""
        return pa.schema(
            [(MEMBER_CODE, pa.string()), ("quota_ids", pa.list_(pa.int64())), ("certain", pa.int32())]
        )

    def collector(self, source: CompactInventory) -> Collector:
        """Return a collector that chooses quotas."""
        return _Choosing(self, source)

    def merged(self, table: Any, source: CompactInventory) -> Any:  # noqa: ARG002
        """Return the rows unchanged: each row is of another member, so there is nothing to combine."""
        return table


class _Choosing(Collector):
    def __init__(self, output: TopK, source: CompactInventory) -> None:
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
        # The members with fewer than `n` quotas so far.
        has_room = kernel.everybody.copy()
        words = len(has_room)
        # For each survey, the members who have none of its quotas yet.
        self._untaken = np.full((len(self._has_several), words), _LAST, dtype=np.uint64)
        chosen: list[Pairs] = []
        had = np.zeros(count, dtype=np.int64)
        certain = had
        # The certain quotas of all blocks first, best rank first, then the possible ones. `had` counts each
        # member's quotas: it may exceed `n` within a block, and `best_of` cuts it.
        for are_certain in (True, False):
            for block in kernel.plan.blocks:
                if not has_room.any():
                    break
                certain_rows, others = split(kernel, block)
                rows = certain_rows if are_certain else others
                leave_out = self._leave_out_taken if self._output.one_per_survey else None
                pairs = ranked_pairs(block.quotas, rows, has_room, leave_out)
                chosen.append(pairs)
                had = had + np.bincount(pairs[1], minlength=count)
                has_room = packed((had < n)[None])[0]
            if are_certain:
                certain = np.minimum(had, n)
        quota, counts = best_of(chosen, had, n)
        lists = lists_of(arrow(self._quota_ids[quota]), counts)
        codes = self._codes.slice(members.start, count)
        return pa.record_batch([codes, lists, arrow(certain.astype(np.int32))], schema=self._output.schema)

    def _leave_out_taken(self, quotas: NDArray[np.intp], rows: NDArray[np.uint64]) -> None:
        """Remove from each row, in place, the members who have a quota of the same survey already."""
        for at, survey in enumerate(self._survey[quotas].tolist()):
            if self._has_several[survey]:
                rows[at] &= self._untaken[survey]
                # The row is a subset of `_untaken` now, so that "exclusive or" removes its members.
                self._untaken[survey] ^= rows[at]


def ranked_pairs(
    quotas: NDArray[np.intp],
    rows: NDArray[np.uint64],
    has_room: NDArray[np.uint64],
    leave_out: Callable[[NDArray[np.intp], NDArray[np.uint64]], None] | None = None,
) -> Pairs:
    """Return the pairs of some quotas and their members in the order of rank.

    Members without `has_room` need no more quotas. `leave_out` removes members from rows, given their quotas.
    """
    order = np.argsort(quotas)
    # Drop the members with enough quotas, and then the quotas without members.
    rows = rows[order] & has_room
    some = rows.any(axis=1)
    quotas, rows = quotas[order][some], rows[some]
    if leave_out is not None:
        leave_out(quotas, rows)
    row, member = _members_in(rows)
    return quotas[row], member


def _members_in(rows: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the members in rows, row by row: for each bit set, its row and its member."""
    word, bit = members_in(rows.reshape(-1))
    row, in_row = np.divmod(word, rows.shape[1])
    return row, in_row * _WORD + bit


class FlatPairs(NamedTuple):
    """The pairs of an output with the columns of `TopK`, member by member."""

    members: NDArray[np.intp]  # the rows of the members that have any
    counts: NDArray[np.intp]  # how many each of these has
    quota_ids: NDArray[np.int64]
    ranks: NDArray[np.intp]  # the place of each pair in its list
    is_certain: NDArray[np.bool_]

    @classmethod
    def of(cls, batch: Any) -> FlatPairs:
        lists, certain = batch.column(1), batch.column(2).to_numpy()
        counts = np.diff(lists.offsets.to_numpy())
        some = np.flatnonzero(counts)
        member = np.repeat(some, counts[some])
        ranks = places_within(member)
        return cls(some, counts[some], lists.flatten().to_numpy(), ranks, ranks < certain[member])

    def repeated(self, of_members: Sequence[int]) -> list[int]:
        """Return for each pair what its member has."""
        repeated: list[int] = np.repeat(of_members, self.counts).tolist()
        return repeated
