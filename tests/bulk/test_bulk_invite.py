"""Bulk Invite of one member: one outcome for every ID, in the order asked, whatever fails."""

from __future__ import annotations

import copy
import copyreg
import gc
from functools import partial

import anyio
import anyio.lowlevel
import doubles
import httpx
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given
from hypothesis import strategies as st

import sampling_async
from sampling_async import (
    BulkInviteResult,
    ClientClosedError,
    ForbiddenError,
    InvalidRequestError,
    InviteOutcome,
    RetryPolicy,
    SamplingError,
    ServerError,
    TransportError,
    TransportTimeoutError,
)

ONCE = RetryPolicy(max_attempts=1)


async def bulk(handler, quota_ids, **options) -> BulkInviteResult:
    chunk_size = options.pop("chunk_size", 100)
    async with doubles.client(handler, **options) as client:
        return await client.bulk_invite("m", quota_ids, chunk_size=chunk_size)


async def test_outcomes_come_in_the_callers_order():
    quota_ids = [*range(350, 0, -1), 7, 7]
    result = await bulk(doubles.Service(doubles.bulk), quota_ids)
    assert [outcome.quota_id for outcome in result] == quota_ids
    assert (len(result.invited), len(result.rejected)) == (175, 177)
    assert result[0].invite.quota_id == 350
    assert {outcome.member_code for outcome in result} == {"m"}


def outcomes_made() -> int:
    """Return how many outcomes exist; a result makes each one when it is read."""
    return sum(type(each) is InviteOutcome for each in gc.get_objects())


async def test_a_result_is_its_responses_one_after_the_other():
    """Where an ID is repeated, the responses are cut there."""
    result = await bulk(doubles.Service(doubles.bulk), range(1, 251))
    assert [len(part) for part in result._answers] == [100, 100, 50]
    assert outcomes_made() == 0
    quota_ids = [*range(1, 5001), 7]
    result = await bulk(doubles.Service(doubles.bulk), quota_ids)
    assert [len(part) for part in result._answers] == [100] * 50 + [1]
    result = await bulk(doubles.Service(doubles.bulk), [7, *range(1, 151), 3, 3, 4])
    assert [len(part) for part in result._answers] == [7, 1, 93, 50, 1, 2]
    assert outcomes_made() == 0
    assert [outcome.quota_id for outcome in result] == [7, *range(1, 151), 3, 3, 4]
    assert {outcome.member_code for outcome in result} == {"m"}


async def test_the_outcomes_of_a_failed_request_are_those_of_the_member():
    result = await bulk(doubles.Service(lambda _: httpx.Response(403)), [5, 6])
    assert [(each.member_code, each.quota_id, each.status) for each in result] == [
        ("m", 5, "not_sent"),
        ("m", 6, "not_sent"),
    ]


async def test_an_error_holds_nothing_of_the_request():
    """A traceback holds frames with the key and the bodies; a million IDs may leave ten thousand tracebacks."""
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


async def test_an_empty_bulk_sends_nothing():
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
            client.stream_bulk_invite("..", doubles.ids(1))
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

    with anyio.fail_after(60):
        result = await bulk(handler, range(1, 21), chunk_size=1, max_concurrency=4)
    assert (len(result), peak) == (20, 4)


def failing(chunk: int, failure) -> doubles.Service:
    """Return a service that fails for the chunk with this quota ID."""

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


async def test_a_bulk_invite_that_was_refused_unprocessed_is_sent_again():
    service = doubles.Service(httpx.Response(408), httpx.Response(429), doubles.bulk)
    assert (await bulk(service, [2])).invited
    assert len(service.requests) == 3


async def test_ambiguous_retries_are_opt_in_and_marked():
    service = doubles.Service(httpx.ReadError("cut"), doubles.bulk)
    result = await bulk(service, [2, 3], retry=RetryPolicy(retry_ambiguous=True))
    # A rejection proves nothing: the lost invite may be its reason.
    assert [outcome.status for outcome in result] == ["invited", "unknown"]
    assert (result[1].result_code, result[1].error.delivery) == (9, "unknown")
    assert str(result[1].error).startswith("bulk_invite: rejected when this was sent again")
    assert all("an earlier invite may exist" in outcome.anomaly for outcome in result)


async def test_an_answer_to_a_repetition_that_is_wrong_says_both():
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"Invites": [doubles.item(2, 1) | {"Invite": None}]})

    service = doubles.Service(httpx.ReadError("cut"), answer)
    (outcome,) = await bulk(service, [2], retry=RetryPolicy(retry_ambiguous=True))
    wrong, again = outcome.anomaly.split("; ")
    assert outcome.status == "unknown"
    assert wrong == "expected an invite beside result code 1"
    assert again.startswith("this was sent again")


