"""Classes of answers to a question, and the rows that are filled from a panel's columns by class.

All answers of one class meet the same conditions. A member who gives one answer is in one class of the
question. So each condition is a set of classes: an integer with a bit for each class, as in `_bits`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sampling_async._pacing.gc_pauses import defer_full_gc
from sampling_async.matching._bits import ascending

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from sampling_async.matching._conditions import Condition, Kind, Known, MatchPolicy
    from sampling_async.matching.panel._rows import Op


class InputRow(NamedTuple):
    """A row that is filled from a panel's columns.

    `how` says which members are in it. "is": members in a class of answers; "upto": in a class or one before
    it; "in": in one of a set of classes; "has": members with a list of answers, one of which is in a class;
    "device": members on one of some devices, or on an unknown one; "untaken": members who may take a wave;
    "listed": members on a quota's recontact list.
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
        return [InputRow(how, question_id, part) for part in parts]

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


UNANSWERED: Final = 0
"""The class of members without an answer."""

OTHER: Final = 1
"""The class of answers that meet no condition."""

MOST_CODES: Final = 255
"""The most classes of a question whose class numbers are compared, as bytes; with more, tables are used."""


class Classes:
    """The classes of a question's answers.

    Attributes:
        of: The class of each year, answer ID or prefix of postal codes; all other answers are in `OTHER`.
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
        for length in self._lengths:
            if length <= len(code) and (number := self.of.get(code[:length])) is not None:
                return number
        return OTHER


def _in_order(value: int | str) -> Any:
    """Return a value as its sort key, for type checkers: all values of a question are of one type."""
    return value
