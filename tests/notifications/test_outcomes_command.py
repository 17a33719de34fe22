"""`sampling-async outcomes`: the funnel of invites, from files and a store."""

from __future__ import annotations

import json
import re
import stat
import sys

import anyio
import doubles
import pyarrow.parquet as pq
import pytest
from cli_kit import on_terminal, point_at, quota_ids, run
from panel_kit import all_of, campaign_of
from store_kit import COMPLETION, SECRET, post

from sampling_async.notifications import Inbox, OutcomeLedger
from sampling_async.simulator import Notifying, Simulator


@pytest.fixture(scope="module")
def day(tmp_path_factory):
    """A day of a simulator: outcomes as lines and as a journal, and a store with the notifications."""
    folder = tmp_path_factory.mktemp("day")
    sim = Simulator(
        seed=4, surveys=8, members=20, notifying=Notifying(completes=0.5, corrected=0.3, reconciled=0.3)
    )

    requests = [json.dumps({"MemberCode": code, "QuotaIDs": quota_ids(sim)}) for code in sim.members]
    with sim.serve() as base_url, pytest.MonkeyPatch.context() as patch:
        point_at(patch, sim, base_url)
        done = run("fan-out", "--journal", folder / "run.journal", stdin="\n".join(requests))
    (folder / "outcomes.jsonl").write_text(done.stdout)

    async def deliver() -> None:
        async with Inbox(folder / "n.db", secrets=SECRET) as inbox:
            await sim.notifications.deliver(inbox)

    anyio.run(deliver)
    return sim, folder


@pytest.fixture
def store(day, tmp_path):
    path = tmp_path / "n.db"
    path.write_bytes((day[1] / "n.db").read_bytes())
    return path


def lines_of(*options) -> list[dict]:
    done = run("outcomes", *options)
    assert done.exit_code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("more", [(), ("--rows",), ("--overdue", 1)])
def test_csv_of_nothing_has_its_names(tmp_path, store, more):
    anyio.run(OutcomeLedger(tmp_path / "new.db").invited, ())
    head, *rows = run("outcomes", "--store", tmp_path / "new.db", "--csv", *more).stdout.splitlines()
    assert rows == []
    assert run("outcomes", "--store", store, "--csv", *more).stdout.splitlines()[0] == head


@pytest.mark.parametrize("file", ["outcomes.jsonl", "run.journal"])
def test_the_funnel_agrees_with_the_simulator(day, store, file):
    sim, folder = day
    rows = lines_of("--store", store, "--invites", folder / file)
    invites = len(sim.ledger.invites)
    assert invites
    assert sum(row["Invited"] for row in rows) == invites
    assert sum(row["Completed"] + row["Terminated"] for row in rows) == invites
    assert sum(row["Uninvited"] + row["Open"] for row in rows) == 0
    assert all(sum(row["Reasons"].values()) == row["Terminated"] for row in rows)
    assert sum(row["Revenue"] for row in rows) > 0
    again = run("outcomes", "--store", store, "--invites", folder / file)
    assert re.match(r"New invites from .*: 0\n", again.stderr)


def test_the_invites_of_a_campaign_come_from_its_ledger(tmp_path):
    sim = Simulator(7, surveys=30, members=60)

    async def night():
        async with sim.client() as client:
            campaign = campaign_of(sim, client, tmp_path)
            await campaign.plan()
            outcomes = await all_of(campaign.run())
        # Some were recorded in the loop, before a kill.
        await OutcomeLedger(tmp_path / "n.db").invited(outcomes[:20])
        return sum(outcome.invite is not None for outcome in outcomes[:20])

    recorded = anyio.run(night)
    for count in (len(sim.ledger.invites) - recorded, 0):
        done = run("outcomes", "--store", tmp_path / "n.db", "--invites", tmp_path / "run.ledger")
        assert (done.exit_code, f": {count:,}\n" in done.stderr) == (0, True), done.stderr
        assert sum(json.loads(line)["Invited"] for line in done.stdout.splitlines()) == len(sim.ledger.invites)


def test_completes_without_an_invite_are_an_exit_code(store):
    done = run("outcomes", "--store", store, "--uninvited")
    assert done.exit_code == 1
    assert {json.loads(line)["Ending"] for line in done.stdout.splitlines()} == {"completed", "corrected"}


def test_what_is_taken_back_is_shown(day, store, monkeypatch):
    sim, folder = day
    rows = lines_of("--store", store, "--invites", folder / "outcomes.jsonl")
    taken_back = sum(posting.kind == "reconciliation" for posting in sim.notifications.told)
    assert sum(row["Reconciled"] for row in rows) == taken_back > 0
    endings = [
        row["Revenue"] < 0 for row in lines_of("--store", store, "--rows") if row["Ending"] == "reconciled"
    ]
    assert len(endings) == taken_back
    on_terminal(monkeypatch)
    assert f"{taken_back:,}  reconciled: revenue was taken back" in run("outcomes", "--store", store).stdout


