"""The member that each link belongs to: what is remembered, and for how long."""

from __future__ import annotations

import json
import threading

import anyio
import doubles
import httpx
import pytest
import wire

from sampling_async import DecodeError, InviteRequest, SamplingClient
from sampling_async._calls.call import InviteOwners
from sampling_async._protocol import requests


def test_a_link_belongs_to_the_first_member_that_got_it():
    links = InviteOwners()
    links.assign("m1", ["a", "b"], "$.Invites")
    links.assign("m1", ["a"], "$.Invites")
    for _ in range(2):  # also when it comes again
        with pytest.raises(
            DecodeError, match=": expected an invite of this member, found a link that"
        ) as caught:
            links.assign("m2", ["c", "b"], "$.Invites")
        assert str(caught.value).endswith("found a link that another member was given")
        assert (caught.value.path, caught.value.delivery) == ("$.Invites", "unknown")
    links.assign("m1", ["b"], "$.Invites")
    links.assign("m3", ["c"], "$.Invites")  # it was in a response that nobody got


def test_an_empty_link_belongs_to_nobody():
    links = InviteOwners()
    links.assign("m1", ["", "a"], "$")
    links.assign("m2", ["", "b"], "$")


def test_the_latest_links_are_remembered_and_no_more():
    links = InviteOwners(most=100)
    for member in range(1000):
        links.assign(f"m{member}", [f"{member}/{quota_id}" for quota_id in range(10)], "$")
        assert len(links._latest) + len(links._before) <= 2 * 110
        assert len(links._latest) <= 100
    assert len(links._before) == 110  # a hundred are no more than the most
    for member in (999, 990):
        with pytest.raises(DecodeError):
            links.assign("other", [f"{member}/0"], "$")
    links.assign("other", ["1/0"], "$")  # forgotten


def test_of_one_member_the_latest_links_are_remembered_too():
    links = InviteOwners(most=100)
    for request in range(1000):
        links.assign("m1", [f"{request}/{quota_id}" for quota_id in range(10)], "$")
        links.assign("m1", [""], "$")
        assert len(links._of_member) <= 11
        assert links._number == sum(map(len, links._of_member)) <= 110
    links.assign("m2", ["980/0"], "$")  # forgotten
    for known in ("999/9", "991/0"):
        with pytest.raises(DecodeError):
            links.assign("m2", ["new", known], "$")
    links.assign("m3", ["new"], "$")
    links.assign("m1", ["999/9"], "$")


async def test_links_of_another_member_are_not_returned_over_any_transport():
    """A transport that gives a response to the wrong request is recognised by the links."""
    last: list[httpx.Response] = []

    def answer(request: httpx.Request) -> httpx.Response:
        response = httpx.Response(200, json=doubles.bulk(request))
        last.append(response)
        return last[0] if "/m2/" in request.url.path else response

    async with doubles.client(answer) as client:
        first = await client.bulk_invite("m1", [1, 2, 4])
        second = await client.bulk_invite("m2", [1, 2, 4])
        third = await client.bulk_invite("m3", [1, 2, 4])
    assert [len(result.invited) for result in (first, second, third)] == [2, 0, 2]
    assert [outcome.status for outcome in second] == ["unknown"] * 3
    assert "another" in str(second[0].error)
    error = second[0].error
    assert (error.attempts, error.endpoint, error.path) == (1, "bulk_invite", "$.Invites")


async def test_a_single_invite_with_a_link_of_another_member_is_an_error():
    time, told = doubles.FakeTime(), []
    time.now = 1000.0

    async def answer(_: httpx.Request) -> httpx.Response:
        time.now += 2.0
        return httpx.Response(200, json=doubles.invite(7))

    async with doubles.client(answer, time, on_outcome=told.append) as client:
        assert (await client.generate_invite("m1", 7)).quota_id == 7
        assert (await client.generate_invite("m1", 7)).quota_id == 7
        with pytest.raises(DecodeError, match="another") as caught:
            await client.generate_invite("m2", 7)
    error = caught.value
    assert (error.delivery, error.endpoint, error.attempts) == ("unknown", "generate_invite", 1)
    assert error.path == "$.URL"
    assert error.elapsed == 2.0
    assert told[-1].delivery == "unknown"


