"""A run of a campaign while it goes on: its figures, what a signal does to it, and its files at the end.

No member code and no link is shown anywhere here.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from sampling_async._cli import _campaign_view as view
from sampling_async._cli import _rendering as show
from sampling_async._cli._connection import fail, silence_stdout
from sampling_async._cli._signals import SignalHandler
from sampling_async._cli._stores import existing_store
from sampling_async._cli._tally import CAPPED, DONE, INCOMPLETE, Tally, code_name
from sampling_async._cli._top import CAMPAIGN_SOCKET
from sampling_async._contract.checks import count_of
from sampling_async.campaign import Campaign, LedgerError
from sampling_async.matching import LiveIndex
from sampling_async.notifications import Inbox, OutcomeLedger, StoreError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from sampling_async import InviteOutcome, SamplingClient
    from sampling_async._cli._campaign import Settings
    from sampling_async.campaign import CampaignRun, Summary

_GRACE: Final = 10.0  # seconds that requests in flight have after a signal, so that their outcomes are known
_WINDOW: Final = 10.0  # seconds over which rates are averaged
_REDRAWN: Final = 0.25
_LINES: Final = 2.0
_BAR: Final = 24
_WORDS: Final = {"outage": "service away", "hours": "outside hours", "rate": "at its rate"}
# All states are as wide as this one, so that the bar does not move when the state changes.
_WIDEST: Final = max(map(len, _WORDS.values()))


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
        self._line_due = time.monotonic() + _LINES

    @asynccontextmanager
    async def kept_up(self) -> AsyncGenerator[None]:
        """Keep it up to date while this block is open."""
        console = show.stderr_console()
        # Lines of JSON and a live display on one screen would write into each other.
        is_live = console.is_terminal and not console.quiet and (not self._as_lines or show.stdout_is_file())
        live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)

        def draw() -> None:
            if is_live:
                self.metrics.measure()
                live.update(figures_view(self.metrics), refresh=True)
            if not show.wanted.quiet and time.monotonic() >= self._line_due:
                self._line_due += _LINES
                self.write_line()

        with live if is_live else nullcontext():
            async with show.redrawn(draw, _REDRAWN):
                yield

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


def figures_view(metrics: RunMetrics) -> Table:
    """Return what a live display shows: lines that are never wrapped, so that it does not flicker."""
    table = Table.grid(Column(no_wrap=True, overflow="ellipsis"), padding=(0, 1, 0, 0))
    run, pairs, state = metrics.run, metrics.run.pairs, _WORDS.get(metrics.state, metrics.state)
    done = pairs.planned - pairs.pending
    # On a narrow terminal, the bar is what gets shorter.
    head = Table.grid(Column(no_wrap=True), Column(max_width=_BAR), Column(no_wrap=True), padding=(0, 1, 0, 0))
    head.add_row(
        Text(f"{state:<{_WIDEST}}", style=view.STATES.get(metrics.state, "bold")),
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
    for (code, result), count in metrics.refusals.most_common(view.MOST_CODES):
        table.add_row(Text(f"  {count:>9,}  ", "yellow").append_text(show.plain(code_name(code, result))))
    return table


def figures_json(metrics: RunMetrics) -> dict[str, Any]:
    return {
        "State": metrics.state,
        "Reason": metrics.run.reason,
        **view.pairs_json(metrics.run.pairs),
        **show.fields_of(metrics.run, "members requests"),
        "InvitesPerSecond": round(metrics.invites_per_second, 1),
        "RequestsPerSecond": round(metrics.requests_per_second, 1),
        "Limit": metrics.limit,
        "ExpectedValue": view.rounded(metrics.run.expected_value),
        "SecondsLeft": None if metrics.seconds_left is None else ceil(metrics.seconds_left),
        "Refusals": [
            {"ResultCode": code, "Result": code_name(code, result).partition(" ")[2], "Pairs": count}
            for (code, result), count in metrics.refusals.most_common(view.MOST_CODES)
        ],
    }


@define
class ShownRun:
    """A run of the campaign in a folder, with its display and its end."""

    folder: Path
    ledger: Path
    settings: Settings
    as_lines: bool
    _signals: SignalHandler = field(factory=SignalHandler)
    _display: Display | None = None  # None until the run has begun

    async def work(self, client: SamplingClient) -> int:
        """Request the pending pairs; then write the files, even if that failed. Return the exit code.

        It is 0 if nothing is pending and the fate of each pair is known, and 6 if a cap left pairs pending.
        """
        summary = None
        with self._signals:
            try:
                with self._signals.scope:
                    await self._run(client)
            finally:
                self._signals.on_first_signal = None
                if self._display is not None:
                    summary = await self._write(self._campaign(client))
                    self._display.metrics.ended_as = "stopped" if summary.pairs.pending else summary.state
                    self._display.write_line()
                    self._show_end(summary, self._display.metrics.run)
        if self._signals.received:
            fail(self._signals.in_words, self._signals.exit_code)
        assert self._display is not None
        assert summary is not None
        unclear = summary.pairs.unknown - summary.settled + summary.pairs.not_sent
        if not summary.pairs.pending + unclear:
            return DONE
        if not unclear and _is_capped(self._display.metrics.run):
            return CAPPED
        return self._display.metrics.tally.exit_code() or INCOMPLETE

    async def _run(self, client: SamplingClient) -> None:
        async with (
            following(client, self.settings) as live,
            self._campaign(client, live).run() as run,
            AsyncExitStack() as stack,
        ):
            self._signals.on_first_signal = partial(self._stop, run)
            metrics = RunMetrics(run, client)
            self._display = Display(metrics, as_lines=self.as_lines)
            # `top --out` sees it, where the system has such sockets and the path is short enough.
            with suppress(OSError, AttributeError):
                await stack.enter_async_context(client.serve_snapshots(self.folder / CAMPAIGN_SOCKET))
            async with self._display.kept_up():
                async for outcome in run:
                    metrics.add(outcome)

    async def _write(self, campaign: Campaign) -> Summary:
        write = partial(campaign.write, self.folder, **file_options(self.folder, self.settings))
        try:
            outcomes = ledger_of_outcomes(self.settings)
            await settle(campaign, outcomes)
            return await write(outcomes=outcomes)
        except StoreError as exc:
            show.note(f"The files are without completes and revenue: {exc}")
            return await write()

    def _campaign(self, client: SamplingClient, live: LiveIndex | None = None) -> Campaign:
        return Campaign(
            client,
            inventory=live,
            ledger=self.ledger,
            share_room=self.settings.shared_room,
            max_turns=self.settings.max_turns or 3,
        )

    def _stop(self, run: CampaignRun) -> None:
        """After a signal, send no more requests; wait some seconds for those in flight."""
        run.stop(self._signals.in_words)
        # A service that is away answers nothing.
        grace = 0.0 if run.waiting_for == "outage" else _GRACE
        self._signals.scope.deadline = asyncio.get_running_loop().time() + grace

    def _show_end(self, summary: Summary, run: CampaignRun) -> None:
        view.show_end(summary, run.reason)
        show.note(f"Files: {self.folder} (invites, pairs, summary.json, report.html)")
        if not summary.pairs.pending:
            return
        if run.limits.paused:
            show.note(f"It is paused. To end that: sampling-async campaign resume {view.quoted(self.folder)}")
        elif _is_capped(run):
            show.note(f"To change the cap: sampling-async campaign limit {view.quoted(self.folder)} ...")
        pending = count_of(summary.pairs.pending, "pending pair")
        show.note(f"{pending} left. To go on: {view.resume_command(self.folder)}")


def file_options(folder: Path, settings: Settings) -> dict[str, Any]:
    """Return how the files of the campaign in `folder` are written: arguments of `Campaign.write`."""
    title, kind = f"Campaign {folder.resolve().name}", settings.format or "parquet"
    return {"partitions": settings.partition or (), "kind": kind, "title": title}


def ledger_of_outcomes(settings: Settings) -> OutcomeLedger | None:
    return None if settings.notifications is None else OutcomeLedger(existing_store(settings.notifications))


async def settle(campaign: Campaign, outcomes: OutcomeLedger | None) -> None:
    """Record invites in a store, if there is one, and settle unknown pairs by it, if both can be written."""
    try:
        if outcomes is not None:
            await campaign.settle(outcomes)
    except (LedgerError, StoreError) as exc:
        show.note(f"Invites are not recorded, and unknown pairs not settled: {exc}")


def _is_capped(run: CampaignRun) -> bool:
    """Return whether a run ended as it was told to, at its cap."""
    return run.reason.startswith("the cap")


@asynccontextmanager
async def following(client: SamplingClient, settings: Settings) -> AsyncGenerator[LiveIndex | None]:
    """Follow what closes while this block is open; None if that is not wanted."""
    if not settings.watch:
        yield None
        return
    store = None if settings.notifications is None else existing_store(settings.notifications)
    # Notifications from before the first poll have no effect: the poll is newer.
    last = 0 if store is None else store.last_id()
    async with client.watch_quotas(settings.watch) as watch:
        await watch.refresh()
        async with LiveIndex(watch) as live:
            if store is None:
                yield live
                return
            # This inbox is never entered, so it accepts nothing: only its facts are read. Its secret is not
            # published, and nothing is written to the store of the process that serves.
            inbox = Inbox(store, secrets=secrets.token_urlsafe(32))
            async with live.follow(inbox, after=last):
                yield live
