"""Attempts per call if a share of them fails, in virtual time: a client must not add load in an outage."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

import httpx
from peers.common import Options, Peer
from peers.naive import NaiveClient
from peers.ours import OurClient

from sampling_async import SamplingError
from scoreboard import virtual
from scoreboard.board import Row, Run, at_most
from scoreboard.replies import NOWHERE, SETTINGS, ok

if TYPE_CHECKING:
    from collections.abc import Callable

GOALS: Final = {0.01: 1.02, 0.10: 1.12, 0.30: 1.25, 1.00: 1.05}


class Failing(httpx.AsyncBaseTransport):
    """A transport that answers Get Settings, or 503 with some probability."""

    def __init__(self, chance: float, random: Callable[[], float]) -> None:
        self._chance = chance
        self._random = random
        self.attempts = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Count and answer a request."""
        self.attempts += 1
        return httpx.Response(503, request=request) if self._random() < self._chance else ok(SETTINGS)


def rows(run: Run) -> list[Row]:
    """Measure both clients at every failure rate."""
    calls = run.of(2_000, 20_000)
    rows = []
    for chance, goal in GOALS.items():
        ours, our_share = virtual.run(_measure(OurClient, chance, calls, run.seed))
        naive, naive_share = virtual.run(_measure(NaiveClient, chance, calls, run.seed))
        note = f"{calls:,} calls; succeeded: ours {our_share:.1%}, naive {naive_share:.1%}"
        rows.append(at_most(f"attempts a call, {chance:.0%} of them fail", goal, ours, naive, note=note))
    return rows


async def _measure(peer: type[Peer], chance: float, calls: int, seed: int) -> tuple[float, float]:
    """Return the attempts per call, and the share of successful calls."""
    service, good = Failing(chance, Random(seed).random), 0
    async with peer(NOWHERE, Options(transport=service)) as client:
        for _ in range(calls):
            try:
                await client.settings()
            except (SamplingError, httpx.HTTPError):
                continue
            good += 1
    return service.attempts / calls, good / calls
