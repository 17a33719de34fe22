"""Helpers for tests of campaigns: the panel of a simulator, and a campaign that asks for it."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa
from matching_kit import AGE, panel_of

from sampling_async.campaign import Campaign
from sampling_async.campaign._campaign import with_ledger
from sampling_async.campaign._ledger import CampaignLedger
from sampling_async.matching import Allocate, QuestionKinds
from sampling_async.simulator import AGE_BANDS, Simulator

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator
    from pathlib import Path

    from sampling_async import SamplingClient

KINDS = QuestionKinds.default().with_age(AGE, AGE_BANDS)
TAKEN = pa.list_(pa.struct([("survey_id", pa.int64()), ("wave_id", pa.int64()), ("status_id", pa.int64())]))


def panel_table(sim: Simulator, count: int | None = None) -> pa.Table:
    """Return the members of a simulator as a panel, with all that the service knows of them."""
    members = list(sim.members.values())[:count]
    taken = [
        [
            {"survey_id": p.survey_id, "wave_id": p.wave_id, "status_id": p.status_id}
            for p in each.participations
        ]
        for each in members
    ]
    return panel_of(
        [each.profile for each in members],
        member_code=[each.member_code for each in members],
        device_type=[each.device_type_id for each in members],
        participations=pa.array(taken, TAKEN),
    )


def campaign_of(sim: Simulator, client: SamplingClient, folder: Path, **more) -> Campaign:
    """Return a campaign for the panel of a simulator."""
    arguments = {"allocate": Allocate(3), "kinds": KINDS, "ledger": folder / "run.ledger", **more}
    panel = arguments.pop("panel", None)
    inventory = arguments.pop("inventory", None)
    return Campaign(client, panel_table(sim) if panel is None else panel, inventory, **arguments)


@asynccontextmanager
async def planned_campaign(
    sim: Simulator, folder: Path, max_concurrency: int = 8, **more
) -> AsyncGenerator[Campaign]:
    """Make a campaign and its plan; its client is open meanwhile."""
    async with sim.client(max_concurrency=max_concurrency) as client:
        campaign = campaign_of(sim, client, folder, **more)
        await campaign.plan()
        yield campaign


async def all_of(run) -> list:
    """Return all outcomes of a run."""
    async with run:
        return [outcome async for outcome in run]


def forget_command(path: Path) -> None:
    """Leave out of a ledger how it was planned, as another program that made it does."""
    with_ledger(path, lambda ledger: ledger.note(command="{}"))


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold a ledger as a run in another process does."""
    ledger = CampaignLedger(path)
    ledger.lock()
    try:
        yield
    finally:
        ledger.close()


def holds(sim: Simulator, summary, outcomes=()) -> None:
    """Check that a ledger adds up, and agrees with the simulator's to the last pair."""
    pairs = summary.pairs
    assert pairs.planned == (
        pairs.invited + pairs.rejected + pairs.not_sent + pairs.unknown + pairs.skipped + pairs.pending
    )
    invites = Counter(sim.ledger.by_pair())
    assert all(count == 1 for count in invites.values()), "a pair was invited twice"
    assert pairs.invited <= invites.total() <= pairs.invited + pairs.unknown
    verdict = sim.ledger.check(outcomes)
    if outcomes:
        assert verdict.ok, verdict


def rows(path, query, *values):
    database = sqlite3.connect(path)
    try:
        return database.execute(query, values).fetchall()
    finally:
        database.close()


def rows_written(path, query, *values):
    database = sqlite3.connect(path)
    with database:
        database.execute(query, values)
    database.close()
