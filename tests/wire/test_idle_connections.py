"""Connections that nobody uses: how long they are kept, and what closes them."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
import weakref

import anyio
import doubles
import pytest
import wire
from wire_kit import Counted, FakeConnection, client_of, client_served_by, engine_of, engine_with

from sampling_async import InvalidRequestError, SamplingClient, TransportError


async def test_a_connection_is_closed_with_the_response_that_is_not_trusted_idle_or_not():
    first, second = FakeConnection(), FakeConnection()
    engine = engine_with(second)
    engine.drop(first)  # not idle
    engine.drop(second)
    assert (first.done, second.done, list(engine._idle)) == (["closed"], ["closed"], [])


def aged(client: SamplingClient, seconds: float, *connections: int) -> None:
    """Make unused connections, all or some, look older by this many seconds."""
    idle = engine_of(client)._idle
    for each in connections or range(len(idle)):
        idle[each].used_at -= seconds


async def test_a_connection_that_was_idle_for_long_is_not_reused():
    script = Counted()
    async with client_served_by(script) as client:
        await client.get_settings()
        aged(client, 60)
        await client.get_settings()
    assert script.requests == [1, 1]


@pytest.mark.parametrize("old", [(), (0,)], ids=["all", "one"])
async def test_old_connections_are_closed_when_others_come_back(old):
    async with client_served_by(Counted()) as client:
        await burst(client, 3)
        assert len(engine_of(client)._idle) > 1
        for _ in range(len(engine_of(client)._idle) - 2):
            engine_of(client)._idle.pop().close()
        aged(client, 60, *old)
        await client.get_settings()
        assert repr(engine_of(client)) == "<Engine: 1 idle>"


async def test_no_more_idle_connections_are_kept_than_configured():
    async with client_served_by(Counted()) as client:
        engine = client._session.engine
        engine._most_idle = 0
        await client.get_settings()
        assert repr(engine) == "<Engine: 0 idle>"


# --- Unused connections, closed in time


class Closing:
    """A script that responds with settings, and keeps its connections so that a test can close them."""

    def __init__(self) -> None:
        self.connections: list[wire.Connection] = []
        self.ended = 0

    def __call__(self, connection: wire.Connection) -> None:
        self.connections.append(connection)
        while connection.read_request() is not None:
            connection.send(wire.answer(b"[]"))
        self.ended += 1


async def burst(client: SamplingClient, calls: int) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(calls):
            tasks.start_soon(client.get_settings)


def slowly(connection: wire.Connection) -> None:
    """Respond so late that other calls open their own connections."""
    while connection.read_request() is not None:
        time.sleep(0.01)
        connection.send(wire.answer(b"[]"))


@pytest.mark.asyncio
async def test_a_timer_closes_connections_that_are_idle_for_long():
    script = Closing()
    async with client_served_by(script, idle_seconds=0.02) as client:
        for calls in (1, 3):
            await burst(client, calls)
            await doubles.until(lambda: script.ended == len(script.connections))
            assert repr(engine_of(client)) == "<Engine: 0 idle>"
            await doubles.until(lambda: engine_of(client)._timer is None)


@pytest.mark.asyncio
async def test_the_timer_is_set_for_the_next_connection_to_close():
    async with client_served_by(slowly) as client:
        await burst(client, 2)
        engine, loop = engine_of(client), asyncio.get_running_loop()
        first = engine._timer
        aged(client, 60, 0)
        engine.clear(loop)
        assert repr(engine) == "<Engine: 1 idle>"
        assert engine._timer.when() > loop.time() + 3
        first.cancel()


@pytest.mark.asyncio
async def test_a_timer_keeps_no_client_alive():
    with wire.serve(Closing()) as url:
        client = client_of(url)
        await client.get_settings()
        engine = engine_of(client)
        gone, timer = weakref.ref(engine), engine._timer
        await client.aclose()
        del client, engine
        gc.collect()
        assert gone() is None
        timer._run()
        timer.cancel()


def test_a_connection_is_too_old_as_soon_as_its_idle_time_has_passed():
    young, old = FakeConnection(3.9), FakeConnection(4.0)
    engine = engine_with(old, young)
    engine._close_old()
    assert (old.done, list(engine._idle)) == (["closed"], [young])
    old = FakeConnection(engine._idle_time.limit)
    assert engine_with(old)._take_idle() is None
    assert old.done == []


def test_each_use_of_an_idle_connection_is_counted():
    engine = engine_with(FakeConnection(), FakeConnection())
    assert engine._take_idle() is not None
    assert engine._take_idle() is not None
    assert engine._take_idle() is None
    assert engine.traffic.reused == 2


@pytest.mark.asyncio
async def test_a_connection_that_the_server_closes_is_closed_at_once():
    """It used to stay half closed until the next request, which may be hours away."""
    script = Closing()
    async with client_served_by(script, idle_seconds=600) as client:
        await client.get_settings()
        (unused,) = engine_of(client)._idle
        script.connections[0].sock.shutdown(socket.SHUT_RDWR)
        await doubles.until(lambda: repr(engine_of(client)) == "<Engine: 0 idle>")
        assert unused._wire._sock.fileno() == -1
        await client.get_settings()


@pytest.mark.parametrize("runs", ["asyncio", "uvloop"])
def test_a_connection_that_the_server_resets_is_closed_at_once(runs):
    """Uvloop tells once of a broken connection, unless it is asked again."""
    run = asyncio.run if runs == "asyncio" else pytest.importorskip("uvloop").run
    over = threading.Event()

    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(wire.answer(b"[]"))
        over.wait()
        connection.reset()

    async def main() -> None:
        async with client_served_by(script, idle_seconds=600) as client:
            await client.get_settings()
            assert client.snapshot().connections.idle == 1
            over.set()
            await doubles.until(lambda: client.snapshot().connections.idle == 0)

    run(main())


@pytest.mark.asyncio
async def test_events_of_a_busy_or_silent_connection_are_ignored():
    async with client_served_by(slowly) as client:
        await burst(client, 2)
        engine = engine_of(client)
        taken = engine._idle.pop()
        engine.look_at(weakref.ref(taken))
        engine.look_at(weakref.ref(engine._idle[0]))
        assert repr(engine) == "<Engine: 1 idle>"
        assert taken.is_quiet()
        taken.close()


async def test_an_idle_time_of_zero_means_no_reuse():
    script = Counted()
    async with client_served_by(script, idle_seconds=0) as client:
        await client.get_settings()
        await client.get_settings()
        assert repr(engine_of(client)) == "<Engine: 0 idle>"
    assert script.requests == [1, 1]


@pytest.mark.parametrize("seconds", [-1, float("inf"), float("nan"), "4", True, None])
def test_the_time_is_a_number_of_seconds(seconds):
    with pytest.raises(InvalidRequestError, match="idle_seconds must be a "):
        client_of("https://service.example", idle_seconds=seconds)


# --- The idle time adapts to closes


async def test_a_close_of_an_idle_connection_shortens_the_idle_time():
    script = Closing()
    async with client_served_by(script) as client:
        await client.get_settings()
        engine = engine_of(client)
        aged(client, 0.5)
        script.connections[0].sock.shutdown(socket.SHUT_RDWR)
        await anyio.sleep(0.01)
        await client.get_settings()
        assert 0.2 < engine._idle_time.limit < 0.4
        aged(client, 1)  # longer than the idle time, shorter than connections are kept
        await client.get_settings()
        assert len(script.connections) == 3
        assert repr(engine) == "<Engine: 2 idle>"
        aged(client, 60)
        await client.get_settings()  # both outlived the idle time, but since before the close
        assert repr(engine) == "<Engine: 1 idle>"
        assert engine._idle_time.limit < 0.4


async def test_connections_that_stay_open_restore_the_time():
    async with client_served_by(Closing()) as client:
        await client.get_settings()
        idle_time = engine_of(client)._idle_time
        idle_time.was_closed(0.5, time.monotonic() - 100)
        assert idle_time.limit < 4
        aged(client, 60)
        await client.get_settings()
        assert idle_time.limit == 4


async def test_a_close_that_was_seen_earlier_shortens_the_idle_time_too():
    script = Closing()
    async with client_served_by(script) as client:
        await client.get_settings()
        idle_time = engine_of(client)._idle_time
        engine_of(client)._idle[0]._wire.on_readable(lambda: None)
        script.connections[0].sock.shutdown(socket.SHUT_RDWR)
        await anyio.sleep(0.01)
        aged(client, 5)
        await client.get_settings()
        assert idle_time.limit == pytest.approx(2.5, abs=0.1)


async def test_only_a_failed_request_on_a_reused_connection_shortens_the_idle_time():
    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(wire.answer(b"[]"))
        connection.read_request()
        connection.reset()

    async with client_served_by(script) as client:
        await client.get_settings()
        engine = engine_of(client)
        aged(client, 1)
        with pytest.raises(TransportError) as caught:
            await client.get_settings()
        assert caught.value.delivery == "unknown"
        assert engine._idle_time.limit == pytest.approx(0.5, abs=0.1)
    async with client_served_by(lambda connection: connection.read_request()) as client:
        with pytest.raises(TransportError):
            await client.get_settings()
        assert engine_of(client)._idle_time.limit == 4


async def test_the_oldest_connection_is_dropped_if_there_are_too_many():
    script = Closing()
    async with client_served_by(script) as client:
        engine = engine_of(client)
        engine._most_idle = 1
        await client.get_settings()
        aged(client, 1)
        engine._idle_time.was_closed(0.5, time.monotonic())
        await client.get_settings()
        assert repr(engine) == "<Engine: 1 idle>"
        assert engine._idle[0].age(time.monotonic()) < 0.9
