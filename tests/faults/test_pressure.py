"""Storms, overload and deadlines, in virtual time: who is served, how soon, and what is sent in vain."""

from __future__ import annotations

from contextlib import suppress
from itertools import count, pairwise
from math import inf
from random import Random
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import httpx
import pytest
from fault_server import Request, right_document
from kit import client_of
from virtual_router import member_of, virtual_router
from virtual_time import ModelGateway, run

from sampling_async import InviteRequest, OutagePolicy, SamplingClient, SamplingError, TransportTimeoutError

if TYPE_CHECKING:
    from sampling_async.routing import RouterStatus

# Requests that take longer than any simulation here. Without an end, a fan-out whose requests all fail at once
# would go on for ever, and virtual time would not.
MANY = 10_000

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


class Stormy(httpx.AsyncBaseTransport):
    """A service that responds after some time, works on some requests at once, and refuses a share in a storm.

    A request beyond the number that it works on waits, as long as the client does.

    Attributes:
        begun: When each request came.
        refused: When each refused request came.
        answered: When each response was sent.
    """

    def __init__(
        self,
        storm: tuple[float, float] = (0.0, 0.0),
        *,
        seconds: float = 0.05,
        at_once: int = 1_000,
        status: int = 429,
        retry_after: int | None = None,
        share: float = 1.0,
    ) -> None:
        self.storm, self.seconds, self.status, self.share = storm, seconds, status, share
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        self.begun: list[float] = []
        self.refused: list[float] = []
        self.answered: list[float] = []
        self._workers = anyio.CapacityLimiter(at_once)
        self._random = Random(2)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        now = anyio.current_time()
        self.begun.append(now)
        if self.storm[0] <= now < self.storm[1] and self._random.random() < self.share:
            self.refused.append(now)
            await anyio.sleep(0.002)
            return httpx.Response(self.status, headers=self.headers)
        async with self._workers:
            await anyio.sleep(self.seconds * self._random.uniform(0.9, 1.1))
        self.answered.append(anyio.current_time())
        raw = f"{request.method} {request.url.raw_path.decode()} HTTP/1.1\r\n"
        raw += "\r\n".join(f"{name}: {value}" for name, value in request.headers.items())
        status, document = right_document(Request.of(raw.encode() + b"\r\n\r\n" + await request.aread()))
        return httpx.Response(status, json=document)


def simulated(service: httpx.AsyncBaseTransport, **options) -> SamplingClient:
    """Return a client with the defaults of users, in virtual time."""
    given = {"clock": anyio.current_time, "sleep": anyio.sleep, "random": Random(1).random}
    return client_of("https://service.example", outage=OutagePolicy(), transport=service, **given | options)


class Clicks:
    """Calls of Generate Invite that come at a rate, each with a deadline, or cancelled after some time.

    Attributes:
        ended: When each came and ended, and how; not of those that were cancelled.
        open: How many have come and not ended.
    """

    def __init__(
        self,
        client: SamplingClient,
        *,
        rate: float,
        seconds: float,
        deadline: float | None = 2.0,
        cancelled_after: float = inf,
    ) -> None:
        self._client = client
        self._rate, self._seconds, self._deadline = rate, seconds, deadline
        self._cancelled_after = cancelled_after
        self.ended: list[tuple[float, float, SamplingError | None]] = []
        self.open = 0

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(int(self._rate * self._seconds)):
                tasks.start_soon(self._click, number)
                await anyio.sleep(1 / self._rate)

    async def _click(self, number: int) -> None:
        came, error = anyio.current_time(), None
        self.open += 1
        with anyio.move_on_after(self._cancelled_after) as scope:
            try:
                await self._client.generate_invite(f"m{number}", 2, deadline=self._deadline)
            except SamplingError as exc:
                error = exc
        self.open -= 1
        if not scope.cancelled_caught:
            self.ended.append((came, anyio.current_time(), error))

    def served(self, since: float, until: float = 1e9) -> float:
        """Return the share of those that came in a span and were served."""
        came = [error for at, _, error in self.ended if since <= at < until]
        return sum(error is None for error in came) / len(came)


def per_second(moments: list[float], since: float, until: float) -> float:
    return sum(since <= at < until for at in moments) / (until - since)


def longest_pause(moments: list[float]) -> float:
    return max(later - earlier for earlier, later in pairwise(moments))


