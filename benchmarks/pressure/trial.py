"""One trial: a client and a load against a modelled service, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import inf, nan
from random import Random
from statistics import quantiles
from typing import TYPE_CHECKING, Final

from scoreboard import virtual

from pressure.possible import Possible, possible
from pressure.service import ServiceModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from pressure.askers import Asker
    from pressure.cells import Cell

_LOOK: Final = 0.05
"""Seconds between two looks at who waits and what forbids to send."""

_WINDOW: Final = 1.0
_SHIFT: Final = 0.1
_AS_BEFORE: Final = 0.9
_WARM: Final = 2.0
"""Seconds until the old rate is measured."""

_BOTH: Final = 2.0
_SETTLED: Final = 3.0


@dataclass
class Seen:
    """What was seen in a trial.

    Attributes:
        cell: The cell.
        who: The client.
        clicks: When each click came and ended, and whether it was answered in time.
        bulks: When each request of the fan-out was answered.
        sent: When each request was sent.
        refused: When each was refused.
        wasted: The requests whose answer nobody waited for any more.
        silent: The longest time in which nothing was sent though callers waited and nothing forbade it.
        idle: The same, of the time in which the service did not work to its capacity.
        hold_ended: The end of the latest Retry-After.
        possible: What was possible.
    """

    cell: Cell
    who: str = "this client"
    clicks: list[tuple[float, float, bool]] = field(default_factory=list)
    bulks: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    wasted: int = 0
    silent: float = 0.0
    idle: float = 0.0
    hold_ended: float = -inf
    possible: Possible = field(default_factory=Possible)

    @property
    def answered(self) -> list[float]:
        """When calls were answered in time, before the end of the trial."""
        return sorted([*self.bulks, *(end for end in self._clicked if end < self.cell.seconds)])

    @property
    def _clicked(self) -> list[float]:
        return [end for _, end, is_answered in self.clicks if is_answered]

    @property
    def goodput(self) -> float:
        """What was answered in time, by what was possible."""
        return len(self.answered) / self.possible.count if self.possible.count else nan

    @property
    def wasted_share(self) -> float:
        """The share of requests whose answer nobody waited for any more."""
        return self.wasted / len(self.sent) if self.sent else 0.0

    @property
    def late(self) -> float:
        """The most seconds by which a click ended after its time."""
        return max((end - came - self.cell.deadline for came, end, _ in self.clicks), default=0.0)

    def took(self, percent: int) -> float:
        """Return a percentile of the seconds that answered clicks took."""
        seconds = [end - came for came, end, is_answered in self.clicks if is_answered]
        return quantiles(seconds, n=100, method="inclusive")[percent - 1]

    @property
    def recovered(self) -> float | None:
        """The seconds from the end of the trouble, or of the last Retry-After, until the old rate is back.

        It is back at the beginning of the first second in which 0.9 of it were answered. The old rate is that
        before the trouble, or what the scheduler answers in that second if that is less. Infinite if it does
        not come back. None without a trouble.
        """
        trouble = self.cell.service.trouble
        if trouble is None:
            return None
        begin, answered, best = max(trouble.end, self.hold_ended), self.answered, self._best
        before = within(answered, _WARM, trouble.begin) / (trouble.begin - _WARM)
        for number in range(int((self.cell.seconds - _WINDOW - begin) / _SHIFT) + 1):
            since = begin + number * _SHIFT
            wanted = min(before, within(best, since, since + _WINDOW))
            if within(answered, since, since + _WINDOW) >= _AS_BEFORE * wanted:
                return since - begin
        return inf

    @property
    def _best(self) -> list[float]:
        return sorted([*self.possible.clicks, *self.possible.bulks])

    @property
    def progress(self) -> float | None:
        """The share of spans of two seconds in which both a click and a part of the fan-out were answered.

        Without those of a trouble and the three seconds after it, and those in which no click can be answered.
        """
        if not (self.cell.has_bulk and self.cell.load):
            return None
        trouble, spans, good = self.cell.service.trouble, 0, 0
        for number in range(int(self.cell.seconds / _BOTH)):
            since, until = number * _BOTH, (number + 1) * _BOTH
            if trouble and since < max(trouble.end, self.hold_ended) + _SETTLED and until > trouble.begin:
                continue
            if within(self.possible.clicks, since, until):
                spans += 1
                good += bool(within(self._clicked, since, until) and within(self.bulks, since, until))
        return good / spans if spans else None


def within(moments: Sequence[float], since: float, until: float) -> int:
    """Return how many moments are in a span."""
    return sum(since <= moment < until for moment in moments)


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Return when clicks come that know nothing of each other."""
    random, now, came = Random(f"clicks {seed}"), 0.0, list[float]()
    while rate > 0 and (now := now + random.expovariate(rate)) < seconds:
        came.append(now)
    return came


