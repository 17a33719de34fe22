"""The client: construction, the five calls, recontact paging."""

from __future__ import annotations

import gc
import json
import pickle
import ssl
import traceback
from contextlib import aclosing
from functools import partial
from pathlib import Path
from uuid import UUID

import anyio
import anyio.lowlevel
import doubles
import httpx
import inventories
import pytest
import respx
import wire
from anyio import wait_all_tasks_blocked

from sampling_async import (
    InvalidRequestError,
    InviteRequest,
    Journal,
    JournalError,
    PagingError,
    RetryPolicy,
    SamplingClient,
    ServerError,
    Timeouts,
)

BASE = "https://service.example/prefix"
SAMPLES = f"{BASE}/IPExternalSamplingService/ExternalSample/{doubles.PANEL}"


# --- Construction


@pytest.mark.parametrize("value", [0, -1, True, 2.0, None])
def test_an_invalid_limit_is_refused(value):
    with pytest.raises(InvalidRequestError, match="max_concurrency"):
        doubles.client(doubles.Service([]), max_concurrency=value)


def test_a_client_is_made_from_the_environment(monkeypatch):
    monkeypatch.setenv("SAMPLING_BASE_URL", "https://service.example")
    monkeypatch.setenv("SAMPLING_PANEL_GUID", doubles.PANEL)
    monkeypatch.setenv("SAMPLING_API_KEY", doubles.KEY)
    assert "service.example" in repr(SamplingClient.from_env())
    client = SamplingClient.from_env(base_url="https://other.example", max_concurrency=3)
    assert repr(client) == "<SamplingClient other.example: 0 of 3 running, 0 waiting>"


@pytest.mark.parametrize("name", ["BASE_URL", "PANEL_GUID", "API_KEY"])
def test_a_missing_variable_is_named(monkeypatch, name):
    monkeypatch.setenv("SAMPLING_BASE_URL", "https://service.example")
    monkeypatch.setenv("SAMPLING_PANEL_GUID", doubles.PANEL)
    monkeypatch.setenv("SAMPLING_API_KEY", doubles.KEY)
    monkeypatch.delenv(f"SAMPLING_{name}")
    with pytest.raises(InvalidRequestError, match=f"SAMPLING_{name}; set"):
        SamplingClient.from_env()


def test_all_that_is_missing_is_named_at_once(monkeypatch):
    for name in ("BASE_URL", "PANEL_GUID", "API_KEY"):
        monkeypatch.delenv(f"SAMPLING_{name}", raising=False)
    with pytest.raises(InvalidRequestError, match="BASE_URL, SAMPLING_PANEL_GUID, SAMPLING_API_KEY; set"):
        SamplingClient.from_env()


def test_a_key_or_a_proxy_is_not_shown_if_variables_are_missing(monkeypatch):
    monkeypatch.delenv("SAMPLING_BASE_URL", raising=False)
    proxy = "http://agent:hunter2@proxy.example"
    with pytest.raises(InvalidRequestError, match="SAMPLING_BASE_URL") as caught:
        SamplingClient.from_env(api_key=UUID(doubles.KEY), panel_guid=doubles.PANEL, proxy=proxy)
    trace = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    ours = [str(frame.locals) for frame in trace.stack if "sampling_async" in frame.filename]
    assert doubles.KEY not in "".join(ours)
    assert "hunter2" not in "".join(ours)
    made = SamplingClient.from_env(
        base_url="https://x.example", api_key=UUID(doubles.KEY), panel_guid=doubles.PANEL
    )
    assert "x.example" in repr(made)


async def test_the_client_shows_neither_key_nor_panel_and_is_not_pickled():
    client = doubles.client(doubles.Service([]))
    assert doubles.KEY not in f"{client!r} {vars(client)}"
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(client)
    await client.aclose()
    assert repr(client) == "<SamplingClient service.example: closed, 0 waiting>"


# --- The five requests, as a server sees them


