"""The engine: a transport of httpx that carries requests as HTTP/1.1 over its own sockets.

httpx's own transport has three problems here. Cancellations make its pool lose slots. If two responses arrive
in one packet, the second one goes to the next request. And a request costs more, the more connections exist.
Here the gate limits how many requests run, and a connection belongs either to one request or to the list of
idle connections. A request that does not end with its whole response closes its connection at once, without
`await`. A request that is sent while the server closes the idle connection ends `unknown`. So an idle
connection is reused only while it is certainly open, and on asyncio it is closed as soon as the server closes
it. On trio nothing may run without a nursery: there that waits for the next request. Connections
through an HTTP proxy are made with CONNECT.
"""

from __future__ import annotations

import re
import ssl
import time
import weakref
from collections import deque
from contextlib import suppress
from contextvars import Context
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final, TypeAlias

import anyio
import httpx

from sampling_async._contract.exchange import FORBIDDEN, Meaning, statuses
from sampling_async._pacing.loops import asyncio_loop, while_alive
from sampling_async._pacing.timeline import BODY, FIRST_BYTE, SEND
from sampling_async._wire.bodies import Request
from sampling_async._wire.connection import BodyStream, Connection, Response, Traffic, failing_as
from sampling_async._wire.failures import Refusal
from sampling_async._wire.http1 import ResponseParser
from sampling_async._wire.sockets import Lookups, Wire, connect, is_of_the_system, received, send_whole
from sampling_async._wire.trust import Unusable, alert_in, default_context

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Mapping

    from sampling_async._wire.address import KeyHeader, Proxy


UNAUTHORIZED: Final = 407
# A client ignores these in a successful answer to CONNECT (RFC 9110 9.3.6), and reads no body of another one.
_FRAMING: Final = re.compile(rb"(?:content-length|transfer-encoding):", re.IGNORECASE)
_LINE_BYTES: Final = 2**16
_OK: Final = range(200, 300)
_PASSING: Final = statuses(Meaning.PASSING)
_WHO: Final = ": check the user and password in proxy= or SAMPLING_PROXY"
_SAYS: Final = {
    401: _WHO,  # tinyproxy's status for a wrong password
    UNAUTHORIZED: _WHO,
    FORBIDDEN: ": it does not allow connections to this host, for this client or for any",
}


async def dig_tunnel(proxy: Proxy, host: str, port: int, sock: socket.socket) -> None:
    """Send CONNECT on a new connection to the proxy. After that, all bytes go to the host.

    The proxy cannot read what TLS sends through the tunnel.
    """
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    lines += [f"{name}: {value}" for name, value in credentials_for(proxy).items()]
    await send_whole(sock, "\r\n".join([*lines, "", ""]).encode("ascii"))
    answer, rest, is_left_out = ResponseParser(), b"", False
    try:
        # Feed line by line, so that `rest` has exactly the bytes after the head.
        while not answer.status:
            line, rest = await _line(sock, rest)
            is_left_out = bool(_FRAMING.match(line)) or (is_left_out and line.startswith((b" ", b"\t")))
            if not is_left_out:
                answer.feed(line)
    except httpx.RemoteProtocolError:
        raise Refusal("the proxy did not respond in HTTP/1.1") from None
    finally:
        answer.let_go()
    if answer.status not in _OK:
        raise refusal_of(answer.status)
    if rest:
        raise Refusal("the proxy sent bytes after its response, before anything was sent to the host")


async def _line(sock: socket.socket, begun: bytes) -> tuple[bytes, bytes]:
    """Return the next line of a head with its end, and what came after it.

    Without an end it is the last, or too long.
    """
    line = b""
    while True:
        data = begun or await received(sock)
        start, newline, begun = data.partition(b"\n")
        line += start + newline
        if newline or not data or len(line) > _LINE_BYTES:
            return line, begun


def credentials_for(proxy: Proxy) -> Mapping[str, str]:
    """Return the headers with the proxy's credentials. They are sent to the proxy only."""
    return {} if proxy.authorization is None else {"Proxy-Authorization": proxy.authorization.reveal()}


def refusal_of(status: int) -> Refusal:
    text = f"the proxy answered {status}{_SAYS.get(status, '')}; nothing was sent to the service"
    return Refusal(text, permanent=status not in _PASSING)


_REMEMBERED: Final = 16
# Seconds. No server has a shorter idle time, so a connection that is closed sooner has another reason.
_SHORTEST: Final = 0.1
# Servers look for idle connections now and then, and several servers behind one address have different times.
# So only half of the shortest time seen is used.
_OF_THE_SHORTEST: Final = 0.5


