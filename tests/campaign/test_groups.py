"""Results by age, gender, region and device: in the ledger from the plan on, in the summary and the report."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from contextlib import closing
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from cli_kit import run, served_panel
from panel_kit import AGE, GENDER, all_of, campaign_of, page_of, panel_of, panel_table, quota, survey
from store_kit import SECRET

from sampling_async.campaign import Campaign, erase_from_ledger
from sampling_async.matching import Allocate
from sampling_async.notifications import Inbox, OutcomeLedger
from sampling_async.simulator import Notifying, Simulator

INVENTORY = [survey(quota(remaining=1000))]
ALL = Allocate(5, room={7: 10_000}, survey_room={3: 10_000})  # everybody is planned
COUNTED = ("invited", "entered", "completed", "terminated", "reconciled")


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page.partition("</style>")[2]).split())


async def planned(panel, folder: Path, **more) -> dict[tuple[str, str], int]:
    """Return the planned pairs of each group."""
    campaign = Campaign(None, panel, INVENTORY, ledger=folder / "run.ledger", allocate=ALL, **more)
    await campaign.plan()
    return {(each.kind, each.value): each.planned for each in (await campaign.summary()).groups}


def people(column: pa.Array, name: str = str(AGE), **more) -> pa.Table:
    codes = [f"m{number}" for number in range(len(column))]
    return pa.table({"member_code": codes, name: column, **more})


@pytest.mark.parametrize(
    "ages",
    [
        pa.array([17, 18, 24, 65, 101, None, 12]),
        pa.array(["17", " 18", "24.0", "65", "101", "", "12"]),
        pa.array([17.0, 18.0, 24.0, 65.0, 101.0, float("nan"), 12.0]),
        pa.array(["17", "18", "24", "65", "101", None, "12"]).dictionary_encode(),
    ],
)
async def test_an_age_is_in_its_band_however_it_is_written(tmp_path, ages):
    panel = people(ages)
    found = await planned(panel, tmp_path)
    assert [*found.items()] == [
        (("age", "13-17"), 1),
        (("age", "18-24"), 2),
        (("age", "65 and over"), 2),
        (("age", "not known"), 2),
    ]


async def test_a_region_of_your_own_stands_before_the_dma_and_several_answers_are_no_group(tmp_path):
    profiles = [{GENDER: [2000246]}, {GENDER: [2000246, 2000247]}, {GENDER: []}, {GENDER: [2000247]}]
    panel = panel_of(
        profiles, member_code=list("abcd"), region=["North", "North", None, "01"], device_type=[1, 2, 1, 1]
    ).append_column("1001568", pa.array([1, 2, 3, 4]))
    assert await planned(panel, tmp_path) == {
        ("gender", "2000246"): 1,
        ("gender", "2000247"): 1,
        ("gender", "not known"): 2,
        ("region", "North"): 2,
        ("region", "01"): 1,
        ("region", "not known"): 1,
        ("device", "1"): 3,
        ("device", "2"): 1,
    }


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"\xff\xfe", b"x"]).view(pa.string()),
        pa.array([{"a": 1}, None]),
        pa.nulls(2),
    ],
)
async def test_a_column_of_which_no_group_can_be_made_is_none(tmp_path, column):
    panel = people(pa.array([30, 40]), region=column)
    assert {kind for kind, _ in await planned(panel, tmp_path)} == {"age"}


async def test_more_than_254_groups_of_a_kind_are_others(tmp_path):
    panel = people(pa.array([f"r{number}" for number in range(300)]), "region", **{"1001538": [30] * 300})
    found = [count for (kind, _), count in (await planned(panel, tmp_path)).items() if kind == "region"]
    assert (len(found), found[-1], sum(found)) == (255, 46, 300)


async def test_small_pieces_and_several_processes_give_each_member_its_own_groups(tmp_path):
    ages = [18 + number % 50 for number in range(3_000)]
    batches = people(pa.array(ages)).to_batches(max_chunksize=7)
    table = pa.Table.from_batches(batches)
    await planned(table, tmp_path, workers=2)
    with closing(sqlite3.connect(tmp_path / "run.ledger")) as database:
        names = json.loads(*database.execute("SELECT value FROM facts WHERE name = 'groups'").fetchone())
        rows = database.execute("SELECT code, grouped FROM members").fetchall()
    of_age = {code: names["age"][1][number % 256 - 1] for code, number in rows}
    assert len(of_age) == 3_000
    for code, band in of_age.items():
        first, last = map(int, band.replace(" and over", "-200").split("-"))
        assert first <= ages[int(code[1:])] <= last


async def test_a_top_up_keeps_the_places_of_the_plan_before(tmp_path):
    ledger = tmp_path / "run.ledger"
    await planned(people(pa.array([20, 30])), tmp_path)
    again = Campaign(None, people(pa.array([60, 30, 20])), INVENTORY, ledger=ledger)
    await again.top_up()
    found = {each.value: each.planned for each in (await again.summary()).groups}
    assert found == {"18-24": 1, "30-34": 2, "60-64": 2}  # what was planned before is skipped, and counted


async def test_an_erased_member_is_in_no_group(tmp_path):
    await planned(people(pa.array([20, 30])), tmp_path)
    assert erase_from_ledger(tmp_path / "run.ledger", "m1")
    found = (await Campaign(None, ledger=tmp_path / "run.ledger").summary()).groups
    assert [(each.value, each.planned) for each in found] == [("18-24", 1), ("not known", 1)]


async def ended(folder: Path) -> tuple[Campaign, OutcomeLedger]:
    """Return a campaign whose invites have ended, and the ledger of that."""
    simulator = Simulator(3, surveys=12, members=80, notifying=Notifying(completes=0.4, reconciled=0.2))
    store, clock = folder / "store.db", (lambda: 1_700_000_000.0)
    async with simulator.client() as client, Inbox(store, secrets=SECRET, clock=clock) as inbox:
        table = panel_table(simulator)
        campaign = campaign_of(simulator, client, folder, panel=table, wall_clock=clock)
        await campaign.plan()
        outcomes = OutcomeLedger(store, clock=clock)
        await outcomes.invited([each for each in await all_of(campaign.run()) if each.status == "invited"])
        await simulator.notifications.deliver(inbox)
    return campaign, outcomes


async def test_the_groups_of_each_kind_add_up_to_what_all_invites_have_brought(tmp_path):
    campaign, outcomes = await ended(tmp_path)
    summary = await campaign.summary(outcomes)
    total = summary.ends.total
    assert total.completed > 10
    kinds = Counter(each.kind for each in summary.groups)
    assert [*kinds] == ["age", "gender", "region", "device"]
    for kind in kinds:
        of_kind = [each for each in summary.groups if each.kind == kind]
        assert sum(each.planned for each in of_kind) == summary.pairs.planned
        assert sum(each.invited for each in of_kind) == summary.pairs.invited
        for name in COUNTED:
            assert sum(getattr(each.ends, name) for each in of_kind) == getattr(total, name), name
        assert sum((each.ends.revenue for each in of_kind), Decimal(0)) == total.revenue
    found = summary.to_dict()["groups"]
    assert len(found) == len(summary.groups)
    assert found[0] | {"kind": "age", "question": "1001538"} == found[0]
    assert "expected" not in found[0]
    assert (await campaign.summary()).groups[0].to_dict().keys() == {
        "kind",
        "question",
        "value",
        "planned",
        "invited",
    }


async def test_a_ledger_from_before_has_no_groups_and_all_the_rest(tmp_path):
    campaign, outcomes = await ended(tmp_path)
    before = await campaign.summary(outcomes)
    with closing(sqlite3.connect(tmp_path / "run.ledger")) as database, database:
        database.execute("ALTER TABLE members DROP COLUMN grouped")
        database.execute("DELETE FROM facts WHERE name = 'groups'")
    summary = await campaign.summary(outcomes)
    assert (summary.groups, summary.ends) == ((), before.ends)
    assert "By group of members" not in page_of(summary)
    code = next(iter(Simulator(3, surveys=12, members=80).members))
    assert erase_from_ledger(tmp_path / "run.ledger", code)
    table = panel_table(Simulator(3, surveys=12, members=80))
    again = Campaign(None, table, INVENTORY, ledger=tmp_path / "run.ledger")
    await again.top_up()
    assert {each.kind for each in (await again.summary()).groups} == {"age", "gender", "region", "device"}


async def test_the_report_names_groups_by_the_labels_and_escapes_them(tmp_path):
    campaign, outcomes = await ended(tmp_path)
    labels = {("1001007", ""): "Sex", ("1001007", "2000246"): "<script>x", ("device_type", "1"): "A" * 100}
    await campaign.write(tmp_path / "out", outcomes=outcomes, labels=labels)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page
    assert f">{'A' * 59}…<" in page
    text = text_of(page)
    assert "By gender (Sex)" in text
    assert "&lt;script&gt;x" in text
    assert "By region (1001568): the next" in text
    assert all(scope in page for scope in ('<th scope="row" class="w"><bdi>&lt;script', '<th scope="col"'))


async def test_before_any_end_is_known_planned_pairs_and_invites_are_shown(tmp_path):
    await planned(people(pa.array([20, 30])), tmp_path)
    text = text_of(page_of(await Campaign(None, ledger=tmp_path / "run.ledger").summary()))
    assert "Group Planned Invites Share Bar 18-24 1 0 \N{EN DASH} 30-34 1 0 \N{EN DASH}" in text


@pytest.fixture
def service(tmp_path, monkeypatch):
    with served_panel(tmp_path, monkeypatch) as simulator:
        yield simulator


def test_the_command_takes_a_region_column_and_shows_names(service):
    rows = [json.loads(line) for line in Path("panel.jsonl").read_text().splitlines()]
    Path("panel.jsonl").write_text("".join(json.dumps({**row, "state": "Ohio"}) + "\n" for row in rows))
    Path("names.csv").write_text("question;question name;answer;answer name\n1001007;Sex;2000246;Women\n")
    made = run("campaign", "panel.jsonl", "--out", "out", "--yes", "--workers", 1, "--column", "region=state")
    assert made.exit_code == 0, made.stderr
    assert run("campaign", "report", "out", "--labels", "names.csv").exit_code == 0
    text = text_of(Path("out/report.html").read_text())
    assert "By region (region) Group Planned Invites Share Bar Ohio" in text
    assert "By gender (Sex)" in text
    assert "Women" in text
    assert {each["value"] for each in json.loads(Path("out/summary.json").read_text())["groups"]} > {"Ohio"}


def test_a_run_keeps_its_names_for_later_reports_and_does_without_them_when_they_are_gone(service):
    Path("names.csv").write_text("question,question name,answer,answer name\n1001007,Sex,2000246,Women\n")
    start = ("campaign", "panel.jsonl", "--out", "out", "--yes", "--workers", 1, "--labels")
    refused = run(*start, "none.csv")
    assert (refused.exit_code, Path("out").exists()) == (2, False)
    assert "none.csv" in refused.stderr
    for command in ((*start, "names.csv"), ("campaign", "report", "out")):
        done = run(*command)
        assert done.exit_code == 0, done.stderr
        assert "Women" in Path("out/report.html").read_text()
    Path("names.csv").unlink()
    for command in (("run", "--out", "out", "--yes"), ("report", "out")):
        done = run("campaign", *command)
        assert done.exit_code == 0, done.stderr
        assert "names.csv" in done.stderr
    assert "Women" not in Path("out/report.html").read_text()


@pytest.mark.parametrize(
    "lines",
    [
        [b"member_code,1001538,region", b"m1,30,Z\xfcrich"],
        [b"member_code,1001538,region,region", b"m1,30,North,South"],
        [b"member_code,1001538,1001007,1001007", b"m1,30,2000246,2000247"],
    ],
)
async def test_a_file_with_columns_that_matching_has_no_use_for_is_planned_as_before(tmp_path, lines):
    panel = tmp_path / "panel.csv"
    panel.write_bytes(b"\n".join(lines))
    assert await planned(str(panel), tmp_path) == {("age", "30-34"): 1}


async def test_a_file_has_its_region_in_the_column_that_is_named(tmp_path):
    panel = tmp_path / "panel.csv"
    for column in ("region", "town"):
        (tmp_path / column).mkdir()
        panel.write_text(f"member_code,1001538,{column}\nm1,30,North\nm2,31,South\n")
        found = await planned(str(panel), tmp_path / column, columns={column: "region"})
        assert found["region", "North"] == found["region", "South"] == 1


async def test_a_top_up_without_a_column_keeps_what_was_known_of_members(tmp_path):
    known = people(pa.array([30, 31, 32]), region=["N", "S", "S"])
    ledger = tmp_path / "run.ledger"
    sim = Simulator(1, members=3)
    async with sim.client() as client:
        first = Campaign(client, known, INVENTORY, ledger=ledger, allocate=ALL)
        await first.plan()
        await Campaign(client, known.drop_columns(["region"]), INVENTORY, ledger=ledger, allocate=ALL).top_up()
    found = {(each.kind, each.value): each.planned for each in (await first.summary()).groups}
    assert found["region", "S"] == 2 * found["region", "N"]
    assert found["age", "30-34"] == 3 * found["region", "N"]
