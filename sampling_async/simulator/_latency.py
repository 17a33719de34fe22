"""How long calls take: a cost for each call, and a queue for a number of workers."""

from __future__ import annotations

from heapq import heapify, heapreplace
from typing import TYPE_CHECKING

import attrs
from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable


@frozen
class Latency:
    """The cost of calls: `a + b * IDs` seconds each, with at most `workers` calls worked on at once.

    IDs is the number of quota IDs of a bulk invite (0 is possible) and 1 for every other call. Further calls
    wait in the order of their arrival. With `workers` None no call ever waits.
    """

    a: float = field(default=0.0, validator=attrs.validators.ge(0))
    b: float = field(default=0.0, validator=attrs.validators.ge(0))
    workers: int | None = field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))

    def seconds(self, ids: int) -> float:
        """Return the seconds of work that a call with so many IDs takes."""
        return self.a + self.b * ids


class WorkQueue:
    """Calculates when a call will be done.

    No call waits inside this class. Costs are known beforehand, so the time at which a call is done follows
    from the times at which the workers become free. A call that its client has given up keeps its worker busy,
    as it would at a real service.
    """

    def __init__(self, latency: Latency, *, clock: Callable[[], float]) -> None:
        self._latency = latency
        self._clock = clock
        # The time at which each worker becomes free. In the beginning all are free.
        self._free_at = [float("-inf")] * (latency.workers or 0)
        heapify(self._free_at)

    def admit(self, ids: int) -> float:
        """Add a call and return the seconds until it is done."""
        cost = self._latency.seconds(ids)
        if not self._free_at:
            return cost
        now = self._clock()
        # The worker that becomes free first takes the call. Example: the time is 1, two workers become free at
        # 3 and 5, the call costs 4. It is worked on from 3 to 7, so it is done in 6 seconds.
        done = max(now, self._free_at[0]) + cost
        heapreplace(self._free_at, done)
        return done - now
