"""The demo: it runs, agrees with the ledger of the simulator, and leaves nothing behind."""

from __future__ import annotations

import ast
import io
import json
from collections import Counter
from datetime import UTC, datetime
from multiprocessing import active_children
from pathlib import Path

import anyio
import attrs
import pytest
from cli_kit import on_terminal, run
from rich.console import Console

from sampling_async import InviteOutcome, Quotas
from sampling_async._cli import _demo, _demo_view
from sampling_async._cli._demo import Demo, DemoError, Ends, ServiceReport, run_day
from sampling_async.campaign import CampaignRun, Pairs, Plan, Summary
from sampling_async.notifications import SqliteStore, StoreError
from sampling_async.simulator import Latency, Lie, Verdict

ARGUMENTS = ["demo", "--members", "12", "--surveys", "8"]


def small(folder, **more) -> Demo:
    return Demo(**{"folder": folder, "members": 12, "surveys": 8, "latency": Latency(), **more})


def test_a_demo_agrees_with_the_service_from_the_inventory_to_the_report(tmp_path):
    steps = []
    findings = anyio.run(run_day, small(tmp_path), steps.append)
    assert findings.agrees
    pairs = findings.summary.pairs
    inventory, plan, *runs = (step for step in steps if not isinstance(step, Ends))
    assert isinstance(inventory, Quotas)
    assert isinstance(plan, Plan)
    assert plan.pairs == pairs.planned
    assert all(isinstance(run, CampaignRun) for run in runs)
    assert len(runs) == findings.statuses.total()
    assert findings.service.invites == findings.statuses["invited"] == pairs.invited > 0
    assert findings.received == (findings.service.completions, findings.service.terminates)
    assert sum(findings.received) == pairs.invited
    heard = [step for step in steps if isinstance(step, Ends)]
    assert all(0 <= step.heard <= step.known == pairs.invited for step in heard)
    assert len(findings.request_seconds) >= 12
    assert 0 < findings.percentile(50) <= findings.percentile(99)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"panel.jsonl", "campaign.ledger", "notifications.db", "report.html", "summary.json"} <= names
    assert active_children() == []


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    return anyio.run(run_day, small(tmp_path_factory.mktemp("demo")))


def with_service(findings, **changes):
    return attrs.evolve(findings, service=attrs.evolve(findings.service, **changes))


def test_one_invite_more_is_a_disagreement(findings):
    invites = findings.service.invites + 1
    found = with_service(findings, invites=invites)
    assert not found.agrees
    assert f"{invites} invites in the service's ledger" in found.disagreement


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

    monkeypatch.setattr(SqliteStore, "receive", refuse)
    on_terminal(monkeypatch)
    result = run(*ARGUMENTS, "--out", tmp_path)
    assert result.exit_code == 1
    assert "They agree on every pair. Not all ends are heard yet:" in " ".join(result.stdout.split())


def test_unknown_outcomes_cover_all_lost_invites_under_faults(tmp_path):
    findings = anyio.run(run_day, small(tmp_path, members=100, faults=True))
    assert findings.agrees
    assert findings.statuses["unknown"] > 0


def test_a_piped_demo_prints_one_json_object(tmp_path):
    result = run(*ARGUMENTS, "--out", tmp_path / "out")
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
    result = run(*ARGUMENTS, "--out", tmp_path)
    assert result.exit_code == 2
    assert "holds an earlier demo; name another folder" in result.stderr
    assert (tmp_path / "campaign.ledger").read_text() == "mine"


@pytest.mark.parametrize("width", [60, 80])
def test_the_screen_fits_the_terminal(width, findings):
    statuses, codes = Counter({"invited": 1, "rejected": 3}), Counter[tuple[int | None, str | None]]()
    codes.update({(1, "SUCCESS"): 1, (16, "MEMBER_DOES_NOT_MATCH_QUOTA"): 1, (12345, "SOMETHING_NEW"): 2})
    pairs = Pairs(planned=4, invited=1, rejected=3)
    shown = screen_of(
        attrs.evolve(
            findings,
            summary=Summary(state="finished", planned_at=datetime.now(UTC), pairs=pairs, requests=4),
            statuses=statuses,
            codes=codes,
            request_seconds=[0.05, 0.06],
            recontact_quota_id=77,
            recontact_pages=[25, 3],
            received=(0, 0),
            service=ServiceReport(invites=1),
        ),
        width,
    )
    assert "25.0 % of the requested pairs ended in an invite" in " ".join(shown.split())
    assert "They agree on every pair and every end." in shown
    assert "MEMBER_DOES_NOT_MATCH_QUOTA" in shown
    assert "12345  SOMETHING_NEW" in shown
    assert "28 member codes in 2 pages" in shown
    assert "p50 50 ms  p90 60 ms" in shown
    assert max(map(len, shown.splitlines())) <= width


def test_a_disagreement_is_shown(findings):
    lie = Lie(InviteOutcome("M", 3, "rejected", None, 16, "NO"), "invented")
    service = attrs.evolve(findings.service, verdict=Verdict(lies=(lie,)))
    assert "They do NOT agree: NOT ok: 1 lies" in screen_of(attrs.evolve(findings, service=service), 80)


def screen_of(findings, width):
    console = Console(file=io.StringIO(), width=width)
    _demo_view.print_findings(console, findings, small(Path("out")))
    return console.file.getvalue()


def test_a_demo_that_fails_leaves_no_process(tmp_path):
    """It may be waiting until its notifications are acknowledged, and nobody receives them any more."""

    def fail(_step):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        anyio.run(run_day, small(tmp_path), fail)
    assert active_children() == []


def test_a_process_that_dies_is_reported(tmp_path):
    def kill(step):
        if isinstance(step, CampaignRun) and not step.pairs.pending:
            for process in active_children():
                process.kill()

    with pytest.raises(DemoError, match="ended with exit code -9"):
        anyio.run(run_day, small(tmp_path), kill)


def test_a_service_that_cannot_start_says_why(tmp_path):
    with pytest.raises(DemoError, match="surveys must be"):
        anyio.run(run_day, small(tmp_path, surveys=-1))


def test_the_example_uses_public_names_only():
    tree = ast.parse(Path(_demo.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {"sampling_async", "sampling_async.campaign"} <= modules
    assert not [module for module in modules if "._" in module]
