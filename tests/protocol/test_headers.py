"""Headers of responses for support cases: on results, errors and reports; bounded, and without secrets."""

from __future__ import annotations

import gc
import json
import pickle
import weakref
from contextlib import aclosing, contextmanager

import doubles
import httpx
import pytest
import wire
from doubles import KEY, PANEL

from sampling_async import (
    DecodeError,
    PagingError,
    RetryPolicy,
    SamplingClient,
    ServerError,
    ServiceError,
    TransportError,
)
from sampling_async._protocol.refusals import ReceivedHeaders

MEMBER = "member-canary"
OWN = {"X-Request-ID": "req-1", "Server": "nginx/1.27", "Set-Cookie": "session=hunter2", "X-Internal": "secret"}


@contextmanager
def served(*replies: tuple[int, dict[str, str], object]):
    """Yield makers of clients over the engine and over a transport; each reply is status, headers and JSON."""

    def body(content: object) -> bytes:
        return content if isinstance(content, bytes) else json.dumps(content).encode()

    def over_sockets(**options):
        left = list(replies)

        def reply(_request: bytes) -> bytes:
            status, headers, content = left.pop(0) if len(left) > 1 else left[0]
            lines = [f"{name}: {value}" for name, value in headers.items()]
            return wire.answer(body(content), f"{status} Said", *lines)

        service = wire.serve(wire.serve_each(reply))
        base_url = service.__enter__()
        servers.append(service)
        return SamplingClient(
            base_url, panel_guid=PANEL, api_key=KEY, **{"retry": RetryPolicy(max_attempts=1)} | options
        )

    def in_memory(**options):
        answers = [
            httpx.Response(status, headers=headers, content=body(content))
            for status, headers, content in replies
        ]
        return doubles.client(doubles.Service(*answers), **{"retry": RetryPolicy(max_attempts=1)} | options)

    servers: list = []
    try:
        yield over_sockets, in_memory
    finally:
        for server in servers:
            server.__exit__(None, None, None)


WAYS = pytest.mark.parametrize("way", [0, 1], ids=["engine", "transport"])


@WAYS
async def test_a_result_has_the_headers_of_its_response(way):
    with served((200, OWN | {"CF-Ray": "8f1"}, [])) as ways:
        async with ways[way]() as client:
            settings = await client.get_settings()
    assert settings.request_id == "req-1"
    assert settings.headers["server"] == "nginx/1.27"
    assert settings.headers["cf-ray"] == "8f1"
    assert not {"set-cookie", "x-internal"} & settings.headers.keys()


@WAYS
async def test_an_error_has_the_headers_of_the_response_and_can_be_pickled(way):
    with served((500, OWN | {"Retry-After": "3"}, {})) as ways:
        async with ways[way]() as client:
            with pytest.raises(ServerError) as caught:
                await client.get_settings()
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.request_id == "req-1"
    assert error.headers["retry-after"] == "3"
    assert "hunter2" not in repr(vars(error))
    assert "req-1" not in str(error)


@WAYS
async def test_errors_of_what_the_response_says_have_them_too(way):
    with served((200, OWN, b"no json")) as ways:
        async with ways[way]() as client:
            with pytest.raises(DecodeError) as caught:
                await client.get_settings()
    assert caught.value.request_id == "req-1"
    with served((200, OWN, doubles.page(more=True))) as ways:
        async with ways[way]() as client:
            with pytest.raises(PagingError) as stuck:
                await anext(client.recontact_pages(5))
    assert stuck.value.request_id == "req-1"


