"""Bodies of requests and responses: sent without generators, and read within limits."""

from __future__ import annotations

import re
import zlib
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import lru_cache
from inspect import isasyncgen
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.lowlevel
import httpx
from attrs import field, frozen

from sampling_async._contract.checks import positive
from sampling_async._contract.errors import DecodeError
from sampling_async._contract.exchange import NOT_MODIFIED

if TYPE_CHECKING:
    from sampling_async._contract.errors import Endpoint

_MIB: Final = 2**20
_PARTS_A_TURN: Final = 256
_ENDING_SECONDS: Final = 1.0
_SLICE: Final = 2**17  # the most bytes that are decompressed at once: decoding them takes some milliseconds

_ETAG: Final = re.compile(r'(W/)?"[\x21\x23-\x7e]{0,250}"')
_PADDING: Final = b"\0\r\n"  # behind a gzip body: the rest of a buffer, or the end of a line
_BEFORE_JSON: Final = b"\xef\xbb\xbf\xff\xfe\0 \t\r\n"  # byte order marks and blanks


@frozen(kw_only=True)
class BodyLimits:
    """Limits of a response's body, in bytes: a gzip body of 200 KB can hold hundreds of megabytes.

    Attributes:
        wire: The most bytes as received.
        decoded: The most bytes after decompression.
        quotas: Both limits for Get Quotas, whose inventories are large.

    Raises:
        InvalidRequestError: A limit is not above 0.
    """

    wire: int = field(default=16 * _MIB, validator=positive)
    decoded: int = field(default=64 * _MIB, validator=positive)
    quotas: int = field(default=512 * _MIB, validator=positive)

    def of(self, endpoint: Endpoint) -> tuple[int, int]:
        """Return the limits of an endpoint: as received, and decoded."""
        return (self.quotas, self.quotas) if endpoint == "get_quotas" else (self.wire, self.decoded)


class OnePart(AsyncIterator[bytes]):
    """A body that is one part. An async generator would have to be closed if it is not read to its end."""

    def __init__(self, part: bytes) -> None:
        self._parts = [part]

    async def __anext__(self) -> bytes:
        if not self._parts:
            raise StopAsyncIteration
        return self._parts.pop()


class Head:
    """The headers of requests, and the same as lines of HTTP/1.1. Requests share it."""

    __slots__ = ("headers", "lines")

    def __init__(self, headers: httpx.Headers) -> None:
        self.headers = headers
        self.lines = b"".join([b"%b: %b\r\n" % header for header in headers.raw])


class Request(httpx.Request):
    """A request of the session. It shares address and headers with others; httpx would copy and parse both.

    `url` is the service's address without the path, which may hold a member code. What is sent is in the
    extension `target`, as in httpcore.
    """

    stream: RequestBody

    def __init__(
        self, method: str, url: httpx.URL, *, head: Head, content: bytes, extensions: dict[str, Any]
    ) -> None:
        # All that httpx's own constructor sets, which is not called.
        self.method = method
        self.url = url
        self.headers = head.headers
        self.lines = head.lines
        self.extensions = extensions
        self.stream = RequestBody(content)


