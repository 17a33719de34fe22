"""Bodies on the wire: sent without generators, read within bounds."""

from __future__ import annotations

import zlib
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

import anyio.lowlevel
import httpx
from attrs import frozen

from sampling_async._errors import DecodeError
from sampling_async._stepwise import Stepwise

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from sampling_async._errors import Endpoint

_MIB: Final = 2**20
_PARTS_A_TURN: Final = 256


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
        self._content = content

    def __aiter__(self) -> AsyncIterator[bytes]:
        return Stepwise((self._content,))


async def read_body(response: httpx.Response, wire: int, decoded: int) -> bytes:
    """Read a body within its limits, undoing gzip, the one encoding that we accept."""
    if response.is_stream_consumed:  # made from memory, by a mock
        if len(response.content) > decoded:
            raise _too_large(decoded, "decoded")
        return response.content
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in {"identity", "gzip", "x-gzip", ""}:
        raise DecodeError("$", "expected no content encoding but gzip", permanent=True)
    inflater = _Inflater(decoded) if "gzip" in encoding else None
    parts: list[bytes] = []
    wire_size = size = 0
    async with _whole(response) as stream:
        async for raw in stream:
            wire_size += len(raw)
            if wire_size > wire:
                raise _too_large(wire, "on the wire")
            parts.append(raw if inflater is None else inflater.feed(raw))
            size += len(parts[-1])
            if size > decoded:
                raise _too_large(decoded, "decoded")
            if not len(parts) % _PARTS_A_TURN:
                await anyio.lowlevel.checkpoint()  # parts of a byte each come without waiting, thousands a read
    if inflater is not None:
        inflater.finish()
    return b"".join(parts)


@asynccontextmanager
async def _whole(response: httpx.Response) -> AsyncGenerator[AsyncIterator[bytes]]:
    """Give the raw parts of a body, and run them to their end even where the block stops early.

    httpx and httpcore read through nested async generators; one left in the middle is scolded by trio. Closing
    the response first makes them end by themselves, without reading on.
    """
    stream = response.aiter_raw()
    try:
        yield stream
    except DecodeError:
        await response.aclose()
        with suppress(Exception):
            async for _ in stream:
                pass
        raise


def _too_large(limit: int, where: str) -> DecodeError:
    return DecodeError(
        "$",
        f"the body is larger than {limit} bytes {where}; raise it with limits=BodyLimits(...)",
        permanent=True,
    )


class _Inflater:
    """Undoes gzip piece by piece, never making more than the limit at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._zlib = zlib.decompressobj(wbits=31)

    def feed(self, raw: bytes) -> bytes:
        """Return what a piece holds; of a piece that holds more than the limit, the limit and a byte."""
        piece = b""
        try:
            while True:
                piece += self._zlib.decompress(raw, self._limit + 1)
                raw = self._zlib.unused_data
                if not raw or len(piece) > self._limit:
                    return piece
                self._zlib = zlib.decompressobj(wbits=31)  # a gzip body may have several members
        except zlib.error:
            pass
        raise DecodeError("$", "expected a gzip body, found other bytes")

    def finish(self) -> None:
        """Check that the stream is whole: a cut one can have the right length on the wire."""
        if not self._zlib.eof:
            raise DecodeError("$", "expected a whole gzip body, found a cut one")
