"""Failure modes of the wire: connections that are cut, silent, slow, stale or out of step. On real sockets."""

from __future__ import annotations

import anyio
import doubles
import pytest
from fault_proxy import FaultProxy
from fault_server import (
    ENDPOINTS,
    PROCESSED,
    RIGHT,
    FaultServer,
    answer,
    black_hole,
    broken_chunk,
    cut,
    cut_gzip,
    endless,
    fin,
    flood,
    half_close,
    interim,
    read,
    refused,
    reply,
    rst,
    send,
    silence,
    slices,
    surplus,
    till_next,
    tls_server,
    twin,
    wait,
)
from kit import ONCE, QUICK, call, client_of

from sampling_async import (
    BadRequestError,
    BodyLimits,
    DecodeError,
    IncompleteBulkError,
    RetryPolicy,
    Timeouts,
    TransportError,
    TransportTimeoutError,
)

AMBIGUOUS = {
    "silence": [*PROCESSED, silence()],
    "fin": [*PROCESSED, fin()],
    "rst": [*PROCESSED, rst()],
    "half-close": [*PROCESSED, half_close()],
    "500": [*PROCESSED, reply(500, '{"Message": "An error has occurred."}')],
    "502": [*PROCESSED, reply(502, "<html>Bad Gateway</html>", "text/html")],
    "504": [*PROCESSED, reply(504, "<html>Gateway Timeout</html>", "text/html")],
    "half a body": [*PROCESSED, cut(-40, "fin")],
    "half a body, reset": [*PROCESSED, cut(-40, "rst")],
    "half a body, close-delimited": [*PROCESSED, cut(-40, "fin", "close")],
    "half a body, chunked": [*PROCESSED, cut(-40, "fin", "chunked")],
    "broken chunk": [*PROCESSED, broken_chunk()],
    "gzip cut under a right length": [*PROCESSED, cut_gzip(8)],
    "html under 200": [*PROCESSED, reply(200, "<html>log in</html>", "text/html")],
    "nothing under 200": [*PROCESSED, reply(200)],
    "garbage": [*PROCESSED, send("SSH-2.0-OpenSSH\r\n"), fin()],
}


@pytest.mark.parametrize("fault", AMBIGUOUS)
async def test_mode_01_a_bulk_invite_that_ends_ambiguously_is_unknown_and_made_once(fault):
    with FaultServer(AMBIGUOUS[fault]) as server:
        async with client_of(server.url, timeouts=QUICK if fault == "silence" else Timeouts()) as client:
            result = await client.bulk_invite("m1", range(1, 6))
        await doubles.until(lambda: server.ledger.processed)
    assert [outcome.status for outcome in result] == ["unknown"] * 5
    assert result.resendable() == ()
    assert len(server.ledger.received) == len(server.ledger.processed) == 1
    assert set(server.ledger.invites.values()) == {1}


async def test_mode_01_sending_again_is_an_option_and_the_outcome_says_so():
    with FaultServer([*PROCESSED, rst()]) as server:
        async with client_of(server.url, retry=RetryPolicy(retry_ambiguous=True)) as client:
            result = await client.bulk_invite("m1", [1, 2])
    assert [outcome.status for outcome in result] == ["unknown", "invited"]
    assert all("sent again" in outcome.anomaly for outcome in result)
    assert server.ledger.invites == {("m1", 2): 2}


async def test_mode_01_an_ambiguous_bulk_invite_is_sent_twice_at_most():
    with FaultServer(then=[*PROCESSED, rst()]) as server:
        async with client_of(server.url, retry=RetryPolicy(max_attempts=9, retry_ambiguous=True)) as client:
            result = await client.bulk_invite("m1", [2])
    assert result[0].status == "unknown"
    assert server.ledger.invites == {("m1", 2): 2}


@pytest.mark.parametrize("fault", ["500", "rst", "html under 200"])
async def test_mode_03_a_failed_chunk_does_not_affect_the_others(fault):
    slow = [*PROCESSED, wait(0.01), answer()]
    with FaultServer(slow, AMBIGUOUS[fault], slow, slow) as server:
        async with client_of(server.url, max_concurrency=4) as client:
            result = await client.bulk_invite("m1", range(1, 41), chunk_size=10)
    assert len(result.unknown) == 10
    assert (len(result.invited), len(result.rejected)) == (15, 15)
    assert server.ledger.lies(result) == []
    with pytest.raises(IncompleteBulkError) as caught:
        result.raise_for_incomplete()
    assert caught.value.bulk_result is result


async def test_mode_06_a_read_succeeds_after_a_stale_connection():
    with FaultServer([*RIGHT, till_next(), rst()]) as server:
        async with client_of(server.url) as client:
            await client.get_settings()
            assert len(await client.get_settings()) == 2
    assert server.opened == 2


