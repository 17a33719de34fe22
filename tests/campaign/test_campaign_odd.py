"""Campaigns in odd circumstances: clocks set back, kills between two writes, files and ledgers of others."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import anyio
import pytest
from cli_kit import lines, run, served_panel
from panel_kit import sql
from store_kit import SECRET

from sampling_async import InvalidRequestError
from sampling_async._cli import _campaign_run
from sampling_async.campaign import Campaign, LedgerError, Limits, erase_from_ledger
from sampling_async.notifications import Inbox
from sampling_async.simulator import Fault

LEDGER = Path("out/campaign.ledger")
GIVEN = ("panel.jsonl", "--out", "out", "--workers", 1)


@pytest.fixture
def service(tmp_path, monkeypatch):
    with served_panel(tmp_path, monkeypatch) as simulator:
        yield simulator


def campaign(*arguments, code: int = 0):
    result = run("campaign", *arguments)
    assert result.exit_code == code, (result.stdout, result.stderr)
    return result


def limits() -> dict:
    (found,) = lines(campaign("limit", "out"))
    return found


# --- The question, the settings and the caps


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_plan_that_nobody_has_confirmed_is_asked_about_whatever_the_clocks_say(service, hours):
    campaign(*GIVEN, "--allocate", 1, "--yes")
    sql(LEDGER, "UPDATE runs SET began = began + ?", 3600 * hours)
    campaign("top-up", "out", "--allocate", 5, "--workers", 1, "--dry-run")
    asked = service.ledger.request_count
    assert "give --yes" in campaign("run", "--out", "out", code=2).stderr
    assert len(service.ledger.requests(endpoint="bulk_invite")) <= asked
    campaign("run", "--out", "out", "--yes")
    campaign("run", "--out", "out")  # the plan has been begun


def test_settings_and_caps_are_there_as_soon_as_the_plan_is(service, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_campaign_run.CampaignJob, "_saved", killed)
        run("campaign", *GIVEN, "--max-invites", 7, "--max-turns", 1, "--format", "csv", "--yes")
    saved = json.loads(sql(LEDGER, "SELECT value FROM facts WHERE name = 'command'")[0][0])
    assert (saved["max_turns"], saved["format"], Path(saved["panel"]).name) == (1, "csv", "panel.jsonl")
    assert limits()["MaxInvites"] == 7
    campaign("run", "--out", "out", "--yes", code=6)
    assert Path("out/invites.csv").exists()
    with monkeypatch.context() as patch:
        patch.setattr(_campaign_run.CampaignJob, "_saved", killed)
        run("campaign", "top-up", "out", "--max-spend", 10, "--workers", 1)
    assert (limits()["MaxInvites"], limits()["MaxSpend"]) == (7, 10.0)


@pytest.mark.parametrize("value", ["1_5", "\N{ARABIC-INDIC DIGIT ONE}"])
def test_a_cap_is_written_in_digits(service, value):
    assert f"not {value!r}" in campaign(*GIVEN, "--max-spend", value, code=2).stderr


# --- Columns of earlier nights


@pytest.mark.parametrize("left", ["2", "1", ""])
def test_a_top_up_reads_a_panel_as_a_plan_does(service, left):
    codes = "".join(f"{code},{left},2000247,30\n" for code in service.members)
    Path("panel.csv").write_text(f"member_code,invites_left,1001007,1001538\n{codes}")
    campaign("panel.csv", "--out", "out", "--workers", 1, "--max-invites", 3, "--yes", code=6)
    campaign("top-up", "out", "--workers", 1, "--dry-run")
    pairs = sql(LEDGER, "SELECT member, count(*) FROM pairs WHERE state = 'pending' GROUP BY member")
    assert pairs
    assert max(count for _, count in pairs) <= int(left or 5)


def test_an_error_of_a_top_up_names_the_row(service):
    campaign(*GIVEN, "--max-invites", 3, "--yes", code=6)
    rows = [json.loads(line) for line in Path("panel.jsonl").read_text().splitlines()]
    rows[5]["invites_left"] = "two"
    Path("panel.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused = campaign("top-up", "out", "--workers", 1, "--dry-run", code=2).stderr
    assert "row 5 of the panel: column 'invites_left' must hold whole numbers, not 'two'" in refused


# --- Files


def test_folders_of_one_name_are_two_nights(service):
    for folder in ("night", "d1/night", "d2/night"):
        campaign("panel.jsonl", "--out", folder, "--workers", 1, "--max-invites", 2, "--yes", code=6)
    (found,) = lines(campaign("compare", "d1/night", "night", "d2/night"))
    assert {night["Name"] for night in found["Nights"]} == {"night", str(Path("night").resolve()), "d2/night"}


def test_a_store_that_is_gone_at_the_end_costs_the_revenue_and_not_the_files(service, monkeypatch):
    async def made():
        async with Inbox("n.db", secrets=SECRET):
            pass

    anyio.run(made)
    write = _campaign_run.ShownRun._write

    async def without_store(shown, campaign):
        shutil.move("n.db", "moved.db")
        return await write(shown, campaign)

    monkeypatch.setattr(_campaign_run.ShownRun, "_write", without_store)
    done = campaign(*GIVEN, "--notifications", "n.db", "--yes")
    assert "The files are without completes and revenue" in done.stderr
    assert {"invites.parquet", "pairs.parquet", "report.html"} <= {each.name for each in Path("out").iterdir()}


def test_files_are_written_into_no_folder_of_another_campaign_and_always_into_ones_own(service):
    campaign(*GIVEN, "--max-invites", 2, "--yes", code=6)
    campaign("panel.jsonl", "--out", "other", "--workers", 1, "--max-invites", 2, "--yes", code=6)
    before = Path("other/invites.parquet").read_bytes()
    refused = campaign("report", "out", "--out", "other", code=2).stderr
    assert "other holds the ledger of another campaign; name another folder" in refused
    assert Path("other/invites.parquet").read_bytes() == before
    Path("out/summary.json").unlink()  # as after a kill between two files
    campaign("report", "out")
    campaign("run", "--out", "out", code=6)


def test_what_is_not_utf_8_is_refused_before_the_work(service):
    assert "must be UTF-8" in campaign("panel.jsonl", "--out", "s\udcfc", "--yes", code=2).stderr
    assert not service.ledger.request_count
    assert (
        "the query is not UTF-8" in campaign("SELECT 'M\udcfc' AS member_code", "--out", "out", code=2).stderr
    )
    campaign(*GIVEN, "--dry-run")
    assert "\\udcfc" in campaign("pause", "out", "--reason", "f\udcfcr").stdout
    assert json.loads(campaign("status", "out").stdout)
    with pytest.raises(InvalidRequestError, match="lone surrogates"):
        erase_from_ledger(LEDGER, "\udcff")


def test_a_byte_order_mark_is_no_part_of_the_code_that_is_erased(service):
    campaign(*GIVEN, "--max-invites", 2, "--yes", code=6)
    (code,) = sql(LEDGER, "SELECT code FROM members LIMIT 1")[0]
    done = run("erase", "-", "--ledger", LEDGER, stdin=f"\ufeff{code}\r\n")
    assert (done.exit_code, "erased" in done.stderr) == (0, True)
    assert not sql(LEDGER, "SELECT 1 FROM members WHERE code = ?", code)


def test_an_empty_inventory_is_exit_code_1_and_the_next_try_plans(service):
    service.faults.add(
        Fault.body(b'{"Surveys":[],"CountryID":1,"CacheExpires":"2026-11-30T00:00:00Z"}').on(
            "get_quotas", times=1
        )
    )
    assert "no quota that is open, so nothing is planned" in campaign(*GIVEN, "--yes", code=1).stderr
    assert "The campaign is finished" in campaign(*GIVEN, "--yes").stderr


# --- Ledgers


async def test_a_ledger_without_a_plan_has_nothing_to_run(tmp_path):
    with served_panel(tmp_path, pytest.MonkeyPatch()) as simulator:
        async with simulator.client() as client:
            made = Campaign(client, "panel.jsonl", ledger="run.ledger", limits=Limits())
            await made.plan()
            with closing(sqlite3.connect("run.ledger")) as database, database:
                database.execute("DELETE FROM facts WHERE name = 'plan'")
            with pytest.raises(LedgerError, match="has no plan"):
                async with made.run():
                    pass


@pytest.mark.parametrize(
    ("statement", "command"),
    [
        ("UPDATE facts SET value = '[1]' WHERE name = 'command'", ("run", "--out", "out", "--yes")),
        ("UPDATE facts SET value = 'xx' WHERE name = 'command'", ("report", "out")),
        ("UPDATE facts SET value = 'x' WHERE name = 'plan'", ("status", "out")),
        ("UPDATE invites SET at = 'x'", ("report", "out")),
        ("UPDATE facts SET value = 'abc' WHERE name = 'requests'", ("run", "--out", "out", "--yes")),
    ],
)
def test_a_value_of_a_ledger_that_nobody_writes_is_damage(service, statement, command):
    campaign(*GIVEN, "--max-invites", 2, "--yes", code=6)
    sql(LEDGER, statement)
    shutil.copytree("out", "kept")
    refused = campaign(*command, code=4)
    assert "is damaged: it holds a value that no campaign writes" in refused.stderr
