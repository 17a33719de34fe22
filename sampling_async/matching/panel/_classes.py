"""The answers to a question, in classes: those of a class meet the same conditions.

A member is in one class of each question, so that what a question asks for is a set of classes: an integer with
a bit for each, as in `_bits`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from sampling_async.matching._questions import OLDEST

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from sampling_async.matching._conditions import Condition
    from sampling_async.matching._policy import MatchPolicy
    from sampling_async.matching._questions import Kind, Known

UNANSWERED: Final = 0
OTHER: Final = 1
"""The class of answers that meet no condition."""

MOST_CODES: Final = 255
"""Classes of a question, if they are told apart one class at a time; of more, what is asked is looked up."""

_MORE: Final = 8
"""Classes a question may have more than it needs, for its answer IDs to be told apart by arithmetic."""


class Classes:
    """The classes of a question's answers.

    Args:
        kind: How the question is matched.
        conditions: Everything that is asked about it.
        policy: What is taken how.

    Attributes:
        kind: As given.
        of: The classes of answers: of years, answer IDs or beginnings of postal codes. Others are in `OTHER`.
        consecutive: The answer IDs, if they come one after the other and are in the classes after `OTHER`, one
            in each.
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
        lengths = {len(value) for value in meeting if isinstance(value, str)}
        self._lengths = sorted(lengths, reverse=True)
        self.consecutive = None if kind in {"age", "postal"} else _range(meeting)
        numbers: dict[object, int] = {(OTHER, ()): OTHER} if self.consecutive is None else {}
        met: list[frozenset[int]] = [frozenset(), frozenset()]  # by the answers of each class
        self.of: dict[int | str, int] = {}
        # A code comes after its beginnings.
        values: Iterable[int | str] = self.consecutive or sorted(meeting, key=_in_order)
        for value in values:
            # What meets a condition by its beginning does so as a whole.
            beginning = self._longest(value[:-1]) if isinstance(value, str) else OTHER
            places_met = meeting.get(value, [])
            key = (beginning, tuple(places_met)) if self.consecutive is None else value
            number = self.of[value] = numbers.setdefault(key, len(met))
            if number == len(met):
                met.append(met[beginning].union(places_met))
        self.everything = (1 << len(met)) - 1
        meet = [bytearray(len(met) // 8 + 1) for _ in conditions]
        for number, places in enumerate(met):
            for at in places:
                meet[at][number >> 3] |= 1 << (number & 7)
        self.certain = [int.from_bytes(each, "little") for each in meet]
        self.possible = [
            certain
            | (self.answered if condition.may_be_met(answered=True, policy=policy) else 0)
            | (1 << UNANSWERED if condition.may_be_met(answered=False, policy=policy) else 0)
            for certain, condition in zip(self.certain, conditions, strict=True)
        ]

    @property
    def answered(self) -> int:
        """The set of all classes but that of no answer."""
        return self.everything ^ 1 << UNANSWERED

    def __len__(self) -> int:
        """Return how many classes there are."""
        return self.everything.bit_length()

    def number(self, known: Known | None) -> int:
        """Return the class of an answer, which is no more than one."""
        if known is None:
            return UNANSWERED
        if isinstance(known, str):
            return self._longest(known)
        if isinstance(known, frozenset):
            (known,) = known
        return self.of.get(known, OTHER)

    def _longest(self, code: str) -> int:
        """Return the class of the longest beginning of a code that there is."""
        for length in self._lengths:
            if length <= len(code) and (number := self.of.get(code[:length])) is not None:
                return number
        return OTHER


def _range(meeting: Mapping[Any, Sequence[int]]) -> range | None:
    """Return numbers with all that are in between, if few of these could be one class."""
    if not meeting:
        return None
    first, end = min(meeting), max(meeting) + 1
    needed = len(set(map(tuple, meeting.values())))
    return range(first, end) if end - first <= min(needed + _MORE, MOST_CODES - OTHER - 1) else None


def _values(condition: Condition) -> Collection[int | str]:
    years = {year for first, last in condition.spans for year in range(max(first, 0), min(last, OLDEST) + 1)}
    return condition.ids or condition.prefixes or years


def _in_order(value: int | str) -> Any:
    """Return what values are sorted by: themselves, since those of a question are all of one type."""
    return value
