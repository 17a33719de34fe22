"""A service that is away: detected soon, probed with Get Settings, and used again when it is back."""

from __future__ import annotations

import logging
import math
import re
from itertools import count, pairwise

import anyio
import anyio.lowlevel
import doubles
import httpx
import pytest
from anyio import wait_all_tasks_blocked

from sampling_async import (
    ClientClosedError,
    DecodeError,
    ForbiddenError,
    InvalidRequestError,
    InviteRequest,
    OutageError,
    OutagePolicy,
    RetryPolicy,
    ServiceError,
    TransportError,
)
from sampling_async._contract.exchange import Reply
from sampling_async._pacing.outage import Away, Outage

DEFAULT_BACKEND = httpx.Response(404, text="default backend - 404")
GONE = [
    httpx.ConnectError("refused"),
    httpx.ReadError("cut"),
    httpx.ReadTimeout("late"),
    httpx.Response(502),
    httpx.Response(503),
    httpx.Response(504),
    httpx.Response(200, html="\ufeff\n <!doctype html><title>We are back soon</title>"),
    httpx.Response(302, headers={"Location": "https://proxy.example/maintenance"}),
    DEFAULT_BACKEND,
]


class Service:
    """A service that is away for a while, with a clock that moves only when somebody sleeps.

    Args:
        until: When it is back.
        since: When it goes.
        gone: How requests fail then.
    """

    def __init__(self, until: float, since: float = 0.0, gone=GONE[0], *, seconds: float = 0.0) -> None:
        self.time = doubles.FakeTime()
        self.asked: list[tuple[float, str]] = []
        self._since, self._until, self._gone, self._seconds = since, until, gone, seconds

    def client(self, **options):
        return doubles.client(self, self.time, **options)

    @property
    def invites(self) -> int:
        return sum(method == "POST" for _, method in self.asked)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        at = self.time.now
        self.asked.append((at, request.method))
        await anyio.lowlevel.checkpoint()
        self.time.now += self._seconds
        if self._since <= at < self._until:
            if isinstance(self._gone, Exception):
                raise self._gone
            return self._gone
        return httpx.Response(200, json=doubles.bulk(request) if request.method == "POST" else [])


def members(number: int):
    return (InviteRequest(f"m{n}", [2, 3]) for n in range(number))


async def statuses(stream) -> list[str]:
    async with stream:
        return [outcome.status async for outcome in stream]


@pytest.mark.parametrize("gone", GONE, ids=str)
async def test_one_window_is_lost_at_most_and_the_rest_is_sent_after_the_outage(gone):
    service = Service(until=3.5, since=0.5, gone=gone, seconds=0.01)
    async with service.client(max_concurrency=4) as client:
        seen = await statuses(client.fan_out(members(400)))
        assert not client.snapshot().away_for
    assert len(seen) == 800
    assert seen.count("unknown") <= 2 * (4 + 4 - 1)  # what was in flight, and all but one of those before
    assert "not_sent" not in seen
    back = next(at for at, _ in service.asked if at >= 3.5)
    assert back < 3.5 + 2


@pytest.mark.parametrize("gone", [httpx.Response(200, html="<p>"), httpx.Response(307)], ids=str)
async def test_a_page_for_get_settings_alone_begins_no_outage(gone):
    service = Service(until=math.inf, gone=gone)
    async with service.client() as client:
        for _ in range(20):
            with pytest.raises((DecodeError, ServiceError)):
                await client.get_settings()
        assert not client.snapshot().away_for


@pytest.mark.parametrize("body", [b"", b"[]", b'{"Result":"<a>"}', b"null", b"<a>", b" " * 1024 + b"<"])
def test_a_page_begins_with_a_tag(body):
    assert Reply(200, body).is_page == (body == b"<a>")


async def test_during_an_outage_only_get_settings_is_sent_less_and_less_often():
    service = Service(until=100.0)
    async with service.client() as client:
        result = await client.bulk_invite("m", range(1, 2001))
    assert not result.not_sent
    questions = [at for at, method in service.asked if method == "GET"]
    pauses = [after - before for before, after in pairwise(questions)]
    assert pauses[4:] == sorted(pauses[4:])  # the earlier probes confirm the outage
    assert pauses[-1] == 1.5
    assert all(at >= 100 for at, method in service.asked[20:] if method == "POST")


