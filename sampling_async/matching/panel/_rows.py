"""Sets of members before there are members: what they will be made of, and in which order.

A row is a set of members, a bit each. Rows are put together from other rows by "and", "or" and "exclusive or",
each combination once; what comes of it is a list of steps, each of which makes many rows in the same way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from numpy.typing import NDArray

Op: TypeAlias = Literal["and", "or", "xor"]
TOGETHER: Final = 512
"""Rows made in one go at most: enough to be worth a call, and few, to stay in the processor's own cache."""


class Row:
    """A row to be: its number in the rows it is of."""

    __slots__ = ("_rows", "number")

    def __init__(self, rows: Rows, number: int) -> None:
        self._rows = rows
        self.number = number

    def __and__(self, other: Row) -> Row:
        return self._rows.combined("and", (self, other))

    def __or__(self, other: Row) -> Row:
        return self._rows.combined("or", (self, other))

    def __xor__(self, other: Row) -> Row:
        return self._rows.combined("xor", (self, other))


class _Made(NamedTuple):
    """What a row is made of, by the numbers of rows; nothing, if it is given."""

    op: Op | None
    operands: tuple[int, ...]


class Step(NamedTuple):
    """Rows to be made in the same way, one after the other from `first` on.

    Attributes:
        op: How.
        first: Where they are put.
        operands: Rows that are combined: of all of them the first operand, then of those that have one the
            second, and so on. Those with most operands come first.
    """

    op: Op
    first: int
    operands: list[NDArray[np.intp]]


class Rows:
    """Rows to be, each kept once however it is come by."""

    def __init__(self) -> None:
        self._made: list[_Made] = []
        self._names: list[Hashable] = []
        self._numbers: dict[Hashable, int] = {}
        self.nothing = self.given("nothing")
        self.everything = self.given("everything")

    def given(self, name: Hashable) -> Row:
        """Return a row that is filled from outside, by its name."""
        return Row(self, self._place(name, _Made(None, ())))

    def combined(self, op: Op, rows: Iterable[Row]) -> Row:
        """Return what comes of rows."""
        operands = self.operands(op, rows)
        if len(operands) == 1:
            return Row(self, operands[0])
        made = _Made(op, operands)
        return Row(self, self._place(made, made))

    def operands(self, op: Op, rows: Iterable[Row]) -> tuple[int, ...]:
        """Return the numbers of the rows that make a difference, one at least."""
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
        number = self._numbers.setdefault(name, len(self._made))
        if number == len(self._made):
            self._made.append(made)
            self._names.append(name)
        return number

    def arranged(self, wanted: set[int]) -> Arranged:
        """Return the steps that make rows, given by their numbers, and where each is to be found."""
        return Arranged(self._made, self._names, wanted)


class Arranged:
    """Rows in the order they are made in.

    Attributes:
        places: Of the numbers of rows that are needed, the places.
        given: The names of those to be filled from outside, which come first, in the order they were named.
        steps: What makes the others.
        count: How many rows there are.
    """

    def __init__(self, made: Sequence[_Made], names: Sequence[Hashable], wanted: set[int]) -> None:
        needed = {0, 1} | wanted
        for number in range(len(made) - 1, -1, -1):  # what a row is made of has a lower number
            if number in needed:
                needed.update(made[number].operands)
        kept = sorted(needed)
        given = [number for number in kept if made[number].op is None]
        self.given = [names[number] for number in given]
        self.places = {number: place for place, number in enumerate(given)}
        self.steps: list[Step] = []
        levels = dict.fromkeys(given, 0)
        alike: defaultdict[tuple[int, Op], list[int]] = defaultdict(list)
        for number in kept:
            op, operands = made[number]
            if op is not None:
                levels[number] = 1 + max(levels[operand] for operand in operands)
                alike[levels[number], op].append(number)
        for _, op in sorted(alike):
            numbers = sorted(alike[_, op], key=lambda number: -len(made[number].operands))
            operands_of = [[self.places[part] for part in made[number].operands] for number in numbers]
            self.steps += _steps(op, operands_of, len(self.places))
            self.places.update(zip(numbers, range(len(self.places), len(kept)), strict=False))
        self.count = len(kept)


def _steps(op: Op, made_of: Sequence[Sequence[int]], first: int) -> list[Step]:
    """Return the steps that make rows of these, which are in the order of how many they are made of."""
    return [
        Step(op, first + start, by_turn(made_of[start : start + TOGETHER]))
        for start in range(0, len(made_of), TOGETHER)
    ]


def by_turn(made_of: Sequence[Sequence[int]]) -> list[NDArray[np.intp]]:
    """Return the first of each, the second of those that have one, and so on; the longest come first."""
    return [
        np.array([operands[turn] for operands in made_of if len(operands) > turn], dtype=np.intp)
        for turn in range(len(made_of[0]) if made_of else 0)
    ]
