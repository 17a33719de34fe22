"""What a run does with a journal: ask it, write into it, and keep an account of what is under way.

Rows of several requests are committed together, in a thread, and a commit has reached the disk when it returns.
The file itself is `_journal_file`'s; here is what of this run is under way.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

import anyio
import anyio.lowlevel

from sampling_async._codec import plain_json
from sampling_async._errors import JournalError
from sampling_async._journal_lines import line_of, outcomes_of
from sampling_async._threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from sampling_async._journal_file import JournalFile
    from sampling_async._outcomes import InviteOutcome
    from sampling_async._protocol import Chunk

_AT_ONCE: Final = 10_000  # quota IDs looked at without a turn of the event loop


class JournalRun:
    """A journal in use: of one run at a time, and of one after the other.

    Args:
        path: The file; it is made if it is not there.
        resend_unknown: Whether to ask again what may have been processed without its answer being known.
        accept_damage: Whether to go on with what can be read of a damaged journal.

    Attributes:
        path: As given.
        resend_unknown: As given.
    """

    def __init__(self, path: Path, *, resend_unknown: bool = False, accept_damage: bool = False) -> None:
        self.path = path
        self.resend_unknown = resend_unknown
        self._accept_damage = accept_damage
        self._owner = ("", "")
        self._file: JournalFile | None = None
        self._lock = anyio.Lock()
        self._chunks = 0
        self._chunks_before: int | None = None
        self._in_flight: dict[str, dict[int, Chunk]] = {}
        self._settled = anyio.Event()

    def claim(self, base_url: str, panel_guid: str) -> None:
        """Say whose journal it is."""
        self._owner = (base_url, panel_guid.lower())

    # --- The file

    async def open(self, *, goes_on: bool = False) -> None:
        """Open the file for a run, and check all of it.

        Cancelled, this returns at once; the file is let go of as soon as the thread at it notices.

        Args:
            goes_on: Whether this is still the run that had it open last, if there was one.

        Raises:
            JournalError: It cannot be opened, is something else than a journal, is damaged, belongs to another
                service or panel, or is in use.
        """
        if self.file is not None:
            raise JournalError("is in use by another fan-out; give each its own", path=self.path)
        self._in_flight.clear()
        self._settled = anyio.Event()
        self._lock = anyio.Lock()
        file = self._file = journal_file(self.path, self._owner, accept_damage=self._accept_damage)
        try:
            await in_thread(file.open)
            self._chunks = file.chunks
            if self._chunks_before is None or not goes_on:
                self._chunks_before = file.chunks
        except BaseException:
            self._file = None
            file.abandon()
            raise

    async def close(self) -> None:
        """Write what is noted and let go of the file, which happens whatever comes: cancelled, this ends later.

        Raises:
            JournalError: It could not be written; the file is closed all the same.
        """
        file, self._file = self._file, None
        if file is not None:
            await _to_its_end(file.leave)

    @property
    def file(self) -> JournalFile | None:
        """The file, where a run of this process has it open."""
        return None if self._file is None or self._file.is_gone else self._file

    def _opened(self) -> JournalFile:
        if self._file is None:
            raise JournalError("is not open", path=self.path)
        return self._file

    # --- What is known

    async def settled(self, member_code: str, quota_ids: Iterable[int]) -> None:
        """Wait until nothing of this run is under way about some of a member's quotas."""
        asked = iter(quota_ids)
        while some := tuple(islice(asked, _AT_ONCE)):
            waiting = list(self._in_flight.get(member_code, {}).keys() & set(some))
            while waiting:
                if waiting[-1] in self._in_flight.get(member_code, {}):
                    await self._settled.wait()
                else:
                    waiting.pop()
            await anyio.lowlevel.checkpoint()

    async def recall(self, member_code: str, quota_ids: Iterable[int]) -> dict[int, InviteOutcome]:
        """Return what is known of some of a member's quotas: all but what was surely never sent.

        Nothing is waited for: what is under way is `unknown`. It takes time by the number of quotas given, so a
        thousand are enough at once.
        """
        # Cut off here, what is known of the request would be lost.
        known: list[InviteOutcome] = []
        file, before = self._opened(), self._chunks_before or 0
        with anyio.CancelScope(shield=True):
            known = await in_thread(_recalled, file, member_code, tuple(quota_ids), before)
        return {outcome.quota_id: outcome for outcome in known}

    def asks_again(self, outcome: InviteOutcome) -> bool:
        """Return whether to send what is known of already."""
        return self.resend_unknown and outcome.status == "unknown"

    # --- What is under way

    def take_up(self, chunk: Chunk) -> None:
        """Note that a chunk is under way: a later request about the same waits for what it comes to."""
        self._in_flight.setdefault(chunk.member_code, {}).update(dict.fromkeys(chunk.places, chunk))

    def settle(self, chunk: Chunk) -> None:
        """Note that a chunk is under way no more; nothing happens where it was not."""
        under_way = self._in_flight.get(chunk.member_code, {})
        for quota_id in chunk.places:
            if under_way.get(quota_id) is chunk:
                del under_way[quota_id]
        if not under_way:
            self._in_flight.pop(chunk.member_code, None)
        self._settled.set()
        self._settled = anyio.Event()

    # --- Writing

    def note_sent(self, chunk: Chunk) -> int:
        """Note that a chunk is going to be sent, once `written()` returns; gives its number."""
        from sampling_async._journal_rows import SENT  # noqa: PLC0415

        file = self._opened()
        self._chunks += 1
        file.note(SENT, self._chunks, chunk.member_code.encode(), plain_json(list(chunk.places)))
        return self._chunks

    def note_answered(self, number: int, outcomes: Iterable[InviteOutcome]) -> None:
        """Note what a chunk came to."""
        from sampling_async._journal_rows import ANSWERED  # noqa: PLC0415

        outcomes = list(outcomes)
        if outcomes:
            lines = b"".join(map(line_of, outcomes))
            self._opened().note(ANSWERED, number, outcomes[0].member_code.encode(), lines)

    async def written(self) -> None:
        """Wait until all that was noted has reached the disk; who comes first writes for all.

        What was noted without waiting is written with the next rows, at the latest when the journal is closed.
        """
        file = self._opened()
        noted = file.noted
        async with self._lock:
            if file.written < noted:
                await in_thread(file.write)


