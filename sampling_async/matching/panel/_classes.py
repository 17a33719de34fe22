"""The answers to a question, in classes: those of a class meet the same conditions.

A member is in one class of each question, so that what a question asks for is a set of classes: an integer with
a bit for each, as in `_bits`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from sampling_async.matching._conditions import Condition
    from sampling_async.matching._policy import MatchPolicy
    from sampling_async.matching._questions import Kind, Known

UNANSWERED: Final = 0
OTHER: Final = 1
"""The class of answers that meet no condition."""

OLDEST: Final = 150


class Classes:
    """The classes of a question's answers.

    Args:
        kind: How the question is matched.
        conditions: Everything that is asked about it.
        policy: What is taken how.

    Attributes:
        kind: As given.
        of: The classes of answers: of years, answer IDs or beginnings of postal codes. Others are in `OTHER`.
        everything: The set of all classes.
        certain: Of each condition, the classes that meet it.
        possible: Of each condition, the classes that may.
    """

    def __init__(self, kind: Kind, conditions: Sequence[Condition], policy: MatchPolicy) -> None:
        self.kind = kind
        meeting: defaultdict[int | str, list[int]] = defaultdict(list)
        for at, condition in enumerate(conditions):
            for value in _values(condition):
                meeting[value].append(at)
        if kind == "postal":
            _inherit(meeting)
        numbers: dict[tuple[int, ...], int] = {(): OTHER}
        self.of: dict[int | str, int] = {
            value: numbers.setdefault(tuple(meeting[value]), len(numbers) + 1)
            for value in sorted(meeting, key=_in_order)
        }
        self.everything = (1 << len(numbers) + 1) - 1
        self.certain = [0] * len(conditions)
        for met, number in numbers.items():
            for at in met:
                self.certain[at] |= 1 << number
        self.possible = [
            certain
            | (self.answered if condition.may_be_met(answered=True, policy=policy) else 0)
            | (1 << UNANSWERED if condition.may_be_met(answered=False, policy=policy) else 0)
            for certain, condition in zip(self.certain, conditions, strict=True)
        ]
        self._lengths = sorted({len(value) for value in self.of if isinstance(value, str)}, reverse=True)

    @property
    def answered(self) -> int:
        """The set of all classes but that of no answer."""
        return self.everything ^ 1 << UNANSWERED

    def __len__(self) -> int:
        """Return how many classes there are."""
        return self.everything.bit_length()

    def number(self, known: Known | None) -> int:
        """Return the class of an answer; of several answer IDs, `numbers` returns them."""
        if known is None:
            return UNANSWERED
        if isinstance(known, str):
            hits = (self.of.get(known[:length]) for length in self._lengths if length <= len(known))
            return next((hit for hit in hits if hit is not None), OTHER)
        if isinstance(known, frozenset):
            (known,) = known
        return self.of.get(known, OTHER)

    def numbers(self, known: Iterable[int]) -> set[int]:
        """Return the classes of answer IDs."""
        return {self.of.get(one, OTHER) for one in known}


def _values(condition: Condition) -> Collection[int | str]:
    years = {year for first, last in condition.spans for year in range(first, min(last, OLDEST) + 1)}
    return condition.ids or condition.prefixes or years


def _in_order(value: int | str) -> Any:
    """Return what values are sorted by: themselves, since those of a question are all of one type."""
    return value


def _inherit(meeting: dict[int | str, list[int]]) -> None:
    """Add to what a beginning of codes meets what its own beginnings meet."""
    own = {prefix: met for prefix, met in meeting.items() if isinstance(prefix, str)}
    lengths = sorted({len(prefix) for prefix in own})
    for prefix, met in own.items():
        shorter = [
            own[prefix[:length]] for length in lengths if length < len(prefix) and prefix[:length] in own
        ]
        if shorter:
            meeting[prefix] = sorted({*met}.union(*shorter))