async def test_sending_resumes_slowly_after_an_outage():
    time, running, beside = doubles.FakeTime(), 0, []

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal running
        gone = 0.5 <= time.now < 3.5
        running += 1
        if time.now >= 3.5 and request.method == "POST":
            beside.append(running)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        running -= 1
        time.now += 0.001
        if gone:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json=doubles.bulk(request) if request.method == "POST" else [])

    async with doubles.client(handle, time, max_concurrency=64) as client:
        seen = await statuses(client.fan_out(members(2000)))
    assert len(seen) == 4000
    assert beside[:3] == [1, 1, 2]
    assert max(beside) >= 6


async def test_a_fan_out_out_of_patience_stops_reading_its_input():
    service, taken = Service(until=1e9, since=1.0, seconds=0.01), 0

    def requests():
        nonlocal taken
        for number in count():
            taken += 1
            yield InviteRequest(f"m{number}", [2, 3])

    async with service.client(outage=OutagePolicy(patience=30.0)) as client:
        async with client.fan_out(requests()) as outcomes:
            seen = [outcome async for outcome in outcomes]
        assert 30 <= service.time.now - 1 < 40
        assert client.snapshot().away_for == pytest.approx(30, abs=0.1)
    assert len(seen) == 2 * taken
    last = seen[-1]
    assert (last.status, type(last.error), last.error.delivery) == ("not_sent", OutageError, "not_sent")
    assert "refused" not in str(last.error)  # the text of a transport may quote the wire
    assert "no connection" in str(last.error)


async def test_every_id_of_a_collection_has_an_outcome_in_an_outage():
    async with Service(until=1e9).client(outage=OutagePolicy(patience=10.0)) as client:
        result = await client.bulk_invite("m", range(1, 10_001))
    assert len(result.not_sent) == len(result) == 10_000


async def test_a_fan_out_without_patience_does_not_wait():
    service = Service(until=1e9)
    async with service.client(outage=OutagePolicy(patience=0)) as client:
        result = await client.bulk_invite("m", range(1, 10_001))
    assert len(result.not_sent) == 10_000
    assert service.time.now < 5  # only the pauses between three attempts


async def test_an_interactive_call_fails_at_once_in_an_outage_and_says_why():
    service = Service(until=10.0)
    async with service.client(retry=RetryPolicy(max_attempts=1)) as client:
        for _ in range(5):
            with pytest.raises(TransportError):
                await client.get_quotas()
        short = client.generate_invite("m", 2, deadline=0.5)
        for call in (client.get_quotas(), client.generate_invite("m", 2), client.get_settings(), short):
            with pytest.raises(
                OutageError, match=r"away for 0\.0 s; the last failure: no connection"
            ) as caught:
                await call
            assert (caught.value.attempts, caught.value.delivery) == (0, "not_sent")
        assert len(service.asked) == 5
        service.time.now = 11.0  # a probe is due: the first call sends it
        await client.get_settings()
        assert [method for _, method in service.asked[5:]] == ["GET", "GET"]


async def test_a_bulk_with_a_deadline_before_the_end_of_an_outage_fails_at_once():
    service = Service(until=math.inf, gone=httpx.ConnectError("refused"))
    async with service.client() as client:
        first = await client.bulk_invite("m1", [2, 3], deadline=2.5)
        began = service.time.now
        later = [await client.bulk_invite("m1", [2, 3], deadline=2.5) for _ in range(7)]
        assert service.time.now == began  # nothing waited
    assert [outcome.status for result in (first, *later) for outcome in result] == ["not_sent"] * 16
    assert all(isinstance(result[0].error, OutageError) for result in later)


async def test_a_bulk_with_a_longer_deadline_waits_for_the_end_of_an_outage():
    service = Service(until=5.0, gone=httpx.ConnectError("refused"))
    async with service.client() as client:
        result = await client.bulk_invite("m1", [2, 3], deadline=30.0)
        assert 5.0 <= service.time.now < 7.0
    assert {outcome.status for outcome in result} == {"invited", "rejected"}


@pytest.mark.parametrize(("deadline", "slept"), [(3.5, []), (3.6, [0.25]), (4.4, [0.25, 0.5, 1.0])])
async def test_an_outage_is_waited_for_while_the_response_to_another_probe_comes_in_time(deadline, slept):
    """The next probe is sent within 1.5 s and answered within 2 s, or it is too late."""
    probes = Probes(*[0.0] * 9)
    probes.fail(3)
    assert not await probes.outage.over(600.0, 0.0, deadline=deadline)
    assert probes.time.slept == slept


