"""Streams of outcomes: any input, read in any way, left at any moment; every ID has an outcome."""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel
import doubles
import httpx
import pytest
from anyio import wait_all_tasks_blocked

from sampling_async import (
    BulkInviteResult,
    InvalidRequestError,
    InviteRequest,
)


async def bulk(handler, quota_ids, **options) -> BulkInviteResult:
    chunk_size = options.pop("chunk_size", 100)
    async with doubles.client(handler, **options) as client:
        return await client.bulk_invite("m", quota_ids, chunk_size=chunk_size)


def hanging(after: int):
    """Respond to the chunks up to this quota ID, and hang for the others."""

    async def handler(request: httpx.Request) -> httpx.Response:
        if doubles.asked(request)[0] > after:
            await anyio.sleep_forever()
        return httpx.Response(200, json=doubles.bulk(request))

    return handler


@pytest.mark.parametrize(
    "source",
    [
        lambda: range(1, 250),
        lambda: iter(range(1, 250)),
        lambda: doubles.ids(*range(1, 250)),
        lambda: doubles.ids(*range(1, 201)),  # ends with a full chunk
    ],
)
async def test_a_stream_takes_any_iterable(source):
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        async with client.stream_bulk_invite("m", source()) as outcomes:
            seen = [outcome.quota_id async for outcome in outcomes]
        assert sorted(seen) == list(range(1, len(seen) + 1))
        assert len(seen) in {200, 249}
        assert outcomes.left_over == ()


async def test_a_repeated_id_is_sent_once_and_has_an_outcome_at_each_place():
    for source in ([5, 5, 7, 5], iter([5, 5, 7, 5])):
        service = doubles.Service(doubles.bulk)
        async with doubles.client(service) as client, client.stream_bulk_invite("m", source) as outcomes:
            assert sorted([outcome.quota_id async for outcome in outcomes]) == [5, 5, 5, 7]
        assert doubles.asked(service.requests[0]) == [5, 7]


async def test_a_panel_is_fanned_out_member_by_member():
    service = doubles.Service(doubles.bulk)
    requests = [InviteRequest(f"m{n}", range(1, 20 + n)) for n in range(5)]

    async def later():
        for request in requests:
            yield request

    for source in (requests, iter(requests), later()):
        async with doubles.client(service) as client, client.fan_out(source, chunk_size=10) as outcomes:
            seen = [(outcome.member_code, outcome.quota_id) async for outcome in outcomes]
        assert sorted(seen) == sorted((r.member_code, quota_id) for r in requests for quota_id in r.quota_ids)


@pytest.mark.parametrize("taken", [1, 10, 15])
async def test_outcomes_read_and_left_over_account_for_every_id(taken):
    async with doubles.client(hanging(30), max_concurrency=3) as client:
        async with client.stream_bulk_invite("m", range(1, 101), chunk_size=10) as outcomes:
            seen = [await anext(outcomes) for _ in range(taken)]
            await wait_all_tasks_blocked()
        left = outcomes.left_over
        assert sorted(outcome.quota_id for outcome in (*seen, *left)) == list(range(1, 101))
        assert {outcome.status for outcome in left if outcome.quota_id > 70} == {"not_sent"}
        assert all(outcome.error for outcome in left if outcome.status in {"not_sent", "unknown"})
        assert any(outcome.status == "unknown" for outcome in left)
        assert (client._gate.running, client._gate.waiting) == (0, 0)
        assert outcomes.left_over is left


async def test_outcomes_and_left_over_give_the_same_account_after_cancellation():
    async with doubles.client(hanging(10), max_concurrency=2) as client:
        seen = []
        with anyio.CancelScope() as scope:
            async with client.stream_bulk_invite("m", range(1, 51), chunk_size=10) as outcomes:
                async for outcome in outcomes:
                    seen.append(outcome)
                    if len(seen) == 10:  # the next await ends in a cancellation
                        scope.cancel()
        assert scope.cancelled_caught
        assert sorted(o.quota_id for o in (*seen, *outcomes.left_over)) == list(range(1, 51))
        assert len(seen) == 10


async def test_an_early_break_accounts_for_what_was_drawn_from_a_generator():
    drawn = []

    async def source():
        for number in range(1, 10_000):
            drawn.append(number)
            yield number

    async with doubles.client(doubles.Service(doubles.bulk), max_concurrency=2) as client:
        async with client.stream_bulk_invite("m", source(), chunk_size=7) as outcomes:
            seen = [await anext(outcomes)]
        assert sorted(o.quota_id for o in (*seen, *outcomes.left_over)) == drawn
        assert len(drawn) < 100


@pytest.mark.parametrize("bad", ["x", LookupError("input")])
async def test_an_error_of_the_input_is_raised_after_the_outcomes(bad):
    def source():
        yield from range(1, 25)
        if isinstance(bad, Exception):
            raise bad
        yield bad

    seen = []
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        with pytest.raises((InvalidRequestError, LookupError)):
            async with client.stream_bulk_invite("m", source(), chunk_size=10) as outcomes:
                async for outcome in outcomes:
                    seen.append(outcome.quota_id)
    assert sorted(seen) == list(range(1, 21))
    assert [(o.quota_id, o.status) for o in outcomes.left_over] == [(n, "not_sent") for n in range(21, 25)]


