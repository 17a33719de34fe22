"""One run of a campaign: request what is pending, under the current limits, and react to the outcomes."""

from __future__ import annotations

import logging
import math
from collections import deque
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, Self

import anyio
from attrs import define, field

from sampling_async import InvalidRequestError, InviteRequest
from sampling_async._bulk.inputs import PromptItems
from sampling_async._contract.checks import count_of
from sampling_async._contract.currencies import money_in_words, total_of
from sampling_async._contract.errors import WithheldError
from sampling_async._pacing.background import BackgroundService
from sampling_async._pacing.threads import in_thread
from sampling_async._protocol.requests import request_of
from sampling_async.campaign._book import Book
from sampling_async.campaign._ledger_file import LedgerError
from sampling_async.campaign._limits import InvitePace, Limits
from sampling_async.campaign._record import LedgerRecord
from sampling_async.campaign._rooms import left_of_surveys
from sampling_async.campaign._summing import Moments, WaitLog, summary_of
from sampling_async.notifications import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from types import TracebackType

    from sampling_async import InviteOutcome, SamplingClient
    from sampling_async._contract.currencies import CurrencyRates
    from sampling_async._protocol.lessons import Rule
    from sampling_async.campaign._ledger import CampaignLedger
    from sampling_async.campaign._ledger_file import DueMember
    from sampling_async.campaign._rooms import SharedRoom
    from sampling_async.campaign._summary import Pairs, Summary, WaitKind

_WINDOW: Final = 500  # members that are read from the ledger at a time
_ROUNDING: Final = 1e-9  # by which sums of costs may be off: a cap of 1,000 takes ten thousand of 0.10
_POLL: Final = 0.5  # seconds between two looks at the limits and at the client
_SIGN: Final = 1.0  # seconds between two signs in the ledger that the run is alive
_ROOM: Final = 3600.0  # seconds between two notes of what it holds of shared room
_LOG: Final = logging.getLogger(__name__)


