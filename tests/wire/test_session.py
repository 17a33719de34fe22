"""One attempt: the key, the origin, limits, and what is known about a failure."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import logging
import pickle
import re
import socket
import ssl
import time
import traceback
import zlib
from pathlib import Path
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import doubles
import httpcore
import httpx
import pytest
import trustme
import wire
from ports import free_port

from sampling_async import (
    BodyLimits,
    ClientClosedError,
    DecodeError,
    ForbiddenError,
    InvalidRequestError,
    RetryPolicy,
    SamplingClient,
    Timeouts,
    TransportError,
    TransportTimeoutError,
    UnexpectedStatusError,
)
from sampling_async._protocol.requests import get_settings
from sampling_async._wire import bodies as _bodies
from sampling_async._wire import session as _session
from sampling_async._wire.bodies import Head, LimitedBody, Request
from sampling_async._wire.session import Track

ONCE = RetryPolicy(max_attempts=1)


def client_of(url: str, **options) -> SamplingClient:
    return SamplingClient(url, **{"panel_guid": doubles.PANEL, "api_key": doubles.KEY, "retry": ONCE} | options)


# --- The key


@pytest.mark.parametrize(
    "broken", [{"api_key": f"{doubles.KEY}\n"}, {"panel_guid": "x"}, {"max_concurrency": 0}, {"url": "ftp://x"}]
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
    with wire.serve(script_of(fault)) as url:
        async with client_of(url, timeouts=Timeouts(read=0.05)) as client:
            with pytest.raises(Exception) as caught:  # noqa: PT011  each fault has its own
                await client.generate_invite("member-canary", 5)
            shown = everything_shown(caught.value, client)
    assert doubles.KEY not in shown + caplog.text
    assert "member-canary" not in caplog.text + str(caught.value)
    assert caught.value.__context__ is None
    assert (caught.value.delivery, caught.value.endpoint) == ("unknown", "generate_invite")


async def test_a_cancelled_call_shows_no_key():
    with wire.serve(script_of("silence")) as url:
        async with client_of(url) as client:
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


async def failure(url: str, **options) -> Exception:
    async with client_of(url, **options) as client:
        with pytest.raises((TransportError, DecodeError)) as caught:
            await client.get_settings()
    return caught.value


async def test_a_refused_connection_was_never_sent():
    port = free_port()
    error = await failure(f"http://127.0.0.1:{port}")
    assert (type(error), error.delivery, error.permanent) == (TransportError, "not_sent", False)
    assert str(error).endswith(f"(ConnectError: Connection refused), on the way to 127.0.0.1:{port}")


async def test_a_host_that_does_not_exist_was_never_sent():
    assert (await failure("https://nowhere.invalid:1")).delivery == "not_sent"


async def test_a_request_whose_connection_does_not_open_was_never_sent():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        fillers = []
        for _ in range(8):  # once the queue is full, the kernel drops packets
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
            fillers.append(filler)
        error = await failure(
            f"http://127.0.0.1:{full.getsockname()[1]}", timeouts=Timeouts(connect=0.1, read=0.1)
        )
        for filler in fillers:
            filler.close()
    assert (type(error), error.delivery) == (TransportTimeoutError, "not_sent")


@pytest.mark.parametrize("names", [["other.example"], ["localhost"]])
async def test_a_refused_certificate_is_permanent(names, monkeypatch):
    authority, stranger = trustme.CA(), trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (stranger if names == ["localhost"] else authority).issue_cert(*names).configure_cert(server)
    with authority.cert_pem.tempfile() as trusted, wire.serve(script_of("close"), tls=server) as url:
        monkeypatch.setenv("SSL_CERT_FILE", trusted)
        error = await failure(url, retry=RetryPolicy())
    assert (error.delivery, error.permanent, error.attempts) == ("not_sent", True, 1)
    assert "certificate was refused" in str(error)


async def test_https_works(monkeypatch):
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    script = wire.serve_each(lambda _: wire.answer(b"[]"))
    with authority.cert_pem.tempfile() as trusted, wire.serve(script, tls=server) as url:
        monkeypatch.setenv("SSL_CERT_FILE", trusted)
        async with client_of(url) as client:
            assert len(await client.get_settings()) == 0


@pytest.mark.parametrize("fault", ["reset", "close", "garbage", "cut"])
async def test_a_cut_response_leaves_the_effect_unknown(fault):
    with wire.serve(script_of(fault)) as url:
        error = await failure(url)
    assert (type(error), error.delivery) == (TransportError, "unknown")


async def test_silence_ends_at_the_read_limit():
    with wire.serve(script_of("silence")) as url:
        error = await failure(url, timeouts=Timeouts(read=0.02))
    assert (type(error), error.delivery) == (TransportTimeoutError, "unknown")


async def test_a_slow_drip_ends_at_the_wall_limit():
    def drip(connection: wire.Connection) -> None:
        connection.read_request()
        for byte in wire.answer(b"[" + b" " * 1000 + b"]"):
            connection.send(bytes([byte]))
            time.sleep(0.005)

    with wire.serve(drip) as url:
        error = await failure(url, timeouts=Timeouts(wall=0.1))
    assert (type(error), error.delivery) == (TransportTimeoutError, "unknown")
    assert "within 0.1 s: the wall limit" in str(error)


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


async def read(response: httpx.Response | bytes, **limits) -> object:
    if isinstance(response, httpx.Response):
        async with doubles.client(lambda _: response, retry=ONCE, limits=BodyLimits(**limits)) as client:
            return await client.get_settings()
    with wire.serve(wire.serve_each(lambda _: response)) as url:
        async with client_of(url, limits=BodyLimits(**limits)) as client:
            return await client.get_settings()


SETTINGS = json.dumps([{"Name": "n", "Description": "", "Value": "v" * 500}]).encode()


def zipped(body: bytes) -> bytes:
    return wire.answer(gzip.compress(body), "200 OK", "Content-Encoding: gzip")


async def test_a_gzip_body_is_read():
    assert len(await read(zipped(SETTINGS))) == 1


async def test_a_gzip_body_of_several_members_is_read():
    body = gzip.compress(SETTINGS[:100]) + gzip.compress(SETTINGS[100:])
    assert len(await read(wire.answer(body, "200 OK", "Content-Encoding: gzip"))) == 1


@pytest.mark.parametrize("padding", [b"\0", b"\0" * 3000, b"\r\n", b"\n", b"\0\r\n\0"])
async def test_padding_after_a_gzip_body_is_ignored(padding):
    assert (
        len(await read(wire.answer(gzip.compress(SETTINGS) + padding, "200 OK", "Content-Encoding: gzip"))) == 1
    )
    members = gzip.compress(SETTINGS[:100]) + padding + gzip.compress(SETTINGS[100:])
    assert len(await read(wire.answer(members, "200 OK", "Content-Encoding: gzip"))) == 1


async def test_padding_counts_as_bytes_on_the_wire():
    with pytest.raises(DecodeError, match="larger than 1000 bytes on the wire"):
        await read(
            wire.answer(gzip.compress(SETTINGS) + bytes(1000), "200 OK", "Content-Encoding: gzip"), wire=1000
        )


@pytest.mark.parametrize(
    "encoding",
    ["utf-8", "UTF-8", "utf8", "none", "binary", "charset=utf-8", "identity", "", ",", "identity, utf-8", "br"],
)
@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b" \r\n" * 3])
async def test_an_encoding_that_is_none_is_ignored_if_the_body_is_json(encoding, before):
    answer = wire.answer(before + SETTINGS, "200 OK", f"Content-Encoding: {encoding}")
    assert (await read(answer))[0].value == "v" * 500
    headers = {"Content-Encoding": encoding}
    mocked = httpx.Response(200, stream=httpx.ByteStream(before + SETTINGS), headers=headers)
    assert (await read(mocked))[0].value == "v" * 500


@pytest.mark.parametrize(
    "encoding", ["gzip", "x-gzip", "GZIP", "gzip, utf-8", "utf-8,gzip", "identity, gzip", "gzip,"]
)
async def test_gzip_is_read_whatever_else_is_named_beside_it(encoding):
    answer = wire.answer(gzip.compress(SETTINGS), "200 OK", f"Content-Encoding: {encoding}")
    assert (await read(answer))[0].value == "v" * 500


async def test_a_bulk_invite_under_an_encoding_that_is_none_is_answered():
    def answer(request: bytes) -> bytes:
        head, _, body = wire.bulk_answer(request).partition(b"\r\n\r\n")
        return head + b"\r\nContent-Encoding: utf-8\r\n\r\n" + body

    with wire.serve(wire.serve_each(answer)) as url:
        async with client_of(url) as client:
            result = await client.bulk_invite("m1", [1, 2])
    assert [outcome.status for outcome in result] == ["rejected", "rejected"]


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip", "utf-8"])
async def test_a_refusal_counts_whatever_its_body(encoding):
    with wire.serve(
        wire.serve_each(lambda _: wire.answer(b"x", "429 No", f"Content-Encoding: {encoding}"))
    ) as url:
        async with client_of(url) as client:
            with pytest.raises(UnexpectedStatusError) as caught:
                await client.get_settings()
    assert (caught.value.status, caught.value.delivery, caught.value.body_excerpt) == (429, "answered", "")


async def test_a_refusal_counts_when_its_body_is_cut():
    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(wire.answer(b"x" * 50, "403 Forbidden")[:-20])

    with wire.serve(script) as url:
        async with client_of(url) as client:
            with pytest.raises(ForbiddenError):
                await client.get_settings()


async def test_a_refusal_counts_when_its_body_drips(monkeypatch):
    monkeypatch.setattr("sampling_async._wire.session._REFUSAL_SECONDS", 0.02)

    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(wire.answer(b"x" * 50, "429 No")[:-20])
        connection.read_request()

    with wire.serve(script) as url:
        async with client_of(url) as client:
            with pytest.raises(UnexpectedStatusError) as caught:
                await client.get_settings()
    assert (caught.value.status, caught.value.delivery) == (429, "answered")


class Silent(httpx.AsyncByteStream):
    """A body of which nothing arrives."""

    def __aiter__(self):
        return self

    async def __anext__(self):
        await anyio.sleep_forever()


async def test_a_refusal_is_returned_with_its_headers_even_if_its_body_never_comes(monkeypatch):
    monkeypatch.setattr(_session, "_REFUSAL_SECONDS", 0.02)
    headers = {"Retry-After": "3", "Date": "Wed, 25 Nov 2026 12:00:00 GMT"}
    replies = []
    for content in ({"stream": Silent()}, {"content": b"why"}):
        response = httpx.Response(429, headers=headers, **content)
        with anyio.fail_after(60):
            replies.append(await _session._read_refusal(response, LimitedBody(response, 100, 100)))
    said = 429, "3", "Wed, 25 Nov 2026 12:00:00 GMT"
    assert [(reply.status, reply.retry_after, reply.date) for reply in replies] == [said] * 2
    assert [(reply.body, reply.is_whole) for reply in replies] == [(b"", False), (b"why", True)]


async def test_a_cut_400_proves_nothing():
    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(wire.answer(b'{"ResultCode": 36}', "400 Bad Request")[:-5])

    with wire.serve(script) as url:
        async with client_of(url) as client:
            result = await client.bulk_invite("m", [1])
    assert result[0].status == "unknown"


async def test_the_client_accepts_gzip_only():
    service = doubles.Service([])
    async with doubles.client(service) as client:
        await client.get_settings()
    assert service.requests[0].headers["Accept-Encoding"] == "gzip"
    assert service.requests[0].headers["Accept"] == "application/json"


async def test_the_path_of_the_address_comes_before_that_of_the_call():
    service = doubles.Service([])
    async with client_of("https://service.example/BOX/", transport=httpx.MockTransport(service)) as client:
        await client.get_settings()
    assert service.requests[0].url.path == "/BOX/IntegratedPanelService/api/Settings"


def unframed(body: bytes) -> bytes:
    """Return a deflate body without the zlib frame, as some servers send it."""
    return zlib.compress(body)[2:-4]


@pytest.mark.parametrize("cut", [None, 1])
@pytest.mark.parametrize(
    "body", [zlib.compress(SETTINGS), unframed(SETTINGS), SETTINGS, zlib.compress(SETTINGS) + b"\r\n"]
)
async def test_deflate_is_read_with_its_frame_without_and_where_only_the_header_says_so(body, cut):
    sent = wire.answer(body, "200 OK", "Content-Encoding: deflate")
    if cut is not None:
        pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        sent = (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: deflate\r\nTransfer-Encoding: chunked\r\n\r\n"
            + pieces
            + b"0\r\n\r\n"
        )
    assert len(await read(sent)) == 1


async def test_deflate_is_bounded_too():
    with pytest.raises(DecodeError, match="larger than 300 bytes decoded"):
        await read(
            wire.answer(zlib.compress(SETTINGS + b" " * 10**6), "200 OK", "Content-Encoding: deflate"),
            decoded=300,
        )


@pytest.mark.parametrize("status", ["201 Created", "203 Non-Authoritative Information"])
@pytest.mark.parametrize("lengths", [1, 2])
async def test_a_whole_answer_with_another_status_of_success_counts(status, lengths):
    def script(connection: wire.Connection) -> None:
        for _ in range(2):
            answer = wire.bulk_answer(connection.read_request()).replace(b"200 OK", status.encode())
            length = re.search(rb"Content-Length: \d+\r\n", answer)
            connection.send(answer.replace(length[0], length[0] * lengths))

    with wire.serve(script) as url:
        async with client_of(url) as client:
            for _ in range(2):  # on one connection
                assert {each.status for each in await client.bulk_invite("m", [1, 2])} == {"rejected"}


@pytest.mark.parametrize("status", ["202 Accepted", "206 Partial Content"])
async def test_a_status_of_success_that_promises_less_is_unknown(status):
    def script(connection: wire.Connection) -> None:
        connection.send(wire.bulk_answer(connection.read_request()).replace(b"200 OK", status.encode()))

    with wire.serve(script) as url:
        async with client_of(url) as client:
            assert {each.status for each in await client.bulk_invite("m", [1, 2])} == {"unknown"}


OTHER_ENCODING = ": expected gzip, deflate or no content encoding, found another one$"


@pytest.mark.parametrize(
    ("answer", "rule"),
    [
        (
            wire.answer(gzip.compress(SETTINGS)[:-20], "200 OK", "Content-Encoding: gzip"),
            "expected a complete gzip body, found one that was cut off$",
        ),
        (
            wire.answer(SETTINGS, "200 OK", "Content-Encoding: gzip"),
            ": expected a gzip body, found other bytes$",
        ),
        (wire.answer(zlib.compress(SETTINGS), "200 OK", "Content-Encoding: gzip"), "found other bytes"),
        *(
            (
                wire.answer(gzip.compress(SETTINGS) + more, "200 OK", "Content-Encoding: gzip"),
                "found other bytes",
            )
            for more in (b"\x1f\x8btail", zlib.compress(SETTINGS), b"tail", b"\0\0tail", b"  tail", b"[]")
        ),
        *(
            (wire.answer(body, "200 OK", "Content-Encoding: deflate"), rule)
            for body, rule in (
                (zlib.compress(SETTINGS)[:-6], "expected a complete deflate body, found one that was cut off$"),
                (unframed(SETTINGS)[:-6], "expected a complete deflate body, found one that was cut off$"),
                (gzip.compress(SETTINGS), "expected a deflate body, found other bytes$"),
                (zlib.compress(SETTINGS) * 2, "expected a deflate body, found other bytes$"),
                (unframed(SETTINGS) + b"tail", "expected a deflate body, found other bytes$"),
                (b"<html>", "expected a deflate body, found other bytes$"),
            )
        ),
        *(
            (wire.answer(body, "200 OK", f"Content-Encoding: {encoding}"), OTHER_ENCODING)
            for encoding, body in (
                ("gzip, gzip", SETTINGS),
                ("deflate, gzip", gzip.compress(zlib.compress(SETTINGS))),
                ("gzip, gzip", gzip.compress(gzip.compress(SETTINGS))),
                ("gzip, x-gzip", gzip.compress(SETTINGS)),
                ("utf-8", gzip.compress(SETTINGS)),
                ("utf-8", b"<html>"),
                ("gzip, br", gzip.compress(b"\x0b\x02\x80hi\x03")),
            )
        ),
    ],
)
async def test_a_broken_encoding_is_refused(answer, rule):
    with pytest.raises(DecodeError, match=rule) as caught:
        await read(answer)
    assert (caught.value.path, caught.value.permanent) == ("$", rule == OTHER_ENCODING)


async def test_bodies_are_bounded_on_the_wire_and_decoded():
    with pytest.raises(DecodeError, match="larger than 100 bytes on the wire"):
        await read(wire.answer(SETTINGS), wire=100)
    with pytest.raises(DecodeError, match="larger than 300 bytes decoded"):
        await read(zipped(SETTINGS), decoded=300)
    with pytest.raises(DecodeError, match="larger than 300 bytes decoded") as caught:
        await read(httpx.Response(200, content=SETTINGS), decoded=300)
    assert (caught.value.permanent, caught.value.path) == (True, "$")


async def test_reading_stops_after_a_part_that_exceeds_the_limit():
    chunks = b"".join(b"3c\r\n" + b" " * 60 + b"\r\n" for _ in range(9)) + b"0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with pytest.raises(DecodeError, match="larger than 50 bytes on the wire"):
        await read(head + chunks, wire=50)


class Parts(httpx.AsyncByteStream):
    """A body in parts of one byte each."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __aiter__(self):
        return self

    async def __anext__(self) -> bytes:
        if not self.left:
            raise StopAsyncIteration
        self.left -= 1
        return b"x"


