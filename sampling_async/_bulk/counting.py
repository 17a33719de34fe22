"""Count the quota IDs of requests: each is sent once, however often it was given."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from sampling_async._pacing.stepwise import ENTRIES, Turns, pieces
from sampling_async._protocol.chunk import Chunk
from sampling_async._protocol.requests import InviteRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

_MANY: Final = 4096
"""How many quota IDs are counted before the event loop gets a turn."""

_FEW: Final = 128
"""The same, for work in which each quota ID may make a different dict grow."""

_COUNTED: Final = 65_536
"""The largest number of requests whose quota IDs are counted in advance; it takes some milliseconds."""


def counted(request: InviteRequest) -> Sequence[Chunk] | None:
    """Return the distinct quota IDs of a request, in the order given, each with its number of places.

    Return None for more than 65,536 IDs, which take too long to count in one step.
    """
    code, quota_ids = request.member_code, request.quota_ids
    if len(quota_ids) > ENTRIES:
        return None
    # Loops in C: 65,536 IDs take 3 ms. Nearly always no ID is repeated, and nothing is copied.
    return (Chunk(code, quota_ids) if _are_distinct(quota_ids) else Chunk.of(code, Counter(quota_ids)),)


async def counted_in_steps(request: InviteRequest) -> Sequence[Chunk]:
    """Do the same for a large request, in several chunks and with turns for the event loop."""
    code, quota_ids = request.member_code, request.quota_ids
    # A dict of a million entries blocks the event loop when it grows. So the counts are in several dicts of at
    # most `ENTRIES`, in order. `piece_of` finds the dict of a repeated ID. It is divided by the remainder of
    # the ID, so that each of its dicts is small as well.
    parts: list[dict[int, int]] = [{}]
    divisor, turns = pieces(len(quota_ids)), Turns()
    piece_of: list[dict[int, dict[int, int]]] = [{} for _ in range(divisor)]
    for start in range(0, len(quota_ids), _FEW):
        if len(parts[-1]) > ENTRIES - _FEW:
            parts.append({})
        for quota_id in quota_ids[start : start + _FEW]:
            piece = piece_of[quota_id % divisor].setdefault(quota_id, parts[-1])
            piece[quota_id] = piece.get(quota_id, 0) + 1
        await turns.step(_FEW)
    # Freeing a million entries takes time too, so it is done in steps.
    for pieces_of_some in piece_of:
        pieces_of_some.clear()
        await turns.step(_MANY)
    chunks: list[Chunk] = []
    for places in parts:
        chunks.append(Chunk.of(code, places))
        places.clear()
        await turns.step(_MANY)
    return chunks


def _are_distinct(quota_ids: tuple[int, ...]) -> bool:
    return len(set(quota_ids)) == len(quota_ids)


def total_of(requests: object) -> int | None:
    """Return the number of quota IDs in all requests; None if it is not known in advance."""
    if not isinstance(requests, list | tuple | set | frozenset) or len(requests) > _COUNTED:
        return None
    if not all(isinstance(request, InviteRequest) for request in requests):
        # Not an error here: it is raised when the first invalid item is drawn.
        return None
    return sum(len(request.quota_ids) for request in requests)
