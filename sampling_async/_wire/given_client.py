"""The user's `httpx.AsyncClient`, or that of httpx2, as what requests go through.

httpx's own `send` runs, with all that the client was configured with. The key is added behind that, at the
transport: hooks and `auth=` flows do not see it, and it goes to no other origin, wherever they send the
request.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio.lowlevel

from sampling_async._contract.checks import shown
from sampling_async._contract.errors import ClientClosedError, InvalidRequestError
from sampling_async._pacing.loops import running_loop
from sampling_async._wire.address import USER_AGENT, origin_of
from sampling_async._wire.clients import Sender, Watch, frames_of_mock, library_of, whole_url
from sampling_async._wire.failures import is_any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import httpx

    from sampling_async._wire.address import KeyHeader
    from sampling_async._wire.bodies import Request
    from sampling_async._wire.clients import Transport

_REDIRECTS: Final = range(300, 400)
_LOG: Final = logging.getLogger("sampling_async.wire")
_OF_HTTP2: Final = ("hpack.hpack", "hpack.table")  # at DEBUG, they log every header
_loops: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()
"""The event loop that each client of a user was first used in."""


class HttpClient(Protocol):
    """An `AsyncClient` of httpx or of httpx2."""

    @property
    def is_closed(self) -> bool: ...

    @property
    def build_request(self) -> Callable[..., Any]: ...

    @property
    def send(self) -> Callable[..., Awaitable[Any]]: ...


def checked_client(client: Any, home: httpx.URL) -> Any:
    """Return an AsyncClient of httpx or httpx2 that the user gave, after a check."""
    library = library_of(client)
    if isinstance(client, library.Client):
        raise InvalidRequestError(
            "http_client must be an httpx.AsyncClient: an httpx.Client blocks the event loop with each request"
        )
    if isinstance(client, type) or not isinstance(client, library.AsyncClient):
        raise InvalidRequestError(
            f"http_client must be an httpx.AsyncClient, or one of httpx2, not {shown(client)}"
        )
    if client.is_closed:
        raise InvalidRequestError("http_client is closed; give one that is open as long as this client")
    if client.base_url.host and origin_of(client.base_url) != origin_of(home):
        raise InvalidRequestError(
            "http_client has a base_url with another host than this client's base_url, which counts; give an "
            "httpx client without one"
        )
    if client.params:
        raise InvalidRequestError("http_client has params, which would change every request; give one without")
    return client


class OverClient(Sender):
    """Requests over the user's client, by httpx's own `send`, with all that it was configured with.

    Not taken from it: the address, the key, the time limits of each attempt, whether redirects are followed.
    Nothing here closes it.
    """

    def __init__(self, key: KeyHeader, client: Any, home: httpx.URL, most: int) -> None:
        self._key = key
        self._client = client
        self._view = type("HttpClient", (_AtTheTransport, type(client)), {"__slots__": ("sampling_async",)})
        self._transport = client._transport_for_url(home)  # noqa: SLF001
        for name in _OF_HTTP2:
            logging.getLogger(name).addFilter(_has_no_key)
        self._warn_of_small_pool(most)

    def _warn_of_small_pool(self, most: int) -> None:
        pool = getattr(self._transport, "_pool", None)
        size = getattr(pool, "_max_connections", most)
        if size < most and not getattr(pool, "_http2", False):
            _LOG.warning(
                "http_client opens at most %d connections, fewer than max_concurrency=%d: requests wait in "
                "its pool, where their time limits run; raise httpx.Limits(max_connections=...)",
                size,
                most,
            )

    async def send(self, request: Request) -> Any:
        watch = Watch(request)
        try:
            await anyio.lowlevel.checkpoint()
            # The client for this one attempt: its attributes are the user's, also those that change later.
            view: Any = object.__new__(self._view)
            view.__dict__ = vars(self._client)
            view.sampling_async = self._key, watch
            built = self._client.build_request(
                request.method,
                whole_url(request),
                headers=self._headers_of(request),
                content=request.stream.content or None,
                extensions={"timeout": request.extensions["timeout"], "trace": watch.trace},
            )
            return await view.send(built, stream=True, follow_redirects=False)
        except BaseException as exc:  # noqa: BLE001  raised again
            # After a hook that called `raise_for_status`, the status counts; that of a token does not.
            if is_any(exc, "HTTPStatusError") and watch.is_of(exc.request):  # type: ignore[attr-defined]
                return exc.response  # type: ignore[attr-defined]  # of httpx or httpx2
            watch.failed(exc)
            raise exc.with_traceback(frames_of_mock(exc))  # noqa: B904

    def _headers_of(self, request: Request) -> list[tuple[str, str]]:
        """Return the session's headers of a request. A User-Agent of the user's client counts instead."""
        left_out = {"host", "content-length"}
        is_default = self._client.headers.get("user-agent", "").startswith("python-httpx")
        if not is_default and request.headers["user-agent"] == USER_AGENT:
            left_out.add("user-agent")
        return [each for each in request.headers.multi_items() if each[0] not in left_out]

    def check_usable(self) -> None:
        if self._client.is_closed:
            raise ClientClosedError("the http_client was closed by its owner; make a client with an open one")
        loop = running_loop()
        if self._client not in _loops:
            _loops[self._client] = _loop_of(self._transport) or loop
        if _loops[self._client] != loop:
            raise InvalidRequestError(
                "http_client belongs to another event loop, where it was used before; make one for each loop"
            )


def _has_no_key(record: logging.LogRecord) -> bool:
    return "api_auth_key" not in record.getMessage().lower()


def _loop_of(transport: Any) -> object:
    """Return the event loop of the connections in httpx's own pool, as far as they show it; else None."""
    for connection in getattr(getattr(transport, "_pool", None), "connections", ()):
        stream: Any = connection
        for name in ("_connection", "_network_stream", "_stream"):
            stream = getattr(stream, name, None)
        stream = getattr(stream, "transport_stream", stream)  # under TLS
        loop: object = getattr(getattr(stream, "_transport", None), "_loop", None)
        if loop is not None:
            return loop
    return None


class _AtTheTransport:
    """What makes the view of a user's client add the key behind its hooks, its `auth=` and its agents."""

    __slots__ = ()
    sampling_async: tuple[KeyHeader, Watch]

    def _transport_for_url(self, url: Any) -> _LastStep:
        return _LastStep(super()._transport_for_url(url), *self.sampling_async)  # type: ignore[misc]

    def __del__(self) -> None:
        """Do not end what belongs to the user's own object."""


class _LastStep:
    """A transport of the user's client, for one attempt."""

    def __init__(self, transport: Transport, key: KeyHeader, watch: Watch) -> None:
        self._transport = transport
        self._key = key
        self._watch = watch

    async def handle_async_request(self, request: Any) -> Any:
        # What an `auth=` sends elsewhere for a token is not the request of this attempt.
        is_ours = self._key.is_home(request.url) or self._watch.is_of(request)
        if is_ours:
            self._watch.begin()
        response = await self._transport.handle_async_request(self._with_key(request))
        if is_ours:
            self._watch.end()
            if response.status_code in _REDIRECTS:
                # httpx parses it, also if it does not follow it, and a bad one raises.
                response.headers.pop("location", None)
        return response

    def _with_key(self, request: Any) -> Any:
        return library_of(request).Request(
            request.method,
            request.url,
            headers=self._key.added_to(request.headers, request.url),
            stream=request.stream,
            extensions=request.extensions,
        )
