"""The cost of a request by the number of waiting chunks: a stream of up to ten million quota IDs."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

from scoreboard.board import at_most

from speed.canned_server import canned_service
from speed.measuring import Measured, Paired, Spread, Table, Watch, flatness, interleaved
from speed.ours import OurClient
from speed.remote import remote

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from scoreboard.board import Run

    from speed.measuring import Sample

WIDTH: Final = 64
SHORT: Final = (10, 100, 1_000)
LONG: Final = (10_000, 100_000)
SLICE: Final = 500
"""The number of requests in a sample: from a long stream, or from several short ones."""

REFERENCE: Final = 125
NOTE: Final = (
    f"A stream is measured in slices of {SLICE} requests. After each, the same client sends a stream of its "
    f"own of {REFERENCE} chunks, while the long one rests. The goal is about the ratios between these two: a "
    "machine changes its speed from one second to the next, and a stream of ten million takes minutes."
)
_DIFFERENT: Final = 200_000
"""Quota IDs for which the service has responses in memory: making them must not count as the client's time."""


class Streamer(OurClient):
    """Streams quota IDs from a generator."""

    def slices(self, chunks: int) -> list[Paired]:
        """Measure a stream of this many chunks, or several short streams that make a slice together."""
        return self.runner.run(self._measured(chunks))

    async def _measured(self, chunks: int) -> list[Paired]:
        await self._stream(4 * WIDTH)  # the first time, until the client has reached its width
        slices = []
        async for sample in self._samples(chunks):
            watch = Watch()
            await self._stream(REFERENCE)
            slices.append(Paired.of(sample, SLICE, watch.sample(), REFERENCE))
        return slices

    async def _samples(self, chunks: int) -> AsyncIterator[Sample]:
        watch = Watch()
        if chunks < SLICE:
            for _ in range(SLICE // chunks):
                await self._stream(chunks)
            yield watch.sample()
            return
        taken = 0
        async with self.client.stream_bulk_invite(self.member_code, _quota_ids(100 * chunks)) as outcomes:
            async for _ in outcomes:
                taken += 1
                if taken % (100 * SLICE) == 0:
                    while self.client.snapshot().running:  # noqa: ASYNC110  what is on its way is part of it
                        await asyncio.sleep(0.001)
                    yield watch.sample()
                    watch = Watch()

    async def _stream(self, chunks: int) -> None:
        answered = 0
        async with self.client.stream_bulk_invite(self.member_code, _quota_ids(100 * chunks)) as outcomes:
            async for outcome in outcomes:
                answered += outcome.status in {"invited", "rejected"}
        if answered != 100 * chunks:
            raise ValueError(f"{answered} of {100 * chunks} quota IDs were answered")


def _quota_ids(count: int) -> Iterator[int]:
    """Yield this many quota IDs. They repeat after a long distance."""
    return (number % _DIFFERENT + 1 for number in range(count))


def measure(run: Run) -> Measured:
    """Measure streams of all lengths, the long ones in the full run only, interleaved with the short ones."""
    rounds = run.of(2, 5)
    with canned_service() as address, remote(Streamer, address, WIDTH) as process:
        short = {chunks: partial(process.call, "slices", chunks) for chunks in SHORT}
        before = interleaved(short, rounds)
        slices = {chunks: process.call("slices", chunks) for chunks in run.of((), LONG)}
        after = interleaved(short, rounds)
    slices = {chunks: list(chain(*before[chunks], *after[chunks])) for chunks in SHORT} | slices
    columns = ("chunks", "quota IDs", "CPU us a request", "by the reference", "quota IDs a second")
    table = Table(f"Streams, {WIDTH} requests at once", columns)
    for chunks, taken in slices.items():
        spreads = [Spread.of(getattr(each, name) for each in taken) for name in ("cpu", "relative", "ids")]
        table.rows.append((chunks, 100 * chunks, *map(str, spreads)))
    flat = flatness([each.relative for each in taken] for taken in slices.values())
    goal = f"CPU a request, {min(slices):,} to {max(slices):,} chunks queued: highest / lowest"
    return Measured(goals=[at_most(goal, 1.2, flat)], tables=[table], samples={"slices": slices}, notes=[NOTE])
