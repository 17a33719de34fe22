"""One attempt on the wire, over httpx.

It hides what an HTTP library gets wrong for this service: the key goes to the configured origin and into
nothing that prints, bodies are bounded while they are read, an attempt has a wall limit, a failure says whether
anything was sent, and a pool that cancellation may have damaged is replaced.
"""

from __future__ import annotations

import logging
import ssl
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.lowlevel
import httpx
from attrs import define, field

from sampling_async._bodies import BodyLimits, RequestBody, read_body
from sampling_async._cancellation import is_stray
from sampling_async._errors import (
    ClientClosedError,
    DecodeError,
    Delivery,
    InvalidRequestError,
    SamplingError,
    TransportError,
    TransportTimeoutError,
)
from sampling_async._replies import Reply
from sampling_async._version import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from sampling_async._configuration import Secret
    from sampling_async._policy import Timeouts
    from sampling_async._protocol import Call

_KEY_HEADER: Final = "API_AUTH_KEY"
_KEEPALIVE_SECONDS: Final = 4.0  # below the 5 s after which common servers close, so that we never race them
_OK: Final = 200
_POOL_SECONDS: Final = 2.0
_CLOSING_SECONDS: Final = 5.0
_REFUSAL_SECONDS: Final = 2.0


@define
class Track:
    """What is known, while a call runs, about whether it may have had its effect.

    Attributes:
        sent: Whether bytes of the running attempt may have left.
        ambiguous: Whether an earlier attempt may have worked.
        attempts: How many attempts were begun.
    """

    sent: bool = False
    ambiguous: bool = False
    attempts: int = 0

    @property
    def delivery(self) -> Delivery:
        """What to say of the call if it ends here."""
        return "unknown" if self.sent or self.ambiguous else "not_sent"