@pytest.fixture
async def client():
    async with SamplingClient(f"{BASE}/", panel_guid=UUID(doubles.PANEL), api_key=doubles.KEY) as client:
        yield client


def sent(route: respx.Route) -> httpx.Request:
    assert route.call_count == 1
    request = route.calls.last.request
    assert request.headers["API_AUTH_KEY"] == doubles.KEY
    assert request.headers["User-Agent"].startswith("sampling-async/")
    assert request.headers["Host"] == "service.example"
    return request


@pytest.mark.parametrize(("flag", "wire"), [(True, "true"), (False, "false")])
async def test_get_quotas(client, flag, wire):
    with respx.mock:
        route = respx.get(f"{SAMPLES}/Quotas?includeRoutables={wire}").respond(json=inventories.quotas())
        quotas = await client.get_quotas(include_routables=flag)
    assert quotas.surveys[0].quotas[0].quota_id == 21
    assert sent(route).content == b""


async def test_bulk_invite(client):
    with respx.mock:
        route = respx.post(f"{SAMPLES}/m%2F1/Invites").respond(json={"Invites": [doubles.item(5, 1)]})
        result = await client.bulk_invite("m/1", [5])
    assert (result[0].status, result[0].member_code) == ("invited", "m/1")
    request = sent(route)
    assert json.loads(request.content) == {"QuotaIDs": [5]}
    assert request.headers["Content-Type"] == "application/json"
    assert request.headers["Content-Length"] == str(len(request.content))


async def test_generate_invite(client):
    with respx.mock:
        body = doubles.invite(5) | {"SurveyId": 7}
        del body["SurveyID"]
        route = respx.get(f"{SAMPLES}/m%201/Invite/5").respond(json=body)
        invite = await client.generate_invite("m 1", 5)
    assert (invite.survey_id, invite.url) == (7, "https://survey.example/5")
    sent(route)


async def test_get_settings(client):
    with respx.mock:
        url = f"{BASE}/IntegratedPanelService/api/Settings?partnerGUID={doubles.PANEL}"
        route = respx.get(url).respond(json=[{"Name": "Qualified URL", "Description": "", "Value": "u"}])
        settings = await client.get_settings()
    assert settings.qualified_url == "u"
    sent(route)


async def test_recontact_members(client):
    with respx.mock:
        url = f"{SAMPLES}/Recontact/5/MemberCodes?maxResults=2&lastMemberCodeReceived=m%261"
        route = respx.get(url).respond(json=doubles.page("m2"))
        codes = [code async for code in client.recontact_members(5, max_results=2, after="m&1")]
    assert codes == ["m2"]
    sent(route)


async def test_json_labelled_as_text_is_accepted(client):
    with respx.mock:
        content = json.dumps(doubles.invite(5)).encode()
        respx.get(f"{SAMPLES}/m/Invite/5").respond(content=content, content_type="application/plaintext")
        assert (await client.generate_invite("m", 5)).quota_id == 5


@pytest.mark.parametrize(("options", "flag"), [({}, "true"), ({"include_routables": False}, "false")])
async def test_a_watch_requests_routables_by_default(options, flag):
    service = doubles.Service(inventories.quotas())
    async with doubles.client(service) as client, client.watch_quotas(**options) as watch:
        await watch.ready()
    assert service.requests[0].url.params["includeRoutables"] == flag


async def test_limits_reach_the_transport():
    service = doubles.Service([])
    async with doubles.client(service, timeouts=Timeouts(connect=1, write=2, read=3)) as client:
        await client.get_settings()
    timeout = service.requests[0].extensions["timeout"]
    assert (timeout["connect"], timeout["write"], timeout["read"]) == (1, 2, 3)


@pytest.mark.parametrize(("ids", "read"), [(1, 15.5), (100, 65)])
async def test_the_read_limit_of_a_bulk_invite_grows_with_its_ids(ids, read):
    service = doubles.Service(doubles.bulk)
    async with doubles.client(service) as client:
        await client.bulk_invite("m", range(1, ids + 1))
    assert service.requests[0].extensions["timeout"]["read"] == read


