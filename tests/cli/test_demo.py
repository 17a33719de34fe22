"""The demo: it runs, agrees with the ledger of the simulator, and leaves nothing behind."""

from __future__ import annotations

import ast
import io
import json
from datetime import UTC, datetime
from pathlib import Path

import anyio
import anyio.lowlevel
import attrs
import pytest
from cli_kit import on_terminal, run
from rich.console import Console

from sampling_async import InviteOutcome, Percentiles
from sampling_async._cli import _demo, _demo_view
from sampling_async._cli._demo import CLICKING, Demo, run_day
from sampling_async.campaign import CodeCount, Pairs, Summary
from sampling_async.notifications import SqliteStore, StoreError
from sampling_async.simulator import Latency, Lie, Verdict

ARGUMENTS = ["demo", "--members", "12", "--surveys", "8"]


def small(folder, **more) -> Demo:
    return Demo(**{"folder": folder, "members": 12, "surveys": 8, "latency": Latency(), **more})


def test_a_demo_agrees_with_the_service_from_the_inventory_to_the_report(tmp_path):
    demo = small(tmp_path)
    findings = anyio.run(run_day, demo)
    assert findings.agrees
    pairs = findings.summary.pairs
    assert demo.run.pairs == pairs
    assert findings.plan.members == 12
    assert 0 < findings.plan.pairs <= pairs.planned
    assert findings.invites == pairs.invited + findings.links
    assert pairs.invited > 0 < findings.links
    assert len(findings.clicks) == 2 * CLICKING
    assert findings.received == findings.posted
    assert sum(findings.received) == findings.invites
    assert findings.latency.count == findings.summary.requests >= 12
    names = {path.name for path in tmp_path.iterdir()}
    assert {"panel.jsonl", "campaign.ledger", "notifications.db", "report.html", "summary.json"} <= names
    ends = findings.summary.ends.total
    assert 0 < ends.completed + ends.terminated <= sum(findings.posted)
    assert ends.open == 0
    assert "What the invites have brought" in (tmp_path / "report.html").read_text()


def test_the_bar_shows_what_a_demo_does(tmp_path):
    demo = small(tmp_path)
    assert _demo_view._progress(demo) == ("Planning", 0, None)

    async def watched():
        seen = set()
        async with anyio.create_task_group() as tasks:

            async def look():
                while True:
                    what, done, total = _demo_view._progress(demo)
                    assert total is None or done <= total
                    seen.add(what)
                    await anyio.lowlevel.checkpoint()

            tasks.start_soon(look)
            findings = await run_day(demo)
            tasks.cancel_scope.cancel()
        return seen, findings

    seen, findings = anyio.run(watched)
    assert seen == {"Planning", "Asking", "Hearing"}
    assert _demo_view._progress(demo) == ("Hearing", sum(findings.received), sum(findings.posted))


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    return anyio.run(run_day, small(tmp_path_factory.mktemp("demo")))


def test_one_invite_more_is_a_disagreement(findings):
    invites = findings.invites + 1
    found = attrs.evolve(findings, invites=invites)
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
    found = attrs.evolve(findings, unheard=1, received=(completed, terminated - 1))
    assert not found.agrees
    assert found.disagreement == ""
    assert found.missing_ends == 1
    # Its acknowledgement alone was lost.
    assert attrs.evolve(findings, unheard=1).agrees


def test_ends_of_another_kind_are_a_disagreement(findings):
    completed, terminated = findings.received
    assert attrs.evolve(findings, received=(completed + 1, terminated - 1)).disagreement


def test_a_demo_whose_inbox_refuses_every_end_says_that_they_are_not_heard_yet(monkeypatch, tmp_path):
    def refuse(*_args, **_options):
        raise StoreError("no space left")

    monkeypatch.setattr(SqliteStore, "receive_all", refuse)
    on_terminal(monkeypatch)
    result = run(*ARGUMENTS, "--out", tmp_path)
    assert result.exit_code == 1
    assert "They agree on every pair. Not all ends are heard yet:" in " ".join(result.stdout.split())


def test_unknown_outcomes_cover_all_lost_invites_under_faults(tmp_path):
    findings = anyio.run(run_day, small(tmp_path, members=100, faults=True))
    assert findings.agrees
    assert findings.summary.pairs.unknown > 0


def test_a_piped_demo_prints_one_json_object(tmp_path):
    result = run(*ARGUMENTS, "--out", tmp_path / "out")
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    figures = json.loads(line)
    assert figures["Agrees"] is True
    assert 0 < figures["SuccessRate"] <= 1
    assert sum(figures["Outcomes"].values()) == sum(each["QuotaIDs"] for each in figures["ResultCodes"])
    assert figures["Outcomes"]["invited"] == figures["Pairs"]["Invited"]
    assert figures["Ledger"]["Invites"] == figures["Pairs"]["Invited"] + figures["Clicks"]["Links"]
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
    codes = tuple(
        CodeCount(result_code=code, result=result, pairs=pairs, lesson="", advice="")
        for code, result, pairs in ((12345, "SOMETHING_NEW", 2), (1, "SUCCESS", 1), (None, "no response", 1))
    )
    pairs = Pairs(planned=4, invited=1, rejected=2, unknown=1)
    shown = screen_of(
        attrs.evolve(
            findings,
            summary=Summary(
                state="finished", planned_at=datetime.now(UTC), pairs=pairs, requests=4, codes=codes
            ),
            latency=Percentiles(count=4, p50=0.05, p90=0.06, p99=0.07, longest=0.08),
            recontacts={77: 25, 78: 3},
            received=(0, 0),
            posted=(0, 0),
            clicks=(),
            invites=1,
            verdict=Verdict(lost=(InviteOutcome("M", 3, "unknown", None, None, None),)),
        ),
        width,
    )
    assert "25.0 % of the requested pairs ended in an invite" in " ".join(shown.split())
    assert "They agree on every pair and every end." in shown
    assert "12345  SOMETHING_NEW" in shown
    assert "28 member codes of 2 quotas" in shown
    assert "Reported unknown, no invite made" in shown
    assert "p50 50 ms  p90 60 ms" in shown
    assert max(map(len, shown.splitlines())) <= width


def test_a_demo_in_which_nobody_fits_has_findings(findings):
    summary = Summary(state="finished", planned_at=datetime.now(UTC))
    assert "0 invites" in screen_of(attrs.evolve(findings, summary=summary, latency=_demo._NO_REQUEST), 80)


def test_a_disagreement_is_shown(findings):
    lie = Lie(InviteOutcome("M", 3, "rejected", None, 16, "NO"), "invented")
    shown = screen_of(attrs.evolve(findings, verdict=Verdict(lies=(lie,))), 80)
    assert "They do NOT agree: NOT ok: 1 lies" in shown


def screen_of(findings, width):
    console = Console(file=io.StringIO(), width=width)
    _demo_view.print_findings(console, findings, small(Path("out")))
    return console.file.getvalue()


def test_the_example_uses_public_names_only():
    tree = ast.parse(Path(_demo.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {"sampling_async", "sampling_async.campaign"} <= modules
    assert not [module for module in modules if "._" in module]
