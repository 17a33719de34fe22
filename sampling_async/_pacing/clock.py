"""The clock of an event loop, and the stages of a running call by that clock."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from sampling_async._contract.timing import STAGES, Timing
from sampling_async._pacing.loops import asyncio_loop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


def _trio_clock() -> Callable[[], float]:
    # Not `trio.current_time`, which works in the thread of the loop only. It is loaded, because it runs.
    trio: Any = sys.modules["trio"]
    clock: Callable[[], float] = trio.lowlevel.current_clock().current_time
    return clock


def _asyncio_clock(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    import asyncio  # noqa: PLC0415  it is loaded: there is a loop

    # uvloop's clock counts whole milliseconds, and stands still while a callback runs: by it, decoding takes
    # no time. That of asyncio is a function in Python that calls this one in C; loops of tests have their own.
    is_usual = getattr(loop.time, "__func__", None) is asyncio.BaseEventLoop.time
    return loop.time if isinstance(loop, asyncio.BaseEventLoop) and not is_usual else time.monotonic


class LoopClock:
    """The clock of the event loop in which it is first read, in seconds. Then any thread may read it.

    It measures. Deadlines of the loop are times of `loop.time`, which counts from another moment on some loops.
    It looks for the loop once: before Python 3.12, each look asks the system for the number of the process.
    """

    __slots__ = ("_time",)

    def __init__(self) -> None:
        self._time: Callable[[], float] | None = None

    def __call__(self) -> float:
        if self._time is None:
            loop = asyncio_loop()
            self._time = _trio_clock() if loop is None else _asyncio_clock(loop)
        return self._time()


PERMIT, HOLD, JOURNAL, BACKOFF, CONNECT, SEND, FIRST_BYTE, BODY, DECODE = range(len(STAGES))


class Timeline:
    """The stage that a running call is in, and the seconds in the stages before."""

    __slots__ = ("_clock", "_stage", "began", "seconds", "since")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stage = PERMIT
        self.seconds = [0.0] * len(STAGES)  # in each stage, without the current one
        self.since = self.began = clock()  # when the current stage began, and when the call did

    def enter(self, stage: int) -> float:
        """End the current stage and begin another, or the same one again. Return the time."""
        now = self._clock()
        self.seconds[self._stage] += now - self.since
        self._stage, self.since = stage, now
        return now

    def resume(self, stage: int) -> None:
        """Begin a stage without ending the one before: the time since that belongs to the user."""
        self._stage, self.since = stage, self._clock()

    def timing(self, attempts: int) -> Timing:
        self.enter(self._stage)
        return Timing(**dict(zip(STAGES, self.seconds, strict=True)), attempts=attempts)
