"""What a campaign's requests cost: the run of a plan, and a plain fan-out of the same requests."""

from __future__ import annotations

import shutil
import tempfile
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

from scoreboard.board import at_most

from sampling_async import InviteRequest
from sampling_async.campaign import LESSONS
from sampling_async.campaign._ledger import CampaignLedger
from sampling_async.campaign._ledger_file import PlannedQuota
from sampling_async.campaign._run import CampaignRun
from speed.canned_server import canned_service
from speed.measuring import Measured, Spread, Table, Watch, interleaved, microseconds, ratio
from speed.ours import OurClient
from speed.remote import remote

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from scoreboard.board import Run

    from sampling_async import InviteOutcome
    from speed.measuring import Sample

WIDTHS: Final = (8, 64)
IDS: Final = 5
_MOST: Final = 1.8
"""Times a plain fan-out."""

NOTE: Final = (
    f"Each member has {IDS} planned pairs, all of which are invited; no two members share a quota. The ledger "
    "is in the folder for temporary files. Planning is not part of this: see the page of campaigns."
)


class Campaigner(OurClient):
    """Runs a plan, and the same requests without one, in the same process."""

    def prepare(self, members: int) -> None:
        """Write the plan, and reach the full width."""
        self._folder, self._copies = Path(tempfile.mkdtemp()), count()
        quota_ids = {f"m{at:06}": [10 * at + step for step in range(2, 12, 2)] for at in range(members)}
        self._requests = [InviteRequest(code, ids) for code, ids in quota_ids.items()]
        ledger = CampaignLedger(self._folder / "planned")
        ledger.open(make=True)
        with ledger.planning() as plan:
            plan.add_quotas(
                [PlannedQuota(id_, id_, 1, "", None, 1, 1.0, 0.5) for ids in quota_ids.values() for id_ in ids]
            )
            numbers = plan.add_members([*quota_ids], [[]] * members)
            pairs = [
                (number, id_, rank, 1)
                for number, ids in zip(numbers, quota_ids.values(), strict=True)
                for rank, id_ in enumerate(ids)
            ]
            plan.add_pairs(*zip(*pairs, strict=True))
        ledger.close()
        self.cost("plain")

    def cost(self, kind: str) -> Sample:
        """Return the cost of a run or of the fan-out."""
        path = self._folder / f"run-{next(self._copies)}"
        shutil.copy(self._folder / "planned", path)
        watch = Watch()
        self.runner.run(self._plain() if kind == "plain" else self._run(path))
        return watch.sample()

    def finish(self) -> None:
        """Remove the ledgers."""
        shutil.rmtree(self._folder)

    async def _plain(self) -> None:
        async with self.client.fan_out(self._requests) as outcomes:
            await self._count(outcomes)

    async def _run(self, path: Path) -> None:
        run = CampaignRun(
            self.client,
            CampaignLedger(path),
            LESSONS,
            is_open=lambda _: True,
            max_turns=3,
            retry_seconds=60.0,
            wall_clock=time.time,
            clock=time.monotonic,
        )
        async with run:
            await self._count(run)

    async def _count(self, outcomes: AsyncIterable[InviteOutcome]) -> None:
        invited = 0
        async for outcome in outcomes:
            invited += outcome.status == "invited"
        if invited != len(self._requests) * IDS:
            raise ValueError(f"{invited} of {len(self._requests) * IDS} pairs were invited")


def measure(run: Run) -> Measured:
    """Measure both at each width, interleaved."""
    members, rounds = run.of((1_000, 3), (5_000, 7))
    table = Table(f"{members:,} requests of {IDS} quota IDs", ("width", "kind", "CPU us a request", "by plain"))
    goals, samples = [], {}
    with canned_service() as address:
        for width in WIDTHS:
            with remote(Campaigner, address, width) as process:
                process.call("prepare", members)
                kinds = {kind: partial(process.call, "cost", kind) for kind in ("plain", "campaign")}
                samples[width] = interleaved(kinds, rounds)
                process.call("finish")
            cost = {kind: microseconds(each, members) for kind, each in samples[width].items()}
            for kind, each in cost.items():
                table.rows.append((width, kind, str(Spread.of(each)), str(ratio(each, cost["plain"]))))
            times = ratio(cost["campaign"], cost["plain"]).median
            goals.append(
                at_most(f"CPU of a campaign's request, {width} wide, by one of a fan-out", _MOST, times)
            )
    return Measured(goals=goals, tables=[table], samples={"samples": samples}, notes=[NOTE])
