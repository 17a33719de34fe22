"""Nights of campaigns, simulated: what leaving out earlier nights brings, and what learned rates bring.

    python benchmarks/nights.py
    python benchmarks/nights.py --surveys 60 --members 3000
    python benchmarks/nights.py --panels
    python benchmarks/nights.py --learned
    python benchmarks/nights.py --learned --weeks 3 --invites 1500

Each night a campaign plans a panel against what the service has open then, and requests it. Between two nights
the surveys that were taken end, and the ledger of outcomes has it from notifications.

Of four nights over the whole panel, those of the first series do not know each other. Those of the second one
leave out what the store of notifications and the ledgers of the nights before know (`Campaign(leave_out=...)`).

With `--panels`, two panels request at the same time: first each plans for all of a quota's room, then both
share it (`Campaign(share_room=...)`).

With `--learned`, each night of a week asks for so many invites, and another part of the panel is awake. The
quotas of a survey end in completes by shares of their own, around the IR times the share of members who follow
an invite. Both weeks have the same service, members, shares and numbers of invites. The first plans by price
times IR, as by default; the second by `OutcomeLedger.rates()`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import anyio
from attrs import frozen

from sampling_async import ResultCode, SamplingClient
from sampling_async._cli._simulation import write_panel
from sampling_async.campaign import Campaign, Limits
from sampling_async.matching import Allocate, LearnedRates, QuestionKinds
from sampling_async.notifications import Inbox, OutcomeLedger
from sampling_async.simulator import AGE_BANDS, Notifying, Simulator, generate_inventory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from sampling_async import InviteOutcome, Quotas

NIGHTS: Final = 4
WEEK: Final = 7
FOLLOW: Final = 0.4  # the share of members who follow an invite
SPREAD: Final = 3.0  # the lower, the more the shares of surveys differ from what their IR says
AGE: Final = 1001538
DAY: Final = 86_400.0


@frozen
class Place:
    """A service, a panel and a folder for the files of the nights."""

    simulator: Simulator
    client: SamplingClient
    inbox: Inbox
    ledger: OutcomeLedger
    folder: Path
    now: list[float]

    @property
    def store(self) -> Path:
        """The store of notifications."""
        return self.folder / "store.db"

    async def night(
        self, number: int, awake: slice, rates: LearnedRates | float, **options: Any
    ) -> tuple[Path, Sequence[InviteOutcome]]:
        """Run the campaign of a night, and let its surveys end; return its ledger and its outcomes."""
        panel = self.folder / f"{number}.jsonl"
        write_panel(list(self.simulator.members.values())[awake], panel)
        campaign = Campaign(
            self.client,
            panel,
            ledger=self.folder / f"{number}.ledger",
            allocate=Allocate(3, rates=rates),
            kinds=QuestionKinds.default().with_age(AGE, AGE_BANDS),
            **options,
        )
        await campaign.plan()
        async with campaign.run() as run:
            outcomes = [outcome async for outcome in run]
        await self.ledger.invited(outcomes, at=datetime.fromtimestamp(self.now[0], UTC))
        self.now[0] += DAY
        await self.simulator.notifications.deliver(self.inbox)
        return campaign.ledger, outcomes


@asynccontextmanager
async def opened(seed: int, inventory: Quotas, members: int, notifying: Notifying) -> AsyncIterator[Place]:
    """Make a service with this inventory, and a client of it."""
    now = [datetime(2026, 11, 2, tzinfo=UTC).timestamp()]
    simulator = Simulator(
        seed,
        inventory=inventory,
        members=members,
        clock=lambda: now[0],
        keep_requests=0,
        notifying=notifying,
    )
    with tempfile.TemporaryDirectory() as name:
        store = Path(name) / "store.db"
        ledger = OutcomeLedger(store, clock=lambda: now[0])
        inbox = Inbox(store, secrets="a-secret-of-these-nights", clock=lambda: now[0])
        async with inbox, simulator.client() as client:
            yield Place(simulator, client, inbox, ledger, Path(name), now)


# --- What is requested for nothing


async def series(seed: int, *, surveys: int, members: int, leave_out: bool) -> list[str]:
    """Run the nights, and return a line for each."""
    found, earlier = list[str](), list[Path]()
    inventory = generate_inventory(seed, surveys=surveys)
    async with opened(seed, inventory, members, Notifying(survey_seconds=600)) as place:
        for number in range(NIGHTS):
            known = [place.store, *earlier] if leave_out else []
            ledger, outcomes = await place.night(number, slice(None), FOLLOW, leave_out=known)
            earlier.append(ledger)
            codes = [outcome.result_code for outcome in outcomes]
            taken = codes.count(ResultCode.SURVEY_TAKEN) / len(codes) if codes else 0.0
            completes = sum(each.completed for each in await place.ledger.funnel())
            found.append(
                f"night {number + 1}: {len(codes):6,} pairs requested, {taken:6.1%} SURVEY_TAKEN,"
                f" {codes.count(ResultCode.SUCCESS):6,} invites, {completes:6,} completes so far"
            )
    return found


# --- Two panels beside each other


async def two_panels(seed: int, *, surveys: int, members: int, share: bool) -> str:
    """Run campaigns of two panels at the same time, and return a line about both."""
    inventory = generate_inventory(seed, surveys=surveys)
    async with opened(seed, inventory, members, Notifying(survey_seconds=600)) as place:
        pairs = Counter[str]()

        async def night(number: int) -> None:
            shared = place.folder / "rooms.db" if share else None
            ledger, _ = await place.night(number, slice(number, None, 2), FOLLOW, share_room=shared)
            found = (await Campaign(None, ledger=ledger).summary()).pairs
            pairs.update(planned=found.planned, invited=found.invited, rejected=found.rejected)

        async with anyio.create_task_group() as panels:
            for number in range(2):
                panels.start_soon(night, number)
        completes = sum(each.completed for each in await place.ledger.funnel())
    return (
        f"{pairs['planned']:6,} pairs planned, {pairs['rejected']:6,} refused, {pairs['invited']:6,} invites,"
        f" {completes:6,} completes"
    )


# --- What learned rates bring


@frozen
class Week:
    """What the invites of a week have brought."""

    invites: int
    completes: int
    revenue: float


def shares_of(inventory: Quotas, seed: int) -> dict[int, float]:
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
    notifying = Notifying(completes=shares_of(inventory, seed), survey_seconds=600)
    async with opened(seed, inventory, members, notifying) as place:
        for number in range(WEEK):
            rates = await place.ledger.rates() if learn and number else FOLLOW
            await place.night(number, slice(number, None, WEEK), rates, limits=Limits(max_invites=invites))
        funnel = await place.ledger.funnel()
    return Week(
        invites=sum(each.invited for each in funnel),
        completes=sum(each.completed for each in funnel),
        revenue=float(sum(each.revenue for each in funnel)),
    )


def compare_weeks(weeks: int, sizes: dict[str, int]) -> None:
    """Print both kinds of weeks, and what the learned ones bring by the fixed ones."""
    more: dict[str, list[float]] = {"completes": [], "revenue": []}
    for seed in range(1, weeks + 1):
        fixed, learned = (anyio.run(partial(week, seed, **sizes, learn=learn)) for learn in (False, True))
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


def main() -> None:
    """Print a line for each night of both series, or for each week."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learned", action="store_true", help="weeks with fixed and learned rates")
    parser.add_argument("--panels", action="store_true", help="two panels, alone and sharing room")
    parser.add_argument("--seed", type=int, default=1, help="of the four nights")
    parser.add_argument("--weeks", type=int, default=5)
    parser.add_argument("--surveys", type=int, default=120)
    parser.add_argument("--members", type=int, help="5,000; 7,000 in a week")
    parser.add_argument("--invites", type=int, default=800, help="a night of a week")
    given = parser.parse_args()
    if given.learned:
        sizes = {"surveys": given.surveys, "members": given.members or 7_000, "invites": given.invites}
        compare_weeks(given.weeks, sizes)
        return
    sizes = {"surveys": given.surveys, "members": given.members or 5_000}
    if given.panels:
        for name, share in (("each alone", False), ("share_room", True)):
            line = anyio.run(partial(two_panels, given.seed, **sizes, share=share))
            sys.stdout.write(f"{name:10} {line}\n")
        return
    for name, leave_out in (("each alone", False), ("leave_out", True)):
        for line in anyio.run(partial(series, given.seed, **sizes, leave_out=leave_out)):
            sys.stdout.write(f"{name:10} {line}\n")


if __name__ == "__main__":
    main()
