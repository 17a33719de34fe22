"""Calls under deadlines too short for them, for a minute, and then calls with time enough."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import httpx
from peers.common import Options, Peer
from peers.naive import NaiveClient
from peers.ours import OurClient
from pydantic import ValidationError

from sampling_async import SamplingError
from sampling_async.simulator import Latency, Simulator
from scoreboard.board import Row, Run, exactly, published
from scoreboard.service import open_inventory, open_members, service

if TYPE_CHECKING:
    from scoreboard.service import Remote

CALLERS: Final = 12
CONCURRENCY: Final = 4
LONGEST: Final = 0.02  # seconds; a call takes some 5 ms
HEALTHY_CALLS: Final = 20
FAILURES: Final = (SamplingError, httpx.HTTPError, ValidationError, TimeoutError)


def rows(run: Run) -> list[Row]:
    """Churn with both clients."""
    seconds = run.of(5, 60)
    with service(build, run.seed) as remote:
        ours = asyncio.run(_churn(remote, OurClient, seconds, run.seed))
    with service(build, run.seed) as remote:
        naive = asyncio.run(_churn(remote, NaiveClient, seconds, run.seed))
    names = ("calls", "healthy", "descriptors", "tasks", "permits")
    us, them = (dict(zip(names, each, strict=True)) for each in (ours, naive))
    note = f"{CALLERS} callers, {CONCURRENCY} at once, each cut off after at most {LONGEST * 1000:.0f} ms"
    return [
        published(f"calls in {seconds} s of churn", us["calls"], them["calls"], note=note),
        exactly(f"of {HEALTHY_CALLS} calls afterwards, worked", HEALTHY_CALLS, us["healthy"], them["healthy"]),
        exactly("file descriptors grown", 0, us["descriptors"], them["descriptors"], note="after closing"),
        exactly("tasks grown", 0, us["tasks"], them["tasks"]),
        Row("permits that did not come back", "0", us["permits"], us["permits"] == 0, them["permits"]),
    ]


def build(seed: int) -> Simulator:
    """Make a simulator that takes a moment."""
    return Simulator(
        seed,
        inventory=open_inventory(10),
        members=open_members(5),
        latency=Latency(a=0.003),
        keep_requests=False,
    )


async def _churn(
    remote: Remote, peer: type[Peer], seconds: float, seed: int
) -> tuple[int, int, int, int, int | None]:
    random, calls = Random(seed), 0
    await asyncio.sleep(0)
    descriptors, tasks = _descriptors(), len(asyncio.all_tasks())

    async def hasty() -> None:
        nonlocal calls
        while time.perf_counter() < end:
            calls += 1
            try:
                await asyncio.wait_for(client.settings(), random.random() * LONGEST)
            except FAILURES:
                continue

    async with peer(remote.address, Options(concurrency=CONCURRENCY, read=5.0, backoff=0.0)) as client:
        end = time.perf_counter() + seconds
        await asyncio.gather(*(hasty() for _ in range(CALLERS)))
        healthy = 0
        for _ in range(HEALTHY_CALLS):
            try:
                await asyncio.wait_for(client.settings(), 1.0)
            except FAILURES:
                continue
            healthy += 1
        permits = client.client.snapshot().running if isinstance(client, OurClient) else None
    await asyncio.sleep(0.1)
    gc.collect()
    return calls, healthy, _descriptors() - descriptors, len(asyncio.all_tasks()) - tasks, permits


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
