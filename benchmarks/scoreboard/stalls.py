"""How long inputs of any kind block the event loop, and how soon a fan-out over them can be left.

Objects that existed before are hidden from the garbage collector (`gc.freeze`): its pauses for them are the
host's own.
"""

from __future__ import annotations

import asyncio
import gc
import time
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import httpx

from sampling_async import InviteRequest, SamplingClient
from scoreboard.board import Row, Run, at_most, published
from scoreboard.testkit import tool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MOST_STALL: Final = 30.0
MOST_STOP: Final = 50.0
TICK: Final = 0.001
ROUNDS: Final = 3


def rows(run: Run) -> list[Row]:
    """Measure each input alone."""
    many = run.of(1_000_000, 3_000_000)
    same, distinct = [5] * many, list(range(1, 1_000_001))
    inputs: dict[str, Callable[[SamplingClient], Awaitable[object]]] = {
        "`fan_out` of requests without IDs, without end": lambda client: _streamed(
            client.fan_out(repeat(InviteRequest("m1", ())))
        ),
        "`stream_bulk_invite` of `repeat(5)`": lambda client: _streamed(
            client.stream_bulk_invite("m1", repeat(5))
        ),
        f"`stream_bulk_invite` of one ID {many:,} times": lambda client: _streamed(
            client.stream_bulk_invite("m1", same)
        ),
        f"`bulk_invite` of one ID {many:,} times": lambda client: client.bulk_invite("m1", same),
        "`bulk_invite` of 1,000,000 IDs, deadline 1 s": lambda client: client.bulk_invite(
            "m1", distinct, deadline=1
        ),
        "`stream_bulk_invite` of 1,000,000 IDs, deadline 1 s": lambda client: _streamed(
            client.stream_bulk_invite("m1", distinct, deadline=1)
        ),
    }
    found = {name: _least(operation) for name, operation in inputs.items()}
    if run.version == "long":
        found["a journalled request of 1,000,000 IDs that is resumed"] = _resumed(distinct)
    stalls = [_row(run, f"longest stall: {name}", MOST_STALL, stall) for name, (stall, _) in found.items()]
    stops = [
        _row(run, f"until it was left: {name}", MOST_STOP, stop)
        for name, (_, stop) in found.items()
        if stop is not None
    ]
    return stalls + stops


def _row(run: Run, name: str, most: float, milliseconds: float) -> Row:
    """Return a row with a goal in the long version only: the short one runs on busy machines."""
    if run.version == "short":
        return published(name, milliseconds, unit="ms")
    return at_most(name, most, milliseconds, unit="ms")


def _least(operation: Callable[[SamplingClient], Awaitable[object]]) -> tuple[float, float | None]:
    """Return the minimum of some rounds: other work of the machine only makes stalls longer."""
    rounds = [asyncio.run(_measured(operation)) for _ in range(ROUNDS)]
    stops = [stop for _, stop in rounds if stop is not None]
    return min(stall for stall, _ in rounds), min(stops, default=None)


def _resumed(quota_ids: list[int]) -> tuple[float, None]:
    """Return the longest stall while the outcomes of an earlier run are recalled."""
    request = InviteRequest("m1", quota_ids)
    with TemporaryDirectory() as folder:

        def run(client: SamplingClient) -> Awaitable[None]:
            return _streamed(client.fan_out([request], journal=Path(folder, "journal")))

        asyncio.run(_measured(run, seconds=600))
        return min(asyncio.run(_measured(run, seconds=600))[0] for _ in range(ROUNDS)), None


async def _streamed(outcomes: Any) -> None:
    async with outcomes:
        async for _ in outcomes:
            pass


async def _measured(
    operation: Callable[[SamplingClient], Awaitable[object]], *, seconds: float = 2.5
) -> tuple[float, float | None]:
    """Return the longest stall, and the time to leave a fan-out that did not end by itself, in milliseconds."""
    known = tool("doubles")

    async def answer(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.001)
        return httpx.Response(200, json=known.bulk(request))

    async with SamplingClient(
        "https://service.example",
        panel_guid=known.PANEL,
        api_key=known.KEY,
        transport=httpx.MockTransport(answer),
    ) as client:
        await client.bulk_invite("warm", range(1, 301))
        gc.collect()
        gc.freeze()
        watch = asyncio.ensure_future(_longest_stall())
        await asyncio.sleep(0.05)
        task = asyncio.ensure_future(operation(client))
        await asyncio.wait([task], timeout=seconds)
        stop = None
        if not task.done():
            task.cancel()
            began = time.perf_counter()
            await asyncio.wait([task])
            stop = (time.perf_counter() - began) * 1e3
        watch.cancel()
        await asyncio.wait([watch])
    return max(_STALLS) * 1e3, stop


_STALLS: Final[list[float]] = []


async def _longest_stall() -> None:
    _STALLS[:] = [0.0]
    before = time.perf_counter()
    while True:
        await asyncio.sleep(TICK)
        now = time.perf_counter()
        _STALLS[0] = max(_STALLS[0], now - before - TICK)
        before = now
