"""One attempt on the wire, over httpx.

It hides what an HTTP library gets wrong for this service: the key goes to the configured origin and into
nothing that prints, bodies are bounded while they are read, an attempt has a wall limit, and a failure says
whether anything was sent.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import anyio
import httpx
from attrs import define

from sampling_async._bodies import Body, BodyLimits, RequestBody
from sampling_async._cancellation import is_stray
from sampling_async._errors import (
    ClientClosedError,
    DecodeError,
    Delivery,
    InvalidRequestError,
    SamplingError,
    TransportTimeoutError,
)
from sampling_async._failures import translated, was_never_sent, way_of
from sampling_async._loops import cancel_scope, running_loop
from sampling_async._replies import OK, Reply
from sampling_async._version import __version__

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

    from sampling_async._configuration import Proxy, Secret
    from sampling_async._engine import Engine
    from sampling_async._policy import Timeouts
    from sampling_async._protocol import Call

T = TypeVar("T")
BodyReader: TypeAlias = "Callable[[Body], Awaitable[Reply]]"
"""What reads the body of a 200, and closes it."""

_KEY_HEADER: Final = "API_AUTH_KEY"
_CLOSING_SECONDS: Final = 5.0
_REFUSAL_SECONDS: Final = 2.0


@define
class Track:
    """What is known, while a call runs, about whether it may have had its effect.

    Attributes:
        sent: Whether bytes of the running attempt may have left.
        ambiguous: Whether an earlier attempt may have worked.
        attempts: How many attempts were begun.
        is_told: Whether the user was told what is known. From then on nothing is sent, or it would be untrue.
    """

    sent: bool = False
    ambiguous: bool = False
    attempts: int = 0
    is_told: bool = False

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
        connections: How many unused connections are kept open; how many are used, the scheduler bounds.
        transport: Something of httpx that carries requests, in place of our engine.
        idle_seconds: How long our engine keeps an unused connection.
        proxy: Our engine's way to the service.
        tls: How our engine speaks TLS; default, as the environment says.

    Attributes:
        closed: Whether it was closed, or is being.
    """

    closed = False
    _loop: object = None  # that of the first attempt

    def __init__(
        self,
        base_url: httpx.URL,
        api_key: Secret,
        *,
        timeouts: Timeouts,
        limits: BodyLimits,
        connections: int,
        transport: httpx.AsyncBaseTransport | None,
        idle_seconds: float,
        proxy: Proxy | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._base_url = base_url
        self._base_path = base_url.raw_path.decode().rstrip("/")
        self._key = api_key
        self.timeouts = timeouts
        self._limits = limits
        self._own_engine = transport is None
        self._has_proxy = proxy is not None
        engine: Engine | None = None
        if transport is None:
            from sampling_async import _engine  # noqa: PLC0415  its parser takes time to import

            engine = _engine.Engine(idle=connections, idle_seconds=idle_seconds, proxy=proxy, tls=tls)
        self._carrier = _Carrier(engine, transport, base_url, api_key)
        self._http = _Client(self._carrier)
        # httpx takes longer for a URL, and for headers, than for the whole request.
        self._url = lru_cache(maxsize=64)(self._made_url)
        self._headers_for = lru_cache(maxsize=256)(self._made_headers)
        self._scopes: set[anyio.CancelScope] = set()
        self._idle: anyio.Event | None = None
        self._headers = httpx.Headers(
            {
                "Host": base_url.netloc.decode(),
                "Accept": "application/json",
                "Accept-Encoding": "gzip",
                "User-Agent": f"sampling-async/{__version__}",
            }
        )
        logging.getLogger("httpx").addFilter(_not_ours)

    def private(self) -> tuple[str, ...]:
        """Return the forms of the key that an answer may repeat, and nobody else."""
        key = self._key.reveal()
        return key, key.replace("-", "")

    async def attempt(
        self,
        call: Call[Any],
        track: Track,
        within: float = inf,
        read: BodyReader | None = None,
    ) -> Reply:
        """Carry one attempt out and return the reply, whatever its status.

        Args:
            call: What to ask.
            track: Where to note what has been sent.
            within: Seconds left of a deadline; they shorten every limit of `Timeouts`.
            read: Reads the body of a 200, and closes it unless it raises; default, it is returned whole.

        Raises:
            ClientClosedError: The session is closed, or was while this ran.
            TransportTimeoutError: A limit passed.
            TransportError: The connection failed.
            DecodeError: The body is beyond the limits or its content encoding is broken.
            InvalidRequestError: The client belongs to another event loop.
            Exception: What a signal handler of the application raised.
        """
        track.sent = False  # what came of earlier attempts has been noted
        self.check_usable()
        track.attempts += 1
        wall = min(within, self.timeouts.wall_limit(call.endpoint, call.quota_ids))
        return await self.guarded(partial(self._exchange, call, track, within, read), track, wall)

    async def guarded(self, run: Callable[[], Awaitable[T]], track: Track, seconds: float) -> T:
        """Do a part of an attempt within so much time; what goes wrong is told by the errors of `attempt`."""
        failure: SamplingError | None = None
        with self.until_closed(seconds) as scope:
            try:
                return await run()
            except SamplingError as exc:
                failure = exc.with_traceback(None)  # whose frames may hold a body
            except BaseException as exc:
                # A transport may raise anything, a cancellation of its own making too; none of it may get out.
                if not (self._carrier.may_have_raised(exc) or is_stray(exc)):
                    raise
                if not self._carrier.knows_what_was_sent and was_never_sent(exc):
                    track.sent = False
                failure = translated(exc, track.delivery, sent=track.sent, way=self._way())
        if scope.cancelled_caught:
            failure = self._interrupted(seconds, track)
        assert failure is not None
        # Raised here, outside of the handlers: the context of the original holds headers and URLs.
        raise failure

    def _way(self) -> str:
        """Return what else to say of a connection that does not come about."""
        if not self._carrier.knows_what_was_sent:
            return ""
        return way_of(self._base_url.scheme, has_proxy=self._has_proxy, environment=os.environ)

    def _interrupted(self, wall: float, track: Track) -> SamplingError:
        if self.closed:
            return ClientClosedError("the client was closed during the call", delivery=track.delivery)
        return TransportTimeoutError(
            f"no complete answer within {max(wall, 0.0):.3g} s, "
            "the wall limit or what was left of the deadline",
            delivery=track.delivery,
        )

    async def _exchange(
        self,
        call: Call[Any],
        track: Track,
        within: float,
        read: BodyReader | None,
    ) -> Reply:
        response = await self._http.send(self._request(call, track, within), stream=True)
        body = Body(response, *self._limits.of(call.endpoint))
        try:
            if response.status_code == OK:
                return await (read or _read_whole)(body)
            return await _read_in_passing(response, body)
        except BaseException:
            await body.aclose()
            raise

    def _request(self, call: Call[Any], track: Track, within: float) -> httpx.Request:
        def sent(may_be: bool) -> None:  # noqa: FBT001
            if may_be and track.is_told:
                raise ClientClosedError("the fan-out has been left", delivery=track.delivery)
            track.sent = may_be

        sent(True)  # until an engine that knows says otherwise: ours does, a mock does not
        limits = self.timeouts
        read = limits.read_limit(call.endpoint, call.quota_ids)
        timeout = {"connect": limits.connect, "write": limits.write, "read": read, "pool": limits.connect}
        timeout = {name: min(seconds, within) for name, seconds in timeout.items()}
        extensions = {"timeout": timeout, "sent": sent}
        headers = self._headers if call.body is None else self._headers_for(len(call.body))
        body = RequestBody(call.body or b"")
        return httpx.Request(
            call.method, self._url(call.target), headers=headers, stream=body, extensions=extensions
        )

    def _made_headers(self, length: int) -> httpx.Headers:
        headers = self._headers.copy()
        headers.update({"Content-Type": "application/json", "Content-Length": str(length)})
        return headers

    def _made_url(self, target: str) -> httpx.URL:
        return self._base_url.copy_with(raw_path=f"{self._base_path}{target}".encode())

    def close_idle(self) -> None:
        """Close the connections that carry nothing now."""
        self._carrier.close_idle()

    def until_closed(self, seconds: float = inf) -> _UntilClosed:
        """Return the scope of a block that closing the session interrupts, or a number of seconds."""
        return _UntilClosed(self, seconds)

    def enter(self, scope: anyio.CancelScope) -> None:
        """Take note of a block to be interrupted."""
        if self.closed:
            scope.cancel()
        self._scopes.add(scope)

    def leave(self, scope: anyio.CancelScope) -> None:
        """Forget it."""
        self._scopes.discard(scope)
        if self._idle is not None and not self._scopes:
            self._idle.set()

    def check_usable(self) -> None:
        """Refuse what is asked of a closed session, or from another event loop than before."""
        if self.closed:
            raise ClientClosedError("the client is closed; make a new one")
        loop = running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop != loop:
            raise InvalidRequestError(
                "this client belongs to another event loop; make one client for each loop"
            )

    @property
    def is_at_home(self) -> bool:
        """Whether this runs in the event loop that the session was used in, if any."""
        return self._loop in (None, running_loop())

    async def aclose(self) -> None:
        """End what runs with `ClientClosedError`, wait for it, and close the connections.

        Interrupted, it has closed the unused ones of our engine; called again, it does the rest.
        """
        self.closed = True
        self._carrier.close()
        at_home = self.is_at_home
        with anyio.CancelScope(shield=True):
            if self._scopes and at_home:
                self._idle = self._idle or anyio.Event()
                for scope in tuple(self._scopes):
                    scope.cancel()
                with anyio.move_on_after(_CLOSING_SECONDS):  # for ever, if closed from within an attempt
                    await self._idle.wait()
            if at_home or self._own_engine:  # connections of another engine ended with their event loop
                with anyio.move_on_after(_CLOSING_SECONDS):
                    await self._carrier.aclose()

    def __del__(self) -> None:
        if self._loop is not None and not self.closed:
            text = f"unclosed SamplingClient of {self._base_url.host}: use `async with`, or call aclose()"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)


