"""Where the time of a call goes: the stages add up to it, on results and on errors."""

from __future__ import annotations

import json
import pickle
from contextlib import aclosing, suppress
from itertools import product

import anyio
import doubles
import httpx
import inventories
import pytest

from sampling_async import (
    BadRequestError,
    InviteRequest,
    RetryPolicy,
    SamplingError,
    ServerError,
    Timing,
)
from sampling_async._bulk.source import checked_request
from sampling_async._contract.headers import no_headers
from sampling_async._contract.timing import explain
from sampling_async._pacing.timeline import BACKOFF, BODY, CONNECT, DECODE, PERMIT, BusyIntervals, Timeline
from sampling_async.simulator import Latency, Simulator


def test_each_moment_is_in_one_stage():
    time = doubles.FakeTime()
    timeline = Timeline(time.clock, BusyIntervals())
    for stage, seconds in ((PERMIT, 1.0), (CONNECT, 2.0), (BACKOFF, 4.0), (CONNECT, 8.0), (DECODE, 16.0)):
        timeline.enter(stage)
        time.now += seconds
    timing = timeline.timing(2)
    assert timing == Timing(permit=1.0, connect=10.0, backoff=4.0, decode=16.0, attempts=2)
    assert timing.total == time.now == 31.0
    assert "connect=10.000000, send=0.000000," in repr(timing)


def test_a_wait_for_a_permit_during_a_hold_is_a_hold():
    time, holds = doubles.FakeTime(), BusyIntervals()
    timeline = Timeline(time.clock, holds)
    time.now = 1.0
    holds.begin("somebody else", 1.0)
    time.now = 3.0
    assert (timeline.timing(0).permit, timeline.timing(0).hold) == (1.0, 2.0)
    time.now = 4.0
    holds.end("somebody else", 4.0)
    time.now = 6.0
    timeline.enter(CONNECT)
    holds.begin("somebody else", 6.0)
    time.now = 9.0
    assert timeline.timing(1) == Timing(permit=3.0, hold=3.0, connect=3.0, attempts=1)


def test_holds_that_ended_before_a_wait_are_not_looked_through():
    time, holds = doubles.FakeTime(), BusyIntervals()
    holds.begin("somebody else", 0.0)
    holds.end("somebody else", 1.0)
    holds.within = None  # a client may have 256 of them, and each of its requests would add them up
    time.now = 1.0
    timeline = Timeline(time.clock, holds)
    time.now = 3.0
    assert timeline.timing(0) == Timing(permit=2.0, attempts=0)


def test_a_timeline_can_be_read_while_it_goes_on():
    time = doubles.FakeTime()
    timeline = Timeline(time.clock, BusyIntervals())
    timeline.enter(BODY)
    time.now = 1.0
    assert timeline.timing(1).body == 1.0
    time.now = 3.0
    assert timeline.timing(1).body == 3.0


def slow(time: doubles.FakeTime, *answers: object):
    """Return a service that takes 1 s for each answer."""
    service = doubles.Service(*answers)

    async def answer(request: httpx.Request) -> httpx.Response:
        time.now += 1.0
        return await service(request)

    return answer


async def test_the_stages_of_a_repeated_call_add_up_to_its_time():
    time = doubles.FakeTime()
    policy = RetryPolicy(base=4.0, max_attempts=3)
    handler = slow(time, httpx.Response(500), httpx.Response(500), doubles.page("a"))
    async with doubles.client(handler, time, retry=policy) as client:
        pages = client.recontact_pages(5)
        page = await anext(pages)
        await pages.aclose()
    assert page.timing is not None
    assert page.timing.attempts == 3
    assert page.timing.backoff == sum(time.slept) > 0
    assert page.timing.first_byte == 3.0
    assert page.timing.total == pytest.approx(time.now)