async def test_a_body_may_be_as_large_as_its_limits():
    body, other = (LimitedBody(httpx.Response(200, stream=Parts(5)), wire, 5) for wire in (5, 4))
    assert await body.read() == b"xxxxx"
    with pytest.raises(DecodeError, match="larger than 4 bytes on the wire"):
        await other.read()
    for each in (body, other):
        await each.aclose()


def _arrived(raw: bytes, encoding: bytes = b"gzip", *, is_over: bool = True) -> httpx.Response:
    own = SimpleNamespace(encoding=encoding, is_over=is_over, take=lambda: raw)
    return httpx.Response(200, extensions={"body": own})


@pytest.mark.parametrize(
    ("raw", "encoding", "is_over", "content"),
    [
        (b"xyz", b"", True, b"xyz"),
        (b"xyz", b"identity", True, b"xyz"),
        (b"xyz", b"", False, None),
        (gzip.compress(b"xyz", mtime=0), b"gzip", True, b"xyz"),
        (gzip.compress(b"xyz", mtime=0), b"gzip", False, None),
    ],
)
def test_a_body_that_has_arrived_is_taken_as_a_whole(raw, encoding, is_over, content):
    response = _arrived(raw, encoding, is_over=is_over)
    assert LimitedBody(response, len(raw), 3).whole() == content
    if content:
        with pytest.raises(DecodeError, match=f"larger than {len(raw) - 1} bytes on the wire"):
            LimitedBody(response, len(raw) - 1, 3).whole()
        with pytest.raises(DecodeError, match="larger than 2 bytes decoded"):
            LimitedBody(response, len(raw), 2).whole()


