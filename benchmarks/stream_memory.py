"""How memory grows while quota IDs of an async generator are streamed through bulk invites.

The simulator runs in the same process, so its memory counts too.

    python benchmarks/stream_memory.py [--ids 1000000]
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

import anyio

from sampling_async.simulator import Simulator

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sampling_async import SamplingClient


def peak_mib() -> float:
    """Return the most resident memory this process has had."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


async def numbers(count: int) -> AsyncIterator[int]:
    """Yield quota IDs that the simulator does not know: no invite, no entry in its ledger."""
    for number in range(1, count + 1):
        yield 10**9 + number


async def stream(client: SamplingClient, member_code: str, count: int) -> Counter[str]:
    """Stream so many IDs and count the outcomes."""
    outcomes: Counter[str] = Counter()
    async with client.stream_bulk_invite(member_code, numbers(count)) as results:
        async for outcome in results:
            outcomes[outcome.status] += 1
    return outcomes


async def measure(count: int) -> None:
    """Warm up with a hundredth, then measure."""
    simulator = Simulator(seed=1, keep_requests=False)
    member_code = next(iter(simulator.members))
    async with simulator.client() as client:
        await stream(client, member_code, max(count // 100, 1000))
        before, started = peak_mib(), time.perf_counter()
        outcomes = await stream(client, member_code, count)
        seconds = time.perf_counter() - started
    print(f"{count:,} IDs in {seconds:.1f} s ({count / seconds:,.0f} a second): {dict(outcomes)}")
    print(f"peak memory {peak_mib():.1f} MiB, grown by {peak_mib() - before:.1f} MiB")


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=1_000_000)
    anyio.run(measure, parser.parse_args().ids)


if __name__ == "__main__":
    main()
