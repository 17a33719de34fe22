"""Failure modes of security: keys in the wrong place, addresses and paths that lead elsewhere."""

from __future__ import annotations

import logging
import warnings
from base64 import b64encode
from urllib.parse import unquote

import attrs
import doubles
import pytest
from fault_proxy import FaultProxy
from fault_server import (
    ENDPOINTS,
    PROCESSED,
    RIGHT,
    FaultServer,
    answer,
    cut,
    cut_gzip,
    fin,
    read,
    refused,
    reply,
    rst,
    send,
    silence,
    tls_server,
)
from forward_proxy import ForwardProxy
from kit import ONCE, QUICK, call, client_of, everything_shown
from virtual_time import seeded

from sampling_async import (
    BadRequestError,
    BulkInviteResult,
    ForbiddenError,
    InvalidRequestError,
    SamplingClient,
    SamplingError,
    UnexpectedStatusError,
)

LEAKY = f'{{"Message": "no such key {doubles.KEY} for /ExternalSample/x/m1/Invites", "ResultCode": 2}}'
FAULTS = {
    "rst": [*PROCESSED, rst()],
    "fin": [*PROCESSED, fin()],
    "silence": [*PROCESSED, silence()],
    "cut": [*PROCESSED, cut(-30, "fin")],
    "cut gzip": [*PROCESSED, cut_gzip(9)],
    "garbage": [*PROCESSED, send(f"key {doubles.KEY}\r\n\r\n"), fin()],
    "bad header": [*PROCESSED, send(f"HTTP/1.1 200 OK\r\n{doubles.KEY}\r\n\r\n"), fin()],
    **{str(status): [read(), reply(status, LEAKY)] for status in (302, 400, 403, 404, 429, 500, 503)},
}


ECHOES = {
    "html": [*PROCESSED, reply(200, f"<html>{doubles.KEY}</html>")],
    "json of another shape": [*PROCESSED, reply(200, f'{{"{doubles.KEY}": "{doubles.KEY}"}}')],
}


@pytest.mark.parametrize("fault", ECHOES)
async def test_mode_22_an_unreadable_response_that_contains_the_key_is_not_shown(fault, caplog):
    caplog.set_level(logging.DEBUG)
    with FaultServer(then=ECHOES[fault]) as server:
        async with client_of(server.url, retry=ONCE) as client:
            for endpoint in ENDPOINTS[:-1]:
                with pytest.raises(SamplingError) as caught:
                    await call(client, endpoint)
                assert doubles.KEY not in everything_shown(caught.value, client)
            result = await call(client, "bulk_invite")
            assert doubles.KEY not in everything_shown(result[0].error, client)
    assert doubles.KEY not in caplog.text


