"""A service that drops from four workers to one, in virtual time: how many responses come too late."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio
from peers.common import Address, Options, Peer
from peers.naive import NaiveClient
from peers.ours import OurClient

from scoreboard import virtual
from scoreboard.board import Row, Run, at_most, published
from scoreboard.testkit import tool

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNKS: Final = 100
CHUNK: Final = 100
STEADY: Final = ((0.0, 4),)
FALLING: Final = ((0.0, 4), (60.0, 1))


def rows(_run: Run) -> list[Row]:
    """Measure both clients with their default timeouts."""
    fallen, fallen_seconds, fallen_work = virtual.run(_measure(OurClient, FALLING))
    naive, naive_seconds, naive_work = virtual.run(_measure(NaiveClient, FALLING))
    steady, steady_seconds, _ = virtual.run(_measure(OurClient, STEADY))
    calm, calm_seconds, _ = virtual.run(_measure(NaiveClient, STEADY))
    note = f"{CHUNKS} chunks of {CHUNK} IDs, 10.5 s of work each, 4 workers, 1 from the 60th second on"
    return [
        at_most("`unknown` in the brown-out", 5.0, fallen, naive, unit="%", note=f"{note}; naive: `failed`"),
        at_most("`unknown` with four workers all the time", 0.0, steady, calm, unit="%"),
        published("requests that the service worked on in the brown-out", fallen_work, naive_work),
        published("brown-out, in all", fallen_seconds, naive_seconds, unit="s", note="virtual time"),
        published("four workers, in all", steady_seconds, calm_seconds, unit="s", note="virtual time"),
    ]


async def _measure(peer: type[Peer], workers: Sequence[tuple[float, int]]) -> tuple[float, float, int]:
    """Return the percentage of IDs without a clear outcome, the duration, and the number of requests."""
    service, known = tool("virtual_time").ModelService(workers), tool("doubles")
    address = Address("http://localhost", known.PANEL, known.KEY)
    async with peer(address, Options(transport=service)) as client:
        outcomes = await client.invite_all([("m1", range(1, CHUNKS * CHUNK + 1))])
    vague = sum(outcome.status in {"unknown", "failed"} for outcome in outcomes)
    return 100 * vague / len(outcomes), anyio.current_time(), len(service.started)