async def test_left_over_is_known_only_after_the_block():
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        async with client.stream_bulk_invite("m", range(1, 51), chunk_size=10) as outcomes:
            await anext(outcomes)
            with pytest.raises(RuntimeError, match="only after the `async with` block has ended"):
                _ = outcomes.left_over
            assert len([outcome async for outcome in outcomes]) == 49
        assert outcomes.left_over == ()


async def test_a_stream_is_used_inside_its_block_and_entered_once():
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        for stream in (client.stream_bulk_invite("m", range(1, 51)), client.stream_recontact_members(5)):
            with pytest.raises(RuntimeError, match="enter the stream first"):
                await anext(stream)
        async with client.stream_bulk_invite("m", range(1, 51), chunk_size=10) as outcomes:
            await anext(outcomes)
        with pytest.raises(RuntimeError, match="has ended, so it gives no more"):
            await anext(outcomes)
        with pytest.raises(RuntimeError, match=r"^a stream can be entered only once; make a new one$"):
            async with outcomes:
                pass
        assert len(outcomes.left_over) == 49


async def test_a_stream_read_to_its_end_stays_at_its_end():
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        async with client.stream_bulk_invite("m", [1]) as outcomes:
            assert len([outcome async for outcome in outcomes]) == 1
        assert [outcome async for outcome in outcomes] == []


def test_a_stream_can_be_made_before_there_is_an_event_loop():
    client = doubles.client(doubles.Service(doubles.bulk))
    stream = client.stream_bulk_invite("m", [1, 2])

    async def use() -> int:
        async with stream as outcomes:
            return len([outcome async for outcome in outcomes])

    assert anyio.run(use) == 2
    anyio.run(client.aclose)


def test_a_recontact_stream_can_be_made_before_there_is_an_event_loop():
    client = doubles.client(doubles.Service(lambda _: doubles.page("a", "b")))
    stream = client.stream_recontact_members(5)

    async def use() -> list[str]:
        async with stream as codes:
            return [code async for code in codes]

    assert anyio.run(use) == ["a", "b"]
    anyio.run(client.aclose)


async def test_input_of_the_wrong_kind_is_named():
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        with pytest.raises(InvalidRequestError, match="only stream_bulk_invite takes an async iterable"):
            await client.bulk_invite("m", doubles.ids(1))
        async with client.fan_out([("m", [1])]) as outcomes:
            with pytest.raises(InvalidRequestError, match="not tuple"):
                await anext(outcomes)


async def test_a_stream_of_ids_that_is_no_generator_is_not_closed():
    send, receive = anyio.create_memory_object_stream[int](10)
    with send, receive:
        for quota_id in range(1, 6):
            send.send_nowait(quota_id)
        async with doubles.client(doubles.Service(doubles.bulk)) as client:
            async with client.stream_bulk_invite("m", receive, chunk_size=5) as outcomes:
                await anext(outcomes)
        send.send_nowait(7)
        assert receive.receive_nowait() == 7


async def test_closing_ends_a_fan_out_that_is_held_back():
    service = doubles.Service(httpx.Response(429, headers={"Retry-After": "30"}))
    client = doubles.client(service, sleep=lambda _: anyio.sleep_forever(), clock=anyio.current_time)
    async with client.stream_bulk_invite("m", range(1, 101), chunk_size=10) as outcomes:
        await wait_all_tasks_blocked()
        with anyio.fail_after(60):
            await client.aclose()
            assert {outcome.status async for outcome in outcomes} == {"not_sent"}


async def test_several_readers_share_a_stream():
    seen = []

    async def read(outcomes) -> None:
        async for outcome in outcomes:
            seen.append(outcome.quota_id)
            await anyio.lowlevel.checkpoint()

    async with doubles.client(doubles.Service(doubles.bulk), max_concurrency=4) as client:
        async with client.stream_bulk_invite("m", range(1, 501), chunk_size=10) as outcomes:
            async with anyio.create_task_group() as readers:
                for _ in range(3):
                    readers.start_soon(read, outcomes)
    assert sorted(seen) == list(range(1, 501))


async def test_the_number_of_unrequested_items_is_bounded(monkeypatch):
    monkeypatch.setattr("sampling_async._bulk.stream._UNREQUESTED_KEPT", 3)
    extra = {"Invites": [doubles.item(quota_id) for quota_id in range(1000, 1010)]}
    result = await bulk(doubles.Service(extra), [1])
    assert [outcome.quota_id for outcome in result.unrequested] == [1007, 1008, 1009]


async def test_a_source_cancelled_elsewhere_raises_an_error():
    async def source():
        for number in range(1, 26):
            yield number
        raise asyncio.CancelledError

    seen = []
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        with pytest.raises(RuntimeError, match="cancelled, but the stream's own task was not"):
            async with client.stream_bulk_invite("m", source(), chunk_size=10) as outcomes:
                async for outcome in outcomes:
                    seen.append(outcome.quota_id)
    assert sorted([*seen, *(outcome.quota_id for outcome in outcomes.left_over)]) == list(range(1, 26))
    assert len(seen) == 20