async def test_a_probe_that_is_due_after_the_deadline_is_not_waited_for():
    probes = Probes()
    probes.fail(3, retry_after=20.0)
    assert not await probes.outage.over(600.0, 0.0, deadline=21.0)
    assert probes.time.slept == []
    assert await probes.outage.over(600.0, 0.0, deadline=23.0)
    assert probes.time.slept == [20.0]


async def test_calls_fail_during_an_outage_while_a_fan_out_waits():
    service = Service(until=5.0)
    async with service.client() as client:
        async with client.fan_out(members(100)) as outcomes, anyio.create_task_group() as tasks:
            tasks.start_soon(anext, outcomes)
            while not outcomes.paused:
                await anyio.lowlevel.checkpoint()
            with pytest.raises(OutageError):
                await client.get_quotas()
            assert outcomes.paused
        assert len([*outcomes.left_over]) > 0


async def test_an_outage_is_logged_once(caplog):
    caplog.set_level(logging.INFO, "sampling_async")
    async with Service(until=60.0).client() as client:
        await client.bulk_invite("m", range(1, 3001))
    assert [record.levelname for record in caplog.records if "HTTP" not in record.message] == [
        "WARNING",
        "INFO",
    ]
    began, ended = (record.message for record in caplog.records if "HTTP" not in record.message)
    assert "away: 5 failures in a row" in began
    assert re.search(r"responds again, after (5|6)\d\.\d s", ended)


@pytest.mark.parametrize("answer", [httpx.Response(403), httpx.Response(500), httpx.Response(429), "garbage"])
async def test_any_response_of_the_service_itself_ends_an_outage(answer):
    """A refused key is a response too. The next request finds out what it means."""
    state = {"gone": True}

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            state["gone"] = False
            return httpx.Response(200, text=answer) if isinstance(answer, str) else answer
        if state["gone"]:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json=doubles.bulk(request))

    async with doubles.client(handle) as client:
        assert not (await client.bulk_invite("m", range(1, 1001))).not_sent


@pytest.mark.parametrize("answer", [DEFAULT_BACKEND, httpx.Response(308), httpx.Response(200, html="<p>")])
async def test_an_outage_ends_even_if_get_settings_alone_stays_broken(answer):
    """It fails in another way than the requests did, so a request is tried at once."""
    time, probes = doubles.FakeTime(), 0

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal probes
        if request.method == "GET":
            probes += 1
            return answer
        if not probes:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json=doubles.bulk(request))

    async with doubles.client(handle, time) as client:
        assert not (await client.bulk_invite("m", range(1, 3001))).not_sent
        assert client.snapshot().breaker == "closed"
    assert probes <= 2
    assert time.now < 2


@pytest.mark.parametrize("gone", [httpx.Response(200, html="<p>"), httpx.Response(302), DEFAULT_BACKEND])
async def test_an_outage_without_certainty_lasts_for_the_patience_and_costs_a_request_each_20_seconds(gone):
    service = Service(until=math.inf, gone=gone)
    async with service.client(outage=OutagePolicy(patience=100)) as client:
        seen = await statuses(client.fan_out(members(2000)))
    assert set(seen) == {"unknown", "not_sent"}
    assert seen.count("unknown") == 2 * service.invites <= 2 * (10 + 4 + 4)
    assert 100 <= service.time.now < 105
    tried = [0.0, *(at for at, method in service.asked if method == "POST" and at > 1)]
    assert len(tried) == 5
    assert all(20 <= after - before < 23 for before, after in pairwise(tried))


async def test_who_cancels_each_probe_gets_through_after_20_seconds():
    """A deadline may be shorter than Get Settings takes."""
    time = doubles.FakeTime()

    async def asks(_seconds: float) -> Away | None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anyio.sleep(1)
        raise ValueError("the caller ended")

    outage = Outage(
        OutagePolicy(failures=1), asks, under_way=2, clock=time.clock, sleep=time.sleep, random=lambda: 1.0
    )
    outage.failed("gone", 0.0)
    for at in (5.0, 5.5, 10.0, 18.0):
        time.now = at
        with pytest.raises(ValueError, match="the caller ended"):
            await outage.over(0.0, 0.0)
        assert not await outage.over(0.0, 0.0)  # no other probe at once
    time.now = 20.0
    assert await outage.over(0.0, 0.0)
    outage.answered(time.now)
    outage.failed("gone", time.now)
    assert outage.began_at == 20.0  # another outage


