"""HTTP/1.1 responses, parsed by llhttp (through httptools), without I/O, and strict about where one ends.

llhttp refuses four things that a recipient must or may accept by RFC 9112: folded header lines, blanks after
`chunked`, minor versions above 1, and the same Content-Length several times. A head with one of these is
collected, rewritten in the strict form, and parsed again.
"""

from __future__ import annotations

import re
from typing import Final

import httpx
from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpResponseParser

_HEAD_BYTES: Final = 100 * 1024
_END: Final = b"\r\n\r\n"
# What is rewritten: `HTTP/1.2`, a line that begins with a blank, a blank after `chunked`, and a second length.
_NEWER: Final = re.compile(rb"(?:\A|\r\n\r\n)HTTP/1\.[2-9]")
_FOLD: Final = re.compile(rb"\r\n(?=[ \t])")
_CODING: Final = re.compile(rb"^(transfer-encoding:[ \t]*chunked)[ \t]+(?=\r|\Z)", re.IGNORECASE | re.MULTILINE)
_LENGTH: Final = re.compile(rb"^content-length:[ \t]*([\d, \t]*\d)[ \t]*\r\n", re.IGNORECASE | re.MULTILINE)
_LENGTHS: Final = re.compile(
    rb"^content-length:[ \t]*\d+[ \t]*(?:,|\r\n(?:.*\r\n)*content-length)", re.IGNORECASE | re.MULTILINE
)
_REWRITABLE: Final = (_NEWER, _FOLD, _CODING, _LENGTHS)
_INTERIM: Final = re.compile(rb"HTTP/1\.\d 1\d\d")
_SWITCHING: Final = 101
_FINAL: Final = 200


class NotHttp(httpx.RemoteProtocolError):
    """What came is no response in HTTP/1.1. Callbacks raise it for heads that llhttp accepts."""

    def __init__(self, text: str = "expected HTTP/1.1") -> None:
        super().__init__(text)


