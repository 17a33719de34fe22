"""Where the time of a call goes: its stages, and the spans in which nothing of its kind was sent."""

from __future__ import annotations

from collections import deque
from math import fsum, inf
from typing import TYPE_CHECKING, Final

from sampling_async._contract.timing import STAGES, Timing

if TYPE_CHECKING:
    from collections.abc import Callable

_KEPT: Final = 256


class BusyIntervals:
    """The latest 256 spans of time in which somebody waited. Where several wait at once, that is one span."""

    _since: float  # of the span that lasts

    def __init__(self) -> None:
        self.until = -inf  # when the latest span ended; inf while one lasts
        self._ended: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._waiting: set[object] = set()

    def begin(self, who: object, now: float) -> None:
        if not self._waiting:
            self.until, self._since = inf, now
        self._waiting.add(who)

    def end(self, who: object, now: float) -> None:
        if who not in self._waiting:
            return
        self._waiting.discard(who)
        if not self._waiting:
            self.until = now
            self._ended.append((self._since, now))

    def within(self, first: float, last: float) -> float:
        spans = [*self._ended, *([(self._since, last)] if self._waiting else [])]
        return fsum(max(0.0, min(end, last) - max(begin, first)) for begin, end in spans)


PERMIT, HOLD, JOURNAL, BACKOFF, CONNECT, SEND, FIRST_BYTE, BODY, DECODE = range(len(STAGES))


class Timeline:
    """The stage that a running call is in, and the seconds in the stages before.

    `holds` are the spans in which nothing of its kind was sent: a wait for a permit meanwhile is a hold.
    """

    __slots__ = ("_clock", "_stage", "began", "holds", "seconds", "since")

    def __init__(self, clock: Callable[[], float], holds: BusyIntervals) -> None:
        self._clock = clock
        self.holds = holds
        self._stage = PERMIT
        self.seconds = [0.0] * len(STAGES)  # in each stage, without the current one
        self.since = self.began = clock()  # when the current stage began, and when the call did

    def enter(self, stage: int) -> float:
        """End the current stage and begin another, or the same one again. Return the time."""
        now = self._clock()
        spent = now - self.since
        if self._stage == PERMIT and self.holds.until > self.since:
            hold = self.holds.within(self.since, now)
            self.seconds[HOLD] += hold
            spent -= hold
        self.seconds[self._stage] += spent
        self._stage, self.since = stage, now
        return now

    def resume(self, stage: int) -> None:
        """Begin a stage without ending the one before: the time since that belongs to the user."""
        self._stage, self.since = stage, self._clock()

    def timing(self, attempts: int) -> Timing:
        self.enter(self._stage)
        return Timing(**dict(zip(STAGES, self.seconds, strict=True)), attempts=attempts)
