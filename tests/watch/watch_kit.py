"""A service whose inventory a test sets, and a watch of it with a clock that the test moves."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
from panel_kit import NOW, A, quota, sub_quota, survey

from sampling_async import DecodeError, Quotas
from sampling_async._contract.records import leave_out
from sampling_async._watch.cache import CacheFile
from sampling_async._watch.shown import Shown
from sampling_async._watch.watch import QuotaWatch

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    import pytest


class HandClock:
    """A clock that only the test moves. Tasks that sleep wait for it."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self.now = start
        self.sleeping: list[tuple[float, anyio.Event]] = []
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        mine = self.now + seconds, anyio.Event()
        self.sleeping.append(mine)
        try:
            await mine[1].wait()
        finally:
            self.sleeping.remove(mine)

    async def advance(self, seconds: float) -> None:
        """Move on to each moment at which somebody wakes, and let everybody run there."""
        end = self.now + seconds
        await settle()
        while due := [each for each in self.sleeping if each[0] <= end]:
            self.now = max(self.now, min(each[0] for each in due))
            for when, event in due:
                if when <= self.now:
                    event.set()
            await settle()
        self.now = end
        await settle()


async def settle(turns: int = 40) -> None:
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()


class FakeService:
    """Answers polls with `inventory`, or raises `error`; `hold()` keeps the answer of the running poll back."""

    def __init__(self, inventory: Quotas) -> None:
        self.inventory = inventory
        self.error: Exception | None = None
        self.polls = 0
        self.running = 0
        self.most = 0
        self._gate: anyio.Event | None = None

    def hold(self) -> anyio.Event:
        self._gate = anyio.Event()
        return self._gate

    async def read(self) -> Quotas:
        self.polls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            # The answer is what is true when the poll begins.
            answer, error, gate, self._gate = self.inventory, self.error, self._gate, None
            await (anyio.lowlevel.checkpoint() if gate is None else gate.wait())
            if error is not None:
                raise error
            return answer
        finally:
            self.running -= 1


def inventory(*quota_ids: int, **changes: Any) -> Quotas:
    """Return an inventory with one quota in each survey; the survey's ID is a hundred times the quota's."""
    return Quotas(1, NOW, tuple(one(quota_id, **changes) for quota_id in quota_ids))


def one(quota_id: int, **changes: Any) -> Any:
    return survey(quota([sub_quota(A)], quota_id=quota_id), survey_id=100 * quota_id, **changes)


def watch_of(
    service: FakeService,
    clock: HandClock,
    *,
    every: float = 60.0,
    max_age: float | None = None,
    cache: CacheFile | None = None,
    random: Callable[[], float] = lambda: 0.5,
    wall_clock: Callable[[], float] | None = None,
) -> QuotaWatch:
    return QuotaWatch(
        service.read,
        every=every,
        max_age=max_age,
        cache=cache,
        clock=clock,
        sleep=clock.sleep,
        random=random,
        wall_clock=wall_clock or clock,
    )


@asynccontextmanager
async def watching(known: Quotas, **options: Any) -> AsyncGenerator[tuple[QuotaWatch, FakeService, HandClock]]:
    """Watch a service, from the moment on at which its first inventory is there."""
    clock, service = HandClock(), FakeService(known)
    async with watch_of(service, clock, **options) as watch:
        await watch.ready()
        yield watch, service, clock


def ids_of(quotas: Quotas) -> list[int]:
    return [quota.quota_id for survey in quotas.surveys for quota in survey.quotas]


def moment(clock: HandClock, seconds: float = 0) -> datetime:
    return datetime.fromtimestamp(clock() + seconds, UTC)


def poll_of(*quota_ids: int, lacks: tuple[tuple[int | None, int | None], ...] = (), **changes):
    """Return an inventory that lacks surveys; `lacks` has the ID and the wave of each."""
    errors = [DecodeError(f"$.Surveys[{at}].LOI", "expected a whole number, found null") for at in range(9)]
    return leave_out(inventory(*quota_ids, **changes), errors[: len(lacks)], lacks)


def after_the_second_is_arranged(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something when the inventory of the second poll has been arranged, and before it is shown."""
    fill = Shown.fill

    async def slowly(shown: Shown, *arguments: Any) -> object:
        changed = await fill(shown, *arguments)
        if shown.poll == 2:
            act()
        return changed

    monkeypatch.setattr(Shown, "fill", slowly)


def cache_at(path, owner: str = "me", max_age: float = 1000) -> CacheFile:
    return CacheFile(path, owner, max_age)
