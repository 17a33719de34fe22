"""A journal of a fan-out on disk: what was sent before it is sent, what was answered when it is.

A process that is killed in the middle is started again with the same input and the same journal. What was
answered is handed over from the journal, what was in flight is `unknown`, and only what was surely not sent
goes out. Rows of several requests are committed together, in a thread, and a commit has reached the disk when
it returns. The file itself is `_journal_file`'s; here is what of this run is under way.
"""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import anyio.lowlevel

from sampling_async._codec import plain_json
from sampling_async._errors import InvalidRequestError, JournalError, SamplingError
from sampling_async._models import Invite
from sampling_async._outcomes import InviteOutcome
from sampling_async._threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sampling_async._journal_file import JournalFile
    from sampling_async._protocol import Chunk

T = TypeVar("T")

_LINES: Final = 100
_AT_ONCE: Final = 10_000  # quota IDs looked at without a turn of the event loop


class Journal:
    """Where a fan-out writes down what it does: `client.fan_out(requests, journal=Journal(path))`.

    A member and quota is asked once for all runs with one journal, and for all requests of a run. The file
    holds member codes and invite links (never the key) and is made readable for its owner only. A small file
    beside it, whose name ends in `-lock`, belongs to it: it says how much the journal holds, so that no part of
    it can be missing unnoticed. `backup` copies both.

    Args:
        path: The file; it is made if it is not there. One run uses it at a time.
        resend_unknown: Whether to ask again what may have been processed without its answer being known. A
            second invite may be made.
        accept_damage: Whether to go on with what can be read of a damaged journal. What was sent and whose
            answer cannot be read is `unknown`; what is missing without a trace is asked again. The damaged file
            is kept, under a name that ends in `-damaged`.

    Raises:
        InvalidRequestError: The path cannot be one.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, resend_unknown: bool = False, accept_damage: bool = False
    ) -> None:
        self.path = _path_of(path)
        self._resend_unknown = resend_unknown
        self._accept_damage = accept_damage
        self._owner = ("", "")
        self._file: JournalFile | None = None
        self._lock = anyio.Lock()
        self._chunks = 0
        self._in_flight: dict[str, dict[int, Chunk]] = {}
        self._settled = anyio.Event()

    def __repr__(self) -> str:
        return f"Journal({str(self.path)!r}, resend_unknown={self._resend_unknown})"

    def claim(self, base_url: str, panel_guid: str) -> None:
        """Say whose journal it is."""
        self._owner = (base_url, panel_guid.lower())

    # --- The file

    async def open(self) -> None:
        """Open the file for a run, and check all of it.

        Cancelled, this returns at once; the file is let go of as soon as the thread at it notices.

        Raises:
            JournalError: It cannot be opened, is something else than a journal, is damaged, belongs to another
                service or panel, or is in use.
        """
        if self._file is not None and not self._file.is_gone:
            raise JournalError("is in use by another fan-out; give each its own", path=self.path)
        self._in_flight.clear()
        self._settled = anyio.Event()
        self._lock = anyio.Lock()
        file = self._file = _file(self.path, self._owner, accept_damage=self._accept_damage)
        try:
            await in_thread(file.open)
        except BaseException:
            self._file = None
            file.abandon()
            raise
        self._chunks = file.chunks

    async def close(self) -> None:
        """Write what is noted and let go of the file, which happens whatever comes: cancelled, this ends later.

        Raises:
            JournalError: It could not be written; the file is closed all the same.
        """
        file, self._file = self._file, None
        if file is not None:
            await _to_its_end(file.leave)

    async def backup(self, path: str | os.PathLike[str]) -> None:
        """Copy the journal, also while a run uses it; the copy is a journal as good as this one.

        Args:
            path: Where to: nothing is there, or an earlier copy, whose place this one takes when it is whole.

        Raises:
            InvalidRequestError: The path cannot be one.
            JournalError: The journal is not there, is damaged, or is in use by another process; or the copy
                cannot be written.
        """
        target = _path_of(path)
        if self._file is not None and not self._file.is_gone:
            await in_thread(self._file.back_up, target)
            return
        file = _file(self.path, None)

        def back_up() -> None:
            file.open()
            try:
                file.back_up(target)
            finally:
                file.leave()

        try:
            await in_thread(back_up)
        except BaseException:
            file.abandon()
            raise

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
        with anyio.CancelScope(shield=True):
            known = await in_thread(_recalled, self._opened(), member_code, tuple(quota_ids))
        return {outcome.quota_id: outcome for outcome in known}

    def asks_again(self, outcome: InviteOutcome) -> bool:
        """Return whether to send what is known of already."""
        return self._resend_unknown and outcome.status == "unknown"

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
            lines = b"".join(map(_line, outcomes))
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


def _path_of(path: str | os.PathLike[str]) -> Path:
    """Return a path that a file can have.

    Raises:
        InvalidRequestError: It is none.
    """
    if isinstance(path, str | os.PathLike):
        given = os.fspath(path)
        if isinstance(given, str) and given and "\0" not in given and _can_be_encoded(given):
            return Path(given)
    raise InvalidRequestError(
        "a journal's path is a str or PathLike of one, not empty and without NUL, not "
        f"{type(path).__name__ if not isinstance(path, str) else 'this text'}"
    )


def _can_be_encoded(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def _file(path: Path, owner: tuple[str, str] | None, *, accept_damage: bool = False) -> JournalFile:
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


def _recalled(file: JournalFile, member_code: str, quota_ids: tuple[int, ...]) -> list[InviteOutcome]:
    lines = file.recall(member_code.encode(), quota_ids)
    known = [_in_flight(member_code, quota_id) for quota_id, line in lines.items() if line is None]
    try:
        answered = filter(None, lines.values())
        while values := json.loads(b"[%b]" % b",".join(islice(answered, _LINES))):  # few lists live at once
            known += [_outcome(member_code, each) for each in values]
    except (ValueError, TypeError):
        values = None
    if values is None:  # raised out here, since those errors hold the line
        raise JournalError("has been damaged since it was opened: an answer cannot be read", path=file.path)
    return [outcome for outcome in known if outcome.status != "not_sent"]


# --- An outcome as a line of a row


def _line(outcome: InviteOutcome) -> bytes:
    """Return a line feed, and an outcome as JSON, which begins with its quota ID."""
    invite, error = outcome.invite, outcome.error
    values = [
        outcome.quota_id,
        outcome.status,
        None if invite is None else _values_of(invite),
        outcome.result_code,
        outcome.result,
    ]
    if error is None and outcome.anomaly is None:
        return b"\n" + plain_json([*values, None, None])
    told = None if error is None else [str(error).removeprefix("bulk_invite: "), error.delivery]
    # What is told may hold anything that came over the wire, which this writes in ASCII.
    return b"\n" + json.dumps([*values, told, outcome.anomaly], separators=(",", ":")).encode("ascii")


def _values_of(invite: Invite) -> list[Any]:
    return [
        invite.survey_id,
        invite.wave_id,
        invite.quota_id,
        invite.partner_amount,
        invite.url,
        invite.loi,
        invite.ir,
        invite.member_amount,
    ]


def _outcome(member_code: str, values: list[Any]) -> InviteOutcome:
    """Return the outcome that was written in a line."""
    quota_id, status, invite, code, result, told, anomaly = values
    return InviteOutcome(
        member_code,
        quota_id,
        status,
        None if invite is None else Invite(*invite),
        code,
        result,
        None if told is None else SamplingError(told[0], endpoint="bulk_invite", delivery=told[1]),
        anomaly,
    )


def _in_flight(member_code: str, quota_id: int) -> InviteOutcome:
    error = SamplingError(
        "sent by a run that ended before an answer was written down", endpoint="bulk_invite", delivery="unknown"
    )
    return InviteOutcome(member_code, quota_id, "unknown", error=error)