def tried(
    cell: Cell,
    opened: Callable[[ServiceModel, Cell, int], AbstractAsyncContextManager[Asker]],
    seed: int,
    who: str = "this client",
) -> Seen:
    """Put a client through a cell."""
    seen = Seen(cell, who)
    came = arrivals(cell.rate, cell.seconds, seed)
    virtual.run(_Trial(seen, came).run(opened, seed))
    seen.possible = possible(
        cell.service,
        came,
        deadline=cell.deadline,
        has_bulk=cell.has_bulk,
        until=cell.seconds,
        width=cell.width,
        seed=seed,
    )
    return seen


class _Trial:
    """The tasks of a trial."""

    def __init__(self, seen: Seen, came: Sequence[float]) -> None:
        self._seen, self._cell, self._came = seen, seen.cell, came
        self._open = 0  # clicks that have come and not ended
        self._has_bulk = seen.cell.has_bulk

    async def run(
        self, opened: Callable[[ServiceModel, Cell, int], AbstractAsyncContextManager[Asker]], seed: int
    ) -> None:
        loop, model = asyncio.get_running_loop(), ServiceModel(self._cell.service, seed)
        async with opened(model, self._cell, seed) as asker:
            watch = loop.create_task(self._watch(model, asker))
            parts = asker.bulks() if self._cell.has_bulk else []
            bulks = [loop.create_task(self._read(part)) for part in parts]
            clicks: list[asyncio.Task[None]] = []
            for at in self._came:
                await asyncio.sleep(at - loop.time())
                clicks.append(loop.create_task(self._click(asker, len(clicks))))
            await asyncio.sleep(self._cell.seconds - loop.time())
            self._has_bulk, model.is_over = False, True
            await _ended(bulks)
            model.is_over = False
            await asyncio.gather(*clicks)
            model.is_over = True
            await _ended([watch])
        self._seen.sent, self._seen.refused = model.sent, model.refused
        self._seen.wasted, self._seen.hold_ended = model.wasted, model.held_until

    async def _click(self, asker: Asker, number: int) -> None:
        loop = asyncio.get_running_loop()
        came, self._open = loop.time(), self._open + 1
        is_answered = await asker.click(f"m{number}", self._cell.deadline)
        self._open -= 1
        self._seen.clicks.append((came, loop.time(), is_answered))

    async def _read(self, part: AsyncIterator[bool]) -> None:
        loop = asyncio.get_running_loop()
        async for is_answered in part:
            if is_answered:
                self._seen.bulks.append(loop.time())

    async def _watch(self, model: ServiceModel, asker: Asker) -> None:
        """Measure for how long nothing is sent though somebody waits, and nothing forbids it."""
        loop, sent = asyncio.get_running_loop(), 0
        quiet_since = idle_since = loop.time()
        while True:
            await asyncio.sleep(_LOOK)
            now = loop.time()
            waits = self._has_bulk or self._open > model.in_flight
            forbids = model.in_flight >= self._cell.width or model.held_until > now or asker.is_on_hold
            if not waits or forbids:
                quiet_since = idle_since = now
            elif len(model.sent) > sent:
                quiet_since = max(quiet_since, model.sent[-1])
                idle_since = max(idle_since, model.sent[-1])
            if model.is_busy:
                idle_since = now
            self._seen.silent = max(self._seen.silent, now - quiet_since)
            self._seen.idle = max(self._seen.idle, now - idle_since)
            sent = len(model.sent)


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks; what they raised before is raised here."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
