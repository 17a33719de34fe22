"""What was possible: a scheduler that knows the service serves the same calls.

It knows how many requests the service works on and lets through, and when its trouble ends. It sends a
request only if a worker and a token are free, so nothing is refused or waits there. It keeps the width of the
client. It knows how long the next request will take. Of the clicks that wait it sends the one whose deadline
is nearest of those that will be answered in time; a bulk gets what is left. In a cell, all clicks have the
same time and nearly all requests take about as long, so no other order serves many more of them. Refusals by
chance it does not know before: they are drawn as the service draws them, and a Retry-After is obeyed. Only
what is answered before the end of the trial counts, here and for the clients: otherwise the line that is left
at the end would count, and it is as long as a click has time, however short the trial.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from pressure.service import REFUSED_AFTER, SPREAD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pressure.service import Service


@dataclass
class Possible:
    """When the calls were answered by the scheduler.

    Attributes:
        clicks: The clicks that were answered in time.
        bulks: The requests of bulks.
    """

    clicks: list[float] = field(default_factory=list)
    bulks: list[float] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many were answered."""
        return len(self.clicks) + len(self.bulks)


def possible(
    service: Service,
    came: Sequence[float],
    *,
    deadline: float,
    has_bulk: bool,
    until: float,
    width: int,
    seed: int,
) -> Possible:
    """Return what the scheduler answers.

    Args:
        service: The service.
        came: When each click came, in order.
        deadline: The seconds that each click has.
        has_bulk: Whether there is always a request of a bulk.
        until: The end of the trial. What is answered later does not count.
        width: The requests that may run at once.
        seed: The seed of the trial, so that chance decides as there.
    """
    found, now = Possible(), 0.0
    durations, refusals = service.durations(seed), service.refusals(seed)
    duration = next(durations)
    busy: list[float] = []  # when those that run end
    waiting: deque[float] = deque()
    arrivals = deque(came)
    tokens, counted_at, held_until = float(service.burst), 0.0, -inf
    while now < until and (arrivals or waiting or has_bulk):
        while busy and busy[0] <= now:
            heapq.heappop(busy)
        while arrivals and arrivals[0] <= now:
            waiting.append(arrivals.popleft())
        while waiting and waiting[0] + deadline < now + (1 - SPREAD) * service.seconds:
            waiting.popleft()
        tokens, counted_at = min(float(service.burst), tokens + service.tokens(counted_at, now)), now
        is_free = len(busy) < min(width, service.workers_at(now)) and now >= held_until
        may_begin = is_free and not service.refuses_all(now) and (not service.rate or tokens >= 1 - 1e-6)
        if not may_begin or not (waiting or has_bulk):
            token_at = now + (1 - tokens) / service.rate_at(now) if service.rate and tokens < 1 else now
            events = [*busy[:1], *islice(arrivals, 1), held_until, token_at, *service.changes]
            now = min((event for event in events if event > now), default=inf)
            continue
        if next(refusals):
            heapq.heappush(busy, now + REFUSED_AFTER)
            if service.retry_after is not None:
                held_until = now + REFUSED_AFTER + service.retry_after
            continue
        tokens -= 1
        end, duration = now + duration, next(durations)
        heapq.heappush(busy, end)
        in_time = next((at for at, since in enumerate(waiting) if since + deadline >= end), None)
        if in_time is not None:
            del waiting[in_time]
            found.clicks += [end] if end < until else []
        elif has_bulk:
            found.bulks += [end] if end < until else []
        else:
            waiting.popleft()  # a slow response, too late for each of them
    return found
