"""The progress of a stream: `OutcomeStream.progress`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import doubles
import pytest

from sampling_async import (
    InviteRequest,
    Progress,
)

if TYPE_CHECKING:
    import httpx


def ticking(time: doubles.FakeTime, seconds: float = 2.0):
    """Return a service that takes this long for each request."""

    async def answer(request: httpx.Request) -> httpx.Response:
        time.now += seconds
        return await doubles.Service(doubles.bulk)(request)

    return answer


async def test_progress_of_a_collection_knows_the_total_and_the_time_left():
    time = doubles.FakeTime()
    async with doubles.client(ticking(time), time, max_concurrency=1) as client:
        stream = client.stream_bulk_invite("m1", [*range(1, 400), 1])
        assert stream.progress == Progress(0, 0, 0, 400, None, None)
        time.now = 1000.0
        async with stream:
            assert stream.progress.seconds_left is None
            for seen in range(1, 401):
                await anext(stream)
                told = stream.progress
                known = round(told.per_second * (time.now - 1000.0))
                assert seen <= known <= told.taken <= 400
                assert told == Progress(
                    told.taken, seen, 0, 400, (400 - known) / told.per_second, told.per_second
                )
        at_the_end = stream.progress
        time.now += 1000.0
        assert stream.progress == at_the_end == Progress(400, 400, 0, 400, 0.0, 50.0)


async def test_progress_of_an_iterator_knows_the_rate_and_no_total():
    time = doubles.FakeTime()
    async with doubles.client(ticking(time), time, max_concurrency=1) as client:
        async with client.stream_bulk_invite("m1", iter(range(1, 151))) as stream:
            for _ in range(150):
                await anext(stream)
            assert stream.progress == Progress(150, 150, 0, None, None, 150 / 4)


async def test_progress_of_empty_input_is_complete():
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        async with client.stream_bulk_invite("m1", []) as stream:
            assert stream.progress == Progress(0, 0, 0, 0, 0.0, None)


@pytest.mark.parametrize(
    ("requests", "total"),
    [
        ([InviteRequest("m1", [1, 2, 2]), InviteRequest("m2", [1])], 4),
        ((InviteRequest("m1", []),), 0),
        ({InviteRequest("m1", [7])}, 1),
        ((each for each in [InviteRequest("m1", [1])]), None),
        ([InviteRequest("m1", [1]), "no request"], None),
        ([InviteRequest("m1", [1])] * 65_536, 65_536),
        ([InviteRequest("m1", [1])] * 65_537, None),  # too many to count before they are sent
    ],
)
async def test_progress_of_a_list_of_requests_knows_the_total(requests, total):
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        assert client.fan_out(requests).progress.total == total


async def test_progress_leaves_replayed_outcomes_out_of_the_rate(tmp_path):
    time = doubles.FakeTime()
    async with doubles.client(ticking(time), time, max_concurrency=1) as client:
        async with client.fan_out([InviteRequest("m1", range(1, 101))], journal=tmp_path / "journal") as stream:
            assert [outcome.replayed async for outcome in stream] == [False] * 100
            assert stream.progress.replayed == 0
        time.now = 0.0
        requests = [InviteRequest("m1", [*range(1, 101), 1, 2]), InviteRequest("m2", range(1, 101))]
        async with client.fan_out(requests, journal=tmp_path / "journal") as stream:
            for seen in range(1, 103):
                assert (await anext(stream)).replayed
                told = stream.progress
                assert (told.answered, told.replayed, told.total) == (seen, seen, 202)
                if not time.now:  # the request is not answered yet
                    assert told.seconds_left is told.per_second is None
            await anext(stream)  # an outcome of one request, which took two seconds
            told = stream.progress
            assert (told.answered, told.seconds_left, told.per_second) == (103, 0.0, 50.0)
            async for _ in stream:
                pass
        assert stream.progress == Progress(202, 202, 102, 202, 0.0, 50.0)
        assert stream.progress.answered - stream.progress.replayed == 100


async def test_progress_after_leaving_early_adds_up_with_the_left_over_outcomes():
    async with doubles.client(doubles.Service(doubles.bulk), max_concurrency=2) as client:
        async with client.stream_bulk_invite("m1", iter(range(1, 1001))) as stream:
            for _ in range(42):
                await anext(stream)
    assert stream.progress.answered == 42
    assert stream.progress.taken <= 42 + len(stream.left_over)
