"""How much of what is possible is used behind a gateway that refuses requests, by a rate or by chance."""

from __future__ import annotations

import itertools
from random import Random
from statistics import mean
from typing import TYPE_CHECKING, Any, Final

import anyio

from sampling_async import InviteRequest, SamplingClient
from scoreboard import virtual
from scoreboard.board import Row, Run, at_least, exactly
from scoreboard.testkit import tool

if TYPE_CHECKING:
    from collections.abc import Iterable

WIDTH: Final = 16
FREE: Final = 160.0
"""Requests a second of one client without any refusal."""
RATE: Final = 20.0
BURST: Final = 5
SECONDS: Final = 60.0


def rows(run: Run) -> list[Row]:
    """Measure the first minute of fan-outs whose requests are refused."""
    found: list[Row] = []
    for retry_after, how in ((None, "429"), (1, "429 with Retry-After: 1")):
        for clients, who in ((1, "one client"), (5, "five clients")):
            accepted, given_up = _measured(run, clients, rate=RATE, burst=BURST, retry_after=retry_after)
            name = f"{RATE:.0f} requests a second allowed, burst {BURST}, {how}, {who}"
            found.append(at_least(f"{name}: of the allowed rate", 0.9, accepted / RATE))
            found.append(exactly("the same: IDs given up", 0, given_up))
        for share in (0.02, 0.05):
            accepted, given_up = _measured(run, 1, share=share, retry_after=retry_after)
            # If each refusal costs its second, one after the other.
            possible = (1 - share) / (1 / FREE + share * (retry_after or 0))
            name = f"{100 * share:.0f} % refused by chance, {how}"
            note = f"{accepted:.1f} of {possible:.1f} a second, {WIDTH} requests at once"
            found.append(at_least(f"{name}: of the possible rate", 0.8, accepted / possible, note=note))
            found.append(exactly("the same: IDs given up", 0, given_up))
    return found


def _measured(run: Run, clients: int, **gateway: Any) -> tuple[float, int]:
    """Return the accepted requests a second, the mean over several seeds, and the IDs that were given up."""
    trials = [
        virtual.run(_trial(Random(f"{run.seed}/{number}"), clients, **gateway))
        for number in range(run.of(3, 10))
    ]
    return mean(accepted for accepted, _ in trials), sum(given_up for _, given_up in trials)


async def _trial(random: Random, clients: int, **gateway: Any) -> tuple[float, int]:
    models, known = tool("virtual_time"), tool("doubles")
    service = models.ModelService(
        workers=((0.0, clients * WIDTH),), base=WIDTH / FREE, per_id=0.0, random=random
    )
    model = models.ModelGateway(service, random, **gateway)
    given_up = 0

    async def fan_out(requests: Iterable[InviteRequest]) -> None:
        nonlocal given_up
        client = SamplingClient(
            "https://service.example",
            panel_guid=known.PANEL,
            api_key=known.KEY,
            max_concurrency=WIDTH,
            transport=model,
            clock=anyio.current_time,
            sleep=anyio.sleep,
            random=random.random,
        )
        async with client, client.fan_out(requests) as outcomes:
            async for outcome in outcomes:
                given_up += outcome.status in {"not_sent", "unknown"}

    with anyio.move_on_after(SECONDS):
        async with anyio.create_task_group() as tasks:
            for number in range(clients):
                tasks.start_soon(fan_out, (InviteRequest(f"m{number}-{at}", [2]) for at in itertools.count()))
    return len(model.accepted) / SECONDS, given_up
