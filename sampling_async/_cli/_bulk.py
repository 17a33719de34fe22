"""The commands `bulk-invite` and `fan-out`: every given quota ID gets a line of output, even after a signal."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from math import ceil, inf
from pathlib import Path  # noqa: TC003  typer reads annotations when it runs
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import anyio
import typer
from attrs import define, field
from rich.progress import BarColumn, TextColumn
from rich.text import Text

from sampling_async import (
    Goal,
    InvalidRequestError,
    InviteOutcome,
    InviteRequest,
    Journal,
    JournalError,
    OutageError,
    Repeats,
    SamplingError,
    to_json,
)
from sampling_async._cli import _rendering as show
from sampling_async._cli._connection import ServiceOptions, fail
from sampling_async._cli._options import JSON_LINES, MEMBER, argument, option, takes
from sampling_async._cli._signals import SignalHandler
from sampling_async._cli._sources import Lines, QuotaIDs, items_of, name_of, number_of_ids, parsed, requests_in
from sampling_async._cli._tally import USAGE, Tally, code_name
from sampling_async._contract.checks import count_of
from sampling_async._contract.records import wire_name
from sampling_async._journal.journal import run_of
from sampling_async._pacing.threads import in_thread
from sampling_async._protocol.results import outcome_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from sampling_async import OutcomeStatus, OutcomeStream, Progress, SamplingClient
    from sampling_async._cli._sources import Items
    from sampling_async._journal.run import JournalRun

Pair: TypeAlias = tuple[str, int]  # a member code and a quota ID
_PATIENCE: Final = 1.0  # seconds that a pipe has, after a signal, to deliver the rest of its input
_AT_ONCE: Final = 1000
_LINES_AT_ONCE: Final = 100
_MOMENT: Final = 0.1
_NOT_SENT: Final = SamplingError(
    "interrupted: the run ended before this was sent", endpoint="bulk_invite", delivery="not_sent"
)
_GIVEN_UP: Final = OutageError(
    "the client gave up: the service was away for longer than --patience",
    endpoint="bulk_invite",
    delivery="not_sent",
)
_UNASKED: Final = SamplingError(
    "interrupted before the journal was read: an earlier run may have sent this",
    endpoint="bulk_invite",
    delivery="unknown",
)
_STYLES: Final[dict[OutcomeStatus, str]] = {
    "invited": "green",
    "rejected": "yellow",
    "not_sent": "magenta",
    "unknown": "red",
}
JOURNAL: Final = option(
    "FILE",
    "A file that notes what is sent and answered. With the same file, a new run continues an interrupted one.",
    "--journal",
)
GOAL: Final = option(
    "throughput|first",
    "throughput: as few requests as possible. first: the last outcome as early as possible. Default: "
    "throughput.",
    "--goal",
)


@takes(service=ServiceOptions, json=JSON_LINES, csv=True, quiet=True)
def bulk_invite(
    service: ServiceOptions,
    member_code: str = MEMBER,
    quota_ids: list[str] | None = argument("IDS", "Quota IDs; - for stdin.", default=None),
    *,
    file: Path | None = option(
        "FILE",
        "Read the quota IDs from a file; - for stdin. If the file holds requests of `match "
        "--requests`, only the lines of this member count.",
        "--file",  # Typer 0.27 would call it --FILE, after its metavar
    ),
    journal: Path | None = JOURNAL,
    goal: Goal | None = GOAL,
) -> None:
    """Request invites of one member to any number of quotas, and show each outcome as it is known.

    Quota IDs come from arguments, a file, or stdin, separated by blanks,
    commas or newlines. Every ID gets one outcome. After an interruption, the
    rest is not_sent; a second signal ends the command at once. A summary
    follows on stderr. With a journal, all IDs are read before the first is
    sent.
    """
    ids = QuotaIDs(name_of(file), member_code)
    written = Journal(journal) if journal else None
    source: Items[int] | None = None
    known: list[int] = []
    if not quota_ids or quota_ids == ["-"]:
        source = items_of(file, ids.feed, is_dash=bool(quota_ids))
    elif file is None:
        known = parsed(quota_ids)
    else:
        raise InvalidRequestError("give quota IDs as arguments or with --file, not both")

    def start(client: SamplingClient) -> OutcomeStream:
        if written is None:
            return client.stream_bulk_invite(member_code, known if source is None else source, goal=goal)
        return client.fan_out([InviteRequest(member_code, known)], journal=written, goal=goal)

    tally = BulkRun(
        journal=written,
        source=source,
        known=known,
        start=start,
        pairs=lambda quota_id: [(member_code, quota_id)],
        reads_first=written is not None,
        shown=OutcomePrinter(),
    ).done_with(service)
    if ids.of_others and not tally.total:
        fail("no request is for this member; `fan-out` sends the requests of all members", USAGE)
    if ids.of_others:
        others = count_of(ids.of_others, "request")
        show.note(f"sampling-async: skipped {others} of other members; `fan-out` sends all")
    if not tally.total:
        fail("the input has no quota IDs", USAGE)
    raise typer.Exit(tally.exit_code())


@takes(service=ServiceOptions, json=JSON_LINES, csv=True, quiet=True)
def fan_out(
    service: ServiceOptions,
    requests: Path | None = argument("FILE", "A file of requests; - for stdin. Default: stdin.", default=None),
    *,
    file: Path | None = option("FILE", "The file of requests, as an option.", "--file"),
    journal: Path | None = JOURNAL,
    goal: Goal | None = GOAL,
    repeats: Repeats = option(
        "once|ask",
        "A pair of member and quota that comes again. once: it is not sent again and gets the outcome "
        "of the first. ask: it is sent again, which may make a second invite.",
        default="once",
    ),
) -> None:
    """Request invites of many members, each to its own quotas, and show each outcome as it is known.

    Requests are lines of JSON with MemberCode and QuotaIDs, as `match
    --requests` writes them. They are read while they are sent. Every ID gets
    one outcome. After an interruption, the rest is not_sent; a second signal
    ends the command at once. A summary follows on stderr.
    """
    written = Journal(journal) if journal else None
    if requests is not None and file is not None:
        raise InvalidRequestError("give the requests as an argument or with --file, not both")
    path = requests or file
    source = items_of(path, Lines(name_of(path), requests_in).feed, is_dash=False, what="requests")
    tally = BulkRun(
        journal=written,
        source=source,
        start=lambda client: client.fan_out(source, journal=written, goal=goal, repeats=repeats),
        pairs=lambda request: [(request.member_code, quota_id) for quota_id in request.quota_ids],
        file=path,
        shown=OutcomePrinter(with_members=True),
    ).done_with(service)
    if not tally.total:
        fail("the input has no requests", USAGE)
    raise typer.Exit(tally.exit_code())


# --- A run


class OutcomePrinter:
    """Shows outcomes as they finish, the progress of the run, and a summary at the end of the `with` block."""

    def __init__(self, *, with_members: bool = False) -> None:
        self.tally = Tally()
        self.total: int | None = None  # of quota IDs, if the stream does not know it
        self._as_lines, self._with_members = show.as_lines(), with_members
        columns = BarColumn(bar_width=24), TextColumn("{task.fields[text]}")
        self._bar = show.display(*columns, lines=self._as_lines)
        self._task = self._bar.add_task("Inviting", total=None, text="")
        self.has_bar = not self._bar.disable
        # If the bar is shown, lines are printed on its console: two on one screen would write into each other.
        self._console = self._bar.console if self.has_bar else show.screen()
        self._texts: list[Text] = []
        self._printed_at = 0.0
        self._reader_is_gone = False

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._flush()
        finally:
            self._bar.stop()
            if exc is None or self.tally.total:
                for line in self.tally.summary():
                    show.stderr_console().print(line, soft_wrap=True)

    def follow(self, stream: OutcomeStream) -> AbstractAsyncContextManager[None]:
        """Show the progress of a stream during a block, also while no outcome comes."""

        def draw() -> None:
            known = stream.progress
            total = self.total if known.total is None else known.total
            text = progress_text(known, total)
            self._bar.update(self._task, completed=known.answered, total=total, text=text)

        return show.redrawn(draw, _MOMENT) if self.has_bar else nullcontext()

    def add(self, outcome: InviteOutcome) -> None:
        self.tally.add(outcome)
        if not self._as_lines:
            self._texts.append(_text_of(outcome, with_member=self._with_members))
            # Many at a time, because each print above a live bar draws the bar again.
            if len(self._texts) >= _LINES_AT_ONCE or time.monotonic() - self._printed_at > _MOMENT:
                self._flush()
        elif not self._reader_is_gone:
            try:
                show.emit_json(_json_of(outcome))
            except OSError:
                # The reader went away, or the disk is full. Later outcomes are still counted, but not written.
                self._reader_is_gone = True
                raise

    def _flush(self) -> None:
        if self._texts:
            self._console.print(Text("\n").join(self._texts), soft_wrap=True)
            self._texts.clear()
        self._printed_at = time.monotonic()


@define(kw_only=True)
class BulkRun:
    """Requests invites, and shows an outcome of each quota ID."""

    journal: Journal | None
    source: Items[Any] | None  # the input that is read during the run; None if all is known beforehand
    start: Callable[[SamplingClient], OutcomeStream]
    pairs: Callable[[Any], Iterable[Pair]]  # returns those that an item of the source requests
    known: list[Any] = field(factory=list[Any])  # items of which the stream takes all at once
    reads_first: bool = False  # whether the source becomes `known` before the first request
    file: Path | None = None  # its quota IDs are counted beforehand
    shown: OutcomePrinter
    signals: SignalHandler = field(factory=SignalHandler)
    stream: OutcomeStream | None = None

    def done_with(self, service: ServiceOptions) -> Tally:
        """Run the requests to their end and return the counts of outcomes."""
        service.call(self.run)
        if self.signals.received:
            fail(self.signals.in_words, self.signals.exit_code)
        return self.shown.tally

    async def run(self, client: SamplingClient) -> None:
        """Show every outcome, including those left over if the run is interrupted or the input fails."""
        try:
            with self.shown, self.signals:
                try:
                    with self.signals.scope:
                        if self.file is not None and self.shown.has_bar:
                            self.shown.total = await in_thread(number_of_ids, self.file)
                        if self.reads_first and self.source is not None:
                            # One by one: a signal must not lose those that were read.
                            async for item in self.source:
                                self.known.append(item)
                        self.stream = stream = self.start(client)
                        async with stream, self.shown.follow(stream):
                            async for outcome in stream:
                                self.shown.add(outcome)
                        if self.source is not None and not self.source.is_over:
                            # The stream has not read all, because the outage was too long.
                            async with _Leftovers(self, client, _GIVEN_UP) as account:
                                await self._read_rest(account)
                finally:
                    # Outside the scope that the signal cancelled, so the account can still await.
                    if self.signals.received:
                        await self._account(client)
                    else:
                        for outcome in self._left_over():
                            self.shown.add(outcome)
                    if self.stream is not None:
                        self.shown.tally.unrequested = len(self.stream.unrequested)
        finally:
            if self.source is not None:
                self.source.close()

    # --- Outcomes left over when the run ends

    def _left_over(self) -> Iterable[InviteOutcome]:
        if self.stream is not None:
            # RuntimeError: the stream was never entered, so nothing is left over.
            with suppress(RuntimeError):
                return self.stream.left_over
        return ()

    async def _account(self, client: SamplingClient) -> None:
        """Show an outcome for everything that was given and has not been shown."""
        async with _Leftovers(self, client, _NOT_SENT) as account:
            for outcome in self._left_over():
                await account.add(outcome)
            # No outcome so far: the signal came before the stream took anything.
            if not (self.shown.tally.total or account.count):
                for item in self.known:
                    await account.add_unasked(item)
            await self._read_rest(account)

    async def _read_rest(self, account: _Leftovers) -> None:
        """Read the rest of the input: a file to its end, a pipe for one second."""
        source = self.source
        if source is None or source.is_over:
            return
        try:
            with anyio.move_on_after(_PATIENCE) as scope:
                async for item in source:
                    # A file ends by itself, so it may take longer than a pipe.
                    if source.is_file:
                        scope.deadline = inf
                    await account.add_unasked(item)
        except (InvalidRequestError, OSError) as exc:
            typer.echo(f"sampling-async: the rest of the input was not read: {exc}", err=True)
        else:
            if not source.is_over:
                typer.echo("sampling-async: the input has not ended; the rest of it was not read", err=True)


@define
class _Leftovers:
    """Shows the outcomes left over from a run; in place of `unknown`, what the journal says if there is one."""

    of: BulkRun
    client: SamplingClient
    error: SamplingError  # why the rest was not sent
    count: int = 0  # how many outcomes were added
    _run: JournalRun | None = None
    _waiting: list[InviteOutcome] = field(factory=list[InviteOutcome])

    async def __aenter__(self) -> Self:
        if self.of.journal is not None:
            # An empty fan-out binds the journal to the client; nothing is sent.
            self.client.fan_out((), journal=self.of.journal)
            run = run_of(self.of.journal)
            # Without a readable journal, outcomes are shown as they are.
            with suppress(JournalError):
                await run.open(goes_on=True)
                self._run = run
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._flush()
        finally:
            if self._run is not None:
                await self._run.close()

    async def add(self, outcome: InviteOutcome) -> None:
        self.count += 1
        if self._run is None:
            self.of.shown.add(outcome)
            return
        self._waiting.append(outcome)
        if len(self._waiting) >= _AT_ONCE:
            await self._flush()

    async def add_unasked(self, item: Any) -> None:
        """Show the outcomes of an item that was not sent here; an earlier line or run may have sent it."""
        stream = self.of.stream
        for pair in self.of.pairs(item):
            if self.of.journal is None:
                earlier = None if stream is None else stream.outcome_of(*pair)
                await self.add(earlier or self._not_sent(*pair))
            else:
                await self.add(InviteOutcome(*pair, "unknown", error=_UNASKED))

    async def _flush(self) -> None:
        some, self._waiting = self._waiting, []
        # Shielded: a cancellation would lose these outcomes, which are kept nowhere else.
        with anyio.CancelScope(shield=True):
            for outcome in await self._by_journal(some):
                self.of.shown.add(outcome)

    async def _by_journal(self, some: Sequence[InviteOutcome]) -> Iterable[InviteOutcome]:
        doubtful: dict[str, list[int]] = {}
        for outcome in some:
            if outcome.status == "unknown":
                doubtful.setdefault(outcome.member_code, []).append(outcome.quota_id)
        if self._run is None or not doubtful:
            return some
        try:
            known = await self._run.recall(doubtful)
        except JournalError:
            return some
        return (
            outcome
            if outcome.status != "unknown"
            else known[outcome.member_code].get(outcome.quota_id)
            or self._not_sent(outcome.member_code, outcome.quota_id)
            for outcome in some
        )

    def _not_sent(self, member_code: str, quota_id: int) -> InviteOutcome:
        return InviteOutcome(member_code, quota_id, "not_sent", error=self.error)


# --- What is shown


def _json_of(outcome: InviteOutcome) -> dict[str, Any]:
    if show.wanted.csv:
        return {wire_name(name): values[0] for name, values in outcome_columns([outcome]).items()}
    return {
        "MemberCode": outcome.member_code,
        "QuotaID": outcome.quota_id,
        "Status": outcome.status,
        "Invite": None if outcome.invite is None else json.loads(to_json(outcome.invite)),
        "ResultCode": outcome.result_code,
        "Result": outcome.result,
        "Error": None if outcome.error is None else str(outcome.error),
        "Anomaly": outcome.anomaly,
        "Replayed": outcome.replayed,
    }


def _text_of(outcome: InviteOutcome, *, with_member: bool = False) -> Text:
    line = Text(f"{outcome.status.replace('_', ' '):<9}", style=_STYLES[outcome.status])
    if with_member:
        line.append_text(show.plain(f" {outcome.member_code:<10}"))
    line.append(f"{outcome.quota_id:>10}  ", style="bold")
    if outcome.invite is not None:
        invite = outcome.invite
        line.append(f"{invite.partner_amount:.2f}  {invite.loi} min  ").append_text(
            show.plain(invite.url, "cyan")
        )
    elif outcome.result_code is None and outcome.error is not None:
        line.append_text(show.plain(str(outcome.error)))
    else:
        line.append_text(show.plain(code_name(outcome.result_code, outcome.result)))
    if outcome.anomaly:
        line.append_text(show.plain(f"  ! {outcome.anomaly}", "red"))
    return line


def progress_text(progress: Progress, total: int | None) -> str:
    """Return the progress of a stream in words. Its `total` may be one that the stream does not know."""
    left = progress.seconds_left
    if progress.total is None and total is not None and progress.per_second is not None:
        left = max(0, total - progress.answered) / progress.per_second
    parts = [f"{progress.answered:,}" if total is None else f"{progress.answered:,}/{total:,}"]
    if progress.patience_left is not None:
        return f"{parts[0]}  the service is away; waiting up to {_clock_time(progress.patience_left)} for it"
    if progress.per_second is not None:
        parts.append(f"{progress.per_second:,.0f}/s")
    if left is not None:
        parts.append(f"{_clock_time(left)} left")
    return "  ".join(parts)


def _clock_time(seconds: float) -> timedelta:
    return timedelta(seconds=ceil(seconds))
