"""Test doubles for the client: a clock, a service in memory, bodies as in the contract, gates."""

from __future__ import annotations

import json
import threading
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import anyio
import anyio.lowlevel
import anyio.to_thread
import httpx

from sampling_async import SamplingClient
from sampling_async._calls.attempt import Attempts
from sampling_async._pacing.gate import Gate, Permit
from sampling_async._pacing.loops import asyncio_loop
from sampling_async._pacing.turns import Lane
from sampling_async._wire import engine
from sampling_async._wire.bodies import LimitedBody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


PANEL = "aaaaaaaa-1111-2222-3333-444444444444"
KEY = "bbbbbbbb-5555-6666-7777-888888888888"


class FakeTime:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await anyio.lowlevel.checkpoint()


def steps_of_turns(monkeypatch: Any) -> list[int]:
    """Return the steps that long work will count from now on; the event loop gets no turns for them."""
    steps: list[int] = []

    async def step(self: object, done: int = 1) -> None:
        steps.append(done)

    monkeypatch.setattr("sampling_async._pacing.steps.LoopYielder.step", step)
    return steps


def decode_in_threads(monkeypatch: Any, first: Callable[[], object] = bool) -> list[threading.Thread]:
    """Let the client decode bodies of any size in a thread that calls `first` before; return those threads."""
    threads: list[threading.Thread] = []
    decode = Attempts._decoded

    def decoded(*given: Any) -> Any:
        threads.append(threading.current_thread())
        first()
        return decode(*given)

    monkeypatch.setattr("sampling_async._calls.attempt._THREADED_BYTES", 1)
    monkeypatch.setattr(Attempts, "_decoded", decoded)
    return threads


def fail_to_close_bodies(monkeypatch: Any, error: Exception) -> None:
    """Let the client close the bodies of responses with an error."""
    aclose = LimitedBody.aclose

    async def fail(body: LimitedBody) -> None:
        await aclose(body)
        raise error

    monkeypatch.setattr(LimitedBody, "aclose", fail)


def connections_opened(monkeypatch: Any, pause: Callable[[], Awaitable[object]] | None = None) -> list[Any]:
    """Return a list that gets each connection the client opens; the client has it after `pause`."""
    opened: list[Any] = []
    connect = engine.connect

    async def noted(*given: Any, **named: Any) -> Any:
        opened.append(await connect(*given, **named))
        if pause is not None:
            await pause()
        return opened[-1]

    monkeypatch.setattr(engine, "connect", noted)
    return opened


class MemoryPeak:
    """Measures the most memory Python objects took in a block."""

    peak = 0

    def __enter__(self) -> Self:
        tracemalloc.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for what sets no event of the loop, such as a thread; a hung test fails."""
    with anyio.fail_after(30):
        while not is_so():  # noqa: ASYNC110  nobody tells
            await anyio.sleep(0.001)


class Service:
    """A service in memory that gives the responses it was made with, in order; the last one is repeated."""

    def __init__(self, *answers: Any) -> None:
        self.requests: list[httpx.Request] = []
        self._answers = list(answers)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        await anyio.lowlevel.checkpoint()
        self.requests.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            answer = answer(request)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)


class InFlight:
    """An ASGI application around another one that counts the requests in flight.

        sim.app = in_flight = InFlight(sim.app)

    Attributes:
        most: The most requests that were in flight at once.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._now = self.most = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_counted = True
        self._now += 1
        self.most = max(self.most, self._now)

        async def send_on(message: Any) -> None:
            nonlocal is_counted
            # Before the last byte is sent: after it, the client may send its next request at once.
            if message["type"] == "http.response.body" and not message.get("more_body"):
                is_counted = False
                self._now -= 1
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            self._now -= is_counted


def client(handler: Callable[..., Any], time: FakeTime | None = None, **overrides: Any) -> SamplingClient:
    """Return a client of a service in memory whose waits take no time."""
    time = time or FakeTime()
    options: dict[str, Any] = {
        "panel_guid": PANEL,
        "api_key": KEY,
        "transport": httpx.MockTransport(handler),
        "clock": time.clock,
        "sleep": time.sleep,
        "random": lambda: 1.0,
    }
    return SamplingClient("https://service.example", **options | overrides)


def asked(request: httpx.Request) -> list[int]:
    """Return the quota IDs of a bulk invite."""
    return json.loads(request.content)["QuotaIDs"]


def item(quota_id: int, code: int = 9, **changes: Any) -> dict[str, Any]:
    """Return an item of a bulk response; code 1 includes an invite."""
    result = {1: "SUCCESS", 9: "QUOTA_NOT_LIVE"}.get(code, "OTHER")
    return {
        "QuotaID": quota_id,
        "Invite": invite(quota_id) if code == 1 else None,
        "ResultCode": code,
        "Result": result,
    } | changes


def invite(quota_id: int, **changes: Any) -> dict[str, Any]:
    """Return an invite as it comes over the wire."""
    return {
        "SurveyID": 7,
        "WaveID": 8,
        "QuotaID": quota_id,
        "MemberAmount": 0.0,
        "PartnerAmount": 1.5,
        "URL": f"https://survey.example/{quota_id}",
        "LOI": 10,
        "IR": 30,
    } | changes


def bulk(request: httpx.Request) -> dict[str, Any]:
    """Respond correctly to a bulk invite: even quota IDs are invited, odd ones are not live."""
    items = [item(quota_id, 9 if quota_id % 2 else 1) for quota_id in asked(request)]
    for each in items:
        if each["Invite"]:
            each["Invite"]["URL"] += f"?of={quote(request.url.path.split('/')[-2], safe='')}"
    return {"Invites": items}


def page(*codes: str, more: bool = False) -> dict[str, Any]:
    """Return a recontact page."""
    return {"MaxResults": len(codes), "HasAdditionalMembers": more, "MemberCodes": list(codes)}


def gate(limit: int = 2) -> Gate:
    time = FakeTime()
    return Gate(limit, clock=time.clock, sleep=time.sleep, random=lambda: 1.0)


def permits(shut: Gate) -> partial[Permit]:
    """Return a function that makes permits for one lane of a gate."""
    return partial(Permit, shut, Lane("work"))


async def alone(function: Callable[[], Awaitable[object]]) -> None:
    """Run a function on its own event loop of the same kind, so that SystemExit ends only that loop."""
    backend = "trio" if asyncio_loop() is None else "asyncio"
    await anyio.to_thread.run_sync(partial(anyio.run, function, backend=backend))


async def ids(*numbers: int) -> AsyncIterator[int]:
    """Yield quota IDs: input that can be read only once."""
    for number in numbers:
        yield number


def fixed(maximum: int, time: FakeTime) -> Gate:
    return Gate(maximum, clock=time.clock, sleep=time.sleep, random=lambda: 0.0)


async def held(shut: Gate, kind: str) -> Permit:
    permit = Permit(shut, Lane(kind))
    await permit.acquire()
    return permit
