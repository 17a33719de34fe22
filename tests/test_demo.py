"""The demo: it runs, agrees with the ledger of the simulator, and leaves nothing behind."""

from __future__ import annotations

import io
import json
import signal
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import attrs
import pytest
from rich.console import Console
from typer.testing import CliRunner

from sampling_async import Invite, InviteOutcome, Quotas
from sampling_async._cli import _demo, _demo_view
from sampling_async._cli._commands import app
from sampling_async._cli._demo import Demo, DemoError, ServiceLedger, Watcher, run_demo, simulator_process
from sampling_async._cli._tally import Tally
from sampling_async.campaign import Pairs, Plan, Summary
from sampling_async.notifications import StoreError
from sampling_async.simulator import LedgerEntry, Lie, Verdict

ARGUMENTS = ["demo", "--members", "12", "--surveys", "8"]


def small(folder, **more) -> Demo:
    return Demo(folder=folder, members=12, surveys=8, latency=(0.0, 0.0, 8), **more)


@pytest.fixture
def processes(monkeypatch):
    """Collect the child processes that are started."""
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    return started


def test_a_demo_agrees_with_the_service_from_the_inventory_to_the_report(processes, tmp_path):
    seen, heard = [], []
    watcher = Watcher(
        inventory=lambda inventory: seen.append(len(inventory.surveys)),
        planned=lambda plan, _: seen.append(plan.pairs),
        outcome=lambda run: seen.append(run.pairs.pending),
        hearing=lambda *counts: heard.append(counts),
    )
    findings = run_demo(small(tmp_path), watcher)
    assert findings.agrees
    pairs = findings.summary.pairs
    assert seen[:2] == [8, findings.plan.pairs]
    assert len(seen) - 2 == findings.tally.total
    assert len(findings.service.invites) == findings.tally.statuses["invited"] == pairs.invited > 0
    assert findings.received == (findings.service.completions, findings.service.terminates)
    assert sum(findings.received) == pairs.invited
    assert all(0 <= known <= ends == pairs.invited for known, ends in heard)
    assert len(findings.request_seconds) >= 12
    assert 0 < findings.percentile(50) <= findings.percentile(99)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"panel.parquet", "campaign.ledger", "notifications.db", "report.html", "summary.json"} <= names
    assert [process.returncode for process in processes] == [0]


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    return run_demo(small(tmp_path_factory.mktemp("demo")))


def with_service(findings, **changes):
    return attrs.evolve(findings, service=attrs.evolve(findings.service, **changes))


def test_one_invite_more_is_a_disagreement(findings):
    invites = [*findings.service.invites, findings.service.invites[0]]
    found = with_service(findings, invites=invites)
    assert not found.agrees
    assert f"{len(invites)} invites in the service's ledger" in found.disagreement


def test_an_end_that_was_acknowledged_and_is_not_in_the_inbox_is_a_disagreement(findings):
    completed, terminated = findings.received
    found = attrs.evolve(findings, received=(completed, terminated - 1))
    assert not found.agrees
    assert "ends were acknowledged" in found.disagreement
    assert attrs.evolve(findings, received=(completed + 1, terminated)).disagreement  # one that nobody sent


def test_an_end_that_nobody_acknowledged_is_not_heard_yet(findings):
    completed, terminated = findings.received
    found = attrs.evolve(with_service(findings, unheard=1), received=(completed, terminated - 1))
    assert not found.agrees
    assert found.disagreement == ""
    assert found.missing_ends == 1
    # Its acknowledgement alone was lost.
    assert with_service(findings, unheard=1).agrees


def test_ends_of_another_kind_are_a_disagreement(findings):
    completed, terminated = findings.received
    assert attrs.evolve(findings, received=(completed + 1, terminated - 1)).disagreement


