"""What is known of durations, in little memory. No I/O: numbers in and out.

For percentiles, durations are counted in buckets, each 10 % wider than the one before, so a percentile is at
most 5 % off. The shortest times are kept as a line over the number of quota IDs.
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

_RELEARNED: Final = 0.25  # the weight of a longer time that was measured without other load of this client
_LATEST: Final = 0.1  # the weight of the latest time in the moving average


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


class LatencyHistogram:
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


@frozen
class Line:
    """The seconds that a request with `n` quota IDs takes: `a + b * n`."""

    a: float
    b: float

    def __call__(self, quota_ids: int) -> float:
        return self.a + self.b * quota_ids


class LatencyLine:
    """The shortest time for each number of quota IDs, and the line through these times.

    Each time is a moving average over responses: of varying times, one of many is short by chance.
    """

    def __init__(self) -> None:
        self._recent: dict[int, float] = {}
        self._best: dict[int, float] = {}
        self.line: Line | None = None  # None before the first response

    def add(self, quota_ids: int, seconds: float, *, alone: bool) -> None:
        """Add the time of one response. With `alone`, no other attempt of this client was running.

        Then this client did not cause a longer time, so a longer time counts too. Otherwise a service that has
        become slower for good would look overloaded from then on.
        """
        recent = self._recent.get(quota_ids, seconds)
        recent = self._recent[quota_ids] = recent + _LATEST * (seconds - recent)
        best = self._best.get(quota_ids)
        if best is None or recent < best:
            self._best[quota_ids] = recent
        elif alone:
            self._best[quota_ids] = best + _RELEARNED * (recent - best)
        else:
            return
        self.line = _through(self._best)


def _through(points: dict[int, float]) -> Line:
    """Return the line of least squares through points, with `a` and `b` of at least 0.

    One point does not determine a line. The time then counts as proportional to the IDs, as the contract says.
    """
    # With 0.3 s for 10 IDs and 1.2 s for 100 IDs, b is 0.9 s / 90 = 0.01 s an ID, and a is 0.3 - 0.1 = 0.2 s.
    count = len(points)
    mean_n, mean_t = sum(points) / count, sum(points.values()) / count
    spread = sum((n - mean_n) ** 2 for n in points)
    b = sum((n - mean_n) * (t - mean_t) for n, t in points.items()) / spread if spread else float("inf")
    if b * mean_n > mean_t:
        # `a` would be below 0, so this is the best line through the origin. One point, with an infinite `b`,
        # ends here too.
        return Line(0.0, sum(n * t for n, t in points.items()) / sum(n * n for n in points))
    b = max(0.0, b)
    return Line(mean_t - b * mean_n, b)
