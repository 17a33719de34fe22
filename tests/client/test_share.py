"""Shares of a client: the same settings, a part of the limit, and nothing else in common."""

from __future__ import annotations

import pickle
import ssl
import traceback

import anyio
import doubles
import httpx
import pytest
import respx

from sampling_async import (
    BodyLimits,
    ClientClosedError,
    InvalidRequestError,
    InviteRequest,
    OutagePolicy,
    RetryPolicy,
    SamplingClient,
    Timeouts,
)
from sampling_async.simulator import Latency, Simulator

SETTINGS = "/IntegratedPanelService/api/Settings"
PASSWORD = "hunter2"
BASIC = "YWdlbnQ6aHVudGVyMg=="  # the same in the header: agent:hunter2


def client_of(url: str = "https://service.example/prefix", **options) -> SamplingClient:
    return SamplingClient(url, **{"panel_guid": doubles.PANEL, "api_key": doubles.KEY, **options})


# --- How much


@pytest.mark.parametrize(("limit", "of", "part"), [(64, 8, 8), (10, 3, 3), (8, 8, 1), (7, 1, 7)])
def test_a_share_has_its_part_of_the_limit_rounded_down(limit, of, part):
    client = client_of(max_concurrency=limit)
    share = client.share(of=of)
    assert share.snapshot().max_concurrency == part
    assert client.snapshot().max_concurrency == limit
    assert repr(share) == f"<SamplingClient service.example: 0 of {part} running, 0 waiting>"


def test_a_share_can_be_divided_again():
    assert client_of(max_concurrency=64).share(of=4).share(of=5).snapshot().max_concurrency == 3


def test_shares_begin_with_as_many_requests_as_the_whole_client():
    whole = client_of(max_concurrency=64)
    clients = (whole, whole.share(of=4), whole.share(of=2).share(of=4))
    assert [client.snapshot().limit for client in clients] == [8, 2, 1]


@pytest.mark.parametrize("of", [0, -1, True, 2.0, "2", None])
def test_a_number_that_is_none_is_refused(of):
    with pytest.raises(InvalidRequestError, match="of must be a whole number of at least 1"):
        client_of().share(of=of)


@pytest.mark.parametrize(("of", "shown"), [(9, "9"), (10**999, "a number too large for a float")])
def test_more_shares_than_requests_are_refused(of, shown):
    rule = f"at most max_concurrency, which is 8, not {shown}: each share needs .*, or make fewer of them$"
    with pytest.raises(InvalidRequestError, match=rule):
        client_of().share(of=of)


def test_a_client_with_a_transport_has_no_shares():
    client = doubles.client(doubles.Service([]), max_concurrency=10)
    with pytest.raises(InvalidRequestError, match=r"its own transport and max_concurrency=3$"):
        client.share(of=3)


# --- What carries over


def test_all_settings_carry_over():
    time, context = doubles.FakeTime(), ssl.create_default_context()
    given = {
        "timeouts": Timeouts(read=7),
        "retry": RetryPolicy(budget=3),
        "outage": OutagePolicy(patience=11),
        "limits": BodyLimits(),
        "proxy": f"http://agent:{PASSWORD}@proxy:3128",
        "ssl_context": context,
        "idle_seconds": 1.5,
        "clock": time.clock,
        "sleep": time.sleep,
        "random": lambda: 0.5,
    }
    client = client_of("http://service.example", allow_http=True, **given)
    share = client.share(of=2)
    settings = share._new_session.keywords
    assert settings["timeouts"] is share._session.timeouts is given["timeouts"]
    assert share._session._limits is given["limits"]
    assert share._caller.policy is given["retry"]
    assert share._outage.policy is given["outage"]
    assert (share._base_url, share._panel_guid) == (client._base_url, doubles.PANEL)
    assert share._gate.clock == share._caller.clock == time.clock
    assert (share._sleep, share._random) == (time.sleep, given["random"])
    engine = share._session.engine
    assert (engine._proxy.host, engine._proxy.port, engine._tls) == ("proxy", 3128, context)
    assert engine._idle_time.seconds == 1.5


async def test_a_request_of_a_share_carries_the_key():
    async with client_of().share(of=2) as share:
        with respx.mock:
            route = respx.get(f"https://service.example/prefix{SETTINGS}?partnerGUID={doubles.PANEL}").respond(
                json=[]
            )
            await share.get_settings()
    assert route.calls.last.request.headers["API_AUTH_KEY"] == doubles.KEY


async def test_policies_work_in_a_share_and_its_retry_budget_is_its_own():
    time = doubles.FakeTime()
    retry = RetryPolicy(max_attempts=3, budget=2)
    async with client_of(clock=time.clock, sleep=time.sleep, retry=retry) as client, client.share(2) as share:
        with respx.mock:
            answers = [httpx.Response(500), httpx.Response(500), httpx.Response(200, json=[])]
            route = respx.get(path=f"/prefix{SETTINGS}").mock(side_effect=answers)
            await share.get_settings()
        assert route.call_count == 3
        assert len(time.slept) == 2
        assert share.snapshot().retry_tokens < 1
        assert client.snapshot().retry_tokens == 2