@pytest.mark.parametrize("content", [bytes(2**17), bytes(2**17 + 1), bytes(2**19)], ids=len)
@pytest.mark.parametrize("more", [b"", b"\0\0", gzip.compress(b"more", mtime=0)], ids=["", "padding", "member"])
async def test_a_body_of_several_slices_or_members_is_read_from_its_beginning(content, more):
    raw = gzip.compress(content) + more
    body = LimitedBody(_arrived(raw), len(raw), len(content) + 4)
    whole = body.whole()
    assert (await body.read() if whole is None else whole) == content + b"more" * (len(more) > 2)


@pytest.mark.parametrize("raw", [b"", gzip.compress(b"xyz", mtime=0)[:-1]], ids=["empty", "cut off"])
async def test_a_gzip_body_that_is_not_complete_is_no_whole(raw):
    body = LimitedBody(_arrived(raw), 100, 100)
    assert body.whole() is None
    with pytest.raises(DecodeError, match="expected a complete gzip body"):
        await body.read()


def test_a_body_that_is_not_gzip_is_refused():
    with pytest.raises(DecodeError, match="expected a gzip body, found other bytes"):
        LimitedBody(_arrived(b"xyz"), 100, 100).whole()


async def test_thousands_of_tiny_parts_give_the_event_loop_turns(monkeypatch):
    monkeypatch.setattr(_bodies, "_PARTS_A_TURN", 4)
    turns, checkpoint = [], anyio.lowlevel.checkpoint

    async def counted() -> None:
        turns.append(None)
        await checkpoint()

    monkeypatch.setattr(anyio.lowlevel, "checkpoint", counted)
    body = LimitedBody(httpx.Response(200, stream=Parts(13)), 100, 100)
    assert len(await body.read()) == 13
    assert len(turns) == 3
    await body.aclose()


