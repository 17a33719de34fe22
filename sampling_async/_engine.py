"""What carries requests under httpx.AsyncClient: HTTP/1.1 over sockets of our own.

httpx's own engine loses slots of its pool under cancellation, gives the surplus half of two answers in one
packet to the next request, and works the longer the wider it is. This one has no pool to queue in: the
scheduler bounds what runs, and a connection belongs either to one request or to the list of idle ones. A
request that does not end with its whole answer closes its connection, at once and without awaiting.

An unused connection is closed when its time has passed, and on asyncio as soon as the server closes it. On
trio, where nothing may run without a nursery to run in, both wait for the next request or the client's end.
"""

from __future__ import annotations

import ssl
import sys
import time
import weakref
from collections import deque
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final, Self

import anyio
import httpx

from sampling_async._alerts import ABOUT_THE_CLIENT, alert_in
from sampling_async._answers import Answer
from sampling_async._bodies import RequestBody, too_large
from sampling_async._failures import Refusal
from sampling_async._idling import IdleTime
from sampling_async._lookups import Lookups
from sampling_async._loops import asyncio_loop
from sampling_async._sockets import TooSlow, Wire, connect, is_of_the_system
from sampling_async._trust import Unusable, default_context
from sampling_async._tunnels import UNAUTHORIZED, Tunnel, credentials_for, refusal_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from sampling_async._configuration import Proxy

    Limits = Mapping[str, float]

_ENDS: Final = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


