"""Read quota IDs as a stream: from arguments, a file or stdin, separated by blanks, commas or newlines.

A file may be a FIFO and stdin may be another program that takes its time, so both are read in a thread while
requests are in flight. Memory holds one block of text, however long the input.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from sampling_async import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator
    from pathlib import Path

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


async def quota_ids_of(opened: Callable[[], ByteSource]) -> AsyncGenerator[int, None]:
    """Open a source when the first quota ID is wanted, yield its IDs as they come, and close it.

    Raises:
        InvalidRequestError: Something in it is no quota ID; those before it have been yielded.
        OSError: It cannot be read.
    """
    rest, source = b"", opened()
    try:
        while block := await _read(source):
            whole, rest = _split_whole(rest + block)
            for quota_id in _ids_of(whole):
                yield quota_id
        for quota_id in _ids_of(rest):
            yield quota_id
    finally:
        source.close()


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


async def _read(source: ByteSource) -> bytes | None:
    """Read a block in a daemon thread: one that waits for ever must not keep the program from ending."""
    loop = asyncio.get_running_loop()
    block: asyncio.Future[bytes | None] = loop.create_future()

    def settle(value: bytes | None, error: OSError | None) -> None:
        if block.done():
            return
        if error is None:
            block.set_result(value)
        else:
            block.set_exception(error)

    def read() -> None:
        value, error = None, None
        try:
            value = source.read(_BLOCK_BYTES)
        except OSError as exc:
            error = exc
        except ValueError:  # closed meanwhile
            return
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=read, name="quota-ids", daemon=True).start()
    return await block
