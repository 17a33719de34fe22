"""Bytes of notifications as text: compressions, and character sets that need not be the declared ones."""

from __future__ import annotations

import codecs
import re
import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_BYTES: Final = 1 << 20
"""The size of a body that is read, compressed or not: 1 MiB. A longer one is refused with 413."""

BLANKS: Final = "\ufeff\0 \t\r\n"
"""What may surround a document. Buffers that are longer than their text leave NULs after it."""

_STARTS: Final = (b"{", b"[", b"<")
_GZIP: Final = b"\x1f\x8b"
_MARKS: Final = (b"\xef\xbb\xbf", b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff", b"\xff\xfe", b"\xfe\xff")
_CHARSET: Final = re.compile(r"charset\s*=\s*[\"']?([^\s\"';,]+)", re.IGNORECASE)
_DECLARED: Final = re.compile(rb"\s*<\?xml[^>]{0,200}?\sencoding\s*=\s*[\"']([\w.:-]+)", re.ASCII)
_ASCII: Final = bytes(range(1, 128))
_WESTERN: Final = {"ascii", "cp1252", "iso8859-1", "utf-8"}
"""Declared character sets without effect: all their texts are UTF-8, or windows-1252 byte by byte."""

_FOREIGN: Final = "sampling_async.windows-1252"


class NotUnderstoodError(ValueError):
    """A body cannot be read. The text is the reason, without any value of the body."""


class RefusedBodyError(ValueError):
    """A body is refused. The text is the verdict of its receipt; `status` is the HTTP status."""

    def __init__(self, status: int, verdict: str) -> None:
        super().__init__(verdict)
        self.status = status


def uncompressed(body: bytes, codings: str = "") -> bytes:
    """Return a body without its compression.

    The bytes decide: gzip is known by its first two bytes, and what a framework has decompressed already is
    taken as it is. A character set in Content-Encoding, a common slip, is no compression.
    """
    for name in reversed(codings.lower().split(",")):
        coding = name.strip()
        if coding == "deflate":
            body = _inflated(body)
        elif coding in ("gzip", "x-gzip"):
            body = _unzipped(body)
        elif coding not in ("", "identity", "none") and _codec(coding) is None:
            raise RefusedBodyError(415, f"the content encoding {coding[:40]!r} is not known")
    return _unzipped(body)


def decoded(body: bytes, *declared: str | None) -> str:
    """Return a document as text, without what may stand around it.

    The bytes decide: the zeros of UTF-16 and UTF-32, and whether they are UTF-8. Only then do declarations
    count: names of character sets, or headers with one. Bytes that are in no such character set are read as
    windows-1252 one by one, so that one of them does not spoil the others.
    """
    if body[:1] in _STARTS and body[1:2] != b"\0":  # as nearly all do
        return _narrow(body, *declared)
    body = next((body[len(mark) :] for mark in _MARKS if body.startswith(mark)), body)
    # A document begins with a character of ASCII.
    match [byte != 0 for byte in body[:4]]:
        case [False, False, False, True]:
            return body.decode("utf-32-be", _FOREIGN).strip(BLANKS)
        case [True, False, False, False]:
            return body.decode("utf-32-le", _FOREIGN).strip(BLANKS)
        case [False, True, *_]:
            return body.decode("utf-16-be", _FOREIGN).strip(BLANKS)
        case [True, False, *_]:
            return body.decode("utf-16-le", _FOREIGN).strip(BLANKS)
        case _:
            return _narrow(body, *declared)


def _narrow(body: bytes, *declared: str | None) -> str:
    by_xml = _DECLARED.match(body)
    return decoded_value(body, *declared, by_xml[1].decode() if by_xml else None).strip(BLANKS)


def decoded_value(value: bytes, *declared: str | None) -> str:
    """Return bytes as text that are not UTF-16 or UTF-32: UTF-8, or in one of the declared character sets."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        names = (match[1] if (match := _CHARSET.search(text)) else text for text in declared if text)
        known = map(_codec, names)
        others = (name for name in known if name and name not in _WESTERN and _extends_ascii(name))
        try:
            return value.decode(next(others, "utf-8"), _FOREIGN)
        except UnicodeError:  # of a codec that asks no handler, such as that of names of hosts
            return value.decode("utf-8", _FOREIGN)


def _unzipped(body: bytes) -> bytes:
    parts: list[bytes] = []
    while body.startswith(_GZIP):  # it may have several members, and zeros behind the last one
        part, body = _member(body, 31, MOST_BYTES - sum(map(len, parts)))
        parts.append(part)
        body = body.lstrip(b"\0")
    return b"".join(parts) if parts else body


def _inflated(body: bytes) -> bytes:
    """Return the content of a deflate body. The standard wants a zlib frame; many senders leave it out."""
    for bits in (15, -15):
        try:
            return _member(body, bits, MOST_BYTES)[0]
        except NotUnderstoodError:
            continue
    return body


def _member(body: bytes, bits: int, most: int) -> tuple[bytes, bytes]:
    """Return the content of a compressed body, at most `most` bytes, and the bytes after it."""
    inflater = zlib.decompressobj(wbits=bits)
    try:
        content = inflater.decompress(body, most + 1)
    except zlib.error:
        raise NotUnderstoodError("its compression is broken") from None
    if len(content) > most:
        raise RefusedBodyError(413, "the body is too large without its compression")
    if not inflater.eof:
        raise NotUnderstoodError("its compression was cut off")
    return content, inflater.unused_data


def _codec(name: str) -> str | None:
    """Return Python's name of a character set; None if it is not known, or no character set."""
    try:
        "".encode(name)
        return codecs.lookup(name).name
    except (LookupError, ValueError):  # ValueError of a name with a NUL
        return None


def _extends_ascii(codec: str) -> bool:
    # A document that is neither UTF-16 nor UTF-32 has its braces, brackets and names in ASCII.
    return _ASCII.decode(codec, "replace") == _ASCII.decode()


def _read_as_windows(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    odd: Sequence[int] = error.object[error.start : error.end]
    return "".join(map(_in_windows, odd)), error.end


def _in_windows(byte: int) -> str:
    try:
        return bytes([byte]).decode("cp1252")
    except UnicodeDecodeError:  # five bytes have no character there
        return chr(byte)


codecs.register_error(_FOREIGN, _read_as_windows)