class Engine:
    """Carries requests to one origin, survives cancellation and knows whether anything was sent.

    Args:
        idle: How many unused connections are kept open.
        idle_seconds: How long, at most. Where the server closes them sooner, they are used for less.
        proxy: The way to the origin: by CONNECT for https, and asked to fetch what is http.
        tls: How TLS is spoken; default, as the environment says.
    """

    def __init__(
        self,
        *,
        idle: int,
        idle_seconds: float,
        proxy: Proxy | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._idle: deque[_Connection] = deque()  # those used last at the right
        self._most_idle = idle if idle_seconds else 0
        self._idle_time = IdleTime(idle_seconds)
        self._timer: asyncio.TimerHandle | None = None
        self._lookups = Lookups()
        self._proxy = proxy
        self._tls = tls  # loaded when the first connection needs it
        self._session: ssl.SSLSession | None = None
        self._resumes = True

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
        sent: Callable[[bool], None] = request.extensions["sent"]
        sent(False)
        is_fetched = self._proxy is not None and request.url.scheme == "http"
        message = self._message_to_proxy(request, private) if is_fetched else _message(request, private)
        connection = self._take_idle() or await self._connect(request.url, limits)
        try:
            await connection.send(message, sent, limits["write"])
            answer = await connection.read_head(limits["read"])
            if is_fetched:
                _must_be_let_through(answer, sent)
                connection.is_kept = _is_kept(answer)
        except BaseException as exc:
            connection.close()
            self._learn_from(connection, exc)
            if connection.was_refused(exc):
                sent(False)
            raise
        body = _Body(connection, answer, limits["read"], self._release)
        body.release_if_whole()
        return httpx.Response(answer.status, headers=answer.headers, stream=body, extensions={"body": body})

    def _message_to_proxy(self, request: httpx.Request, private: Mapping[str, str]) -> bytes:
        assert self._proxy is not None
        target = b"http://%b%b" % (request.url.netloc, request.url.raw_path)
        return _message(request, {**private, **credentials_for(self._proxy)}, target)

    def _take_idle(self) -> _Connection | None:
        now = time.monotonic()
        # The one used last; those not needed grow old. One too old to be used stays, to be seen closed or not.
        while self._idle and self._idle[-1].age(now) < self._idle_time.limit:
            connection = self._idle.pop()
            if connection.is_quiet():
                connection.idled_for = connection.age(now)
                return connection
            self._note_end_of(connection, now)
        return None

    async def _connect(self, url: httpx.URL, limits: Limits) -> _Connection:
        with (
            anyio.move_on_after(limits["connect"]) as scope,
            _told_as(httpx.ConnectError, httpx.ConnectTimeout),
        ):
            wire = await self._opened(url)
            try:
                if wire.is_silent():
                    return self._welcomed(wire)
            except BaseException:
                wire.close()
                raise
            wire.close()  # what it says is not about a request that it has not got
            raise httpx.ConnectError("the server closed, or spoke, before it was asked")
        assert scope.cancelled_caught
        raise httpx.ConnectTimeout("no connection in time")

    async def _opened(self, url: httpx.URL) -> Wire:
        tls = self._context() if url.scheme == "https" else None
        host, port = url.raw_host.decode("ascii"), url.port or (443 if tls else 80)
        through, nearest = None, (host, port)
        if self._proxy is not None:
            through = Tunnel(self._proxy, host, port).dig if tls else None
            nearest = self._proxy.host, self._proxy.port
        addresses = await self._lookups.addresses(*nearest)
        session = self._session
        try:
            return await connect(addresses, host, tls, through=through, session=session)
        except ssl.SSLError as exc:
            if session is None or not alert_in(exc):
                raise
        # Some servers refuse what they cannot resume, in place of beginning anew.
        self._session, self._resumes = None, False
        return await connect(addresses, host, tls, through=through)

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            try:
                self._tls = default_context()
            except Unusable as exc:
                problem = str(exc)
            else:
                return self._tls
            raise Refusal(problem, permanent=True)
        return self._tls

    def _welcomed(self, wire: Wire) -> _Connection:
        self._idle_time.opened_within(wire.opened_within)
        connection = _Connection(wire)
        wire.tell_of_news(partial(_look_at, weakref.ref(self), weakref.ref(connection)))
        return connection

    def _release(self, connection: _Connection) -> None:
        if self._idle:
            self._close_old()
        if not connection.is_reusable() or not self._most_idle:
            connection.close()
            return
        if connection.session_is_new and self._resumes and (session := connection.take_session()):
            self._session = session
        if len(self._idle) >= self._most_idle:
            self._idle.popleft().close()
        self._idle.append(connection)
        if self._timer is None and (loop := asyncio_loop()) is not None:
            self._set_timer(loop)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the oldest connection closed in time: one timer serves all, and is left to run out."""
        seconds = self._idle_time.seconds - self._idle[0].age(time.monotonic())
        ours: weakref.ref[Engine] = weakref.ref(self)
        self._timer = loop.call_later(max(0.0, seconds), _clear, ours, loop)

    def clear(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close what has been unused for too long, and look again when the next one will have been."""
        self._timer = None
        self._close_old()
        if self._idle:
            self._set_timer(loop)

    def _close_old(self) -> None:
        now = time.monotonic()
        while self._idle and self._idle[0].age(now) >= self._idle_time.seconds:
            connection = self._idle.popleft()
            if connection.is_quiet():
                self._idle_time.was_kept(connection.used_at)
                connection.close()
            else:
                self._note_end_of(connection, now)

    def look_at(self, connection: _Connection) -> None:
        """Close a connection, if it is unused and the server has closed it or says what nobody asked for."""
        if connection in self._idle and not connection.is_quiet():
            self._idle.remove(connection)
            self._note_end_of(connection, time.monotonic())

    def _note_end_of(self, connection: _Connection, now: float) -> None:
        connection.close()
        self._idle_time.was_closed(connection.age(now), now)

    def _learn_from(self, connection: _Connection, exc: BaseException) -> None:
        """Learn that the server closed a connection while a request was on its way to it."""
        if connection.was_idle and not connection.received and isinstance(exc, _ENDS):
            self._idle_time.was_closed(connection.idled_for, time.monotonic())

    def close(self) -> None:
        """Close the idle connections; one in use is closed by its request."""
        self._most_idle = 0
        self.close_idle()

    def close_idle(self) -> None:
        """Close the idle connections, and go on with new ones."""
        while self._idle:
            self._idle.pop().close()


def _look_at(engine: weakref.ref[Engine], connection: weakref.ref[_Connection]) -> None:
    ours, news = engine(), connection()
    if ours is not None and news is not None:
        ours.look_at(news)


def _clear(engine: weakref.ref[Engine], loop: asyncio.AbstractEventLoop) -> None:
    ours = engine()
    if ours is not None:
        ours.clear(loop)


def _must_be_let_through(answer: Answer, sent: Callable[[bool], None]) -> None:
    """Raise what a proxy says that was to fetch something, and asks for credentials: it fetched nothing."""
    if answer.status == UNAUTHORIZED and b"proxy-authenticate" in {name.lower() for name, _ in answer.headers}:
        sent(False)
        raise refusal_of(answer.status)


def _is_kept(answer: Answer) -> bool:
    """Return whether a proxy says that it keeps its connection: tinyproxy closes it without a word."""
    said = [value.lower() for name, value in answer.headers if name.lower().endswith(b"connection")]
    return any(b"keep-alive" in value for value in said)


def _message(request: httpx.Request, private: Mapping[str, str], target: bytes | None = None) -> bytes:
    assert isinstance(request.stream, RequestBody)
    lines = [b"%b %b HTTP/1.1" % (request.method.encode("ascii"), target or request.url.raw_path)]
    lines += [b"%b: %b" % header for header in request.headers.raw]
    lines += [f"{name}: {value}".encode("ascii") for name, value in private.items()]
    return b"%b\r\n\r\n%b" % (b"\r\n".join(lines), request.stream.content)


class _Connection:
    """A connection and the answer that is on its way."""

    __slots__ = (
        "__weakref__",
        "_answer",
        "_wire",
        "idled_for",
        "is_kept",
        "received",
        "session_is_new",
        "used_at",
    )

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._answer = Answer()
        self.used_at = 0.0
        self.idled_for = 0.0
        self.received = 0  # bytes of the answer, all that is no body among them
        self.session_is_new = True
        self.is_kept = True  # as far as a proxy is concerned

    @property
    def was_idle(self) -> bool:
        """Whether it carried another request before."""
        return self.used_at > 0

    def age(self, now: float) -> float:
        """Return the seconds since it was used last."""
        return now - self.used_at

    def is_quiet(self) -> bool:
        """Return whether it is open, and holds nothing that was not asked for."""
        return self._wire.is_quiet()

    def was_refused(self, exc: BaseException) -> bool:
        """Return whether an error says that the server ended the handshake, which reads no request.

        With TLS 1.3 it says so when our half is over, and the first request on its way.
        """
        is_first = not (self.was_idle or self.received or self._wire.asks_for_who_we_are_later)
        return is_first and alert_in(exc) in ABOUT_THE_CLIENT

    def take_session(self) -> ssl.SSLSession | None:
        """Return what the next connection can go on with, once: asking for it takes time."""
        self.session_is_new = False
        return self._wire.session

    async def send(self, message: bytes, sent: Callable[[bool], None], seconds: float) -> None:
        """Send a request whole."""
        self.received = 0
        with _told_as(httpx.WriteError, httpx.WriteTimeout):
            try:
                await self._wire.send(message, sent, seconds)
            except OSError as exc:
                if is_of_the_system(exc):
                    self._wire.must_not_be_refused()
                raise

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
        self.received += len(data)
        self._answer.feed(data)

    def is_reusable(self) -> bool:
        """Return whether it is ready for another request."""
        self.used_at = time.monotonic()
        return self._answer.leaves_reusable and self.is_kept

    def close(self) -> None:
        """Close it now."""
        self._wire.close()


class _Body(httpx.AsyncByteStream):
    """The body of an answer as it comes. Read whole, it releases the connection; left earlier, it closes it.

    Attributes:
        most: How many bytes the answer may have on the wire: its head, what frames chunks, and trailers too.
    """

    def __init__(
        self, connection: _Connection, answer: Answer, seconds: float, release: Callable[[_Connection], None]
    ) -> None:
        self._connection = connection
        self._answer = answer
        self._seconds = seconds
        self._release = release
        self._is_over = False
        self.most = inf

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not (part := self._answer.take()):
            if self._is_over:
                raise StopAsyncIteration
            await self._connection.read_on(self._seconds)
            if self._connection.received > self.most:
                raise too_large(self.most, "on the wire")
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
