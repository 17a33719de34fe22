"""Read requests of many members: one line of JSON each, as `match --requests` writes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from sampling_async import InvalidRequestError, InviteRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

BLANK: Final = b"\xef\xbb\xbf \t\r\n"
"""Bytes that may come before the first line: blanks, and the byte order mark that Windows puts before UTF-8."""

_EXAMPLE: Final = '{"MemberCode": "m1", "QuotaIDs": [1100042, 1100043]}'
_LONGEST: Final = 2**24
"""The largest number of bytes in a line: about two million quota IDs."""

_SHOWN: Final = 5
_BLOCK: Final = 2**20


class RequestLines:
    """Parses requests from blocks of bytes.

    Args:
        name: The name of the input in errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._line = 0
        # The parts of a line whose end has not been read. A list: joined once, however many blocks it takes.
        self._begun: list[bytes] = []
        self._size = 0

    def feed(self, block: bytes) -> Iterator[InviteRequest]:
        """Yield the requests whose lines end in this block."""
        whole, newline, rest = block.rpartition(b"\n")
        if newline:
            lines = b"".join([*self._begun, whole]).split(b"\n")
            self._begun, self._size = [], 0
            yield from self._read(lines)
        self._begun.append(rest)
        self._size += len(rest)
        if self._size > _LONGEST:
            raise InvalidRequestError(
                f"{self._name}, line {self._line + 1}: a line of more than {_LONGEST:,} bytes; a request is"
                f" {_EXAMPLE}"
            )

    def end(self) -> Iterator[InviteRequest]:
        """Yield the request of a last line that does not end in a newline."""
        return self._read([b"".join(self._begun)])

    def _read(self, lines: Sequence[bytes]) -> Iterator[InviteRequest]:
        for line in lines:
            self._line += 1
            if line.strip(BLANK):
                try:
                    yield _request(line.strip(BLANK))
                except InvalidRequestError as exc:
                    raise InvalidRequestError(f"{self._name}, line {self._line}: {exc}") from None


def number_of_ids(path: Path) -> int | None:
    """Return the number of quota IDs in a file of requests; None if it is a pipe, or a line is no request."""
    if not path.is_file():
        return None
    lines, total = RequestLines(path.name), 0
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                total += sum(len(request.quota_ids) for request in lines.feed(block))
        return total + sum(len(request.quota_ids) for request in lines.end())
    except (InvalidRequestError, OSError):
        return None  # the run itself will say what is wrong


def _hint(line: bytes) -> str:
    """Return a hint at the format of a line that is not JSON."""
    if line.startswith(b"PAR1"):
        return "; this is Parquet: `match --requests 20 --output FILE.jsonl` writes lines"
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "; this is UTF-16, as PowerShell writes it, but must be UTF-8"
    return ""


def _request(line: bytes) -> InviteRequest:
    try:
        # Decoded first, because json.loads() guesses the encoding of bytes; only UTF-8 is accepted.
        fields: Any = json.loads(line.decode())
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"not JSON; a request is {_EXAMPLE}{_hint(line)}") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"a request must be a JSON object, such as {_EXAMPLE}")
    member_code = fields.get("MemberCode", fields.get("member_code"))
    quota_ids = fields.get("QuotaIDs", fields.get("quota_ids"))
    if member_code is None or not isinstance(quota_ids, list):
        keys = ", ".join(json.dumps(str(key)[:40]) for key in list(fields)[:_SHOWN]) or "nothing"
        raise InvalidRequestError(
            'a request must have "MemberCode" and a list "QuotaIDs", as `sampling-async match --requests 20` '
            f"writes them; this line has {keys}"
        )
    return InviteRequest(member_code, quota_ids)
