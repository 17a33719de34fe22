"""Read an inventory from a file: the service's document, or surveys as lines of JSON."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any, Final

from sampling_async import DecodeError, InvalidRequestError, Quotas, Survey, from_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_DOCUMENT: Final = re.compile(rb'"Surveys"\s*:')
_HEAD_BYTES: Final = 4096
_WAY_OUT: Final = "write one with `sampling-async quotas --json > FILE`"


def read_inventory(file: Path) -> tuple[Survey, ...]:
    """Return the surveys of a file that `sampling-async quotas` wrote, with or without `--json`; - for stdin.

    Raises:
        InvalidRequestError: The file is missing or holds something else. The text names the file and the place.
    """
    is_stdin = str(file) == "-"
    name = "stdin" if is_stdin else str(file)
    try:
        body = sys.stdin.buffer.read() if is_stdin else file.read_bytes()
        # PowerShell writes UTF-16, which begins with one of these two byte order marks.
        body = body.decode(json.detect_encoding(body)).encode() if body[:1] in {b"\xff", b"\xfe"} else body
    except OSError as exc:
        raise InvalidRequestError(f"{name}: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{name} is neither UTF-8 nor UTF-16; {_WAY_OUT}") from None
    body = body.removeprefix(b"\xef\xbb\xbf")
    if not body.strip():
        raise InvalidRequestError(f"{name} is empty; {_WAY_OUT}")
    # A document has "Surveys" near its beginning. Otherwise the first line shows whether these are lines.
    if _DOCUMENT.search(body, 0, _HEAD_BYTES) is None and _begins_with_a_survey(body):
        return tuple(_surveys(name, body))
    try:
        return from_json(Quotas, body).surveys
    except DecodeError as exc:
        raise InvalidRequestError(f"{name} is not an inventory: {exc}; {_WAY_OUT}") from None


def _begins_with_a_survey(body: bytes) -> bool:
    try:
        first: Any = json.loads(body.lstrip().partition(b"\n")[0])
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "Surveys" not in first


def _surveys(name: str, body: bytes) -> Iterator[Survey]:
    for number, line in enumerate(body.split(b"\n"), start=1):
        if line.strip():
            try:
                yield from_json(Survey, line)
            except DecodeError as exc:
                raise InvalidRequestError(f"{name}, line {number} is not a survey: {exc}; {_WAY_OUT}") from None
