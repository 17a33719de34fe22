"""Chunks of a bulk: a bad ID is found by splitting, and a refused chunk is asked again."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import doubles
import httpx
import pytest
from bulk_kit import DIRECT, bulk

from sampling_async import OutagePolicy, RetryPolicy

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
