"""How long calls take: a cost for each, and a queue for so many workers."""

from __future__ import annotations

from heapq import heapify, heapreplace
from typing import TYPE_CHECKING

import attrs
from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable


@frozen
class Latency:
    """What a call costs: `a + b * IDs` seconds, and at most `workers` calls are worked on at once.

    IDs is the number of quota IDs of a bulk invite (0 is possible) and 1 for every other call. Further calls
    wait in the order they came. `workers` None means that none ever waits.
    """

    a: float = field(default=0.0, validator=attrs.validators.ge(0))
    b: float = field(default=0.0, validator=attrs.validators.ge(0))
    workers: int | None = field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))

    def seconds(self, ids: int) -> float:
        """Return how long a call with so many IDs is worked on."""
        return self.a + self.b * ids


class WorkQueue:
    """Says when a call will be done.

    No call is ever held here: since costs are known beforehand, the time it is done follows from the times the
    workers are done with what came before. So a call that its client has given up keeps its worker busy, as it
    would at a real service.
    """

    def __init__(self, latency: Latency, *, clock: Callable[[], float]) -> None:
        self._latency = latency
        self._clock = clock
        self._free_at = [float("-inf")] * (latency.workers or 0)
        heapify(self._free_at)

    def admit(self, ids: int) -> float:
        """Enter a call and return the seconds until it is done."""
        cost = self._latency.seconds(ids)
        if not self._free_at:
            return cost
        now = self._clock()
        done = max(now, self._free_at[0]) + cost
        heapreplace(self._free_at, done)
        return done - now
