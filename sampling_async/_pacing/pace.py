"""The rate at which attempts may begin, learned from refusals for load. No I/O: numbers in, seconds out.

A limit on the attempts that run at once is not enough. If a service allows twenty requests a second and
responds in a millisecond, even one attempt at a time is too much for it.

An attempt that the service did not refuse for load is *accepted* here, whatever the response.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final

from attrs import frozen

# Rates, in attempts a second.
_FIRST_RATE: Final = 10.0  # after the first refusal, if too few responses came before it to measure a rate
_LEAST_RATE: Final = 0.2
_LEAST_GUESSED_RATE: Final = 1.0  # the least rate that is only guessed, if any attempt was accepted before

# Five refusals are compared with the five before. Going slower had no effect if the rate fell to
# `_SLOWER_SHARE` of what it was, but the refused share of all attempts stayed above
# `_HELPED_SHARE` of what it was, and below `_MOST_REFUSED`.
_COMPARED_REFUSALS: Final = 5
_SLOWER_SHARE: Final = 0.8
_HELPED_SHARE: Final = 0.7
_MOST_REFUSED: Final = 0.5

# Attempts without a rate after that. Their number doubles each time, and the rate returns early if, of at least
# `_FREE_AT_LEAST` attempts, more than `_MOST_REFUSED` were refused.
_FREE_ATTEMPTS: Final = 200
_MOST_FREE_ATTEMPTS: Final = 20_000
_FREE_AT_LEAST: Final = 16

# How a rate is set by a refusal, and how it grows again.
_ENOUGH: Final = 8  # accepted attempts that are enough for a measurement
_FIRST_SHARE: Final = 0.85  # the share of a measured rate to begin with
_GUESSED_SHARE: Final = 0.3  # the factor for a rate that could not be measured
_REGAINED_AFTER: Final = 20  # accepted attempts until the rate is the measured one again
_DOUBLED_AFTER: Final = 150  # further ones until it is twice the measured one
_LEAST_GROWTH: Final = 0.1  # a second, for each one: refusals by chance must not push the rate to its minimum

_TIMER_LATENESS: Final = 0.002  # seconds by which timers fire late
NEXT_TO_NOTHING: Final = 1e-9  # seconds by which they fire early: sleeping for so short a time is spinning


class Pace:
    """The rate at which attempts may begin. There is none until the service refuses attempts for load.

    A refusal sets the rate to a little less than the rate of the attempts accepted before it, because that is
    what the service allows. From there the rate grows: slowly at first, since the limit is near, and later
    ever faster, since the limit seems to be gone. If too few attempts were accepted to measure a rate, the rate
    falls by more, and grows fast until the next refusal.

    Refusals may have another cause than the rate: one node of several may refuse everything. If going slower
    had no effect, and most attempts are accepted anyway, there is no rate for a while.

    Attributes:
        is_measured: Whether the rate was measured, and not guessed.
    """

    __slots__ = (
        "_accepted",
        "_accepted_at",
        "_begun_count",
        "_free_from",
        "_free_next",
        "_free_until",
        "_marks",
        "_next_at",
        "_rate",
        "_refused_at",
        "_refused_count",
        "is_measured",
    )

    def __init__(self) -> None:
        self._rate = inf  # a second, at the latest refusal: measured or guessed
        self.is_measured = False
        self._accepted = 0  # accepted attempts since the latest refusal
        self._begun_count = self._refused_count = 0
        # At each of the latest refusals: the attempts begun and refused in all, and the rate.
        self._marks: deque[tuple[int, int, float]] = deque(maxlen=2 * _COMPARED_REFUSALS + 1)
        # The attempts without a rate: the counts of begun and refused attempts at their start, and the count of
        # begun attempts at their end.
        self._free_from, self._free_until = (0, 0), 0
        self._free_next = _FREE_ATTEMPTS
        self._refused_at = inf  # when the latest refusal came
        self._accepted_at: deque[float] = deque(maxlen=_ENOUGH)
        self._next_at = -inf

    @property
    def rate(self) -> float:
        """The number of attempts that may begin in a second."""
        if self._rate == inf:
            return inf
        if not self.is_measured:
            return self._rate * (1 + self._accepted / _ENOUGH)
        # With a measured rate of 100 a second: 85 right after the refusal, 100 after 20 accepted attempts, then
        # growing with their square: 111 after 70, 200 after 170. For low rates, the second term is the larger
        # one: it grows by 0.1 a second with each accepted attempt.
        beyond = self._accepted - _REGAINED_AFTER
        more = (1 - _FIRST_SHARE) * beyond / _REGAINED_AFTER if beyond < 0 else (beyond / _DOUBLED_AFTER) ** 2
        return max(self._rate * (1 + more), self._rate * _FIRST_SHARE + _LEAST_GROWTH * self._accepted)

    def refused(self, now: float, *, is_news: bool = True) -> None:
        """Learn that the service refused an attempt because of load.

        Args:
            now: The time.
            is_news: Whether it is the first refusal of the attempts that run at once. The others say the same.
        """
        self._refused_count += 1
        if self._is_free() or not is_news:
            return
        rate = self.rate
        self._marks.append((self._begun_count, self._refused_count, rate))
        if self._slowing_does_not_help():
            # Begin a period without a rate, twice as long as the one before.
            self._rate, self.is_measured, self._accepted = inf, False, 0
            self._free_from, self._free_until = (
                (self._begun_count, self._refused_count),
                self._begun_count + self._free_next,
            )
            self._free_next = min(_MOST_FREE_ATTEMPTS, 2 * self._free_next)
            self._marks.clear()
            return
        if self._accepted < _ENOUGH:
            # Too few for a measurement: a measured rate falls a little, a guessed one by much.
            known = rate * (_FIRST_SHARE if self.is_measured else _GUESSED_SHARE)
            self._rate = known if rate < inf else _FIRST_RATE
        else:
            # A guessed rate has risen fast, so only the latest 8 accepted attempts, with 7 gaps between them,
            # show how far. A measured rate has hardly changed, so all since the latest refusal count.
            was_measured = self.is_measured
            accepted, since = (
                (self._accepted, self._refused_at) if was_measured else (_ENOUGH - 1, self._accepted_at[0])
            )
            # Without a rate so far, this is no measurement: the first attempts were accepted before the service
            # applied any limit.
            self.is_measured = rate < inf
            self._rate = min(rate, accepted / max(now - since, 1e-6))
        self._rate = max(
            self._rate, _LEAST_GUESSED_RATE if self._accepted and not self.is_measured else _LEAST_RATE
        )
        self._accepted, self._refused_at = 0, now
        self._next_at = max(self._next_at, now + 1 / self.rate)

    def _slowing_does_not_help(self) -> bool:
        """Return whether going slower had no effect: as many refusals as before, and most attempts accepted."""
        # 11 marks bound ten stretches between refusals: five before the middle one and five after it.
        if len(self._marks) < 2 * _COMPARED_REFUSALS + 1:
            return False
        marks = list(self._marks)
        before, after = _between(marks[: _COMPARED_REFUSALS + 1]), _between(marks[_COMPARED_REFUSALS:])
        return (
            after.rate <= _SLOWER_SHARE * before.rate
            and _HELPED_SHARE * before.refused <= after.refused <= _MOST_REFUSED
        )

    def _is_free(self) -> bool:
        """Return whether refusals do not count now, because earlier ones had another cause than the rate."""
        if self._begun_count >= self._free_until:
            return False
        # If most attempts are refused without a rate, the rate was the cause after all: it counts again.
        begun, refused = self._begun_count - self._free_from[0], self._refused_count - self._free_from[1]
        if begun >= _FREE_AT_LEAST and refused > _MOST_REFUSED * begun:
            self._free_until, self._free_next = 0, _FREE_ATTEMPTS
            return False
        return True

    def answered(self, now: float) -> None:
        """Learn that an attempt was accepted."""
        self._accepted += 1
        self._accepted_at.append(now)

    def wait(self, now: float) -> float:
        """Return the seconds until the next attempt may begin."""
        wait = self._next_at - now
        return wait if wait > NEXT_TO_NOTHING else 0.0

    def begin(self, now: float) -> None:
        """Learn that an attempt begins."""
        self._begun_count += 1
        if self._rate < inf:
            gap = 1 / self.rate
            # The next attempt may begin one gap after this one was due. If this one is much later than due, the
            # gap counts from now: time without attempts does not allow a burst later. Only the lateness of the
            # timer is made up for, at most 2 ms or a tenth of the gap, or the rate would always be too low.
            self._next_at = max(self._next_at, now - min(_TIMER_LATENESS, gap / 10)) + gap


@frozen
class _Stretch:
    """The attempts between several refusals: the refused share, and the mean rate in attempts a second."""

    refused: float
    rate: float


def _between(marks: list[tuple[int, int, float]]) -> _Stretch:
    (begun, refused, _), *_, (begun_then, refused_then, _) = marks
    rates = [rate for _, _, rate in marks[1:]]
    return _Stretch((refused_then - refused) / max(1, begun_then - begun), sum(rates) / len(rates))
