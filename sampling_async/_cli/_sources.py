"""Read a file or stdin in blocks, in a thread, while requests are in flight.

A thread is needed because a FIFO, or a program that writes to stdin, may let the reader wait. Memory holds one
block of text, however long the input is.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar

from sampling_async import InvalidRequestError
from sampling_async._pacing.threads import begun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sampling_async._pacing.threads import Run

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_BLOCK_BYTES: Final = 65_536
STDIN: Final = "stdin"


class ByteSource(Protocol):
    """An unbuffered binary file."""

    def read(self, size: int, /) -> bytes | None:
        """Wait for the first byte, and return at most `size` bytes; at the end none."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...

    def fileno(self) -> int:
        """Return its descriptor."""
        ...


class Parser(Protocol[T_co]):
    """Parses blocks of bytes into items. All items of a block are read before the next block is fed."""

    def feed(self, block: bytes, /) -> Iterator[T_co]:
        """Yield the items that are complete after this block.

        Raises:
            InvalidRequestError: The block holds something else. The text names the source and the line.
        """
        ...

    def end(self) -> Iterator[T_co]:
        """Yield the items that are known to be complete only at the end of the input."""
        ...


def stdin_is_terminal() -> bool:
    """Return whether stdin is a terminal, so that a person would have to type the input."""
    return sys.stdin.isatty()


def stdin_source() -> ByteSource:
    """Return stdin, unbuffered: a thread waiting in a buffered read would keep the interpreter from ending."""
    buffer: Any = sys.stdin.buffer
    source: ByteSource = getattr(buffer, "raw", buffer)
    return source


def file_source(path: Path) -> ByteSource:
    """Open a file, or a FIFO.

    Raises:
        OSError: The file cannot be opened.
    """
    return path.open("rb", buffering=0)


def check_file(path: Path) -> None:
    """Refuse a path that is not a file; a FIFO counts as a file.

    Raises:
        InvalidRequestError: The path does not exist, or is a folder.
    """
    if path.is_dir():
        raise InvalidRequestError(f"{path} is a folder, not a file")
    # Not is_file(), which is false for a FIFO.
    if not path.exists():
        raise InvalidRequestError(f"{path}: the file does not exist")


class Items(Generic[T]):
    """An async iterator over the items of a source. It opens the source when the first item is requested.

    A cancellation loses nothing: the next request for an item goes on at the same place.

    Args:
        opened: Opens the source. It runs in a thread, because opening a FIFO waits for a writer.
        parser: Parses the blocks of the source into items.

    Attributes:
        is_over: Whether all items were returned.
        is_file: Whether the source is a regular file, which has an end; known after the first read.

    Raises:
        InvalidRequestError: While iterating: the source holds something else. Items before it were returned.
        OSError: While iterating: the source cannot be opened or read.
    """

    def __init__(self, opened: Callable[[], ByteSource], parser: Parser[T]) -> None:
        self._opened = opened
        self._parser = parser
        self._source: ByteSource | None = None
        self._reading: Run[bytes | None] | None = None
        self._items: Iterator[T] = iter(())
        # Whether the source was read to its end. Items of the last block may still be left.
        self._is_read = False
        self.is_over = False
        self.is_file = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while True:
            # The loop returns the next item of the block, if there is one.
            try:
                for item in self._items:
                    return item
            except InvalidRequestError:
                self._is_read = self.is_over = True
                raise
            if self._is_read:
                self.is_over = True
                raise StopAsyncIteration
            await self._read_on()

    async def _read_on(self) -> None:
        # The read runs in a daemon thread, so that a read that never returns does not keep the program from
        # ending. A read that a cancellation left behind is taken up again here, so no block is lost.
        self._reading = self._reading or begun(self._block)
        await self._reading.over.wait()
        reading, self._reading = self._reading, None
        block = reading.result()
        self._is_read = not block
        self._items = self._parser.feed(block) if block else self._parser.end()

    def _block(self) -> bytes | None:
        if self._source is None:
            self._source = self._opened()
            self.is_file = _is_file(self._source)
        return self._source.read(_BLOCK_BYTES)

    def close(self) -> None:
        """Close the source."""
        if self._source is not None:
            self._source.close()


def _is_file(source: ByteSource) -> bool:
    try:
        return stat.S_ISREG(os.fstat(source.fileno()).st_mode)
    except (OSError, ValueError):
        # Not a file of the operating system, as in a test.
        return False
