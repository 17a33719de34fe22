"""The gain of reading ahead, if the consumer of the codes is as slow as the service."""

from __future__ import annotations

import asyncio
import statistics
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from scoreboard.board import at_least

from sampling_async.simulator import Latency
from speed.canned_server import Canned, canned_service
from speed.measuring import Measured, Spread, Table, interleaved
from speed.ours import OurClient
from speed.remote import remote

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from scoreboard.board import Run

SERVICE: Final = Latency(a=0.02)
CODES_A_PAGE: Final = 1_000
QUOTA: Final = 1
PLAIN: Final = "recontact_members"
AHEAD: Final = "stream_recontact_members"


class Consumer(OurClient):
    """Reads codes, and works on each page for as long as the service needs to make it."""

    def page_seconds(self) -> float:
        """Return the time to read a page. From then on, the work on each page takes that long."""
        self._work = self.runner.run(self._page_seconds())
        return self._work

    async def _page_seconds(self) -> float:
        pages = self.client.recontact_pages(QUOTA, max_results=CODES_A_PAGE)
        times = [time.perf_counter() async for _ in pages]
        return statistics.median(after - before for before, after in pairwise(times))

    def pages_a_second(self, how: str, pages: int) -> float:
        """Read the whole list, which has this many codes."""
        return self.runner.run(self._pages_a_second(how, pages))

    async def _pages_a_second(self, how: str, pages: int) -> float:
        began = time.perf_counter()
        if how == AHEAD:
            async with self.client.stream_recontact_members(QUOTA, max_results=CODES_A_PAGE) as codes:
                count = await self._work_on(codes)
        else:
            count = await self._work_on(self.client.recontact_members(QUOTA, max_results=CODES_A_PAGE))
        if count != pages * CODES_A_PAGE:
            raise ValueError(f"{count} codes were read")
        return pages / (time.perf_counter() - began)

    async def _work_on(self, codes: AsyncIterator[str]) -> int:
        count = 0
        async for _ in codes:
            count += 1
            if count % CODES_A_PAGE == 0:
                await asyncio.sleep(self._work)
        return count


def measure(run: Run) -> Measured:
    """Read the same list with and without reading ahead."""
    pages = run.of(30, 60)
    service = canned_service(Canned(codes=pages * CODES_A_PAGE, latency=SERVICE))
    with service as address, remote(Consumer, address) as consumer:
        page_seconds = consumer.call("page_seconds")
        takers = {how: partial(consumer.call, "pages_a_second", how, pages) for how in (PLAIN, AHEAD)}
        samples = interleaved(takers, run.of(2, 7))
    faster = Spread.of(ahead / plain for plain, ahead in zip(samples[PLAIN], samples[AHEAD], strict=True))
    title = (
        f"{pages} pages of {CODES_A_PAGE:,} codes; to read and to work on, {page_seconds * 1000:.0f} ms each"
    )
    table = Table(title, ("call", "pages a second"))
    table.rows += [(how, str(Spread.of(taken))) for how, taken in samples.items()]
    return Measured(
        goals=[at_least("pages a second: recontact_members is 1, reading ahead", 1.8, faster.median)],
        tables=[table],
        samples={"page_seconds": page_seconds, "pages_a_second": samples},
    )