async def test_a_probe_that_is_answered_during_a_trial_ends_the_outage(caplog):
    caplog.set_level(logging.INFO, "sampling_async.pacing")
    probes = Probes(Away(is_certain=False))
    probes.fail(3, is_certain=False)
    assert not await probes.outage.over(0.0, 0.0)
    probes.time.now = 0.25
    assert not await probes.outage.over(0.0, 0.0)
    answered = probes.outage._send_probe

    async def slow(seconds: float) -> Away | None:
        probes.time.now = 20.0
        assert await probes.outage.over(0.0, 0.0)  # another call, which begins the trial
        return await answered(seconds)

    probes.outage._send_probe = slow
    probes.time.now = 1.0
    assert await probes.outage.over(0.0, 0.0)
    probes.outage.answered(21.0)
    probes.time.now = 22.0
    probes.fail(2)
    assert not probes.outage.is_on
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_after_a_quiet_hour_a_probe_is_sent_before_anything_is_tried():
    probes = Probes(0.0)
    probes.fail(3)
    probes.time.now += 3600
    assert not await probes.outage.over(0.0, 0.0)
    assert len(probes.limits) == 1
    assert probes.outage.is_on


async def test_a_502_is_certain_so_nothing_is_tried():
    """Whatever its body is: that of nginx is a page."""
    service = Service(until=math.inf, gone=httpx.Response(502, html="<center>nginx</center>"))
    async with service.client(outage=OutagePolicy(patience=200)) as client:
        seen = await statuses(client.fan_out(members(2000)))
    assert seen.count("unknown") <= 2 * (10 + 1)
    assert service.time.now == pytest.approx(200, abs=3)


async def test_a_trial_that_fails_goes_on_with_the_same_outage(caplog):
    caplog.set_level(logging.INFO, "sampling_async.pacing")
    probes = Probes(*[Away(is_certain=False)] * 99)
    probes.fail(3, is_certain=False)
    began = probes.outage.began_at
    assert await probes.outage.over(600.0, 0.0)
    assert probes.time.now - began == pytest.approx(20, abs=2)
    assert not probes.outage.is_on
    asked = len(probes.limits)
    await probes.outage.probe_if_stuck(lambda: True)
    assert len(probes.limits) == asked
    probes.fail(1, is_certain=False)
    assert (probes.outage.is_on, probes.outage.began_at) == (True, began)
    probes.outage.answered(probes.time.now)  # a late response to another request
    assert await probes.outage.over(600.0, 0.0)
    assert probes.time.now - began == pytest.approx(40, abs=4)
    probes.outage.answered(probes.time.now)
    probes.outage.answered(probes.time.now)
    assert probes.changes == 4
    assert [record.message.split(",")[0][:27] for record in caplog.records] == [
        "the service is away: 3 fail",
        "the service responds again",
    ]
    probes.fail(2)
    assert not probes.outage.is_on


async def test_a_trial_begins_20_seconds_after_the_last_certainty():
    probes = Probes(Away(), *[Away(is_certain=False)] * 9)
    probes.fail(3, is_certain=False)
    for at, is_over in ((0.25, False), (1.0, False), (20.2, False), (20.25, True)):
        probes.time.now = at
        assert await probes.outage.over(0.0, 0.0) is is_over


async def test_another_failure_of_a_probe_lets_a_request_be_tried_each_20_seconds():
    probes = Probes(Away(is_certain=False), Away(), Away(is_certain=False))
    probes.fail(3)
    probes.time.now = 0.25
    assert await probes.outage.over(0.0, 0.0)
    probes.fail(1)
    for at, is_over in ((0.75, False), (20.25, True)):
        probes.time.now = at
        assert await probes.outage.over(0.0, 0.0) is is_over


@pytest.mark.parametrize(("is_certain", "tried_at"), [(True, 0.5), (False, 20.25)])
async def test_a_probe_of_a_stuck_client_reports_how_certain_the_outage_is(is_certain, tried_at):
    probes = Probes(Away(is_certain=is_certain), *[Away(is_certain=False)] * 30)
    probes.fail(2, is_certain=is_certain)
    await probes.outage.probe_if_stuck(lambda: True)
    assert probes.outage.is_on
    assert await probes.outage.over(600.0, 0.0)
    assert probes.time.now == pytest.approx(tried_at, abs=2 * (not is_certain))


