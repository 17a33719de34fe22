"""Chunks: the distinct quota IDs of one member for one bulk request."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Self

from attrs import field

from sampling_async._contract.records import hidden
from sampling_async._contract.values import value

if TYPE_CHECKING:
    from collections.abc import Iterator


MAX_QUOTA_IDS: Final = 100
"""The most quota IDs in one bulk invite (section "Limits")."""

_NONE: Final[Mapping[int, int]] = MappingProxyType({})


@value
class Chunk:
    """Distinct quota IDs of one member for one bulk request.

    Attributes:
        member_code: The member.
        quota_ids: The quota IDs, in the order of the request.
        repeated: How many times the caller gave an ID, for IDs given more than once. An ID is sent once, but
            the caller gets one outcome for each time, which is called a *place*.
        asked_before: Whether an earlier request with these IDs may have made invites.
    """

    member_code: str = field(repr=hidden)
    quota_ids: tuple[int, ...]
    repeated: Mapping[int, int] = _NONE
    asked_before: bool = False

    @classmethod
    def of(cls, member_code: str, places: Mapping[int, int], *, asked_before: bool = False) -> Self:
        """Return a chunk of quota IDs, each with its number of places."""
        repeated = {quota_id: times for quota_id, times in places.items() if times > 1}
        return cls(member_code, tuple(places), repeated or _NONE, asked_before)

    @property
    def places(self) -> int:
        """The number of outcomes that the caller gets."""
        if not self.repeated:
            return len(self.quota_ids)
        return len(self.quota_ids) + sum(self.repeated.values()) - len(self.repeated)

    def each_place(self) -> Iterator[int]:
        """Yield each quota ID as many times as the caller gave it."""
        if not self.repeated:
            return iter(self.quota_ids)
        return (each for id_ in self.quota_ids for each in repeat(id_, self.repeated.get(id_, 1)))

    def part(self, start: int, end: int) -> Chunk:
        """Return a chunk of the quota IDs from one index to before another."""
        quota_ids, repeated = self.quota_ids[start:end], self.repeated
        if repeated:
            repeated = {id_: repeated[id_] for id_ in quota_ids if id_ in repeated} or _NONE
        return Chunk(self.member_code, quota_ids, repeated, self.asked_before)


def cut(chunk: Chunk, size: int) -> Iterator[Chunk]:
    """Cut a chunk into chunks of at most `size` quota IDs: 250 IDs into 100, 100 and 50, with a size of 100."""
    for start in range(0, len(chunk.quota_ids), size):
        yield chunk.part(start, start + size)
