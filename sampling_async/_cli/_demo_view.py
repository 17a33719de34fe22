"""The display of the demo: step by step on a terminal, one JSON object if piped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from sampling_async import Quotas
from sampling_async._cli import _rendering as show
from sampling_async._cli._campaign_view import pairs_json
from sampling_async._cli._demo import PER_MEMBER, Demo, Ends, Findings
from sampling_async._cli._tally import STATUSES
from sampling_async.campaign import Plan

if TYPE_CHECKING:
    from sampling_async._cli._demo import Step

_SHOWN_SURVEYS = 3
_BAR_CELLS = 24
_PERCENTS = (50, 90, 99)


class DemoScreen:
    """Shows a demo while it runs; if it is silent, only the bar, which is on stderr."""

    def __init__(self, demo: Demo, *, silent: bool) -> None:
        self._console = Console(quiet=True) if silent else show.screen()
        self.bar = show.progress_bar(total_known=True)
        self._task = self.bar.add_task("Asking", total=None, visible=False)
        faults = "with" if demo.faults else "no"
        text = Text.assemble(
            ("sampling_async ", "bold"),
            f"against a simulated service in its own process, {faults} faults.\n",
            ("A partner's day: inventory, panel, matching, invites, and how each survey ended.", "dim"),
        )
        self._console.print(Panel(text, border_style="cyan", expand=False))

    def show(self, step: Step) -> None:
        """Show how far the demo is."""
        if isinstance(step, Quotas):
            found = f"{len(step.surveys):,} surveys, {_quotas_in(step):,} open quotas, watched; the first:"
            self._console.print("\n", _pairs(Inventory=found), "\n", sep="")
            self._console.print(show.quotas_table(step.surveys[:_SHOWN_SURVEYS], self._console.width), "")
        elif isinstance(step, Plan):
            found = f"{step.members:,} members of panel.jsonl, {step.matched:,} of them match quotas"
            plan = f"{step.pairs:,} pairs in {step.requests:,} requests, at most {PER_MEMBER} for each member"
            self._console.print(_pairs(Panel=found, Plan=plan))
        elif isinstance(step, Ends):
            self._move("Hearing", step.heard, step.known)
        elif not self.bar.disable:  # the counts of a run are added up each time
            pairs = step.pairs
            self._move("Asking", pairs.planned - pairs.pending, pairs.planned)

    def _move(self, what: str, done: int, total: int) -> None:
        self.bar.update(self._task, description=what, completed=done, total=total, visible=True)


def print_findings(console: Console, findings: Findings, demo: Demo) -> None:
    """Print the findings: the share of invites, outcomes, ends, and the comparison with the service."""
    summary, pages, total = findings.summary, findings.recontact_pages, max(findings.statuses.total(), 1)
    completed, terminated = findings.received
    times = "  ".join(f"p{percent} {findings.percentile(percent) * 1000:.0f} ms" for percent in _PERCENTS)
    console.print(
        "",
        _pairs(
            Invites=f"{_share(summary.success_rate)} of the requested pairs ended in an invite: "
            f"{summary.pairs.invited:,} invites, {summary.invites_per_request:.1f} a request, "
            f"{summary.expected_value:,.0f} expected (price x incidence rate)",
            Speed=f"{findings.seconds:.1f} s, {len(findings.request_seconds):,} bulk requests: {times}",
            Surveys=f"{completed:,} completes worth {findings.revenue:,.2f}, {terminated:,} terminates",
            Recontact=f"quota {findings.recontact_quota_id}: {sum(pages):,} member codes in {len(pages)} pages",
        ),
        "",
    )
    table = show.new_table("Outcome", "Quota IDs", "Share", "", right=("Quota IDs", "Share"))
    for status in STATUSES:
        name, style = Text(status.replace("_", " "), show.STYLES[status]), show.STYLES[status]
        count = findings.statuses[status]
        line = Text("\N{BOX DRAWINGS HEAVY HORIZONTAL}" * round(_BAR_CELLS * count / total), style)
        table.add_row(name, f"{count:,}", _share(count / total), line)
    console.print(table, "")
    table = show.new_table("Code", "Result", "Quota IDs", "Share", right=("Code", "Quota IDs", "Share"))
    for (code, result), count in findings.codes.most_common():
        name = show.plain(result or "no result code")
        table.add_row("" if code is None else str(code), name, f"{count:,}", _share(count / total))
    console.print(table, "", _comparison(findings))
    console.print(
        Text.assemble(("Report     ", "bold"), (str(demo.folder / "report.html"), "cyan")), soft_wrap=True
    )


def _pairs(**texts: str) -> Table:
    """Return a grid of names and texts, as wide as the terminal."""
    grid = Table.grid(Column(style="bold", min_width=9), padding=(0, 2))
    for name, text in texts.items():
        grid.add_row(name, show.plain(text))
    return grid


def _share(part: float) -> str:
    return f"{100 * part:.1f} %"


def _comparison(findings: Findings) -> Panel:
    service, invited, heard = findings.service, findings.statuses["invited"], sum(findings.received)
    unread, lost = len(service.verdict.unread), len(service.verdict.lost)
    rows = [
        ("Invites that the client reports", invited),
        ("Invites in the service's ledger", service.invites),
        ("Ends of surveys in the inbox", heard),
        ("Ends that the service knows of", heard + findings.missing_ends),
    ]
    if unread or lost:
        rows += [
            ("  read by the client", invited),
            ("  response lost, reported unknown", unread),
            ("Reported unknown, no invite made", lost),
        ]
    table = Table.grid("", Column(justify="right"), padding=(0, 2))
    for name, count in rows:
        table.add_row(name, f"{count:,}")
    text, style = "They agree on every pair and every end.", "green"
    if findings.disagreement:
        text, style = f"They do NOT agree: {findings.disagreement}", "red"
    elif missing := findings.missing_ends:
        text = f"They agree on every pair. Not all ends are heard yet: {missing:,} are missing."
        style = "yellow"
    group = Group(table, show.plain(text, f"bold {style}"))
    return Panel(group, title="Client and ledger", border_style=style, expand=False)


def _quotas_in(inventory: Quotas) -> int:
    return sum(len(survey.quotas) for survey in inventory.surveys)


def findings_json(demo: Demo, findings: Findings) -> dict[str, Any]:
    """Return the figures of a demo as one JSON object."""
    summary, service, pages = findings.summary, findings.service, findings.recontact_pages
    verdict, (completed, terminated) = service.verdict, findings.received
    return {
        "SuccessRate": round(summary.success_rate, 4),
        "InvitesPerRequest": round(summary.invites_per_request, 3),
        "ExpectedValue": round(summary.expected_value, 2),
        "Members": demo.members,
        "Surveys": len(findings.inventory.surveys),
        "Quotas": _quotas_in(findings.inventory),
        "Pairs": pairs_json(summary.pairs),
        "Outcomes": {status: findings.statuses[status] for status in STATUSES},
        "ResultCodes": [
            {"ResultCode": code, "Result": result, "QuotaIDs": count}
            for (code, result), count in findings.codes.most_common()
        ],
        "Seconds": round(findings.seconds, 3),
        "BulkRequests": len(findings.request_seconds),
        "BulkRequestSeconds": {f"P{each}": round(findings.percentile(each), 4) for each in _PERCENTS},
        "Recontact": {"QuotaID": findings.recontact_quota_id, "Pages": len(pages), "MemberCodes": sum(pages)},
        "Notifications": {"Completions": completed, "Terminates": terminated, "Revenue": findings.revenue},
        "Ledger": {
            "Invites": service.invites,
            "Completions": service.completions,
            "Terminates": service.terminates,
            "Unheard": findings.missing_ends,
            "Unread": len(verdict.unread),
            "Lost": len(verdict.lost),
            "Lies": len(verdict.lies),
            "Unexplained": len(verdict.unexplained),
        },
        "Agrees": findings.agrees,
        "Report": str(demo.folder / "report.html"),
    }
