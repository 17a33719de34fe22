"""A pair of member and quota is asked once in a fan-out: its later place gets the outcome of the first."""

from __future__ import annotations

import logging
from collections import Counter

import anyio
import doubles
import httpx
import pytest

from sampling_async import InvalidRequestError, InviteRequest, OutagePolicy, RetryPolicy
from sampling_async._bulk.asked import RequestedPairs
from sampling_async._bulk.options import asked_pairs

DOUBLED = [InviteRequest("m1", [5, 6]), InviteRequest("m2", [5, 6]), InviteRequest("m1", [5, 6])]


def member(request: httpx.Request) -> str:
    return request.url.path.split("/")[-2]


def pairs(service: doubles.Service) -> Counter[tuple[str, int]]:
    return Counter(
        (member(request), quota_id)
        for request in service.requests
        if request.method == "POST"
        for quota_id in doubles.asked(request)
    )


async def outcomes(client, requests, **options):
    async with client.fan_out(requests, **options) as stream:
        return [outcome async for outcome in stream]


async def later(requests):
    for request in requests:
        await anyio.lowlevel.checkpoint()
        yield request


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("make", [list, iter, later])
async def test_a_pair_is_asked_once_and_each_place_gets_its_outcome(make, width):
    service = doubles.Service(doubles.bulk)
    async with doubles.client(service, max_concurrency=width) as client:
        got = await outcomes(client, make(DOUBLED * 3))
    assert pairs(service) == {(code, quota_id): 1 for code in ("m1", "m2") for quota_id in (5, 6)}
    counts = Counter((each.member_code, each.quota_id, each.status, each.replayed) for each in got)
    assert counts == {
        ("m1", 5, "rejected", False): 6,
        ("m1", 6, "invited", False): 6,
        ("m2", 5, "rejected", False): 3,
        ("m2", 6, "invited", False): 3,
    }
    assert {each.invite.url for each in got if each.invite} == {
        f"https://survey.example/6?of={code}" for code in ("m1", "m2")
    }


async def test_a_request_of_known_and_new_quotas_sends_the_new_ones():
    service = doubles.Service(doubles.bulk)
    requests = [InviteRequest("m", [1, 2]), InviteRequest("m", [2, 3, 2]), InviteRequest("m", [3, 4])]
    async with doubles.client(service) as client:
        got = await outcomes(client, requests)
    assert pairs(service) == {("m", quota_id): 1 for quota_id in (1, 2, 3, 4)}
    assert Counter(each.quota_id for each in got) == {1: 1, 2: 3, 3: 2, 4: 1}


async def test_a_place_waits_while_the_first_is_in_flight_and_others_go_on():
    answered, others = anyio.Event(), anyio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        service.requests.append(request)
        if member(request) == "m":
            await answered.wait()
        else:
            others.set()
        return httpx.Response(200, json=doubles.bulk(request))

    service = doubles.Service([])
    requests = [InviteRequest("m", [2]), InviteRequest("m", [2]), InviteRequest("n", [2])]
    async with doubles.client(answer) as client, client.fan_out(requests) as stream:
        with anyio.fail_after(5):
            await others.wait()  # the repetition does not hold up the next member
            answered.set()
            got = [outcome async for outcome in stream]
    assert pairs(service) == {("m", 2): 1, ("n", 2): 1}
    assert [each.status for each in got] == ["invited"] * 3


async def test_many_places_of_one_pair_in_flight_take_no_recursion():
    started, answered = anyio.Event(), anyio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        started.set()
        await answered.wait()
        return httpx.Response(200, json=doubles.bulk(request))

    async with doubles.client(answer, max_concurrency=1000) as client:
        async with client.fan_out([InviteRequest("m", [2])] * 900) as stream:
            with anyio.fail_after(5):
                await started.wait()
                for _ in range(20):
                    await anyio.lowlevel.checkpoint()
        assert Counter(each.status for each in stream.left_over) == {"unknown": stream.progress.taken}


