"""A service that goes away behind nginx, and an nginx with a rate limit."""

from __future__ import annotations

import math
import time

import doubles
import pytest
from backend import Backend
from real_proxies import nginx

from sampling_async import InviteRequest, RetryPolicy, SamplingClient

pytestmark = pytest.mark.asyncio

WIDTH = 8
LIMITS = "limit_req_zone $server_port zone=all:1m rate=20r/s;"
AWAY = ("200 '<p>Back soon'", "302 /maintenance", "404")
INSTEAD = "location @away { default_type text/html; return %s; }"
DIRECT = RetryPolicy(unprocessed={408, 425, 429, 503})


def client_of(url: str, **options) -> SamplingClient:
    """Return a client with the real clock, because these tests measure time."""
    return SamplingClient(url, panel_guid=doubles.PANEL, api_key=doubles.KEY, max_concurrency=WIDTH, **options)


@pytest.mark.parametrize("behind", [None, "", *(INSTEAD % each for each in AWAY)])
async def test_an_outage_costs_one_window_and_its_end_is_noticed_soon(behind):
    instead = {"location": "error_page 502 504 = @away;", "server": behind} if behind else {}
    with Backend(0.002) as backend, nginx(backend.url, **instead) as proxied:
        url = backend.url if behind is None else proxied

        def requests():
            number = 0
            while backend.back_at == math.inf or number % 100:
                number += 1
                yield InviteRequest(f"m{number}", [2, 3])

        with backend.outage(0.3, 1.0):
            async with client_of(url) as client, client.fan_out(requests()) as outcomes:
                seen = [outcome async for outcome in outcomes]
        assert backend.ledger.lies(seen) == []
    statuses = [outcome.status for outcome in seen]
    # What is no overload lowers no limit, so others are sent until five have failed.
    assert statuses.count("unknown") <= 2 * (WIDTH + (4 if behind else 1))
    assert statuses.count("not_sent") == 0
    assert {"invited", "rejected"} <= set(statuses[-200:])  # these may include the requests that hung


@pytest.mark.parametrize(("status", "policy"), [(429, None), (503, DIRECT), (503, None)])
async def test_the_client_uses_the_rate_that_nginx_allows_and_little_is_refused(status, policy):
    location = f"limit_req zone=all burst=5; limit_req_status {status};"
    requests = [InviteRequest(f"m{number}", [2, 3]) for number in range(60)]
    began = time.monotonic()
    with Backend() as backend, nginx(backend.url, http=LIMITS, location=location) as url:
        async with client_of(url, retry=policy) as client, client.fan_out(requests) as outcomes:
            seen = [outcome async for outcome in outcomes]
        assert backend.ledger.lies(seen) == []
    statuses = [outcome.status for outcome in seen]
    assert statuses.count("not_sent") == 0
    # Unknown are only IDs from the beginning, before the rate is known: their 503 proves nothing.
    assert statuses.count("unknown") <= (2 * 10 if status == 503 and policy is None else 0)
    assert time.monotonic() - began < 2 * 60 / 20 + 5
