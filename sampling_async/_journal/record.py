"""What a fan-out needs of a journal, or of anything else that records what is sent and what came back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sampling_async._protocol.chunk import Chunk
    from sampling_async._protocol.outcomes import InviteOutcome


@runtime_checkable
class Record(Protocol):
    """Records chunks before they are sent, and their outcomes afterwards; see `JournalRun`, which does it."""

    def claim(self, base_url: str, panel_guid: str) -> None:
        """Learn the service and the panel that the record must belong to."""

    async def open(self) -> None:
        """Open the record for a run."""

    async def close(self) -> None:
        """Write what was noted, and close the record."""

    async def settled(self, member_code: str, quota_ids: Iterable[int]) -> None:
        """Wait until no chunk of this run is in flight about these quotas of a member."""

    async def recall(self, member_code: str, quota_ids: Iterable[int]) -> Mapping[int, InviteOutcome]:
        """Return the recorded outcomes of these quotas of a member, without those that were never sent."""
        ...

    def asks_again(self, outcome: InviteOutcome) -> bool:
        """Return whether to send a quota ID again that has this outcome."""
        ...

    def take_up(self, chunk: Chunk) -> None:
        """Note that a chunk is in flight."""

    def settle(self, chunk: Chunk) -> None:
        """Note that a chunk is no longer in flight."""

    def note_sent(self, chunk: Chunk) -> int:
        """Note that a chunk will be sent, once `written()` has returned. Return its number."""
        ...

    def note_answered(self, number: int, outcomes: Iterable[InviteOutcome]) -> None:
        """Note the outcomes of a chunk."""

    async def written(self) -> None:
        """Wait until all that was noted before is on disk."""