@BACKENDS
@pytest.mark.parametrize("deadline", [0.15, 0.3, 2.0, 30.0])
def test_in_a_storm_somebody_always_probes_and_not_more_than_some_times_a_second(backend, deadline):
    service = Stormy((5.0, 15.0))

    async def main() -> Clicks:
        async with simulated(service) as client:
            clicks = Clicks(client, rate=20, seconds=25, deadline=deadline)
            await clicks.run()
        return clicks

    clicks = run(main, backend=backend)
    assert longest_pause(service.begun) <= 1
    assert len(service.refused) <= 50
    assert clicks.served(15 + 3) == 1


@BACKENDS
def test_a_caller_whose_turn_is_too_late_is_told_so_at_once_and_the_turns_go_to_others(backend):
    """Two requests a second are allowed; half of the callers cannot wait for their turn."""
    service = ModelGateway(Stormy(), Random(1), rate=2, burst=1)

    async def main() -> tuple[Clicks, Clicks]:
        async with simulated(service) as client, anyio.create_task_group() as tasks:
            hasty = Clicks(client, rate=4, seconds=60, deadline=0.2)
            patient = Clicks(client, rate=1, seconds=60, deadline=10)
            tasks.start_soon(hasty.run)
            tasks.start_soon(patient.run)
        return hasty, patient

    hasty, patient = run(main, backend=backend)
    assert patient.served(10) > 0.3
    late = [(end - came, error) for came, end, error in hasty.ended if isinstance(error, TransportTimeoutError)]
    assert len(late) > 60
    assert {error.delivery for _, error in late} == {"not_sent"}
    assert {"the line is longer than the deadline" in str(error) for _, error in late} == {True}
    assert sum(seconds == 0 for seconds, _ in late) > len(late) / 3
    assert len(service.accepted) > 0.8 * 2 * 60


@BACKENDS
def test_callers_who_are_cancelled_in_a_storm_leave_their_turns_to_others(backend):
    """As when visitors close the page: half of the callers are gone after a tenth of a second."""
    service = Stormy((5.0, 10.0))

    async def main() -> Clicks:
        async with simulated(service) as client, anyio.create_task_group() as tasks:
            hasty = Clicks(client, rate=10, seconds=16, deadline=None, cancelled_after=0.1)
            patient = Clicks(client, rate=10, seconds=16)
            tasks.start_soon(hasty.run)
            tasks.start_soon(patient.run)
        return patient

    patient = run(main, backend=backend)
    assert longest_pause(service.begun) <= 1
    assert patient.served(10 + 3) == 1


@BACKENDS
@pytest.mark.parametrize("retry_after", [None, 1])
@pytest.mark.parametrize("seconds", [0.5, 4.0, 12.0])
def test_callers_with_short_deadlines_are_served_soon_after_a_storm_of_429(backend, seconds, retry_after):
    service = Stormy((5.0, 5.0 + seconds), retry_after=retry_after)

    async def main() -> Clicks:
        async with simulated(service) as client:
            clicks = Clicks(client, rate=20, seconds=seconds + 16)
            await clicks.run()
        return clicks

    clicks = run(main, backend=backend)
    assert clicks.served(0, 4) == 1
    assert clicks.served(5 + seconds + 3) == 1


@BACKENDS
@pytest.mark.parametrize("retry_after", [None, 1])
def test_a_fan_out_and_clicks_beside_it_are_as_before_soon_after_a_storm(backend, retry_after):
    service = Stormy((5.0, 9.0), seconds=0.1, retry_after=retry_after)

    async def main() -> tuple[Clicks, list[float]]:
        outcomes_at: list[float] = []

        async def fan_out() -> None:
            requests = (InviteRequest(f"b{at}", [2]) for at in range(MANY))
            async with client.fan_out(requests) as outcomes:
                async for outcome in outcomes:
                    assert outcome.status in {"invited", "rejected"}
                    outcomes_at.append(anyio.current_time())

        async with simulated(service) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(fan_out)
            clicks = Clicks(client, rate=20, seconds=25)
            await clicks.run()
            tasks.cancel_scope.cancel()
        return clicks, outcomes_at

    clicks, outcomes_at = run(main, backend=backend)
    assert clicks.served(0, 4) == 1
    assert clicks.served(12) == 1
    before = per_second(outcomes_at, 1, 5)
    assert before > 50
    # Up to two clicks run beyond the maximum when it is just reached, so the fan-out's part is partly chance.
    assert per_second(outcomes_at, 12, 16) > 0.85 * before