async def test_a_stream_beyond_its_limit_is_drained():
    class Endless(httpx.AsyncByteStream):
        def __init__(self) -> None:
            self.parts = 0

        async def __aiter__(self):
            for _ in range(5):
                self.parts += 1
                yield b" " * 60

    stream = Endless()
    with pytest.raises(DecodeError, match="larger than 50 bytes on the wire"):
        await read_streamed(stream, wire=50)
    assert stream.parts == 5


async def read_streamed(stream: httpx.AsyncByteStream, **limits) -> object:
    service = doubles.Service(lambda _: httpx.Response(200, stream=stream))
    async with doubles.client(service, retry=ONCE, limits=BodyLimits(**limits)) as client:
        return await client.get_settings()


async def test_a_request_that_timed_out_in_a_pool_was_never_sent():
    async with doubles.client(doubles.Service(httpx.PoolTimeout("full")), retry=ONCE) as client:
        with pytest.raises(TransportTimeoutError) as caught:
            await client.get_settings()
    assert caught.value.delivery == "not_sent"


async def test_a_decompression_bomb_is_never_unpacked():
    bomb = gzip.compress(b" " * 50_000_000)
    tracked = doubles.MemoryPeak()
    with tracked, pytest.raises(DecodeError, match="larger than 1048576 bytes decoded"):
        await read(wire.answer(bomb, "200 OK", "Content-Encoding: gzip"), decoded=2**20)
    assert tracked.peak < 8 * 2**20


