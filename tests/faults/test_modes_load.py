"""Failure modes of load: overload, outages, Retry-After, long queues and long runs."""

from __future__ import annotations

import gc
import itertools
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import anyio
import anyio.lowlevel
import doubles
import httpx
import pytest
from fault_server import ENDPOINTS, PROCESSED, RIGHT, FaultServer, answer, cut, fin, read, reply, rst
from kit import assert_idle, call, client_of, descriptors
from virtual_time import ModelGateway, ModelService, run, seeded

from sampling_async import (
    BulkInviteResult,
    ForbiddenError,
    InviteRequest,
    OutagePolicy,
    RetryPolicy,
    SamplingClient,
    SamplingError,
    ServerError,
    TransportError,
    UnexpectedStatusError,
)

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
SEED = 20_240_229


def simulated(service: httpx.AsyncBaseTransport, rng, **options) -> SamplingClient:
    """Return a client of a model service in virtual time."""
    given = {"transport": service, "clock": anyio.current_time, "sleep": anyio.sleep, "random": rng.random}
    return client_of("https://service.example", **given | options)


# --- A gateway that refuses


WIDTH = 16
FREE = 160.0
"""Requests a second without any refusal, 16 at once."""


def accepted_a_second(
    backend: str, seed: int, *, seconds: float = 60.0, clients: int = 1, **gateway
) -> tuple[float, list[str]]:
    """Run fan-outs against a gateway; return accepted requests a second, and statuses that are no response."""
    with seeded(seed) as rng:
        service = ModelService(workers=((0.0, clients * WIDTH),), base=WIDTH / FREE, per_id=0.0, random=rng)
        model = ModelGateway(service, rng, **gateway)
        given_up: list[str] = []

        async def fan_out(number: int) -> None:
            requests = (InviteRequest(f"m{number}-{at}", [2]) for at in itertools.count())
            async with (
                simulated(model, rng, max_concurrency=WIDTH, outage=OutagePolicy()) as client,
                client.fan_out(requests) as outcomes,
            ):
                async for outcome in outcomes:
                    if outcome.status not in {"invited", "rejected"}:
                        given_up.append(outcome.status)

        async def main() -> None:
            with anyio.move_on_after(seconds):
                async with anyio.create_task_group() as tasks:
                    for number in range(clients):
                        tasks.start_soon(fan_out, number)

        run(main, backend=backend)
        return len(model.accepted) / seconds, given_up


@BACKENDS
@pytest.mark.parametrize("retry_after", [None, 1])
def test_nine_tenths_of_a_rate_limit_are_used_from_the_first_minute_on(backend, retry_after):
    accepted, given_up = accepted_a_second(backend, 3, rate=20, burst=5, retry_after=retry_after)
    assert 18 <= accepted <= 20.1
    assert given_up == []


@BACKENDS
@pytest.mark.parametrize("retry_after", [None, 1])
def test_several_clients_that_know_nothing_of_each_other_share_a_rate_limit(backend, retry_after):
    """The scoreboard holds 0.9 of it as the mean of ten trials; four trials of trio vary by some hundredths."""
    trials = [
        accepted_a_second(backend, seed, clients=5, rate=20, burst=5, retry_after=retry_after)
        for seed in range(4)
    ]
    assert 0.86 * 20 <= sum(accepted for accepted, _ in trials) / 4 <= 20.1
    assert [given_up for _, given_up in trials] == [[]] * 4


@BACKENDS
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.02, 0.05])
def test_a_refusal_by_chance_costs_the_second_that_it_requests_and_little_more(backend, share, seed):
    """Of 50 requests one is refused: they take 0.31 s, and the hold takes one."""
    accepted, given_up = accepted_a_second(backend, seed, share=share, retry_after=1)
    assert accepted >= 0.8 * (1 - share) / (1 / FREE + share)
    assert given_up == []


@BACKENDS
@pytest.mark.parametrize("share", [0.02, 0.05])
def test_refusals_by_chance_without_a_pause_hardly_slow_a_fan_out(backend, share):
    accepted, given_up = accepted_a_second(backend, 1, seconds=20.0, share=share)
    assert accepted >= 0.8 * (1 - share) * FREE
    assert given_up == []


def test_a_limit_that_begins_after_refusals_by_chance_is_kept_to():
    with seeded(5) as rng:
        service = ModelService(workers=((0.0, WIDTH),), base=WIDTH / FREE, per_id=0.0, random=rng)
        model = ModelGateway(service, rng, share=0.05)

        async def main() -> None:
            requests = (InviteRequest(f"m{at}", [2]) for at in itertools.count())
            with anyio.move_on_after(60):
                async with (
                    simulated(model, rng, max_concurrency=WIDTH, outage=OutagePolicy()) as client,
                    client.fan_out(requests) as outcomes,
                ):
                    async for _ in outcomes:
                        if anyio.current_time() > 20:
                            model.share, model.rate = 0.0, 20.0

        run(main, backend="asyncio")
    late = [at for at in model.accepted if at > 30]
    assert 0.9 * 20 <= len(late) / 30 <= 20.2


