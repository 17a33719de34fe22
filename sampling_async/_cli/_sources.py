"""Read quota IDs and requests from words, files or stdin, in a thread, while requests are in flight.

A thread is needed because a FIFO, or a program that writes to stdin, may let the reader wait. Memory holds one
block of text and one line, however long the input is.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Generic, Self, TypeVar

from attrs import define, field

from sampling_async import InvalidRequestError, InviteRequest
from sampling_async._cli._files import each_once
from sampling_async._pacing.threads import start
from sampling_async._protocol.requests import quota_id_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from sampling_async._pacing.threads import Run

T = TypeVar("T")

# Digits of the largest 64-bit number. A longer word is not a quota ID, and need not be kept whole.
_LONGEST_ID: Final = 19
_SEPARATORS: Final = b" \t\n\r\v\f,"
# From the same bytes: if one of the two knew fewer, an ID could be cut between blocks, and become two.
_WORD: Final = re.compile(rb"[^%b]+" % _SEPARATORS)


def parsed(texts: list[str]) -> list[int]:
    """Return the quota IDs of arguments; one argument may hold several."""
    return [_quota_id(word) for text in texts for word in _WORD.findall(text.encode(errors="replace"))]


@define
class QuotaIDs:
    """Parses quota IDs from blocks of bytes: words, or the lines of one member among requests, after a `{`."""

    _name: str
    _member_code: str
    of_others: int = 0  # how many requests of other members were skipped
    _begun: bytes = b""
    _parser: _Words | Lines[InviteRequest] | None = None

    def feed(self, block: bytes) -> Iterator[int]:
        # The first byte that is not blank decides between words and lines. Until it comes, blanks are kept.
        if self._parser is None:
            block = self._begun + block
            head = block.lstrip(BLANK)
            if not head:
                self._begun = block
                return
            if head.startswith(b"{"):
                self._parser = Lines(self._name, requests_in)
            else:
                self._parser, block = _Words(self._name), block.removeprefix(b"\xef\xbb\xbf")
        for item in self._parser.feed(block):
            if isinstance(item, int):
                yield item
            elif item.member_code == self._member_code:
                yield from item.quota_ids
            else:
                self.of_others += 1


@define
class _Words:
    """Quota IDs as they come. A program that writes them may end no line for long."""

    _name: str
    _cut: bytes = b""  # the end of the last block, which may be the first part of an ID
    _line: int = 1

    def feed(self, block: bytes) -> Iterator[int]:
        text = self._cut + block
        # Split after the last separator, because an ID may be divided between two blocks.
        end = 1 + max(map(text.rfind, _SEPARATORS))  # 0 without a separator
        if not block or (not end and len(text) > _LONGEST_ID):
            end = len(text)
        text, self._cut = text[:end], text[end:]
        for match in _WORD.finditer(text):
            try:
                yield _quota_id(match[0])
            except InvalidRequestError as exc:
                line = self._line + text.count(b"\n", 0, match.start())
                raise InvalidRequestError(f"{self._name}, line {line}: {exc}") from None
        self._line += text.count(b"\n")


def _quota_id(word: bytes) -> int:
    # isdigit() of bytes knows ASCII only; int() would take 1_000 and +1 as well.
    if not word.isdigit() or len(word) > _LONGEST_ID:
        shown = word[: _LONGEST_ID + 1].decode("ascii", "replace")
        raise InvalidRequestError(
            f"{shown!r} is not a quota ID: `sampling-async quotas` shows them, as whole numbers"
        )
    return quota_id_of(int(word))


def one_id(word: str) -> int:
    """Return the quota ID of an argument that holds one."""
    return _quota_id(word.encode(errors="replace"))


# Bytes that may come before the first line: blanks, and the byte order mark that Windows puts before UTF-8.
BLANK: Final = b"\xef\xbb\xbf \t\r\n"
_EXAMPLE: Final = '{"MemberCode": "m1", "QuotaIDs": [1100042, 1100043]}'
_LONGEST: Final = 2**24  # the largest number of bytes in a line: about two million quota IDs
_SHOWN: Final = 5
_BLOCK: Final = 2**20


@define
class Lines(Generic[T]):
    """Cuts blocks of bytes into lines, and parses each that is not blank. An error names the line."""

    _name: str
    _parse: Callable[[bytes], Iterable[T]]  # of a line without blanks around it
    _line: int = 0
    # The parts of a line whose end has not been read. A list: joined once, however many blocks it takes.
    _begun: list[bytes] = field(factory=list[bytes])
    _size: int = 0

    def feed(self, block: bytes) -> Iterator[T]:
        """Yield the items of the lines that end in this block, and at the end of the input the last one."""
        whole, newline, rest = block.rpartition(b"\n")
        if newline or not block:
            lines = b"".join([*self._begun, whole]).split(b"\n")
            self._begun, self._size = [], 0
            for line in lines:
                self._line += 1
                if text := line.strip(BLANK):
                    try:
                        yield from self._parse(text)
                    except InvalidRequestError as exc:
                        raise InvalidRequestError(f"{self._name}, line {self._line}: {exc}") from None
        self._begun.append(rest)
        self._size += len(rest)
        if self._size > _LONGEST:
            raise InvalidRequestError(
                f"{self._name}, line {self._line + 1}: a line of more than {_LONGEST:,} bytes; a request is"
                f" {_EXAMPLE}"
            )


def number_of_ids(path: Path) -> int | None:
    """Return the number of quota IDs in a file of requests; None if it is a pipe, or a line is no request."""
    if not path.is_file():
        return None
    lines, total, block = Lines(path.name, requests_in), 0, b"a first one"
    try:
        with path.open("rb") as file:
            while block:
                block = file.read(_BLOCK)
                total += sum(len(request.quota_ids) for request in lines.feed(block))
    except (InvalidRequestError, OSError):
        return None  # the run itself will say what is wrong
    return total


def _hint(line: bytes) -> str:
    if line.startswith(b"PAR1"):
        return "; this is Parquet: `match --requests 20 --output FILE.jsonl` writes lines"
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "; this is UTF-16, as PowerShell writes it, but must be UTF-8"
    return ""


def requests_in(line: bytes) -> list[InviteRequest]:
    """Parse a line that is a request."""
    try:
        # Decoded first, because json.loads() guesses the encoding of bytes; only UTF-8 is accepted.
        fields: Any = json.loads(line.decode(), object_pairs_hook=each_once)
    except InvalidRequestError:
        raise
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"not JSON; a request is {_EXAMPLE}{_hint(line)}") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"a request must be a JSON object, such as {_EXAMPLE}")
    member_code = _named(fields, "MemberCode", "member_code")
    quota_ids = _named(fields, "QuotaIDs", "quota_ids")
    if member_code is None or not isinstance(quota_ids, list):
        keys = ", ".join(json.dumps(str(key)[:40]) for key in list(fields)[:_SHOWN]) or "nothing"
        raise InvalidRequestError(
            'a request must have "MemberCode" and a list "QuotaIDs", as `sampling-async match --requests 20` '
            f"writes them; this line has {keys}"
        )
    return [InviteRequest(member_code, quota_ids)]


def _named(fields: dict[str, Any], name: str, other: str) -> Any:
    if name in fields and other in fields:
        raise InvalidRequestError(f'a request must have "{name}" or "{other}", not both')
    return fields.get(name, fields.get(other))


_BLOCK_BYTES: Final = 65_536


def stdin_is_terminal() -> bool:
    """Return whether stdin is a terminal, so that a person would have to type the input."""
    return sys.stdin.isatty()


def name_of(file: Path | None) -> str:
    return "stdin" if file is None or str(file) == "-" else str(file)


def items_of(
    file: Path | None,
    parse: Callable[[bytes], Iterator[T]],
    *,
    is_dash: bool,
    what: str = "quota IDs",
) -> Items[T]:
    """Return the items of a file or of stdin, which is not opened yet."""
    if file is not None and str(file) != "-":
        if file.is_dir():
            raise InvalidRequestError(f"{file} is a folder, not a file")
        # Not is_file(), which is false for a FIFO.
        if not file.exists():
            raise InvalidRequestError(f"{file}: the file does not exist")
        return Items(lambda: file.open("rb", buffering=0), parse)
    if file is None and not is_dash and stdin_is_terminal():
        ways = "as arguments, with --file," if what == "quota IDs" else "as a file,"
        raise InvalidRequestError(f"give {what} {ways} or through a pipe")
    # Unbuffered: a thread waiting in a buffered read would keep the interpreter from ending.
    return Items(lambda: getattr(sys.stdin.buffer, "raw", sys.stdin.buffer), parse)


@define(eq=False)
class Items(Generic[T]):
    """An async iterator over the items of a source. It opens the source when the first item is requested.

    A cancellation loses nothing: the next request for an item goes on at the same place. If the source holds
    something else, that is raised after the items before it.
    """

    _opened: Callable[[], BinaryIO]  # runs in a thread, because opening a FIFO waits for a writer
    # Parses blocks of bytes, an empty one at the end. The items of a block are read before the next is parsed.
    _parse: Callable[[bytes], Iterator[T]]
    is_over: bool = False  # whether all items were returned
    is_file: bool = False  # whether it is a regular file, which has an end; known after the first read
    _source: BinaryIO | None = None
    _reading: Run[bytes | None] | None = None
    _items: Iterator[T] = field(factory=lambda: iter(()))
    _is_read: bool = False  # whether the source was read to its end; items of the last block may still be left

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
            # The read runs in a daemon thread, so that a read that never returns does not keep the program from
            # ending. A read that a cancellation left behind is taken up again here, so no block is lost.
            self._reading = self._reading or start(self._block)
            await self._reading.over.wait()
            reading, self._reading = self._reading, None
            block = reading.result() or b""
            self._is_read = not block
            self._items = self._parse(block)

    def _block(self) -> bytes | None:
        if self._source is None:
            self._source = self._opened()
            with suppress(OSError, ValueError):  # not a file of the operating system, as in a test
                self.is_file = stat.S_ISREG(os.fstat(self._source.fileno()).st_mode)
        return self._source.read(_BLOCK_BYTES)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
