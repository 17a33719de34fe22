"""The engine: kept and dropped connections, surplus responses, mocks of httpx."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import re
import socket
import ssl
import threading
import time
import weakref
from contextlib import aclosing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import doubles
import httpx
import pytest
import respx
import wire

from sampling_async import (
    BodyLimits,
    DecodeError,
    InvalidRequestError,
    PagingError,
    RetryPolicy,
    SamplingClient,
    SamplingError,
    Timeouts,
    TransportError,
)
from sampling_async._calls.attempt import Attempts
from sampling_async._pacing.outage import Away
from sampling_async._wire import connection as _connection
from sampling_async._wire import engine as _engine
from sampling_async._wire import sockets as _lookups
from sampling_async._wire.address import KeyHeader, Proxy, Secret
from sampling_async._wire.bodies import Head, Request
from sampling_async._wire.clients import OverEngine, OverTransport
from sampling_async._wire.reader import TooSlow

if TYPE_CHECKING:
    from collections.abc import Callable

    from sampling_async._wire.engine import Engine


NO_KEY = KeyHeader(httpx.URL("https://service.example"), Secret(""))


def client_of(url: str, **options) -> SamplingClient:
    once = RetryPolicy(max_attempts=1)
    return SamplingClient(url, **{"panel_guid": doubles.PANEL, "api_key": doubles.KEY, "retry": once} | options)


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


async def test_a_connection_is_reused():
    script = Counted()
    with wire.serve(script) as url:
        async with client_of(url) as client:
            for _ in range(3):
                await client.get_settings()
    assert script.requests == [3]


@pytest.mark.parametrize(
    "answer",
    [
        wire.answer(b"[]", "200 OK", "Connection: close"),
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n[]",
    ],
)
async def test_a_connection_that_the_server_closes_is_not_reused(answer):
    script = Counted(answer)
    with wire.serve(script) as url:
        async with client_of(url) as client:
            await client.get_settings()
            await client.get_settings()
    assert script.requests == [1, 1]


STALE = wire.answer(b'[{"Name": "stale", "Description": "", "Value": ""}]')


async def test_a_surplus_response_in_the_same_packet_is_discarded():
    script = Counted(wire.answer(b"[]") + STALE)
    with wire.serve(script) as url:
        async with client_of(url) as client:
            for _ in range(3):
                assert len(await client.get_settings()) == 0
    assert script.requests == [1, 1, 1]


@pytest.mark.parametrize("after", [lambda connection: connection.send(STALE), lambda connection: None])
async def test_a_late_surplus_response_or_close_is_seen_before_the_next_request(after):
    """A request is never sent into a dead connection, because a bulk invite would end unknown."""
    script = Counted(then=after)
    with wire.serve(script) as url:
        async with client_of(url) as client:
            for _ in range(3):
                assert len(await client.get_settings()) == 0
                await anyio.to_thread.run_sync(script.ended.wait)
                script.ended.clear()
                await anyio.sleep(0.005)  # on loopback, the bytes have arrived by now
    assert script.requests == [1, 1, 1]


REFUSED = b'{"Result": "QUOTA_NOT_LIVE", "ResultCode": 9}'


@pytest.mark.parametrize(
    ("answers", "connections"),
    [
        ([wire.answer(REFUSED, "400 Bad Request")], [3]),  # in the service's own words
        ([wire.answer(b"<html>", "400 Bad Request")], [1, 1, 1]),
        *(
            ([wire.answer(REFUSED, status)], [1, 1, 1])
            for status in ("429 Too Many", "500 Oops", "502 Bad Gateway", "503 Away", "504 Timeout", "404 No")
        ),
        ([wire.answer(b"<html>")], [1, 1, 1]),
        ([wire.answer(b'{"Invites": [{"QuotaID": 8, "ResultCode": 9, "Invite": null}]}')], [1, 1, 1]),
        ([wire.answer(b'{"Invites": [{"QuotaID": 7, "ResultCode": 9, "Invite": null}]}')], [3]),
    ],
)
async def test_after_what_may_be_no_response_to_the_request_the_connection_is_not_used_again(
    answers, connections
):
    script = Counted(*answers)
    with wire.serve(script) as url:
        async with client_of(url) as client:
            for _ in range(3):
                await client.bulk_invite("m1", [7])
    assert script.requests == connections


async def test_the_right_response_after_another_one_is_never_taken_for_that_to_the_next_request():
    """A gateway gives up on a request, keeps the connection, and passes on the late response."""

    def late(connection: wire.Connection) -> None:
        owed: list[bytes] = []
        while (request := connection.read_request()) is not None:
            member = request.split(b" ")[1].split(b"/")[-2]
            item = doubles.item(7, code=1, Invite=doubles.invite(7, URL=f"https://s.example/{member.decode()}"))
            own = wire.answer(json.dumps({"Invites": [item]}).encode())
            if owed:
                connection.send(owed.pop())
            else:
                owed.append(own)
                connection.send(wire.answer(b"<html>", "504 Timeout"))

    with wire.serve(late) as url:
        async with client_of(url) as client:
            for member in ("alice", "bob", "carol"):
                (outcome,) = await client.bulk_invite(member, [7])
                assert outcome.invite is None or outcome.invite.url.endswith(member)


async def test_a_refusal_together_with_another_response_proves_nothing():
    script = Counted(wire.answer(REFUSED, "408 Too Late") + wire.answer(b"[]"))
    with wire.serve(script) as url:
        async with client_of(url, retry=RetryPolicy(max_attempts=3)) as client:
            (outcome,) = await client.bulk_invite("m1", [7])
    assert outcome.status == "unknown"
    assert script.requests == [1]


async def test_a_connection_is_closed_with_the_response_that_is_not_trusted_idle_or_not():
    first, second = FakeConnection(), FakeConnection()
    engine = engine_with(second)
    engine.drop(first)  # not idle
    engine.drop(second)
    assert (first.done, second.done, list(engine._idle)) == (["closed"], ["closed"], [])


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_no_other_request_gets_a_connection_before_its_response_is_judged(encoding):
    """Reading a gzip body gives others a turn, and they wait for a connection."""

    def odd(request: bytes) -> bytes:
        items = [doubles.item(int(each)) for each in re.findall(rb"\d+", request.rpartition(b"[")[2])]
        body = json.dumps({"Invites": [*items, doubles.item(999)]}).encode()
        if encoding == "gzip":
            return wire.answer(gzip.compress(body), "200 OK", "Content-Encoding: gzip")
        return wire.answer(body)

    connections: list[int] = []

    def script(connection: wire.Connection) -> None:
        place = len(connections)
        connections.append(0)
        while (request := connection.read_request()) is not None:
            connections[place] += 1
            connection.send(odd(request))

    with wire.serve(script) as url:
        async with client_of(url, max_concurrency=4) as client:
            with anyio.fail_after(10):
                outcomes = await client.bulk_invite("m1", range(1, 61), chunk_size=1)
    assert {outcome.status for outcome in outcomes} == {"rejected"}
    assert set(connections) == {1}


@pytest.mark.parametrize(
    ("body", "encoding"), [(gzip.compress(b"{}")[:-3], "gzip"), (b"x", "br")], ids=["cut", "unknown"]
)
async def test_a_failed_attempt_leaves_the_connection_of_the_attempt_before_to_others(body, encoding):
    """It was released with the refusal, and a request of somebody else is waiting on it."""
    passing = wire.answer(b'{"Result":"TECHNICAL_ERROR","ResultCode":36}', "400 Bad Request")
    broken = wire.answer(body, "200 OK", f"Content-Encoding: {encoding}")
    answers, is_over = [passing, broken], threading.Event()

    def script(connection: wire.Connection) -> None:
        while (request := connection.read_request()) is not None:
            if b"/Invite/" in request:
                connection.send(answers.pop(0))
            else:
                is_over.wait(10)
                connection.send(wire.bulk_answer(request))

    with wire.serve(script) as url:
        retry = RetryPolicy(max_attempts=2)
        outcomes = []

        async def until_the_other_uses_it(_: float) -> None:
            tasks.start_soon(ask)
            await doubles.until(lambda: not engine_of(client).idle)

        async def ask() -> None:
            outcomes.extend(await client.bulk_invite("m2", [7]))

        async with client_of(url, retry=retry, sleep=until_the_other_uses_it) as client:
            async with anyio.create_task_group() as tasks:
                with pytest.raises(SamplingError):
                    await client.generate_invite("m1", 7)
                is_over.set()
    assert [outcome.status for outcome in outcomes] == ["rejected"]


def shifted(padding: int, tell: Callable[[str], object] = bool) -> Callable[[wire.Connection], None]:
    """Return a gateway that repeats its first response on a connection, and is one behind from then on.

    Args:
        padding: Makes its late responses longer.
        tell: Called with the member of each request.
    """

    def script(connection: wire.Connection) -> None:
        before = None
        while (request := connection.read_request()) is not None:
            member = request.split(b"/Invites")[0].rpartition(b"/")[2].decode()
            tell(member)
            item = doubles.item(
                7, code=1, Invite=doubles.invite(7, URL=f"https://s.example/{before or member}")
            )
            body = {"Invites": [item], "Padding": "x" * padding if before else ""}
            connection.send(wire.answer(json.dumps(body).encode()))
            before = member

    return script


async def test_no_member_gets_the_invite_of_another_while_a_response_is_decoded_in_a_thread(monkeypatch):
    judging, others_ask = threading.Event(), threading.Event()
    at_once = Attempts._decoded

    def slow(self: Attempts, call: Any, reply: Any) -> object:
        if len(reply.body) > 1_000_000:
            judging.set()
            others_ask.wait(10)
        return at_once(self, call, reply)

    monkeypatch.setattr(Attempts, "_decoded", slow)
    with wire.serve(shifted(3_000_000, lambda member: others_ask.set() if member == "m3" else None)) as url:
        async with client_of(url) as client:
            await client.bulk_invite("m1", [7])
            seen = {}

            async def ask(member: str) -> None:
                (seen[member],) = await client.bulk_invite(member, [7])

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, "m2")
                await doubles.until(judging.is_set)
                tasks.start_soon(ask, "m3")
            assert (seen["m2"].status, seen["m3"].status) == ("unknown", "invited")
            assert seen["m3"].invite.url.endswith("m3")


async def test_a_call_that_is_cancelled_while_its_response_is_decoded_gives_no_connection_back(monkeypatch):
    entered, goes_on = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        entered.set()
        goes_on.wait(10)

    monkeypatch.setattr(Attempts, "_decoded", slow)
    with wire.serve(shifted(3_000_000)) as url:
        async with client_of(url) as client:
            monkeypatch.setattr("sampling_async._calls.attempt._THREADED_BYTES", 1)
            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    await client.bulk_invite("m1", [7])

                tasks.start_soon(ask)
                await doubles.until(entered.is_set)
                tasks.cancel_scope.cancel()
            goes_on.set()
            assert engine_of(client).idle == 0
            assert engine_of(client).traffic.closed == engine_of(client).traffic.opened == 1


@pytest.mark.parametrize("body", [b"<html>", b'{"Invites":[]}'])
async def test_the_connection_of_a_probe_is_not_used_again(body):
    with wire.serve(Counted(wire.answer(body))) as url:
        async with client_of(url) as client:
            assert await client._send_probe(1.0) == (Away(is_certain=False) if body == b"<html>" else None)
            assert engine_of(client).idle == 0


async def test_a_connection_whose_response_was_judged_late_is_closed_and_teaches_nothing():
    engine = engine_with()
    late, in_time = FakeConnection(4.0), FakeConnection(3.99)
    engine.release(late)
    engine.release(in_time)
    assert (late.done, in_time.done, list(engine._idle)) == (["closed"], [], [in_time])
    assert engine._idle_time.limit == 4.0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_close_by_the_server_while_a_response_is_judged_is_seen_when_it_comes(monkeypatch):
    """The engine learns the idle time from it, and does not keep the connection."""
    at_once, seen = Attempts._decoded, threading.Event()

    def slow(self: Attempts, call: Any, reply: Any) -> object:
        seen.wait(10)
        return at_once(self, call, reply)

    def script(connection: wire.Connection) -> None:
        connection.send(wire.answer(b"[]" + b" " * 2_000_000)) if connection.read_request() else None
        time.sleep(0.12)

    monkeypatch.setattr(Attempts, "_decoded", slow)
    with wire.serve(script) as url:
        async with client_of(url) as client:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.get_settings)
                await doubles.until(lambda: engine_of(client).traffic.closed == 1)
                seen.set()
            assert engine_of(client).idle == 0
            assert 0.05 < engine_of(client)._idle_time.limit < 1.0


async def test_a_call_that_is_left_in_its_pause_closes_no_connection_of_others():
    """The refusal before the pause was judged, and its connection is used by somebody else."""
    passing = wire.answer(b'{"Result":"TECHNICAL_ERROR","ResultCode":36}', "400 Bad Request")
    cut, answers = b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{", threading.Event()
    inventories = [cut, passing]

    def script(connection: wire.Connection) -> None:
        while (request := connection.read_request()) is not None:
            if b"/Quotas" in request:
                connection.send(inventories.pop(0))
                if len(inventories) == 1:
                    return
            else:
                answers.wait(10)
                connection.send(wire.bulk_answer(request))

    with wire.serve(script) as url:
        outcomes, pauses = [], []

        async def pause(_: float) -> None:
            pauses.append(None)
            if len(pauses) == 2:
                tasks.start_soon(ask)
                await doubles.until(lambda: not engine_of(client).idle)
                tasks.cancel_scope.cancel()
                await anyio.sleep_forever()

        async def ask() -> None:
            with anyio.CancelScope(shield=True):
                outcomes.extend(await client.bulk_invite("m2", [7]))

        async def read() -> None:
            async with aclosing(client.iter_surveys()) as surveys:
                try:
                    await anext(surveys)
                finally:
                    answers.set()

        async with client_of(url, retry=RetryPolicy(max_attempts=3), sleep=pause) as client:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
    assert [outcome.status for outcome in outcomes] == ["rejected"]


async def test_the_connection_of_a_page_that_may_be_that_of_another_call_is_not_used_again():
    page = json.dumps(doubles.page("a", "b", more=True)).encode()
    with wire.serve(Counted(wire.answer(page))) as url:
        async with client_of(url) as client:
            with pytest.raises(PagingError, match="the same code as an earlier page"):
                _ = [code async for code in client.recontact_members(7)]
            assert engine_of(client).idle == 0


def engine_of(client: SamplingClient) -> Engine:
    return client._session.engine


def aged(client: SamplingClient, seconds: float, *connections: int) -> None:
    """Make unused connections, all or some, look older by this many seconds."""
    idle = engine_of(client)._idle
    for each in connections or range(len(idle)):
        idle[each].used_at -= seconds


async def test_a_connection_that_was_idle_for_long_is_not_reused():
    script = Counted()
    with wire.serve(script) as url:
        async with client_of(url) as client:
            await client.get_settings()
            aged(client, 60)
            await client.get_settings()
    assert script.requests == [1, 1]


async def test_old_connections_are_closed_when_others_come_back():
    script = Counted()
    with wire.serve(script) as url:
        async with client_of(url) as client:
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(client.get_settings)
            assert len(engine_of(client)._idle) > 1
            aged(client, 60)
            await client.get_settings()
            assert repr(engine_of(client)) == "<Engine: 1 idle>"


async def test_an_old_connection_is_closed_when_a_younger_one_comes_back():
    with wire.serve(Counted()) as url:
        async with client_of(url) as client:
            async with anyio.create_task_group() as tasks:
                for _ in range(2):
                    tasks.start_soon(client.get_settings)
            aged(client, 60, 0)
            await client.get_settings()
            assert repr(engine_of(client)) == "<Engine: 1 idle>"


async def test_no_more_idle_connections_are_kept_than_configured():
    with wire.serve(Counted()) as url:
        async with client_of(url) as client:
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
    with wire.serve(script) as url:
        async with client_of(url, idle_seconds=0.02) as client:
            for calls in (1, 3):
                await burst(client, calls)
                await doubles.until(lambda: script.ended == len(script.connections))
                assert repr(engine_of(client)) == "<Engine: 0 idle>"
                await doubles.until(lambda: engine_of(client)._timer is None)


@pytest.mark.asyncio
async def test_the_timer_is_set_for_the_next_connection_to_close():
    with wire.serve(slowly) as url:
        async with client_of(url) as client:
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


async def test_a_response_has_the_headers_of_the_wire_when_they_are_requested():
    raw = [(b"ETag", b'"1"'), (b"X-Twice", b"a"), (b"X-Twice", b"b")]
    response = _connection.Response(200, SimpleNamespace(headers=raw))
    assert response.headers.get("etag") == '"1"'
    assert response.headers.get("x-twice") == "a, b"
    assert response.headers.get("nothing") is None
    assert response.headers.get("nothing", "") == ""
    assert response.headers.raw == raw


@pytest.mark.parametrize(
    ("was_idle", "received", "exc", "is_learned"),
    [
        (True, 0, httpx.ReadError("cut"), True),
        (True, 0, httpx.ReadTimeout("late"), False),
        (True, 1, httpx.ReadError("cut"), False),
        (False, 0, httpx.ReadError("cut"), False),
    ],
)
def test_an_idle_time_is_measured_from_a_reused_connection_that_ended_without_a_response(
    was_idle, received, exc, is_learned
):
    engine, learned = _engine.Engine(key=NO_KEY, idle=1, idle_seconds=4.0), []
    engine._idle_time = SimpleNamespace(was_closed=lambda *told: learned.append(told))
    engine._learn_from(SimpleNamespace(was_idle=was_idle, received=received, idled_for=2.5), exc)
    assert [after for after, _ in learned] == [2.5] * is_learned
    assert all(abs(now - time.monotonic()) < 60 for _, now in learned)


@pytest.mark.parametrize(("age", "seconds"), [(3.0, 1.0), (3.9, 0.1), (9.0, 0.0)])
def test_a_timer_closes_the_oldest_connection_when_its_time_has_passed(age, seconds):
    engine, timers = _engine.Engine(key=NO_KEY, idle=1, idle_seconds=4.0), []
    engine._idle.append(SimpleNamespace(age=lambda _: age))
    loop = SimpleNamespace(call_later=lambda *given, context: timers.append((*given, len(context))) or "timer")
    engine._set_timer(loop)
    ((after, function, of_engine, of_loop, context_values),) = timers
    assert after == pytest.approx(seconds)
    assert (function, of_engine(), of_loop, context_values) == (_engine._clear, engine, loop, 0)
    assert engine._timer == "timer"
    engine._idle.clear()


@pytest.mark.parametrize(
    ("exc", "of_engine", "of_others"),
    [
        (httpx.ReadError("cut"), True, True),
        (OSError(104, "reset"), True, True),
        (TimeoutError("of a signal handler"), False, True),
        (ValueError(), False, True),
        (KeyboardInterrupt(), False, False),
    ],
)
def test_whether_an_exception_may_be_that_of_a_transport(exc, of_engine, of_others):
    engine = _engine.Engine(key=NO_KEY, idle=1, idle_seconds=4.0)
    assert OverEngine(engine).may_have_raised(exc) is of_engine
    assert OverTransport(NO_KEY, doubles.Service([])).may_have_raised(exc) is of_others


async def test_a_connection_counts_its_traffic_and_passes_its_limits_on():
    given: list[object] = []

    class FakeWire:
        session = "the session"

        async def send(self, message, sent, seconds):
            given.append((message, sent, seconds))

        async def receive(self, seconds):
            given.append(seconds)
            return b"HTTP/1.1 204 No\r\n"

        def close(self):
            given.append("closed")

    traffic = _connection.Traffic()
    made = _connection.Connection(FakeWire(), traffic)
    for seconds in (7.0, 8.0):
        await made.send(b"abc", bool, seconds)
        made.new_answer()
        await made.read_on(seconds + 1)
        assert made.received == 17
    assert given == [(b"abc", bool, 7.0), 8.0, (b"abc", bool, 8.0), 9.0]
    assert (traffic.sent, traffic.received, traffic.closed) == (6, 34, 0)
    assert made.session_is_new
    assert (made.take_session(), made.session_is_new) == ("the session", False)
    made.close()
    made.close()
    assert given[4:] == ["closed", "closed"]
    assert traffic == _connection.Traffic(sent=6, received=34, closed=1)
    _connection.Connection(FakeWire(), traffic).close()  # before its first request
    assert traffic.closed == 2


@pytest.mark.parametrize(
    ("raised", "told", "text"),
    [
        (ConnectionRefusedError(111, "Connection refused"), httpx.ConnectError, "Connection refused"),
        (ConnectionResetError(104, ""), httpx.ConnectError, "ConnectionResetError"),
        (TooSlow(), httpx.ConnectTimeout, "TooSlow"),
    ],
)
def test_errors_of_the_system_are_reported_with_their_own_text(raised, told, text):
    with pytest.raises(told) as caught, _connection.CONNECTING:
        raise raised
    assert str(caught.value) == text


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


def test_a_connection_that_comes_back_to_a_closed_engine_is_closed():
    engine, late = engine_with(), FakeConnection()
    engine.close()
    engine.release(late)
    assert late.done == ["closed"]
    assert not engine._idle


def request_to(url: httpx.URL, target: bytes, headers=(), **extensions) -> Request:
    given = {"timeout": {}, "sent": bool, "enter": bool, "target": target} | extensions
    return Request("GET", url, head=Head(httpx.Headers(headers)), content=b"", extensions=given)


async def test_a_request_is_written_within_its_limit(monkeypatch):
    connection, given = FakeConnection(), []

    async def send(message: bytes, sent: object, seconds: float) -> None:
        given.append(seconds)
        raise httpx.WriteError("enough")

    connection.send = send
    connection.was_idle = False
    connection.was_refused = lambda _: False
    engine = engine_with(connection)
    limits = {"connect": 1.0, "write": 2.0, "read": 3.0}
    with pytest.raises(httpx.WriteError):
        await engine.handle_async_request(request_to(httpx.URL("http://h"), b"/", timeout=limits))
    assert given == [2.0]


async def test_a_connection_that_does_not_come_about_is_reported_with_its_reason(monkeypatch):
    closed: list[bool] = []
    engine, url = engine_with(), httpx.URL("http://h")

    class Talking:
        def is_silent(self) -> bool:
            return False

        def close(self) -> None:
            closed.append(True)

    async def talking(_: object) -> Talking:
        return Talking()

    async def never(_: object) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(engine, "_opened", talking)
    rule = "the server closed the connection, or sent something, before any request"
    with pytest.raises(httpx.ConnectError, match=f"^{rule}$"):
        await engine._connect(url, {"connect": 5.0})
    assert closed == [True]
    monkeypatch.setattr(engine, "_opened", never)
    with pytest.raises(httpx.ConnectTimeout, match=r"^no connection within the time limit$"):
        await engine._connect(url, {"connect": 0.001})


async def test_without_a_session_a_refused_handshake_is_not_tried_again(monkeypatch):
    tried: list[object] = []
    alert = ssl.SSLError(1, "[SSL: SSLV3_ALERT_HANDSHAKE_FAILURE] alert")

    async def connect(*_: object, session: object = None, **__: object) -> None:
        tried.append(session)
        raise alert

    async def addresses(*_: object) -> list[object]:
        return []

    engine = engine_with()
    monkeypatch.setattr(_engine, "connect", connect)
    monkeypatch.setattr(_engine, "alert_in", lambda _: "handshake failure")
    monkeypatch.setattr(engine._lookups, "addresses", addresses)
    monkeypatch.setattr(engine, "_context", lambda: "context")
    for session, expected in ((None, [None]), ("known", ["known", None])):
        engine._session = session
        with pytest.raises(ssl.SSLError):
            await engine._opened(httpx.URL("https://h"))
        assert tried == expected
        tried.clear()


async def test_the_engine_adds_the_key_on_the_wire_only():
    received: list[bytes] = []
    with wire.serve(wire.serve_each(wire.kept(received, wire.answer(b"[]")))) as url:
        origin = httpx.URL(url)
        engine = _engine.Engine(key=KeyHeader(origin, Secret("v")), idle=1, idle_seconds=4.0)
        limits = {"connect": 5.0, "write": 5.0, "read": 5.0}
        request = request_to(origin, b"/a?b", {"Host": "h", "A": "b"}, timeout=limits)
        response = await engine.handle_async_request(request)
        assert isinstance(response, httpx.Response)
        await response.aclose()
        engine.close()
    assert received == [b"GET /a?b HTTP/1.1\r\nHost: h\r\nA: b\r\nAPI_AUTH_KEY: v\r\n\r\n"]
    assert "API_AUTH_KEY" not in request.headers


async def test_a_lookup_for_which_there_is_no_thread_is_reported(monkeypatch):
    def begun(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_lookups, "start", begun)
    with pytest.raises(OSError, match=r"^\[Errno 11\] no thread could be started to look up the host name$"):
        await _lookups.Lookups().addresses("service.example", 443)


async def test_a_client_uses_no_proxy_of_the_environment(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    async with doubles.client(doubles.Service([])) as client:
        assert not client._session._over._client._mounts
        await client.get_settings()


async def test_another_transport_gets_the_time_limits_and_a_request_counts_as_sent_just_before_it():
    seen: list[object] = []

    async def answered(request: httpx.Request) -> httpx.Response:
        seen.append(request.extensions["timeout"])
        return httpx.Response(200)

    over = OverTransport(NO_KEY, httpx.MockTransport(answered))
    request = request_to(httpx.URL("https://service.example"), b"/a", timeout={"read": 7.0}, sent=seen.append)
    await over.send(request)
    assert seen == [False, True, {"read": 7.0}]
    with anyio.CancelScope() as scope:
        scope.cancel()
        await over.send(request)
    assert seen[3:] == [False]


def test_the_stock_transport_of_httpx_ignores_the_environment(monkeypatch):
    made = []
    monkeypatch.setattr(httpx, "AsyncHTTPTransport", lambda **options: made.append(options) or "transport")
    OverTransport(NO_KEY, None, "httpx")
    assert made == [{"trust_env": False}]


@pytest.mark.parametrize(
    ("url", "proxy", "asked", "has_tunnel"),
    [
        ("http://service.example", None, ("service.example", 80), False),
        ("https://service.example", None, ("service.example", 443), False),
        ("http://service.example:8080", None, ("service.example", 8080), False),
        ("http://service.example", Proxy("proxy", 3128, None), ("proxy", 3128), False),
        ("https://service.example", Proxy("proxy", 3128, None), ("proxy", 3128), True),
    ],
)
async def test_a_connection_leads_to_the_service_or_its_proxy(monkeypatch, url, proxy, asked, has_tunnel):
    """Also where the server ends the handshake because it cannot resume a session, and another is made."""
    refused, ways = ssl.SSLError(1, "refused"), []
    refused.reason = "TLSV1_ALERT_INTERNAL_ERROR"

    async def addresses(*nearest):
        ways.append(nearest)
        return ["the addresses"]

    async def connect(found, host, tls, *, through=None, session=None):
        ways.append((found, host, tls is not None, through is not None, session))
        if session is not None:
            raise refused
        return "wire"

    engine = _engine.Engine(key=NO_KEY, idle=1, idle_seconds=4.0, proxy=proxy, tls=ssl.create_default_context())
    engine._lookups = SimpleNamespace(addresses=addresses)
    engine._session = "session"
    monkeypatch.setattr(_engine, "connect", connect)
    assert await engine._opened(httpx.URL(url)) == "wire"
    way = ["the addresses"], "service.example", url.startswith("https"), has_tunnel
    assert ways == [asked, (*way, "session"), (*way, None)]
    assert (engine._session, engine._resumes) == (None, False)


def test_each_connection_that_is_opened_is_counted():
    engine = _engine.Engine(key=NO_KEY, idle=1, idle_seconds=4.0)
    for count in (1, 2, 3):
        engine._welcomed(SimpleNamespace(opened_within=0.1, on_readable=bool))
        assert engine.traffic.opened == count


def test_events_of_a_collected_engine_are_ignored():
    class Gone:
        pass

    held = Gone()
    gone, alive = weakref.ref(Gone()), weakref.ref(held)
    for engine, connection in ((gone, gone), (gone, alive), (alive, gone)):
        _engine._look_at(engine, connection)
    _engine._clear(gone, None)


@pytest.mark.parametrize(("lies_there", "told"), [("the alert", "SSLError"), ("nothing", "BrokenPipeError")])
async def test_a_tls_alert_is_reported_in_place_of_the_failed_send(lies_there, told):
    class Line:
        async def send(self, *_: object) -> None:
            raise BrokenPipeError(32, "Broken pipe")

        def must_not_be_refused(self) -> None:
            if lies_there == "the alert":
                raise ssl.SSLError(1, "refused")

    connection = _connection.Connection(Line(), _connection.Traffic())
    with pytest.raises(httpx.WriteError) as caught:
        await connection.send(b"x", bool, 1)
    assert type(caught.value.__cause__).__name__ == told


async def test_an_exception_of_a_signal_handler_during_a_send_propagates():
    class Line:
        async def send(self, *_: object) -> None:
            raise TimeoutError("alarm")

    with pytest.raises(TimeoutError, match="alarm"):
        await _connection.Connection(Line(), _connection.Traffic()).send(b"x", bool, 1)


@pytest.mark.asyncio
async def test_a_connection_that_the_server_closes_is_closed_at_once():
    """It used to stay half closed until the next request, which may be hours away."""
    script = Closing()
    with wire.serve(script) as url:
        async with client_of(url, idle_seconds=600) as client:
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
        with wire.serve(script) as url:
            async with client_of(url, idle_seconds=600) as client:
                await client.get_settings()
                assert client.snapshot().connections.idle == 1
                over.set()
                await doubles.until(lambda: client.snapshot().connections.idle == 0)

    run(main())


@pytest.mark.asyncio
async def test_events_of_a_busy_or_silent_connection_are_ignored():
    with wire.serve(slowly) as url:
        async with client_of(url) as client:
            await burst(client, 2)
            engine = engine_of(client)
            taken = engine._idle.pop()
            engine.look_at(taken)
            engine.look_at(engine._idle[0])
            assert repr(engine) == "<Engine: 1 idle>"
            assert taken.is_quiet()
            taken.close()


async def test_an_idle_time_of_zero_means_no_reuse():
    script = Counted()
    with wire.serve(script) as url:
        async with client_of(url, idle_seconds=0) as client:
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
    with wire.serve(script) as url:
        async with client_of(url) as client:
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
    with wire.serve(Closing()) as url:
        async with client_of(url) as client:
            await client.get_settings()
            idle_time = engine_of(client)._idle_time
            idle_time.was_closed(0.5, time.monotonic() - 100)
            assert idle_time.limit < 4
            aged(client, 60)
            await client.get_settings()
            assert idle_time.limit == 4


async def test_a_close_that_was_seen_earlier_shortens_the_idle_time_too():
    script = Closing()
    with wire.serve(script) as url:
        async with client_of(url) as client:
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

    with wire.serve(script) as url:
        async with client_of(url) as client:
            await client.get_settings()
            engine = engine_of(client)
            aged(client, 1)
            with pytest.raises(TransportError) as caught:
                await client.get_settings()
            assert caught.value.delivery == "unknown"
            assert engine._idle_time.limit == pytest.approx(0.5, abs=0.1)
    with wire.serve(lambda connection: connection.read_request()) as url:
        async with client_of(url) as client:
            with pytest.raises(TransportError):
                await client.get_settings()
            assert engine_of(client)._idle_time.limit == 4


async def test_the_oldest_connection_is_dropped_if_there_are_too_many():
    script = Closing()
    with wire.serve(script) as url:
        async with client_of(url) as client:
            engine = engine_of(client)
            engine._most_idle = 1
            await client.get_settings()
            aged(client, 1)
            engine._idle_time.was_closed(0.5, time.monotonic())
            await client.get_settings()
            assert repr(engine) == "<Engine: 1 idle>"
            assert engine._idle[0].age(time.monotonic()) < 0.9


# --- What counts against the limits


@pytest.mark.parametrize(
    "without_end",
    [b"X: " + b"y" * 1000 + b"\r\n", b"1;" + b"y" * 1000 + b"\r\nz\r\n"],
    ids=["trailers", "chunk extensions"],
)
async def test_trailers_and_chunk_extensions_around_a_body_count_against_its_limit(without_end):
    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.send(b"0\r\n" if without_end.startswith(b"X") else b"")
        while True:
            connection.send(without_end * 50)

    with wire.serve(script) as url:
        limits = BodyLimits(wire=500_000)
        async with client_of(url, limits=limits) as client:
            with anyio.fail_after(60), pytest.raises(DecodeError, match="larger than 500000 bytes on the wire"):
                await client.get_settings()


async def test_interim_responses_are_skipped():
    script = Counted(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", wire.answer(b"[]"))
    with wire.serve(script) as url:
        async with client_of(url) as client:
            assert len(await client.get_settings()) == 0


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000,
    ],
)
async def test_bytes_that_are_not_http_are_a_lost_response(answer):
    with wire.serve(Counted(answer)) as url:
        async with client_of(url, timeouts=Timeouts(read=1)) as client:
            with pytest.raises(TransportError, match=r"not valid HTTP/1\.1") as caught:
                await client.get_settings()
    assert caught.value.delivery == "unknown"


async def test_a_body_of_many_parts_is_read():
    parts = b"".join(b"1\r\n \r\n" for _ in range(600)) + b"2\r\n[]\r\n0\r\n\r\n"
    script = Counted(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", parts)
    with wire.serve(script) as url:
        async with client_of(url) as client:
            await client.get_settings()
            await client.get_settings()
    assert script.requests == [2]


async def test_a_cancelled_wait_closes_its_connection():
    script = wire.Silent()
    with wire.serve(script) as url:
        async with client_of(url) as client:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.get_settings)
                assert await anyio.to_thread.run_sync(script.arrived.wait, 5)
                tasks.cancel_scope.cancel()
            assert await anyio.to_thread.run_sync(script.closed.wait, 5)


async def test_libraries_that_mock_httpx_work():
    settings = "https://service.example/IntegratedPanelService/api/Settings"
    async with client_of("https://service.example") as client:
        with respx.mock:
            respx.get(settings).respond(json=[])
            assert len(await client.get_settings()) == 0
        with respx.mock(using="httpx") as router:
            router.get(settings).respond(json=[])
            assert len(await client.get_settings()) == 0


async def test_our_engine_is_used_again_after_the_mock_ends():
    script = Counted()
    with wire.serve(script) as url:
        async with client_of(url) as client:
            with respx.mock:
                respx.get(f"{url}/IntegratedPanelService/api/Settings").respond(json=[])
                await client.get_settings()
            await client.get_settings()
            assert repr(client._session.engine) == "<Engine: 1 idle>"
    assert script.requests == [1]


async def test_a_patched_transport_of_httpx_works(monkeypatch):
    async def answer(_transport: httpx.AsyncHTTPTransport, _request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=[])

    monkeypatch.setattr("httpx.AsyncHTTPTransport.handle_async_request", answer)
    async with client_of("https://service.example") as client:
        assert len(await client.get_settings()) == 0
