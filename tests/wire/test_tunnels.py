"""Connections through an HTTP proxy: CONNECT and absolute form, over real sockets."""

from __future__ import annotations

import ssl

import anyio
import doubles
import pytest
import trustme
import wire
from forward_proxy import ForwardProxy, tls_front

from sampling_async import InvalidRequestError, RetryPolicy, SamplingClient, Timeouts, TransportError
from sampling_async._wire.address import Proxy
from sampling_async._wire.engine import dig_tunnel, refusal_of
from sampling_async._wire.failures import Refusal


class Behind:
    """A service that responds with settings and bulk invites, and records what it was sent."""

    def __init__(self) -> None:
        self.received: list[bytes] = []

    def __call__(self, connection: wire.Connection) -> None:
        while (request := connection.read_request()) is not None:
            self.received.append(request)
            connection.send(wire.bulk_answer(request) if b"QuotaIDs" in request else wire.answer(b"[]"))


def context_for(pem: str) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=pem)


def client_of(url: str, proxy: str, **options) -> SamplingClient:
    given = {"panel_guid": doubles.PANEL, "api_key": doubles.KEY, "retry": RetryPolicy(max_attempts=1)}
    return SamplingClient(url, proxy=proxy, **given | options)


async def test_https_goes_through_a_tunnel_and_the_proxy_sees_nothing_of_it():
    service = Behind()
    with wire.serve(service) as plain, tls_front(plain) as (url, pem):
        with ForwardProxy(credentials="agent:hunter2@:") as proxy:
            way = proxy.url.replace("hunter2@:", "hunter2%40%3A")
            async with client_of(url, way, ssl_context=context_for(pem)) as client:
                for _ in range(3):
                    await client.get_settings()
                assert len(await client.bulk_invite("m1", [1, 2])) == 2
    assert [head.split(b"\r\n")[0] for head in proxy.seen] == [
        b"CONNECT %b HTTP/1.1" % url.removeprefix("https://").encode()
    ]
    assert doubles.KEY.encode() not in proxy.seen[0]
    assert doubles.KEY.encode() not in proxy.tunnelled
    assert all(doubles.KEY.encode() in request for request in service.received)
    assert not any(b"proxy-auth" in request.lower() for request in service.received)


async def test_the_environment_names_the_proxy(monkeypatch):
    with (
        wire.serve(Behind()) as plain,
        tls_front(plain) as (url, pem),
        ForwardProxy(credentials="a:b") as proxy,
    ):
        monkeypatch.setenv("SAMPLING_PROXY", proxy.url)
        given = {"base_url": url, "panel_guid": doubles.PANEL, "api_key": doubles.KEY}
        async with SamplingClient.from_env(**given, ssl_context=context_for(pem)) as client:
            await client.get_settings()
    assert len(proxy.seen) == 1


async def test_http_requests_are_forwarded_by_the_proxy():
    service = Behind()
    with wire.serve(service) as url, ForwardProxy(credentials="agent:hunter2") as proxy:
        async with client_of(url, proxy.url) as client:
            for _ in range(2):
                await client.get_settings()
            assert len(await client.bulk_invite("m1", [1, 2])) == 2
    assert proxy.seen[0].startswith(b"GET %b/IntegratedPanelService/api/Settings?" % url.encode())
    assert b"\r\nProxy-Authorization: Basic " in proxy.seen[0]
    assert not any(b"proxy-auth" in request.lower() for request in service.received)


@pytest.mark.parametrize(
    ("header", "connections"), [(None, 2), ("Connection: Keep-Alive", 1), ("Proxy-Connection: keep-alive", 1)]
)
async def test_a_forward_proxy_connection_is_reused_only_if_the_proxy_says_keep_alive(header, connections):
    """Tinyproxy closes after each response without an announcement: the next request would be lost."""
    opened = []

    def script(connection: wire.Connection) -> None:
        opened.append(connection)
        while connection.read_request() is not None:
            connection.send(wire.answer(b"[]", "200 OK", *([header] if header else [])))

    with wire.serve(script) as proxy:
        async with client_of("http://127.0.0.1:1", proxy) as client:
            for _ in range(2):
                await client.get_settings()
    assert len(opened) == connections