class IdleTime:
    """The measured time for which an idle connection can be reused."""

    __slots__ = ("_closed_after", "_closed_at", "_round_trip", "limit", "seconds")

    def __init__(self, seconds: float) -> None:
        self.limit = self.seconds = seconds  # the greatest age, in seconds, at which a connection is reused
        self._closed_after: deque[float] = deque(maxlen=_REMEMBERED)
        self._closed_at = -inf
        self._round_trip = inf

    def opened_within(self, seconds: float) -> None:
        """Record the seconds it took to open a connection, which is at least one round trip."""
        self._round_trip = min(self._round_trip, seconds)

    def was_closed(self, after: float, now: float) -> None:
        """Record that the other side closed a connection, so many seconds after it was last used."""
        if after < _SHORTEST:
            return
        self._closed_at = now
        self._closed_after.append(after)
        shortest = min(self._closed_after)
        # A request arrives half a round trip after it was sent, and a close is seen half a round trip late. The
        # factor 2 doubles that. Example: closes were seen after 3 s and 5 s, and the round trip is 0.1 s. Then
        # the limit is 1.5 s, the smaller of 0.5 * 3 s and 3 s - 0.2 s.
        in_time = shortest - 2 * self._round_trip
        self.limit = max(0.0, min(self.seconds, _OF_THE_SHORTEST * shortest, in_time))

    def was_kept(self, since: float) -> None:
        """Record that a connection stayed open for the whole time, idle since `since` on the same clock."""
        # If a close was seen during that time, this connection may belong to another server behind the address.
        if since > self._closed_at:
            self._closed_after.clear()
            self.limit = self.seconds


Limits: TypeAlias = "Mapping[str, float]"

_OF_THE_SERVICE: Final = statuses(Meaning.OWN)

# The errors of a request on a connection that the server was closing.
_ENDS: Final = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


