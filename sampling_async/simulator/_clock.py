"""A clock for tests: its time moves on as soon as no task has anything else to do."""

from __future__ import annotations

from heapq import heapify, heappush
from typing import Final

import anyio
import anyio.lowlevel
from attrs import field, frozen

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
    thread with another event loop.

    Args:
        start: The time at which the clock begins, in seconds.
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
                    mine = self._renewed(mine) if mine.is_next.is_set() else mine
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

    def _renewed(self, sleeper: _Sleeper) -> _Sleeper:
        """Replace a sleeper that was woken although another one is due before it, and return the new one."""
        # An event cannot be cleared, so a new one is needed. Due time and number stay: the heap's order holds.
        again = _Sleeper(sleeper.due, sleeper.number)
        self._sleepers[self._sleepers.index(sleeper)] = again
        return again

    async def _others_wait(self, mine: _Sleeper) -> bool:
        """Let all ready tasks run; return False if a task began to sleep meanwhile, or time has moved on."""
        count, now = self._count, self._now
        for _ in range(_TURNS):
            await anyio.lowlevel.checkpoint()
            if self._sleepers[0] is not mine or (count, now) != (self._count, self._now):
                return False
        return True
