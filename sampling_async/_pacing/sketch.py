"""Percentiles of durations in little memory. No I/O: numbers in, percentiles out.

Durations are counted in buckets, each 10 % wider than the one before, so a percentile is at most 5 % off.
"""

from __future__ import annotations

from itertools import accumulate
from math import log
from typing import Final

from attrs import frozen

_SHORTEST: Final = 1e-4  # seconds; shorter ones count as this
_GROWTH: Final = 1.1
_BUCKETS: Final = 170  # up to 1,000 s; longer ones are in the last bucket
_LOG: Final = log(_GROWTH)
_GENERATION: Final = 300.0  # seconds


@frozen(kw_only=True)
class Percentiles:
    """How long attempts took, over the last five to ten minutes, in seconds and within 5 %.

    Attributes:
        count: The number of attempts.
        p50: Half of them took at most this long.
        p90: Nine in ten took at most this long.
        p99: 99 in a hundred took at most this long.
        longest: The longest one, exactly.
    """

    count: int
    p50: float
    p90: float
    p99: float
    longest: float


class Sketch:
    """The durations of the last five to ten minutes: two generations, the older one is dropped whole."""

    __slots__ = ("_before", "_began", "_latest", "_longest")

    def __init__(self) -> None:
        self._latest = [0] * _BUCKETS
        self._before = [0] * _BUCKETS
        self._longest = (0.0, 0.0)  # of the generation before and of this one
        self._began: float | None = None

    def add(self, seconds: float, now: float) -> None:
        self._turn_over(now)
        bucket = int(log(seconds / _SHORTEST) / _LOG) + 1 if seconds > _SHORTEST else 0
        self._latest[min(bucket, _BUCKETS - 1)] += 1
        if seconds > self._longest[1]:
            self._longest = self._longest[0], seconds

    def _turn_over(self, now: float) -> None:
        if self._began is None:
            self._began = now
        elif now - self._began >= _GENERATION:
            is_recent = now - self._began < 2 * _GENERATION
            self._before = self._latest if is_recent else [0] * _BUCKETS
            self._longest = self._longest[1] if is_recent else 0.0, 0.0
            # A generation begins where the one before ends, however late that is noticed.
            self._latest, self._began = [0] * _BUCKETS, self._began + _GENERATION if is_recent else now

    def percentiles(self, now: float) -> Percentiles | None:
        # Nothing is changed here: another thread than that of the event loop may ask.
        if self._began is None or now - self._began >= 2 * _GENERATION:
            return None
        is_old = now - self._began >= _GENERATION
        before = [0] * _BUCKETS if is_old else self._before
        counts = [sum(both) for both in zip(before, self._latest, strict=True)]
        total = sum(counts)
        if not total:
            return None
        longest = self._longest[1] if is_old else max(self._longest)
        p50, p90, p99 = (min(longest, _at(counts, share * total)) for share in (0.5, 0.9, 0.99))
        return Percentiles(count=total, p50=p50, p90=p90, p99=p99, longest=longest)


def _at(counts: list[int], rank: float) -> float:
    bucket = next(at for at, seen in enumerate(accumulate(counts)) if seen >= rank)
    middle: float = _GROWTH ** (bucket - 0.5)
    return _SHORTEST * middle
