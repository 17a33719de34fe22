"""Sets of small numbers as Python integers: bit `n` stands for the number `n`.

At some thousand bits a big integer is the fastest set there is in plain Python.
"""

from __future__ import annotations

from functools import reduce
from operator import getitem, or_
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


def all_of(sets: Iterable[int]) -> int:
    """Return the union."""
    return reduce(or_, sets, 0)


class Unions:
    """Sets, of which some are to be united again and again: eight at a time, by a union that was made before.

    Args:
        sets: The sets, by their places.
        most_bytes: What is remembered, about.
    """

    def __init__(self, sets: Sequence[int], most_bytes: int) -> None:
        self._groups = [_Group(sets[start : start + 8]) for start in range(0, len(sets), 8)]
        self._most = most_bytes
        self._size = max((each.bit_length() for each in sets), default=0) // 8 + 100

    def of(self, places: int) -> int:
        """Return the union of the sets at these places."""
        groups = self._groups
        united = reduce(or_, map(getitem, groups, places.to_bytes(len(groups), "little")), 0)
        if self._size * sum(map(len, groups)) > self._most:
            for group in groups:
                group.clear()
        return united


class _Group(dict[int, int]):
    """Unions of up to eight sets, by which of them."""

    __slots__ = ("_sets",)

    def __init__(self, sets: Sequence[int]) -> None:
        super().__init__()
        self._sets = sets

    def __missing__(self, chosen: int) -> int:
        united = self[chosen] = all_of(each for at, each in enumerate(self._sets) if chosen >> at & 1)
        return united


class _Set(Protocol):
    """What sets can be combined by; integers, and others."""

    def __and__(self, other: Self, /) -> Self: ...
    def __xor__(self, other: Self, /) -> Self: ...


S = TypeVar("S", bound=_Set)


def without(these: S, those: S) -> S:
    """Return the difference. `these & ~those` takes longer: it goes through negative numbers."""
    return (these & those) ^ these


def ascending(bits: int) -> Iterator[int]:
    """Yield the numbers in a set, the lowest first, as they are asked for."""
    text = f"{bits:b}"[::-1]
    place = text.find("1")
    while place >= 0:
        yield place
        place = text.find("1", place + 1)
