"""What the commands about campaigns show: a plan, a run while it goes on, and what became of it.

No member code and no link is shown anywhere here.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from contextlib import nullcontext
from datetime import timedelta
from math import ceil
from typing import TYPE_CHECKING, Any, Final

import anyio
from attrs import fields
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from sampling_async._cli import _rendering as show
from sampling_async._cli._connection import silence_stdout
from sampling_async._cli._tally import Tally, code_name
from sampling_async._contract.checks import count_of
from sampling_async._contract.records import wire_name
from sampling_async.campaign._comparison import FIGURES, SHARES, CampaignComparison

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import Console

    from sampling_async import InviteOutcome, SamplingClient
    from sampling_async.campaign import CampaignRun, Limits, Pairs, Plan, Summary

_WINDOW: Final = 10.0  # seconds over which rates are averaged
_REDRAWN: Final = 0.25
_LINES: Final = 2.0
_UNKNOWN: Final = "-"  # a figure that nobody knows


class RunMetrics:
    """A run, and the figures that `measure` finds of it."""

    def __init__(self, run: CampaignRun, client: SamplingClient) -> None:
        self.run = run
        self.tally = Tally()
        self.ended_as: str | None = None
        self.refusals: Counter[tuple[int | None, str | None]] = Counter()  # by code and name
        self.invites_per_second = self.requests_per_second = 0.0
        self.seconds_left: float | None = None
        self.limit = 0.0  # how many requests the client now sends at once
        self._client = client
        # Moment, invites, requests and pairs that were done by then.
        self._samples: deque[tuple[float, int, int, int]] = deque()
        self.measure()

    def add(self, outcome: InviteOutcome) -> None:
        self.tally.add(outcome)
        if outcome.status == "rejected":
            self.refusals[outcome.result_code, outcome.result] += 1

    @property
    def state(self) -> str:
        """`asking`, why it waits, or how it has ended."""
        return self.ended_as or ("stopping" if self.run.reason else self.run.waiting_for or "asking")

    def measure(self) -> None:
        now, pairs, samples = time.monotonic(), self.run.pairs, self._samples
        samples.append((now, pairs.invited, self.run.requests, pairs.planned - pairs.pending))
        while now - samples[0][0] > _WINDOW and len(samples) > 2:  # noqa: PLR2004  a rate needs two
            samples.popleft()
        seconds = max(now - samples[0][0], 1e-3)
        invites, requests, done = (
            (last - first) / seconds if seconds >= _REDRAWN / 2 else 0.0
            for first, last in zip(samples[0][1:], samples[-1][1:], strict=True)
        )
        self.invites_per_second, self.requests_per_second = invites, requests
        self.limit = self._client.snapshot().limit
        # The pending pairs take so long, or the invites up to the cap if that is reached earlier.
        ways, cap = [(pairs.pending, max(done, 0.0))], self.run.limits.max_invites
        if cap is not None:
            ways.append((max(0, cap - pairs.invited - pairs.unknown), invites))
        self.seconds_left = min((count / rate for count, rate in ways if rate), default=None)
        # The length of a wait is not known.
        if self.ended_as or not pairs.pending or self.run.waiting_for not in {None, "rate"}:
            self.seconds_left = None


class Display:
    """Shows a run: live on a terminal, and as lines of JSON on stdout."""

    def __init__(self, metrics: RunMetrics, *, as_lines: bool) -> None:
        self.metrics, self._as_lines = metrics, as_lines

    async def keep(self) -> None:
        """Keep it up to date, until this is cancelled."""
        console, line_due = show.stderr_console(), time.monotonic() + _LINES
        # Lines of JSON and a live display on one screen would write into each other.
        is_live = console.is_terminal and not console.quiet and (not self._as_lines or show.stdout_is_file())
        live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        with live if is_live else nullcontext():
            while True:
                if is_live:
                    self.metrics.measure()
                    live.update(figures_view(self.metrics), refresh=True)
                if self._as_lines and not show.wanted.quiet and time.monotonic() >= line_due:
                    line_due += _LINES
                    self.write_line()
                await anyio.sleep(_REDRAWN)

    def write_line(self) -> None:
        """Write a line of JSON, if lines are wanted. A reader that went away does not end a campaign."""
        if not self._as_lines:
            return
        try:
            self.metrics.measure()
            show.emit_json(figures_json(self.metrics))
        except BrokenPipeError:
            self._as_lines = False
            silence_stdout()


_BAR: Final = 24
_LONG: Final = 1000
_MOST_CODES: Final = 5
_MOST_REASONS: Final = 3
_STATES: Final = {
    "asking": "green",
    "running": "green",
    "finished": "green",
    "paused": "yellow",
    "outage": "red",
    "hours": "yellow",
    "rate": "cyan",
    "stopped": "red",
}
_WORDS: Final = {"outage": "service away", "hours": "outside hours", "rate": "at its rate"}
# All states are as wide as this one, so that the bar does not move when the state changes.
_WIDEST: Final = max(map(len, _WORDS.values()))
_PARTS: Final = ("invited", "rejected", "not_sent", "unknown", "skipped", "pending")


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
    return {**show.fields_of(plan, names), "ExpectedValue": _rounded(plan.expected_value)}


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


# --- A run


def figures_view(metrics: RunMetrics) -> Table:
    """Return what a live display shows: lines that are never wrapped, so that it does not flicker."""
    table = Table.grid(Column(no_wrap=True, overflow="ellipsis"), padding=(0, 1, 0, 0))
    run, pairs, state = metrics.run, metrics.run.pairs, _WORDS.get(metrics.state, metrics.state)
    done = pairs.planned - pairs.pending
    # On a narrow terminal, the bar is what gets shorter.
    head = Table.grid(Column(no_wrap=True), Column(max_width=_BAR), Column(no_wrap=True), padding=(0, 1, 0, 0))
    head.add_row(
        Text(f"{state:<{_WIDEST}}", style=_STATES.get(metrics.state, "bold")),
        ProgressBar(total=max(pairs.planned, 1), completed=done),
        f"{done:,}/{count_of(pairs.planned, 'pair')}  {done / max(pairs.planned, 1):.0%}",
    )
    table.add_row(head)
    counts = [f"{pairs.invited:,} invited", f"{pairs.rejected:,} rejected", f"{pairs.skipped:,} skipped"]
    line = Text(f"  {count_of(run.members, 'member')}: " + ", ".join(counts))
    if doubtful := [f"{n:,} {w}" for w, n in (("unknown", pairs.unknown), ("not sent", pairs.not_sent)) if n]:
        line.append(", " + ", ".join(doubtful), style="red")
    table.add_row(line)
    table.add_row(
        f"  {count_of(run.requests, 'request')}, {metrics.invites_per_second:,.1f} invites/s, "
        f"{metrics.requests_per_second:,.1f} requests/s, limit {metrics.limit:g}"
    )
    worth = f"  expected value {run.worth}"
    left = metrics.seconds_left
    table.add_row(worth if left is None else f"{worth}, {timedelta(seconds=ceil(left))} left")
    for (code, result), count in metrics.refusals.most_common(_MOST_CODES):
        table.add_row(Text(f"  {count:>9,}  ", "yellow").append_text(show.plain(code_name(code, result))))
    return table


def figures_json(metrics: RunMetrics) -> dict[str, Any]:
    return {
        "State": metrics.state,
        "Reason": metrics.run.reason,
        **pairs_json(metrics.run.pairs),
        **show.fields_of(metrics.run, "members requests"),
        "InvitesPerSecond": round(metrics.invites_per_second, 1),
        "RequestsPerSecond": round(metrics.requests_per_second, 1),
        "Limit": metrics.limit,
        "ExpectedValue": _rounded(metrics.run.expected_value),
        "SecondsLeft": None if metrics.seconds_left is None else ceil(metrics.seconds_left),
        "Refusals": [
            {"ResultCode": code, "Result": code_name(code, result).partition(" ")[2], "Pairs": count}
            for (code, result), count in metrics.refusals.most_common(_MOST_CODES)
        ],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def pairs_json(pairs: Pairs) -> dict[str, int]:
    return show.fields_of(pairs, " ".join(("planned", *_PARTS)))


# --- What became of it


def summary_json(summary: Summary) -> dict[str, Any]:
    return {
        **show.fields_of(summary, "state reason"),
        **pairs_json(summary.pairs),
        **show.fields_of(summary, "members matched invited_members"),
        "SkippedBecause": dict(summary.skipped),
        "Requests": summary.requests,
        "InvitesPerRequest": round(summary.invites_per_request, 4),
        "SuccessRate": round(summary.success_rate, 4),
        "ExpectedValue": _rounded(summary.expected_value),
        "PlannedValue": _rounded(summary.planned_value),
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
        Text(summary.state, _STATES.get(summary.state, "")).append_text(show.plain(reason, "default")),
    )
    yield "Pairs", account(summary.pairs)
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
    yield "Runs", _runs(summary)


def _runs(summary: Summary) -> str:
    if summary.started_at is None:
        return "none yet"
    first = f"{summary.runs:,}, the first at {summary.started_at:%Y-%m-%d %H:%M} UTC"
    if summary.ended_at is None:
        return f"{first}; one is active"
    return f"{first}, the last one ended at {summary.ended_at:%Y-%m-%d %H:%M:%S} UTC"


def print_codes(summary: Summary, console: Console) -> None:
    """Print the most frequent refusals of a campaign, each with what a person can do."""
    refused = [each for each in summary.codes if each.lesson or each.result_code is None][:_MOST_CODES]
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
    if summary.pairs.unknown:
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