# --- 4: a brownout


def brown_out(backend: str, seed: int, **model) -> tuple[BulkInviteResult, ModelService, float]:
    """Ask for 10,000 quotas in 100 chunks of 10.5 s of work each."""
    with seeded(seed) as rng:
        service = ModelService(random=rng, **model)

        async def main():
            async with simulated(service, rng) as client:
                result = await client.bulk_invite("m1", range(1, 10_001))
                assert_idle(client)
            return result, service, anyio.current_time()

        return run(main, backend=backend)


@BACKENDS
@pytest.mark.parametrize(
    ("workers", "most_unknown"),
    [(((0, 4),), 0), (((0, 16),), 0), (((0, 1),), 500), (((0, 4), (60, 1)), 500)],
    ids=["4 workers", "16 workers", "1 worker", "4 then 1"],
)
def test_mode_04_a_slow_service_gets_fewer_requests_and_few_responses_come_too_late(
    backend, workers, most_unknown
):
    result, service, _ = brown_out(backend, SEED, workers=workers)
    assert len(result.unknown) <= most_unknown
    assert service.ledger.lies(result) == []
    assert len(service.started) <= 110


@BACKENDS
def test_mode_04_the_client_regains_its_speed_after_a_brownout(backend):
    _, _, steady = brown_out(backend, SEED, workers=((0, 4),))
    result, _, with_a_dip = brown_out(backend, SEED, workers=((0, 4), (60, 1), (120, 4)))
    assert len(result.unknown) <= 500
    lost = 60 * 3 / 4  # what the three missing workers would have done in a minute
    assert with_a_dip <= steady + 2 * lost + 60


@BACKENDS
@pytest.mark.parametrize("seed", range(2))
def test_mode_04_failures_in_a_brown_out_make_no_lies_and_no_flood(backend, seed):
    result, service, _ = brown_out(backend, seed, workers=((0, 4), (60, 1)), failures=0.05)
    assert service.ledger.lies(result) == []
    assert [outcome.quota_id for outcome in result] == list(range(1, 10_001))
    assert len(service.started) <= 115
    assert max(service.ledger.invites.values()) == 1


# --- 5: an outage


@pytest.mark.parametrize("outage", ["503", "500", "refused"])
async def test_mode_05_retries_do_not_multiply_the_load_in_an_outage(outage):
    answers = {"503": httpx.Response(503), "500": httpx.Response(500), "refused": httpx.ConnectError("refused")}
    down = True
    service = doubles.Service(lambda request: answers[outage] if down else [])
    if outage == "refused":

        async def handler(request: httpx.Request) -> httpx.Response:
            service.requests.append(request)
            if down:
                raise answers[outage]
            return httpx.Response(200, json=[])
    else:
        handler = service
    async with doubles.client(handler) as client:
        for _ in range(400):
            with pytest.raises((ServerError, TransportError)):
                await client.get_settings()
        assert len(service.requests) <= 440
        down = False
        assert len(await client.get_settings()) == 0
        assert len(service.requests) <= 441


async def test_mode_05_a_fan_out_in_an_outage_ends_soon_and_reports_what_may_be_sent_again():
    service = doubles.Service(httpx.Response(429))
    requests = [InviteRequest(f"m{n}", range(1, 101)) for n in range(200)]
    async with doubles.client(service) as client, client.fan_out(requests) as outcomes:
        assert {outcome.status async for outcome in outcomes} == {"not_sent"}
    assert len(service.requests) <= 660  # one a second, for as long as `OutagePolicy.patience`


# --- 9: response times that grow with the number of IDs


@BACKENDS
@pytest.mark.parametrize("n", [1, 10, 100])
def test_mode_09_the_time_limit_grows_with_the_quota_ids(backend, n):
    """A service near the limits: 14 s for any request and 0.45 s for an ID. No fixed timeout would work."""
    service = ModelService(workers=((0, 1000),), base=14, per_id=0.45)

    async def main() -> BulkInviteResult:
        async with simulated(service, service.random) as client:
            return await client.bulk_invite("m1", range(1, 10 * n + 1), chunk_size=n)

    assert len(run(main, backend=backend).unknown) == 0


# --- 29: deadlines in simulated time


