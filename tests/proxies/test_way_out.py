"""Forward proxies: squid and tinyproxy with credentials; and nginx that requires client certificates."""

from __future__ import annotations

import os
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import doubles
import pytest
import trustme
from fault_server import PROCESSED, RIGHT, FaultServer, answer, tls_server, wait
from kit import ONCE, call
from real_proxies import PASSWORD, nginx_that_asks_who, squid, tinyproxy
from wire_kit import client_of

from sampling_async import BadRequestError, RetryPolicy, SamplingClient, SamplingError, TransportError

PROXIES = {"squid": squid, "tinyproxy": tinyproxy}
ENDPOINTS = ["get_settings", "get_quotas", "generate_invite", "bulk_invite", "recontact_members"]


@pytest.fixture(scope="module", params=PROXIES)
def proxy(request):
    with PROXIES[request.param]() as url:
        yield url


def trusting(path: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=path)


async def test_all_calls_go_through_a_tunnel(proxy):
    with tls_server("none") as (server, url, authorities):
        async with client_of(url, proxy=proxy, ssl_context=trusting(authorities)) as client:
            for endpoint in ENDPOINTS:
                assert await call(client, endpoint)
            result = await client.bulk_invite("m1", range(1, 301), chunk_size=10)
    assert (len(result.invited), len(result.rejected)) == (150, 150)
    assert server.ledger.lies(result) == []


async def test_all_calls_go_through_a_forward_proxy(proxy):
    with FaultServer() as server:
        async with client_of(server.url, proxy=proxy) as client:
            for endpoint in ENDPOINTS:
                assert await call(client, endpoint)
            result = await client.bulk_invite("m1", range(1, 301), chunk_size=10)
    assert (len(result.invited), len(result.rejected)) == (150, 150)
    assert server.ledger.lies(result) == []


@pytest.mark.parametrize("scheme", ["https", "http"])
@pytest.mark.parametrize("password", ["none", "wrong"])
async def test_wrong_credentials_are_reported_with_the_status_and_nothing_was_sent(scheme, password, proxy):
    """Tinyproxy responds 401 to a wrong password. A service behind a forward proxy might do that too."""
    is_tinys = password == "wrong" and "401" in await _said_to("sesame", proxy)
    way = proxy.replace(f"agent:{PASSWORD}@", "" if password == "none" else "agent:sesame@")
    with FaultServer() as server:
        async with client_of(
            server.url.replace("http:", f"{scheme}:"), proxy=way, retry=RetryPolicy()
        ) as client:
            with pytest.raises(SamplingError) as caught:
                await client.get_settings()
            result = await client.bulk_invite("m1", [1, 2])
    assert server.ledger.received == []
    assert "sesame" not in str(caught.value)
    if is_tinys and scheme == "http":
        assert "answered 401" in str(caught.value)
        assert [outcome.status for outcome in result] == ["unknown"] * 2
        return
    status = 401 if is_tinys else 407
    assert f"the proxy answered {status}: check the user" in str(caught.value)
    assert (caught.value.delivery, caught.value.permanent) == ("not_sent", True)
    assert [outcome.status for outcome in result] == ["not_sent"] * 2


async def _said_to(password: str, proxy: str) -> str:
    """Return the error after a wrong password."""
    async with client_of("https://127.0.0.1:1", proxy=proxy.replace(PASSWORD, password)) as client:
        with pytest.raises(TransportError) as caught:
            await client.get_settings()
    return str(caught.value)


async def test_the_error_of_an_unreachable_service_mentions_the_proxy(proxy):
    async with client_of("https://127.0.0.1:1", proxy=proxy) as client:
        with pytest.raises(TransportError, match=r"the proxy answered 5\d\d; nothing was sent") as caught:
            await client.get_settings()
    assert (caught.value.delivery, caught.value.permanent) == ("not_sent", False)


@pytest.mark.asyncio
@pytest.mark.parametrize("scheme", ["https", "http"])
async def test_after_many_cancelled_calls_through_a_proxy_all_calls_work(scheme, proxy):
    """The engine of httpx stopped working after 600 of them."""
    slow = [*PROCESSED, wait(0.002), answer()]
    with tls_server("none" if scheme == "https" else "plain_text", then=slow) as (server, https, authorities):
        url = https if scheme == "https" else server.url
        async with client_of(url, proxy=proxy, ssl_context=trusting(authorities)) as client:
            for round_ in range(20):
                async with anyio.create_task_group() as tasks:
                    for number in range(10):
                        tasks.start_soon(_cut_off, client, (number * 20 + round_) % 20 / 1000)
            for _ in range(20):
                with anyio.fail_after(60):
                    await client.get_settings()
    assert connections_to(proxy) == 0


def connections_to(url: str) -> int:
    """Return how many sockets of this process lead to an address."""
    peers = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(each.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(each.name))) as sock:
                    peers.append(sock.getpeername()[1:2])
    return peers.count((urlsplit(url).port,))


async def _cut_off(client: SamplingClient, seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await client.get_settings()


@pytest.mark.asyncio
async def test_nginx_accepts_our_client_certificate_and_tls_sessions_are_resumed(tmp_path, monkeypatch):
    authority = trustme.CA()
    authority.issue_cert("partner@example.org").private_key_and_cert_chain_pem.write_to_path(tmp_path / "me")
    authority.cert_pem.write_to_path(tmp_path / "authority")
    monkeypatch.setenv("SAMPLING_CA_FILE", str(tmp_path / "authority"))
    monkeypatch.setenv("SAMPLING_CLIENT_CERT", str(tmp_path / "me"))
    given = {"panel_guid": doubles.PANEL, "api_key": doubles.KEY, "retry": ONCE}
    tells = "add_header Set-Cookie $ssl_session_reused always;"
    with FaultServer() as server, nginx_that_asks_who(server.url, authority, location=tells) as url:
        async with SamplingClient.from_env(base_url=url, **given) as client:
            result = await client.bulk_invite("m1", range(1, 11))
            assert len(result.invited) == 5
            client._session.close_idle()
            assert len(await client.get_settings()) == 2
            (connection,) = client._session.engine._idle
            assert connection._wire._sock.session_reused
        stranger = trusting(tmp_path / "authority")
        async with client_of(url, ssl_context=stranger) as client:
            with pytest.raises(
                BadRequestError
            ) as caught:  # nginx completes the handshake, and then refuses in HTML
                await client.get_settings()
            assert "No required SSL certificate was sent" in caught.value.body_excerpt


@pytest.mark.asyncio
async def test_a_client_certificate_works_through_squid(tmp_path):
    authority = trustme.CA()
    context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    authority.issue_cert("partner@example.org").configure_cert(context)
    with FaultServer(then=RIGHT) as server, nginx_that_asks_who(server.url, authority) as url:
        with squid() as proxy:
            async with client_of(url, proxy=proxy, ssl_context=context) as client:
                result = await client.bulk_invite("m1", range(1, 101), chunk_size=10)
    assert len(result.invited) == 50
