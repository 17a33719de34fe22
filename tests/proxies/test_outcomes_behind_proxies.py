"""Responses that proxies give in place of the service, and the outcomes that follow."""

from __future__ import annotations

import pytest
from fault_server import PROCESSED, RIGHT, FaultServer, answer, read, reply, rst, send
from kit import client_of
from real_proxies import nginx, varnish

from sampling_async import InviteRequest, RetryPolicy, ServerError, TransportError

pytestmark = pytest.mark.asyncio

FAULT_IN_400 = '{"Result": "TECHNICAL_ERROR", "ResultCode": 36}'
CUT_400 = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n\r\n{FAULT_IN_400[:20]}"
DIRECT = RetryPolicy(unprocessed={408, 425, 429, 503})


async def test_a_503_from_varnish_leaves_a_bulk_invite_unknown(tmp_path):
    """Its page even has Retry-After: three requests would make three invites for each ID."""
    with FaultServer(then=[*PROCESSED, rst()]) as server, varnish(server.url) as url:
        async with client_of(url) as client:
            requests = [InviteRequest("m1", [2, 3])]
            async with client.fan_out(requests, journal=tmp_path / "journal") as outcomes:
                first = [outcome async for outcome in outcomes]
            async with client.fan_out(requests, journal=tmp_path / "journal") as outcomes:
                again = [outcome async for outcome in outcomes]
    for told in (first, again):
        assert [outcome.status for outcome in told] == ["unknown", "unknown"]
        assert server.ledger.lies(told) == []
    assert isinstance(first[0].error, ServerError)
    assert first[0].error.status == 503
    assert len(server.ledger.processed) == 1


async def test_a_503_from_varnish_leaves_a_single_invite_unknown():
    with FaultServer(then=[*PROCESSED, rst()]) as server, varnish(server.url) as url:
        async with client_of(url) as client:
            with pytest.raises(ServerError) as caught:
                await client.generate_invite("m1", 2)
    assert (caught.value.status, caught.value.delivery) == (503, "unknown")
    assert server.ledger.processed


async def test_a_503_counts_as_a_refusal_if_the_policy_says_so():
    with FaultServer([read(), reply(503)], then=RIGHT) as server, varnish(server.url) as url:
        async with client_of(url, retry=DIRECT) as client:
            result = await client.bulk_invite("m1", [2, 3])
    assert (len(result.invited), len(server.ledger.received)) == (1, 2)


async def test_a_cut_400_that_nginx_completes_leaves_a_bulk_invite_unknown():
    """It uses HTTP/1.0 to the backend, where the end of the connection is the end of the body."""
    with FaultServer(then=[*PROCESSED, send(CUT_400), rst_softly]) as server, nginx(server.url) as url:
        async with client_of(url) as client:
            result = await client.bulk_invite("m1", range(1, 11))
    assert [outcome.status for outcome in result] == ["unknown"] * 10
    assert server.ledger.lies(result) == []
    assert len(server.ledger.processed) == 1


def rst_softly(exchange) -> None:
    """End the connection like a backend that dies between two writes."""
    exchange.connection.sock.close()
    exchange.over = True


async def test_a_502_from_nginx_leaves_a_bulk_invite_unknown():
    with FaultServer(then=[*PROCESSED, rst()]) as server, nginx(server.url) as url:
        async with client_of(url) as client:
            result = await client.bulk_invite("m1", [2, 3])
    assert [outcome.error.status for outcome in result.unknown] == [502, 502]
    assert len(server.ledger.processed) == 1


async def test_a_cut_400_that_ends_with_the_connection_proves_nothing():
    with FaultServer(then=[*PROCESSED, send(CUT_400), rst_softly]) as server:
        async with client_of(server.url) as client:
            result = await client.bulk_invite("m1", range(1, 11))
    assert (len(result.unknown), len(server.ledger.processed)) == (10, 1)


async def test_a_bulk_behind_nginx_or_varnish_gives_the_same_outcomes():
    with FaultServer(then=[*PROCESSED, answer()]) as server:
        for proxy in (nginx, varnish):
            with proxy(server.url) as url:
                async with client_of(url) as client:
                    result = await client.bulk_invite("m1", range(1, 301), chunk_size=10)
            assert (len(result.invited), len(result.rejected)) == (150, 150)
            assert not isinstance(result[0].error, TransportError)
