"""The display of the demo: a bar while it runs, then its findings, as text or as one JSON object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from sampling_async._cli import _rendering as show
from sampling_async._cli._demo import ENDS, PER_MEMBER, Demo, Findings, run_day
from sampling_async._cli._service import quotas_table
from sampling_async._cli._tally import STATUSES

if TYPE_CHECKING:
    from rich.console import Console

    from sampling_async import Quotas

_SHOWN_SURVEYS = 3
_BAR_CELLS = 16
_POLL_SECONDS = 0.1
_PERCENTILES = "p50", "p90", "p99"


async def run_shown(demo: Demo) -> Findings:
    """Run a demo, with a bar on stderr that shows how far it is."""
    bar = show.progress_bar(total_known=True)
    task = bar.add_task("", total=None)

    def draw() -> None:
        what, done, total = _progress(demo)
        bar.update(task, description=what, completed=done, total=total)

    with bar:  # it ends before an error is printed on the same screen
        async with show.redrawn(draw, _POLL_SECONDS):
            return await run_day(demo)


def _progress(demo: Demo) -> tuple[str, int, int | None]:
    """Return what a demo does, how much of it is done, and of how much."""
    if demo.run is None or demo.outbox is None:
        return "Planning", 0, None
    pairs = demo.run.pairs
    if pairs.pending:
        return "Asking", pairs.planned - pairs.pending, pairs.planned
    ends, unheard = (
        sum(posting.kind in ENDS for posting in postings)
        for postings in (demo.outbox.told, demo.outbox.unheard)
    )
    return "Hearing", ends - unheard, ends


def print_findings(console: Console, findings: Findings, demo: Demo) -> None:
    """Print the findings: inventory, plan, outcomes, ends, and the comparison with the service."""
    faults = "with" if demo.faults else "no"
    title = Text.assemble(
        ("sampling_async ", "bold"),
        f"against a simulated service, {faults} faults.\n",
        ("A partner's day: inventory, panel, matching, invites, and how each survey ended.", "dim"),
    )
    inventory, plan, summary = findings.inventory, findings.plan, findings.summary
    latency, (completed, terminated) = findings.latency, findings.received
    texts = {
        "Inventory": f"{len(inventory.surveys):,} surveys, {_quotas_in(inventory):,} open quotas, watched",
        "Panel": f"{plan.members:,} members of panel.jsonl, {plan.matched:,} of them match quotas",
        "Plan": f"{plan.pairs:,} pairs in {plan.requests:,} requests, at most {PER_MEMBER} for each member",
        "Invites": f"{_share(summary.success_rate)} of the requested pairs ended in an invite: "
        f"{summary.pairs.invited:,} invites, {summary.invites_per_request:.1f} a request, "
        f"expected value {summary.expected_value or 0:,.0f} (price x IR)",
        "Speed": f"{summary.active_seconds:.1f} s, {latency.count:,} bulk requests: "
        + "  ".join(f"{name} {getattr(latency, name) * 1000:.0f} ms" for name in _PERCENTILES),
        "Surveys": f"{completed:,} completes worth {findings.revenue:,.2f}, {terminated:,} terminates",
        "Clicks": f"{len(findings.clicks):,} on the partner's page, two at a time: {findings.links:,} links, "
        f"{findings.without_link:,} clicks without one",
        "Recontact": f"{sum(findings.recontacts.values()):,} member codes of "
        f"{len(findings.recontacts):,} quotas",
    }
    grid = Table.grid(Column(style="bold", min_width=9), padding=(0, 2))
    for label, words in texts.items():
        grid.add_row(label, show.plain(words))
    surveys = quotas_table(inventory.surveys[:_SHOWN_SURVEYS], console.width)
    console.print(Panel(title, border_style="cyan", expand=False), "", surveys, "", grid, "", sep="\n")
    table = show.new_table("Code", "Result", "Quota IDs", "Share", "", right=("Code", "Quota IDs", "Share"))
    for each in summary.codes:
        number, name = str(each.result_code or ""), show.plain(each.result or "no result code")
        share = each.pairs / summary.asked
        bar = Text("\N{BOX DRAWINGS HEAVY HORIZONTAL}" * round(_BAR_CELLS * share), "cyan")
        table.add_row(number, name, f"{each.pairs:,}", _share(share), bar)
    console.print(table, "", _comparison(findings))
    report = Text.assemble(("Report     ", "bold"), (str(demo.folder / "report.html"), "cyan"))
    console.print(report, soft_wrap=True)


def _share(part: float) -> str:
    return f"{100 * part:.1f} %"


def _comparison(findings: Findings) -> Panel:
    summary, verdict = findings.summary, findings.verdict
    rows = [
        ("Invites that the client reports", summary.pairs.invited + findings.links),
        ("Invites in the service's ledger", findings.invites),
    ]
    if verdict.unread or verdict.lost:
        rows += [
            ("  response lost, reported unknown", len(verdict.unread)),
            ("Reported unknown, no invite made", len(verdict.lost)),
        ]
    rows += [
        ("Ends of surveys in the inbox", sum(findings.received)),
        ("Ends that the service knows of", sum(findings.posted)),
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
    summary, verdict, latency = findings.summary, findings.verdict, findings.latency
    return {
        "SuccessRate": round(summary.success_rate, 4),
        "InvitesPerRequest": round(summary.invites_per_request, 3),
        "ExpectedValue": round(summary.expected_value or 0, 2),
        "Members": demo.members,
        "Surveys": len(findings.inventory.surveys),
        "Quotas": _quotas_in(findings.inventory),
        "Pairs": show.fields_of(summary.pairs),
        "Outcomes": {status: getattr(summary.pairs, status) for status in STATUSES},
        "ResultCodes": [
            {"ResultCode": each.result_code, "Result": each.result, "QuotaIDs": each.pairs}
            for each in summary.codes
        ],
        "Seconds": round(summary.active_seconds, 3),
        "BulkRequests": latency.count,
        "BulkRequestSeconds": {name.upper(): round(getattr(latency, name), 4) for name in _PERCENTILES},
        "Recontact": {
            "QuotaIDs": len(findings.recontacts),
            "MemberCodes": sum(findings.recontacts.values()),
        },
        "Clicks": {
            "Made": len(findings.clicks),
            "Links": findings.links,
            "Without": findings.without_link,
        },
        "Notifications": {
            "Completions": findings.received[0],
            "Terminates": findings.received[1],
            "Revenue": findings.revenue,
        },
        "Ledger": {
            "Invites": findings.invites,
            "Completions": findings.posted[0],
            "Terminates": findings.posted[1],
            "Unheard": findings.missing_ends,
            "Unread": len(verdict.unread),
            "Lost": len(verdict.lost),
            "Lies": len(verdict.lies),
            "Unexplained": len(verdict.unexplained),
        },
        "Agrees": findings.agrees,
        "Report": str(demo.folder / "report.html"),
    }