async def test_a_probe_waits_a_minute_at_most_for_a_retry_after():
    probes = Probes()
    probes.fail(3, retry_after=3600.0)
    assert await probes.outage.over(600.0, 0.0)
    assert probes.time.now == 60.0


async def test_a_broken_probe_of_a_stuck_client_is_a_response_if_the_requests_failed_otherwise():
    probes = Probes(Away(is_certain=False))
    probes.fail(2)
    await probes.outage.probe_if_stuck(lambda: True)
    assert not probes.outage.is_on
    probes.fail(2)
    assert not probes.outage.is_on


async def test_a_refused_key_ends_the_fan_out_after_an_outage():
    async def handle(request: httpx.Request) -> httpx.Response:
        if time.now < 5:
            raise httpx.ConnectError("refused")
        return httpx.Response(403)

    time = doubles.FakeTime()
    async with doubles.client(handle, time) as client:
        result = await client.bulk_invite("m", range(1, 1001))
    assert len(result.not_sent) == 1000
    assert isinstance(result[999].error, ForbiddenError)


async def test_requests_that_hang_since_before_the_outage_do_not_block_its_end():
    """Some requests of a window fail at once, the others hang: no further failure would be counted."""
    time, hung = doubles.FakeTime(), 0

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal hung
        if request.method == "POST" and time.now < 2:
            if hung < 4:
                hung += 1
                await anyio.sleep_forever()
            await anyio.lowlevel.checkpoint()
            raise httpx.ReadError("cut")
        if time.now < 2:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json=doubles.bulk(request) if request.method == "POST" else [])

    async with doubles.client(handle, time) as client:
        async with client.fan_out(members(100)) as outcomes:
            seen = []
            with anyio.fail_after(60):
                while len(seen) < 2 * 96:  # four hang
                    seen.append((await anext(outcomes)).status)
        assert len(outcomes.left_over) == 2 * 4
    assert seen.count("unknown") <= 2 * 5
    assert "not_sent" not in seen


async def test_failures_between_successes_are_no_outage():
    posts = 0

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal posts
        await anyio.lowlevel.checkpoint()
        if request.method == "GET":
            return httpx.Response(200, json=[])
        posts += 1
        return httpx.Response(200, json=doubles.bulk(request)) if posts % 5 == 0 else httpx.Response(502)

    async with doubles.client(handle) as client:
        client._gate.kind("bulk_invite").adaptive.start_again()  # one at a time, to keep their order
        seen = await statuses(client.fan_out(members(100)))
    assert seen.count("unknown") == 2 * 80


async def test_the_service_is_probed_if_some_requests_failed_and_the_others_hang():
    """It is there: the failures were about these requests, and requests under way are waited for."""
    all_there, hung, time, posts, asked = anyio.Event(), anyio.Event(), doubles.FakeTime(), 0, 0

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal asked, posts
        if request.method == "GET":
            asked += 1
            hung.set()
            return httpx.Response(200, json=[])
        posts += 1
        if posts == 8:
            all_there.set()
        await all_there.wait()
        if doubles.asked(request)[0] in {1, 11}:
            raise httpx.ReadError("cut")
        await hung.wait()
        return httpx.Response(200, json=doubles.bulk(request))

    async with doubles.client(handle, time) as client:
        with anyio.fail_after(60):
            result = await client.bulk_invite("m", range(1, 81), chunk_size=10)
        assert not client.snapshot().away_for
    assert (len(result.unknown), asked) == (20, 1)


async def test_an_outage_obeys_retry_after():
    service = Service(until=1.0, gone=httpx.Response(503, headers={"Retry-After": "20"}))
    async with service.client() as client:
        await client.bulk_invite("m", range(1, 2001))
    assert [at for at, _ in service.asked if 0 < at < 20] == []


async def test_failures_of_get_settings_alone_stop_nothing():
    def answer(request: httpx.Request):
        return doubles.bulk(request) if request.method == "POST" else httpx.Response(502)

    async with doubles.client(doubles.Service(answer)) as client:
        for _ in range(10):
            with pytest.raises(Exception, match="502"):
                await client.get_settings()
        assert not (await client.bulk_invite("m", [2, 3])).not_sent


