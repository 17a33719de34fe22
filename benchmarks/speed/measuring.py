"""How figures are measured: samples of CPU and wall time, in interleaved rounds, shown as quartiles."""

from __future__ import annotations

import gc
import logging
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from scoreboard.board import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from scoreboard.board import Row, Value

PERCENTS: Final = (50, 90, 99)
T = TypeVar("T")
Key = TypeVar("Key")


@dataclass
class Table:
    """A table of figures."""

    title: str
    columns: tuple[str, ...]
    rows: list[Sequence[Value]] = field(default_factory=list)


@dataclass
class Measured:
    """The results of a section.

    Attributes:
        goals: The figures that have a goal.
        tables: All figures.
        samples: All rounds as measured, for programs and plots.
        notes: Explanations that are needed to understand the figures.
    """

    goals: list[Row]
    tables: list[Table]
    samples: dict[str, Any]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """The cost of some work: CPU seconds of this process with all its threads, and wall seconds."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Paired:
    """A sample, and its ratio to the next one, which is always the same client with the same work.

    Attributes:
        cpu: Microseconds per request.
        relative: CPU time per request, divided by that of the next sample.
        ids: Quota IDs per second.
    """

    cpu: float
    relative: float
    ids: float

    @classmethod
    def of(cls, sample: Sample, requests: int, after: Sample, requests_after: int) -> Paired:
        """Return a pair of samples with this many requests each, of 100 quota IDs."""
        cpu = sample.cpu / requests
        return cls(cpu * 1e6, cpu / (after.cpu / requests_after), 100 * requests / sample.wall)


class Watch:
    """Takes a sample that begins when this is made, after a garbage collection."""

    def __init__(self) -> None:
        gc.collect()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def sample(self) -> Sample:
        """Return the sample until now."""
        return Sample(time.process_time() - self._cpu, time.perf_counter() - self._wall)


def interleaved(takers: Mapping[Key, Callable[[], T]], rounds: int) -> dict[Key, list[T]]:
    """Take one sample of each in every round. Each round begins with another one.

    So a machine that becomes slower or faster meanwhile does so for all of them.
    """
    names = list(takers)
    taken: dict[Key, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken[name].append(takers[name]())
    return taken


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of some values."""
        known = list(values)
        if len(known) == 1:
            return cls(known[0], known[0], known[0])
        return cls(*statistics.quantiles(known, n=4, method="inclusive"))

    def __str__(self) -> str:
        return f"{shown(self.median)} ({shown(self.low)} to {shown(self.high)})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the ratio of ours to theirs for each round, because a disturbance of a round affects both."""
    return Spread.of(mine / other for mine, other in zip(ours, theirs, strict=True))


def flatness(costs: Iterable[Iterable[float]]) -> float:
    """Return the ratio of the highest to the lowest median of the rounds."""
    medians = [statistics.median(each) for each in costs]
    return max(medians) / min(medians)


def several_times(times: int, take: Callable[[], Mapping[Key, list[T]]]) -> dict[Key, list[T]]:
    """Take the same samples several times and return all of each, if `take` uses new processes each time.

    Where a process has its memory makes it some percent faster or slower.
    """
    taken: dict[Key, list[T]] = {}
    for _ in range(times):
        for key, samples in take().items():
            taken.setdefault(key, []).extend(samples)
    return taken


def microseconds(samples: Iterable[Sample], units: int) -> list[float]:
    """Return the CPU microseconds of each sample, per unit of work."""
    return [sample.cpu / units * 1e6 for sample in samples]


class _Attempts(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and isinstance(record.args[3], float):
            self.seconds.append(record.args[3])


@contextmanager
def attempts() -> Iterator[list[float]]:
    """Collect the durations of the attempts in the block. This costs CPU time, so do not measure that."""
    logger, collected = logging.getLogger("sampling_async"), _Attempts()
    logger.addHandler(collected)
    logger.setLevel(logging.DEBUG)
    try:
        yield collected.seconds
    finally:
        logger.removeHandler(collected)
        logger.setLevel(logging.NOTSET)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return milliseconds by percentile."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{percent}": round(cuts[percent - 1] * 1000, 2) for percent in PERCENTS}


def resident_mib() -> float:
    """Return the current resident memory."""
    return _status("VmRSS")


def peak_mib() -> float:
    """Return the peak of resident memory since this process was started.

    ru_maxrss is not used: a spawned process begins with that of its parent.
    """
    return _status("VmHWM")


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise OSError(f"the system does not tell {name}")
