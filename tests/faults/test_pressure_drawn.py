"""Drawn services and loads, in virtual time: what must never happen, whatever they are."""

from __future__ import annotations

from math import inf
from random import Random

import anyio
import httpx
from attrs import frozen
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_pressure import Clicks, Stormy, simulated
from virtual_time import ModelGateway, run

from sampling_async import InviteRequest, SamplingClient

SILENT = 1.5
"""The longest time in which nothing may be sent though callers wait and nothing forbids it."""

LOOK = 0.05
SECONDS = 8.0


@frozen
class Pressure:
    """A service, and the load on it."""

    seconds: float
    at_once: int
    rate: float | None
    share: float
    retry_after: int | None
    storm: tuple[float, float]
    status: int
    width: int
    clicks: float  # a second
    deadline: float
    has_bulk: bool

    def service(self) -> Watched:
        stormy = Stormy(
            self.storm,
            seconds=self.seconds,
            at_once=self.at_once,
            status=self.status,
            retry_after=self.retry_after,
        )
        return Watched(ModelGateway(stormy, Random(3), self.share, self.rate, retry_after=self.retry_after))


class Watched(httpx.AsyncBaseTransport):
    """Notes how many requests are sent and under way, and until when a Retry-After holds."""

    def __init__(self, service: httpx.AsyncBaseTransport) -> None:
        self._service = service
        self.sent = 0
        self.under_way = 0
        self.held_until = -inf
        self.silent = 0.0  # the longest time in which nothing was sent for no reason

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.sent += 1
        self.under_way += 1
        try:
            response = await self._service.handle_async_request(request)
        finally:
            self.under_way -= 1
        seconds = float(response.headers.get("Retry-After", 0))
        self.held_until = max(self.held_until, anyio.current_time() + seconds)
        return response


async def watch(drawn: Pressure, service: Watched, client: SamplingClient, clicks: Clicks) -> None:
    """Measure for how long nothing is sent at most, though callers wait and the service could do more."""
    quiet_since, sent = 0.0, 0
    while True:
        now = anyio.current_time()
        waits = drawn.has_bulk or clicks.open > service.under_way
        is_full = service.under_way >= min(drawn.width, drawn.at_once)
        forbids = is_full or service.held_until > now or client.snapshot().breaker == "open"
        if forbids or not waits or service.sent > sent:
            quiet_since, sent = now, service.sent
        service.silent = max(service.silent, now - quiet_since)
        await anyio.sleep(LOOK)


async def under(drawn: Pressure, service: Watched) -> Clicks:
    """Put a client under pressure, and return its clicks."""

    async def fan_out() -> None:
        requests = (InviteRequest(f"b{at}", [2]) for at in range(10_000))
        async with client.fan_out(requests) as outcomes:
            async for _ in outcomes:
                pass

    async with simulated(service, max_concurrency=drawn.width) as client, anyio.create_task_group() as tasks:
        clicks = Clicks(client, rate=drawn.clicks or 1, seconds=SECONDS, deadline=drawn.deadline)
        tasks.start_soon(watch, drawn, service, client, clicks)
        if drawn.has_bulk:
            tasks.start_soon(fan_out)
        if drawn.clicks:
            await clicks.run()
        else:
            await anyio.sleep(SECONDS)
        tasks.cancel_scope.cancel()
    return clicks


PRESSURES = st.builds(
    Pressure,
    seconds=st.sampled_from([0.02, 0.1, 0.3]),
    at_once=st.sampled_from([1, 2, 4, 16]),
    rate=st.sampled_from([None, 5.0, 20.0, 60.0]),
    share=st.sampled_from([0.0, 0.02, 0.2]),
    retry_after=st.sampled_from([None, 1, 2]),
    storm=st.tuples(st.just(2.0), st.sampled_from([2.0, 2.5, 7.0])),
    status=st.sampled_from([429, 503]),
    width=st.sampled_from([1, 8, 64]),
    clicks=st.sampled_from([0.0, 2.0, 20.0]),
    deadline=st.sampled_from([0.3, 1.0, 2.0, 5.0]),
    has_bulk=st.booleans(),
)


STORM = Pressure(0.1, 4, None, 0.0, None, (2.0, 7.0), 429, 8, clicks=0.0, deadline=1.0, has_bulk=True)
"""A fan-out alone in a storm, in which the pause between two requests doubles."""


# Left out: callers without a deadline whom their host cancels after a fixed time. Nobody can say when they must
# be served; `test_pressure` has one such storm.
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@example(STORM)
@given(PRESSURES)
def test_nobody_waits_in_silence_and_every_call_ends_in_time(drawn):
    service = drawn.service()
    clicks = run(under, drawn, service, backend="asyncio")
    assert service.silent <= SILENT
    assert max((end - came for came, end, _ in clicks.ended), default=0.0) <= drawn.deadline + 1e-6
    assert len(clicks.ended) == int(drawn.clicks * SECONDS)
