"""The blocking client: each public method of the async client, made from that method."""

from __future__ import annotations

import inspect
import re
import time
from contextlib import closing, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar

from sampling_async._client import SamplingClient as AsyncClient
from sampling_async._contract.errors import InvalidRequestError
from sampling_async._contract.records import safe_repr
from sampling_async._wire.address import hide_secrets
from sampling_async.sync._loop import LoopThread
from sampling_async.sync._streams import OutcomeStream, PulledItems, RecontactStream, pulled, read_whole

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from types import TracebackType

    from sampling_async._bulk.stream import OutcomeStream as AsyncOutcomeStream
    from sampling_async._calls.recontact import RecontactStream as AsyncRecontactStream
    from sampling_async._contract.records import RecontactMembers
    from sampling_async._profiles.record import PanelProfile

T = TypeVar("T")
Given = ParamSpec("Given")
Function = TypeVar("Function", bound="Callable[..., Any]")
Client = TypeVar("Client", bound="SamplingClient")

_AHEAD: Final = {"fan_out": 256, "stream_bulk_invite": 4096}
"""How many requests or quota IDs are read at once from an iterator."""

_PLAIN: Final = (
    (r"\basync (with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"aclosing", "closing"),
    (r"AbstractAsync", "Abstract"),
    (r"\blive\.ready\b", "router.ready"),
    (r"AsyncGenerator\[(\w+), None\]", r"Generator[\1, None, None]"),
)


def _plain(text: str) -> str:
    """Return documentation, or a type, without what is only for async functions."""
    for pattern, replacement in _PLAIN:
        text = re.sub(pattern, replacement, text)
    return text


def like(method: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return a decorator that gives a function the name, signature and documentation of an async method."""

    def decorate(function: Function) -> Function:
        original = getattr(method, "__func__", method)  # of a class method
        signature, module = inspect.signature(original), function.__module__
        returned: Any = wraps(original)(function)
        returned.__module__ = module
        returned.__doc__ = _plain(method.__doc__ or "")
        returned.__signature__ = signature.replace(return_annotation=_plain(signature.return_annotation))
        blocking: Function = returned
        return blocking

    return decorate


def _calling(
    method: Callable[Concatenate[AsyncClient, Given], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SamplingClient, Given], T]:
    """Make a method that calls an async one, and waits for its result."""

    @like(method)
    def call(self: SamplingClient, /, *args: Given.args, **kwargs: Given.kwargs) -> T:
        client, loop = parts_of(self)
        asked: Any = method
        given = [read_whole(each) for each in args]
        options = {name: read_whole(each) for name, each in kwargs.items()}
        result: T = loop.call(asked, client, *given, **options)
        return result

    return call


def _iterating(
    method: Callable[Concatenate[AsyncClient, Given], AsyncGenerator[T, None]],
) -> Callable[Concatenate[SamplingClient, Given], Generator[T]]:
    """Make a method that is a generator, from one that is an async generator."""

    @like(method)
    def iterate(self: SamplingClient, /, *args: Given.args, **kwargs: Given.kwargs) -> Generator[T]:
        client, loop = parts_of(self)
        items = method(client, *args, **kwargs)

        async def step() -> tuple[T, ...]:
            # A tuple, because an item may be None; () at the end.
            async for item in items:
                return (item,)
            return ()

        try:
            while found := loop.call(step):
                yield found[0]
        finally:
            loop.leave(items.aclose)

    return iterate


def _streaming(
    method: Callable[Concatenate[AsyncClient, Given], AsyncOutcomeStream],
) -> Callable[Concatenate[SamplingClient, Given], OutcomeStream]:
    """Make a method that returns a stream of outcomes. Iterators in its arguments are read by its reader."""

    @like(method)
    def stream(self: SamplingClient, /, *args: Given.args, **kwargs: Given.kwargs) -> OutcomeStream:
        client, loop = parts_of(self)
        asked: Any = method
        most = _AHEAD[method.__name__]
        given = [pulled(each, most) for each in args]
        options = {name: pulled(each, most) for name, each in kwargs.items()}

        async def begin() -> AsyncOutcomeStream:
            stream: AsyncOutcomeStream = asked(client, *given, **options)
            return stream

        items = [each for each in (*given, *options.values()) if isinstance(each, PulledItems)]
        return OutcomeStream(loop, loop.call(begin), items[0] if items else None)

    return stream


def _streaming_codes(
    method: Callable[Concatenate[AsyncClient, Given], AsyncRecontactStream],
) -> Callable[Concatenate[SamplingClient, Given], RecontactStream]:
    """Make a method that returns a stream of member codes."""

    @like(method)
    def stream(self: SamplingClient, /, *args: Given.args, **kwargs: Given.kwargs) -> RecontactStream:
        client, loop = parts_of(self)
        return RecontactStream(loop, method(client, *args, **kwargs))

    return stream


def _reading(method: Callable[[AsyncClient], T]) -> Callable[[SamplingClient], T]:
    """Make a method that only looks at the client, which any thread may do."""

    @like(method)
    def read(self: SamplingClient) -> T:
        return method(parts_of(self)[0])

    return read


def _within(
    method: Callable[Concatenate[AsyncClient, Given], AbstractAsyncContextManager[T]],
) -> Callable[Concatenate[SamplingClient, Given], AbstractContextManager[T]]:
    """Make a method that returns a block."""

    @like(method)
    @contextmanager
    def block(self: SamplingClient, /, *args: Given.args, **kwargs: Given.kwargs) -> Generator[T]:
        client, loop = parts_of(self)
        inside = method(client, *args, **kwargs)
        yielded = loop.call(inside.__aenter__)
        try:
            yield yielded
        finally:
            loop.leave(partial(inside.__aexit__, None, None, None))

    return block


def _of_pages(
    method: Callable[Concatenate[AsyncClient, Given], AsyncGenerator[str, None]],
    pages: Callable[Concatenate[SamplingClient, Given], Generator[RecontactMembers]],
) -> Callable[Concatenate[SamplingClient, Given], Generator[str]]:
    """Make the generator of member codes from that of pages: one call into the event loop brings a page."""

    @like(method)
    def iterate(self: SamplingClient, /, *args: Given.args, **kwargs: Given.kwargs) -> Generator[str]:
        with closing(pages(self, *args, **kwargs)) as read:
            for page in read:
                yield from page.member_codes

    return iterate


def _deriving(
    method: Callable[Concatenate[AsyncClient, Given], AsyncClient], *, own_loop: bool
) -> Callable[Concatenate[Client, Given], Client]:
    """Make a method that returns another client, with an event loop of its own or with this client's."""

    @like(method)
    def derive(self: Client, /, *args: Given.args, **kwargs: Given.kwargs) -> Client:
        client, loop = parts_of(self)
        derived = object.__new__(type(self))
        vars(derived).update(vars(self))
        _wrap(derived, method(client, *args, **kwargs), None if own_loop else loop)
        return derived

    return derive


def _constructing(
    method: Callable[Concatenate[AsyncClient, Given], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[SamplingClient, Given], None]]:
    return like(method)


def _wrap(client: SamplingClient, wrapped: AsyncClient, loop: LoopThread | None = None) -> None:
    """Make a client from an async one, with an event loop of its own, or with that of another client."""
    vars(client).update(_client=wrapped, _is_view=loop is not None)
    vars(client).update(_loop=loop or LoopThread(repr(client), wrapped.aclose))


def parts_of(client: SamplingClient) -> tuple[AsyncClient, LoopThread]:
    return client._client, client._loop  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  as a method may


def _prepare(options: dict[str, Any]) -> None:
    """Change the options of an async client into those of one with an event loop of its own."""
    hide_secrets(options)
    if options.get("http_client") is not None:
        raise InvalidRequestError(
            "the blocking client takes no http_client: an httpx.AsyncClient belongs to the event loop of its "
            "owner, and this client runs one of its own in a thread; give headers=, proxy=, ssl_context= or "
            "transport=, or use the async client"
        )
    # That of the event loop, which does not run yet.
    options.setdefault("clock", time.monotonic)


class SamplingClient:
    """A client of one External Sampling Service for one partner panel, for programs without asyncio.

    Each call waits for its result. This is `sampling_async.SamplingClient`, with its arguments, and with an
    event loop in a background thread, which starts with the first call. Use it as
    `with SamplingClient(...) as client`, or call `close()` at the end.

    Several threads may use one client: one limit applies to all their calls. Ctrl-C, or another signal handler
    that raises, cancels the call that waits. Hooks (`on_attempt`, `on_outcome`) and a `transport` run in the
    background thread, and cannot call the client. After a fork, only the parent can use a client that was in
    use before.

    Raises:
        InvalidRequestError: An argument is invalid. The message never repeats keys and addresses.
    """

    _client: AsyncClient
    _loop: LoopThread
    _is_view: bool  # whether the event loop belongs to another client

    @_constructing(AsyncClient.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # This comes first: error reports may show the local variables of this frame.
        _prepare(kwargs)
        _wrap(self, AsyncClient(*args, **kwargs))

    @classmethod
    @like(AsyncClient.from_env)
    def from_env(cls, *, profile: str | PanelProfile | None = None, **overrides: Any) -> Self:
        _prepare(overrides)
        client = object.__new__(cls)
        _wrap(client, AsyncClient.from_env(profile=profile, **overrides))
        return client

    share = _deriving(AsyncClient.share, own_loop=True)
    with_options = _deriving(AsyncClient.with_options, own_loop=False)

    @property
    def name(self) -> str | None:
        """The name of the panel, as given."""
        return self._client.name

    @safe_repr
    def __repr__(self) -> str:
        return f"<sync {repr(self._client)[1:]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the client. Running calls of other threads end with `ClientClosedError`. Open blocks are left.

        It may be called more than once. The clients that `with_options` made from it are closed too. One of
        those is closed alone.
        """
        if not self._is_view:
            self._loop.close()
        elif self._loop.is_running:
            self._loop.call(self._client.aclose)

    get_quotas = _calling(AsyncClient.get_quotas)
    iter_surveys = _iterating(AsyncClient.iter_surveys)
    get_settings = _calling(AsyncClient.get_settings)
    generate_invite = _calling(AsyncClient.generate_invite)
    bulk_invite = _calling(AsyncClient.bulk_invite)
    stream_bulk_invite = _streaming(AsyncClient.stream_bulk_invite)
    fan_out = _streaming(AsyncClient.fan_out)
    recontact_pages = _iterating(AsyncClient.recontact_pages)
    recontact_members = _of_pages(AsyncClient.recontact_members, recontact_pages)
    stream_recontact_members = _streaming_codes(AsyncClient.stream_recontact_members)
    snapshot = _reading(AsyncClient.snapshot)
    serve_snapshots = _within(AsyncClient.serve_snapshots)
