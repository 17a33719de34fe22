"""The blocking router: clicks of many threads, routed together in the background thread of their client."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import anyio
from attrs import field, frozen

from sampling_async import Invite
from sampling_async._contract.checks import number_above_0, number_from_0, require_instance
from sampling_async._contract.records import hidden
from sampling_async.matching import LiveIndex
from sampling_async.notifications import StoreError
from sampling_async.routing import Route as AsyncRoute
from sampling_async.routing import RouterStatus, RouteStatus
from sampling_async.routing import SurveyRouter as AsyncRouter
from sampling_async.sync._client import SamplingClient, like, parts_of

if TYPE_CHECKING:
    import os
    from collections.abc import Collection
    from types import TracebackType

    from sampling_async import QuotaWatch
    from sampling_async._contract.checks import Text
    from sampling_async._contract.currencies import Currencies
    from sampling_async.matching import MatchPolicy, Member, QuestionKinds, Rank
    from sampling_async.notifications._stores import AnyStore
    from sampling_async.routing import Caps, Offer

T = TypeVar("T")
_LOG: Final = logging.getLogger("sampling_async.routing")


@frozen(kw_only=True)
class Route:
    """How the click of a member has ended: `sampling_async.routing.Route`, with an `entered` that waits.

    Attributes:
        status: How it has ended; see `RouteStatus`.
        invite: The invite, if there is a link.
        is_repeat: Whether the link is that of an earlier click, which the member has not entered yet.
        asked: How many quotas were requested for this click.
        seconds: How long it took.
    """

    status: RouteStatus
    invite: Invite | None = field(default=None, repr=hidden)
    is_repeat: bool = False
    asked: int = 0
    seconds: float = 0.0
    _enter: Callable[[], object] | None = field(default=None, repr=False, eq=False, alias="enter")

    @property
    def url(self) -> str | None:
        """The link; None unless the status is `routed`. It identifies the member: keep it out of logs."""
        return None if self.invite is None else self.invite.url

    @like(AsyncRoute.entered)
    def entered(self) -> None:
        if self._enter is not None:
            self._enter()


class SurveyRouter:
    """Gives members who click the link of the best survey that takes them, for programs without asyncio.

        router = SurveyRouter(SamplingClient.from_env(), store="links.db")  # when the module is imported
        ...
        route = router.route(member, within=2.0)                            # in any thread
        if route.url is not None:
            route.entered()

    This is `sampling_async.routing.SurveyRouter` in the background thread of a blocking client. It watches the
    quotas itself, so it takes the options of the watch and the index in place of `live`. All threads may use
    one router. It opens with its first call. Use it as a block or call `close()`; closing the client, as the
    end of the program does, closes it too. After a fork, only the parent can use a router whose client was in
    use before.

    Ctrl-C, or another signal handler that raises, ends the wait of a click, and the router goes on: what was
    requested is in the store, and the next click gets its link.

    Args:
        client: The blocking client.
        store, lifetime, caps, remembers, currency_rates, clock: As for the async router.
        every, cache: As for `SamplingClient.watch_quotas` of the async client.
        kinds, policy, rank: As for `QuotaIndex`.

    Raises:
        InvalidRequestError: An argument is invalid; or, with the first call, there are prices in a currency
            without a rate.
    """

    def __init__(
        self,
        client: SamplingClient,
        *,
        store: AnyStore | None,
        lifetime: float | None = None,
        caps: Caps | None = None,
        remembers: float = 30.0,
        currency_rates: Currencies = None,
        clock: Callable[[], float] = time.time,
        every: float = 60.0,
        cache: str | os.PathLike[str] | None = None,
        kinds: QuestionKinds | None = None,
        policy: MatchPolicy | None = None,
        rank: Rank | None = None,
    ) -> None:
        require_instance(client, SamplingClient, "client", "a sampling_async.sync.SamplingClient")
        wrapped, self._loop = parts_of(client)

        def made() -> tuple[QuotaWatch, LiveIndex, AsyncRouter]:
            watch = wrapped.watch_quotas(every, cache=cache, wall_clock=clock)
            live = LiveIndex(watch, kinds=kinds, policy=policy, rank=rank)
            router = AsyncRouter(
                wrapped,
                live,
                store=store,
                lifetime=lifetime,
                caps=caps,
                remembers=remembers,
                currency_rates=currency_rates,
                clock=clock,
            )
            return watch, live, router

        made()  # so that an invalid option is refused here
        self._made = made
        # Of the event loop.
        self._opening: asyncio.Task[tuple[LiveIndex, AsyncRouter]] | None = None
        self._is_closed = False

    # --- Opening and closing

    def __enter__(self) -> Self:
        self._loop.call(self._opened)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the router; the client stays open. Clicks of other threads end. It may be called again."""
        self._is_closed = True
        self._loop.leave(self._leave)

    async def _opened(self) -> tuple[LiveIndex, AsyncRouter]:
        """Return what is open. One task opens it for all calls; if that fails, the next call tries again."""
        if self._is_closed:
            raise RuntimeError("the survey router is closed")
        if self._opening is None:
            # Polls that go on for days are no part of the span of the first click.
            self._opening = asyncio.get_running_loop().create_task(self._open(), context=Context())
            # Marks an exception as seen, or asyncio logs it: nobody may ask for it.
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        opening = self._opening
        if not opening.done():
            await asyncio.wait({opening})  # if this is cancelled, the task goes on
        if opening.exception() is not None and self._opening is opening:
            self._opening = None
        return opening.result()

    async def _open(self) -> tuple[LiveIndex, AsyncRouter]:
        watch, live, router = self._made()
        async with AsyncExitStack() as stack:
            for each in (watch, live, router):
                await stack.enter_async_context(each)
            # The key is not this object: the event loop would keep it, and its client.
            self._loop.open[router] = stack.pop_all().aclose
        return live, router

    async def _leave(self) -> None:
        opening = self._opening
        if opening is None:
            return
        await asyncio.wait({opening})
        if opening.exception() is None:
            _, router = opening.result()
            if (close := self._loop.open.pop(router, None)) is not None:
                await close()

    def ready(self, timeout: float | None = None) -> None:
        """Wait until there is an inventory.

        Args:
            timeout: The most seconds to wait; None for as long as it takes.

        Raises:
            TimeoutError: There is none after `timeout` seconds.
            RuntimeError: The router is closed, or the watch has ended.
        """

        async def wait() -> None:
            with anyio.fail_after(None if timeout is None else number_from_0(timeout, "timeout", "seconds")):
                live, _ = await self._opened()
                await live.ready()

        self._loop.call(wait)

    # --- What members are shown

    @like(AsyncRouter.offers)
    def offers(self, member: Member, *, most: int = 20) -> list[Offer]:
        async def look() -> list[Offer]:
            live, router = await self._opened()
            if live.age is None:
                raise RuntimeError("there is no inventory yet: router.ready() first")
            return router.offers(member, most=most)

        return self._loop.call(look)

    @property
    def status(self) -> RouterStatus:
        """What was routed so far, and whether clicks can be routed now. It opens the router, as a call does."""

        async def look() -> RouterStatus:
            return (await self._opened())[1].status

        none: dict[str, Any] = {"clicks": {}, "repeats": 0, "asked": 0, "invited": 0, "unused": 0}
        if self._is_closed:
            return RouterStatus(is_ready=False, reason="the router is closed", **none)
        try:
            return self._loop.call(look)
        except StoreError as exc:
            return RouterStatus(is_ready=False, reason=str(exc), **none)

    # --- A click

    @like(AsyncRouter.route)
    def route(self, member: Member, *, within: float = 2.0, quota_ids: Collection[int] | None = None) -> Route:
        seconds = number_above_0(within, "within", "seconds")
        return self._loop.call(self._route, member, seconds, quota_ids)

    async def _route(self, member: Member, seconds: float, quota_ids: Collection[int] | None) -> Route:
        until, router = anyio.current_time() + seconds, None
        with anyio.move_on_after(seconds):
            try:
                live, router = await self._opened()
            except StoreError as exc:
                _LOG.warning("the survey router cannot open its store: %s", exc)
                return Route(status=RouteStatus.UNAVAILABLE)
            # The first clicks of a process come before its first inventory, which takes a moment.
            if live.status == "starting":
                with anyio.move_on_after(seconds / 2), suppress(RuntimeError):  # of a watch that has ended
                    await live.ready()
        # Not in the scope above: cut off there, a click whose invite may exist would look unavailable.
        left = until - anyio.current_time()
        if router is None or left <= 0:
            return Route(status=RouteStatus.UNAVAILABLE, seconds=seconds)
        found = await router.route(member, within=left, quota_ids=quota_ids)
        enter = None
        if found.invite is not None:
            enter = partial(self._loop.call, found.entered)
        return Route(
            status=found.status,
            invite=found.invite,
            is_repeat=found.is_repeat,
            asked=found.asked,
            seconds=anyio.current_time() - until + seconds,
            enter=enter,
        )

    @like(AsyncRouter.entered)
    def entered(self, member_code: Text, quota_id: int) -> None:
        async def store() -> None:
            await (await self._opened())[1].entered(member_code, quota_id)

        self._loop.call(store)
