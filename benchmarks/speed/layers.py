"""Where the CPU time of a bulk request goes: the same requests, through more and more layers of the client.

This uses private parts of the client, to show which layers cause a missed goal.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

from peers.aiohttp_msgspec import AiohttpClient

from sampling_async._pacing.gate import Permit
from sampling_async._pacing.turns import Lane
from sampling_async._protocol.requests import bulk_invite
from speed.canned_server import canned_service
from speed.measuring import Measured, Spread, Table, Watch, interleaved, microseconds, ratio
from speed.ours import OurClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from scoreboard.board import Run

    from sampling_async import BulkInviteResult
    from sampling_async._calls.reports import CallTrack
    from sampling_async._contract.exchange import Call
    from speed.canned_server import Address
    from speed.measuring import Sample

WIDTH: Final = 64
REQUESTS: Final = 100
AIOHTTP: Final = "aiohttp + msgspec, everything"


class Layers(OurClient):
    """Our client, called layer by layer."""

    def __init__(self, address: Address) -> None:
        super().__init__(address, WIDTH)
        self._panel = address.panel_guid
        self._session = self.client._session  # noqa: SLF001
        self._peer: Any = self.runner.run(AiohttpClient(*address[:3], WIDTH).__aenter__())
        self._ids = range(1, REQUESTS * 100 + 1)
        self._calls = [self._call(start) for start in range(1, REQUESTS * 100, 100)]
        self._lane = Lane("bulk_invite")

    def _call(self, start: int) -> Call[Any]:
        return bulk_invite(self._panel, self.member_code, tuple(range(start, start + 100)))

    def _track(self) -> CallTrack:
        return self.client._caller.track("bulk_invite")  # noqa: SLF001

    def close(self) -> None:
        """Close both clients."""
        self.runner.run(self._peer.__aexit__(None, None, None))
        self.runner.run(self.client.aclose())
        self.runner.close()

    def takers(self) -> dict[str, Callable[[], Sample]]:
        """Return for each layer a function that measures it together with all layers below."""
        client = self.client

        async def request(call: Call[Any]) -> None:
            self._call(call.read.args[1][0])  # type: ignore[attr-defined]

        async def exchange(call: Call[Any]) -> None:
            made = self._session._request(call, self._track(), inf)  # noqa: SLF001
            response = await self._session._over.send(made)  # noqa: SLF001
            body = response.extensions["body"]
            async for _ in body:
                pass
            await response.aclose()
            body.release()

        # From here on, what reads a response also gives its connection back.
        async def attempt(call: Call[Any]) -> None:
            track = self._track()
            await self._session.attempt(call, track)
            track.release_connection()

        async def items(call: Call[Any]) -> None:
            track = self._track()
            call.read((await self._session.attempt(call, track)).body)
            track.release_connection()

        async def calls(call: Call[Any]) -> None:
            permit, track = Permit(client._gate, self._lane), self._track()  # noqa: SLF001
            await client._caller.run(call, permit, track)  # noqa: SLF001
            track.release_connection()
            permit.release()

        layers = {
            "the request as bytes": request,
            "+ sockets, llhttp and httpx": exchange,
            "+ limits, closing, translated errors": attempt,
            "+ items, decoded, checked and matched": items,
            "+ retries, permits, the adaptive limit": calls,
        }
        takers = {name: partial(self._sample, partial(self._side_by_side, run)) for name, run in layers.items()}
        takers["+ the fan-out"] = partial(self._sample, self._bulk)
        takers["+ each outcome, created and read: everything"] = partial(self._sample, self._looked_at)
        takers[AIOHTTP] = partial(self._sample, partial(self._peer.bulk, self.member_code, self._ids))
        return takers

    def _sample(self, run: Callable[[], Awaitable[object]]) -> Sample:
        return self.runner.run(self._timed(run))

    async def _timed(self, run: Callable[[], Awaitable[object]]) -> Sample:
        watch = Watch()
        await run()
        return watch.sample()

    async def _bulk(self) -> BulkInviteResult:
        return await self.client.bulk_invite(self.member_code, self._ids)

    async def _looked_at(self) -> None:
        assert sum(outcome.invite is not None for outcome in await self._bulk()) == REQUESTS * 50

    async def _side_by_side(self, run: Callable[[Call[Any]], Awaitable[None]]) -> None:
        left = iter(self._calls)

        async def work() -> None:
            for call in left:
                await run(call)
                await asyncio.sleep(0)  # as in a fan-out, so that requests leave together in all layers

        await asyncio.gather(*(work() for _ in range(WIDTH)))


def measure(run: Run) -> Measured:
    """Measure all layers in one process, interleaved."""
    with canned_service() as address, closing(Layers(address)) as layers:
        takers = layers.takers()
        for take in takers.values():
            take()
        taken = interleaved(takers, run.of(5, 25))
    cpu = {name: microseconds(samples, REQUESTS) for name, samples in taken.items()}
    table = Table(f"Bulk, {WIDTH} wide", ("so far", "CPU us a request", "by aiohttp + msgspec"))
    for name, values in cpu.items():
        table.rows.append((name, str(Spread.of(values)), str(ratio(values, cpu[AIOHTTP]))))
    return Measured([], [table], {"cpu_us": cpu})
