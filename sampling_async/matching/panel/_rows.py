"""Symbolic rows: how rows will be made from other rows, and in which order, before there are any members.

A row is a set of members, with a bit for each. Rows are combined by "and", "or" and "exclusive or", and each
combination is made once. The result is a list of steps, each of which makes many rows by the same operation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from sampling_async._pacing.gc_pauses import defer_full_gc

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

T = TypeVar("T")
Op: TypeAlias = Literal["and", "or", "xor"]
TOGETHER: Final = 512
"""The most rows made by one step: many, so that a call pays; few, to stay in the core's own cache."""


def with_gc_deferred(items: Iterable[T]) -> Iterator[T]:
    """Yield items, and delay full garbage collections: a plan makes no garbage, but a million small objects."""
    for item in items:
        defer_full_gc()
        yield item


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
        self._made: list[_Made] = []
        self._names: list[Hashable] = []
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
        number = self._numbers.setdefault(name, len(self._made))
        if number == len(self._made):
            self._made.append(made)
            self._names.append(name)
        return number

    def arranged(self, wanted: set[int]) -> Arranged:
        """Return the steps that make the wanted rows, given by their numbers, and the place of each row."""
        return Arranged(self._made, self._names, wanted)


class Arranged:
    def __init__(self, made: Sequence[_Made], names: Sequence[Hashable], wanted: set[int]) -> None:
        needed = {0, 1} | wanted
        # Operands have lower numbers than the row made from them, so one pass from the last row on finds all.
        for number in range(len(made) - 1, -1, -1):
            if number in needed:
                needed.update(made[number].operands)
        kept = sorted(needed)
        given = [number for number in kept if made[number].op is None]
        self.given = [names[number] for number in given]
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
            self.steps += _steps(op, operands_of, len(self.places))
            self.places.update(zip(numbers, range(len(self.places), len(kept)), strict=False))
        self.count = len(kept)


def _steps(op: Op, made_of: Sequence[Sequence[int]], first: int) -> list[Step]:
    """Return the steps that make rows, given the operands of each; the rows with most operands come first."""
    return [
        Step(op, first + start, by_turn(made_of[start : start + TOGETHER]))
        for start in range(0, len(made_of), TOGETHER)
    ]


def by_turn(made_of: Sequence[Sequence[int]]) -> list[NDArray[np.intp]]:
    """Return all first operands, then the second ones of the rows that have them, and so on.

    The rows with most operands come first: [[3, 4, 5], [6, 7]] becomes [[3, 6], [4, 7], [5]].
    """
    return [
        np.array([operands[turn] for operands in made_of if len(operands) > turn], dtype=np.intp)
        for turn in range(len(made_of[0]) if made_of else 0)
    ]
