"""What carries requests under httpx.AsyncClient: HTTP/1.1 by h11 over sockets of our own.

httpx's own engine loses slots of its pool under cancellation, gives the surplus half of two answers in one
packet to the next request, and works the longer the wider it is. This one has no pool to queue in: the
scheduler bounds what runs, and a connection belongs either to one request or to the list of idle ones. A
request that does not end with its whole answer closes its connection, at once and without awaiting.
"""

from __future__ import annotations

import sys
from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import anyio
import h11
import httpx

from sampling_async._sockets import Wire, connect

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Generator, Mapping

    Limits = Mapping[str, float]

_IDLE_SECONDS: Final = 4.0  # below the 5 s after which common servers close, so that we never race them
_HEAD_BYTES: Final = 100 * 1024


class Engine(httpx.AsyncBaseTransport):
    """An httpx transport for one origin that survives cancellation and knows whether anything was sent.

    It reads two extensions of a request: `timeout`, as httpx fills it, and `sent`, a function to be told False
    while it is certain that no byte of the request has left, and True from then on.

    Args:
        idle: How many unused connections are kept open.
    """

    def __init__(self, *, idle: int) -> None:
        self._idle: deque[_Connection] = deque()
        self._most_idle = idle
        self._tls: ssl.SSLContext | None = None  # loaded when the first connection needs it
        self._stock: httpx.AsyncHTTPTransport | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and return its answer, whose body is still to be read."""
        if _is_mocked():
            self._stock = self._stock or httpx.AsyncHTTPTransport(trust_env=False)
            return await self._stock.handle_async_request(request)
        limits: Limits = request.extensions["timeout"]
        request.extensions["sent"](False)
        assert isinstance(request.stream, httpx.AsyncByteStream)
        body = b"".join([part async for part in request.stream])
        connection = self._take_idle() or await self._connect(request.url, limits)
        try:
            await connection.send(request, body, limits)
            head = await connection.read_head(limits)
        except BaseException:
            connection.close()
            raise
        stream = _Body(connection, limits, self._release)
        return httpx.Response(head.status_code, headers=list(head.headers), stream=stream)

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()  # the one used last; those not needed grow old
            if connection.is_fit():
                return connection
            connection.close()
        return None

    async def _connect(self, url: httpx.URL, limits: Limits) -> _Connection:
        tls = None
        if url.scheme == "https":
            tls = self._tls = self._tls or httpx.create_ssl_context()
        port = url.port or (443 if tls else 80)
        with _told_as(httpx.ConnectError, httpx.ConnectTimeout, limits["connect"]):
            return _Connection(await connect(url.raw_host.decode("ascii"), port, tls))

    def _release(self, connection: _Connection) -> None:
        while self._idle and not self._idle[0].is_young():
            self._idle.popleft().close()
        if len(self._idle) < self._most_idle and connection.is_reusable():
            self._idle.append(connection)
        else:
            connection.close()

    async def aclose(self) -> None:
        """Close the idle connections; one in use is closed by its request."""
        self._most_idle = 0
        while self._idle:
            self._idle.pop().close()
        if self._stock is not None:
            await self._stock.aclose()


def _is_mocked() -> bool:
    """Return whether httpx's own engine is patched: respx and pytest-httpx work so, and must work with us."""
    patched = getattr(httpx.AsyncHTTPTransport.handle_async_request, "__module__", "").split(".")[0] != "httpx"
    httpcore = sys.modules.get("httpcore")  # not loaded, it cannot be patched
    if patched or httpcore is None:
        return patched
    method = httpcore.AsyncConnectionPool.handle_async_request
    return getattr(method, "__module__", "").split(".")[0] != "httpcore"


class _Connection:
    """A connection and the state of HTTP on it."""

    __slots__ = ("_http", "_used_at", "_wire")

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        self._used_at = 0.0

    def is_young(self) -> bool:
        """Return whether the server surely keeps it open still."""
        return anyio.current_time() - self._used_at < _IDLE_SECONDS

    def is_fit(self) -> bool:
        """Return whether a request may be sent: it is young, open, and holds nothing that was not asked for."""
        return self.is_young() and self._wire.is_quiet()

    async def send(self, request: httpx.Request, body: bytes, limits: Limits) -> None:
        """Send a request whole."""
        events = [
            h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw),
            *([h11.Data(data=body)] if body else []),
            h11.EndOfMessage(),
        ]
        message = b"".join(self._http.send(event) or b"" for event in events)
        with _told_as(httpx.WriteError, httpx.WriteTimeout, limits["write"]):
            await self._wire.send(message, partial(request.extensions["sent"], True))

    async def read_head(self, limits: Limits) -> h11.Response:
        """Return the head of the answer, past interim ones."""
        while not isinstance(event := await self._next(limits), h11.Response):
            assert isinstance(event, h11.InformationalResponse)
        return event

    async def read_part(self, limits: Limits) -> bytes | None:
        """Return a part of the body; None after the last."""
        event = await self._next(limits)
        if isinstance(event, h11.Data):
            return bytes(event.data)
        assert isinstance(event, h11.EndOfMessage)
        return None

    async def _next(self, limits: Limits) -> h11.Event | type[h11.NEED_DATA | h11.PAUSED]:
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as exc:
                raise httpx.RemoteProtocolError("expected HTTP/1.1") from exc
            if event is not h11.NEED_DATA:
                return event
            with _told_as(httpx.ReadError, httpx.ReadTimeout, limits["read"]):
                self._http.receive_data(await self._wire.receive())

    def is_reusable(self) -> bool:
        """Make it ready for the next request; False if there can be none, or more came than was asked for."""
        surplus, _ = self._http.trailing_data
        if surplus or self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        self._used_at = anyio.current_time()
        return True

    def close(self) -> None:
        """Close it now."""
        self._wire.close()


class _Body(httpx.AsyncByteStream):
    """The body of an answer as it comes. Read whole, it releases the connection; left earlier, it closes it."""

    def __init__(self, connection: _Connection, limits: Limits, release: Callable[[_Connection], None]) -> None:
        self._connection = connection
        self._limits = limits
        self._release = release
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        part = None if self._is_over else await self._connection.read_part(self._limits)
        if part is not None:
            return part
        if not self._is_over:
            self._is_over = True
            self._release(self._connection)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Close the connection, if the body was not read to its end."""
        if not self._is_over:
            self._is_over = True
            self._connection.close()


@contextmanager
def _told_as(
    failure: type[httpx.NetworkError], timeout: type[httpx.TimeoutException], seconds: float
) -> Generator[None]:
    """Raise httpx's errors for those of the system, and for a time limit."""
    with anyio.move_on_after(seconds) as scope:
        try:
            yield
        except OSError as exc:
            raise failure(exc.strerror or type(exc).__name__) from exc
    if scope.cancelled_caught:
        raise timeout(f"after {seconds:g} s")
