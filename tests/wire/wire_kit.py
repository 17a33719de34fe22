"""Clients of services of sockets, engines, and scripts that count what comes."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import doubles
import httpx
import wire

from sampling_async import RetryPolicy, SamplingClient
from sampling_async._calls.attempt import Attempts
from sampling_async._wire import engine as _engine
from sampling_async._wire.address import KeyHeader, Secret

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    import pytest

    from sampling_async._contract.exchange import Reply
    from sampling_async._wire.engine import Engine


ONCE = RetryPolicy(max_attempts=1)
NO_KEY = KeyHeader(httpx.URL("https://service.example"), Secret(""))


def client_of(url: str, **options) -> SamplingClient:
    return SamplingClient(url, **{"panel_guid": doubles.PANEL, "api_key": doubles.KEY, "retry": ONCE} | options)


@asynccontextmanager
async def client_served_by(
    script: Callable[[wire.Connection], None], **options
) -> AsyncGenerator[SamplingClient]:
    """Serve a script on a socket; the client of it is open meanwhile."""
    with wire.serve(script) as url:
        async with client_of(url, **options) as client:
            yield client


class Counted:
    """A script that responds with settings, and counts connections and the requests on each."""

    def __init__(self, *answers: bytes, then=None) -> None:
        self.requests: list[int] = []
        self.ended = threading.Event()
        self._answers = answers or (wire.answer(b"[]"),)
        self._then = then

    def __call__(self, connection: wire.Connection) -> None:
        place = len(self.requests)
        self.requests.append(0)
        while connection.read_request() is not None:
            self.requests[place] += 1
            for answer in self._answers:
                connection.send(answer)
            if self._then is not None:
                self._then(connection)
                self.ended.set()
                return


def engine_of(client: SamplingClient) -> Engine:
    return client._session.engine


class FakeConnection:
    """A connection whose age is given, and which says what is done with it."""

    is_kept = session_is_new = False

    def __init__(self, age: float = 0.0) -> None:
        self._age = age
        self.used_at = 1.0
        self.done: list[object] = []

    def age(self, _now: float) -> float:
        return self._age

    def is_quiet(self) -> bool:
        return True

    is_reusable = True

    def close(self) -> None:
        self.done.append("closed")


def engine_with(*idle: FakeConnection) -> Engine:
    engine = _engine.Engine(key=NO_KEY, idle=8, idle_seconds=4.0)
    engine._idle.extend(idle)
    return engine


def decoded_after(monkeypatch: pytest.MonkeyPatch, first: Callable[[bytes], object]) -> None:
    """Call a function with the body of each response before that is decoded."""
    decoded = Attempts._decoded

    def slow(self: Attempts, call: object, reply: Reply) -> object:
        first(reply.body)
        return decoded(self, call, reply)

    monkeypatch.setattr(Attempts, "_decoded", slow)