async def test_what_the_first_did_not_send_a_later_place_sends_once():
    """The first request is refused before it is processed; of two later places one is sent."""
    first = httpx.Response(429)
    service = doubles.Service(first, doubles.bulk)
    policy = RetryPolicy(max_attempts=1)
    async with doubles.client(service, retry=policy, outage=OutagePolicy(patience=0)) as client:
        got = await outcomes(client, [InviteRequest("m", [1, 2])] * 3)
    assert pairs(service) == {("m", 1): 2, ("m", 2): 2}
    assert Counter((each.quota_id, each.status) for each in got) == {
        (1, "not_sent"): 1,
        (2, "not_sent"): 1,
        (1, "rejected"): 2,
        (2, "invited"): 2,
    }


async def test_an_unknown_pair_is_not_asked_again():
    service = doubles.Service(httpx.ReadError("cut"), doubles.bulk)
    async with doubles.client(service) as client:
        got = await outcomes(
            client, [InviteRequest("m", [2]), InviteRequest("n", [2]), InviteRequest("m", [2])]
        )
    assert pairs(service) == {("m", 2): 1, ("n", 2): 1}
    assert [each.status for each in got if each.member_code == "m"] == ["unknown"] * 2


async def test_after_a_stop_all_places_are_not_sent():
    service = doubles.Service(httpx.Response(403))
    async with doubles.client(service, max_concurrency=1) as client:
        got = await outcomes(client, DOUBLED)
    assert [each.status for each in got] == ["not_sent"] * 6
    assert len(service.requests) == 1


async def test_a_place_that_waits_for_a_lost_request_is_unknown_too():
    """Leaving the block cancels the request in flight, which may have made invites: all places say so."""
    started = anyio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        started.set()
        return await anyio.sleep_forever()

    async with doubles.client(answer) as client:
        async with client.fan_out([InviteRequest("m", [1, 2]), InviteRequest("m", [2, 3, 2])]) as stream:
            with anyio.fail_after(5):
                await started.wait()
                while stream.progress.taken < 5:
                    await anyio.lowlevel.checkpoint()
        left = Counter((each.quota_id, each.status) for each in stream.left_over)
    assert left[1, "unknown"] == 1
    assert left[2, "unknown"] == 3
    assert sum(left.values()) == 5


async def test_a_request_of_two_thirds_known_is_cut_at_the_chunk_size():
    service = doubles.Service(doubles.bulk)
    requests = [InviteRequest("m", range(1, 301)), InviteRequest("m", range(101, 401))]
    async with doubles.client(service) as client:
        got = await outcomes(client, requests)
    assert set(pairs(service).values()) == {1}
    assert [len(doubles.asked(request)) for request in service.requests] == [100] * 4
    assert len(got) == 600


async def test_a_member_of_many_requests_is_indexed_in_steps(monkeypatch):
    steps = doubles.steps_of_turns(monkeypatch)
    service = doubles.Service(doubles.bulk)
    requests = [InviteRequest("m", range(1, 2001)), InviteRequest("m", range(1, 2001))]
    async with doubles.client(service) as client:
        got = await outcomes(client, requests)
    assert set(pairs(service).values()) == {1}
    assert len(got) == 4000
    assert steps.count(100) >= 20


async def test_who_wants_repetitions_gets_them():
    service = doubles.Service(doubles.bulk)
    async with doubles.client(service) as client:
        got = await outcomes(client, DOUBLED, repeats="ask")
    assert pairs(service)["m1", 5] == 2
    assert len(got) == 6


async def test_a_wrong_value_and_a_journal_that_contradicts_are_refused(tmp_path):
    async with doubles.client(doubles.Service([])) as client:
        with pytest.raises(InvalidRequestError, match='repeats must be "once" or "ask", not \'twice\''):
            client.fan_out([], repeats="twice")
        with pytest.raises(InvalidRequestError, match="a journal sends each pair once"):
            client.fan_out([], repeats="ask", journal=tmp_path / "j")
    assert asked_pairs("once", has_journal=True) is None


