"""Bulks whose requests a service refuses, and services that answer when they are told to."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import doubles
import httpx

from sampling_async import RetryPolicy

ONCE = RetryPolicy(max_attempts=1)
DIRECT = {408, 425, 429, 503}
"""Statuses that prove non-processing if there is no proxy between the client and the service."""


async def bulk(service, quota_ids, chunk_size: int = 100, **options):
    async with doubles.client(service, **options) as client:
        return await client.bulk_invite("m", quota_ids, chunk_size=chunk_size)


async def settled() -> None:
    """Let all tasks run until they wait for the service."""
    for _ in range(50):
        await anyio.lowlevel.checkpoint()


class Slots:
    """A service that responds when told to, and records which calls it got."""

    def __init__(self) -> None:
        self.let_in: list[str] = []
        self._turn = anyio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        is_bulk = request.method == "POST"
        self.let_in.append(request.url.path.split("/")[-2] if is_bulk else "interactive")
        turn = self._turn
        await turn.wait()
        return httpx.Response(200, json=doubles.bulk(request) if is_bulk else [])

    async def answer_all(self, times: int = 1) -> None:
        """Respond to all calls and let the next ones in, this many times."""
        for _ in range(times):
            await settled()
            turn, self._turn = self._turn, anyio.Event()
            turn.set()
        await settled()


async def consume(client, member: str, count: int, **options) -> None:
    async with client.stream_bulk_invite(member, iter(range(1, count)), chunk_size=1, **options) as outcomes:
        async for _ in outcomes:
            pass