async def test_a_page_without_a_code_that_the_user_has_explains_its_time_too():
    time = doubles.FakeTime()
    handler = slow(time, doubles.page("a", "b", more=True), doubles.page("b", "c"))
    async with doubles.client(handler, time) as client:
        pages = [page async for page in client.recontact_pages(5)]
    assert [page.member_codes for page in pages] == [("a", "b"), ("c",)]
    assert [page.timing.first_byte for page in pages if page.timing is not None] == [1.0, 1.0]


async def test_an_error_explains_its_time():
    time = doubles.FakeTime()
    policy = RetryPolicy(base=4.0, max_attempts=2)
    async with doubles.client(slow(time, httpx.Response(500)), time, retry=policy) as client:
        with pytest.raises(ServerError) as caught:
            await client.get_settings()
    timing = caught.value.timing
    assert timing is not None
    assert (timing.attempts, timing.first_byte, timing.backoff) == (2, 2.0, sum(time.slept))
    assert timing.total == caught.value.elapsed == pytest.approx(time.now)
    assert pickle.loads(pickle.dumps(caught.value)).timing == timing


async def test_a_refusal_of_load_is_a_hold():
    time = doubles.FakeTime()
    handler = slow(time, httpx.Response(429, headers={"Retry-After": "20"}), [])
    async with doubles.client(handler, time) as client:
        timing = (await client.get_settings()).timing
    assert timing is not None
    assert timing.hold + timing.backoff >= 20.0
    assert timing.total == pytest.approx(time.now)


@pytest.mark.parametrize("gone", [httpx.Response(429, headers={"Retry-After": "20"}), httpx.ConnectError("no")])
async def test_a_hold_is_reported_by_a_bulk_whose_last_request_was_formed_after_it(gone):
    time = doubles.FakeTime()

    async def answer(request: httpx.Request) -> httpx.Response:
        if time.now < 15:
            if isinstance(gone, Exception):
                raise gone
            return gone
        time.now += 1.0
        return httpx.Response(200, json=doubles.bulk(request) if request.method == "POST" else [])

    async with doubles.client(answer, time, max_concurrency=2) as client:
        timing = (await client.bulk_invite("m", range(1, 1001))).timing
    assert timing is not None
    assert timing.hold > 13
    assert timing.total == pytest.approx(time.now)
    assert timing.permit + timing.first_byte == pytest.approx(time.now - timing.hold, abs=2)


async def test_waiting_for_a_permit_is_reported():
    time = doubles.FakeTime()
    async with doubles.client(slow(time, []), time, max_concurrency=1) as client:
        found: list[Timing | None] = []

        async def ask() -> None:
            found.append((await client.get_settings()).timing)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
    assert sorted(each.permit for each in found if each) == [0.0, 1.0, 2.0]


async def test_all_results_explain_their_time():
    simulator = Simulator(seed=3, surveys=4, members=20)
    async with simulator.client() as client:
        quotas = await client.get_quotas()
        settings = await client.get_settings()
        found = [quotas.timing, settings.timing]
        ids = [quota.quota_id for survey in quotas.surveys for quota in survey.quotas]
        first, *others = simulator.members
        found.append((await client.bulk_invite(first, ids)).timing)
        for member, quota_id in product(others, ids):
            with suppress(BadRequestError):
                found.append((await client.generate_invite(member, quota_id)).timing)
                break
    assert len(found) == 4
    for timing in found:
        assert timing is not None
        assert timing.attempts == 1
        assert 0 < timing.total < 60


async def test_the_time_of_a_bulk_is_that_of_the_request_that_ended_last():
    time = doubles.FakeTime()

    async def answer(request: httpx.Request) -> httpx.Response:
        time.now += 1.0
        return httpx.Response(200, json=doubles.bulk(request))

    async with doubles.client(answer, time, max_concurrency=1) as client:
        before = time.now
        result = await client.bulk_invite("m", range(1, 301))
        assert result.timing is not None
        assert result.timing.permit == 2.0  # two requests came before
        assert result.timing.first_byte == 1.0
        assert result.timing.total == time.now - before == 3.0


