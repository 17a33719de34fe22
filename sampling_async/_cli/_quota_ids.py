"""Read the quota IDs of one member: words, or the member's lines from `match --requests`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from sampling_async import InvalidRequestError
from sampling_async._cli._requests import BLANK, RequestLines
from sampling_async._protocol.requests import quota_id_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_LONGEST_ID: Final = 19
"""Digits of the largest 64-bit number. A longer word is not a quota ID, and need not be kept whole."""

_SEPARATORS: Final = b" \t\n\r\v\f,"
# From the same bytes: if one of the two knew fewer, an ID could be cut between blocks, and become two.
_WORD: Final = re.compile(rb"[^%b]+" % _SEPARATORS)


def parsed(texts: list[str]) -> list[int]:
    """Return the quota IDs of arguments; one argument may hold several.

    Raises:
        InvalidRequestError: A word is not a quota ID.
    """
    words = (match[0] for text in texts for match in _WORD.finditer(text.encode(errors="replace")))
    return [_quota_id(word) for word in words]


class QuotaIDs:
    """Parses quota IDs from blocks of bytes: words, or the lines of one member among requests.

    Words are separated by blanks, commas or newlines. Input that begins with `{` is read as lines of requests.

    Args:
        name: The name of the input in errors.
        member_code: The member whose lines are read.

    Attributes:
        of_others: How many requests of other members were skipped.
    """

    def __init__(self, name: str, member_code: str) -> None:
        self._name = name
        self._member_code = member_code
        self._begun = b""
        self._words: _Words | None = None
        self._lines: RequestLines | None = None
        self.of_others = 0

    def feed(self, block: bytes) -> Iterator[int]:
        """Yield the IDs that are complete after this block."""
        # The first byte that is not blank decides between words and lines. Until it comes, blanks are kept.
        if self._words is None and self._lines is None:
            block = self._begun + block
            head = block.lstrip(BLANK)
            if not head:
                self._begun = block
                return
            if head.startswith(b"{"):
                self._lines = RequestLines(self._name)
            else:
                self._words, block = _Words(self._name), block.removeprefix(b"\xef\xbb\xbf")
        if self._words is not None:
            yield from self._words.feed(block)
        elif self._lines is not None:
            for request in self._lines.feed(block):
                yield from self._of_member(request.member_code, request.quota_ids)

    def end(self) -> Iterator[int]:
        """Yield the last ID, or the IDs of the last line."""
        if self._words is not None:
            yield from self._words.end()
        elif self._lines is not None:
            for request in self._lines.end():
                yield from self._of_member(request.member_code, request.quota_ids)

    def _of_member(self, member_code: str, quota_ids: Iterable[int]) -> Iterator[int]:
        if member_code == self._member_code:
            yield from quota_ids
        else:
            self.of_others += 1


class _Words:
    """Parses quota IDs that are words."""

    def __init__(self, name: str) -> None:
        self._name = name
        # The end of the last block, which may be the first part of an ID.
        self._cut = b""
        self._line = 1

    def feed(self, block: bytes) -> Iterator[int]:
        whole, self._cut = _split_whole(self._cut + block)
        return self._ids_of(whole)

    def end(self) -> Iterator[int]:
        return self._ids_of(self._cut)

    def _ids_of(self, text: bytes) -> Iterator[int]:
        for match in _WORD.finditer(text):
            try:
                yield _quota_id(match[0])
            except InvalidRequestError as exc:
                line = self._line + text.count(b"\n", 0, match.start())
                raise InvalidRequestError(f"{self._name}, line {line}: {exc}") from None
        self._line += text.count(b"\n")


def _split_whole(text: bytes) -> tuple[bytes, bytes]:
    """Split after the last separator, because an ID may be divided between two blocks."""
    # rfind() returns -1 if there is no separator, so `end` is 0 then.
    end = 1 + max(map(text.rfind, _SEPARATORS))
    if end == 0 and len(text) > _LONGEST_ID:
        return text, b""
    return text[:end], text[end:]


def _quota_id(word: bytes) -> int:
    # isdigit() of bytes knows ASCII only; int() would take 1_000 and +1 as well.
    if not word.isdigit() or len(word) > _LONGEST_ID:
        shown = word[: _LONGEST_ID + 1].decode("ascii", "replace")
        raise InvalidRequestError(
            f"{shown!r} is not a quota ID: `sampling-async quotas` shows them, as whole numbers"
        )
    return quota_id_of(int(word))
