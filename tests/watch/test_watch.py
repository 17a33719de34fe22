"""A watch: polls, pauses, states, and what ends it."""

from __future__ import annotations

import asyncio
import logging
from math import inf

import anyio
import pytest
from watch_kit import FakeService, HandClock, ids_of, inventory, moment, settle, watch_of, watching

from sampling_async import (
    ClientClosedError,
    DecodeError,
    ForbiddenError,
    InvalidRequestError,
    OutageError,
    ServerError,
    TransportError,
)
from sampling_async.simulator import Fault, Simulator, VirtualClock

# --- States and pauses


async def test_a_watch_holds_the_newest_inventory():
    clock, service = HandClock(), FakeService(inventory(1, 2))
    watch = watch_of(service, clock)
    assert (watch.status, watch.age, watch.since) == ("starting", None, None)
    assert repr(watch) == "<QuotaWatch starting, 0 polls>"
    with pytest.raises(RuntimeError, match="no inventory yet"):
        _ = watch.quotas
    async with watch:
        await watch.ready()
        assert watch.quotas is service.inventory
        assert (watch.status, watch.age, watch.since) == ("ready", 0, moment(clock))
        service.inventory = inventory(2, 3)
        await clock.advance(59)
        assert ids_of(watch.quotas) == [1, 2]
        await clock.advance(1)
        assert ids_of(watch.quotas) == [2, 3]
        assert repr(watch) == "<QuotaWatch ready, 0 s old, 2 polls>"
    assert service.running == 0
    assert ids_of(watch.quotas) == [2, 3]


@pytest.mark.parametrize(("random", "due"), [(0.0, 54), (0.5, 60), (1.0, 66)])
async def test_the_pause_has_a_jitter_of_a_tenth(random, due):
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock, random=lambda: random):
        await clock.advance(due - 0.1)
        assert service.polls == 1
        await clock.advance(0.2)
        assert service.polls == 2


@pytest.mark.parametrize(
    "error",
    [DecodeError("$", "odd"), OutageError("away"), TransportError("cut"), ServerError("bad", status=500)],
)
async def test_failures_are_kept_and_the_pauses_grow(error):
    async with watching(inventory(1)) as (watch, service, clock):
        service.error = error
        await clock.advance(60)
        assert watch.last_error is error
        assert watch.status == "ready"  # the inventory is a minute old
        clock.slept.clear()
        await clock.advance(61)
        assert watch.status == "stale"
        await clock.advance(800)
        assert watch.status == "failing"
        assert ids_of(watch.quotas) == [1]
        # Five seconds, doubled each time, five minutes at most.
        assert clock.slept[:8] == [10, 20, 40, 80, 160, 300, 300, 300][: len(clock.slept)]
        service.error = None
        await clock.advance(300)
        assert (watch.status, watch.last_error) == ("ready", None)


async def test_a_service_that_never_answered_is_failing():
    clock, service = HandClock(), FakeService(inventory(1))
    service.error = ServerError("bad", status=500)
    async with watch_of(service, clock) as watch:
        await settle()
        assert (watch.status, watch.age) == ("failing", None)
        service.error = None
        await clock.advance(5)
        assert watch.status == "ready"


async def test_max_age_decides_when_a_watch_is_failing():
    async with watching(inventory(1), max_age=70) as (watch, service, clock):
        service.error = ServerError("bad", status=500)
        await clock.advance(69)
        assert watch.status == "ready"
        await clock.advance(2)
        assert watch.status == "failing"


async def test_after_a_403_polls_are_rare_until_two_have_succeeded():
    async with watching(inventory(1)) as (watch, service, clock):
        service.error = ForbiddenError("no", status=403)
        await clock.advance(60)
        await clock.advance(119)
        assert service.polls == 2
        await clock.advance(1)
        assert service.polls == 3
        service.error = None
        await clock.advance(240)
        assert service.polls == 4
        assert watch.status == "ready"
        watch.refresh_soon()
        await clock.advance(119)
        assert service.polls == 4
        await clock.advance(1)
        assert service.polls == 5
        await clock.advance(60)
        assert service.polls == 6