@BACKENDS
def test_a_fan_out_alone_is_as_fast_as_before_soon_after_a_storm(backend):
    service = Stormy((5.0, 9.0), seconds=0.1)

    async def main() -> list[float]:
        outcomes_at: list[float] = []
        requests = (InviteRequest(f"b{at}", [2]) for at in range(MANY))
        with anyio.move_on_after(20):
            async with simulated(service) as client, client.fan_out(requests) as outcomes:
                async for _ in outcomes:
                    outcomes_at.append(anyio.current_time())
        return outcomes_at

    outcomes_at = run(main, backend=backend)
    assert per_second(outcomes_at, 12, 16) > 0.9 * per_second(outcomes_at, 1, 5)


@BACKENDS
@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_storm_that_refuses_some_leaves_no_rate_that_is_far_too_low(backend, share, width):
    """Such refusals look like a low limit, and at a low rate there are few results that could show more."""
    service = Stormy((5.0, 9.0), seconds=0.1, share=share)

    async def main() -> list[float]:
        outcomes_at: list[float] = []
        requests = (InviteRequest(f"b{at}", [2]) for at in range(MANY))
        with anyio.move_on_after(14):
            async with (
                simulated(service, max_concurrency=width) as client,
                client.fan_out(requests) as outcomes,
            ):
                async for _ in outcomes:
                    outcomes_at.append(anyio.current_time())
        return outcomes_at

    outcomes_at = run(main, backend=backend)
    assert per_second(outcomes_at, 12, 14) > 0.9 * per_second(outcomes_at, 3, 5)
    assert longest_pause(service.begun) < 1.1


@BACKENDS
def test_a_router_gives_links_again_soon_after_a_storm_and_no_invite_is_lost(backend):
    service = Stormy((5.0, 9.0))
    links: list[tuple[float, float, str | None]] = []  # when the click came, how long it took, its link

    async def main() -> RouterStatus:
        async def click(number: int) -> None:
            came = anyio.current_time()
            route = await router.route(member_of(number), within=2.0)
            links.append((came, anyio.current_time() - came, route.url))

        async with virtual_router(simulated, service) as router, anyio.create_task_group() as tasks:
            for number in range(20 * 16):
                tasks.start_soon(click, number)
                await anyio.sleep(1 / 20)
        return router.status

    status = run(main, backend=backend)
    assert all(url for came, _, url in links if came < 4 or came >= 9 + 3)
    assert longest_pause(service.begun) <= 1
    assert max(seconds for _, seconds, _ in links) <= 2 + 1e-6
    assert status.unused == 0


