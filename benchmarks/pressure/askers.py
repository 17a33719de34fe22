"""Who is put through the cells: this client, over a modelled transport. `peers.py` has the others."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, Final

import httpx
from scoreboard.testkit import tool

from sampling_async import InviteRequest, SamplingClient, SamplingError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pressure.cells import Cell
    from pressure.service import ServiceModel

QUOTA_ID: Final = 2
"""A quota that invites."""

URL: Final = "https://service.example"
_CHUNK: Final = 4
_MEMBER_IDS: Final = 40
_ANSWERED: Final = frozenset({"invited", "rejected"})


class Asker(ABC):
    """A client under test, or a peer."""

    @abstractmethod
    async def click(self, member: str, deadline: float) -> bool:
        """Request one invite, and return whether there was a response in time."""

    @abstractmethod
    def bulks(self) -> list[AsyncIterator[bool]]:
        """Return the parts of an endless fan-out: each yields whether a request was answered."""

    @property
    def is_on_hold(self) -> bool:
        """Whether it has noticed an outage, so that only probes are sent."""
        return False


class OurAsker(Asker):
    """This client with its default options: one, two views of one, or four shares of one."""

    def __init__(
        self, clients: list[SamplingClient], bulk_clients: list[SamplingClient], *, cancels: bool
    ) -> None:
        self._clients, self._bulk_clients, self._turn = clients, bulk_clients, count()
        self._cancels = cancels

    async def click(self, member: str, deadline: float) -> bool:
        """Request one invite; the clients take turns."""
        client = self._clients[next(self._turn) % len(self._clients)]
        try:
            if self._cancels:
                async with asyncio.timeout(deadline):
                    await client.generate_invite(member, QUOTA_ID)
            else:
                await client.generate_invite(member, QUOTA_ID, deadline=deadline)
        except (SamplingError, TimeoutError):
            return False
        return True

    def bulks(self) -> list[AsyncIterator[bool]]:
        """Return a fan-out of each client that has a gate of its own."""
        return [self._fan_out(client, number) for number, client in enumerate(self._bulk_clients)]

    async def _fan_out(self, client: SamplingClient, number: int) -> AsyncIterator[bool]:
        ids = [2 * each for each in range(1, _MEMBER_IDS + 1)]
        requests = (InviteRequest(f"bulk-{number}-{member}", ids) for member in count())
        answered = seen = 0
        async with client.fan_out(requests, chunk_size=_CHUNK) as outcomes:
            async for outcome in outcomes:
                answered += outcome.status in _ANSWERED
                seen += 1
                if seen == _CHUNK:
                    yield answered == seen
                    answered = seen = 0

    @property
    def is_on_hold(self) -> bool:
        """Whether one of them sends probes only."""
        return any(client.snapshot().breaker == "open" for client in self._bulk_clients)


@asynccontextmanager
async def ours(model: ServiceModel, cell: Cell, seed: int) -> AsyncIterator[Asker]:
    """Open this client."""
    known, loop = tool("doubles"), asyncio.get_running_loop()
    options: dict[str, Any] = {
        "panel_guid": known.PANEL,
        "api_key": known.KEY,
        "max_concurrency": cell.width,
        "clock": loop.time,
        "sleep": asyncio.sleep,
        "random": Random(f"client {seed}").random,
    }
    async with AsyncExitStack() as stack:
        if cell.clients == "shares":
            http_client = await stack.enter_async_context(httpx.AsyncClient(transport=model))
            whole = SamplingClient(URL, http_client=http_client, **options)
            shares = [await stack.enter_async_context(whole.share(of=4)) for _ in range(4)]
            yield OurAsker(shares, shares, cancels=cell.is_cancelled)
            return
        client = await stack.enter_async_context(SamplingClient(URL, transport=model, **options))
        views = [client, client.with_options(name="clicks")] if cell.clients == "views" else [client]
        yield OurAsker(views, [client], cancels=cell.is_cancelled)
