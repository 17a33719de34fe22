"""`QuotaWatch`: polls the inventory in the background, and holds the newest good one."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import anyio
from attrs import define, field, frozen

from sampling_async._contract.checks import moment_of, number_above_0, whole_id
from sampling_async._contract.errors import (
    DecodeError,
    OutageError,
    SamplingError,
    ServiceError,
    TransportError,
    delivered,
)
from sampling_async._contract.records import safe_repr
from sampling_async._pacing.background import BackgroundService
from sampling_async._pacing.steps import let_go
from sampling_async._pacing.threads import in_thread, start
from sampling_async._watch.reader import Board, PollSchedule, QuotaChanges
from sampling_async._watch.shown import Closings, Shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sampling_async._contract.records import Quotas
    from sampling_async._pacing.threads import Run
    from sampling_async._watch.cache import CacheFile
    from sampling_async._watch.shown import Wave

WatchStatus: TypeAlias = Literal["starting", "ready", "stale", "failing"]
"""The state of a `QuotaWatch`.

`starting`: there is no inventory yet. `ready`: the inventory is new. `stale`: it is older than two usual
pauses, or comes from the cache. `failing`: the last poll failed, and there is no inventory, or one that is
older than `max_age`; or an unexpected error has ended the watch.
"""

_FAILURES: Final = (DecodeError, OutageError, ServiceError, TransportError)
"""Failures of a poll that may pass. Any other error ends the watch."""

_STALE: Final = 2
_MAX_AGE: Final = 10
_NEAR_EMPTY: Final = 10
_MANY: Final = 20
_LAST_WRITE: Final = 10.0

_LOG: Final = logging.getLogger("sampling_async.watch")


@define(eq=False)
class _Round:
    """A poll that somebody waits for."""

    over: anyio.Event = field(factory=anyio.Event)
    is_done: bool = False
    error: SamplingError | None = None


@frozen
class _Begun:
    """A poll: its number, and when it began, by the clock and in seconds since 1970."""

    poll: int
    since: float
    began: float


class QuotaWatch(BackgroundService):
    """The inventory of a service that is polled in the background while a block is open.

        async with client.watch_quotas(every=60) as watch:
            await watch.ready()
            print(watch.quotas, watch.status, watch.age)

    `client.watch_quotas` makes it. It can be entered once. A failed poll is not raised: the last good
    inventory stays, and `status`, `age` and `last_error` say how good it is. After failures the pauses grow
    from 5 seconds up to 5 minutes; after a 403 they last for minutes, until two polls in a row have succeeded.
    An unexpected error ends the watch: it is raised when the block is left.

    A poll with fewer than a tenth of the quotas is held back, if there were at least 20: the service may have
    lost them for a moment. So is a first poll without any. If the next poll confirms it, it is shown.

    Attributes:
        board: What is shown now; for other parts of this package.
        held_back: Whether the last good poll was held back, because its inventory was suddenly near-empty.
        last_error: The error of the last poll; None if it succeeded.
    """

    _called = "watch"

    def __init__(
        self,
        read: Callable[[], Awaitable[Quotas]],
        *,
        every: float,
        max_age: float | None,
        cache: CacheFile | None,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]],
        random: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        super().__init__()
        self._every = number_above_0(every, "every", "seconds")
        self._max_age = (
            _MAX_AGE * self._every if max_age is None else number_above_0(max_age, "max_age", "seconds")
        )
        self.board = Board()
        self.held_back = False
        self.last_error: Exception | None = None
        self._read = read
        self._cache = cache
        self._clock = clock
        self._sleep = sleep
        self._wall = wall_clock
        self._pace = PollSchedule(self._every, random)
        self._shown: Shown | None = None
        self._closings = Closings()
        self._arranged: Closings | None = None  # those of an inventory that is being arranged
        self._arranged_poll = 0
        self._late: list[int | Wave] = []  # what was closed meanwhile
        self._early: list[tuple[int | Wave, datetime]] = []  # what was closed before the cache was loaded
        self._is_loaded = cache is None
        self._is_cached = False
        self._of: _Begun | None = None  # the poll that is shown
        self._polls = 0  # how many have begun
        self._running: _Begun | None = None
        self._round: _Round | None = None  # of the running poll
        self._next: _Round | None = None  # of the next one
        self._is_wanted_soon = False
        self._began = 0.0  # when the latest poll began, by `clock`
        self._due = 0.0
        self._resting: anyio.CancelScope | None = None
        self._writing: Run[None] | None = None

    @safe_repr
    def __repr__(self) -> str:
        age = "" if self.age is None else f", {self.age:.0f} s old"
        return f"<QuotaWatch {self.status}{age}, {self._polls} polls>"

    # --- What is known

    @property
    def quotas(self) -> Quotas:
        """The last good inventory, without what was closed by notifications since.

        Raises:
            RuntimeError: There is none yet; `await watch.ready()` waits for it.
        """
        if self._shown is None:
            raise RuntimeError("there is no inventory yet: await watch.ready() first")
        return self._shown.quotas()

    @property
    def status(self) -> WatchStatus:
        """How good the inventory is; see `WatchStatus`."""
        return self.judged(self.age)

    def judged(self, age: float | None, *, has_failed: bool = False) -> WatchStatus:
        """Return how good an inventory of some age is; `has_failed` is about something else than a poll."""
        if self._broken_by is not None:
            return "failing"
        if (has_failed or self.last_error is not None) and (age is None or age > self._max_age):
            return "failing"
        if age is None:
            return "starting"
        return "stale" if self._is_cached or age > _STALE * self._every else "ready"

    @property
    def age(self) -> float | None:
        """Seconds since the poll began that gave the inventory: it is not older than that. None without one."""
        return None if self._of is None else max(0.0, self._clock() - self._of.since)

    @property
    def since(self) -> datetime | None:
        """When the poll began that gave the inventory; None without one."""
        return None if self._of is None else datetime.fromtimestamp(self._of.began, UTC)

    @property
    def given(self) -> Quotas:
        """What the last good poll gave; for other parts of this package."""
        assert self._shown is not None
        return self._shown.given

    def is_open(self, quota_id: int) -> bool:
        """Return whether a quota is shown as open."""
        return self._shown is not None and any(
            quota.quota_id == quota_id
            for key in self._shown.about(quota_id)
            if key in self._shown.view
            for quota in self._shown.view[key].quotas
        )

    def must_be_entered(self) -> None:
        """Raise RuntimeError if the block was not entered; for other parts of this package."""
        if self._runner is None:
            self._must_be_inside()

    def hidden(self) -> list[int]:
        """Return the quotas of the last good poll that are closed; for other parts of this package."""
        return [] if self._shown is None else self._shown.hidden(self._closings)

    async def ready(self) -> None:
        """Wait until there is an inventory, perhaps from the cache. For a time limit, use `anyio.fail_after`.

        Raises:
            RuntimeError: The watch has ended, or was not entered.
        """
        await self._until(lambda: self._shown is not None)

    def changes(self) -> QuotaChanges:
        """Return a reader of all changes from now on, which begins with the whole inventory.

        async with watch.changes() as changes:
            async for change in changes: ...
        """
        self.must_be_entered()
        return QuotaChanges(self.board)

    # --- Asking for a poll

    async def refresh(self) -> Quotas:
        """Poll now, without regard to the pauses, and return the inventory after it.

        A poll that is running when this is called does not count, because the service may have given its answer
        already. All callers that come before the next poll begins share that poll. So there is never more than
        one poll in flight, and ten callers cost one. If the poll is held back (see `held_back`), the inventory
        before it is returned.

        Raises:
            SamplingError: The poll failed. The last good inventory stays.
            RuntimeError: The watch has ended, or was not entered.
        """
        self._must_be_inside()
        if self._finished:
            raise self._ended()
        if self._next is None:
            self._next = _Round()
        poll = self._next
        self._wake()
        await poll.over.wait()
        if not poll.is_done:
            raise self._ended()
        if poll.error is not None:
            raise delivered(poll.error, poll.error.delivery)  # each caller gets an error of its own
        return self.quotas

    def refresh_soon(self, at: datetime | None = None) -> None:
        """Have the next poll begin soon, and do not wait for it: as after a notification that a quota is live.

        There are at least 5 seconds between the beginnings of two polls, or `every` if that is less. After a
        failure the pauses for failures are kept.

        Args:
            at: When the notification came; None for now. Nothing is done if a poll began after that.

        Raises:
            InvalidRequestError: `at` is no datetime with a time zone.
        """
        if self._polls_at(at) == self._polls:
            self._is_wanted_soon = True
            self._wake()

    def _wake(self) -> None:
        if self._resting is not None:
            self._resting.cancel()

    # --- Closing

    def close_quota(self, quota_id: int, *, at: datetime | None = None) -> bool:
        """Show a quota as closed from now on, as after a notification; return whether it was open.

        A poll that began before that does not open it again. A poll that began after it decides.

        Args:
            quota_id: The quota.
            at: When the notification came, by the clock of this machine; None for now. If the poll that is
                shown began after that, nothing is done.

        Raises:
            InvalidRequestError: `quota_id` is no whole number, or `at` is no datetime with a time zone.
        """
        return self._close(whole_id(quota_id, "quota_id"), at)

    def close_survey(self, survey_id: int, wave_id: int | None = None, *, at: datetime | None = None) -> bool:
        """Show a survey, or one wave of it, as closed, as `close_quota` does; return whether it was open.

        Raises:
            InvalidRequestError: An ID is no whole number, or `at` is no datetime with a time zone.
        """
        wave = whole_id(survey_id, "survey_id"), None if wave_id is None else whole_id(wave_id, "wave_id")
        return self._close(wave, at)

    def _close(self, what: int | Wave, at: datetime | None) -> bool:
        start = self._polls_at(at)
        if not self._is_loaded:
            # It may be newer than the inventory of the cache, or older.
            self._early.append((what, datetime.fromtimestamp(self._wall(), UTC) if at is None else at))
            return False
        if start is None:
            return False
        self._closings.close(what, start)
        if self._arranged is not None:
            self._late.append(what)
            if start >= self._arranged_poll:
                self._arranged.close(what, start)
        if self._shown is None:
            return False
        changed = self._shown.hide(self._shown.about(what), self._closings)
        if changed:
            self.board.moved(changed)
        return bool(changed)

    def _polls_at(self, at: datetime | None) -> int | None:
        """Return how many polls had begun when a notification came; None if a later poll has decided."""
        if at is None:
            return self._polls
        moment = moment_of(at, "at")
        if self._running is not None and self._began_by(self._running, moment):
            return self._polls
        if self._of is not None and self._began_by(self._of, moment):
            return self._polls if self._running is None else self._polls - 1
        # Either the poll that is shown began later, or the first poll will.
        return None

    def _began_by(self, poll: _Begun, moment: float) -> bool:
        """Return whether a poll began before a moment, in seconds since 1970."""
        # If that clock was set back since, the poll began earlier by it than it seemed. In doubt a closing
        # counts: that does less harm than a quota that seems to be open.
        return min(poll.began, self._wall() - (self._clock() - poll.since)) <= moment

    # --- The work

    async def _work(self) -> None:
        try:
            await self._load()
            while True:
                await self._rest()
                await self._poll()
        finally:
            if self._writing is not None:
                with anyio.move_on_after(_LAST_WRITE, shield=True):
                    await self._writing.over.wait()

    def is_over(self) -> None:
        """Record the end of the work. It may be called several times."""
        super().is_over()
        broken = self._broken_by
        if broken is not None:
            self.last_error = broken
        self.board.end(None if broken is None else self._ended)
        for poll in (self._round, self._next):
            if poll is not None:
                poll.over.set()

    async def _rest(self) -> None:
        while (seconds := self._until_due()) > 0:
            with anyio.CancelScope() as self._resting:
                await self._sleep(seconds)
            self._resting = None

    def _until_due(self) -> float:
        if self._next is not None:
            return 0.0
        due = self._due
        if self._is_wanted_soon and self._pace.is_usual:
            due = min(due, self._began + self._pace.soonest)
        return due - self._clock()

    async def _poll(self) -> None:
        self._round, self._next = self._next, None
        self._is_wanted_soon = False
        self._polls += 1
        self._began = self._clock()
        running = self._running = _Begun(self._polls, self._began, self._wall())
        error: SamplingError | None = None
        try:
            quotas = await self._read()
        except _FAILURES as exc:
            # The traceback would keep the frames of the call in memory.
            error = exc.with_traceback(None)
            self.last_error = error
            self._due = self._clock() + self._pace.after_failure(error)
            _LOG.info(
                "the inventory was not read, the next poll is in %.0f s: %s", self._due - self._clock(), error
            )
        else:
            self.last_error = None
            self._due = self._clock() + self._pace.after_success()
            if self._is_held_back(quotas):
                if self._shown is None:  # readers wait for it
                    self._due = min(self._due, self._clock() + self._pace.soonest)
            else:
                await self._show(quotas, running)
                self._save()
        finally:
            self._running = None
        poll, self._round = self._round, None
        if poll is not None:
            poll.is_done, poll.error = True, error
            poll.over.set()

    def _is_held_back(self, quotas: Quotas) -> bool:
        before = 0 if self._shown is None else self._shown.size()
        now = sum(len(survey.quotas) for survey in quotas.surveys)
        # The first one of all has none before it: only that nothing at all is open is not believed at once.
        is_sudden = not now if self._shown is None else before >= _MANY and now * _NEAR_EMPTY < before
        # Two polls that agree are believed.
        self.held_back = is_sudden and not self.held_back
        if self.held_back:
            _LOG.warning("an inventory of %d quotas is held back for one poll: there were %d", now, before)
        return self.held_back

    async def _show(self, quotas: Quotas, poll: _Begun) -> None:
        before, shown = self._shown, Shown(quotas, poll.poll, poll.began)
        self._arranged, self._late = self._closings.since(poll.poll), []
        self._arranged_poll = poll.poll
        try:
            changed = await shown.fill(self._arranged, before)
            # No await from here on: whoever looks sees the old inventory, or the new one.
            for late in self._late:
                keys = shown.about(late)
                shown.hide(keys, self._arranged)
                # Also what this poll shows as open: readers saw meanwhile that it is closed.
                changed.update(dict.fromkeys(keys))
            self._closings = self._arranged
        finally:
            self._arranged = None
        if shown.repeated and (before is None or before.repeated != shown.repeated):
            _LOG.warning("surveys that are listed twice: %d; of each, the first listing counts", shown.repeated)
        self._shown, self._of, self._is_cached = shown, poll, poll.poll == 0
        self.board.view = shown.view
        self.board.version += 1
        self.board.since = poll.since
        self.board.moved(changed)
        self._progress.notify()
        if before is not None:
            old = [*before.surveys.values(), *before.view.values()]
            del before
            await let_go(old)

    # --- The cache

    async def _load(self) -> None:
        if self._cache is not None:
            now, since = self._wall(), self._clock()
            found = await in_thread(self._cache.load, now)
            if found is not None:
                quotas, began = found
                await self._show(quotas, _Begun(0, since - (now - began), began))
        self._is_loaded = True
        early, self._early = self._early, []
        for what, at in early:
            self._close(what, at)

    def _save(self) -> None:
        # A disk that is slower than the polls gets only some of the inventories.
        is_free = self._writing is None or self._writing.over.is_set()
        if self._cache is not None and self._shown is not None and is_free:
            try:
                self._writing = start(self._cache.save, self.quotas, self._shown.began)
            except RuntimeError as exc:  # no thread can be started now
                _LOG.warning("the inventory is not written to the cache: %s", exc)
