"""The transport under httpx: it adds the key and uses our engine, or a transport that the user gave."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import anyio
import httpx

from sampling_async._contract.checks import shown
from sampling_async._contract.errors import InvalidRequestError, is_test_failure
from sampling_async._contract.timing import BODY, FIRST_BYTE
from sampling_async._wire.bodies import origin_of

if TYPE_CHECKING:
    import logging
    from contextlib import AbstractContextManager

    from sampling_async._wire.address import Secret
    from sampling_async._wire.engine import Engine


_KEY_HEADER: Final = "API_AUTH_KEY"


class Client(httpx.AsyncClient):
    """An httpx client that hands requests to a `Carrier` and does nothing else.

    It follows no redirects, keeps no cookies and writes no log. Monitoring agents wrap methods of httpx's class
    and report addresses, which contain member codes. This class bypasses these methods.
    """

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(transport=carrier, trust_env=False)
        # Set again: an agent may have wrapped the transport while `__init__` ran.
        self._transport = carrier

    async def send(self, request: httpx.Request, **_: Any) -> httpx.Response:
        """Send a request and return its response, whose body is still to be read."""
        # Through this method and not `self._transport`, because respx patches it.
        return await self._transport_for_url(origin_of(request)).handle_async_request(request)


class Carrier(httpx.AsyncBaseTransport):
    """The transport of `Client`: it sends requests by our engine, or by a transport that the user gave.

    It adds the key at the lowest level, below all parts of httpx that log, redirect or put requests into
    exceptions.
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
        self._home: httpx.URL | None = None  # the latest URL of that origin, so that it is compared once
        self._key = key

    @property
    def knows_what_was_sent(self) -> bool:
        """Whether requests go through our engine, which knows exactly whether anything was sent."""
        return self._engine is not None and not self._engine.is_bypassed

    def may_have_raised(self, exc: BaseException) -> bool:
        """Return whether an error may come from the engine or transport, and not from the application."""
        if self._engine is not None and self.knows_what_was_sent:
            return self._engine.may_have_raised(exc)
        return isinstance(exc, Exception)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        private = {_KEY_HEADER: self._key.reveal()} if self._is_home(origin_of(request)) else {}
        try:
            if self._engine is not None and not self._engine.is_bypassed:
                return await self._engine.exchange(request, private)
            # A request that the session did not make has no `sent`. `bool` then ignores the argument.
            sent = request.extensions.get("sent", bool)
            sent(False)
            # Mocks may never give the event loop a turn, as our engine does.
            await anyio.lowlevel.checkpoint()
            sent(True)
            enter = request.extensions.get("enter", bool)
            enter(FIRST_BYTE)
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
                response = await self._httpx_transport().handle_async_request(keyed)
            enter(BODY)
            return response  # noqa: TRY300
        except BaseException as exc:  # noqa: BLE001  raised again
            # The frames of the traceback hold the headers in their local variables, which crash reporters send.
            # What fails a test keeps those of the mock, which show where.
            is_of_a_mock = is_test_failure(exc) and not self.knows_what_was_sent
            below = exc.__traceback__.tb_next if is_of_a_mock and exc.__traceback__ else None
            raise exc.with_traceback(below)  # noqa: B904
        finally:
            del private

    def _is_home(self, url: httpx.URL) -> bool:
        if url is not self._home and _origin(url) == self._origin:
            self._home = url
        return url is self._home

    def _httpx_transport(self) -> httpx.AsyncBaseTransport:
        if self._transport is not None:
            return self._transport
        self._stock = self._stock or httpx.AsyncHTTPTransport(trust_env=False)
        return self._stock

    def close_idle(self) -> None:
        """Close the idle connections of our engine. Later requests open new ones."""
        if self._engine is not None:
            self._engine.close_idle()

    def close(self) -> None:
        """Close the idle connections of our engine for good. Without `await`, nothing can interrupt this."""
        if self._engine is not None:
            self._engine.close()

    async def aclose(self) -> None:
        """Close the other transports: the one that the user gave, and httpx's own."""
        for transport in (self._transport, self._stock):
            if transport is not None:
                await transport.aclose()


def checked_transport(transport: httpx.AsyncBaseTransport) -> httpx.AsyncBaseTransport:
    """Return a transport that the user gave, after a check; any class with its methods will do.

    Raises:
        InvalidRequestError: It is none, such as a client, a class, or a transport without `async`.
    """
    has_method = callable(getattr(transport, "handle_async_request", None))
    if isinstance(transport, type) or not has_method:
        raise InvalidRequestError(
            "transport must be an httpx.AsyncBaseTransport, such as httpx.MockTransport(handler) or "
            f"httpx.ASGITransport(app), not {shown(transport)}"
        )
    return transport


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


_ours: ContextVar[bool] = ContextVar("sampling_async_request", default=False)


def is_not_of_this_client(_record: logging.LogRecord) -> bool:
    """Filter httpx's log: drop its lines about our requests, because their URLs contain member codes."""
    return not _ours.get()


class _Unwatched:
    """A block in which a foreign transport reports no request, neither to httpx's log nor to OpenTelemetry.

    Such a transport may use an httpx client, which logs, and OpenTelemetry watches transports.
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
