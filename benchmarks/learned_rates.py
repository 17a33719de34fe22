"""A week of campaigns with fixed rates, and with those that the ledger of outcomes has learned.

    python benchmarks/learned_rates.py
    python benchmarks/learned_rates.py --weeks 3 --invites 1500

Each night a campaign asks a simulated service for so many invites; members of another part of the panel are
awake each night. The quotas of a survey end in completes by shares of their own, around the IR times the share
of members who follow an invite. Both weeks have the same service, members, shares and numbers of invites. The
first plans by price times IR, as by default; the second by `OutcomeLedger.rates()`. Completes and revenue are
read from the ledger of outcomes, which has them from notifications.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import anyio
from attrs import frozen

from sampling_async._cli._simulation import write_panel
from sampling_async.campaign import Campaign, Limits
from sampling_async.matching import Allocate, LearnedRates, QuestionKinds
from sampling_async.notifications import Inbox, OutcomeLedger
from sampling_async.simulator import AGE_BANDS, Notifying, Simulator, generate_inventory

NIGHTS: Final = 7
FOLLOW: Final = 0.4  # the share of members who follow an invite
SPREAD: Final = 3.0  # the lower, the more the shares of surveys differ from what their IR says
AGE: Final = 1001538
DAY: Final = 86_400.0


@frozen
class Week:
    """What the invites of a week have brought."""

    invites: int
    completes: int
    revenue: float


def shares_of(inventory: Any, seed: int) -> dict[int, float]:
    """Return the true share of completes of each quota, which only the service knows."""
    random, shares = Random(seed), dict[int, float]()
    for survey in inventory.surveys:
        mean = FOLLOW * (survey.ir or 50) / 100
        of_survey = random.betavariate(SPREAD * mean, SPREAD * (1 - mean))
        for quota in survey.quotas:
            # The quotas of a survey are more alike.
            concentration = 30.0
            share = min(max(of_survey, 0.005), 0.995)
            shares[quota.quota_id] = random.betavariate(concentration * share, concentration * (1 - share))
    return shares


async def week(seed: int, *, surveys: int, members: int, invites: int, learn: bool) -> Week:
    """Run the campaigns of a week."""
    inventory = generate_inventory(seed, surveys=surveys)
    now = [datetime(2026, 11, 2, tzinfo=UTC).timestamp()]
    simulator = Simulator(
        seed,
        inventory=inventory,
        members=members,
        clock=lambda: now[0],
        keep_requests=0,
        notifying=Notifying(completes=shares_of(inventory, seed), survey_seconds=600),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ledger = OutcomeLedger(folder / "store.db", clock=lambda: now[0])
        inbox = Inbox(folder / "store.db", secrets="a-secret-of-the-week", clock=lambda: now[0])
        async with inbox, simulator.client() as client:
            for night in range(NIGHTS):
                rates: LearnedRates | float = await ledger.rates() if learn and night else FOLLOW
                awake = folder / f"{night}.jsonl"
                write_panel(list(simulator.members.values())[night::NIGHTS], awake)
                campaign = Campaign(
                    client,
                    awake,
                    ledger=folder / f"{night}.ledger",
                    allocate=Allocate(3, rates=rates),
                    kinds=QuestionKinds.default().with_age(AGE, AGE_BANDS),
                    limits=Limits(max_invites=invites),
                )
                await campaign.plan()
                async with campaign.run() as run:
                    outcomes = [outcome async for outcome in run]
                await ledger.invited(outcomes, at=datetime.fromtimestamp(now[0], UTC))
                now[0] += DAY
                await simulator.notifications.deliver(inbox)
            funnel = await ledger.funnel()
    return Week(
        invites=sum(each.invited for each in funnel),
        completes=sum(each.completed for each in funnel),
        revenue=float(sum(each.revenue for each in funnel)),
    )


def main() -> None:
    """Print both kinds of weeks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weeks", type=int, default=5)
    parser.add_argument("--surveys", type=int, default=120)
    parser.add_argument("--members", type=int, default=7_000)
    parser.add_argument("--invites", type=int, default=800, help="a night")
    given = parser.parse_args()
    more: dict[str, list[float]] = {"completes": [], "revenue": []}
    for seed in range(1, given.weeks + 1):
        sizes = {"surveys": given.surveys, "members": given.members, "invites": given.invites}
        fixed, learned = (anyio.run(lambda: week(seed, **sizes, learn=learn)) for learn in (False, True))  # noqa: B023
        for name, each in (("fixed", fixed), ("learned", learned)):
            sys.stdout.write(
                f"week {seed}, {name:7}: {each.invites:,} invites, {each.completes:,} completes,"
                f" revenue {each.revenue:,.2f}\n"
            )
        more["completes"].append(learned.completes / learned.invites / (fixed.completes / fixed.invites))
        more["revenue"].append(learned.revenue / learned.invites / (fixed.revenue / fixed.invites))
    for name, ratios in more.items():
        text = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
        sys.stdout.write(f"{name} an invite, learned by fixed: {median(ratios):.2f} ({text})\n")


if __name__ == "__main__":
    main()
