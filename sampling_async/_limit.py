"""How much to run at once, and how soon after each other, learned from how attempts end: numbers in and out.

The limit starts at a modest width and grows while the service answers as fast as it ever did. It is halved
when the service shows that it has enough (a timeout, 429, 503, a failed connection) and lowered when answers
take several times as long as they could: a client that learns from timeouts alone pays for each lesson with a
hundred invites that may exist. Since the service takes longer the more quota IDs it is asked, times are
compared with the line `a + b * IDs` of the shortest ones seen.

One at a time is still too much for a service that allows twenty requests a second and answers in a
millisecond. So refusals for load set a pace as well, see `Pace`.
"""

from __future__ import annotations

from collections import deque
from math import inf
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

_FIRST_RATE: Final = 10.0  # a second, after a refusal before which nothing was learned
_LEAST_RATE: Final = 0.2
_LOWEST_GUESSED: Final = 1.0
_MOST: Final = 0.6
_FREE: Final = 200
_MOST_FREE: Final = 20_000
_LEARNED: Final = 8  # answers that make a measurement
_CAUTION: Final = 0.85
_GUESSED: Final = 0.3
_TRIED: Final = 20  # answers until the rate is as high as what was measured
_STEEP: Final = 150
_MORE: Final = 0.1  # a second, with each answer: refusals by chance must not bring it down to nothing
_LATE: Final = 0.002  # seconds: timers fire so much late
_NEXT_TO_NOTHING: Final = 1e-9  # seconds: what is left of one that fired early, for which sleeping is spinning


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

    def overloaded(self, generation: int, *, halves: bool = True) -> None:
        """Learn that an attempt, started in this generation, was more than the service could take."""
        if generation == self.generation:
            self._limit = max(1.0, self._limit * (_OVERLOADED if halves else 1.0))
            self.generation += 1

    def start_again(self) -> None:
        """Begin with one at a time: how much the service can take now is not known."""
        self._limit = 1.0
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


class Pace:
    """How soon after each other attempts may begin: no limit until the service refuses some for load.

    A refusal sets the rate to a little less than that of the answers before it, which is what the service
    allows. From there it grows, first slowly, since the limit is near, then ever faster, since it has gone.
    Where too few were answered to measure anything, it falls further, and grows fast until the next refusal.

    Refusals may have nothing to do with the rate: one node of several may say no to everything. Where most
    attempts are answered at one a second, and the others refused all the same, there is no rate for a while.

    Attributes:
        is_measured: Whether the rate is one that the service was seen to allow.
    """

    __slots__ = (
        "_answers",
        "_answers_at_lowest",
        "_begun_at_lowest",
        "_free",
        "_free_next",
        "_latest",
        "_next",
        "_rate",
        "_since",
        "is_measured",
    )

    def __init__(self) -> None:
        self._rate = inf  # a second: what was measured, or guessed
        self.is_measured = False
        self._answers = 0  # since the latest refusal
        self._begun_at_lowest = 0  # attempts, at the lowest rate that was guessed
        self._answers_at_lowest = 0
        self._free = 0  # attempts to come, in which refusals are not taken to be about the rate
        self._free_next = _FREE
        self._since = inf
        self._latest: deque[float] = deque(maxlen=_LEARNED)
        self._next = -inf

    @property
    def rate(self) -> float:
        """How many attempts may begin in a second."""
        if self._rate == inf:
            return inf
        if not self.is_measured:
            return self._rate * (1 + self._answers / _LEARNED)
        beyond = self._answers - _TRIED
        more = (1 - _CAUTION) * beyond / _TRIED if beyond < 0 else (beyond / _STEEP) ** 2
        return max(self._rate * (1 + more), self._rate * _CAUTION + _MORE * self._answers)

    def refused(self, now: float) -> None:
        """Learn that an attempt was refused for load; of several under way at once, the first one counts."""
        if self._free:
            return
        rate = self.rate
        if self._is_in_vain():
            self._rate, self._free = inf, self._free_next
            self._free_next = min(_MOST_FREE, 2 * self._free_next)
            self._answers = self._begun_at_lowest = self._answers_at_lowest = 0
            return
        if self._answers < _LEARNED:
            known = rate * (_CAUTION if self.is_measured else _GUESSED)
            self._rate = known if rate < inf else _FIRST_RATE
        else:
            # While the rate was sought it rose: only the latest answers say where it ended.
            whole = self.is_measured
            answers, since = (self._answers, self._since) if whole else (_LEARNED - 1, self._latest[0])
            self._free_next = _FREE if rate < inf else self._free_next
            self.is_measured = rate < inf  # the first ones were let through before any limit showed
            self._rate = min(rate, answers / max(now - since, 1e-6))
        self._rate = max(self._rate, _LOWEST_GUESSED if self._answers and not self.is_measured else _LEAST_RATE)
        if not self._is_at_lowest():
            self._begun_at_lowest = self._answers_at_lowest = 0
        self._answers, self._since = 0, now
        self._next = max(self._next, now + 1 / self.rate)

    def _is_in_vain(self) -> bool:
        """Return whether, as low as the rate may be, more are answered than refused."""
        enough = self._begun_at_lowest >= _LEARNED and self._answers < _LEARNED
        return enough and self._answers_at_lowest >= _MOST * self._begun_at_lowest

    def _is_at_lowest(self) -> bool:
        return not self.is_measured and self._rate == _LOWEST_GUESSED

    def answered(self, now: float) -> None:
        """Learn that an attempt was answered."""
        self._answers += 1
        self._answers_at_lowest += self._is_at_lowest()
        self._latest.append(now)

    def wait(self, now: float) -> float:
        """Return the seconds until the next attempt may begin."""
        wait = self._next - now
        return wait if wait > _NEXT_TO_NOTHING else 0.0

    def begin(self, now: float) -> None:
        """Take note that an attempt begins."""
        if self._free:
            self._free -= 1
        self._begun_at_lowest += self._is_at_lowest()
        if self._rate < inf:
            gap = 1 / self.rate
            self._next = max(self._next, now - min(_LATE, gap / 10)) + gap  # nothing is saved up
