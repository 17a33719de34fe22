"""Clients with other options over the same connections: one limit, one knowledge of the service."""

from __future__ import annotations

import gc
import json
import logging
import warnings
from collections import Counter

import anyio
import doubles
import httpx
import pytest
from anyio import wait_all_tasks_blocked

from sampling_async import (
    BadRequestError,
    ClientClosedError,
    InvalidRequestError,
    InviteRequest,
    OutageError,
    OutagePolicy,
    ResultCode,
    RetryPolicy,
    ServerError,
    Timeouts,
    TransportError,
)
from sampling_async.simulator import Fault, Latency, Simulator

PANELS = [f"0000000{number}-1111-2222-3333-444444444444" for number in range(5)]
NOT_A_PANEL = httpx.Response(
    400, json={"ResultCode": int(ResultCode.PANEL_DOES_NOT_EXIST), "Result": "PANEL_DOES_NOT_EXIST"}
)
ALL_GONE = OutagePolicy(patience=0)


class Counted:
    """A service that answers only when it is let go on, and counts what is in flight."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.go_on = anyio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.go_on.wait()
            await anyio.lowlevel.checkpoint()
        finally:
            self.now -= 1
        return httpx.Response(200, json=doubles.bulk(request))


# --- What is shared


async def test_five_simulated_panels_keep_one_limit_and_one_that_is_refused_stops_no_other():
    sim = Simulator(3, surveys=20, members=10, latency=Latency(a=0.002))
    for _ in range(4):
        sim.add_panel(members=10, api_key=sim.api_key)
    refused = sim.panels[2].panel_guid
    sim.faults.add(Fault.status(400, result_code=3).on(panel_guid=refused))
    sim.app = counted = doubles.InFlight(sim.app)
    quota_ids = [quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas]
    found: dict[str, Counter[str]] = {}

    async with sim.client(max_concurrency=4, clock=anyio.current_time) as client:

        async def run(panel):
            counts = found[panel.panel_guid] = Counter()
            asked = [InviteRequest(code, quota_ids) for code in panel.members]
            own = client.with_options(panel_guid=panel.panel_guid)
            async with own.fan_out(asked, chunk_size=10) as outcomes:
                async for outcome in outcomes:
                    counts[outcome.status] += 1

        async with anyio.create_task_group() as tasks:
            for panel in sim.panels:
                tasks.start_soon(run, panel)
    assert 1 < counted.most <= 4
    assert {counts.total() for counts in found.values()} == {10 * len(quota_ids)}
    assert found.pop(refused).keys() == {"not_sent"}
    assert all(counts["invited"] and not counts["unknown"] for counts in found.values())


async def test_each_panel_is_asked_for_by_its_guid_and_a_refused_one_does_not_stop_the_others():
    def respond(request):
        refused = PANELS[1] in str(request.url)
        return NOT_A_PANEL if refused else httpx.Response(200, json=doubles.bulk(request))

    service = doubles.Service(respond)
    async with doubles.client(service) as client:
        panels = [client.with_options(panel_guid=guid, name=guid[:8]) for guid in PANELS]
        results = [await panel.bulk_invite("m", [2, 4]) for panel in panels]
        assert [len(result.invited) for result in results] == [2, 0, 2, 2, 2]
        assert {outcome.result_code for outcome in results[1]} == {ResultCode.PANEL_DOES_NOT_EXIST}
        with pytest.raises(BadRequestError):
            await panels[1].get_settings()
    asked = {guid for guid in PANELS if any(guid in str(request.url) for request in service.requests)}
    assert asked == set(PANELS)
    assert all(request.headers["API_AUTH_KEY"] == doubles.KEY for request in service.requests)


async def test_an_outage_that_one_meets_is_known_to_all_and_each_has_its_own_patience():
    time, away_until = doubles.FakeTime(), 30.0

    def respond(request):
        if time.now < away_until:
            return httpx.Response(503)
        if request.url.path.endswith("Settings"):
            return httpx.Response(200, json=[])
        return httpx.Response(200, json=doubles.bulk(request))

    service = doubles.Service(respond)
    retry = RetryPolicy(max_attempts=1)
    async with doubles.client(service, time, retry=retry, outage=OutagePolicy(failures=2)) as client:
        quick = client.with_options(outage=ALL_GONE)
        for _ in range(2):
            with pytest.raises(ServerError):
                await quick.generate_invite("m", 1)
        assert client.snapshot().breaker == quick.snapshot().breaker == "open"
        sent = len(service.requests)
        with pytest.raises(OutageError):
            await client.generate_invite("m", 1)
        gone = await quick.bulk_invite("m", [2])
        assert [outcome.status for outcome in gone] == ["not_sent"]
        assert not [each for each in service.requests[sent:] if each.method == "POST"]
        assert len((await client.bulk_invite("m", [2])).invited) == 1
        assert time.now >= away_until
        assert quick.snapshot().breaker == "closed"


async def test_a_hold_holds_all():
    time = doubles.FakeTime()
    service = doubles.Service(httpx.Response(429, headers={"Retry-After": "7"}), doubles.bulk)
    async with doubles.client(service, time) as client:
        other = client.with_options(panel_guid=PANELS[0])
        result = await client.bulk_invite("m", [2], deadline=1)
        assert [outcome.status for outcome in result] == ["not_sent"]
        assert other.snapshot().held_for == pytest.approx(7, abs=1)
        await other.bulk_invite("m", [2])
        assert time.now >= 7


async def test_a_snapshot_counts_the_attempts_of_all():
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        other = client.with_options(name="other")
        await client.bulk_invite("m", [2])
        await other.bulk_invite("m", [4])
        assert client.snapshot().attempts == other.snapshot().attempts == 2
        assert other.snapshot().latency["bulk_invite"].count == 2


async def test_a_link_that_another_panels_member_was_given_is_noticed():
    def same(request):
        (quota_id,) = doubles.asked(request)
        return {"Invites": [doubles.item(quota_id, 1)]}

    async with doubles.client(doubles.Service(same)) as client:
        assert len((await client.bulk_invite("m", [2])).invited) == 1
        (outcome,) = await client.with_options(panel_guid=PANELS[0]).bulk_invite("n", [2])
        assert outcome.status == "unknown"


# --- What is not


async def test_what_is_not_given_is_inherited():
    reports: list[object] = []
    async with doubles.client(
        doubles.Service(doubles.bulk), on_attempt=reports.append, name="us", timeouts=Timeouts(read=7)
    ) as client:
        same = client.with_options()
        await same.bulk_invite("m", [2])
        assert len(reports) == 1
        assert repr(same) == repr(client)
        assert same._session.timeouts == Timeouts(read=7)


async def test_hooks_are_replaced():
    first: list[object] = []
    second: list[object] = []
    calls: list[object] = []
    async with doubles.client(doubles.Service(doubles.bulk), on_attempt=first.append) as client:
        other = client.with_options(on_attempt=second.append, on_outcome=calls.append)
        await other.bulk_invite("m", [2])
        await client.bulk_invite("m", [2])
    assert (len(first), len(second), len(calls)) == (1, 1, 1)


async def test_time_limits_are_those_of_the_client_that_is_called():
    seen: list[dict] = []

    def respond(request):
        seen.append(request.extensions["timeout"])
        return doubles.bulk(request)

    async with doubles.client(doubles.Service(respond), timeouts=Timeouts(read=9)) as client:
        quick = client.with_options(timeouts=Timeouts(connect=1, read=2))
        await quick.bulk_invite("m", [2])
        await client.bulk_invite("m", [2])
    assert [(each["connect"], each["read"]) for each in seen] == [(1, 2), (5, 9)]


async def test_another_retry_policy_has_a_budget_of_its_own():
    service = doubles.Service(httpx.Response(503))
    async with doubles.client(service, retry=RetryPolicy(max_attempts=3, base=0)) as client:
        same, once = client.with_options(name="same"), client.with_options(retry=RetryPolicy(max_attempts=1))
        with pytest.raises(ServerError) as raised:
            await once.get_settings()
        assert raised.value.attempts == 1
        assert once.snapshot().retry_tokens == 10
        with pytest.raises(ServerError) as raised:
            await client.get_settings()
        assert raised.value.attempts == 3
        assert (client.snapshot().retry_tokens, same.snapshot().retry_tokens) == (8, 8)
        assert once.snapshot().retry_tokens == 10


async def test_a_new_client_is_a_subclass_like_the_first():
    class Partner(type(doubles.client(doubles.Service([])))):
        def __init__(self) -> None:
            raise AssertionError("not called")

    client = doubles.client(doubles.Service([]))
    client.__class__ = Partner
    client.note = "kept"
    other = client.with_options(name="x")
    assert type(other) is Partner
    assert other.note == "kept"


async def test_a_share_of_a_new_client_has_its_options_and_nothing_in_common():
    client = doubles.client(doubles.Service([]), transport=None, max_concurrency=8)
    quick = client.with_options(timeouts=Timeouts(read=2), name="quick", retry=RetryPolicy(max_attempts=1))
    share = quick.share(of=2)
    assert share._session.timeouts == Timeouts(read=2)
    assert repr(share) == "<SamplingClient quick at service.example: 0 of 4 running, 0 waiting>"
    await client.aclose()
    assert not share._session.closed
    await share.aclose()
    assert share._session.closed


# --- Closing


async def test_closing_the_new_client_leaves_the_first_open():
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        other, third = client.with_options(), client.with_options()
        async with other:
            pass
        await other.aclose()
        assert repr(other) == "<SamplingClient service.example: closed, 0 waiting>"
        with pytest.raises(ClientClosedError):
            await other.get_settings()
        assert [outcome.status for outcome in await other.bulk_invite("m", [2])] == ["not_sent"]
        assert len((await client.bulk_invite("m", [2])).invited) == 1
        assert len((await third.bulk_invite("m", [4])).invited) == 1


async def test_after_closing_the_new_client_the_first_still_notices_holds_and_outages():
    service = doubles.Service(httpx.Response(429, headers={"Retry-After": "7"}), httpx.ConnectError("refused"))
    options = {"retry": RetryPolicy(max_attempts=1), "outage": OutagePolicy(failures=1)}
    async with doubles.client(service, **options) as client:
        await client.with_options().aclose()
        await client.bulk_invite("m", [2], deadline=1)
        assert client.snapshot().held_for > 5
        with pytest.raises(TransportError):
            await client.generate_invite("m", 2)
        assert client.snapshot().breaker == "open"


async def test_closing_the_first_client_closes_all():
    client = doubles.client(doubles.Service(doubles.bulk))
    other = client.with_options()
    deeper = other.with_options(name="deeper")
    await client.bulk_invite("m", [2])
    await client.aclose()
    for each in (other, deeper, client.with_options()):
        with pytest.raises(ClientClosedError):
            await each.get_settings()


@pytest.mark.parametrize("closes_first", [False, True])
async def test_closing_ends_the_calls_that_run(closes_first):
    service, results = Counted(), {}
    async with doubles.client(service) as client, anyio.create_task_group() as tasks:
        other = client.with_options()

        async def ask(name, asked):
            results[name] = [outcome.status for outcome in await asked.bulk_invite(name, [2])]

        tasks.start_soon(ask, "first", client)
        tasks.start_soon(ask, "other", other)
        await wait_all_tasks_blocked()
        await (client if closes_first else other).aclose()
        await wait_all_tasks_blocked()
        assert results == (
            {"first": ["unknown"], "other": ["unknown"]} if closes_first else {"other": ["unknown"]}
        )
        service.go_on.set()
    assert results["first"] == (["unknown"] if closes_first else ["invited"])


async def test_closing_ends_the_wait_for_a_permit():
    service, results = Counted(), []
    async with doubles.client(service, max_concurrency=1) as client, anyio.create_task_group() as tasks:
        other = client.with_options()

        async def ask(asked):
            results.append([outcome.status for outcome in await asked.bulk_invite("m", [2])])

        tasks.start_soon(ask, client)
        await wait_all_tasks_blocked()
        tasks.start_soon(ask, other)
        await wait_all_tasks_blocked()
        assert client.snapshot().waiting == 1
        await other.aclose()
        await doubles.until(lambda: results)
        assert results == [["not_sent"]]
        assert client.snapshot().waiting == 0
        service.go_on.set()
    assert results == [["not_sent"], ["invited"]]


@pytest.mark.anyio(backends=["asyncio"])
async def test_a_new_client_need_not_be_closed():
    client = doubles.client(doubles.Service(doubles.bulk))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        other = client.with_options()
        await other.bulk_invite("m", [2])
        del other
        gc.collect()
    await client.aclose()


# --- The name


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 65, 7, b"us"])
def test_a_name_that_cannot_be_shown_is_refused(name):
    with pytest.raises(
        InvalidRequestError, match='name must be 1 to 64 printable characters, such as "us", not'
    ):
        doubles.client(doubles.Service([]), name=name)
    with pytest.raises(InvalidRequestError, match="name must be"):
        doubles.client(doubles.Service([])).with_options(name=name)


def test_the_name_is_in_the_repr():
    client = doubles.client(doubles.Service([]), name="us")
    assert repr(client) == "<SamplingClient us at service.example: 0 of 8 running, 0 waiting>"
    assert "de at" in repr(client.with_options(name="de"))


async def test_the_name_is_in_log_messages(caplog):
    caplog.set_level(logging.DEBUG, "sampling_async")
    service = doubles.Service(httpx.ConnectError("refused"))
    retry = RetryPolicy(max_attempts=1)
    async with doubles.client(service, name="100% us", retry=retry, outage=OutagePolicy(failures=1)) as client:
        await client.with_options(name="de", outage=ALL_GONE).bulk_invite("m", [2])

        def fail(_report):
            raise ValueError

        await client.with_options(on_outcome=fail, name="fr", outage=ALL_GONE).bulk_invite("m", [2])
    found = [each for each in caplog.records if each.name == "sampling_async.pacing"]
    pacing = [(each.getMessage(), each.panel) for each in found]
    (outage,) = [each for each in pacing if "is away" in each[0]]
    assert outage[0].startswith("100% us: the service is away: 1 failures in a row")
    assert all(text.startswith(f"{panel}: ") for text, panel in pacing)
    calls = [(each.getMessage(), each.panel) for each in caplog.records if each.name == "sampling_async.calls"]
    assert calls[0][0].startswith("de: POST bulk_invite: TransportError after")
    assert calls[0][1] == "de"
    assert any(text.startswith("fr: on_outcome failed; this is logged once") for text, _ in calls)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"timeouts": 3}, "timeouts must be a Timeouts"),
        ({"retry": 3}, "retry must be a RetryPolicy"),
        ({"outage": True}, "outage must be an OutagePolicy"),
        ({"panel_guid": "us"}, "panel_guid"),
        ({"on_attempt": 1}, "on_attempt must be"),
    ],
)
def test_wrong_options_are_refused(given, rule):
    with pytest.raises(InvalidRequestError, match=rule):
        doubles.client(doubles.Service([])).with_options(**given)


async def test_fan_outs_of_two_clients_take_turns():
    # With one permit, neither waits for the other's end.
    order: list[str] = []

    def respond(request):
        order.append(request.url.path.split("/")[-2])
        return doubles.bulk(request)

    async with doubles.client(doubles.Service(respond), max_concurrency=1) as client:
        clients = {"a": client, "b": client.with_options(panel_guid=PANELS[0])}

        async def run(member):
            requests = [InviteRequest(member, [2 * number]) for number in range(1, 11)]
            async with clients[member].fan_out(requests) as outcomes:
                async for outcome in outcomes:
                    assert outcome.status == "invited"

        async with anyio.create_task_group() as tasks:
            for member in clients:
                tasks.start_soon(run, member)
    assert len(order) == 20
    assert "b" in order[:4]
    assert "a" in order[-6:]


def test_the_socket_of_snapshots_shows_the_name(tmp_path):
    import socket  # noqa: PLC0415

    async def read():
        path = tmp_path / "s"
        async with (
            doubles.client(doubles.Service([]), name="us") as client,
            client.serve_snapshots(path),
            await anyio.connect_unix(path) as stream,
        ):
            return json.loads(await stream.receive())

    if not hasattr(socket, "AF_UNIX"):  # pragma: no cover
        pytest.skip("no Unix sockets")
    shown = anyio.run(read)
    assert (shown["name"], shown["host"]) == ("us", "service.example")
