"""Campaigns from inside: who has a ledger, and what a plan, a run or a write leaves that ends midway."""

from __future__ import annotations

import sqlite3
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import anyio
import pytest
from panel_kit import all_of, campaign_of, holds, planned_campaign, sql

from sampling_async._journal import lock as _lock
from sampling_async._journal.database import transaction
from sampling_async._pacing.threads import CancelFlag
from sampling_async.campaign import LedgerError, Limits, _files, _report
from sampling_async.campaign._ledger import CampaignLedger
from sampling_async.campaign._run import CampaignRun
from sampling_async.simulator import Latency, Simulator


async def test_a_run_that_is_cancelled_while_it_begins_says_so(sim, tmp_path, monkeypatch):
    async with planned_campaign(sim, tmp_path) as campaign:
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


async def test_a_child_that_was_forked_off_a_run_does_not_go_on_with_it(tmp_path):
    sim = Simulator(7, surveys=30, members=120, latency=Latency(a=0.1))
    async with planned_campaign(sim, tmp_path, max_concurrency=1) as campaign:
        with pytest.raises(LedgerError, match="was forked from its run"):
            async with campaign.run() as run:
                await anext(run)
                _lock._forget_all()  # as after a fork, see test_journal_file
                async for _ in run:
                    pass
        assert len(sim.ledger.invites) < 60


async def test_a_plan_that_another_process_made_meanwhile_is_taken(sim, tmp_path):
    async with sim.client() as client:
        slow = campaign_of(sim, client, tmp_path)
        planner = await slow._planner()
        first = await campaign_of(sim, client, tmp_path).plan()
        assert slow._planned(planner, None, CancelFlag()) == first
        assert sql(tmp_path / "run.ledger", "SELECT max(plan) FROM pairs") == [(1,)]


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


async def test_files_that_are_cancelled_replace_nothing(sim, tmp_path, monkeypatch):
    began, go_on = threading.Event(), threading.Event()
    report = _report.report

    def slow(*args, **kwargs):
        began.set()
        go_on.wait(10)
        return report(*args, **kwargs)

    async with planned_campaign(sim, tmp_path) as campaign:
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
    async with planned_campaign(sim, tmp_path) as campaign:
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
