"""One semaphore for all attempts of a client, shared fairly. Depends on anyio and knows nothing of surveys.

A `Gate` is the limit. Attempts belong to kinds, one for each endpoint. A kind has its own limit below that of
the gate, and its own holds: if one kind is refused or slow, the others go on. A `Permit` lets one attempt run:
it is acquired before a task gets the work, and released when the attempt ends. Each user of the gate waits for
its permits in a `Lane`, and `FairQueue` says whose turn it is.

Held permits are kept in sets, and counts are the sizes of these sets. A signal handler may raise between any
two lines. A separate counter would then stay wrong until the client is closed.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final

import anyio

from sampling_async._contract.logs import PanelLogger
from sampling_async._pacing.limit import NEXT_TO_NOTHING, OVERLOADED
from sampling_async._pacing.loops import OneShotEvent
from sampling_async._pacing.outage import logger
from sampling_async._pacing.turns import FairQueue, LeastTime, WorkKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sampling_async._pacing.outage import Outage
    from sampling_async._pacing.turns import Lane, Waiter

_LOWERED: Final = "%s: at most %d requests at once, %d before: the service is overloaded"

# Waiting tasks resume at random moments within this share of a hold after its end, and within a second.
_SPREAD: Final = 0.1
_AT_ONCE: Final = 2.0  # seconds within which reports of overload from two kinds have the same cause

# Calls that somebody waits for may go beyond the maximum while the service is well: by two at most, and by a
# quarter of a small maximum. Then they need not wait for another request while a fan-out has all places.
_RESERVED: Final = 2
_RESERVED_SHARE: Final = 4

# Seconds after a report of overload in which the service does not count as well.
_UNWELL: Final = 3.0


class Gate:
    """A semaphore for all calls of a client, whose size adapts.

    It decides who is next. The limit says how many may run, the pace when the next may begin, a hold or an
    outage whether anybody may, and a deadline when its caller leaves.

    Attributes:
        maximum: The number of attempts that may run, all kinds together; see `_RESERVED`.
        waiting: The number of tasks that wait for a permit.
        callers: The time of those who wait for a call: until its deadline, or until their host cancelled it.
        clock: Returns seconds, from any start.
        shares: How many clients share what the service can take, this one included.
    """

    def __init__(
        self,
        maximum: int,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]],
        random: Callable[[], float],
        outage: Outage | None = None,
        shares: int = 1,
        name: str | None = None,
    ) -> None:
        self._log = PanelLogger(logger, name)
        self.maximum = maximum
        self.shares = shares
        self._reserved = min(_RESERVED, maximum // _RESERVED_SHARE)
        self._outage = outage
        if outage is not None:
            outage.on_change = self._note_outage
        self.waiting = 0
        self.callers = LeastTime()
        self.clock = clock
        self._sleep = sleep
        self._random = random
        self._kinds: dict[str, WorkKind] = {}
        self._all = WorkKind("", maximum)  # only its hold is used: the hold of all kinds
        self._held: set[Permit] = set()  # of all kinds
        self._line = FairQueue(self._kinds)
        self._delayed: set[Permit] = set()  # that wait for the end of a hold or an outage, or for their pace
        self._held_back: set[anyio.CancelScope] = set()
        self._is_closed = False

    @property
    def running(self) -> int:
        """The number of permits that are held."""
        return len(self._held)

    @property
    def at_work(self) -> int:
        """The number of permits whose attempts run."""
        return len(self._held) - sum(permit.is_held for permit in tuple(self._delayed))

    @property
    def in_wait(self) -> int:
        """The number of attempts that cannot begin yet."""
        return self.waiting + len(self._delayed)

    def kind(self, name: str) -> WorkKind:
        """Return the state of a kind of work."""
        if name not in self._kinds:
            self._kinds[name] = WorkKind(name, self.maximum, self.shares)
        return self._kinds[name]

    def held_for(self, kind: WorkKind | None = None) -> float:
        """Return the seconds until the hold of a kind ends; without a kind, the longest of all holds."""
        if kind is None:
            return max(map(self.held_for, (self._all, *self._kinds.values())))
        until = max(kind.held_until, self._all.held_until)
        if until == -inf:
            return 0.0
        left = until - self.clock()
        return left if left > NEXT_TO_NOTHING else 0.0

    def hold(self, seconds: float, kind: str | None = None) -> None:
        """Grant no permits of one kind, or of all kinds, for some seconds. The hold that ends last counts.

        If two kinds are held at the same time, the cause is not in one endpoint, so all kinds are held. The
        waiting tasks resume at random moments shortly after the hold, not all at once.
        """
        if self._is_closed:
            return
        now = self.clock()
        until, spread = now + seconds, min(1.0, _SPREAD * seconds)
        others = (each for name, each in self._kinds.items() if name != kind)
        held = [self._all] if kind is None or any(each.held_until > now for each in others) else []
        held += [self.kind(kind)] if kind is not None else []
        for each in held:
            if until > each.held_until:
                each.held_until, each.spread = until, spread
        for each in self._kinds.values() if self._all in held else held:
            each.pace.held(until)

    def unhold(self) -> None:
        """End all holds now."""
        self._end_holds()
        for scope in self._held_back:
            scope.cancel()

    def close(self, *, wakes: bool) -> None:
        """End all holds and allow no new ones, so that the waiting tasks can end.

        Args:
            wakes: Whether this runs in the event loop of the waiting tasks. Only that loop may wake them.
        """
        self._is_closed = True
        self._end_holds()
        if self._outage is not None:
            self._outage.close(wakes=wakes)
        if wakes:
            self.unhold()

    def _end_holds(self) -> None:
        for kind in (self._all, *self._kinds.values()):
            kind.held_until = -inf

    def refused(self, permit: Permit) -> None:
        """Record that the service refused an attempt because of load."""
        kind = permit.kind
        pace = kind.pace
        pace.refused(self.clock(), is_news=permit.generation == kind.adaptive.generation)
        self.overloaded(permit, 1.0 if pace.spares_limit else OVERLOADED)

    def overloaded(self, permit: Permit, share: float = OVERLOADED, *, was_late: bool = False) -> None:
        """Record that an attempt overloaded the service. If two kinds report this, all kinds are lowered.

        Args:
            permit: The permit of the attempt.
            share: The share of its kind's limit that is left.
            was_late: Whether it had no response in time for its caller. What all kinds send made it wait.
        """
        kind, now = permit.kind, self.clock()
        kind.reported_at = now
        before = kind.adaptive.limit
        kind.adaptive.overloaded(permit.generation, share, is_careful=was_late)
        if kind.adaptive.limit != before:
            self._log.debug(_LOWERED, permit.lane.kind, kind.adaptive.limit, before)
        others = [each for each in self._kinds.values() if each is not kind]
        if not (was_late or any(now - other.reported_at < _AT_ONCE for other in others)):
            return
        for other in others:
            # Each kind is lowered once for one cause. `lowered_at` is separate from `reported_at`: a kind that
            # was lowered because of others has reported nothing, so it must not count as a second report.
            if now - max(other.reported_at, other.lowered_at) >= _AT_ONCE:
                other.lowered_at = now
                other.adaptive.overloaded(other.adaptive.generation, is_careful=was_late and bool(other.held))

    async def acquire(self, permit: Permit) -> None:
        """Wait until a permit is granted, there is no hold or outage, and its kind's pace allows an attempt.

        The permit is not held during a hold or an outage. If an outage lasts longer than the patience of the
        permit's lane, or may end too late for its deadline, or if the permit is withdrawn, return without it.
        """
        kind = permit.kind
        try:
            # Each wait starts the checks again, since a hold or an outage may have begun meanwhile.
            while not permit.is_withdrawn:
                if self._is_shut(kind):
                    permit.release()
                    self._delayed.add(permit)
                    try:
                        kind.shut.begin(permit, self.clock())
                        if not await self._open_again(permit):
                            return
                    finally:
                        self._delayed.discard(permit)
                        kind.shut.end(permit, self.clock())
                elif not permit.is_held:
                    if not self.waiting and self._has_place(kind):
                        self.grant(permit)
                        continue
                    now, time = self.clock(), permit.remaining
                    waiter = self._line.join(permit.lane, partial(self.grant, permit), now, time)
                    self.serve()
                    # If it was this permit's turn, it is held now: then no event and no wait are needed.
                    if not permit.is_held:
                        await self._wait_in_line(permit, waiter)
                elif wait := self._begin_or_wait(permit):
                    await self._interruptible_sleep(wait, permit)
                else:
                    return
        except BaseException:
            permit.release()
            raise

    def renew(self, permit: Permit) -> bool:
        """Release a permit whose attempt has ended, and grant it again if it is its lane's turn.

        It has the effect of `release` and a new place in the queue, but no task has to wait for the permit, and
        none is woken.

        Returns:
            Whether the permit is held again, and another attempt may begin now.
        """
        kind, now = permit.kind, self.clock()
        self._take_back(permit)
        # Nearly always the only other waiter, if any, is the next job of the same lane.
        alone = self.waiting <= bool(permit.lane)
        if self._is_shut(kind) or kind.pace.wait(now) or not kind.has_room:
            is_next = False
        elif alone:
            is_next = True
            self._line.in_a_row = 0
        elif is_next := self._line.next() is permit.lane:
            self._line.count(permit.lane)
        if is_next:
            self.grant(permit)
            kind.pace.begin(now)
            kind.next_to_begin = None
        if kind.has_room or not is_next:  # the limit may have grown
            self.serve()
        return is_next

    def _has_place(self, kind: WorkKind) -> bool:
        return len(self._held) < self.maximum and kind.has_room

    def _is_shut(self, kind: WorkKind) -> bool:
        return (self._outage is not None and self._outage.is_on) or self.held_for(kind) > 0

    async def _open_again(self, permit: Permit) -> bool:
        """Wait for the end of an outage or a hold; return False if the lane has no patience left."""
        kind, lane = permit.kind, permit.lane
        if self._outage is not None and self._outage.is_on:
            now = self.clock()
            lane.since = min(lane.since, now)
            return await self._outage.over(lane.patience, lane.since, deadline=now + permit.remaining)
        holds = kind if kind.held_until > self._all.held_until else self._all
        await self._interruptible_sleep(self.held_for(kind) + self._random() * holds.spread, permit)
        return True

    def _begin_or_wait(self, permit: Permit) -> float:
        """Use a permit's turn by the pace, or return the seconds until then. Release it if that is too late."""
        kind, now = permit.kind, self.clock()
        wait = 0.0
        if kind.pace.delays and not self._is_closed:
            wait = kind.wait_by_pace(now, permit.lane, permit.remaining, is_held=True)
        if now + wait >= permit.leaves_at:
            permit.release()
            return 0.0
        if not wait:
            kind.pace.begin(now)
            if kind.next_to_begin is permit:
                kind.next_to_begin = None
                self.serve()
        return wait

    async def _interruptible_sleep(self, seconds: float, permit: Permit) -> None:
        """Let a permit wait, but not longer than until `unhold` or `close`."""
        with anyio.CancelScope() as scope:
            self._held_back.add(scope)
            self._delayed.add(permit)
            try:
                await self._sleep(seconds)
            finally:
                self._delayed.discard(permit)
                self._held_back.discard(scope)

    def _note_outage(self) -> None:
        """At the beginning of an outage, wake all waiters; at its end, start with one attempt of each kind."""
        if self._outage is not None and self._outage.is_on:
            # The waiters get no permit. They resume in `acquire`, which sees the outage and waits for its end.
            for lane in self._line.lanes():
                while lane:
                    lane.leave().wake()
            return
        for kind in self._kinds.values():
            kind.stale = set(kind.held)
            kind.adaptive.start_again()
            kind.pace.end_rest()

    async def _wait_in_line(self, permit: Permit, waiter: Waiter) -> None:
        waiter.woken, permit.waiter = OneShotEvent(), waiter
        self.waiting += 1
        try:
            await waiter.woken.wait()
        except BaseException:
            waiter.gave_up = True
            permit.was_cancelled(self.clock() - waiter.since)
            # `serve` may have granted the permit in the moment of the cancellation. Without this release,
            # nobody would hold it, and one place less would be left for all others.
            permit.release()
            raise
        finally:
            self.waiting -= 1
            permit.waiter = None  # they refer to each other, and would stay until a garbage collection

    def grant(self, permit: Permit) -> None:
        """Mark a permit as held, and note the state of the gate at this moment."""
        permit.generation = permit.kind.adaptive.generation
        permit.among = len(self._held) + 1
        permit.kind.held.add(permit)
        self._held.add(permit)
        if permit.kind.pace.delays:
            permit.kind.next_to_begin = permit

    def release(self, permit: Permit) -> None:
        """Take a permit back, and grant it to the next waiter."""
        self._take_back(permit)
        self.serve()

    def _take_back(self, permit: Permit) -> None:
        if permit.kind.next_to_begin is permit:
            permit.kind.next_to_begin = None
        permit.kind.held.discard(permit)
        permit.kind.stale.discard(permit)
        self._held.discard(permit)

    def serve(self) -> None:
        """Grant all free permits to the waiters whose turn it is."""
        while len(self._held) < self.maximum and (lane := self._line.next()) is not None:
            self._line.count(lane)
            self._grant_first(lane)
        # Only as many of them as are reserved: otherwise they would take, one by one, what a bulk gives up.
        while len(self._held) >= self.maximum and self._reserved:
            lane = self._line.first_interactive()
            if lane is None or not self._is_well() or self._interactive_held() >= self._reserved:
                return
            self._grant_first(lane)

    def _interactive_held(self) -> int:
        return sum(permit.is_waited_for for permit in self._held)

    def _grant_first(self, lane: Lane) -> None:
        is_waited_for, now = lane is self._kinds[lane.kind].interactive, self.clock()
        waiter = lane.leave(is_late=is_waited_for and lane.first().is_late(now, self.callers.at(now)))
        waiter.grant()
        waiter.wake()

    def _is_well(self) -> bool:
        now = self.clock()
        return all(now - max(kind.reported_at, kind.lowered_at) > _UNWELL for kind in self._kinds.values())


