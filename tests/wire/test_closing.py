"""Cancelled calls and closed clients: what ends, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import anyio
import anyio.lowlevel
import doubles
import httpcore
import httpx
import pytest
import wire
from wire_kit import ONCE, client_of

from sampling_async import ClientClosedError, OutagePolicy, RetryPolicy, TransportError


@pytest.mark.asyncio
@pytest.mark.parametrize("warm", [False, True])
async def test_a_client_works_after_its_task_was_cancelled_at_any_tick(warm):
    """With the cancellation of asyncio itself; for that of scopes see test_sweeps."""
    with wire.serve(wire.serve_each(wire.bulk_answer)) as url:
        client, ticks, finished = client_of(url, max_concurrency=1), 0, False
        while not finished:
            if not warm:
                await client.aclose()
                client = client_of(url, max_concurrency=1)
            task = asyncio.ensure_future(client.bulk_invite("m", [1, 2]))
            for _ in range(ticks):
                await asyncio.sleep(0)
            finished = task.done()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            result = await client.bulk_invite("m", [1, 2])
            assert len(result.rejected) == 2, (ticks, result[0].error)
            assert (client._gate.running, client._gate.waiting, len(client._session._blocks)) == (0, 0, 0)
            ticks += 1
        assert ticks > 5
        await client.aclose()


async def test_closing_from_within_an_attempt_does_not_hang(monkeypatch):
    monkeypatch.setattr("sampling_async._wire.session._CLOSING_SECONDS", 0.02)

    async def handler(request: httpx.Request) -> httpx.Response:
        with anyio.CancelScope(shield=True):
            await client.aclose()
        return httpx.Response(200, json=[])

    client = doubles.client(handler, retry=ONCE)
    with anyio.fail_after(60), contextlib.suppress(ClientClosedError):
        await client.get_settings()
    assert "closed" in repr(client)


async def test_closing_waits_for_the_calls_it_ends():
    ended = []

    async def handler(request: httpx.Request) -> httpx.Response:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.005)
            ended.append(request)

    client = doubles.client(handler, retry=ONCE)
    async with anyio.create_task_group() as tasks:

        async def call() -> None:
            with pytest.raises(ClientClosedError):
                await client.get_settings()

        tasks.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        await client.aclose()
        assert len(ended) == 1


class SendingTwice(httpx.AsyncBaseTransport):
    """A transport that repeats a request after an error, as the usual packages for that do."""

    def __init__(self) -> None:
        self.inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        with contextlib.suppress(httpx.TransportError):
            return await self.inner.handle_async_request(request)
        return await self.inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self.inner.aclose()


@pytest.mark.parametrize("is_client", [True, False])
async def test_a_transport_that_repeats_a_request_does_not_hide_that_it_was_sent(is_client):
    """The first try arrives, and the second finds nobody."""
    arrived: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def lose() -> None:
        connection, _ = listener.accept()
        arrived.append(connection.recv(2**16))
        listener.close()
        connection.close()

    thread = threading.Thread(target=lose)
    thread.start()
    given = httpx.AsyncClient(transport=SendingTwice()) if is_client else SendingTwice()
    options = {"http_client" if is_client else "transport": given, "outage": OutagePolicy(patience=0)}
    async with client_of(f"http://127.0.0.1:{listener.getsockname()[1]}", **options) as client:
        result = await client.bulk_invite("m", [1])
    await given.aclose()
    thread.join()
    assert len(arrived) == 1
    assert (result[0].status, result.resendable()) == ("unknown", ())


class ForeignError(Exception):
    """An exception of another HTTP library under its adapter for httpx."""


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        (None, "not_sent"),
        (httpcore.ConnectError("refused"), "unknown"),  # of another request, as it did not report this one
        (OSError(), "not_sent"),
        (ForeignError(), "unknown"),
    ],
)
async def test_not_sent_is_believed_only_from_known_transports(cause, status):
    """Adapters of aiohttp and reqwest report a failed connect even if the connection is lost later."""

    def lose(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no connection") from cause

    async with doubles.client(lose, retry=RetryPolicy(max_attempts=1)) as client:
        result = await client.bulk_invite("m", [1])
    assert result[0].status == status


@pytest.mark.parametrize(
    ("failure", "delivery"), [(httpx.ConnectError("refused"), "not_sent"), (httpx.ReadError("cut"), "unknown")]
)
async def test_closing_ends_a_backoff(failure, delivery):
    client = doubles.client(doubles.Service(failure), sleep=lambda _: anyio.sleep_forever())
    async with anyio.create_task_group() as tasks:

        async def call() -> None:
            with pytest.raises(ClientClosedError) as caught:
                await client.get_settings()
            assert caught.value.delivery == delivery

        tasks.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        await client.aclose()


async def test_work_that_begins_after_closing_is_interrupted_at_once():
    client = doubles.client(doubles.Service([]))
    await client.aclose()
    with client._session.until_closed(60) as scope:
        await anyio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_transport_is_closed_with_its_client():
    class Counted(httpx.MockTransport):
        closed = 0

        async def aclose(self) -> None:
            self.closed += 1

    transport = Counted(doubles.Service([]))
    async with doubles.client(doubles.Service([]), transport=transport) as client:
        await client.get_settings()
        assert transport.closed == 0
    assert transport.closed == 1


def test_a_transport_of_another_event_loop_is_left_alone():
    class Bound(httpx.MockTransport):
        async def aclose(self) -> None:
            pytest.fail("its connections are gone with their loop")

    client = doubles.client(doubles.Service([]), transport=Bound(doubles.Service([])))
    anyio.run(client.get_settings)
    anyio.run(client.aclose)
    assert "closed" in repr(client)


async def test_the_text_of_a_foreign_transport_is_not_repeated():
    failure = httpx.ConnectError(f"no way to https://service.example/m/Invites with {doubles.KEY}")
    async with doubles.client(doubles.Service(failure), retry=ONCE) as client:
        with pytest.raises(TransportError) as caught:
            await client.get_settings()
    assert str(caught.value) == "get_settings: no connection (ConnectError)"