class CampaignRun:
    """The outcomes of a run as they come: an async context manager and, inside it, an async iterator.

    It ends when no pair is pending, when a cap is reached, or when no more requests can be sent; `reason` then
    says why. Leave the block to stop it earlier: what was not sent stays pending, for the next run.

    Attributes:
        reason: Why it ended although pairs are pending; empty otherwise.
        waiting_for: Why nothing is requested now; None if something is.
        limits: The limits that hold now.
    """

    def __init__(
        self,
        client: SamplingClient,
        ledger: CampaignLedger,
        rules: Mapping[int, Rule],
        *,
        is_open: Callable[[int], bool],
        rooms: Callable[[CampaignLedger], SharedRoom | None],
        max_turns: int,
        retry_seconds: float,
        wall_clock: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self.reason = ""
        self.waiting_for: WaitKind | None = None
        self.limits = Limits()
        self._client, self._ledger, self._rules = client, ledger, rules
        self._is_open = is_open
        self._rooms_of = rooms
        self._rooms: SharedRoom | None = None
        self._room_kept = 0.0
        self._max_turns, self._retry_seconds = max_turns, retry_seconds
        self._wall_clock, self._clock = wall_clock, clock
        self._watching = _Watching(self)
        self._number = 0
        self._book = Book((), (), rules)  # until the ledger is read
        self._rates: CurrencyRates | None = None
        self._added: Callable[[Mapping[int, float]], float | None] = partial(total_of, rates=None)
        self._waits = WaitLog(0)
        self._seen = 0.0
        self._pace = InvitePace()
        self._last_error = ""
        self._before = 0, 0  # members with a request, and requests, in the runs before
        self._blocks = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<CampaignRun of {self._ledger.path.name}: {self.reason or self.waiting_for or 'asking'}>"

    # --- What a user looks at

    @property
    def pairs(self) -> Pairs:
        """The pairs of the campaign, by what became of them so far."""
        return self._book.pairs

    @property
    def members(self) -> int:
        """Members who had a request, in all runs."""
        self._must_be_entered()
        return self._record.asked

    @property
    def requests(self) -> int:
        """Requests sent, in all runs."""
        self._must_be_entered()
        return self._record.requests

    @property
    def expected_value(self) -> float | None:
        """What the invites are expected to bring; None with several currencies and no rates, see `Plan`."""
        return self._added(self._book.expected)

    @property
    def worth(self) -> str:
        """`expected_value` in words, with its currency; with several currencies, what is in each."""
        expected, currencies = self._book.expected, list(self._book.expected)
        currency_id = currencies[0] if len(currencies) == 1 and currencies[0] else None
        return money_in_words(self.expected_value, currency_id, expected, self._rates)

    async def summary(self) -> Summary:
        """Return what became of the campaign so far.

        Raises:
            LedgerError: The ledger cannot be read.
        """
        self._must_be_entered()
        await self._record.written()
        return await in_thread(summary_of, self._ledger, self._rules)

    # --- The block

    async def __aenter__(self) -> Self:
        self._blocks.push_async_callback(self._close)
        try:
            await in_thread(self._open)
            self._record = LedgerRecord(
                self._ledger,
                Moments(self._number),
                self._book,
                self._wall_clock,
                self._clock,
                *self._before,
                self._may_send,
            )
            due = _DueRequests(self._most, self._allowed, self._request, self._next_turn, self._window)
            self._stream = self._client.fan_out(due, journal=self._record)
            await self._blocks.enter_async_context(self._stream)
            await self._blocks.enter_async_context(self._watching)
        except BaseException:
            self.reason = self.reason or "it was ended before it began"
            await self._blocks.aclose()
            raise
        return self

    def _open(self) -> None:
        ledger = self._ledger
        ledger.open()
        ledger.lock()
        if not ledger.plan:
            raise ledger.error("has no plan: call plan() first")
        self._number = ledger.begin_run(self._wall_clock())
        self.limits = ledger.limits()
        with ledger.as_written():
            self._take_up(ledger)
        self._rooms = self._rooms_of(ledger)
        self._keep_room()

    def _take_up(self, ledger: CampaignLedger) -> None:
        self._book = Book(
            ledger.quotas(),
            ledger.counts(),
            self._rules,
            is_open=self._is_open,
            max_turns=self._max_turns,
            retry_seconds=self._retry_seconds,
            spent=ledger.spent() + ledger.doubtful(),
            earlier=ledger.earlier(),
            left_of_surveys=left_of_surveys(ledger),
        )
        self._rates, self._added = ledger.currency_rates(), ledger.adding()
        self._waits = WaitLog(ledger.last_wait())
        self._before = ledger.asked(), int(ledger.fact("requests") or 0)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # What is cut off before it was sent stays pending.
        self._record.is_ending = True
        if not self.reason and exc_type is not None:
            cancelled = issubclass(exc_type, anyio.get_cancelled_exc_class())
            self.reason = "it was cancelled" if cancelled else f"it was ended by {exc_type.__name__}"
        await self._blocks.__aexit__(exc_type, exc, traceback)

    async def _close(self) -> None:
        with anyio.CancelScope(shield=True):
            await in_thread(self._end)

    def _end(self) -> None:
        try:
            if self._number:
                left = self._book.pairs.pending
                reason = self.reason or ("it was left before its end" if left else "")
                self._ledger.end_run(self._number, self._wall_clock(), reason)
                self._keep_room()
        finally:
            self._ledger.close()

    def _keep_room(self) -> None:
        """Note what this campaign holds of the room that it shares; the rest is free."""
        if self._rooms is None:
            return
        self._room_kept = now = self._wall_clock()
        try:
            if self._rooms.take(self._ledger, now):
                _LOG.warning("%r held no room any more, and others have planned for it: plan a top-up", self)
        except StoreError as exc:
            _LOG.warning("the room that %r shares is as it was noted before: %s", self, exc)

    def __aiter__(self) -> Self:
        self._must_be_entered()
        return self

    @property
    def is_entered(self) -> bool:
        """Whether the block was entered."""
        return bool(self._number)

    def _must_be_entered(self) -> None:
        if not self._number:
            raise InvalidRequestError(
                "the run of a campaign works within its block: async with campaign.run() as run: "
                "async for outcome in run: ..."
            )

    async def __anext__(self) -> InviteOutcome:
        self._must_be_entered()
        try:
            outcome = await self._stream.__anext__()
            while outcome.status == "not_sent" and isinstance(outcome.error, WithheldError):
                # The pair is pending again.
                outcome = await self._stream.__anext__()
        except StopAsyncIteration:
            # Nobody has stopped it, and still not everything was requested.
            if self.pairs.pending:
                self.stop(f"the client gave up: {self._last_error or 'the service cannot be asked'}")
            raise
        if outcome.error is not None:
            self._last_error = str(outcome.error)
        # The fan-out has given up, as after a 403 or a long outage, and does not even request this one. So it
        # stays pending, and the campaign stops.
        if self._record.is_waiting(outcome.member_code, outcome.quota_id):
            self.stop(str(outcome.error))
        return outcome

    def stop(self, reason: str) -> None:
        """Request nothing more. Responses to what is in flight are still processed, and the rest stays pending.

        `reason` is for the ledger and the report; an earlier one stays.
        """
        self.reason = self.reason or reason
        self._record.changed.notify()

    # --- What is requested

    async def _next_turn(self) -> int | None:
        """Wait until nothing is in flight, and return the turn of the next members; None if none is left."""
        while True:
            while self._record.members and not self._must_stop():
                await self._record.changed.wait()
            await self._record.written()
            found = await in_thread(self._ledger.pending, self._wall_clock())
            if found is None or self._must_stop():
                return None
            (turn, due), now = found, self._wall_clock()
            if due <= now:
                return turn
            if due > now + self._retry_seconds:
                # The clock was set back since that was noted.
                await in_thread(self._ledger.bring_forward, now + self._retry_seconds)
            else:
                await self._wait(None, due - now)

    async def _window(self, turn: int, after: int) -> list[DueMember]:
        return await in_thread(self._ledger.window, turn, after, self._wall_clock(), _WINDOW)

    def _request(self, member: DueMember, most: int) -> InviteRequest | None:
        """Return the request for a member, of at most so many pairs; None if nothing is left for it."""
        quota_ids = self._record.ready(member, most)
        return request_of(member.code, quota_ids) if quota_ids else None

    def _most(self, member: DueMember) -> int:
        return 0 if self._must_stop() or self._obstacle() is not None else self._left(member)

    async def _allowed(self, member: DueMember) -> bool:
        """Wait until the limits allow a request for a member. Return False if they never will."""
        while not self._must_stop():
            match self._obstacle():
                case None if self._left(member):
                    self.waiting_for = None
                    return True
                case None if self._book.asked:
                    # What is in flight may be refused, and leave some of the cap.
                    await self._record.changed.wait()
                case None:
                    self.stop(self._cap())
                case "concurrency":
                    await self._record.changed.wait()
                case "paused" | "hours" | "rate" as kind:
                    await self._wait(kind)
        return False

    def _obstacle(self) -> Literal["paused", "hours", "concurrency", "rate"] | None:
        """Return which limit any request has to wait for now. The caps are not among them; see `_left`."""
        limits = self.limits
        if limits.paused:
            return "paused"
        if limits.hours is not None and limits.seconds_closed(self._wall_clock()):
            return "hours"
        if limits.concurrency is not None and self._record.members >= limits.concurrency:
            return "concurrency"
        rate = limits.invites_per_minute
        if rate is not None and not self._pace.has_token(self._clock(), self._book.committed, rate):
            return "rate"
        return None

    def _may_send(self, quota_ids: Iterable[int]) -> bool:
        """Return whether what was requested may be sent now: it may have waited, or been refused for load."""
        must_wait = self._must_stop() or self._obstacle() in {"paused", "hours"} or self._is_over_caps()
        return not must_wait and all(self._book.is_open(quota_id) for quota_id in quota_ids)

    def _is_over_caps(self) -> bool:
        """Return whether what was requested is more than the caps allow, as when they were lowered since."""
        invites, spend = self.limits.max_invites, self.limits.max_spend
        return (invites is not None and self._book.committed > invites) or (
            spend is not None and self._book.most_spent > spend * (1 + _ROUNDING)
        )

    def _must_stop(self) -> bool:
        if self._book.stop is not None:
            self.stop(self._book.stop)
        return bool(self.reason)

    def _left(self, member: DueMember) -> int:
        """Return how many more pairs the caps allow."""
        most = len(member.due)
        if self.limits.max_invites is not None:
            most = min(most, self.limits.max_invites - self._book.committed)
        if self.limits.max_spend is not None:
            cap, cost = self.limits.max_spend, self._book.cost_of(member)
            left = cap - self._book.most_spent
            if cost:
                most = math.floor(max(0.0, min(most, (left + _ROUNDING * cap) / cost)))
            elif left <= 0:
                most = 0
        return max(0, most)

    def _cap(self) -> str:
        if self.limits.max_invites is not None and self._book.committed >= self.limits.max_invites:
            return f"the cap of {count_of(self.limits.max_invites, 'invite')} is reached"
        return f"the cap on spend, {self.limits.max_spend:,}, is reached"

    # --- Waiting

    async def poll_limits(self) -> None:
        """Apply limits that were changed, and sample the client's state."""
        await in_thread(self._ledger.must_be_in_place)
        limits = await in_thread(self._ledger.limits)
        if limits != self.limits:
            if limits.invites_per_minute != self.limits.invites_per_minute:
                # What was made without a limit, or with another one, does not count against this one.
                self._pace = InvitePace()
            self.limits = limits
            self._record.changed.notify()
        snapshot, now = self._client.snapshot(), self._wall_clock()
        if not 0 <= now - self._seen < _SIGN:
            # If the process is killed, this is how long the run was active.
            self._seen = now
            with suppress(LedgerError):  # what it cannot write will be said of an outcome
                await in_thread(partial(self._ledger.note, seen=now))
        if not 0 <= now - self._room_kept < _ROOM:
            await in_thread(self._keep_room)
        self._record.moments.note_limit(now, snapshot.limit)
        if snapshot.away_for:
            self.waiting_for = "outage"
            self.note_wait("outage", now - snapshot.away_for)
        elif self.waiting_for == "outage":
            self.waiting_for = None

    async def _wait(self, kind: WaitKind | None, seconds: float = _POLL) -> None:
        began = self._wall_clock()
        if kind is not None:
            self.waiting_for = kind
        with anyio.move_on_after(min(seconds, _POLL)):
            await self._record.changed.wait()
        if kind is not None:
            self.note_wait(kind, began)

    def note_wait(self, kind: WaitKind, began: float) -> None:
        number, first, last = self._waits.extend(kind, began, self._wall_clock())
        if last - first >= 1:
            self._record.note_wait(number, kind, first, last)


@define(eq=False)
class _DueRequests(PromptItems[InviteRequest]):
    """The requests of a run, turn by turn. What the limits allow now needs no wait."""

    _most: Callable[[DueMember], int]
    _allowed: Callable[[DueMember], Awaitable[bool]]
    _request: Callable[[DueMember, int], InviteRequest | None]
    _next_turn: Callable[[], Awaitable[int | None]]
    _window: Callable[[int, int], Awaitable[list[DueMember]]]
    _members: deque[DueMember] = field(init=False, factory=deque)  # the next ones of this turn
    _turn: int | None = field(init=False, default=None)
    _after: int = field(init=False, default=0)

    def __next__(self) -> InviteRequest:
        while self._members and (most := self._most(self._members[0])):
            request = self._request(self._members.popleft(), most)
            if request is not None:
                return request
        raise StopIteration

    async def __anext__(self) -> InviteRequest:
        while True:
            for request in self:
                return request
            if not await (self._allowed(self._members[0]) if self._members else self._read_on()):
                raise StopAsyncIteration

    async def _read_on(self) -> bool:
        """Read the next members, of this turn or the next one. Return False if there are none."""
        while True:
            if self._turn is None:
                self._turn, self._after = await self._next_turn(), 0
                if self._turn is None:
                    return False
            if some := await self._window(self._turn, self._after):
                self._after = some[-1].id
                self._members.extend(some)
                return True
            self._turn = None


class _Watching(BackgroundService):
    """Looks at the limits in the ledger, and at the client, while a run is active."""

    _called = "campaign"

    def __init__(self, run: CampaignRun) -> None:
        super().__init__()
        self._run = run

    async def _work(self) -> None:
        try:
            while True:
                await self._run.poll_limits()
                await anyio.sleep(_POLL)
        except Exception as exc:
            # It must not go on without heeding a pause or a cap.
            self._run.stop(f"its ledger cannot be looked at: {type(exc).__name__}")
            raise
