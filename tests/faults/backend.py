"""A service on a socket that can go away and come back, fast enough to be driven hard; with a ledger."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from fault_server import Ledger, Request, framed, right_document

if TYPE_CHECKING:
    from collections.abc import Coroutine


class Backend:
    """A right service: `with Backend() as backend: ... backend.url`, in a thread with an event loop of its own.

    Args:
        seconds: How long it takes for an answer.

    Attributes:
        ledger: What it received and processed.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.ledger = Ledger()
        self.url = ""
        self._seconds = seconds
        self._port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.come_back()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_away()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def go_away(self) -> None:
        """Refuse connections, and cut those there are."""
        self._do(self._close())

    def come_back(self) -> None:
        """Accept connections, under the same address as before."""
        self._do(self._open())

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(10)

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._converse, "127.0.0.1", self._port, backlog=512)
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    await self._exchange(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.transport.abort() if self._server is None else writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        request = Request.of(head + await reader.readexactly(int(length or 0)))
        if self._server is None:  # it went away while this connection was being accepted
            raise ConnectionAbortedError
        self.ledger.received.append(request)
        if self._seconds:
            await asyncio.sleep(self._seconds)
        status, document = right_document(request)
        self.ledger.process(request)
        writer.write(framed(status, json.dumps(document).encode()))
        await writer.drain()
