"""Calls with deadlines that are too short, for a minute, and then calls with enough time.

All of it is repeated through a proxy in another process: with a tunnel (CONNECT), and with the absolute form.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
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
from scoreboard.testkit import ROOT
from scoreboard.testkit import descriptors as open_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peers.common import Address

CALLERS: Final = 12
CONCURRENCY: Final = 4
LONGEST: Final = 0.02  # seconds; a call takes about 5 ms
LONGEST_THROUGH_PROXY: Final = 0.04  # with a proxy, where a new connection needs a tunnel and a handshake
HEALTHY_CALLS: Final = 20
FAILURES: Final = (SamplingError, httpx.HTTPError, ValidationError, TimeoutError)


def rows(run: Run) -> list[Row]:
    """Measure both clients."""
    seconds = run.of(5, 60)
    alone = Options(concurrency=CONCURRENCY, read=5.0, backoff=0.0)
    with service(build, run.seed) as remote:
        ours = asyncio.run(_churn(remote.address, OurClient, alone, seconds, run.seed))
    with service(build, run.seed) as remote:
        naive = asyncio.run(_churn(remote.address, NaiveClient, alone, seconds, run.seed))
    names = ("calls", "healthy", "descriptors", "tasks", "permits")
    us, them = (dict(zip(names, each, strict=True)) for each in (ours, naive))
    note = f"{CALLERS} callers, {CONCURRENCY} at once, each cut off after at most {LONGEST * 1000:.0f} ms"
    return [
        published(f"calls in {seconds} s of churn", us["calls"], them["calls"], note=note),
        exactly(f"of {HEALTHY_CALLS} calls afterwards, worked", HEALTHY_CALLS, us["healthy"], them["healthy"]),
        exactly("file descriptors grown", 0, us["descriptors"], them["descriptors"], note="after closing"),
        exactly("tasks grown", 0, us["tasks"], them["tasks"]),
        Row("permits that were not released", "0", us["permits"], us["permits"] == 0, them["permits"]),
        *_rows_through_proxy(seconds, run.seed, "CONNECT"),
        *_rows_through_proxy(seconds, run.seed, "absolute form"),
    ]


def _rows_through_proxy(seconds: float, seed: int, how: str) -> list[Row]:
    found = []
    for peer in (OurClient, NaiveClient):
        with service(build, seed) as remote, _proxy(remote.address) as (options, https):
            address = replace(remote.address, url=https) if how == "CONNECT" else remote.address
            found.append(asyncio.run(_churn(address, peer, options, seconds, seed)))
    (calls, healthy, left, *_), (their_calls, their_healthy, their_left, *_) = found
    return [
        published(f"the same through a proxy ({how}), calls", calls, their_calls),
        exactly(f"{how}: of {HEALTHY_CALLS} calls afterwards, worked", HEALTHY_CALLS, healthy, their_healthy),
        exactly(f"{how}: connections left", 0, left, their_left, note="after closing"),
    ]


@contextmanager
def _proxy(service_at: Address) -> Iterator[tuple[Options, str]]:
    """Run a proxy and a TLS server in front of the service. Yield a client's options and the https address."""
    program = ROOT / "tests" / "proxies" / "forward_proxy.py"
    with subprocess.Popen(
        [sys.executable, program, service_at.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        ways = {"proxy": told["proxy"], "authority": told["ca"]}
        yield Options(concurrency=CONCURRENCY, read=5.0, backoff=0.0, **ways), told["https"]


def build(seed: int) -> Simulator:
    """Make a simulator with a short latency."""
    return Simulator(
        seed,
        inventory=open_inventory(10),
        members=open_members(5),
        latency=Latency(a=0.003),
        keep_requests=False,
    )


async def _churn(
    address: Address, peer: type[Peer], options: Options, seconds: float, seed: int
) -> tuple[int, int, int, int, int | None]:
    random, calls = Random(seed), 0
    longest = LONGEST_THROUGH_PROXY if options.proxy else LONGEST
    await asyncio.sleep(0)
    descriptors, tasks = open_files(), len(asyncio.all_tasks())

    async def hasty() -> None:
        nonlocal calls
        while time.perf_counter() < end:
            calls += 1
            try:
                await asyncio.wait_for(client.settings(), random.random() * longest)
            except FAILURES:
                continue

    async with peer(address, options) as client:
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
    return calls, healthy, open_files() - descriptors, len(asyncio.all_tasks()) - tasks, permits
