"""Pairs of members and quotas, chosen by what each brings, and what an allocation reads of members."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sampling_async._contract.errors import InvalidRequestError
from sampling_async.matching.panel._arrow import arrow, pa
from sampling_async.matching.panel._columns import numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FACTORS: Final = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_HALF: Final = np.uint64(32)
_UNIT: Final = 2.0**-64

INVITES_LEFT: Final = "invites_left"
"""The column of the panel with the most invites that a member may get today, as its caps say."""

_SPARE: Final = 3
_WIDEST_TABLE: Final = 2**22

SPREAD: Final = 0.02
"""The part of its value that a pair gains by chance: members who tie should not all take the same quota."""


def chances(members: NDArray[np.uint64], quotas: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number from 0 to 1 for each pair, which depends on nothing but the two hashes."""
    mixed = members * _FACTORS[0] ^ quotas * _FACTORS[1]
    mixed ^= mixed >> _HALF
    mixed *= _FACTORS[2]
    mixed ^= mixed >> _HALF
    chance: NDArray[np.float64] = mixed.astype(np.float64) * _UNIT
    return chance


class Places:
    """The places of quotas, by their IDs.

    Args:
        quota_ids: The quotas, in the order of their places.
    """

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
        """Return the pairs in lists of quota IDs, without those of other quotas.

        Args:
            lists: A list for each member: the certain quotas, and then the possible ones.
            certain: How many of them are certain.

        Returns:
            For each pair the member, the place of the quota, and whether it is certain.
        """
        member = np.repeat(np.arange(len(lists)), np.diff(lists.offsets.to_numpy()))
        is_certain = places_within(member) < certain.to_numpy()[member]
        place = self._of(lists.flatten().to_numpy())
        known = place >= 0
        if known.all():
            return member, place, is_certain
        return member[known], place[known], is_certain[known]

    def _of(self, quota_ids: NDArray[np.int64]) -> NDArray[np.intp]:
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


def best_of_each(
    members: NDArray[np.intp],
    surveys: NDArray[np.int64],
    gains: NDArray[np.float64],
    most: NDArray[np.int64],
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the pairs that each member would take: those that gain most, one of each survey, at most `most`.

    It may be fewer, if a member's best pairs are many of the same survey.

    Args:
        members: The member of each pair, from 0 on.
        surveys: The survey of each pair, from 0 on.
        gains: What each pair brings. One that brings nothing is not taken.
        most: How many pairs each member may take.

    Returns:
        The pairs, and for each member the gain of the next best one, 0 if there is none.
    """
    pairs = np.flatnonzero(gains > 0)
    pairs = pairs[np.lexsort((-gains[pairs], members[pairs]))]
    # A few more than are wanted are enough, mostly: some may be of the same survey.
    pairs = pairs[places_within(members[pairs]) < _SPARE * most[members[pairs]]]
    # The first pair of each member and survey is the best one.
    of_survey = members[pairs] * np.int64(surveys.max(initial=0) + 1) + surveys[pairs]
    _, first = np.unique(of_survey, return_index=True)
    pairs = pairs[np.sort(first)]
    place = places_within(members[pairs])
    next_best = pairs[place == most[members[pairs]]]
    others = np.zeros(len(most))
    others[members[next_best]] = gains[next_best]
    return pairs[place < most[members[pairs]]], others


def columns_read(weight: str | None) -> frozenset[str]:
    """Return the columns of the panel that only an allocation reads."""
    return frozenset({INVITES_LEFT} if weight is None else {INVITES_LEFT, weight})


def limits(batch: Any, per_member: int) -> Any:
    """Return how many invites each member may get."""
    if INVITES_LEFT not in batch.schema.names:
        return arrow(np.full(len(batch), per_member, dtype=np.int64))
    left, is_known = numbers(batch.column(INVITES_LEFT), INVITES_LEFT)
    return arrow(np.where(is_known, np.clip(left, 0, per_member), per_member).astype(np.int64))


def weights(batch: Any, name: str | None, first: int) -> Any:
    """Return what each member's value is multiplied by."""
    if name is None:
        return pa.array(np.ones(len(batch)))
    if name not in batch.schema.names:
        raise InvalidRequestError(f"the panel has no column {name!r}, which Allocate(weight=...) names")
    try:
        column = batch.column(name).cast(pa.float64()).fill_null(1.0)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InvalidRequestError(f"column {name!r} of the panel must hold numbers") from None
    values = column.to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        raise InvalidRequestError(
            f"column {name!r} of the panel must hold numbers from 0 on; row {first + wrong[0]} does not"
        )
    return column
