"""Deadlines and goals of a bulk: how it is cut, and what is left when its time is over."""

from __future__ import annotations

import contextlib
import math
import threading
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import doubles
import httpx
import pytest
from anyio import wait_all_tasks_blocked
from bulk_kit import ONCE, Slots, bulk, consume, settled

from sampling_async import (
    InvalidRequestError,
    InviteRequest,
    OutageError,
    OutagePolicy,
    RetryPolicy,
    Timeouts,
    TransportTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


# --- Goals


async def sizes(**options) -> list[int]:
    service = doubles.Service(doubles.bulk)
    async with doubles.client(service) as client:
        await client.bulk_invite("m", range(1, 101), **options)
    return [len(doubles.asked(request)) for request in service.requests]


async def test_a_bulk_makes_as_few_requests_as_possible_by_default():
    assert await sizes() == [100]


@pytest.mark.parametrize("options", [{"goal": "first"}, {"deadline": 60}])
async def test_a_bulk_with_goal_first_or_a_deadline_uses_all_free_slots(options):
    assert sorted(await sizes(**options)) == [9] + [13] * 7


async def test_a_bulk_with_goal_first_is_cut_by_what_earlier_requests_took():
    """Each request takes half a second, so parts that are much smaller are not much faster: see `spread`."""
    clock, asked = doubles.FakeTime(), []

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.append(len(doubles.asked(request)))
        clock.now += 0.5 + 0.01 * asked[-1]
        return httpx.Response(200, json=doubles.bulk(request))

    async with doubles.client(answer, clock) as client:
        await client.bulk_invite("m", range(1, 11))
        await client.bulk_invite("m", range(1, 101))
        await client.bulk_invite("m", range(1, 101), goal="first")
    assert sorted(asked[2:]) == [10] + [15] * 6


async def test_a_bulk_is_not_spread_if_no_slot_is_free():
    service = doubles.Service(doubles.bulk)
    async with doubles.client(service, max_concurrency=1) as client:
        await client.bulk_invite("m", range(1, 101), goal="first")
        await client.bulk_invite("m", [], goal="first")
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    "options",
    [{"goal": "last"}, *({"deadline": each} for each in (0, -1, math.nan, 10**400, True, "1"))],
    ids=str,
)
async def test_invalid_options_are_refused(options):
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        with pytest.raises(InvalidRequestError, match=next(iter(options))):
            await client.bulk_invite("m", [1], **options)


async def test_a_deadline_of_paging_is_checked_at_once():
    async with doubles.client(doubles.Service(doubles.page())) as client:
        with pytest.raises(InvalidRequestError, match="deadline"):
            await anext(client.recontact_pages(5, deadline=-1))


# --- Deadlines


@pytest.mark.parametrize("name", ["get_quotas", "get_settings", "generate_invite", "recontact"])
async def test_every_call_ends_at_its_deadline(name):
    async def never(_: httpx.Request) -> httpx.Response:
        return await anyio.sleep_forever()

    async with doubles.client(never, clock=anyio.current_time, sleep=anyio.sleep) as client:
        calls = {
            "get_quotas": lambda: client.get_quotas(deadline=0.1),
            "get_settings": lambda: client.get_settings(deadline=0.1),
            "generate_invite": lambda: client.generate_invite("m", 5, deadline=0.1),
            "recontact": lambda: anext(client.recontact_members(5, deadline=0.1)),
        }
        with anyio.fail_after(60), pytest.raises(TransportTimeoutError) as caught:
            await calls[name]()
    assert (caught.value.attempts, caught.value.delivery) == (1, "unknown")


async def test_timeouts_are_shortened_to_the_time_left():
    service = doubles.Service([])
    async with doubles.client(service) as client:
        await client.get_settings(deadline=3)
    assert set(service.requests[0].extensions["timeout"].values()) == {3}


