"""The fan-out: one outcome for every ID, whatever happens."""

from __future__ import annotations

import asyncio
import copy
import copyreg
from functools import partial

import anyio
import anyio.lowlevel
import doubles
import httpx
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given
from hypothesis import strategies as st

from sampling_async import (
    BulkInviteResult,
    ClientClosedError,
    ForbiddenError,
    InvalidRequestError,
    InviteRequest,
    Progress,
    RetryPolicy,
    SamplingError,
    ServerError,
    TransportError,
    TransportTimeoutError,
    _chunks,
    _errors,
)

pytestmark = pytest.mark.anyio
ONCE = RetryPolicy(max_attempts=1)


async def bulk(handler, quota_ids, **options) -> BulkInviteResult:
    chunk_size = options.pop("chunk_size", 100)
    async with doubles.client(handler, **options) as client:
        return await client.bulk_invite("m", quota_ids, chunk_size=chunk_size)


async def ids(*numbers: int):
    for number in numbers:
        yield number


async def test_outcomes_come_in_the_callers_order():
    quota_ids = [*range(350, 0, -1), 7, 7]
    result = await bulk(doubles.Service(doubles.bulk), quota_ids)
    assert [outcome.quota_id for outcome in result] == quota_ids
    assert (len(result.invited), len(result.rejected)) == (175, 177)
    assert result[0].invite.quota_id == 350


async def test_what_failed_holds_nothing_of_the_request():
    """A traceback has the frames, with the key and the bodies; a million IDs may leave ten thousand of them."""
    for status in (403, 500, 503):
        result = await bulk(
            doubles.Service(lambda _, status=status: httpx.Response(status)), range(1, 301), retry=ONCE
        )
        assert {getattr(outcome.error, "status", status) for outcome in result} == {status}
        assert all(outcome.error.__traceback__ is None for outcome in result)
        assert all(outcome.error.__context__ is None for outcome in result)


async def test_requests_hold_at_most_100_ids_each_once():
    service = doubles.Service(doubles.bulk)
    await bulk(service, [*range(1, 251), 1, 250])
    chunks = [doubles.asked(request) for request in service.requests]
    assert sorted(map(len, chunks)) == [50, 100, 100]
    assert sorted(quota_id for chunk in chunks for quota_id in chunk) == list(range(1, 251))


async def test_nothing_asked_is_nothing_sent():
    service = doubles.Service(doubles.bulk)
    assert len(await bulk(service, [])) == 0
    assert service.requests == []


@pytest.mark.parametrize("bad", [0, -1, True, "7", None, 2**63, 1.5])
async def test_a_bad_id_is_refused_before_anything_is_sent(bad):
    service = doubles.Service(doubles.bulk)
    async with doubles.client(service) as client:
        with pytest.raises(InvalidRequestError):
            await client.bulk_invite("m", [*range(1, 200), bad])
        with pytest.raises(InvalidRequestError):
            client.stream_bulk_invite("m", [*range(1, 200), bad])
        with pytest.raises(InvalidRequestError):
            client.stream_bulk_invite("..", ids(1))
    assert service.requests == []


@pytest.mark.parametrize("size", [0, 101, True, 1.0, None])
async def test_a_chunk_size_the_service_does_not_take_is_refused(size):
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        with pytest.raises(InvalidRequestError, match="from 1 to 100"):
            await client.bulk_invite("m", [1], chunk_size=size)


async def test_requests_run_in_parallel_up_to_the_limit():
    running = peak = 0
    all_four = anyio.Event()

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        if running == 4:
            all_four.set()
        await all_four.wait()
        running -= 1
        return httpx.Response(200, json=doubles.bulk(request))

    with anyio.fail_after(5):
        result = await bulk(handler, range(1, 21), chunk_size=1, max_concurrency=4)
    assert (len(result), peak) == (20, 4)


def failing(chunk: int, failure) -> doubles.Service:
    """Return a service that fails for the chunk which holds this quota ID."""

    def answer(request: httpx.Request):
        if chunk not in doubles.asked(request):
            return doubles.bulk(request)
        if isinstance(failure, Exception):
            raise failure
        return failure

    return doubles.Service(answer)


