"""Postal codes looked up by what they begin with, all of a column at once: as numbers of eight letters each."""

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
    """Numbers above 0, each with a class, which is found in a step or two instead of some fifteen.

    Each is at the first free place from its own one on.
    """

    def __init__(self, numbers: NDArray[np.uint64], classes: NDArray[np.intp]) -> None:
        bits = (2 * len(numbers)).bit_length()
        self._shift = np.uint64(64 - bits)
        self._last = (1 << bits) - 1
        self._numbers = np.zeros(1 << bits, dtype=np.uint64)
        self._classes = np.zeros(1 << bits, dtype=np.intp)
        left, at = np.arange(len(numbers)), self._places(numbers)
        while len(left):
            free = self._numbers[at] == 0
            self._numbers[at[free]] = numbers[left[free]]  # of those with one place, one is there then
            there = self._numbers[at] == numbers[left]
            self._classes[at[there]] = classes[left[there]]
            left, at = left[~there], at[~there] + 1 & self._last

    def replace(self, numbers: NDArray[np.uint64], classes: NDArray[np.intp]) -> None:
        """Put the classes of those numbers that are here in place of others."""
        at = self._places(numbers)
        found = self._numbers[at]
        left = np.flatnonzero((found != numbers) & (found != 0))
        while len(left):
            at[left] = at[left] + 1 & self._last
            found[left] = self._numbers[at[left]]
            left = left[(found[left] != numbers[left]) & (found[left] != 0)]
        np.copyto(classes, self._classes[at], where=found == numbers)

    def _places(self, numbers: NDArray[np.uint64]) -> NDArray[np.intp]:
        places: NDArray[np.intp] = (numbers * _SPREAD >> self._shift).astype(np.intp)
        return places


class _OfLength(NamedTuple):
    """Beginnings of one length: the bits they are made of, and what class each is of."""

    mask: np.uint64
    table: _Table


class Beginnings:
    """What is asked for of a question whose answers are postal codes.

    Args:
        classes: Its classes.
    """

    def __init__(self, classes: Classes) -> None:
        self._classes = classes
        self._are_long = max(map(len, map(str, classes.of)), default=0) > _PACKED
        self._by_length = list(_by_length(classes.of))

    def numbers(self, words: Any) -> NDArray[np.intp] | None:
        """Return the classes of texts, or None if there is more to leave out of one than blanks and hyphens."""
        codes = _plain(pc.fill_null(words, "") if words.null_count else words)
        if codes is None:
            return None
        numbers = np.full(len(codes), OTHER, dtype=np.intp)
        packed = _packed(codes)
        for mask, table in self._by_length:  # what is found last is the longest
            table.replace(packed & mask, numbers)
        numbers[packed == 0] = UNANSWERED
        for long in np.flatnonzero(_lengths(codes) > _PACKED) if self._are_long else ():
            numbers[long] = self._classes.number(codes[int(long)].as_py())
        return numbers


def _by_length(of: Mapping[Any, int]) -> Iterator[_OfLength]:
    """Yield beginnings of postal codes with their classes, those of a length together, the shortest first."""
    by_length: defaultdict[int, list[str]] = defaultdict(list)
    for text in of:
        if text.isascii() and text.isalnum():  # no answer that is plain begins with anything else
            by_length[len(text)].append(text)
    for length in range(1, _PACKED + 1):
        same = by_length[length]
        if not same:
            continue
        letters = np.zeros((len(same), _PACKED), dtype=np.uint8)
        letters[:, :length] = np.frombuffer("".join(same).encode(), dtype=np.uint8).reshape(-1, length)
        numbers = letters.view(">u8")[:, 0].astype(np.uint64)
        classes = np.array([of[text] for text in same], dtype=np.intp)
        yield _OfLength(_LAST << np.uint64(8 * (_PACKED - length)), _Table(numbers, classes))


def _plain(words: Any) -> Any | None:
    """Return postal codes, which are all there, as they are compared, where that is easily had."""
    codes = words
    if not _are_alnum(words).all():
        codes = pc.replace_substring(pc.replace_substring(words, " ", ""), "-", "")
        if not (_are_alnum(codes) | (_lengths(codes) == 0)).all():
            return None
    return pc.ascii_lower(codes)


def _packed(codes: Any) -> NDArray[np.uint64]:
    """Return texts of letters and digits, cut to as many as fit, as numbers."""
    same = pc.ascii_rpad(pc.utf8_slice_codeunits(codes, 0, _PACKED), _PACKED, "\0")
    return np.frombuffer(same.buffers()[2] or b"", dtype=">u8", count=len(codes)).astype(np.uint64)


def _are_alnum(texts: Any) -> NDArray[np.bool_]:
    return booleans(pc.ascii_is_alnum(texts))


def _lengths(texts: Any) -> NDArray[np.integer[Any]]:
    return integers(pc.binary_length(texts))[0]