async def test_waits_are_shortened_to_the_time_before_the_deadline():
    time = doubles.FakeTime()
    service = doubles.Service(httpx.ConnectError("refused"))
    async with doubles.client(service, time) as client:
        with pytest.raises(Exception, match="no connection") as caught:
            await client.get_settings(
                deadline=0.45
            )  # 0.05 of it must be left; without a deadline: 0.25 and 0.5
    assert (caught.value.attempts, time.slept) == (3, [pytest.approx(0.2), pytest.approx(0.1)])


async def test_no_attempt_begins_with_less_time_left_than_one_takes():
    time = doubles.FakeTime()

    async def answer(request: httpx.Request):
        time.now += 0.4
        return httpx.Response(200, json=doubles.bulk(request)) if time.now < 1 else httpx.Response(429)

    async with doubles.client(answer, time, max_concurrency=1) as client:
        for _ in range(2):
            await client.bulk_invite("m", [1])
        result = await client.bulk_invite("m", [1], deadline=0.79)
    assert result[0].error.attempts == 1
    assert result[0].status == "not_sent"


@pytest.mark.parametrize("refused", [httpx.Response(429), httpx.Response(503), httpx.ConnectError("refused")])
async def test_a_chunk_that_was_surely_not_processed_is_asked_as_often_as_it_takes(refused):
    service = doubles.Service(*[refused] * 12, doubles.bulk)
    retry = RetryPolicy(budget=0, unprocessed={429, 503})
    result = await bulk(service, [2, 3], outage=OutagePolicy(failures=100), retry=retry)
    assert [outcome.status for outcome in result] == ["invited", "rejected"]
    assert len(service.requests) == 13


async def test_a_chunk_goes_back_also_after_a_minute_and_if_failures_are_repeated_once():
    refused = httpx.Response(429, headers={"Retry-After": "60"})
    service = doubles.Service(*[refused] * 3, doubles.bulk)
    result = await bulk(service, [2, 3], retry=RetryPolicy(budget=0, max_attempts=2))
    assert [outcome.status for outcome in result] == ["invited", "rejected"]
    assert len(service.requests) == 4


async def test_a_chunk_that_was_not_processed_for_a_reason_of_its_own_is_asked_a_few_times():
    service = doubles.Service(httpx.Response(408))
    result = await bulk(service, [2, 3], outage=OutagePolicy(failures=100))
    assert [outcome.status for outcome in result] == ["not_sent", "not_sent"]
    assert len(service.requests) == RetryPolicy().max_attempts


async def test_a_chunk_that_is_refused_while_another_call_is_answered_is_asked_a_few_times():
    time, retry, bulks = doubles.FakeTime(), RetryPolicy(unprocessed={503}), count()

    async def answer(request):
        time.now += 0.1
        if request.method == "GET":
            return httpx.Response(200, json=[])
        next(bulks)
        await client.get_settings()
        return httpx.Response(503)

    async with doubles.client(answer, time, retry=retry, outage=OutagePolicy(failures=100)) as client:
        (outcome,) = await client.bulk_invite("m", [1])
    assert (outcome.status, outcome.error.attempts) == ("not_sent", retry.max_attempts)
    assert next(bulks) == retry.max_attempts


async def test_such_a_chunk_is_not_retried_if_retries_are_off():
    service = doubles.Service(httpx.Response(429), doubles.bulk)
    assert len((await bulk(service, [2, 3], retry=ONCE)).not_sent) == 2
    assert len(service.requests) == 1


async def test_such_a_chunk_is_given_up_when_nothing_was_accepted_for_long():
    time, service = doubles.FakeTime(), doubles.Service(httpx.Response(429))
    async with doubles.client(service, time, outage=OutagePolicy(patience=100)) as client:
        result = await client.bulk_invite("m", range(1, 5001))
    assert len(result.not_sent) == 5000
    assert isinstance(result[4999].error, OutageError)
    assert "answered 429" in str(result[0].error)
    assert 100 <= time.now < 300


