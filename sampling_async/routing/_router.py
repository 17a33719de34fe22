"""`SurveyRouter`: the best link for a member who has clicked, in time, and never two for one pair."""

from __future__ import annotations

import logging
import shutil
import time
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Final, Self

import anyio

from sampling_async import SamplingClient
from sampling_async._contract.checks import (
    number_above_0,
    require_functions,
    require_instance,
    text_of,
    whole_id,
    whole_number,
)
from sampling_async._pacing.background import BackgroundService
from sampling_async._pacing.loops import Notifier
from sampling_async._pacing.threads import join_uncancelled, start
from sampling_async._protocol.lessons import Lesson
from sampling_async._protocol.requests import member_code_of
from sampling_async.matching import LiveIndex, Member
from sampling_async.notifications import StoreError
from sampling_async.notifications._committer import Committer
from sampling_async.notifications._stores import sql_store_of
from sampling_async.routing._click import Click, RouteStep
from sampling_async.routing._history import DAY, Caps, lesson_of, refused_until
from sampling_async.routing._links import Settlement, Wish, begin, enter, settle
from sampling_async.routing._offers import OfferBook
from sampling_async.routing._route import Offer, Route, RouterStatus, RouteStatus
from sampling_async.routing._tempo import Tempo

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from types import TracebackType

    from anyio.abc import TaskGroup

    from sampling_async import Invite, InviteOutcome
    from sampling_async._contract.checks import Text
    from sampling_async.notifications._stores import AnyStore
    from sampling_async.routing._history import Link, MemberHistory

_LOG: Final = logging.getLogger("sampling_async.routing")
_CHOICE: Final = 20  # offers among which the store may choose
_LEASE_SECONDS: Final = 1.0  # after the end of a click for which others wait for it
_LONGEST_LEASE: Final = 60.0  # if the process dies, the member waits no longer
_WATCH_SECONDS: Final = 1.0  # for which a click waits for what may be leased by another clock
_LATE_SECONDS: Final = 10.0  # for which the response of a click that has ended is still waited for
_BUSY_SECONDS: Final = 0.03  # between two looks whether another process has asked
_FOLLOW_SECONDS: Final = 1.0  # between two looks at what other processes have stored
_RETRY_SECONDS: Final = 5.0  # the same, if the store cannot be read
_SETTLING: Final = (0.5, 2.0, 8.0)  # pauses before a result is stored again
_GRACE_SECONDS: Final = 0.5  # for responses, when the router is closed: what comes later is unclear
_STORED_SECONDS: Final = 0.5  # for which a member who has a link waits until that is stored
_MOST_UNCLEAR: Final = 2  # requests of one click without a usable response
_MOST_SPARE: Final = 100_000


