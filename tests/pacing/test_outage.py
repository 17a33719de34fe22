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


@pytest.mark.parametrize(
    ("patience", "seconds"), [(10.0, 15), (0, 5)]
)  # without patience, three attempts pause
async def test_every_id_of_a_collection_has_an_outcome_in_an_outage(patience, seconds):
    service = Service(until=1e9)
    async with service.client(outage=OutagePolicy(patience=patience)) as client:
        result = await client.bulk_invite("m", range(1, 10_001))
    assert len(result.not_sent) == len(result) == 10_000
    assert patience <= service.time.now < seconds


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


async def test_a_502_is_certain_so_nothing_is_tried():
    """Whatever its body is: that of nginx is a page."""
    service = Service(until=math.inf, gone=httpx.Response(502, html="<center>nginx</center>"))
    async with service.client(outage=OutagePolicy(patience=200)) as client:
        seen = await statuses(client.fan_out(members(2000)))
    assert seen.count("unknown") <= 2 * (10 + 1)
    assert service.time.now == pytest.approx(200, abs=3)


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


@pytest.mark.parametrize("field", ["patience", "failures", "first_pause", "longest_pause"])
def test_an_outage_policy_checks_its_numbers(field):
    with pytest.raises(InvalidRequestError, match=f"OutagePolicy.{field}"):
        OutagePolicy(**{field: -1})


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
    assert str(result[0].error).startswith(
        "bulk_invite: the service processed no request for 30 s; the last failure: "
    )
    assert result[0].error.attempts > 1