@pytest.mark.parametrize("is_too_long", [False, True])
async def test_a_response_may_be_as_long_as_its_limit(is_too_long):
    head, body = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"2\r\n[]\r\n0\r\n\r\n"

    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(head)
        time.sleep(0.05)  # so that the body comes after the head
        connection.send(body)

    limits = BodyLimits(wire=len(head) + len(body) - is_too_long)
    with wire.serve(script) as url:
        async with client_of(url, limits=limits, retry=ONCE) as client:
            if is_too_long:
                with pytest.raises(DecodeError, match="on the wire"):
                    await client.get_settings()
            else:
                assert not await client.get_settings()


async def test_a_request_has_these_headers_and_no_others():
    received: list[bytes] = []
    with wire.serve(wire.serve_each(wire.kept(received, wire.answer(b"[]")))) as url:
        async with client_of(url) as client:
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


def test_a_client_that_nobody_closed_is_named():
    async def use(client: SamplingClient) -> None:
        await client.get_settings()

    client = doubles.client(doubles.Service([]))
    anyio.run(use, client)
    session = client._session
    with pytest.warns(ResourceWarning, match="unclosed SamplingClient of service.example: use") as caught:
        session.__del__()
    (warning,) = caught
    assert warning.source is session
    session._is_closed = True


