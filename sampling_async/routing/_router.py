"""`SurveyRouter`: the best link for a member who has clicked, in time, and never two for one pair."""

from __future__ import annotations

import logging
import shutil
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from functools import partial
from math import inf
from pathlib import Path
from secrets import token_hex
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Final, Self

import anyio

from sampling_async import SamplingClient
from sampling_async._contract.checks import (
    number_above_0,
    require_functions,
    require_instance,
    whole_id,
    whole_number,
)
from sampling_async._contract.currencies import rates_or_none
from sampling_async._pacing.background import BackgroundService
from sampling_async._pacing.threads import join_uncancelled, start
from sampling_async._protocol.lessons import Lesson
from sampling_async._protocol.requests import member_code_of, quota_id_of
from sampling_async.matching import LiveIndex, Member
from sampling_async.notifications import StoreError
from sampling_async.notifications._committer import Committer
from sampling_async.notifications._entries import member_text
from sampling_async.notifications._facts import DamagedStoreError
from sampling_async.notifications._stores import store_of
from sampling_async.routing._click import Flight, Flights, UnusedInvites, shorten
from sampling_async.routing._history import DAY, Caps, lesson_of, refused_until
from sampling_async.routing._links import Settlement, Wish, abandon, begin, enter, settle
from sampling_async.routing._offers import OfferBook, RequestSizer
from sampling_async.routing._route import Offer, Route, RouterStatus, RouteStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from types import TracebackType

    from anyio.abc import TaskGroup

    from sampling_async import InviteOutcome
    from sampling_async._contract.checks import Text
    from sampling_async._contract.currencies import Currencies
    from sampling_async.notifications._stores import AnyStore
    from sampling_async.routing._history import Link, MemberHistory
    from sampling_async.routing._links import Turn

_LOG: Final = logging.getLogger("sampling_async.routing")
_CHOICE: Final = 20  # offers among which the store may choose
_LEASE_SECONDS: Final = 1.0  # after the end of a click for which others wait for it
_LONGEST_LEASE: Final = 60.0  # if the process dies, the member waits no longer
_LATE_SECONDS: Final = 10.0  # for which the response of a click that has ended is still waited for
_BUSY_SECONDS: Final = 0.03  # between two looks whether another process has asked
_FOLLOW_SECONDS: Final = 1.0  # between two looks at what other processes have stored
_RETRY_SECONDS: Final = 5.0  # the same, if the store cannot be read
_SETTLING: Final = (0.5, 2.0, 8.0)  # pauses before a result is stored again
_GRACE_SECONDS: Final = 0.5  # for responses, when the router is closed: what comes later is unclear
_STORED_SECONDS: Final = 0.5  # for which a member who has a link waits until that is stored
_MOST_UNCLEAR: Final = 2  # requests of one click without a usable response