async def test_the_successes_after_a_403_come_in_a_row():
    async with watching(inventory(1)) as (_, service, clock):
        for error, seconds in (
            (ForbiddenError("no", status=403), 60),
            (ServerError("bad", status=500), 120),
            (None, 240),
            (ServerError("bad", status=500), 120),
            (None, 120),
            (None, 120),
            (None, 60),
        ):
            before, service.error = service.polls, error
            await clock.advance(seconds - 1)
            assert service.polls == before
            await clock.advance(1)
            assert service.polls == before + 1


@pytest.mark.parametrize(("retry_after", "due"), [(50.0, 50), (31_536_000.0, 300)])
async def test_a_longer_retry_after_is_kept_but_not_one_of_a_year(retry_after, due):
    clock, service = HandClock(), FakeService(inventory(1))
    service.error = error = ServerError("bad", status=503)
    error.retry_after = retry_after
    async with watch_of(service, clock):
        await clock.advance(due - 1)
        assert service.polls == 1
        await clock.advance(1)
        assert service.polls == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every must be seconds above 0, not 0"),
        ({"every": "x"}, "every must be seconds above 0, not 'x'"),
        ({"max_age": -1}, "max_age must be seconds above 0, not -1"),
        ({"cache_max_age": 0}, "cache_max_age must be seconds above 0, not 0"),
        ({"every": inf - inf}, "every must be seconds above 0, not nan"),
    ],
)
async def test_numbers_are_checked(options, said):
    async with Simulator(surveys=1, members=1).client() as client:
        with pytest.raises(InvalidRequestError, match=f"^{said}$"):
            client.watch_quotas(**options)


# --- Errors that end it


async def test_a_cancellation_of_the_block_is_no_error_for_the_log(caplog):
    caplog.set_level("INFO", "sampling_async")
    for ticks in range(10):
        with anyio.CancelScope() as scope:
            async with watch_of(FakeService(inventory(1)), HandClock()) as watch:
                await watch.ready()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(anyio.sleep_forever)
                    for _ in range(ticks):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()
        assert scope.cancelled_caught
    assert [record for record in caplog.records if record.levelname in {"WARNING", "ERROR"}] == []


@pytest.mark.parametrize("error", [ZeroDivisionError("oops"), ClientClosedError("closed")])
async def test_an_unexpected_error_is_raised_when_the_block_is_left(error, caplog):
    clock, service = HandClock(), FakeService(inventory(1))
    with pytest.raises(type(error)):
        async with watch_of(service, clock) as watch:
            await watch.ready()
            service.error = error
            async with anyio.create_task_group() as tasks:

                async def refresh() -> None:
                    with pytest.raises(RuntimeError, match=f"ended by {type(error).__name__}"):
                        await watch.refresh()

                tasks.start_soon(refresh)
            assert (watch.status, watch.last_error) == ("failing", error)
            # A service does not leave the block, so that a log must tell it.
            logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
            name = type(error).__name__
            assert logged == [f"the watch was ended by {name}, which is raised when its block is left"]
            assert "oops" not in caplog.text
            with pytest.raises(RuntimeError, match="the watch was ended by") as caught:
                await watch.refresh()
            assert caught.value.__cause__ is error
            assert ids_of(watch.quotas) == [1]


async def test_an_error_of_the_block_is_not_replaced():
    clock, service = HandClock(), FakeService(inventory(1))
    service.error = ZeroDivisionError("oops")
    with pytest.raises(KeyError):
        async with watch_of(service, clock) as watch:
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                await watch.ready()
            raise KeyError


async def test_a_watch_is_used_inside_its_block():
    clock, service = HandClock(), FakeService(inventory(1))
    watch = watch_of(service, clock)
    for use in (watch.ready, watch.refresh):
        with pytest.raises(RuntimeError, match="enter the watch first"):
            await use()
    with pytest.raises(RuntimeError, match="enter the watch first"):
        watch.changes()
    async with watch:
        with pytest.raises(RuntimeError, match="a watch can be entered only once"):
            await watch.__aenter__()
    with pytest.raises(RuntimeError, match="the watch has ended"):
        await watch.ready()
    with pytest.raises(RuntimeError, match="block of the watch has ended"):
        await watch.refresh()


