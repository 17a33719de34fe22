"""Outages of the service: when one begins, when the next probe is due, and how long to wait for the end.

After several failures in a row only a probe is sent, a request with no effect, until the service responds.
There is no task for it: one of the waiting tasks sends it for all, and nothing is sent if no task waits.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio

from sampling_async._contract.exchange import MAX_RETRY_AFTER
from sampling_async._contract.logs import PanelLogger
from sampling_async._pacing.loops import Notifier
from sampling_async._pacing.patience import OutagePolicy, doubled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator


# The time limit of a probe. It is short, because a probe that hangs delays the next one.
_PROBE_SECONDS: Final = 2.0


# Each fourth probe has no such limit: the service may be back, but slower than before.
_UNLIMITED_EACH: Final = 4

# If no probe has said for certain, for so many seconds, that the service is away, a request is tried.
_TRIAL_SECONDS: Final = 20.0

logger: Final = logging.getLogger("sampling_async.pacing")


class Away(NamedTuple):
    """What a probe says of a service that does not respond."""

    retry_after: float = 0.0  # seconds to wait before the next probe, as the service asked, or 0
    is_certain: bool = True  # False if the failure may concern the endpoint of the probe alone


class Outage:
    """The state of the service: whether there is an outage, since when and why."""

    _is_certain: bool  # whether the latest failure concerns the whole service for certain
    # Of an outage:
    _known_at: float  # when it was last known for certain that the service is away
    _is_doubtful: bool  # whether the latest probe did not say so for certain
    _tried_at: float  # when requests were last tried, although no probe was answered

    def __init__(
        self,
        policy: OutagePolicy,
        send_probe: Callable[[float], Awaitable[Away | None]],
        *,
        under_way: int,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]],
        random: Callable[[], float],
        name: str | None = None,
    ) -> None:
        self._log = PanelLogger(logger, name)
        self.policy = policy
        self.is_on = False
        self.began_at = -inf  # when the latest outage was noticed
        # when the latest response came, of any kind that shows that the service is there
        self.answered_at = -inf
        self.cause = ""  # the latest failure, in words
        self.on_change: Callable[[], None] = lambda: None  # called when an outage begins and when it ends
        self._send_probe = send_probe
        self._clock = clock
        self._sleep = sleep
        self._random = random
        self._needed_failures = policy.enough(under_way)
        self._failures = 0  # in a row
        self._ended_at = -inf
        self._is_trial = False  # whether requests are tried
        self._probes = 0  # the number of probes in this outage
        self._probe_at = -inf  # when the next probe is due
        self._is_probing = False  # whether a task is waiting to send the next probe, or sends it
        self._pause_scope: anyio.CancelScope | None = None
        self._change = Notifier()  # the outage ended, or no task sends probes any more
        self._is_closed = False

    def answered(self, now: float) -> None:
        """Record a response of the service. It does not end an outage, but a trial."""
        self._failures, self.answered_at = 0, now
        if self._is_trial:
            self._is_trial = False
            self._log_end(now)

    def failed(self, cause: str, began_at: float, *, retry_after: float = 0.0, is_certain: bool = True) -> None:
        """Record a failure as in an outage: its cause in words, when the attempt began, and the Retry-After.

        It is not certain if it may concern one endpoint alone.
        """
        # An attempt that began before the latest outage ended says nothing about the service since then.
        if self.is_on or self._is_closed or began_at < self._ended_at:
            return
        # In this order, here and below: a signal handler may raise between two lines.
        self.cause, self._is_certain = cause, is_certain
        self._failures += 1
        if self._is_trial:
            # The outage goes on as before: it began when it began, which bounds the patience of those who wait.
            self.is_on, self._is_trial = True, False
            self._plan_probe(retry_after)
            self.on_change()
            return
        if self._failures < self._needed_failures:
            return
        now = self._clock()
        self._known_at, self._tried_at, self._is_doubtful = now, -inf, False
        self.is_on, self.began_at, self._probes = True, now, 0
        self._plan_probe(retry_after)
        self._log.warning(
            "the service is away: %d failures in a row; the last failure: %s. Until it responds, only Get "
            "Settings is sent; fan-outs and bulks wait up to %g s for it (OutagePolicy.patience, --patience)",
            self._failures,
            cause,
            self.policy.patience,
        )
        self.on_change()

    async def probe_if_stuck(self, is_stuck: Callable[[], bool]) -> None:
        """Send a probe if attempts have failed, but too few for an outage, and no other attempt can begin.

        When a service goes away, some attempts fail at once and others hang, perhaps for a minute. If the
        hanging ones use up the limit, no attempt is left to fail, and the outage would be noticed late.
        """
        while not self._is_probing and self._is_suspected() and is_stuck():
            with self._probing():
                await self._sleep(self.policy.first_pause)
                if not (self._is_suspected() and is_stuck()):
                    return
                away = await self._send_probe(_PROBE_SECONDS)
            if away is None or self._is_another_failure(away):
                self._failures = 0
                return
            self.failed(self.cause, self._clock(), retry_after=away.retry_after, is_certain=away.is_certain)

    def _is_suspected(self) -> bool:
        return self._failures > 0 and not self.is_on

    @contextmanager
    def _probing(self) -> Generator[None]:
        """Send probes for all waiting tasks inside this block. After the block, another task may take over."""
        try:
            # Set inside of `try`: a signal handler may raise right after it, and no task could take over then.
            self._is_probing = True
            yield
        finally:
            self._is_probing, self._pause_scope = False, None
            self._change.notify()

    def away_for(self) -> float:
        return self._clock() - self.began_at if self.is_on else 0.0

    async def over(self, patience: float, since: float, *, deadline: float = inf) -> bool:
        """Wait until the outage ends, and return whether it did. Send the probes, if no other task does.

        The wait is at most `patience` seconds from `since`, or from the beginning of the outage if that is
        later. With 0 it does not wait, but sends a probe if one is due. As soon as the response to the next
        probe may come later than `deadline`, it behaves as with a patience of 0.
        """
        patient_until = max(self.began_at, since) + patience
        while self.is_on:
            now = self._clock()
            response_by = max(self._probe_at, now + self.policy.longest_pause) + _PROBE_SECONDS
            until = patient_until if response_by < deadline else -inf
            if self._is_doubtful and now - max(self._known_at, self._tried_at) >= _TRIAL_SECONDS:
                self._try()
            elif now >= until and (self._is_probing or now < self._probe_at):
                return False
            elif self._is_probing:
                await self._change.wait()
            else:
                await self._wait_and_probe(min(until, self._probe_at) - now)
        return True

    async def _wait_and_probe(self, seconds: float) -> None:
        with self._probing():
            if seconds > 0:
                with anyio.CancelScope() as self._pause_scope:
                    await self._sleep(seconds)
            if self.is_on and self._clock() >= self._probe_at:
                self._probes += 1
                seconds = inf if self._probes % _UNLIMITED_EACH == 0 else _PROBE_SECONDS
                try:
                    away = await self._send_probe(seconds)
                except BaseException:
                    # Its caller ended. The next one shall not begin another at once.
                    self._is_doubtful = True
                    self._plan_probe(0.0)
                    raise
                if self._is_closed:  # while the probe was under way
                    return
                if away is None:
                    self._end()
                    return
                self._plan_probe(away.retry_after)
                logger.debug("the service is still away; probe in %.3f s", self._probe_at - self._clock())
                self._is_doubtful = not away.is_certain
                if away.is_certain:
                    self._known_at = self._clock()
                elif self._is_another_failure(away) and self._clock() - self._tried_at >= _TRIAL_SECONDS:
                    self._try()

    def _is_another_failure(self, away: Away) -> bool:
        return self._is_certain and not away.is_certain

    def _try(self) -> None:
        """Let requests run, one at a time, until one gets a response, which ends the outage, or fails."""
        now = self._clock()
        self.is_on, self._is_trial, self._failures = False, True, 0
        self._ended_at = self._tried_at = now
        self.on_change()
        self._change.notify()

    def _plan_probe(self, retry_after: float) -> None:
        """Set the time of the next probe. The pause doubles each time up to a maximum, with a random part."""
        # The default pauses are 0.25, 0.5, 1, then always 1.5 s, each drawn at random from its half up. Without
        # the random part, all clients that lost the service at one moment would return at one moment.
        longest = doubled(self.policy.first_pause, self._probes, self.policy.longest_pause)
        pause = longest * (0.5 + 0.5 * self._random())
        self._probe_at = self._clock() + max(pause, min(retry_after, MAX_RETRY_AFTER))

    def _end(self) -> None:
        now = self._clock()
        self._log_end(now)
        self.is_on = self._is_trial = False  # a trial may have begun while the probe was under way
        self._failures, self._ended_at, self.answered_at = 0, now, now
        self.on_change()

    def _log_end(self, now: float) -> None:
        self._log.info("the service responds again, after %.1f s", now - self.began_at)

    def close(self, *, wakes: bool) -> None:
        """End the outage for good, so that the waiting tasks go on and notice that the client is closed.

        `wakes` says that this is the event loop of these tasks: only that may wake them.
        """
        self._is_closed, self.is_on = True, False
        if not wakes:
            return
        if self._pause_scope is not None:
            self._pause_scope.cancel()
        self._change.notify()