@pytest.mark.parametrize(
    ("failure", "status", "error_class"),
    [
        (httpx.Response(500), "unknown", ServerError),
        (httpx.Response(502, text="<html>"), "unknown", ServerError),
        (httpx.Response(400, json={"ResultCode": 3, "Result": "R"}), "not_sent", Exception),
        (httpx.ReadTimeout("late"), "unknown", TransportTimeoutError),
        (httpx.ReadError("cut"), "unknown", TransportError),
        (httpx.ConnectError("refused"), "not_sent", TransportError),
        (httpx.Response(503), "unknown", ServerError),
        (httpx.Response(503, json={"ResultCode": 14, "Result": "R"}), "not_sent", ServerError),
        (httpx.Response(429), "not_sent", Exception),
        (httpx.Response(400), "unknown", Exception),
        (httpx.Response(404, text="<html>"), "unknown", Exception),
        (httpx.Response(200, text="<html>"), "unknown", Exception),
        (httpx.Response(302), "unknown", Exception),
    ],
)
async def test_a_failed_chunk_keeps_the_other_results(failure, status, error_class):
    result = await bulk(failing(15, failure), range(1, 31), chunk_size=10, retry=ONCE)
    kinds = {outcome.quota_id: outcome.status for outcome in result}
    assert {kinds[i] for i in range(11, 21)} == {status}
    assert {kinds[i] for i in (*range(1, 11), *range(21, 31))} == {"invited", "rejected"}
    assert all(isinstance(result[i].error, error_class) for i in range(10, 20))
    assert result.resendable() == (tuple(range(11, 21)) if status == "not_sent" else ())


async def test_the_outcome_of_a_refused_call_has_its_code():
    result = await bulk(failing(1, httpx.Response(400, json={"ResultCode": 3, "Result": "R"})), [1])
    assert (result[0].result_code, result[0].result, result[0].error.delivery) == (3, "R", "answered")


async def test_a_bulk_invite_that_may_have_worked_is_not_sent_again():
    for failure in (httpx.Response(500), httpx.ReadError("cut"), httpx.Response(200, text="")):
        service = failing(1, failure)
        assert (await bulk(service, [1])).unknown
        assert len(service.requests) == 1


async def test_a_bulk_invite_that_was_refused_unprocessed_is():
    service = doubles.Service(httpx.Response(408), httpx.Response(429), doubles.bulk)
    assert (await bulk(service, [2])).invited
    assert len(service.requests) == 3


async def test_ambiguous_retries_are_opt_in_and_marked():
    service = doubles.Service(httpx.ReadError("cut"), doubles.bulk)
    result = await bulk(service, [2, 3], retry=RetryPolicy(retry_ambiguous=True))
    # A rejection proves nothing: the lost invite itself may be the reason.
    assert [outcome.status for outcome in result] == ["invited", "unknown"]
    assert (result[1].result_code, result[1].error.delivery) == (9, "unknown")
    assert all("an earlier invite may exist" in outcome.anomaly for outcome in result)


@pytest.mark.parametrize(
    "later", [httpx.ConnectError("refused"), *(httpx.Response(code) for code in (400, 403, 404, 429, 503))]
)
async def test_what_may_have_worked_once_stays_unknown(later):
    service = doubles.Service(httpx.ReadError("cut"), later)
    result = await bulk(service, [2], retry=RetryPolicy(retry_ambiguous=True))
    assert (result[0].status, result[0].error.delivery, result.resendable()) == ("unknown", "unknown", ())


async def test_a_missing_item_after_a_retry_knows_its_attempts():
    service = doubles.Service(httpx.Response(429), {"Invites": []})
    result = await bulk(service, [2])
    assert (result[0].status, result[0].error.attempts) == ("unknown", 2)


async def test_a_wait_longer_than_we_wait_for_stops_new_chunks():
    service = doubles.Service(httpx.Response(429, headers={"Retry-After": "120"}))
    result = await bulk(service, range(1, 1001), chunk_size=10, max_concurrency=2)
    assert len(service.requests) <= 4
    assert len(result.not_sent) == 1000
    assert result[-1].error.retry_after == 120


async def test_what_is_not_sent_any_more_gives_the_loop_its_turns():
    """Nothing waits for the wire then: thousands of chunks without a turn would hold up the application."""
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1

    async with doubles.client(failing(1, httpx.Response(403)), max_concurrency=2) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick)
            result = await client.bulk_invite("m", range(1, 100_001))
            tasks.cancel_scope.cancel()
    assert len(result.not_sent) > 99_000
    assert turns >= 500  # of 1,000 chunks, by two tasks


@pytest.mark.parametrize("answer", [doubles.bulk, httpx.ConnectError("refused"), httpx.Response(400)])
async def test_a_transport_that_never_waits_leaves_the_loop_its_turns(answer):
    """As mocks and services in the same process do: a bulk over one can be cancelled, and others run."""
    turns = asked = 0

    def handle(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer(request))

    async def tick(scope: anyio.CancelScope) -> None:
        nonlocal turns
        while turns < 40:
            await anyio.lowlevel.checkpoint()
            turns += 1
        scope.cancel()

    async with doubles.client(handle, max_concurrency=2, retry=ONCE) as client:
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                tasks.start_soon(tick, scope)
                await client.bulk_invite("m", range(1, 100_001))
    assert scope.cancelled_caught
    assert asked < 200


