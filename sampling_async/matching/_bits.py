"""Sets of small numbers as Python integers: bit `n` is set if the number `n` is in the set.

The set {0, 3} is 0b1001. With some thousand bits, a big integer is the fastest set in plain Python.
"""

from __future__ import annotations

from functools import reduce
from operator import getitem, or_
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


def all_of(sets: Iterable[int]) -> int:
    return reduce(or_, sets, 0)


def of_places(places: Iterable[int]) -> int:
    listed = list(places)
    # Set the bits in bytes: to set a bit of a big integer copies the integer.
    bits = bytearray(max(listed, default=-1) // 8 + 1)
    for place in listed:
        bits[place >> 3] |= 1 << (place & 7)
    return int.from_bytes(bits, "little")


class Unions:
    """A sequence of sets with cached unions, for many unions of some of them.

    The sets are in groups of eight. The union of any selection in a group is made once and then looked up, so
    that one union takes an eighth of the operations. At about `most_bytes`, the cache is cleared.
    """

    def __init__(self, sets: Sequence[int], most_bytes: int) -> None:
        self._groups = [_UnionCache(sets[start : start + 8]) for start in range(0, len(sets), 8)]
        self._most = most_bytes
        self._size = max((each.bit_length() for each in sets), default=0) // 8 + 100

    def of(self, places: int) -> int:
        groups = self._groups
        # Byte `g` of `places` says which sets of group `g` are chosen, and is the key of the cached union. With
        # 16 sets, places {1, 8, 9} are the bytes 0b00000010 and 0b00000011: two lookups, united.
        united = reduce(or_, map(getitem, groups, places.to_bytes(len(groups), "little")), 0)
        if self._size * sum(map(len, groups)) > self._most:
            for group in groups:
                group.clear()
        return united


class _UnionCache(dict[int, int]):
    """The cached unions of up to eight sets; the key has bit `n` set if set `n` is chosen."""

    __slots__ = ("_sets",)

    def __init__(self, sets: Sequence[int]) -> None:
        super().__init__()
        self._sets = sets

    def __missing__(self, chosen: int) -> int:
        united = self[chosen] = all_of(each for at, each in enumerate(self._sets) if chosen >> at & 1)
        return united


class _Set(Protocol):
    """The operations on sets; integers have them, and `Row` of the panel."""

    def __and__(self, other: Self, /) -> Self: ...
    def __or__(self, other: Self, /) -> Self: ...
    def __xor__(self, other: Self, /) -> Self: ...


S = TypeVar("S", bound=_Set)


def without(these: S, those: S) -> S:
    # `these & ~those` is slower, because `~` makes a negative number.
    return (these & those) ^ these


def ascending(bits: int) -> Iterator[int]:
    """Yield the numbers in a set lazily, the lowest first."""
    # 0b1010 becomes the text "0101", in which `find` sees the bits 1 and 3.
    text = f"{bits:b}"[::-1]
    place = text.find("1")
    while place >= 0:
        yield place
        place = text.find("1", place + 1)