async def test_a_body_that_was_cut_keeps_the_head_of_its_response():
    def cut(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(b"HTTP/1.1 200 OK\r\nX-Request-ID: req-1\r\nContent-Length: 100\r\n\r\n{")

    with wire.serve(cut) as base_url:
        options = {"panel_guid": PANEL, "api_key": KEY, "retry": RetryPolicy(max_attempts=1)}
        async with SamplingClient(base_url, **options) as client:
            with pytest.raises(TransportError) as caught:
                await client.get_settings()
    assert caught.value.request_id == "req-1"


async def test_without_a_response_there_are_none():
    service = doubles.Service(httpx.ConnectError("refused"))
    async with doubles.client(service, retry=RetryPolicy(max_attempts=1)) as client:
        with pytest.raises(TransportError) as caught:
            await client.get_settings()
        result = await client.bulk_invite(MEMBER, ())
    assert (caught.value.headers, caught.value.request_id) == ({}, None)
    assert (result.headers, result.request_id) == ({}, None)


@WAYS
async def test_all_results_have_them(way):
    invite = doubles.invite(4)
    with served(
        (200, OWN, invite),
        (200, {"X-Request-ID": "req-2"}, {"Invites": [doubles.item(4)]}),
        (200, {"X-Request-ID": "req-3"}, doubles.page("m1")),
        (
            200,
            {"X-Request-ID": "req-4"},
            {"CountryID": 1, "CacheExpires": "2026-01-01T00:00:00Z", "Surveys": []},
        ),
    ) as ways:
        async with ways[way]() as client, aclosing(client.recontact_pages(5)) as pages:
            results = (
                await client.generate_invite(MEMBER, 4),
                await client.bulk_invite(MEMBER, [4]),
                await anext(pages),
                await client.get_quotas(),
            )
    assert [result.request_id for result in results] == ["req-1", "req-2", "req-3", "req-4"]
    assert results[0] == pickle.loads(pickle.dumps(results[0]))
    assert pickle.loads(pickle.dumps(results[1])).headers == {}


async def test_each_request_of_a_bulk_that_failed_has_its_own():
    number = iter(range(100))

    def refuse(_request):
        return httpx.Response(403, headers={"X-Request-ID": f"req-{next(number)}"})

    async with doubles.client(doubles.Service(refuse), max_concurrency=1) as client:
        result = await client.bulk_invite(MEMBER, range(1, 201))
    assert {outcome.error.request_id for outcome in result} == {"req-0"}
    assert result.request_id == "req-0"


async def test_an_item_that_cannot_be_read_has_the_request_id_of_its_response():
    body = {"Invites": [doubles.item(4, 1, Invite=None)]}
    service = doubles.Service(httpx.Response(200, json=body, headers={"X-Request-ID": "req-1"}))
    async with doubles.client(service) as client:
        result = await client.bulk_invite(MEMBER, [4])
    assert result.unknown[0].error.request_id == "req-1"


async def test_attempts_report_their_own():
    reports = []
    answers = (
        httpx.Response(500, headers={"X-Request-ID": "req-1"}),
        httpx.ReadError("cut"),
        httpx.Response(200, json=[], headers={"X-Request-ID": "req-3", "Set-Cookie": "a=b"}),
    )
    async with doubles.client(doubles.Service(*answers), on_attempt=reports.append) as client:
        await client.get_settings()
    assert [(report.status, report.request_id) for report in reports] == [
        (500, "req-1"),
        (None, None),
        (200, "req-3"),
    ]
    assert "set-cookie" not in reports[2].headers
    assert len({*reports}) == 3  # they can be hashed


@pytest.mark.parametrize(
    "value",
    [
        MEMBER,
        MEMBER.upper(),
        f"of-{MEMBER}-7",
        MEMBER.replace("-", "%2D"),
        MEMBER.replace("-", "\\u002d"),
        KEY,
        KEY.replace("-", "").upper(),
        PANEL,
        f"https://service.example/{PANEL}/{MEMBER}",
        "x" * 150 + MEMBER * 20,
    ],
)
async def test_no_header_repeats_the_key_the_panel_or_the_member_code(value):
    reports = []
    service = doubles.Service(httpx.Response(500, headers={"X-Request-ID": value}))
    async with doubles.client(service, retry=RetryPolicy(max_attempts=1), on_attempt=reports.append) as client:
        with pytest.raises(ServiceError) as caught:
            await client.generate_invite(MEMBER, 5)
    for headers in (caught.value.headers, reports[0].headers):
        shown = headers["x-request-id"].lower().replace("-", "")
        assert "<hidden>" in headers["x-request-id"]
        for secret in (MEMBER, KEY, PANEL):
            assert secret.replace("-", "") not in shown


def read(*pairs: tuple[bytes, bytes]):
    return ReceivedHeaders(list(pairs), ("m1",), lambda: ("", "k"))()


def test_values_are_bounded_printable_and_ascii():
    flood = [(b"Via", b"1.1 proxy" * 100)] * 1000
    headers = read(
        *flood, (b"X-Request-Id", "é\x7f\x01 ok".encode()), (b"Age", b"5"), (b"X-Served-By", b"\xff")
    )
    assert len(headers["via"]) == 200
    assert headers["x-request-id"] == "? ok"
    assert headers["age"] == "5"
    assert headers["x-served-by"] == "?"
    assert all(value.isascii() and value.isprintable() for value in headers.values())


def test_the_services_own_id_counts_before_those_on_the_way():
    headers = read((b"CF-RAY", b"ray"), (b"traceparent", b"00-1-2-01"), (b"x-correlation-id", b"mine"))
    assert list(headers) == ["x-correlation-id", "traceparent", "cf-ray"]


def test_a_short_member_code_is_hidden_as_a_word_only():
    assert read((b"request-id", b"m1 am1b"))["request-id"] == "<hidden> am1b"


async def test_a_result_does_not_keep_its_client():
    async with doubles.client(doubles.Service(httpx.Response(200, json=[], headers=OWN))) as client:
        settings, session = await client.get_settings(), weakref.ref(client._session)
    del client
    gc.collect()
    assert session() is None
    assert settings.request_id == "req-1"


@WAYS
async def test_nothing_is_read_before_somebody_looks(way, monkeypatch):
    """The bulk path is measured in microseconds: a response that nobody asks about costs nothing."""
    calls = []
    monkeypatch.setattr(ReceivedHeaders, "__call__", lambda self: calls.append(self) or {})
    with served((200, OWN, {"Invites": [doubles.item(4)]})) as ways:
        async with ways[way]() as client:
            result = await client.bulk_invite(MEMBER, [4])
            assert calls == []
            assert KEY not in repr(result.__reduce__())
            assert result.request_id is None
    assert len(calls) == 1
    assert "hunter2" not in repr(calls)
