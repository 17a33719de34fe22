"""The rule of a layer: which members fit the layer, given which members fit its sub-quotas.

The rule is written once, in set operations, and used for four kinds of sets: sets of members, sets of answer
classes, sets of layers that are evaluated together, and sets of one single member (1 is everybody, 0 is
nobody).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple

from sampling_async.matching._bits import S, without

if TYPE_CHECKING:
    from collections.abc import Iterable


class Fitting(NamedTuple, Generic[S]):
    certain: S
    possible: S  # those who certainly fit included


def fitting(sub_quotas: Iterable[tuple[S, S, S]], nobody: S, *, exactly_one: bool) -> Fitting[S]:
    """Return the members who fit a layer: exactly one of its sub-quotas, or at least one.

    In both rules, a member who certainly fits a full sub-quota does not fit the layer. Each of `sub_quotas` has
    the members who certainly fit it, those who may, and those for whom it is full: everybody or nobody.
    """
    # Each set collects the members with one property: they certainly fit (`fit`) or may fit (`may`) at least
    # one sub-quota, at least two of them (`two_`), one that is full (`full_`), or one that is open.
    fit = two_fit = may = two_may = may_open = full_fit = full_may = open_fit = nobody
    for certain, possible, full in sub_quotas:
        # Order matters: `fit` holds the earlier sub-quotas only, so that `fit & certain` is a second fit.
        two_fit |= fit & certain
        fit |= certain
        two_may |= may & possible
        may |= possible
        full_fit |= certain & full
        full_may |= possible & full
        open_fit |= without(certain, full)
        may_open |= without(possible, full)
    # Possible: an open sub-quota may fit, and no certain fit contradicts that. Certain: an open sub-quota fits,
    # and no other one may fit that would contradict it.
    possible = without(may_open, full_fit | two_fit if exactly_one else full_fit)
    return Fitting(without(open_fit & possible, two_may if exactly_one else full_may), possible)
