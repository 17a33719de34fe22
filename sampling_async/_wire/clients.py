"""The client's own httpx client, which requests go through if the user gave none.

It is over our engine; with `transport=` it is over that; and while a mock has patched httpx (respx,
pytest-httpx), over the transport that is patched.

Each works with httpx2 as well. That need not be installed: whoever gives a client or a transport of it has
imported it.
"""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio
import anyio.lowlevel
import httpx

from sampling_async._contract.checks import shown
from sampling_async._contract.errors import InvalidRequestError, is_test_failure
from sampling_async._pacing.timeline import BODY, FIRST_BYTE
from sampling_async._wire.bodies import RequestBody
from sampling_async._wire.failures import LIBRARIES, was_never_sent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from contextlib import AbstractContextManager
    from types import TracebackType

    from sampling_async._wire.address import KeyHeader
    from sampling_async._wire.bodies import Request
    from sampling_async._wire.engine import Engine

# Ends of the names of httpcore's events.
_SENDING: Final = ".send_request_headers.started"
_CONNECTING: Final = (".connect_tcp.started", ".connect_unix_socket.started", ".start_tls.started")


# --- The client's own ----------------------------------------------------------------------------------------


class _Direct:
    """What makes an AsyncClient, of httpx or httpx2, hand each request to its transport and do nothing else.

    Redirects are not followed, cookies not kept, and nothing is logged. With httpx's own `send`, a
    request of a bulk costs 9 to 14 % more CPU. And monitoring agents wrap that: they would write headers of
    theirs into requests, which share them here.
    """

    async def send(self, request: Any, **_: Any) -> Any:
        # Through this method and not `self._transport`, because respx patches it.
        transport: Any = self._transport_for_url(request.url)  # type: ignore[attr-defined]
        return await transport.handle_async_request(request)


class OwnClient(_Direct, httpx.AsyncClient):
    """The httpx client of a `SamplingClient` that was given none."""


def _client_over(transport: Any, library: Any) -> Any:
    """Return a client of a library that hands requests to a transport."""
    made = _class_of(library)(transport=transport, trust_env=False)
    # Set again: an agent may have wrapped the transport while `__init__` ran.
    made._transport = transport  # noqa: SLF001
    return made


@lru_cache(maxsize=2)
def _class_of(library: Any) -> Any:
    return OwnClient if library is httpx else type("OwnClient", (_Direct, library.AsyncClient), {})


class Sender:
    """What the session sends requests through: an httpx client, and what is to be known of it."""

    knows_what_was_sent = False  # always, and not only as far as a transport says

    async def send(self, request: Request) -> Any:
        """Send a request and return its response, of httpx or httpx2; its body is still to be read."""

    def may_have_raised(self, exc: BaseException) -> bool:
        """Return whether an error may come from here, and not from a signal handler of the application."""
        return isinstance(exc, Exception)  # foreign transports, hooks and flows may raise any

    def check_usable(self) -> None:
        """Refuse a client that cannot be used any more, or not here."""

    async def aclose(self) -> None:
        """Close what belongs to this client."""


class OverEngine(Sender):
    """Requests over our engine. The session closes it, without `await`."""

    knows_what_was_sent = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._client = _client_over(engine, httpx)

    def may_have_raised(self, exc: BaseException) -> bool:
        return self._engine.may_have_raised(exc)

    async def send(self, request: Request) -> httpx.Response:
        try:
            response: httpx.Response = await self._client.send(request, stream=True)
        except BaseException as exc:  # noqa: BLE001  raised again
            # The frames hold headers in their local variables, which crash reporters send.
            raise exc.with_traceback(None)  # noqa: B904
        return response


# --- Transports of the user, and patched ones ----------------------------------------------------------------


class Transport(Protocol):
    """A transport: an `AsyncBaseTransport` of httpx or httpx2, or another object with its methods."""

    def handle_async_request(self, request: Any, /) -> Awaitable[Any]:
        """Send a request and return the response."""
        ...

    def aclose(self) -> Awaitable[None]:
        """Close the connections."""
        ...


def checked_transport(transport: Transport) -> Transport:
    """Return a transport that the user gave, after a check; any class with its methods will do."""
    methods = (getattr(transport, name, None) for name in ("handle_async_request", "aclose"))
    if isinstance(transport, type) or not all(map(callable, methods)):
        raise InvalidRequestError(
            "transport must be an httpx.AsyncBaseTransport, such as httpx.MockTransport(handler) or "
            f"httpx.ASGITransport(app), or one of httpx2, not {shown(transport)}"
        )
    return transport


def patched_library() -> str | None:
    """Return the library whose own engine is patched, as respx and pytest-httpx do; None for none.

    Then requests go through it. A module that is not loaded cannot be patched.
    """
    modules: Mapping[str, Any] = sys.modules
    for library in LIBRARIES:
        if library in modules and _is_patched(modules, library):
            return library
    return None


def _is_patched(modules: Mapping[str, Any], library: str) -> bool:
    loaded, engine = modules[library], LIBRARIES[library]
    try:
        pool = modules[engine].AsyncConnectionPool.handle_async_request if engine in modules else None
        transport, client = loaded.AsyncHTTPTransport, loaded.AsyncClient
        return _are_patched(transport.handle_async_request, client._transport_for_url, pool)  # noqa: SLF001
    except AttributeError:  # another thread is importing it
        return False


