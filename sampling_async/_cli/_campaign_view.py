"""What the commands about campaigns show: a plan, its run, what became of it, its limits, and a comparison.

No member code and no link is shown anywhere here.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter, deque
from datetime import timedelta
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, Final

import anyio
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from sampling_async import InvalidRequestError
from sampling_async._cli import _rendering as show
from sampling_async._cli._campaign import Settings
from sampling_async._cli._connection import needs
from sampling_async._cli._files import read_labels
from sampling_async._cli._stores import existing_store
from sampling_async._cli._tally import Tally, code_name
from sampling_async._contract.checks import count_of
from sampling_async._contract.records import wire_name
from sampling_async.campaign import Campaign, LedgerError, compare
from sampling_async.campaign._comparison import FIGURES, SHARES, CampaignComparison
from sampling_async.campaign._ledger import with_ledger
from sampling_async.campaign._ledger_file import LEDGER_NAME
from sampling_async.notifications import OutcomeLedger, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from sampling_async import InviteOutcome, SamplingClient
    from sampling_async.campaign import CampaignRun, Limits, Pairs, Plan, Summary
    from sampling_async.campaign._ledger import CampaignLedger

SAVED: Final = "command"  # the fact of the ledger that holds what later commands need
_WINDOW: Final = 10.0  # seconds over which rates are averaged
_BAR: Final = 24
_WORDS: Final = {"outage": "service away", "hours": "outside hours", "rate": "at its rate"}
# All states are as wide as this one, so that the bar does not move when the state changes.
_WIDEST: Final = max(map(len, _WORDS.values()))
REDRAWN: Final = 0.25
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
    console = on_stderr()
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
    names = " ".join(name for name in show.names_of(type(plan)) if name != "currency_rates")
    return {**show.fields_of(plan, names), "ExpectedValue": rounded(plan.expected_value)}


def on_stderr() -> Console:
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


# --- A run


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
            (last - first) / seconds if seconds >= REDRAWN / 2 else 0.0
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


def figures_view(metrics: RunMetrics) -> Table:
    """Return what a live display shows: lines that are never wrapped, so that it does not flicker."""
    table = Table.grid(Column(no_wrap=True, overflow="ellipsis"), padding=(0, 1, 0, 0))
    run, pairs, state = metrics.run, metrics.run.pairs, _WORDS.get(metrics.state, metrics.state)
    done = pairs.planned - pairs.pending
    # On a narrow terminal, the bar is what gets shorter.
    head = Table.grid(Column(no_wrap=True), Column(max_width=_BAR), Column(no_wrap=True), padding=(0, 1, 0, 0))
    head.add_row(
        Text(f"{state:<{_WIDEST}}", style=STATES.get(metrics.state, "bold")),
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
    for (code, result), count in metrics.refusals.most_common(MOST_CODES):
        table.add_row(Text(f"  {count:>9,}  ", "yellow").append_text(show.plain(code_name(code, result))))
    return table


def figures_json(metrics: RunMetrics) -> dict[str, Any]:
    return {
        "State": metrics.state,
        "Reason": metrics.run.reason,
        **show.fields_of(metrics.run.pairs),
        **show.fields_of(metrics.run, "members requests"),
        "InvitesPerSecond": round(metrics.invites_per_second, 1),
        "RequestsPerSecond": round(metrics.requests_per_second, 1),
        "Limit": metrics.limit,
        "ExpectedValue": rounded(metrics.run.expected_value),
        "SecondsLeft": None if metrics.seconds_left is None else ceil(metrics.seconds_left),
        "Refusals": [
            {"ResultCode": code, "Result": code_name(code, result).partition(" ")[2], "Pairs": count}
            for (code, result), count in metrics.refusals.most_common(MOST_CODES)
        ],
    }


# --- What became of it


def summary_json(summary: Summary) -> dict[str, Any]:
    return {
        **show.fields_of(summary, "state reason"),
        **show.fields_of(summary.pairs),
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


def ends_text(summary: Summary) -> str:
    """Return what the invites have brought, in one line; an empty text if that is not known."""
    if summary.ends is None:
        return ""
    total = summary.ends.total
    planned = "" if total.completes_planned is None else f"; {total.completes_planned:,.0f} planned"
    rate = "" if total.rate is None else f" ({total.rate:.1%} of {count_of(total.invited, 'invite')}{planned})"
    taken_back = f", {count_of(total.reconciled, 'reconciliation')}" * bool(total.reconciled)
    return (
        f"{count_of(total.completed, 'complete')}{rate}, {count_of(total.terminated, 'terminate')}{taken_back},"
        f" revenue {summary.worth('revenue')}"
    )


def _print_comparison(comparison: CampaignComparison) -> None:
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


# --- Campaigns in their folders


def ledger_in(folder: Path) -> Path:
    path = folder / LEDGER_NAME
    if not path.is_file():
        raise InvalidRequestError(
            f"{folder} holds no campaign; `sampling-async campaign PANEL --out {quoted(folder)}` makes one"
        )
    return path


def saved_in(ledger: CampaignLedger) -> Settings:
    with ledger.as_written():
        return Settings.from_json(ledger.fact(SAVED))


def change_limits(folder: Path, changes: dict[str, Any]) -> None:
    """Change limits, if there is any change, and show those that hold."""

    def change(ledger: CampaignLedger) -> tuple[Limits, bool]:
        _require_plan(ledger, folder)
        limits = ledger.change_limits(**changes) if changes else ledger.limits()
        return limits, ledger.is_running()

    limits, is_running = with_ledger(ledger_in(folder), change, reads=not changes)
    if show.as_lines():
        show.emit_json({**show.fields_of(limits), "Running": is_running})
        return
    rows = {
        "Paused": "yes" + (f": {limits.reason}" if limits.reason else "") if limits.paused else "no",
        **_limit_rows(limits.in_words()),
        "Run": "active; it heeds this within a second" if is_running else "none is active",
    }
    show.screen().print(_grid(rows))


def show_status(folder: Path) -> None:
    summary = _summary_of(folder)
    if show.as_lines():
        show.emit_json(summary_json(summary))
    else:
        show.screen().print(_grid(dict(_summary_rows(summary))))
        print_codes(summary, show.screen())


def show_comparison(folders: Sequence[Path], html: Path | None, given: Settings) -> None:
    """Show several campaigns side by side, and write the page of that."""
    summaries: dict[str, Summary] = {}
    seen: set[Path] = set()
    for folder in folders:
        whole = folder.resolve()
        if whole in seen:
            raise InvalidRequestError(f"{folder} is given twice")
        seen.add(whole)
        found = _summary_of(folder, given)
        if found.started_at is None:
            show.note(f"Left out: {folder} was only planned, and nothing was requested")
        else:
            names = (whole.name, str(folder), str(whole))
            summaries[next(name for name in names if name not in summaries)] = found
    if not summaries:
        raise InvalidRequestError("none of these campaigns has requested anything yet")
    comparison = compare(summaries)
    if html is not None:
        with needs("the page"):
            from sampling_async.campaign._report import comparison_page  # noqa: PLC0415  Jinja2

            show.write_page(html, comparison_page(comparison))
    rows = comparison_json(comparison.to_dict())
    if show.wanted.csv:
        for night in rows["Nights"]:
            show.emit_json({name: value for name, value in night.items() if name != "Codes"})
    elif show.as_lines():
        show.emit_json(rows)
    else:
        _print_comparison(comparison)


def write_report(folder: Path, out: Path, given: Settings) -> None:
    """Write the files of a campaign into a folder; what is not given is as the run had it."""
    read_labels(given.labels)  # what is wrong with a file that was named now is an error
    settings = given.over(_saved_of(folder))
    campaign = Campaign(None, ledger=folder / LEDGER_NAME)
    outcomes = ledger_of_outcomes(settings)
    anyio.run(settle, campaign, outcomes)
    write = partial(campaign.write, out, **file_options(folder, settings), outcomes=outcomes)
    summary = anyio.run(write)
    for text in filter(None, (ends_text(summary), summary.unknown_in_words)):
        show.note(text)
    show.note(f"Files: {out} (invites, pairs, summary.json, report.html)")


def settle_unknown(folder: Path, given: Settings) -> None:
    """Settle the unknown pairs of a campaign by the notifications of a store, and show what was found."""
    outcomes = ledger_of_outcomes(given.over(_saved_of(folder)))
    if outcomes is None:
        raise InvalidRequestError("name the store of notifications: --notifications FILE|ADDRESS")
    campaign = Campaign(None, ledger=folder / LEDGER_NAME)
    found = anyio.run(campaign.settle, outcomes)
    summary = anyio.run(campaign.summary)
    if show.as_lines():
        by_kind = {str(kind): count for kind, count in found.by_kind().items()}
        counts = {"Unknown": summary.pairs.unknown, "Settled": summary.settled, "New": len(found.settled)}
        show.emit_json(counts | {"ByKind": by_kind, "Unclear": found.unclear})
        return
    new = ", ".join(f"{count:,} by {kind} notifications" for kind, count in found.by_kind().items())
    show.note(summary.unknown_in_words or f"{summary.pairs.unknown:,} unknown, none settled")
    show.note(f"New: {new or 'none'}")
    if found.unclear:
        show.note(f"{count_of(found.unclear, 'notification')} fit several pairs, and settle none")


def _summary_of(folder: Path, given: Settings | None = None) -> Summary:
    """Return the summary of a campaign, which must have a plan; with `given`, what its invites have brought."""
    saved = _saved_of(folder)
    outcomes = None if given is None else ledger_of_outcomes(given.over(saved))
    return anyio.run(Campaign(None, ledger=folder / LEDGER_NAME).summary, outcomes)


def _saved_of(folder: Path) -> Settings:
    def saved(ledger: CampaignLedger) -> Settings:
        _require_plan(ledger, folder)
        return saved_in(ledger)

    return with_ledger(ledger_in(folder), saved, reads=True)


def _require_plan(ledger: CampaignLedger, folder: Path) -> None:
    if not ledger.plan:
        raise InvalidRequestError(f"the ledger in {folder} has no plan: making it was cut off")


def file_options(folder: Path, settings: Settings) -> dict[str, Any]:
    """Return how the files of the campaign in `folder` are written: arguments of `Campaign.write`."""
    title, kind = f"Campaign {folder.resolve().name}", settings.format or "parquet"
    try:
        labels = read_labels(settings.labels)
    except InvalidRequestError as exc:
        # Of a run, it may have gone since: names are no reason to do without the report.
        show.note(f"The report shows IDs: {exc}")
        labels = {}
    return {"partitions": settings.partition or (), "kind": kind, "title": title, "labels": labels}


def ledger_of_outcomes(settings: Settings) -> OutcomeLedger | None:
    return None if settings.notifications is None else OutcomeLedger(existing_store(settings.notifications))


async def settle(campaign: Campaign, outcomes: OutcomeLedger | None) -> None:
    """Record invites in a store, if there is one, and settle unknown pairs by it, if both can be written."""
    try:
        if outcomes is not None:
            await campaign.settle(outcomes)
    except (LedgerError, StoreError) as exc:
        show.note(f"Invites are not recorded, and unknown pairs not settled: {exc}")