@BACKENDS
@pytest.mark.parametrize("seconds", [5, 30, 200])
def test_mode_29_a_bulk_keeps_its_deadline_and_its_outcomes_are_complete_and_true(backend, seconds):
    service = ModelService(workers=((0, 2),))

    async def main() -> tuple[BulkInviteResult, float]:
        async with simulated(service, service.random) as client:
            result = await client.bulk_invite("m1", range(1, 5001), deadline=seconds)
            assert_idle(client)
            return result, anyio.current_time()

    result, ended = run(main, backend=backend)
    assert ended <= seconds + 0.001
    assert [outcome.quota_id for outcome in result] == list(range(1, 5001))
    assert service.ledger.lies(result) == []
    assert len(result.not_sent) > 0
    assert len(result.unknown) <= 800, "requests that cannot be answered in time must not be sent"


@BACKENDS
@pytest.mark.parametrize("endpoint", ENDPOINTS[:-1])
def test_mode_29_the_deadline_of_a_call_includes_attempts_and_waits(backend, endpoint):
    service = ModelService(base=14, per_id=0, failures=1.0)

    async def main() -> float:
        async with simulated(service, service.random) as client:
            with pytest.raises(SamplingError):
                await call(client, endpoint, deadline=20)
            assert_idle(client)
            return anyio.current_time()

    assert run(main, backend=backend) <= 20.001


# --- 15: Retry-After

DATE = datetime(2001, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("asked", "least"),
    [
        ("7", 7),
        ("0", 0),
        ("60", 60),
        (format_datetime(DATE + timedelta(seconds=20), usegmt=True), 20),
        (format_datetime(DATE - timedelta(seconds=20), usegmt=True), 0),
        ("soon", 0),
        ("", 0),
    ],
)
async def test_mode_15_a_wait_is_kept_to_the_second_and_nonsense_is_not(status, asked, least):
    """A date is relative to the Date header of the response. Our clock, decades later, does not matter."""
    headers = {"Retry-After": asked, "Date": format_datetime(DATE, usegmt=True)}
    service, time = doubles.Service(httpx.Response(status, headers=headers), []), doubles.FakeTime()
    async with doubles.client(service, time) as client:
        await client.get_settings()
    assert least <= time.now <= max(least, 1) + 1
    assert len(service.requests) == 2


@pytest.mark.parametrize("asked", ["61", "999999", format_datetime(DATE + timedelta(days=1), usegmt=True)])
async def test_mode_15_a_wait_too_long_is_left_to_the_caller(asked):
    headers = {"Retry-After": asked, "Date": format_datetime(DATE, usegmt=True)}
    service, time = doubles.Service(httpx.Response(429, headers=headers)), doubles.FakeTime()
    async with doubles.client(service, time) as client:
        with pytest.raises(UnexpectedStatusError) as caught:
            await client.get_settings()
        result = await client.bulk_invite("m1", range(1, 1001))
    assert caught.value.retry_after > 60
    assert max(time.slept, default=0) <= 0.1  # only the pace that a 429 sets, not the requested wait
    assert len(result.not_sent) == 1000
    assert result[999].error.retry_after == caught.value.retry_after
    assert len(service.requests) <= 1 + 8


@BACKENDS
def test_mode_15_all_requests_wait_and_restart_at_different_moments(backend):
    with seeded(SEED) as rng:
        started: list[float] = []

        async def handler(request: httpx.Request) -> httpx.Response:
            started.append(anyio.current_time())
            await anyio.sleep(1)
            if len(started) <= 8:
                return httpx.Response(429, headers={"Retry-After": "30"})
            return httpx.Response(200, json=doubles.bulk(request))

        async def main() -> BulkInviteResult:
            async with simulated(httpx.MockTransport(handler), rng) as client:
                return await client.bulk_invite("m1", range(1, 401), chunk_size=10)

        result = run(main, backend=backend)
        assert len(result.unknown) == 0
        after = [moment for moment in started if moment > 1]
        assert min(after) >= 31
        assert len({round(moment, 3) for moment in after[:8]}) > 4, "all requests restarted at the same moment"


