"""The outputs `Counts` and `TopK`: how many members match each quota, and the best quotas of each member."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from attrs import field, frozen

from sampling_async._contract.checks import whole_of_31_bits
from sampling_async.matching.panel._arrow import arrow, pa
from sampling_async.matching.panel._collectors import by_member, count_of, known_rows, split
from sampling_async.matching.panel._columns import MEMBER_CODE, member_codes
from sampling_async.matching.panel._kernel import members_in, packed

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from sampling_async.matching.panel._collectors import Collector
    from sampling_async.matching.panel._kernel import Kernel
    from sampling_async.matching.panel._plan import CompactInventory


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


class _Counting:
    def __init__(self, source: CompactInventory) -> None:
        self._source = source
        self._may = np.zeros(len(source.quota_ids), dtype=np.int64)
        self._not_certain = np.zeros(len(source.quota_ids), dtype=np.int64)

    def begin(self, batch: Any, first: int) -> Any:  # noqa: ARG002
        return batch

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


Pairs: TypeAlias = "tuple[NDArray[np.intp], NDArray[np.intp]]"
"""Quotas, and the member of each."""

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


class _Choosing:
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
        # member's quotas: it may exceed `n` within a block, and `_batch` cuts it.
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
        return self._batch(members, chosen, had, certain)

    def _leave_out_taken(self, quotas: NDArray[np.intp], rows: NDArray[np.uint64]) -> None:
        """Remove from each row, in place, the members who have a quota of the same survey already."""
        for at, survey in enumerate(self._survey[quotas].tolist()):
            if self._has_several[survey]:
                rows[at] &= self._untaken[survey]
                # The row is a subset of `_untaken` now, so that "exclusive or" removes its members.
                self._untaken[survey] ^= rows[at]

    def _batch(
        self, members: slice, chosen: list[Pairs], had: NDArray[np.int64], certain: NDArray[np.int64]
    ) -> Any:
        n = self._output.n
        quota = np.concatenate([quota for quota, _ in chosen]) if chosen else np.zeros(0, dtype=np.intp)
        member = np.concatenate([member for _, member in chosen]) if chosen else quota
        # The pairs are in the order of rank; a stable sort by member keeps that order for each member.
        quota = quota[by_member(member)]
        # Keep the first `n` of each member. With `had` = [3, 0, 2] and n = 2: the members begin at 0, 3, 3, the
        # positions in a member are 0 1 2 0 1, of which the third is dropped, and `ends` is [0, 2, 2, 4].
        starts = np.cumsum(had) - had
        kept = np.arange(len(quota)) - np.repeat(starts, had) < n
        ends = np.concatenate([[0], np.cumsum(np.minimum(had, n))]).astype(np.int32)
        quota_ids = pa.ListArray.from_arrays(arrow(ends), arrow(self._quota_ids[quota[kept]]))
        codes = self._codes.slice(members.start, members.stop - members.start)
        return pa.record_batch([codes, quota_ids, arrow(certain.astype(np.int32))], schema=self._output.schema)

    def end(self) -> None:
        return None


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
