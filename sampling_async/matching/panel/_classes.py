"""Classes of answers to a question: all answers of one class meet the same conditions.

A member who gives one answer is in one class of the question. So each condition is a set of classes: an integer
with a bit for each class, as in `_bits`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from sampling_async._pacing.gc_pauses import defer_full_gc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sampling_async.matching._conditions import Condition
    from sampling_async.matching._policy import MatchPolicy
    from sampling_async.matching._questions import Kind, Known

UNANSWERED: Final = 0
"""The class of members without an answer."""

OTHER: Final = 1
"""The class of answers that meet no condition."""

MOST_CODES: Final = 255
"""The most classes of a question whose class numbers are compared, as bytes; with more, tables are used."""


class Classes:
    """The classes of a question's answers.

    Args:
        kind: How the question is matched.
        conditions: All conditions about it.
        policy: Rules for the cases that the contract leaves open.

    Attributes:
        kind: As given.
        of: The class of each year, answer ID or prefix of postal codes; all other answers are in `OTHER`.
        everything: The set of all classes.
        certain: For each condition, the classes that certainly meet it.
        possible: For each condition, the classes that may meet it.
    """

    def __init__(self, kind: Kind, conditions: Sequence[Condition], policy: MatchPolicy) -> None:
        self.kind = kind
        meeting: defaultdict[int | str, list[int]] = defaultdict(list)
        for at, condition in enumerate(conditions):
            defer_full_gc()
            for value in condition.values():
                meeting[value].append(at)
        lengths = {len(value) for value in meeting if isinstance(value, str)}
        self._lengths = sorted(lengths, reverse=True)
        numbers: dict[object, int] = {(OTHER, ()): OTHER}
        # For each class, the conditions that its answers meet; the first two are UNANSWERED and OTHER.
        met: list[frozenset[int]] = [frozenset(), frozenset()]
        self.of: dict[int | str, int] = {}
        # Sorted, a prefix comes before the longer prefixes that begin with it, so that its class is known then.
        for value in sorted(meeting, key=_in_order):
            defer_full_gc()
            # A code that begins with "1001" also begins with "10": it meets the conditions of both. So the
            # class of "1001" is found by the class of "10" and its own conditions.
            beginning = self._longest(value[:-1]) if isinstance(value, str) else OTHER
            places_met = meeting[value]
            number = self.of[value] = numbers.setdefault((beginning, tuple(places_met)), len(met))
            if number == len(met):
                met.append(met[beginning].union(places_met))
        self.everything = (1 << len(met)) - 1
        defer_full_gc()
        # Set the bits in byte arrays: to set a bit of a big integer copies the integer.
        meet = [bytearray(len(met) // 8 + 1) for _ in conditions]
        for number, places in enumerate(met):
            for at in places:
                meet[at][number >> 3] |= 1 << (number & 7)
        defer_full_gc()
        self.certain = [int.from_bytes(each, "little") for each in meet]
        self.possible = [
            certain
            | (self.answered if condition.may_be_met(answered=True, policy=policy) else 0)
            | (1 << UNANSWERED if condition.may_be_met(answered=False, policy=policy) else 0)
            for certain, condition in zip(self.certain, conditions, strict=True)
        ]

    @property
    def answered(self) -> int:
        """The set of all classes except `UNANSWERED`."""
        return self.everything ^ 1 << UNANSWERED

    def __len__(self) -> int:
        """Return how many classes there are."""
        return self.everything.bit_length()

    def number(self, known: Known | None) -> int:
        """Return the class of an answer, which contains at most one answer ID."""
        if known is None:
            return UNANSWERED
        if isinstance(known, str):
            return self._longest(known)
        if isinstance(known, frozenset):
            (known,) = known
        return self.of.get(known, OTHER)

    def _longest(self, code: str) -> int:
        """Return the class of the longest known prefix of a code."""
        for length in self._lengths:
            if length <= len(code) and (number := self.of.get(code[:length])) is not None:
                return number
        return OTHER


def _in_order(value: int | str) -> Any:
    """Return a value as its sort key, for type checkers: all values of a question are of one type."""
    return value