@pytest.mark.parametrize("scheme", ["https", "http"])
async def test_a_407_is_reported_with_its_status_and_nothing_was_sent(scheme):
    service = Behind()
    with wire.serve(service) as plain, ForwardProxy(credentials="agent:right") as proxy:
        url = plain.replace("http:", f"{scheme}:")
        way = proxy.url.replace("right", "hunter2")
        async with client_of(url, way, retry=RetryPolicy()) as client:
            with pytest.raises(TransportError, match="the proxy answered 407: check the user") as caught:
                await client.get_settings()
            result = await client.bulk_invite("m1", [1, 2])
    assert (caught.value.delivery, caught.value.permanent, caught.value.attempts) == ("not_sent", True, 1)
    assert "hunter2" not in str(caught.value)
    assert result.resendable() == (1, 2)
    assert service.received == []


async def test_a_407_without_proxy_authenticate_may_come_from_the_service():
    script = wire.serve_each(lambda _: wire.answer(b"{}", "407 Who"))
    with wire.serve(script) as url, ForwardProxy() as proxy:
        async with client_of(url, proxy.url) as client:
            result = await client.bulk_invite("m1", [1])
    assert result[0].status == "unknown"


@pytest.mark.parametrize(
    ("answer", "says", "permanent"),
    [
        (wire.answer(b"no", "403 Forbidden"), "answered 403: it does not allow", True),
        (wire.answer(b"", "405 Method Not Allowed"), "answered 405; nothing was sent", True),
        (wire.answer(b"", "502 Bad Gateway"), "answered 502; nothing was sent", False),
        (wire.answer(b"", "503 Unavailable"), "answered 503", False),
        (b"HTTP/1.1 302 Found\r\nLocation: http://login\r\n\r\n", "answered 302", True),
        (b"SSH-2.0-OpenSSH\r\n", "did not respond in HTTP/1.1", False),
        (b"HTTP/1.1 50", ": the proxy did not respond in HTTP/1.1$", False),
    ],
)
async def test_a_refusal_of_the_proxy_is_reported_and_nothing_was_sent(answer, says, permanent):
    with ForwardProxy(connect_answer=answer) as proxy:
        async with client_of("https://service.invalid", proxy.url) as client:
            with pytest.raises(TransportError, match=says) as caught:
                await client.get_settings()
            result = await client.bulk_invite("m1", [1])
    assert (caught.value.delivery, caught.value.permanent) == ("not_sent", permanent)
    assert result[0].status == "not_sent"