@BACKENDS
@pytest.mark.parametrize("deadline", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("load", [2, 10])
def test_under_overload_the_client_serves_as_many_as_it_can(backend, load, deadline):
    service, seconds = Stormy(seconds=0.1, at_once=8), 3 if load > 2 else 6

    async def main() -> Clicks:
        async with simulated(service) as client:
            clicks = Clicks(client, rate=80 * load, seconds=seconds, deadline=deadline)
            await clicks.run()
        return clicks

    clicks = run(main, backend=backend)
    served = [end - came for came, end, error in clicks.ended if error is None]
    in_time = sum(error is None and end <= seconds for _, end, error in clicks.ended)
    assert in_time >= 0.9 * 80 * seconds
    assert max(served) <= deadline
    assert len(service.begun) - len(served) <= 0.03 * len(service.begun)  # in vain
    refused = [error for _, _, error in clicks.ended if error is not None]
    assert {error.delivery for error in refused if isinstance(error, TransportTimeoutError)} >= {"not_sent"}


@BACKENDS
def test_callers_who_are_cancelled_by_their_host_are_served_again_after_a_storm(backend):
    """Without `deadline=` the client cannot know when they go: the oldest in the line have no time left."""
    service, served = Stormy((5.0, 10.0)), []

    async def main() -> None:
        async with simulated(service) as client, anyio.create_task_group() as tasks:

            async def click(number: int) -> None:
                came = anyio.current_time()
                with anyio.move_on_after(2.0), suppress(SamplingError):
                    await client.generate_invite(f"m{number}", 2)
                    served.append(came)

            for number in range(20 * 18):
                tasks.start_soon(click, number)
                await anyio.sleep(1 / 20)

    run(main, backend=backend)
    assert sum(came >= 13 for came in served) == 20 * 5


class Stubborn(httpx.AsyncBaseTransport):
    """A service that goes on with requests that nobody waits for any more, as services do."""

    def __init__(self, service: Stormy, tasks: anyio.abc.TaskGroup) -> None:
        self._service, self._tasks = service, tasks

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        over, responses = anyio.Event(), []

        async def work() -> None:
            responses.append(await self._service.handle_async_request(request))
            over.set()

        self._tasks.start_soon(work)
        await over.wait()
        return responses[0]


@BACKENDS
@pytest.mark.parametrize(("workers", "width", "least"), [(1, 8, 0.4), (4, 16, 0.8), (4, 64, 0.8)])
def test_a_service_whose_line_is_longer_than_all_deadlines_is_given_time_to_work_it_off(
    backend, workers, width, least
):
    """Each request is late because of those before it, and no response ever shows that."""
    service, seconds = Stormy(seconds=0.1, at_once=workers), 12

    async def main() -> Clicks:
        async with anyio.create_task_group() as tasks:
            async with simulated(Stubborn(service, tasks), max_concurrency=width) as client:
                clicks = Clicks(client, rate=20 * workers, seconds=seconds, deadline=0.3)
                await clicks.run()
            tasks.cancel_scope.cancel()
        return clicks

    clicks = run(main, backend=backend)
    served = sum(error is None for _, _, error in clicks.ended)
    assert served >= least * 10 * workers * seconds
    assert clicks.served(seconds - 3) > 0.15


@BACKENDS
@pytest.mark.parametrize("load", [2, 10])
def test_short_deadlines_are_kept_by_a_service_that_works_on_half_as_many(backend, load):
    """A call takes a third of its deadline and more, so who leaves the line late is sent in vain."""
    service, seconds = Stormy(seconds=0.1, at_once=4), 6

    async def main() -> Clicks:
        async with simulated(service) as client:
            clicks = Clicks(client, rate=40 * load, seconds=seconds, deadline=0.3)
            await clicks.run()
        return clicks

    clicks = run(main, backend=backend)
    served = sum(error is None for _, _, error in clicks.ended)
    assert served >= 0.90 * 40 * seconds
    assert len(service.begun) - served <= 0.10 * len(service.begun)  # most before the usual time is known


@BACKENDS
@pytest.mark.parametrize(("workers", "load", "least"), [(1, 2, 0.5), (4, 2, 0.75), (4, 10, 0.75)])
def test_a_client_learns_how_long_hosts_wait_that_cancel_calls_without_a_deadline(
    backend, workers, load, least
):
    """The service works on what was cancelled, so each request is late, and no caller says what time it has."""
    service, seconds, rate = Stormy(seconds=0.1, at_once=workers), 8, 10 * workers

    async def main() -> Clicks:
        async with anyio.create_task_group() as tasks:
            async with simulated(Stubborn(service, tasks)) as client:
                clicks = Clicks(client, rate=rate * load, seconds=seconds, deadline=None, cancelled_after=0.3)
                await clicks.run()
            tasks.cancel_scope.cancel()
        return clicks

    clicks = run(main, backend=backend)
    assert len(clicks.ended) >= least * rate * seconds
    assert len(service.begun) - len(clicks.ended) <= 0.5 * len(service.begun)


@BACKENDS
def test_clicks_with_short_deadlines_are_served_beside_a_wide_fan_out(backend):
    """The fan-out may have 64 requests in the service's line, each click behind them."""
    service, seconds = Stormy(seconds=0.1, at_once=4), 8
    done = 0

    async def main() -> Clicks:
        async with anyio.create_task_group() as tasks:
            async with simulated(Stubborn(service, tasks), max_concurrency=64) as client:

                async def fan_out() -> None:
                    nonlocal done
                    requests = (InviteRequest(f"b{number}", [2, 4]) for number in count())
                    async with client.fan_out(requests, chunk_size=2) as outcomes:
                        async for _ in outcomes:
                            done += 1

                tasks.start_soon(fan_out)
                clicks = Clicks(client, rate=20, seconds=seconds, deadline=0.5)
                await clicks.run()
                tasks.cancel_scope.cancel()
        return clicks

    clicks = run(main, backend=backend)
    assert clicks.served(1.0) >= 0.9
    assert done / 2 + len(clicks.ended) >= 0.9 * 40 * seconds
