"""The duration of requests by their number of quota IDs, at a service with a latency for each ID."""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING, Final

from sampling_async.simulator import Latency
from speed.canned_server import Canned, canned_service
from speed.measuring import PERCENTS, Measured, Table, attempts, interleaved, percentiles
from speed.ours import OurClient
from speed.remote import remote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scoreboard.board import Run, Value

SIZES: Final = (1, 5, 10, 25, 50, 100)
WIDTH: Final = 8
SERVICE: Final = Latency(a=0.005, b=0.0001)


class Asker(OurClient):
    """Sends chunks of different sizes."""

    def seconds(self, size: int, requests: int) -> list[float]:
        """Return the duration of each of this many requests."""
        return self.runner.run(self._seconds(size, requests))

    async def _seconds(self, size: int, requests: int) -> list[float]:
        await self._ask(size, WIDTH)
        gc.collect()
        with attempts() as seconds:
            await self._ask(size, requests)
        return seconds

    async def _ask(self, size: int, requests: int) -> None:
        quota_ids = range(1, size * requests + 1)
        result = await self.client.bulk_invite(self.member_code, quota_ids, chunk_size=size)
        result.raise_for_incomplete()


def measure(run: Run) -> Measured:
    """Send chunks of each size, in turns."""
    requests = run.of(100, 400)
    with canned_service(Canned(latency=SERVICE)) as address, remote(Asker, address, WIDTH) as process:
        takers = {size: partial(process.call, "seconds", size, requests) for size in SIZES}
        rounds = interleaved(takers, run.of(2, 5))
    found = {size: percentiles([each for taken in all_ for each in taken]) for size, all_ in rounds.items()}
    columns = ("quota IDs a request", "the service takes, ms", *(f"p{percent}, ms" for percent in PERCENTS))
    rows: list[Sequence[Value]] = [
        (size, SERVICE.seconds(size) * 1000, *each.values()) for size, each in found.items()
    ]
    return Measured(
        goals=[],
        tables=[Table(f"Requests of sampling_async, {WIDTH} at once", columns, rows)],
        samples={
            "service_ms": {size: SERVICE.seconds(size) * 1000 for size in SIZES},
            "percentiles_ms": found,
            "rounds_ms": {size: [percentiles(taken) for taken in all_] for size, all_ in rounds.items()},
        },
    )
