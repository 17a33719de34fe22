"""Four nights of campaigns over one panel: how much of each night is requested for nothing.

    python benchmarks/nights.py
    python benchmarks/nights.py --surveys 60 --members 3000

Each night a campaign plans the whole panel against what a simulated service has open then, and requests it.
Between two nights the surveys that were taken end. The nights of the first series do not know each other. Those
of the second one leave out what the store of notifications and the ledgers of the nights before know
(`Campaign(leave_out=...)`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import anyio
from attrs import frozen

from sampling_async import ResultCode
from sampling_async._cli._simulation import write_panel
from sampling_async.campaign import Campaign
from sampling_async.matching import Allocate, QuestionKinds
from sampling_async.notifications import Inbox, OutcomeLedger
from sampling_async.simulator import AGE_BANDS, Notifying, Simulator, generate_inventory

NIGHTS: Final = 4
AGE: Final = 1001538
DAY: Final = 86_400.0


@frozen
class Night:
    """What one night has brought."""

    requested: int
    taken: int  # refused with SURVEY_TAKEN
    invites: int
    completes: int  # in all nights so far


async def nights(seed: int, *, surveys: int, members: int, leave_out: bool) -> list[Night]:
    """Run the nights."""
    inventory = generate_inventory(seed, surveys=surveys)
    now = [datetime(2026, 11, 2, tzinfo=UTC).timestamp()]
    simulator = Simulator(
        seed,
        inventory=inventory,
        members=members,
        clock=lambda: now[0],
        keep_requests=0,
        notifying=Notifying(survey_seconds=600),
    )
    found = list[Night]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store, panel, earlier = folder / "store.db", folder / "panel.jsonl", list[Path]()
        write_panel(list(simulator.members.values()), panel)
        ledger = OutcomeLedger(store, clock=lambda: now[0])
        inbox = Inbox(store, secrets="a-secret-of-these-nights", clock=lambda: now[0])
        async with inbox, simulator.client() as client:
            for night in range(NIGHTS):
                campaign = Campaign(
                    client,
                    panel,
                    ledger=folder / f"{night}.ledger",
                    allocate=Allocate(3, rates=0.4),
                    kinds=QuestionKinds.default().with_age(AGE, AGE_BANDS),
                    leave_out=[store, *earlier] if leave_out else [],
                )
                await campaign.plan()
                async with campaign.run() as run:
                    outcomes = [outcome async for outcome in run]
                earlier.append(campaign.ledger)
                await ledger.invited(outcomes, at=datetime.fromtimestamp(now[0], UTC))
                now[0] += DAY
                await simulator.notifications.deliver(inbox)
                codes = [outcome.result_code for outcome in outcomes]
                found.append(
                    Night(
                        requested=len(codes),
                        taken=codes.count(ResultCode.SURVEY_TAKEN),
                        invites=codes.count(ResultCode.SUCCESS),
                        completes=sum(each.completed for each in await ledger.funnel()),
                    )
                )
    return found


def main() -> None:
    """Print a line for each night of both series."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--surveys", type=int, default=120)
    parser.add_argument("--members", type=int, default=5_000)
    given = parser.parse_args()
    for name, leave_out in (("each alone", False), ("leave_out", True)):
        series = partial(nights, given.seed, surveys=given.surveys, members=given.members, leave_out=leave_out)
        for number, night in enumerate(anyio.run(series), 1):
            share = night.taken / night.requested if night.requested else 0.0
            sys.stdout.write(
                f"{name:10} night {number}: {night.requested:6,} pairs requested, {share:6.1%} SURVEY_TAKEN,"
                f" {night.invites:6,} invites, {night.completes:6,} completes so far\n"
            )


if __name__ == "__main__":
    main()
