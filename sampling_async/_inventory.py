"""An inventory, read as it comes: each survey is cut out and decoded as soon as its last byte is there.

So a body of any size is neither kept nor decoded in one piece, which would hold up the event loop for seconds.

Where a survey ends is guessed, fast, from how the one before it ended and by counting braces. A brace within a
text makes a guess wrong, but never an answer: what was cut out must be one whole object of JSON, and where it
is not, its end is looked for token by token.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from sampling_async._codec import new_shared, parse, read, read_many
from sampling_async._errors import DecodeError
from sampling_async._models import Quotas, Survey

if TYPE_CHECKING:
    from weakref import WeakValueDictionary

# Plain values may come before the surveys, in any order. What else comes there makes it a body read whole.
_HEAD: Final = re.compile(
    rb'[ \t\r\n]*+\{(?:[ \t\r\n]*+"[^"\\]*+"[ \t\r\n]*+:[ \t\r\n]*+(?:"[^"\\]*+"|[-+.\w]++)[ \t\r\n]*+,)*'
    rb'[ \t\r\n]*+"Surveys"[ \t\r\n]*+:[ \t\r\n]*+\['
)
_HEAD_BYTES: Final = 4096
_NEXT: Final = re.compile(rb"[ \t\r\n]*+(,?)[ \t\r\n]*+([^ \t\r\n,])")
_END: Final = re.compile(rb"\}(?=\s{0,99}[,\]])")
_ALIKE: Final = re.compile(rb'\}\s{0,99},\s{0,99}\{\s{0,99}"[^"\\]{1,99}"')
_TOKEN: Final = re.compile(rb'[^"{}]*+(?:"(?:[^"\\]|\\.)*+"|[{}])', re.DOTALL)
_GUESSED_BYTES: Final = 2**18


class Inventory:
    """The answer of Get Quotas, fed piece by piece.

    Args:
        known: Surveys of answers before; those that are as they were are not read again. The others are added.
    """

    def __init__(self, known: WeakValueDictionary[bytes, Survey] | None = None) -> None:
        self._buffer = bytearray()
        self._head: bytes | None = None
        self._count = 0
        self._survey: _Extent | None = None  # the one that is begun and not whole
        self._alike = b""  # how a survey ended and the next one began, the last time
        self._tried = 0  # up to where surveys have been read together, or not
        self._shared = new_shared(known)
        self._is_exact = False
        self._is_list_over = False

    def feed(self, part: bytes) -> list[Survey]:
        """Take a piece and return the surveys that are whole now.

        Raises:
            DecodeError: A survey is not what the contract says.
        """
        self._buffer += part
        if self._head is None and len(self._buffer) - len(part) <= _HEAD_BYTES:
            head = _HEAD.match(self._buffer)
            if head is not None:
                self._head = head[0]
                del self._buffer[: len(self._head)]
        return [] if self._head is None else self._whole_surveys()

    def end(self) -> list[Survey]:
        """Return the surveys that only the end of the body shows to be whole.

        Raises:
            DecodeError: As for `feed`, or the body is cut.
        """
        if self._head is None:
            return []
        self._is_exact = True  # there is nothing to wait for any more
        if self._survey is not None:
            self._survey.be_exact()
        surveys = self._whole_surveys()
        if not self._is_list_over:
            raise DecodeError(self._path, "expected a survey or the end of the list, found the end of the body")
        return surveys

    @property
    def unread(self) -> bytes | None:
        """After the end: the body, where it has no surveys and is to be read whole; else None."""
        if self._head is None:
            return bytes(self._buffer)
        return self._head + b"]" + self._buffer if self._count == 0 else None

    def frame(self) -> Quotas:
        """Return what stands around the surveys, after the end.

        Raises:
            DecodeError: It is not what the contract says.
        """
        assert self._head is not None
        body = self._head + b"]" + self._buffer
        frame = read(Quotas, body)
        fields: list[tuple[str, object]] = parse(body, pairs=True)
        if [name for name, _ in fields].count("Surveys") > 1:
            raise DecodeError("$.Surveys", "expected one list of surveys, found several")
        return frame

    @property
    def _path(self) -> str:
        return f"$.Surveys[{self._count}]"

    def _whole_surveys(self) -> list[Survey]:
        surveys: list[Survey] = []
        start = 0  # of what has not been read
        while not self._is_list_over:
            if self._survey is None:
                following = _NEXT.match(self._buffer, start)
                if following is None:
                    break
                start = following.end(2) - self._opens(following)
                continue
            end = self._cut_many(self._survey, surveys) or self._cut(self._survey, surveys)
            if end is None:
                break
            start, self._survey = end, None
        del self._buffer[:start]
        self._tried -= start
        if self._survey is not None:
            self._survey.shift(start)
        return surveys

    def _opens(self, following: re.Match[bytes]) -> bool:
        """Look at what follows a survey, or the beginning of the list; return whether it is another one."""
        comma, first = following.groups()
        if first == b"]" and not comma:
            self._is_list_over = True
            return False
        if first != b"{" or bool(comma) is (self._count == 0):
            raise DecodeError(self._path, "expected surveys, which are objects, with a comma between them")
        self._survey = _Extent(self._buffer, following.start(2), self._alike, is_exact=self._is_exact)
        return True

    def _cut_many(self, extent: _Extent, surveys: list[Survey]) -> int | None:
        """Read all surveys up to the last end there seems to be; None if that takes a closer look."""
        if not extent.alike or extent.is_exact:
            return None
        buffer, start = self._buffer, extent.start
        last = buffer.rfind(extent.alike, max(start, self._tried)) + 1
        if last == 0:
            return None
        self._tried = last
        if buffer.count(b"{", start, last) != buffer.count(b"}", start, last):
            return None
        with memoryview(buffer) as view:
            many = read_many(Survey, b"[%b]" % bytes(view[start:last]), self._shared)
        if many is None:
            return None
        surveys.extend(many)
        self._count += len(many)
        return last

    def _cut(self, extent: _Extent, surveys: list[Survey]) -> int | None:
        """Read a survey and return where it ends; None if its end has not come yet."""
        while (end := extent.find_end()) is not None:
            with memoryview(self._buffer) as view:
                piece = bytes(view[extent.start : end])
            try:
                surveys.append(read(Survey, piece, self._path, self._shared))
            except DecodeError:
                if extent.is_exact or _is_json(piece):
                    raise
                extent.be_exact()
                continue
            self._count += 1
            alike = _ALIKE.match(self._buffer, end - 1)
            if alike is not None:
                self._alike = alike[0]
            return end
        return None


class _Extent:
    """From where to where a survey reaches in a buffer that grows.

    Attributes:
        start: Its first byte.
        alike: What to look for as its end and the beginning of the next one; nothing, for any end.
        is_exact: Whether its end is no guess.
    """

    __slots__ = ("_buffer", "_depth", "_scanned", "alike", "is_exact", "start")

    def __init__(self, buffer: bytearray, start: int, alike: bytes, *, is_exact: bool) -> None:
        self.start = start
        self.alike = alike
        self.is_exact = is_exact
        self._buffer = buffer
        self._depth = 0
        self._scanned = start

    def shift(self, by: int) -> None:
        """Follow the buffer, of which so much was removed before it."""
        self.start -= by
        self._scanned -= by

    def be_exact(self) -> None:
        """Stop guessing."""
        self.is_exact, self._depth, self._scanned = True, 0, self.start

    def find_end(self) -> int | None:
        """Return where it ends, or None if that has not come yet."""
        while not self.is_exact:
            end = self._candidate()
            if end >= 0:
                self._depth += self._buffer.count(b"{", self._scanned, end)
                self._depth -= self._buffer.count(b"}", self._scanned, end)
                self._scanned = end
                if self._depth == 0:
                    return end
            elif len(self._buffer) - self.start < _GUESSED_BYTES:
                return None
            elif self.alike:
                self.alike = b""
            else:
                self.be_exact()
        return self._exact_end()

    def _candidate(self) -> int:
        if self.alike:
            return self._buffer.find(self.alike, self._scanned) + 1 or -1
        match = _END.search(self._buffer, self._scanned)
        return match.end() if match else -1

    def _exact_end(self) -> int | None:
        while token := _TOKEN.match(self._buffer, self._scanned):
            self._scanned = token.end()
            last = self._buffer[self._scanned - 1]
            self._depth += (last == ord("{")) - (last == ord("}"))
            if self._depth == 0:
                return self._scanned
        return None


def _is_json(piece: bytes) -> bool:
    try:
        parse(piece)
    except DecodeError:
        return False
    return True