# --- Recontact paging


def listing(*codes: str, size: int = 2):
    """Serve a recontact list page by page."""

    def answer(request: httpx.Request):
        after = request.url.params.get("lastMemberCodeReceived")
        start = codes.index(after) + 1 if after else 0
        part = codes[start : start + size]
        return doubles.page(*part, more=start + size < len(codes))

    return doubles.Service(answer)


async def test_pages_are_requested_when_they_are_needed():
    service = listing("a", "b", "c", "d", "e")
    async with doubles.client(service) as client:
        async with aclosing(client.recontact_members(5)) as codes:
            assert [await anext(codes), await anext(codes)] == ["a", "b"]
            assert len(service.requests) == 1
            assert [code async for code in codes] == ["c", "d", "e"]
        pages = [page.member_codes async for page in client.recontact_pages(5, after="b")]
    assert pages == [("c", "d"), ("e",)]


@pytest.mark.parametrize("last", ["\t", ".", "..", "a/b?c#d%20+é"])
async def test_a_list_goes_on_behind_any_code_that_came(last):
    service = listing("a", last, "z")
    async with doubles.client(service) as client:
        assert [code async for code in client.recontact_members(5, after=last)] == ["z"]


async def test_iteration_can_be_left_and_resumed_after_the_last_code():
    service = listing("a", "b", "c", "d", "e")
    async with doubles.client(service) as client:
        seen = []
        async with aclosing(client.recontact_members(5)) as codes:
            async for code in codes:
                seen.append(code)
                if len(seen) == 3:
                    break
        seen += [code async for code in client.recontact_members(5, after=seen[-1])]
    assert seen == ["a", "b", "c", "d", "e"]


@pytest.mark.asyncio  # trio warns about generators that are not closed
async def test_iteration_can_be_left_without_closing():
    async with doubles.client(listing("a", "b", "c", "d", "e")) as client:
        async for _ in client.recontact_members(5):
            break
        gc.collect()
        await anyio.lowlevel.checkpoint()
        assert client._gate.running == 0


async def test_pages_wait_for_the_end_of_a_hold_of_their_endpoint():
    time = doubles.FakeTime()
    service = doubles.Service(httpx.Response(503, headers={"Retry-After": "30"}), doubles.page("a"))
    async with doubles.client(service, time, retry=RetryPolicy(max_attempts=1)) as client:
        with pytest.raises(ServerError):
            [code async for code in client.recontact_members(5)]
        assert [code async for code in client.recontact_members(5)] == ["a"]
    assert time.now >= 30


async def test_only_the_failed_page_is_read_again():
    pages = [doubles.page("a", "b", more=True), httpx.Response(500), doubles.page("c")]
    service = doubles.Service(*pages)
    async with doubles.client(service) as client:
        assert [code async for code in client.recontact_members(5)] == ["a", "b", "c"]
    cursors = [request.url.params.get("lastMemberCodeReceived") for request in service.requests]
    assert cursors == [None, "b", "b"]


async def test_a_list_that_does_not_advance_ends_in_an_error_with_the_cursor():
    service = doubles.Service(doubles.page("a", "b", more=True), doubles.page(more=True))
    async with doubles.client(service) as client:
        seen = []
        with pytest.raises(PagingError) as caught:
            async for code in client.recontact_members(5):
                seen.append(code)
    assert (seen, caught.value.cursor, caught.value.attempts) == (["a", "b"], "b", 1)
    assert str(caught.value).endswith(
        ": the page is empty, but the service announces more members; resume later with after=error.cursor"
    )