class _UntilClosed:
    """See `Session.until_closed`. One made by contextlib costs more than a part of an attempt."""

    __slots__ = ("_scope", "_session")

    def __init__(self, session: Session, seconds: float) -> None:
        self._session = session
        self._scope = cancel_scope(seconds)

    def __enter__(self) -> anyio.CancelScope:
        self._scope.__enter__()
        self._session.enter(self._scope)
        return self._scope

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            self._session.leave(self._scope)
        finally:
            left = self._scope.__exit__(exc_type, exc, traceback)
        return left


class _Client(httpx.AsyncClient):
    """httpx's client, which hands requests to their carrier and does nothing else.

    It follows no redirects, keeps no cookies and writes no log. Above all it passes nothing that monitoring
    agents wrap in httpx's class: they put addresses, and so member codes, into what they report.
    """

    def __init__(self, carrier: _Carrier) -> None:
        super().__init__(transport=carrier, trust_env=False)
        self._transport = carrier  # an agent may have put something between a client and its transport

    async def send(self, request: httpx.Request, **_: Any) -> httpx.Response:
        """Return the answer, whose body is still to be read."""
        # respx may have patched what is asked for the transport.
        return await self._transport_for_url(request.url).handle_async_request(request)


class _Carrier(httpx.AsyncBaseTransport):
    """Carries requests for httpx's client by our engine, or by a transport that was given instead.

    It adds the key below everything of httpx that logs, redirects or puts requests into exceptions.
    """

    def __init__(
        self,
        engine: Engine | None,
        transport: httpx.AsyncBaseTransport | None,
        base_url: httpx.URL,
        key: Secret,
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._stock: httpx.AsyncHTTPTransport | None = None
        self._origin = _origin(base_url)
        self._home: httpx.URL | None = None  # one of that origin, the latest
        self._key = key

    @property
    def knows_what_was_sent(self) -> bool:
        """Whether requests are carried by our engine, which says so exactly."""
        return self._engine is not None and not self._engine.is_bypassed

    def may_have_raised(self, exc: BaseException) -> bool:
        """Return whether an error may be of who carries requests; else it is of the application."""
        if self._engine is not None and self.knows_what_was_sent:
            return self._engine.may_have_raised(exc)
        return isinstance(exc, Exception)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        private = {_KEY_HEADER: self._key.reveal()} if self._is_home(request.url) else {}
        try:
            if self._engine is not None and not self._engine.is_bypassed:
                return await self._engine.exchange(request, private)
            sent = request.extensions.get("sent", bool)  # one that is not ours has none
            sent(False)
            await anyio.lowlevel.checkpoint()  # ours gives the event loop its turns; others, mocks, may not
            sent(True)
            headers = request.headers.copy()
            headers.update(private)
            keyed = httpx.Request(
                request.method,
                request.url,
                headers=headers,
                stream=request.stream,
                extensions=request.extensions,
            )
            del headers
            with _Unwatched():
                return await self._other_than_ours().handle_async_request(keyed)
        except BaseException as exc:  # noqa: BLE001  raised again
            # The frames below hold the headers in their locals, where a crash reporter finds them.
            raise exc.with_traceback(None)  # noqa: B904
        finally:
            del private

    def _is_home(self, url: httpx.URL) -> bool:
        if url is not self._home and _origin(url) == self._origin:
            self._home = url
        return url is self._home

    def _other_than_ours(self) -> httpx.AsyncBaseTransport:
        if self._transport is not None:
            return self._transport
        self._stock = self._stock or httpx.AsyncHTTPTransport(trust_env=False)
        return self._stock

    def close_idle(self) -> None:
        """Close what our engine keeps open, and let it go on."""
        if self._engine is not None:
            self._engine.close_idle()

    def close(self) -> None:
        """Close what our engine keeps open, now: nothing can come between."""
        if self._engine is not None:
            self._engine.close()

    async def aclose(self) -> None:
        """Close what else carried requests."""
        for transport in (self._transport, self._stock):
            if transport is not None:
                await transport.aclose()


async def _read_whole(body: Body) -> Reply:
    content = await body.read()
    await body.aclose()
    return Reply(OK, content)


async def _read_in_passing(response: httpx.Response, body: Body) -> Reply:
    """Read the body of a refusal, whose status counts also if that does not come whole and soon."""
    content = None
    with anyio.move_on_after(_REFUSAL_SECONDS):
        with suppress(DecodeError, httpx.HTTPError):
            content = await body.read()
    await body.aclose()
    asked, date = response.headers.get("Retry-After"), response.headers.get("Date")
    return Reply(response.status_code, content or b"", asked, date, is_whole=content is not None)


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


_ours: ContextVar[bool] = ContextVar("sampling_async_request", default=False)


def _not_ours(_record: logging.LogRecord) -> bool:
    """Keep httpx's lines about our requests, which spell out URLs with member codes, out of its log."""
    return not _ours.get()


class _Unwatched:
    """A block in which a transport of others tells nobody of a request: not httpx's log, and not OpenTelemetry.

    A transport may be built on a client of httpx, and OpenTelemetry watches transports.
    """

    def __enter__(self) -> None:
        # Never imported here: where it is not loaded, it watches nothing.
        telemetry = sys.modules.get("opentelemetry.instrumentation.utils")
        suppressed = getattr(telemetry, "suppress_http_instrumentation", nullcontext)
        self._telemetry: AbstractContextManager[object] = suppressed()
        self._telemetry.__enter__()
        self._quiet = _ours.set(True)

    def __exit__(self, *_: object) -> None:
        _ours.reset(self._quiet)
        self._telemetry.__exit__(None, None, None)
