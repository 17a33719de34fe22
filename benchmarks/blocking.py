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
import time
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple, TextIO

from speed.canned_server import Address, canned_service

from sampling_async import InviteOutcome, InviteRequest, SamplingClient
from sampling_async import sync as blocking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WIDTH: Final = 8


class Cost(NamedTuple):
    """What a run cost, in seconds."""

    wall: float
    cpu: float


def requests_of(requests: int, quota_ids: int) -> Iterator[InviteRequest]:
    """Yield the input."""
    ids = tuple(range(1, quota_ids + 1))
    return (InviteRequest(f"m{number:06}", ids) for number in range(requests))


def writer(file: TextIO) -> Callable[[InviteOutcome], object]:
    """Return a function that writes an outcome."""

    def write(outcome: InviteOutcome) -> None:
        url = outcome.invite.url if outcome.invite else None
        file.write(json.dumps({"member": outcome.member_code, "quota": outcome.quota_id, "url": url}) + "\n")

    return write


def by_async(
    address: Address, requests: Iterator[InviteRequest], keep: Callable[[InviteOutcome], object]
) -> Cost:
    """Run the async client."""

    async def run() -> Cost:
        base_url, panel_guid, api_key, member_code = address
        async with SamplingClient(
            base_url, panel_guid=panel_guid, api_key=api_key, max_concurrency=_WIDTH
        ) as client:
            await client.bulk_invite(member_code, range(1, 101))
            began, cpu = time.perf_counter(), time.process_time()
            async with client.fan_out(requests) as outcomes:
                async for outcome in outcomes:
                    keep(outcome)
            return Cost(time.perf_counter() - began, time.process_time() - cpu)

    return asyncio.run(run())


def by_blocking(
    address: Address, requests: Iterator[InviteRequest], keep: Callable[[InviteOutcome], object]
) -> Cost:
    """Run the blocking client."""
    base_url, panel_guid, api_key, member_code = address
    with blocking.SamplingClient(
        base_url, panel_guid=panel_guid, api_key=api_key, max_concurrency=_WIDTH
    ) as client:
        client.bulk_invite(member_code, range(1, 101))
        began, cpu = time.perf_counter(), time.process_time()
        with client.fan_out(requests) as outcomes:
            for outcome in outcomes:
                keep(outcome)
        return Cost(time.perf_counter() - began, time.process_time() - cpu)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--ids", type=int, default=100, help="quota IDs in a request")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    with canned_service() as address, open("/dev/null", "w") as nowhere:  # noqa: PTH123
        for what, keep in (("counted", lambda _: None), ("written as JSON", writer(nowhere))):
            costs: dict[str, list[Cost]] = {"async": [], "blocking": []}
            for counted in range(-1, given.rounds):
                for name, run in (("async", by_async), ("blocking", by_blocking)):
                    cost = run(address, requests_of(given.requests, given.ids), keep)
                    if counted >= 0:
                        costs[name].append(cost)
            print(f"{given.requests} requests of {given.ids} quota IDs, {_WIDTH} wide, outcomes {what}:")
            for name, taken in costs.items():
                rate = median(given.requests * given.ids / cost.wall for cost in taken)
                cpu = median(cost.cpu for cost in taken) / given.requests * 1e6
                print(f"  {name:8} {rate:10,.0f} outcomes a second, {cpu:6.0f} us CPU a request")
            pairs = list(zip(costs["blocking"], costs["async"], strict=True))
            wall, cpu = (median(one[at] / other[at] for one, other in pairs) for at in (0, 1))
            print(f"  blocking by async: {1 / wall:.2f} of the outcomes a second, {cpu:.2f} times the CPU")


if __name__ == "__main__":
    main()
