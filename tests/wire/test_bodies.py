"""Bodies of responses: encodings, limits, and refusals whose body is not whole."""

from __future__ import annotations

import gzip
import json
import re
import time
import zlib
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import doubles
import httpx
import pytest
import wire
from wire_kit import ONCE, client_of, client_served_by

from sampling_async import (
    BodyLimits,
    DecodeError,
    ForbiddenError,
    RetryPolicy,
    SamplingClient,
    UnexpectedStatusError,
)
from sampling_async._wire import bodies as _bodies
from sampling_async._wire import session as _session
from sampling_async._wire.bodies import LimitedBody

# --- Bodies


async def read(response: httpx.Response | bytes, **limits) -> object:
    if isinstance(response, httpx.Response):
        async with doubles.client(lambda _: response, retry=ONCE, limits=BodyLimits(**limits)) as client:
            return await client.get_settings()
    async with client_served_by(wire.serve_each(lambda _: response), limits=BodyLimits(**limits)) as client:
        return await client.get_settings()


SETTINGS = json.dumps([{"Name": "n", "Description": "", "Value": "v" * 500}]).encode()


def zipped(body: bytes) -> bytes:
    return wire.answer(gzip.compress(body), "200 OK", "Content-Encoding: gzip")


@pytest.mark.parametrize("padding", [b"", b"\0", b"\0" * 3000, b"\r\n", b"\n", b"\0\r\n\0"])
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

    async with client_served_by(wire.serve_each(answer)) as client:
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

    async with client_served_by(script) as client:
        with pytest.raises(ForbiddenError):
            await client.get_settings()


async def test_a_refusal_counts_when_its_body_drips(monkeypatch):
    monkeypatch.setattr("sampling_async._wire.session._REFUSAL_SECONDS", 0.02)

    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(wire.answer(b"x" * 50, "429 No")[:-20])
        connection.read_request()

    async with client_served_by(script) as client:
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

    async with client_served_by(script) as client:
        result = await client.bulk_invite("m", [1])
    assert result[0].status == "unknown"


async def test_the_client_accepts_gzip_only():
    service = doubles.Service([])
    async with doubles.client(service) as client:
        await client.get_settings()
    assert service.requests[0].headers["Accept-Encoding"] == "gzip"
    assert service.requests[0].headers["Accept"] == "application/json"


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


@pytest.mark.parametrize("status", ["201 Created", "203 Non-Authoritative Information"])
@pytest.mark.parametrize("lengths", [1, 2])
async def test_a_whole_answer_with_another_status_of_success_counts(status, lengths):
    def script(connection: wire.Connection) -> None:
        for _ in range(2):
            answer = wire.bulk_answer(connection.read_request()).replace(b"200 OK", status.encode())
            length = re.search(rb"Content-Length: \d+\r\n", answer)
            connection.send(answer.replace(length[0], length[0] * lengths))

    async with client_served_by(script) as client:
        for _ in range(2):  # on one connection
            assert {each.status for each in await client.bulk_invite("m", [1, 2])} == {"rejected"}


@pytest.mark.parametrize("status", ["202 Accepted", "206 Partial Content"])
async def test_a_status_of_success_that_promises_less_is_unknown(status):
    def script(connection: wire.Connection) -> None:
        connection.send(wire.bulk_answer(connection.read_request()).replace(b"200 OK", status.encode()))

    async with client_served_by(script) as client:
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
    with pytest.raises(DecodeError, match="larger than 300 bytes decoded"):
        await read(wire.answer(zlib.compress(SETTINGS), "200 OK", "Content-Encoding: deflate"), decoded=300)
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


@pytest.mark.parametrize("is_too_long", [False, True])
async def test_a_response_may_be_as_long_as_its_limit(is_too_long):
    head, body = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"2\r\n[]\r\n0\r\n\r\n"

    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(head)
        time.sleep(0.05)  # so that the body comes after the head
        connection.send(body)

    limits = BodyLimits(wire=len(head) + len(body) - is_too_long)
    async with client_served_by(script, limits=limits, retry=ONCE) as client:
        if is_too_long:
            with pytest.raises(DecodeError, match="on the wire"):
                await client.get_settings()
        else:
            assert not await client.get_settings()


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
