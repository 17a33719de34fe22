"""A live inventory in fast motion: the longest stall of the event loop, and the moments that were wrong.

python benchmarks/day.py [--quotas 8000] [--polls 40]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import time
from typing import TYPE_CHECKING

import anyio

from sampling_async import QuotaWatch, SamplingClient
from sampling_async.matching import LiveIndex
from sampling_async.simulator import Simulator, generate_inventory

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SLICE = 0.001
CHANGED = 20  # one quota in so many changes from one poll to the next


class Stalls:
    """The gaps of a task that sleeps a millisecond at a time."""

    def __init__(self) -> None:
        self.gaps: list[float] = []

    async def measure(self) -> None:
        """Measure until this is cancelled."""
        before = time.perf_counter()
        while True:
            await asyncio.sleep(SLICE)
            now = time.perf_counter()
            self.gaps.append(now - before - SLICE)
            before = now

    def told(self) -> str:
        """Return the longest gaps as text."""
        gaps = sorted(self.gaps)
        return f"longest {1e3 * gaps[-1]:.1f} ms, 99.9 % under {1e3 * gaps[int(len(gaps) * 0.999)]:.1f} ms"


class Service:
    """A simulator in a process of its own, in which quotas open and close when it is told so."""

    def __init__(self, surveys: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, surveys), daemon=True)
        self._process.start()
        self.url, self.panel_guid, self.api_key = self._ours.recv()

    def moved(self) -> set[int]:
        """Open and close some quotas; return those that are open then."""
        self._ours.send("move")
        return self._ours.recv()

    def end(self) -> None:
        """End the process."""
        self._ours.send("end")
        self._process.join()


def serve(pipe: Connection, surveys: int) -> None:
    """Serve a simulator and do what comes through the pipe."""
    sim, choice = Simulator(1, surveys=surveys, members=1), random.Random(1)
    ids = [quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas]
    closed: set[int] = set()
    with sim.serve() as url:
        pipe.send((url, sim.panel_guid, sim.api_key))
        while pipe.recv() == "move":
            for quota_id in choice.sample(ids, len(ids) // CHANGED):
                (sim.open_quota if quota_id in closed else sim.close_quota)(quota_id)
                closed ^= {quota_id}
            pipe.send(set(ids) - closed)


class Day:
    """What is counted."""

    def __init__(self) -> None:
        self.changes = self.moments = self.wrong = 0
        self.longest = 0.0

    async def read(self, watch: QuotaWatch) -> None:
        """Count changes until this is cancelled."""
        async with watch.changes() as changes:
            async for _ in changes:
                self.changes += 1

    async def check(self, live: LiveIndex, open_ids: set[int]) -> None:
        """Wait for the index of the newest inventory, and compare it in a thread with what is open."""
        began = time.perf_counter()
        before = live.index
        while live.index is before and time.perf_counter() - began < 5:  # noqa: ASYNC110  it tells nobody
            await asyncio.sleep(SLICE)
        self.longest = max(self.longest, time.perf_counter() - began)
        index = live.index
        self.moments += 1
        self.wrong += await asyncio.to_thread(lambda: set(index.quota_ids) != open_ids)

    def close(self, watch: QuotaWatch, live: LiveIndex, quota_ids: list[int]) -> None:
        """Close quotas as notifications do, and look at once."""
        for quota_id in quota_ids:
            watch.close_quota(quota_id)
            self.moments += 1
            self.wrong += quota_id in live.index.quota_ids


def surveys_for(quotas: int) -> int:
    """Return how many surveys have so many quotas."""
    share = sum(len(survey.quotas) for survey in generate_inventory(1, surveys=1000).surveys) / 1000
    return round(quotas / share)


async def main(quotas: int, polls: int) -> None:
    """Run a day and print what was measured."""
    service = await asyncio.to_thread(Service, surveys_for(quotas))
    day, stalls, choice = Day(), Stalls(), random.Random(2)
    async with (
        SamplingClient(service.url, panel_guid=service.panel_guid, api_key=service.api_key) as client,
        client.watch_quotas(3600) as watch,
        LiveIndex(watch) as live,
        anyio.create_task_group() as tasks,
    ):
        await live.ready()
        size = len(live.index)
        tasks.start_soon(day.read, watch)
        tasks.start_soon(stalls.measure)
        for _ in range(polls):
            open_ids = await asyncio.to_thread(service.moved)
            some = choice.sample(tuple(open_ids), 10)
            await watch.refresh()
            await day.check(live, open_ids)
            day.close(watch, live, some)
        tasks.cancel_scope.cancel()
    await asyncio.to_thread(service.end)
    print(f"{size:,} quotas, {polls} polls, one quota in {CHANGED} changes from poll to poll")
    print(f"stalls of the event loop: {stalls.told()}")
    print(f"from the inventory to its index: {1e3 * day.longest:.0f} ms at most")
    print(f"changes read: {day.changes:,}; moments checked: {day.moments}; wrong: {day.wrong}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quotas", type=int, default=8000)
    parser.add_argument("--polls", type=int, default=40)
    given = parser.parse_args()
    asyncio.run(main(given.quotas, given.polls))