async def test_the_check_of_the_ids_is_part_of_the_time(monkeypatch):
    time = doubles.FakeTime()

    async def slow(*given):
        time.now += 2.0
        return await checked_request(*given)

    monkeypatch.setattr("sampling_async._client.checked_request", slow)
    async with doubles.client(doubles.Service(doubles.bulk), time) as client:
        result = await client.bulk_invite("m", [2])
    assert result.timing is not None
    assert (result.timing.decode, result.timing.total) == (2.0, 2.0)


async def test_a_result_without_a_request_has_no_timing():
    async with doubles.client(doubles.Service([])) as client:
        assert (await client.bulk_invite("m", [])).timing is None


async def test_failed_outcomes_explain_their_time():
    async with doubles.client(doubles.Service(httpx.Response(500))) as client:
        async with client.fan_out([InviteRequest("m", [1])]) as outcomes:
            (outcome,) = [each async for each in outcomes]
    assert isinstance(outcome.error, SamplingError)
    assert outcome.error.timing is not None
    assert outcome.error.timing.attempts == outcome.error.attempts


async def test_the_wait_for_a_journal_is_reported(tmp_path):
    simulator = Simulator(seed=3, surveys=4, members=20)
    reports = []
    async with simulator.client(on_outcome=reports.append) as client:
        quotas = await client.get_quotas()
        ids = [quota.quota_id for survey in quotas.surveys for quota in survey.quotas]
        request = InviteRequest(next(iter(simulator.members)), ids)
        async with client.fan_out([request], journal=tmp_path / "journal") as outcomes:
            assert len([each async for each in outcomes]) == len(ids)
    (report,) = [each for each in reports if each.endpoint == "bulk_invite"]
    assert report.timing.journal > 0


def test_the_timing_is_no_part_of_the_value():
    simulator = Simulator(seed=3, surveys=4, members=20)

    async def main() -> None:
        async with simulator.client() as client:
            one, other = await client.get_settings(), await client.get_settings()
            assert one == other
            assert hash(one) == hash(other)
            explain(one, Timing(body=7.0), no_headers)
            assert one == other
            assert one.timing == Timing(body=7.0)
            assert pickle.loads(pickle.dumps(one)).timing is None
            explain("something else", Timing(), no_headers)

    anyio.run(main)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_over_a_socket_the_stages_add_up_to_the_wall_time(backend):
    simulator = Simulator(seed=3, surveys=4, members=20, latency=Latency(a=0.002, b=0.0, workers=4))

    async def main(base_url: str) -> None:
        from sampling_async import SamplingClient  # noqa: PLC0415

        async with SamplingClient(
            base_url, panel_guid=simulator.panel_guid, api_key=simulator.api_key
        ) as client:
            for _ in range(2):
                began = anyio.current_time()
                quotas = await client.get_quotas()
                took = anyio.current_time() - began
                assert quotas.timing is not None
                assert quotas.timing.total <= took
                assert quotas.timing.connect > 0
                assert quotas.timing.send > 0
                # The system may switch to the service before `send` returns.
                assert quotas.timing.send + quotas.timing.first_byte > 0.002

    with simulator.serve() as base_url:
        anyio.run(main, base_url, backend=backend)


async def test_an_error_in_the_middle_of_surveys_explains_its_time():
    body = json.dumps(inventories.quotas(inventories.survey(), inventories.survey())).encode()
    time = doubles.FakeTime()

    class Cut(httpx.AsyncByteStream):
        async def __aiter__(self):
            time.now += 1.0
            yield body[: len(body) * 2 // 3]  # with the first survey
            time.now += 4.0
            raise httpx.ReadError("cut")

    async def answer(_: httpx.Request) -> httpx.Response:
        time.now += 2.0
        return httpx.Response(200, stream=Cut())

    async with doubles.client(answer, time) as client:
        async with aclosing(client.iter_surveys()) as surveys:
            with pytest.raises(SamplingError) as caught:
                async for _ in surveys:
                    time.now += 100.0  # the time of the user
    timing = caught.value.timing
    assert timing is not None
    assert (timing.first_byte, timing.body, timing.total) == (2.0, 5.0, 7.0)
