"""One attempt: the key, the origin, and what is known about a failure."""

from __future__ import annotations

import contextlib
import logging
import pickle
import traceback

import anyio
import anyio.lowlevel
import doubles
import httpx
import pytest
import wire
from wire import free_port
from wire_kit import ONCE, client_of, client_served_by

from sampling_async import (
    ClientClosedError,
    ForbiddenError,
    InvalidRequestError,
    SamplingClient,
    Timeouts,
    TransportError,
    TransportTimeoutError,
)
from sampling_async._protocol.requests import get_settings
from sampling_async._wire.bodies import Head, Request
from sampling_async._wire.session import Track

# --- The key


@pytest.mark.parametrize(
    "broken",
    [
        {"api_key": f"{doubles.KEY}\n"},
        {"api_key": f"{doubles.KEY}0"},
        {"panel_guid": "x"},
        {"max_concurrency": 0},
        {"url": "ftp://x"},
    ],
)
def test_a_failed_construction_shows_no_key(broken, monkeypatch):
    monkeypatch.setenv("SAMPLING_BASE_URL", broken.get("url", "https://service.example"))
    monkeypatch.setenv("SAMPLING_PANEL_GUID", broken.get("panel_guid", doubles.PANEL))
    monkeypatch.setenv("SAMPLING_API_KEY", broken.get("api_key", doubles.KEY))
    with pytest.raises(InvalidRequestError) as caught:
        SamplingClient.from_env(max_concurrency=broken.get("max_concurrency", 8))
    trace = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    ours = [str(frame.locals) for frame in trace.stack if "sampling_async" in frame.filename]
    assert ours
    assert doubles.KEY not in "".join(ours)


async def test_a_response_that_contains_the_key_is_not_shown():
    body = f"unknown key {doubles.KEY}, {doubles.KEY.replace('-', '').upper()}"
    async with doubles.client(doubles.Service(httpx.Response(403, text=body))) as client:
        with pytest.raises(ForbiddenError) as caught:
            await client.get_settings()
    assert caught.value.body_excerpt == "unknown key <hidden>, <hidden>"


async def test_the_key_goes_to_the_configured_origin_only():
    seen = []

    async def handler(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.host, request.headers.get("API_AUTH_KEY")))
        return httpx.Response(200)

    async with doubles.client(handler) as client:
        for url in (
            "https://service.example/a",
            "https://service.example:444/",
            "http://service.example/",
            "https://other.example/",
        ):
            head = Head(httpx.Headers())
            extensions = {"sent": bool, "enter": bool, "timeout": {}, "target": b"/"}
            request = Request("GET", httpx.URL(url), head=head, content=b"", extensions=extensions)
            await client._session._over.send(request)
    key = doubles.KEY
    assert [value for _, value in seen] == [key, None, None, None]


async def test_redirects_are_not_followed_and_cookies_not_kept():
    service = doubles.Service(
        lambda _: httpx.Response(302, headers={"Location": "https://evil.example/", "Set-Cookie": "a=1"}),
        [],
    )
    async with doubles.client(service) as client:
        with pytest.raises(Exception, match="answered 302"):
            await client.get_settings()
        await client.get_settings()
    assert [request.url.host for request in service.requests] == ["service.example"] * 2
    assert "cookie" not in service.requests[1].headers


def everything_shown(error: BaseException, client: SamplingClient) -> str:
    trace = traceback.TracebackException.from_exception(error, capture_locals=True)
    parts = ["".join(trace.format()), repr(error), str(vars(error)), repr(client), str(vars(client))]
    chain, seen = error, []
    while chain is not None:
        seen.append(repr(getattr(chain, "request", None)))
        chain = chain.__cause__ or chain.__context__
    with contextlib.suppress(Exception):
        parts.append(str(pickle.dumps(error)))
    return "\n".join(parts + seen)


def script_of(fault: str):
    def script(connection: wire.Connection) -> None:
        connection.read_request()
        match fault:
            case "reset":
                connection.reset()
            case "close":
                pass
            case "silence":
                connection.read_request()
            case "garbage":
                connection.send(b"SSH-2.0-OpenSSH\r\n")
            case "html":
                connection.send(wire.answer(b"<html>", "502 Bad Gateway"))
            case "cut":
                connection.send(wire.answer(b"{" + b" " * 50)[:-20])
            case "unreadable":
                connection.send(wire.answer(b"{}"))

    return script


@pytest.mark.parametrize("fault", ["reset", "close", "silence", "garbage", "html", "cut", "unreadable"])
async def test_no_failure_shows_the_key_or_the_member(fault, caplog):
    caplog.set_level(logging.DEBUG)
    async with client_served_by(script_of(fault), timeouts=Timeouts(read=0.05)) as client:
        with pytest.raises(Exception) as caught:  # noqa: PT011  each fault has its own
            await client.generate_invite("member-canary", 5)
        shown = everything_shown(caught.value, client)
    assert doubles.KEY not in shown + caplog.text
    assert "member-canary" not in caplog.text + str(caught.value)
    assert caught.value.__context__ is None
    assert (caught.value.delivery, caught.value.endpoint) == ("unknown", "generate_invite")