async def test_mode_06_a_bulk_invite_on_a_connection_that_died_of_age_is_unknown():
    with FaultServer([*RIGHT, till_next(), rst()]) as server:
        async with client_of(server.url) as client:
            await client.get_settings()
            result = await client.bulk_invite("m1", [2])
            assert result[0].status == "unknown"
            assert (await client.bulk_invite("m1", [2]))[0].status == "invited"
    assert server.ledger.invites == {("m1", 2): 1}


@pytest.mark.parametrize("end", [fin, rst])
async def test_mode_06_a_connection_the_service_has_closed_is_not_used_again(end):
    with FaultServer(then=[*RIGHT, end()]) as server:
        async with client_of(server.url) as client:
            for number in range(1, 6):
                assert (await client.bulk_invite("m1", [2]))[0].status == "invited"
                await server.has_done(number)
    assert server.opened == 5


@pytest.mark.parametrize("late", [False, True], ids=["in one packet", "later"])
async def test_mode_07_a_surplus_response_is_never_taken_for_the_next_one(late):
    """Two members ask for the same quotas, so only the link tells whose invite it is."""
    fault = [*RIGHT, wait(0.003), surplus()] if late else [*PROCESSED, twin()]
    with FaultServer(then=fault) as server:
        async with client_of(server.url, max_concurrency=1) as client:
            for number in range(10):
                result = await client.bulk_invite(f"m{number}", [2, 4])
                assert server.ledger.lies(result) == []
                await anyio.sleep(0.008 if late else 0)
                invite = await client.generate_invite(f"m{number}", 2)
                assert f"m{number}/2" in invite.url
                await anyio.sleep(0.008 if late else 0)


@pytest.mark.parametrize("endpoint", ["get_settings", "get_quotas", "recontact_members"])
async def test_mode_07_a_read_after_a_surplus_response_gets_its_own_response(endpoint):
    with FaultServer([*PROCESSED, twin()]) as server:
        async with client_of(server.url, max_concurrency=1, retry=ONCE) as client:
            await client.generate_invite("m1", 2)
            assert await call(client, endpoint)


async def test_mode_08_a_drip_ends_at_the_wall_limit():
    with FaultServer(then=[*PROCESSED, slices(1, 0.005)]) as server:
        limits = Timeouts(read=0.04, wall=0.08)
        async with client_of(server.url, timeouts=limits, retry=ONCE) as client:
            with pytest.raises(TransportTimeoutError) as caught:
                await client.get_settings()
            result = await client.bulk_invite("m1", [2])
    assert caught.value.delivery == "unknown"
    assert result[0].status == "unknown"
    assert isinstance(result[0].error, TransportTimeoutError)


@pytest.mark.parametrize("framing", ["close", "chunked"])
async def test_mode_20_a_body_without_end_is_cut_at_the_limit(framing):
    tracked = doubles.MemoryPeak()
    with FaultServer([*PROCESSED, endless(framing)]) as server, tracked:
        async with client_of(server.url, limits=BodyLimits(wire=2**20)) as client:
            with pytest.raises(DecodeError, match="on the wire") as caught:
                await client.get_settings()
            assert len(await client.get_settings()) == 2
    assert (caught.value.permanent, caught.value.attempts) == (True, 1)
    assert server.opened == 2
    assert tracked.peak < 4 * 2**20


@pytest.mark.parametrize(("headers", "size"), [(10_000, 1), (1, 2**20), (200, 1000)])
async def test_mode_20_a_flood_of_headers_is_read_or_refused_and_ends(headers, size):
    tracked = doubles.MemoryPeak()
    with FaultServer([*PROCESSED, flood(headers, size)]) as server, tracked:
        async with client_of(server.url, retry=ONCE) as client:
            try:
                assert len(await client.get_settings()) == 2
            except TransportError as error:
                assert error.delivery == "unknown"  # noqa: PT017  both ends are right
            assert len(await client.get_settings()) == 2
    assert tracked.peak < 16 * 2**20


@pytest.mark.parametrize("status", [100, 102, 103])
async def test_mode_20_an_interim_response_is_skipped(status):
    with FaultServer(then=[*PROCESSED, interim(status), answer()]) as server:
        async with client_of(server.url) as client:
            assert (await client.bulk_invite("m1", [2]))[0].status == "invited"
            assert len(await client.get_settings()) == 2
    assert server.opened == 1


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("lost", [1, 30, 200])
async def test_mode_21_a_response_cut_by_a_proxy_is_unknown(how, lost):
    with FaultServer() as server:
        whole = len(await _answer_to_a_bulk_invite(server))
        with FaultProxy(server.url, cut_at=whole - lost, cut_how=how) as proxy:
            async with client_of(proxy.url) as client:
                result = await client.bulk_invite("m1", [1, 2])
    assert [outcome.status for outcome in result] == ["unknown"] * 2


