"""How a figure is taken: samples of CPU and wall time, in interleaved rounds, told as quartiles."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from scoreboard.board import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from scoreboard.board import Row, Value

T = TypeVar("T")
Key = TypeVar("Key")


@dataclass
class Table:
    """Figures side by side."""

    title: str
    columns: tuple[str, ...]
    rows: list[Sequence[Value]] = field(default_factory=list)


@dataclass
class Measured:
    """What a section hands back.

    Attributes:
        goals: The figures that have a goal.
        tables: All figures.
        samples: Every round as it was taken, for programs and for the plots.
        notes: What one must know to read them.
    """

    goals: list[Row]
    tables: list[Table]
    samples: dict[str, Any]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """What some work took: CPU seconds of this process with all its threads, and wall seconds."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Paired:
    """A sample, and what it is by the one after it, of the same client at the same work as always.

    Attributes:
        cpu: Microseconds a request.
        relative: CPU time a request by that of the one after it.
        ids: Quota IDs a second.
    """

    cpu: float
    relative: float
    ids: float

    @classmethod
    def of(cls, sample: Sample, requests: int, after: Sample, requests_after: int) -> Paired:
        """Return a pair of samples of so many requests each, of 100 quota IDs."""
        cpu = sample.cpu / requests
        return cls(cpu * 1e6, cpu / (after.cpu / requests_after), 100 * requests / sample.wall)


class Watch:
    """Takes a sample from when it is made; the garbage of what was before does not count."""

    def __init__(self) -> None:
        gc.collect()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def sample(self) -> Sample:
        """Return what it took until now."""
        return Sample(time.process_time() - self._cpu, time.perf_counter() - self._wall)


def interleaved(takers: Mapping[Key, Callable[[], T]], rounds: int) -> dict[Key, list[T]]:
    """Take one sample of each in every round, each time beginning with another one.

    A machine that grows slower or faster on the way then does so for all of them alike.
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
    """Return how many times theirs ours is, round by round: what disturbs a round disturbs both."""
    return Spread.of(mine / other for mine, other in zip(ours, theirs, strict=True))


def flatness(costs: Iterable[Iterable[float]]) -> float:
    """Return the dearest by the cheapest, where each is the median of its rounds."""
    medians = [statistics.median(each) for each in costs]
    return max(medians) / min(medians)


def microseconds(samples: Iterable[Sample], units: int) -> list[float]:
    """Return the CPU microseconds of each sample, for each of so many units of work."""
    return [sample.cpu / units * 1e6 for sample in samples]


def resident_mib() -> float:
    """Return the memory that is resident now."""
    return _status("VmRSS")


def peak_mib() -> float:
    """Return the most memory that has been resident since this process was started.

    Not ru_maxrss: a spawned process begins with that of its parent.
    """
    return _status("VmHWM")


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise OSError(f"the system does not tell {name}")
