"""Whether a client keeps to Retry-After, in virtual time. Its other calls count too."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from random import Random
from typing import Final

import anyio
import httpx
from peers.common import Options, Peer
from peers.naive import NaiveClient
from peers.ours import OurClient

from sampling_async import SamplingError
from scoreboard import virtual
from scoreboard.board import Row, Run, at_least, published
from scoreboard.replies import NOWHERE, SETTINGS, ok

EPOCH: Final = datetime(2027, 1, 1, tzinfo=UTC)


@dataclass
class Throttling(httpx.AsyncBaseTransport):
    """A service that answers one request with Retry-After, as seconds or as a date of its own clock.

    Attributes:
        random: Draws the value of Retry-After, and its moment.
        allowed: The virtual time from which requests are allowed again, after Retry-After was sent.
        margins: The seconds from `allowed` to each later request.
    """

    random: Random
    allowed: float | None = None
    margins: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._countdown = self.random.randint(1, 6)
        # The clocks of service and client differ: here by up to a day.
        self._clock = EPOCH + timedelta(seconds=self.random.uniform(-86_400, 86_400))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request. The response with Retry-After comes at once, others later."""
        now = anyio.current_time()
        if self.allowed is not None:
            self.margins.append(now - self.allowed)
            return ok(SETTINGS)
        self._countdown -= 1
        if self._countdown:
            await anyio.sleep(self.random.uniform(0.0, 0.5))
            return ok(SETTINGS)
        seconds = self.random.randint(1, 59)
        status = self.random.choice((429, 503))
        if self.random.random() < 0.5:
            self.allowed = now + seconds
            return httpx.Response(status, headers={"Retry-After": str(seconds)}, request=request)
        today = self._clock + timedelta(seconds=now)
        until = (today + timedelta(seconds=seconds)).replace(microsecond=0)
        self.allowed = now + (until - today).total_seconds()
        headers = {"Retry-After": _http(until), "Date": _http(today)}
        return httpx.Response(status, headers=headers, request=request)


def rows(run: Run) -> list[Row]:
    """Measure both clients."""
    trials = run.of(1_000, 10_000)
    ours, naive = _margins(OurClient, trials, run.seed), _margins(NaiveClient, trials, run.seed)
    early, naive_early = (sum(margin < 0 for margin in margins) for margins in (ours, naive))
    goal = "never below 0"
    note = "seconds and HTTP dates, clocks up to a day apart, 12 calls of one endpoint at once, all held"
    return [
        at_least("trials", trials, len(ours), len(naive), note=note),
        Row("earliest request minus the allowed time", goal, min(ours), min(ours) >= 0, min(naive), "s"),
        Row("trials with a request too early", "0", early, early == 0, naive_early),
        published("latest first request minus the allowed time", max(ours), max(naive), unit="s"),
    ]


def _http(moment: datetime) -> str:
    return format_datetime(moment.replace(microsecond=0), usegmt=True)


def _margins(peer: type[Peer], trials: int, seed: int) -> list[float]:
    """Return for each trial the smallest margin of a request after Retry-After."""
    return [virtual.run(_trial(peer, Random(f"{seed}/{number}"))) for number in range(trials)]


async def _trial(peer: type[Peer], random: Random) -> float:
    service = Throttling(random)

    async def call(client: Peer) -> None:
        await asyncio.sleep(random.uniform(0.0, 1.0))
        with suppress(SamplingError, httpx.HTTPError):
            await client.settings()

    async with peer(NOWHERE, Options(concurrency=4, transport=service)) as client:
        await asyncio.gather(*(call(client) for _ in range(12)))
    return round(min(service.margins), 6)  # smaller differences are rounding errors
