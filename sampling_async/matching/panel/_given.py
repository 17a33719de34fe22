"""Rows that are filled from the columns of a panel, and how a set of classes is made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from sampling_async._pacing.gc_pauses import defer_full_gc
from sampling_async.matching._bits import ascending
from sampling_async.matching.panel._classes import UNANSWERED

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from sampling_async.matching.panel._rows import Op


class Given(NamedTuple):
    """A row that is filled from a panel's columns.

    Attributes:
        how: Which members are in the row. "is": members in a class of answers; "upto": in a class or one before
            it; "in": in one of a set of classes; "has": members with a list of answers, one of which is in a
            class; "device": members on one of some devices, or on an unknown one; "untaken": members who may
            take a wave; "listed": members on a quota's recontact list.
        of: The question; 0 for the last three.
        what: The class, the set of classes, the device types, the place of the wave, or the quota.
    """

    how: str
    of: int
    what: Any


def parts_of(how: str, question_id: int, classes: int, everything: int) -> tuple[Op, list[Hashable]]:
    """Return how to make a set of classes: the operation, and the names of the rows to combine."""
    # There may be a hundred thousand sets, and their parts are no garbage.
    defer_full_gc()
    # A member of a question with single answers is in one class, so that "xor" of classes is their union.
    answered = everything ^ 1 << UNANSWERED
    if classes in {0, everything}:
        return "xor", ["everything"] if classes else []
    single = "is" if how == "upto" else how

    def given(parts: Iterable[int], how: str = how) -> list[Hashable]:
        return [Given(how, question_id, part) for part in parts]

    if classes == answered:
        return "xor", ["everything", *given([1 << UNANSWERED if how == "in" else UNANSWERED], single)]
    if how == "in":
        return "xor", given(part for part in (classes & 1, classes & answered) if part)
    if how == "has":
        return "or", given(ascending(classes))
    if how == "is":
        others = everything ^ classes
        if classes.bit_count() > others.bit_count() + 1:
            return "xor", ["everything", *given(ascending(others))]
        return "xor", given(ascending(classes))
    # "upto": a bit of `classes ^ classes >> 1` is set where a run of classes, or a gap, ends. {2, 3, 5} gives
    # 1, 3, 4, 5, and the set is upto(1) ^ upto(3) ^ upto(4) ^ upto(5).
    ends = list(ascending(classes ^ classes >> 1))
    last = everything.bit_length() - 1
    return "xor", [*given(end for end in ends if end != last), *(["everything"] if last in ends else [])]
