"""The common parts of the outputs: the protocol of collectors, and functions that several of them use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from sampling_async.matching.panel._arrow import arrow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from sampling_async.matching.panel._kernel import Kernel
    from sampling_async.matching.panel._plan import Block, CompactInventory

_WIDEST_TABLE: Final = 2**22


class Collector(Protocol):
    """Builds an output from the rows of one chunk of members after the other."""

    def begin(self, batch: Any, first: int) -> Any:
        """Begin a batch whose first member has this place in the panel; return the batch, perhaps reordered."""

    def add(self, kernel: Kernel, members: slice) -> Any | None:
        """Add the rows of some members of the batch; return a record batch if one is ready."""

    def end(self) -> Any | None:
        """Return the rest of the output as a record batch, if there is a rest."""


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


class Places:
    def __init__(self, quota_ids: NDArray[np.int64]) -> None:
        self._order = np.argsort(quota_ids)
        self._sorted = quota_ids[self._order]
        # Most IDs are close together, and a table is much faster than a search.
        self._table: NDArray[np.intp] | None = None
        if len(quota_ids) and self._sorted[-1] - self._sorted[0] < _WIDEST_TABLE:
            table = np.full(self._sorted[-1] - self._sorted[0] + 1, -1)
            table[quota_ids - self._sorted[0]] = np.arange(len(quota_ids))
            self._table = table

    def pairs(self, lists: Any, certain: Any) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]:
        """Return the member, the place of the quota, and whether it is certain, of each pair.

        A list has first the certain quotas; `certain` says how many. Unknown quotas are left out.
        """
        member = np.repeat(np.arange(len(lists)), np.diff(lists.offsets.to_numpy()))
        is_certain = places_within(member) < certain.to_numpy()[member]
        place = self.of(lists.flatten().to_numpy())
        known = place >= 0
        if known.all():
            return member, place, is_certain
        return member[known], place[known], is_certain[known]

    def of(self, quota_ids: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the places of quotas, -1 for unknown ones."""
        if not len(self._sorted):
            return np.full(len(quota_ids), -1)
        if self._table is not None:
            at = quota_ids - self._sorted[0]
            is_in = (at >= 0) & (at < len(self._table))
            return np.where(is_in, self._table[np.where(is_in, at, 0)], -1)
        found = np.minimum(np.searchsorted(self._sorted, quota_ids), len(self._sorted) - 1)
        return np.where(self._sorted[found] == quota_ids, self._order[found], -1)


def places_within(groups: NDArray[np.integer]) -> NDArray[np.intp]:
    """Return the place of each item in its group, whose items stand together: [7, 7, 4] gives [0, 1, 0]."""
    if not len(groups):
        return np.zeros(0, dtype=np.intp)
    starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
    return np.arange(len(groups)) - np.repeat(starts, np.diff(starts, append=len(groups)))


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


def by_member(member: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the order of pairs by their members: fewer than 65,536, in a chunk, a group and a sample."""
    # numpy sorts numbers of 16 bits by radix, seven times as fast as longer ones.
    return np.argsort(member.astype(np.uint16), kind="stable")


def best_first(member: NDArray[np.intp], gains: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the order of pairs by member, as `by_member`, and those of each member by gain, the most first."""
    # A sort that is not stable is seven times as fast, and hardly any gains are equal.
    order = np.argsort(-gains)
    if (gains[order[1:]] == gains[order[:-1]]).any():
        order = np.argsort(-gains, kind="stable")
    return order[by_member(member[order])]


def numbered(member: NDArray[np.intp], survey: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return a number for each pair, from 0 on: the same for pairs of the same member and survey."""
    order = np.lexsort((survey.astype(np.min_scalar_type(survey.max(initial=0))), member.astype(np.uint16)))
    member, survey = member[order], survey[order]
    is_new = (member[1:] != member[:-1]) | (survey[1:] != survey[:-1])
    numbers = np.empty(len(order), dtype=np.intp)
    numbers[order[:1]] = 0
    numbers[order[1:]] = np.cumsum(is_new)
    return numbers


def first_of_each(pairs: NDArray[np.intp], numbers: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the pairs that come before all others of the same number."""
    first = np.empty(numbers.max(initial=-1) + 1, dtype=np.intp)
    # Of several values for a place, the last one stays: begin at the end.
    first[numbers[pairs[::-1]]] = pairs[::-1]
    is_first: NDArray[np.bool_] = first[numbers[pairs]] == pairs
    return pairs[is_first]


def known_rows(table: Any, source: CompactInventory) -> tuple[Any, NDArray[np.intp]]:
    """Return the rows of a table about quotas of a source, and the places of these quotas.

    Parts may know others: of a matcher from before a quota closed, for example.
    """
    places = Places(source.quota_ids).of(table.column("quota_id").to_numpy())
    known = np.flatnonzero(places >= 0)
    return (table, places) if len(known) == len(places) else (table.take(arrow(known)), places[known])
