"""Monitoring agents: calls avoid what agents wrap, and agents transmit none of our secrets.

The agents themselves run in other processes (`agent_canary.py`), if they are installed: the
dependency group `scoreboard` has them. The other tests imitate them everywhere.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import types
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path

import anyio
import doubles
import httpcore
import httpx
import pytest
import wire
from agent_canary import AGENTS, CALLERS, TELEMETRY

from sampling_async import RetryPolicy, SamplingClient

CANARY = Path(__file__).with_name("agent_canary.py")
MEMBER = "canary"


def installed(agent: str) -> bool:
    try:
        return find_spec(AGENTS[agent].module) is not None
    except ModuleNotFoundError:  # of its parent package
        return False


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_would_transmit_none_of_our_secrets(agent, caller):
    if not installed(agent):
        pytest.skip(f"{agent} is not installed; the dependency group `scoreboard` has it")
    command = [sys.executable, str(CANARY), agent, caller]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["texts"]
    if caller == "plain":  # proves that a hit can be seen
        assert all(found["hits"][name] for name in ("member code", "panel", "URL"))
        assert found["hits"]["key"] or agent in {"sentry", "newrelic"}  # these read no headers
    else:
        assert not any(found["hits"].values()), found


def test_our_own_spans_and_metrics_hold_none_of_our_secrets():
    if not installed("opentelemetry"):
        pytest.skip("the dependency group `scoreboard` has the instrumentation of httpx")
    command = [sys.executable, str(CANARY), "opentelemetry", TELEMETRY]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["texts"] > 8  # spans of calls and attempts, and the metrics
    assert not any(found["hits"].values()), found


async def used(client: SamplingClient) -> None:
    async with client:
        assert {outcome.status for outcome in await client.bulk_invite(MEMBER, range(1, 201))} == {"rejected"}


def client_of(url: str, **options) -> SamplingClient:
    options |= {"panel_guid": doubles.PANEL, "api_key": doubles.KEY, "retry": RetryPolicy(max_attempts=1)}
    return SamplingClient(url, **options)


WRAPPED = [
    (httpx.AsyncClient, "send"),
    (httpx.AsyncClient, "request"),
    (httpx.AsyncClient, "build_request"),
    (httpx.AsyncClient, "_send_handling_auth"),
    (httpx.AsyncClient, "_send_handling_redirects"),
    (httpx.AsyncClient, "_send_single_request"),
    (httpx.AsyncHTTPTransport, "handle_async_request"),
    (httpcore.AsyncConnectionPool, "handle_async_request"),
    (httpcore.AsyncHTTPConnection, "handle_async_request"),
]


def watched(monkeypatch, targets) -> list[str]:
    """Wrap methods as agents do, without a change of their names and modules."""
    seen: list[str] = []

    def wrap(target: type, name: str) -> None:
        method = getattr(target, name)

        @functools.wraps(method)
        def wrapper(self, *args, **options):
            seen.append(f"{target.__name__}.{name}")
            return method(self, *args, **options)

        monkeypatch.setattr(target, name, wrapper)

    for target, name in targets:
        wrap(target, name)
    return seen


async def test_no_call_goes_through_what_agents_wrap(monkeypatch):
    seen = watched(monkeypatch, WRAPPED)
    with wire.serve(wire.serve_each(wire.bulk_answer)) as url:
        await used(client_of(url))
        assert not seen
        async with httpx.AsyncClient() as theirs:
            await theirs.post(url, json={"QuotaIDs": []})
    assert {"AsyncClient.send", "AsyncHTTPTransport.handle_async_request"} < set(seen)


async def test_no_call_over_a_transport_of_httpx_goes_through_its_client(monkeypatch):
    seen = watched(monkeypatch, WRAPPED[:6])
    with wire.serve(wire.serve_each(wire.bulk_answer)) as url:
        await used(client_of(url, transport=httpx.AsyncHTTPTransport()))
    assert not seen


async def test_a_transport_that_an_agent_puts_between_a_client_and_its_own_is_not_used(monkeypatch):
    made, init = [], httpx.AsyncClient.__init__

    class Between(httpx.AsyncBaseTransport):
        """As earlier versions of OpenTelemetry: it wraps the transport that a client is given."""

    def with_between(self, **options) -> None:
        init(self, **options)
        self._transport = Between()
        made.append(self)

    monkeypatch.setattr(httpx.AsyncClient, "__init__", with_between)
    with wire.serve(wire.serve_each(wire.bulk_answer)) as url:
        await used(client_of(url, transport=httpx.AsyncHTTPTransport()))
        await used(client_of(url))
    assert len(made) == 2


suppressed: ContextVar[bool] = ContextVar("suppressed", default=False)


@pytest.fixture
def telemetry(monkeypatch) -> None:
    """Imitate OpenTelemetry, whose instrumentation checks whether it is suppressed."""

    @contextmanager
    def suppress_http_instrumentation():
        token = suppressed.set(True)
        try:
            yield
        finally:
            suppressed.reset(token)

    module = types.ModuleType("opentelemetry.instrumentation.utils")
    module.suppress_http_instrumentation = suppress_http_instrumentation
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("telemetry")
@pytest.mark.parametrize("answer", [doubles.bulk, httpx.ConnectError("refused"), KeyError("of the transport")])
async def test_open_telemetry_is_suppressed_for_other_transports(answer):
    during: list[bool] = []

    async def answered(request: httpx.Request) -> httpx.Response:
        during.append(suppressed.get())
        return await doubles.Service(answer)(request)

    async with doubles.client(answered, retry=RetryPolicy(max_attempts=1)) as client:
        (outcome,) = await client.bulk_invite(MEMBER, [1])
        assert (outcome.status == "rejected") is (answer is doubles.bulk)
        async with client.stream_bulk_invite(MEMBER, range(1, 301)) as outcomes:
            async for _ in outcomes:
                assert not suppressed.get()
    assert len(during) >= 4  # the bulk requests and the probes of the outage
    assert all(during)
    assert not suppressed.get()


@pytest.mark.usefixtures("telemetry")
async def test_a_cancelled_call_leaves_the_instrumentation_unchanged():
    arrived = anyio.CancelScope()

    async def silent(_request: httpx.Request) -> httpx.Response:
        arrived.cancel()
        return await anyio.sleep_forever()

    async with doubles.client(silent) as client:
        with arrived:
            await client.get_settings()
        assert not suppressed.get()
    assert arrived.cancelled_caught
