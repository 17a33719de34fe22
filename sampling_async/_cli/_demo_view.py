"""The display of the demo: step by step on a terminal, one JSON object if piped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from sampling_async._cli import _rendering as show
from sampling_async._cli._demo import Demo, Findings, Watcher
from sampling_async._cli._tally import STATUSES

if TYPE_CHECKING:
    from sampling_async import Quotas
    from sampling_async.campaign import CampaignRun, Plan

_SHOWN_SURVEYS = 3
_BAR_CELLS = 24


class DemoScreen:
    """Shows a demo while it runs: the inventory, the plan, a bar, and the findings."""

    def __init__(self, demo: Demo) -> None:
        self._demo = demo
        self._console = show.screen()
        self._bar: Progress | None = None
        self._asking = TaskID(0)

    def watcher(self, *, silent: bool) -> Watcher:
        """Return the functions to notify. If silent, they show only the bar on stderr."""
        return Watcher(
            inventory=(lambda _: None) if silent else self._show_inventory,
            planned=self._start if silent else self._show_plan,
            outcome=self._follow,
            hearing=self._hear,
            finished=self.stop,
        )

    def show_demo(self) -> None:
        """Print what the demo is going to do."""
        faults = "with" if self._demo.faults else "no"
        text = Text.assemble(
            ("sampling_async ", "bold"),
            f"against a simulated service in its own process, {faults} faults.\n",
            ("A partner's day: inventory, panel, matching, invites, and how each survey ended.", "dim"),
        )
        self._console.print(Panel(text, border_style="cyan", expand=False))

    def _show_inventory(self, inventory: Quotas) -> None:
        surveys = len(inventory.surveys)
        quotas = sum(len(survey.quotas) for survey in inventory.surveys)
        self._console.print(
            f"\n[bold]Inventory[/bold]  {surveys:,} surveys, {quotas:,} open quotas, watched; the first:\n"
        )
        self._console.print(show.quotas_table(inventory.surveys[:_SHOWN_SURVEYS], self._console.width))

    def _show_plan(self, plan: Plan, seconds: float) -> None:
        self._console.print(
            f"\n[bold]Panel[/bold]      {plan.members:,} members of {self._demo.panel.name}, "
            f"{plan.matched:,} of them match quotas"
            f"\n[bold]Plan[/bold]       {plan.pairs:,} pairs in {plan.requests:,} requests, at most "
            f"{self._demo.per_member} for each member ({seconds:.1f} s)"
        )
        self._start(plan, seconds)

    def _start(self, plan: Plan, _seconds: float) -> None:
        bar = show.progress_bar(total_known=True, lines=False)
        self._asking = bar.add_task("Asking", total=plan.pairs)
        # Started by hand: the bar begins and ends in different calls of the watcher.
        bar.start()
        self._bar = bar

    def _follow(self, run: CampaignRun) -> None:
        if self._bar is not None and not self._bar.disable:
            pairs = run.pairs
            self._bar.update(self._asking, completed=pairs.planned - pairs.pending, total=pairs.planned)

    def _hear(self, heard: int, ends: int) -> None:
        if self._bar is not None:
            self._bar.update(self._asking, description="Hearing", completed=heard, total=ends)

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def show_findings(self, findings: Findings) -> None:
        """Show the results."""
        print_findings(self._console, findings, self._demo)


def print_findings(console: Console, findings: Findings, demo: Demo) -> None:
    """Print the findings: the share of invites, outcomes, ends, and the comparison with the service."""
    console.print()
    console.print(_headline(findings))
    console.print(_speed(findings))
    console.print(_ends(findings))
    console.print(_recontact(findings))
    console.print()
    console.print(_outcomes_table(findings))
    console.print()
    console.print(_codes_table(findings))
    console.print()
    console.print(_ledger_panel(findings))
    console.print(Text.assemble(("Report     ", "bold"), (str(demo.report), "cyan")), soft_wrap=True)


def _headline(findings: Findings) -> RenderableType:
    summary = findings.summary
    return Text.assemble(
        (f"{100 * summary.success_rate:.1f} %", "bold green"),
        (" of what was asked for ended in an invite: ", "bold"),
        f"{summary.pairs.invited:,} invites,\n           {summary.invites_per_request:.1f} a request, "
        f"{summary.expected_value:,.0f} expected (price x incidence rate)",
    )


def _speed(findings: Findings) -> RenderableType:
    times = "  ".join(f"p{percent} {_ms(findings.percentile(percent))}" for percent in (50, 90, 99))
    return Text.assemble(
        ("Speed      ", "bold"),
        f"{findings.seconds:.1f} s, {len(findings.request_seconds):,} bulk requests: {times}",
    )


def _ends(findings: Findings) -> RenderableType:
    completed, terminated = findings.received
    return Text.assemble(
        ("Surveys    ", "bold"),
        f"{completed:,} completes worth {findings.revenue:,.2f}, {terminated:,} terminates",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def _outcomes_table(findings: Findings) -> Table:
    table = show.new_table("Outcome", "Quota IDs", "Share", "", right=("Quota IDs", "Share"))
    total = max(findings.tally.total, 1)
    for status in STATUSES:
        count, style = findings.tally.statuses[status], show.STYLES[status]
        table.add_row(Text(status.replace("_", " "), style), f"{count:,}", *_share(count, total, style))
    return table


def _codes_table(findings: Findings) -> Table:
    table = show.new_table("Code", "Result", "Quota IDs", "Share", "", right=("Code", "Quota IDs", "Share"))
    total = max(findings.tally.total, 1)
    for (code, result), count in findings.tally.codes.most_common():
        name = show.plain(result or "no result code")
        table.add_row("" if code is None else str(code), name, f"{count:,}", *_share(count, total, "blue"))
    return table


def _share(count: int, total: int, style: str) -> tuple[str, Text]:
    cells = round(_BAR_CELLS * count / total)
    return f"{100 * count / total:.1f} %", Text("\N{BOX DRAWINGS HEAVY HORIZONTAL}" * cells, style)


def _recontact(findings: Findings) -> RenderableType:
    pages = findings.recontact_pages
    return Text.assemble(
        ("Recontact  ", "bold"),
        f"quota {findings.recontact_quota_id}: {sum(pages):,} member codes in {len(pages)} pages",
    )


def _ledger_panel(findings: Findings) -> Panel:
    verdict, invited = findings.verdict, findings.tally.statuses["invited"]
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_row("Invites that the client reports", f"{invited:,}")
    table.add_row("Invites in the service's ledger", f"{len(findings.service.invites):,}")
    table.add_row("Ends of surveys in the inbox", f"{sum(findings.received):,}")
    table.add_row("Ends that the service knows of", f"{sum(findings.received) + findings.missing_ends:,}")
    if verdict.unread or verdict.lost:
        table.add_row("  read by the client", f"{invited:,}")
        table.add_row("  response lost, reported unknown", f"{len(verdict.unread):,}")
        table.add_row("Reported unknown, no invite made", f"{len(verdict.lost):,}")
    if findings.disagreement:
        says, style = show.plain(f"They do NOT agree: {findings.disagreement}", "bold red"), "red"
    elif findings.missing_ends:
        text = f"They agree on every pair. Not all ends are heard yet: {findings.missing_ends:,} are missing."
        says, style = Text(text, "bold yellow"), "yellow"
    else:
        says, style = Text("They agree on every pair and every end.", "bold green"), "green"
    return Panel(Group(table, says), title="Client and ledger", border_style=style, expand=False)


def findings_json(demo: Demo, findings: Findings) -> dict[str, Any]:
    """Return the figures of a demo as one JSON object."""
    tally, verdict, summary = findings.tally, findings.verdict, findings.summary
    completed, terminated = findings.received
    return {
        "SuccessRate": round(summary.success_rate, 4),
        "InvitesPerRequest": round(summary.invites_per_request, 3),
        "ExpectedValue": round(summary.expected_value, 2),
        "Members": demo.members,
        "Surveys": len(findings.inventory.surveys),
        "Quotas": sum(len(survey.quotas) for survey in findings.inventory.surveys),
        "Pairs": {
            "Planned": summary.pairs.planned,
            "Invited": summary.pairs.invited,
            "Rejected": summary.pairs.rejected,
            "NotSent": summary.pairs.not_sent,
            "Unknown": summary.pairs.unknown,
            "Skipped": summary.pairs.skipped,
            "Pending": summary.pairs.pending,
        },
        "Outcomes": {status: tally.statuses[status] for status in STATUSES},
        "ResultCodes": [
            {"ResultCode": code, "Result": result, "QuotaIDs": count}
            for (code, result), count in tally.codes.most_common()
        ],
        "Seconds": round(findings.seconds, 3),
        "BulkRequests": len(findings.request_seconds),
        "BulkRequestSeconds": {
            f"P{percent}": round(findings.percentile(percent), 4) for percent in (50, 90, 99)
        },
        "Recontact": {
            "QuotaID": findings.recontact_quota_id,
            "Pages": len(findings.recontact_pages),
            "MemberCodes": sum(findings.recontact_pages),
        },
        "Notifications": {"Completions": completed, "Terminates": terminated, "Revenue": findings.revenue},
        "Ledger": {
            "Invites": len(findings.service.invites),
            "Completions": findings.service.completions,
            "Terminates": findings.service.terminates,
            "Unheard": findings.missing_ends,
            "Unread": len(verdict.unread),
            "Lost": len(verdict.lost),
            "Lies": len(verdict.lies),
            "Unexplained": len(verdict.unexplained),
        },
        "Agrees": findings.agrees,
        "Report": str(demo.report),
    }
