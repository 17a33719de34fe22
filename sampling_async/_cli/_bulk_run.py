"""One run of `bulk-invite` or `fan-out`: every given quota ID gets a line of output, even after a signal."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeAlias

import anyio
import typer

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
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType

    from sampling_async import Goal, Journal, OutcomeStream, Repeats, SamplingClient
    from sampling_async._cli._signals import SignalHandler
    from sampling_async._cli._sources import Items
    from sampling_async._cli._tally import Tally
    from sampling_async._journal.run import JournalRun


class OutcomePrinter:
    """Shows outcomes as they finish, the progress of the run, and a summary at the end of the `with` block."""

    def __init__(self, tally: Tally, *, as_lines: bool, with_members: bool = False) -> None:
        self.tally = tally
        self.bar = show.StreamBar(lines=as_lines)
        self._page = None if as_lines else show.OutcomePage(self.bar.display, with_members=with_members)
        self._reader_is_gone = False

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._page is not None:
                self._page.flush()
        finally:
            self.bar.__exit__()
            if exc is None or self.count:
                show.print_summary(self.tally)

    @property
    def count(self) -> int:
        return self.tally.total

    def add(self, outcome: InviteOutcome) -> None:
        self.tally.add(outcome)
        if self._page is not None:
            self._page.add(outcome)
        elif not self._reader_is_gone:
            self._write(outcome)

    def _write(self, outcome: InviteOutcome) -> None:
        try:
            show.emit_json(show.outcome_json(outcome))
        except OSError:
            # The reader went away, or the disk is full. Later outcomes are still counted, but not written.
            self._reader_is_gone = True
            raise


Pair: TypeAlias = tuple[str, int]
"""A member code and a quota ID."""

_PATIENCE: Final = 1.0
"""Seconds that a pipe has, after a signal, to deliver the rest of its input."""

_AT_ONCE: Final = 1000
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


class Work(Protocol):
    """The requests of a run."""

    @property
    def source(self) -> Items[Any] | None:
        """The input that is read during the run; None if all requests are known beforehand."""
        ...

    async def stream(self, client: SamplingClient) -> OutcomeStream:
        """Start the stream of outcomes. This may read the source to its end first."""
        ...

    async def total(self) -> int | None:
        """Return the number of quota IDs in the source, if it can be counted beforehand."""
        ...

    def known(self) -> Iterator[Pair]:
        """Yield the pairs known without reading the source, except those a stream takes item by item."""
        ...

    def pairs(self, item: Any) -> Iterator[Pair]:
        """Yield the pairs that an item of the source requests."""
        ...


class OneMember:
    """Quota IDs of one member: a list, or a stream. With a journal, all are read before the first is sent."""

    def __init__(
        self, member_code: str, asked: list[int] | Items[int], journal: Journal | None, goal: Goal | None
    ) -> None:
        self._member_code = member_code
        self._journal = journal
        self._goal: Goal | None = goal
        self._known: list[int] = asked if isinstance(asked, list) else []
        self.source = None if isinstance(asked, list) else asked

    async def stream(self, client: SamplingClient) -> OutcomeStream:
        if self._journal is None:
            asked = self._known if self.source is None else self.source
            return client.stream_bulk_invite(self._member_code, asked, goal=self._goal)
        if self.source is not None:
            async for quota_id in self.source:
                self._known.append(quota_id)
        request = InviteRequest(self._member_code, self._known)
        return client.fan_out([request], journal=self._journal, goal=self._goal)

    async def total(self) -> None:
        """Return nothing: the stream knows the number, or the source is read as it comes."""

    def known(self) -> Iterator[Pair]:
        return ((self._member_code, quota_id) for quota_id in self._known)

    def pairs(self, item: int) -> Iterator[Pair]:
        yield self._member_code, item


class ManyMembers:
    """Requests of many members, sent as they are read."""

    def __init__(
        self,
        source: Items[InviteRequest],
        journal: Journal | None,
        goal: Goal | None,
        repeats: Repeats = "once",
        count: Callable[[], int | None] | None = None,
    ) -> None:
        self.source = source
        self._journal = journal
        self._goal: Goal | None = goal
        self._repeats: Repeats = repeats
        self._count = count

    async def stream(self, client: SamplingClient) -> OutcomeStream:
        return client.fan_out(self.source, journal=self._journal, goal=self._goal, repeats=self._repeats)

    async def total(self) -> int | None:
        """Return the number of quota IDs in the source: of a file, not of a pipe."""
        return None if self._count is None else await in_thread(self._count)

    def known(self) -> Iterator[Pair]:
        """Yield nothing: all requests are in the source, or in the stream."""
        return iter(())

    def pairs(self, item: InviteRequest) -> Iterator[Pair]:
        return ((item.member_code, quota_id) for quota_id in item.quota_ids)


class BulkRun:
    def __init__(
        self, work: Work, journal: Journal | None, shown: OutcomePrinter, signals: SignalHandler
    ) -> None:
        self._work = work
        self._journal = journal
        self._shown = shown
        self._signals = signals
        self._stream: OutcomeStream | None = None

    async def run(self, client: SamplingClient) -> None:
        """Show every outcome, including those left over if the run is interrupted or the input fails."""
        try:
            with self._shown, self._signals:
                try:
                    with self._signals.scope:
                        if not self._shown.bar.display.disable:
                            self._shown.bar.total = await self._work.total()
                        self._stream = await self._work.stream(client)
                        await self._follow(self._stream)
                        await self._give_up_the_rest(client)
                finally:
                    # Outside the scope that the signal cancelled, so the account can still await.
                    if self._signals.received:
                        await self._account(client)
                    else:
                        for outcome in self._left_over():
                            self._shown.add(outcome)
                    if self._stream is not None:
                        self._shown.tally.unrequested = len(self._stream.unrequested)
        finally:
            if self._work.source is not None:
                self._work.source.close()

    async def _follow(self, stream: OutcomeStream) -> None:
        async with stream:
            with self._shown.bar.follow(stream):
                async for outcome in stream:
                    self._shown.add(outcome)

    async def _give_up_the_rest(self, client: SamplingClient) -> None:
        """Account for the input that the stream did not read, because the outage was too long."""
        if self._work.source is not None and not self._work.source.is_over:
            async with self._accounting(client, _GIVEN_UP) as account:
                await self._read_rest(account)

    # --- Outcomes left over when the run ends

    def _left_over(self) -> Iterable[InviteOutcome]:
        if self._stream is not None:
            # RuntimeError: the stream was never entered, so nothing is left over.
            with suppress(RuntimeError):
                return self._stream.left_over
        return ()

    async def _account(self, client: SamplingClient) -> None:
        """Show an outcome for everything that was given and has not been shown."""
        async with self._accounting(client, _NOT_SENT) as account:
            for outcome in self._left_over():
                await account.add(outcome)
            # No outcome so far: the signal came before the stream took anything.
            if not (self._shown.count or account.count):
                for pair in self._work.known():
                    await account.add_unasked(pair)
            await self._read_rest(account)

    def _accounting(self, client: SamplingClient, error: SamplingError) -> _Leftovers:
        return _Leftovers(self._shown, self._journal, client, error, self._stream)

    async def _read_rest(self, account: _Leftovers) -> None:
        """Read the rest of the input: a file to its end, a pipe for one second."""
        source = self._work.source
        if source is None or source.is_over:
            return
        try:
            with anyio.move_on_after(_PATIENCE) as scope:
                async for item in source:
                    # A file ends by itself, so it may take longer than a pipe.
                    if source.is_file:
                        scope.deadline = inf
                    for pair in self._work.pairs(item):
                        await account.add_unasked(pair)
        except (InvalidRequestError, OSError) as exc:
            typer.echo(f"sampling-async: the rest of the input was not read: {exc}", err=True)
        else:
            if not source.is_over:
                typer.echo("sampling-async: the input has not ended; the rest of it was not read", err=True)


class _Leftovers:
    """Shows the outcomes left over from a run: an async context manager.

    If there is a journal, each `unknown` outcome is looked up in it. The journal's outcome is shown instead, or
    `not_sent` if the journal has none for the ID.
    """

    def __init__(
        self,
        shown: OutcomePrinter,
        journal: Journal | None,
        client: SamplingClient,
        error: SamplingError,
        stream: OutcomeStream | None,
    ) -> None:
        self._shown = shown
        self._journal = journal
        self._client = client
        self._error = error
        self._stream = stream
        self._run: JournalRun | None = None
        self._waiting: list[InviteOutcome] = []
        self.count = 0

    async def __aenter__(self) -> Self:
        if self._journal is not None:
            # An empty fan-out binds the journal to the client; nothing is sent.
            self._client.fan_out((), journal=self._journal)
            run = run_of(self._journal)
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
        """Show an outcome, or the journal's outcome in its place."""
        self.count += 1
        if self._run is None:
            self._shown.add(outcome)
            return
        self._waiting.append(outcome)
        if len(self._waiting) >= _AT_ONCE:
            await self._flush()

    async def add_unasked(self, pair: Pair) -> None:
        """Show the outcome of a pair that was not sent here; an earlier line or run may have sent it."""
        if self._journal is None:
            earlier = None if self._stream is None else self._stream.outcome_of(*pair)
            await self.add(earlier or self._not_sent(*pair))
        else:
            await self.add(InviteOutcome(*pair, "unknown", error=_UNASKED))

    async def _flush(self) -> None:
        some, self._waiting = self._waiting, []
        # Shielded: a cancellation would lose these outcomes, which are kept nowhere else.
        with anyio.CancelScope(shield=True):
            for outcome in await self._by_journal(some):
                self._shown.add(outcome)

    async def _by_journal(self, some: Sequence[InviteOutcome]) -> Iterable[InviteOutcome]:
        doubtful: dict[str, list[int]] = {}
        for outcome in some:
            if outcome.status == "unknown":
                doubtful.setdefault(outcome.member_code, []).append(outcome.quota_id)
        known: dict[str, dict[int, InviteOutcome]] = {}
        if self._run is None or not doubtful:
            return some
        try:
            # One lookup for each member, with all its IDs.
            for member_code, quota_ids in doubtful.items():
                known[member_code] = await self._run.recall(member_code, quota_ids)
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
        return InviteOutcome(member_code, quota_id, "not_sent", error=self._error)