@pytest.mark.parametrize("fault", [*FAULTS, "refused"])
async def test_mode_22_no_fault_reveals_the_key(fault, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    shown = []
    with FaultServer(then=FAULTS.get(fault, RIGHT)) as server, warnings.catch_warnings(record=True) as warned:
        url = refused() if fault == "refused" else server.url
        async with client_of(url, timeouts=QUICK, retry=ONCE) as client:
            for endpoint in ENDPOINTS:
                try:
                    result = await call(client, endpoint)
                except SamplingError as error:
                    shown.append(everything_shown(error, client))
                else:
                    assert isinstance(result, BulkInviteResult)
                    shown += [everything_shown(outcome.error, client) for outcome in result]
                    shown.append(repr(list(result)))
    assert len(shown) >= len(ENDPOINTS)
    printed = capfd.readouterr()
    for text in (*shown, caplog.text, printed.out, printed.err, *(str(warning.message) for warning in warned)):
        assert doubles.KEY not in text
        assert doubles.KEY.replace("-", "") not in text


@pytest.mark.parametrize("way", ["https", "http"])
@pytest.mark.parametrize("fault", ["407", "refused", "cut", "fine"])
async def test_mode_22_the_credentials_of_a_proxy_show_nowhere(fault, way, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    password, basic = "hunter2-hunter2", b64encode(b"agent:hunter2-hunter2").decode()
    shown = []
    with FaultServer(then=FAULTS["cut"] if fault == "cut" else RIGHT) as server:
        with ForwardProxy(credentials=f"agent:{'other' if fault == '407' else password}") as proxy:
            url = server.url.replace("http:", f"{way}:")
            out = f"http://agent:{password}@127.0.0.1:1"
            if fault != "refused":
                out = proxy.url.replace("other", password)
            # The server knows no TLS: behind a tunnel, each call waits for a handshake until `connect` is over.
            timeouts = attrs.evolve(QUICK, connect=0.05)
            async with client_of(url, transport=None, proxy=out, timeouts=timeouts, retry=ONCE) as client:
                for endpoint in ENDPOINTS:
                    try:
                        result = await call(client, endpoint)
                    except SamplingError as error:
                        shown.append(everything_shown(error, client, client._session))
                    else:
                        shown += [everything_shown(SamplingError(), client, client._session), repr(result)]
    printed = capfd.readouterr()
    for text in (*shown, caplog.text, printed.out, printed.err):
        assert password not in text
        assert basic not in text
        assert doubles.KEY not in text


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_mode_23_a_redirect_is_an_error_and_the_key_stays_with_its_origin(status):
    with FaultServer() as other:
        elsewhere = f"Location: {other.url}/IntegratedPanelService/api/Settings"
        with FaultServer(then=[read(), reply(status, "", "text/html", elsewhere)]) as server:
            async with client_of(server.url) as client:
                for endpoint in ENDPOINTS[:-1]:
                    with pytest.raises(UnexpectedStatusError) as caught:
                        await call(client, endpoint)
                    assert (caught.value.status, caught.value.attempts) == (status, 1)
                result = await call(client, "bulk_invite")
    assert {outcome.status for outcome in result} == {"unknown"}
    assert other.opened == 0


CODES = [
    "a/b",
    "a?b",
    "a#b",
    "a%2Fb",
    "100%",
    "a b",
    "a+b",
    "ä",
    "日本",
    "a;b",
    "a&b=c",
    "...",
    "a..",
    "%2e%2e",
]
ALPHABET = "ab09 /?#%&+;=:@!$'()*,[]<>\\^`{|}~\"._-äß日😀"


async def test_mode_24_a_member_code_reaches_the_service_unchanged():
    with seeded(24) as rng, FaultServer() as server:
        drawn = ["".join(rng.choices(ALPHABET, k=rng.randrange(1, 9))) for _ in range(60)]
        codes = [code for code in [*CODES, *drawn] if code not in {".", ".."}]
        async with client_of(server.url) as client:
            for code in codes:
                await client.bulk_invite(code, [1])
                await client.generate_invite(code, 2)
    assert [request.member_code for request in server.ledger.received[::2]] == codes
    assert [request.member_code for request in server.ledger.received[1::2]] == codes


@pytest.mark.parametrize("code", ["", ".", "..", "a\x00", "a\n", "\x7f", "\x85", "\ud800", None, 7, b"a"])
async def test_mode_24_a_member_code_that_would_change_the_route_is_refused_before_sending(code):
    with FaultServer() as server:
        async with client_of(server.url) as client:
            with pytest.raises(InvalidRequestError):
                await client.bulk_invite(code, [1])
            with pytest.raises(InvalidRequestError):
                await client.generate_invite(code, 2)
    assert server.opened == 0


def refuse_dangerous_paths(exchange) -> None:
    """Refuse some characters in a path, encoded or not, as ASP.NET does."""
    path = unquote(exchange.request.target.partition("?")[0])
    if set(path) & set("<>*%&:\\"):
        page = "<html><title>A potentially dangerous Request.Path value was detected (&amp;).</title></html>"
        reply(400, page, "text/html")(exchange)
    else:
        answer()(exchange)


@pytest.mark.parametrize("code", ["a&b", "a:b", "100%", "<a>"])
async def test_mode_25_a_path_the_platform_refuses_is_a_bad_request_and_not_repeated(code):
    with FaultServer(then=[read(), refuse_dangerous_paths]) as server:
        async with client_of(server.url) as client:
            with pytest.raises(BadRequestError) as caught:
                await client.generate_invite(code, 2)
            result = await client.bulk_invite(code, [2])
            assert (await client.generate_invite("plain", 2)).quota_id == 2
    # The platform refuses it before the service sees it, but a client cannot know that.
    assert (caught.value.attempts, caught.value.delivery) == (1, "unknown")
    assert caught.value.result_code is None
    assert "Request.Path" in caught.value.body_excerpt
    assert [outcome.status for outcome in result] == ["unknown"]
    assert len(server.ledger.received) == 3


async def test_mode_26_the_error_names_a_proxy_that_may_drop_the_key():
    with FaultServer() as server, FaultProxy(server.url, drop_underscores=True) as proxy:
        async with client_of(proxy.url) as client:
            with pytest.raises(ForbiddenError, match="proxy dropped the header API_AUTH_KEY") as caught:
                await client.get_settings()
            proxy.drop_underscores = False
            assert len(await client.get_settings()) == 2
    assert caught.value.attempts == 1
    assert server.ledger.received[0].headers.get("host")


SECRET = "cccccccc-5555-6666-7777-888888888888"


@pytest.mark.parametrize(
    "broken",
    [
        {"api_key": f"{SECRET}\n"},
        {"api_key": f" {SECRET}"},
        {"api_key": f"{SECRET}\x00"},
        {"api_key": f"{{{SECRET}}}"},
        {"api_key": SECRET.replace("c", "ç")},
        {"api_key": SECRET.replace("c", "\uff43")},
        {"api_key": ""},
        {"base_url": f"https://user:{SECRET}@host"},
        {"base_url": f"http://host.example/{SECRET}"},
        {"base_url": f"https://host/../{SECRET}"},
        {"base_url": f"https://host/?key={SECRET}"},
        {"base_url": f"ftp://host/{SECRET}"},
        {"base_url": f"https:///{SECRET}"},
        {"base_url": ""},
    ],
    ids=lambda broken: str(broken).replace(SECRET, "SECRET").encode("ascii", "replace").decode(),
)
def test_mode_28_an_invalid_key_or_address_is_refused_and_not_shown(broken):
    options = {"base_url": "https://service.example", "panel_guid": doubles.PANEL, "api_key": SECRET} | broken
    with pytest.raises(InvalidRequestError) as caught:
        SamplingClient(options.pop("base_url"), **options)
    assert "8888" not in str(caught.value)
    assert "host" not in str(caught.value) or "https://host" in str(caught.value)


async def test_mode_28_proxies_of_the_environment_are_not_used(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, refused())
    with FaultServer() as server:
        async with client_of(server.url, retry=ONCE) as client:
            assert len(await client.get_settings()) == 2


async def test_mode_28_plain_http_is_for_loopback_only(monkeypatch):
    with pytest.raises(InvalidRequestError, match="https"):
        client_of("http://service.example")
    client_of("http://service.example", allow_http=True)
    with tls_server("none") as (server, url, authorities):
        monkeypatch.setenv("SSL_CERT_FILE", authorities)
        async with client_of(url) as client:
            assert len(await client.get_settings()) == 2
    assert len(server.ledger.processed) == 1


async def test_mode_31_cookies_are_not_kept():
    cookies = ("Set-Cookie: ARRAffinity=node7; Path=/", "Set-Cookie: session=1")
    with FaultServer(then=[*PROCESSED, reply(200, "[]", "application/json", *cookies)]) as server:
        async with client_of(server.url) as client:
            for _ in range(3):
                await client.get_settings()
    assert len(server.ledger.received) == 3
    assert not any("cookie" in request.headers for request in server.ledger.received)
