"""One connection of our engine, the response that it is receiving, and the body of that response."""

from __future__ import annotations

import time
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, Self

import httpx
from attrs import define

from sampling_async._wire.bodies import too_large
from sampling_async._wire.http1 import ResponseParser
from sampling_async._wire.reader import TooSlow
from sampling_async._wire.sockets import Wire, is_of_the_system
from sampling_async._wire.trust import ABOUT_THE_CLIENT, alert_in

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Generator, Mapping


@define
class Traffic:
    """What an engine has done so far; `sent` and `received` are bytes."""

    opened: int = 0
    closed: int = 0
    reused: int = 0
    sent: int = 0
    received: int = 0


class Connection:
    """A connection, and the response that it is receiving."""

    def __init__(self, wire: Wire, traffic: Traffic) -> None:
        self._wire = wire
        self._traffic = traffic
        self._is_open = True
        self._answer = ResponseParser()
        # when it last received something, 0 if never: the server counts its idle time from then
        self.used_at = 0.0
        self.idled_for = 0.0  # how long it had been idle when it was used again
        self.received = 0  # bytes of the current response, head and framing included
        self.session_is_new = True  # its TLS session was not taken yet
        self.is_kept = True  # False if a proxy closes it, or if the response is none of the service's own

    @property
    def was_idle(self) -> bool:
        return self.used_at > 0

    @property
    def certificate(self) -> Mapping[str, Any]:
        return self._wire.certificate

    def age(self, now: float) -> float:
        return now - self.used_at

    def is_quiet(self) -> bool:
        """Return whether the connection is open and holds no bytes that came without a request."""
        return self._wire.is_quiet()

    def was_refused(self, exc: BaseException) -> bool:
        """Return whether the server ended the TLS handshake and has read no request.

        With TLS 1.3 its alert may arrive after our half of the handshake, while the first request is sent.
        """
        is_first = not (self.was_idle or self.received or self._wire.post_handshake_auth)
        return is_first and alert_in(exc) in ABOUT_THE_CLIENT

    def take_session(self) -> ssl.SSLSession | None:
        """Return the TLS session, which the next connection can resume. Taken once, because it takes time."""
        self.session_is_new = False
        return self._wire.session

    async def send(self, message: bytes, sent: Callable[[bool], None], seconds: float) -> None:
        self.received = 0
        self._traffic.sent += len(message)
        try:
            await self._wire.send(message, sent, seconds)
        except (OSError, TooSlow) as exc:
            with failing_as(httpx.WriteError, httpx.WriteTimeout):
                # The server's alert, if there is one, explains more than the broken connection.
                if is_of_the_system(exc):
                    self._wire.is_silent()
                raise

    def new_answer(self) -> ResponseParser:
        answer = self._answer = ResponseParser()
        return answer

    async def read_on(self, seconds: float) -> None:
        try:
            data = await self._wire.receive(seconds)
        except (OSError, TooSlow):
            with failing_as(httpx.ReadError, httpx.ReadTimeout):
                raise
        self.received += len(data)
        self._traffic.received += len(data)
        self.used_at = time.monotonic()
        self._answer.feed(data)

    @property
    def is_answered(self) -> bool:
        return self.received > 0 and self._answer.is_whole

    @property
    def is_reusable(self) -> bool:
        return self._is_open and self._answer.leaves_reusable and self.is_kept

    def close(self) -> None:
        self._traffic.closed += self._is_open
        self._is_open = False
        self._answer.let_go()
        self._wire.close()


class Response(httpx.Response):
    """A response of our engine, whose body is still to be read. Its headers are parsed if they are read."""

    def __init__(self, status: int, body: BodyStream) -> None:
        # All that httpx's own constructor sets, which is not called, but `headers`.
        self.status_code = status
        self.stream = body
        self.extensions: dict[str, Any] = {"http_version": b"HTTP/1.1", "body": body}
        self.history = []
        self.next_request = None
        self.is_closed = self.is_stream_consumed = False
        self.default_encoding = "utf-8"
        self._request = None
        self._num_bytes_downloaded = 0

    def __getattr__(self, name: str) -> httpx.Headers:
        if name != "headers":
            raise AttributeError(name)
        self.headers = httpx.Headers(self.extensions["body"].headers)
        return self.headers

    def aiter_raw(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
        """Return the parts of the body as received, without a generator."""
        assert chunk_size is None
        body: BodyStream = self.extensions["body"]
        return body

    async def aclose(self) -> None:
        await self.extensions["body"].aclose()


class Pool(Protocol):
    """What a body returns its connection to."""

    def release(self, connection: Connection) -> None:
        """Keep a connection for the next request, if it is ready for one."""

    def drop(self, connection: Connection) -> None:
        """Close a connection."""


class BodyStream(httpx.AsyncByteStream):
    """The body of a response as it arrives. It holds the connection until the response is judged."""

    def __init__(self, connection: Connection, answer: ResponseParser, seconds: float, pool: Pool) -> None:
        self.headers = answer.headers
        self.encoding = answer.fields.get(b"content-encoding", b"")
        self._connection = connection
        self._answer = answer
        self._seconds = seconds
        self._pool = pool
        self._is_released = False
        self.is_over = answer.is_whole
        self.most = inf  # bytes on the wire, with head, chunk framing and trailers

    def __aiter__(self) -> Self:
        return self

    @property
    def certificate(self) -> Mapping[str, Any]:
        return self._connection.certificate

    def take(self) -> bytes:
        return self._answer.take()

    async def __anext__(self) -> bytes:
        while not (part := self._answer.take()):
            if self.is_over:
                raise StopAsyncIteration
            await self._connection.read_on(self._seconds)
            if self._connection.received > self.most:
                raise too_large(self.most, "on the wire")
            self.is_over = self._answer.is_whole
        return part

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._pool.release(self._connection)

    @property
    def is_followed(self) -> bool:
        return self._answer.is_followed

    def discard(self) -> None:
        """Close the connection, also if it was just released: the response may be another request's.

        The right one may still come, and would be taken for the response to the next request.
        """
        self._is_released = True
        self._pool.drop(self._connection)

    async def aclose(self) -> None:
        """Close the connection if the body was not received to its end."""
        if not self.is_over:
            self.is_over = True
            self.discard()


@contextmanager
def failing_as(
    failure: type[httpx.TransportError], timeout: type[httpx.TransportError]
) -> Generator[None, None, None]:
    """Turn errors of the system, and a time limit that passed, into errors of an exchange."""
    try:
        yield
    except OSError as exc:
        if not is_of_the_system(exc):
            raise
        raise failure(exc.strerror or type(exc).__name__) from exc
    except TooSlow as exc:
        raise timeout(type(exc).__name__) from exc
