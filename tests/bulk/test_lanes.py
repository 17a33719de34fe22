"""Lanes: what bulks and calls that somebody waits for get of one client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial

import anyio
import anyio.lowlevel
import doubles
import httpx
import pytest
from bulk_kit import ONCE, Slots, consume, settled

from sampling_async import InvalidRequestError, InviteRequest, SamplingError


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


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan"), 1e-320, 1e300, 10**400, True, "1"])
async def test_an_invalid_weight_is_refused(weight):
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        with pytest.raises(InvalidRequestError, match="weight"):
            client.stream_bulk_invite("m", [1], weight=weight)


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
