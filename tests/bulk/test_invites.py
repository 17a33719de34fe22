"""Chunks: a bad ID is found by splitting; deadlines, goals, lanes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import doubles
import httpx
import pytest
from anyio import wait_all_tasks_blocked

from sampling_async import (
    InvalidRequestError,
    InviteRequest,
    OutageError,
    OutagePolicy,
    RetryPolicy,
    SamplingError,
    ServerError,
    Timeouts,
    TransportTimeoutError,
)
from sampling_async._bulk.invites import Inviter
from sampling_async._bulk.job import Job
from sampling_async._protocol.requests import Chunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ONCE = RetryPolicy(max_attempts=1)
NO_PATIENCE = OutagePolicy(patience=0)
"""Chunks that are refused for load or cannot be sent use up their attempts."""


def refusing(bad: set[int], status: int = 400, **headers: str) -> doubles.Service:
    """Return a service that refuses a whole request if it contains one of these IDs."""

    def answer(request: httpx.Request):
        if request.method == "GET":
            return httpx.Response(200, json=[])
        if bad & set(doubles.asked(request)):
            return httpx.Response(status, json={"Result": "NO_QUOTA_ID", "ResultCode": 10}, headers=headers)
        return doubles.bulk(request)

    return doubles.Service(answer)


async def bulk(service, quota_ids, chunk_size: int = 100, **options):
    async with doubles.client(service, **options) as client:
        return await client.bulk_invite("m", quota_ids, chunk_size=chunk_size)


# --- One bad ID


@pytest.mark.parametrize("bad", [1, 50, 51, 77, 100])
async def test_one_bad_id_among_a_hundred_is_found(bad):
    service = refusing({bad})
    result = await bulk(service, range(1, 101))
    assert result.resendable() == (bad,)
    assert len(result.invited) + len(result.rejected) == 99
    assert result[bad - 1].result_code == 10
    assert len(service.requests) <= 1 + 14
    assert [outcome.quota_id for outcome in result] == list(range(1, 101))


async def test_two_bad_ids_are_found_or_not_sent_and_the_effort_is_bounded():
    service = refusing({3, 90})
    result = await bulk(service, range(1, 101))
    assert {3, 90} <= set(result.resendable())
    assert len(result.resendable()) < 50
    assert len(service.requests) == 1 + 16


async def test_a_chunk_whose_parts_are_all_refused_stops_further_splitting():
    service = refusing(set(range(1, 1001)))
    result = await bulk(service, range(1, 1001), max_concurrency=1)
    assert len(result.not_sent) == 1000
    assert len(service.requests) <= 10 + 2 * 4  # one chunk, and one that ran at the same time


@pytest.mark.parametrize("code", [3, 12, 14])
async def test_a_refusal_of_the_panel_or_member_does_not_split_the_chunk(code):
    service = doubles.Service(httpx.Response(400, json={"Result": "R", "ResultCode": code}))
    assert len((await bulk(service, range(1, 101))).not_sent) == 100
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    "failure",
    [
        httpx.Response(500),
        httpx.Response(502),
        httpx.ReadError("cut"),
        httpx.Response(503),
        httpx.Response(404),
        httpx.Response(400),
        httpx.Response(400, text='{"Result": "TECHNIC'),
        httpx.Response(400, json={"Result": "TECHNICAL_ERROR", "ResultCode": 36}),
    ],
)
async def test_a_failure_that_proves_nothing_does_not_split_the_chunk(failure):
    service = doubles.Service(failure)
    await bulk(service, range(1, 101))
    assert len(service.requests) == 1


DIRECT = {408, 425, 429, 503}
"""Statuses that prove non-processing if there is no proxy between the client and the service."""


async def test_a_lasting_503_splits_the_chunk_if_it_proves_something_and_others_succeed():
    service, policy = refusing({7}, 503), RetryPolicy(budget=100, unprocessed=DIRECT)
    result = await bulk(service, range(1, 33), chunk_size=8, max_concurrency=2, retry=policy)
    assert result.resendable() == (7,)


async def test_a_503_of_the_service_itself_is_retried_and_does_not_split_the_chunk():
    service = refusing({7}, 503)
    policy = RetryPolicy(budget=100)
    result = await bulk(
        service, range(1, 33), chunk_size=8, max_concurrency=2, retry=policy, outage=NO_PATIENCE
    )
    assert len(result.not_sent) == 8
    assert len(service.requests) == 3 + 3


async def test_a_503_of_unknown_origin_is_not_retried_and_proves_nothing():
    service = doubles.Service(httpx.Response(503, text="<html>", headers={"Retry-After": "1"}))
    result = await bulk(service, range(1, 9))
    assert len(result.unknown) == 8
    assert len(service.requests) == 1


async def test_a_503_to_the_only_chunk_does_not_split_it():
    service = refusing({7}, 503)
    assert len((await bulk(service, range(1, 9), outage=NO_PATIENCE)).not_sent) == 8
    assert len(service.requests) == 3


async def test_parts_that_are_not_sent_any_more_end_with_the_refusal():
    result = await bulk(refusing(set(range(1, 101))), range(1, 101))
    assert {str(outcome.error) for outcome in result} == {str(result[0].error)}
    assert result[99].error.result_code == 10


async def test_after_a_chunk_that_failed_in_another_way_a_bad_id_is_still_found():
    def answer(request: httpx.Request):
        if request.method == "GET":
            return []  # one failure and no other attempt that could begin: the service is probed
        if 1 in doubles.asked(request):
            return httpx.Response(500)
        return (
            httpx.Response(400, json={"Result": "R", "ResultCode": 10})
            if 7 in doubles.asked(request)
            else (doubles.bulk(request))
        )

    result = await bulk(doubles.Service(answer), range(1, 9), chunk_size=4, max_concurrency=1)
    assert result.resendable() == (7,)
    assert len(result.unknown) == 4


def inviter(client) -> Inviter:
    return Inviter(client._caller, doubles.PANEL)


@pytest.mark.parametrize(
    ("attempts", "others_answered", "may"),
    [(1, True, False), (2, True, True), (3, True, True), (2, False, False)],
)
async def test_a_503_is_about_one_id_if_it_lasted_and_others_were_answered_meanwhile(
    attempts, others_answered, may
):
    async with doubles.client(doubles.Service([]), retry=RetryPolicy(unprocessed=DIRECT)) as client:
        error = ServerError("away", status=503, delivery="answered")
        error.attempts = attempts
        chunk = Chunk("m", (1, 2))
        assert inviter(client)._may_be_about_one_id(chunk, error, others_answered=others_answered) is may


async def test_what_was_answered_before_the_refused_chunk_began_proves_nothing():
    """Of four chunks, one at a time, the last is refused with 503."""
    policy, outage = RetryPolicy(budget=100, unprocessed=DIRECT), OutagePolicy(patience=0, failures=99)
    result = await bulk(
        refusing({13}, 503), range(1, 17), chunk_size=4, max_concurrency=1, retry=policy, outage=outage
    )
    assert result.resendable() == (13, 14, 15, 16)


async def test_chunks_answered_after_the_refused_one_began_prove_something_however_many_came_before():
    policy = RetryPolicy(budget=100, unprocessed=DIRECT)
    result = await bulk(refusing({30}, 503), range(1, 41), chunk_size=4, max_concurrency=2, retry=policy)
    assert result.resendable() == (30,)


@pytest.mark.parametrize(("retry_after", "stops"), [(None, False), (60.0, False), (60.1, True)])
async def test_a_retry_after_of_more_than_a_minute_stops_the_fan_out(retry_after, stops):
    async with doubles.client(doubles.Service([])) as client:
        asking, error = inviter(client), ServerError("away", status=503, delivery="answered")
        error.retry_after = retry_after
        asking._stop(error)
        assert asking.needs_permit(Job(Chunk("m", (1,)))) is not stops


async def test_a_journal_is_closed_once_by_the_fan_out_that_opened_it():
    class Kept:
        closed = 0

        async def open(self) -> None:
            pass

        async def close(self) -> None:
            self.closed += 1

    async with doubles.client(doubles.Service([])) as client:
        journal = Kept()
        asking = Inviter(client._caller, doubles.PANEL, journal)
        await asking.end(lambda: None)
        assert journal.closed == 0
        await asking.begin()
        for _ in range(2):
            await asking.end(lambda: None)
        assert journal.closed == 1
        await inviter(client).end(lambda: None)  # without a journal


async def test_errors_of_single_items_have_the_time_of_their_request_which_is_about_the_panel():
    time = doubles.FakeTime()

    def answer(request: httpx.Request):
        assert doubles.PANEL in str(request.url)
        time.now += 1.5
        return {"Invites": [doubles.item(2)]}

    time.now = 100.0
    async with doubles.client(doubles.Service(answer), time) as client:
        result = await client.bulk_invite("m", [2, 3])
    assert result[1].error.elapsed == 1.5


async def test_an_outage_stops_the_splitting_of_chunks():
    service = doubles.Service(httpx.Response(503))
    async with doubles.client(service, retry=RetryPolicy(unprocessed=DIRECT)) as client:
        for _ in range(3):
            assert len((await client.bulk_invite("m", range(1, 101))).not_sent) == 100
        assert client.snapshot().breaker == "open"
    assert len([request for request in service.requests if request.method == "POST"]) == 5


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        ({"retry": RetryPolicy(max_attempts=1, unprocessed=DIRECT)}, {}),
        ({"retry": RetryPolicy(unprocessed=DIRECT)}, {"Retry-After": "1"}),
        ({"retry": RetryPolicy(budget=2, deposit=0, unprocessed=DIRECT)}, {}),
    ],
)
async def test_a_503_does_not_split_the_chunk(options, headers):
    service = refusing({7}, 503, **headers)
    result = await bulk(service, range(1, 33), chunk_size=8, max_concurrency=2, outage=NO_PATIENCE, **options)
    assert len(result.not_sent) == 8
    assert len(service.requests) <= 3 + 3


async def test_an_ambiguous_part_is_unknown_and_the_other_parts_keep_their_outcomes():
    def answer(request: httpx.Request):
        ids = doubles.asked(request)
        if len(ids) == 8:
            return httpx.Response(400, json={"Result": "R", "ResultCode": 10})
        return httpx.Response(500) if 1 in ids else doubles.bulk(request)

    result = await bulk(doubles.Service(answer), range(1, 9))
    assert [outcome.quota_id for outcome in result.unknown] == [1, 2, 3, 4]
    assert len(result.invited) + len(result.rejected) == 4


async def test_a_refused_key_ends_the_splitting():
    def answer(request: httpx.Request):
        whole = len(doubles.asked(request)) == 8
        return httpx.Response(400, json={"ResultCode": 10}) if whole else httpx.Response(403)

    service = doubles.Service(answer)
    assert len((await bulk(service, range(1, 9))).not_sent) == 8
    assert len(service.requests) == 2


async def test_answered_parts_keep_their_outcomes_after_cancellation():
    """An invite of the first half is not reported as `not_sent` if the second half is cancelled."""
    second = anyio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        ids = doubles.asked(request)
        if len(ids) == 8:
            return httpx.Response(400, json={"Result": "R", "ResultCode": 10})
        if 5 in ids:
            second.set()
            await anyio.sleep_forever()
        return httpx.Response(200, json=doubles.bulk(request))

    async with doubles.client(answer) as client:
        async with client.stream_bulk_invite("m", range(1, 9)) as stream:
            with anyio.fail_after(60):
                await second.wait()
    kinds = {outcome.quota_id: outcome.status for outcome in stream.left_over}
    assert kinds == {1: "rejected", 2: "invited", 3: "rejected", 4: "invited"} | dict.fromkeys(
        range(5, 9), "unknown"
    )


async def test_parts_that_were_not_asked_yet_are_not_sent():
    first = anyio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        if len(doubles.asked(request)) == 8:
            return httpx.Response(400, json={"Result": "R", "ResultCode": 10})
        first.set()
        return await anyio.sleep_forever()

    async with doubles.client(answer) as client:
        async with client.stream_bulk_invite("m", range(1, 9)) as stream:
            await first.wait()
    kinds = [outcome.status for outcome in stream.left_over]
    assert kinds == ["unknown"] * 4 + ["not_sent"] * 4


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
    [
        {"goal": "last"},
        {"deadline": 0},
        {"deadline": True},
        {"deadline": "1"},
        {"weight": -1},
        {"weight": math.nan},
    ],
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


async def test_a_stream_is_entered_once():
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        stream = client.fan_out([])
        async with stream:
            with pytest.raises(RuntimeError, match="entered only once"):
                async with stream:
                    pytest.fail("entered twice")


# --- Lanes


async def settled() -> None:
    """Let all tasks run until they wait for the service."""
    for _ in range(50):
        await anyio.lowlevel.checkpoint()


class Slots:
    """A service that responds when told to, and records which calls it got."""

    def __init__(self) -> None:
        self.let_in: list[str] = []
        self._turn = anyio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        is_bulk = request.method == "POST"
        self.let_in.append(request.url.path.split("/")[-2] if is_bulk else "interactive")
        turn = self._turn
        await turn.wait()
        return httpx.Response(200, json=doubles.bulk(request) if is_bulk else [])

    async def answer_all(self, times: int = 1) -> None:
        """Respond to all calls and let the next ones in, this many times."""
        for _ in range(times):
            await settled()
            turn, self._turn = self._turn, anyio.Event()
            turn.set()
        await settled()


async def consume(client, member: str, count: int, **options) -> None:
    async with client.stream_bulk_invite(member, iter(range(1, count)), chunk_size=1, **options) as outcomes:
        async for _ in outcomes:
            pass


async def test_calls_that_somebody_waits_for_need_not_wait_for_a_bulk_while_the_service_is_well():
    slots = Slots()
    async with doubles.client(slots, max_concurrency=8) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume, client, "bulk", 10_000_000)
            await settled()
            for _ in range(3):
                tasks.start_soon(client.get_settings)
                await settled()
            assert slots.let_in == ["bulk"] * 8 + ["interactive"] * 2
            await slots.answer_all()
            assert slots.let_in.count("interactive") == 3
            bulk = client._gate.kind("bulk_invite")
            bulk.reported_at = client._gate.clock()  # it has just reported an overload
            await settled()
            tasks.start_soon(client.get_settings)
            await settled()
            assert slots.let_in.count("interactive") == 3
            tasks.cancel_scope.cancel()


async def test_an_interactive_call_gets_the_first_slot_that_an_endless_bulk_frees():
    slots = Slots()
    async with doubles.client(slots, max_concurrency=3) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume, client, "bulk", 10_000_000)
            await settled()
            tasks.start_soon(client.get_settings)
            await settled()
            assert slots.let_in == ["bulk"] * 3
            await slots.answer_all()
            assert sorted(slots.let_in[3:]) == ["bulk"] * 2 + ["interactive"]
            tasks.cancel_scope.cancel()


async def test_an_interactive_call_gets_the_first_free_slot_after_the_limit_was_lowered():
    slots = Slots()
    async with doubles.client(slots, max_concurrency=3) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume, client, "bulk", 10_000_000)
            await settled()
            client._gate.kind("bulk_invite").adaptive._limit = 1.0
            tasks.start_soon(client.get_settings)
            await settled()
            assert slots.let_in.count("interactive") == 0  # all slots are taken
            await slots.answer_all(1)
            assert slots.let_in[3:].count("interactive") == 1
            tasks.cancel_scope.cancel()


async def test_bulks_share_evenly_or_by_their_weights():
    for weights, shares in (((1, 1), (0.5, 0.5)), ((3, 1), (0.75, 0.25))):
        slots = Slots()
        async with doubles.client(slots, max_concurrency=1) as client:
            async with anyio.create_task_group() as tasks:
                for name, weight in zip("ab", weights, strict=True):
                    tasks.start_soon(partial(consume, client, name, 1_000_000, weight=weight))
                await slots.answer_all(40)
                tasks.cancel_scope.cancel()
        counted = tuple(slots.let_in[:40].count(name) / 40 for name in "ab")
        assert counted == pytest.approx(shares, abs=0.05)


async def test_a_late_bulk_gets_its_share_and_no_more():
    slots = Slots()
    async with doubles.client(slots, max_concurrency=1) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume, client, "a", 1_000_000)
            await slots.answer_all(20)
            tasks.start_soon(consume, client, "b", 1_000_000)
            await slots.answer_all(20)
            tasks.cancel_scope.cancel()
    assert 8 <= slots.let_in.count("b") <= 12


async def test_bulks_get_one_permit_in_ten_however_many_interactive_calls_there_are():
    slots = Slots()

    async def ask_on() -> None:
        while True:
            await client.get_settings()

    async with doubles.client(slots, max_concurrency=1) as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask_on)
            tasks.start_soon(consume, client, "bulk", 1000)
            await slots.answer_all(40)
            tasks.cancel_scope.cancel()
    assert 3 <= slots.let_in.count("bulk") <= 5


async def test_a_snapshot_shows_current_and_waiting_work():
    slots = Slots()
    async with doubles.client(slots, max_concurrency=2) as client:
        shot = client.snapshot()
        assert (shot.seconds_per_request, shot.seconds_per_id) == (None, None)
        assert (shot.breaker, shot.requests_per_second) == ("closed", None)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume, client, "m", 4)
            await settled()
            tasks.start_soon(client.get_settings)
            await settled()
            shot = client.snapshot()
            assert (shot.limit, shot.max_concurrency, shot.running, shot.waiting) == (2, 2, 2, 2)
            assert (shot.retry_tokens, shot.held_for) == (10, 0)
            while client.snapshot().running:
                await slots.answer_all()
        assert (client.snapshot().seconds_per_request, client.snapshot().seconds_per_id) == (0, 0)


@pytest.mark.parametrize(
    ("shown", "limits"),
    [
        # Where nothing else comes, refusals for load say nothing of the number at once.
        (httpx.Response(429), (4, 4, 4)),
        (httpx.Response(503), (4, 4, 4)),
        (httpx.Response(502), (4, 2, 1)),
        (httpx.ReadTimeout("late"), (4, 2, 1)),
    ],
    ids=str,
)
async def test_the_limit_follows_the_service(shown, limits):
    service = doubles.Service(*[shown] * 3, doubles.bulk)
    async with doubles.client(service, retry=ONCE) as client:
        for limit in limits:
            await client.bulk_invite("m", [1])
            assert client.snapshot().limit == limit
        await client.bulk_invite("m", [1])
        assert client.snapshot().limit == max(limits[-1], 2)


async def test_a_failing_endpoint_does_not_slow_down_the_others():
    """Bulks continue at full speed while Get Quotas fails."""

    def answer(request: httpx.Request):
        if request.method == "POST":
            return doubles.bulk(request)
        return httpx.Response(503, headers={"Retry-After": "60"})

    service = doubles.Service(answer)
    time = doubles.FakeTime()
    async with doubles.client(service, time, retry=ONCE) as client:
        for _ in range(3):
            client._gate.unhold()
            with contextlib.suppress(Exception):
                await client.get_quotas()
        assert client.snapshot().held_for == 60
        began = time.now  # Get Quotas has a pace by now
        assert len((await client.bulk_invite("m", range(1, 1001))).unknown) == 0
        assert (client.snapshot().limit, time.now) == (8, began)


async def test_a_fan_out_accepts_a_goal_a_deadline_and_a_weight():
    service = doubles.Service(doubles.bulk)
    requests = [InviteRequest(f"m{n}", range(1, 11)) for n in range(3)]
    async with doubles.client(service, timeouts=Timeouts()) as client:
        async with client.fan_out(requests, goal="first", deadline=100, weight=2) as stream:
            assert len([outcome async for outcome in stream]) == 30
    assert len(service.requests) > 3


async def test_replayed_outcomes_do_not_wait_for_a_hold(tmp_path):
    """Outcomes from a journal are returned at once, whatever Retry-After says."""
    clock, service = doubles.FakeTime(), doubles.Service(doubles.bulk)
    requests = [InviteRequest("m", range(1, 201))]
    async with doubles.client(service, clock) as client:
        for _ in range(2):
            async with client.fan_out(requests, journal=tmp_path / "journal") as outcomes:
                assert len([outcome async for outcome in outcomes]) == 200
            client._gate.hold(30)
    assert (clock.now, len(service.requests)) == (0, 2)


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


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan"), 1e-320, 1e300, 10**400, True, "1"])
async def test_an_invalid_weight_is_refused(weight):
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        with pytest.raises(InvalidRequestError, match="weight"):
            client.stream_bulk_invite("m", [1], weight=weight)


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), 10**400, True, "1"])
async def test_an_invalid_deadline_is_refused(deadline):
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        with pytest.raises(InvalidRequestError, match="deadline"):
            await client.bulk_invite("m", [1], deadline=deadline)


async def test_an_id_whose_index_method_raises_is_refused_and_earlier_ids_are_reported():
    class Broken:
        def __index__(self) -> int:
            raise ValueError("broken")

    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        with pytest.raises(InvalidRequestError, match="Broken"):
            async with client.stream_bulk_invite("m", iter([1, 2, Broken()])) as outcomes:
                async for _ in outcomes:
                    pass
    assert [outcome.quota_id for outcome in outcomes.left_over] == [1, 2]


def test_a_client_can_be_closed_from_another_event_loop_while_calls_wait_in_the_first():
    service = doubles.Service(httpx.Response(429, headers={"Retry-After": "30"}))
    client = doubles.client(service, sleep=anyio.sleep, clock=time.monotonic, retry=ONCE)

    async def wait() -> asyncio.Task[object]:
        with contextlib.suppress(SamplingError):
            await client.get_settings()
        waiting = asyncio.ensure_future(client.get_settings())
        await asyncio.sleep(0.01)
        return waiting

    loop = asyncio.new_event_loop()
    waiting = loop.run_until_complete(wait())
    asyncio.run(client.aclose())
    assert client._session.closed
    waiting.cancel()
    loop.run_until_complete(asyncio.wait([waiting]))
    loop.close()