async def test_closing_the_client_ends_the_wait_for_the_service():
    async def away(_request: httpx.Request) -> httpx.Response:
        await anyio.lowlevel.checkpoint()
        raise httpx.ConnectError("refused")

    client = doubles.client(away, sleep=lambda _: anyio.sleep_forever(), clock=anyio.current_time)
    async with client.fan_out(members(100)) as outcomes:
        await wait_all_tasks_blocked()
        with anyio.fail_after(60):
            await client.aclose()
            seen = [outcome async for outcome in outcomes]
    assert {outcome.status for outcome in seen} == {"not_sent"}
    assert isinstance(seen[-1].error, ClientClosedError)


async def test_another_caller_probes_if_the_first_is_cancelled():
    """There is no separate task for probes: if the probing caller is cancelled, the next waiter must probe."""
    time, asked = doubles.FakeTime(), 0

    async def asks(_seconds: float) -> Away | None:
        nonlocal asked
        asked += 1
        if asked == 1:
            await anyio.sleep_forever()
        return None

    policy = OutagePolicy(failures=1)
    outage = Outage(policy, asks, under_way=8, clock=time.clock, sleep=time.sleep, random=lambda: 1.0)
    outage.failed("gone", 0.0)
    async with anyio.create_task_group() as others:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outage.over, 600.0, 0.0)
            await wait_all_tasks_blocked()
            others.start_soon(outage.over, 600.0, 0.0)
            await wait_all_tasks_blocked()
            assert (asked, outage.is_on) == (1, True)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(60):
            await wait_all_tasks_blocked()
    assert (asked, outage.is_on) == (2, False)


@pytest.mark.parametrize("field", ["patience", "failures", "first_pause", "longest_pause"])
def test_an_outage_policy_checks_its_numbers(field):
    with pytest.raises(InvalidRequestError, match=f"OutagePolicy.{field}"):
        OutagePolicy(**{field: -1})


async def test_an_outage_that_is_closed_during_a_probe_plans_no_other():
    time, asked = doubles.FakeTime(), 0

    async def asks(_seconds: float) -> Away | None:
        nonlocal asked
        asked += 1
        outage.close(wakes=True)
        return 5.0

    policy = OutagePolicy(failures=1)
    outage = Outage(policy, asks, under_way=8, clock=time.clock, sleep=time.sleep, random=lambda: 1.0)
    outage.failed("gone", 0.0)
    assert await outage.over(600.0, 0.0)
    assert asked == 1


async def test_a_chunk_refused_for_long_beside_answered_ones_has_its_refusal_as_its_error():
    time = doubles.FakeTime()

    def bulk(request: httpx.Request) -> httpx.Response:
        if 1 in doubles.asked(request):
            return httpx.Response(429, headers={"Retry-After": "20"})
        return doubles.bulk(request)

    options = {"outage": OutagePolicy(patience=30.0), "max_concurrency": 2}
    async with (
        doubles.client(doubles.Service(bulk), time, **options) as client,
        client.stream_bulk_invite("m", range(1, 9), chunk_size=1) as outcomes,
    ):
        seen = {outcome.quota_id: outcome async for outcome in outcomes}
    assert seen[1].status == "not_sent"
    assert type(seen[1].error).__name__ == "UnexpectedStatusError"
    assert {seen[quota_id].status for quota_id in range(2, 9)} == {"invited", "rejected"}


async def test_chunks_of_a_service_that_never_answered_say_that_it_processed_nothing():
    options = {"outage": OutagePolicy(patience=30.0), "max_concurrency": 2}
    async with doubles.client(doubles.Service(httpx.Response(429)), **options) as client:
        result = await client.bulk_invite("m", [2, 3])
    assert type(result[0].error) is OutageError
    assert str(result[0].error).startswith("the service processed no request for 30 s; the last failure: ")


# --- In exact numbers


class Probes:
    """An outage whose probes are answered as told: None is a response, a number that of `Away`."""

    def __init__(self, *answers: Away | float | None, random: float = 1.0, **policy: float) -> None:
        self.time = doubles.FakeTime()
        self.limits: list[float] = []
        self.changes = 0
        self._answers = list(answers)
        given = OutagePolicy(**{"failures": 3} | policy)
        self.outage = Outage(
            given, self._ask, under_way=2, clock=self.time.clock, sleep=self.time.sleep, random=lambda: random
        )
        self.outage.on_change = self._changed

    def _changed(self) -> None:
        self.changes += 1

    async def _ask(self, seconds: float) -> Away | None:
        self.limits.append(seconds)
        answer = self._answers.pop(0) if self._answers else None
        return Away(answer) if isinstance(answer, float) else answer

    def fail(self, times: int = 1, **facts: float) -> None:
        for _ in range(times):
            self.outage.failed("gone", self.time.now, **facts)