class SurveyRouter(BackgroundService):
    """Gives members who click the link of the best survey that takes them, within a time.

        async with SurveyRouter(client, live, store="links.db") as router:
            offers = router.offers(member)                  # for a list of surveys; no request
            route = await router.route(member, within=2.0)  # for a click
            if route.url is not None:
                await route.entered()
                ... redirect the member to route.url

    A pair of member and quota is written to the store before it is requested. It is never requested again while
    it is unclear whether there is an invite. Two clicks of a member at the same moment make one request and get
    the same link, in one process or in several that share the store. Links outlast a restart. A link is given
    again until the member has entered it, its survey has ended for the member, its quota closes, or it is older
    than its lifetime. The invites are in the `OutcomeLedger` of the store.

    Args:
        client: The client. Clicks go before its bulks, and do not wait in an outage.
        live: The live index. Its block must be open.
        store: Where links are kept: the store of the inbox, a path, or the address of a database. With the
            store of the inbox, surveys that have ended for a member are known, and completes are counted. None:
            a file that goes with the router, for tests.
        lifetime: Seconds after which a link that was not entered is not given again.
        caps: How much a member may do on a day.
        remembers: Days of links and ends that `offers` knows; `route` knows all. It takes about 1 KB of memory
            for each member who did something in these days.
        clock: The clock, in seconds since 1970.

    Raises:
        InvalidRequestError: An argument is not of its type, or not above 0.
    """

    _called = "survey router"

    def __init__(
        self,
        client: SamplingClient,
        live: LiveIndex,
        *,
        store: AnyStore | None,
        lifetime: float = 1800.0,
        caps: Caps | None = None,
        remembers: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        require_instance(client, SamplingClient, "client", "a SamplingClient")
        require_instance(live, LiveIndex, "live", "a LiveIndex")
        require_instance(caps, Caps | None, "caps", "a Caps, such as Caps(starts=10)")
        require_functions(clock=clock)
        self._lifetime = number_above_0(lifetime, "lifetime", "seconds")
        seconds = number_above_0(remembers, "remembers", "days") * DAY
        if store is None:
            folder = mkdtemp(prefix="sampling-links-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            store = Path(folder) / "links.db"
        opened = sql_store_of(store)
        self._client = client.for_clicks()
        self._live = live
        self._caps = caps or Caps()
        self._clock = clock
        self._book = OfferBook(live, opened.copy(), seconds=seconds, caps=self._caps, clock=clock)
        self._committer = Committer(opened)
        self._tempo = Tempo()
        self._busy: dict[str, anyio.Event] = {}  # the members with a click
        self._steps = 0  # that run
        self._idle = Notifier()
        self._tasks: TaskGroup | None = None
        self._is_closing = False
        self._counts: Counter[str] = Counter()
        self._clicks: Counter[RouteStatus] = Counter()
        self._spare: dict[tuple[str, int], None] = {}  # invites that no click has got, the oldest first

    # --- Opening and closing

    async def __aenter__(self) -> Self:
        await join_uncancelled(start(self._committer.start))
        try:
            await self._book.follow()
            await super().__aenter__()
            await self._until(lambda: self._tasks is not None)
        except BaseException:
            await join_uncancelled(start(self._committer.stop))
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_closing = True
        try:
            with anyio.move_on_after(_GRACE_SECONDS):
                while self._steps:
                    await self._idle.wait()
        finally:
            try:
                await super().__aexit__(exc_type, exc, traceback)
            finally:
                await join_uncancelled(start(self._committer.stop))

    async def _work(self) -> None:
        async with anyio.create_task_group() as self._tasks:
            self._progress.notify()
            while True:
                await anyio.sleep(_RETRY_SECONDS if self._book.store_failure.reason else _FOLLOW_SECONDS)
                await self._book.follow()

    # --- What members are shown

    def offers(self, member: Member, *, most: int = 20) -> list[Offer]:
        """Return what a member fits now, the best expected value first, one quota a survey. No request is made.

        What the member has taken, started or been refused is left out. What another process has stored in the
        last second may not be known yet: `route` looks at the store itself.

        Args:
            member: The member, with its answers.
            most: The most offers to return.

        Raises:
            InvalidRequestError: An answer is not valid for its question, or `most` is no whole number.
            RuntimeError: There is no inventory yet; `await live.ready()` waits for it.
        """
        whole_number(most, "most")
        require_instance(member, Member, "member", "a Member, with its code and its answers")
        return self._book.best(member, most)

    @property
    def status(self) -> RouterStatus:
        """What was routed so far, and whether clicks can be routed now."""
        reason = self._book.store_failure.reason
        if self._finished or self._is_closing or self._tasks is None:
            reason = "the router is closed"
        elif self._live.age is None:
            reason = "there is no inventory yet"
        return RouterStatus(
            is_ready=not reason,
            reason=reason,
            clicks=dict(self._clicks),
            repeats=self._counts["repeats"],
            asked=self._counts["asked"],
            invited=self._counts["invited"],
            unused=len(self._spare),
        )

    # --- A click

    async def route(
        self, member: Member, *, within: float = 2.0, quota_ids: Collection[int] | None = None
    ) -> Route:
        """Return the best link for a member who has clicked, in time.

        A link that an earlier click was given comes first. Then the best quota is requested; if it is refused,
        the next one, as long as there is time. Nothing is raised for a service or a store that is away: the
        status says so.

        Args:
            member: The member, with its answers.
            within: Seconds that the member waits.
            quota_ids: The quotas that the member has clicked on, the best first. Default: all offers.

        Raises:
            InvalidRequestError: An argument is not valid.
            RuntimeError: The router was not entered, or is closed.
        """
        require_instance(member, Member, "member", "a Member, with its code and its answers")
        member_code_of(member.member_code)
        chosen = None if quota_ids is None else [whole_id(each, "each of quota_ids") for each in quota_ids]
        seconds, began = number_above_0(within, "within", "seconds"), anyio.current_time()
        watches_until = began + min(_WATCH_SECONDS, seconds / 2)
        click = Click(member, chosen, self._clock(), began + seconds, watches_until)
        self._must_be_inside()
        if self._is_closing or self._finished:
            raise RuntimeError("the survey router is closed")
        try:
            with anyio.move_on_after(seconds):
                await self._follow(click)
        finally:
            click.is_over = True
        invite, status = click.invite, click.status
        self._clicks[status] += 1
        self._counts["repeats"] += click.is_repeat
        return Route(
            status=status,
            invite=invite,
            is_repeat=click.is_repeat,
            asked=click.asked,
            seconds=anyio.current_time() - began,
            enter=None if invite is None else partial(self.entered, member.member_code, click.quota_id),
        )

    async def entered(self, member_code: Text, quota_id: int) -> None:
        """Record that a member was sent to the link of a quota; see `Route.entered`.

        Raises:
            RuntimeError: The router was not entered, or is closed.
        """
        self._must_be_inside()
        if self._is_closing or self._finished or self._tasks is None:
            raise RuntimeError("the survey router is closed")
        code = text_of(member_code)
        operation = partial(enter, member_code=code, quota_id=quota_id, now=self._clock())
        await self._store(code, operation)

    async def _follow(self, click: Click) -> None:
        """Do what a click needs, while it waits."""
        code = click.member.member_code
        while code in self._busy:  # an earlier click of the member
            await self._busy[code].wait()
        over = self._busy[code] = anyio.Event()
        try:
            while await self._step(click):
                pass
        finally:
            del self._busy[code]
            over.set()

    async def _step(self, click: Click) -> bool:
        """Ask for some quotas, wait for what comes of it, and return whether the click goes on."""
        is_too_late = click.left <= 0 or (click.asked and not self._tempo.has_time(click.left))
        if is_too_late or self._is_closing:
            return False
        step = RouteStep(click, self._choice(click))
        assert self._tasks is not None
        # In a task of its own: it goes on if the click is cancelled, or ends before the response comes.
        self._steps += 1
        self._tasks.start_soon(self._run, step)
        await step.over.wait()
        if step.failure is not None:
            raise step.failure
        if step.goes_on and click.is_busy:
            await anyio.sleep(_BUSY_SECONDS)
        return step.goes_on

    def _choice(self, click: Click) -> list[Offer]:
        if self._live.age is None:  # there is no inventory yet; a link of an earlier click may do
            return []
        if click.quota_ids is not None:
            return self._book.among(click.member, click.quota_ids)
        return self._book.best(click.member, _CHOICE)

    async def _run(self, step: RouteStep) -> None:
        try:
            await self._turn(step)
        except StoreError as exc:
            self._book.store_failure.failed(exc)
        except Exception as exc:  # noqa: BLE001  raised in the task of the click
            step.failure = exc
        finally:
            step.over.set()
            self._steps -= 1
            self._idle.notify()

    async def _turn(self, step: RouteStep) -> None:
        click = step.click
        wish = Wish(
            owner=step.owner,
            member_code=click.member.member_code,
            offers=step.offers,
            most=self._tempo.most(click.left),
            quota_ids=None if click.quota_ids is None else frozenset(click.quota_ids),
            takes_links=click.takes_links,
            caps=self._caps,
            watches=anyio.current_time() < click.watches_until,
            began=click.began,
            seconds=min(max(0.0, click.left), _LONGEST_LEASE) + _LEASE_SECONDS,
        )
        turn = await self._committer.run(partial(begin, wish=wish, clock=self._clock), key=wish.member_code)
        self._book.learn(wish.member_code, turn.history)
        click.is_busy = turn.is_busy
        if turn.is_busy:
            step.goes_on = True
        elif turn.links:
            self._give_again(step, turn.links)
        elif turn.asked:
            await self._ask(step, turn.asked)
        elif self._live.age is not None:
            click.is_refused = True
            # The store may have known more than this process did: then there may be other offers.
            step.goes_on = bool(step.offers) and self._choice(click) not in ([], step.offers)

    def _give_again(self, step: RouteStep, links: Sequence[Link]) -> None:
        for link in links:
            # Without an inventory nobody knows better.
            if self._live.age is None or self._live.is_open(link.quota_id):
                self._give(step.click, link.quota_id, link.invite)
                step.click.is_repeat = step.click.invite is not None
                return
        step.click.takes_links, step.goes_on = False, True

    def _give(self, click: Click, quota_id: int, invite: Invite) -> None:
        """Give a click its invite; if it has ended, the next one finds it in the store."""
        if not click.is_over:
            click.invite, click.quota_id = invite, quota_id
            self._spare.pop((click.member.member_code, quota_id), None)

    async def _ask(self, step: RouteStep, asked: Sequence[Offer]) -> None:
        click, code, began = step.click, step.click.member.member_code, anyio.current_time()
        outcomes: Sequence[InviteOutcome] = ()
        left = click.left
        if left > 0 and not click.is_over:
            click.is_asking = True
            click.asked += len(asked)
            self._counts["asked"] += len(asked)
            quota_ids = [offer.quota_id for offer in asked]
            outcomes = await self._client.ask_at_once(code, quota_ids, within=left, late=_LATE_SECONDS)
        found = {outcome.quota_id: outcome for outcome in outcomes}
        settled = [self._settlement(offer, found.get(offer.quota_id)) for offer in asked]
        answered = [each for each in settled if each.state in {"invited", "refused"}]
        if answered:
            refused = sum(each.state == "refused" for each in answered)
            self._tempo.ended(anyio.current_time() - began, len(answered), refused)
        for each in answered:
            if each.invite is not None:
                self._counts["invited"] += 1
                self._spare[code, each.offer.quota_id] = None
            else:
                self._close(each)
        while len(self._spare) > _MOST_SPARE:
            del self._spare[next(iter(self._spare))]
        now = self._clock()
        await self._store(code, partial(settle, owner=step.owner, member_code=code, settled=settled, now=now))
        click.is_asking = False  # not if this is cancelled before: then nobody knows
        self._conclude(step, settled)

    def _settlement(self, offer: Offer, outcome: InviteOutcome | None) -> Settlement:
        now = self._clock()
        if outcome is None or outcome.status == "not_sent":
            return Settlement(offer=offer, state=None)
        if outcome.invite is not None:
            until = now + self._lifetime
            return Settlement(offer=offer, state="invited", until=until, code=1, invite=outcome.invite)
        if outcome.status == "unknown":
            return Settlement(offer=offer, state="unclear")
        code = outcome.result_code
        return Settlement(offer=offer, state="refused", until=refused_until(code, now), code=code)

    def _close(self, settled: Settlement) -> None:
        """Close a quota or a survey that takes nobody now."""
        match lesson_of(settled.code):
            case Lesson.QUOTA:
                self._live.close_quota(settled.offer.quota_id)
            case Lesson.SURVEY:
                self._live.close_survey(settled.offer.survey_id, settled.offer.wave_id or None)
            case _:
                pass

    def _conclude(self, step: RouteStep, settled: Sequence[Settlement]) -> None:
        """Take into a click what its request has brought."""
        click = step.click
        click.unclear += any(each.state == "unclear" for each in settled)
        for each in settled:
            if each.invite is not None:
                self._give(click, each.offer.quota_id, each.invite)
                return
        if any(lesson_of(each.code) is Lesson.STOP for each in settled):
            click.is_refused = False  # it is the panel that was refused: the service takes nobody of it
        elif all(each.state is not None for each in settled) and click.unclear < _MOST_UNCLEAR:
            click.is_refused = step.goes_on = True

    async def _store(self, member_code: str, operation: Callable[[Any], MemberHistory]) -> None:
        """Have something stored, and wait for it half a second at most: a member with a link must not wait."""
        with anyio.move_on_after(_STORED_SECONDS):
            try:
                self._book.learn(member_code, await self._committer.run(operation, key=member_code))
            except StoreError as exc:
                self._book.store_failure.failed(exc)
            else:
                return
        # It may be stored meanwhile. To store it twice does no harm.
        assert self._tasks is not None
        self._tasks.start_soon(self._store_later, member_code, operation)

    async def _store_later(self, member_code: str, operation: Callable[[Any], MemberHistory]) -> None:
        reason = ""
        for pause in _SETTLING:
            await anyio.sleep(pause)
            try:
                self._book.learn(member_code, await self._committer.run(operation, key=member_code))
            except StoreError as exc:
                reason = str(exc)
            else:
                return
        _LOG.error("it is not stored what became of a request, or that a link was entered: %s", reason)