async def test_a_transport_that_was_cancelled_elsewhere_leaves_its_ids_unknown():
    def answer(request: httpx.Request):
        if 15 in doubles.asked(request):
            raise asyncio.CancelledError
        return doubles.bulk(request)

    result = await bulk(doubles.Service(answer), range(1, 31), chunk_size=10)
    assert [outcome.quota_id for outcome in result.unknown] == list(range(11, 21))


async def test_a_system_exit_in_a_source_propagates_bare():
    async def source():
        yield 1
        raise SystemExit(3)

    async def invite() -> None:
        async with doubles.client(doubles.Service(doubles.bulk)) as client:
            async with client.stream_bulk_invite("m", source()) as outcomes:
                await anext(outcomes)

    with pytest.raises(SystemExit) as caught:
        await doubles.alone(invite)
    assert caught.value.code == 3


def test_a_fan_out_on_another_event_loop_is_the_callers_error():
    client = doubles.client(doubles.Service(doubles.bulk))

    async def invite() -> BulkInviteResult:
        return await client.bulk_invite("m", range(1, 31))

    assert len(anyio.run(invite)) == 30
    with pytest.raises(InvalidRequestError, match="another event loop"):
        anyio.run(invite)
    anyio.run(client.aclose)


async def test_a_bug_in_the_client_is_raised_bare_and_every_id_is_accounted_for(monkeypatch):
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        original = client._caller.run

        async def run(call, permit, track):
            if b"15" in call.body:
                raise ZeroDivisionError
            return await original(call, permit, track)

        monkeypatch.setattr(client._caller, "run", run)
        seen = []
        with pytest.raises(ZeroDivisionError):
            async with client.stream_bulk_invite("m", range(1, 31), chunk_size=10) as outcomes:
                async for outcome in outcomes:
                    seen.append(outcome.quota_id)
        left = [outcome.quota_id for outcome in outcomes.left_over]
        assert sorted(seen + left) == list(range(1, 31))


async def test_a_call_inside_the_loop_gets_its_turn():
    async with doubles.client(doubles.Service(doubles.bulk), max_concurrency=1) as client:
        async with client.stream_bulk_invite("m", range(1, 31), chunk_size=10) as outcomes:
            async for outcome in outcomes:
                if outcome.quota_id % 10 == 0:
                    assert len(await client.bulk_invite("other", [1])) == 1


async def test_memory_is_bounded_by_the_limit_and_not_by_the_input():
    class Source:
        drawn = 0

        async def __aiter__(self):
            for number in range(1, 200_001):
                self.drawn = number
                yield number

    source, taken, ahead = Source(), 0, 0
    async with doubles.client(doubles.Service(doubles.bulk), max_concurrency=4) as client:
        async with client.stream_bulk_invite("m", source) as outcomes:
            async for _ in outcomes:
                taken += 1
                ahead = max(ahead, source.drawn - taken)
                if taken == 20_000:
                    break
    assert ahead <= (4 + 2) * 100


async def test_outcomes_at_hand_do_not_block_the_event_loop():
    """One ID at very many places: all its outcomes are available at once."""
    turns = taken = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1

    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        async with client.stream_bulk_invite("m", [2] * 200_000) as outcomes:
            async with anyio.create_task_group() as tasks:
                await anext(outcomes)
                tasks.start_soon(tick)
                await anyio.lowlevel.checkpoint()
                turns = 0
                async for _ in outcomes:
                    taken += 1
                tasks.cancel_scope.cancel()
    assert taken == 199_999
    assert turns >= 5


async def test_replies_that_come_at_once_give_others_their_turns(monkeypatch):
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        steps = doubles.steps_of_turns(monkeypatch)
        await client.bulk_invite("m", range(1, 1001))
    # Each reply counts four steps twice: when it comes, and when it is put in order.
    assert sum(steps) >= 2 * 10 * 4


async def test_outcomes_go_on_after_a_signal_handler_has_raised_in_their_iterator():
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        async with client.stream_bulk_invite("m", range(1, 21)) as outcomes:
            seen = [await anext(outcomes) for _ in range(3)]
            ((job, _),) = outcomes._current
            outcomes._current[0] = job, iter(())  # a generator ends when something is raised in it
            seen += [each async for each in outcomes]
        assert outcomes.left_over == ()
    assert sorted(outcome.quota_id for outcome in seen) == list(range(1, 21))


async def test_an_input_that_raises_stop_async_iteration_is_no_end():
    def requests():
        yield InviteRequest("m", [1])
        raise StopAsyncIteration

    async with doubles.client(doubles.Service(doubles.bulk)) as client, client.fan_out(requests()) as outcomes:
        with pytest.raises(RuntimeError, match="the input raised StopAsyncIteration"):
            assert [outcome async for outcome in outcomes] == []