async def test_codes_of_a_page_that_does_not_advance_are_not_lost():
    service = doubles.Service(doubles.page("a", "b", more=True), doubles.page("c", "d", "b", more=True))
    async with doubles.client(service) as client:
        with pytest.raises(PagingError) as caught:
            assert [code async for code in client.recontact_members(5)] == []
    assert caught.value.member_codes == ("c", "d", "b")
    assert "the page ends with the same code as an earlier page" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_results": 0}, "^max_results must"),
        ({"max_results": True}, "^max_results must"),
        ({"after": ""}, "member code"),
        ({"after": "\ud800"}, "member code"),
        ({"after": 7}, "member code"),
    ],
)
async def test_paging_arguments_are_checked(options, named):
    async with doubles.client(doubles.Service(doubles.page())) as client:
        with pytest.raises(InvalidRequestError, match=named):
            await anext(client.recontact_members(5, **options))


async def test_a_stream_reads_the_next_page_ahead():
    service = listing(*"abcdefgh")
    async with doubles.client(service) as client:
        async with client.stream_recontact_members(5) as codes:
            assert codes.last_taken is None
            assert await anext(codes) == "a"
            await wait_all_tasks_blocked()
            assert len(service.requests) == 2
            assert [code async for code in codes] == list("bcdefgh")
            assert codes.last_taken == "h"


async def test_a_stream_can_be_left_and_resumed():
    async with doubles.client(listing(*"abcdefgh")) as client:
        with pytest.raises(ZeroDivisionError):
            async with client.stream_recontact_members(5) as codes:
                assert [await anext(codes) for _ in range(3)] == ["a", "b", "c"]
                raise ZeroDivisionError
        async with client.stream_recontact_members(5, after=codes.last_taken) as codes:
            assert codes.last_taken == "c"
            assert [code async for code in codes] == list("defgh")
        assert client._gate.running == 0


async def test_a_stream_raises_after_the_codes_before_it():
    service = doubles.Service(doubles.page("a", more=True), httpx.Response(500))
    async with doubles.client(service) as client:
        async with client.stream_recontact_members(5) as codes:
            assert await anext(codes) == "a"
            with pytest.raises(ServerError) as caught:
                await anext(codes)
    assert caught.value.attempts == 3


async def test_a_snapshot_reports_how_long_the_answered_attempts_of_an_endpoint_took():
    time, durations = doubles.FakeTime(), [1.0, 2.0, 3.0, 50.0, 4.0]
    time.now = 1000.0

    async def answer(_: httpx.Request) -> httpx.Response:
        time.now += durations.pop(0)
        return httpx.Response(500 if time.now > 1050 and len(durations) == 1 else 200, json=[])

    async with doubles.client(answer, time, retry=RetryPolicy(max_attempts=1)) as client:
        for _ in range(3):
            await client.get_settings()
        with pytest.raises(ServerError):
            await client.get_settings()
        await client.get_settings()
        (latency,) = client.snapshot().latency.values()
    assert latency.p50 == pytest.approx(2.0, rel=0.1)
    assert latency.p99 == pytest.approx(4.0, rel=0.1)


async def test_a_snapshot_reports_the_rate_how_long_the_service_is_away_and_of_no_connections_of_a_transport():
    time = doubles.FakeTime()
    async with doubles.client(doubles.Service(httpx.ConnectError("gone")), time) as client:
        assert set(client._gate._kinds) == {"bulk_invite"}  # another thread may ask
        assert client.snapshot().requests_per_second is None
        client._gate.kind("bulk_invite").pace.refused(0.0)
        for _ in range(5):
            client._outage.failed("gone", 0.0)
        time.now += 7.0
        told = client.snapshot()
    assert (told.requests_per_second, told.away_for, told.breaker) == (10.0, 7.0, "open")
    assert told.connections is None


@pytest.mark.asyncio
async def test_a_snapshot_counts_the_connections():
    def script(connection: wire.Connection) -> None:
        connection.read_request()
        connection.send(wire.answer(b"[]"))
        if connection.read_request():
            connection.send(wire.answer(b"[]", "200 OK", "Connection: close"))

    with wire.serve(script) as base_url:
        async with SamplingClient(base_url, panel_guid=doubles.PANEL, api_key=doubles.KEY) as client:
            for _ in range(3):
                await client.get_settings()
            told = client.snapshot().connections
            client._session.close_idle()
            closed = client.snapshot().connections
    assert told is not None
    assert closed is not None
    assert (told.opened, told.reused, told.open, told.idle) == (2, 1, 1, 1)
    assert (closed.opened, closed.open, closed.idle) == (2, 0, 0)
    assert told.bytes_sent > told.bytes_received > 100