async def test_get_quotas_has_its_own_body_limit():
    assert BodyLimits(quotas=7).of("get_quotas") == (7, 7)
    assert BodyLimits(wire=1, decoded=2).of("get_settings") == (1, 2)


# --- Cancellation and closing


async def _call_cancelled_after(ticks: int, client: SamplingClient) -> bool:
    """Cancel a call after some ticks of the event loop; return whether it had finished before."""
    finished = False

    async def call() -> None:
        nonlocal finished
        await client.bulk_invite("m", [1, 2])
        finished = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        for _ in range(ticks):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    return finished


async def _task_cancelled_after(ticks: int, client: SamplingClient) -> bool:
    """Do the same with the cancellation of asyncio."""
    task = asyncio.ensure_future(client.bulk_invite("m", [1, 2]))
    for _ in range(ticks):
        await asyncio.sleep(0)
    finished = task.done()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return finished


async def _sweep(cancelled_after, url: str, *, warm: bool) -> None:
    """Cancel at every tick; after each, the next call must work and nothing may be held."""
    client = client_of(url, max_concurrency=1)
    ticks, finished = 0, False
    while not finished:
        if not warm:
            await client.aclose()
            client = client_of(url, max_concurrency=1)
        finished = await cancelled_after(ticks, client)
        result = await client.bulk_invite("m", [1, 2])
        assert len(result.rejected) == 2, (ticks, result[0].error)
        assert (client._gate.running, client._gate.waiting, len(client._session._blocks)) == (0, 0, 0)
        ticks += 1
    assert ticks > 5
    await client.aclose()


