"""Sets of small numbers as Python integers: bit `n` is set if the number `n` is in the set.

The set {0, 3} is 0b1001. With some thousand bits, a big integer is the fastest set in plain Python.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def all_of(sets: Iterable[int]) -> int:
    return reduce(or_, sets, 0)


def of_places(places: Iterable[int]) -> int:
    listed = list(places)
    end = max(listed, default=-1) + 1
    if len(listed) * _DENSE > end:
        # A text of zeros and ones is filled in a third of the time, and then read in a nanosecond per place.
        text = bytearray(b"0") * end
        for place in listed:
            text[place] = _ONE
        text.reverse()
        return int(text, 2) if end else 0
    # Set the bits in bytes: to set a bit of a big integer copies the integer.
    bits = bytearray((end + 7) // 8)
    for place in listed:
        bits[place >> 3] |= 1 << (place & 7)
    return int.from_bytes(bits, "little")


_DENSE: Final = 40
"""From one place in so many on, a set is read from a text."""

_ONE: Final = ord("1")


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