# --- What is handed on to the parts


def test_by_default_plain_http_is_refused_and_a_connection_is_used_again_within_four_seconds():
    with pytest.raises(InvalidRequestError, match="http"):
        SamplingClient("http://service.example", panel_guid=doubles.PANEL, api_key=doubles.KEY)
    client = SamplingClient(BASE, panel_guid=doubles.PANEL, api_key=doubles.KEY)
    assert client._session.engine._idle_time.limit == 4.0


def test_a_context_of_the_host_s_own_is_used_and_no_files_are_read(monkeypatch):
    monkeypatch.setenv("SAMPLING_CA_FILE", "/nowhere.pem")
    given = {"base_url": BASE, "panel_guid": doubles.PANEL, "api_key": doubles.KEY}
    SamplingClient.from_env(ssl_context=ssl.create_default_context(), **given)
    with pytest.raises(InvalidRequestError, match="SAMPLING_CA_FILE"):
        SamplingClient.from_env(**given)


def test_misuse_of_a_client_is_described_in_full(monkeypatch):
    for variable in ("BASE_URL", "PANEL_GUID", "API_KEY"):
        monkeypatch.delenv(f"SAMPLING_{variable}", raising=False)
    client = doubles.client(doubles.Service([]))

    def said(act) -> str:
        with pytest.raises(InvalidRequestError) as caught:
            act()
        return str(caught.value)

    assert said(lambda: SamplingClient.from_env(api_key=doubles.KEY)) == (
        "the environment has no SAMPLING_BASE_URL, SAMPLING_PANEL_GUID; set what is missing, or give "
        "base_url, panel_guid"
    )
    assert said(lambda: doubles.client(doubles.Service([]), proxy="http://p.example")) == (
        "proxy and ssl_context cannot be combined with your own transport; give them to that transport"
    )
    assert said(lambda: doubles.client(doubles.Service([]), max_concurrency=0)).startswith("max_concurrency ")
    assert said(lambda: client.share(of=9)) == (
        "of must be at most max_concurrency, which is 8, not 9: each share needs at least one request, and the "
        "sum of the shares must not exceed the limit; raise max_concurrency to the number of shares, or make "
        "fewer of them"
    )
    assert said(lambda: client.share(of=3)) == (
        "share() cannot share a transport, because that is closed with its client; give http_client=, or each "
        "client its own transport and max_concurrency=2"
    )
    assert said(lambda: client.stream_bulk_invite("m", 5)).startswith("quota_ids ")
    assert said(lambda: client.fan_out(5)).startswith("requests ")
    assert said(lambda: client.fan_out([], deadline=0)) == "deadline must be seconds above 0, not 0"
    assert said(lambda: doubles.client(doubles.Service([]), telemetry=5)) == (
        "telemetry must be True, False or a Telemetry, not int"
    )


def test_the_repr_of_a_client_that_was_not_made():
    assert repr(object.__new__(SamplingClient)) == "<SamplingClient: not made>"


async def test_a_probe_requests_the_settings_of_the_panel():
    service = doubles.Service([])
    async with doubles.client(service) as client:
        assert await client._send_probe(1.0) is None
    assert doubles.PANEL in str(service.requests[0].url)


async def _all_of(things) -> None:
    async for _ in things:
        pass


