"""Runs of campaigns against the simulator: stopped, killed, and gone on with."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections import Counter

import anyio
import pytest
from panel_kit import all_of, campaign_of, holds, planned_campaign, sql

from sampling_async import InvalidRequestError, SamplingClient
from sampling_async.campaign import Campaign, LedgerError, Limits
from sampling_async.simulator import Latency, Simulator

# --- The run


async def test_a_run_accounts_for_every_pair(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        plan = await campaign.plan()
        async with campaign.run() as run:
            outcomes = [outcome async for outcome in run]
            assert run.pairs.pending == 0
            assert run.reason == ""
        summary = await campaign.summary()
        requests = len(sim.ledger.requests())
        assert await all_of(campaign.run()) == []
        assert len(sim.ledger.requests()) == requests  # a finished campaign asks for nothing more
    assert summary.state == "finished"
    assert summary.pairs == run.pairs
    assert summary.pairs.planned >= plan.pairs
    assert summary.pairs.invited == len(sim.ledger.invites) == sum(o.status == "invited" for o in outcomes)
    assert summary.expected_value == pytest.approx(run.expected_value)
    assert summary.requests == len(sim.ledger.requests(endpoint="bulk_invite")) == run.requests
    assert run.members == len({outcome.member_code for outcome in outcomes})
    assert summary.runs == 1
    assert summary.members == 120
    assert sum(code.pairs for code in summary.codes) == len(outcomes)
    assert sum(moment.invited for moment in summary.timeline) == summary.pairs.invited
    assert sum(moment.requests for moment in summary.timeline) == summary.requests
    assert sum(quota.invited for quota in summary.quotas) == summary.pairs.invited
    holds(sim, summary, outcomes)


async def test_a_run_without_a_plan_says_so(sim, tmp_path):
    async with sim.client() as client:
        with pytest.raises(LedgerError, match=r"does not exist: call plan\(\) first"):
            await all_of(Campaign(client, ledger=tmp_path / "none").run())
        with pytest.raises(InvalidRequestError, match="a plan needs a panel"):
            await Campaign(client, ledger=tmp_path / "none").plan()
        with pytest.raises(LedgerError, match=r"does not exist: call plan\(\) first"):
            await Campaign(client, ledger=tmp_path / "none").summary()


async def test_one_run_at_a_time_has_the_ledger_and_others_may_look(sim, tmp_path):
    async with planned_campaign(sim, tmp_path) as campaign:
        async with campaign.run() as run:
            await anext(run)
            with pytest.raises(LedgerError, match="in use by another run"):
                await all_of(campaign.run())
            with pytest.raises(LedgerError, match="in use by another run"):
                await campaign.top_up()
            assert (await campaign.summary()).state == "running"
            assert (await run.summary()).state == "running"
        assert (await campaign.summary()).state == "stopped"
        await all_of(campaign.run())


async def test_a_ledger_belongs_to_one_service_and_panel(sim, tmp_path):
    async with planned_campaign(sim, tmp_path) as campaign:
        async with campaign.run() as run:
            await anext(run)
    other = Simulator(8, surveys=3, members=3)
    async with other.client() as client:
        with pytest.raises(LedgerError, match="belongs to another service or panel"):
            await all_of(Campaign(client, ledger=tmp_path / "run.ledger").run())
    assert len(other.ledger.requests()) == 0


async def test_what_is_left_early_goes_on_later(sim, tmp_path):
    outcomes = []
    async with planned_campaign(sim, tmp_path, max_concurrency=2) as campaign:
        for _ in range(4):
            async with campaign.run() as run:
                for _ in range(20):
                    outcomes.append(await anext(run))
            summary = await campaign.summary()
            assert summary.state == "stopped"
            assert summary.reason == "it was left before its end"
            # What came after the last outcome that was taken is in the ledger all the same.
            assert summary.pairs.pending > 0
        outcomes += await all_of(campaign.run())
        summary = await campaign.summary()
    assert (summary.state, summary.runs) == ("finished", 5)
    asked = "SELECT count(DISTINCT member) FROM pairs WHERE state NOT IN ('pending', 'skipped')"
    async with sim.client() as client, Campaign(client, ledger=tmp_path / "run.ledger").run() as run:
        assert [(run.members,)] == sql(tmp_path / "run.ledger", asked)
    holds(sim, summary)
    known = sql(tmp_path / "run.ledger", "SELECT count(*) FROM pairs WHERE state = 'invited'")[0][0]
    assert known == summary.pairs.invited


async def test_a_cancelled_run_loses_nothing(sim, tmp_path):
    async with planned_campaign(sim, tmp_path, max_concurrency=4) as campaign:
        for stop_after in (1, 7, 30):
            with anyio.CancelScope() as scope:
                async with campaign.run() as run:
                    taken = 0
                    async for _ in run:
                        taken += 1
                        if taken == stop_after:
                            scope.cancel()
            holds(sim, await campaign.summary())
        await all_of(campaign.run())
        summary = await campaign.summary()
    assert summary.pairs.pending == 0
    holds(sim, summary)


async def test_an_exception_of_the_caller_is_the_callers_and_is_noted(sim, tmp_path):
    async with planned_campaign(sim, tmp_path) as campaign:
        with pytest.raises(ZeroDivisionError):
            async with campaign.run() as run:
                async for _ in run:
                    1 / 0  # noqa: B018
        assert (await campaign.summary()).reason == "it was ended by ZeroDivisionError"
        await all_of(campaign.run())
        holds(sim, await campaign.summary())


async def test_what_was_in_flight_when_a_process_died_is_unknown_and_not_asked_again(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, cost=2.0)
        await campaign.plan()
    path = tmp_path / "run.ledger"
    database = sqlite3.connect(path)
    member, quotas = database.execute(
        "SELECT member, json_group_array(quota) FROM pairs WHERE member = 1"
    ).fetchone()
    database.execute("INSERT INTO requests VALUES (1, ?, ?)", (member, quotas))
    database.execute("INSERT INTO runs (began) VALUES (5.0)")
    database.commit()
    database.close()
    lost = len(json.loads(quotas))
    async with sim.client() as client:
        again = Campaign(client, ledger=path)
        before = await again.summary()
        assert (before.state, before.reason) == ("stopped", "the process ended before the response came")
        assert before.pairs.unknown == lost
        assert before.spent == 2.0 * lost  # each may be an invite
        outcomes = await all_of(again.run())
        summary = await again.summary()
    code = sql(path, "SELECT code FROM members WHERE id = 1")[0][0]
    assert code not in {outcome.member_code for outcome in outcomes}
    assert summary.pairs.unknown == lost
    assert summary.state == "finished"


async def test_a_run_whose_limits_cannot_be_read_any_more_stops(tmp_path):
    sim = Simulator(7, surveys=30, members=120, latency=Latency(a=0.1))
    async with planned_campaign(sim, tmp_path, max_concurrency=1, limits=Limits(max_invites=1000)) as campaign:
        with pytest.raises(LedgerError, match="holds limits that cannot be used"):
            async with campaign.run() as run:
                await anext(run)
                sql(tmp_path / "run.ledger", "UPDATE facts SET value = '{' WHERE name = 'limits'")
                async for _ in run:
                    pass
        assert run.reason == "its ledger cannot be looked at: LedgerError"
        assert len(sim.ledger.invites) < 60
        with pytest.raises(LedgerError, match="holds limits that cannot be used"):
            await campaign.limit(max_invites=3)


@pytest.mark.parametrize("name", ["run.ledger", "run.ledger-lock"])
@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not remove a file that is open")
async def test_a_run_whose_ledger_is_removed_stops(tmp_path, name):
    sim = Simulator(7, surveys=30, members=120, latency=Latency(a=0.1))
    async with planned_campaign(sim, tmp_path, max_concurrency=1) as campaign:
        with pytest.raises(LedgerError, match="was removed or replaced"):
            async with campaign.run() as run:
                await anext(run)
                (tmp_path / name).unlink()
                async for _ in run:
                    pass
        assert len(sim.ledger.invites) < 60


# --- A kill, for real


PROGRAM = """
import sys
import anyio
from sampling_async import SamplingClient
from sampling_async.campaign import Campaign

