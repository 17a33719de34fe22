"""One call from beginning to end: attempts, waits, attributes of the last error."""

from __future__ import annotations

import logging
import threading

import anyio
import doubles
import httpx
import pytest

from sampling_async import (
    BadRequestError,
    DecodeError,
    RetryPolicy,
    ServerError,
    ServiceError,
    TransportError,
    UnexpectedStatusError,
)


def status(code: int, **headers: str) -> httpx.Response:
    return httpx.Response(code, headers={name.replace("_", "-"): value for name, value in headers.items()})


async def test_a_read_is_repeated_until_it_succeeds():
    time = doubles.FakeTime()
    service = doubles.Service(status(500), httpx.ReadTimeout("late"), [])
    async with doubles.client(service, time) as client:
        assert list(await client.get_settings()) == []
        assert (client.snapshot().attempts, client.snapshot().failures) == (3, 2)
    assert len(service.requests) == 3
    assert time.slept == [0.25, 0.5]


async def test_the_last_error_covers_all_attempts():
    time = doubles.FakeTime()
    time.now = 100.0
    service = doubles.Service(status(500), status(500), httpx.ConnectError("refused"))
    async with doubles.client(service, time) as client:
        with pytest.raises(TransportError) as caught:
            await client.get_settings()
    error = caught.value
    assert (error.endpoint, error.attempts, error.elapsed) == ("get_settings", 3, 0.75)  # of 100.75
    # The last attempt was never sent, but earlier ones may have worked.
    assert error.delivery == "unknown"


async def test_a_call_that_was_never_sent_says_so():
    async with doubles.client(doubles.Service(httpx.ConnectError("refused"))) as client:
        with pytest.raises(TransportError) as caught:
            await client.generate_invite("m", 5)
    assert (caught.value.delivery, caught.value.attempts) == ("not_sent", 3)


@pytest.mark.parametrize("code", [400, 403, 404])
async def test_no_later_response_takes_back_that_an_invite_may_exist(code):
    """The quota may be full because of the invite whose response was lost."""
    service = doubles.Service(httpx.ReadError("cut"), status(code))
    async with doubles.client(service) as client:
        with pytest.raises(ServiceError) as caught:
            await client.generate_invite("m", 5)
    assert (caught.value.status, caught.value.delivery, caught.value.attempts) == (code, "unknown", 2)


async def test_a_read_that_is_refused_at_last_is_answered():
    async with doubles.client(doubles.Service(httpx.ReadError("cut"), status(403))) as client:
        with pytest.raises(ServiceError) as caught:
            await client.get_settings()
    assert caught.value.delivery == "answered"


async def test_a_refusal_is_not_repeated():
    service = doubles.Service(httpx.Response(400, json={"Result": "NO_QUOTA_ID", "ResultCode": 10}))
    async with doubles.client(service) as client:
        with pytest.raises(BadRequestError) as caught:
            await client.generate_invite("m", 5)
    assert (caught.value.result_code, caught.value.delivery, len(service.requests)) == (10, "answered", 1)


async def test_a_technical_error_inside_a_400_is_repeated():
    service = doubles.Service(httpx.Response(400, json={"ResultCode": 36}), doubles.invite(5))
    async with doubles.client(service) as client:
        assert (await client.generate_invite("m", 5)).quota_id == 5


async def test_a_single_invite_is_requested_again_after_an_invite_for_another_quota():
    service = doubles.Service(doubles.invite(6), doubles.invite(5))
    async with doubles.client(service) as client:
        assert (await client.generate_invite("m", 5)).quota_id == 5
    service = doubles.Service(doubles.invite(6))
    async with doubles.client(service) as client:
        with pytest.raises(DecodeError, match=r"\$\.QuotaID"):
            await client.generate_invite("m", 5)
    assert len(service.requests) == 2


async def test_an_error_body_in_a_200_is_an_error_of_the_service():
    service = doubles.Service({"Result": "PANEL_DOES_NOT_EXIST", "ResultCode": 3})
    async with doubles.client(service) as client:
        with pytest.raises(UnexpectedStatusError) as caught:
            await client.get_quotas()
    assert (caught.value.status, caught.value.result_code) == (200, 3)


async def test_retry_after_holds_the_whole_client():
    time = doubles.FakeTime()
    service = doubles.Service(status(503, Retry_After="7"), [])
    async with doubles.client(service, time, random=lambda: 0.0) as client:
        await client.get_settings()
        assert time.now == 7
        assert client._gate.kind("get_settings").held_until == 7


