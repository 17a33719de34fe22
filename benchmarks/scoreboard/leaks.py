"""Leaks after many calls over real sockets, some with faults or cancellations."""

from __future__ import annotations

import asyncio
import gc
import re
import tracemalloc
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

import httpx
from peers.common import Options, Peer
from peers.naive import NaiveClient
from peers.ours import OurClient
from pydantic import ValidationError

from sampling_async import SamplingError
from sampling_async.simulator import Fault, Simulator
from scoreboard.board import Row, Run, at_least, at_most, exactly
from scoreboard.service import FIRST_QUOTA, Remote, open_inventory, open_members, service
from scoreboard.testkit import descriptors as open_files

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Iterator

CONCURRENCY: Final = 8
CALLERS: Final = 16
SLOPE_CALLS: Final = 100_000
CANCELLED_SHARE: Final = 0.05


@dataclass
class Remains:
    """What a client leaked.

    Attributes:
        calls: Calls made after the warm-up.
        cancelled: How many of them were cancelled.
        failed: How many of them raised.
        descriptors: Additional open files and sockets after the client was closed.
        tasks: Additional tasks after the client was closed.
        slope: Growth of Python objects in MiB per 100,000 calls, in the half with the smaller growth.
        permits: Permits that were not released; None if the client does not report them.
        healthy: The result of a call without a fault afterwards.
    """

    calls: int = 0
    cancelled: int = 0
    failed: int = 0
    descriptors: int = 0
    tasks: int = 0
    slope: float = 0.0
    permits: int | None = None
    healthy: str = "works"


def rows(run: Run) -> list[Row]:
    """Measure both clients."""
    calls = run.of(5_000, 100_000)
    remains = []
    for peer, share in ((OurClient, 1), (NaiveClient, run.of(1, 5))):  # the long run is about our client
        with service(build, run.seed) as remote:
            remains.append(asyncio.run(_measure(remote, peer, calls // share, run.seed)))
    us, them = remains
    note = (
        f"cancelled and raised, ours: {us.cancelled:,} and {us.failed:,}, "
        f"naive: {them.cancelled:,} and {them.failed:,}; {CALLERS} callers, {CONCURRENCY} at once"
    )
    slope_note = f"Python objects, extrapolated to {SLOPE_CALLS:,} calls"
    return [
        at_least("calls of all kinds, 5 % with a fault, 5 % cancelled", calls, us.calls, them.calls, note=note),
        exactly("file descriptors grown", 0, us.descriptors, them.descriptors, note="after closing"),
        exactly("tasks grown", 0, us.tasks, them.tasks),
        at_most("memory slope", 1.0, us.slope, them.slope, unit="MiB", note=slope_note),
        Row("permits that were not released", "0", us.permits, us.permits == 0, them.permits),
        Row("a healthy call afterwards", "works", us.healthy, us.healthy == "works", them.healthy),
    ]


def build(seed: int) -> Simulator:
    """Make a simulator with a fault in one request of twenty."""
    faults = [
        Fault.cut(when="before"),
        Fault.cut(when="after", reset=True),
        Fault.cut(when="middle"),
        Fault.status(500),
        Fault.status(503),
        Fault.html(),
        Fault.delay(0.5),
        Fault.drip(slices=5, pause=0.005),
    ]
    return Simulator(
        seed,
        inventory=open_inventory(20, recontacts=1),
        members=open_members(50),
        faults=[fault.on(probability=0.05 / len(faults)) for fault in faults],
        keep_requests=False,
    )


def clear_faults(simulator: Simulator) -> None:
    """Remove the faults."""
    simulator.faults.clear()


async def _measure(remote: Remote, peer: type[Peer], calls: int, seed: int) -> Remains:
    descriptors, tasks = open_files(), len(asyncio.all_tasks())
    remains = Remains()
    tracemalloc.start()  # compared with the first one, so that objects which replace older ones do not count
    client = peer(remote.address, Options(CONCURRENCY, read=0.25, patience=0.5, backoff=0.005))
    async with client:
        await _run(client, max(1_000, calls // 20), Random(seed), Remains())
        traced = [_traced()]
        for half in (1, 2):  # a leak grows in both halves; a cache that fills, or chance, does not
            await _run(client, calls // 2, Random(seed + half), remains)
            traced.append(_traced())
        slope = min(traced[1] - traced[0], traced[2] - traced[1])
        remains.slope = slope / 2**20 * SLOPE_CALLS / (calls // 2)
        tracemalloc.stop()
        remains.permits = _permits_out(client)
        await asyncio.to_thread(remote.ask, clear_faults)
        try:
            await asyncio.wait_for(client.settings(), 10)
        except Exception as exc:  # noqa: BLE001  whatever it is, it is the figure
            remains.healthy = type(exc).__name__
    del client
    await asyncio.sleep(0.1)  # closed transports are freed in the next turns of the loop
    remains.descriptors = open_files() - descriptors
    remains.tasks = len(asyncio.all_tasks()) - tasks
    return remains


async def _run(client: Peer, calls: int, random: Random, remains: Remains) -> None:
    numbers = iter(range(calls))
    await asyncio.gather(*(_caller(client, numbers, random, remains) for _ in range(CALLERS)))


async def _caller(client: Peer, numbers: Iterator[int], random: Random, remains: Remains) -> None:
    for _ in numbers:
        call = asyncio.ensure_future(_call(client, random))
        remains.calls += 1
        if random.random() < CANCELLED_SHARE:
            await asyncio.sleep(random.choice((0, 0, random.uniform(0, 0.01))))
            remains.cancelled += call.cancel()
        try:
            await call
        except asyncio.CancelledError:
            pass
        except (SamplingError, httpx.HTTPError, ValidationError):
            remains.failed += 1


def _call(client: Peer, random: Random) -> Coroutine[Any, Any, Any]:
    member = f"m{random.randint(1, 50):06}"
    match random.randrange(5):
        case 0:
            return client.settings()
        case 1:
            return client.quotas()
        case 2:
            return client.invite(member, FIRST_QUOTA + random.randrange(20))
        case 3:
            return client.invite_all([(member, range(FIRST_QUOTA, FIRST_QUOTA + 20))])
        case _:
            return _read(client.recontact(FIRST_QUOTA))


async def _read(codes: AsyncGenerator[str, None]) -> int:
    return len([code async for code in codes])


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _permits_out(client: Peer) -> int | None:
    if isinstance(client, NaiveClient):
        return CONCURRENCY - client.permits
    if isinstance(client, OurClient):
        told = re.search(r"(\d+) of \d+ running, (\d+) waiting", repr(client.client))
        return int(told[1]) + int(told[2]) if told else None
    return None