async def test_a_cancelled_call_shows_no_key():
    async with client_served_by(script_of("silence")) as client:
        caught = None
        with anyio.move_on_after(0.05):
            try:
                await client.get_settings()
            except BaseException as exc:
                caught = exc
                raise
        shown = everything_shown(caught, client)
        assert not [line for line in shown.splitlines() if doubles.KEY in line]


class OverHttpx(httpx.AsyncBaseTransport):
    """A transport that uses an httpx client, like those with a cache."""

    def __init__(self, service: doubles.Service) -> None:
        self._client = httpx.AsyncClient(transport=httpx.MockTransport(service))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._client.send(request)


@pytest.mark.parametrize("transport", [httpx.MockTransport, OverHttpx])
async def test_lines_of_httpx_about_us_do_not_reach_the_log(caplog, transport):
    caplog.set_level(logging.DEBUG)
    service = doubles.Service(doubles.invite(5))
    async with doubles.client(service, transport=transport(service)) as client:
        await client.generate_invite("member-canary", 5)
    names = {record.name for record in caplog.records}
    assert "httpx" not in names
    assert "generate_invite" in caplog.text
    assert "member-canary" not in caplog.text


async def test_lines_of_httpx_about_others_are_logged(caplog):
    caplog.set_level(logging.INFO)
    async with (
        doubles.client(doubles.Service([])) as client,
        httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200))) as theirs,
    ):
        await client.get_settings()
        await theirs.get("https://theirs.example/page")
    assert "https://theirs.example/page" in caplog.text
    assert "service.example" not in caplog.text


# --- Failures, and what is known about them


async def test_a_refused_connection_was_never_sent():
    port = free_port()
    async with client_of(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(TransportError) as caught:
            await client.get_settings()
    error = caught.value
    assert (type(error), error.delivery, error.permanent) == (TransportError, "not_sent", False)
    assert str(error).endswith(f"(ConnectError: Connection refused), on the way to 127.0.0.1:{port}")


async def test_any_exception_of_a_transport_becomes_one_of_this_package():
    async def handler(request: httpx.Request) -> httpx.Response:
        raise RuntimeError("a bug with member-canary in it")

    async with doubles.client(handler, retry=ONCE) as client:
        with pytest.raises(
            TransportError, match=r"raised RuntimeError when the request may have been sent$"
        ) as caught:
            await client.get_settings()
    assert caught.value.delivery == "unknown"


# --- Bodies


async def test_the_path_of_the_address_comes_before_that_of_the_call():
    service = doubles.Service([])
    async with client_of("https://service.example/BOX/", transport=httpx.MockTransport(service)) as client:
        await client.get_settings()
    assert service.requests[0].url.path == "/BOX/IntegratedPanelService/api/Settings"


async def test_a_request_that_timed_out_in_a_pool_was_never_sent():
    async with doubles.client(doubles.Service(httpx.PoolTimeout("full")), retry=ONCE) as client:
        with pytest.raises(TransportTimeoutError) as caught:
            await client.get_settings()
    assert caught.value.delivery == "not_sent"


async def test_a_request_has_these_headers_and_no_others():
    received: list[bytes] = []
    async with client_served_by(wire.serve_each(wire.kept(received, wire.answer(b"[]")))) as client:
        await client.get_settings()
        await client.bulk_invite("m1", [7])
    names = [
        [line.partition(b":")[0] for line in request.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]]
        for request in received
    ]
    common = [b"Host", b"Accept", b"Accept-Encoding", b"User-Agent"]
    assert names[0] == [*common, b"API_AUTH_KEY"]
    assert names[1] == [*common, b"Content-Type", b"Content-Length", b"API_AUTH_KEY"]


async def test_another_transport_gets_all_limits_of_httpx():
    service = doubles.Service([])
    async with client_of(
        "https://service.example",
        transport=httpx.MockTransport(service),
        timeouts=Timeouts(connect=3.0, write=4.0),
    ) as client:
        await client.get_settings()
        await client.bulk_invite("m1", [7])
    limits = [request.extensions["timeout"] for request in service.requests]
    assert [sorted(each) for each in limits] == [["connect", "pool", "read", "write"]] * 2
    assert {(each["connect"], each["pool"], each["write"]) for each in limits} == {(3.0, 3.0, 4.0)}
    assert service.requests[1].headers["Content-Type"] == "application/json"


async def test_a_request_reported_as_not_sent_is_never_sent():
    """A user who read that a request was not sent may send it again."""
    async with client_served_by(wire.serve_each(lambda _: wire.answer(b"[]"))) as client:
        track = Track(outcomes_delivered=True)
        call = get_settings(doubles.PANEL)
        with pytest.raises(ClientClosedError, match="has ended"):
            await client._session.attempt(call, track)
        assert track.delivery == "not_sent"