async def _answer_to_a_bulk_invite(server: FaultServer) -> bytes:
    lengths = []
    server.faults.append([*PROCESSED, lambda exchange: lengths.append(exchange.right()), answer()])
    async with client_of(server.url) as client:
        await client.bulk_invite("m1", [1, 2])
    return lengths[0]


async def test_mode_21_a_response_in_slow_slices_is_complete():
    with FaultServer() as server, FaultProxy(server.url, slice_size=40, delay=0.0005, rate=1e6) as proxy:
        async with client_of(proxy.url) as client:
            result = await client.bulk_invite("m1", range(1, 11))
            assert len(await client.get_settings()) == 2
    assert server.ledger.lies(result) == []
    assert len(result.unknown) == 0


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("where", ["refused", "no such host"])
async def test_mode_34_a_request_that_could_not_connect_is_not_sent_and_is_retried(endpoint, where):
    url = refused() if where == "refused" else "https://nowhere.invalid"
    async with client_of(url, retry=RetryPolicy(max_attempts=2)) as client:
        if endpoint == "bulk_invite":
            result = await call(client, endpoint)
            assert result.resendable() == (2, 3)
            error = result[0].error
        else:
            with pytest.raises(TransportError) as caught:
                await call(client, endpoint)
            error = caught.value
    assert (error.delivery, error.attempts, error.permanent) == ("not_sent", 2, False)


async def test_mode_34_connecting_to_a_host_that_drops_packets_ends_at_the_connect_limit():
    with black_hole() as url:
        limits = Timeouts(connect=0.05)
        async with client_of(url, timeouts=limits, retry=RetryPolicy(max_attempts=2)) as client:
            with anyio.fail_after(60):
                result = await client.bulk_invite("m1", [2])
    assert result.resendable() == (2,)
    assert isinstance(result[0].error, TransportTimeoutError)
    assert result[0].error.attempts == 2


@pytest.mark.parametrize("fault", ["wrong_host", "expired", "unknown_authority"])
async def test_mode_34_a_refused_certificate_is_permanent_and_nothing_was_sent(fault, monkeypatch):
    with tls_server(fault) as (server, url, authorities):
        monkeypatch.setenv("SSL_CERT_FILE", authorities)
        async with client_of(url) as client:
            with pytest.raises(TransportError, match="certificate was refused") as caught:
                await client.get_settings()
            result = await client.bulk_invite("m1", [2])
    assert (caught.value.delivery, caught.value.permanent, caught.value.attempts) == ("not_sent", True, 1)
    assert result.resendable() == (2,)
    assert server.ledger.received == []


async def test_mode_34_plain_text_where_tls_is_expected_is_not_sent(monkeypatch):
    plain = [reply(400, "this port speaks no TLS", "text/plain"), fin()]
    with tls_server("plain_text", then=plain) as (_, url, authorities):
        monkeypatch.setenv("SSL_CERT_FILE", authorities)
        async with client_of(url, timeouts=QUICK, retry=ONCE) as client:
            result = await client.bulk_invite("m1", [2])
    assert result.resendable() == (2,)


async def test_mode_35_an_early_response_and_a_reset_cause_no_false_outcome():
    """The reset may destroy the response: the outcome is `unknown` then, and `not_sent` if the 413 was read."""
    too_large = [reply(413, "too large", "text/plain", "Connection: close"), fin()]
    with FaultServer(then=too_large) as server:
        async with client_of(server.url) as client:
            result = await client.bulk_invite("m1", range(1, 101))
    assert {outcome.status for outcome in result} < {"unknown", "not_sent"}
    assert server.opened == 1
    assert server.ledger.received == []


async def test_mode_35_an_early_response_that_arrives_counts():
    early = [reply(400, '{"ResultCode": 10, "Result": "NO_QUOTA_ID"}'), read(), fin()]
    with FaultServer(early) as server:
        async with client_of(server.url) as client:
            result = await client.bulk_invite("m1", [2])
            await server.has_done(1)
            assert (await client.bulk_invite("m1", [2]))[0].status == "invited"
    assert result[0].status == "not_sent"
    assert isinstance(result[0].error, BadRequestError)
    assert server.opened == 2


async def test_mode_36_http_2_is_not_offered(monkeypatch):
    chosen = []

    def look(exchange) -> None:
        chosen.append(exchange.connection.sock.selected_alpn_protocol())

    with tls_server("none", [look, *RIGHT]) as (_, url, authorities):
        monkeypatch.setenv("SSL_CERT_FILE", authorities)
        async with client_of(url) as client:
            assert len(await client.get_settings()) == 2
    assert chosen == ["http/1.1"]
