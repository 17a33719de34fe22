"""The number of attempts to run at once, learned from how attempts end. No I/O: numbers in, limit out.

The limit starts at 8 and grows while the service responds as fast as at its best. It is halved when the service
shows overload (a timeout, 429, 503, a failed connection). It is also lowered when responses take several times
as long as at their best, before any of them times out: a bulk invite that times out leaves up to a hundred
invites that may exist.

The service needs more time for more quota IDs. So a time is compared with the line `a + b * IDs` through the
shortest times seen.
"""

from __future__ import annotations

from typing import Final

from attrs import define, field, frozen

_START: Final = 8  # the first limit
OVERLOADED: Final = 0.5  # the factor for the limit after an overload

# Ratios of a response's time to the expected one. Up to the first, the limit grows by 1 with each response; up
# to the second, by about 1 with each full set of responses; above the third, it is lowered.
_AT_EASE: Final = 1.25
_GROWING: Final = 2.0
_TOO_SLOW: Final = 3.0

_HARMLESS: Final = 1 / 20  # of the time limit: a response this fast is never too slow
_RELEARNED: Final = 0.25  # the weight of a longer time that was measured without other load of this client
_LATEST: Final = 0.1  # the weight of the latest time in the moving average


@frozen
class Line:
    """The seconds that a request with `n` quota IDs takes: `a + b * n`."""

    a: float
    b: float

    def __call__(self, quota_ids: int) -> float:
        """Return the seconds for a number of quota IDs."""
        return self.a + self.b * quota_ids


class LatencyLine:
    """The shortest time for each number of quota IDs, and the line through these times.

    Each time is a moving average over responses. The shortest single time would not be a fair measure: if times
    vary, one of many is short by chance.
    """

    __slots__ = ("_best", "_line", "_recent")

    def __init__(self) -> None:
        self._recent: dict[int, float] = {}
        self._best: dict[int, float] = {}
        self._line: Line | None = None

    def learn(self, quota_ids: int, seconds: float, *, alone: bool) -> None:
        """Learn the time of one response.

        Args:
            quota_ids: The number of IDs in the request.
            seconds: The time until the response.
            alone: Whether no other attempt of this client was running. Then this client did not cause a longer
                time, so a longer time is learned too. Otherwise a service that has become slower for good would
                look overloaded from then on.
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
        self._line = _through(self._best)

    @property
    def line(self) -> Line | None:
        """The line, or None before the first response."""
        return self._line


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


@define
class AdaptiveLimit:
    """A limit between 1 and a maximum that adapts to the load that the service can take.

    Attributes:
        maximum: The highest limit.
        latency: The times of bulk invites seen so far.
        generation: The number of overloads and outages so far that changed the limit. Several attempts of one
            generation may report the same overload, and only the first report changes the limit: the others
            were started before that change and say nothing new.
    """

    maximum: int
    latency: LatencyLine = field(factory=LatencyLine, init=False)
    generation: int = field(default=0, init=False)
    _limit: float = field(init=False)
    _ratio: float = field(default=0.0, init=False)  # of the previous response

    def __attrs_post_init__(self) -> None:
        self._limit = float(min(_START, self.maximum))

    @property
    def limit(self) -> int:
        """The number of attempts that may run."""
        return int(self._limit)

    def overloaded(self, generation: int, share: float = OVERLOADED) -> None:
        """Record that an attempt, started in a generation of the limit, overloaded the service.

        Args:
            generation: The generation of the limit when the attempt was started.
            share: The share of the limit that is left.
        """
        if generation == self.generation:
            self._limit = max(1.0, self._limit * share)
            self.generation += 1

    def start_again(self) -> None:
        """Begin again with one attempt at a time, because the service's capacity is now unknown."""
        self._limit = 1.0
        self.generation += 1

    def answered(self, generation: int, running: int) -> None:
        """Learn that an attempt succeeded while a number of attempts were running."""
        self._grow(1.0 / self._limit, generation, running)

    def answered_in(
        self, seconds: float, *, quota_ids: int, patience: float, generation: int, running: int, among: int
    ) -> None:
        """Learn that a bulk invite succeeded, and its time.

        Args:
            seconds: The time until the response.
            quota_ids: The number of IDs in the request.
            patience: The time limit of the attempt. Times below 5 % of it never count as slow.
            generation: The limit's generation when the attempt was started.
            running: The number of attempts that ran when it ended, itself included.
            among: The number of attempts that ran when it was started, itself included.
        """
        expected = self.latency.line
        self.latency.learn(quota_ids, seconds, alone=running == among == 1)
        if expected is None or seconds <= patience * _HARMLESS:
            ratio = _AT_EASE
        else:
            ratio = seconds / max(expected(quota_ids), 1e-9)
        before, self._ratio = self._ratio, ratio
        # One slow response may be chance, so the previous one must have been slow as well.
        if ratio > _TOO_SLOW and before > _GROWING:
            # If 8 ran and took 4 times as long, the service worked on 8 / 4 = 2 at once. The limit becomes
            # twice that, 4, so that the service always has the next one waiting.
            self._limit = min(self._limit, max(1.0, _GROWING * among / ratio))
        elif ratio <= _AT_EASE:
            # One more place for each response doubles the limit with each full set of responses.
            self._grow(1.0, generation, running)
        elif ratio <= _GROWING:
            self._grow(1.0 / self._limit, generation, running)

    def _grow(self, step: float, generation: int, running: int) -> None:
        # If less than half of the limit was used, the response says nothing about a higher limit.
        if generation == self.generation and running * 2 >= self.limit:
            self._limit = min(float(self.maximum), self._limit + step)
