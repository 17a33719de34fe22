"""Plans of campaigns: what they say, what they are made from, and who may make one."""

from __future__ import annotations

import sqlite3
import stat
import threading
from contextlib import closing
from uuid import UUID

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from panel_kit import AGES, all_of, campaign_of, panel_table, planned_campaign, sql

from sampling_async import InvalidRequestError, RetryPolicy
from sampling_async.campaign import Campaign, LedgerError, Limits
from sampling_async.matching import Allocate, LiveIndex, PanelMatcher, QuotaIndex
from sampling_async.simulator import Fault, Simulator

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
        index = QuotaIndex(await client.get_quotas(), kinds=AGES)
        await campaign_of(sim, client, tmp_path, inventory=index).plan()
    given = PanelMatcher(index, Allocate(3)).run(panel_table(sim)).read_all().to_pylist()
    expected = {(row["member_code"], quota_id) for row in given for quota_id in row["quota_ids"]}
    query = "SELECT m.code, p.quota FROM pairs AS p JOIN members AS m ON m.id = p.member"
    assert set(sql(tmp_path / "run.ledger", query)) == expected


async def test_quotas_that_close_while_a_plan_is_made_change_nothing_in_it(sim, tmp_path):
    """The cost is asked for each quota after the panel was matched; here that closes all quotas."""
    for name in "ab":
        (tmp_path / name).mkdir()
    async with sim.client() as client:
        index = QuotaIndex(await client.get_quotas(), kinds=AGES)
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
        async with LiveIndex(watch, kinds=AGES) as live:
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
        ({"member_code": ["a", ""], "1001538": [30, 40]}, "row 1 of the panel: a member code cannot be empty"),
        (
            {"member_code": ["b", "'a'\0"], "1001538": [30, 40]},
            "row 1 of the panel: .* cannot hold control",
        ),
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
            planned = {code for (code,) in sql(ledger, "SELECT code FROM members")}
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
    async with planned_campaign(sim, tmp_path) as campaign:
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
            assert sql(path, "SELECT max(plan) FROM pairs") == [(1,)]
            assert (await Campaign(None, ledger=path).summary()).pairs.pending == found[0].pairs


# --- Limits


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


async def test_surveys_of_a_generator_can_be_planned_with_twice(sim, tmp_path):
    async with sim.client() as client:
        quotas = await client.get_quotas()
        surveys = (survey for survey in quotas.surveys)
        campaign = campaign_of(sim, client, tmp_path, inventory=surveys, limits=Limits(max_invites=5))
        assert (await campaign.plan()).quotas
        assert (await campaign.top_up()).quotas


async def test_the_cost_can_be_given_by_quota_or_by_a_function(sim, tmp_path):
    async with sim.client() as client:
        quotas = await client.get_quotas()
        dear = quotas.surveys[0].quotas[0].quota_id
        for number, cost in enumerate(({dear: 2.0}, lambda _, quota: 2.0 if quota.quota_id == dear else 0.0)):
            path = tmp_path / f"{number}.ledger"
            await campaign_of(sim, client, tmp_path, ledger=path, inventory=quotas, cost=cost).plan()
            assert sql(path, "SELECT quota, cost FROM terms WHERE cost > 0") == [(dear, 2.0)]
        with pytest.raises(InvalidRequestError, match="the cost of quota"):
            await campaign_of(sim, client, tmp_path, ledger=tmp_path / "x", cost=-1.0).plan()
        with pytest.raises(InvalidRequestError, match="must be a finite number"):
            await campaign_of(sim, client, tmp_path, ledger=tmp_path / "x", cost=float("inf")).plan()