@lru_cache(maxsize=8)  # used by each request
def _are_patched(transport: object, client: object, pool: object | None) -> bool:
    modules = [getattr(method, "__module__", "").split(".")[0] for method in (transport, client)]
    engine = getattr(pool, "__module__", "").split(".")[0]
    return not LIBRARIES.keys() >= {*modules} or (pool is not None and engine not in LIBRARIES.values())


def library_of(given: object) -> Any:
    """Return httpx2 for an object of it, and httpx for any other."""
    modules = (each.__module__.split(".")[0] for each in type(given).__mro__)
    return import_module(next((name for name in modules if name in LIBRARIES), "httpx"))


class Watch:
    """What is known of whether one attempt has sent anything, over any transport but the engine.

    Before a transport is called, nothing was sent. From then on it may have been: that is the cautious value
    for transports that say nothing, such as mocks. httpcore says more through its `trace` extension: when it
    opens a connection, and when the request's first byte leaves.
    """

    def __init__(self, request: Request) -> None:
        self._sent: Callable[[bool], None] = request.extensions["sent"]
        self._enter: Callable[[int], object] = request.extensions["enter"]
        # An `auth=` may repeat a request after its response, and a transport after an error. Once the request
        # was sent, what is known of a repetition does not count.
        self._is_unsent = True
        self._has_connected = False
        self._sent(False)

    def is_of(self, request: Any) -> bool:
        """Return whether this is the request of the attempt, and none that an `auth=` makes besides."""
        return bool(request.extensions.get("trace") == self.trace)

    def begin(self) -> None:
        """Record that a transport is called with the request."""
        self._sent(True)
        self._enter(FIRST_BYTE)

    def end(self) -> None:
        """Record that a response has begun."""
        self._enter(BODY)
        self._is_unsent = False

    def failed(self, exc: BaseException) -> None:
        """Record an error, which may prove that there was no connection."""
        if self._is_unsent and was_never_sent(exc, has_connected=self._has_connected):
            self._sent(False)

    async def trace(self, event: str, given: Mapping[str, Any]) -> None:
        """Note a step of httpcore."""
        if event.endswith(_SENDING):
            # A request that opens a tunnel goes to the proxy only.
            if getattr(given.get("request"), "method", b"") != b"CONNECT":
                self._sent(True)
                self._is_unsent = False
        elif self._is_unsent and event.endswith(_CONNECTING):
            self._has_connected = True
            self._sent(False)


class OverTransport(Sender):
    """Requests over a transport that the user gave, or over a patched one of a library.

    Such a transport may use an httpx client of its own, whose log and whose agents learn nothing of them.
    """

    def __init__(self, key: KeyHeader, transport: Transport | None, library: str | None = None) -> None:
        self._library: Any = library_of(transport) if library is None else import_module(library)
        self._transport = transport or self._library.AsyncHTTPTransport(trust_env=False)
        self._client = _client_over(self._transport, self._library)
        self._key = key
        for name in LIBRARIES:
            logging.getLogger(name).addFilter(is_not_of_this_client)

    async def send(self, request: Request) -> Any:
        watch = Watch(request)
        try:
            # Mocks may never give the event loop a turn, as our engine does.
            await anyio.lowlevel.checkpoint()
            watch.begin()
            with _Unwatched():
                response = await self._client.send(self._rebuilt(request, watch))
        except BaseException as exc:  # noqa: BLE001  raised again
            watch.failed(exc)
            raise exc.with_traceback(frames_of_mock(exc))  # noqa: B904
        watch.end()
        return response

    def _rebuilt(self, request: Request, watch: Watch) -> Any:
        """Return a request of the library, with the address and the headers as they are sent."""
        return self._library.Request(
            request.method,
            whole_url(request),
            headers=self._key.added_to(request.headers, request.url),
            stream=_stream_of(self._library)(request.stream.content),
            extensions={"timeout": request.extensions["timeout"], "trace": watch.trace},
        )

    async def aclose(self) -> None:
        await self._transport.aclose()


def frames_of_mock(exc: BaseException) -> TracebackType | None:
    """Return what an error's traceback keeps. Frames of this package hold headers, which crash reporters send.

    What fails a test keeps the frames of the mock, which show where.
    """
    below = exc.__traceback__ if is_test_failure(exc) else None
    while below is not None and below.tb_frame.f_globals.get("__package__") == __package__:
        below = below.tb_next
    return below


def whole_url(request: Request) -> str:
    target: bytes = request.extensions["target"]
    return f"{request.url.scheme}://{request.url.netloc.decode()}{target.decode('ascii')}"


@lru_cache(maxsize=2)
def _stream_of(library: Any) -> Any:
    return type("RequestBody", (RequestBody, library.AsyncByteStream), {})


_ours: ContextVar[bool] = ContextVar("sampling_async_request", default=False)


def is_not_of_this_client(_record: logging.LogRecord) -> bool:
    """Filter httpx's log: drop its lines about our requests, because their URLs contain member codes."""
    return not _ours.get()


class _Unwatched:
    """A block in which a foreign transport reports no request to httpx's log or OpenTelemetry.

    It may use an httpx client, which logs, and OpenTelemetry watches transports.
    """

    def __enter__(self) -> None:
        # Not imported here: if it is not loaded, it watches nothing.
        telemetry = sys.modules.get("opentelemetry.instrumentation.utils")
        suppressed = getattr(telemetry, "suppress_http_instrumentation", nullcontext)
        self._telemetry: AbstractContextManager[object] = suppressed()
        self._telemetry.__enter__()
        self._quiet = _ours.set(True)

    def __exit__(self, *_: object) -> None:
        _ours.reset(self._quiet)
        self._telemetry.__exit__(None, None, None)