def journal_file(path: Path, owner: tuple[str, str] | None, *, accept_damage: bool = False) -> JournalFile:
    """Return one use of a journal's file, see there."""
    from sampling_async._journal_file import JournalFile  # noqa: PLC0415  with sqlite3, for runs that have one

    return JournalFile(path, owner, accept_damage=accept_damage)


async def _to_its_end(function: Callable[[], None]) -> None:
    """Call a function in a thread until it has ended, whatever comes meanwhile; a second call only waits.

    A shield of anyio's keeps off no cancellation of asyncio's own, of which there may be several.
    """
    cancelled: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while True:
            try:
                await in_thread(function)
            except anyio.get_cancelled_exc_class() as exc:
                cancelled = exc
            else:
                break
    if cancelled is not None:
        raise cancelled


def _recalled(
    file: JournalFile, member_code: str, quota_ids: tuple[int, ...], before: int
) -> list[InviteOutcome]:
    """Return what is known, where chunks up to `before` are those of runs before."""
    parts: tuple[dict[int, bytes | None], ...] = ({}, {})
    for quota_id, latest in file.recall(member_code.encode(), quota_ids).items():
        parts[latest.chunk <= before][quota_id] = latest.line
    of_this, replayed = (
        outcomes_of(member_code, lines, file.path, replayed=bool(which)) for which, lines in enumerate(parts)
    )
    return [outcome for outcome in (*replayed, *of_this) if outcome.status != "not_sent"]
