"""How close the end of a fan-out is to the earliest end that the service allows."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Final

from scoreboard.board import at_least, at_most

from sampling_async.simulator import Latency
from speed.canned_server import Canned, canned_service
from speed.contenders import AIOHTTP, OURS, contender
from speed.measuring import Measured, Spread, Table, interleaved, ratio
from speed.ours import OurClient
from speed.remote import remote

if TYPE_CHECKING:
    from collections.abc import Callable

    from scoreboard.board import Row, Run

    from sampling_async._bulk.options import Goal
    from speed.measuring import Sample

IDS: Final = 10_000
WORKERS: Final = (4, 8)
SLOTS: Final = 8
SERVICE: Final = Latency(a=0.04, b=0.0006)
IN_PROPORTION: Final = Latency(b=0.005)
"""The latency of the contract for Bulk Invite: the more quota IDs, the longer, without other effects."""

_GOALS: Final[tuple[Goal, ...]] = ("throughput", "first")


class Bulks(OurClient):
    """Sends bulks of 100 quota IDs with different goals."""

    def warm_up(self) -> None:
        """Let the client learn the duration of requests of different sizes."""
        for size in (10, 25, 50, 100):
            self.runner.run(self._seconds(10 * size, "throughput", size))

    def seconds(self, goal: Goal) -> float:
        """Return the time of a bulk until its last response."""
        return self.runner.run(self._seconds(100, goal, 100))

    async def _seconds(self, ids: int, goal: Goal, size: int) -> float:
        quota_ids = range(1, ids + 1)
        began = time.perf_counter()
        result = await self.client.bulk_invite(self.member_code, quota_ids, goal=goal, chunk_size=size)
        seconds = time.perf_counter() - began
        result.raise_for_incomplete()
        return seconds


def measure(run: Run) -> Measured:
    """Measure a large fan-out, and a small one in a hurry."""
    large, small = _large(run), _small(run)
    return Measured(large.goals + small.goals, large.tables + small.tables, large.samples | small.samples)


def _large(run: Run) -> Measured:
    with ExitStack() as stack:
        takers: dict[tuple[str, int], Callable[[], Sample]] = {}
        for workers in run.of(WORKERS[1:], WORKERS):
            latency = Latency(a=SERVICE.a, b=SERVICE.b, workers=workers)
            address = stack.enter_context(canned_service(Canned(latency=latency)))
            for name in (OURS, AIOHTTP):
                client = stack.enter_context(contender(name, address))
                takers[name, workers] = partial(client.call, "bulk", IDS // 100, workers)
        samples = interleaved(takers, run.of(1, 5))
    columns = ("client", "workers, and requests at once", "ideal, s", "measured, s", "by the ideal")
    table = Table(f"{IDS:,} quota IDs, where the service takes 40 ms and 0.6 ms an ID", columns)
    goals = []
    for (name, workers), taken in samples.items():
        ideal = ceil(IDS / 100 / workers) * SERVICE.seconds(100)
        times = Spread.of(sample.wall / ideal for sample in taken)
        table.rows.append((name, workers, ideal, str(Spread.of(sample.wall for sample in taken)), str(times)))
        if name == OURS:
            goal = f"makespan of {IDS:,} IDs, {workers} workers: the ideal schedule is 1"
            goals.append(at_most(goal, 1.05, times.median))
    walls = {f"{name}, {workers}": [each.wall for each in taken] for (name, workers), taken in samples.items()}
    return Measured(goals, [table], {"large_s": walls})


def _small(run: Run) -> Measured:
    services = {"5 ms an ID": IN_PROPORTION, "40 ms and 0.6 ms an ID": SERVICE}
    with ExitStack() as stack:
        takers: dict[tuple[str, Goal], Callable[[], float]] = {}
        for name, latency in services.items():
            address = stack.enter_context(canned_service(Canned(latency=latency)))
            bulks = stack.enter_context(remote(Bulks, address, SLOTS))
            bulks.call("warm_up")
            for goal in _GOALS:
                takers[name, goal] = partial(bulks.call, "seconds", goal)
        samples = interleaved(takers, run.of(3, 9))
    columns = ("the service takes", "one request, ms", 'goal="first", ms', "times faster")
    table = Table(f"100 quota IDs, {SLOTS} slots free", columns)
    goals: list[Row] = []
    for name, latency in services.items():
        one, parts = samples[name, "throughput"], samples[name, "first"]
        faster = ratio(one, parts)
        cells = [str(Spread.of(seconds * 1000 for seconds in taken)) for taken in (one, parts)]
        table.rows.append((name, *cells, str(faster)))
        if latency is IN_PROPORTION:
            title = f'100 IDs with goal="first" and {SLOTS} slots: times faster than one request'
            goals.append(at_least(title, 4, faster.median))
    seconds = {f"{name}, {goal}": taken for (name, goal), taken in samples.items()}
    return Measured(goals, [table], {"small_s": seconds})
