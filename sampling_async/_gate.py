"""Who may run now: a limit for a whole client, shared fairly. Knows anyio and nothing of surveys.

A `Gate` is the limit. A `Lane` is where one of its users queues for it. A `Permit` is leave for one attempt,
taken before the work is spawned and given back when the attempt ends.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Final

import anyio

from sampling_async._limit import AdaptiveLimit
from sampling_async._loops import event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_MOST_IN_A_ROW: Final = 9
_NEXT_TO_NOTHING: Final = 1e-9  # seconds: timers fire so much too early, and sleeping for that is spinning
_SPREAD: Final = 0.1  # of a hold, and at most a second, over which those it held back set out again


class Lane:
    """A queue at a gate. Lanes take turns, so that nobody's length is another's wait.

    Args:
        weight: How many turns it has beside a lane of weight 1.
    """

    __slots__ = ("_waiting", "in_line", "stride", "turn")

    def __init__(self, weight: float = 1.0) -> None:
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

    def leave(self) -> _Waiter:
        """Take out who has waited longest."""
        return self._waiting.popleft()


class _Waiter:
    __slots__ = ("gave_up", "granted", "is_taken", "turn_came")

    def __init__(self) -> None:
        self.turn_came: anyio.Event | None = None  # made only by who has to wait
        self.granted = False
        self.gave_up = False
        self.is_taken = False  # by somebody else, before it woke


class Gate:
    """A fair limit on what runs at once, which adapts and can be held shut for a while.

    The lane `interactive` goes first: one of its waiters waits for the next permit given back, even where the
    limit was lowered meanwhile, and behind others of its lane only. Where they come without end, one permit in
    ten goes to the other lanes all the same. Those take turns by their weight; within a lane, first come is
    first served.

    Attributes:
        interactive: The lane of calls that somebody waits for.
        adaptive: The limit.
        running: How many permits are out.
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
    ) -> None:
        self.interactive = Lane()
        self.adaptive = AdaptiveLimit(maximum)
        self.running = 0
        self.waiting = 0
        self._interactive_running = 0
        self._in_a_row = 0  # permits given to the interactive, and none to others
        self._lanes: list[tuple[float, int, Lane]] = []  # a heap of those where somebody waits, by turn
        self._now = 0.0  # the turn that was served last
        self._joined = count()
        self.clock = clock
        self._sleep = sleep
        self._random = random
        self._held_until = -inf
        self._spread = 0.0
        self._held_back: set[anyio.CancelScope] = set()

    @property
    def limit(self) -> int:
        """How many permits there are now. Lowered, it takes effect as running attempts end."""
        return self.adaptive.limit

    @property
    def held_for(self) -> float:
        """For how many seconds more no permits are given."""
        if self._held_until == -inf:
            return 0.0
        left = self._held_until - self.clock()
        return left if left > _NEXT_TO_NOTHING else 0.0

    def hold(self, seconds: float) -> None:
        """Give no new permits for so long; the longest hold counts. Those held back set out spread a little."""
        until = self.clock() + seconds
        if until > self._held_until:
            self._held_until, self._spread = until, min(1.0, _SPREAD * seconds)

    def unhold(self) -> None:
        """End the hold now."""
        self._held_until = -inf
        for scope in self._held_back:
            scope.cancel()

    async def acquire(self, permit: Permit) -> None:
        """Wait until a permit may be used, and for the end of a hold; it is not kept meanwhile."""
        while True:
            while wait := self.held_for:
                with anyio.CancelScope() as scope:
                    self._held_back.add(scope)
                    try:
                        await self._sleep(wait + self._random() * self._spread)
                    finally:
                        self._held_back.discard(scope)
            waiter = self._queue(permit)
            if not waiter.granted:
                await self._turn_of(waiter, permit.lane)
            if waiter.is_taken:
                return
            if not self.held_for:
                permit.begin()
                return
            permit.waiter = None  # nobody is to take what is given back
            self.release(permit.lane)

    def acquire_now(self, permit: Permit) -> bool:
        """Let a permit be used, if nobody need be waited for."""
        if self.running >= self.limit or self.held_for:
            return False
        waiter = self._queue(permit)
        if waiter.granted:
            permit.begin()
        else:
            waiter.gave_up = True
        return waiter.granted

    def _queue(self, permit: Permit) -> _Waiter:
        """Queue for a permit; it may be granted at once."""
        waiter = permit.waiter = _Waiter()
        permit.lane.join(waiter)
        self._put_in_line(permit.lane)
        self.serve()
        return waiter

    async def _turn_of(self, waiter: _Waiter, lane: Lane) -> None:
        waiter.turn_came = event()
        self.waiting += 1
        try:
            await waiter.turn_came.wait()
        except BaseException:
            waiter.gave_up = True
            if waiter.granted and not waiter.is_taken:  # in the same moment
                self.release(lane)
            raise
        finally:
            self.waiting -= 1

    def release(self, lane: Lane) -> None:
        """Take a permit back."""
        self.running -= 1
        self._interactive_running -= lane is self.interactive
        self.serve()

    def serve(self) -> None:
        """Give the permits there are to those whose turn it is."""
        while self._serve_interactive(_MOST_IN_A_ROW) or self._serve_lane() or self._serve_interactive():
            pass

    def _serve_interactive(self, most_in_a_row: float = inf) -> bool:
        # They are not counted against others' attempts above a limit that was lowered.
        has_room = self._interactive_running < self.limit and self.running < self.adaptive.maximum
        if not (has_room and self._in_a_row < most_in_a_row and self.interactive):
            return False
        self._interactive_running += 1
        self._in_a_row += 1
        self._grant(self.interactive)
        return True

    def _serve_lane(self) -> bool:
        while self._lanes and self.running < self.limit:
            self._now, _, lane = heapq.heappop(self._lanes)
            lane.in_line = False
            if lane:
                self._in_a_row = 0
                self._grant(lane)
                lane.turn = self._now + lane.stride
                self._put_in_line(lane)
                return True
        return False

    def _put_in_line(self, lane: Lane) -> None:
        if lane is not self.interactive and not lane.in_line and lane:
            lane.in_line = True
            lane.turn = max(lane.turn, self._now)  # who was away has not saved up turns
            heapq.heappush(self._lanes, (lane.turn, next(self._joined), lane))

    def _grant(self, lane: Lane) -> None:
        waiter = lane.leave()
        waiter.granted = True
        self.running += 1
        if waiter.turn_came is not None:
            waiter.turn_came.set()


