"""The time of an invite that somebody waits for, alone and beside a fan-out of the same client."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from scoreboard.board import at_most

from sampling_async import InviteRequest
from sampling_async.simulator import Latency
from speed.canned_server import Canned, canned_service
from speed.measuring import Measured, Table
from speed.ours import OurClient
from speed.remote import remote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scoreboard.board import Run

WIDTHS: Final = (8, 64)
SERVICE: Final = 0.02
_MOST: Final = 1.15

NOTE: Final = (
    f"The service takes {1000 * SERVICE:.0f} ms for each call. Invites follow each other with pauses of 5 ms. "
    "The fan-out has 100 quota IDs a request, and runs on until the invites have ended."
)


class Clicker(OurClient):
    """Requests single invites, and measures how long each takes."""

    def clicks(self, count: int) -> tuple[list[float], list[float]]:
        """Return the seconds of each invite: alone, and beside a fan-out."""
        return self.runner.run(self._clicks(count)), self.runner.run(self._beside(count))

    async def _beside(self, count: int) -> list[float]:
        fan_out = asyncio.create_task(self._fan_out())
        while self.client.snapshot().limit < self.client.snapshot().max_concurrency:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        try:
            return await self._clicks(count)
        finally:
            fan_out.cancel()
            with suppress(asyncio.CancelledError):
                await fan_out

    async def _fan_out(self) -> None:
        async with self.client.fan_out(_requests(), repeats="ask") as outcomes:
            async for _ in outcomes:
                pass

    async def _clicks(self, count: int) -> list[float]:
        taken = []
        for number in range(count):
            began = time.perf_counter()
            await self.client.generate_invite(self.member_code, 2 * number + 2)
            taken.append(time.perf_counter() - began)
            await asyncio.sleep(0.005)
        return taken


def _requests() -> Iterator[InviteRequest]:
    """Yield requests without an end; odd quotas are not live, so that no link is given twice."""
    number = 0
    while True:
        number += 1
        yield InviteRequest(f"n{number}", range(1, 201, 2))


def measure(run: Run) -> Measured:
    """Measure each width in a process of its own."""
    count = run.of(100, 500)
    table = Table("Milliseconds of an invite", ("width", "kind", "half within", "99 of 100 within"))
    goals, samples = [], {}
    with canned_service(Canned(latency=Latency(a=SERVICE))) as address:
        for width in WIDTHS:
            with remote(Clicker, address, width) as process:
                alone, beside = map(sorted, process.call("clicks", count))
            samples[width] = {"alone": alone, "beside": beside}
            for kind, taken in samples[width].items():
                half, most = 1000 * taken[count // 2], 1000 * taken[count * 99 // 100]
                table.rows.append((width, kind, round(half, 1), round(most, 1)))
            times = beside[count // 2] / alone[count // 2]
            goals.append(at_most(f"an invite beside a fan-out {width} wide, by one alone (half)", _MOST, times))
    return Measured(goals=goals, tables=[table], samples={"samples": samples}, notes=[NOTE])
