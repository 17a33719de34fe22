"""One run of `bulk-invite` or `fan-out`: every given quota ID gets a line of output, even after a signal."""

from __future__ import annotations

import time
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import anyio
import typer
from attrs import define, field
from rich.text import Text

from sampling_async import (
    InvalidRequestError,
    InviteOutcome,
    InviteRequest,
    JournalError,
    OutageError,
    SamplingError,
)
from sampling_async._cli import _rendering as show
from sampling_async._journal.journal import run_of
from sampling_async._pacing.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from types import TracebackType

    from sampling_async import Goal, Journal, OutcomeStream, Repeats, SamplingClient
    from sampling_async._cli._signals import SignalHandler
    from sampling_async._cli._sources import Items
    from sampling_async._cli._tally import Tally
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


class OutcomePrinter:
    """Shows outcomes as they finish, the progress of the run, and a summary at the end of the `with` block."""

    def __init__(self, tally: Tally, *, as_lines: bool, with_members: bool = False) -> None:
        self.tally = tally
        self.bar = show.StreamBar(lines=as_lines)
        self._as_lines, self._with_members = as_lines, with_members
        display = self.bar.display
        # If the bar is shown, lines are printed on its console: two on one screen would write into each other.
        self._console = show.screen() if display.disable else display.console
        self._texts: list[Text] = []
        self._printed_at = 0.0
        self._reader_is_gone = False

    def __enter__(self) -> Self:
        self.bar.display.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._flush()
        finally:
            self.bar.display.stop()
            if exc is None or self.tally.total:
                for line in show.summary(self.tally):
                    show.stderr_console().print(line, soft_wrap=True)

    def add(self, outcome: InviteOutcome) -> None:
        self.tally.add(outcome)
        if not self._as_lines:
            self._texts.append(show.outcome_text(outcome, with_member=self._with_members))
            # Many at a time, because each print above a live bar draws the bar again.
            if len(self._texts) >= _LINES_AT_ONCE or time.monotonic() - self._printed_at > _MOMENT:
                self._flush()
        elif not self._reader_is_gone:
            try:
                show.emit_json(show.outcome_json(outcome))
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
class Work:
    journal: Journal | None
    source: Items[Any] | None  # the input that is read during the run; None if all is known beforehand
    start: Callable[[SamplingClient], Awaitable[OutcomeStream]]  # may read the source to its end first
    pairs: Callable[[Any], Iterable[Pair]]  # returns those that an item of the source requests
    known: Callable[[], Iterable[Pair]] = tuple[Pair, ...]  # without those that the stream takes item by item
    count: Callable[[], int | None] | None = None  # counts the quota IDs of the source beforehand


def of_one_member(
    member_code: str, asked: list[int] | Items[int], journal: Journal | None, goal: Goal | None
) -> Work:
    """Return the quota IDs of one member. With a journal, all are read before the first is sent."""
    source = None if isinstance(asked, list) else asked
    known = asked if isinstance(asked, list) else []

    async def start(client: SamplingClient) -> OutcomeStream:
        if journal is None:
            return client.stream_bulk_invite(member_code, asked, goal=goal)
        if source is not None:
            async for quota_id in source:
                known.append(quota_id)  # one by one: a signal must not lose those that were read
        return client.fan_out([InviteRequest(member_code, known)], journal=journal, goal=goal)

    return Work(
        journal=journal,
        source=source,
        start=start,
        pairs=lambda quota_id: [(member_code, quota_id)],
        known=lambda: [(member_code, quota_id) for quota_id in known],
    )


def of_many_members(
    source: Items[InviteRequest],
    journal: Journal | None,
    goal: Goal | None,
    repeats: Repeats,
    count: Callable[[], int | None] | None,
) -> Work:
    """Return requests that are sent as they are read."""

    async def start(client: SamplingClient) -> OutcomeStream:
        return client.fan_out(source, journal=journal, goal=goal, repeats=repeats)

    def pairs(request: InviteRequest) -> list[Pair]:
        return [(request.member_code, quota_id) for quota_id in request.quota_ids]

    return Work(journal=journal, source=source, start=start, pairs=pairs, count=count)