async def main():
    async with SamplingClient.from_env(max_concurrency=4) as client:
        async with Campaign(client, ledger=sys.argv[1]).run() as run:
            async for outcome in run:
                print(outcome.status, flush=True)

anyio.run(main)
"""


@pytest.mark.parametrize("outcomes_before", [1, 40])
def test_a_killed_process_goes_on_from_its_ledger_and_requests_nothing_twice(tmp_path, outcomes_before):
    sim = Simulator(7, surveys=30, members=60, latency=Latency(a=0.01, workers=3))
    # Four requests at once for three workers: one is in flight when the outcomes of the others come.
    path = tmp_path / "run.ledger"
    with sim.serve() as url:
        environment = {
            **os.environ,
            "SAMPLING_BASE_URL": url,
            "SAMPLING_PANEL_GUID": sim.panel_guid,
            "SAMPLING_API_KEY": sim.api_key,
        }
        arguments = {"panel_guid": sim.panel_guid, "api_key": sim.api_key}

        async def plan() -> None:
            async with SamplingClient(url, **arguments) as client:
                await campaign_of(sim, client, tmp_path).plan()

        async def finish():
            async with SamplingClient(url, **arguments) as client:
                campaign = Campaign(client, ledger=path)
                before = await campaign.summary()
                await all_of(campaign.run())
                return before, await campaign.summary()

        anyio.run(plan)
        command = [sys.executable, "-c", PROGRAM, str(path)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(outcomes_before):
                assert process.stdout.readline()
            process.kill()
        before, summary = anyio.run(finish)
    assert before.state == "stopped"
    assert summary.state == "finished"
    assert summary.pairs.unknown == before.pairs.unknown
    holds(sim, summary)
    query = "SELECT m.code, p.quota, p.state FROM pairs AS p JOIN members AS m ON m.id = p.member"
    states = {(code, quota): state for code, quota, state in sql(path, query)}
    made = sim.ledger.by_pair()
    assert all(states[pair] in {"invited", "unknown"} for pair in made)
    assert all(state != "invited" or pair in made for pair, state in states.items())
    asked = Counter(
        (r.member_code, q) for r in sim.ledger.requests(endpoint="bulk_invite") for q in r.quota_ids
    )
    assert max(asked.values()) == 1
