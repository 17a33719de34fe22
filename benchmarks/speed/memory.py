"""How memory grows while millions of quota IDs, or of member codes, pass through the client."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from scoreboard.board import at_most, shown

from speed.canned_server import Canned, canned_service
from speed.measuring import Measured, Table, peak_mib, resident_mib
from speed.ours import OurClient
from speed.remote import remote

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from scoreboard.board import Run

WIDTH: Final = 64
CONSTANT: Final = 1.0
"""MiB. For ten million items this is less than a tenth of a byte each."""

STREAMS: Final = ("stream_bulk_invite", "recontact_members", "stream_recontact_members")
_A_PERCENT: Final = 20
"""Samples for each percent of a run."""


@dataclass(frozen=True)
class Growth:
    """Resident MiB at each moment of a run, the peak, and the duration in seconds."""

    resident: tuple[float, ...]
    peak: float
    seconds: float

    def after(self, percent: int) -> float:
        """Return the growth from the time after this share of the run to the end."""
        # Medians of two equally long times: the client forgets old links by the ten thousand, so its memory
        # goes up and down by a megabyte.
        return statistics.median(self.resident[-percent * _A_PERCENT :]) - self.typical(percent)

    def typical(self, percent: int) -> float:
        """Return the median in a share of the run, after a first share that is as long."""
        return statistics.median(self.resident[percent * _A_PERCENT : 2 * percent * _A_PERCENT])


class Consumer(OurClient):
    """Reads a stream and keeps nothing."""

    def take(self, stream: str, count: int) -> Growth:
        """Read this many quota IDs or codes."""
        return self.runner.run(self._take(stream, count))

    async def _take(self, stream: str, count: int) -> Growth:
        if stream == "recontact_members":
            return await _growth(self.client.recontact_members(1), count)
        if stream == "stream_recontact_members":
            async with self.client.stream_recontact_members(1) as codes:
                return await _growth(codes, count)
        ids = (number for number in range(1, count + 1))  # each ID is different, and no collection holds them
        async with self.client.stream_bulk_invite(self.member_code, ids) as outcomes:
            return await _growth(outcomes, count)


async def _growth(stream: AsyncIterable[object], count: int) -> Growth:
    resident: list[float] = []
    step, taken, began = count // (100 * _A_PERCENT), 0, time.perf_counter()
    async for _ in stream:
        taken += 1
        if taken % step == 0:
            resident.append(resident_mib())
    if taken != count:
        raise ValueError(f"{taken} of {count} were taken")
    return Growth(tuple(resident), peak_mib(), time.perf_counter() - began)


def measure(run: Run) -> Measured:
    """Read each stream in its own process."""
    count, warm = run.of((500_000, 20), (10_000_000, 5))
    growths: dict[str, Growth] = {}
    with canned_service(Canned(codes=count)) as address:
        for stream in STREAMS:
            with remote(Consumer, address, WIDTH) as process:
                growths[stream] = process.call("take", stream, count)
    columns = ("stream", "peak memory", f"median of {warm} to {2 * warm} %", "growth to the end", "a second")
    table = Table(f"{count:,} quota IDs, and as many recontact codes", columns)
    for stream, growth in growths.items():
        mib = [shown(value, "MiB") for value in (growth.peak, growth.typical(warm), growth.after(warm))]
        table.rows.append((stream, *mib, round(count / growth.seconds)))
    goals = [
        at_most(
            f"memory of {count:,} through {stream}: growth after warm-up",
            CONSTANT,
            growth.after(warm),
            unit="MiB",
            note=f"peak {growth.peak:.1f} MiB",
        )
        for stream, growth in growths.items()
    ]
    return Measured(goals=goals, tables=[table], samples={"count": count, "growths": growths})
