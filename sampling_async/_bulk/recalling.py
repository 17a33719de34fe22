"""Look up a request in the journal: which of its quota IDs have an outcome, and which must be asked again.

If this is interrupted, what is left of the request can be listed at any moment; see `source`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Final, Self

from attrs import frozen

from sampling_async._bulk.job import Answered, Job, failed
from sampling_async._bulk.plans import Plan
from sampling_async._contract.errors import SamplingError
from sampling_async._protocol.chunk import Chunk
from sampling_async._protocol.outcomes import InviteOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from sampling_async._journal.record import Record

_RECALLED: Final = 1000
"""How many quota IDs are looked up in the journal at once."""


class Recalling:
    """A request that is looked up in the journal, one part after the other.

    Args:
        member_code: The member.
        counted: Its quota IDs.
        journal: The journal.

    Attributes:
        part: The part that was looked up last, until plans for it are made.
    """

    def __init__(self, member_code: str, counted: Sequence[Chunk], journal: Record) -> None:
        self._member_code = member_code
        self._counted = counted
        self._items = self._places()
        self._read = 0
        self._journal = journal
        self.part: Part | None = None

    def _places(self) -> Iterator[tuple[int, int]]:
        return ((id_, whole.repeated.get(id_, 1)) for whole in self._counted for id_ in whole.quota_ids)

    async def next(self) -> Part | None:
        """Look up the next part, after all chunks in flight about the same quotas. Return None at the end."""
        places = dict(islice(self._items, _RECALLED))
        if not places:
            return None
        try:
            await self._journal.settled(self._member_code, places)
        finally:
            # This also runs after a cancellation: `left` must report correct outcomes of these quota IDs.
            known = await self._journal.recall(self._member_code, places)
            again = {id_ for id_, outcome in known.items() if self._journal.asks_again(outcome)}
            part = Part.of(self._member_code, places, known, again)
            self.part, self._read = part, self._read + len(places)
        return part

    def left(self) -> Iterator[Job]:
        """Yield jobs with the quota IDs that are in no plan. Those not looked up yet are `unknown`."""
        if self.part is not None:
            yield from Plan(self.part.answered, _RECALLED, self.part.known).left()
            yield Job(self.part.again)
            yield Job(self.part.fresh)
        rest = Chunk.of(self._member_code, dict(islice(self._places(), self._read, None)))
        yield Job(rest, not_looked_up(rest))


@frozen
class Part:
    """Quota IDs of a request, divided by what the journal says about them.

    Attributes:
        answered: IDs with an outcome that is final; they are not sent.
        again: IDs to send again although an invite may exist.
        fresh: IDs that are not in the journal.
        known: The outcomes in the journal, by quota ID.
    """

    answered: Chunk
    again: Chunk
    fresh: Chunk
    known: Mapping[int, InviteOutcome]

    @classmethod
    def of(
        cls,
        member_code: str,
        places: Mapping[int, int],
        known: Mapping[int, InviteOutcome],
        again: AbstractSet[int],
    ) -> Self:
        """Divide quota IDs into the three kinds."""
        kinds: tuple[dict[int, int], ...] = ({}, {}, {})
        for quota_id, times in places.items():
            kind = 2 if quota_id not in known else 1 if quota_id in again else 0
            kinds[kind][quota_id] = times
        answered, asked_again, fresh = kinds
        return cls(
            Chunk.of(member_code, answered),
            Chunk.of(member_code, asked_again, asked_before=True),
            Chunk.of(member_code, fresh),
            known,
        )


def not_looked_up(chunk: Chunk) -> Answered:
    """Return `unknown` for IDs that were not looked up in the journal: an earlier run may have sent them."""
    error = SamplingError(
        "interrupted before the journal was read: an earlier run may have sent this",
        endpoint="bulk_invite",
        delivery="unknown",
    )
    return failed(chunk, error)
