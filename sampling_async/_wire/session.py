"""One attempt: send a request through an httpx client and read its response.

The key goes to the configured origin only, and appears in nothing that is printed: it is added last. The size
of a body is limited while it is read, and so is the time of the whole attempt. A failure says whether anything
was sent.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from functools import lru_cache, partial
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeAlias, TypeVar

import anyio
import httpx
from attrs import define, field, frozen

from sampling_async._contract.checks import not_negative, positive
from sampling_async._contract.errors import (
    ClientClosedError,
    DecodeError,
    InvalidRequestError,
    SamplingError,
    TransportTimeoutError,
)
from sampling_async._contract.exchange import ANSWERS, OK, Call, Reply
from sampling_async._pacing.background import is_foreign_cancellation
from sampling_async._pacing.blocks import Block, DeadlineScopes
from sampling_async._pacing.loops import running_loop
from sampling_async._wire.address import USER_AGENT, KeyHeader
from sampling_async._wire.bodies import BodyLimits, Head, LimitedBody, Request
from sampling_async._wire.clients import (
    OverEngine,
    OverTransport,
    Sender,
    Transport,
    patched_library,
)
from sampling_async._wire.failures import failure_of_test, is_any, translated, way_of
from sampling_async._wire.given_client import OverClient

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from sampling_async._contract.errors import Delivery, Endpoint
    from sampling_async._wire.address import Proxy, Secret
    from sampling_async._wire.engine import Engine

T = TypeVar("T")
Given = ParamSpec("Given")
BodyReader: TypeAlias = "Callable[[LimitedBody], Awaitable[Reply]]"
"""A function that reads the body of a 200, or of the 304 to a `Call.if_none_match`, and closes it."""

_CLOSING_SECONDS: Final = 5.0
_REFUSAL_SECONDS: Final = 2.0
_REFUSAL_BYTES: Final = 2**20
_SPARE_CONNECTIONS: Final = 2
_SHORTEST_SECRET: Final = 8


_READ_SECONDS: Final[Mapping[Endpoint, float]] = {
    "get_settings": 15,
    "generate_invite": 20,
    "get_quotas": 30,
    "recontact_members": 60,
}
_WALL_MARGIN: Final = 15.0


@frozen(kw_only=True)
class Timeouts:
    """Time limits of one attempt, in seconds.

    Attributes:
        connect: The time to open a connection, TLS included.
        write: The time between two parts of the request.
        read: The time between two parts of the response. None: settings 15, invite 20, quotas 30, recontact 60,
            bulk `bulk_base + bulk_per_id * IDs`, because the service needs more time for more IDs.
        wall: The time from the start to the last byte. It is needed because a body that arrives slowly but
            steadily never exceeds `read`. None: `read` + 15.
        bulk_base: The read limit of a bulk invite without its IDs.
        bulk_per_id: The seconds that each quota ID adds to it.

    Raises:
        InvalidRequestError: A limit is not above 0.
    """

    connect: float = field(default=5.0, validator=positive)
    write: float = field(default=10.0, validator=positive)
    read: float | None = field(default=None, validator=positive)
    wall: float | None = field(default=None, validator=positive)
    bulk_base: float = field(default=15.0, validator=positive)
    bulk_per_id: float = field(default=0.5, validator=not_negative)

    def read_limit(self, endpoint: Endpoint, quota_ids: int = 0) -> float:
        """Return the longest time, in seconds, to wait for the next part of a response."""
        if self.read is not None:
            return self.read
        if endpoint == "bulk_invite":
            return self.bulk_base + self.bulk_per_id * quota_ids
        return _READ_SECONDS[endpoint]

    def wall_limit(self, endpoint: Endpoint, quota_ids: int = 0) -> float:
        """Return the seconds that one attempt may take from start to end."""
        return self.wall if self.wall is not None else self.read_limit(endpoint, quota_ids) + _WALL_MARGIN


@define
class Track:
    """Whether a running call may have had its effect."""

    sent: bool = False  # bytes of the running attempt may have been sent
    ambiguous: bool = False  # an earlier attempt may have had the effect
    attempts: int = 0  # how many were begun
    # The user has the outcomes already. Sending something would make them wrong.
    outcomes_delivered: bool = False
    enter: Callable[[int], object] = field(default=bool, repr=False)  # notes which stage begins
    # Our engine's body of the last response: it holds its connection until it is judged.
    response: Any = field(default=None, repr=False)
    # Of the latest response, as they came: pairs of bytes, or httpx's object. None before one came.
    raw_headers: Any = field(default=None, repr=False)

    def may_send(self, may_be: bool) -> None:  # noqa: FBT001
        """Record whether bytes of the running attempt may have been sent, or may be from now on."""
        if may_be and self.outcomes_delivered:
            raise ClientClosedError("the `async with` block of the fan-out has ended", delivery=self.delivery)
        self.sent = may_be

    def release_connection(self) -> None:
        response, self.response = self.response, None
        if response is not None:
            response.release()

    def discard_connection(self) -> None:
        """Close the connection of the last response, which may belong to another request.

        The right one may be on its way, and the next request would take it for its own.
        """
        response, self.response = self.response, None
        if response is not None:
            response.discard()

    @property
    def delivery(self) -> Delivery:
        return "unknown" if self.sent or self.ambiguous else "not_sent"


class _SharedState:
    """What all sessions over the same connections share."""

    def __init__(self) -> None:
        self.closed = False
        self.loop: object = None  # the event loop of the first attempt
        self.blocks: weakref.WeakSet[DeadlineScopes] = weakref.WeakSet()


class Session:
    """The sender of single attempts. With an empty key, no API_AUTH_KEY is sent."""

    _is_closed = False
    _is_view = False  # whether the connections belong to another session

    def __init__(
        self,
        base_url: httpx.URL,
        api_key: Secret,
        *,
        timeouts: Timeouts,
        limits: BodyLimits,
        concurrency: int = 1,
        transport: Transport | None = None,
        http_client: Any = None,
        headers: Mapping[str, Secret] = MappingProxyType({}),
        user_agent: str = USER_AGENT,
        idle_seconds: float,
        proxy: Proxy | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._base_url = base_url
        self._base_path = base_url.raw_path.decode("ascii").rstrip("/")
        # A function without a reference to the session: results keep it, and must not keep connections.
        self.private = partial(_forms_of, api_key, tuple(headers.values()))
        self._shared = _SharedState()
        self._set_limits(timeouts)
        self._limits = limits
        self._has_proxy = proxy is not None
        self._key = KeyHeader(base_url, api_key)
        self._stock: dict[str, OverTransport] = {}  # of patched libraries
        self.engine: Engine | None = None
        self._over: Sender
        if http_client is not None:
            self._over = OverClient(self._key, http_client, base_url, concurrency)
        elif transport is not None:
            self._over = OverTransport(self._key, transport)
        else:
            from sampling_async._wire.engine import Engine  # noqa: PLC0415  its parser takes time to import

            idle = concurrency + _SPARE_CONNECTIONS
            self.engine = Engine(key=self._key, idle=idle, idle_seconds=idle_seconds, proxy=proxy, tls=tls)
            self._over = OverEngine(self.engine)
        self._head_for = lru_cache(maxsize=256)(self._made_head)
        self._headers = {
            "Host": base_url.netloc.decode("ascii"),
            "Accept": "application/json",
            "Accept-Encoding": "gzip",
            "User-Agent": user_agent,
        }
        self._more_headers = headers

    def _sender(self) -> Sender:
        """Return what requests go through now: while a mock has patched httpx, that."""
        library = None if self.engine is None else patched_library()
        if library is None:
            return self._over
        if library not in self._stock:
            self._stock[library] = OverTransport(self._key, None, library)
        return self._stock[library]

    def view(self, timeouts: Timeouts) -> Session:
        """Return a session over the same connections. It may be closed alone, and is closed with this one."""
        view = object.__new__(type(self))
        vars(view).update(vars(self))
        view._is_view = True
        view._set_limits(timeouts)
        return view

    def _set_limits(self, timeouts: Timeouts) -> None:
        self.timeouts = timeouts
        self._limits_for = lru_cache(maxsize=256)(self._made_limits)
        self._blocks = DeadlineScopes()
        self._shared.blocks.add(self._blocks)

    @property
    def closed(self) -> bool:
        """Whether this session was closed, or the one that the connections belong to."""
        return self._is_closed or self._shared.closed

    def attempt(
        self, call: Call[Any], track: Track, within: float = inf, read: BodyReader | None = None
    ) -> Coroutine[Any, Any, Reply]:
        """Make one attempt and return the reply, with any status. Await what this returns at once.

        `within` shortens every limit of `Timeouts`. `read` reads the body of a 200, in place of returning it,
        and closes it unless it raises. An exception of the application's signal handler is raised unchanged.
        """
        # What earlier attempts sent is in `track.ambiguous` by now.
        track.sent = False
        track.raw_headers = None
        self.check_usable()
        track.attempts += 1
        wall = min(within, self._limits_for(call.endpoint, call.quota_ids)[1])
        return self.guarded(track, wall, self._exchange, call, track, within, read)

    async def guarded(
        self,
        track: Track,
        seconds: float,
        run: Callable[Given, Awaitable[T]],
        *args: Given.args,
        **kwargs: Given.kwargs,
    ) -> T:
        """Call a part of an attempt with a time limit, and turn every failure into an error of `attempt`.

        What fails a test, such as an assertion in a mock, is raised as it is.
        """
        failure: BaseException | None = None
        sender = self._sender()
        with self._blocks.within(seconds, is_ours=sender.knows_what_was_sent) as scope:
            try:
                return await run(*args, **kwargs)
            except SamplingError as exc:
                # The traceback's frames may hold a body.
                failure = exc.with_traceback(None)
            except BaseException as exc:
                # A transport may raise any exception, even a stray cancellation. It becomes one of our errors.
                # Exceptions of the application, such as those of signal handlers, are raised unchanged.
                if not (sender.may_have_raised(exc) or is_foreign_cancellation(exc)):
                    raise
                failure = failure_of_test(exc)
                if failure is None:
                    way = self._way() if sender.knows_what_was_sent else ""
                    failure = translated(exc, track.delivery, sent=track.sent, way=way)
        if scope.cancelled_caught:
            failure = self._interrupted(seconds, track)
        assert failure is not None
        # Raised outside of the handlers. Inside, the original error would become its context, which holds
        # headers and URLs.
        raise failure

    def _way(self) -> str:
        proxy = way_of(self._base_url.scheme, has_proxy=self._has_proxy, environment=os.environ)
        return f", on the way to {self._base_url.netloc.decode('ascii')}{proxy}"

    def _interrupted(self, wall: float, track: Track) -> SamplingError:
        if self.closed:
            return ClientClosedError("the client was closed during the call", delivery=track.delivery)
        return TransportTimeoutError(
            f"no complete response within {max(wall, 0.0):.3g} s: the wall limit, or the rest of the deadline",
            delivery=track.delivery,
        )

    async def _exchange(self, call: Call[Any], track: Track, within: float, read: BodyReader | None) -> Reply:
        response = await self._sender().send(self._request(call, track, within))
        body = LimitedBody(response, *self._limits.of(call.endpoint))
        track.raw_headers = response.headers if body.own is None else body.own.headers
        try:
            if response.status_code in ANSWERS or (body.is_unchanged and call.if_none_match is not None):
                reply = await (read or _read_whole)(body)
            else:
                reply = await _read_refusal(response, body)
        except BaseException:
            if body.own is not None:
                body.own.discard()
            # A transport of the user takes its time for this, also when the call is cancelled.
            with anyio.move_on_after(_CLOSING_SECONDS, shield=True):
                await body.aclose()
            raise
        # Not before: what a signal handler interrupts is closed when nothing holds it any more.
        track.response = body.own
        return reply

    def _request(self, call: Call[Any], track: Track, within: float) -> Request:
        timeout, _ = self._limits_for(call.endpoint, call.quota_ids)
        if within < inf:
            timeout = {name: min(seconds, within) for name, seconds in timeout.items()}
        extensions = {
            "timeout": timeout,
            "target": f"{self._base_path}{call.target}".encode(),
            "sent": track.may_send,
            "enter": track.enter,
        }
        content = call.body or b""
        head = self._head_for(len(content), call.if_none_match)
        return Request(call.method, self._base_url, head=head, content=content, extensions=extensions)

    def _made_head(self, length: int, if_none_match: str | None) -> Head:
        headers = dict(self._headers)
        if length:
            headers.update({"Content-Type": "application/json", "Content-Length": str(length)})
        if if_none_match is not None:
            headers["If-None-Match"] = if_none_match
        private = {name: text.reveal() for name, text in self._more_headers.items()}
        return Head(httpx.Headers({**headers, **private}))

    def _made_limits(self, endpoint: Endpoint, quota_ids: int) -> tuple[dict[str, float], float]:
        limits = self.timeouts
        read = limits.read_limit(endpoint, quota_ids)
        timeout = {"connect": limits.connect, "write": limits.write, "read": read, "pool": limits.connect}
        return timeout, limits.wall_limit(endpoint, quota_ids)

    def read_limit(self, endpoint: Endpoint, quota_ids: int) -> float:
        return self._limits_for(endpoint, quota_ids)[0]["read"]

    def close_idle(self) -> None:
        if self.engine is not None:
            self.engine.close_idle()

    def until_closed(self, seconds: float = inf) -> Block:
        return self._blocks.within(seconds)

    def check_usable(self) -> None:
        """Refuse the use of a closed session, or from another event loop than before."""
        if self.closed:
            raise ClientClosedError("the client is closed; make a new one")
        loop = running_loop()
        if self._shared.loop is None:
            _must_not_repeat_a_program()
            self._shared.loop = loop
        elif self._shared.loop != loop:
            raise InvalidRequestError(
                "this client belongs to another event loop; make a client for each loop (in "
                "pytest-asyncio: give the client's fixture and its tests the same loop_scope)"
            )
        self._over.check_usable()

    @property
    def is_in_its_loop(self) -> bool:
        """Whether the current event loop is the one the session was used in, or it was not used yet."""
        return self._shared.loop in (None, running_loop())

    async def aclose(self) -> None:
        """End all running attempts with `ClientClosedError`, wait for them, and close the connections.

        A view closes no connections. If this is cancelled, the idle connections of the client's own engine are
        closed already. Another call does the rest.
        """
        # These come before any `await`, so that a cancellation cannot prevent them.
        self._is_closed = True
        closed = [self._blocks]
        if not self._is_view:
            self._shared.closed, closed = True, list(self._shared.blocks)
        for blocks in closed:
            blocks.shut()
        if not self._is_view and self.engine is not None:
            self.engine.close()
        in_its_loop = self.is_in_its_loop
        with anyio.CancelScope(shield=True):
            if in_its_loop:
                # With a limit: an attempt that closes its own client would wait here for its own end.
                with anyio.move_on_after(_CLOSING_SECONDS):
                    for blocks in closed:
                        await blocks.end(_CLOSING_SECONDS)
            if self._is_view:
                return
            # A foreign transport is not closed from another event loop: its connections ended with its own one.
            if in_its_loop or self.engine is not None:
                with anyio.move_on_after(_CLOSING_SECONDS):
                    for each in (self._over, *self._stock.values()):
                        await each.aclose()

    def __del__(self) -> None:
        if not self._is_view and self._shared.loop is not None and not self.closed:
            text = f"unclosed SamplingClient of {self._base_url.host}: use `async with`, or call aclose()"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)


def _forms_of(key: Secret, headers: tuple[Secret, ...]) -> tuple[str, ...]:
    """Return the key in the forms that a response may repeat, so that they can be removed from messages.

    With it come the values of the user's headers, but for short ones, which stand in other words too.
    """
    texts = [header.reveal() for header in headers if len(header.reveal()) >= _SHORTEST_SECRET]
    return key.reveal(), key.reveal().replace("-", ""), *texts


def _must_not_repeat_a_program() -> None:
    """Refuse to send while multiprocessing starts this process: its parent has sent the same already."""
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is not None and getattr(processes.current_process(), "_inheriting", False):
        raise InvalidRequestError(
            "this process is a worker that is being started, and imports the main module of the program for "
            "that, which would send everything again: put the program's work under `if __name__ == '__main__':`"
        )


async def _read_whole(body: LimitedBody) -> Reply:
    content = body.whole()
    if content is None:
        content = await body.read()
        await body.aclose()
    return Reply(OK, content)


async def _read_refusal(response: httpx.Response, body: LimitedBody) -> Reply:
    """Read the body of a refusal. Its status counts even if the body is late or incomplete."""
    content = None
    body.narrow(_REFUSAL_BYTES)
    with anyio.move_on_after(_REFUSAL_SECONDS):
        try:
            content = await body.read()
        except Exception as exc:
            # A StreamError: the user's client has closed the response.
            if not (isinstance(exc, DecodeError) or is_any(exc, "HTTPError", "StreamError")):
                raise
    await body.aclose()
    asked, date = response.headers.get("Retry-After"), response.headers.get("Date")
    is_whole, is_followed = content is not None, body.is_followed
    return Reply(response.status_code, content or b"", asked, date, is_whole=is_whole, is_followed=is_followed)
