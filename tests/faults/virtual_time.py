"""Simulations in virtual time: hours of a service with few workers take milliseconds and are repeatable.

`run(main, backend=...)` runs an async function on an event loop whose clock jumps to the next timer when
no task can run. `ModelGateway` refuses requests, by a rate or by chance. `ModelService` is a service in
memory for it: some workers, first come first served, a time per request that grows with its quota IDs. Like
real services it continues with a request after the client has given up, so timeouts create invites that nobody
reads.
"""

from __future__ import annotations

import asyncio
import json
import random
import selectors
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import httpx
import trio.testing
from attrs import Factory, define, field
from fault_server import Ledger, Request, right_document

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

T = TypeVar("T")


def run(main: Callable[..., Awaitable[T]], *args: Any, backend: str) -> T:
    """Run an async function to its end in virtual time, which starts at 0."""
    if backend == "trio":
        options: dict[str, Any] = {"clock": trio.testing.MockClock(autojump_threshold=0)}
    else:
        options = {"loop_factory": _JumpingLoop}
    return anyio.run(main, *args, backend=backend, backend_options=options)


_FOREVER = 1e7
"""Seconds after which a simulation has no end: what waits for ever does so with timers of a day on asyncio."""


_LATE = 1e-9
"""Real clocks wake late. Woken early by a rounding error, who waits for a moment would never get there."""


class _JumpingSelector(selectors.DefaultSelector):
    """Moves the clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and (timeout is None or self.now > _FOREVER):
            self.now = 0.0  # so that the loop can end its tasks
            raise RuntimeError("nothing is left that could happen: the tasks would wait for ever")
        if not ready and timeout and timeout > 0:
            self.now += timeout + _LATE
        return ready


class _JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop for code that needs neither sockets nor threads."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


@contextmanager
def seeded(seed: int) -> Iterator[random.Random]:
    """Give repeatable random numbers, and add their seed to any exception."""
    try:
        yield random.Random(seed)
    except BaseException as exc:
        exc.add_note(f"seed {seed}")
        raise


@define(eq=False)
class ModelService(httpx.AsyncBaseTransport):
    """A service with workers, a queue and a ledger, as a transport of httpx.

    It respects the read timeout of a request as a connection would: after it the client gets a `ReadTimeout`.

    Attributes:
        workers: Pairs of a time and the number of workers from then on.
        base: Seconds of work for any request.
        per_id: Seconds of work for each quota ID.
        failures: Share of the requests that fail: half of them processed, half not.
        random: Decides which requests fail.
        started: When each request came.
    """

    workers: Sequence[tuple[float, int]] = ((0.0, 4),)
    base: float = 0.5
    per_id: float = 0.1
    failures: float = 0.0
    random: random.Random = field(factory=lambda: random.Random(0))
    ledger: Ledger = Factory(Ledger)
    started: list[float] = Factory(list)
    _ends: list[float] = Factory(list)
    _last_start: float = 0.0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        now = anyio.current_time()
        raw = f"{request.method} {request.url.raw_path.decode()} HTTP/1.1\r\n"
        raw += "\r\n".join(f"{name}: {value}" for name, value in request.headers.items())
        asked = Request.of(raw.encode() + b"\r\n\r\n" + await request.aread())
        self.started.append(now)
        self.ledger.received.append(asked)
        end = self._queue(now, self.base + self.per_id * len(asked.quota_ids))
        kind = self.random.choice(("refused", "lost")) if self.random.random() < self.failures else "right"
        if kind != "refused":
            self.ledger.process(asked)  # processed even if the client gives up: a request cannot be taken back
        limit = request.extensions["timeout"]["read"]
        await anyio.sleep(min(end - now, limit))
        if end - now > limit:
            raise httpx.ReadTimeout("no answer yet")
        if kind != "right":
            return httpx.Response(503 if kind == "refused" else 500)
        status, document = right_document(asked)
        return httpx.Response(status, content=json.dumps(document).encode())

    def _queue(self, now: float, seconds: float) -> float:
        """Put work into the queue and return the time at which it will be done.

        First come, first served: a start time does not depend on later requests, so it is known at once.
        """
        start = max(now, self._last_start)
        running = sorted(end for end in self._ends if end > start)
        for moment in sorted({start, *running, *(since for since, _ in self.workers if since > start)}):
            if sum(end > moment for end in running) < self._workers_at(moment):
                start = moment
                break
        self._last_start = start
        self._ends = [end for end in self._ends if end > start]
        self._ends.append(start + seconds)
        return start + seconds

    def _workers_at(self, moment: float) -> int:
        return [count for since, count in self.workers if since <= moment][-1]


@define(eq=False)
class ModelGateway(httpx.AsyncBaseTransport):
    """A gateway that refuses requests with 429, in front of a service, as a transport of httpx.

    Attributes:
        service: What gets the requests that are not refused.
        random: Decides which requests are refused by chance.
        share: The share of them.
        rate: Requests a second that it lets through; None for all.
        burst: The most that it lets through at once after a pause.
        retry_after: Seconds for the header; None leaves it out.
        accepted: When each request was let through.
    """

    service: httpx.AsyncBaseTransport
    random: random.Random
    share: float = 0.0
    rate: float | None = None
    burst: int = 5
    retry_after: int | None = None
    accepted: list[float] = Factory(list)
    _level: float = 0.0
    _seen: float = 0.0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        now = anyio.current_time()
        if self.rate is not None:
            self._level = max(0.0, self._level - self.rate * (now - self._seen))
            self._seen = now
        is_over = self.rate is not None and self._level > self.burst - 1
        if is_over or self.random.random() < self.share:
            await anyio.sleep(0.002)
            return httpx.Response(
                429, headers={} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
            )
        self._level += self.rate is not None
        self.accepted.append(now)
        return await self.service.handle_async_request(request)
