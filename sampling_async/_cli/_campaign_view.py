"""What the commands about campaigns show: a plan, what became of it, its limits, and a comparison.

No member code and no link is shown anywhere here.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

from attrs import fields
from rich.table import Column, Table
from rich.text import Text

from sampling_async._cli import _rendering as show
from sampling_async._cli._tally import code_name
from sampling_async._contract.checks import count_of
from sampling_async._contract.records import wire_name
from sampling_async.campaign._comparison import FIGURES, SHARES, CampaignComparison

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from rich.console import Console

    from sampling_async.campaign import Limits, Pairs, Plan, Summary

_UNKNOWN: Final = "-"  # a figure that nobody knows
_LONG: Final = 1000
MOST_CODES: Final = 5
_MOST_REASONS: Final = 3
STATES: Final = {
    "asking": "green",
    "running": "green",
    "finished": "green",
    "paused": "yellow",
    "outage": "red",
    "hours": "yellow",
    "rate": "cyan",
    "stopped": "red",
}
_PARTS: Final = ("invited", "rejected", "not_sent", "unknown", "skipped", "pending")


def quoted(folder: Path) -> str:
    return shlex.quote(str(folder))


def resume_command(folder: Path) -> str:
    return f"sampling-async campaign run --out {quoted(folder)}"


def account(pairs: Pairs) -> str:
    parts = " + ".join(f"{getattr(pairs, name):,} {name.replace('_', ' ')}" for name in _PARTS)
    return f"{pairs.planned:,} planned = {parts}"


# --- The plan


def show_plan(plan: Plan) -> None:
    console = _on_stderr()
    rows = {
        "Members": f"{plan.members:,}, {plan.matched:,} of them with quotas",
        "Pairs": f"{plan.pairs:,}, {plan.certain:,} of them match certainly",
        "Requests": f"{plan.requests:,}",
        "Quotas": f"{plan.quotas:,}, with room for {count_of(plan.room, 'invite')} in all",
        "Expected": f"{count_of(plan.expected_invites, 'invite')}, worth {plan.worth}",
        **_limit_rows(plan.limits),
    }
    title = "The plan" if plan.number == 1 else f"The plan, number {plan.number}"
    console.print(Text(title, style="bold"))
    console.print(_grid(rows))
    for warning in plan.warnings:
        show.warn(warning)


def plan_json(plan: Plan) -> dict[str, Any]:
    names = " ".join(each.name for each in fields(type(plan)) if each.name != "currency_rates")
    return {**show.fields_of(plan, names), "ExpectedValue": rounded(plan.expected_value)}


def _on_stderr() -> Console:
    console = show.stderr_console()
    if not console.is_terminal:
        console.width = _LONG  # a log wraps nothing
    return console


def _limit_rows(limits: Mapping[str, str]) -> dict[str, str]:
    return {"Limits": "; ".join(f"{name}: {value}" for name, value in limits.items()) or "none"}


def _grid(rows: Mapping[str, str | Text]) -> Table:
    columns = Column(style="dim", no_wrap=True), Column(overflow="fold")
    table = Table.grid(*columns, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(f"  {name}", show.plain(value) if isinstance(value, str) else value)
    return table


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def pairs_json(pairs: Pairs) -> dict[str, int]:
    return show.fields_of(pairs, " ".join(("planned", *_PARTS)))


# --- What became of it


def summary_json(summary: Summary) -> dict[str, Any]:
    return {
        **show.fields_of(summary, "state reason"),
        **pairs_json(summary.pairs),
        "Settled": summary.settled,
        **show.fields_of(summary, "members matched invited_members"),
        "SkippedBecause": dict(summary.skipped),
        "Requests": summary.requests,
        "InvitesPerRequest": round(summary.invites_per_request, 4),
        "SuccessRate": round(summary.success_rate, 4),
        "ExpectedValue": rounded(summary.expected_value),
        "PlannedValue": rounded(summary.planned_value),
        "Spent": round(summary.spent, 2),
        "ByCurrency": {str(each): show.fields_of(sums) for each, sums in summary.by_currency.items()},
        **show.fields_of(summary, "currency_id runs started_at ended_at limits"),
    }


def show_summary(summary: Summary, console: Console) -> None:
    console.print(_grid(dict(_summary_rows(summary))))
    print_codes(summary, console)


def _summary_rows(summary: Summary) -> Iterator[tuple[str, str | Text]]:
    reason = f": {summary.reason}" if summary.reason else ""
    yield (
        "State",
        Text(summary.state, STATES.get(summary.state, "")).append_text(show.plain(reason, "default")),
    )
    yield "Pairs", account(summary.pairs)
    if summary.unknown_in_words:
        yield "Settled", summary.unknown_in_words
    yield "Requests", f"{summary.requests:,}, {summary.invites_per_request:.2f} invites per request"
    yield "Success rate", f"{summary.success_rate:.1%} of the requested pairs"
    if reasons := [f"{count:,} {why}" for why, count in summary.skipped.items()][:_MOST_REASONS]:
        yield "Skipped", "; ".join(reasons)
    yield "Members", f"{summary.invited_members:,} with invites, of {summary.members:,}"
    yield (
        "Expected value",
        f"{summary.worth()} of "
        + (summary.worth("planned_value") if summary.planned_value is None else f"{summary.planned_value:,.2f}")
        + " planned",
    )
    if summary.spent:
        yield "Spent at most", f"{summary.spent:,.2f}"
    yield from _limit_rows(summary.limits).items()
    runs = "none yet"
    if summary.started_at is not None:
        runs = f"{summary.runs:,}, the first at {summary.started_at:%Y-%m-%d %H:%M} UTC"
        if summary.ended_at is None:
            runs += "; one is active"
        else:
            runs += f", the last one ended at {summary.ended_at:%Y-%m-%d %H:%M:%S} UTC"
    yield "Runs", runs


def print_codes(summary: Summary, console: Console) -> None:
    """Print the most frequent refusals of a campaign, each with what a person can do."""
    refused = [each for each in summary.codes if each.lesson or each.result_code is None][:MOST_CODES]
    table = Table.grid(Column(justify="right", style="yellow", no_wrap=True), "", padding=(0, 2, 0, 0))
    for each in refused:
        name = each.result if each.result_code is None else code_name(each.result_code, each.result)
        table.add_row(f"  {each.pairs:,}", show.plain(name))
        if each.advice:
            table.add_row("", show.plain(each.advice, "dim"))
    if refused:
        console.print(table)


def show_end(summary: Summary, reason: str) -> None:
    console = _on_stderr()
    is_done = not summary.pairs.pending
    text = "The campaign is finished" if is_done else f"The campaign has stopped: {reason or summary.reason}"
    console.print(show.plain(text, "bold green" if is_done else "bold yellow"))
    console.print(account(summary.pairs))
    console.print(
        f"{count_of(summary.requests, 'request')}, expected value {summary.worth()},"
        f" success rate {summary.success_rate:.1%}"
    )
    if ends := ends_text(summary):
        console.print(show.plain(ends))
    print_codes(summary, console)
    if summary.unknown_in_words:
        console.print(summary.unknown_in_words)
    elif summary.pairs.unknown:
        console.print("Unknown: an invite may exist; such a pair is not requested again.")


def ends_text(summary: Summary) -> str:
    """Return what the invites have brought, in one line; an empty text if that is not known."""
    if summary.ends is None:
        return ""
    total = summary.ends.total
    rate = "" if total.rate is None else f" ({total.rate:.1%} of {count_of(total.invited, 'invite')})"
    taken_back = f", {count_of(total.reconciled, 'reconciliation')}" * bool(total.reconciled)
    return (
        f"{count_of(total.completed, 'complete')}{rate}, {count_of(total.terminated, 'terminate')}{taken_back},"
        f" revenue {summary.worth('revenue')}"
    )


def show_limits(limits: Limits, *, is_running: bool) -> None:
    paused = "yes" + (f": {limits.reason}" if limits.reason else "") if limits.paused else "no"
    rows = {
        "Paused": paused,
        **_limit_rows(limits.in_words()),
        "Run": "active; it heeds this within a second" if is_running else "none is active",
    }
    show.screen().print(_grid(rows))


def show_comparison(comparison: CampaignComparison) -> None:
    """Print several campaigns side by side; on a narrow terminal, the latest ones."""
    nights, console = comparison.nights, show.screen()
    rows = [
        (text, *(_figure(name, read(night.summary)) for night in nights))
        for name, (text, read) in FIGURES.items()
    ]
    columns = [("Figure", 0), *((night.name, place) for place, night in enumerate(nights, 1))]
    rows.append(("Currency", *(night.currency for night in nights)))
    known = [row for row in rows if any(text != _UNKNOWN for text in row[1:])]
    console.print(show.fitting_table(known, columns, console.width))
    for text in comparison.changes():
        console.print(show.plain(text))


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    if name in SHARES:
        return f"{value:.1%}"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def comparison_json(value: Any) -> Any:
    """Return a comparison with its names as the contract spells them."""
    if isinstance(value, list):
        return [comparison_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    # Not the names of result codes: `28 QUOTA_FULL`.
    return {wire_name(key) if key.isidentifier() else key: comparison_json(each) for key, each in value.items()}