class RequestBody(httpx.AsyncByteStream):
    """The body of a request. httpx's own is an async generator, and trio warns if one is left unfinished."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __aiter__(self) -> AsyncIterator[bytes]:
        return OnePart(self.content)


class LimitedBody:
    """The body of a response, part by part and within its limits. It accepts gzip and deflate.

    Another encoding in the header, or deflate, is ignored if the body begins as JSON: some services send
    `utf-8` there.
    """

    def __init__(self, response: httpx.Response, wire: int, decoded: int) -> None:
        self._response = response
        self._wire_left = wire
        self._decoded_left = decoded
        self._parts = 0
        self._limits = wire, decoded
        # The body of our engine, which holds its connection until it is judged; None with other transports.
        self.own: Any = response.extensions.get("body")
        if self.own is not None:
            # The engine also counts the bytes around the body, such as chunk framing, which the parts do not
            # contain.
            self.own.most = wire
            encoding = self.own.encoding
        else:
            encoding = (response.headers.get("Content-Encoding") or "").encode()
        self._zipped, self._is_deflate, self._is_other = _codings(encoding) if encoding else (0, False, False)
        self._inflater: _Inflater | None = None
        self._source: AsyncIterator[bytes] | None = None  # until the first part is read

    @property
    def is_unchanged(self) -> bool:
        """Whether the response says that there is nothing newer (304); it has no body then."""
        return self._response.status_code == NOT_MODIFIED

    @property
    def etag(self) -> str | None:
        """The ETag of the response; None without one, and for one that is not safe to send back."""
        etag = self._response.headers.get("ETag") or ""
        return etag if _ETAG.fullmatch(etag) else None

    def narrow(self, decoded: int) -> None:
        """Accept no more decoded bytes than these."""
        self._decoded_left = min(self._decoded_left, decoded)

    async def next(self) -> bytes:
        """Return the next part, or nothing at the end. Parts are small if the transport gives small parts."""
        if self._zipped > 1:
            raise _other_encoding()
        if self._source is None:
            # A mock may have made the response from memory. Then httpx has decompressed it already.
            is_read = self._response.is_stream_consumed
            self._source = OnePart(self._response.content) if is_read else self._response.aiter_raw()
            self._inflater = _Inflater(is_deflate=self._is_deflate) if self._zipped and not is_read else None
        while True:
            if self._inflater is not None and (part := self._inflater.next()):
                # One received part can decompress to a thousand times its size, so each slice gives a turn.
                await anyio.lowlevel.checkpoint()
                return self._accepted(part)
            raw = await self._next_raw(self._source)
            if self._parts == 1 and self._is_misnamed(raw):
                self._inflater = None
            if self._inflater is None:
                return self._accepted(raw)
            if not raw:
                self._inflater.finish()
                return raw
            self._inflater.feed(raw)

    def _is_misnamed(self, start: bytes) -> bool:
        return self._is_deflate and start[:1] in {b"{", b"["}

    async def _next_raw(self, source: AsyncIterator[bytes]) -> bytes:
        while not (raw := await anext(source, None)):
            if raw is None:
                return b""
        self._wire_left -= len(raw)
        if self._wire_left < 0:
            raise too_large(self._limits[0], "on the wire")
        self._parts += 1
        if not self._parts % _PARTS_A_TURN:
            # Thousands of parts of one byte each may come from one read, without any wait.
            await anyio.lowlevel.checkpoint()
        return raw

    def _accepted(self, part: bytes) -> bytes:
        # An encoding that is not gzip is a wrong name, or there is no way to read the body.
        if self._is_other and (start := part.lstrip(_BEFORE_JSON)):
            if start[0] not in b"{[":
                raise _other_encoding()
            self._is_other = False
        return self._within_limit(part)

    def _within_limit(self, part: bytes) -> bytes:
        self._decoded_left -= len(part)
        if self._decoded_left < 0:
            raise too_large(self._limits[1], "decoded")
        return part

    def whole(self) -> bytes | None:
        """Return the body if all of it has arrived, and one slice holds it, as in most responses; else None."""
        if self.own is None or not self.own.is_over or self._zipped > 1 or self._is_other:
            return None
        raw: bytes = self.own.take()
        content = raw
        if self._zipped and not self._is_misnamed(raw):
            self._inflater = _Inflater(is_deflate=self._is_deflate)
            self._inflater.feed(raw)
            content = self._inflater.next()
            if not self._inflater.is_finished:  # it is read slice by slice, from the beginning
                self._inflater, self._source = _Inflater(is_deflate=self._is_deflate), OnePart(raw)
                return None
        self._wire_left -= len(raw)
        if self._wire_left < 0:
            raise too_large(self._limits[0], "on the wire")
        return self._within_limit(content)

    async def read(self) -> bytes:
        parts: list[bytes] = []
        while part := await self.next():
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def is_followed(self) -> bool:
        """Whether bytes have come after the response, as far as our engine knows."""
        return self.own is not None and self.own.is_followed

    async def aclose(self) -> None:
        """Close the body, read completely or not. The body of our engine must be judged besides."""
        await self._response.aclose()
        source = self._source
        if isasyncgen(source):
            # httpx reads through nested async generators, and trio warns about those that are left unfinished.
            # After the response is closed, a few more steps end them without reading. Their number and time are
            # limited, in case a generator goes on reading: a stream without an `aclose` of its own does.
            with suppress(Exception), anyio.move_on_after(_ENDING_SECONDS):
                for _ in range(_PARTS_A_TURN):
                    await anext(source)


@lru_cache(maxsize=16)
def _codings(encoding: bytes) -> tuple[int, bool, bool]:
    """Return how many known codings a Content-Encoding names, and whether deflate and others are among them."""
    codings = [coding.strip() for coding in encoding.lower().split(b",")]
    zipped = sum(coding in {b"gzip", b"x-gzip", b"deflate"} for coding in codings)
    is_other = zipped + codings.count(b"identity") + codings.count(b"") < len(codings)
    return zipped, b"deflate" in codings, is_other


def _other_encoding() -> DecodeError:
    return DecodeError("$", "expected gzip, deflate or no content encoding, found another one", permanent=True)


def too_large(limit: float, where: str) -> DecodeError:
    return DecodeError(
        "$",
        f"the body is larger than {limit} bytes {where}; raise it with limits=BodyLimits(...)",
        permanent=True,
    )


class _Inflater:
    """A decompressor that works slice by slice, for gzip or deflate.

    By the standard, deflate is in a zlib frame. Some servers leave the frame out: its first byte shows it.
    """

    def __init__(self, *, is_deflate: bool) -> None:
        self._name = "deflate" if is_deflate else "gzip"
        self._zlib: Any = None if is_deflate else zlib.decompressobj(wbits=31)
        self._raw = b""

    def feed(self, raw: bytes) -> None:
        self._raw = raw

    @property
    def is_finished(self) -> bool:
        return self._zlib is not None and self._zlib.eof and not self._raw

    def next(self) -> bytes:
        """Return the next decompressed slice of the part, or nothing."""
        try:
            while self._raw:
                if self._zlib is None:
                    self._zlib = zlib.decompressobj(wbits=15 if self._raw[0] & 15 == zlib.DEFLATED else -15)
                if self._zlib.eof:
                    self._raw = self._raw.lstrip(_PADDING)
                    if not self._raw:
                        break
                    # A gzip body may have several members. One of deflate has none, and fails here.
                    self._zlib = zlib.decompressobj(wbits=31)
                part: bytes = self._zlib.decompress(self._raw, _SLICE)
                self._raw = self._zlib.unconsumed_tail or self._zlib.unused_data
                if part:
                    return part
        except zlib.error:
            # Raised below: inside, the zlib error would become the context.
            pass
        else:
            return b""
        raise DecodeError("$", f"expected a {self._name} body, found other bytes")

    def finish(self) -> None:
        """Check that the gzip stream is complete. A truncated one may still have the announced length."""
        if not self.is_finished:
            raise DecodeError("$", f"expected a complete {self._name} body, found one that was cut off")