@BACKENDS
@pytest.mark.parametrize(("status", "burst"), [(429, 5), (429, 0), (503, 5)])
def test_the_client_adapts_to_the_rate_of_a_gateway(backend, status, burst):
    """20 requests a second: no ID is given up, few requests are refused, and little time is lost."""
    with seeded(SEED) as rng:
        level, last, refused = 0.0, 0.0, 0

        async def gateway(request: httpx.Request) -> httpx.Response:
            nonlocal level, last, refused
            await anyio.sleep(0.002)
            now = anyio.current_time()
            level, last = max(0.0, level - 20 * (now - last)), now
            if level > burst:
                refused += 1
                return httpx.Response(status)
            level += 1
            return httpx.Response(200, json=doubles.bulk(request) if request.method == "POST" else [])

        async def main() -> tuple[set[str], float]:
            policy = RetryPolicy(unprocessed={408, 425, 429, 503})
            requests = [InviteRequest(f"m{n}", [2, 3]) for n in range(400)]
            async with simulated(
                httpx.MockTransport(gateway), rng, retry=policy, outage=OutagePolicy()
            ) as client:
                async with client.fan_out(requests) as outcomes:
                    seen = {outcome.status async for outcome in outcomes}
                assert 15 < client.snapshot().requests_per_second < 50
            return seen, anyio.current_time()

        seen, seconds = run(main, backend=backend)
        assert seen == {"invited", "rejected"}
        assert refused < 0.1 * 400
        assert seconds < 400 / 20 / 0.75


# --- 27: a key that is revoked during a run


async def test_mode_27_after_a_403_no_chunk_follows_and_the_rest_is_not_sent():
    with FaultServer(*[RIGHT] * 4, then=[read(), reply(403, '{"Message": "Forbidden"}')]) as server:
        async with client_of(server.url, max_concurrency=2) as client:
            result = await client.bulk_invite("m1", range(1, 121), chunk_size=10)
    assert len(server.ledger.received) <= 4 + 2
    assert len(server.ledger.processed) == 4
    assert (len(result.invited), len(result.rejected), len(result.not_sent)) == (20, 20, 80)
    assert all(isinstance(outcome.error, ForbiddenError) for outcome in result.not_sent)
    assert server.ledger.lies(result) == []


# --- 37: long queues


async def test_mode_37_calls_wait_before_they_take_a_connection():
    with FaultServer() as server:
        async with client_of(server.url, max_concurrency=8) as client:
            async with anyio.create_task_group() as tasks:
                for _ in range(300):
                    tasks.start_soon(client.get_settings)
                while not client._gate.waiting:
                    await anyio.lowlevel.checkpoint()
                assert client._gate.running <= 8
            assert_idle(client)
    assert len(server.ledger.received) == 300
    assert server.most_open <= 10
    assert server.opened <= 10


async def test_mode_37_thousands_of_chunks_do_not_make_thousands_of_tasks():
    service = doubles.Service(doubles.bulk)
    most = 0
    async with doubles.client(service, max_concurrency=8) as client:
        before = len(anyio.get_running_tasks())
        async with client.stream_bulk_invite("m1", iter(range(1, 1501)), chunk_size=1) as outcomes:
            async for _ in outcomes:
                most = max(most, len(anyio.get_running_tasks()) - before)
    assert len(service.requests) == 1500
    assert most <= 8 + 2


# --- 38: long runs


FAULTS = [
    [*PROCESSED, rst()],
    [*PROCESSED, fin()],
    [*PROCESSED, cut(60, "rst")],
    [*PROCESSED, cut(-20, "fin", "close")],
    [*PROCESSED, answer("close")],
    [*RIGHT, rst()],
    [read(), reply(503)],
    [*PROCESSED, reply(500)],
]


async def test_mode_38_a_long_run_with_faults_and_cancels_leaves_nothing_behind():
    """1,500 calls: 5 % meet a fault, 5 % are cancelled."""
    with seeded(SEED) as rng, FaultServer() as server:
        async with client_of(server.url, max_concurrency=4, retry=RetryPolicy(budget=1e9)) as client:
            tasks_before = len(anyio.get_running_tasks())

            async def one(endpoint: str) -> None:
                if rng.random() < 0.05:
                    server.faults.append(rng.choice(FAULTS))
                with suppress(SamplingError):  # other tests check the errors
                    await call(client, endpoint)

            async def some(calls: int) -> None:
                for _ in range(calls // 4):
                    async with anyio.create_task_group() as group:
                        for _ in range(4):
                            group.start_soon(one, rng.choice(ENDPOINTS))
                        if rng.random() < 0.05 * 4:
                            for _ in range(rng.randrange(12)):
                                await anyio.lowlevel.checkpoint()
                            group.cancel_scope.cancel()

            await some(300)
            server.faults.clear()
            gc.collect()
            open_before, objects_before = descriptors(), len(gc.get_objects())
            await some(1200)
            server.faults.clear()
            assert len((await client.bulk_invite("m2", range(1, 1001))).unknown) == 0
            assert_idle(client)
            assert len(anyio.get_running_tasks()) == tasks_before
            # Both ends of at most 4 connections, and the records of the ledger.
            assert descriptors() <= open_before + 2 * 6
            gc.collect()
            assert len(gc.get_objects()) - objects_before < 15_000
