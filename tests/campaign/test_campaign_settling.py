"""Unknown pairs of campaigns against the simulator: settled by its notifications, and shown."""

from __future__ import annotations

from pathlib import Path

import anyio
import pyarrow as pa
import pytest
from cli_kit import lines, run, served_panel
from panel_kit import all_of, campaign_of

from sampling_async.campaign import Campaign, Limits
from sampling_async.notifications import Inbox, OutcomeLedger
from sampling_async.simulator import Fault, Notifying, Simulator

SECRET = "a-secret-of-this-test"
BADLY = Notifying(survey_seconds=1, late=0.5, repeated=0.3, forged=0.5, drifted=0.5, shared_secret="shared")


@pytest.fixture
def sim():
    return Simulator(7, surveys=30, members=120, notifying=BADLY)


def delivered_to(store: Path) -> Inbox:
    return Inbox(store, secrets=SECRET, shared_secrets="shared")


@pytest.mark.parametrize(
    "fault", [Fault.missing(3), Fault.cut(when="after"), Fault.cut(), Fault.html(), Fault.empty()]
)
async def test_what_was_lost_after_the_service_acted_is_settled_and_nothing_else(sim, tmp_path, fault):
    store = tmp_path / "store.db"
    sim.faults.add(fault.on("bulk_invite", probability=0.2))
    async with delivered_to(store) as inbox, sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        await all_of(campaign.run())
        ledger = OutcomeLedger(store)
        before = await campaign.summary()
        assert (await campaign.settle(ledger)).settled == ()
        await sim.notifications.deliver(inbox)
        found = await campaign.settle(ledger)
        summary = await campaign.summary(ledger)
        again = await campaign.settle(ledger)
    made = sim.ledger.by_pair()
    rows = pa.table(campaign).to_pylist()
    unknown = {(each["member_code"], each["quota_id"]) for each in rows if each["status"] == "unknown"}
    settled = {(each.member_code, each.quota_id) for each in found.settled}
    assert unknown
    assert settled == unknown & made.keys()
    assert summary.pairs == before.pairs
    assert (summary.settled, again.settled) == (len(settled), ())
    assert found.still_unknown == again.still_unknown == len(unknown) - len(settled)
    # Their completes are the campaign's too.
    assert summary.ends is not None
    assert summary.ends.total.invited == summary.pairs.invited + len(settled)
    assert summary.ends.total.open == 0
    shown = {each["settled_by"] for each in rows if each["settled_at"] is not None}
    assert shown <= {"invite", "completion", "terminate"}
    assert bool(shown) == bool(settled)


async def test_what_was_in_flight_at_a_kill_is_settled_before_the_next_run(tmp_path):
    sim = Simulator(7, surveys=30, members=120, notifying=Notifying())
    store = tmp_path / "store.db"
    async with delivered_to(store) as inbox, sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        killed = campaign_of(sim, client, tmp_path)
        async with killed.run() as first:
            await anext(first)
            copy = tmp_path / "copy"
            copy.mkdir()
            for each in tmp_path.glob("run.ledger*"):
                (copy / each.name).write_bytes(each.read_bytes())
            async for _ in first:
                pass
        later = Campaign(client, ledger=copy / "run.ledger")
        await sim.notifications.deliver(inbox)
        assert (await later.summary()).pairs.unknown > 0
        found = await later.settle(OutcomeLedger(store))
        assert found.settled
        before = (await later.summary()).settled
        await all_of(later.run())
        assert (await later.summary()).settled == before


async def test_what_came_before_a_later_run_settles_nothing_of_it(tmp_path):
    sim, now = Simulator(7, surveys=30, members=120, notifying=Notifying()), [1_700_000_000.0]
    store = tmp_path / "store.db"
    clock = {"wall_clock": lambda: now[0]}
    inbox = Inbox(store, secrets=SECRET, clock=lambda: now[0])
    async with inbox, sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, limits=Limits(max_invites=20), **clock)
        await campaign.plan()
        await all_of(campaign.run())
        # Another night, that the store knows nothing of, gets nearly all that this one has planned.
        now[0] += 86_400
        other = campaign_of(sim, client, tmp_path, ledger=tmp_path / "other.ledger", **clock)
        await other.plan()
        await all_of(other.run())
        await sim.notifications.deliver(inbox)
        now[0] += 86_400
        sim.faults.add(Fault.missing(100).on("bulk_invite"))
        await campaign.limit(max_invites=None)
        made = set(sim.ledger.by_pair())
        await all_of(campaign.run())
        assert (await campaign.summary()).pairs.unknown > 100
        found = await campaign.settle(OutcomeLedger(store))
        await sim.notifications.deliver(inbox)
        later = await campaign.settle(OutcomeLedger(store))
    assert found.settled == ()
    assert not {(each.member_code, each.quota_id) for each in later.settled} & made


