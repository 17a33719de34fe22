"""Record a fan-out in a campaign's ledger: requests before they are sent, outcomes before they are shown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import anyio
from attrs import define, field

from sampling_async._contract.errors import WithheldError
from sampling_async._json.converter import plain_json
from sampling_async._pacing.loops import Notifier
from sampling_async._pacing.threads import SharedRun, in_thread
from sampling_async.campaign._ledger_file import DueMember, LedgerError, Notes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sampling_async import InviteOutcome
    from sampling_async._protocol.requests import Chunk
    from sampling_async.campaign._book import Book
    from sampling_async.campaign._ledger import CampaignLedger
    from sampling_async.campaign._summing import Moments

_SHIELDED: Final = 30.0  # seconds that the last notes may take to be written after a cancellation


@define(eq=False)
class LedgerRecord:
    """The `Recorder` of one run. A pair is requested once at a time, so it needs no `Replay`."""

    _ledger: CampaignLedger
    moments: Moments
    _book: Book
    _wall_clock: Callable[[], float]
    _clock: Callable[[], float]
    asked: int  # how many members had a request, in all runs
    requests: int  # how many requests there were, in all runs
    _may_send: Callable[[Iterable[int]], bool]  # whether quotas may be requested now
    changed: Notifier = field(factory=Notifier)
    is_ending: bool = False  # whether what is not sent now goes back to what is pending
    _members: dict[str, DueMember] = field(factory=dict[str, DueMember])
    _sent_at: dict[int, float] = field(factory=dict[int, float])
    _notes: Notes = field(factory=Notes)
    _unwritten: list[tuple[Notes, int]] = field(factory=list["tuple[Notes, int]"])
    _noted: int = 0
    _on_disk: int = 0
    _owner: tuple[str, str] = ("", "")
    _writes: SharedRun = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._writes = SharedRun(self._write_soon)

    @property
    def members(self) -> int:
        """How many members wait for outcomes."""
        return len(self._members)

    def is_waiting(self, member_code: str, quota_id: int) -> bool:
        member = self._members.get(member_code)
        return member is not None and quota_id in member.waiting

    def ready(self, member: DueMember, most: int) -> tuple[int, ...]:
        """Return what is requested for a member now, at most so many pairs; note what was changed for that."""
        before = len(self._notes.ends)
        quota_ids = self._book.ready(member, most, self._notes)
        self._noted += len(self._notes.ends) > before  # a new pair takes the place of one that has ended
        if quota_ids:
            self._members[member.code] = member
        return quota_ids

    def note_wait(self, number: int, kind: str, began: float, ended: float) -> None:
        """Note a time in which nothing was requested; the same number again makes it longer."""
        self._notes.waits[number] = (kind, began, ended)
        self._noted += 1

    # --- What the fan-out calls

    def claim(self, base_url: str, panel_guid: str) -> None:
        self._owner = (base_url, panel_guid.lower())

    async def open(self) -> None:
        """Check that the ledger belongs to this service and panel; a new one does from now on."""
        known = await in_thread(self._ledger.fact, "owner")
        owner = json.dumps(self._owner)
        if known is None:
            await in_thread(lambda: self._ledger.note(owner=owner))
        elif known != owner:
            raise LedgerError("belongs to another service or panel", path=self._ledger.path)

    async def close(self) -> None:
        with anyio.move_on_after(_SHIELDED, shield=True):
            await self.written()

    def note_sent(self, chunk: Chunk) -> int:
        """Note that a chunk will be sent, once `written()` has returned. Return its number."""
        self.requests += 1
        member = self._members[chunk.member_code]
        self._notes.sent.append((self.requests, member.id, plain_json(chunk.quota_ids).decode()))
        self._noted += 1
        self._sent_at[self.requests] = self._clock()
        return self.requests

    def may_send(self, chunk: Chunk) -> bool:
        return self._may_send(chunk.quota_ids)

    def note_withheld(self, chunk: Chunk) -> None:
        member = self._members[chunk.member_code]
        for quota_id in chunk.quota_ids:
            self._book.put_back(member, quota_id)
        self._let_go(member)
        self.changed.notify()

    def note_answered(self, number: int, outcomes: Iterable[InviteOutcome]) -> None:
        """Note the outcomes of a chunk, and what they change."""
        found = list(outcomes)
        latency = self._clock() - self._sent_at.pop(number)
        self._notes.answered.append((number,))
        self._noted += 1
        if found:
            member = self._members[found[0].member_code]
            if not member.was_asked and not all(isinstance(each.error, WithheldError) for each in found):
                member.was_asked = True
                self.asked += 1
            self._record(member, found, latency)
        self.changed.notify()

    def _record(self, member: DueMember, outcomes: list[InviteOutcome], latency: float) -> None:
        now, notes = self._wall_clock(), self._notes
        if self.is_ending:
            # Cut off before it was sent: it stays pending, as if it had not been requested.
            for each in outcomes:
                if each.status == "not_sent":
                    self._book.put_back(member, each.quota_id)
            outcomes = [each for each in outcomes if each.status != "not_sent"]
        before = len(notes.ends)
        self._book.record(member, outcomes, now, notes, requested=now - latency)
        self._let_go(member)
        states = [end.state for end in notes.ends[before:]]
        self.moments.add(
            now,
            latency,
            invited=states.count("invited"),
            rejected=states.count("rejected"),
            failed=states.count("unknown") + states.count("not_sent"),
        )

    def _let_go(self, member: DueMember) -> None:
        if not member.waiting:
            del self._members[member.code]

    async def written(self) -> None:
        """Wait until all that was noted before is on disk. One transaction writes for all tasks that wait."""
        noted = self._noted
        await self._writes.until(lambda: self._on_disk >= noted)

    def _write_soon(self) -> Callable[[], object]:
        self._notes.moments += self.moments.taken()
        self._unwritten.append((self._notes, self._noted))
        self._notes = Notes()
        return self._write

    def _write(self) -> None:
        # If the ledger cannot be written, the notes stay, and the next call writes them.
        some = list(self._unwritten)
        self._ledger.write([notes for notes, _ in some], self.requests)
        self._on_disk = some[-1][1]
        del self._unwritten[: len(some)]
