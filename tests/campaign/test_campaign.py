"""Campaigns against the simulator: plan, run, kill, learn, limits, top-up, files."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager
from datetime import date
from types import SimpleNamespace
from uuid import UUID

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attrs import evolve
from campaign_kit import KINDS, all_of, campaign_of, holds, panel_table

from sampling_async import (
    ForbiddenError,
    InvalidRequestError,
    OutagePolicy,
    ResultCode,
    RetryPolicy,
    SamplingClient,
)
from sampling_async._journal import lock as _lock
from sampling_async._journal.database import transaction
from sampling_async._pacing.threads import CancelFlag
from sampling_async.campaign import (
    Campaign,
    LedgerError,
    Lesson,
    Limits,
    _files,
    _pages,
    _report,
    erase_from_ledger,
)
from sampling_async.campaign._ledger import CampaignLedger
from sampling_async.campaign._run import CampaignRun
from sampling_async.matching import Allocate, LiveIndex, PanelMatcher, QuotaIndex
from sampling_async.simulator import Fault, Latency, Simulator


@pytest.fixture
def sim():
    return Simulator(7, surveys=30, members=120)


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


# --- The plan


async def test_a_plan_says_what_will_be_requested_and_sends_nothing(sim, tmp_path):
    async with sim.client() as client:
        plan = await campaign_of(sim, client, tmp_path).plan()
    assert plan.members == 120
    assert 0 < plan.matched <= 120
    assert plan.matched <= plan.pairs <= 3 * plan.matched
    assert plan.requests == plan.matched
    assert plan.certain <= plan.pairs
    assert plan.certain <= plan.expected_invites <= plan.pairs
    assert plan.number == 1
    assert len(sim.ledger.invites) == 0
    assert not sim.ledger.requests(endpoint="bulk_invite")
    assert f"{plan.pairs:,} pairs in {plan.requests:,} requests" in str(plan)


async def test_a_plan_that_is_there_needs_no_panel(sim, tmp_path):
    async with sim.client() as client:
        plan = await campaign_of(sim, client, tmp_path).plan()
        again = Campaign(client, ledger=tmp_path / "run.ledger")
        assert await again.plan() == plan
        await all_of(again.run())
        assert (await again.summary()).state == "finished"


async def test_the_pairs_of_a_plan_are_those_that_the_allocation_gives(sim, tmp_path):
    async with sim.client() as client:
        index = QuotaIndex(await client.get_quotas(), kinds=KINDS)
        await campaign_of(sim, client, tmp_path, inventory=index).plan()
    given = PanelMatcher(index, Allocate(3)).run(panel_table(sim)).read_all().to_pylist()
    expected = {(row["member_code"], quota_id) for row in given for quota_id in row["quota_ids"]}
    query = "SELECT m.code, p.quota FROM pairs AS p JOIN members AS m ON m.id = p.member"
    assert set(rows(tmp_path / "run.ledger", query)) == expected


async def test_quotas_that_close_while_a_plan_is_made_change_nothing_in_it(sim, tmp_path):
    """The cost is asked for each quota after the panel was matched; here that closes all quotas."""
    for name in "ab":
        (tmp_path / name).mkdir()
    async with sim.client() as client:
        index = QuotaIndex(await client.get_quotas(), kinds=KINDS)
        expected = await campaign_of(sim, client, tmp_path / "a", inventory=index).plan()

        def panel():
            for quota_id in tuple(index.quota_ids):
                index.close(quota_id)
            return panel_table(sim).to_reader()

        plan = await campaign_of(sim, client, tmp_path / "b", inventory=index, panel=panel).plan()
    assert plan == expected
    assert len(index) == 0


async def test_a_top_up_over_quotas_that_close_meanwhile_is_made(sim, tmp_path):
    async with sim.client() as client, client.watch_quotas() as watch:
        async with LiveIndex(watch, kinds=KINDS) as live:
            await live.ready()

            def panel():
                for quota_id in tuple(live.index.quota_ids)[::2]:
                    live.index.close(quota_id)
                return panel_table(sim).to_reader()

            campaign = campaign_of(sim, client, tmp_path, inventory=live, panel=panel)
            assert (await campaign.plan()).pairs
            assert (await campaign.top_up()).number == 2
            assert PanelMatcher(live, Allocate(3)).run(panel_table(sim)).read_all().num_rows == 120


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"member_code": ["a", "b", "a"], "1001538": [30, 40, 50]},
            "row 2 has the member code of an earlier row",
        ),
        ({"member_code": ["a", None, "c"], "1001538": [30, 40, 50]}, "row 1 of the panel has no member_code"),
        ({"member_code": ["a", ""], "1001538": [30, 40]}, "row 1: a member code cannot be empty"),
        ({"member_code": ["b", "'a'\0"], "1001538": [30, 40]}, "row 1: a member code cannot hold control"),
        ({"member_code": ["a"], "1001538": ["old"]}, "row 0"),
        ({"code": ["a"], "1001538": [30]}, "no column 'member_code'; it has 'code', '1001538'"),
        ({"member_code": ["a"], "age": [30]}, "no column for any question of the inventory"),
        ({"member_code": pa.array([], pa.string())}, "has no members"),
    ],
)
async def test_a_panel_is_checked_whole_before_anything_is_written(sim, tmp_path, columns, message):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, panel=pa.table(columns))
        with pytest.raises(InvalidRequestError, match=message) as caught:
            await campaign.plan()
    assert "'a'" not in str(caught.value)
    assert not (tmp_path / "run.ledger").exists()
    assert list(tmp_path.iterdir()) == []


async def test_a_panel_that_can_be_read_only_once_is_refused_with_the_way_out(sim, tmp_path):
    async with sim.client() as client:
        for once in (panel_table(sim).to_reader(), iter(panel_table(sim).to_batches()), 7):
            campaign = campaign_of(sim, client, tmp_path, panel=once)
            with pytest.raises(InvalidRequestError, match="a function that opens it anew"):
                await campaign.plan()


async def test_panels_come_from_files_queries_tables_and_functions(sim, tmp_path):
    table = panel_table(sim).drop_columns(["participations"])
    file = tmp_path / "panel.parquet"
    pq.write_table(table, file)
    plans = []
    async with sim.client() as client:
        for number, panel in enumerate((table, file, str(file), f"SELECT * FROM '{file}'", table.to_reader)):
            if isinstance(panel, str) and panel.startswith("SELECT"):
                pytest.importorskip("duckdb")
            campaign = campaign_of(sim, client, tmp_path, panel=panel, ledger=tmp_path / f"{number}.ledger")
            plans.append(await campaign.plan())
    assert all(plan == plans[0] for plan in plans)


async def test_member_codes_of_a_panel_may_be_uuids(sim, tmp_path):
    table = panel_table(sim).drop_columns(["participations", "member_code"])
    uuids = [UUID(int=number) for number in range(len(table))]
    table = table.append_column("id", pa.array([each.bytes for each in uuids], pa.uuid()))
    file = tmp_path / "panel.parquet"
    pq.write_table(table, file)
    async with sim.client() as client:
        for panel in (table, file):
            ledger = tmp_path / f"{type(panel).__name__}.ledger"
            campaign = campaign_of(
                sim, client, tmp_path, panel=panel, ledger=ledger, columns={"id": "member_code"}
            )
            assert (await campaign.plan()).members == len(uuids)
            planned = {code for (code,) in rows(ledger, "SELECT code FROM members")}
            assert planned
            assert planned <= set(map(str, uuids))


async def test_columns_can_have_other_names(sim, tmp_path):
    table = panel_table(sim)
    renamed = table.rename_columns(["age" if name == "1001538" else name for name in table.column_names])
    async with sim.client() as client:
        plain = await campaign_of(sim, client, tmp_path, ledger=tmp_path / "a").plan()
        campaign = campaign_of(sim, client, tmp_path, panel=renamed, columns={"age": "1001538"})
        assert await campaign.plan() == plain


async def test_recontact_lists_are_read_so_that_nobody_else_is_asked(tmp_path):
    sim = Simulator(11, surveys=60, members=150)
    assert sim.recontact_quota_ids
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        outcomes = await all_of(campaign.run())
    assert 17 not in {outcome.result_code for outcome in outcomes}  # NO_RECONTACT_GID


@pytest.mark.parametrize(
    "fault",
    [
        Fault.status(400),
        Fault.status(404),
        Fault.status(500),
        Fault.html(),
        Fault.body(b'{"GIDs": 7}'),
        Fault.stuck_cursor(),
    ],
    ids=str,
)
async def test_a_recontact_list_that_cannot_be_read_costs_its_quota_and_no_more(tmp_path, fault):
    """Its quota may have closed since the inventory was read."""
    sim = Simulator(11, surveys=60, members=150)
    refused = min(sim.recontact_quota_ids)
    sim.faults.add(fault.on("recontact_members", quota_id=refused))
    async with sim.client(retry=RetryPolicy(max_attempts=1)) as client:
        campaign = campaign_of(sim, client, tmp_path)
        plan = await campaign.plan()
        outcomes = await all_of(campaign.run())
    assert plan.pairs > 50
    assert refused not in {outcome.quota_id for outcome in outcomes}
    assert f"quota {refused} is left out, because its recontact list cannot be read" in "".join(plan.warnings)


async def test_a_file_that_is_no_ledger_is_left_alone(sim, tmp_path):
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as database:  # from Python 3.13 on, one that stays open warns
        database.execute("CREATE TABLE mine (x)")
    text = tmp_path / "text"
    text.write_text("my notes " * 100)
    async with sim.client() as client:
        for path in (other, text):
            before = path.read_bytes()
            with pytest.raises(LedgerError, match=r"of something else|not a database"):
                await campaign_of(sim, client, tmp_path, ledger=path).plan()
            assert path.read_bytes() == before


async def test_of_two_that_plan_at_once_one_plans_and_the_other_takes_that_plan_or_is_refused(sim, tmp_path):
    async with sim.client() as client:
        for number in range(6):
            path = tmp_path / f"{number}.ledger"
            found: list[object] = []

            async def plan(path, found) -> None:
                try:
                    found.append((await campaign_of(sim, client, tmp_path, ledger=path).plan()).number)
                except LedgerError as exc:
                    found.append(str(exc).rpartition("ledger ")[2])

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(plan, path, found)
                tasks.start_soon(plan, path, found)
            assert 1 in found
            assert set(found) <= {1, "is in use by another run of the campaign"}
            assert rows(path, "SELECT max(plan) FROM pairs") == [(1,)]


async def test_a_plan_that_another_process_made_meanwhile_is_taken(sim, tmp_path):
    async with sim.client() as client:
        slow = campaign_of(sim, client, tmp_path)
        planner = await slow._planner()
        first = await campaign_of(sim, client, tmp_path).plan()
        assert slow._planned(planner, None, CancelFlag()) == first
        assert rows(tmp_path / "run.ledger", "SELECT max(plan) FROM pairs") == [(1,)]


async def test_a_display_sees_how_many_members_were_read(sim, tmp_path):
    seen, panel = [], tmp_path / "panel.parquet"
    pq.write_table(panel_table(sim), panel, row_group_size=40)
    async with sim.client() as client:
        await campaign_of(sim, client, tmp_path, panel=panel).plan(on_members=lambda *each: seen.append(each))
    members = len(sim.members)
    assert seen[-1] == (2 * members, 2 * members)  # it is read twice
    assert [count for count, _ in seen] == sorted(count for count, _ in seen)


async def test_a_plan_that_is_cancelled_is_not_made_and_holds_no_ledger(sim, tmp_path):
    began, go_on = threading.Event(), threading.Event()

    def panel():
        def batches():
            for batch in panel_table(sim).to_batches(max_chunksize=40):
                began.set()
                go_on.wait(10)
                yield batch

        table = panel_table(sim)
        return pa.RecordBatchReader.from_batches(table.schema, batches())

    async with sim.client() as client:
        slow = campaign_of(sim, client, tmp_path, panel=panel)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(slow.plan)
                await anyio.to_thread.run_sync(began.wait)
                scope.cancel()
                threading.Timer(0.02, go_on.set).start()
        assert scope.cancelled_caught
        assert not (tmp_path / "run.ledger").exists()
        assert (await campaign_of(sim, client, tmp_path).plan()).number == 1


async def test_files_that_are_cancelled_replace_nothing(sim, tmp_path, monkeypatch):
    began, go_on = threading.Event(), threading.Event()
    report = _report.report

    def slow(*args, **kwargs):
        began.set()
        go_on.wait(10)
        return report(*args, **kwargs)

    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        await all_of(campaign.run())
        await campaign.write(tmp_path / "out", kind="jsonl")
        before = {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()}
        monkeypatch.setattr(_report, "report", slow)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(campaign.write, tmp_path / "out")
                await anyio.to_thread.run_sync(began.wait)
                scope.cancel()
                threading.Timer(0.02, go_on.set).start()
        assert scope.cancelled_caught
        assert {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()} == before


async def test_no_file_is_written_where_jinja2_is_missing(sim, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    for module in (_report, _pages):
        monkeypatch.delitem(sys.modules, module.__name__)
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        with pytest.raises(ImportError, match=r'needs jinja2: python -m pip install "sampling-async\[panel\]"'):
            await campaign.write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


async def test_a_ledger_that_was_replaced_while_it_was_open_is_not_written(sim, tmp_path):
    async with sim.client() as client:
        await campaign_of(sim, client, tmp_path).plan()
    path = tmp_path / "run.ledger"
    ledger = CampaignLedger(path)
    ledger.open()
    path.rename(tmp_path / "other")
    with pytest.raises(LedgerError, match="was removed or replaced"):
        ledger.lock()
    ledger.close()


async def test_only_the_owner_can_read_a_ledger(sim, tmp_path):
    async with sim.client() as client:
        await campaign_of(sim, client, tmp_path).plan()
    assert stat.S_IMODE((tmp_path / "run.ledger").stat().st_mode) == 0o600


async def test_plans_that_are_made_at_once_do_not_remove_or_replace_each_other(sim, tmp_path):
    async with sim.client() as client:
        quotas = await client.get_quotas()
        for number in range(8):
            path = tmp_path / f"{number}.ledger"
            found = []

            async def plan(path=path, found=found):
                try:
                    found.append(await campaign_of(sim, client, tmp_path, ledger=path, inventory=quotas).plan())
                except LedgerError as exc:
                    assert "in use by another run" in str(exc)  # noqa: PT017

            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(plan)
            assert found
            assert {each.number for each in found} == {1}
            assert (await Campaign(None, ledger=path).summary()).pairs.pending == found[0].pairs


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


async def test_a_finished_campaign_requests_nothing_more(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        await all_of(campaign.run())
        before = len(sim.ledger.requests())
        assert await all_of(campaign.run()) == []
        assert len(sim.ledger.requests()) == before


async def test_a_run_without_a_plan_says_so(sim, tmp_path):
    async with sim.client() as client:
        with pytest.raises(LedgerError, match=r"does not exist: call plan\(\) first"):
            await all_of(Campaign(client, ledger=tmp_path / "none").run())
        with pytest.raises(InvalidRequestError, match="a plan needs a panel"):
            await Campaign(client, ledger=tmp_path / "none").plan()
        with pytest.raises(LedgerError, match=r"does not exist: call plan\(\) first"):
            await Campaign(client, ledger=tmp_path / "none").summary()


async def test_one_run_at_a_time_has_the_ledger_and_others_may_look(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
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
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        async with campaign.run() as run:
            await anext(run)
    other = Simulator(8, surveys=3, members=3)
    async with other.client() as client:
        with pytest.raises(LedgerError, match="belongs to another service or panel"):
            await all_of(Campaign(client, ledger=tmp_path / "run.ledger").run())
    assert len(other.ledger.requests()) == 0


async def test_what_is_left_early_goes_on_later(sim, tmp_path):
    outcomes = []
    async with sim.client(max_concurrency=2) as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
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
        assert [(run.members,)] == rows(tmp_path / "run.ledger", asked)
    holds(sim, summary)
    known = rows(tmp_path / "run.ledger", "SELECT count(*) FROM pairs WHERE state = 'invited'")[0][0]
    assert known == summary.pairs.invited


async def test_a_cancelled_run_loses_nothing(sim, tmp_path):
    async with sim.client(max_concurrency=4) as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
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
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
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
    code = rows(path, "SELECT code FROM members WHERE id = 1")[0][0]
    assert code not in {outcome.member_code for outcome in outcomes}
    assert summary.pairs.unknown == lost
    assert summary.state == "finished"


async def test_a_run_that_is_cancelled_while_it_begins_says_so(sim, tmp_path, monkeypatch):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        with monkeypatch.context() as patch:
            counts, reading = CampaignLedger.counts, threading.Event()

            def slow(ledger):
                reading.set()
                time.sleep(0.2)
                return counts(ledger)

            patch.setattr(CampaignLedger, "counts", slow)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(all_of, campaign.run())
                    while not reading.is_set():  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                    scope.cancel()
        assert (await campaign.summary()).reason == "it was ended before it began"
        await all_of(campaign.run())
        holds(sim, await campaign.summary())


async def test_a_run_whose_limits_cannot_be_read_any_more_stops(tmp_path):
    sim = Simulator(7, surveys=30, members=120, latency=Latency(a=0.1))
    async with sim.client(max_concurrency=1) as client:
        campaign = campaign_of(sim, client, tmp_path, limits=Limits(max_invites=1000))
        await campaign.plan()
        with pytest.raises(LedgerError, match="holds limits that cannot be used"):
            async with campaign.run() as run:
                await anext(run)
                rows_written(tmp_path / "run.ledger", "UPDATE facts SET value = '{' WHERE name = 'limits'")
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
    async with sim.client(max_concurrency=1) as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        with pytest.raises(LedgerError, match="was removed or replaced"):
            async with campaign.run() as run:
                await anext(run)
                (tmp_path / name).unlink()
                async for _ in run:
                    pass
        assert len(sim.ledger.invites) < 60


async def test_a_child_that_was_forked_off_a_run_does_not_go_on_with_it(tmp_path):
    sim = Simulator(7, surveys=30, members=120, latency=Latency(a=0.1))
    async with sim.client(max_concurrency=1) as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        with pytest.raises(LedgerError, match="was forked from its run"):
            async with campaign.run() as run:
                await anext(run)
                _lock._forget_all()  # as after a fork, see test_journal
                async for _ in run:
                    pass
        assert len(sim.ledger.invites) < 60


# --- What it learns


def pairs_by_state(path, quota_id):
    return dict(rows(path, "SELECT state, count(*) FROM pairs WHERE quota = ? GROUP BY state", quota_id))


async def test_a_full_quota_is_requested_once_and_its_members_get_their_next_best(sim, tmp_path):
    async with sim.client(max_concurrency=1) as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        path = tmp_path / "run.ledger"
        busiest, planned = rows(path, "SELECT quota, count(*) FROM pairs GROUP BY quota ORDER BY 2 DESC")[0]
        sim.faults.add(Fault.refusal(28).on("bulk_invite", quota_id=busiest))
        outcomes = await all_of(campaign.run())
        summary = await campaign.summary()
    # One job more than can run is drawn before the first answer.
    assert sum(o.quota_id == busiest for o in outcomes) <= 2 < planned
    states = pairs_by_state(path, busiest)
    assert states["skipped"] >= planned - 2
    assert summary.skipped["QUOTA_FULL"] >= states["skipped"]
    assert next(each for each in summary.quotas if each.quota_id == busiest).closed == "QUOTA_FULL"
    replaced = rows(path, "SELECT count(*) FROM pairs WHERE rank > 3 OR turn > 1")[0][0]
    assert replaced > 0
    assert summary.pairs.planned > planned
    holds(sim, summary, outcomes)


async def test_nothing_more_is_requested_for_a_blocked_member(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        path = tmp_path / "run.ledger"
        ((code,),) = rows(path, "SELECT code FROM members ORDER BY id LIMIT 1")
        sim.faults.add(Fault.refusal(14).on("bulk_invite", member_code=code))
        await all_of(campaign.run())
    assert rows(path, "SELECT closed FROM members WHERE code = ?", code) == [("MEMBER_BLOCKED",)]
    assert len(sim.ledger.requests(member_code=code)) == 1
    turns = rows(path, "SELECT max(turn) FROM pairs JOIN members AS m ON m.id = member WHERE m.code = ?", code)
    assert turns == [(1,)]


async def test_a_technical_error_is_requested_again_and_ends_after_three(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, retry_seconds=0.01)
        await campaign.plan()
        path = tmp_path / "run.ledger"
        (once,), (always,) = rows(path, "SELECT DISTINCT quota FROM pairs ORDER BY quota LIMIT 2")
        sim.faults.add(Fault.refusal(36).on("bulk_invite", quota_id=once, times=1))
        sim.faults.add(Fault.refusal(36).on("bulk_invite", quota_id=always))
        outcomes = await all_of(campaign.run())
        summary = await campaign.summary()
    assert rows(path, "SELECT DISTINCT tries, code FROM pairs WHERE quota = ? AND state = 'rejected'", always)
    assert {tries for (tries,) in rows(path, "SELECT tries FROM pairs WHERE quota = ?", always)} == {3}
    assert 36 not in {code for (code,) in rows(path, "SELECT code FROM pairs WHERE quota = ?", once)}
    holds(sim, summary)
    asked = [o for o in outcomes if o.quota_id == always]
    assert len(asked) == 3 * len({o.member_code for o in asked})


async def test_each_pair_that_the_service_saw_counts_as_requested(sim, tmp_path):
    """One quota answers with code 36 and then closes, while its pairs wait for another try."""
    async with sim.client() as client, client.watch_quotas(600) as watch:
        async with LiveIndex(watch, kinds=KINDS) as live:
            await live.ready()
            campaign = campaign_of(sim, client, tmp_path, inventory=live, retry_seconds=0.01)
            await campaign.plan()
            path = tmp_path / "run.ledger"
            query = "SELECT quota FROM pairs GROUP BY quota ORDER BY count(*) DESC LIMIT 1"
            ((busiest,),) = rows(path, query)
            sim.faults.add(Fault.refusal(36).on("bulk_invite", quota_id=busiest))
            async with campaign.run() as run:
                async for outcome in run:
                    if outcome.quota_id == busiest:
                        watch.close_quota(busiest)
            summary = await campaign.summary()
    requests = sim.ledger.requests(endpoint="bulk_invite")
    seen = {(each.member_code, quota_id) for each in requests for quota_id in each.quota_ids}
    assert summary.asked == len(seen)
    assert sum(each.pairs for each in summary.codes) == len(seen)
    assert not summary.pairs.pending
    states = rows(path, "SELECT DISTINCT state, code, tries FROM pairs WHERE quota = ? AND tries", busiest)
    assert states == [("rejected", 36, 1)]
    holds(sim, summary)


async def test_a_pair_that_waits_for_another_try_was_requested_and_stays_so_in_a_new_plan(sim, tmp_path):
    path = tmp_path / "run.ledger"
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        assert (await campaign.summary()).asked == 0
        ((member, quota),) = rows(path, "SELECT member, quota FROM pairs LIMIT 1")
        which = "member = ? AND quota = ?"
        rows_written(path, f"UPDATE pairs SET code = 36, tries = 1 WHERE {which}", member, quota)
        assert (await campaign.summary()).asked == 1
        await campaign.top_up()
        summary = await campaign.summary()
    assert (summary.asked, summary.pairs.rejected) == (1, 1)
    query = f"SELECT state, code, reason FROM pairs WHERE plan = 1 AND {which}"
    assert rows(path, query, member, quota) == [("rejected", 36, "planned anew")]


async def test_the_table_of_codes_can_be_changed(sim, tmp_path):
    async with sim.client(max_concurrency=1) as client:
        campaign = campaign_of(sim, client, tmp_path, lessons={28: Lesson.PAIR, 77: Lesson.STOP})
        await campaign.plan()
        path = tmp_path / "run.ledger"
        busiest, planned = rows(path, "SELECT quota, count(*) FROM pairs GROUP BY quota ORDER BY 2 DESC")[0]
        sim.faults.add(Fault.refusal(28).on("bulk_invite", quota_id=busiest))
        outcomes = await all_of(campaign.run())
    assert sum(o.quota_id == busiest for o in outcomes) >= planned
    with pytest.raises(InvalidRequestError, match="a Lesson, such as"):
        Campaign(client, ledger=path, lessons={28: "quota"})


async def test_a_code_that_concerns_the_panel_stops_the_campaign(sim, tmp_path):
    async with sim.client(max_concurrency=1) as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        sim.faults.add(Fault.refusal(4).on("bulk_invite"))
        async with campaign.run() as run:
            outcomes = [outcome async for outcome in run]
        assert "PANEL_NOT_ES_ENABLED (4)" in run.reason
        assert len(sim.ledger.requests(endpoint="bulk_invite")) <= 3
        assert len(outcomes) < 20
        summary = await campaign.summary()
        assert (summary.state, summary.reason) == ("stopped", run.reason)
        assert summary.pairs.pending > 0
        sim.faults.clear()
        await all_of(campaign.run())
        holds(sim, await campaign.summary())


async def test_the_invites_of_a_ledger_are_those_that_were_made_but_of_erased_members(sim, tmp_path):
    async with sim.client(max_concurrency=2) as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        seen = []
        async with campaign.run() as run:
            async for outcome in run:
                seen.append(outcome)
                if len(seen) > 40:
                    break
        # What was made, and not seen before the run was left, is there too.
        there = [outcome async for outcome in campaign.invites()]
        pairs = Counter((each.member_code, each.quota_id) for each in there)
        assert pairs == Counter(sim.ledger.by_pair())
        made = {(each.member_code, each.quota_id): each.invite for each in there}
        assert all(made[each.member_code, each.quota_id] == each.invite for each in seen if each.invite)
        assert all(each.replayed and each.status == "invited" for each in there)
        assert erase_from_ledger(tmp_path / "run.ledger", there[0].member_code)
        left = [outcome async for outcome in Campaign(None, ledger=tmp_path / "run.ledger").invites()]
    assert left == [each for each in there if each.member_code != there[0].member_code]


@pytest.mark.parametrize("fault", [Fault.status(400, result_code=3), Fault.refusal(3)])
async def test_what_is_in_flight_when_the_panel_is_refused_is_requested_by_the_next_run(sim, tmp_path, fault):
    async with sim.client(max_concurrency=4) as client:
        campaign = campaign_of(sim, client, tmp_path)
        plan = await campaign.plan()
        async with campaign.run() as run:
            async for outcome in run:
                if outcome.invite is not None:
                    sim.faults.add(fault.on("bulk_invite"))
        stopped = await campaign.summary()
        assert (stopped.state, stopped.pairs.not_sent) == ("stopped", 0)
        refused = [code.pairs for code in stopped.codes if code.result_code == 3]
        assert len(refused) == 1
        assert stopped.pairs.pending > refused[0] > 0
        sim.faults.clear()
        async with campaign.run() as again:
            async for _ in again:
                pass
            assert again.members == plan.matched
        summary = await campaign.summary()
    assert (summary.state, summary.pairs.not_sent, summary.pairs.pending) == ("finished", 0, 0)
    assert all(code.result_code != 3 for code in summary.codes)
    holds(sim, summary)


async def test_a_top_up_plans_again_what_was_refused_with_the_panel(sim, tmp_path):
    async with sim.client(max_concurrency=1) as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        sim.faults.add(Fault.status(400, result_code=3).on("bulk_invite"))
        await all_of(campaign.run())
        for _ in range(2):
            await campaign.top_up()
    query = "SELECT member, quota FROM pairs WHERE plan = ?"
    first, *others = (set(rows(tmp_path / "run.ledger", query, plan)) for plan in (1, 2, 3))
    assert others == [first, first]


async def test_a_refused_key_stops_the_campaign_and_everything_stays_pending(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        plan = await campaign.plan()
        sim.faults.add(Fault.status(403).on("bulk_invite"))
        with anyio.fail_after(20):
            outcomes = await all_of(run := campaign.run())
        assert any(isinstance(outcome.error, ForbiddenError) for outcome in outcomes)
        assert "403" in run.reason
        summary = await campaign.summary()
        assert summary.pairs.pending == plan.pairs
        sim.faults.clear()
        await all_of(campaign.run())
        holds(sim, await campaign.summary())


async def test_an_outage_that_is_too_long_stops_the_campaign_and_it_goes_on_later(sim, tmp_path):
    quick = {"outage": OutagePolicy(patience=0.2), "retry": RetryPolicy(max_attempts=1)}
    async with sim.client(**quick) as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        sim.faults.add(Fault.cut(when="before"))
        with anyio.fail_after(30):
            async with campaign.run() as run:
                async for _ in run:
                    pass
        assert run.reason
        summary = await campaign.summary()
        assert summary.state == "stopped"
        sim.faults.clear()
    async with sim.client() as client:
        again = Campaign(client, ledger=tmp_path / "run.ledger")
        await all_of(again.run())
        summary = await again.summary()
    assert summary.pairs.pending == 0
    holds(sim, summary)


async def test_lost_responses_are_unknown_and_never_asked_again(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        sim.faults.add(Fault.cut(when="after").on("bulk_invite", every=5))
        outcomes = await all_of(campaign.run())
        summary = await campaign.summary()
        assert summary.pairs.unknown > 0
        assert await all_of(campaign.run()) == []
    holds(sim, summary, outcomes)


async def test_quotas_that_close_in_a_live_index_are_not_requested(sim, tmp_path):
    async with sim.client(max_concurrency=1) as client, client.watch_quotas(600) as watch:
        async with LiveIndex(watch, kinds=KINDS) as live:
            await live.ready()
            campaign = campaign_of(sim, client, tmp_path, inventory=live)
            await campaign.plan()
            path = tmp_path / "run.ledger"
            busiest, planned = rows(path, "SELECT quota, count(*) FROM pairs GROUP BY quota ORDER BY 2 DESC")[0]
            async with campaign.run() as run:
                await anext(run)
                assert watch.close_quota(busiest)
                outcomes = [outcome async for outcome in run]
    assert sum(o.quota_id == busiest for o in outcomes) <= 3
    states = pairs_by_state(path, busiest)
    assert states["skipped"] >= planned - 3
    reasons = {
        reason
        for (reason,) in rows(path, "SELECT reason FROM pairs WHERE quota = ? AND state = 'skipped'", busiest)
    }
    assert reasons == {"closed in the inventory"}


# --- Limits


async def test_a_cap_on_invites_is_never_exceeded_and_can_be_raised(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, limits=Limits(max_invites=25))
        plan = await campaign.plan()
        assert plan.expected_invites == 25
        await all_of(run := campaign.run())
        assert run.reason == "the cap of 25 invites is reached"
        assert len(sim.ledger.invites) == 25
        await campaign.limit(max_invites=40)
        await all_of(campaign.run())
        assert len(sim.ledger.invites) == 40
        await campaign.limit(max_invites=None)
        await all_of(campaign.run())
        summary = await campaign.summary()
    assert summary.state == "finished"
    holds(sim, summary)


async def test_unknown_pairs_count_against_the_cap(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, limits=Limits(max_invites=30))
        await campaign.plan()
        sim.faults.add(Fault.cut(when="after").on("bulk_invite", every=3))
        await all_of(campaign.run())
        summary = await campaign.summary()
    assert len(sim.ledger.invites) <= 30
    assert summary.pairs.invited + summary.pairs.unknown == 30


async def test_a_cap_on_spend_is_never_exceeded(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, cost=0.1, limits=Limits(max_spend=3.0))
        await campaign.plan()
        await all_of(run := campaign.run())
        summary = await campaign.summary()
    assert run.reason == "the cap on spend, 3.0, is reached"
    assert len(sim.ledger.invites) == 30
    assert summary.spent == pytest.approx(3.0)


async def test_limits_come_with_the_plan_or_not_at_all(sim, tmp_path, monkeypatch):
    """A run of a plan whose process was killed before its limits were written would ask without any."""
    path, commits = tmp_path / "run.ledger", []
    connect = sqlite3.connect

    def traced(*args, **options) -> sqlite3.Connection:
        database = connect(*args, **options)

        def look(statement: str) -> None:
            if statement == "COMMIT":
                commits.append({name for (name,) in database.execute("SELECT name FROM facts")})

        database.set_trace_callback(look)
        return database

    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, limits=Limits(max_invites=5))
        monkeypatch.setattr(sqlite3, "connect", traced)
        await campaign.plan()
    with_plan = [names for names in commits if "plan" in names]
    assert with_plan
    assert all("limits" in names for names in with_plan)
    assert path.exists()


async def test_a_plan_that_cannot_be_committed_is_none(sim, tmp_path, monkeypatch):
    committed = []

    @contextmanager
    def failing(database):
        with transaction(database):
            yield
            if database.execute("SELECT count(*) FROM facts WHERE name = 'plan'").fetchone()[0]:
                committed.append(True)
                raise sqlite3.OperationalError("database or disk is full")

    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        monkeypatch.setattr("sampling_async.campaign._ledger_file.transaction", failing)
        with pytest.raises(LedgerError, match="disk is full"):
            await campaign.plan()
        assert committed
        assert not (tmp_path / "run.ledger").exists()
        monkeypatch.undo()
        assert (await campaign.plan()).pairs


async def test_what_an_invite_cost_and_is_worth_does_not_change_with_a_later_plan(sim, tmp_path):
    async with sim.client() as client:
        quotas = await client.get_quotas()
        given = {"inventory": quotas, "allocate": Allocate(1)}
        first = campaign_of(sim, client, tmp_path, cost=2.0, limits=Limits(max_spend=40.0), **given)
        await first.plan()
        sim.faults.add(Fault.cut(when="after").on("bulk_invite", every=7))
        await all_of(first.run())
        before = await first.summary()
        assert (before.pairs.invited + before.pairs.unknown, before.spent) == (20, 40.0)
        assert before.pairs.unknown
        dear = [evolve(survey, price=evolve(survey.price, amount=1000.0)) for survey in quotas.surveys]
        given = {"inventory": dear, "allocate": Allocate(3)}
        second = campaign_of(sim, client, tmp_path, cost=1.0, **given)
        await second.top_up()
        after = await second.summary()
        assert (after.spent, after.expected_value) == (40.0, before.expected_value)
        assert await all_of(run := second.run()) == []
        assert run.reason == "the cap on spend, 40.0, is reached"
        await second.limit(max_spend=50.0)
        await all_of(run := second.run())
        summary = await second.summary()
    new = summary.pairs.invited + summary.pairs.unknown - 20
    assert (new, summary.spent) == (10, 50.0)
    worth = {quota.quota_id: quota.value for quota in summary.quotas}
    invited = rows(tmp_path / "run.ledger", "SELECT quota FROM pairs WHERE plan = 2 AND state = 'invited'")
    gained = sum(worth[quota_id] for (quota_id,) in invited)
    assert gained > 100 * before.expected_value  # by the new prices
    assert summary.expected_value == pytest.approx(before.expected_value + gained) == run.expected_value


async def test_surveys_of_a_generator_can_be_planned_with_twice(sim, tmp_path):
    async with sim.client() as client:
        quotas = await client.get_quotas()
        surveys = (survey for survey in quotas.surveys)
        campaign = campaign_of(sim, client, tmp_path, inventory=surveys, limits=Limits(max_invites=5))
        assert (await campaign.plan()).quotas
        assert (await campaign.top_up()).quotas


async def test_a_clock_that_is_set_back_delays_a_repetition_by_no_more_than_usual(sim, tmp_path):
    ahead = [365 * 86_400.0]

    def wall_clock() -> float:
        return time.time() + ahead[0]

    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, retry_seconds=0.01, wall_clock=wall_clock)
        await campaign.plan()
        sim.faults.add(Fault.refusal(36).on("bulk_invite", times=10))

        async def outcomes():
            async with campaign.run() as run:
                async for outcome in run:
                    if outcome.result_code == 36:
                        ahead[0] = 0.0
                    yield outcome

        with anyio.fail_after(20):
            assert [outcome async for outcome in outcomes()]
        holds(sim, summary := await campaign.summary())
    assert (summary.state, summary.pairs.pending) == ("finished", 0)


@pytest.mark.parametrize(
    ("spent", "cost", "pairs"),
    [
        (0.0, 0.0, 5),
        (10.0, 0.0, 0),
        (7.0, 1.0, 3),
        (0.0, 1.0, 5),
        (9.9, 0.1, 1),  # as the sum of many costs has it
        (11.0, 1.0, 0),
        (0.0, 1e-310, 5),
        (11.0, 1e-310, 0),  # the cap was lowered
    ],
)
def test_as_many_pairs_are_requested_as_the_cap_on_spend_allows(spent, cost, pairs):
    book = SimpleNamespace(committed=0, most_spent=spent, cost_of=lambda _: cost)
    run = SimpleNamespace(limits=Limits(max_spend=10.0), _book=book)
    assert CampaignRun._left(run, SimpleNamespace(due=dict.fromkeys(range(5), 0))) == pairs


async def test_a_cost_that_is_next_to_nothing_is_no_error(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, cost=1e-310, limits=Limits(max_spend=1.0))
        await campaign.plan()
        await all_of(campaign.run())
        assert (await campaign.summary()).state == "finished"


async def test_unknown_pairs_count_against_the_cap_on_spend(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, cost=1.0, limits=Limits(max_spend=30))
        await campaign.plan()
        sim.faults.add(Fault.cut(when="after").on("bulk_invite", every=3))
        await all_of(campaign.run())
        pairs = (await campaign.summary()).pairs
        assert await all_of(campaign.run()) == []
    assert len(sim.ledger.invites) <= 30
    assert pairs.invited + pairs.unknown == 30
    assert pairs.unknown


async def test_the_cost_can_be_given_by_quota_or_by_a_function(sim, tmp_path):
    async with sim.client() as client:
        quotas = await client.get_quotas()
        dear = quotas.surveys[0].quotas[0].quota_id
        for number, cost in enumerate(({dear: 2.0}, lambda _, quota: 2.0 if quota.quota_id == dear else 0.0)):
            path = tmp_path / f"{number}.ledger"
            await campaign_of(sim, client, tmp_path, ledger=path, inventory=quotas, cost=cost).plan()
            assert rows(path, "SELECT quota, cost FROM terms WHERE cost > 0") == [(dear, 2.0)]
        with pytest.raises(InvalidRequestError, match="the cost of quota"):
            await campaign_of(sim, client, tmp_path, ledger=tmp_path / "x", cost=-1.0).plan()
        with pytest.raises(InvalidRequestError, match="must be a finite number"):
            await campaign_of(sim, client, tmp_path, ledger=tmp_path / "x", cost=float("inf")).plan()


async def waits_for(run, kind: str) -> None:
    """Read outcomes until the run waits for something of that kind."""
    with anyio.fail_after(60):
        while run.waiting_for != kind:
            with anyio.move_on_after(0.05):
                await anext(run)


async def test_a_pause_from_elsewhere_holds_a_run_until_it_is_resumed(sim, tmp_path):
    async with sim.client(max_concurrency=2) as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        await campaign.pause("lunch")
        other = Campaign(client, ledger=tmp_path / "run.ledger")
        async with campaign.run() as run:
            await waits_for(run, "paused")
            assert not sim.ledger.requests(endpoint="bulk_invite")
            summary = await other.summary()
            assert (summary.state, summary.reason) == ("paused", "lunch")
            await other.resume()
            with anyio.fail_after(20):
                outcomes = [outcome async for outcome in run]
            assert run.waiting_for is None
    assert outcomes
    holds(sim, await campaign.summary())


async def test_outside_of_its_hours_a_run_waits(sim, tmp_path):
    now = [1_700_000_000.0]  # 22:13:20 UTC
    async with sim.client() as client:
        campaign = campaign_of(
            sim, client, tmp_path, limits=Limits(hours="02:00-04:00"), wall_clock=lambda: now[0]
        )
        await campaign.plan()
        async with campaign.run() as run:
            await waits_for(run, "hours")
            now[0] += 4 * 3600
            with anyio.fail_after(20):
                assert [outcome async for outcome in run]
        summary = await campaign.summary()
    (wait,) = summary.waits
    assert (wait.kind, wait.seconds) == ("hours", pytest.approx(4 * 3600, abs=5))


async def test_invites_a_minute_are_kept_to(sim, tmp_path):
    clock = [0.0]
    async with sim.client(max_concurrency=4) as client:
        campaign = campaign_of(
            sim, client, tmp_path, limits=Limits(invites_per_minute=600), clock=lambda: clock[0]
        )
        await campaign.plan()
        async with campaign.run() as run:
            for second in range(1, 4):
                with anyio.fail_after(60):
                    while len(sim.ledger.invites) < 8 * (second - 1):
                        await anext(run)
                await waits_for(run, "rate")
                # Ten a second, and the pairs of one member more, which are asked for together.
                assert len(sim.ledger.invites) <= 10 * second + 3
                clock[0] += 1


async def test_invites_without_a_limit_do_not_count_against_a_later_one(sim, tmp_path):
    clock = [0.0]
    sim = Simulator(7, surveys=30, members=120, latency=Latency(a=0.02))
    async with sim.client(max_concurrency=2) as client:
        campaign = campaign_of(
            sim, client, tmp_path, limits=Limits(invites_per_minute=6000), clock=lambda: clock[0]
        )
        await campaign.plan()
        async with campaign.run() as run:
            await anext(run)
            for limit in (None, 6000):
                await campaign.limit(invites_per_minute=limit)
                with anyio.fail_after(60):
                    while run.limits.invites_per_minute != limit:
                        await anext(run)
                if limit is None:
                    for _ in range(200):
                        await anext(run)
            await waits_for(run, "rate")
            made = len(sim.ledger.invites)
            clock[0] += 1
            with anyio.fail_after(20):  # a busy machine takes its time
                while len(sim.ledger.invites) <= made:
                    await anext(run)
            assert len(sim.ledger.invites) > made


async def test_no_more_members_are_requested_at_once_than_the_limit_says(tmp_path):
    at_once = []
    sim = Simulator(7, surveys=30, members=60)
    async with sim.client(max_concurrency=8) as client:
        campaign = campaign_of(sim, client, tmp_path, limits=Limits(concurrency=2))
        await campaign.plan()
        async with campaign.run() as run:
            async for _ in run:
                at_once.append(run._record.members)
        await campaign.summary()
    assert max(at_once) <= 2


async def test_limits_are_checked_and_kept(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, limits=Limits(concurrency=3))
        await campaign.plan()
        assert (await campaign.limit(invites_per_minute=60)).concurrency == 3
        for wrong in (
            {"concurrency": 0},
            {"max_invites": -1},
            {"hours": "25:00-26:00"},
            {"zone": "Moon"},
            {"max_spend": float("inf")},
            {"invites_per_minute": float("inf")},
            {"paused": "false"},
            {"reason": 7},
            {"paused": None},
            {"x": 1},
        ):
            with pytest.raises(InvalidRequestError):
                await campaign.limit(**wrong)
        summary = await campaign.summary()
    assert summary.limits == {"members asked for at once": "3", "invites a minute": "60"}


# --- Topping up


async def test_a_top_up_asks_nobody_for_a_survey_that_they_have(sim, tmp_path):
    now = [1_700_000_000.0]
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, wall_clock=lambda: now[0])
        await campaign.plan()
        await all_of(campaign.run())
        first = await campaign.summary()
        now[0] += 3 * 86_400
        plan = await campaign.top_up()
        assert plan.number == 2
        outcomes = await all_of(campaign.run())
        summary = await campaign.summary()
    assert summary.pairs.invited > first.pairs.invited
    assert 38 not in {outcome.result_code for outcome in outcomes}  # SURVEY_TAKEN
    holds(sim, summary)
    twice = rows(
        tmp_path / "run.ledger",
        "SELECT count(*) FROM invites GROUP BY member, survey HAVING count(*) > 1",
    )
    assert twice == []


@pytest.mark.parametrize(
    ("code", "is_asked_again"),
    [
        (ResultCode.QUOTA_FULL, True),
        (ResultCode.MAX_DAILY_EXCEEDED, True),
        (ResultCode.TECHNICAL_ERROR, True),
        (ResultCode.SURVEY_TAKEN, False),
        (ResultCode.MEMBER_DOES_NOT_MATCH_QUOTA, False),
    ],
)
async def test_a_top_up_asks_again_where_the_reason_of_a_refusal_may_have_passed(
    sim, tmp_path, code, is_asked_again
):
    path = tmp_path / "run.ledger"
    asked = (
        "SELECT DISTINCT p.member, q.survey FROM pairs AS p JOIN quotas AS q ON q.id = p.quota WHERE p.plan = ?"
    )
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, retry_seconds=0.01)
        await campaign.plan()
        sim.faults.add(Fault.refusal(code).on("bulk_invite"))
        await all_of(campaign.run())
        refused = set(rows(path, f"{asked} AND p.state = 'rejected'", 1))
        await campaign.top_up()
    assert refused
    assert bool(refused & set(rows(path, asked, 2))) is is_asked_again


async def test_invites_that_are_still_open_take_room_in_a_top_up(sim, tmp_path):
    room = {}
    async with sim.client() as client:
        quotas = await client.get_quotas()
        quota = max(
            (q for s in quotas.surveys for q in s.quotas), key=lambda q: q.estimated_completes_remaining
        )
        room = {quota.quota_id: 10}
        campaign = campaign_of(sim, client, tmp_path, inventory=quotas, allocate=Allocate(1, room=room))
        plan = await campaign.plan()
        await all_of(campaign.run())
        invited = (await campaign.summary()).pairs.invited
        assert 0 < invited <= plan.pairs <= 10
        again = await campaign.top_up()
        assert again.pairs <= 10 - invited
        later = await campaign.top_up(open_seconds=1e-9)
        assert later.number == 3


async def test_a_member_gets_no_more_by_a_top_up_while_its_invites_are_open(sim, tmp_path):
    now = [1_700_000_000.0]
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, wall_clock=lambda: now[0])
        await campaign.plan()
        await all_of(campaign.run())
        most = rows(
            tmp_path / "run.ledger", "SELECT max(n) FROM (SELECT count(*) AS n FROM invites GROUP BY member)"
        )
        assert most == [(3,)]
        now[0] += 3600
        await campaign.top_up()
        await all_of(campaign.run())
        holds(sim, await campaign.summary())
    counts = rows(tmp_path / "run.ledger", "SELECT count(*) FROM invites GROUP BY member")
    # A member that was refused once gets one more, and no member more than three in all.
    assert max(count for (count,) in counts) <= 3


async def test_a_top_up_skips_what_was_pending(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, limits=Limits(max_invites=5))
        await campaign.plan()
        await all_of(campaign.run())
        before = await campaign.summary()
        await campaign.top_up()
        after = await campaign.summary()
        assert after.skipped["planned anew"] == before.pairs.pending
        with pytest.raises(InvalidRequestError, match="needs a panel"):
            await Campaign(client, ledger=tmp_path / "run.ledger").top_up()


async def test_a_top_up_after_a_kill_asks_nobody_again_for_what_was_in_flight(sim, tmp_path):
    path = tmp_path / "run.ledger"
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        ((code, quotas),) = rows(
            path,
            "SELECT m.code, json_group_array(p.quota) FROM pairs AS p JOIN members AS m ON m.id = p.member"
            " WHERE m.id = 1",
        )
        # The service has made the invites, and the process died before the response came.
        await client.bulk_invite(code, json.loads(quotas))
        rows_written(path, "INSERT INTO requests VALUES (1, 1, ?)", quotas)
        lost = len(json.loads(quotas))
        await campaign.top_up()
        assert (await campaign.summary()).pairs.unknown == lost
        outcomes = await all_of(campaign.run())
        summary = await campaign.summary()
    surveys = {invite.survey_id for invite in sim.ledger.invites if invite.member_code == code}
    assert len(surveys) == sum(invite.member_code == code for invite in sim.ledger.invites)
    assert not {o.quota_id for o in outcomes if o.member_code == code} & set(json.loads(quotas))
    assert summary.pairs.unknown == lost
    holds(sim, summary)


# --- Files


async def test_files_say_what_became_of_everybody(sim, tmp_path):
    out = tmp_path / "out"
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        await all_of(campaign.run())
        summary = await campaign.write(out)
    assert sorted(path.name for path in out.iterdir()) == [
        "invites.parquet",
        "pairs.parquet",
        "report.html",
        "summary.json",
    ]
    invites = pq.read_table(out / "invites.parquet").to_pylist()
    by_pair = {(each.member_code, each.quota_id): each.url for each in sim.ledger.invites}
    assert {(row["member_code"], row["quota_id"]): row["url"] for row in invites} == by_pair
    pairs = pq.read_table(out / "pairs.parquet")
    assert len(pairs) == summary.pairs.planned
    told = json.loads((out / "summary.json").read_text())
    assert told["pairs"]["invited"] == summary.pairs.invited == len(invites)
    page = (out / "report.html").read_text()
    assert f"{summary.pairs.invited:,}" in page
    assert not any(row["member_code"] in page or row["url"] in page for row in invites)
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o600}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
async def test_invites_can_be_divided_into_folders(sim, tmp_path, kind):
    out = tmp_path / "out"
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        await all_of(campaign.run())
        await campaign.write(out, partitions=("day", "survey_id"), kind=kind)
        summary = await campaign.write(out, partitions=("day", "survey_id"), kind=kind)
    files = sorted((out / "invites").rglob(f"*.{kind}"))
    assert all(path.parent.name.startswith("survey_id=") for path in files)
    days = {path.parent.parent.name for path in files}
    assert all(date.fromisoformat(day.removeprefix("day=")) for day in days)
    if kind == "jsonl":
        found = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    else:
        found = [row for path in files for row in pq.ParquetFile(path).read().to_pylist()]
    assert len(found) == summary.pairs.invited == len({row["url"] for row in found})
    assert "survey_id" not in found[0]
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


async def test_invites_of_another_format_are_replaced_too(sim, tmp_path):
    folder, form = tmp_path / "out", []
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, limits=Limits(max_invites=5))
        await campaign.plan()
        await all_of(campaign.run())
        for options in ({}, {"partitions": ["survey_id"]}, {"kind": "jsonl"}, {}):
            await campaign.write(folder, **options)
            form.append([path.name for path in folder.glob("invites*")])
        assert form == [["invites.parquet"], ["invites"], ["invites.jsonl"], ["invites.parquet"]]
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


async def test_a_folder_with_files_of_somebody_else_is_refused_and_left_alone(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, ledger=tmp_path / "a.ledger")
        await campaign.plan()
        for name in ("invites", "invites.jsonl", "pairs.parquet", "report.html", "summary.json"):
            (tmp_path / name).mkdir()
            there = tmp_path / name / name
            if name == "invites":
                there.mkdir()
                (there / "precious.txt").write_text("precious")
            else:
                there.write_text("[]")
            with pytest.raises(
                InvalidRequestError, match=f"holds {name}, which is not of a campaign; name another"
            ):
                await campaign.write(tmp_path / name)
            assert [path.name for path in (tmp_path / name).iterdir()] == [name]
        await campaign.write(tmp_path / "ours")
        await campaign.write(tmp_path / "ours", kind="jsonl")
        other = campaign_of(sim, client, tmp_path, ledger=tmp_path / "b.ledger")
        await other.plan()
        with pytest.raises(InvalidRequestError, match=r"which is of the campaign of a\.ledger; name another"):
            await other.write(tmp_path / "ours")


async def test_wrong_partitions_are_refused_before_anything_is_read(sim, tmp_path):
    async with sim.client() as client:
        campaign = Campaign(client, ledger=tmp_path / "none")
        with pytest.raises(InvalidRequestError, match="divided by survey_id, wave_id, quota_id, day"):
            await campaign.write(tmp_path / "out", partitions=("country",))
        with pytest.raises(InvalidRequestError, match="parquet, jsonl or csv"):
            await campaign.write(tmp_path / "out", kind="xlsx")


async def test_a_run_that_was_killed_was_active_until_its_last_sign(sim, tmp_path):
    """Its moments are ten seconds apart, and there are none while the service is away."""
    now = 1_000_000.0
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, wall_clock=lambda: now)
        await campaign.plan()
        run = campaign.run()
        async with run:
            await anext(run)
            now += 24.0
            await run.poll_limits()
        rows_written(tmp_path / "run.ledger", "UPDATE runs SET ended = NULL")
        assert (await campaign.summary()).active_seconds == 24.0
        now += 1000.0
        async with campaign.run():
            now += 2.0
        assert (await campaign.summary()).active_seconds == 26.0


@pytest.mark.skipif(sys.platform == "win32", reason="a folder cannot be locked")
async def test_what_a_killed_write_has_left_is_removed_by_the_next_and_nothing_else_is(sim, tmp_path):
    out = tmp_path / "out"
    (out / ".campaign-ab_12cd3" / "invites-before").mkdir(parents=True)
    (out / ".campaign-ab_12cd3" / "pairs.parquet").write_text("member codes")
    others = [".campaign-theirs", ".campaign-notes.txt", "campaign-ab_12cd3"]
    (out / others[0]).mkdir()
    (out / others[0] / "holiday.jpg").touch()
    (out / others[1]).touch()
    (out / others[2]).mkdir()
    (out / ".campaign-link").symlink_to(out / others[2])
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        await campaign.write(out)
        assert {path.name for path in out.iterdir()} == {
            *others, ".campaign-link", "invites.parquet", "pairs.parquet", "summary.json", "report.html",
        }  # fmt: skip
        with _files._in_use(out):  # another process is writing
            (out / ".campaign-living00").mkdir()
            await campaign.write(out)
        assert (out / ".campaign-living00").exists()
        await campaign.write(out)
        assert not (out / ".campaign-living00").exists()


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
    states = {(code, quota): state for code, quota, state in rows(path, query)}
    made = sim.ledger.by_pair()
    assert all(states[pair] in {"invited", "unknown"} for pair in made)
    assert all(state != "invited" or pair in made for pair, state in states.items())
    asked = Counter(
        (r.member_code, q) for r in sim.ledger.requests(endpoint="bulk_invite") for q in r.quota_ids
    )
    assert max(asked.values()) == 1