async def test_those_who_wait_are_woken_when_the_block_is_left():
    clock, service = HandClock(), FakeService(inventory(1))
    watch = watch_of(service, clock)
    ended: list[str] = []

    async def wait(use) -> None:
        with pytest.raises(RuntimeError) as caught:
            await use()
        ended.append(str(caught.value))

    async with anyio.create_task_group() as tasks:
        async with watch:
            service.hold()
            tasks.start_soon(wait, watch.ready)
            tasks.start_soon(wait, watch.refresh)
            await settle()
    assert ended == ["the watch has ended"] * 2


async def test_ready_can_be_bounded():
    clock, service = HandClock(), FakeService(inventory(1))
    service.hold()
    async with watch_of(service, clock) as watch:
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.01):
                await watch.ready()


@pytest.mark.asyncio
async def test_a_watch_may_be_left_in_another_task():
    clock, service = HandClock(), FakeService(inventory(1))
    watch = watch_of(service, clock)
    await asyncio.create_task(watch.__aenter__())
    await watch.ready()
    await asyncio.create_task(watch.__aexit__(None, None, None))
    assert len(asyncio.all_tasks()) == 1


# --- refresh


async def test_ten_callers_cost_one_poll():
    async with watching(inventory(1)) as (watch, service, _):
        service.inventory = inventory(2)
        found: list[list[int]] = []

        async def refresh() -> None:
            found.append(ids_of(await watch.refresh()))

        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(refresh)
        assert found == [[2]] * 10
        assert service.polls == 2


async def test_a_poll_that_began_before_does_not_count():
    async with watching(inventory(1)) as (watch, service, clock):
        gate = service.hold()
        await clock.advance(60)
        assert service.running == 1
        service.inventory = inventory(2)
        found: list[list[int]] = []

        async def refresh() -> None:
            found.append(ids_of(await watch.refresh()))

        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(refresh)
            await settle()
            assert found == []
            gate.set()
        assert found == [[2]] * 10
        assert (service.polls, service.most) == (3, 1)


async def test_a_failed_poll_is_raised_to_those_who_asked():
    async with watching(inventory(1)) as (watch, service, _):
        service.error = ServerError("bad", status=500, delivery="answered")
        with pytest.raises(ServerError) as caught:
            await watch.refresh()
        assert caught.value is not watch.last_error  # each caller has its own, with what became of the poll
        assert caught.value.delivery == "answered"
        service.error = None
        assert ids_of(await watch.refresh()) == [1]  # without the pause for failures


async def test_a_caller_that_is_cancelled_leaves_the_others_alone():
    async with watching(inventory(1)) as (watch, service, _):
        gate = service.hold()
        done: list[bool] = []

        async def refresh() -> None:
            await watch.refresh()
            done.append(True)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refresh)
            with anyio.move_on_after(0.01):
                await refresh()
            gate.set()
        assert done == [True]
        assert service.polls <= 3


async def test_a_poll_can_be_requested_without_a_hurry():
    async with watching(inventory(1)) as (watch, service, clock):
        for _ in range(3):
            watch.refresh_soon()
        watch.refresh_soon(moment(clock, -1))  # a poll has begun since
        await clock.advance(4)
        assert service.polls == 1
        await clock.advance(1)
        assert service.polls == 2
        await clock.advance(59)
        assert service.polls == 2
        service.error = ServerError("bad", status=500)
        await clock.advance(1 + 5 + 10)
        assert service.polls == 5
        watch.refresh_soon()
        await clock.advance(19)
        assert service.polls == 5


async def test_the_running_poll_knows_what_came_before_it():
    async with watching(inventory(1)) as (watch, service, clock):
        gate = service.hold()
        await clock.advance(60)
        watch.refresh_soon(moment(clock, -1))
        gate.set()
        await clock.advance(59)
        assert service.polls == 2