async def test_the_rest_of_an_input_is_not_called_not_sent_if_it_was_requested():
    started = anyio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        if member(request) == "m":
            return httpx.Response(200, json=doubles.bulk(request))
        started.set()
        return await anyio.sleep_forever()

    async with doubles.client(answer, max_concurrency=1) as client:
        async with client.fan_out([InviteRequest("m", [2]), InviteRequest("n", [2])]) as stream:
            with anyio.fail_after(5):
                await started.wait()
    asked = [stream.outcome_of(*pair) for pair in (("m", 2), ("n", 2), ("m", 3), ("o", 2))]
    assert [each and each.status for each in asked] == ["invited", "unknown", None, None]
    async with doubles.client(answer) as client:
        assert client.fan_out([], repeats="ask").outcome_of("m", 2) is None


async def test_progress_says_how_long_an_outage_is_still_waited_for():
    time = doubles.FakeTime()
    waits: list[float | None] = []

    def answer(request: httpx.Request):
        waits.append(stream.progress.patience_left)
        raise httpx.ConnectError("refused")

    options = {"outage": OutagePolicy(patience=50.0), "max_concurrency": 1}
    async with doubles.client(doubles.Service(answer), time, **options) as client:
        async with client.fan_out([InviteRequest(f"m{n}", [1]) for n in range(9)]) as stream:
            assert [outcome.status async for outcome in stream] == ["not_sent"] * 9
    assert waits[0] is None
    later = [wait for wait in waits if wait is not None]
    assert later
    assert later == sorted(later, reverse=True)
    assert all(0 <= wait <= 50 for wait in later)


# --- Bounds of the memory


@pytest.fixture
def bounded(monkeypatch):
    """Return a function that makes fan-outs remember less."""

    def bound(**bounds):
        monkeypatch.setattr("sampling_async._bulk.options.RequestedPairs", lambda: RequestedPairs(**bounds))

    return bound


async def test_an_invite_that_is_no_longer_kept_is_unknown_and_not_sent_again(bounded):
    bounded(most_invites=1)
    service = doubles.Service(doubles.bulk)
    requests = [InviteRequest(code, [1, 2]) for code in "mnopqm"]
    async with doubles.client(service, max_concurrency=1) as client:
        got = await outcomes(client, requests)
    assert set(pairs(service).values()) == {1}
    counts = Counter((each.member_code, each.status, each.result_code) for each in got if each.quota_id == 2)
    assert counts["m", "invited", 1] == counts["m", "unknown", 1] == 1
    (gone,) = (each for each in got if each.status == "unknown")
    assert gone.anomaly is not None
    assert gone.anomaly in str(gone.error)
    assert [each.status for each in got if each.quota_id == 1] == ["rejected"] * 6


async def test_the_earliest_requests_are_forgotten_and_this_is_logged_once(bounded, caplog):
    bounded(most_bytes=3000)
    service = doubles.Service(doubles.bulk)
    requests = [InviteRequest(f"m{n}", [1, 2]) for n in (*range(20), 19, 0)]
    with caplog.at_level(logging.WARNING, "sampling_async.bulk"):
        async with doubles.client(service, max_concurrency=1) as client:
            got = await outcomes(client, requests)
    asked = pairs(service)
    assert asked["m19", 1] == 1
    assert asked["m0", 1] == 2
    assert len(got) == 44
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "this fan-out has requested so many quota IDs that the earliest are forgotten"
    ]


async def test_what_is_forgotten_leaves_nothing_behind(bounded, monkeypatch):
    bounded(most_bytes=20_000)
    made: list[RequestedPairs] = []
    init = RequestedPairs.__init__
    monkeypatch.setattr(RequestedPairs, "__init__", lambda self, **k: (init(self, **k), made.append(self))[0])
    service = doubles.Service(doubles.bulk)
    requests = (InviteRequest(f"m{n % 3}", range(n, n + 5)) for n in range(1, 500))
    async with doubles.client(service) as client:
        await outcomes(client, requests)
    (asked,) = made
    kept = list(asked._done)
    assert 0 < asked._bytes <= 20_000
    assert not asked._in_flight
    assert asked._invites == sum(len(request.answers.invites) for request in kept)
    assert sum(len(asked._of_member.get(f"m{n}", ())) for n in range(3)) == len(kept)
    assert asked._bytes == sum(request.size for request in kept) + 120 * sum(map(len, asked._indexes.values()))
    assert set(asked._with_invites) <= set(kept)
