"""Pairs of members and quotas, chosen by what each brings, and what an allocation reads of members."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sampling_async._contract.errors import InvalidRequestError
from sampling_async.matching.panel._arrow import arrow, pa
from sampling_async.matching.panel._collectors import places_within
from sampling_async.matching.panel._columns import numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FACTORS: Final = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_HALF: Final = np.uint64(32)
_UNIT: Final = 2.0**-64

INVITES_LEFT: Final = "invites_left"
"""The column of the panel with the most invites that a member may get today, as its caps say."""

_SPARE: Final = 3

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


def limits(batch: Any, per_member: int, first: int) -> Any:
    """Return how many invites each member may get."""
    if INVITES_LEFT not in batch.schema.names:
        return arrow(np.full(len(batch), per_member, dtype=np.int64))
    left, is_known = numbers(batch.column(INVITES_LEFT), INVITES_LEFT, first)
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
