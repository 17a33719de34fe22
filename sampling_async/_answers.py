"""HTTP/1.1 answers, parsed by llhttp (through httptools): without I/O, and strict about where one ends.

llhttp refuses three things that RFC 9112 has a recipient accept: folded header lines, blanks after `chunked`,
and minor versions above 1. A head with one of these is gathered whole, written as it is meant, and read anew:
whether it is accepted is then decided by the same strict rules.
"""

from __future__ import annotations

import re
from typing import Final

import httpx
from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpResponseParser

_HEAD_BYTES: Final = 100 * 1024
_END: Final = b"\r\n\r\n"
_NEWER: Final = re.compile(rb"(?:\A|\r\n\r\n)HTTP/1\.[2-9]")
_FOLD: Final = re.compile(rb"\r\n(?=[ \t])")
_CODING: Final = re.compile(rb"^(transfer-encoding:[ \t]*chunked)[ \t]+(?=\r|\Z)", re.IGNORECASE | re.MULTILINE)
_MENDABLE: Final = (_NEWER, _FOLD, _CODING)
_INTERIM: Final = re.compile(rb"HTTP/1\.\d 1\d\d")
_SWITCHING: Final = 101
_FINAL: Final = 200


class _NotHttp(Exception):  # noqa: N818  heard by the parser only, which raises an error of its own for it
    """What the parser takes for a head is none that we go by."""


class Answer:
    """One answer, fed as it comes.

    Attributes:
        status: The status, once the head is there; 0 before.
        headers: The headers as they came.
        is_whole: Whether the last byte of the body is there.
    """

    __slots__ = (
        "_head",
        "_is_framed",
        "_is_gathered",
        "_is_mended",
        "_is_surplus",
        "_parser",
        "_parts",
        "_stays_open",
        "headers",
        "is_whole",
        "status",
    )

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_whole = False
        self._parser = HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._head = bytearray()  # what came of it before its last part
        self._is_gathered = False  # and not parsed, until the head is whole
        self._is_mended = False
        self._is_framed = False  # the head says where the body ends, else the end of the connection does
        self._is_surplus = False
        self._stays_open = False

    def feed(self, data: bytes) -> None:
        """Take what came; nothing means that the connection has ended.

        Raises:
            httpx.RemoteProtocolError: It is not HTTP/1.1, or ends too early.
        """
        if not data:
            self._end()
            return
        if not self._is_gathered:
            self._parse(data)
        if self._is_gathered:  # not in the handler of an error, which would become the context of another
            self._gather(data)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as exc:
            struck = exc.__context__
            if isinstance(exc, HttpParserCallbackError) and not isinstance(struck, _NotHttp | None):
                raise struck from None  # by a signal handler, while the parser called us
            self._is_gathered = self._may_be_mended(data)
            if self._is_gathered:
                return
            if not self.is_whole:  # else what is wrong comes after the answer
                raise _not_http() from None
            self._is_surplus = True
        if not self.status:
            self._keep(data)

    def _keep(self, data: bytes) -> None:
        self._head += data
        if len(self._head) > _HEAD_BYTES:
            raise _not_http()

    def _may_be_mended(self, data: bytes) -> bool:
        if self.status or self._is_mended:
            return False
        head = bytes(self._head) + data
        return any(pattern.search(head) for pattern in _MENDABLE)

    def _gather(self, data: bytes) -> None:
        """Keep what came until the head is whole, and read it anew as it is meant."""
        tail = self._head[-len(_END) :] + data
        if _END in tail and (mended := _mended(bytes(self._head) + data)):
            self._is_gathered, self._is_mended, self._head = False, True, bytearray()
            self.headers.clear()
            self._parser = HttpResponseParser(self)
            self.feed(mended)
        else:
            self._keep(data)

    def _end(self) -> None:
        if not self.is_whole and (not self.status or self._is_framed):
            raise httpx.RemoteProtocolError("the connection ended before the answer did")
        self.is_whole = True

    def take(self) -> bytes:
        """Return what there is of the body, once."""
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        return body

    @property
    def leaves_reusable(self) -> bool:
        """Whether another request may follow: it is whole, nothing came after it, and the server agrees."""
        return self._stays_open and self._is_framed and not self._is_surplus

    # --- What the parser calls -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Take note of a second answer, which nobody asked for."""
        self._is_surplus = self.is_whole

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        if not self.status:  # else it is a trailer, or of another answer
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Learn the status and where the body ends; interim answers are passed over."""
        status = self._parser.get_status_code()
        if self.is_whole:
            return
        if status == _SWITCHING:
            raise _NotHttp
        if status < _FINAL:
            self.headers.clear()
            return
        names = {name.lower() for name, _ in self.headers}
        codings = [value.lower() for name, value in self.headers if name.lower() == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]) or not self._parser.get_http_version().startswith("1."):
            raise _NotHttp
        self._is_framed = bool(codings) or b"content-length" in names or status in {204, 304}
        self.status = status

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        if not self.is_whole:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        """Learn that it is whole, unless it was an interim one."""
        if self.status and not self.is_whole:
            self.is_whole = True
            self._stays_open = self._parser.should_keep_alive()


def _mended(data: bytes) -> bytes | None:
    """Return what came with its head written as strict parsers have it; None until the head is whole."""
    heads: list[bytes] = []
    while True:
        head, end, data = data.partition(_END)
        if not end:
            return None
        start, newline, fields = head.partition(b"\r\n")
        fields = _CODING.sub(
            rb"\1", _FOLD.sub(b"  ", fields)
        )  # a fold below the first line is left, and refused
        heads += [_NEWER.sub(b"HTTP/1.1", start), newline, fields, end]
        if not _INTERIM.match(start):
            return b"".join(heads) + data


def _not_http() -> httpx.RemoteProtocolError:
    return httpx.RemoteProtocolError("expected HTTP/1.1")
