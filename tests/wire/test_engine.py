"""The engine: what it sends and reads, what counts against limits, and mocks of httpx."""

from __future__ import annotations

import ssl
import time
import weakref
from types import SimpleNamespace

import anyio
import doubles
import httpx
import pytest
import respx
import wire
from wire_kit import NO_KEY, Counted, FakeConnection, client_of, client_served_by, engine_with

from sampling_async import BodyLimits, DecodeError, Timeouts, TransportError
from sampling_async._pacing.loops import while_alive
from sampling_async._wire import connection as _connection
from sampling_async._wire import engine as _engine
from sampling_async._wire import sockets as _lookups
from sampling_async._wire.address import KeyHeader, Proxy, Secret
from sampling_async._wire.bodies import Head, Request
from sampling_async._wire.clients import OverEngine, OverTransport
from sampling_async._wire.engine import IdleTime
from sampling_async._wire.reader import TooSlow


async def test_a_connection_is_reused():
    script = Counted()
    async with client_served_by(script) as client:
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
    async with client_served_by(script) as client:
        await client.get_settings()
        await client.get_settings()
    assert script.requests == [1, 1]


# --- Unused connections, closed in time


async def test_a_response_has_the_headers_of_the_wire_when_they_are_requested():
    raw = [(b"ETag", b'"1"'), (b"X-Twice", b"a"), (b"X-Twice", b"b")]
    response = _connection.Response(200, SimpleNamespace(headers=raw))
    assert response.headers.get("etag") == '"1"'
    assert response.headers.get("x-twice") == "a, b"
    assert response.headers.get("nothing") is None
    assert response.headers.get("nothing", "") == ""
    assert response.headers.raw == raw


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
    with pytest.raises(told) as caught, _connection.failing_as(httpx.ConnectError, httpx.ConnectTimeout):
        raise raised
    assert str(caught.value) == text


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


@pytest.mark.parametrize(("lies_there", "told"), [("the alert", "SSLError"), ("nothing", "BrokenPipeError")])
async def test_a_tls_alert_is_reported_in_place_of_the_failed_send(lies_there, told):
    class Line:
        async def send(self, *_: object) -> None:
            raise BrokenPipeError(32, "Broken pipe")

        def is_silent(self) -> None:
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
    async with client_served_by(Counted(answer), timeouts=Timeouts(read=1)) as client:
        with pytest.raises(TransportError, match=r"not valid HTTP/1\.1") as caught:
            await client.get_settings()
    assert caught.value.delivery == "unknown"


async def test_a_body_of_many_parts_is_read():
    parts = b"".join(b"1\r\n \r\n" for _ in range(600)) + b"2\r\n[]\r\n0\r\n\r\n"
    script = Counted(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", parts)
    async with client_served_by(script) as client:
        await client.get_settings()
        await client.get_settings()
    assert script.requests == [2]


async def test_a_cancelled_wait_closes_its_connection():
    script = wire.Silent()
    async with client_served_by(script) as client:
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
    ((after, function, clear, of_loop, context_values),) = timers
    assert after == pytest.approx(seconds)
    assert (function, clear(), of_loop, context_values) == (while_alive, engine.clear, loop, 0)
    assert engine._timer == "timer"
    engine._idle.clear()


def test_events_of_a_collected_engine_or_connection_are_ignored():
    class Gone:
        def clear(self) -> None:
            raise AssertionError

    while_alive(weakref.WeakMethod(Gone().clear))
    _engine.Engine(key=NO_KEY, idle=1, idle_seconds=4.0).look_at(weakref.ref(Gone()))


def idle(round_trip: float = 0.0, seconds: float = 4.0) -> IdleTime:
    made = IdleTime(seconds)
    made.opened_within(round_trip)
    return made


def test_the_idle_time_is_the_configured_one_at_first():
    assert IdleTime(4.0).limit == 4.0


@pytest.mark.parametrize(
    ("closed_after", "round_trip", "limit"),
    [
        (0.5, 0.0, 0.25),
        (0.5, 0.1, 0.25),
        (
            0.25,
            0.1,
            0.05,
        ),  # a request sent after 0.1 s would arrive too late at a server that closes after 0.25 s
        (0.2, 0.1, 0.0),
        (0.0, 0.0, 4.0),  # the server failed or was restarted: this says nothing about its idle time
        (0.09, 0.0, 4.0),
        (0.1, 0.0, 0.05),
        (60.0, 0.0, 4.0),
    ],
)
def test_a_close_shortens_the_idle_time_so_that_requests_arrive_in_time(closed_after, round_trip, limit):
    learned = idle(round_trip)
    learned.was_closed(closed_after, now=100.0)
    assert learned.limit == pytest.approx(limit)


def test_the_idle_time_follows_the_shortest_of_the_latest_closes():
    learned = idle()
    for after in (1.0, 0.4, 3.0):
        learned.was_closed(after, now=1.0)
    assert learned.limit == 0.2
    for _ in range(16):
        learned.was_closed(2.0, now=2.0)
    assert learned.limit == 1.0


def test_the_fastest_connect_is_taken_as_the_round_trip_time():
    learned = idle(0.1)
    learned.opened_within(3.0)  # a packet was lost
    learned.was_closed(0.5, now=1.0)
    assert learned.limit == 0.25


def test_a_connection_that_outlives_the_idle_time_restores_it_if_none_closed_meanwhile():
    learned = idle()
    learned.was_closed(0.5, now=10.0)
    learned.was_kept(since=9.0)
    assert learned.limit == 0.25
    learned.was_kept(since=11.0)
    assert learned.limit == 4.0
    learned.was_closed(1.0, now=20.0)
    assert learned.limit == 0.5


def test_a_connection_that_is_idle_since_the_close_of_another_one_says_nothing():
    learned = idle()
    learned.was_closed(1.0, now=100.0)
    learned.was_kept(since=100.0)
    assert learned.limit == 0.5
    learned.was_kept(since=100.1)
    assert learned.limit == 4.0