async def test_a_second_night_does_not_claim_the_invites_of_the_first(sim, tmp_path):
    store = tmp_path / "store.db"
    ledger = OutcomeLedger(store)
    sim.faults.add(Fault.cut(when="after").on("bulk_invite", probability=0.3))
    async with delivered_to(store) as inbox, sim.client() as client:
        nights, made, settled = list[Campaign](), list[set](), list[set]()
        for name in ("monday", "tuesday"):
            made.append(set(sim.ledger.by_pair()))
            nights.append(campaign_of(sim, client, tmp_path, ledger=tmp_path / name))
            await nights[-1].plan()
            await all_of(nights[-1].run())
            await nights[-1].settle(ledger)  # nothing has come yet
        third = campaign_of(sim, client, tmp_path, ledger=tmp_path / "third", leave_out=[store])
        await third.plan()
        await sim.notifications.deliver(inbox)
        for night in nights:
            found = await night.settle(ledger)
            settled.append({(each.member_code, each.quota_id) for each in found.settled})
        uninvited = await ledger.uninvited()
    monday, tuesday = settled
    assert len(monday) > 10
    assert monday <= set(sim.ledger.by_pair())
    assert tuesday.isdisjoint(made[1] | monday)
    # What is unknown is left out by the next night, and what was proven is invited in the store too.
    rows = pa.concat_tables([pa.table(night) for night in nights]).to_pylist()
    unknown = {(each["member_code"], each["quota_id"]) for each in rows if each["status"] == "unknown"}
    assert unknown.isdisjoint((each["member_code"], each["quota_id"]) for each in pa.table(third).to_pylist())
    assert not uninvited


def test_a_run_a_report_and_a_command_settle_and_say_it(tmp_path, monkeypatch):
    with served_panel(tmp_path, monkeypatch, notifying=Notifying()) as service:
        service.faults.add(Fault.missing(2).on("bulk_invite"))
        out = ("campaign", "panel.jsonl", "--out", "night", "--yes")
        assert run(*out).exit_code == 1
        text = " ".join(run("campaign", "settle", "night").stderr.split())
        assert "name the store of notifications: --notifications FILE|ADDRESS" in text

        inbox = Inbox("store.db", secrets=SECRET)

        async def deliver():
            async with inbox:
                await service.notifications.deliver(inbox)

        anyio.run(deliver)
        (found,) = lines(run("campaign", "settle", "night", "--notifications", "store.db"))
        (status,) = lines(run("campaign", "status", "night", "--json"))
        assert found["Unknown"] > found["Settled"] == found["New"] == status["Settled"] > 10
        assert found["ByKind"] == {"invite": found["New"]}  # what came first
        (again,) = lines(run("campaign", "settle", "night", "--notifications", "store.db"))
        assert (again["New"], again["Settled"]) == (0, found["Settled"])
        result = run("campaign", "report", "night", "--notifications", "store.db")
        left = found["Unknown"] - found["Settled"]
        said = f"{found['Unknown']} unknown: {found['Settled']} settled as invited, {left} open"
        assert said in " ".join(result.stderr.split())
        assert said in Path("night/report.html").read_text()

        other = ("--notifications", "store.db", "--leave-out", "none")
        result = run("campaign", "panel.jsonl", "--out", "other", "--yes", *other)
        assert "settled as invited" not in result.stderr  # they came from the night before
        # A run records its invites in its store.
        recorded = run("outcomes", "--store", "store.db", "--invites", "other/campaign.ledger")
        assert "New invites from other/campaign.ledger: 0" in recorded.stderr
