"""Lookup of postal codes by their prefixes, for a whole column at once.

The first eight letters of a code are packed into one number, the first letter in the highest byte. A mask then
cuts a code to a prefix: with the mask 0xFFFF000000000000, the code "1001" becomes the number of "10".
"""

from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from sampling_async.matching._conditions import plain_postal
from sampling_async.matching.panel._arrow import DICTIONARY, booleans, integers, is_text, pa, pc
from sampling_async.matching.panel._rows import OTHER, UNANSWERED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from sampling_async.matching.panel._rows import Classes

_LOG: Final = logging.getLogger("sampling_async.matching")
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


class Beginnings:
    def __init__(self, classes: Classes) -> None:
        self._classes = classes
        self._are_long = max(map(len, map(str, classes.of)), default=0) > _PACKED
        self._by_length = list(_by_length(classes.of))

    def numbers(self, words: Any) -> NDArray[np.intp]:
        codes, others = _plain(pc.fill_null(words, "") if words.null_count else words)
        numbers = np.full(len(codes), OTHER, dtype=np.intp)
        packed = _packed(codes)
        # The shortest prefixes come first, so that the class of the longest prefix replaces the others.
        for mask, table in self._by_length:
            table.replace(packed & mask, numbers)
        numbers[packed == 0] = UNANSWERED
        # Eight letters do not decide about codes and prefixes that are longer: look these up one by one.
        for long in np.flatnonzero(_lengths(codes) > _PACKED) if self._are_long else ():
            numbers[long] = self._classes.number(codes[int(long)].as_py().lower())
        if others is not None and len(others.places):
            of_word = np.array([self._classes.number(word or None) for word in others.words])
            numbers[others.places] = of_word[others.which]
        return numbers


def _by_length(of: Mapping[Any, int]) -> Iterator[tuple[np.uint64, _Table]]:
    """Yield for each length the bits of so many letters and the class of each prefix, the shortest first."""
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
        yield _LAST << np.uint64(8 * (_PACKED - length)), _Table(numbers, classes)


class _Others(NamedTuple):
    words: list[str]  # the distinct codes, as they count
    places: NDArray[np.intp]  # the places of the column that hold one
    which: NDArray[np.intp]  # for each of these places, which word it is


def _plain(words: Any) -> tuple[Any, _Others | None]:
    """Return postal codes without nulls as ASCII letters and digits; what is something else becomes empty."""
    if _are_alnum(words).all():
        return words, None
    codes = pc.replace_substring(pc.replace_substring(words, " ", ""), "-", "")
    odd = _are_odd(codes)
    if odd.any():
        # The forms of spreadsheets: ="01001" and '01001.
        codes = pc.ascii_trim(codes, "=\"'")
        odd = _are_odd(codes)
    if not odd.any():
        return codes, None
    # Each distinct text of this kind is parsed once: a whole column may be written so.
    mask, places = pa.array(odd), np.flatnonzero(odd)
    found = codes.filter(mask).dictionary_encode()
    plain = [plain_postal(word) for word in found.dictionary.to_pylist()]
    is_usual = np.array([not code or (code.isascii() and code.isalnum()) for code in plain])
    usual = pa.array([code if each else "" for code, each in zip(plain, is_usual, strict=True)], codes.type)
    codes = pc.replace_with_mask(codes, mask, usual.take(found.indices))
    which = integers(found.indices)[0].astype(np.intp)
    is_other = ~is_usual[which]
    return codes, _Others(plain, places[is_other], which[is_other])


def _packed(codes: Any) -> NDArray[np.uint64]:
    """Return the first eight letters and digits of each text, in lower case, packed into a number."""
    # Padded to eight bytes each, the texts of the column follow each other in its buffer, and can be read as
    # numbers without a loop.
    padded = pc.ascii_rpad(pc.utf8_slice_codeunits(codes, 0, _PACKED), _PACKED, "\0")
    # Only now: of texts that do not begin at the start of their buffer, such as slices that went through
    # pandas, pyarrow's `ascii_lower` takes other bytes (as of version 26).
    same = pc.ascii_lower(padded)
    return np.frombuffer(same.buffers()[2] or b"", dtype=">u8", count=len(codes)).astype(np.uint64)


def _are_odd(codes: Any) -> NDArray[np.bool_]:
    odd: NDArray[np.bool_] = ~(_are_alnum(codes) | (_lengths(codes) == 0))
    return odd


def _are_alnum(texts: Any) -> NDArray[np.bool_]:
    return booleans(pc.ascii_is_alnum(texts))


def _lengths(texts: Any) -> NDArray[np.integer[Any]]:
    return integers(pc.binary_length(texts))[0]


_FINE: Final = np.zeros(256, dtype=np.bool_)
_FINE[[ord(each) for each in " -0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"]] = True
"""The bytes of codes that need no closer look."""


class OddCodes:
    """Counts the cells of a panel that no list of postal codes can contain, because of a character in them."""

    def __init__(self, question_ids: Iterable[int]) -> None:
        self._names = [str(id_) for id_ in question_ids]
        self._count = self._first = 0

    def look(self, batch: Any, first: int) -> None:
        for name in self._names:
            if name in batch.schema.names:
                self._look(batch.column(name), first)

    def _look(self, column: Any, first: int) -> None:
        words = column.dictionary if column.type.id == DICTIONARY else column
        if not is_text(words.type) or _are_fine(words):
            return
        words = column.dictionary_decode() if column.type.id == DICTIONARY else column
        with suppress(UnicodeDecodeError):  # the reader of the column refuses it
            others = _plain(pc.fill_null(words, ""))[1]
            if others is not None:
                is_odd = np.array([not word.isalnum() for word in others.words])
                odd = others.places[is_odd[others.which]]
                if len(odd) and not self._count:
                    self._first = first + int(odd[0])
                self._count += len(odd)

    def log(self) -> None:
        if self._count:
            _LOG.warning(
                "%s postal codes of the panel hold something else than letters and digits, so no list can "
                "contain them; the first is in row %d",
                f"{self._count:,}",
                self._first,
            )


def _are_fine(words: Any) -> bool:
    """Return whether all texts consist of ASCII letters, digits, blanks and hyphens."""
    offsets, data = words.buffers()[1:]
    if data is None:
        return True
    size = np.int64 if pa.types.is_large_string(words.type) else np.int32
    ends = np.frombuffer(offsets, size, len(words) + 1, words.offset * np.dtype(size).itemsize)
    return bool(_FINE[np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]].all())