@define
class BulkRun:
    """Requests invites, and shows an outcome of each quota ID."""

    work: Work
    shown: OutcomePrinter
    signals: SignalHandler
    stream: OutcomeStream | None = None

    async def run(self, client: SamplingClient) -> None:
        """Show every outcome, including those left over if the run is interrupted or the input fails."""
        try:
            with self.shown, self.signals:
                try:
                    with self.signals.scope:
                        if self.work.count is not None and not self.shown.bar.display.disable:
                            self.shown.bar.total = await in_thread(self.work.count)
                        self.stream = stream = await self.work.start(client)
                        async with stream:
                            with self.shown.bar.follow(stream):
                                async for outcome in stream:
                                    self.shown.add(outcome)
                        if self.work.source is not None and not self.work.source.is_over:
                            # The stream has not read all, because the outage was too long.
                            async with self._accounting(client, _GIVEN_UP) as account:
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
            if self.work.source is not None:
                self.work.source.close()

    # --- Outcomes left over when the run ends

    def _left_over(self) -> Iterable[InviteOutcome]:
        if self.stream is not None:
            # RuntimeError: the stream was never entered, so nothing is left over.
            with suppress(RuntimeError):
                return self.stream.left_over
        return ()

    async def _account(self, client: SamplingClient) -> None:
        """Show an outcome for everything that was given and has not been shown."""
        async with self._accounting(client, _NOT_SENT) as account:
            for outcome in self._left_over():
                await account.add(outcome)
            # No outcome so far: the signal came before the stream took anything.
            if not (self.shown.tally.total or account.count):
                for pair in self.work.known():
                    await account.add_unasked(pair)
            await self._read_rest(account)

    def _accounting(self, client: SamplingClient, error: SamplingError) -> _Leftovers:
        return _Leftovers(self.shown, self.work.journal, client, error, self.stream)

    async def _read_rest(self, account: _Leftovers) -> None:
        """Read the rest of the input: a file to its end, a pipe for one second."""
        source = self.work.source
        if source is None or source.is_over:
            return
        try:
            with anyio.move_on_after(_PATIENCE) as scope:
                async for item in source:
                    # A file ends by itself, so it may take longer than a pipe.
                    if source.is_file:
                        scope.deadline = inf
                    for pair in self.work.pairs(item):
                        await account.add_unasked(pair)
        except (InvalidRequestError, OSError) as exc:
            typer.echo(f"sampling-async: the rest of the input was not read: {exc}", err=True)
        else:
            if not source.is_over:
                typer.echo("sampling-async: the input has not ended; the rest of it was not read", err=True)


@define
class _Leftovers:
    """Shows the outcomes left over from a run; in place of `unknown`, what the journal says if there is one."""

    shown: OutcomePrinter
    journal: Journal | None
    client: SamplingClient
    error: SamplingError  # why the rest was not sent
    stream: OutcomeStream | None
    count: int = 0  # how many outcomes were added
    _run: JournalRun | None = None
    _waiting: list[InviteOutcome] = field(factory=list[InviteOutcome])

    async def __aenter__(self) -> Self:
        if self.journal is not None:
            # An empty fan-out binds the journal to the client; nothing is sent.
            self.client.fan_out((), journal=self.journal)
            run = run_of(self.journal)
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
            self.shown.add(outcome)
            return
        self._waiting.append(outcome)
        if len(self._waiting) >= _AT_ONCE:
            await self._flush()

    async def add_unasked(self, pair: Pair) -> None:
        """Show the outcome of a pair that was not sent here; an earlier line or run may have sent it."""
        if self.journal is None:
            earlier = None if self.stream is None else self.stream.outcome_of(*pair)
            await self.add(earlier or self._not_sent(*pair))
        else:
            await self.add(InviteOutcome(*pair, "unknown", error=_UNASKED))

    async def _flush(self) -> None:
        some, self._waiting = self._waiting, []
        # Shielded: a cancellation would lose these outcomes, which are kept nowhere else.
        with anyio.CancelScope(shield=True):
            for outcome in await self._by_journal(some):
                self.shown.add(outcome)

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