# --- Independence


async def test_closing_one_does_not_close_the_other():
    client = client_of()
    first, second = client.share(of=2), client.share(of=2)
    await first.aclose()
    assert [each._session.closed for each in (client, first, second)] == [False, True, False]
    await client.aclose()
    assert not second._session.closed
    await second.aclose()


def test_a_share_has_nothing_that_changes_in_common_with_its_client():
    client = client_of()
    share = client.share(of=2)
    for name in ("_session", "_outage", "_gate", "_caller", "_quotas"):
        assert vars(share)[name] is not vars(client)[name]
    assert share._session.engine is not client._session.engine
    assert share._caller.budget is not client._caller.budget


@pytest.fixture
def sim():
    return Simulator(seed=3, surveys=20, members=30, latency=Latency(a=0.02))


def client_for(sim: Simulator, url: str, **options) -> SamplingClient:
    return client_of(url, panel_guid=sim.panel_guid, api_key=sim.api_key, **options)


async def test_a_client_that_was_used_or_closed_has_shares(sim):
    with sim.serve() as url:
        async with client_for(sim, url) as client, client.share(of=2) as unused:
            await client.get_settings()
            used = client.share(of=2)
            await used.get_settings()
        async with used, client.share(of=2) as of_closed:
            assert unused._session.closed
            assert (await used.get_quotas()).surveys
            assert (await of_closed.get_quotas()).surveys
        with pytest.raises(ClientClosedError):
            await client.get_settings()


def test_a_share_works_on_another_event_loop_than_its_client(sim):
    async def used(client: SamplingClient) -> None:
        async with client:
            await client.get_settings()

    with sim.serve() as url:
        client = client_for(sim, url)
        for each in (client, client.share(of=2)):
            anyio.run(used, each)


async def test_three_shares_of_six_never_have_more_than_six_requests_in_flight(sim):
    sim.app = in_flight = doubles.InFlight(sim.app)
    quota_ids = [quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas]
    requests = [InviteRequest(member, quota_ids) for member in sim.members]
    outcomes = []

    async def work(part: int) -> None:
        async with client_for(sim, url, max_concurrency=6).share(of=3) as share:
            async with share.fan_out(requests[part::3], chunk_size=10) as stream:
                outcomes.extend([outcome async for outcome in stream])

    with sim.serve() as url:
        async with anyio.create_task_group() as group:
            for part in range(3):
                group.start_soon(work, part)
    assert 2 < in_flight.most <= 6
    assert len(outcomes) == len(requests) * len(quota_ids)
    assert sim.ledger.check(outcomes).ok
    assert max(sim.ledger.by_pair().values()) == 1


# --- Secrets


def shown(thing: object, depth: int = 4) -> str:
    """Return what a debugger shows of an object: its repr, and its attributes' to some depth."""
    texts = [repr(thing)]
    if depth and texts != ["<secret>"]:
        inside = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
        inside += getattr(thing, "__dict__", {}).values()
        inside += [*getattr(thing, "args", ()), *getattr(thing, "keywords", {}).values()]
        texts += [shown(each, depth - 1) for each in inside if not isinstance(each, type)]
    return "\n".join(texts)


SECRETS = (doubles.KEY, doubles.KEY.replace("-", ""), PASSWORD, BASIC)


def test_neither_a_client_nor_its_share_shows_secrets():
    client = client_of(proxy=f"http://agent:{PASSWORD}@proxy:3128")
    for each in (client, client.share(of=2)):
        text = f"{each!r} {vars(each)} {shown(each)}"
        assert "proxy:3128" in text
        assert not [secret for secret in SECRETS if secret in text]
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            pickle.dumps(each)


@pytest.mark.parametrize("of", [0, 9])
def test_a_refused_share_shows_no_secrets(of):
    client = client_of(proxy=f"http://agent:{PASSWORD}@proxy:3128")
    with pytest.raises(InvalidRequestError) as caught:
        client.share(of=of)
    trace = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    text = f"{caught.value} {[frame.locals for frame in trace.stack]} {pickle.dumps(caught.value)}"
    assert "SamplingClient service.example" in text
    assert not [secret for secret in SECRETS if secret in text]


# --- Subclasses


class Counting(SamplingClient):
    """A subclass with arguments of its own, which refuses to be copied."""

    made = 0

    def __init__(self, name: str, /) -> None:
        type(self).made += 1
        super().__init__(f"https://{name}.example", panel_guid=doubles.PANEL, api_key=doubles.KEY)
        self.names = [name]

    def __reduce__(self):
        raise TypeError("not this one")


def test_a_share_of_a_subclass_has_its_class_and_its_attributes(monkeypatch):
    monkeypatch.setattr(Counting, "made", 0)
    client = Counting("service")
    share = client.share(of=2)
    assert type(share) is Counting
    assert Counting.made == 1
    assert share.names is client.names
    assert share._outage._send_probe.__self__ is share
    assert share.snapshot().max_concurrency == 4
