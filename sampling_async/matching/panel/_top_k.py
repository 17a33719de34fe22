"""The output `TopK`: the best quotas of each member."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import field, frozen

from sampling_async._contract.checks import whole_from_1
from sampling_async.matching.panel._arrow import arrow, pa
from sampling_async.matching.panel._collectors import split
from sampling_async.matching.panel._columns import MEMBER_CODE, member_codes
from sampling_async.matching.panel._kernel import members_in, packed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sampling_async.matching.panel._collectors import Collector
    from sampling_async.matching.panel._kernel import Kernel
    from sampling_async.matching.panel._plan import Block, Source

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

    n: int = field(default=20, validator=whole_from_1)
    one_per_survey: bool = True

    @property
    def schema(self) -> Any:
        """The Arrow schema of the output."""
        return pa.schema(
            [(MEMBER_CODE, pa.string()), ("quota_ids", pa.list_(pa.int64())), ("certain", pa.int32())]
        )

    def collector(self, source: Source) -> Collector:
        """Return a collector that chooses quotas."""
        return _Choosing(self, source)

    def merged(self, table: Any, source: Source) -> Any:  # noqa: ARG002
        """Return the rows unchanged: each row is of another member, so there is nothing to combine."""
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
        # The members with fewer than `n` quotas so far.
        has_room = kernel.everybody.copy()
        words = len(has_room)
        # For each survey, the members who have none of its quotas yet.
        self._untaken = np.full((len(self._has_several), words), _LAST, dtype=np.uint64)
        chosen: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
        had = np.zeros(count, dtype=np.int64)
        certain = had
        # The certain quotas of all blocks first, best rank first, then the possible ones. `had` counts each
        # member's quotas: it may exceed `n` within a block, and `_batch` cuts it.
        for are_certain in (True, False):
            for block in kernel.plan.blocks:
                if not has_room.any():
                    break
                quotas, rows = _ranked(kernel, block, are_certain=are_certain)
                # Drop the members with enough quotas, and then the quotas without members.
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
        """Remove from each row, in place, the members who have a quota of the same survey already."""
        for at, survey in enumerate(self._survey[quotas].tolist()):
            if self._has_several[survey]:
                rows[at] &= self._untaken[survey]
                # The row is a subset of `_untaken` now, so that "exclusive or" removes its members.
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
        # The pairs are in the order of rank; a stable sort by member keeps that order for each member.
        quota = quota[np.argsort(member.astype(np.uint32), kind="stable")]
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


def _ranked(kernel: Kernel, block: Block, *, are_certain: bool) -> tuple[NDArray[np.intp], NDArray[np.uint64]]:
    """Return the quotas of a block in the order of rank, with a row of the members of each.

    Args:
        kernel: The kernel, which holds the rows of a chunk.
        block: The block.
        are_certain: Return the members who certainly match; else, the others who may match.
    """
    certain, others = split(kernel, block)
    order = np.argsort(block.quotas)
    return block.quotas[order], (certain if are_certain else others)[order]


def _members_in(rows: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the members in rows, row by row: for each bit set, its row and its member."""
    word, bit = members_in(rows.reshape(-1))
    row, in_row = np.divmod(word, rows.shape[1])
    return row, in_row * _WORD + bit
