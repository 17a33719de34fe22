"""The use of a journal by a run: look up outcomes, write rows, and know which chunks are in flight.

Rows of several requests are committed together, in a thread. A commit is on disk when it returns. The file is
the work of `JournalFile`. This module knows the chunks of this run that are in flight.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import anyio
import anyio.lowlevel

from sampling_async._contract.errors import JournalError
from sampling_async._journal.lines import lines_of, outcomes_of
from sampling_async._json.converter import plain_json
from sampling_async._pacing.loops import Notifier
from sampling_async._pacing.threads import SharedRun, in_thread, join_uncancelled, start

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path

    from sampling_async._journal.file import JournalFile
    from sampling_async._journal.rows import Latest
    from sampling_async._protocol.requests import Chunk
    from sampling_async._protocol.results import InviteOutcome


@runtime_checkable
class Recorder(Protocol):
    """Records chunks before they are sent, and their outcomes before the user gets them."""

    def claim(self, base_url: str, panel_guid: str) -> None:
        """Record the service and the panel that the record must belong to."""

    async def open(self) -> None:
        """Open the record for a run."""

    async def close(self) -> None:
        """Write what was noted, and close the record."""

    def note_sent(self, chunk: Chunk) -> int:
        """Note that a chunk will be sent, once `written()` has returned. Return its number."""
        ...

    def may_send(self, chunk: Chunk) -> bool:
        """Return whether a chunk may still be sent: it may have waited for long, or been refused for load."""
        ...

    def note_withheld(self, chunk: Chunk) -> None:
        """Note that a chunk is not sent, because it may not be sent any more."""

    def note_answered(self, number: int, outcomes: Iterable[InviteOutcome]) -> None:
        """Note the outcomes of a chunk."""

    async def written(self) -> None:
        """Wait until all that was noted before is on disk."""


@runtime_checkable
class Replay(Protocol):
    """Knows the outcomes of earlier requests, and the chunks in flight, so that no pair is sent twice."""

    async def settled(self, member_code: str, quota_ids: Iterable[int]) -> None:
        """Wait until no chunk of this run is in flight about these quotas of a member."""

    def knows(self, member_code: str) -> bool:
        """Return whether anything may be recorded of a member, or be in flight. If not, nothing is recalled."""
        ...

    def is_in_flight(self, member_code: str) -> bool:
        """Return whether a chunk of a member is in flight."""
        ...

    async def recall(self, pairs: Mapping[str, Collection[int]]) -> Mapping[str, Mapping[int, InviteOutcome]]:
        """Return the recorded outcomes of quotas of some members, without those that were never sent."""
        ...

    async def rest(self) -> Mapping[str, Mapping[int, InviteOutcome]]:
        """Return some recorded outcomes of earlier runs that were not recalled; none after the last."""
        ...

    def asks_again(self, outcome: InviteOutcome) -> bool:
        """Return whether to send a quota ID again that has this outcome."""
        ...

    def take_up(self, chunk: Chunk) -> None:
        """Note that a chunk is in flight."""

    def settle(self, chunk: Chunk) -> None:
        """Note that a chunk is no longer in flight."""


_LOG: Final = logging.getLogger("sampling_async.journal")
_AT_ONCE: Final = 10_000  # quota IDs that are checked before the event loop gets a turn


class JournalRun:
    """A journal as used by runs, one run after the other: a `Recorder` and a `Replay`.

    Args:
        path: The file. It is created if it does not exist.
        resend_unknown: Whether to send `unknown` quota IDs again.
        settled: Pairs of member and quota that are not sent again for all that.
        accept_damage: Whether to continue with the readable part of a damaged journal.
        only_input: Whether to return the outcomes of the input only, without the rest of the journal.

    Attributes:
        path: As given.
        resend_unknown: As given.
    """

    def __init__(
        self,
        path: Path,
        *,
        resend_unknown: bool = False,
        settled: Collection[tuple[str, int]] = (),
        accept_damage: bool = False,
        only_input: bool = False,
    ) -> None:
        self.path = path
        self.resend_unknown = resend_unknown
        self._settled_pairs = settled
        self._only_input = only_input
        self._rest_row = self._rest_count = 0  # how far the rest was returned
        self._accept_damage = accept_damage
        self._owner = ("", "")
        self._file: JournalFile | None = None
        self._commits = SharedRun(self._commit)
        self._chunks = 0
        self._chunks_before: int | None = None
        self._in_flight: dict[str, dict[int, Chunk]] = {}
        self._settled = Notifier()

    def claim(self, base_url: str, panel_guid: str) -> None:
        """Set the service and the panel that the journal must belong to."""
        self._owner = (base_url, panel_guid.lower())

    # --- The file

    async def open(self, *, goes_on: bool = False) -> None:
        """Open the file for a run, and check all of it.

        After a cancellation this returns at once, and the thread closes the file as soon as it notices.

        Args:
            goes_on: Whether this is still the same run that had it open last, if there was one.

        Raises:
            JournalError: The file cannot be opened, is not a journal, is damaged, belongs to another service or
                panel, or is in use.
        """
        if self.file is not None:
            raise JournalError(
                "is in use by another fan-out; use a separate journal for each", path=self.path, in_use=True
            )
        self._in_flight.clear()
        self._rest_row = self._rest_count = 0
        self._settled = Notifier()
        self._commits = SharedRun(self._commit)
        file = self._file = journal_file(self.path, self._owner, accept_damage=self._accept_damage)
        try:
            await in_thread(file.open)
            self._chunks = file.chunks
            # Chunks up to this number are from earlier runs, so their outcomes are `replayed`.
            if self._chunks_before is None or not goes_on:
                self._chunks_before = file.chunks
        except BaseException:
            self._file = None
            file.abandon()
            raise

    async def close(self) -> None:
        """Write the noted rows and close the file. A cancellation does not interrupt this; it is raised later.

        Raises:
            JournalError: The rows could not be written. The file is closed anyway.
        """
        file, self._file = self._file, None
        if file is not None:
            await join_uncancelled(start(file.leave))

    @property
    def file(self) -> JournalFile | None:
        """The file, if a run of this process has it open, otherwise None."""
        return None if self._file is None or self._file.is_gone else self._file

    def _opened(self) -> JournalFile:
        if self._file is None:
            raise JournalError("is not open", path=self.path)
        return self._file

    # --- Recorded outcomes

    async def settled(self, member_code: str, quota_ids: Iterable[int]) -> None:
        """Wait until no chunk of this run is in flight about these quotas of a member."""
        asked = iter(quota_ids)
        while some := tuple(islice(asked, _AT_ONCE)):
            waiting = list(self._in_flight.get(member_code, {}).keys() & set(some))
            # After each settled chunk, look only at the last quota, and drop it when it is not in flight.
            while waiting:
                if waiting[-1] in self._in_flight.get(member_code, {}):
                    await self._settled.wait()
                else:
                    waiting.pop()
            await anyio.lowlevel.checkpoint()

    def knows(self, member_code: str) -> bool:
        """Return whether anything may be recorded of a member, or be in flight."""
        return member_code in self._in_flight or self._opened().knows(member_code.encode())

    def is_in_flight(self, member_code: str) -> bool:
        """Return whether a chunk of a member is in flight."""
        return member_code in self._in_flight

    async def recall(self, pairs: Mapping[str, Collection[int]]) -> dict[str, dict[int, InviteOutcome]]:
        """Return the recorded outcomes of quotas of some members, without those that were never sent.

        This does not wait for chunks in flight: their quotas are `unknown`. The time grows with the number of
        quotas, so give at most a thousand at once.
        """
        # Shielded: after a cancellation, `left_over` still needs these outcomes.
        known: list[dict[str, dict[int, InviteOutcome]]] = []
        with anyio.CancelScope(shield=True):
            known.append(await in_thread(_recalled, self._opened(), pairs, self._chunks_before or 0))
        return known[0]

    async def rest(self) -> dict[str, dict[int, InviteOutcome]]:
        """Return some recorded outcomes of earlier runs that were not recalled; none after the last.

        If this is cancelled, the next call returns the same.
        """
        if self._only_input or not self._chunks_before:
            return {}
        found: dict[str, dict[int, InviteOutcome]] = {}
        row: int | None = self._rest_row
        while row is not None and not found:
            row, found = await in_thread(_rest, self._opened(), row, self._chunks_before)
            self._rest_row = self._rest_row if row is None else row
        self._rest_count += sum(map(len, found.values()))
        if not found and self._rest_count:
            _LOG.warning(
                "%s: %d recorded outcomes are of pairs that the input has not; they were returned after it",
                self.path,
                self._rest_count,
            )
            self._rest_count = 0
        return found

    def asks_again(self, outcome: InviteOutcome) -> bool:
        """Return whether to send a quota ID again that has this outcome."""
        if not self.resend_unknown or outcome.status != "unknown":
            return False
        return (outcome.member_code, outcome.quota_id) not in self._settled_pairs

    # --- Chunks in flight

    def take_up(self, chunk: Chunk) -> None:
        """Note that a chunk is in flight. A later request about the same quotas waits for its outcomes."""
        self._in_flight.setdefault(chunk.member_code, {}).update(dict.fromkeys(chunk.quota_ids, chunk))

    def settle(self, chunk: Chunk) -> None:
        """Note that a chunk is no longer in flight. If it was not in flight, this has no effect."""
        under_way = self._in_flight.get(chunk.member_code, {})
        for quota_id in chunk.quota_ids:
            if under_way.get(quota_id) is chunk:
                del under_way[quota_id]
        if not under_way:
            self._in_flight.pop(chunk.member_code, None)
        self._settled.notify()

    # --- Writing

    def may_send(self, chunk: Chunk) -> bool:  # noqa: ARG002  see `Recorder`
        return True

    def note_withheld(self, chunk: Chunk) -> None:
        """See `may_send`."""

    def note_sent(self, chunk: Chunk) -> int:
        """Note that a chunk will be sent. Send it only after `written()` has returned. Return its number."""
        from sampling_async._journal.rows import SENT  # noqa: PLC0415

        file = self._opened()
        self._chunks += 1
        file.note(SENT, self._chunks, chunk.member_code.encode(), plain_json(chunk.quota_ids))
        return self._chunks

    def note_answered(self, number: int, outcomes: Iterable[InviteOutcome]) -> None:
        """Note the outcomes of a chunk."""
        from sampling_async._journal.rows import ANSWERED  # noqa: PLC0415

        outcomes = list(outcomes)
        if outcomes:
            self._opened().note(ANSWERED, number, outcomes[0].member_code.encode(), lines_of(outcomes))

    async def written(self) -> None:
        """Wait until all rows noted before are on disk. One commit writes the rows of all tasks that wait.

        Rows that no task waits for are written with the next rows, at the latest when the journal is closed.
        """
        file = self._opened()
        noted = file.noted
        await self._commits.until(lambda: file.written >= noted)

    def _commit(self) -> Callable[[], object]:
        return bool if self._file is None else self._file.write  # if it is closed, all rows are written


def journal_file(path: Path, owner: tuple[str, str] | None, *, accept_damage: bool = False) -> JournalFile:
    """Return a new `JournalFile`, see there."""
    from sampling_async._journal.file import JournalFile  # noqa: PLC0415  with sqlite3, for runs that have one

    return JournalFile(path, owner, accept_damage=accept_damage)


def _rest(file: JournalFile, after: int, before: int) -> tuple[int | None, dict[str, dict[int, InviteOutcome]]]:
    """Return outcomes up to chunk `before` that were not recalled, and the last row; None after the last."""
    requests = file.rest(after, before)
    found: dict[str, dict[int, InviteOutcome]] = {}
    for request in requests:
        code = request.member_code.decode()
        outcomes = outcomes_of(code, request.lines, file.path, replayed=True)
        if known := {each.quota_id: each for each in outcomes if each.status != "not_sent"}:
            found.setdefault(code, {}).update(known)
    return requests[-1].row if requests else None, found


def _recalled(
    file: JournalFile, pairs: Mapping[str, Collection[int]], before: int
) -> dict[str, dict[int, InviteOutcome]]:
    """Return the outcomes in the journal. Chunks up to `before` are from earlier runs: `replayed`."""
    codes = [code.encode() for code in pairs]
    found = file.recall(list(zip(codes, pairs.values(), strict=True)))
    return {code: _outcomes(file, code, latest, before) for code, latest in zip(pairs, found, strict=True)}


def _outcomes(
    file: JournalFile, member_code: str, found: Mapping[int, Latest], before: int
) -> dict[int, InviteOutcome]:
    if not found:
        return {}
    # The index is a bool: `parts[False]` has the lines of this run, `parts[True]` those of earlier runs.
    parts: tuple[dict[int, bytes | None], ...] = ({}, {})
    for quota_id, latest in found.items():
        parts[latest.chunk <= before][quota_id] = latest.line
    of_this, replayed = (
        outcomes_of(member_code, lines, file.path, replayed=bool(which)) for which, lines in enumerate(parts)
    )
    return {each.quota_id: each for each in (*replayed, *of_this) if each.status != "not_sent"}