@pytest.mark.parametrize("warm", [False, True])
async def test_a_client_works_after_a_cancel_at_any_tick(warm):
    """The pool of httpx loses a slot permanently if a call is cancelled while its connection opens."""
    with wire.serve(wire.serve_each(wire.bulk_answer)) as url:
        await _sweep(_call_cancelled_after, url, warm=warm)


@pytest.mark.asyncio
@pytest.mark.parametrize("warm", [False, True])
async def test_a_client_works_after_its_task_was_cancelled_at_any_tick(warm):
    with wire.serve(wire.serve_each(wire.bulk_answer)) as url:
        await _sweep(_task_cancelled_after, url, warm=warm)


def _descriptors() -> int:
    """Return how many descriptors are open; 0 if the system does not say."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


async def test_churn_of_short_deadlines_leaks_nothing():
    def slow(request: bytes) -> bytes:
        time.sleep(0.001)
        return wire.bulk_answer(request)

    with wire.serve(wire.serve_each(slow)) as url:
        async with client_of(url, max_concurrency=2) as client:
            await client.bulk_invite("m", [1])
            gc.collect()
            before = _descriptors()

            async def hasty(seconds: float) -> None:
                with anyio.move_on_after(seconds):
                    await client.bulk_invite("m", range(1, 200))

            for step in range(40):
                async with anyio.create_task_group() as tasks:
                    for seconds in (0.0002 * step, 0.0005, 0.0001 * step):
                        tasks.start_soon(hasty, seconds)
            result = await client.bulk_invite("m", range(1, 500))
            assert len(result.rejected) == 499
            assert (client._gate.running, client._gate.waiting) == (0, 0)
            gc.collect()
            if before:
                # Both ends belong to this process: at most one more connection is open than at the start.
                assert _descriptors() <= before + 2 * 2


async def test_a_closed_client_refuses_calls():
    client = doubles.client(doubles.Service([]))
    await client.aclose()
    await client.aclose()
    with pytest.raises(ClientClosedError, match="is closed") as caught:
        await client.get_settings()
    assert caught.value.delivery == "not_sent"


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


async def test_closing_ends_running_and_waiting_calls():
    errors = []

    async def call() -> None:
        with pytest.raises(ClientClosedError) as caught:
            await client.get_settings()
        errors.append(caught.value)

    with wire.serve(script_of("silence")) as url:
        client = client_of(url, max_concurrency=1, retry=RetryPolicy())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await anyio.sleep(0.05)
            tasks.start_soon(call)  # waits for the only permit
            await anyio.sleep(0.01)
            async with anyio.create_task_group() as closing:
                closing.start_soon(client.aclose)
                closing.start_soon(client.aclose)
    assert sorted((error.delivery, error.args[0]) for error in errors) == [
        ("not_sent", "the client is closed; make a new one"),
        ("unknown", "the client was closed during the call"),
    ]


class Endless(httpx.AsyncByteStream):
    """An endless body that closing does not stop."""

    async def __aiter__(self):
        while True:
            await anyio.lowlevel.checkpoint()
            yield b"x" * 100


@pytest.mark.asyncio  # trio warns about what httpx leaves of such a stream
async def test_closing_does_not_wait_for_an_endless_body():
    def endless(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Endless())

    limits = BodyLimits(wire=1000)
    async with doubles.client(endless, limits=limits, retry=RetryPolicy(max_attempts=1)) as client:
        with pytest.raises(DecodeError, match="larger than 1000 bytes on the wire"):
            await client.get_settings()


class ForeignError(Exception):
    """An exception of another HTTP library under its adapter for httpx."""


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        (None, "not_sent"),
        (httpcore.ConnectError("refused"), "not_sent"),
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


def test_a_client_belongs_to_one_event_loop():
    client = doubles.client(doubles.Service([]))
    anyio.run(client.get_settings)
    with pytest.raises(InvalidRequestError, match="another event loop"):
        anyio.run(client.get_settings)
    anyio.run(client.aclose)


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


def test_a_client_can_be_closed_on_another_event_loop():
    with wire.serve(wire.serve_each(lambda _: wire.answer(b"[]", "200 OK", "Connection: close"))) as url:
        client = client_of(url)
        anyio.run(client.get_settings)
        anyio.run(client.aclose)
    assert "closed" in repr(client)


def test_a_mistyped_key_is_in_none_of_our_frames():
    with pytest.raises(InvalidRequestError) as caught:
        SamplingClient("https://service.example", panel_guid=doubles.PANEL, api_key=f"{doubles.KEY}0")
    trace = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    assert doubles.KEY not in str([frame.locals for frame in trace.stack if "sampling_async" in frame.filename])


async def test_the_text_of_a_foreign_transport_is_not_repeated():
    failure = httpx.ConnectError(f"no way to https://service.example/m/Invites with {doubles.KEY}")
    async with doubles.client(doubles.Service(failure), retry=ONCE) as client:
        with pytest.raises(TransportError) as caught:
            await client.get_settings()
    assert str(caught.value) == "get_settings: no connection (ConnectError)"


async def test_nothing_is_sent_if_the_trust_store_is_missing(monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/at/all.pem")
    async with client_of("https://localhost:1") as client:
        result = await client.bulk_invite("m", [1, 2])
    assert len(result.not_sent) == 2


async def test_a_request_reported_as_not_sent_is_never_sent():
    """A user who read that a request was not sent may send it again."""
    with wire.serve(wire.serve_each(lambda _: wire.answer(b"[]"))) as url:
        async with client_of(url) as client:
            track = Track(outcomes_delivered=True)
            call = get_settings(doubles.PANEL)
            with pytest.raises(ClientClosedError, match="has ended"):
                await client._session.attempt(call, track)
            assert track.delivery == "not_sent"
