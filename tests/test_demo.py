"""The demo: it runs, agrees with the ledger of the simulator, and leaves nothing behind."""

from __future__ import annotations

import io
import json
import subprocess
from datetime import UTC, datetime

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sampling_async import Invite, InviteOutcome, Quotas
from sampling_async._cli import _demo, _demo_view
from sampling_async._cli._commands import app
from sampling_async._cli._demo import DemoError, Plan, Watcher, run_demo, simulator_process
from sampling_async._cli._tally import Tally
from sampling_async.simulator import Lie, Verdict

SMALL = Plan(members=6, quota_ids=60, latency=(0.0, 0.0, 8))
ARGUMENTS = ["demo", "--members", "6", "--quota-ids", "60"]


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


def test_a_demo_agrees_with_the_ledger(processes):
    seen = []

    def outcome(stream) -> None:
        seen.append(stream.progress.answered)

    findings = run_demo(SMALL, Watcher(inventory=lambda _, total: seen.append(total), outcome=outcome))
    assert findings.agrees
    findings.ledger_invites += 1
    assert not findings.agrees  # with one more invite the counts disagree
    findings.ledger_invites -= 1
    assert findings.verdict.ok
    assert findings.ledger_invites == findings.tally.statuses["invited"] > 0
    assert seen[0] == findings.tally.total == len(seen) - 1 >= 60
    assert seen[1:] == list(range(1, seen[0] + 1))
    assert len(findings.request_seconds) >= 6
    assert 0 < findings.percentile(50) <= findings.percentile(99)
    assert sum(findings.recontact_pages) > 0
    assert [process.returncode for process in processes] == [0]


def test_unknown_outcomes_cover_all_lost_invites_under_faults():
    findings = run_demo(Plan(members=90, quota_ids=90, faults=True, latency=(0.0, 0.0, 8)))
    assert findings.agrees
    assert findings.tally.statuses["unknown"] > 0


def test_a_piped_demo_prints_one_json_object():
    result = CliRunner().invoke(app, ARGUMENTS)
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    figures = json.loads(line)
    assert figures["Agrees"] is True
    assert figures["QuotaIDs"] == sum(figures["Outcomes"].values())
    assert figures["QuotaIDs"] == sum(each["QuotaIDs"] for each in figures["ResultCodes"])
    assert figures["Ledger"]["Invites"] == figures["Outcomes"]["invited"]
    assert result.stderr == ""


def test_a_disagreement_is_shown_and_ends_with_exit_code_1(monkeypatch):
    monkeypatch.setattr(_demo, "_verdict", lambda _, outcomes: Verdict(lies=(Lie(outcomes[0], "invented"),)))
    monkeypatch.setattr(_demo_view.show, "as_lines", lambda wanted: wanted)
    result = CliRunner().invoke(app, ARGUMENTS)
    assert result.exit_code == 1
    assert "do NOT agree" in result.stdout


def test_the_screen_fits_80_columns():
    findings = _demo.Findings(Quotas(1, datetime.now(UTC), ()), Tally(), 1.5, [0.05, 0.06], 77, [25, 3])
    for code in (1, 16, 31, 12345):
        invite = Invite(1, 2, 3, 1.0, "https://entry.example/", 10, 20) if code == 1 else None
        status = "invited" if invite else "rejected"
        findings.tally.add(InviteOutcome("M", 3, status, invite, code, "SOMETHING_NEW"))
    findings.ledger_invites = 1
    console = Console(file=io.StringIO(), width=80)
    _demo_view.print_findings(console, findings)
    shown = console.file.getvalue()
    assert "They agree on every quota ID." in shown
    assert "MEMBER_DOES_NOT_MATCH_QUOTA" in shown
    assert "12345  SOMETHING_NEW" in shown
    assert "28 member codes in 2 pages (25 + 3)" in shown
    assert "p50 50 ms  p90 60 ms" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_child_ends_when_the_demo_fails(processes):
    with pytest.raises(ZeroDivisionError), simulator_process(SMALL):
        _ = 1 / 0
    assert [process.returncode for process in processes] == [0]


def test_a_child_that_dies_is_reported(processes):
    with pytest.raises(DemoError), simulator_process(SMALL) as simulator:
        processes[0].kill()
        processes[0].wait()
        simulator.ledger()


def test_a_child_that_cannot_start_says_why():
    with pytest.raises(DemoError, match="'a' must be"), simulator_process(Plan(latency=(-1.0, 0.0, 1))):
        pass
