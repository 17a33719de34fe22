"""Postal codes looked up by what they begin with, all of a column at once: as numbers of eight letters each."""

from __future__ import annotations

from itertools import groupby
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


class _OfLength(NamedTuple):
    """Beginnings of one length, in order: the bits they are made of, themselves, and their classes."""

    mask: np.uint64
    packed: NDArray[np.uint64]
    classes: NDArray[np.intp]


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
        codes = _plain(words)
        if codes is None:
            return None
        numbers = np.full(len(codes), OTHER, dtype=np.intp)
        packed = _packed(codes)
        for mask, beginnings, classes in self._by_length:  # what is found last is the longest
            cut = packed & mask
            at = np.minimum(np.searchsorted(beginnings, cut), len(beginnings) - 1)
            numbers = np.where(beginnings[at] == cut, classes[at], numbers)
        numbers[packed == 0] = UNANSWERED
        for long in np.flatnonzero(_lengths(codes) > _PACKED) if self._are_long else ():
            numbers[long] = self._classes.number(codes[int(long)].as_py())
        return numbers


def _by_length(of: Mapping[Any, int]) -> Iterator[_OfLength]:
    """Yield beginnings of postal codes with their classes, those of a length together, the shortest first."""
    # No answer that is plain begins with anything else.
    texts = [text for text in of if text.isascii() and text.isalnum() and len(text) <= _PACKED]
    texts.sort(key=lambda text: (len(text), text))
    for length, group in groupby(texts, key=len):
        same = list(group)
        packed = np.frombuffer("".join(text.ljust(_PACKED, "\0") for text in same).encode(), dtype=">u8")
        mask = _LAST << np.uint64(8 * (_PACKED - length))
        yield _OfLength(mask, packed.astype(np.uint64), np.array([of[text] for text in same], dtype=np.intp))


def _plain(words: Any) -> Any | None:
    """Return postal codes as they are compared, where that is easily had."""
    if words.null_count:
        return None
    codes = words
    if not _are_alnum(words).all():
        codes = pc.replace_substring(pc.replace_substring(words, " ", ""), "-", "")
        if not (_are_alnum(codes) | (_lengths(codes) == 0)).all():
            return None
    return pc.ascii_lower(codes)


def _packed(codes: Any) -> NDArray[np.uint64]:
    """Return texts of letters and digits, cut to as many as fit, as numbers that are in the order of texts."""
    same = pc.ascii_rpad(pc.utf8_slice_codeunits(codes, 0, _PACKED), _PACKED, "\0")
    return np.frombuffer(same.buffers()[2] or b"", dtype=">u8", count=len(codes)).astype(np.uint64)


def _are_alnum(texts: Any) -> NDArray[np.bool_]:
    return booleans(pc.ascii_is_alnum(texts))


def _lengths(texts: Any) -> NDArray[np.integer[Any]]:
    return integers(pc.binary_length(texts))[0]
