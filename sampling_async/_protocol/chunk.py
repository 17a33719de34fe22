"""Chunks: the distinct quota IDs of one member for one bulk request."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

from sampling_async._contract.records import hidden

if TYPE_CHECKING:
    from collections.abc import Iterator


MAX_QUOTA_IDS: Final = 100
"""The most quota IDs in one bulk invite (section "Limits")."""


@frozen
class Chunk:
    """Distinct quota IDs of one member for one bulk request.

    Attributes:
        member_code: The member.
        places: The quota IDs, each with the number of times that the caller gave it. An ID is sent once, but
            the caller gets one outcome for each time.
        asked_before: Whether an earlier request with these IDs may have made invites.
    """

    member_code: str = field(repr=hidden)
    places: Mapping[int, int]
    asked_before: bool = False

    @property
    def quota_ids(self) -> tuple[int, ...]:
        """The quota IDs, in the order of the request."""
        return tuple(self.places)


def cut(chunk: Chunk, size: int) -> Iterator[Chunk]:
    """Cut a chunk into chunks of at most `size` quota IDs: 250 IDs into 100, 100 and 50, with a size of 100."""
    places = iter(chunk.places.items())
    while batch := dict(islice(places, size)):
        yield Chunk(chunk.member_code, batch, chunk.asked_before)