async def test_it_takes_failures_in_a_row_and_a_response_starts_the_count_again():
    probes = Probes()
    assert probes.outage.cause == ""
    probes.fail(2)
    probes.outage.answered(0.0)
    probes.fail(2)
    assert (probes.outage.is_on, probes.changes) == (False, 0)
    probes.fail()
    assert (probes.outage.is_on, probes.changes, probes.outage.cause) == (True, 1, "gone")
    probes.fail(9)
    assert probes.changes == 1


async def test_a_refusal_among_failures_starts_the_count_again():
    bad_gateway, refused = httpx.Response(502), httpx.Response(400, json={"ResultCode": 16})
    service = doubles.Service(bad_gateway, bad_gateway, refused, bad_gateway, bad_gateway, bad_gateway)
    options = {"outage": OutagePolicy(failures=3), "retry": RetryPolicy(max_attempts=1)}
    async with doubles.client(service, **options) as client:
        breakers = []
        for _ in range(6):
            with pytest.raises(ServiceError):
                await client.generate_invite("m", 5)
            breakers.append(client.snapshot().breaker)
    assert breakers == ["closed"] * 5 + ["open"]


async def test_after_an_outage_the_count_of_failures_starts_again():
    probes = Probes()
    probes.fail(3)
    assert await probes.outage.over(600.0, 0.0)
    assert (probes.outage.is_on, probes.changes, probes.outage.answered_at) == (False, 2, probes.time.now)
    probes.fail(2)
    assert not probes.outage.is_on
    probes.fail()
    assert probes.outage.is_on


async def test_attempts_from_before_the_end_of_an_outage_say_nothing_and_those_from_its_moment_do():
    probes = Probes()
    probes.fail(3)
    assert await probes.outage.over(600.0, 0.0)
    for _ in range(9):
        probes.outage.failed("gone", probes.time.now - 0.001)
    assert not probes.outage.is_on
    probes.fail(3)
    assert probes.outage.is_on


async def test_pauses_double_up_to_the_longest():
    probes = Probes(0.0, 0.0, 0.0, 0.0, 0.0)
    probes.fail(3)
    assert await probes.outage.over(600.0, 0.0)
    assert probes.time.slept == pytest.approx([0.25, 0.5, 1.0, 1.5, 1.5, 1.5])


async def test_each_fourth_probe_may_take_as_long_as_it_likes():
    probes = Probes(*[0.0] * 8)
    probes.fail(3)
    assert await probes.outage.over(600.0, 0.0)
    assert probes.limits == [2.0, 2.0, 2.0, math.inf] * 2 + [2.0]


async def test_pauses_are_drawn_from_their_half_up():
    probes = Probes(0.0, random=0.0)
    probes.fail(3)
    assert await probes.outage.over(600.0, 0.0)
    assert probes.time.slept == pytest.approx([0.125, 0.25])


async def test_a_probe_waits_as_long_as_the_service_asked():
    probes = Probes(7.0, 0.1)
    probes.fail(3, retry_after=20.0)
    assert await probes.outage.over(600.0, 0.0)
    assert probes.time.slept == pytest.approx([20.0, 7.0, 1.0])


async def test_the_time_away_counts_from_the_failure_that_began_it():
    probes = Probes()
    assert probes.outage.away_for() == 0.0
    probes.time.now = 5.0
    probes.fail(3)
    probes.time.now = 9.0
    assert probes.outage.away_for() == 4.0
    assert await probes.outage.over(600.0, 0.0)
    assert probes.outage.away_for() == 0.0


async def test_patience_counts_from_the_later_of_the_wait_and_the_outage():
    probes = Probes(*[0.0] * 99)
    probes.time.now = 100.0
    probes.fail(3)
    assert not await probes.outage.over(10.0, 3.0)
    assert probes.time.now == pytest.approx(110.0)
    assert not await probes.outage.over(10.0, 108.0)
    assert probes.time.now == pytest.approx(118.0)


async def test_without_patience_a_probe_is_sent_if_it_is_due():
    probes = Probes()
    probes.fail(3)
    assert not await probes.outage.over(0.0, 0.0)
    assert (probes.limits, probes.time.slept) == ([], [])
    probes.time.now = 0.25
    assert await probes.outage.over(0.0, 0.0)
    assert len(probes.limits) == 1


