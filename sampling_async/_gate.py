"""Who may run now: a limit for a whole client, shared fairly. Knows anyio and nothing of surveys.

A `Gate` is the limit. Work comes in kinds, each with a limit of its own below that of the gate, and holds of
its own: where one kind is refused or slow, the others go on. A `Lane` is where one user of the gate queues. A
`Permit` lets one attempt run: it is acquired before the work is given to a task and released when the attempt
ends. What is out is what is in a set, so that nothing that strikes between two lines makes a count wrong.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Final

import anyio

from sampling_async._limit import AdaptiveLimit, Pace
from sampling_async._loops import event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from sampling_async._outage import Outage

_MOST_IN_A_ROW: Final = 9
_NEXT_TO_NOTHING: Final = 1e-9  # seconds: timers fire so much too early, and sleeping for that is spinning
_SPREAD: Final = 0.1  # of a hold, and at most a second, over which those it held back set out again
_AT_ONCE: Final = 2.0  # seconds within which two kinds that report overload speak of the same thing


class Lane:
    """A queue at a gate for one kind of work. Lanes take turns, so that nobody's length is another's wait.

    Args:
        kind: What it is for.
        weight: How many turns it has beside a lane of weight 1, nearly: a lane that asks for one permit at a
            time gets no more than one of those that come free in the same moment.
        patience: For how many seconds it waits while the service is away.

    Attributes:
        since: When it first had to wait for that; from then on its patience counts.
    """

    __slots__ = ("_waiting", "in_line", "kind", "patience", "since", "stride", "turn")

    def __init__(self, kind: str, weight: float = 1.0, *, patience: float = 0.0) -> None:
        self.kind = kind
        self.patience = patience
        self.since = inf
        self.stride = 1.0 / weight
        self.turn = 0.0
        self.in_line = False
        self._waiting: deque[_Waiter] = deque()

    def __bool__(self) -> bool:
        """Return whether anybody waits; those who gave up do not count."""
        while self._waiting and self._waiting[0].gave_up:
            self._waiting.popleft()
        return bool(self._waiting)

    def join(self, waiter: _Waiter) -> None:
        """Queue."""
        self._waiting.append(waiter)

    def first(self) -> _Waiter:
        """Return who has waited longest."""
        return self._waiting[0]

    def leave(self) -> _Waiter:
        """Take out who has waited longest."""
        return self._waiting.popleft()


class _Waiter:
    __slots__ = ("came", "gave_up", "permit", "turn_came")

    def __init__(self, permit: Permit, came: int) -> None:
        self.permit = permit
        self.came = came  # the lower, the earlier
        self.turn_came: anyio.Event | None = None  # made only by who has to wait
        self.gave_up = False


class Kind:
    """What a gate knows of one kind of work.

    Attributes:
        adaptive: Its limit.
        pace: How soon after each other its attempts may begin.
        held: The permits for it that are out.
        stale: Those of them that were granted before an outage: their attempts may hang for long, which says
            nothing of the service as it is since.
        interactive: The lane of calls that somebody waits for.
        lanes: A heap of the other lanes where somebody waits, by turn.
        held_until: When it may go on that was asked to wait.
        reported_at: When an attempt of this kind last was more than the service could take.
        lowered_at: When its limit was last lowered for what others reported.
    """

    __slots__ = (
        "adaptive",
        "held",
        "held_until",
        "interactive",
        "lanes",
        "lowered_at",
        "pace",
        "reported_at",
        "spread",
        "stale",
    )

    def __init__(self, name: str, maximum: int) -> None:
        self.adaptive = AdaptiveLimit(maximum)
        self.pace = Pace()
        self.held: set[Permit] = set()
        self.stale: set[Permit] = set()
        self.interactive = Lane(name)
        self.lanes: list[tuple[float, int, Lane]] = []
        self.held_until = -inf
        self.reported_at = -inf
        self.lowered_at = -inf
        self.spread = 0.0

    @property
    def has_room(self) -> bool:
        """Whether its limit allows for another attempt."""
        return len(self.held) - len(self.stale) < self.adaptive.limit


class Gate:
    """A fair limit on what runs at once, which adapts and can be held shut for a while.

    Interactive lanes go first: who waits there waits for the next permit that is released, and behind others of
    these lanes only. Where they come without end, one permit in ten goes to the other lanes all the same. Those
    take turns by their weight; within a lane, first come is first served.

    Attributes:
        maximum: How many attempts may run, of all kinds.
        waiting: How many wait for a permit.
        clock: Seconds, from any start.
    """

    def __init__(
        self,
        maximum: int,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]],
        random: Callable[[], float],
        outage: Outage | None = None,
    ) -> None:
        self.maximum = maximum
        self._outage = outage
        if outage is not None:
            outage.on_change = self._note_outage
        self.waiting = 0
        self.clock = clock
        self._sleep = sleep
        self._random = random
        self._kinds: dict[str, Kind] = {}
        self._all = Kind("", maximum)  # where holds of all kinds are noted
        self._held: set[Permit] = set()  # of all kinds
        self._in_a_row = 0  # permits granted to interactive lanes, and none to others
        self._now = 0.0  # the turn that was served last
        self._joined = count()
        self._held_back: set[anyio.CancelScope] = set()
        self._is_closed = False

    @property
    def running(self) -> int:
        """How many permits are out."""
        return len(self._held)

    def kind(self, name: str) -> Kind:
        """Return what is known of a kind of work."""
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kinds[name] = Kind(name, self.maximum)
        return kind

    def held_for(self, kind: Kind | None = None) -> float:
        """Return for how many seconds more a kind of work is to wait; without one, the longest of all."""
        if kind is None:
            return max(map(self.held_for, (self._all, *self._kinds.values())))
        until = max(kind.held_until, self._all.held_until)
        if until == -inf:
            return 0.0
        left = until - self.clock()
        return left if left > _NEXT_TO_NOTHING else 0.0

    def hold(self, seconds: float, kind: str | None = None) -> None:
        """Grant no permits for a kind of work for so long, or for all kinds; the longest hold counts.

        Where two kinds are to wait at the same time, it is not about either, and all wait. Those held back set
        out spread a little.
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

    def unhold(self) -> None:
        """End all holds now."""
        self._lift()
        for scope in self._held_back:
            scope.cancel()

    def close(self, *, wakes: bool) -> None:
        """End all holds for good: what still waits is to end.

        Args:
            wakes: Whether this runs in the event loop of those that are held back; another one must not.
        """
        self._is_closed = True
        self._lift()
        if self._outage is not None:
            self._outage.close(wakes=wakes)
        if wakes:
            self.unhold()

    def _lift(self) -> None:
        for kind in (self._all, *self._kinds.values()):
            kind.held_until = -inf

    def refused(self, permit: Permit) -> None:
        """Learn that an attempt was refused for load."""
        kind = permit.kind
        if permit.generation == kind.adaptive.generation:
            kind.pace.refused(self.clock())
        self.overloaded(permit, halves=not kind.pace.is_measured)  # how many at once was not what was too much

    def overloaded(self, permit: Permit, *, halves: bool = True) -> None:
        """Learn that an attempt was more than the service could take; if two kinds say so, it is about all."""
        kind, now = permit.kind, self.clock()
        kind.reported_at = now
        kind.adaptive.overloaded(permit.generation, halves=halves)
        others = [each for each in self._kinds.values() if each is not kind]
        if not any(now - other.reported_at < _AT_ONCE for other in others):
            return
        for other in others:
            # What was lowered for others has reported nothing itself, and is no witness.
            if now - max(other.reported_at, other.lowered_at) >= _AT_ONCE:
                other.lowered_at = now
                other.adaptive.overloaded(other.adaptive.generation)

    async def acquire(self, permit: Permit) -> None:
        """Wait until a permit may be used, and for the end of a hold or an outage; it is not kept meanwhile.

        Where an outage lasts longer than the permit's lane waits, this returns without it.
        """
        kind = permit.kind
        try:
            while True:
                if self._is_shut(kind):
                    permit.release()
                    if not await self._open_again(permit):
                        return
                elif not permit.is_held:
                    waiter = self._queue(permit)
                    if not permit.is_held:
                        await self._turn_of(waiter)
                elif (wait := kind.pace.wait(self.clock())) and not self._is_closed:
                    await self._nap(wait)
                else:
                    kind.pace.begin(self.clock())
                    return
        except BaseException:
            permit.release()
            raise

    def _lanes(self) -> Iterator[Lane]:
        for kind in self._kinds.values():
            yield kind.interactive
            yield from (lane for _, _, lane in kind.lanes)

    def _is_shut(self, kind: Kind) -> bool:
        return (self._outage is not None and self._outage.is_on) or self.held_for(kind) > 0

    async def _open_again(self, permit: Permit) -> bool:
        """Wait for the end of an outage, or of a hold; False if that is not worth waiting for."""
        kind, lane = permit.kind, permit.lane
        if self._outage is not None and self._outage.is_on:
            lane.since = min(lane.since, self.clock())
            return await self._outage.over(lane.patience, lane.since)
        holds = kind if kind.held_until > self._all.held_until else self._all
        await self._nap(self.held_for(kind) + self._random() * holds.spread)
        return True

    async def _nap(self, seconds: float) -> None:
        """Sleep, until holds are ended at the latest."""
        with anyio.CancelScope() as scope:
            self._held_back.add(scope)
            try:
                await self._sleep(seconds)
            finally:
                self._held_back.discard(scope)

    def _note_outage(self) -> None:
        """Let everybody wait for the end of an outage, not for permits; after it, begin with one at a time."""
        if self._outage is not None and self._outage.is_on:
            for lane in self._lanes():
                while lane:
                    waiter = lane.leave()
                    if waiter.turn_came is not None:
                        waiter.turn_came.set()
            return
        for kind in self._kinds.values():
            kind.stale = set(kind.held)
            kind.adaptive.start_again()

    def _queue(self, permit: Permit) -> _Waiter:
        """Queue for a permit; it may be granted at once."""
        waiter = _Waiter(permit, next(self._joined))
        permit.lane.join(waiter)
        self._put_in_line(permit.lane)
        self.serve()
        return waiter

    async def _turn_of(self, waiter: _Waiter) -> None:
        waiter.turn_came = event()
        self.waiting += 1
        try:
            await waiter.turn_came.wait()
        except BaseException:
            waiter.gave_up = True
            waiter.permit.release()  # which may have been granted in the same moment
            raise
        finally:
            self.waiting -= 1

    def grant(self, permit: Permit) -> None:
        """Count a permit as out."""
        permit.generation = permit.kind.adaptive.generation
        permit.among = len(self._held) + 1
        permit.kind.held.add(permit)
        self._held.add(permit)

    def release(self, permit: Permit) -> None:
        """Take a permit back."""
        permit.kind.held.discard(permit)
        permit.kind.stale.discard(permit)
        self._held.discard(permit)
        self.serve()

    def serve(self) -> None:
        """Grant the permits there are to those whose turn it is."""
        while len(self._held) < self.maximum:
            if not (self._serve_interactive(_MOST_IN_A_ROW) or self._serve_lane() or self._serve_interactive()):
                return

    def _serve_interactive(self, most_in_a_row: float = inf) -> bool:
        if self._in_a_row >= most_in_a_row:
            return False
        first: Lane | None = None
        for kind in self._kinds.values():
            lane = kind.interactive
            if lane and kind.has_room and (first is None or lane.first().came < first.first().came):
                first = lane
        if first is None:
            return False
        self._in_a_row += 1
        self._call_up(first)
        return True

    def _serve_lane(self) -> bool:
        while True:
            first: Kind | None = None
            for kind in self._kinds.values():
                if kind.lanes and kind.has_room and (first is None or kind.lanes[0] < first.lanes[0]):
                    first = kind
            if first is None:
                return False
            self._now, _, lane = heapq.heappop(first.lanes)
            lane.in_line = False
            if lane:
                self._in_a_row = 0
                self._call_up(lane)
                lane.turn = self._now + lane.stride
                self._put_in_line(lane)
                return True

    def _put_in_line(self, lane: Lane) -> None:
        kind = self.kind(lane.kind)
        if lane is not kind.interactive and not lane.in_line and lane:
            lane.in_line = True
            lane.turn = max(lane.turn, self._now)  # who was away has not saved up turns
            heapq.heappush(kind.lanes, (lane.turn, next(self._joined), lane))

    def _call_up(self, lane: Lane) -> None:
        waiter = lane.leave()
        self.grant(waiter.permit)
        if waiter.turn_came is not None:
            waiter.turn_came.set()


