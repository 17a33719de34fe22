"""How far one bulk request travels through the code: calls of functions, changes of file and of package.

    python benchmarks/stations.py

A client that is already connected requests 100 quota IDs from an embedded simulator. `sys.setprofile` counts
the calls in this thread. A coroutine that continues after a wait counts as called again. A response that
comes in several pieces takes more waits, so the shortest of some requests is shown. Unlike times, its numbers
are exact and repeatable: they say how many stations a reader has to follow.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sampling_async
from sampling_async import SamplingClient
from sampling_async.simulator import Simulator

if TYPE_CHECKING:
    from types import FrameType

PACKAGE = Path(sampling_async.__file__).parent
_REQUESTS = 50


class Stations:
    """Counts calls of our functions, and changes of file and package from one call to the next."""

    def __init__(self) -> None:
        self.calls = 0
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Count a call, for `sys.setprofile`."""
        if event != "call":
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            self.calls += 1
            self.files.append(path.relative_to(PACKAGE).with_suffix("").as_posix())

    def changes(self, *, of_packages: bool = False) -> int:
        """Return how often a call was in another file, or package, than the call before."""
        places = [file.split("/")[0] if of_packages else file for file in self.files]
        return sum(1 for before, after in pairwise(places) if before != after)


async def stations_of_one_request(url: str, simulator: Simulator) -> Stations:
    """Request 100 quota IDs with a client that is already connected, and count."""
    member, quota_ids = next(iter(simulator.members)), range(1, 101)
    taken: list[Stations] = []
    key = simulator.api_key
    async with SamplingClient(url, panel_guid=simulator.panel_guid, api_key=key) as client:
        for _ in range(5):
            await client.bulk_invite(member, quota_ids)
        for _ in range(_REQUESTS):
            taken.append(Stations())
            sys.setprofile(taken[-1])
            await client.bulk_invite(member, quota_ids)
            sys.setprofile(None)
    return min(taken, key=lambda each: each.calls)


def main() -> None:
    """Count and print."""
    simulator = Simulator(seed=1)
    with simulator.serve() as url:
        stations = asyncio.run(stations_of_one_request(url, simulator))
    print(f"calls of functions of the package: {stations.calls}")
    print(f"changes from file to file: {stations.changes()}; files: {len(set(stations.files))}")
    print(f"changes from package to package: {stations.changes(of_packages=True)}")
    for file, calls in Counter(stations.files).most_common():
        print(f"{calls:6} {file}")


if __name__ == "__main__":
    main()
