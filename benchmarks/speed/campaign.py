"""What a campaign's requests cost: the run of a plan, and a plain fan-out of the same requests."""

from __future__ import annotations

import shutil
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sampling_async import InviteRequest
from sampling_async.campaign import LESSONS
from sampling_async.campaign._ledger import CampaignLedger
from sampling_async.campaign._ledger_file import PlannedQuota
from sampling_async.campaign._run import CampaignRun
from speed.beside_plain import IDS, beside_plain
from speed.measuring import Measured, Watch
from speed.ours import OurClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from scoreboard.board import Run

    from sampling_async import InviteOutcome
    from speed.measuring import Sample

_MOST: Final = 1.8
"""Times a plain fan-out."""

_QUOTAS: Final = 2_000

NOTE: Final = (
    f"Each member has {IDS} planned pairs with some of {_QUOTAS:,} quotas, as many as a country has, and all "
    "are invited. The ledger is in the folder for temporary files. Planning is not part of this: see the page "
    "of campaigns."
)


class Campaigner(OurClient):
    """Runs a plan, and the same requests without one, in the same process."""

    def prepare(self, members: int) -> None:
        """Write the plan, and reach the full width."""
        self._folder, self._copies = Path(tempfile.mkdtemp()), count()
        quota_ids = {
            f"m{at:06}": [2 * ((IDS * at + rank) % _QUOTAS) + 2 for rank in range(IDS)] for at in range(members)
        }
        self._requests = [InviteRequest(code, ids) for code, ids in quota_ids.items()]
        ledger = CampaignLedger(self._folder / "planned")
        ledger.open(make=True)
        with ledger.planning() as plan:
            plan.add_quotas(
                [PlannedQuota(id_, id_, 1, "", None, members, 1.0, 0.5) for id_ in range(2, 2 * _QUOTAS + 2, 2)]
            )
            numbers = plan.add_members([*quota_ids], [[]] * members, [0] * members)
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
            rooms=lambda _: None,
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
    """Measure both."""
    kinds = {"plain": "plain", "campaign": "campaign"}
    goal = "CPU of a {}'s request, {} wide, by one of a fan-out"
    title = "{:,} requests of {} quota IDs"
    return beside_plain(run, Campaigner, kinds, most=_MOST, goal=goal, title=title, note=NOTE)
