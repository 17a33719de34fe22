"""A set of members in little memory: it may take a member for one of its own, and never the other way round."""

from __future__ import annotations

from typing import Final

_FIRST: Final = 2**20
"""The bits of the first field: 128 KiB, for 65,536 members."""

_BITS_EACH: Final = 16
_PROBES: Final = 4  # with 16 bits a member, one of 400 others is taken for a member


class MemberFilter:
    """A Bloom filter that grows: a full field of bits is followed by one that is four times as large.

    A set of a million codes would take 100 MB, and this takes 3.
    """

    __slots__ = ("_fields", "_room")

    def __init__(self) -> None:
        self._fields = [bytearray(_FIRST // 8)]
        self._room = _FIRST // _BITS_EACH

    def add(self, member_code: bytes) -> None:
        """Add a member."""
        if member_code in self:
            return
        if not self._room:
            self._fields.append(bytearray(4 * len(self._fields[-1])))
            self._room = 8 * len(self._fields[-1]) // _BITS_EACH
        self._room -= 1
        field = self._fields[-1]
        for bit in _bits(member_code):
            at = bit % (8 * len(field))
            field[at >> 3] |= 1 << (at & 7)

    def __contains__(self, member_code: bytes) -> bool:
        bits = _bits(member_code)
        return any(_has(field, bits) for field in self._fields)


def _bits(member_code: bytes) -> list[int]:
    # Two halves of one hash do as well as four hashes (Kirsch and Mitzenmacher).
    first, second = divmod(hash(member_code) & 2**64 - 1, 2**32)
    return [first + probe * (second | 1) for probe in range(_PROBES)]


def _has(field: bytearray, bits: list[int]) -> bool:
    size = 8 * len(field)
    return all(field[(bit % size) >> 3] >> (bit % size & 7) & 1 for bit in bits)