class Session:
    """Carries single attempts to the service and back.

    Args:
        base_url: The service's base address, see `base_url_of`.
        api_key: The key, a Guid.
        timeouts: Limits of an attempt.
        limits: Bounds of a body.
        connections: How many connections may be open; the scheduler keeps calls below it, so that no call
            ever queues in the pool.
        transport: Something of httpx that carries requests, in place of its own engine.
    """

    def __init__(
        self,
        base_url: httpx.URL,
        api_key: Secret,
        *,
        timeouts: Timeouts,
        limits: BodyLimits,
        connections: int,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self._base_url = base_url
        self._base_path = base_url.raw_path.decode().rstrip("/")
        self._key = api_key
        self._timeouts = timeouts
        self._limits = limits
        self._connections = connections
        self._transport = transport
        self._tls: ssl.SSLContext | None = None
        self._line: _Line | None = None
        self._scopes: set[anyio.CancelScope] = set()
        self._idle: anyio.Event | None = None
        self._loop: object = None
        self._headers = {
            "Accept": "application/json",
            "Accept-Encoding": "gzip",
            "User-Agent": f"sampling-async/{__version__}",
        }
        self.closed = False
        logging.getLogger("httpx").addFilter(_not_ours)

    def private(self) -> tuple[str, ...]:
        """Return the forms of the key that an answer may repeat, and nobody else."""
        key = self._key.reveal()
        return key, key.replace("-", "")

    async def attempt(self, call: Call[Any], track: Track) -> Reply:
        """Carry one attempt out and return the reply, whatever its status.

        Raises:
            ClientClosedError: The session is closed, or was while this ran.
            TransportTimeoutError: A limit passed.
            TransportError: The connection failed.
            DecodeError: The body is beyond the limits or its content encoding is broken.
            InvalidRequestError: The client belongs to another event loop.
        """
        track.sent = False
        self._check_open()
        track.attempts += 1
        wall = self._timeouts.wall_limit(call.endpoint, call.quota_ids)
        failure: SamplingError | None = None
        with self.until_closed(wall) as scope:
            try:
                async with self._open_line() as line:
                    return await self._exchange(line, call, track)
            except SamplingError as exc:
                failure = exc
            except BaseException as exc:
                # A transport may raise anything, a cancellation of its own making too; none of it may get out.
                if not (isinstance(exc, Exception) or is_stray(exc)):
                    raise
                failure = _translated(exc, track)
        if scope.cancelled_caught:
            failure = self._interrupted(wall, track)
        assert failure is not None
        # Raised here, outside of the handlers: the context of the original holds headers and URLs.
        raise failure

    def _interrupted(self, wall: float, track: Track) -> SamplingError:
        if self.closed:
            return ClientClosedError("the client was closed during the call", delivery=track.delivery)
        return TransportTimeoutError(
            f"no complete answer within the wall limit of {wall:g} s", delivery=track.delivery
        )

    async def _exchange(self, line: _Line, call: Call[Any], track: Track) -> Reply:
        request = self._request(call, track)
        quiet = _ours.set(True)
        try:
            response = await line.client.send(request, stream=True)
        except BaseException as exc:
            # Cancelled as its connection opens, a call can leave a slot of httpx's pool taken for good.
            if isinstance(exc, httpx.PoolTimeout) or not (track.sent or isinstance(exc, Exception)):
                self._retire(line)
            raise
        finally:
            _ours.reset(quiet)
        limits = self._limits.of(call.endpoint)
        try:
            if response.status_code == _OK:
                body: bytes | None = await read_body(response, *limits)
            else:
                body = await _read_in_passing(response, limits)
        finally:
            await response.aclose()
        return Reply(
            response.status_code,
            body or b"",
            response.headers.get("Retry-After"),
            response.headers.get("Date"),
            is_whole=body is not None,
        )

    def _request(self, call: Call[Any], track: Track) -> httpx.Request:
        async def trace(event: str, _info: Any) -> None:
            if not event.startswith("connection."):  # an event we do not know counts as sending
                track.sent = True

        limits = self._timeouts
        read = limits.read_limit(call.endpoint, call.quota_ids)
        timeout = {
            "connect": limits.connect,
            "write": limits.write,
            "read": read,
            "pool": _POOL_SECONDS,
        }
        extensions: dict[str, Any] = {"timeout": timeout}
        if self._transport is None:
            extensions["trace"] = trace
        else:
            track.sent = True  # a transport we do not know does not tell
        url = self._base_url.copy_with(raw_path=f"{self._base_path}{call.target}".encode())
        if call.body is None:
            return httpx.Request(call.method, url, headers=self._headers, extensions=extensions)
        headers = {
            "Host": url.netloc.decode(),
            **self._headers,
            "Content-Type": "application/json",
            "Content-Length": str(len(call.body)),
        }
        return httpx.Request(
            call.method, url, headers=headers, stream=RequestBody(call.body), extensions=extensions
        )

    @contextmanager
    def until_closed(self, seconds: float | None = None) -> Generator[anyio.CancelScope]:
        """Run a block that closing the session interrupts, or a number of seconds."""
        with anyio.CancelScope() as scope:
            if seconds is not None:
                scope.deadline = anyio.current_time() + seconds
            if self.closed:
                scope.cancel()
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)
                if self._idle is not None and not self._scopes:
                    self._idle.set()

    def _check_open(self) -> None:
        if self.closed:
            raise ClientClosedError("the client is closed; make a new one")
        loop = anyio.lowlevel.current_token()
        if self._loop is None:
            self._loop = loop
        elif self._loop != loop:
            raise InvalidRequestError(
                "this client belongs to another event loop; make one client for each loop"
            )

    @asynccontextmanager
    async def _open_line(self) -> AsyncGenerator[_Line]:
        line = self._line = self._line or _Line(self._new_client())
        line.users += 1
        try:
            yield line
        finally:
            line.users -= 1
            if line.retired and not line.users:
                await line.aclose()

    def _new_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=_KeyedTransport(self._transport or self._new_engine(), self._base_url, self._key),
            follow_redirects=False,
            trust_env=False,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        )

    def _new_engine(self) -> httpx.AsyncBaseTransport:
        if self._tls is None:
            secure = self._base_url.scheme == "https"  # loading certificates takes longer than many a call
            self._tls = httpx.create_ssl_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return httpx.AsyncHTTPTransport(
            verify=self._tls,
            trust_env=False,
            limits=httpx.Limits(
                max_connections=self._connections,
                max_keepalive_connections=self._connections,
                keepalive_expiry=_KEEPALIVE_SECONDS,
            ),
        )

    def _retire(self, line: _Line) -> None:
        """Let later attempts open a new line; this one closes when those that use it have ended."""
        if self._transport is None:
            line.retired = True
            if self._line is line:
                self._line = None

    async def aclose(self) -> None:
        """End what runs with `ClientClosedError`, wait for it, and close the connections."""
        self.closed = True
        if self._loop not in (None, anyio.lowlevel.current_token()):
            self._line = None  # its connections ended with their event loop
            return
        with anyio.CancelScope(shield=True):
            if self._scopes:
                self._idle = self._idle or anyio.Event()
                for scope in tuple(self._scopes):
                    scope.cancel()
                with anyio.move_on_after(_CLOSING_SECONDS):  # for ever, if closed from within an attempt
                    await self._idle.wait()
            if self._line is not None:
                line, self._line = self._line, None
                await line.aclose()