async def test_other_calls_wait_for_the_end_of_a_hold():
    time = doubles.FakeTime()
    service = doubles.Service(status(429, Retry_After="30"), doubles.invite(5))
    async with doubles.client(service, time, retry=RetryPolicy(max_attempts=1)) as client:
        with pytest.raises(UnexpectedStatusError) as caught:
            await client.get_settings()
        assert (caught.value.retry_after, time.now) == (30.0, 0)
        assert client.snapshot().held_for == 30
        await client.generate_invite("m", 5)
    assert time.now == 31  # and not at the moment when all other calls continue


async def test_a_retry_after_beyond_the_maximum_is_left_to_the_caller():
    time = doubles.FakeTime()
    service = doubles.Service(status(503, Retry_After="61"), [])
    async with doubles.client(service, time) as client:
        with pytest.raises(ServerError) as caught:
            await client.get_settings()
        assert (caught.value.retry_after, caught.value.attempts, time.slept) == (61.0, 1, [])
        await client.get_settings()


async def test_a_chunk_that_could_not_be_sent_waits_longer_each_time():
    time, service = doubles.FakeTime(), doubles.Service(*[httpx.ConnectError("refused")] * 3, doubles.bulk)
    async with doubles.client(service, time) as client:
        assert (await client.bulk_invite("m", [2])).invited
    assert [seconds for seconds in time.slept if seconds] == [0.25, 0.5, 1.0]


async def test_a_chunk_that_was_refused_for_load_waits_for_the_pace_only():
    time, service = doubles.FakeTime(), doubles.Service(*[status(429)] * 3, doubles.bulk)
    async with doubles.client(service, time) as client:
        assert (await client.bulk_invite("m", [2])).invited
    assert time.now < 2.0  # the backoff would take 1 + 2 + 4 s


async def test_a_call_after_three_503s_waits_a_quarter_second_at_most():
    time, service = doubles.FakeTime(), doubles.Service(*[status(503)] * 3, doubles.invite(2))
    async with doubles.client(service, time) as client:
        with pytest.raises(ServerError):
            await client.generate_invite("m", 2)
        before = time.now
        assert (await client.generate_invite("m", 2, deadline=1.0)).quota_id == 2
    assert time.now - before <= 0.25


@pytest.mark.parametrize(("status", "error"), [(400, BadRequestError), (200, ServiceError)])
async def test_a_refusal_does_not_repeat_what_is_private(status, error):
    body = {"Result": "member-canary is blocked", "ResultCode": 13, "Key": doubles.KEY}
    async with doubles.client(doubles.Service(httpx.Response(status, json=body))) as client:
        with pytest.raises(error) as caught:
            await client.generate_invite("member-canary", 5)
    assert caught.value.result == "<hidden> is blocked"
    assert doubles.KEY not in caught.value.body_excerpt


async def test_a_deadline_counts_with_the_time_that_such_a_call_takes():
    """Two seconds are left, and such calls take three: another attempt would be in vain."""
    time, service = doubles.FakeTime(), doubles.Service(*[doubles.bulk] * 20, status(500))

    async def answer(request):
        time.now += 3.0
        return await service(request)

    async with doubles.client(answer, time, retry=RetryPolicy(retry_ambiguous=True)) as client:
        for _ in range(20):
            await client.bulk_invite("m", [1])
        (outcome,) = await client.bulk_invite("m", [1], deadline=5.0)
    assert outcome.status == "unknown"
    assert (outcome.error.attempts, len(service.requests)) == (1, 21)


async def test_retries_do_not_add_a_multiple_of_the_load():
    service = doubles.Service(httpx.ConnectError("refused"))
    async with doubles.client(service) as client:
        for _ in range(100):
            with pytest.raises(TransportError):
                await client.get_settings()
    assert len(service.requests) == 110  # 100 calls, and the 10 retries of the budget


async def test_successes_refill_the_budget():
    service = doubles.Service([])
    async with doubles.client(service) as client:
        client._caller.budget.tokens = 0
        for _ in range(5):
            await client.get_settings()
        assert client._caller.budget.tokens == pytest.approx(1.0)


