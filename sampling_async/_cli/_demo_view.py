"""The display of the demo: live on a terminal, one JSON object if piped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sampling_async._cli import _rendering as show
from sampling_async._cli._demo import Findings, Plan, Watcher
from sampling_async._cli._tally import STATUSES

if TYPE_CHECKING:
    from sampling_async import OutcomeStream, Quotas

_SHOWN_SURVEYS = 5
_BAR_CELLS = 24


class DemoScreen:
    """Shows a demo while it runs: the inventory, a bar with rate and remaining time, and the findings."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._console = show.screen()
        self._bar: show.StreamBar | None = None

    def watcher(self, *, silent: bool) -> Watcher:
        """Return the functions to notify. If silent, they show only the bar on stderr."""
        return Watcher(
            inventory=self._start if silent else self._show_inventory,
            outcome=self._follow,
            finished=self.stop,
        )

    def show_plan(self) -> None:
        """Print what the demo is going to do."""
        faults = "with" if self._plan.faults else "no"
        text = Text.assemble(
            ("sampling_async ", "bold"),
            f"against a simulated service in its own process, {faults} faults.\n",
            ("Every member is asked about every open quota, 100 quota IDs per request.", "dim"),
        )
        self._console.print(Panel(text, border_style="cyan", expand=False))

    def _show_inventory(self, inventory: Quotas, total: int) -> None:
        surveys = len(inventory.surveys)
        quotas = sum(len(survey.quotas) for survey in inventory.surveys)
        self._console.print(
            f"\n[bold]Inventory[/bold]  {surveys:,} surveys, {quotas:,} open quotas; the first:\n"
        )
        self._console.print(show.quotas_table(inventory.surveys[:_SHOWN_SURVEYS], self._console.width))
        self._console.print(
            f"\n[bold]Fan-out[/bold]    {self._plan.members:,} members x {quotas:,} quotas = "
            f"[bold]{total:,}[/bold] quota IDs"
        )
        self._start(inventory, total)

    def _start(self, _inventory: Quotas, _total: int) -> None:
        # Entered by hand: the bar begins and ends in different calls of the watcher.
        self._bar = show.StreamBar().__enter__()

    def _follow(self, stream: OutcomeStream) -> None:
        if self._bar is not None:
            self._bar.follow(stream)

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.__exit__()

    def show_findings(self, findings: Findings) -> None:
        """Show the results."""
        print_findings(self._console, findings)


def print_findings(console: Console, findings: Findings) -> None:
    """Print the findings: speed, outcomes, recontact list and the comparison with the ledger."""
    console.print(_speed(findings))
    console.print()
    console.print(_outcomes_table(findings))
    console.print()
    console.print(_codes_table(findings))
    console.print()
    console.print(_recontact(findings))
    console.print()
    console.print(_ledger_panel(findings))


def _speed(findings: Findings) -> RenderableType:
    times = "  ".join(f"p{percent} {_ms(findings.percentile(percent))}" for percent in (50, 90, 99))
    rate = findings.tally.total / max(findings.seconds, 1e-9)
    return Text.assemble(
        ("Speed      ", "bold"),
        f"{findings.seconds:.2f} s, ",
        (f"{rate:,.0f} quota IDs/s", "bold cyan"),
        f"\n           {len(findings.request_seconds):,} bulk requests: {times}",
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
    sizes = " + ".join(str(count) for count in pages)
    return Text.assemble(
        ("Recontact  ", "bold"),
        f"quota {findings.recontact_quota_id}: {sum(pages):,} member codes in {len(pages)} pages ({sizes})",
    )


def _ledger_panel(findings: Findings) -> Panel:
    verdict, invited = findings.verdict, findings.tally.statuses["invited"]
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_row("Invites that the client reports", f"{invited:,}")
    table.add_row("Invites in the service's ledger", f"{findings.ledger_invites:,}")
    if verdict.unread or verdict.lost:
        table.add_row("  read by the client", f"{invited:,}")
        table.add_row("  response lost, reported unknown", f"{len(verdict.unread):,}")
        table.add_row("Reported unknown, no invite made", f"{len(verdict.lost):,}")
    if findings.agrees:
        says, style = Text("They agree on every quota ID.", "bold green"), "green"
    else:
        says, style = show.plain(f"They do NOT agree: {str(verdict).splitlines()[0]}", "bold red"), "red"
    return Panel(Group(table, says), title="Client and ledger", border_style=style, expand=False)


def findings_json(plan: Plan, findings: Findings) -> dict[str, Any]:
    """Return the figures of a demo as one JSON object."""
    tally, verdict = findings.tally, findings.verdict
    return {
        "Members": plan.members,
        "Surveys": len(findings.inventory.surveys),
        "Quotas": sum(len(survey.quotas) for survey in findings.inventory.surveys),
        "QuotaIDs": tally.total,
        "Outcomes": {status: tally.statuses[status] for status in STATUSES},
        "ResultCodes": [
            {"ResultCode": code, "Result": result, "QuotaIDs": count}
            for (code, result), count in tally.codes.most_common()
        ],
        "Seconds": round(findings.seconds, 3),
        "QuotaIDsPerSecond": round(tally.total / max(findings.seconds, 1e-9)),
        "BulkRequests": len(findings.request_seconds),
        "BulkRequestSeconds": {
            f"P{percent}": round(findings.percentile(percent), 4) for percent in (50, 90, 99)
        },
        "Recontact": {
            "QuotaID": findings.recontact_quota_id,
            "Pages": len(findings.recontact_pages),
            "MemberCodes": sum(findings.recontact_pages),
        },
        "Ledger": {
            "Invites": findings.ledger_invites,
            "Unread": len(verdict.unread),
            "Lost": len(verdict.lost),
            "Lies": len(verdict.lies),
            "Unexplained": len(verdict.unexplained),
        },
        "Agrees": findings.agrees,
    }
