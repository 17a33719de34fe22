"""The commands `campaign ...`: a panel in, invites out, and an account that agrees with the service."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import anyio
import pyarrow.parquet as pq
import pytest
from cli_kit import (
    ENDINGS,
    at_keyboard,
    lines,
    on_terminal,
    program,
    reader_gone,
    run,
    served_panel,
    wait_after_signal,
)
from panel_kit import forget_command

from sampling_async.campaign import Campaign
from sampling_async.notifications import OutcomeLedger
from sampling_async.simulator import Fault, Latency

MEMBERS = 24


@pytest.fixture
def service(tmp_path, monkeypatch):
    with served_panel(tmp_path, monkeypatch) as simulator:
        yield simulator


@pytest.fixture
def terminal(monkeypatch):
    """Have commands believe that they write to a terminal."""
    screen = io.StringIO()
    on_terminal(monkeypatch, screen)
    return screen


def campaign(*arguments, code: int = 0, stdin=None):
    result = run("campaign", *arguments, stdin=stdin)
    assert result.exit_code == code, (result.stdout, result.stderr)
    return result


def started(*arguments, out="out", code: int = 0):
    """Plan and run a campaign, in as few steps as can be."""
    return campaign("panel.jsonl", "--out", out, "--yes", "--workers", 1, *arguments, code=code)


def pairs_in(folder: str) -> list[dict]:
    return pq.read_table(Path(folder) / "pairs.parquet").to_pylist()


def invited(folder: str) -> Counter[tuple[str, int]]:
    return Counter(
        (each["member_code"], each["quota_id"]) for each in pairs_in(folder) if each["status"] == "invited"
    )


def status(folder: str = "out") -> dict:
    (found,) = lines(campaign("status", folder))
    return found


def until(is_so, seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < ends, "it did not come to that"
        time.sleep(0.02)


def adds_up(figures: dict) -> bool:
    parts = ("Invited", "Rejected", "NotSent", "Unknown", "Skipped", "Pending")
    return figures["Planned"] == sum(figures[name] for name in parts)


# --- Running


def test_a_panel_in_and_invites_out_with_an_account_that_agrees_with_the_service(service):
    result = started()
    assert invited("out") == service.ledger.by_pair()
    last = lines(result)[-1]
    assert last["State"] == "finished"
    assert last["Invited"] == len(service.ledger.invites) > MEMBERS
    assert adds_up(last)
    assert last["Requests"] == len(service.ledger.requests(endpoint="bulk_invite"))
    assert {each["status"] for each in pairs_in("out")} <= {"invited", "rejected", "skipped"}
    names = {"campaign.ledger", "invites.parquet", "pairs.parquet", "summary.json", "report.html"}
    assert {path.name for path in Path("out").iterdir()} >= names
    assert "planned = " in result.stderr
    assert "The campaign is finished" in result.stderr
    assert "Files: out" in result.stderr


def test_no_member_code_and_no_link_is_shown_and_only_the_owner_can_read_the_files(service, terminal):
    outputs = [
        started("--json").output,
        campaign("status", "out").output,
        campaign("limit", "out").output,
        campaign("report", "out").output,
        terminal.getvalue(),
    ]
    told = "\n".join(outputs)
    assert not [code for code in service.members if code in told]
    assert "http" not in told
    assert service.api_key not in told
    assert Path("out").stat().st_mode & 0o077 == 0
    for name in ("campaign.ledger", "invites.parquet", "pairs.parquet"):
        assert Path("out", name).stat().st_mode & 0o077 == 0


def test_run_is_what_campaign_does_unless_the_first_word_is_another_command(service):
    Path("pause").write_text(Path("panel.jsonl").read_text())
    Path("pause").rename("pause.jsonl")
    for first in (["panel.jsonl"], ["run", "panel.jsonl"], ["./pause.jsonl", "--bands", "panel.bands.json"]):
        out = f"out{len(first)}"
        (plan,) = lines(campaign(*first, "--out", out, "--dry-run", "--workers", 1))
        assert plan["Members"] == MEMBERS
    (plan,) = lines(campaign("--out", "out1", "--dry-run"))
    assert plan["Members"] == MEMBERS
    assert "did you mean 'status'" in campaign("stauts", "out1", code=2).stderr
    assert "campaign run" in run("campaign", "panel.jsonl", "--help").stdout
    assert "top-up" in run("campaign", "-h").stdout


def test_a_dry_run_requests_nothing_and_keeps_its_plan(service):
    result = campaign("panel.jsonl", "--out", "out", "--dry-run", "--max-invites", 7, "--workers", 1)
    (plan,) = lines(result)
    assert plan["Pairs"] >= plan["Matched"] > 0
    assert (plan["ExpectedInvites"], plan["Number"]) == (7, 1)
    assert plan["Limits"] == {"invites in all": "7"}
    assert "Nothing was requested" in result.stderr
    assert not service.ledger.requests(endpoint="bulk_invite")
    assert status()["State"] == "planned"
    # Who goes on has not been asked yet.
    assert f"requests {plan['Pairs']} pairs" in campaign("run", "--out", "out", code=2).stderr
    Path("panel.jsonl").unlink()
    campaign("run", "--out", "out", "--yes", "--max-invites", "none")
    assert invited("out") == service.ledger.by_pair()


def test_a_dry_run_with_an_inventory_from_a_file_needs_no_service(service, monkeypatch):
    monkeypatch.delenv("SAMPLING_API_KEY")
    campaign("panel.jsonl", "--out", "out", "--inventory", "quotas.json", "--dry-run", "--workers", 1)
    assert not service.ledger.requests
    assert "API key is missing" in campaign("run", "--out", "out", "--yes", code=2).stderr


def test_on_a_terminal_a_person_is_asked_once(service, terminal, monkeypatch):
    at_keyboard(monkeypatch)
    no = campaign("panel.jsonl", "--out", "out", "--workers", 1, stdin="\n", code=1)
    assert re.search(r"Request \d+ pairs\? \[y/N\]", no.stderr)
    assert "To run it: sampling-async campaign run --out out" in no.stderr
    assert not service.ledger.requests(endpoint="bulk_invite")
    capped = campaign("run", "--out", "out", "--max-invites", 3, stdin="y\n", code=6)
    assert re.search(r"Request \d+ pairs, up to 3 invites\? \[y/N\]", capped.stderr)
    again = campaign("run", "--out", "out", "--max-invites", "none")
    assert "[y/N]" not in again.stderr
    shown = terminal.getvalue()
    assert "the cap of 3 invites is reached" in shown
    assert "The plan" in shown
    assert "invites/s" in shown
    assert all(
        len(line) <= 80 for line in shown.splitlines() if "sampling-async" not in line and "\x1b" not in line
    )


def test_a_cap_ends_a_run_and_a_later_run_goes_on(service):
    first = started("--max-invites", 5, code=6)
    assert lines(first)[-1]["State"] == "stopped"
    assert lines(first)[-1]["Reason"] == "the cap of 5 invites is reached"
    assert "campaign limit out" in first.stderr
    assert "To go on: sampling-async campaign run --out out" in first.stderr
    assert len(service.ledger.invites) == 5
    assert status()["Pending"] > 0
    (limits,) = lines(campaign("limit", "out", "--max-invites", "NONE"))
    assert limits["MaxInvites"] is None
    campaign("run", "--out", "out")
    assert status()["Runs"] == 2
    assert invited("out") == service.ledger.by_pair()
    assert max(service.ledger.by_pair().values()) == 1


def test_what_closes_in_the_inventory_is_not_requested(service):
    campaign("panel.jsonl", "--out", "out", "--dry-run", "--workers", 1)
    campaign("report", "out")
    first = pairs_in("out")[0]["quota_id"]
    service.close_quota(first)
    campaign("run", "--out", "out", "--yes")
    assert first not in {q for each in service.ledger.requests(endpoint="bulk_invite") for q in each.quota_ids}
    assert {each["status"] for each in pairs_in("out") if each["quota_id"] == first} == {"skipped"}
    campaign(
        "panel.jsonl", "--out", "blind", "--inventory", "quotas.json", "--watch", 0, "--yes", "--workers", 1
    )
    assert first in {q for each in service.ledger.requests(endpoint="bulk_invite") for q in each.quota_ids}


def test_invites_as_csv_have_the_rows_and_columns_of_the_others(service):
    started("--format", "csv")
    with Path("out/invites.csv").open(newline="") as file:
        assert file.readline().endswith("\r\n")  # RFC 4180
        file.seek(0)
        rows = list(csv.DictReader(file))
    assert Path("out/invites.csv").stat().st_mode & 0o077 == 0
    campaign("report", "out", "--format", "parquet")
    assert not Path("out/invites.csv").exists()
    expected = pq.read_table("out/invites.parquet").to_pylist()
    assert rows == [
        {
            name: "" if value is None else value.isoformat() if name == "invited_at" else str(value)
            for name, value in row.items()
        }
        for row in expected
    ]
    assert len(rows) == len(service.ledger.invites)
    started_again = campaign("report", "out", "--format", "csv", "--partition", "day")
    assert started_again.exit_code == 0
    [part] = Path("out").glob("invites/day=*/invites.csv")
    assert len(part.read_text().splitlines()) == len(rows) + 1


# --- What is kept


def test_later_commands_know_how_a_campaign_was_planned(service, tmp_path, monkeypatch):
    started("--allocate", 2, "--partition", "survey_id", "--format", "jsonl", "--max-invites", 3, code=6)
    monkeypatch.chdir("/")
    out = tmp_path / "out"
    other = campaign(tmp_path / "panel.jsonl", "--out", out, "--allocate", 3, code=2)
    assert "--allocate would not change" in other.stderr
    assert "the panel" not in other.stderr
    campaign("run", "--out", out, "--max-invites", "none")
    assert list(out.glob("invites/survey_id=*/invites.jsonl"))
    campaign("report", out, "--format", "parquet")
    assert list(out.glob("invites/survey_id=*/invites.parquet"))
    result = campaign("top-up", out, "--dry-run", "--workers", 1)
    assert lines(result)[0]["Number"] == 2
    assert "The plan, number 2" in result.stderr
    assert "Nothing was requested" in result.stderr


def test_a_top_up_asks_before_its_first_run_and_never_asks_twice_for_a_pair(service):
    started("--allocate", 1)
    before = len(service.ledger.invites)
    assert "give --yes" in campaign("top-up", "out", "--workers", 1, "--allocate", 4, code=2).stderr
    campaign("top-up", "out", "panel.jsonl", "--workers", 1, "--allocate", 4, "--yes")
    assert len(service.ledger.invites) > before
    assert max(service.ledger.by_pair().values()) == 1
    assert invited("out") == service.ledger.by_pair()


def test_a_finished_campaign_can_be_run_after_a_top_up_that_found_nothing(service):
    started("--allocate", 1)
    matched = json.loads(Path("out/summary.json").read_text())["matched"]
    while (result := run("campaign", "top-up", "out", "--workers", 1, "--yes")).exit_code == 0:
        pass
    assert "no member matches a quota with room" in result.stderr
    Path("out/report.html").unlink()
    campaign("run", "--out", "out")
    assert Path("out/report.html").exists()
    assert json.loads(Path("out/summary.json").read_text())["matched"] >= matched > 0


@pytest.mark.parametrize(("options", "is_warned"), [((), True), (("--cost", 1), False)])
def test_a_cap_on_spend_without_costs_is_warned_of(service, options, is_warned):
    planned = campaign("panel.jsonl", "--out", "out", "--dry-run", "--workers", 1, "--max-spend", 5, *options)
    assert ("without --cost, --max-spend counts only" in planned.stderr) == is_warned


def test_options_that_would_not_change_a_plan_are_refused(service):
    campaign("panel.jsonl", "--out", "out", "--dry-run", "--workers", 1, "--allocate", 3)
    Path("other.jsonl").write_text("")
    message = campaign("other.jsonl", "--out", "out", "--allocate", 4, code=2).stderr
    assert "the panel and --allocate would not change" in message
    assert "campaign top-up" in message
    campaign("panel.jsonl", "--out", "out", "--allocate", 3, "--dry-run")  # the same command again


# --- Steering and looking


def test_limits_are_changed_and_shown(service, monkeypatch):
    campaign("panel.jsonl", "--out", "out", "--dry-run", "--workers", 1, "--hours", "22:00-06:00")
    given = ("--concurrency", 2, "--invites-per-minute", 90.5, "--max-spend", 10, "--zone", "Europe/Berlin")
    (limits,) = lines(campaign("limit", "out", *given))
    assert limits == {
        "Concurrency": 2,
        "InvitesPerMinute": 90.5,
        "MaxInvites": None,
        "MaxSpend": 10.0,
        "Hours": "22:00-06:00",
        "Zone": "Europe/Berlin",
        "Paused": False,
        "Reason": "",
        "Running": False,
    }
    (paused,) = lines(campaign("pause", "out", "--reason", "lunch [red]"))
    assert (paused["Paused"], paused["Reason"], paused["MaxSpend"]) == (True, "lunch [red]", 10.0)
    on_terminal(monkeypatch)
    assert "lunch [red]" in campaign("limit", "out").stdout
    shown = campaign("resume", "out").stdout
    assert "lunch" not in shown
    assert "none is active" in shown
    assert "22:00-06:00" in shown
    assert "22:00-06:00" not in campaign("limit", "out", "--hours", "none").stdout
    assert "planned" in campaign("status", "out").stdout
    assert status_json("out")["Limits"]["spend in all"] == "10.0"


def status_json(folder: str) -> dict:
    return json.loads(campaign("status", folder, "--json").stdout)


def test_the_status_on_a_terminal_names_codes_and_what_to_do(service, monkeypatch):
    started()
    on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    shown = campaign("status", "out").stdout
    assert all(len(line) <= 80 for line in shown.splitlines())
    for word in ("finished", "planned = ", "invites per request", "Success rate", "Expected value", "Runs"):
        assert word in shown


WRONG = [
    (["status", "nothing"], "nothing holds no campaign"),
    (["pause", "nothing"], "nothing holds no campaign"),
    (["limit", "nothing", "--max-invites", "5"], "nothing holds no campaign"),
    (["report", "nothing"], "nothing holds no campaign"),
    (["top-up", "nothing"], "nothing holds no campaign"),
    (["run", "--out", "nothing"], "give the PANEL"),
    (["limit", "out", "--max-invites", "many"], "--max-invites must be a whole number or none, not 'many'"),
    (["limit", "out", "--concurrency", "0"], "--concurrency"),
    (["limit", "out", "--max-spend", "nan"], "--max-spend"),
    (["limit", "out", "--hours", "22-6"], "--hours must be two different times"),
    (["limit", "out", "--zone", "Berlin"], "--zone must be a time zone"),
    (["panel.jsonl", "--out", "new", "--partition", "member"], "invites can be divided by survey_id"),
    (["panel.jsonl", "--out", "new", "--rate", "0"], "--rate must be above 0"),
    (["panel.jsonl", "--out", "new", "--overshoot", "-1"], "--overshoot must be above 0"),
    (["panel.jsonl", "--out", "new", "--column", "x"], "--column must be QUESTION=NAME"),
    (["panel.jsonl", "--out", "new", "--notifications", "no.db"], "no.db: no such store"),
    (
        ["panel.jsonl", "--out", "new", "--notifications", "postgresql://me:password@host/x"],
        "leave the password out of the address",
    ),
    (["panel.jsonl", "--out", "panel.jsonl/x"], "--out panel.jsonl/x"),
    (["missing.jsonl", "--out", "new"], "missing.jsonl"),
    (["report", "out", "--partition", "x"], "invites can be divided by"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(each) for each, _ in WRONG])
def test_a_mistake_is_one_line_and_exit_code_2(service, arguments, message):
    if "out" in arguments:
        campaign("panel.jsonl", "--out", "out", "--dry-run", "--workers", 1)
    result = campaign(*arguments, code=2)
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_a_store_of_notifications_needs_the_watch(service):
    with_store = ("--notifications", "store.db", "--watch", 0)
    Path("store.db").write_text("")
    assert "needs --watch" in campaign("panel.jsonl", "--out", "new", *with_store, code=2).stderr


def test_rates_are_taken_from_the_ledger_of_outcomes(service):
    started("--allocate", 2, out="first")

    async def record() -> None:
        invites = [each async for each in Campaign(None, ledger="first/campaign.ledger").invites()]
        assert await OutcomeLedger("notifications.db").invited(invites, at=datetime(2026, 1, 1, tzinfo=UTC))
        assert await OutcomeLedger("young.db").invited(invites)

    anyio.run(record)
    plans = {}
    for name, more in {"fixed": (), "learned": ("--rates-from", "notifications.db")}.items():
        result = campaign("panel.jsonl", "--out", name, "--dry-run", "--json", "--workers", 1, *more)
        plans[name] = lines(result)[0]["ExpectedValue"]
    assert plans["learned"] < plans["fixed"]  # none of the invites has ended in a complete
    with closing(sqlite3.connect("learned/campaign.ledger")) as database:
        (saved,) = database.execute("SELECT value FROM facts WHERE name = 'command'").fetchone()
    assert json.loads(saved)["rates_from"] == str(Path("notifications.db").absolute())
    assert re.search(r"Rates of \d+ invites are used", result.stderr)
    result = campaign("panel.jsonl", "--out", "early", "--dry-run", "--rates-from", "young.db")
    assert "no recorded invite that is older than six hours" in result.stderr
    both = ("--rates-from", "notifications.db", "--rate", 0.5)
    result = campaign("panel.jsonl", "--out", "both", "--dry-run", *both, code=2)
    assert "give one of them" in result.stderr


def test_a_plan_that_cannot_be_made_leaves_no_folder(service, monkeypatch):
    Path("none.jsonl").write_text("")
    campaign("none.jsonl", "--out", "nights/one", "--yes", code=2)
    assert not Path("nights").exists()
    Path("nights").mkdir()
    Path("mine").mkdir()
    monkeypatch.setenv("SAMPLING_API_KEY", str(uuid4()))
    for out in ("nights/one", "mine"):
        campaign("panel.jsonl", "--out", out, "--yes", code=3)
    assert (list(Path("nights").iterdir()), list(Path("mine").iterdir())) == ([], [])


def test_a_report_says_in_a_line_what_the_invites_have_brought(service):
    started("--allocate", 2)
    assert "complete" not in campaign("report", "out").stderr

    async def record() -> int:
        invites = [each async for each in Campaign(None, ledger="out/campaign.ledger").invites()]
        return await OutcomeLedger("notifications.db").invited(invites)

    invites = anyio.run(record)
    result = campaign("report", "out", "--notifications", "notifications.db")
    planned = json.loads(Path("out/summary.json").read_text())["ends"]["total"]["completes_planned"]
    assert planned > 0
    text = f"0 completes (0.0% of {invites} invites; {planned:,.0f} planned), 0 terminates, revenue 0.00"
    assert text in result.stderr


@pytest.mark.parametrize("more", [(), ("--html", "page.html")])
def test_folders_are_compared(service, more):
    for name in ("one", "two"):
        started("--allocate", 1, out=name)
    (found,) = lines(campaign("compare", "two", "one", *more))
    assert [each["Name"] for each in found["Nights"]] == ["two", "one"]
    assert found["Nights"][0]["Invited"] < found["Nights"][1]["Invited"]  # the surveys are taken
    assert Path("page.html").exists() == bool(more)
    assert "given twice" in campaign("compare", "one", "./one", code=2).stderr
    assert "holds no campaign" in campaign("compare", "one", "nothing", code=2).stderr


def test_a_campaign_that_was_only_planned_is_no_night(service):
    started("--allocate", 1, out="one")
    campaign("run", "panel.jsonl", "--out", "plan", "--dry-run")
    result = campaign("compare", "plan", "one")
    (found,) = lines(result)
    assert [each["Name"] for each in found["Nights"]] == ["one"]
    assert "Left out: plan was only planned" in result.stderr
    assert "has requested anything" in campaign("compare", "plan", code=2).stderr


def test_on_a_terminal_the_latest_campaigns_are_shown(service, terminal):
    started("--allocate", 1, out="one")
    shown = campaign("compare", "one").stdout
    assert "Success rate" in shown
    assert "Completes" not in shown  # nobody knows them
    assert "Completes" not in terminal.getvalue()
    for name in ("[red]x", "a\x1b[31m"):
        shutil.copytree("one", name)
    shown = campaign("compare", "one", "[red]x", "a\x1b[31m").stdout
    assert "[red]x" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("panel", ["member_code,1001538\n", "member_code,1001538"])
def test_an_empty_panel_leaves_nothing_behind(service, panel):
    Path("empty.csv").write_text(panel)
    before = set(Path().iterdir())
    assert "empty.csv" in campaign("empty.csv", "--out", "out", "--yes", code=2).stderr
    assert set(Path().iterdir()) == before
    Path("out").mkdir()
    campaign("empty.csv", "--out", "out", "--yes", code=2)
    assert list(Path("out").iterdir()) == []  # a folder that was there stays


def test_a_member_is_erased_from_a_ledger_and_its_numbers_stay(service):
    started()
    before = json.loads(campaign("status", "out", "--json").stdout)
    code = next(pair["member_code"] for pair in pairs_in("out") if pair["status"] == "invited")
    done = run("erase", "-", "--ledger", "out/campaign.ledger", stdin=f"{code}\n")
    assert (done.exit_code, "erased" in done.stderr) == (0, True)
    assert json.loads(campaign("status", "out", "--json").stdout) == before
    with sqlite3.connect("out/campaign.ledger") as database:
        members = {row[0] for row in database.execute("SELECT code FROM members")}
        blank = database.execute("SELECT count(*) FROM invites WHERE url = ''").fetchone()[0]
    database.close()
    assert code not in members
    assert blank > 0
    again = run("erase", code, "--ledger", "out/campaign.ledger")
    assert "no such member" in again.stderr
    missing = run("erase", code, "--ledger", "missing.ledger")
    assert (missing.exit_code, "does not exist" in missing.stderr) == (4, True)


def test_a_ledger_without_a_plan_and_a_file_that_is_no_ledger(service):
    Path("out").mkdir()
    Path("out/campaign.ledger").touch()
    assert "has no plan" in campaign("status", "out", code=2).stderr
    Path("out/campaign.ledger").write_text("hello, I am no database at all" * 100)
    assert "the ledger out/campaign.ledger cannot be opened" in campaign("status", "out", code=4).stderr


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE facts SET value = 'j0' WHERE name = 'members'",
        "UPDATE facts SET value = '{\"1\" 2.0}' WHERE name IN ('values', 'groups')",
        "DELETE FROM facts WHERE name = 'planned_at'",
        "UPDATE pairs SET state = 'i5vited'",
        "DELETE FROM quotas",
        "UPDATE facts SET value = '[1]' WHERE name IN ('groups', 'currency_rates')",
        "UPDATE moments SET latencies = '[1]'",
    ],
)
def test_a_value_that_no_campaign_writes_is_damage(service, damage):
    started("--allocate", 1)
    with closing(sqlite3.connect("out/campaign.ledger")) as database, database:
        database.execute(damage)
    for command in ("status", "report"):
        result = campaign(command, "out", code=4)
        assert "the ledger out/campaign.ledger is damaged" in result.stderr


# --- When the service does not


def test_a_service_that_refuses_ends_a_run_and_what_was_not_sent_stays_pending(service, monkeypatch):
    campaign("panel.jsonl", "--out", "out", "--dry-run", "--workers", 1)
    monkeypatch.setenv("SAMPLING_API_KEY", "cafecafe-0000-4000-8000-00000000cafe")
    assert campaign("run", "--out", "out", "--yes", code=3).stdout == ""  # the watch's first poll
    assert status()["State"] == "planned"
    blind = campaign("run", "--out", "out", "--yes", "--watch", 0, code=3)
    assert lines(blind)[-1]["State"] == "stopped"
    assert "To go on" in blind.stderr
    assert (status()["Pending"], status()["Unknown"]) == (status()["Planned"], 0)


def test_an_outcome_that_nobody_knows_is_exit_code_1(service):
    service.faults.add(Fault.cut(when="after").on("bulk_invite", times=1))
    result = started(code=1)
    assert lines(result)[-1]["Unknown"] > 0
    assert "such a pair is not requested again" in result.stderr
    campaign("run", "--out", "out", code=1)
    assert max(service.ledger.by_pair().values()) == 1


def test_what_is_not_answered_soon_after_a_signal_is_cut_off_and_unknown(service, monkeypatch):
    wait_after_signal(monkeypatch, 0.2)
    # A shell without job control starts what runs in the background with SIGINT ignored, as CI may be.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    service.faults.add(Fault.delay(60).on("bulk_invite"))

    def interrupt() -> None:
        until(lambda: service.ledger.requests(endpoint="bulk_invite"))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        result = started("--watch", 0, code=130)
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.stderr.endswith("sampling-async: interrupted\n")
    last = lines(result)[-1]
    assert (last["State"], last["Reason"]) == ("stopped", "interrupted")
    assert last["Unknown"] > 0 < last["Pending"]
    assert adds_up(last)
    assert len(pairs_in("out")) == last["Planned"]


def test_without_a_match_there_is_nothing_to_request(service):
    surveys = [survey.survey_id for survey in service.inventory.surveys]
    Path("nobody.jsonl").write_text(json.dumps({"member_code": "m", "1001538": 30, "exclude_surveys": surveys}))
    result = campaign("nobody.jsonl", "--out", "out", "--yes", "--workers", 1, "--at-least-one", code=1)
    assert "nothing to request" in result.stderr
    assert "no column for" in result.stderr  # the plan's own warning
    assert not service.ledger.requests(endpoint="bulk_invite")


def test_a_ledger_that_does_not_know_its_panel_is_topped_up_with_one(service):
    campaign("panel.jsonl", "--out", "out", "--dry-run", "--workers", 1)
    forget_command(Path("out/campaign.ledger"))
    assert "give PANEL" in campaign("top-up", "out", code=2).stderr
    campaign("top-up", "out", "panel.jsonl", "--dry-run", "--workers", 1)
    # The service is asked for the quotas, unless a file has them.
    given = ("--inventory", "quotas.json", "--watch", 0, "--workers", 1, "--yes")
    campaign("top-up", "out", *given)
    assert invited("out") == service.ledger.by_pair()


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sampling_async.campaign", None)
    assert 'python -m pip install "sampling-async[panel]"' in campaign("status", "out", code=2).stderr


def test_only_what_writes_a_report_needs_jinja2(service, monkeypatch):
    started()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert json.loads(campaign("pause", "out", "--json").stdout)["Paused"]
    assert campaign("status", "out", "--json").stdout
    for command in (("report", "out"), ("run", "panel.jsonl", "--out", "other", "--yes")):
        assert "campaign needs jinja2: python -m pip install" in campaign(*command, code=2).stderr


def test_a_reader_that_goes_away_does_not_end_a_campaign(service, monkeypatch):
    silenced = reader_gone(monkeypatch)
    started()
    assert silenced == [True]
    assert invited("out") == service.ledger.by_pair()


# --- As programs


@pytest.fixture
def slow_service(tmp_path, monkeypatch):
    with served_panel(tmp_path, monkeypatch, members=60, latency=Latency(a=0.3)) as simulator:
        yield simulator


def told(*arguments) -> dict:
    with program("campaign", *arguments) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return json.loads(out)


def test_a_run_is_paused_resumed_ended_by_a_signal_and_gone_on_with_by_other_processes(slow_service):
    service = slow_service

    def count() -> int:
        return len(service.ledger.requests(endpoint="bulk_invite"))

    given = ("--yes", "--workers", 1, "--watch", 0, "--max-concurrency", 2, "--inventory", "quotas.json")
    process = program("campaign", "panel.jsonl", "--out", "out", *given)
    try:
        until(lambda: count() > 4)
        if len(str(Path("out/top.sock").absolute())) < 100:  # as long as the path of a socket may be
            (seen,) = lines(run("top", "--out", "out", "--once", "--json"))
            assert (seen["pid"], seen["host"]) == (process.pid, "127.0.0.1")
        paused = told("pause", "out", "--reason", "tests")
        assert (paused["Paused"], paused["Running"]) == (True, True)
        until(lambda: status()["State"] == "paused")
        time.sleep(1.0)  # a run looks at its limits each half second, and what was asked is answered
        quiet = count()
        time.sleep(0.5)
        assert count() == quiet
        assert status()["Pending"] > 0
        assert campaign("run", "--out", "out", code=5).stderr.endswith(
            "in use by another run of the campaign\n"
        )
        told("resume", "out")
        until(lambda: count() > quiet + 2)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == ENDINGS[signal.SIGTERM]
    assert err.splitlines()[-1] == "sampling-async: terminated by SIGTERM"
    ended = json.loads(out.splitlines()[-1])
    assert (ended["State"], ended["Reason"]) == ("stopped", "terminated by SIGTERM")
    # What was in flight at the signal was waited for, so that no pair is unknown.
    assert ended["Unknown"] == 0 < ended["Pending"]
    assert adds_up(ended)
    found = status()
    assert (found["State"], found["Pending"], found["Invited"]) == (
        "stopped",
        ended["Pending"],
        ended["Invited"],
    )
    assert invited("out") == service.ledger.by_pair()
    campaign("run", "--out", "out", "--max-concurrency", 16)
    assert invited("out") == service.ledger.by_pair()
    assert max(service.ledger.by_pair().values()) == 1
    assert status()["Pending"] == 0


def test_a_run_that_was_killed_is_seen_as_stopped_and_gone_on_with(slow_service):
    service = slow_service
    given = ("--yes", "--workers", 1, "--watch", 0, "--max-concurrency", 2)
    process = program("campaign", "panel.jsonl", "--out", "out", *given)
    until(lambda: len(service.ledger.requests(endpoint="bulk_invite")) > 4)
    process.kill()
    process.communicate()
    found = status()
    assert found["State"] == "stopped"
    assert adds_up(found)
    campaign("report", "out")
    campaign("run", "--out", "out", "--max-concurrency", 16, code=1 if found["Unknown"] else 0)
    assert status()["Unknown"] == found["Unknown"]
    assert max(service.ledger.by_pair().values()) == 1


def test_a_second_signal_ends_a_run_at_once(slow_service):
    slow_service.faults.add(Fault.delay(60).on("bulk_invite"))
    given = ("--yes", "--workers", 1, "--watch", 0)
    process = program("campaign", "panel.jsonl", "--out", "out", *given)
    until(lambda: len(slow_service.ledger.requests(endpoint="bulk_invite")) > 1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None  # it waits for what is in flight
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == ENDINGS[signal.SIGINT]
    assert status()["Unknown"] > 0


def test_a_folder_that_holds_files_of_somebody_else_is_refused_before_anything_is_asked(service):
    mine = Path("mine")
    (mine / "invites").mkdir(parents=True)
    (mine / "invites" / "my.txt").write_text("precious")
    result = run("campaign", "panel.jsonl", "--out", "mine", "--yes")
    assert (result.exit_code, "holds invites, which is not of a campaign" in result.stderr) == (2, True)
    assert (mine / "invites" / "my.txt").read_text() == "precious"
    assert [path.name for path in mine.iterdir()] == ["invites"]