class Permit:
    """Leave to have one attempt in flight: acquired for each attempt, never held through a backoff.

    Args:
        gate: Whose.
        lane: Where to queue for it.
        until: When it is of no use any more, by the gate's clock.
    """

    __slots__ = ("_gate", "_held", "_until", "among", "generation", "lane", "waiter")

    def __init__(self, gate: Gate, lane: Lane, until: float = inf) -> None:
        self._gate = gate
        self.lane = lane
        self.waiter: _Waiter | None = None  # the latest
        self._until = until
        self._held = False
        self.generation = 0  # of the limit, when it was acquired
        self.among = 0  # how many were out then, itself included

    @property
    def is_held(self) -> bool:
        """Whether leave was given and not given back."""
        return self._held

    @property
    def remaining(self) -> float:
        """For how many seconds it is of use."""
        return self._until if self._until == inf else self._until - self._gate.clock()

    async def acquire(self) -> bool:
        """Wait for leave; False if it does not come in time. Returns at once if it is held already."""
        remaining = self.remaining
        if not self._held and remaining == inf:
            await self._gate.acquire(self)
        elif not self._held and self._gate.held_for < remaining:
            with anyio.move_on_after(remaining):
                await self._gate.acquire(self)
        return self._held and remaining > 0

    def acquire_now(self) -> bool:
        """Return whether leave can be had at once, and was taken."""
        return self.remaining > 0 and self._gate.acquire_now(self)

    def take(self) -> bool:
        """Take leave from who waits for it in `acquire`, if it came and that task has not woken yet."""
        waiter = self.waiter
        if waiter is None or not waiter.granted or waiter.gave_up or self._held or self._gate.held_for:
            return False
        waiter.is_taken = True
        self.begin()
        return True

    def begin(self) -> None:
        """Hold the leave that came."""
        self._held = True
        self.generation = self._gate.adaptive.generation
        self.among = self._gate.running

    def release(self) -> None:
        """Give leave back, if it is held."""
        if self._held:
            self._held = False
            self._gate.release(self.lane)
