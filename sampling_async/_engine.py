"""What carries requests under httpx.AsyncClient: HTTP/1.1 over sockets of our own.

httpx's own engine loses slots of its pool under cancellation, gives the surplus half of two answers in one
packet to the next request, and works the longer the wider it is. This one has no pool to queue in: the
scheduler bounds what runs, and a connection belongs either to one request or to the list of idle ones. A
request that does not end with its whole answer closes its connection, at once and without awaiting.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Self

import anyio
import httpx

from sampling_async._answers import Answer
from sampling_async._bodies import RequestBody
from sampling_async._lookups import Lookups
from sampling_async._sockets import TooSlow, Wire, connect, is_of_the_system

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

    Limits = Mapping[str, float]

_IDLE_SECONDS: Final = 4.0  # below the 5 s after which common servers close, so that we never race them


class Engine:
    """Carries requests to one origin, survives cancellation and knows whether anything was sent.

    Args:
        idle: How many unused connections are kept open.
    """

    def __init__(self, *, idle: int) -> None:
        self._idle: deque[_Connection] = deque()
        self._most_idle = idle
        self._lookups = Lookups()
        self._tls: ssl.SSLContext | None = None  # loaded when the first connection needs it

    @property
    def is_bypassed(self) -> bool:
        """Whether httpx's own engine is patched: respx and pytest-httpx work so, and must work with us."""
        stock = httpx.AsyncHTTPTransport.handle_async_request
        patched = getattr(stock, "__module__", "").split(".")[0] != "httpx"
        httpcore = sys.modules.get("httpcore")  # not loaded, it cannot be patched
        if patched or httpcore is None:
            return patched
        method = httpcore.AsyncConnectionPool.handle_async_request
        return getattr(method, "__module__", "").split(".")[0] != "httpcore"

    @staticmethod
    def may_have_raised(exc: BaseException) -> bool:
        """Return whether an error says that a request failed; else a signal handler of the host raised it."""
        return isinstance(exc, httpx.HTTPError) or is_of_the_system(exc)

    async def exchange(self, request: httpx.Request, private: Mapping[str, str]) -> httpx.Response:
        """Send a request and return its answer, whose body is still to be read.

        Args:
            request: What to send. Two of its extensions count: `timeout`, as httpx fills it, and `sent`, a
                function that is told False where it is certain that no byte has left, and True before that may
                change.
            private: Headers that only the wire gets to see.
        """
        limits: Limits = request.extensions["timeout"]
        request.extensions["sent"](False)
        message = _message(request, private)
        connection = self._take_idle() or await self._connect(request.url, limits)
        try:
            await connection.send(message, request.extensions["sent"], limits["write"])
            answer = await connection.read_head(limits["read"])
        except BaseException:
            connection.close()
            raise
        body = _Body(connection, answer, limits["read"], self._release)
        body.release_if_whole()
        return httpx.Response(answer.status, headers=answer.headers, stream=body, extensions={"body": body})

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
        with (
            anyio.move_on_after(limits["connect"]) as scope,
            _told_as(httpx.ConnectError, httpx.ConnectTimeout),
        ):
            host = url.raw_host.decode("ascii")
            connection = _Connection(await connect(await self._lookups.addresses(host, port), host, tls))
            if connection.is_silent():
                return connection
            connection.close()  # what it says is not about a request that it has not got
            raise httpx.ConnectError("the server closed, or spoke, before it was asked")
        assert scope.cancelled_caught
        raise httpx.ConnectTimeout("no connection in time")

    def _release(self, connection: _Connection) -> None:
        while self._idle and not self._idle[0].is_young():
            self._idle.popleft().close()
        if len(self._idle) < self._most_idle and connection.is_reusable():
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the idle connections; one in use is closed by its request."""
        self._most_idle = 0
        self.close_idle()

    def close_idle(self) -> None:
        """Close the idle connections, and go on with new ones."""
        while self._idle:
            self._idle.pop().close()


def _message(request: httpx.Request, private: Mapping[str, str]) -> bytes:
    assert isinstance(request.stream, RequestBody)
    lines = [b"%b %b HTTP/1.1" % (request.method.encode("ascii"), request.url.raw_path)]
    lines += [b"%b: %b" % header for header in request.headers.raw]
    lines += [f"{name}: {value}".encode("ascii") for name, value in private.items()]
    return b"%b\r\n\r\n%b" % (b"\r\n".join(lines), request.stream.content)


class _Connection:
    """A connection and the answer that is on its way."""

    __slots__ = ("_answer", "_used_at", "_wire")

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._answer = Answer()
        self._used_at = 0.0

    def is_young(self) -> bool:
        """Return whether the server surely keeps it open still."""
        return time.monotonic() - self._used_at < _IDLE_SECONDS

    def is_fit(self) -> bool:
        """Return whether a request may be sent: it is young, open, and holds nothing that was not asked for."""
        return self.is_young() and self._wire.is_quiet()

    def is_silent(self) -> bool:
        """Return whether it is open, and nothing came that was not asked for, right after it was opened."""
        return self._wire.is_silent()

    async def send(self, message: bytes, sent: Callable[[bool], None], seconds: float) -> None:
        """Send a request whole."""
        with _told_as(httpx.WriteError, httpx.WriteTimeout):
            await self._wire.send(message, sent, seconds)

    async def read_head(self, seconds: float) -> Answer:
        """Return the answer, once its head is there."""
        answer = self._answer = Answer()
        while not answer.status:
            await self.read_on(seconds)
        return answer

    async def read_on(self, seconds: float) -> None:
        """Feed the answer with what comes next."""
        with _told_as(httpx.ReadError, httpx.ReadTimeout):
            data = await self._wire.receive(seconds)
        self._answer.feed(data)

    def is_reusable(self) -> bool:
        """Return whether it is ready for another request."""
        self._used_at = time.monotonic()
        return self._answer.leaves_reusable

    def close(self) -> None:
        """Close it now."""
        self._wire.close()


class _Body(httpx.AsyncByteStream):
    """The body of an answer as it comes. Read whole, it releases the connection; left earlier, it closes it."""

    def __init__(
        self, connection: _Connection, answer: Answer, seconds: float, release: Callable[[_Connection], None]
    ) -> None:
        self._connection = connection
        self._answer = answer
        self._seconds = seconds
        self._release = release
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not (part := self._answer.take()):
            if self._is_over:
                raise StopAsyncIteration
            await self._connection.read_on(self._seconds)
            self.release_if_whole()
        return part

    def release_if_whole(self) -> None:
        """Release the connection, if the last byte of the body has come."""
        if self._answer.is_whole and not self._is_over:
            self._is_over = True
            self._release(self._connection)

    async def aclose(self) -> None:
        """Close the connection, if the body was not read to its end."""
        if not self._is_over:
            self._is_over = True
            self._connection.close()


class _told_as:  # noqa: N801  a context manager; one made by contextlib costs more than its block
    """Raises httpx's errors for those of the system, and for a time limit."""

    __slots__ = ("_failure", "_timeout")

    def __init__(self, failure: type[httpx.NetworkError], timeout: type[httpx.TimeoutException]) -> None:
        self._failure = failure
        self._timeout = timeout

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        if isinstance(exc, OSError) and is_of_the_system(exc):
            raise self._failure(exc.strerror or type(exc).__name__) from exc
        if isinstance(exc, TooSlow):
            raise self._timeout(type(exc).__name__) from exc
