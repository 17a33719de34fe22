"""How much to run at once, learned from how attempts end: numbers in, limit out.

The limit starts at a modest width and grows while the service answers as fast as it ever did. It is halved
when the service shows that it has enough (a timeout, 429, 503, a failed connection) and lowered when answers
take several times as long as they could: a client that learns from timeouts alone pays for each lesson with a
hundred invites that may exist. Since the service takes longer the more quota IDs it is asked, times are
compared with the line `a + b * IDs` of the shortest ones seen.
"""

from __future__ import annotations

from typing import Final

from attrs import define, field, frozen

_START: Final = 8
_OVERLOADED: Final = 0.5
_AT_EASE: Final = 1.25
_GROWING: Final = 2.0
_TOO_SLOW: Final = 3.0
_HARMLESS: Final = 1 / 20
_RELEARNED: Final = 0.25
_LATEST: Final = 0.1


@frozen
class Line:
    """The seconds a request takes by the number of its quota IDs: `a + b * n`."""

    a: float
    b: float

    def __call__(self, quota_ids: int) -> float:
        """Return the seconds for so many quota IDs."""
        return self.a + self.b * quota_ids


class LatencyLine:
    """The shortest times for each number of quota IDs, and the line through them.

    The shortest average, that is, of answers in a row: where times scatter, the shortest single one of many is
    nothing that the others can be held to.
    """

    __slots__ = ("_best", "_line", "_recent")

    def __init__(self) -> None:
        self._recent: dict[int, float] = {}
        self._best: dict[int, float] = {}
        self._line: Line | None = None

    def learn(self, quota_ids: int, seconds: float, *, alone: bool) -> None:
        """Take a time into account.

        Args:
            quota_ids: How many IDs were asked.
            seconds: How long the answer took.
            alone: Whether nothing else of ours was running: then a longer time is the service's own, and it is
                learned too, or a service that has become slower for good would never be trusted again.
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
        """The line, or None before the first answer."""
        return self._line


def _through(points: dict[int, float]) -> Line:
    """Return the line of least squares with `a` and `b` not below 0.

    One point says nothing of the two; it is taken as in proportion to the IDs, which is what the contract says.
    """
    count = len(points)
    mean_n, mean_t = sum(points) / count, sum(points.values()) / count
    spread = sum((n - mean_n) ** 2 for n in points)
    b = sum((n - mean_n) * (t - mean_t) for n, t in points.items()) / spread if spread else float("inf")
    if b * mean_n > mean_t:  # a would be below 0
        return Line(0.0, sum(n * t for n, t in points.items()) / sum(n * n for n in points))
    b = max(0.0, b)
    return Line(mean_t - b * mean_n, b)


@define
class AdaptiveLimit:
    """A limit between 1 and a maximum that follows what the service can take.

    Attributes:
        maximum: The highest it gets.
        latency: The times of bulk invites that it has seen.
        generation: Counts the cuts. What was started before the latest one says nothing new.
    """

    maximum: int
    latency: LatencyLine = field(factory=LatencyLine, init=False)
    generation: int = field(default=0, init=False)
    _limit: float = field(init=False)
    _ratio: float = field(default=0.0, init=False)  # of the answer before

    def __attrs_post_init__(self) -> None:
        self._limit = float(min(_START, self.maximum))

    @property
    def limit(self) -> int:
        """How many attempts may run."""
        return int(self._limit)

    def overloaded(self, generation: int) -> None:
        """Learn that an attempt, started in this generation, was more than the service could take."""
        if generation == self.generation:
            self._limit = max(1.0, self._limit * _OVERLOADED)
            self.generation += 1

    def answered(self, generation: int, running: int) -> None:
        """Learn that an attempt was answered, while so many were running."""
        self._grow(1.0 / self._limit, generation, running)

    def answered_in(
        self, seconds: float, *, quota_ids: int, patience: float, generation: int, running: int, among: int
    ) -> None:
        """Learn that a bulk invite was answered.

        Args:
            seconds: How long it took.
            quota_ids: How many IDs it asked about.
            patience: The time limit it had. A small part of that is harmless, however it compares.
            generation: When it was started.
            running: How many were running when it ended, itself included.
            among: How many were running when it was started.
        """
        expected = self.latency.line
        self.latency.learn(quota_ids, seconds, alone=running == among == 1)
        if expected is None or seconds <= patience * _HARMLESS:
            ratio = _AT_EASE
        else:
            ratio = seconds / max(expected(quota_ids), 1e-9)
        before, self._ratio = self._ratio, ratio
        if ratio > _TOO_SLOW and before > _GROWING:  # one slow answer may be chance, two are not
            # Among so many, and taking so many times the time: the service works on as many as the quotient.
            self._limit = min(self._limit, max(1.0, _GROWING * among / ratio))
        elif ratio <= _AT_EASE:
            self._grow(1.0, generation, running)
        elif ratio <= _GROWING:
            self._grow(1.0 / self._limit, generation, running)

    def _grow(self, step: float, generation: int, running: int) -> None:
        # What did not use the limit says nothing of a higher one.
        if generation == self.generation and running * 2 >= self.limit:
            self._limit = min(float(self.maximum), self._limit + step)
