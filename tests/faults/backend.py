"""A fast service on a socket that can go away and come back; it keeps a ledger."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any, Self

from fault_server import Ledger, Request, framed, right_document
from wire import free_port

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator


class Backend:
    """A correct service: `with Backend() as backend: ... backend.url`. It has its own thread and loop.

    Args:
        seconds: How long it takes for an answer.

    Attributes:
        ledger: What it received and processed.
        back_at: When it came back from an `outage`, by time.perf_counter; infinity before.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.ledger = Ledger()
        self.url = ""
        self.back_at = inf
        self._seconds = seconds
        self._listener: socket.socket | None = None
        self._port = free_port()
        self._conversations: dict[asyncio.Task[None], socket.socket] = {}
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
        """Refuse new connections and cut the existing ones."""
        self._do(self._close())

    def come_back(self) -> None:
        """Accept connections again, under the same address."""
        self._do(self._open())

    @contextmanager
    def outage(self, after: float, seconds: float) -> Iterator[None]:
        """Go away during the block, and come back; both are times in seconds. At its end it is back."""

        def go() -> None:
            time.sleep(after)
            self.go_away()
            time.sleep(seconds)
            self.come_back()
            self.back_at = time.perf_counter()

        thread = threading.Thread(target=go)
        thread.start()
        try:
            yield
        finally:
            thread.join()

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(10)

    async def _open(self) -> None:
        # asyncio's server is not used: closed while it accepts a connection, it leaves that open.
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=512)
        self._listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self._port}"
        self._loop.add_reader(self._listener, self._accept)

    async def _close(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        conversations = dict(self._conversations)
        for task in conversations:
            task.cancel()
        await asyncio.gather(*conversations, return_exceptions=True)
        for sock in conversations.values():
            sock.close()  # in case the task had not begun

    def _accept(self) -> None:
        assert self._listener is not None
        with suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            task = self._loop.create_task(self._converse(sock))
            self._conversations[task] = sock
            task.add_done_callback(self._conversations.pop)

    async def _converse(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            with suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    await self._exchange(reader, writer)
        finally:
            writer.transport.abort()
            await asyncio.sleep(0)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        request = Request.of(head + await reader.readexactly(int(length or 0)))
        self.ledger.received.append(request)
        if self._seconds:
            await asyncio.sleep(self._seconds)
        status, document = right_document(request)
        self.ledger.process(request)
        writer.write(framed(status, json.dumps(document).encode()))
        await writer.drain()