@pytest.mark.parametrize("random", [0.0, 0.5, 1.0])
async def test_one_429_under_a_deadline_of_a_second_still_gives_all_outcomes(random):
    service = doubles.Service(httpx.Response(429), doubles.bulk)
    async with doubles.client(service, random=lambda: random) as client:
        result = await client.bulk_invite("m", range(1, 11), deadline=1)
    assert len(result.invited) + len(result.rejected) == 10


async def test_a_wait_beyond_the_deadline_is_left_to_the_caller():
    time = doubles.FakeTime()
    service = doubles.Service(httpx.Response(503, headers={"Retry-After": "30"}))
    async with doubles.client(service, time) as client:
        with pytest.raises(Exception, match="503") as caught:
            await client.get_settings(deadline=20)
        assert (caught.value.retry_after, caught.value.attempts, time.slept) == (30, 1, [])
        with pytest.raises(TransportTimeoutError, match=r": the line is longer than the deadline: ") as caught:
            await client.get_settings(deadline=20)
    assert (caught.value.delivery, time.slept) == ("not_sent", [])


async def test_a_call_that_waits_for_a_permit_ends_at_its_deadline():
    async def never(_: httpx.Request) -> httpx.Response:
        return await anyio.sleep_forever()

    async with doubles.client(never, max_concurrency=1, clock=anyio.current_time) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.get_settings)
            await wait_all_tasks_blocked()
            with pytest.raises(TransportTimeoutError) as caught:
                await client.get_settings(deadline=0.01)
            tasks.cancel_scope.cancel()
        assert (client.snapshot().running, client.snapshot().waiting) == (0, 0)
    assert (caught.value.delivery, caught.value.attempts) == ("not_sent", 0)


async def test_a_bulk_past_its_deadline_has_an_outcome_for_every_id():
    """IDs in flight are unknown; IDs not sent by then are not_sent."""

    async def slow(request: httpx.Request) -> httpx.Response:
        await anyio.sleep(0.01 if 1 in doubles.asked(request) else 60)
        return httpx.Response(200, json=doubles.bulk(request))

    async with doubles.client(slow, max_concurrency=2, clock=anyio.current_time) as client:
        result = await client.bulk_invite("m", range(1, 51), chunk_size=5, deadline=0.25)
    kinds = [outcome.status for outcome in result]
    assert len(kinds) == 50
    assert kinds[:5] == ["rejected", "invited", "rejected", "invited", "rejected"]
    assert kinds.count("unknown") == 10
    assert kinds.count("not_sent") == 35
    assert isinstance(result[49].error, TransportTimeoutError)


async def test_a_missed_deadline_does_not_count_against_the_service():
    async def slow(_: httpx.Request) -> httpx.Response:
        await anyio.sleep(60)

    async with doubles.client(slow, clock=anyio.current_time) as client:
        for _ in range(3):
            with contextlib.suppress(TransportTimeoutError):
                await client.get_settings(deadline=0.01)
        assert client.snapshot().limit == 8


async def test_a_stream_stops_reading_endless_input_at_its_deadline():
    async def never() -> AsyncIterator[int]:
        yield 1
        await anyio.sleep_forever()

    async with doubles.client(doubles.Service(doubles.bulk), clock=anyio.current_time) as client:
        for endless in (count(1), never()):
            with anyio.fail_after(60):
                async with client.stream_bulk_invite("m", endless, chunk_size=1, deadline=0.2) as stream:
                    kinds = {outcome.status async for outcome in stream}
            assert {"rejected"} <= kinds