@define(eq=False)
class _Line:
    """An httpx.AsyncClient with its pool of connections, and how many attempts use it."""

    client: httpx.AsyncClient
    users: int = field(default=0, init=False)
    retired: bool = field(default=False, init=False)

    async def aclose(self) -> None:
        with anyio.move_on_after(_CLOSING_SECONDS, shield=True):
            await self.client.aclose()


class _KeyedTransport(httpx.AsyncBaseTransport):
    """Adds the key below everything of httpx that logs, redirects or puts requests into exceptions."""

    def __init__(self, inner: httpx.AsyncBaseTransport, base_url: httpx.URL, key: Secret) -> None:
        self._inner = inner
        self._origin = _origin(base_url)
        self._key = key

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        headers = request.headers.copy()
        if _origin(request.url) == self._origin:
            headers[_KEY_HEADER] = self._key.reveal()
        keyed = httpx.Request(
            request.method, request.url, headers=headers, stream=request.stream, extensions=request.extensions
        )
        del headers
        try:
            return await self._inner.handle_async_request(keyed)
        except BaseException as exc:  # noqa: BLE001  raised again
            # The frames below hold the headers in their locals, where a crash reporter finds them.
            raise exc.with_traceback(None)  # noqa: B904

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _read_in_passing(response: httpx.Response, limits: tuple[int, int]) -> bytes | None:
    """Read the body of a refusal, whose status counts anyway; None if it does not come whole and soon."""
    with anyio.move_on_after(_REFUSAL_SECONDS):
        try:
            return await read_body(response, *limits)
        except (DecodeError, httpx.HTTPError):
            pass
    return None


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


_ours: ContextVar[bool] = ContextVar("sampling_async_request", default=False)


def _not_ours(_record: logging.LogRecord) -> bool:
    """Keep httpx's lines about our requests, which spell out URLs with member codes, out of its log."""
    return not _ours.get()


_NEVER_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)


def _translated(exc: BaseException, track: Track) -> TransportError:
    """Return our error for one of a transport, without its text where that may quote the wire."""
    track.sent = not isinstance(exc, _NEVER_SENT)
    name = type(exc).__name__
    if isinstance(exc, httpx.TimeoutException):
        return TransportTimeoutError(f"a time limit passed ({name})", delivery=track.delivery)
    refused = _certificate_refusal(exc)
    if refused is not None:
        return TransportError(
            f"the TLS certificate was refused: {refused.verify_message}",
            delivery=track.delivery,
            permanent=True,
        )
    detail = f": {exc}" if isinstance(exc, httpx.ConnectError) else ""
    what = "the connection was lost after the request was sent" if track.sent else "no connection"
    return TransportError(f"{what} ({name}{detail})", delivery=track.delivery)


def _certificate_refusal(exc: BaseException | None) -> ssl.SSLCertVerificationError | None:
    while exc is not None and not isinstance(exc, ssl.SSLCertVerificationError):
        exc = exc.__cause__ or exc.__context__
    return exc
