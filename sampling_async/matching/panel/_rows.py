"""Sets of members as rows, with a bit for each: how they are made, before there are any members.

All answers of one class meet the same conditions. A member who gives one answer is in one class of the
question. So each condition is a set of classes: an integer with a bit for each class, as in `_bits`. Rows are
filled from a panel's columns by class, and combined by "and", "or" and "exclusive or". Each combination is made
once. The result is a list of steps, each of which makes many rows by the same operation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, cast

import numpy as np

from sampling_async._pacing.gc_pauses import defer_full_gc, with_gc_deferred
from sampling_async.matching._bits import ascending

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from numpy.typing import NDArray

    from sampling_async.matching._conditions import Condition, Kind, Known, MatchPolicy

Op: TypeAlias = Literal["and", "or", "xor"]
TOGETHER: Final = 512
"""The most rows made by one step: many, so that a call pays; few, to stay in the core's own cache."""


# --- Classes of answers

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
        for at, condition in enumerate(with_gc_deferred(conditions)):
            for value in condition.values():
                meeting[value].append(at)
        lengths = {len(value) for value in meeting if isinstance(value, str)}
        self._lengths = sorted(lengths, reverse=True)
        numbers: dict[object, int] = {(OTHER, ()): OTHER}
        # For each class, the conditions that its answers meet; the first two are UNANSWERED and OTHER.
        met: list[frozenset[int]] = [frozenset(), frozenset()]
        self.of: dict[int | str, int] = {}
        # Sorted, a prefix comes before the longer prefixes that begin with it, so that its class is known then.
        for value in with_gc_deferred(sorted(cast("dict[Any, object]", meeting))):
            # A code that begins with "1001" also begins with "10": it meets the conditions of both. So the
            # class of "1001" is found by the class of "10" and its own conditions.
            beginning = self._longest(value[:-1]) if isinstance(value, str) else OTHER
            places_met = meeting[value]
            number = self.of[value] = numbers.setdefault((beginning, tuple(places_met)), len(met))
            if number == len(met):
                met.append(met[beginning].union(places_met))
        self.everything = (1 << len(met)) - 1
        # Set the bits in byte arrays: to set a bit of a big integer copies the integer.
        meet = [bytearray(len(met) // 8 + 1) for _ in conditions]
        for number, places in enumerate(with_gc_deferred(met)):
            for at in places:
                meet[at][number >> 3] |= 1 << (number & 7)
        self.certain = [int.from_bytes(each, "little") for each in with_gc_deferred(meet)]
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


# --- Rows


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


class Row:
    """A symbolic row: its number in the `SymbolicRows` it belongs to."""

    __slots__ = ("_rows", "number")

    def __init__(self, rows: SymbolicRows, number: int) -> None:
        self._rows = rows
        self.number = number

    def __and__(self, other: Row) -> Row:
        return self._rows.combined("and", (self, other))

    def __or__(self, other: Row) -> Row:
        return self._rows.combined("or", (self, other))

    def __xor__(self, other: Row) -> Row:
        return self._rows.combined("xor", (self, other))


class _Made(NamedTuple):
    """How a row is made: the operation and the numbers of its operands; none if the row is given."""

    op: Op | None
    operands: tuple[int, ...]


class Step(NamedTuple):
    """Rows made by the same operation, at consecutive places.

    `operands` has the places of all first operands, then of all second operands, and so on, see `by_turn`.
    """

    op: Op
    first: int  # the place of the first row made
    operands: list[NDArray[np.intp]]


class SymbolicRows:
    """A collection of symbolic rows, in which equal combinations are one row."""

    def __init__(self) -> None:
        self.made: list[_Made] = []
        self.names: list[Hashable] = []
        self._numbers: dict[Hashable, int] = {}
        self.nothing = self.given("nothing")
        self.everything = self.given("everything")

    def given(self, name: Hashable) -> Row:
        return Row(self, self._place(name, _Made(None, ())))

    def combined(self, op: Op, rows: Iterable[Row]) -> Row:
        operands = self.operands(op, rows)
        if len(operands) == 1:
            return Row(self, operands[0])
        made = _Made(op, operands)
        return Row(self, self._place(made, made))

    def operands(self, op: Op, rows: Iterable[Row]) -> tuple[int, ...]:
        """Return the numbers of the rows that affect the result, at least one."""
        # Equal rows cancel out in pairs for "xor", and count once else. Empty or full rows either decide the
        # result alone, or do not change it.
        numbers = [row.number for row in rows]
        kept = set(numbers)
        if op == "xor":
            if len(kept) < len(numbers):
                kept = {number for number, times in Counter(numbers).items() if times % 2}
            neutral = self.nothing.number
        else:
            neutral, final = self.nothing.number, self.everything.number
            if op == "and":
                neutral, final = final, neutral
            if final in kept:
                return (final,)
        return tuple(sorted(kept - {neutral})) or (neutral,)

    def _place(self, name: Hashable, made: _Made) -> int:
        number = self._numbers.setdefault(name, len(self.made))
        if number == len(self.made):
            self.made.append(made)
            self.names.append(name)
        return number


class Arranged:
    """The steps that make the wanted rows, given by their numbers, and the place of each row."""

    def __init__(self, rows: SymbolicRows, wanted: set[int]) -> None:
        made = rows.made
        needed = {0, 1} | wanted
        # Operands have lower numbers than the row made from them, so one pass from the last row on finds all.
        for number in range(len(made) - 1, -1, -1):
            if number in needed:
                needed.update(made[number].operands)
        kept = sorted(needed)
        given = [number for number in kept if made[number].op is None]
        self.given = [rows.names[number] for number in given]
        self.places = {number: place for place, number in enumerate(given)}
        self.steps: list[Step] = []
        # Rows of one level do not depend on each other, so that all with the same operation are one step.
        levels = dict.fromkeys(given, 0)
        alike: defaultdict[tuple[int, Op], list[int]] = defaultdict(list)
        for number in with_gc_deferred(kept):
            op, operands = made[number]
            if op is not None:
                levels[number] = 1 + max(levels[operand] for operand in operands)
                alike[levels[number], op].append(number)
        for _, op in sorted(alike):
            numbers = sorted(alike[_, op], key=lambda number: -len(made[number].operands))
            operands_of = [
                [self.places[part] for part in made[number].operands] for number in with_gc_deferred(numbers)
            ]
            self.steps += [
                Step(op, len(self.places) + start, by_turn(operands_of[start : start + TOGETHER]))
                for start in range(0, len(operands_of), TOGETHER)
            ]
            self.places.update(zip(numbers, range(len(self.places), len(kept)), strict=False))
        self.count = len(kept)


def by_turn(made_of: Sequence[Sequence[int]]) -> list[NDArray[np.intp]]:
    """Return all first operands, then the second ones of the rows that have them, and so on.

    The rows with most operands come first: [[3, 4, 5], [6, 7]] becomes [[3, 6], [4, 7], [5]].
    """
    return [
        np.array([operands[turn] for operands in made_of if len(operands) > turn], dtype=np.intp)
        for turn in range(len(made_of[0]) if made_of else 0)
    ]
