"""Whether the service is there at all. Knows anyio and nothing of surveys.

A service that is away answers nothing that helps: each request sent to it fails, and of one that had reached it
before it went nobody knows what became. So after some failures in a row nothing is sent but one question
without an effect, again and again, until it is answered. No task of its own asks it: who waits does, one for
all, and where nobody waits nobody asks.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Final

import anyio

from sampling_async._loops import event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from sampling_async._policy import OutagePolicy

_QUESTION_SECONDS: Final = 2.0  # a question that hangs must not keep the next one waiting
_MOST_DOUBLINGS: Final = 30
_PATIENT_EACH: Final = 4  # but a service may have become slow

logger: Final = logging.getLogger("sampling_async")


class Outage:
    """Notices that the service is away, and that it is back.

    Args:
        policy: When it counts as away, how often to ask, how long a fan-out waits.
        asks: Asks the harmless question, within so many seconds; returns None if the service is there, else the
            seconds that it wants to be left alone.
        under_way: How many requests may be under way.
        clock: Seconds, from any start.
        sleep: Waits a number of seconds.
        random: Draws from 0 to 1.

    Attributes:
        is_on: Whether it is away.
        began_at: When that was noticed last.
        answered_at: When it answered last, whatever.
        cause: What failed last, in words.
        on_change: Called when it has gone, and when it is back.
    """

    def __init__(
        self,
        policy: OutagePolicy,
        asks: Callable[[float], Awaitable[float | None]],
        *,
        under_way: int,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]],
        random: Callable[[], float],
    ) -> None:
        self.policy = policy
        self.is_on = False
        self.began_at = -inf
        self.answered_at = -inf
        self.cause = ""
        self.on_change: Callable[[], None] = lambda: None
        self._asks = asks
        self._clock = clock
        self._sleep = sleep
        self._random = random
        self._enough = policy.enough(under_way)
        self._failures = 0  # in a row
        self._ended_at = -inf
        self._asked = 0  # how often since it is away
        self._next = -inf
        self._is_led = False  # somebody waits for the next question, and asks it
        self._nap: anyio.CancelScope | None = None
        self._news: anyio.Event | None = None
        self._is_closed = False

    def answered(self, now: float) -> None:
        """Learn that the service answers, now. Once it is away, only the answer to the question ends that."""
        self._failures, self.answered_at = 0, now

    def failed(self, cause: str, began_at: float, *, alone_for: float = 0.0) -> None:
        """Learn that an attempt failed as they do when the service is away.

        Args:
            cause: How, in words.
            began_at: When it was begun; before the service was back, it says nothing new.
            alone_for: Seconds that it wants to be left alone.
        """
        if self.is_on or self._is_closed or began_at < self._ended_at:
            return
        self._failures += 1
        self.cause = cause
        if self._failures < self._enough:
            return
        self.is_on, self.began_at, self._asked = True, self._clock(), 0
        self._plan(alone_for)
        logger.warning(
            "the service is away, after %d failures in a row, the last one: %s; nothing is sent but Get "
            "Settings, until that is answered",
            self._failures,
            cause,
        )
        self.on_change()

    async def make_sure(self, is_stuck: Callable[[], bool]) -> None:
        """Ask whether the service is there, while attempts have failed, but too few, and no more can be sent.

        Of a service that went away, some attempts fail at once, and the others may hang for a minute.

        Args:
            is_stuck: Returns whether nothing more may be sent before another attempt has ended.
        """
        while not self._is_led and self._is_suspected() and is_stuck():
            with self._leading():
                await self._sleep(self.policy.first_pause)
                if not (self._is_suspected() and is_stuck()):
                    return
                answer = await self._asks(_QUESTION_SECONDS)
            if answer is None:
                self._failures = 0
                return
            self.failed(self.cause, self._clock(), alone_for=answer)

    def _is_suspected(self) -> bool:
        return self._failures > 0 and not self.is_on

    @contextmanager
    def _leading(self) -> Generator[None]:
        """Be the one who asks. Whatever ends this, another one may take over."""
        try:
            self._is_led = True
            yield
        finally:
            self._is_led, self._nap = False, None
            self._tell()

    def away_for(self) -> float:
        """Return for how many seconds it has been away; 0 if it is not."""
        return self._clock() - self.began_at if self.is_on else 0.0

    async def over(self, patience: float, since: float) -> bool:
        """Wait until the service is back; asks for all who wait, if nobody else does.

        Args:
            patience: Seconds to wait at most. Without any, this asks if a question is due, and does not wait.
            since: From when on they count, unless the service went away later.

        Returns:
            Whether it is back.
        """
        until = max(self.began_at, since) + patience
        while self.is_on:
            now = self._clock()
            if now >= until and (self._is_led or now < self._next):
                return False
            if self._is_led:
                self._news = self._news or event()
                await self._news.wait()
            else:
                await self._lead(min(until, self._next) - now)
        return True

    async def _lead(self, seconds: float) -> None:
        """Wait, and ask if the question is due then."""
        with self._leading():
            if seconds > 0:
                with anyio.CancelScope() as self._nap:
                    await self._sleep(seconds)
            if self.is_on and self._clock() >= self._next:
                self._asked += 1
                alone_for = await self._asks(inf if self._asked % _PATIENT_EACH == 0 else _QUESTION_SECONDS)
                if self._is_closed:
                    return
                if alone_for is None:
                    self._end()
                else:
                    self._plan(alone_for)

    def _plan(self, alone_for: float) -> None:
        """Say when to ask next: later each time, and at a moment of this client's own."""
        doubled = self.policy.first_pause * 2.0 ** min(self._asked, _MOST_DOUBLINGS)
        longest = min(self.policy.longest_pause, doubled)
        pause = longest * (0.5 + 0.5 * self._random())
        self._next = self._clock() + max(pause, alone_for)

    def _end(self) -> None:
        now = self._clock()
        logger.info("the service answers again, after %.1f s", now - self.began_at)
        self.is_on, self._failures, self._ended_at, self.answered_at = False, 0, now, now
        self.on_change()

    def close(self, *, wakes: bool) -> None:
        """Let everybody go on, to learn that the client is closed.

        Args:
            wakes: Whether this runs in the event loop of those who wait; another one must not.
        """
        self._is_closed, self.is_on = True, False
        if not wakes:
            return
        if self._nap is not None:
            self._nap.cancel()
        self._tell()

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None
