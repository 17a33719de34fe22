"""The simulator over real sockets: uvicorn, with connections that can be cut."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from sampling_async._contract.extras import install

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as exc:
    raise ImportError(f"uvicorn is missing: {install('simulator')}") from exc

from sampling_async.simulator._transport import BACKLOG, ClientConnection, listening, with_connection

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Generator

    from starlette.types import ASGIApp, Receive

# The value of SO_LINGER: on, with 0 seconds. Closing the socket then sends a TCP reset.
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_STEP_SECONDS: Final = 0.002


class _CuttableProtocol(H11Protocol):
    """uvicorn's HTTP protocol, extended so that the application can drop its connection."""

    def __init__(self, config: uvicorn.Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        app: Any = self.app

        async def connected(scope: Any, receive: Any, send: Any) -> None:
            await app(with_connection(scope, _SocketConnection(self.transport, receive)), receive, send)

        self.app = connected


class _SocketConnection(ClientConnection):
    def __init__(self, transport: asyncio.Transport, receive: Receive) -> None:
        self._transport = transport
        self._receive = receive

    async def cut(self, *, reset: bool) -> None:
        """Close the socket, and wait until the server has noticed; otherwise it would respond 500."""
        if reset:
            accepted: socket.socket = self._transport.get_extra_info("socket")
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._transport.abort()
        else:
            self._transport.close()
        while (await self._receive())["type"] != "http.disconnect":
            pass


@contextmanager
def served(app: ASGIApp, *, port: int) -> Generator[str]:
    """Serve an application on 127.0.0.1 from a thread, and yield the base URL."""
    with listening("127.0.0.1", port) as listener:
        server = uvicorn.Server(_config(app, log_level="critical"))
        thread = threading.Thread(target=server.run, args=([listener],), name="simulator", daemon=True)
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise OSError("the simulator's server ended before it began to listen")
                time.sleep(_STEP_SECONDS)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def run(app: ASGIApp, listener: socket.socket) -> None:
    # After Ctrl-C uvicorn shuts down in order, and then raises the interrupt again.
    with listener, suppress(KeyboardInterrupt):
        uvicorn.Server(_config(app, log_level="warning")).run([listener])


def _config(app: ASGIApp, *, log_level: str) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_CuttableProtocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        log_level=log_level,
        backlog=BACKLOG,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=1,  # for requests in progress
    )
