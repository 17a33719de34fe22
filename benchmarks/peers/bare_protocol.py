"""The least that asyncio can do: a protocol for each connection, httptools and msgspec, and nothing else.

It has no limits of time or size, no retries, no TLS, and no calls that could be cancelled. It is no client, but
the limit below which none can be.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

import httptools
import msgspec

from peers.aiohttp_msgspec import CHUNK, SAMPLES, items_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class _Connection(asyncio.Protocol):
    """A connection that sends the next chunk when the response to the one before has come."""

    def __init__(self, head: str) -> None:
        self._head = head
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def begin(self, path: str, chunks: Iterator[Sequence[int]], done: asyncio.Future[int]) -> None:
        """Send chunks until there are none, then set the number of invites."""
        self._path, self._chunks, self._done, self._invited = path, chunks, done, 0
        self._next()

    def _next(self) -> None:
        chunk = next(self._chunks, None)
        if chunk is None:
            self._done.set_result(self._invited)
            return
        self._chunk = chunk
        body = msgspec.json.encode({"QuotaIDs": list(chunk)})
        self._parser, self._body = httptools.HttpResponseParser(self), b""
        head = f"POST {self._path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Keep a part of the response."""
        self._body += body

    def on_message_complete(self) -> None:
        """Read the response."""
        if self._parser.get_status_code() != 200:
            raise ValueError("no 200")
        items = items_of(self._body, self._chunk)
        self._invited += sum(item.invite is not None for item in items.values())
        asyncio.get_running_loop().call_soon(self._next)

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


class BareProtocol:
    """Bulk invites over as many connections as may be used at once."""

    name = "asyncio.Protocol + httptools + msgspec"

    def __init__(self, url: str, panel_guid: str, api_key: str, width: int) -> None:
        self._url, self._width = urlsplit(url), width
        self._path = f"{SAMPLES}/{panel_guid}"
        self._head = (
            f"Host: {self._url.netloc}\r\nAPI_AUTH_KEY: {api_key}\r\nAccept: application/json\r\n"
            "Content-Type: application/json\r\n"
        )

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._connections = [
            (await loop.create_connection(lambda: _Connection(self._head), self._url.hostname, self._url.port))[
                1
            ]
            for _ in range(self._width)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()

    async def bulk(self, member_code: str, quota_ids: Sequence[int]) -> int:
        """Request invites for all quota IDs and return the number of invites."""
        chunks = (quota_ids[start : start + CHUNK] for start in range(0, len(quota_ids), CHUNK))
        path, loop = f"{self._path}/{quote(member_code, safe='')}/Invites", asyncio.get_running_loop()
        ended = [loop.create_future() for _ in self._connections]
        for connection, done in zip(self._connections, ended, strict=True):
            connection.begin(path, chunks, done)
        return sum(await asyncio.gather(*ended))
