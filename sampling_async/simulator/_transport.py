"""Connections that can be cut, and the simulator in process: an httpx transport with such connections."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import anyio.lowlevel
import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, MutableMapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send


Sleep: TypeAlias = Callable[[float], Awaitable[object]]
"""Something like `anyio.sleep`."""

EXTENSION: Final = "simulator.connection"
"""Where a `Connection` stands among the extensions of the ASGI scope."""


class Connection(Protocol):
    """The connection of one request."""

    async def pause(self, seconds: float, sleep: Sleep) -> None:
        """Let time pass in which nothing is sent."""
        ...

    async def cut(self, *, reset: bool) -> None:
        """Drop the connection; the application sends nothing afterwards."""
        ...


class ForeignConnection:
    """A connection under a server that knows no extension: it cannot be cut but by failing."""

    async def pause(self, seconds: float, sleep: Sleep) -> None:
        """Let time pass."""
        await sleep(seconds)

    async def cut(self, *, reset: bool) -> None:
        """Fail, which makes servers drop a connection whose answer has begun, and else answer 500."""
        raise ConnectionAbortedError(f"the simulator cuts this connection, reset={reset}")


def connection_of(scope: MutableMapping[str, Any]) -> Connection:
    """Return the connection a request came by."""
    known: Connection | None = (scope.get("extensions") or {}).get(EXTENSION)
    return known or ForeignConnection()


def with_connection(scope: MutableMapping[str, Any], connection: Connection) -> dict[str, Any]:
    """Return a scope that names the connection."""
    return {**scope, "extensions": {**(scope.get("extensions") or {}), EXTENSION: connection}}


class SimulatorTransport(httpx.AsyncBaseTransport):
    """Asks the application directly, on whatever event loop the caller runs.

    - A cut before the answer raises `httpx.RemoteProtocolError`, with a reset `httpx.ReadError`; in the middle
      of the body, the status is there and reading the body raises.
    - Where the simulator would be silent for longer than the request's read timeout, the transport is silent
      for that long and raises `httpx.ReadTimeout`; what was asked has been done all the same.
    - Other timeouts mean nothing here: there is no connection to make or to wait for.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request, or raise what a socket would have raised."""
        await anyio.lowlevel.checkpoint()  # a socket would let others run, and a cancellation through
        patience = request.extensions.get("timeout", {}).get("read")
        line = _Line(self._app, patience=patience)
        response = await httpx.ASGITransport(line).handle_async_request(request)
        if line.error is None:
            return response
        if not line.is_answered:
            raise line.error
        stream = _BrokenStream(line.sent, line.error)
        return httpx.Response(response.status_code, headers=response.headers, stream=stream)


class _Line:
    """One exchange: the application's connection, and the application as the transport sees it."""

    def __init__(self, app: ASGIApp, *, patience: float | None) -> None:
        self._app = app
        self._patience = patience
        self._silence = 0.0
        self.sent: list[bytes] = []
        self.is_answered = False
        self.error: httpx.TransportError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if self.error is None:
                self._silence = 0.0
                self.is_answered = True
                self.sent.append(message.get("body", b""))
                await send(message)

        await self._app(with_connection(scope, self), receive, send_on)
        if self.error is not None:
            await self._finish(send)

    async def _finish(self, send: Send) -> None:
        """Complete an answer that broke off, since the transport below insists on a whole one."""
        if not self.is_answered:
            await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def pause(self, seconds: float, sleep: Sleep) -> None:
        """Let time pass; when it is more than the client waits for, the client is gone."""
        if self.error is not None:
            return
        left = float("inf") if self._patience is None else self._patience - self._silence
        await sleep(min(seconds, left))
        self._silence += seconds
        if seconds > left:
            self.error = httpx.ReadTimeout("the simulator was silent for too long")

    async def cut(self, *, reset: bool) -> None:
        """Drop the connection."""
        if self.error is None:
            self.error = _cut_error(reset=reset, in_body=self.is_answered)


def _cut_error(*, reset: bool, in_body: bool) -> httpx.TransportError:
    if reset:
        return httpx.ReadError("the simulator reset the connection")
    if in_body:
        return httpx.RemoteProtocolError("the simulator closed the connection in the middle of the body")
    return httpx.RemoteProtocolError("the simulator closed the connection without an answer")


class _BrokenStream(httpx.AsyncByteStream):
    def __init__(self, parts: list[bytes], error: httpx.TransportError) -> None:
        self._parts = parts
        self._error = error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        raise self._error
