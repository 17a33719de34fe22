"""The time of a simulator: a clock for tests that moves on when all tasks wait, and how long calls take."""

from __future__ import annotations

from heapq import heapify, heappush, heapreplace
from typing import TYPE_CHECKING, Final

import anyio
import anyio.lowlevel
import attrs
from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable


@frozen
class Latency:
    """The cost of calls: `a + b * IDs` seconds each, with at most `workers` calls worked on at once.

    IDs is the number of quota IDs of a bulk invite (0 is possible) and 1 for every other call. Further calls
    wait in the order of their arrival. With `workers` None no call ever waits.
    """

    a: float = field(default=0.0, validator=attrs.validators.ge(0))
    b: float = field(default=0.0, validator=attrs.validators.ge(0))
    workers: int | None = field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))

    def seconds(self, ids: int) -> float:
        """Return the seconds of work that a call with so many IDs takes."""
        return self.a + self.b * ids


class WorkQueue:
    """Calculates when a call will be done, from its cost and the times at which the workers become free.

    A call that its client has given up keeps its worker busy, as it would at a real service.
    """

    def __init__(self, latency: Latency, *, clock: Callable[[], float]) -> None:
        self._latency = latency
        self._clock = clock
        # A heap of the times at which the workers become free. In the beginning all are free.
        self._free_at = [float("-inf")] * (latency.workers or 0)

    def admit(self, ids: int) -> float:
        cost = self._latency.seconds(ids)
        if not self._free_at:
            return cost
        now = self._clock()
        # The worker that becomes free first takes the call. Example: the time is 1, two workers become free at
        # 3 and 5, the call costs 4. It is worked on from 3 to 7, so it is done in 6 seconds.
        done = max(now, self._free_at[0]) + cost
        heapreplace(self._free_at, done)
        return done - now


_TURNS: Final = 32
"""Turns of the event loop that ready tasks get before time moves on. A request takes about ten."""


@frozen(order=True)
class _Sleeper:
    due: float
    number: int
    is_next: anyio.Event = field(factory=anyio.Event, eq=False)


class VirtualClock:
    """A clock that moves on as soon as all tasks wait for it, so that tests do not wait.

        clock = VirtualClock()
        sim = Simulator(latency=Latency(a=2.0), clock=clock, sleep=clock.sleep)
        async with sim.client() as client:
            await client.get_quotas()
        assert clock() == 2.0

    Sleeping tasks wake in the order of their due times, and each of them sees the clock at its own due time. A
    clock belongs to one event loop. So it works for simulators in process only: a served simulator runs in a
    thread with another event loop. `start` is the time at which it begins, in seconds.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._sleepers: list[_Sleeper] = []
        self._count = 0

    def __call__(self) -> float:
        """Return the current time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move time on without waiting, and wake the tasks that are due by then.

        Raises:
            ValueError: `seconds` is less than 0, or not a number.
        """
        # `not seconds >= 0` refuses NaN too, which `seconds < 0` would let pass.
        if not seconds >= 0:
            raise ValueError(f"seconds must be at least 0, not {seconds!r}: time does not go back")
        self._now += seconds
        for sleeper in self._sleepers:
            if sleeper.due <= self._now:
                sleeper.is_next.set()

    async def sleep(self, seconds: float) -> None:
        """Sleep until this clock has moved on by `seconds`."""
        if not seconds > 0:
            await anyio.lowlevel.checkpoint()
            return
        self._count += 1
        mine = _Sleeper(self._now + seconds, self._count)
        heappush(self._sleepers, mine)
        try:
            while self._now < mine.due:
                # Only the task that is due first may move the time. The others wait for their event.
                if self._sleepers[0] is not mine:
                    if mine.is_next.is_set():
                        # It was woken, but another one is due before it. An event cannot be cleared, so a new
                        # one is needed. Due time and number stay: the heap's order holds.
                        at, mine = self._sleepers.index(mine), _Sleeper(mine.due, mine.number)
                        self._sleepers[at] = mine
                    await mine.is_next.wait()
                elif await self._others_wait(mine):
                    self._now = mine.due
        finally:
            # A cancelled sleeper may stand anywhere in the heap, so the heap is built anew after removal.
            self._sleepers.remove(mine)
            heapify(self._sleepers)
            # The next sleeper takes over: without this, all would wait and nobody would move time on.
            if self._sleepers:
                self._sleepers[0].is_next.set()

    async def _others_wait(self, mine: _Sleeper) -> bool:
        """Let all ready tasks run; return False if a task began to sleep meanwhile, or time has moved on."""
        count, now = self._count, self._now
        for _ in range(_TURNS):
            await anyio.lowlevel.checkpoint()
            if self._sleepers[0] is not mine or (count, now) != (self._count, self._now):
                return False
        return True
