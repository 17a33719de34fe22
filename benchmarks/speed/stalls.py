"""How long the event loop is blocked while an inventory is received, decoded and handed over."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from bisect import bisect_left
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from scoreboard.board import at_most, shown

from speed.canned_server import Canned, canned_service
from speed.contenders import AIOHTTP, HTTPX, OURS, peer
from speed.inventory import SIZES, inventory
from speed.measuring import Measured, Spread, Table, interleaved, peak_mib, resident_mib
from speed.remote import remote

if TYPE_CHECKING:
    from scoreboard.board import Run

    from speed.canned_server import Address

TICK: Final = 0.001
EDGES: Final = (1, 2, 5, 10, 20, 30, 50, 100, 200, 500, 1000, 2000, 5000)
"""The limits between the bins of the histogram, in milliseconds."""

GET: Final = "get_quotas()"
ITER: Final = "iter_surveys()"
READERS: Final = (GET, ITER, AIOHTTP, HTTPX)
LONGEST: Final = 10.0
NOTE: Final = (
    "A task that sleeps for a millisecond, again and again, notes by how much each sleep was overdrawn. "
    "A gap counts for no more than the CPU time that the process, all its threads, took in it: in the "
    "rest of it the machine had given the core to another process. Threads count, since one that holds "
    "the interpreter's lock stops the loop too. What was read is held until after the measurement. Ours "
    "makes a small call before, since the first call of a process imports things. *Slowest callback*: "
    "what asyncio's debug mode says, in one read more; in wall time, so that here the machine's own "
    "pauses count."
)
_BESIDE: Final = 0.02


@dataclass(frozen=True)
class Reading:
    """The measurements of reading one inventory.

    Attributes:
        stalls: Milliseconds, the twenty longest first.
        bins: The number of stalls below each limit, and the number above the last.
        seconds: The total duration.
    """

    stalls: tuple[float, ...]
    bins: tuple[int, ...]
    seconds: float


class _Slow(logging.Handler):
    """Collects asyncio's log records about slow callbacks."""

    longest = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and isinstance(record.args[-1], float):
            self.longest = max(self.longest, record.args[-1])


class Reader:
    """Reads inventories in this process, with a call of our client or with another client.

    Args:
        what: `get_quotas` or `iter_surveys` of ours, or the name of another client.
        address: The service.
    """

    def __init__(self, what: str, address: Address) -> None:
        self._what = what
        self._access = address[:3]

    def read(self) -> Reading:
        """Read one inventory, next to a task that should run every millisecond."""
        gc.collect()
        return asyncio.run(self._watched())

    async def _watched(self) -> Reading:
        gaps: list[float] = []
        async with self._client() as client:
            if self._what in {GET, ITER}:
                await client.client.get_settings()  # the first call imports modules, which must not count
            ticker = asyncio.create_task(tick(gaps))
            await asyncio.sleep(_BESIDE)
            began = time.perf_counter()
            read = await self._surveys(client)
            seconds = time.perf_counter() - began
            await asyncio.sleep(_BESIDE)  # the work that is left after the handing over
            ticker.cancel()
            del read  # not earlier
        stalls = sorted((round(gap * 1000, 2) for gap in gaps), reverse=True)
        bins = [0] * (len(EDGES) + 1)
        for stall in stalls:
            bins[bisect_left(EDGES, stall)] += 1
        return Reading(tuple(stalls[:20]), tuple(bins), seconds)

    def slowest_callback(self) -> float:
        """Return the milliseconds of the longest callback during one inventory, from asyncio's debug mode."""
        slow = _Slow()
        logger = logging.getLogger("asyncio")
        logger.addHandler(slow)
        logger.propagate = False
        with asyncio.Runner(debug=True) as runner:
            runner.get_loop().slow_callback_duration = TICK
            runner.run(self._alone())
        return slow.longest * 1000

    async def _alone(self) -> None:
        async with self._client() as client:
            await self._surveys(client)

    def peak(self) -> float:
        """Return the growth of memory in MiB while an inventory is read, in a fresh process."""
        return asyncio.run(self._peak())

    async def _peak(self) -> float:
        async with self._client() as client:
            before = resident_mib()
            await self._surveys(client)
            return peak_mib() - before

    def _client(self) -> Any:
        name = OURS if self._what in {GET, ITER} else self._what
        return peer(name)(*self._access, 8)

    async def _surveys(self, client: Any) -> object:
        """Return the inventory, if the caller holds all of it."""
        if self._what != ITER:
            return await client.quotas()
        number = 0
        async for _ in client.client.iter_surveys(include_routables=True):
            number += 1
        return number


async def tick(gaps: list[float]) -> None:
    """Record the delay of each tick.

    If this process did not work during a delay, the cause is the machine, which gave it no core. So a delay
    counts at most as the CPU time of the process, with all its threads, in it.
    """
    while True:
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.sleep(TICK)
        gaps.append(min(time.perf_counter() - wall - TICK, time.process_time() - cpu))


def measure(run: Run) -> Measured:
    """Read the large inventory with both calls of ours and with the other clients, then measure memory."""
    small, large = SIZES
    weighed = run.of((GET, ITER), READERS)
    with canned_service(Canned(inventory(large))) as address, ExitStack() as stack:
        readers = {what: stack.enter_context(remote(Reader, what, address)) for what in READERS}
        takers = {what: partial(each.call, "read") for what, each in readers.items()}
        readings = interleaved(takers, run.of(1, 5))
        callbacks = {what: readers[what].call("slowest_callback") for what in (GET, ITER)}
        at_large = {what: _peak(what, address) for what in weighed}
    with canned_service(Canned(inventory(small))) as address:
        at_small = {what: _peak(what, address) for what in weighed}
    worst = {what: max(reading.stalls[0] for reading in taken) for what, taken in readings.items()}
    columns = (
        "read by",
        "longest stall of all, ms",
        "longest of a read, ms",
        "seconds a read",
        "slowest callback, ms",
    )
    stalls = Table(f"An inventory of {large} MB", columns)
    memory = Table(
        "Memory above that of an open client, at its peak", ("read by", f"{small} MB", f"{large} MB")
    )
    for what, taken in readings.items():
        longest = Spread.of(reading.stalls[0] for reading in taken)
        seconds = Spread.of(reading.seconds for reading in taken)
        stalls.rows.append((what, worst[what], str(longest), str(seconds), callbacks.get(what, "")))
    for what in weighed:
        memory.rows.append((what, shown(at_small[what], "MiB"), shown(at_large[what], "MiB")))
    return Measured(
        goals=[
            at_most(f"longest stall while get_quotas() reads {large} MB", LONGEST, worst[GET], unit="ms"),
            at_most(f"longest stall while iter_surveys() reads {large} MB", LONGEST, worst[ITER], unit="ms"),
        ],
        tables=[stalls, memory],
        samples={"edges_ms": EDGES, "readings": readings, "callbacks_ms": callbacks}
        | {"peak_mib": {small: at_small, large: at_large}},
        notes=[NOTE],
    )


def _peak(what: str, address: Address) -> float:
    with remote(Reader, what, address) as reader:
        peak: float = reader.call("peak")
        return peak