class SurveyRouter(BackgroundService):
    """Gives members who click the link of the best survey that takes them, within a time.

        async with SurveyRouter(client, live, store="links.db") as router:
            offers = router.offers(member)                  # for a list of surveys; no request
            route = await router.route(member, within=2.0)  # for a click
            if route.url is not None:
                await route.entered()
                ... redirect the member to route.url

    A pair of member and quota is written to the store before it is requested. It is never requested again while
    it is unclear whether there is an invite, nor once there is one. Clicks of a member at the same moment make
    one request and get the same link, in one process or in several that share the store. Links outlast a
    restart. A link is given again until the member has entered it, its survey has ended for the member, its
    quota closes, or it is older than `lifetime`. The invites are in the `OutcomeLedger` of the store.

    Args:
        client: The client. Clicks go before its bulks, and do not wait in an outage.
        live: The live index. Its block must be open.
        store: Where links are kept: the store of the inbox, a path, or the address of a database. With the
            store of the inbox, surveys that have ended for a member are known, and completes are counted. None:
            a file that goes with the router, for tests.
        lifetime: Seconds after which a link that was not entered is not given again. The pair is not requested
            again either: the member gets other surveys, and the invite stays unused. Default: it is given as
            long as its quota is open.
        caps: How much a member may do on a day.
        remembers: Days of links and ends that `offers` knows; `route` knows all. It takes about 300 bytes of
            memory for each member who did something in these days.
        currency_rates: What one unit of each currency is worth, by currency ID, if the prices are in several.
            Without rates, each of these prices counts as 1, and a warning is logged. Quotas in a currency
            without a rate that come later are offered last, and an error is logged.
        clock: The clock, in seconds since 1970.

    Raises:
        InvalidRequestError: An argument is not of its type, or not above 0; or, on entering, there are prices
            in a currency without a rate.
    """

    _called = "survey router"

    def __init__(
        self,
        client: SamplingClient,
        live: LiveIndex,
        *,
        store: AnyStore | None,
        lifetime: float | None = None,
        caps: Caps | None = None,
        remembers: float = 30.0,
        currency_rates: Currencies = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        require_instance(client, SamplingClient, "client", "a SamplingClient")
        require_instance(live, LiveIndex, "live", "a LiveIndex")
        require_instance(caps, Caps | None, "caps", "a Caps, such as Caps(starts=10)")
        require_functions(clock=clock)
        self._lifetime = inf if lifetime is None else number_above_0(lifetime, "lifetime", "seconds")
        seconds = number_above_0(remembers, "remembers", "days") * DAY
        if store is None:
            folder = mkdtemp(prefix="sampling-links-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            store = Path(folder) / "links.db"
        opened = store_of(store).copy()
        self._invites = client._for_clicks()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        self._live = live
        self._caps = caps or Caps()
        self._clock = clock
        self._book = OfferBook(
            live,
            opened.copy(),
            seconds=seconds,
            caps=self._caps,
            currency_rates=rates_or_none(currency_rates),
            clock=clock,
        )
        self._committer = Committer(opened)
        self._sizer = RequestSizer()
        self._flights = Flights(self._fly)
        self._abandoned: dict[str, list[str]] = {}  # questions that may be in the store, and were not followed
        self._tasks: TaskGroup | None = None
        self._is_closing = False
        self._counts: Counter[str] = Counter()
        self._clicks: Counter[RouteStatus] = Counter()
        self._unused = UnusedInvites(self._invites.count_unused)

    # --- Opening and closing

    async def __aenter__(self) -> Self:
        await join_uncancelled(start(self._committer.start))
        try:
            await self._book.follow()
            self._book.require_rates()
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
                await self._flights.over()
        finally:
            try:
                await super().__aexit__(exc_type, exc, traceback)
            finally:
                self._flights.release()
                await join_uncancelled(start(self._committer.stop))

    async def _work(self) -> None:
        async with anyio.create_task_group() as self._tasks:
            self._progress.notify()
            while True:
                await anyio.sleep(_RETRY_SECONDS if self._book.store_failure.reason else _FOLLOW_SECONDS)
                self._unused.use(await self._book.follow())  # another process may have given them
                await self._clear_up()

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
            unused=len(self._unused),
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
        if quota_ids is not None:
            require_instance(quota_ids, Iterable, "quota_ids", "a list of quota IDs")
        chosen = None if quota_ids is None else tuple(whole_id(each, "each of quota_ids") for each in quota_ids)
        seconds, began = number_above_0(within, "within", "seconds"), anyio.current_time()
        self._must_be_inside()
        if self._is_closing or self._finished:
            raise RuntimeError("the survey router is closed")
        assert self._tasks is not None
        flight, is_first = self._flights.board(self._tasks, member, chosen, self._clock(), seconds)
        await flight.wait(seconds)
        if flight.failure is not None:
            try:
                raise flight.failure.with_traceback(None)
            finally:
                del flight  # no cycle of the exception, its traceback and this frame
        invite, status, is_repeat = flight.invite, flight.status, flight.is_repeat or not is_first
        self._clicks[status] += 1
        enter = None
        if invite is not None:
            self._counts["repeats"] += is_repeat
            self._unused.use([(member_text(member.member_code), flight.quota_id)])
            enter = partial(self.entered, member.member_code, flight.quota_id)
        return Route(
            status=status,
            invite=invite,
            is_repeat=is_repeat and invite is not None,
            asked=flight.asked if is_first else 0,
            seconds=anyio.current_time() - began,
            enter=enter,
        )

    async def entered(self, member_code: Text, quota_id: int) -> None:
        """Record that a member was sent to the link of a quota; see `Route.entered`.

        Raises:
            RuntimeError: The router was not entered, or is closed.
        """
        self._must_be_inside()
        if self._is_closing or self._finished or self._tasks is None:
            raise RuntimeError("the survey router is closed")
        code = member_code_of(member_code)
        operation = partial(enter, member_code=code, quota_id=quota_id_of(quota_id), now=self._clock())
        await self._store(code, operation)

    async def _fly(self, flight: Flight) -> None:
        try:
            while await self._step(flight):
                pass
        except StoreError as exc:
            self._book.failed(exc)
            if isinstance(exc, DamagedStoreError):
                flight.failure = exc
        except Exception as exc:  # noqa: BLE001  raised in the tasks of the clicks
            flight.failure = exc

    async def _step(self, flight: Flight) -> bool:
        """Ask the store, and for some quotas, and return whether the flight goes on."""
        is_too_late = flight.left <= 0 or (flight.asked and not self._sizer.has_time(flight.left))
        if is_too_late and flight.is_refused and self._choice(flight):
            flight.is_refused = False  # there are others, and no time to ask for them
        if is_too_late or self._is_closing:
            return False
        goes_on = await self._turn(flight)
        if goes_on and flight.is_busy:
            await anyio.sleep(_BUSY_SECONDS)
        return goes_on

    def _choice(self, flight: Flight) -> list[Offer]:
        if self._live.age is None:  # there is no inventory yet; a link of an earlier click may do
            return []
        if flight.quota_ids is not None:
            return self._book.among(flight.member, flight.quota_ids)
        return self._book.best(flight.member, _CHOICE)

    async def _turn(self, flight: Flight) -> bool:
        code, offers = flight.member.member_code, self._choice(flight)
        wish = Wish(
            owner=token_hex(8),
            member_code=code,
            offers=offers,
            most=self._sizer.most(flight.left),
            quota_ids=None if flight.quota_ids is None else frozenset(flight.quota_ids),
            takes_links=flight.takes_links,
            caps=self._caps,
            watches=anyio.current_time() < flight.watches_until,
            abandoned=tuple(self._abandoned.get(code, ())),
            began=flight.began,
            seconds=min(max(0.0, flight.left), _LONGEST_LEASE) + _LEASE_SECONDS,
        )
        turn = await self._begin(wish)
        flight.is_busy = turn.is_busy
        if turn.is_busy:
            return True
        if turn.links:
            return self._give_again(flight, turn.links)
        if turn.asked:
            return await self._ask(flight, wish.owner, turn.asked)
        if self._live.age is None:
            return False
        flight.is_refused = True
        # The store may have known more than this process did: then there may be other offers.
        return bool(offers) and self._choice(flight) not in ([], offers)

    async def _begin(self, wish: Wish) -> Turn:
        code = wish.member_code
        try:
            turn = await self._committer.run(partial(begin, wish=wish, clock=self._clock), key=code)
        except DamagedStoreError:
            raise  # by what was read, so nothing is stored
        except StoreError:
            # It may be stored all the same: whether the store has committed it is not known.
            self._abandoned.setdefault(code, []).append(wish.owner)
            shorten(self._abandoned)
            raise
        self._forget_abandoned(code, wish.abandoned)
        self._book.learn(code, turn.history)
        return turn

    def _forget_abandoned(self, member_code: str, owners: Collection[str]) -> None:
        left = [owner for owner in self._abandoned.pop(member_code, ()) if owner not in owners]
        if left:
            self._abandoned[member_code] = left

    async def _clear_up(self) -> None:
        """Have what was written down and not followed deleted, so that other processes need not wait for it."""
        while self._abandoned and not self._book.store_failure.reason:
            code = next(iter(self._abandoned))
            owners = tuple(self._abandoned[code])
            operation = partial(abandon, member_code=code, owners=owners, now=self._clock())
            try:
                self._book.learn(code, await self._committer.run(operation, key=code))
            except StoreError as exc:
                self._book.failed(exc)
                if not isinstance(exc, DamagedStoreError):
                    return
            self._forget_abandoned(code, owners)

    def _give_again(self, flight: Flight, links: Sequence[Link]) -> bool:
        for link in links:
            # Without an inventory nobody knows better.
            if self._live.age is None or self._live.is_open(link.quota_id):
                flight.invite, flight.quota_id, flight.is_repeat = link.invite, link.quota_id, True
                return False
        flight.takes_links = False
        return True

    async def _ask(self, flight: Flight, owner: str, asked: Sequence[Offer]) -> bool:
        code, began = flight.member.member_code, anyio.current_time()
        outcomes: Sequence[InviteOutcome] = ()
        left = flight.left
        if left > 0:
            flight.is_asking = True
            flight.asked += len(asked)
            self._counts["asked"] += len(asked)
            quota_ids = [offer.quota_id for offer in asked]
            outcomes = await self._invites.request(code, quota_ids, within=left, late=_LATE_SECONDS)
        found = {outcome.quota_id: outcome for outcome in outcomes}
        settled = [self._settlement(offer, found.get(offer.quota_id)) for offer in asked]
        answered = [each for each in settled if each.state in {"invited", "refused"}]
        if answered:
            refused = sum(each.state == "refused" for each in answered)
            self._sizer.ended(anyio.current_time() - began, len(answered), refused)
        for each in answered:
            if each.invite is not None:
                self._counts["invited"] += 1
                self._unused.add(code, each.offer.quota_id)
            else:
                self._close(each)
        now = self._clock()
        await self._store(code, partial(settle, owner=owner, member_code=code, settled=settled, now=now))
        flight.is_asking = False  # not if this is cancelled before: then nobody knows
        return self._conclude(flight, settled)

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

    def _conclude(self, flight: Flight, settled: Sequence[Settlement]) -> bool:
        """Take into a flight what its request has brought, and return whether it goes on."""
        flight.unclear += any(each.state == "unclear" for each in settled)
        for each in settled:
            if each.invite is not None:
                flight.invite, flight.quota_id = each.invite, each.offer.quota_id
                return False
        if any(each.state is None or lesson_of(each.code) is Lesson.STOP for each in settled):
            flight.is_refused = False  # by nobody who has looked at this member and quota
        elif flight.unclear < _MOST_UNCLEAR:
            flight.is_refused = True
            return True
        return False

    async def _store(self, member_code: str, operation: Callable[[Any], MemberHistory]) -> None:
        """Have something stored, and wait for it half a second at most: a member with a link must not wait."""
        with anyio.move_on_after(_STORED_SECONDS):
            try:
                self._book.learn(member_code, await self._committer.run(operation, key=member_code))
            except StoreError as exc:
                self._book.failed(exc)
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
            except Exception as exc:  # noqa: BLE001  it must not end the tasks of other clicks
                reason = str(exc)
            else:
                return
        _LOG.error("it is not stored what became of a request, or that a link was entered: %s", reason)