class ResponseParser:
    """One response, fed with bytes as they arrive."""

    __slots__ = (
        "_collects_head",
        "_head",
        "_is_framed",
        "_is_rewritten",
        "_parser",
        "_parts",
        "_stays_open",
        "fields",
        "headers",
        "is_followed",
        "is_whole",
        "status",
    )

    def __init__(self) -> None:
        self.status = 0  # 0 until the head is complete
        self.headers: list[tuple[bytes, bytes]] = []
        # By names in lower case. Several values of one name are joined by commas.
        self.fields: dict[bytes, bytes] = {}
        self.is_whole = False
        self._parser: HttpResponseParser | None = None  # until the first bytes, and after the last
        self._parts: list[bytes] = []
        self._head = bytearray()  # the bytes of a head that is not complete yet
        self._collects_head = False  # the head is collected, to be rewritten, and not parsed
        self._is_rewritten = False  # the head was rewritten
        # The head says where the body ends. Otherwise the end of the connection is the end of the body.
        self._is_framed = False
        self.is_followed = False  # bytes came after the response
        self._stays_open = False  # the server keeps the connection open

    def feed(self, data: bytes) -> None:
        """Parse the next bytes. No bytes mean that the connection has ended."""
        if not data:
            self._end()
            return
        if self.is_whole:
            self.is_followed = self.is_followed or bool(data.strip(b"\r\n"))
            return
        if not self._collects_head:
            self._parse(data)
        # Not inside the `except` of `_parse`: that error would become the context of an error in here.
        if self._collects_head:
            self._collect_head(data)

    def _parse(self, data: bytes) -> None:
        try:
            if self._parser is None:
                self._parser = HttpResponseParser(self)
                # Some servers fill the size of a chunk up with blanks, which leaves no doubt about it.
                self._parser.set_dangerous_leniencies(lenient_spaces_after_chunk_size=True)
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as exc:
            struck = exc.__context__
            # A signal handler raised while the parser called one of our methods. Raise its error unchanged.
            if isinstance(exc, HttpParserCallbackError) and not isinstance(struck, NotHttp | None):
                raise struck from None
            self._collects_head = self._can_be_rewritten(data)
            if self._collects_head:
                return
            # After a complete response, the wrong bytes are surplus and the response itself is valid.
            if not self.is_whole:
                raise NotHttp from None
            self.is_followed = True
        if self.is_whole:
            self.let_go()
        if not self.status:
            self._keep(data)

    def _keep(self, data: bytes) -> None:
        self._head += data
        if len(self._head) > _HEAD_BYTES:
            raise NotHttp

    def _can_be_rewritten(self, data: bytes) -> bool:
        if self.status or self._is_rewritten:
            return False
        head = bytes(self._head) + data
        return any(pattern.search(head) for pattern in _REWRITABLE)

    def _collect_head(self, data: bytes) -> None:
        """Collect the bytes until the head is complete, then parse its strict form from the beginning."""
        # The end of the head may be divided between two reads, so a few bytes of the earlier ones are searched.
        tail = self._head[-len(_END) :] + data
        if _END in tail and (mended := _rewritten(bytes(self._head) + data)):
            self._collects_head, self._is_rewritten, self._head = False, True, bytearray()
            self.headers.clear()
            self.let_go()
            self.feed(mended)
        else:
            self._keep(data)

    def _end(self) -> None:
        if not self.is_whole and (not self.status or self._is_framed):
            raise httpx.RemoteProtocolError("the connection ended before the end of the response")
        self.is_whole = True

    def take(self) -> bytes:
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        return body

    def let_go(self) -> None:
        """Free the parser. It holds our methods: together they would stay until a garbage collection."""
        self._parser = None

    @property
    def leaves_reusable(self) -> bool:
        """Whether the body's end is certain, nothing followed, and the server keeps the connection."""
        return self._stays_open and self._is_framed and not self.is_followed

    # --- Callbacks of the parser -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.is_followed = self.is_whole

    def on_header(self, name: bytes, value: bytes) -> None:
        # With a status set, this is a trailer or a header of a second response.
        if not self.status:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Set the status, and find out where the body ends. Interim responses (1xx) are skipped."""
        assert self._parser is not None  # it calls this
        status = self._parser.get_status_code()
        if self.is_whole:
            return
        if status == _SWITCHING:
            raise NotHttp
        if status < _FINAL:
            self.headers.clear()
            return
        fields: dict[bytes, bytes] = {}
        for name, value in self.headers:
            key = name.lower()
            fields[key] = value if key not in fields else b"%b, %b" % (fields[key], value)
        # Transfer codings other than a single `chunked` are refused.
        coding = fields.get(b"transfer-encoding")
        is_known = coding is None or coding.lower() == b"chunked"
        if not is_known or not self._parser.get_http_version().startswith("1."):
            raise NotHttp
        self._is_framed = coding is not None or b"content-length" in fields or status in {204, 304}
        self.fields, self.status = fields, status

    def on_body(self, body: bytes) -> None:
        if not self.is_whole:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        if self.status and not self.is_whole:
            assert self._parser is not None
            self.is_whole = True
            self._stays_open = self._parser.should_keep_alive()


def _rewritten(data: bytes) -> bytes | None:
    """Return the bytes with a head in the strict form; None until the head is complete."""
    heads: list[bytes] = []
    while True:
        head, end, data = data.partition(_END)
        if not end:
            return None
        start, newline, fields = head.partition(b"\r\n")
        # The first line of the response is not in `fields`. A fold directly below it stays, and is refused.
        fields = _with_one_length(_CODING.sub(rb"\1", _FOLD.sub(b"  ", fields)))
        heads += [_NEWER.sub(b"HTTP/1.1", start), newline, fields, end]
        # Interim heads (1xx) come before the final one, and are rewritten with it.
        if not _INTERIM.match(start):
            return b"".join(heads) + data


def _with_one_length(fields: bytes) -> bytes:
    """Return the fields with one Content-Length in place of several equal ones; different ones are refused."""
    values: list[bytes] = [
        value.strip() for line in _LENGTH.findall(fields + b"\r\n") for value in line.split(b",")
    ]
    if len(values) < 2 or len({*values}) > 1:  # noqa: PLR2004  of one, nothing is left to do
        return fields
    return _LENGTH.sub(b"", fields + b"\r\n") + b"Content-Length: " + values[0]
