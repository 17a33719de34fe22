"""The surveys of earlier inventories: one that has not changed is not read again, and is the same object."""

from __future__ import annotations

import re
import sys
from hashlib import sha1
from typing import TYPE_CHECKING, Final
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Callable

    from sampling_async._contract.records import Survey

_HEAD_BYTES: Final = 32  # of a survey; its ID is in them, so few surveys begin alike
_MOST_LENGTHS: Final = 2**16  # that are remembered
_FEWEST_REFERENCES: Final = 2**12  # up to which nobody looks for those whose survey is gone
_BETWEEN: Final = re.compile(rb"[ \t\r\n]*+,[ \t\r\n]*+(?=\{)")


def _sha1(text: bytes) -> int:
    return int.from_bytes(sha1(text, usedforsecurity=False).digest())


# Python's hash of bytes is a SipHash, seeded anew in each process, and takes less than half the time of SHA-1.
# With 64 bits, one of 10 ** 19 surveys that change is taken for what it was before.
_fingerprint: Final[Callable[[bytes], int]] = hash if sys.hash_info.width >= 64 else _sha1  # noqa: PLR2004


def _gone() -> None:
    """Return what a reference does whose survey is gone."""


class KnownSurveys:
    """The surveys that somebody still uses, by the fingerprints of their texts.

    The length of each survey's latest text is known too, by its first bytes. So in an inventory that has
    changed little, nobody looks for the ends of the surveys: either the text of that length is known, or the
    survey is read. A length that is wrong costs time only.
    """

    __slots__ = ("_lengths", "_most", "_surveys")

    def __init__(self) -> None:
        # A WeakValueDictionary would forget at once. But it is written in Python, and takes 2 % of a full read.
        self._surveys: dict[int, ref[Survey]] = {}
        self._most = _FEWEST_REFERENCES
        self._lengths: dict[bytes, int] = {}

    def __len__(self) -> int:
        return sum(survey() is not None for survey in self._surveys.values())

    def add(self, text: bytes, survey: Survey) -> None:
        """Add a survey that was read from a text."""
        if len(self._surveys) >= self._most:
            self._surveys = {key: known for key, known in self._surveys.items() if known() is not None}
            self._most = max(_FEWEST_REFERENCES, 2 * len(self._surveys))
        self._surveys[_fingerprint(text)] = ref(survey)
        self._remember(text)

    def find(self, text: bytes) -> Survey | None:
        """Return the survey with this text, if it is known."""
        survey = self._surveys.get(_fingerprint(text), _gone)()
        if survey is not None:
            self._remember(text)
        return survey

    def _remember(self, text: bytes) -> None:
        if len(self._lengths) >= _MOST_LENGTHS:
            self._lengths.clear()
        self._lengths[text[:_HEAD_BYTES]] = len(text)

    def awaits(self, buffer: bytearray, start: int) -> bool:
        """Return whether the survey that begins at `start` has a known length, and the buffer is shorter."""
        length = self._lengths.get(bytes(buffer[start : start + _HEAD_BYTES]))
        return length is not None and start + length > len(buffer)

    def leading(self, buffer: bytearray, start: int) -> tuple[list[Survey], int]:
        """Return the known surveys with which a list goes on, and where the last of them ends.

        Args:
            buffer: The bytes of a list of surveys.
            start: Where a survey begins.
        """
        surveys: list[Survey] = []
        length_of, survey_of = self._lengths.get, self._surveys.get
        at, end, size = start, start, len(buffer)
        with memoryview(buffer) as view:
            while length := length_of(view[at : at + _HEAD_BYTES].tobytes()):
                # At the end of the buffer may be less: a part of the survey, or a shorter text of it that is
                # known too, and ends here.
                if at + length > size:
                    break
                survey = survey_of(_fingerprint(view[at : at + length].tobytes()), _gone)()
                if survey is None:
                    break
                surveys.append(survey)
                end = at + length
                if buffer.startswith(b",{", end):
                    at = end + 1
                elif between := _BETWEEN.match(buffer, end):
                    at = between.end()
                else:
                    break
        return surveys, end