class Permit:
    """Lets one attempt run: acquired for each attempt, never held through a backoff.

    Args:
        gate: Whose.
        lane: Where to queue for it.
        until: When it is of no use any more, by the gate's clock.

    Attributes:
        kind: What is known of the kind of work that it is for.
        generation: The generation of that kind's limit when it was granted.
        among: How many were out then, itself included.
    """

    __slots__ = ("_gate", "_until", "among", "generation", "kind", "lane")

    def __init__(self, gate: Gate, lane: Lane, until: float = inf) -> None:
        self._gate = gate
        self._until = until
        self.lane = lane
        self.kind = gate.kind(lane.kind)
        self.generation = 0
        self.among = 0

    @property
    def is_held(self) -> bool:
        """Whether it was granted and not released."""
        return self in self.kind.held

    @property
    def remaining(self) -> float:
        """For how many seconds it is of use."""
        return self._until if self._until == inf else self._until - self._gate.clock()

    @property
    def held_for(self) -> float:
        """For how many seconds it will not be granted."""
        return self._gate.held_for(self.kind)

    async def acquire(self) -> bool:
        """Wait until it is granted; False if that does not come in time. Returns at once if it is held."""
        remaining = self.remaining
        if not self.is_held and remaining == inf:
            await self._gate.acquire(self)
        elif not self.is_held and self.held_for < remaining:
            with anyio.move_on_after(remaining):
                await self._gate.acquire(self)
        return self.is_held and remaining > 0

    def release(self) -> None:
        """Release it, if it is held."""
        if self.is_held:
            self._gate.release(self)