@pytest.mark.parametrize(
    "later", [httpx.ConnectError("refused"), *(httpx.Response(code) for code in (400, 403, 404, 429, 503))]
)
async def test_an_id_that_may_have_been_invited_once_stays_unknown(later):
    service = doubles.Service(httpx.ReadError("cut"), later)
    result = await bulk(service, [2], retry=RetryPolicy(retry_ambiguous=True))
    assert (result[0].status, result[0].error.delivery, result.resendable()) == ("unknown", "unknown", ())


async def test_a_missing_item_after_a_retry_counts_all_attempts():
    service = doubles.Service(httpx.Response(429), {"Invites": []})
    result = await bulk(service, [2])
    assert (result[0].status, result[0].error.attempts, result.timing.attempts) == ("unknown", 2, 2)


async def test_a_retry_after_beyond_the_maximum_stops_new_chunks():
    service = doubles.Service(httpx.Response(429, headers={"Retry-After": "120"}))
    result = await bulk(service, range(1, 1001), chunk_size=10, max_concurrency=2)
    assert len(service.requests) <= 4
    assert len(result.not_sent) == 1000
    assert result[-1].error.retry_after == 120


async def test_chunks_that_are_no_longer_sent_do_not_block_the_event_loop():
    """Nothing waits for the network then: thousands of chunks in one turn would block the application."""
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
async def test_a_transport_that_never_waits_does_not_block_the_event_loop(answer):
    """Mocks and in-process services never wait. A bulk over one can still be cancelled, and other tasks run."""
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


async def test_a_stopped_bulk_ends_soon_after_cancellation():
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
    assert turns < 100  # the rest of the bulk takes 500


async def test_a_stopped_bulk_can_be_cancelled_and_accounts_for_every_id():
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
    """Copy errors as tblib does for the whole process; dask.distributed imports it."""

    def shared(kind, attributes, args):
        other = kind.__new__(kind, *args)
        other.__dict__ = attributes
        return other

    def reduced(error):
        return shared, (type(error), error.__dict__, error.args)

    public = [getattr(sampling_async, name) for name in sampling_async.__all__ if name.endswith("Error")]
    for kind in public:
        monkeypatch.setitem(copyreg.dispatch_table, kind, reduced)
    error = ClientClosedError(delivery="unknown")
    assert vars(copy.copy(error)) is vars(error)


@pytest.mark.usefixtures("errors_that_share_when_they_are_copied")
async def test_ids_in_flight_stay_unknown_even_if_a_library_copies_errors():
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


async def test_unrequested_items_are_reported():
    def answer(request: httpx.Request):
        extra = doubles.item(10_000 + doubles.asked(request)[0], 1)
        return {"Invites": [*doubles.bulk(request)["Invites"], extra]}

    result = await bulk(doubles.Service(answer), range(1, 31), chunk_size=10)
    assert sorted(outcome.quota_id for outcome in result.unrequested) == [10_001, 10_011, 10_021]
    async with doubles.client(doubles.Service(answer)) as client:
        async with client.stream_bulk_invite("m", doubles.ids(1, 2)) as outcomes:
            assert len([outcome async for outcome in outcomes]) == 2
        assert [outcome.quota_id for outcome in outcomes.unrequested] == [10_001]


_answers = st.sampled_from(
    ["right", "missing", "extra", "reversed", "empty", "500", "503", "429", "cut", "refused", "null"]
)


@given(
    st.lists(st.integers(1, 60), max_size=120), st.integers(1, 20), st.lists(_answers, min_size=1, max_size=8)
)
def test_every_id_has_one_true_outcome_whatever_the_service_does(quota_ids, chunk_size, plan):
    """The invariant, checked against a ledger of the invites that were really made."""
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
async def test_invalid_input_is_refused_at_once(nothing):
    async with doubles.client(doubles.Service(doubles.bulk)) as client:
        for ask in (client.fan_out, partial(client.stream_bulk_invite, "m")):
            with pytest.raises(InvalidRequestError) as caught:
                ask(nothing)
            kind = type(nothing).__name__
            assert f"must be an iterable or an async iterable, not {kind}" in str(caught.value)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"weight": 0}, "weight must be a share above 0, not 0"),
        ({"weight": "1"}, "weight must be a share above 0, not '1'"),
        ({"weight": 9e-7}, "weight must be a share from 1e-06 to 1000000, not 9e-07"),
        ({"weight": 1_000_001}, "weight must be a share from 1e-06 to 1000000, not 1000001"),
        ({"chunk_size": 101}, "chunk_size must be a whole number from 1 to 100, not 101"),
        ({"goal": "last"}, 'goal must be "throughput" or "first", not \'last\''),
    ],
)
def test_what_is_wrong_with_an_option_is_described_in_full(option, said):
    with pytest.raises(InvalidRequestError) as caught:
        doubles.client(doubles.Service([])).stream_bulk_invite("m", [2], **option)
    assert str(caught.value) == said


@pytest.mark.parametrize("weight", [1e-6, 1e6])
def test_the_least_and_the_largest_weight_are_taken(weight):
    doubles.client(doubles.Service([])).stream_bulk_invite("m", [2], weight=weight)