async def test_a_call_that_is_interrupted_after_a_link_of_another_member_may_have_had_its_effect():
    async with doubles.client(doubles.Service([])) as client:
        call = requests.get_settings(doubles.PANEL)
        track = client._caller.track(call.endpoint)
        client._caller.assign_links("m1", ["a"], call, track, path="$", started=0.0)
        assert track.delivery == "not_sent"
        with pytest.raises(DecodeError):
            client._caller.assign_links("m2", ["a"], call, track, path="$", started=0.0)
        assert track.delivery == "unknown"


async def test_links_of_concurrent_requests_are_checked_too():
    """The first two requests run at the same time and get the same response."""
    both = anyio.Event()
    asked: list[httpx.Request] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if len(asked) == 2:
            both.set()
        await both.wait()
        return httpx.Response(200, json=doubles.bulk(asked[0]))

    async with doubles.client(answer) as client:
        async with client.fan_out([InviteRequest(member, [2, 4]) for member in ("m1", "m2")]) as outcomes:
            told = {outcome.invite.url async for outcome in outcomes if outcome.invite}
    assert len(told) == 2
    assert len({url.rpartition("=")[2] for url in told}) == 1


def reply(request: bytes) -> bytes:
    """Return the response to a bulk invite, as bytes of the wire."""
    target = request.split(b" ")[1].decode()
    ids = json.loads(request.partition(b"\r\n\r\n")[2])["QuotaIDs"]
    made = doubles.bulk(httpx.Request("POST", f"http://x{target}", json={"QuotaIDs": ids}))
    return wire.answer(json.dumps(made).encode())


async def test_idle_connections_are_not_used_again_after_a_response_of_another_member():
    """What is one response behind may be so on all of them, as behind one gateway."""
    both = threading.Barrier(2, timeout=60)

    def script(connection: wire.Connection) -> None:
        first = connection.read_request()
        if first is None:
            return
        both.wait()  # so that there are two connections
        connection.send(reply(first))
        if connection.read_request() is not None:
            connection.send(reply(first))
            connection.read_request()

    with wire.serve(script) as url:
        async with SamplingClient(
            url, panel_guid=doubles.PANEL, api_key=doubles.KEY, max_concurrency=2
        ) as client:
            async with anyio.create_task_group() as tasks:
                for member in ("m1", "m2"):
                    tasks.start_soon(client.bulk_invite, member, [2, 4])
            before = client.snapshot().connections
            result = await client.bulk_invite("m3", [2, 4])
            after = client.snapshot().connections
    assert len(result.unknown) == 2
    assert before is not None
    assert after is not None
    assert (before.idle, after.idle, after.open) == (2, 0, 0)


async def test_a_connection_that_gave_the_response_of_another_member_is_not_used_again():
    """The correct response is still on its way there and would go to the next member."""

    def script(connection: wire.Connection) -> None:
        first = connection.read_request()
        if first is None:
            return
        connection.send(reply(first))
        if (second := connection.read_request()) is not None:
            connection.send(reply(first))  # again, late; the response to the second request comes even later
            connection.sock.settimeout(5)
            if connection.read_request() is not None:
                connection.send(reply(second))

    with wire.serve(script) as url:
        async with SamplingClient(
            url, panel_guid=doubles.PANEL, api_key=doubles.KEY, max_concurrency=1
        ) as client:
            told = [await client.bulk_invite(member, [2, 4]) for member in ("m1", "m2", "m3", "m4")]
    assert [[outcome.status for outcome in result] for result in told] == [
        ["invited"] * 2,
        ["unknown"] * 2,
        ["invited"] * 2,
        ["unknown"] * 2,
    ]
    assert [result[0].invite.url.rpartition("=")[2] for result in told if result.invited] == ["m1", "m3"]