async def test_a_bulk_of_which_no_more_is_sent_ends_soon_when_it_is_cancelled():
    turns = 0

    async def tick(scope: anyio.CancelScope) -> None:
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1
            if turns == 50:
                scope.cancel()

    async with doubles.client(failing(1, httpx.Response(403)), max_concurrency=2) as client:
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                tasks.start_soon(tick, scope)
                await client.bulk_invite("m", range(1, 100_001))
            tasks.cancel_scope.cancel()
    assert scope.cancelled_caught
    assert turns < 100  # of 500 that the rest of it takes


async def test_what_is_not_sent_any_more_can_be_cancelled_and_is_accounted_for():
    drawn = []

    def ids():
        for quota_id in range(1, 1_000_001):
            drawn.append(quota_id)
            yield quota_id

    seen = []
    async with doubles.client(failing(1, httpx.Response(403)), max_concurrency=2) as client:
        with anyio.CancelScope() as scope:
            async with client.stream_bulk_invite("m", ids(), chunk_size=10) as stream:
                async for outcome in stream:
                    seen.append(outcome.quota_id)
                    if len(seen) == 500:
                        scope.cancel()
    assert scope.cancelled_caught
    assert len(drawn) < 1000
    assert sorted([*seen, *(outcome.quota_id for outcome in stream.left_over)]) == drawn


async def test_a_403_stops_new_chunks_and_the_rest_is_not_sent():
    service = failing(15, httpx.Response(403))
    result = await bulk(service, range(1, 1001), chunk_size=10, max_concurrency=2)
    assert len(service.requests) < 6
    assert len(result) == 1000
    assert len(result.not_sent) >= 1000 - 50
    assert {outcome.quota_id for outcome in result.not_sent} >= set(range(100, 1001))
    assert all(isinstance(outcome.error, ForbiddenError) for outcome in result.not_sent)
    assert (result[-1].error.delivery, result[-1].error.attempts) == ("not_sent", 0)
    assert "underscores_in_headers" in str(result[-1].error)
    assert len(result.invited) + len(result.rejected) + len(result.not_sent) == 1000


async def test_closing_the_client_ends_a_fan_out_with_outcomes():
    async def handler(request: httpx.Request) -> httpx.Response:
        if 1 not in doubles.asked(request):
            await anyio.sleep_forever()
        return httpx.Response(200, json=doubles.bulk(request))

    client = doubles.client(handler, max_concurrency=2)
    statuses = []
    async with client.stream_bulk_invite("m", range(1, 51), chunk_size=10) as outcomes:
        async for outcome in outcomes:
            if not statuses:
                await wait_all_tasks_blocked()
                await client.aclose()
            statuses.append(outcome.status)
    assert len(statuses) == 50
    assert statuses.count("unknown") == 20
    assert statuses.count("not_sent") == 20
    assert isinstance(outcome.error, ClientClosedError)


