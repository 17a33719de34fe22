"""One run of `bulk-invite`: every quota ID that was given ends in a line, also where a signal ends the run."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Final, Self

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
from sampling_async._cli._quota_ids import QuotaIDs
from sampling_async._journal import run_of
from sampling_async._protocol import quota_id_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType

    from sampling_async import Journal, OutcomeStream, SamplingClient
    from sampling_async._cli._signals import Ending
    from sampling_async._cli._tally import Tally
    from sampling_async._journal_run import JournalRun

_PATIENCE: Final = 1.0
"""Seconds that a pipe has, after a signal, to give the rest of the quota IDs."""

_AT_ONCE: Final = 1000
_NOT_SENT: Final = SamplingError(
    "interrupted: the run was ended before this was sent", endpoint="bulk_invite", delivery="not_sent"
)
_GIVEN_UP: Final = OutageError(
    "given up: the service was away for longer than --patience", endpoint="bulk_invite", delivery="not_sent"
)
_UNASKED: Final = SamplingError(
    "interrupted before the journal was read: a run before may have asked for this",
    endpoint="bulk_invite",
    delivery="unknown",
)


class Bulk:
    """Asks invites of one member and shows every outcome.

    Args:
        member_code: The member.
        asked: The quota IDs: a list, or a stream of them.
        journal: Where given, what to write down what is sent in.
        shown: Shows outcomes.
        ending: What signals do.
    """

    def __init__(
        self,
        member_code: str,
        asked: list[int] | QuotaIDs,
        journal: Journal | None,
        shown: OutcomePrinter,
        ending: Ending,
    ) -> None:
        self._member_code = member_code
        self._asked = asked
        self._journal = journal
        self._shown = shown
        self._ending = ending
        self._known: list[int] = []  # of a stream, where all of it is to be known first
        self._stream: OutcomeStream | None = None

    async def run(self, client: SamplingClient) -> None:
        """Show every outcome, also of those left over if this is interrupted or the input fails."""
        try:
            with self._shown, self._ending:
                try:
                    with self._ending.scope:
                        self._stream = await self._made(client)
                        await self._follow(self._stream)
                        await self._give_up_the_rest()
                finally:
                    if self._ending.came:
                        await self._account(client)
                    else:
                        self._show_left_over()
        finally:
            if isinstance(self._asked, QuotaIDs):
                self._asked.close()

    async def _made(self, client: SamplingClient) -> OutcomeStream:
        if self._journal is None:
            return client.stream_bulk_invite(self._member_code, self._asked)
        return client.fan_out([InviteRequest(self._member_code, await self._all())], journal=self._journal)

    async def _all(self) -> list[int]:
        if not isinstance(self._asked, QuotaIDs):
            return self._asked
        async for quota_id in self._asked:
            self._known.append(quota_id)
        return self._known

    async def _follow(self, stream: OutcomeStream) -> None:
        async with stream:
            async for outcome in stream:
                self._shown.add(outcome)
                self._shown.bar.follow(stream)

    async def _give_up_the_rest(self) -> None:
        """Account for what the stream did not read any more, since the service was away for too long."""
        if isinstance(self._asked, QuotaIDs) and not self._asked.is_over:
            await self._read_rest(
                self._asked, lambda quota_id: self._shown.add(self._not_sent(quota_id, _GIVEN_UP))
            )

    # --- What is left when it ends

    def _show_left_over(self) -> None:
        if self._stream is not None:
            self._show(self._left_over(self._stream))
            self._shown.tally.unrequested = len(self._stream.unrequested)

    @staticmethod
    def _left_over(stream: OutcomeStream) -> Iterable[InviteOutcome]:
        with suppress(RuntimeError):  # it was never entered
            return stream.left_over
        return ()

    async def _account(self, client: SamplingClient) -> None:
        """Show what became of all that was given and has not been shown."""
        left: Iterable[InviteOutcome] = () if self._stream is None else self._left_over(self._stream)
        if not self._shown.count and not left and (given := await self._given()):
            left = self._unasked(given)  # struck before any of it was taken
        if self._journal is None:
            self._show(left)
            if isinstance(self._asked, QuotaIDs):
                await self._read_rest(self._asked, lambda quota_id: self._shown.add(self._not_sent(quota_id)))
        else:
            self._stream = self._stream or client.fan_out((), journal=self._journal)  # says whose journal it is
            await self._show_by(run_of(self._journal), left)
        if self._stream is not None:
            self._shown.tally.unrequested = len(self._stream.unrequested)

    async def _given(self) -> list[int]:
        """Return the quota IDs that were to be known before the first was asked."""
        if self._journal is not None and isinstance(self._asked, QuotaIDs):
            await self._read_rest(self._asked, self._known.append)
            return self._known
        return [] if isinstance(self._asked, QuotaIDs) else self._asked

    async def _read_rest(self, quota_ids: QuotaIDs, take: Callable[[int], None]) -> None:
        """Read what there still is: a file to its end, and of a pipe what comes soon."""
        try:
            with anyio.move_on_after(_PATIENCE) as scope:
                async for quota_id in quota_ids:
                    if quota_ids.is_file:
                        scope.deadline = inf
                    take(quota_id_of(quota_id))
        except (InvalidRequestError, OSError) as exc:
            typer.echo(f"sampling-async: the rest of the input was not read: {exc}", err=True)
        else:
            if not quota_ids.is_over:
                typer.echo(
                    "sampling-async: the input has not ended; what is still to come was not read", err=True
                )

    async def _show_by(self, run: JournalRun, left: Iterable[InviteOutcome]) -> None:
        """Show what is left, and of what is unknown what the journal says: it may not have been asked yet."""
        try:
            await run.open(goes_on=True)
        except JournalError:  # whose text the account needs no more than the run did
            self._show(left)
            return
        try:
            rest = iter(left)
            while some := tuple(islice(rest, _AT_ONCE)):
                self._show(await self._by_journal(run, some))
        finally:
            await run.close()

    async def _by_journal(self, run: JournalRun, some: Sequence[InviteOutcome]) -> Iterable[InviteOutcome]:
        doubtful = [outcome.quota_id for outcome in some if outcome.status == "unknown"]
        try:
            known = await run.recall(self._member_code, doubtful)
        except JournalError:
            return some
        return (
            outcome
            if outcome.status != "unknown"
            else known.get(outcome.quota_id) or self._not_sent(outcome.quota_id)
            for outcome in some
        )

    def _show(self, outcomes: Iterable[InviteOutcome]) -> None:
        for outcome in outcomes:
            self._shown.add(outcome)

    def _not_sent(self, quota_id: int, error: SamplingError = _NOT_SENT) -> InviteOutcome:
        return InviteOutcome(self._member_code, quota_id, "not_sent", error=error)

    def _unasked(self, quota_ids: Iterable[int]) -> Iterator[InviteOutcome]:
        """Yield what is known of IDs of which not one was taken: nothing was sent, unless by a run before."""
        for quota_id in quota_ids:
            if self._journal is None:
                yield self._not_sent(quota_id)
            else:
                yield InviteOutcome(self._member_code, quota_id, "unknown", error=_UNASKED)


class OutcomePrinter:
    """Shows outcomes as they finish, how far the run has come, and a summary at the end of its block.

    Args:
        tally: Counts them.
        as_lines: Whether they are lines of JSON, or for people.

    Attributes:
        tally: As given.
        bar: Shows how far the run has come.
    """

    def __init__(self, tally: Tally, *, as_lines: bool) -> None:
        self.tally = tally
        self.bar = show.StreamBar(lines=as_lines)
        self._page = None if as_lines else show.OutcomePage(self.bar.display)
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
        """How many were shown."""
        return self.tally.total

    def add(self, outcome: InviteOutcome) -> None:
        """Show an outcome."""
        self.tally.add(outcome)
        if self._page is not None:
            self._page.add(outcome)
        elif not self._reader_is_gone:
            self._write(outcome)

    def _write(self, outcome: InviteOutcome) -> None:
        try:
            show.emit_json(show.outcome_json(outcome))
        except OSError:  # the reader went away, the disk is full
            self._reader_is_gone = True  # what is left over is counted all the same
            raise