# --- With a client


async def test_a_client_watches_a_simulator(tmp_path):
    clock = VirtualClock(1_000_000)
    sim = Simulator(1, surveys=50, clock=clock, sleep=clock.sleep)
    async with sim.client(clock=clock, sleep=clock.sleep, random=lambda: 0.5) as client:
        async with client.watch_quotas(wall_clock=clock, cache=tmp_path / "cache") as watch:
            await watch.ready()
            assert watch.quotas == sim.inventory
            known = watch.quotas.surveys
            sim.close_quota(sim.inventory.surveys[0].quotas[0].quota_id)
            await watch.refresh()
            assert watch.quotas == sim.inventory
            # Unchanged surveys are the same objects: they were not decoded again, but for the first and the
            # last ones of a body, whose bounds are found in another way.
            still = {id(survey) for survey in watch.quotas.surveys}
            assert sum(id(survey) not in still for survey in known) <= 4
            sim.faults.add(Fault.html())
            with pytest.raises(DecodeError):
                await watch.refresh()
            sim.faults.clear()
            sim.faults.add(Fault.status(403))
            with pytest.raises(ForbiddenError):
                await watch.refresh()
            assert isinstance(watch.last_error, ForbiddenError)


async def test_changes_after_the_beginning_of_the_latest_poll_ask_for_another_one():
    async with watching(inventory(1)) as (watch, service, clock):
        await clock.advance(3)
        watch.refresh_soon(moment(clock, -1))
        await clock.advance(2)
        assert service.polls == 2


async def test_each_inventory_has_a_number_and_the_one_before_is_let_go_of_in_steps(monkeypatch):
    clock, service, let = HandClock(), FakeService(inventory(1, 2)), []

    async def noted(items) -> None:
        let.append(list(items))

    monkeypatch.setattr("sampling_async._watch.watch.let_go", noted)
    async with watch_of(service, clock) as watch:
        await watch.ready()
        first = watch.quotas.surveys
        for number in (1, 2, 3):
            assert watch.board.version == number
            assert watch.board.since == clock.now
            service.inventory = inventory(1, 2, number)
            await clock.advance(60)
    assert let[0] == [*first, *first]  # as they were given, and as they were shown


async def test_an_inventory_is_good_up_to_the_very_end_of_its_time():
    async with watching(inventory(1), max_age=200.0) as (watch, _, _):
        assert watch.judged(120.0) == "ready"
        assert watch.judged(120.1) == "stale"
        assert watch.judged(200.0, has_failed=True) == "stale"
        assert watch.judged(200.1, has_failed=True) == "failing"


@pytest.mark.parametrize(("retry_after", "due"), [(None, 0.5), (0.7, 0.7)])
async def test_a_short_pause_after_a_failure_is_not_lengthened_without_a_retry_after(retry_after, due):
    clock, service = HandClock(), FakeService(inventory(1))
    service.error = error = ServerError("bad", status=500)
    error.retry_after = retry_after
    async with watch_of(service, clock, every=0.5):
        await settle()
        assert clock.slept == [pytest.approx(due)]


async def test_a_failed_poll_is_logged_with_its_reason_and_the_next_one(caplog):
    caplog.set_level(logging.INFO, "sampling_async.watch")
    clock, service = HandClock(), FakeService(inventory(1))
    service.error = ServerError("bad", status=500)
    async with watch_of(service, clock):
        await settle()
    assert caplog.messages == ["the inventory was not read, the next poll is in 5 s: bad"]


async def test_the_first_poll_begins_at_once_whatever_the_clock_says():
    clock, service = HandClock(0.0), FakeService(inventory(1))
    watch = watch_of(service, clock)
    assert watch.held_back is False
    watch.is_over()  # nothing has begun
    async with watch_of(service, clock) as other:
        await settle()
        assert (service.polls, clock.now) == (1, 0.0)
        assert other.held_back is False