async def test_a_probe_that_is_due_is_sent_without_a_pause():
    probes = Probes()
    probes.fail(3)
    probes.time.now = 0.25
    assert await probes.outage.over(600.0, 0.0)
    assert probes.time.slept == []


async def test_a_probe_of_a_stuck_client_that_fails_counts_with_its_retry_after():
    probes = Probes(20.0)
    probes.fail(2)
    await probes.outage.probe_if_stuck(lambda: True)
    assert probes.outage.is_on
    assert probes.outage.cause == "gone"
    assert await probes.outage.over(600.0, 0.0)
    assert probes.time.slept == pytest.approx([0.25, 20.0])


async def test_one_failure_is_a_suspicion():
    probes = Probes()
    probes.fail()
    await probes.outage.probe_if_stuck(lambda: True)
    assert len(probes.limits) == 1


async def test_no_probe_is_sent_if_all_is_well_after_the_pause_before_it():
    probes = Probes()

    async def answered(_: float) -> None:
        probes.outage.answered(probes.time.now)

    sleep, probes.outage._sleep = probes.outage._sleep, answered
    probes.fail(2)
    await probes.outage.probe_if_stuck(lambda: True)
    probes.outage._sleep = sleep
    probes.fail(2)
    answers = [False, True]
    await probes.outage.probe_if_stuck(answers.pop)
    assert (probes.limits, answers) == ([], [])


async def test_a_probe_of_a_stuck_client_that_is_answered_ends_the_suspicion():
    probes = Probes()
    probes.fail(2)
    await probes.outage.probe_if_stuck(lambda: True)
    probes.fail(2)
    assert not probes.outage.is_on


async def test_no_probe_is_sent_without_a_suspicion_or_if_attempts_can_begin():
    probes = Probes()
    await probes.outage.probe_if_stuck(lambda: True)
    probes.fail(2)
    await probes.outage.probe_if_stuck(lambda: False)
    assert (probes.limits, probes.time.slept) == ([], [])


async def test_the_log_says_when_a_service_goes_why_and_when_it_is_back(caplog):
    caplog.set_level(logging.INFO)
    probes = Probes(0.0)
    probes.time.now = 100.0
    probes.fail(3)
    assert await probes.outage.over(600.0, 100.0)
    away, back = (record.getMessage() for record in caplog.records)
    assert away == (
        "the service is away: 3 failures in a row; the last failure: gone. Until it responds, only Get "
        "Settings is sent; fan-outs and bulks wait up to 600 s for it (OutagePolicy.patience, --patience)"
    )
    assert back == "the service responds again, after 0.8 s"


async def test_closing_ends_the_pause_before_a_probe_and_the_waits_for_it():
    outage = Outage(
        OutagePolicy(failures=1),
        lambda _: pytest.fail("a probe of a closed client"),
        under_way=8,
        clock=lambda: 0.0,
        sleep=lambda _: anyio.sleep_forever(),
        random=lambda: 1.0,
    )
    outage.failed("gone", 0.0)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(outage.over, 600.0, 0.0)
            await wait_all_tasks_blocked()
            outage.close(wakes=True)


async def test_a_closed_outage_does_not_begin_again():
    probes = Probes()
    probes.outage.close(wakes=False)
    probes.fail(9)
    assert not probes.outage.is_on


async def test_who_runs_out_of_patience_before_the_next_probe_is_due_sends_none():
    probes = Probes()
    probes.fail(3)  # the first probe is due after 0.25 s
    assert not await probes.outage.over(0.1, 0.0)
    assert probes.limits == []


async def test_a_client_that_is_closed_during_the_pause_sends_no_probe():
    probes = Probes()
    probes.fail(3)

    async def closes(seconds: float) -> None:
        probes.time.now += seconds
        probes.outage.close(wakes=False)

    probes.outage._sleep = closes
    await probes.outage.over(600.0, 0.0)
    assert probes.limits == []


@pytest.mark.parametrize(("under_way", "failures"), [(1, 2), (2, 2), (3, 3), (5, 5), (64, 5)])
def test_an_outage_takes_as_many_failures_as_run_at_once_from_two_to_five(under_way, failures):
    assert OutagePolicy().enough(under_way) == failures
    assert OutagePolicy(failures=7).enough(under_way) == 7
