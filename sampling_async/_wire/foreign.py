"""The edge to httpx and httpx2: transports of theirs that the user gave, and mocks that patch them.

Our engine needs neither. A transport gets a request of its own library, and its responses are read as they are:
they have all that `ReceivedResponse` names. httpx2 is not required; whoever has a transport of it has imported
it.
"""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

from sampling_async._contract.checks import shown
from sampling_async._contract.errors import InvalidRequestError
from sampling_async._pacing.loops import Stepwise

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Mapping
    from contextlib import AbstractContextManager

    from sampling_async._wire.bodies import ReceivedResponse, Request

_LIBRARIES: Final = {"httpx": "httpcore", "httpx2": "httpcore2"}
"""Each with the library that its own engine is in."""


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
    has_method = callable(getattr(transport, "handle_async_request", None))
    if isinstance(transport, type) or not has_method:
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
    for library in _LIBRARIES:
        if library in modules and _is_patched(modules, library):
            return library
    return None


def _is_patched(modules: Mapping[str, Any], library: str) -> bool:
    httpx, engine = modules[library], _LIBRARIES[library]
    try:
        pool = modules[engine].AsyncConnectionPool.handle_async_request if engine in modules else None
        transport, client = httpx.AsyncHTTPTransport, httpx.AsyncClient
        return _are_patched(transport.handle_async_request, client._transport_for_url, pool)  # noqa: SLF001
    except AttributeError:  # another thread is importing it
        return False


@lru_cache(maxsize=8)  # used by each request
def _are_patched(transport: object, client: object, pool: object | None) -> bool:
    modules = [getattr(method, "__module__", "").split(".")[0] for method in (transport, client)]
    engine = getattr(pool, "__module__", "").split(".")[0]
    return not _LIBRARIES.keys() >= {*modules} or (pool is not None and engine not in _LIBRARIES.values())


class ForeignTransport:
    """A transport of httpx or httpx2, for requests of this package.

    Args:
        transport: The transport that the user gave; None for that of the library.
        library: "httpx" or "httpx2".
    """

    def __init__(self, transport: Transport | None, library: str | None = None) -> None:
        # What is no class of either, gets requests of httpx.
        of = (each.__module__.split(".")[0] for each in type(transport).__mro__)
        self._httpx: Any = import_module(library or next((name for name in of if name in _LIBRARIES), "httpx"))
        self.transport = transport or self._httpx.AsyncHTTPTransport(trust_env=False)
        self._client = self._httpx.AsyncClient(transport=self.transport, trust_env=False)
        # Set again: an agent may have wrapped the transport while `__init__` ran.
        self._client._transport = self.transport  # noqa: SLF001
        for name in _LIBRARIES:
            logging.getLogger(name).addFilter(is_not_of_this_client)

    async def exchange(self, request: Request, private: Mapping[str, str]) -> ReceivedResponse:
        """Send a request with some more headers, and return the response."""
        url = f"{request.origin.scheme}://{request.origin.netloc}{request.target.decode('ascii')}"
        headers = [*request.headers.items(), *private.items()]
        made = self._httpx.Request(
            request.method,
            url,
            headers=headers,
            stream=_stream_of(self._httpx)(request.body),
            extensions=request.extensions,
        )
        del headers, private  # the traceback of a mock that fails a test shows the variables of this frame
        with _Unwatched():
            # Through this method, because respx patches it. Not through `send`: monitoring agents patch that,
            # and report addresses, which contain member codes.
            transport = self._client._transport_for_url(made.url)  # noqa: SLF001
            response: ReceivedResponse = await transport.handle_async_request(made)
        return response


class _RequestBody:
    """The body of a request. The libraries' own is an async generator; trio warns of unfinished ones."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __aiter__(self) -> AsyncIterator[bytes]:
        return Stepwise((self.content,))


@lru_cache(maxsize=2)
def _stream_of(httpx: Any) -> Any:
    return type("RequestBody", (_RequestBody, httpx.AsyncByteStream), {})


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