class Permit:
    """The right to run one attempt. It is acquired for each attempt, and not held while a call backs off.

    Args:
        gate: The gate that grants it.
        lane: The lane to queue in.
        until: The deadline by the gate's clock; the permit is of no use after it.
        late: Seconds after that in which an attempt that has begun may still end.

    Attributes:
        kind: The state of the kind of work that it is for.
        generation: The generation of that kind's limit when the permit was granted.
        among: The number of permits held at that moment, this one included.
        leaves_at: When it leaves the line, because too little time is left.
        waiter: Its place in the queue, while a task waits there.
        is_withdrawn: Whether the permit was withdrawn.
    """

    __slots__ = (
        "_end", "_gate", "_until", "among", "generation", "is_withdrawn", "kind", "lane", "leaves_at", "waiter",
    )  # fmt: skip

    def __init__(self, gate: Gate, lane: Lane, until: float = inf, late: float = 0.0) -> None:
        self._gate = gate
        self._until, self._end = until, until + late
        self.lane = lane
        self.kind = gate.kind(lane.kind)
        self.generation = 0
        self.among = 0
        self.leaves_at = inf
        self.waiter: Waiter | None = None
        self.is_withdrawn = False
        if until < inf and self.is_waited_for:
            gate.callers.note(until - gate.clock(), gate.clock())

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody waits for the call, and it is no part of a bulk."""
        return self.lane is self.kind.interactive

    def was_cancelled(self, seconds: float) -> bool:
        """Record that its call was cancelled, if somebody waits for it; return False if it had a deadline."""
        is_without = self._until == inf and self.is_waited_for
        if is_without:
            self._gate.callers.note(seconds, self._gate.clock())
        return is_without

    @property
    def is_held(self) -> bool:
        """Whether the permit was granted and not released."""
        return self in self.kind.held

    @property
    def remaining(self) -> float:
        """The seconds in which it may be granted; once it is, those in which its attempt must end."""
        if self._until == inf:
            return inf
        return (self._end if self.is_held else self._until) - self._gate.clock()

    @property
    def held_for(self) -> float:
        """The seconds until the hold of the permit's kind ends."""
        return self._gate.held_for(self.kind)

    async def acquire(self) -> bool:
        """Wait until the permit is granted; return False if the deadline passes first, or it is withdrawn.

        If the permit is held already, return at once. If a hold ends, or its turn by the pace comes, too late
        for the deadline, do not wait. A call that somebody waits for leaves while just enough time is left.
        """
        remaining, until_closed = self.remaining, self.lane.until_closed
        if self.is_held:
            return remaining > 0
        if remaining < inf:
            now = self._gate.clock()
            turn = self.kind.wait_by_pace(now, self.lane, remaining)
            if self.is_waited_for:
                remaining = self.kind.leaves_after(remaining)
            self.leaves_at = now + remaining
            if max(turn, self.held_for) >= remaining:
                return False
        if until_closed is not None:
            with until_closed(remaining):
                await self._gate.acquire(self)
        elif remaining == inf:
            await self._gate.acquire(self)
        else:
            with anyio.move_on_after(remaining):
                await self._gate.acquire(self)
        return self.is_held

    def renew(self) -> bool:
        """Release the permit after an attempt, and return whether it is granted for another one at once."""
        return self.is_held and self.remaining > 0 and self._gate.renew(self)

    def withdraw(self) -> None:
        """End the wait for the permit, or release it. It is of no use after that."""
        self.is_withdrawn = True
        self.release()
        if self.waiter is not None:
            self.waiter.gave_up = True
            self.waiter.wake()

    def release(self) -> None:
        """Release the permit, if it is held."""
        if self.is_held:
            self._gate.release(self)
