"""The hooks of a client: what they are told, and that a failing one harms nobody."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import threading
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

import anyio
import anyio.from_thread
import anyio.lowlevel
import doubles
import httpx
import inventories
import pytest

from sampling_async import (
    AttemptReport,
    BadRequestError,
    CallReport,
    InvalidRequestError,
    InviteRequest,
    PagingError,
    RetryPolicy,
    SamplingClient,
    SamplingError,
    Telemetry,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CANARY = "member-canary"


class Watcher:
    """Keeps all reports."""

    def __init__(self) -> None:
        self.attempts: list[AttemptReport] = []
        self.calls: list[CallReport] = []

    def hooks(self):
        return {"on_attempt": self.attempts.append, "on_outcome": self.calls.append}


class Spans(Telemetry):
    """Telemetry that keeps what it is told, or fails."""

    def __init__(self, error: Exception | None = None, span: str = "span") -> None:
        self.span = span
        self.told: list[tuple] = []
        self.gauges: Callable[[], Mapping[str, float]] | None = None
        self._error = error

    def of_client(self, host, port, gauges, name):
        self.address, self.gauges = (host, port), gauges
        return self

    def attempt_ended(self, endpoint, status, error, seconds, fan_out):
        self._keep("attempt", endpoint, status, error, seconds, fan_out)

    def count(self, endpoint, outcomes):
        self._keep("count", endpoint, outcomes)

    def needs_reports(self, span):
        return span == "span"

    def call_ended(self, endpoint, seconds, outcomes, report, fan_out):
        self._keep("call", endpoint, seconds, outcomes, report().timing.total, fan_out)

    def fan_out_began(self):
        self._keep("began")
        return self.span

    def fan_out_ended(self, span, taken, answered):
        self._keep("ended", span, taken, answered)

    def _keep(self, *facts):
        if self._error is not None:
            raise self._error
        self.told.append(facts)


@pytest.mark.parametrize("on_attempt", [None, bool])
@pytest.mark.parametrize("on_outcome", [None, bool])
async def test_reports_are_made_for_each_hook_and_for_spans_that_are_recorded(on_attempt, on_outcome):
    for span in ("span", "sampled out"):
        spans = Spans(span=span)
        hooks = {"on_attempt": on_attempt, "on_outcome": on_outcome, "telemetry": spans}
        async with doubles.client(doubles.Service(doubles.bulk), **hooks) as client:
            await client.bulk_invite(CANARY, [1])
        is_made = span == "span" or on_attempt is bool or on_outcome is bool
        assert [told[0] for told in spans.told[2:-1]] == ["call" if is_made else "count"]


async def test_each_attempt_and_each_call_is_reported():
    seen, time = Watcher(), doubles.FakeTime()
    service = doubles.Service(httpx.Response(500), httpx.ReadError("cut"), [])
    policy = RetryPolicy(base=4.0, max_attempts=3)
    async with doubles.client(service, time, retry=policy, **seen.hooks()) as client:
        await client.get_settings()
    assert [(each.number, each.status, each.error, each.delivery) for each in seen.attempts] == [
        (1, 500, "ServerError", "unknown"),
        (2, None, "TransportError", "unknown"),
        (3, 200, None, "answered"),
    ]
    assert [each.began for each in seen.attempts] == [0.0, time.slept[0], sum(time.slept)]
    assert {(each.endpoint, each.timing.attempts, each.timing.backoff) for each in seen.attempts} == {
        ("get_settings", 1, 0.0)
    }
    (call,) = seen.calls
    assert (call.endpoint, call.error, call.delivery, call.outcomes) == ("get_settings", None, "answered", {})
    assert call.attempts == tuple(seen.attempts)
    assert call.timing.total == time.now


async def test_a_request_of_a_bulk_is_one_call_with_its_outcomes_counted():
    seen = Watcher()

    def answer(request: httpx.Request) -> httpx.Response:
        body = doubles.bulk(request)
        body["Invites"][0] = doubles.item(doubles.asked(request)[0], 16)
        return httpx.Response(200, json=body)

    async with doubles.client(answer, **seen.hooks()) as client:
        await client.bulk_invite(CANARY, range(1, 151))
    assert sorted((each.quota_ids, dict(each.outcomes)) for each in seen.calls) == [
        (50, {("invited", 1): 25, ("rejected", 9): 24, ("rejected", 16): 1}),
        (100, {("invited", 1): 50, ("rejected", 9): 49, ("rejected", 16): 1}),
    ]
    assert {each.delivery for each in seen.calls} == {"answered"}
    assert CANARY not in repr(seen.calls)
    assert doubles.PANEL not in repr(seen.calls)


@pytest.mark.parametrize(
    ("answer", "outcomes", "delivery"),
    [
        (doubles.invite(5), {("invited", 1): 1}, "answered"),
        (
            httpx.Response(400, json={"Result": "MEMBER_BLOCKED", "ResultCode": 13}),
            {("rejected", 13): 1},
            "answered",
        ),
        (httpx.Response(403, json={"ResultCode": 36}), {("not_sent", 36): 1}, "answered"),
        (httpx.Response(429), {("not_sent", None): 1}, "answered"),
        (httpx.Response(400), {("unknown", None): 1}, "unknown"),
        (httpx.ReadError("cut"), {("unknown", None): 1}, "unknown"),
        (httpx.ConnectError("refused"), {("not_sent", None): 1}, "not_sent"),
    ],
)
async def test_the_outcome_of_one_invite_is_counted(answer, outcomes, delivery):
    seen = Watcher()
    policy = RetryPolicy(max_attempts=1)
    async with doubles.client(doubles.Service(answer), retry=policy, **seen.hooks()) as client:
        with suppress(SamplingError):
            await client.generate_invite(CANARY, 5)
    (call,) = seen.calls
    assert (call.outcomes, call.delivery, call.quota_ids) == (outcomes, delivery, 1)


async def test_requests_that_were_not_sent_are_counted_too():
    seen = Watcher()
    async with doubles.client(
        doubles.Service(httpx.Response(403)), max_concurrency=1, **seen.hooks()
    ) as client:
        result = await client.bulk_invite(CANARY, range(1, 301))
    assert len(result.not_sent) == 300
    assert sum(sum(each.outcomes.values()) for each in seen.calls) == 300
    assert [len(each.attempts) for each in seen.calls] == [1, 0, 0]
    assert {each.error for each in seen.calls} == {"ForbiddenError"}


async def test_outcomes_of_a_journal_are_not_counted_again(tmp_path):
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=doubles.bulk(request))

    for _ in range(2):
        seen = Watcher()
        async with doubles.client(answer, **seen.hooks()) as client:
            requests = [InviteRequest(CANARY, range(1, 12))]
            async with client.fan_out(requests, journal=tmp_path / "journal") as outcomes:
                assert len([each async for each in outcomes]) == 11
        counted = [dict(each.outcomes) for each in seen.calls]
        if seen.attempts:
            assert counted == [{("invited", 1): 5, ("rejected", 9): 6}]
    assert counted == []


async def test_a_cancelled_call_is_reported():
    seen = Watcher()
    cancelled = anyio.CancelScope()

    async def answer(_: httpx.Request) -> httpx.Response:
        cancelled.cancel()
        await anyio.sleep_forever()
        raise AssertionError

    async with doubles.client(answer, **seen.hooks()) as client:
        with cancelled:
            await client.generate_invite(CANARY, 5)
        async with client.fan_out([InviteRequest(CANARY, [1, 2])]):
            await anyio.wait_all_tasks_blocked()
    single, chunk = seen.calls
    assert single.delivery == chunk.delivery == "unknown"
    assert [each.delivery for each in seen.attempts] == ["unknown", "unknown"]
    assert single.outcomes == {("unknown", None): 1}
    assert chunk.outcomes == {("unknown", None): 2}


async def test_telemetry_is_notified_of_attempts_calls_and_fan_outs():
    spans, time = Spans(), doubles.FakeTime()

    async def answer(request: httpx.Request) -> httpx.Response:
        time.now += 2.0
        return httpx.Response(200, json=doubles.bulk(request) if request.method == "POST" else [])

    async with doubles.client(answer, time, telemetry=spans) as client:
        await client.get_settings()
        await client.bulk_invite(CANARY, [1, 2])
    outcomes = {("invited", 1): 1, ("rejected", 9): 1}
    assert spans.told == [
        ("attempt", "get_settings", 200, None, 2.0, None),
        ("call", "get_settings", 2.0, {}, 2.0, None),
        ("began",),
        ("attempt", "bulk_invite", 200, None, 2.0, "span"),
        ("call", "bulk_invite", 2.0, outcomes, 2.0, "span"),
        ("ended", "span", 2, 2),
    ]


async def test_telemetry_of_a_fan_out_that_is_sampled_out_is_notified_of_attempts_and_outcomes():
    spans = Spans(span="sampled out")
    async with doubles.client(doubles.Service(httpx.Response(500)), telemetry=spans) as client:
        await client.bulk_invite(CANARY, [1, 2])
    assert spans.told == [
        ("began",),
        ("attempt", "bulk_invite", 500, "ServerError", 0.0, "sampled out"),
        ("count", "bulk_invite", {("unknown", None): 2}),
        ("ended", "sampled out", 2, 2),
    ]


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("https://service.example/x", ("service.example", 443)),
        ("http://localhost", ("localhost", 80)),
        ("https://service.example:8443", ("service.example", 8443)),
    ],
)
def test_telemetry_knows_the_address_and_reads_gauges_that_keep_no_client_alive(url, address):
    spans = Spans()
    client = SamplingClient(url, panel_guid=doubles.PANEL, api_key=doubles.KEY, telemetry=spans)
    assert spans.address == address
    assert spans.gauges() == {"limit": 8, "waiting": 0, "retry_tokens": 10}
    del client
    gc.collect()
    assert spans.gauges() == {"limit": 0, "waiting": 0, "retry_tokens": 0}


async def test_a_failing_hook_is_logged_once_and_harms_no_call(caplog):
    def fail(_: object) -> None:
        raise ValueError("a bug of the host")

    hooks = {"telemetry": Spans(ValueError("a bug of the host")), "on_attempt": fail, "on_outcome": fail}
    caplog.set_level(logging.INFO, "sampling_async")
    async with doubles.client(doubles.Service([]), **hooks) as client:
        await client.bulk_invite(CANARY, [])
        for _ in range(3):
            assert len(await client.get_settings()) == 0
    assert [(each.name, each.message.split()[0]) for each in caplog.records] == [
        ("sampling_async.calls", "telemetry"),
        ("sampling_async.calls", "on_attempt"),
        ("sampling_async.calls", "on_outcome"),
    ]


@pytest.mark.parametrize("fails", ["count", "needs_reports", "attempt_ended", "fan_out_ended"])
async def test_telemetry_that_fails_is_logged_once_by_its_name(fails, caplog, monkeypatch):
    def fail(*_: object) -> None:
        raise ValueError("a bug of the host")

    spans = Spans(span="sampled out")
    monkeypatch.setattr(spans, fails, fail)
    caplog.set_level(logging.INFO, "sampling_async")
    async with doubles.client(doubles.Service(doubles.bulk), telemetry=spans) as client:
        for _ in range(3):
            await client.bulk_invite(CANARY, [1])
    (record,) = caplog.records
    assert record.getMessage() == "telemetry failed; this is logged once, and the call goes on"


async def test_the_delivery_of_an_attempt_is_that_of_its_failure():
    seen = Watcher()
    service = doubles.Service(httpx.ReadError("cut"), httpx.Response(400, json={"ResultCode": 16}))
    async with doubles.client(service, **seen.hooks()) as client:
        with pytest.raises(SamplingError):
            await client.generate_invite(CANARY, 5)
    assert [each.delivery for each in seen.attempts] == ["unknown", "answered"]
    (call,) = seen.calls
    assert call.delivery == "unknown"


async def test_the_report_of_a_call_keeps_its_latest_attempts():
    seen = Watcher()
    answers = [httpx.Response(400, json={"Result": "X", "ResultCode": 2})] * 1
    policy = RetryPolicy(max_attempts=60, base=0.001, budget=100)
    service = doubles.Service(*[httpx.Response(500)] * 40, *answers)
    async with doubles.client(service, retry=policy, **seen.hooks()) as client:
        with pytest.raises(BadRequestError):
            await client.get_settings()
    (call,) = seen.calls
    assert [each.number for each in call.attempts] == list(range(10, 42))
    assert call.timing.attempts == 41


async def test_the_shares_of_a_client_are_watched_too():
    seen = Watcher()
    client = SamplingClient(
        "https://service.example", panel_guid=doubles.PANEL, api_key=doubles.KEY, **seen.hooks()
    )
    async with client.share(of=2) as share:
        assert share._caller.hooks is not None
    await client.aclose()


async def test_an_attempt_that_was_cut_off_is_reported_and_the_call_keeps_its_time():
    seen, spans, time = Watcher(), Spans(), doubles.FakeTime()
    cancelled = anyio.CancelScope()

    async def answer(request: httpx.Request) -> httpx.Response:
        if not seen.attempts:
            time.now += 1
            return httpx.Response(503, headers={"Retry-After": "2"})
        time.now += 5
        cancelled.cancel()
        await anyio.sleep_forever()
        raise AssertionError

    async with doubles.client(answer, time, telemetry=spans, **seen.hooks()) as client:
        with cancelled:
            await client.get_quotas()
    assert [told[4] for told in spans.told if told[0] == "attempt"] == pytest.approx([1.0, 5.0])
    assert [(each.number, each.error, each.delivery) for each in seen.attempts] == [
        (1, "ServerError", seen.attempts[0].delivery),
        (2, type_of_cancellation(), "unknown"),
    ]
    (call,) = seen.calls
    assert (call.timing.attempts, len(call.attempts)) == (2, 2)
    assert call.timing.total == pytest.approx(time.now)
    assert [each.began for each in call.attempts] == [0, pytest.approx(time.now - 5)]


def type_of_cancellation() -> str:
    return anyio.get_cancelled_exc_class().__name__


async def test_a_response_that_cannot_be_read_is_a_failed_attempt(caplog):
    caplog.set_level(logging.DEBUG, "sampling_async.calls")
    seen = Watcher()
    service = doubles.Service(httpx.Response(200, text="<html>"), [])
    async with doubles.client(service, **seen.hooks()) as client:
        await client.get_settings()
        assert (client.snapshot().attempts, client.snapshot().failures) == (2, 1)
    assert [(each.status, each.error) for each in seen.attempts] == [(200, "DecodeError"), (200, None)]
    assert [record.ended for record in caplog.records] == ["DecodeError", "200"]


async def test_attempts_that_were_cut_off_count_and_are_logged_wherever_they_were(caplog, monkeypatch):
    caplog.set_level(logging.DEBUG, "sampling_async.calls")
    seen, go_on, scopes = Watcher(), threading.Event(), [anyio.CancelScope() for _ in range(2)]

    async def answer(_: httpx.Request) -> httpx.Response:
        if not seen.attempts:  # the first one is cut off before its response, the second while that is decoded
            scopes[0].cancel()
            await anyio.sleep_forever()
        return httpx.Response(200, json=[])

    def cancel_and_wait() -> None:
        anyio.from_thread.run_sync(scopes[1].cancel, token=here)
        go_on.wait(10)

    here = anyio.lowlevel.current_token()
    doubles.decode_in_threads(monkeypatch, cancel_and_wait)
    async with doubles.client(answer, **seen.hooks()) as client:
        for scope in scopes:
            with scope:
                await client.get_settings()
        go_on.set()
        assert (client.snapshot().attempts, client.snapshot().failures) == (2, 0)
    assert [(each.status, each.error is not None) for each in seen.attempts] == [(None, True), (200, True)]
    assert [len(call.attempts) for call in seen.calls] == [1, 1]
    assert len(caplog.records) == 2


@pytest.mark.parametrize("ends", ["whole", "cut", "closed by the user"])
async def test_an_inventory_that_is_read_as_it_arrives_is_reported_once_at_its_end(ends):
    body = json.dumps(inventories.quotas(*[inventories.survey() for _ in range(3)])).encode()
    watcher, time = Watcher(), doubles.FakeTime()

    class Arriving(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield body[: len(body) // 2]  # with the first survey
            time.now += 3.0
            if ends == "cut":
                raise httpx.ReadError("cut")
            yield body[len(body) // 2 :]

    async def answer(_: httpx.Request) -> httpx.Response:
        time.now += 2.0
        return httpx.Response(200, stream=Arriving())

    async with doubles.client(answer, time, **watcher.hooks()) as client:
        async with aclosing(client.iter_surveys()) as surveys:
            with suppress(SamplingError):
                async for _ in surveys:
                    assert not [call for call in watcher.calls if call.timing.total < 5.0]
                    time.now += 100.0  # the time of the user
                    if ends == "closed by the user":
                        break
            assert len(watcher.calls) == (ends != "closed by the user")
        assert (client.snapshot().attempts, client.snapshot().failures) == (1, ends == "cut")
    (call,), (attempt,) = watcher.calls, watcher.attempts
    assert call.attempts == (attempt,)
    assert (attempt.status, attempt.error, attempt.delivery) == (200, call.error, call.delivery)
    assert attempt.timing.total == call.timing.total
    assert call.error == ("TransportError" if ends == "cut" else None)
    assert call.delivery == ("unknown" if ends == "cut" else "answered")
    assert call.timing.total == (2.0 if ends == "closed by the user" else 5.0)


async def test_an_inventory_whose_connection_cannot_be_closed_is_reported_too(monkeypatch):
    body = json.dumps(inventories.quotas(*[inventories.survey() for _ in range(3)])).encode()
    watcher = Watcher()
    doubles.fail_to_close_bodies(monkeypatch, OSError("it cannot be closed"))

    class Arriving(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield body[: len(body) // 2]
            yield body[len(body) // 2 :]

    async with doubles.client(lambda _: httpx.Response(200, stream=Arriving()), **watcher.hooks()) as client:
        with pytest.raises(OSError, match="cannot be closed"):
            async with aclosing(client.iter_surveys()) as surveys:
                async for _ in surveys:
                    break
    (call,) = watcher.calls
    assert call.error is None


async def test_an_inventory_of_which_nothing_arrives_is_reported_once():
    watcher = Watcher()

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(403, json={"ResultCode": 6, "Result": "No"})

    async with doubles.client(answer, **watcher.hooks()) as client:
        with pytest.raises(SamplingError) as caught:
            [survey async for survey in client.iter_surveys()]
    (call,) = watcher.calls
    assert call.error == type(caught.value).__name__
    assert caught.value.timing is not None


async def test_a_closed_client_begins_no_attempt():
    seen = Watcher()
    client = doubles.client(doubles.Service([]), **seen.hooks())
    await client.aclose()
    result = await client.bulk_invite(CANARY, [1, 2])
    assert {outcome.status for outcome in result} == {"not_sent"}
    assert seen.attempts == []
    assert client.snapshot().failures == 0


async def test_the_parts_of_a_chunk_are_reported_with_their_own_sizes():
    seen = Watcher()

    def answer(request: httpx.Request) -> httpx.Response:
        if 3 in doubles.asked(request):
            return httpx.Response(400, json={"Result": "NO_QUOTA_ID", "ResultCode": 10})
        return httpx.Response(200, json=doubles.bulk(request))

    async with doubles.client(answer, **seen.hooks()) as client:
        result = await client.bulk_invite(CANARY, range(1, 9))
    (call,) = seen.calls
    assert [each.quota_ids for each in call.attempts] == [each.quota_ids for each in seen.attempts]
    assert [each.quota_ids for each in seen.attempts] == [8, 4, 4, 2, 2, 1, 1]
    assert call.timing.attempts == result.timing.attempts == 7


async def test_the_report_of_a_chunk_in_parts_keeps_its_latest_attempts_too():
    seen = Watcher()

    def answer(request: httpx.Request) -> httpx.Response:
        if 3 in doubles.asked(request):
            return httpx.Response(400, json={"Result": "NO_QUOTA_ID", "ResultCode": 10})
        return httpx.Response(425 if len(seen.attempts) % 2 else 200, json=doubles.bulk(request))

    async with doubles.client(answer, retry=RetryPolicy(budget=1000, max_attempts=9), **seen.hooks()) as client:
        await client.bulk_invite(CANARY, range(1, 101))
        await client.bulk_invite(CANARY, range(1, 101))
    assert all(len(call.attempts) == min(32, call.timing.attempts) for call in seen.calls)
    assert tuple(seen.attempts[-len(seen.calls[-1].attempts) :]) == seen.calls[-1].attempts


async def test_a_page_that_does_not_advance_is_a_failed_call():
    seen = Watcher()
    service = doubles.Service(doubles.page("a", more=True), doubles.page(more=True))
    async with doubles.client(service, **seen.hooks()) as client:
        with pytest.raises(PagingError) as caught:
            [code async for code in client.recontact_members(5)]
    assert [call.error for call in seen.calls] == [None, "PagingError"]
    assert caught.value.timing == seen.calls[-1].timing


async def test_what_was_never_sent_explains_no_time():
    async with doubles.client(doubles.Service(httpx.Response(403)), max_concurrency=1) as client:
        first, last = await client.bulk_invite(CANARY, [1, 2], chunk_size=1)
    assert first.error.timing.attempts == 1
    assert (last.error.attempts, last.error.elapsed, last.error.timing) == (0, 0.0, None)


async def test_waiting_for_an_outage_to_be_noticed_is_a_hold():
    service = doubles.Service(httpx.ReadError("cut"), doubles.bulk)
    time = doubles.FakeTime()

    async def probed(_: object) -> None:
        time.now += 2.5

    async with doubles.client(service, time) as client:
        client._caller.outage.probe_if_stuck = probed
        result = await client.bulk_invite(CANARY, [1])
    assert result.timing.hold == pytest.approx(2.5)
    assert result.timing.decode < 0.1


async def test_a_hook_cannot_cancel_a_call_and_is_no_coroutine(anyio_backend_name):
    async def later(_: object) -> None: ...

    class Later:
        async def __call__(self, _: object) -> None: ...

    def cancels(_: object) -> None:
        raise asyncio.CancelledError

    for name, hook in itertools.product(("on_attempt", "on_outcome"), (later, Later())):
        with pytest.raises(InvalidRequestError, match=f"^{name} must be a plain function"):
            doubles.client(doubles.Service([]), **{name: hook})
    async with doubles.client(doubles.Service([]), on_attempt=cancels) as client:
        if anyio_backend_name == "asyncio":
            await client.get_settings()


async def test_the_duration_of_a_stream_begins_with_its_attempt_and_not_with_the_wait_before(caplog):
    time = doubles.FakeTime()

    def late(_: httpx.Request) -> httpx.Response:
        time.now += 2.0
        return httpx.Response(200, json=inventories.quotas())

    caplog.set_level(logging.DEBUG, "sampling_async.calls")
    async with doubles.client(doubles.Service(late), time) as client:
        client._gate.hold(5.0, "get_quotas")
        async with aclosing(client.iter_surveys()) as surveys:
            assert [each async for each in surveys]
    (record,) = caplog.records
    assert record.seconds == 2.0