async def test_refusals_refill_the_retry_budget():
    service = doubles.Service(httpx.Response(400, json={"ResultCode": 16}))
    async with doubles.client(service) as client:
        client._caller.budget.tokens = 0
        for _ in range(5):
            with pytest.raises(BadRequestError):
                await client.generate_invite("m", 5)
        assert client._caller.budget.tokens == pytest.approx(1.0)


async def test_no_permit_is_held_through_a_backoff():
    running = []

    async def sleep(_seconds: float) -> None:
        running.append(client._gate.running)

    client = doubles.client(doubles.Service(status(500), []), sleep=sleep)
    async with client:
        await client.get_settings()
    assert running == [0]


async def test_a_large_body_is_decoded_in_a_thread(monkeypatch):
    threads = doubles.decode_in_threads(monkeypatch)
    body = [{"Name": "n", "Description": "", "Value": None}]
    async with doubles.client(doubles.Service(body, "rubbish" * 10)) as client:
        assert len(await client.get_settings()) == 1
        with pytest.raises(DecodeError):
            await client.get_settings()
    assert len(threads) == 1 + 2  # the second call makes two attempts
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ([], None),
        (status(400), None),
        (status(502), (0.0, True)),
        (httpx.Response(502, html="<p>"), (0.0, True)),
        (status(500), None),
        (httpx.Response(302), (0.0, False)),
        (httpx.Response(200, html="<p>"), (0.0, False)),
        (httpx.ConnectError("refused"), (0.0, True)),
    ],
)
async def test_a_probe_reports_whether_the_service_responds(answer, told):
    async with doubles.client(doubles.Service(answer)) as client:
        assert await client._send_probe(1.0) == told


async def test_a_probe_reports_a_retry_after_and_ends_in_its_time():
    async def silent(_: httpx.Request) -> httpx.Response:
        await anyio.sleep_forever()
        raise AssertionError

    async with doubles.client(doubles.Service(httpx.Response(503, headers={"Retry-After": "7"}))) as client:
        assert await client._send_probe(1.0) == (7.0, True)
    async with doubles.client(silent) as client:
        with anyio.fail_after(60):
            assert await client._send_probe(0.01) == (0.0, True)


async def test_the_log_names_endpoints(caplog):
    caplog.set_level(logging.DEBUG, "sampling_async")
    async with doubles.client(doubles.Service(httpx.ReadError("cut"), doubles.invite(5))) as client:
        await client.generate_invite("member-canary", 5)
    records = [record for record in caplog.records if record.name == "sampling_async.calls"]
    first = records[0]
    assert (first.endpoint, first.ended, first.seconds) == ("generate_invite", "TransportError", 0.0)
    assert (first.attempt, first.quota_ids) == (1, 1)
    assert [record.getMessage() for record in records] == [
        "GET generate_invite: TransportError after 0.000 s, attempt 1, 1 quota IDs, unknown, request ID -",
        "GET generate_invite: 200 after 0.000 s, attempt 2, 1 quota IDs, answered, request ID -",
    ]


async def test_cancelling_a_backoff_ends_the_call():
    async def sleep(_seconds: float) -> None:
        await anyio.sleep_forever()

    async with doubles.client(doubles.Service(status(500)), sleep=sleep) as client:
        with anyio.move_on_after(0.01) as scope:
            await client.get_settings()
        assert scope.cancelled_caught
        assert len(client._session._blocks) == 0


async def test_a_request_that_was_refused_unprocessed_and_waits_to_be_repeated_is_not_sent():
    time = doubles.FakeTime()
    options = {"sleep": lambda _: anyio.sleep_forever()}
    service = doubles.Service(httpx.Response(429, headers={"Retry-After": "30"}))
    async with doubles.client(service, time, **options) as client:
        async with client.stream_bulk_invite("m", [2, 3]) as outcomes:
            await anyio.wait_all_tasks_blocked()
            assert len(service.requests) == 1
        assert [outcome.status for outcome in outcomes.left_over] == ["not_sent", "not_sent"]


async def test_a_call_whose_first_attempt_may_have_arrived_is_unknown_even_if_the_last_was_not_sent():
    service = doubles.Service(httpx.ReadTimeout("late"), httpx.ConnectError("gone"))
    async with doubles.client(service) as client:
        with pytest.raises(TransportError) as caught:
            await client.get_settings()
    assert (caught.value.attempts, caught.value.delivery) == (3, "unknown")
