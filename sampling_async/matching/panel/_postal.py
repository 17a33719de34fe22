"""Lookup of postal codes by their prefixes, for a whole column at once.

The first eight letters of a code are packed into one number, the first letter in the highest byte. A mask then
cuts a code to a prefix: with the mask 0xFFFF000000000000, the code "1001" becomes the number of "10".
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from sampling_async.matching.panel._arrow import booleans, integers, pc
from sampling_async.matching.panel._classes import OTHER, UNANSWERED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from sampling_async.matching.panel._classes import Classes

_PACKED: Final = 8
_LAST: Final = np.iinfo(np.uint64).max
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio, which spreads numbers that are next to each other."""


class _Table:
    """A hash table from numbers above 0 to classes, searched for many numbers at once.

    A lookup takes one or two steps; a binary search takes about fifteen. At most half of the places are used.
    Each number is at the first free place from its own place on (linear probing), and 0 marks a free place.
    """

    def __init__(self, numbers: NDArray[np.uint64], classes: NDArray[np.intp]) -> None:
        bits = (2 * len(numbers)).bit_length()
        self._shift = np.uint64(64 - bits)
        self._last = (1 << bits) - 1
        self._numbers = np.zeros(1 << bits, dtype=np.uint64)
        self._classes = np.zeros(1 << bits, dtype=np.intp)
        # Each round tries to put every number left at its place, and moves the others on to the next place.
        left, at = np.arange(len(numbers)), self._places(numbers)
        while len(left):
            free = self._numbers[at] == 0
            # If several numbers are written to the same place, one of them stays, and `there` finds it.
            self._numbers[at[free]] = numbers[left[free]]
            there = self._numbers[at] == numbers[left]
            self._classes[at[there]] = classes[left[there]]
            left, at = left[~there], at[~there] + 1 & self._last

    def replace(self, numbers: NDArray[np.uint64], classes: NDArray[np.intp]) -> None:
        """Replace entries of `classes` by the class of their number, for the numbers in the table."""
        at = self._places(numbers)
        found = self._numbers[at]
        left = np.flatnonzero((found != numbers) & (found != 0))
        while len(left):
            at[left] = at[left] + 1 & self._last
            found[left] = self._numbers[at[left]]
            left = left[(found[left] != numbers[left]) & (found[left] != 0)]
        np.copyto(classes, self._classes[at], where=found == numbers)

    def _places(self, numbers: NDArray[np.uint64]) -> NDArray[np.intp]:
        # Fibonacci hashing: multiply modulo 2**64, and keep the highest bits as the place.
        places: NDArray[np.intp] = (numbers * _SPREAD >> self._shift).astype(np.intp)
        return places


class _OfLength(NamedTuple):
    """The prefixes of one length.

    Attributes:
        mask: The bits of the letters up to this length.
        table: The class of each prefix, by its packed letters.
    """

    mask: np.uint64
    table: _Table


class Beginnings:
    """The prefixes that a question about postal codes asks for.

    Args:
        classes: The classes of the question's answers.
    """

    def __init__(self, classes: Classes) -> None:
        self._classes = classes
        self._are_long = max(map(len, map(str, classes.of)), default=0) > _PACKED
        self._by_length = list(_by_length(classes.of))

    def numbers(self, words: Any) -> NDArray[np.intp] | None:
        """Return the classes of texts, or None if a text needs slower code.

        Plain texts consist of ASCII letters, digits, blanks and hyphens; any other character needs slower code.
        """
        codes = _plain(pc.fill_null(words, "") if words.null_count else words)
        if codes is None:
            return None
        numbers = np.full(len(codes), OTHER, dtype=np.intp)
        packed = _packed(codes)
        # The shortest prefixes come first, so that the class of the longest prefix replaces the others.
        for mask, table in self._by_length:
            table.replace(packed & mask, numbers)
        numbers[packed == 0] = UNANSWERED
        # Eight letters do not decide about codes and prefixes that are longer: look these up one by one.
        for long in np.flatnonzero(_lengths(codes) > _PACKED) if self._are_long else ():
            numbers[long] = self._classes.number(codes[int(long)].as_py().lower())
        return numbers


def _by_length(of: Mapping[Any, int]) -> Iterator[_OfLength]:
    """Yield the prefixes of each length with their classes, the shortest first."""
    by_length: defaultdict[int, list[str]] = defaultdict(list)
    for text in of:
        # The codes looked up here have ASCII letters and digits only, so other prefixes never fit.
        if text.isascii() and text.isalnum():
            by_length[len(text)].append(text)
    for length in range(1, _PACKED + 1):
        same = by_length[length]
        if not same:
            continue
        # One row of eight bytes for each prefix, padded with zeros, and read as one big-endian number.
        letters = np.zeros((len(same), _PACKED), dtype=np.uint8)
        letters[:, :length] = np.frombuffer("".join(same).encode(), dtype=np.uint8).reshape(-1, length)
        numbers = letters.view(">u8")[:, 0].astype(np.uint64)
        classes = np.array([of[text] for text in same], dtype=np.intp)
        yield _OfLength(_LAST << np.uint64(8 * (_PACKED - length)), _Table(numbers, classes))


def _plain(words: Any) -> Any | None:
    """Return postal codes without nulls as letters and digits only, or None if that needs slower code."""
    codes = words
    if not _are_alnum(words).all():
        codes = pc.replace_substring(pc.replace_substring(words, " ", ""), "-", "")
        if not (_are_alnum(codes) | (_lengths(codes) == 0)).all():
            return None
    return codes


def _packed(codes: Any) -> NDArray[np.uint64]:
    """Return the first eight letters and digits of each text, in lower case, packed into a number."""
    # Padded to eight bytes each, the texts of the column follow each other in its buffer, and can be read as
    # numbers without a loop.
    padded = pc.ascii_rpad(pc.utf8_slice_codeunits(codes, 0, _PACKED), _PACKED, "\0")
    # Only now: of texts that do not begin at the start of their buffer, such as slices that went through
    # pandas, pyarrow's `ascii_lower` takes other bytes (as of version 26).
    same = pc.ascii_lower(padded)
    return np.frombuffer(same.buffers()[2] or b"", dtype=">u8", count=len(codes)).astype(np.uint64)


def _are_alnum(texts: Any) -> NDArray[np.bool_]:
    return booleans(pc.ascii_is_alnum(texts))


def _lengths(texts: Any) -> NDArray[np.integer[Any]]:
    return integers(pc.binary_length(texts))[0]