@pytest.fixture
def errors_that_share_when_they_are_copied(monkeypatch):
    """Have errors copied as tblib does it for the whole process, which dask.distributed imports."""

    def shared(kind, attributes, args):
        other = kind.__new__(kind, *args)
        other.__dict__ = attributes
        return other

    def reduced(error):
        return shared, (type(error), error.__dict__, error.args)

    kinds = [kind for kind in vars(_errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    for kind in kinds:
        monkeypatch.setitem(copyreg.dispatch_table, kind, reduced)
    error = ClientClosedError(delivery="unknown")
    assert vars(copy.copy(error)) is vars(error)


@pytest.mark.usefixtures("errors_that_share_when_they_are_copied")
async def test_what_was_in_flight_stays_unknown_whatever_a_library_makes_of_errors():
    await test_closing_the_client_ends_a_fan_out_with_outcomes()

    async def refused(request: httpx.Request) -> httpx.Response:
        if 1 in doubles.asked(request):
            await anyio.sleep(0.01)
            return httpx.Response(403, json={"Result": "PANEL_DOES_NOT_EXIST"})
        raise httpx.ReadError("lost")

    async with doubles.client(refused, max_concurrency=2) as client:
        result = await client.bulk_invite("m", range(1, 51), chunk_size=10)
    assert {outcome.status for outcome in result if outcome.quota_id in range(11, 21)} == {"unknown"}
    for outcome in result:
        assert isinstance(outcome.error, SamplingError)
        assert (outcome.status == "unknown") == (outcome.error.delivery == "unknown")


async def test_answers_nobody_asked_for_are_reported():
    def answer(request: httpx.Request):
        extra = doubles.item(10_000 + doubles.asked(request)[0], 1)
        return {"Invites": [*doubles.bulk(request)["Invites"], extra]}

    result = await bulk(doubles.Service(answer), range(1, 31), chunk_size=10)
    assert sorted(outcome.quota_id for outcome in result.unrequested) == [10_001, 10_011, 10_021]
    async with doubles.client(doubles.Service(answer)) as client:
        async with client.stream_bulk_invite("m", ids(1, 2)) as outcomes:
            assert len([outcome async for outcome in outcomes]) == 2
        assert [outcome.quota_id for outcome in outcomes.unrequested] == [10_001]


@pytest.mark.parametrize(
    "source",
    [
        lambda: range(1, 250),
        lambda: iter(range(1, 250)),
        lambda: ids(*range(1, 250)),
        lambda: ids(*range(1, 201)),  # ends with a full chunk
    ],
)
async def test_a_stream_takes_any_iterable(source):
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        async with client.stream_bulk_invite("m", source()) as outcomes:
            seen = [outcome.quota_id async for outcome in outcomes]
        assert sorted(seen) == list(range(1, len(seen) + 1))
        assert len(seen) in {200, 249}
        assert outcomes.left_over == ()


async def test_a_repeated_id_is_sent_once_and_answered_at_each_of_its_places():
    for source in ([5, 5, 7, 5], iter([5, 5, 7, 5])):
        service = doubles.Service(doubles.bulk)
        async with doubles.client(service) as client, client.stream_bulk_invite("m", source) as outcomes:
            assert sorted([outcome.quota_id async for outcome in outcomes]) == [5, 5, 5, 7]
        assert doubles.asked(service.requests[0]) == [5, 7]


async def test_a_collection_is_sent_once_across_chunks_too():
    service = doubles.Service(doubles.bulk)
    async with doubles.client(service) as client:
        async with client.stream_bulk_invite("m", [*range(1, 101), 1]) as outcomes:
            assert len([outcome async for outcome in outcomes]) == 101
    assert len(service.requests) == 1


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


def hanging(after: int):
    """Answer the chunks up to this quota ID, and hang for the others."""

    async def handler(request: httpx.Request) -> httpx.Response:
        if doubles.asked(request)[0] > after:
            await anyio.sleep_forever()
        return httpx.Response(200, json=doubles.bulk(request))

    return handler


@pytest.mark.parametrize("taken", [1, 10, 15])
async def test_what_is_seen_and_what_is_left_over_account_for_every_id(taken):
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


async def test_cancellation_leaves_the_same_account():
    async with doubles.client(hanging(10), max_concurrency=2) as client:
        seen = []
        with anyio.move_on_after(0.02) as scope:
            async with client.stream_bulk_invite("m", range(1, 51), chunk_size=10) as outcomes:
                async for outcome in outcomes:
                    seen.append(outcome)
        assert scope.cancelled_caught
        assert sorted(o.quota_id for o in (*seen, *outcomes.left_over)) == list(range(1, 51))
        assert len(seen) == 10


async def test_an_early_break_from_a_generator_accounts_for_what_was_drawn():
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
async def test_an_input_that_fails_is_raised_after_what_was_sent(bad):
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
            with pytest.raises(RuntimeError, match="when the block has been left"):
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
        with pytest.raises(RuntimeError, match="left before its end"):
            await anext(outcomes)
        with pytest.raises(RuntimeError, match="entered once"):
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


async def test_the_wrong_kind_of_input_is_named():
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        with pytest.raises(InvalidRequestError, match="only stream_bulk_invite takes an async one"):
            await client.bulk_invite("m", ids(1))
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
        with anyio.fail_after(5):
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


async def test_unrequested_answers_are_kept_within_bounds(monkeypatch):
    monkeypatch.setattr("sampling_async._bulk._UNREQUESTED_KEPT", 3)
    extra = {"Invites": [doubles.item(quota_id) for quota_id in range(1000, 1010)]}
    result = await bulk(doubles.Service(extra), [1])
    assert [outcome.quota_id for outcome in result.unrequested] == [1007, 1008, 1009]


async def test_a_source_that_was_cancelled_elsewhere_is_an_error_and_no_silence():
    async def source():
        for number in range(1, 26):
            yield number
        raise asyncio.CancelledError

    seen = []
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        with pytest.raises(RuntimeError, match="cancelled, and not by who runs the stream"):
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


async def test_an_exit_of_the_program_in_a_source_leaves_the_package_bare():
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


async def test_a_bug_in_the_client_is_raised_bare_and_its_ids_are_accounted_for(monkeypatch):
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


async def test_an_interactive_call_waits_for_one_freed_slot():
    order = []

    async def handler(request: httpx.Request) -> httpx.Response:
        order.append("bulk" if request.method == "POST" else "settings")
        await anyio.sleep(0.002)
        return httpx.Response(200, json=doubles.bulk(request) if request.method == "POST" else [])

    async with doubles.client(handler, max_concurrency=1) as client:
        async with client.stream_bulk_invite("m", iter(range(1, 10**7))) as outcomes:
            await anext(outcomes)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.get_settings)
                while "settings" not in order:
                    before = len(order)
                    await anext(outcomes)
        assert before <= 4


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


_answers = st.sampled_from(
    ["right", "missing", "extra", "reversed", "empty", "500", "503", "429", "cut", "refused", "null"]
)


@given(
    st.lists(st.integers(1, 60), max_size=120), st.integers(1, 20), st.lists(_answers, min_size=1, max_size=8)
)
def test_every_id_ends_in_one_truthful_outcome_whatever_the_service_does(quota_ids, chunk_size, plan):
    """The invariant, against a ledger of the invites that were really made."""
    ledger: set[int] = set()
    script = iter(plan * 1000)

    async def handler(request: httpx.Request) -> httpx.Response:
        fault = next(script)
        if fault == "refused":
            raise httpx.ConnectError("refused")
        if fault == "429":
            return httpx.Response(429)
        items = doubles.bulk(request)["Invites"]
        ledger.update(item["QuotaID"] for item in items if item["ResultCode"] == 1)
        match fault:
            case "cut":
                raise httpx.ReadError("cut")
            case "500" | "503":
                return httpx.Response(int(fault))
            case "missing":
                items = items[1:]
            case "extra":
                items = [*items, doubles.item(1000, 1)]
            case "reversed":
                items = items[::-1]
            case "empty":
                items = []
            case "null":
                items = None
        return httpx.Response(200, json={"Invites": items})

    async def run() -> BulkInviteResult:
        return await bulk(handler, quota_ids, chunk_size=chunk_size)

    result = anyio.run(run)
    assert [outcome.quota_id for outcome in result] == quota_ids
    kinds = (result.invited, result.rejected, result.not_sent, result.unknown)
    assert sum(map(len, kinds)) == len(quota_ids)
    assert all(outcome.quota_id in ledger for outcome in result.invited)
    assert not any(outcome.quota_id in ledger for outcome in (*result.rejected, *result.not_sent))


@pytest.mark.parametrize("nothing", [5, None, 1.5, True])
async def test_what_is_no_input_is_refused_at_once(nothing):
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        for ask in (client.fan_out, partial(client.stream_bulk_invite, "m")):
            with pytest.raises(InvalidRequestError, match="is an iterable or async iterable, not"):
                ask(nothing)


async def test_outcomes_that_are_at_hand_do_not_keep_the_loop_to_themselves():
    """One ID asked in very many places: all outcomes are there at once."""
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


# --- How far it has come


def ticking(time: doubles.FakeTime, seconds: float = 2.0):
    """Return a service that takes so long for each request."""

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


async def test_progress_of_nothing_is_at_its_end():
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
        ([InviteRequest("m1", [1])] * 9, None),
    ],
)
async def test_progress_of_requests_counts_those_that_lie_there(monkeypatch, requests, total):
    monkeypatch.setattr(_chunks, "_COUNTED", 8)
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        assert client.fan_out(requests).progress.total == total


async def test_progress_reckons_without_what_a_journal_knew(tmp_path):
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
            await anext(stream)  # of one request, which took two seconds
            told = stream.progress
            assert (told.answered, told.seconds_left, told.per_second) == (103, 0.0, 50.0)
            async for _ in stream:
                pass
        assert stream.progress == Progress(202, 202, 102, 202, 0.0, 50.0)
        assert stream.progress.answered - stream.progress.replayed == 100


async def test_progress_after_leaving_early_adds_up_with_what_is_left_over():
    async with doubles.client(doubles.Service(doubles.bulk), max_concurrency=2) as client:
        async with client.stream_bulk_invite("m1", iter(range(1, 1001))) as stream:
            for _ in range(42):
                await anext(stream)
    assert stream.progress.answered == 42
    assert stream.progress.taken <= 42 + len(stream.left_over)
