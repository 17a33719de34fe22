"""Clicks through the real `SurveyRouter`, with its store, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final

from scoreboard import virtual
from scoreboard.board import Row, at_least, at_most, exactly
from scoreboard.testkit import tool

from pressure import goals
from pressure.askers import URL
from pressure.cells import SHORT_STORM, STORM_OF_503, WORKERS, Cell
from pressure.possible import possible
from pressure.service import ServiceModel
from pressure.trial import Seen, arrivals
from sampling_async import SamplingClient

if TYPE_CHECKING:
    import httpx

    from sampling_async.routing import SurveyRouter

_HERD: Final = 500
_WITHIN: Final = 2.0

CASES: Final = {
    "storm of 429": Cell(SHORT_STORM, 0.5, _WITHIN, seconds=20.0),
    "storm of 503": Cell(STORM_OF_503, 0.5, _WITHIN, seconds=20.0),
    "load 2": Cell(WORKERS, 2.0, _WITHIN, seconds=8.0),
    "load 10": Cell(WORKERS, 10.0, _WITHIN, seconds=8.0),
    "herd": Cell(WORKERS, 1.0, _WITHIN, seconds=0.0),
}
"""Each with the cell whose service and load it has."""


@dataclass
class Routed:
    """What routers did.

    Attributes:
        seen: The clicks and requests; an answered click has a link.
        unused: Invites that no click got.
        invited: Invites in all.
        links: Different links that were given.
    """

    seen: Seen
    unused: int = 0
    invited: int = 0
    links: set[str] = field(default_factory=set)


def rows(case: str, seed: int) -> list[Row]:
    """Return the rows of one case."""
    cell = CASES[case]
    if case == "herd":
        herd = routed(cell, [0.0] * _HERD, seed, members=1)
        share = sum(has_link for _, _, has_link in herd.seen.clicks) / _HERD
        name = f"router, {_HERD} clicks of one member at once"
        return [
            exactly(f"{name}: invites requested", 1, len(herd.seen.sent)),
            at_least(f"{name}: share that gets the link", 1.0, share),
        ]
    found = routed(cell, arrivals(cell.rate, cell.seconds, seed), seed)
    seen, name = found.seen, f"router, {case}"
    unused = 100 * found.unused / max(1, found.invited)
    note = f"{len(seen.answered)} of {seen.possible.count}, {cell.rate:g} clicks a second, {_WITHIN:g} s each"
    if seen.recovered is None:
        first = at_least(f"{name}: links by what was possible", goals.WORST_GOODPUT, seen.goodput, note=note)
    else:
        first = at_most(f"{name}: recovered after", goals.RECOVERED, seen.recovered, unit="s", note=note)
    return [first, at_most("the same: invites that no click got", goals.WASTED, unused, unit="%")]


def routed(cell: Cell, came: list[float], seed: int, *, members: int | None = None) -> Routed:
    """Route clicks; with `members`, they are of so many only."""
    found = Routed(Seen(cell, "router"))
    virtual.run(_route(found, came, seed, members or len(came)))
    found.seen.possible = possible(
        cell.service,
        came,
        deadline=cell.deadline,
        has_bulk=False,
        until=cell.seconds,
        width=cell.width,
        seed=seed,
    )
    return found


async def _route(found: Routed, came: list[float], seed: int, members: int) -> None:
    loop, kit, known = asyncio.get_running_loop(), tool("virtual_router"), tool("doubles")
    cell, began, model = found.seen.cell, loop.time(), ServiceModel(found.seen.cell.service, seed)

    def client(transport: httpx.AsyncBaseTransport) -> SamplingClient:
        options: dict[str, Any] = {"max_concurrency": cell.width, "clock": loop.time, "sleep": asyncio.sleep}
        options |= {"panel_guid": known.PANEL, "api_key": known.KEY}
        random = Random(f"client {seed}").random
        return SamplingClient(URL, transport=transport, random=random, **options)

    async def click(router: SurveyRouter, number: int) -> None:
        at = loop.time()
        route = await router.route(kit.member_of(number % members), within=cell.deadline)
        found.seen.clicks.append((at, loop.time(), route.url is not None))
        if route.url is not None:
            found.links.add(route.url)

    async with kit.virtual_router(client, model) as router, asyncio.TaskGroup() as clicks:
        for number, at in enumerate(came):
            if at > loop.time() - began:
                await asyncio.sleep(at - (loop.time() - began))
            clicks.create_task(click(router, number))
    found.unused, found.invited = router.status.unused, router.status.invited
    found.seen.sent, found.seen.refused, found.seen.wasted = model.sent, model.refused, model.wasted
    found.seen.hold_ended = model.held_until
