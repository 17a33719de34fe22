"""Read quota IDs as a stream: from arguments, a file or stdin, separated by blanks, commas or newlines.

A file may be a FIFO and stdin may be another program that takes its time, so both are read in a thread while
requests are in flight. Memory holds one block of text, however long the input.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from sampling_async import InvalidRequestError
from sampling_async._threads import begun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sampling_async._threads import Run

_BLOCK_BYTES: Final = 65_536
_LONGEST_ID: Final = 19
"""Digits of the largest 64-bit number; what is longer is not a quota ID, and need not be kept whole."""


class ByteSource(Protocol):
    """What quota IDs are read from: an unbuffered binary file."""

    def read(self, size: int, /) -> bytes | None:
        """Return at most `size` bytes, and none at the end; waits for the first."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...

    def fileno(self) -> int:
        """Return its descriptor."""
        ...


def stdin_is_terminal() -> bool:
    """Return whether a person would have to type the quota IDs."""
    return sys.stdin.isatty()


def stdin_source() -> ByteSource:
    """Return stdin, unbuffered: a thread left waiting in a buffered read would stop the interpreter's end."""
    buffer: Any = sys.stdin.buffer
    source: ByteSource = getattr(buffer, "raw", buffer)
    return source


def file_source(path: Path) -> ByteSource:
    """Open a file of quota IDs, or a FIFO.

    Raises:
        OSError: It cannot be opened.
    """
    return path.open("rb", buffering=0)


def parsed(texts: list[str]) -> list[int]:
    """Return the quota IDs of arguments; one argument may hold several.

    Raises:
        InvalidRequestError: One of them is none.
    """
    return [quota_id for text in texts for quota_id in _ids_of(text.encode(errors="replace"))]


class QuotaIDs:
    """The quota IDs of a source, as they come: an async iterator, opened when the first is wanted.

    Cancelled at any moment, it has lost nothing: read on, it goes on where it was.

    Args:
        opened: Opens the source, in a thread: a FIFO waits for who writes into it.

    Attributes:
        is_over: Whether all of it was read.
        is_file: Whether it is a file, which has an end; known when something was read.

    Raises:
        InvalidRequestError: While iterating: something is no quota ID; those before it have been yielded.
        OSError: While iterating: it cannot be opened or read.
    """

    def __init__(self, opened: Callable[[], ByteSource]) -> None:
        self._opened = opened
        self._source: ByteSource | None = None
        self._reading: Run[bytes | None] | None = None
        self._ids: Iterator[int] = iter(())
        self._cut = b""  # the end of what was read, which may be a part of an ID
        self.is_over = False
        self.is_file = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        while True:
            try:
                for quota_id in self._ids:
                    return quota_id
            except InvalidRequestError:
                self.is_over = True
                raise
            if self.is_over:
                raise StopAsyncIteration
            await self._read_on()

    async def _read_on(self) -> None:
        # A daemon thread: one that waits for ever must not keep the program from ending.
        self._reading = self._reading or begun(self._block)
        await self._reading.over.wait()
        reading, self._reading = self._reading, None
        block = reading.result()
        if block:
            whole, self._cut = _split_whole(self._cut + block)
            self._ids = _ids_of(whole)
        else:
            self.is_over = True
            self._ids = _ids_of(self._cut)

    def _block(self) -> bytes | None:
        if self._source is None:
            self._source = self._opened()
            self.is_file = _is_file(self._source)
        return self._source.read(_BLOCK_BYTES)

    def close(self) -> None:
        """Let go of the source."""
        if self._source is not None:
            self._source.close()


def _is_file(source: ByteSource) -> bool:
    try:
        return stat.S_ISREG(os.fstat(source.fileno()).st_mode)
    except (OSError, ValueError):  # it is none of the system, as under a test
        return False


def _split_whole(text: bytes) -> tuple[bytes, bytes]:
    """Cut after the last separator: an ID may be split between two blocks."""
    end = 1 + max(text.rfind(separator) for separator in (b"\n", b",", b" ", b"\t", b"\r"))
    if end == 0 and len(text) > _LONGEST_ID:
        return text, b""
    return text[:end], text[end:]


def _ids_of(text: bytes) -> Iterator[int]:
    for word in text.replace(b",", b" ").split():
        # isdigit() of bytes knows ASCII only; int() would take 1_000 and +1 as well.
        if not word.isdigit() or len(word) > _LONGEST_ID:
            shown = word[: _LONGEST_ID + 1].decode("ascii", "replace")
            raise InvalidRequestError(f"not a quota ID: {shown!r}; whole numbers, from `sampling-async quotas`")
        yield int(word)