class Answering:
    """The proxy's end of a connection, which responds with these pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = [*pieces, b""]
        self.sent = b""


@pytest.fixture
def digging(monkeypatch):
    """Open a tunnel through a proxy that responds like this."""

    async def dig(*pieces: bytes, host: str = "service.example") -> bytes:
        end = Answering(*pieces)

        async def send(_: object, data: bytes) -> None:
            end.sent += data

        async def received(_: object) -> bytes:
            return end.pieces.pop(0)

        monkeypatch.setattr("sampling_async._wire.engine.send_whole", send)
        monkeypatch.setattr("sampling_async._wire.engine.received", received)
        await dig_tunnel(Proxy("proxy", 3128, None), host, 443, end)
        return end.sent

    return dig


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.0 200 Connection established\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",  # ignored after CONNECT
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        *(
            b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % b"\r\n".join(fields)
            for fields in (
                (b"Transfer-Encoding: gzip",),
                (b"transfer-encoding:",),
                (b"Transfer-Encoding: chunked", b"Content-Length: 0"),
                (b"CONTENT-LENGTH: 2", b"Via: a", b"Content-Length: 3"),
                (b"Content-Length: none",),
                (b"Content-Length:", b" 5, 6", b"\t7", b"Via: a"),
            )
        ),
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 Fine\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nVia: a\r\n b\r\n\r\n",
    ],
)
async def test_a_tunnel_is_open_after_the_head_of_the_response(answer, digging):
    asked = b"CONNECT service.example:443 HTTP/1.1\r\nHost: service.example:443\r\n\r\n"
    assert await digging(answer) == asked
    assert await digging(*(answer[at : at + 1] for at in range(len(answer)))) == asked


async def test_an_ipv6_address_is_in_brackets(digging):
    assert (await digging(b"HTTP/1.1 200 OK\r\n\r\n", host="::1")).startswith(b"CONNECT [::1]:443 HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "more",
    [b"\r\n\x16\x03\x01", b"\r\nHTTP/1.1 200 OK\r\n\r\n", b"\r\n\r\n", b"Content-Length: 2\r\n\r\nhi"],
)
async def test_bytes_after_the_200_of_a_proxy_are_refused(more, digging):
    with pytest.raises(
        Refusal, match=r"^the proxy sent bytes after its response, before anything was sent to the host$"
    ):
        await digging(b"HTTP/1.1 200 OK\r\n" + more)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\nVia: a\n\n",
        b"HTTP/1.1 200 OK\r\nVia a\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2",
    ],
)
async def test_a_head_that_is_broken_or_cut_opens_no_tunnel(head, digging):
    with pytest.raises(Refusal, match=r"^the proxy did not respond in HTTP/1\.1$"):
        await digging(head, b"")


async def test_an_endless_line_of_a_proxy_is_refused(digging):
    with pytest.raises(Refusal, match=r"did not respond in HTTP/1\.1"):
        await digging(b"HTTP/1.1 200 OK\r\nVia: ", *([b"x" * 2**14] * 20))


def test_temporary_statuses_of_a_proxy_are_retried():
    assert [status for status in range(300, 600) if not refusal_of(status).permanent] == [
        *(408, 425, 429),
        *(500, 502, 503, 504),
    ]


async def test_a_proxy_that_is_silent_ends_at_the_connect_limit():
    def script(connection: wire.Connection) -> None:
        while connection.read_request() is not None:
            pass

    with wire.serve(script) as url:
        async with client_of("https://service.invalid", url, timeouts=Timeouts(connect=0.05)) as client:
            with pytest.raises(TransportError, match="the connection goes through the proxy") as caught:
                await client.get_settings()
    assert caught.value.delivery == "not_sent"


async def test_a_call_cancelled_during_connect_closes_its_connection():
    script = wire.Silent()
    with wire.serve(script) as url:
        async with client_of("https://service.invalid", url) as client:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.get_settings)
                assert await anyio.to_thread.run_sync(script.arrived.wait, 5)
                tasks.cancel_scope.cancel()
            assert await anyio.to_thread.run_sync(script.closed.wait, 5)


async def test_the_error_of_an_unreachable_proxy_mentions_the_proxy():
    async with client_of("https://service.invalid", "http://127.0.0.1:1") as client:
        with pytest.raises(TransportError, match=r"ConnectError: Connection refused.*through the proxy"):
            await client.get_settings()


async def test_a_refused_certificate_behind_a_proxy_is_reported():
    with wire.serve(Behind()) as plain, tls_front(plain) as (url, _), ForwardProxy() as proxy:
        stranger = context_for(trustme.CA().cert_pem.bytes().decode())
        async with client_of(url, proxy.url, ssl_context=stranger) as client:
            with pytest.raises(TransportError, match="certificate was refused") as caught:
                await client.get_settings()
    assert (caught.value.permanent, caught.value.delivery) == (True, "not_sent")


# --- Errors without a proxy


@pytest.mark.parametrize(
    ("variable", "url"),
    [
        ("HTTPS_PROXY", "https://127.0.0.1:1"),
        ("https_proxy", "https://127.0.0.1:1"),
        ("HTTP_PROXY", "http://127.0.0.1:1"),
        ("ALL_PROXY", "https://127.0.0.1:1"),
    ],
)
async def test_a_proxy_of_the_environment_that_is_not_used_is_named(variable, url, monkeypatch):
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    given = {"panel_guid": doubles.PANEL, "api_key": doubles.KEY, "retry": RetryPolicy(max_attempts=1)}
    async with SamplingClient(url, **given) as client:
        with pytest.raises(TransportError) as caught:
            await client.get_settings()
        assert "PROXY" not in str(caught.value)
        monkeypatch.setenv(variable, "http://agent:hunter2@proxy:3128")
        with pytest.raises(TransportError, match=f"; {variable} is set but not used: give proxy=") as caught:
            await client.get_settings()
    assert "hunter2" not in str(caught.value)


async def test_other_failures_do_not_mention_proxies(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    with wire.serve(lambda connection: connection.read_request()) as url:
        given = {"panel_guid": doubles.PANEL, "api_key": doubles.KEY, "retry": RetryPolicy(max_attempts=1)}
        async with SamplingClient(url, **given) as client:
            with pytest.raises(TransportError) as caught:
                await client.get_settings()
    assert "PROXY" not in str(caught.value)


def test_the_key_is_not_sent_in_plain_text_to_a_remote_proxy():
    with pytest.raises(InvalidRequestError, match=r"with this proxy, .*; give allow_http=True to accept that$"):
        client_of("http://localhost:8080", "http://proxy.example:3128")
    client_of("http://localhost:8080", "http://proxy.example:3128", allow_http=True)
    client_of("http://localhost:8080", "http://127.0.0.1:3128")
    client_of("https://service.example", "http://proxy.example:3128")
