"""What was possible: a scheduler that knows the service serves the same calls.

It knows how many requests the service works on and lets through, and when its trouble ends. It sends a request
only if a worker and a token are free, so nothing is refused or waits there. It keeps the width of the client.
When the service is about to refuse all, as many requests wait there as it works on, and those are worked on
during the trouble: more would be there only for one who knew of it before. It knows how long the next request
will take. Of the clicks that wait it sends the one whose deadline is nearest of those that will be answered in
time; a bulk gets what is left. In a cell, all clicks have the same time and nearly all requests take about as
long, so no other order serves many more of them. Refusals by chance it does not know before: they are drawn as
the service draws them, and a Retry-After is obeyed. Only what is answered before the end of the trial counts,
here and for the clients: otherwise the line that is left at the end would count, and it is as long as a click
has time, however short the trial.
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
    scheduler = _Scheduler(service, deadline, has_bulk=has_bulk, width=width, seed=seed)
    arrivals, now = deque(came), 0.0
    while now < until and (arrivals or scheduler.waiting or has_bulk):
        while arrivals and arrivals[0] <= now:
            scheduler.waiting.append(arrivals.popleft())
        if not scheduler.begins(now):
            events = [*islice(arrivals, 1), *scheduler.events(now), *service.changes]
            now = min((event for event in events if event > now), default=inf)
    found = scheduler.found
    return Possible([end for end in found.clicks if end < until], [end for end in found.bulks if end < until])


class _Scheduler:
    """The scheduler at a moment.

    Attributes:
        waiting: When the clicks came that wait.
        found: What it has sent and will be answered.
    """

    def __init__(self, service: Service, deadline: float, *, has_bulk: bool, width: int, seed: int) -> None:
        self._service, self._deadline, self._has_bulk, self._width = service, deadline, has_bulk, width
        self._durations, self._refusals = service.durations(seed), service.refusals(seed)
        self._duration = next(self._durations)
        self._busy: list[float] = []  # a heap: when those that run end
        self._tokens, self._counted_at, self._held_until = float(service.burst), 0.0, -inf
        self._in_line: int | None = None  # in the service's line since before it refused all
        self.waiting: deque[float] = deque()
        self.found = Possible()

    def events(self, now: float) -> list[float]:
        """Return when another request may begin: maybe, and maybe in the past."""
        lacks = self._service.rate and self._tokens < 1
        token_at = now + (1 - self._tokens) / self._service.rate_at(now) if lacks else now
        return [*self._busy[:1], self._held_until, token_at]

    def begins(self, now: float) -> bool:
        """Begin one request, and return whether there was one that may begin."""
        service = self._service
        while self._busy and self._busy[0] <= now:
            heapq.heappop(self._busy)
        while self.waiting and self.waiting[0] + self._deadline < now + (1 - SPREAD) * service.seconds:
            self.waiting.popleft()
        more = service.tokens(self._counted_at, now)
        self._tokens, self._counted_at = min(float(service.burst), self._tokens + more), now
        is_free = len(self._busy) < min(self._width, service.workers_at(now)) and now >= self._held_until
        is_wanted = bool(self.waiting) or self._has_bulk
        return is_free and is_wanted and self._is_let_in(now) and self._send(now)

    def _is_let_in(self, now: float) -> bool:
        """Return whether the service takes a request: it works on those that came before it refused all."""
        if not self._service.refuses_all(now):
            return not self._service.rate or self._tokens >= 1 - 1e-6
        if self._in_line is None:
            self._in_line = min(self._width - len(self._busy), self._service.workers_at(now))
        return self._in_line > 0 and not self._service.rate

    def _send(self, now: float) -> bool:
        trouble, before = self._service.trouble, inf
        if trouble is not None and self._service.refuses_all(now):
            before = trouble.begin
        end = now + self._duration
        can = (at for at, came in enumerate(self.waiting) if came + self._deadline >= end and came < before)
        chosen = next(can, None)
        if chosen is None and not self._has_bulk and before < inf:
            return False
        if next(self._refusals):
            heapq.heappush(self._busy, now + REFUSED_AFTER)
            if self._service.retry_after is not None:
                self._held_until = now + REFUSED_AFTER + self._service.retry_after
            return True
        self._tokens -= 1
        self._in_line = None if self._in_line is None else self._in_line - 1
        self._duration = next(self._durations)
        heapq.heappush(self._busy, end)
        if chosen is not None:
            del self.waiting[chosen]
            self.found.clicks.append(end)
        elif self._has_bulk:
            self.found.bulks.append(end)
        else:
            self.waiting.popleft()  # a slow response, too late for each of them
        return True