@pytest.mark.parametrize("form", [(), ("--json",), ("--csv",), ("--rows",), ("--output",)])
@pytest.mark.parametrize("surveys", [(1,), (1, 2)])
def test_money_of_several_surveys_is_never_summed_in_silence(tmp_path, monkeypatch, surveys, form):
    """A notification names no currency, so surveys may pay in different ones."""
    store = tmp_path / "n.db"

    async def pay() -> None:
        async with Inbox(store, secrets=SECRET) as inbox:
            for survey in surveys:
                await post(inbox, "completion", {**COMPLETION, "SurveyId": survey})

    anyio.run(pay)
    if not form:
        on_terminal(monkeypatch)
    done = run("outcomes", "--store", store, *form, *[tmp_path / "all.parquet"] * (form == ("--output",)))
    assert done.exit_code == 0
    is_said = "Notifications name no currency" in done.stderr and "`campaign report`" in done.stderr
    assert is_said is (len(surveys) > 1)
    if not form:
        condition = ", if all surveys pay in one currency" * (len(surveys) > 1)
        assert f"revenue {1.5 * len(surveys):.2f}{condition}\n" in done.stdout


def test_overdue_invites_are_an_exit_code(day, tmp_path):
    sim, folder = day
    store = tmp_path / "new.db"  # made by recording invites; there are no notifications yet
    options = ("--store", store, "--invites", folder / "outcomes.jsonl", "--overdue")
    first = run("outcomes", *options, "1")
    assert first.exit_code == 0
    assert "is a new store" in first.stderr
    done = run("outcomes", *options, "0")
    assert done.exit_code == 1
    assert len(done.stdout.splitlines()) == len(sim.ledger.invites)


def test_rows_are_written_as_parquet(day, store, tmp_path):
    _, folder = day
    rows = lines_of("--store", store, "--invites", folder / "outcomes.jsonl", "--rows")
    assert run("outcomes", "--store", store, "--output", tmp_path / "all.parquet").exit_code == 0
    assert not list(tmp_path.glob(".*"))  # what it was written to first
    if sys.platform != "win32":
        assert stat.S_IMODE((tmp_path / "all.parquet").stat().st_mode) == 0o600  # it holds member codes
    table = pq.read_table(tmp_path / "all.parquet")
    assert table.num_rows == len(rows)
    assert float(sum(table["revenue"].to_pylist())) == pytest.approx(sum(row["Revenue"] for row in rows))


def test_a_file_that_cannot_be_written_is_named(store, tmp_path):
    done = run("outcomes", "--store", store, "--output", tmp_path / "none" / "all.parquet")
    assert (done.exit_code, done.stdout) == (4, "")
    assert done.stderr.endswith("none/all.parquet: No such file or directory\n")


def test_tables_are_shown_on_a_terminal(day, store, monkeypatch):
    _, folder = day
    on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "120")
    shown = run("outcomes", "--store", store, "--invites", folder / "outcomes.jsonl").stdout
    assert "Revenue" in shown
    assert "terminated: " in shown
    assert " invited, " in shown
    assert "SCREENED_OUT" in run("outcomes", "--store", store, "--rows").stdout
    assert run("outcomes", "--store", store, "--overdue", 99).stdout == "None.\n"


def test_who_entered_is_a_column_only_if_somebody_said_it(day, tmp_path, monkeypatch):
    _, folder = day
    store = tmp_path / "own.db"
    on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "120")
    assert "Entered" not in run("outcomes", "--store", store, "--invites", folder / "outcomes.jsonl").stdout
    row = lines_of("--store", store, "--rows", "--json")[0]
    anyio.run(OutcomeLedger(store).entered, row["MemberCode"], row["QuotaID"])
    assert "Entered" in run("outcomes", "--store", store).stdout


def line_of(**changes):
    """Return the line of an invite, as `fan-out` writes it."""
    return json.dumps({"MemberCode": "m", "QuotaID": 1, "Invite": doubles.invite(1)} | changes)


def test_blank_lines_and_a_byte_order_mark_are_passed_over(store, tmp_path):
    (tmp_path / "found.jsonl").write_text(f"\ufeff{line_of()}\n\n{line_of(MemberCode='n')}\r\n\n")
    done = run("outcomes", "--store", store, "--invites", tmp_path / "found.jsonl")
    assert done.exit_code == 0
    assert "found.jsonl: 2\n" in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bad.jsonl", "{}\n", "bad.jsonl, line 1: no outcome as"),
        ("bad.jsonl", '{"Invite": {}, "MemberCode": "m", "QuotaID": 1}', "line 1"),
        ("bad.jsonl", "[]", "line 1"),
        ("bad.jsonl", "[" * 100_000, "line 1"),
        ("bad.jsonl", line_of(QuotaID=1.5), "line 1"),
        ("bad.jsonl", line_of(QuotaID=True), "line 1"),
        ("bad.jsonl", line_of(MemberCode=None), "line 1"),
        ("bad.jsonl", line_of().removesuffix("}") + ', "QuotaID": 2}', "line 1"),
        ("none.jsonl", None, "none.jsonl: No such file"),
    ],
)
def test_a_file_without_outcomes_is_named(store, tmp_path, name, text, message):
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    done = run("outcomes", "--store", store, "--invites", file)
    assert done.exit_code != 0
    assert message in done.stderr


def test_a_store_that_is_not_there_is_named(tmp_path):
    done = run("outcomes", "--store", tmp_path / "no.db")
    assert done.exit_code == 2
    assert "no such store" in done.stderr
