"""The blocking client by the async one: outcomes a second and CPU a request of the same fan-out, in turn.

    python benchmarks/blocking.py                        # 1,000 requests of 100 quota IDs, 9 rounds
    python benchmarks/blocking.py --ids 1                # requests of one quota ID

The service is a process of its own, and costs next to nothing. Both clients are 8 wide, and read a generator.
The first rounds count the outcomes only; in the second ones each outcome is written as a line of JSON, as a
script does. CPU is that of this process, with all its threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, TextIO

from speed.canned_server import Address, canned_service
from speed.measuring import Sample, Watch, interleaved, microseconds, ratio

from sampling_async import InviteOutcome, InviteRequest, SamplingClient
from sampling_async import sync as blocking

if TYPE_CHECKING:
    from collections.abc import Iterator

Keep = Callable[[InviteOutcome], object]
_WIDTH: Final = 8


def requests_of(requests: int, quota_ids: int) -> Iterator[InviteRequest]:
    """Yield the input."""
    ids = tuple(range(1, quota_ids + 1))
    return (InviteRequest(f"m{number:06}", ids) for number in range(requests))


def writer(file: TextIO) -> Keep:
    """Return a function that writes an outcome."""

    def write(outcome: InviteOutcome) -> None:
        url = outcome.invite.url if outcome.invite else None
        file.write(json.dumps({"member": outcome.member_code, "quota": outcome.quota_id, "url": url}) + "\n")

    return write


def by_async(address: Address, requests: Iterator[InviteRequest], keep: Keep) -> Sample:
    """Run the async client."""

    async def run() -> Sample:
        async with SamplingClient(address.url, **options(address)) as client:
            await client.bulk_invite(address.member_code, range(1, 101))
            watch = Watch()
            async with client.fan_out(requests) as outcomes:
                async for outcome in outcomes:
                    keep(outcome)
            return watch.sample()

    return asyncio.run(run())


def by_blocking(address: Address, requests: Iterator[InviteRequest], keep: Keep) -> Sample:
    """Run the blocking client."""
    with blocking.SamplingClient(address.url, **options(address)) as client:
        client.bulk_invite(address.member_code, range(1, 101))
        watch = Watch()
        with client.fan_out(requests) as outcomes:
            for outcome in outcomes:
                keep(outcome)
        return watch.sample()


def options(address: Address) -> dict[str, Any]:
    """Return the options of both."""
    return {"panel_guid": address.panel_guid, "api_key": address.api_key, "max_concurrency": _WIDTH}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--ids", type=int, default=100, help="quota IDs in a request")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    clients = {"async": by_async, "blocking": by_blocking}
    with canned_service() as address, Path("/dev/null").open("w", encoding="utf-8") as nowhere:
        for what, keep in (("counted", lambda _: None), ("written as JSON", writer(nowhere))):
            takers = {
                name: lambda run=run, keep=keep: run(address, requests_of(given.requests, given.ids), keep)
                for name, run in clients.items()
            }
            for take in takers.values():
                take()
            taken = interleaved(takers, given.rounds)
            print(f"{given.requests} requests of {given.ids} quota IDs, {_WIDTH} wide, outcomes {what}:")
            for name, samples in taken.items():
                rate = median(given.requests * given.ids / sample.wall for sample in samples)
                cpu = median(microseconds(samples, given.requests))
                print(f"  {name:8} {rate:10,.0f} outcomes a second, {cpu:6.0f} us CPU a request")
            wall, cpu = (
                ratio(*([getattr(each, of) for each in taken[name]] for name in ("blocking", "async"))).median
                for of in ("wall", "cpu")
            )
            print(f"  blocking by async: {1 / wall:.2f} of the outcomes a second, {cpu:.2f} times the CPU")


if __name__ == "__main__":
    main()
