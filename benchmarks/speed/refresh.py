"""How long the event loop is blocked while a live index takes a new inventory of 8,000 quotas."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import TYPE_CHECKING, Final

import httpx
from scoreboard.board import at_most

from sampling_async import SamplingClient, to_json
from sampling_async.matching import LiveIndex
from sampling_async.simulator import Simulator
from speed.measuring import Measured, Table
from speed.remote import fresh
from speed.stalls import tick

if TYPE_CHECKING:
    from scoreboard.board import Run

SURVEYS: Final = 3_400
CHANGED: Final = 300
"""Surveys that are another length in each new inventory."""

_MOST: Final = 30.0
_SETTLED: Final = 0.4
NOTE: Final = (
    f"Each refresh changes {CHANGED} of {SURVEYS:,} surveys. The responses come from a transport of the "
    "process. Stalls are measured as in *Stalls*. *Frozen*: the host has called `gc.freeze()` after its start."
)


class Service:
    """A service whose inventory changes. It keeps texts, which cost a garbage collection nothing."""

    def __init__(self) -> None:
        inventory = json.loads(to_json(Simulator(seed=3, surveys=SURVEYS).inventory))
        self._surveys = [json.dumps(survey) for survey in inventory.pop("Surveys")]
        self._head = json.dumps(inventory).removesuffix("}")
        self._start = 0
        self.change()

    def change(self) -> None:
        """Change the next surveys."""
        for at in range(self._start, min(self._start + CHANGED, SURVEYS)):
            survey = json.loads(self._surveys[at])
            survey["LOI"] = survey["LOI"] % 60 + 1
            self._surveys[at] = json.dumps(survey)
        self._start = (self._start + CHANGED) % SURVEYS
        self._body = f'{self._head}, "Surveys": [{", ".join(self._surveys)}]}}'.encode()

    def __call__(self, _: httpx.Request) -> httpx.Response:
        """Respond with the inventory."""
        return httpx.Response(200, content=self._body)


async def _longest(refreshes: int, *, is_frozen: bool) -> list[float]:
    """Return the longest stall in each refresh, in milliseconds."""
    service = Service()
    client = SamplingClient(
        "https://service.example",
        panel_guid="11111111-2222-4333-8444-555555555555",
        api_key="99999999-8888-4777-8666-555555555555",
        transport=httpx.MockTransport(service),
    )
    longest = []
    async with client, client.watch_quotas() as watch, LiveIndex(watch) as live:
        await live.ready()
        gc.collect()
        if is_frozen:
            gc.freeze()
        for _ in range(refreshes):
            service.change()
            await asyncio.sleep(_SETTLED)
            gaps: list[float] = []
            before, ticker = live.index, asyncio.create_task(tick(gaps))
            await watch.refresh()
            while live.index is before:  # noqa: ASYNC110  it has no event for this
                await asyncio.sleep(0.01)
            await asyncio.sleep(_SETTLED)
            ticker.cancel()
            longest.append(1000 * max(gaps))
    return longest


def _measured(refreshes: int, is_frozen: bool) -> list[float]:  # noqa: FBT001
    return asyncio.run(_longest(refreshes, is_frozen=is_frozen))


def measure(run: Run) -> Measured:
    """Measure refreshes in a process of their own, and in one whose host has frozen its objects."""
    refreshes = run.of(5, 20)
    taken = {frozen: fresh(_measured, refreshes, frozen, limit=300.0) for frozen in (False, True)}
    table = Table("The longest stall in a refresh, ms", ("host", "of all", "half within"))
    for frozen, stalls in taken.items():
        name = "has frozen its objects" if frozen else "as Python is"
        table.rows.append((name, round(max(stalls), 1), round(sorted(stalls)[refreshes // 2], 1)))
    goal = at_most("longest stall in a refresh of a live index", _MOST, max(taken[False]), unit="ms")
    return Measured(goals=[goal], tables=[table], samples={"stalls_ms": taken}, notes=[NOTE])
