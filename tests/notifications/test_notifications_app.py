"""The inbox as an ASGI application: mounted, alone, and under senders that do not behave."""

from __future__ import annotations

import socket
import threading
import warnings
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import urlopen

import anyio
import anyio.lowlevel
import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from store_kit import COMPLETION, PEER, SECRET, encoded, facts_of, wait_for_bodies

from sampling_async.notifications import Inbox, Kind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture
def inbox(tmp_path):
    return Inbox(tmp_path / "n.db", secrets=SECRET)


def test_two_tests_with_a_test_client_work_with_one_inbox(inbox):
    @asynccontextmanager
    async def lifespan(_app: object) -> AsyncIterator[None]:
        async with inbox:
            yield

    app = Starlette(lifespan=lifespan, routes=[Mount("/events", app=inbox.app)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it deprecates httpx
        from starlette.testclient import TestClient  # noqa: PLC0415

        for number in (1, 2):
            with TestClient(app) as client:
                fields = {**COMPLETION, "WaveId": number}
                assert client.post(f"/events{inbox.path(Kind.COMPLETION)}", json=fields).status_code == 200
    assert anyio.run(facts_of, inbox)[1].notification.wave_id == 2


@pytest.mark.parametrize("prefix", ["", "/events"])
def test_the_access_log_of_the_server_shows_neither_secrets_nor_members(inbox, prefix, caplog):
    app = Starlette(routes=[Mount(prefix, app=inbox.app)]) if prefix else inbox.app
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
    caplog.set_level("INFO", logger="uvicorn.access")
    with socket.create_server(("127.0.0.1", 0)) as listener, running(server, listener) as url:
        for path in (
            f"/completion/{SECRET}",
            f"/completion/{SECRET}/",
            f"/completion/{SECRET}/x",
            f"/{SECRET}",
        ):
            try:
                urlopen(f"{url}{prefix}{path}?UniqueCode=m-1").close()
            except HTTPError as refused:
                refused.close()
    shown = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert len(shown) == 4
    assert f'"GET {prefix}/completion/hidden HTTP/1.1" 503' in shown[0]
    assert not any(SECRET in line or "m-1" in line for line in shown)


@contextmanager
def running(server: uvicorn.Server, listener: socket.socket) -> Iterator[str]:
    """Serve from a thread, and yield the URL."""
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def asking(app) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, client=(PEER, 1234))
    return httpx.AsyncClient(transport=transport, base_url="http://partner.example")


@pytest.mark.parametrize("prefix", ["", "/events", "/a/b"])
async def test_it_can_be_mounted_anywhere(inbox, prefix):
    app = Starlette(routes=[Mount(prefix, app=inbox.app)]) if prefix else inbox.app
    async with inbox, asking(app) as http:
        for kind, url in inbox.urls(f"http://partner.example{prefix}").items():
            assert (await http.post(url, content=b"?")).status_code == 200, kind
        wrong = await http.post(f"{prefix}/completion/wrong", content=b"?")
        assert (wrong.status_code, wrong.text) == (404, "Not found")
        for path in ("/", "/completion", f"/completion/{SECRET}/more", f"/other/{SECRET}", f"/{SECRET}"):
            assert (await http.post(prefix + path, content=b"?")).status_code == 404, path
    assert len(await facts_of(inbox)) == 5


async def test_get_and_post_are_taken_and_nothing_else(inbox):
    async with inbox, asking(inbox.app) as http:
        url = inbox.path(Kind.QUOTA_STATUS)
        query = "QuotaID=7&IsLive=false&UpdateDateTimeUTC=2026-11-22+10:00:00"
        assert (await http.get(f"{url}?{query}")).status_code == 200
        for method in ("PUT", "DELETE", "OPTIONS", "HEAD"):
            assert (await http.request(method, url)).status_code == 405
    (fact,) = await facts_of(inbox)
    assert fact.notification.quota_id == 7


async def test_a_closed_inbox_asks_to_come_again(inbox):
    async with asking(inbox.app) as http:
        response = await http.post(inbox.path(Kind.COMPLETION), content=b"?")
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")


async def test_the_peer_and_its_headers_are_stored(inbox):
    async with inbox, asking(inbox.app) as http:
        await http.post(inbox.path(Kind.COMPLETION), content=encoded(COMPLETION), headers={"X-Request-Id": "7"})
        peer, headers = inbox.store._open.execute("SELECT peer, headers FROM receipts").fetchone()
    assert peer == PEER
    assert '["x-request-id", "7"]' in headers


async def call(app, messages, *, path=f"/completion/{SECRET}", method="POST"):
    """Call an ASGI application with these messages, and return what it sends."""
    sent = []

    async def receive():
        if not messages:
            await anyio.sleep_forever()
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    await app(http_scope(path=path, method=method), receive, send)
    return sent


def http_scope(*, path=f"/completion/{SECRET}", method="POST"):
    return {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", "client": None}


def part(body: bytes, *, more: bool):
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_comes_in_parts(inbox):
    async with inbox:
        body = encoded(COMPLETION)
        sent = await call(inbox.app, [part(body[:9], more=True), part(body[9:], more=False)])
        assert sent[0]["status"] == 200
    assert [fact.kind for fact in await facts_of(inbox)] == ["completion"]


async def test_a_body_without_end_is_refused(inbox):
    async with inbox:
        endless = [part(b"x" * 600_000, more=True)] * 3
        sent = await call(inbox.app, endless)
        assert sent[0]["status"] == 413
        assert len(endless) == 1  # it is not read to its end


async def test_a_sender_that_goes_away_leaves_nothing(inbox):
    async with inbox:
        assert await call(inbox.app, [part(b"x", more=True), {"type": "http.disconnect"}]) == []
    assert await facts_of(inbox) == []


@pytest.mark.parametrize("came", [[], [part(b"x", more=True)]], ids=["nothing", "a-part"])
async def test_a_slow_sender_is_not_waited_for(inbox, monkeypatch, came):
    wait_for_bodies(monkeypatch, 0.01)
    async with inbox:
        sent = await call(inbox.app, [*came])
        assert sent[0]["status"] == 408


@pytest.mark.parametrize("waits", [1, 2, 3])
async def test_a_body_that_comes_after_its_head_is_waited_for(inbox, waits):
    sent = []

    async def receive():
        for _ in range(waits):
            await anyio.sleep(0.001)
        return part(encoded(COMPLETION), more=False)

    async def send(message):
        sent.append(message)

    async with inbox:
        await inbox.app(http_scope(), receive, send)
    assert sent[0]["status"] == 200
    assert [fact.kind for fact in await facts_of(inbox)] == ["completion"]


@pytest.mark.parametrize("waits", [0, 1, 2])
async def test_what_the_server_raises_while_the_body_is_read_is_raised(inbox, waits):
    async def receive():
        for _ in range(waits):
            await anyio.lowlevel.checkpoint()
        raise LookupError

    async with inbox:
        with pytest.raises(LookupError):
            await inbox.app(http_scope(), receive, None)


async def test_a_request_is_cancelled_while_its_body_is_waited_for(inbox):
    seen = []

    async def receive():
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):  # a server may have something to await yet
                await anyio.sleep(0.001)
            seen.append("cancelled")

    async with inbox:
        with anyio.move_on_after(0.005):
            await inbox.app(http_scope(), receive, None)
    assert seen == ["cancelled"]
    assert await facts_of(inbox) == []


async def test_nothing_is_read_for_a_wrong_secret(inbox):
    async with inbox:
        messages = [part(b"x", more=False)]
        sent = await call(inbox.app, messages, path="/completion/wrong")
        assert sent[0]["status"] == 404
        assert len(messages) == 1


async def test_other_protocols_are_answered(inbox):
    sent = []

    async def send(message):
        sent.append(message["type"])

    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive():
        return messages.pop(0)

    await inbox.app({"type": "lifespan"}, receive, send)
    await inbox.app({"type": "websocket"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]