@pytest.mark.parametrize(
    ("kind", "act", "body"),
    [
        ("get_quotas", lambda client: client.get_quotas(), inventories.quotas()),
        ("get_quotas", lambda client: _all_of(client.iter_surveys()), inventories.quotas()),
        ("get_settings", lambda client: client.get_settings(), []),
        ("generate_invite", lambda client: client.generate_invite("m", 5), doubles.invite(5)),
        ("recontact_members", lambda client: _all_of(client.recontact_pages(5)), doubles.page("a", more=False)),
    ],
)
async def test_each_call_waits_for_the_hold_of_its_endpoint_and_requests_its_panel(kind, act, body):
    time, service = doubles.FakeTime(), doubles.Service(body)
    async with doubles.client(service, time) as client:
        client._gate.hold(5.0, kind)
        await act(client)
    assert time.slept[0] >= 5.0
    assert doubles.PANEL in str(service.requests[0].url)


async def _bulk(client: SamplingClient, call: str, quota_ids, **options) -> None:
    """Ask for the invites of one member in one of three ways."""
    if call == "bulk_invite":
        await client.bulk_invite("m", quota_ids, **options)
        return
    request = ("m", quota_ids)
    given = request if call == "stream_bulk_invite" else [[InviteRequest(*request)]]
    async with getattr(client, call)(*given, **options) as outcomes:
        await _all_of(outcomes)


@pytest.mark.parametrize("call", ["bulk_invite", "stream_bulk_invite", "fan_out"])
async def test_for_the_first_outcomes_a_small_bulk_becomes_many_requests(call):
    service = doubles.Service(doubles.bulk)
    async with doubles.client(service) as client:
        await _bulk(client, call, range(1, 101), goal="first")
    assert len(service.requests) == 8


@pytest.mark.parametrize("call", ["bulk_invite", "stream_bulk_invite", "fan_out"])
async def test_a_bulk_has_the_weight_1_by_default(call):
    service = doubles.Service(doubles.bulk)
    async with doubles.client(service, max_concurrency=1) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(_bulk, client, call, range(1, 51), chunk_size=1))
        tasks.start_soon(partial(_bulk, client, "bulk_invite", range(101, 151), chunk_size=1, weight=1.0))
    first = [quota_id for request in service.requests[:40] for quota_id in doubles.asked(request)]
    assert sum(quota_id < 101 for quota_id in first) == pytest.approx(20, abs=1)


async def test_a_journal_belongs_to_one_service_and_may_be_given_in_three_forms(tmp_path):
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        for number, form in enumerate((str, Path, Journal)):
            path = tmp_path / f"{number}.journal"
            for journal in (form(path), path):  # the second time, it is all recorded
                async with client.fan_out([InviteRequest("m", [2])], journal=journal) as outcomes:
                    assert [outcome.quota_id async for outcome in outcomes] == [2]
    other = SamplingClient("https://other.example", panel_guid=doubles.PANEL, api_key=doubles.KEY)
    with pytest.raises(JournalError):
        async with other, other.fan_out([InviteRequest("m", [2])], journal=path) as outcomes:
            await _all_of(outcomes)


async def test_a_watch_has_its_defaults_and_a_cache_for_its_panel_and_its_options(tmp_path):
    cache = tmp_path / "inventory"
    client = doubles.client(doubles.Service(inventories.quotas()))
    watch = client.watch_quotas()
    assert (watch._every, watch._cache) == (60.0, None)
    assert client.watch_quotas(cache=cache)._cache._max_age == 86_400.0
    assert client.watch_quotas(cache=cache, cache_max_age=5.0)._cache._max_age == 5.0
    for_options = [client.watch_quotas(cache=cache, include_routables=each) for each in (True, False, True)]
    assert len({each._cache._owner for each in for_options}) == 2


async def test_a_recontact_stream_hands_on_the_size_of_its_pages_and_the_deadline():
    time = doubles.FakeTime()

    def late(_: httpx.Request) -> httpx.Response:
        time.now += 0.2
        return httpx.Response(500)

    service = doubles.Service(late)
    async with doubles.client(service, time) as client:
        async with client.stream_recontact_members(5, max_results=7, deadline=0.1) as codes:
            with pytest.raises(ServerError):
                await _all_of(codes)
    assert service.requests[0].url.params["maxResults"] == "7"
    assert len(service.requests) == 1
