"""Check `chunk_size`, `goal`, `weight` and `repeats`, in one place for all methods that take them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from attrs import frozen

from sampling_async._bulk.asked import AskedPairs
from sampling_async._bulk.plans import Goal, spread
from sampling_async._contract.checks import number_above_0, whole_number
from sampling_async._contract.errors import Endpoint, InvalidRequestError
from sampling_async._protocol.chunk import MAX_QUOTA_IDS

if TYPE_CHECKING:
    from sampling_async._pacing.gate import Gate

BULK: Final[Endpoint] = "bulk_invite"
Repeats: TypeAlias = Literal["once", "ask"]
"""Whether a pair of member and quota that comes again in a fan-out is sent once, or asked for again."""

_LEAST_SHARE: Final = 1e-6


@frozen
class BulkOptions:
    """The options of one bulk invite or fan-out.

    Attributes:
        size: The most quota IDs in a chunk.
        size_of: Returns the best chunk size now, for a number of quota IDs. None: always `size`.
        share: Its share of the permits, compared with other bulks.
        until: The deadline, by the gate's clock; `inf` for none.
    """

    size: int
    size_of: Callable[[int], int] | None
    share: float
    until: float


def options_of(gate: Gate, until: float, *, chunk_size: int, goal: Goal | None, weight: float) -> BulkOptions:
    """Return the options after a check of their values.

    Raises:
        InvalidRequestError: An option has an invalid value.
    """
    size = whole_number(chunk_size, "chunk_size", most=MAX_QUOTA_IDS)
    if goal not in {"throughput", "first", None}:
        raise InvalidRequestError(f'goal must be "throughput" or "first", not {goal!r}')
    is_first = goal == "first" or (goal is None and until < inf)
    return BulkOptions(size, _spreading(gate, size) if is_first else None, _share_of(weight), until)


def asked_pairs(repeats: Repeats, *, has_journal: bool) -> AskedPairs | None:
    """Return what remembers the pairs of a fan-out, if it is needed: a journal remembers them itself.

    Raises:
        InvalidRequestError: The option has an invalid value, or a journal contradicts it.
    """
    if repeats not in {"once", "ask"}:
        raise InvalidRequestError(f'repeats must be "once" or "ask", not {repeats!r}')
    if repeats == "ask" and has_journal:
        raise InvalidRequestError(
            'a journal sends each pair once, so repeats cannot be "ask" with it; leave one of the two out'
        )
    return None if has_journal or repeats == "ask" else AskedPairs()


def _spreading(gate: Gate, largest: int) -> Callable[[int], int]:
    bulk = gate.kind(BULK)

    # Example: the limit is 8, and 3 bulk requests run. So 5 permits are free, and 100 quota IDs are cut for 5
    # parallel requests. If others wait for a permit that a bulk could have, none is free.
    def size_of(quota_ids: int) -> int:
        free = min(bulk.adaptive.limit - len(bulk.held), gate.maximum - gate.running)
        return spread(quota_ids, slots=max(1, free), line=bulk.adaptive.latency.line, largest=largest)

    return size_of


def _share_of(weight: float) -> float:
    share = number_above_0(weight, "weight", "a share")
    if not _LEAST_SHARE <= share <= 1 / _LEAST_SHARE:
        raise InvalidRequestError(
            f"weight must be a share from {_LEAST_SHARE} to {1 / _LEAST_SHARE:.0f}, not {weight!r}"
        )
    return share
