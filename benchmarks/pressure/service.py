"""The modelled service: what it can take, and the trouble it has."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from random import Random
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import httpx
from scoreboard.testkit import tool

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind: TypeAlias = Literal["429", "503", "away", "slow"]

MANY: Final = 100_000
"""Workers of a service that works on any number of requests at once."""

REFUSED_AFTER: Final = 0.01
"""Seconds until a refusal, or a refused connection, is known."""

SPREAD: Final = 0.1
"""The share of its usual seconds by which a request takes longer or shorter."""

_PROBE_SECONDS: Final = 0.005
_SLOWER: Final = 10.0


@dataclass(frozen=True)
class Trouble:
    """A time of trouble.

    Attributes:
        begin: When it begins.
        end: When it ends.
        kind: All are refused with 429 or 503, the service is away, or it is slow: the other numbers say how.
    """

    begin: float
    end: float
    kind: Kind


@dataclass(frozen=True)
class Service:
    """What a modelled service can take.

    Attributes:
        name: Its name in tables.
        workers: How many requests it works on at once, from a time on. Others wait, first come first served.
        seconds: What a request takes, within a tenth.
        rate: How many requests a second it lets through, from a time on; empty for any number.
        burst: The most that it lets through at once after a pause.
        chance: The share of requests that are refused by chance.
        retry_after: What a refusal says in Retry-After; None leaves it out.
        slow: The share of requests that take ten times as long.
        trouble: When it has trouble.
    """

    name: str
    workers: tuple[tuple[float, int], ...] = ((0.0, MANY),)
    seconds: float = 0.1
    rate: tuple[tuple[float, float], ...] = ()
    burst: int = 5
    chance: float = 0.0
    retry_after: int | None = None
    slow: float = 0.0
    trouble: Trouble | None = None

    def workers_at(self, now: float) -> int:
        """Return on how many requests it works at once."""
        return [count for since, count in self.workers if since <= now][-1]

    def rate_at(self, now: float) -> float:
        """Return how many requests a second it lets through; it has a rate."""
        return [rate for since, rate in self.rate if since <= now][-1]

    @property
    def changes(self) -> list[float]:
        """The moments at which it changes."""
        troubles = [] if self.trouble is None else [self.trouble.begin, self.trouble.end]
        return [*(since for since, _ in (*self.workers, *self.rate)), *troubles]

    def tokens(self, since: float, now: float) -> float:
        """Return how many requests a rate lets through in a span."""
        steps = [*self.rate, (inf, 0.0)]
        return sum(
            rate * max(0.0, min(now, end) - max(since, begin)) for (begin, rate), (end, _) in pairwise(steps)
        )

    def refuses_all(self, now: float) -> bool:
        """Return whether nothing is let through."""
        trouble = self.trouble
        return trouble is not None and trouble.kind != "slow" and trouble.begin <= now < trouble.end

    def capacity(self, width: int) -> float:
        """Return the requests a second that it can take at the beginning from a client of a width."""
        at_once = min(width, self.workers[0][1]) / self.seconds
        return min(at_once, self.rate[0][1]) if self.rate else at_once

    def durations(self, seed: int) -> Iterator[float]:
        """Yield what requests take, in the order in which they are begun."""
        random = Random(f"durations {seed}")
        while True:
            seconds = self.seconds * random.uniform(1 - SPREAD, 1 + SPREAD)
            yield seconds * _SLOWER if random.random() < self.slow else seconds

    def refusals(self, seed: int) -> Iterator[bool]:
        """Yield which requests are refused by chance."""
        random = Random(f"refusals {seed}")
        while True:
            yield random.random() < self.chance


class ServiceModel(httpx.AsyncBaseTransport):
    """A modelled service as a transport of httpx.

    Like many real services, it does not notice that a client gave up: it works on the request all the same.

    Attributes:
        sent: When each request came, probes included.
        refused: When each refused request came.
        wasted: The requests whose answer nobody waited for any more.
        in_flight: The requests that somebody waits for now.
        held_until: The end of the latest Retry-After.
        is_over: Whether the trial has ended, so that nothing counts as wasted any more.
    """

    def __init__(self, service: Service, seed: int) -> None:
        self._service = service
        self._durations, self._refusals = service.durations(seed), service.refusals(seed)
        self._queue: deque[asyncio.Future[None]] = deque()
        self._busy = 0
        self._tokens, self._counted_at = float(service.burst), 0.0
        self._loop = asyncio.get_running_loop()
        for since, _ in service.workers[1:]:
            self._loop.call_at(since, self._begin_next)
        self._kit = tool("fault_server")
        self.sent: list[float] = []
        self.refused: list[float] = []
        self.wasted = 0
        self.in_flight = 0
        self.held_until = -inf
        self.is_over = False

    @property
    def is_busy(self) -> bool:
        """Whether it works on as many requests as it can."""
        return self._busy >= self._service.workers_at(self._loop.time())

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Respond as the service would at this moment."""
        self.sent.append(self._loop.time())
        self.in_flight += 1
        try:
            async with asyncio.timeout(request.extensions["timeout"]["read"]):
                return await self._respond(request)
        except (asyncio.CancelledError, TimeoutError) as exc:
            self.wasted += not self.is_over
            if isinstance(exc, TimeoutError):
                raise httpx.ReadTimeout("no response yet") from None
            raise
        finally:
            self.in_flight -= 1

    async def _respond(self, request: httpx.Request) -> httpx.Response:
        now, trouble = self._loop.time(), self._service.trouble
        if trouble is not None and self._service.refuses_all(now):
            if trouble.kind == "away":
                self.refused.append(now)
                await asyncio.sleep(REFUSED_AFTER)
                raise httpx.ConnectError("connection refused")
            return await self._refuse(now, int(trouble.kind))
        raw = f"{request.method} {request.url.raw_path.decode()} HTTP/1.1\r\n"
        raw += "\r\n".join(f"{name}: {value}" for name, value in request.headers.items())
        asked = self._kit.Request.of(raw.encode() + b"\r\n\r\n" + await request.aread())
        if asked.endpoint == "get_settings":  # a probe takes no place
            await asyncio.sleep(_PROBE_SECONDS)
        elif next(self._refusals) or not self._takes_token(now):
            return await self._refuse(now, 429)
        else:
            await self._worked_on()
        status, document = self._kit.right_document(asked)
        return httpx.Response(status, json=document)

    async def _refuse(self, now: float, status: int) -> httpx.Response:
        self.refused.append(now)
        headers: dict[str, str] = {}
        if self._service.retry_after is not None:
            headers["Retry-After"] = str(self._service.retry_after)
            self.held_until = max(self.held_until, now + REFUSED_AFTER + self._service.retry_after)
        await asyncio.sleep(REFUSED_AFTER)
        document = {"Result": "TRY_AGAIN_LATER", "ResultCode": status}
        return httpx.Response(status, headers=headers, json=document)

    def _takes_token(self, now: float) -> bool:
        if not self._service.rate:
            return True
        more = self._service.tokens(self._counted_at, now)
        self._tokens, self._counted_at = min(float(self._service.burst), self._tokens + more), now
        # Sums of small parts: without this, who waits for exactly one token would never get it.
        if self._tokens < 1 - 1e-6:
            return False
        self._tokens -= 1
        return True

    async def _worked_on(self) -> None:
        ended: asyncio.Future[None] = self._loop.create_future()
        self._queue.append(ended)
        self._begin_next()
        await ended

    def _begin_next(self) -> None:
        while self._queue and self._busy < self._service.workers_at(self._loop.time()):
            self._busy += 1
            self._loop.call_later(next(self._durations), self._end, self._queue.popleft())

    def _end(self, ended: asyncio.Future[None]) -> None:
        self._busy -= 1
        if not ended.done():  # its client has given up
            ended.set_result(None)
        self._begin_next()
