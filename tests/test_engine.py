"""The engine under httpx: connections kept and dropped, surplus answers, mocks of httpx's own engine."""

from __future__ import annotations

import threading

import anyio
import doubles
import httpx
import pytest
import respx
import wire

from sampling_async import RetryPolicy, SamplingClient, Timeouts, TransportError
from sampling_async._engine import Engine

pytestmark = pytest.mark.anyio


def client_of(url: str, **options) -> SamplingClient:
    once = RetryPolicy(max_attempts=1)
    return SamplingClient(url, **{"panel_guid": doubles.PANEL, "api_key": doubles.KEY, "retry": once} | options)


class Counted:
    """A script that answers settings, and counts connections and what was read on each."""

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


async def test_a_connection_is_used_again():
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
async def test_a_connection_that_the_server_closes_is_not(answer):
    script = Counted(answer)
    with wire.serve(script) as url:
        async with client_of(url) as client:
            await client.get_settings()
            await client.get_settings()
    assert script.requests == [1, 1]


STALE = wire.answer(b'[{"Name": "stale", "Description": "", "Value": ""}]')


async def test_a_surplus_answer_in_the_same_packet_is_nobodys():
    script = Counted(wire.answer(b"[]") + STALE)
    with wire.serve(script) as url:
        async with client_of(url) as client:
            for _ in range(3):
                assert len(await client.get_settings()) == 0
    assert script.requests == [1, 1, 1]


@pytest.mark.parametrize("after", [lambda connection: connection.send(STALE), lambda connection: None])
async def test_a_surplus_answer_or_end_that_comes_later_is_seen_before_the_next_request(after):
    """The second request of a connection is never sent into a dead one: a bulk invite would end unknown."""
    script = Counted(then=after)
    with wire.serve(script) as url:
        async with client_of(url) as client:
            for _ in range(3):
                assert len(await client.get_settings()) == 0
                await anyio.to_thread.run_sync(script.ended.wait)
                script.ended.clear()
                await anyio.sleep(0.005)  # on loopback, what was sent has come by now
    assert script.requests == [1, 1, 1]


def engine_of(client: SamplingClient) -> Engine:
    return client._session._http._transport._engine


def aged(client: SamplingClient, seconds: float, *connections: int) -> None:
    """Let unused connections, all or some, have been used last so many seconds earlier."""
    idle = engine_of(client)._idle
    for each in connections or range(len(idle)):
        idle[each].used_at -= seconds


async def test_a_connection_idle_for_long_is_not_used():
    script = Counted()
    with wire.serve(script) as url:
        async with client_of(url) as client:
            await client.get_settings()
            aged(client, 60)
            await client.get_settings()
    assert script.requests == [1, 1]


async def test_connections_that_grew_old_are_closed_as_others_come_back():
    script = Counted()
    with wire.serve(script) as url:
        async with client_of(url) as client:
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(client.get_settings)
            assert len(engine_of(client)._idle) > 1
            aged(client, 60)
            await client.get_settings()
            assert len(engine_of(client)._idle) == 1


async def test_an_old_connection_behind_a_young_one_is_closed_when_that_comes_back():
    with wire.serve(Counted()) as url:
        async with client_of(url) as client:
            async with anyio.create_task_group() as tasks:
                for _ in range(2):
                    tasks.start_soon(client.get_settings)
            aged(client, 60, 0)
            await client.get_settings()
            assert len(engine_of(client)._idle) == 1


async def test_no_more_connections_are_kept_than_asked_for():
    with wire.serve(Counted()) as url:
        async with client_of(url) as client:
            engine = client._session._http._transport._engine
            engine._most_idle = 0
            await client.get_settings()
            assert not engine._idle


async def test_interim_answers_are_passed_over():
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
async def test_what_is_not_http_is_a_lost_answer(answer):
    with wire.serve(Counted(answer)) as url:
        async with client_of(url, timeouts=Timeouts(read=1)) as client:
            with pytest.raises(TransportError, match="RemoteProtocolError") as caught:
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


async def test_a_wait_that_was_cancelled_closes_its_connection():
    arrived, closed = threading.Event(), threading.Event()

    def script(connection: wire.Connection) -> None:
        connection.read_request()
        arrived.set()
        assert connection.read_request() is None
        closed.set()

    with wire.serve(script) as url:
        async with client_of(url) as client:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.get_settings)
                assert await anyio.to_thread.run_sync(arrived.wait, 5)
                tasks.cancel_scope.cancel()
            assert await anyio.to_thread.run_sync(closed.wait, 5)


async def test_libraries_that_mock_httpx_work():
    settings = "https://service.example/IntegratedPanelService/api/Settings"
    async with client_of("https://service.example") as client:
        with respx.mock:
            respx.get(settings).respond(json=[])
            assert len(await client.get_settings()) == 0
        with respx.mock(using="httpx") as router:
            router.get(settings).respond(json=[])
            assert len(await client.get_settings()) == 0


async def test_when_the_mocking_is_over_it_is_our_engine_again():
    script = Counted()
    with wire.serve(script) as url:
        async with client_of(url) as client:
            with respx.mock:
                respx.get(f"{url}/IntegratedPanelService/api/Settings").respond(json=[])
                await client.get_settings()
            await client.get_settings()
            assert len(client._session._http._transport._engine._idle) == 1
    assert script.requests == [1]


async def test_a_patched_transport_of_httpx_works(monkeypatch):
    async def answer(_transport: httpx.AsyncHTTPTransport, _request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=[])

    monkeypatch.setattr("httpx.AsyncHTTPTransport.handle_async_request", answer)
    async with client_of("https://service.example") as client:
        assert len(await client.get_settings()) == 0
