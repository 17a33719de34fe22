"""Sockets and connections that can be cut, and an httpx transport that runs the simulator in process."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio.lowlevel
import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, MutableMapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BACKLOG: Final = 2048


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; 0 takes a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets that name their protocol. With the algorithm on,
    # responses take 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except BaseException as exc:
        listener.close()
        if isinstance(exc, OSError):
            exc.filename = f"{host}, port {port}"  # the system's text does not say where
        raise
    return listener


Sleep: TypeAlias = Callable[[float], Awaitable[object]]
"""A function such as `anyio.sleep`."""

EXTENSION: Final = "simulator.connection"
"""The key of the `ClientConnection` among the extensions of the ASGI scope."""


class ClientConnection:
    """A connection that can be cut. This one is for servers without the extension, so it raises an error."""

    async def pause(self, seconds: float, sleep: Sleep) -> None:
        await sleep(seconds)

    async def cut(self, *, reset: bool) -> None:
        """Drop the connection: after an error, servers do so if the response has begun, or else respond 500."""
        raise ConnectionAbortedError(f"the simulator cuts this connection, reset={reset}")


def connection_of(scope: MutableMapping[str, Any]) -> ClientConnection:
    known: ClientConnection | None = (scope.get("extensions") or {}).get(EXTENSION)
    return known or ClientConnection()


def with_connection(scope: MutableMapping[str, Any], connection: ClientConnection) -> dict[str, Any]:
    return {**scope, "extensions": {**(scope.get("extensions") or {}), EXTENSION: connection}}


class SimulatorTransport(httpx.AsyncBaseTransport):
    """Calls the application directly, on the event loop of the caller.

    - A cut before the response raises `httpx.RemoteProtocolError`, or with a reset `httpx.ReadError`. After a
      cut in the middle of the body, the response has its status, and reading the body raises.
    - If the simulator would be silent for longer than the request's read timeout, the transport is silent for
      that long and raises `httpx.ReadTimeout`. The service has acted on the request nevertheless.
    - Other timeouts have no effect: there is no connection to open or to wait for.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Respond to a request, or raise the error that a socket would have raised."""
        # A socket would let other tasks run here, and deliver a cancellation.
        await anyio.lowlevel.checkpoint()
        patience = request.extensions.get("timeout", {}).get("read")
        line = _Exchange(self._app, patience=patience)
        response = await httpx.ASGITransport(line).handle_async_request(request)
        if line.error is None:
            return response
        if not line.is_answered:
            raise line.error
        stream = _BrokenStream(line.sent, line.error)
        return httpx.Response(response.status_code, headers=response.headers, stream=stream)


class _Exchange(ClientConnection):
    """One exchange: to the application it is the connection, to httpx's transport it is the application."""

    def __init__(self, app: ASGIApp, *, patience: float | None) -> None:
        self._app = app
        self._patience = patience
        self._silence = 0.0
        self.sent: list[bytes] = []
        self.is_answered = False
        self.error: httpx.TransportError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            # After a cut or a timeout the client is gone, so nothing more is sent.
            if self.error is None:
                self._silence = 0.0
                self.is_answered = True
                self.sent.append(message.get("body", b""))
                await send(message)

        await self._app(with_connection(scope, self), receive, send_on)
        if self.error is not None:
            # httpx's ASGI transport requires a whole response, also if it broke off.
            if not self.is_answered:
                await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def pause(self, seconds: float, sleep: Sleep) -> None:
        """Wait. If the silence exceeds the client's read timeout, the client is gone afterwards."""
        if self.error is not None:
            return
        # Silence adds up until something is sent. Example: with a patience of 5 s and 3 s of silence so far, a
        # pause of 4 s sleeps for 2 s, and then the client times out.
        left = float("inf") if self._patience is None else self._patience - self._silence
        await sleep(min(seconds, left))
        self._silence += seconds
        if seconds > left:
            self.error = httpx.ReadTimeout("the simulator did not respond within the time limit")

    async def cut(self, *, reset: bool) -> None:
        if self.error is None:
            where = "in the middle of the body" if self.is_answered else "without a response"
            self.error = (
                httpx.ReadError("the simulator reset the connection")
                if reset
                else httpx.RemoteProtocolError(f"the simulator closed the connection {where}")
            )


class _BrokenStream(httpx.AsyncByteStream):
    def __init__(self, parts: list[bytes], error: httpx.TransportError) -> None:
        self._parts = parts
        self._error = error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        raise self._error