async def test_every_id_of_a_collection_has_an_outcome_after_the_deadline():
    time = doubles.FakeTime()

    def answer(request: httpx.Request):
        time.now += 10.0
        return doubles.bulk(request)

    service = doubles.Service(answer)
    requests = [InviteRequest(f"m{n}", range(1, 11)) for n in range(5)]
    async with doubles.client(service, time, max_concurrency=1) as client:
        async with client.fan_out(requests, deadline=15) as stream:
            kinds = [outcome.status async for outcome in stream]
        assert len(kinds) == 50
        async with client.fan_out(iter(requests), deadline=15) as stream:
            assert len([outcome async for outcome in stream]) < 50


async def test_reading_a_response_counts_against_the_deadline(monkeypatch):
    monkeypatch.setattr("sampling_async._calls.attempt._THREADED_BYTES", 0)
    released = threading.Event()

    def slowly(_: bytes) -> None:
        released.wait(60)

    monkeypatch.setattr("sampling_async._protocol.requests.from_json", lambda *_: slowly(b""))
    async with doubles.client(doubles.Service([]), clock=anyio.current_time, retry=ONCE) as client:
        with pytest.raises(TransportTimeoutError) as caught:
            await client.get_settings(deadline=0.25)
        released.set()
    assert caught.value.delivery == "unknown"
    assert caught.value.args[0] == "the deadline passed while the response was decoded"


async def test_an_explicit_goal_takes_precedence_over_the_deadline():
    assert await sizes(deadline=60, goal="throughput") == [100]


async def test_slots_that_others_wait_for_are_not_free():
    slots = Slots()
    async with doubles.client(slots, max_concurrency=2) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume, client, "a", 100)
            await settled()
            tasks.start_soon(partial(client.bulk_invite, "b", range(1, 101), goal="first"))
            await slots.answer_all(6)
            assert slots.let_in.count("b") == 1
            tasks.cancel_scope.cancel()


# --- Lanes


async def test_a_fan_out_accepts_a_goal_a_deadline_and_a_weight():
    service = doubles.Service(doubles.bulk)
    requests = [InviteRequest(f"m{n}", range(1, 11)) for n in range(3)]
    async with doubles.client(service, timeouts=Timeouts()) as client:
        async with client.fan_out(requests, goal="first", deadline=100, weight=2) as stream:
            assert len([outcome async for outcome in stream]) == 30
    assert len(service.requests) > 3


async def test_a_bulk_with_goal_first_uses_all_slots_of_bulks():
    """Other endpoints have their own limits: neither their permits nor their queues count for bulks."""
    service = doubles.Service(doubles.bulk)
    async with doubles.client(service, max_concurrency=64) as client:
        *busy, late = [client._interactive("get_settings", None) for _ in range(9)]
        for permit in busy:
            await permit.acquire()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(late.acquire)
            await wait_all_tasks_blocked()
            await client.bulk_invite("m", range(1, 101), goal="first")
            for permit in busy:
                permit.release()
        late.release()
    assert len(service.requests) == 8


async def test_a_bulk_with_goal_first_is_cut_for_the_slots_that_other_bulks_leave():
    arrived, answer = [], anyio.Event()

    async def service(request: httpx.Request) -> httpx.Response:
        arrived.append(len(doubles.asked(request)))
        if len(arrived) <= 3:
            await answer.wait()
        return httpx.Response(200, json=doubles.bulk(request))

    async with doubles.client(service, max_concurrency=64) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(client.bulk_invite, "m", range(1, 301))
        await wait_all_tasks_blocked()
        await client.bulk_invite("n", range(1, 101), goal="first")
        answer.set()
    assert arrived == [100] * 3 + [20] * 5  # the limit begins at 8


async def test_a_bulk_with_goal_first_is_cut_for_the_slots_that_interactive_calls_leave():
    service = doubles.Service(doubles.bulk)
    async with doubles.client(service, max_concurrency=4) as client:
        busy = [client._interactive("get_settings", None) for _ in range(2)]
        for permit in busy:
            await permit.acquire()
        await client.bulk_invite("m", range(1, 101), goal="first")
        for permit in busy:
            permit.release()
    assert len(service.requests) == 2