class Engine(httpx.AsyncBaseTransport):
    """An HTTP/1.1 engine for one origin that survives cancellation and knows whether anything was sent."""

    def __init__(
        self,
        *,
        key: KeyHeader,
        idle: int,
        idle_seconds: float,
        proxy: Proxy | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._key = key
        self._idle: deque[Connection] = deque()  # the latest used one is at the right end
        self._most_idle = idle if idle_seconds else 0
        self._idle_time = IdleTime(idle_seconds)
        self._timer: asyncio.TimerHandle | None = None
        self._lookups = Lookups()
        self._proxy = proxy
        # Without `tls`, the default context is loaded when the first connection needs it.
        self._tls = tls
        self._session: ssl.SSLSession | None = None
        self._resumes = True
        self.traffic = Traffic()

    @property
    def idle(self) -> int:
        return len(self._idle)

    def __repr__(self) -> str:
        return f"<Engine: {len(self._idle)} idle>"

    @staticmethod
    def may_have_raised(exc: BaseException) -> bool:
        """Return whether an error is a failed request, and not one that a signal handler raised."""
        return isinstance(exc, httpx.TransportError) or is_of_the_system(exc)

    async def handle_async_request(self, request: httpx.Request) -> Response:
        """Send a request and return its response, whose body is still to be read.

        The extension `sent` is called with False when it is certain that no byte has left, and with True before
        that may change; `enter` with each stage that begins. The key is added here, on the wire only.
        """
        assert isinstance(request, Request)
        limits: Limits = request.extensions["timeout"]
        sent: Callable[[bool], None] = request.extensions["sent"]
        enter: Callable[[int], object] = request.extensions["enter"]
        url = request.url
        sent(False)
        is_fetched = self._proxy is not None and url.scheme == "http"
        message = self._message_to_proxy(request) if is_fetched else _message(request, self._key.line_for(url))
        connection = self._take_idle() or await self._connect(url, limits)
        try:
            enter(SEND)
            await connection.send(message, sent, limits["write"])
            enter(FIRST_BYTE)
            answer = connection.new_answer()
            await connection.read_on(limits["read"])
            enter(BODY)
            while not answer.status:
                await connection.read_on(limits["read"])
            if is_fetched:
                _check_proxy_accepts(answer, sent)
                connection.is_kept = _is_kept(answer)
            if answer.status not in _OF_THE_SERVICE:
                connection.is_kept = False
        except BaseException as exc:
            connection.close()
            self._learn_from(connection, exc)
            # The server ended the TLS handshake, so it has read no byte of the request.
            if connection.was_refused(exc):
                sent(False)
            raise
        return Response(answer.status, BodyStream(connection, answer, limits["read"], self))

    def _message_to_proxy(self, request: Request) -> bytes:
        assert self._proxy is not None
        private = "".join(f"{name}: {text}\r\n" for name, text in credentials_for(self._proxy).items()).encode()
        before = b"http://%b" % request.url.netloc
        return _message(request, self._key.line_for(request.url) + private, before)

    def _take_idle(self) -> Connection | None:
        now = time.monotonic()
        # Take the latest used one, so that surplus connections age. One that is too old for reuse stays in the
        # list: whether the server closes it shows how long idle connections live.
        while self._idle and (age := self._idle[-1].age(now)) < self._idle_time.limit:
            connection = self._idle.pop()
            if connection.is_quiet():
                connection.idled_for = age
                self.traffic.reused += 1
                return connection
            self._note_end_of(connection, now)
        return None

    async def _connect(self, url: httpx.URL, limits: Limits) -> Connection:
        connecting = failing_as(httpx.ConnectError, httpx.ConnectTimeout)
        with anyio.move_on_after(limits["connect"]) as scope, connecting:
            wire = await self._opened(url)
            try:
                if wire.is_silent():
                    return self._welcomed(wire)
            except BaseException:
                wire.close()
                raise
            # Bytes that came before any request cannot be a response to it.
            wire.close()
            raise httpx.ConnectError("the server closed the connection, or sent something, before any request")
        assert scope.cancelled_caught
        raise httpx.ConnectTimeout("no connection within the time limit")

    async def _opened(self, url: httpx.URL) -> Wire:
        tls = self._context() if url.scheme == "https" else None
        host, port = url.raw_host.decode("ascii"), url.port or (443 if tls else 80)
        through, nearest = None, (host, port)
        if self._proxy is not None:
            through = partial(dig_tunnel, self._proxy, host, port) if tls else None
            nearest = self._proxy.host, self._proxy.port
        addresses = await self._lookups.addresses(*nearest)
        session = self._session
        try:
            return await connect(addresses, host, tls, through=through, session=session)
        except ssl.SSLError as exc:
            if session is None or not alert_in(exc):
                raise
        # Some servers end the handshake if they cannot resume a session, in place of a full handshake. So try
        # once more without a session, and never resume again.
        self._session, self._resumes = None, False
        return await connect(addresses, host, tls, through=through)

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            try:
                self._tls = default_context()
            except Unusable as exc:
                raise Refusal(str(exc), permanent=True) from None
        return self._tls

    def _welcomed(self, wire: Wire) -> Connection:
        self._idle_time.opened_within(wire.opened_within)
        connection = Connection(wire, self.traffic)
        self.traffic.opened += 1
        wire.on_readable(partial(while_alive, weakref.WeakMethod(self.look_at), weakref.ref(connection)))
        return connection

    def release(self, connection: Connection) -> None:
        if self._idle:
            self._close_old()
        # It is old already if whoever read the response kept it for long.
        is_old = connection.age(time.monotonic()) >= self._idle_time.seconds
        if is_old or not connection.is_reusable or not self._most_idle:
            connection.close()
            return
        if connection.session_is_new and self._resumes and (session := connection.take_session()):
            self._session = session
        if len(self._idle) >= self._most_idle:
            self._idle.popleft().close()
        self._idle.append(connection)
        if self._timer is None and (loop := asyncio_loop()) is not None:
            self._set_timer(loop)

    def drop(self, connection: Connection) -> None:
        with suppress(ValueError):
            self._idle.remove(connection)
        connection.close()

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the timer that closes the oldest connection. One timer serves all, and it is never cancelled."""
        seconds = self._idle_time.seconds - self._idle[0].age(time.monotonic())
        # In a context of its own: that of the task may hold the data of a request, and outlive it here.
        self._timer = loop.call_later(
            max(0.0, seconds), while_alive, weakref.WeakMethod(self.clear), loop, context=Context()
        )

    def clear(self, loop: asyncio.AbstractEventLoop) -> None:
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

    def look_at(self, readable: weakref.ref[Connection]) -> None:
        """Close a connection, idle or not judged yet, if it was closed or has bytes without a request."""
        if (connection := readable()) is None:
            return
        if (connection in self._idle or connection.is_answered) and not connection.is_quiet():
            with suppress(ValueError):
                self._idle.remove(connection)
            self._note_end_of(connection, time.monotonic())

    def _note_end_of(self, connection: Connection, now: float) -> None:
        connection.close()
        self._idle_time.was_closed(connection.age(now), now)

    def _learn_from(self, connection: Connection, exc: BaseException) -> None:
        """Derive the server's idle time, if it closed a reused connection before it responded."""
        if connection.was_idle and not connection.received and isinstance(exc, _ENDS):
            self._idle_time.was_closed(connection.idled_for, time.monotonic())

    def close(self) -> None:
        """Close the idle connections. A connection in use is closed by its request."""
        self._most_idle = 0
        self.close_idle()

    def close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _check_proxy_accepts(answer: ResponseParser, sent: Callable[[bool], None]) -> None:
    """Raise if a proxy requires credentials: then it has not sent the request to the service."""
    if answer.status == UNAUTHORIZED and b"proxy-authenticate" in answer.fields:
        sent(False)
        raise refusal_of(answer.status)


def _is_kept(answer: ResponseParser) -> bool:
    """Return whether a proxy says that it keeps its connection open: tinyproxy closes it without notice."""
    said = (value for name, value in answer.fields.items() if name.endswith(b"connection"))
    return any(b"keep-alive" in value.lower() for value in said)


def _message(request: Request, private: bytes, before: bytes = b"") -> bytes:
    return b"%b %b%b HTTP/1.1\r\n%b%b\r\n%b" % (
        request.method.encode("ascii"),
        before,
        request.extensions["target"],
        request.lines,
        private,
        request.stream.content,
    )
