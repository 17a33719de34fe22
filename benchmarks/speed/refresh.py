"""How long the event loop is blocked while a live index takes a new inventory of 8,000 quotas.

Beside it, the index is compared with what is open: after each refresh, and after quotas were closed by hand, as
notifications close them.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import TYPE_CHECKING, Final

import httpx
from scoreboard.board import at_most, exactly

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

LEFT_OUT: Final = 10
"""Surveys that are closed in each new inventory, others each time."""

CLOSED: Final = 10
"""Quotas that are closed by hand after each."""

_MOST: Final = 30.0
_SETTLED: Final = 0.4
NOTE: Final = (
    f"Each refresh changes {CHANGED} of {SURVEYS:,} surveys, and closes {LEFT_OUT}. The responses come from a "
    "transport of the process. Stalls are measured as in *Stalls*. *Frozen*: the host has called `gc.freeze()` "
    "after its start."
)


class Service:
    """A service whose inventory changes. It keeps texts, which cost a garbage collection nothing."""

    def __init__(self) -> None:
        inventory = json.loads(to_json(Simulator(seed=3, surveys=SURVEYS).inventory))
        self._surveys = [json.dumps(survey) for survey in inventory.pop("Surveys")]
        self._quotas = [[quota["QuotaID"] for quota in json.loads(each)["Quotas"]] for each in self._surveys]
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
        is_open = [not self._start <= at < self._start + LEFT_OUT for at in range(SURVEYS)]
        surveys = ", ".join(compress(self._surveys, is_open))
        self._body = f'{self._head}, "Surveys": [{surveys}]}}'.encode()
        self.open_ids = set(chain.from_iterable(compress(self._quotas, is_open)))

    def __call__(self, _: httpx.Request) -> httpx.Response:
        """Respond with the inventory."""
        return httpx.Response(200, content=self._body)


@dataclass
class Taken:
    """Of each refresh the longest stall, and the milliseconds until its index was there; and what was wrong."""

    stalls: list[float] = field(default_factory=list)
    index: list[float] = field(default_factory=list)
    moments: int = 0
    wrong: int = 0


async def _taken(refreshes: int, *, is_frozen: bool) -> Taken:
    service = Service()
    client = SamplingClient(
        "https://service.example",
        panel_guid="11111111-2222-4333-8444-555555555555",
        api_key="99999999-8888-4777-8666-555555555555",
        transport=httpx.MockTransport(service),
    )
    taken = Taken()
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
            began = time.perf_counter()
            while live.index is before:  # noqa: ASYNC110  it has no event for this
                await asyncio.sleep(0.001)
            taken.index.append(1000 * (time.perf_counter() - began))
            await asyncio.sleep(_SETTLED)
            ticker.cancel()
            taken.stalls.append(1000 * max(gaps))
            taken.wrong += set(live.index.quota_ids) != service.open_ids
            for quota_id in [*service.open_ids][:CLOSED]:
                watch.close_quota(quota_id)
                taken.wrong += quota_id in live.index.quota_ids
            taken.moments += 1 + CLOSED
    return taken


def _measured(refreshes: int, is_frozen: bool) -> Taken:  # noqa: FBT001
    return asyncio.run(_taken(refreshes, is_frozen=is_frozen))


def measure(run: Run) -> Measured:
    """Measure refreshes in a process of their own, and in one whose host has frozen its objects."""
    refreshes = run.of(5, 20)
    taken = {frozen: fresh(_measured, refreshes, frozen, limit=300.0) for frozen in (False, True)}
    columns = ("host", "of all", "half within", "from the inventory to its index, at most")
    table = Table("The longest stall in a refresh, ms", columns)
    for frozen, each in taken.items():
        name = "has frozen its objects" if frozen else "as Python is"
        half = sorted(each.stalls)[refreshes // 2]
        table.rows.append((name, round(max(each.stalls), 1), round(half, 1), round(max(each.index), 1)))
    moments, wrong = (sum(getattr(each, name) for each in taken.values()) for name in ("moments", "wrong"))
    goals = [
        at_most("longest stall in a refresh of a live index", _MOST, max(taken[False].stalls), unit="ms"),
        exactly("moments at which the index did not have what is open", 0, wrong, note=f"of {moments:,}"),
    ]
    return Measured(goals=goals, tables=[table], samples={"refreshes": taken}, notes=[NOTE])
