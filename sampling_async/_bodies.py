"""Bodies on the wire: sent without generators, read within bounds."""

from __future__ import annotations

import zlib
from contextlib import suppress
from inspect import isasyncgen
from typing import TYPE_CHECKING, Any, Final

import anyio.lowlevel
import httpx
from attrs import frozen

from sampling_async._errors import DecodeError
from sampling_async._stepwise import Stepwise

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sampling_async._errors import Endpoint

_MIB: Final = 2**20
_PARTS_A_TURN: Final = 256
_SLICE: Final = 2**17
"""Bytes undone of gzip at once: some milliseconds' work for who decodes them."""

_ENCODINGS: Final = frozenset({b"identity", b"gzip", b"x-gzip", b""})


@frozen(kw_only=True)
class BodyLimits:
    """Bounds of an answer's body, in bytes: a 200 KB gzip body can hold hundreds of megabytes.

    Attributes:
        wire: As it comes over the wire.
        decoded: After its content encoding is undone.
        quotas: Both of these for Get Quotas, whose inventories are large.
    """

    wire: int = 16 * _MIB
    decoded: int = 64 * _MIB
    quotas: int = 512 * _MIB

    def of(self, endpoint: Endpoint) -> tuple[int, int]:
        """Return the bounds on the wire and decoded."""
        return (self.quotas, self.quotas) if endpoint == "get_quotas" else (self.wire, self.decoded)


class RequestBody(httpx.AsyncByteStream):
    """A request's body. httpx's own is an async generator, which a cancelled call leaves for trio to scold."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __aiter__(self) -> AsyncIterator[bytes]:
        return Stepwise((self.content,))


class Body:
    """The body of an answer, part by part, within its limits, with gzip undone, the one encoding we accept.

    Args:
        response: Whose.
        wire: The limit of what comes over the wire, in bytes.
        decoded: The limit of what that makes.
    """

    def __init__(self, response: httpx.Response, wire: int, decoded: int) -> None:
        self._response = response
        self._wire_left = wire
        self._decoded_left = decoded
        self._parts = 0
        self._limits = wire, decoded
        encodings = [value for name, value in response.headers.raw if name.lower() == b"content-encoding"]
        self._encoding = b", ".join(encodings).strip().lower()
        self._inflater = _Inflater() if b"gzip" in self._encoding else None
        self._source = self._raw = _raw_parts(response, wire)
        if response.is_stream_consumed:  # made from memory, by a mock, and decoded there
            self._inflater, self._source = None, Stepwise((response.content,))

    async def next(self) -> bytes:
        """Return the next part, of modest size where the wire gave it so; nothing at the end.

        Raises:
            DecodeError: It is larger than a limit, encoded otherwise, or its encoding is broken.
        """
        if self._encoding not in _ENCODINGS:
            raise DecodeError("$", "expected no content encoding but gzip", permanent=True)
        while True:
            if self._inflater is not None and (part := self._inflater.next()):
                await anyio.lowlevel.checkpoint()  # a part on the wire can hold a thousand times as much
                return self._within_limit(part)
            raw = await self._next_raw()
            if self._inflater is None:
                return self._within_limit(raw)
            if not raw:
                self._inflater.finish()
                return raw
            self._inflater.feed(raw)

    async def _next_raw(self) -> bytes:
        while not (raw := await anext(self._source, None)):
            if raw is None:
                return b""
        self._wire_left -= len(raw)
        if self._wire_left < 0:
            raise too_large(self._limits[0], "on the wire")
        self._parts += 1
        if not self._parts % _PARTS_A_TURN:
            await anyio.lowlevel.checkpoint()  # parts of a byte each come without waiting, thousands a read
        return raw

    def _within_limit(self, part: bytes) -> bytes:
        self._decoded_left -= len(part)
        if self._decoded_left < 0:
            raise too_large(self._limits[1], "decoded")
        return part

    async def read(self) -> bytes:
        """Return all of it."""
        parts: list[bytes] = []
        while part := await self.next():
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def aclose(self) -> None:
        """Close it, whether it was read whole or not."""
        await self._response.aclose()
        if isasyncgen(self._raw):
            # httpx reads through nested async generators; one left in the middle is scolded by trio. With the
            # response closed, they end by themselves and read no further.
            # One that goes on all the same is no longer waited for.
            with suppress(Exception):
                for _ in range(_PARTS_A_TURN):
                    await anext(self._source)


def _raw_parts(response: httpx.Response, most: int) -> AsyncIterator[bytes]:
    """Return the parts as they come: our engine's own, for httpx's layers cost as much as the reading does."""
    own: Any = response.extensions.get("body")
    if own is None:
        return response.aiter_raw()
    own.most = most  # it also counts what is around the body, of which parts say nothing
    parts: AsyncIterator[bytes] = aiter(own)
    return parts


def too_large(limit: float, where: str) -> DecodeError:
    """Return the error for a body beyond a limit in bytes."""
    return DecodeError(
        "$",
        f"the body is larger than {limit} bytes {where}; raise it with limits=BodyLimits(...)",
        permanent=True,
    )


class _Inflater:
    """Undoes gzip, a slice at a time."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)
        self._raw = b""

    def feed(self, raw: bytes) -> None:
        """Take a piece, after all that the one before holds was taken out."""
        self._raw = raw

    def next(self) -> bytes:
        """Return the next slice of what the piece holds, or nothing.

        Raises:
            DecodeError: It is no gzip.
        """
        try:
            while self._raw:
                if self._zlib.eof:
                    self._zlib = zlib.decompressobj(wbits=31)  # a gzip body may have several members
                part = self._zlib.decompress(self._raw, _SLICE)
                self._raw = self._zlib.unconsumed_tail or self._zlib.unused_data
                if part:
                    return part
        except zlib.error:
            pass
        else:
            return b""
        raise DecodeError("$", "expected a gzip body, found other bytes")

    def finish(self) -> None:
        """Check that the stream is whole: a cut one can have the right length on the wire."""
        if not self._zlib.eof:
            raise DecodeError("$", "expected a whole gzip body, found a cut one")