def test_a_demo_whose_inbox_refuses_every_end_says_that_they_are_not_heard_yet(monkeypatch, tmp_path):
    def refuse(*_args, **_options):
        raise StoreError("no space left")

    monkeypatch.setattr(_demo.SqliteStore, "receive", refuse)
    monkeypatch.setattr(_demo_view.show, "as_lines", lambda wanted: wanted)
    result = CliRunner().invoke(app, [*ARGUMENTS, "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "They agree on every pair. Not all ends are heard yet:" in " ".join(result.stdout.split())


def test_unknown_outcomes_cover_all_lost_invites_under_faults(tmp_path):
    demo = Demo(folder=tmp_path, members=100, surveys=8, latency=(0.0, 0.0, 8), faults=True)
    findings = run_demo(demo)
    assert findings.agrees
    assert findings.tally.statuses["unknown"] > 0


def test_a_piped_demo_prints_one_json_object(tmp_path):
    result = CliRunner().invoke(app, [*ARGUMENTS, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    figures = json.loads(line)
    assert figures["Agrees"] is True
    assert 0 < figures["SuccessRate"] <= 1
    assert sum(figures["Outcomes"].values()) == sum(each["QuotaIDs"] for each in figures["ResultCodes"])
    assert figures["Ledger"]["Invites"] == figures["Outcomes"]["invited"] == figures["Pairs"]["Invited"]
    assert figures["Report"] == str(tmp_path / "out" / "report.html")
    assert (tmp_path / "out" / "report.html").is_file()
    assert result.stderr == ""


def test_a_folder_with_an_earlier_demo_is_left_alone(tmp_path):
    (tmp_path / "campaign.ledger").write_text("mine")
    result = CliRunner().invoke(app, [*ARGUMENTS, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds an earlier demo; name another folder" in result.stderr
    assert (tmp_path / "campaign.ledger").read_text() == "mine"


def test_a_disagreement_is_shown_and_ends_with_exit_code_1(monkeypatch, tmp_path):
    monkeypatch.setattr(_demo, "_verdict", lambda _, outcomes: Verdict(lies=(Lie(outcomes[0], "invented"),)))
    monkeypatch.setattr(_demo_view.show, "as_lines", lambda wanted: wanted)
    result = CliRunner().invoke(app, [*ARGUMENTS, "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "do NOT agree" in result.stdout


def test_the_screen_fits_80_columns(tmp_path):
    now = datetime.now(UTC)
    plan = Plan(
        members=5,
        matched=5,
        pairs=5,
        certain=4,
        requests=5,
        quotas=3,
        room=9,
        expected_invites=4,
        expected_value=8.0,
        currency_id=1,
    )
    summary = Summary(
        state="finished", planned_at=now, pairs=Pairs(planned=4, invited=1, rejected=3), requests=4
    )
    findings = _demo.Findings(Quotas(1, now, ()), plan, summary, Tally(), 1.5, [0.05, 0.06], 77, [25, 3])
    for code in (1, 16, 31, 12345):
        invite = Invite(1, 2, 3, 1.0, "https://entry.example/", 10, 20) if code == 1 else None
        status = "invited" if invite else "rejected"
        findings.tally.add(InviteOutcome("M", 3, status, invite, code, "SOMETHING_NEW"))
    entry = LedgerEntry(0, "P", "M", 3, 1, 2, "bulk_invite", "https://entry.example/", 4)
    findings.service = ServiceLedger([entry], 0, 0, 0)
    console = Console(file=io.StringIO(), width=80)
    _demo_view.print_findings(console, findings, small(Path("out")))
    shown = console.file.getvalue()
    assert "25.0 % of what was asked for ended in an invite" in shown
    assert "They agree on every pair and every end." in shown
    assert "MEMBER_DOES_NOT_MATCH_QUOTA" in shown
    assert "12345  SOMETHING_NEW" in shown
    assert "28 member codes in 2 pages" in shown
    assert "p50 50 ms  p90 60 ms" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_child_is_killed_when_the_demo_fails(processes, tmp_path):
    """It may be waiting until all its notifications are sent, which nobody hears any more."""
    with pytest.raises(ZeroDivisionError), simulator_process(small(tmp_path).service({})):
        _ = 1 / 0
    assert [process.returncode for process in processes] == [-signal.SIGKILL]


def test_a_child_that_dies_is_reported(processes, tmp_path):
    with pytest.raises(DemoError), simulator_process(small(tmp_path).service({})) as simulator:
        processes[0].kill()
        processes[0].wait()
        simulator.ledger(lambda *_: None)


def test_a_child_that_cannot_start_says_why(tmp_path):
    broken = Demo(folder=tmp_path, latency=(-1.0, 0.0, 1)).service({})
    with pytest.raises(DemoError, match="'a' must be"), simulator_process(broken):
        pass
