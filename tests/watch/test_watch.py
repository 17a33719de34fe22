"""A watch: polls, pauses, states, closings, and the cache."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import threading
from datetime import UTC, datetime
from math import inf
from types import SimpleNamespace

import anyio
import doubles
import httpx
import inventories
import pytest
from attrs import evolve
from watch_kit import FakeService, HandClock, ids_of, inventory, one, settle, watch_of

from sampling_async import (
    ClientClosedError,
    DecodeError,
    ForbiddenError,
    InvalidRequestError,
    OutageError,
    RetryPolicy,
    ServerError,
    TransportError,
)
from sampling_async._contract.records import leave_out
from sampling_async._pacing.loops import let_go
from sampling_async._watch import watch as _watch
from sampling_async._watch.cache import CacheFile
from sampling_async._watch.reader import PollSchedule
from sampling_async.simulator import Fault, Simulator, VirtualClock


def moment(clock: HandClock, seconds: float = 0) -> datetime:
    return datetime.fromtimestamp(clock() + seconds, UTC)


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


async def test_a_watch_says_which_surveys_its_inventory_lacks():
    clock, lacks = HandClock(), (DecodeError("$.Surveys[1].LOI", "expected a whole number, found null"),)
    async with watch_of(FakeService(leave_out(inventory(1, 2), lacks)), clock) as watch:
        await watch.ready()
        assert watch.quotas.left_out == lacks
        watch.close_quota(1)
        assert (ids_of(watch.quotas), watch.quotas.left_out) == ([2], lacks)


def poll_of(*quota_ids: int, lacks: tuple[tuple[int | None, int | None], ...] = (), **changes):
    """Return an inventory that lacks surveys; `lacks` has the ID and the wave of each."""
    errors = [DecodeError(f"$.Surveys[{at}].LOI", "expected a whole number, found null") for at in range(9)]
    return leave_out(inventory(*quota_ids, **changes), errors[: len(lacks)], lacks)


async def kinds_until_now(changes) -> list[tuple[str, int]]:
    found = []
    with anyio.move_on_after(0.01):
        async for change in changes:
            found.append((change.kind, change.survey_id))
    return found


@pytest.mark.parametrize("lacks", [(200, 1), (200, None), (None, 1), (None, None)])
async def test_a_survey_that_lacks_a_value_stays_as_it_was_until_it_is_really_gone(lacks):
    clock, service = HandClock(), FakeService(inventory(1, 2, 3))
    async with watch_of(service, clock) as watch:
        await watch.ready()
        async with watch.changes() as changes:
            assert ("synced", 0) in await kinds_until_now(changes)
            service.inventory = poll_of(1, 3, lacks=(lacks,))
            for _ in range(2):
                await watch.refresh()
                assert sorted(ids_of(watch.quotas)) == [1, 2, 3]
                assert len(watch.quotas.left_out) == 1
                assert watch.is_open(2)
            assert await kinds_until_now(changes) == []
            service.inventory = poll_of(1, 3, lacks=(lacks,), loi=77)
            await watch.refresh()
            assert await kinds_until_now(changes) == [("loi", 100), ("loi", 300)]
            service.inventory = inventory(1, 2, 3, loi=77)
            await watch.refresh()
            assert await kinds_until_now(changes) == [("loi", 200)]
            service.inventory = inventory(1, 3, loi=77)
            await watch.refresh()
            assert await kinds_until_now(changes) == [("quota_closed", 200), ("survey_closed", 200)]
            assert ids_of(watch.quotas) == [1, 3]


@pytest.mark.parametrize("lacks", [(200, 1), (200, None), (None, 2), (200, 2)])
async def test_a_survey_closes_beside_another_one_that_lacks_a_value(lacks):
    clock, service = HandClock(), FakeService(inventory(1, 2, 3))
    async with watch_of(service, clock) as watch:
        await watch.ready()
        service.inventory = poll_of(1, lacks=(lacks,))
        await watch.refresh()
        assert ids_of(watch.quotas) == ([1, 2] if lacks[1] != 2 else [1])


@pytest.mark.parametrize("when", ["before", "while polling", "after"])
@pytest.mark.parametrize("lacks", [(200, 1), (None, None)])
async def test_what_was_said_to_be_closed_stays_closed_in_a_survey_that_lacks_a_value(when, lacks):
    clock, service = HandClock(), FakeService(inventory(1, 2, 3))
    async with watch_of(service, clock) as watch:
        await watch.ready()
        if when == "before":
            assert watch.close_quota(2)
        service.inventory = poll_of(1, 3, lacks=(lacks,))
        if when == "while polling":
            gate = service.hold()
            watch.refresh_soon()
            await clock.advance(5)
            assert service.running == 1
            assert watch.close_quota(2)
            gate.set()
            await settle()
        else:
            await watch.refresh()
        if when == "after":
            assert watch.close_survey(200)
        await watch.refresh()
        assert (ids_of(watch.quotas), watch.is_open(2)) == ([1, 3], False)
        service.inventory = inventory(1, 2, 3)
        await watch.refresh()
        assert ids_of(watch.quotas) == [1, 2, 3]


@pytest.mark.parametrize(
    "nulls", [{"LOI": None}, {"LOI": None, "WaveID": None}, {"LOI": None, "SurveyID": None}, {"Quotas": None}]
)
@pytest.mark.parametrize("head", [{}, {"N": {}}])  # read in parts, and as a whole
async def test_a_survey_with_a_null_is_kept_as_it_was(nulls, head):
    other, whole = inventories.survey(SurveyID=13, Quotas=[]), inventories.survey()
    misspelled = {"SurveyId": 11} | whole | nulls
    del misspelled["SurveyID"]
    surveys = [other, whole]
    service = doubles.Service(
        lambda _: httpx.Response(200, json=head | inventories.quotas() | {"Surveys": surveys})
    )
    async with doubles.client(service) as client, client.watch_quotas() as watch:
        await watch.ready()
        for each in (whole | nulls, misspelled, whole):
            surveys = [other, each]
            quotas = await watch.refresh()
            assert [survey.survey_id for survey in quotas.surveys] == [13, 11]
            assert len(quotas.left_out) == (each is not whole)
        surveys = [other]
        assert [survey.survey_id for survey in (await watch.refresh()).surveys] == [13]


async def test_a_strict_watch_keeps_the_inventory_before_one_that_lacks_a_survey():
    body = inventories.quotas()
    service = doubles.Service(lambda _: httpx.Response(200, json=body))
    async with doubles.client(service, retry=RetryPolicy(max_attempts=1)) as client:
        async with client.watch_quotas(strict=True) as watch:
            await watch.ready()
            body["Surveys"][0]["LOI"] = None
            before = watch.quotas
            with pytest.raises(DecodeError):
                await watch.refresh()
            assert watch.quotas == before
            assert watch.last_error.path == "$.Surveys[0].LOI"


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
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock) as watch:
        await watch.ready()
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
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock, max_age=70) as watch:
        await watch.ready()
        service.error = ServerError("bad", status=500)
        await clock.advance(69)
        assert watch.status == "ready"
        await clock.advance(2)
        assert watch.status == "failing"


async def test_after_a_403_polls_are_rare_until_two_have_succeeded():
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock) as watch:
        await watch.ready()
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
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock) as watch:
        await watch.ready()
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


async def test_a_retry_after_of_a_year_is_not_kept():
    clock, service = HandClock(), FakeService(inventory(1))
    service.error = error = ServerError("bad", status=503)
    error.retry_after = 31_536_000.0
    async with watch_of(service, clock):
        await clock.advance(300)
        assert service.polls == 2


async def test_a_longer_retry_after_is_kept():
    clock, service = HandClock(), FakeService(inventory(1))
    error = ServerError("bad", status=503)
    error.retry_after = 50.0
    service.error = error
    async with watch_of(service, clock):
        await clock.advance(49)
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
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock) as watch:
        await watch.ready()
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
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock) as watch:
        await watch.ready()
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
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock) as watch:
        await watch.ready()
        service.error = ServerError("bad", status=500)
        with pytest.raises(ServerError) as caught:
            await watch.refresh()
        assert caught.value is not watch.last_error
        service.error = None
        assert ids_of(await watch.refresh()) == [1]  # without the pause for failures


async def test_a_caller_that_is_cancelled_leaves_the_others_alone():
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock) as watch:
        await watch.ready()
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
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock) as watch:
        await watch.ready()
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
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock) as watch:
        await watch.ready()
        gate = service.hold()
        await clock.advance(60)
        watch.refresh_soon(moment(clock, -1))
        gate.set()
        await clock.advance(59)
        assert service.polls == 2


# --- Closings


async def test_a_closing_takes_effect_at_once():
    clock, service = HandClock(), FakeService(inventory(1, 2, 3))
    async with watch_of(service, clock) as watch:
        assert not watch.close_quota(3)  # before the first poll, which decides
        await watch.ready()
        assert watch.close_quota(1)
        assert not watch.close_quota(1)
        assert not watch.close_quota(99)
        assert ids_of(watch.quotas) == [2, 3]
        assert watch.close_survey(200, 1)
        assert not watch.close_survey(200, 7)
        assert watch.close_survey(300)
        assert ids_of(watch.quotas) == []
        assert sorted(watch.hidden()) == [1, 2, 3]
        # A poll that began later decides.
        await watch.refresh()
        assert watch.quotas is service.inventory


async def test_a_poll_that_began_before_the_closing_does_not_open_again():
    clock, service = HandClock(), FakeService(inventory(1, 2, 3))
    async with watch_of(service, clock) as watch:
        await watch.ready()
        gate = service.hold()
        await clock.advance(60)
        assert watch.close_quota(1)
        assert watch.close_survey(200)
        gate.set()
        await settle()
        assert service.polls == 2
        assert ids_of(watch.quotas) == [3]
        await clock.advance(60)
        assert ids_of(watch.quotas) == [1, 2, 3]


async def test_only_the_closed_quotas_of_a_survey_are_gone():
    clock = HandClock()
    (first,), (second,) = inventory(1).surveys[0].quotas, inventory(2).surveys[0].quotas
    service = FakeService(evolve(inventory(1), surveys=(one(1), evolve(one(5), quotas=(first, second)))))
    async with watch_of(service, clock) as watch:
        await watch.ready()
        watch.close_quota(1)  # listed by two surveys, against the contract
        assert ids_of(watch.quotas) == [2]


async def test_the_time_of_a_closing_is_compared_with_the_polls():
    clock, service = HandClock(), FakeService(inventory(1, 2, 3))
    watch = watch_of(service, clock)
    assert not watch.close_quota(1, at=moment(clock))
    async with watch:
        await watch.ready()
        assert not watch.close_quota(1, at=moment(clock, -1))  # the poll knew of it
        assert not watch.close_survey(100, at=moment(clock, -1))
        assert watch.close_quota(1, at=moment(clock, +1))
        gate = service.hold()
        await clock.advance(60)
        assert watch.close_quota(2, at=moment(clock, -1))  # the running poll knows of it
        assert watch.close_quota(3, at=moment(clock))
        gate.set()
        await settle()
        assert ids_of(watch.quotas) == [1, 2]
        gate = service.hold()
        await clock.advance(60)
        assert watch.close_quota(2, at=moment(clock, +1))
        assert not watch.close_quota(2, at=moment(clock, -1))  # told again, and older: the newer one counts
        gate.set()
        await settle()
        assert ids_of(watch.quotas) == [1, 3]
        with pytest.raises(InvalidRequestError, match="time zone"):
            watch.close_quota(1, at=datetime(2026, 1, 1))  # noqa: DTZ001


async def test_a_closing_while_a_new_inventory_is_arranged(monkeypatch):
    clock, service = HandClock(), FakeService(inventory(*range(1, 30)))
    fill = _watch.Shown.fill

    async def slowly(shown, *arguments):
        changed = await fill(shown, *arguments)
        if shown.poll == 2:
            assert watch.close_quota(1)
            assert watch.close_survey(200)
            assert not watch.close_quota(50)
        return changed

    monkeypatch.setattr(_watch.Shown, "fill", slowly)
    async with watch_of(service, clock) as watch:
        await watch.ready()
        service.inventory = inventory(*range(1, 31))
        await watch.refresh()
        assert ids_of(watch.quotas) == list(range(3, 31))
        await watch.refresh()
        assert ids_of(watch.quotas) == list(range(1, 31))


async def test_a_closing_before_a_poll_does_not_count_while_that_poll_is_arranged(monkeypatch):
    clock, service = HandClock(), FakeService(inventory(1, 2))
    fill, told = _watch.Shown.fill, []

    async def slowly(shown, *arguments):
        changed = await fill(shown, *arguments)
        if shown.poll == 2:
            watch.close_quota(1, at=moment(clock, -1))
            watch.close_survey(200, at=moment(clock, -1))
        return changed

    monkeypatch.setattr(_watch.Shown, "fill", slowly)
    async with watch_of(service, clock) as watch, watch.changes() as changes:
        await watch.ready()
        await clock.advance(30)
        await watch.refresh()
        assert ids_of(watch.quotas) == [1, 2]
        with anyio.move_on_after(60):
            while len(told) < 5:
                change = await anext(changes)
                told.append((change.kind, change.quota_id))
    assert [each for each in told if each[0] == "quota_opened"] == [("quota_opened", 1), ("quota_opened", 2)]


async def test_closings_count_after_the_clock_was_set_back():
    clock, wall, service = HandClock(), HandClock(), FakeService(inventory(1, 2, 3))
    async with watch_of(service, clock, wall_clock=wall) as watch:
        await watch.ready()
        clock.now, wall.now = clock.now + 10, wall.now - 3600
        assert watch.close_quota(1, at=moment(wall))
        gate = service.hold()
        await clock.advance(50)
        wall.now -= 3600
        assert watch.close_quota(2, at=moment(wall))
        gate.set()
        await settle()
        assert ids_of(watch.quotas) == [1, 3]


class Odd:
    def __index__(self) -> int:
        return 1


async def test_ids_are_whole_numbers_of_any_kind(monkeypatch):
    clock, service = HandClock(), FakeService(inventory(1, 2))
    fill = _watch.Shown.fill

    async def slowly(shown, *arguments):
        if shown.poll == 2:
            watch.close_quota(Odd())
        return await fill(shown, *arguments)

    monkeypatch.setattr(_watch.Shown, "fill", slowly)
    async with watch_of(service, clock) as watch:
        await watch.ready()
        await watch.refresh()
        assert ids_of(watch.quotas) == [2]
        for wrong in ("1", None, 1.0, True, [1]):
            with pytest.raises(InvalidRequestError, match="quota_id must be a whole number"):
                watch.close_quota(wrong)
            with pytest.raises(InvalidRequestError, match="survey_id must be a whole number"):
                watch.close_survey(wrong)
        with pytest.raises(InvalidRequestError, match="wave_id must be a whole number"):
            watch.close_survey(1, "2")
        with pytest.raises(
            InvalidRequestError, match=r"^at is a datetime with a time zone, such as datetime\.now\(UTC\)$"
        ):
            watch.close_quota(1, at="2026-11-22T10:00:00Z")
        assert ids_of(watch.quotas) == [2]


async def test_a_survey_that_is_listed_twice_counts_once():
    clock, service = HandClock(), FakeService(inventory(1, 2))
    twice = evolve(one(3), quotas=one(3).quotas * 2)
    service.inventory = evolve(service.inventory, surveys=(*service.inventory.surveys, one(1, loi=99), twice))
    async with watch_of(service, clock) as watch:
        await watch.ready()
        assert watch.quotas.surveys == (one(1), one(2), twice)
        watch.close_quota(2)
        assert watch.quotas.surveys == (one(1), twice)
        watch.close_quota(3)
        assert watch.quotas.surveys == (one(1),)


# --- Held back


async def test_an_inventory_that_is_suddenly_near_empty_is_held_back_once(caplog):
    clock, service = HandClock(), FakeService(inventory(*range(1, 31)))
    async with watch_of(service, clock) as watch:
        await watch.ready()
        service.inventory = inventory(1, 2)
        await clock.advance(60)
        assert watch.held_back
        assert len(ids_of(watch.quotas)) == 30
        assert caplog.messages[-1] == "an inventory of 2 quotas is held back for one poll: there were 30"
        service.inventory = inventory(*range(1, 29))
        await clock.advance(60)
        assert not watch.held_back
        assert len(ids_of(watch.quotas)) == 28
        service.inventory = inventory(1, 2)
        await clock.advance(60)
        assert (watch.held_back, watch.age) == (True, 60)
        await clock.advance(60)
        assert not watch.held_back
        assert ids_of(watch.quotas) == [1, 2]
        service.inventory = inventory()  # two quotas may close
        await clock.advance(60)
        assert ids_of(watch.quotas) == []


# --- The cache


def cache_at(path, owner: str = "me", max_age: float = 1000) -> CacheFile:
    return CacheFile(path, owner, max_age)


async def filled(path, clock) -> None:
    service = FakeService(inventory(1, 2, 3))
    async with watch_of(service, clock, cache=cache_at(path)) as watch:
        await watch.ready()
        service.inventory = inventory(1, 2)
        await watch.refresh()


async def test_the_last_good_inventory_is_there_at_the_next_start(tmp_path):
    path, clock = tmp_path / "cache", HandClock()
    await filled(path, clock)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    began = clock()
    await clock.advance(100)
    service = FakeService(inventory(2, 3))
    gate = service.hold()
    async with watch_of(service, clock, cache=cache_at(path)) as watch:
        await watch.ready()
        assert watch.status == "stale"
        assert (watch.age, watch.since) == (100, datetime.fromtimestamp(began, UTC))
        known = watch.quotas
        assert known.surveys[0] == one(1)
        gate.set()
        await clock.advance(1)
        assert watch.status == "ready"
        assert ids_of(watch.quotas) == [2, 3]


@pytest.mark.parametrize("damage", ["cut", "altered", "foreign", "other form", "empty", "page", "bytes"])
async def test_a_cache_that_cannot_be_used_is_ignored(damage, tmp_path, caplog):
    path, clock = tmp_path / "cache", HandClock()
    await filled(path, clock)
    body = path.read_bytes()
    head, _, rest = body.partition(b"\n")
    broken = {
        "cut": body[:-200],
        "altered": body.replace(b'"LOI":10', b'"LOI":11'),
        "foreign": body,
        "other form": json.dumps(json.loads(head) | {"form": "2"}).encode() + b"\n" + rest,
        "empty": b"",
        "page": b"<html>\n</html>\n",
        "bytes": b"\xff\xfe" + body,
    }
    path.write_bytes(broken[damage])
    service = FakeService(inventory(7))
    async with watch_of(service, clock, cache=cache_at(path, "you" if damage == "foreign" else "me")) as watch:
        await watch.ready()
        assert ids_of(watch.quotas) == [7]
    assert "is not used" in caplog.text


async def test_a_cache_that_is_too_old_is_ignored(tmp_path):
    path, clock = tmp_path / "cache", HandClock()
    await filled(path, clock)
    clock.now += 1001
    service = FakeService(inventory(7))
    async with watch_of(service, clock, cache=cache_at(path)) as watch:
        await watch.ready()
        assert ids_of(watch.quotas) == [7]


async def test_a_cache_that_cannot_be_read_or_written_is_reported(tmp_path, caplog, monkeypatch):
    clock, service = HandClock(), FakeService(inventory(7))
    async with watch_of(service, clock, cache=cache_at(tmp_path)) as watch:  # a folder
        await watch.ready()
    assert "cannot be read" in caplog.text
    assert "cannot be written" in caplog.text
    assert list(tmp_path.iterdir()) == []
    async with watch_of(FakeService(inventory(7)), clock, cache=cache_at(tmp_path / "no" / "cache")) as watch:
        await watch.ready()
    assert caplog.text.count("cannot be written") == 2


async def test_what_was_closed_since_the_cache_was_written_is_not_open(tmp_path, monkeypatch):
    """Whoever tells it need not wait until the cache is loaded."""
    path, clock = tmp_path / "cache", HandClock()
    cache_at(path).save(inventory(1, 2), clock())
    await clock.advance(100)
    load, gate = CacheFile.load, threading.Event()

    def slowly(self, now):
        assert gate.wait(60)
        return load(self, now)

    monkeypatch.setattr(CacheFile, "load", slowly)
    service = FakeService(inventory(1, 2, 3, 4))
    service.error = ServerError("away", status=500)
    async with watch_of(service, clock, cache=cache_at(path)) as watch:
        await settle()
        assert not watch.close_quota(1, at=moment(clock, -50))
        assert not watch.close_quota(2, at=moment(clock, -150))  # the cache knew of it
        assert not watch.close_survey(400)
        gate.set()
        await watch.ready()
        await settle()
        assert ids_of(watch.quotas) == [2]
        service.error = None
        await watch.refresh()  # and the poll knows of all that was told before it
        assert ids_of(watch.quotas) == [1, 2, 3, 4]


async def test_a_cache_is_a_regular_file(tmp_path, caplog):
    clock = HandClock()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", f"{tmp_path}/with\0zero"):
        async with watch_of(FakeService(inventory(7)), clock, cache=cache_at(path)) as watch:
            await watch.ready()
    assert "it is no regular file" in caplog.text
    assert caplog.text.count("cannot be read") == 2
    (tmp_path / "pipe").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    await filled(tmp_path / "link", clock)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").is_file()


async def test_what_a_killed_process_has_left_is_removed(tmp_path):
    path, clock = tmp_path / "cache", HandClock()
    old, new = tmp_path / ".cache.old.sampling_async", tmp_path / ".cache.new.sampling_async"
    for each in (old, new):
        each.write_text("")
    os.utime(old, (1, 1))
    await filled(path, clock)
    assert set(tmp_path.iterdir()) == {path, new}  # another process may be writing that one


async def test_without_a_thread_the_cache_is_not_written_and_the_watch_goes_on(tmp_path, monkeypatch, caplog):
    def refused(*_):
        raise RuntimeError("can't start new thread")

    clock, service = HandClock(), FakeService(inventory(7))
    monkeypatch.setattr(_watch, "start", refused)
    async with watch_of(service, clock, cache=cache_at(tmp_path / "cache")) as watch:
        await watch.refresh()
        assert watch.status == "ready"
    assert caplog.messages[-1] == "the inventory is not written to the cache: can't start new thread"


@pytest.mark.parametrize("path", [5, b"x", ""])
async def test_a_cache_is_given_by_its_path(path):
    async with Simulator(seed=1).client() as client:
        with pytest.raises(InvalidRequestError, match="cache must be the path of a file"):
            client.watch_quotas(cache=path)


async def test_a_slow_disk_gets_some_of_the_inventories(tmp_path, monkeypatch):
    clock, service = HandClock(), FakeService(inventory(7))
    saved: list[list[int]] = []
    gate = anyio.Event()

    class Slow:
        over = gate

    monkeypatch.setattr(_watch, "start", lambda _, quotas, __: saved.append(ids_of(quotas)) or Slow)
    async with watch_of(service, clock, cache=cache_at(tmp_path / "cache")) as watch:
        await watch.refresh()
        service.inventory = inventory(8)
        await watch.refresh()
        assert saved == [[7]]
        gate.set()
        await watch.refresh()
        assert saved == [[7], [8]]


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


async def test_objects_are_let_go_one_by_one():
    items: list[object] = [object() for _ in range(100)]
    await let_go(items)
    assert items == []


@pytest.mark.parametrize(
    ("before", "after", "is_held_back"), [(20, 1, True), (19, 1, False), (30, 2, True), (30, 3, False)]
)
async def test_of_twenty_quotas_or_more_less_than_a_tenth_is_held_back(before, after, is_held_back):
    clock, service = HandClock(), FakeService(inventory(*range(1, before + 1)))
    async with watch_of(service, clock) as watch:
        await watch.ready()
        service.inventory = inventory(*range(1, after + 1))
        await clock.advance(60)
        assert watch.held_back is is_held_back


async def test_changes_after_the_beginning_of_the_latest_poll_ask_for_another_one():
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock) as watch:
        await watch.ready()
        await clock.advance(3)
        watch.refresh_soon(moment(clock, -1))
        await clock.advance(2)
        assert service.polls == 2


async def test_who_asks_without_a_hurry_shortens_no_pause_after_a_failure():
    clock, service = HandClock(), FakeService(inventory(1))
    service.error = ServerError("bad", status=500)
    async with watch_of(service, clock) as watch:
        await settle()
        await clock.advance(4.5)
        assert service.polls == 1
        watch.refresh_soon()
        await settle()
        assert service.polls == 1
        await clock.advance(0.5)
        assert service.polls == 2


async def test_the_error_of_a_poll_says_for_each_caller_what_became_of_it():
    clock, service = HandClock(), FakeService(inventory(1))
    service.error = ServerError("bad", status=500, delivery="answered")
    async with watch_of(service, clock) as watch:
        with pytest.raises(ServerError) as caught:
            await watch.refresh()
    assert caught.value.delivery == "answered"
    assert caught.value is not service.error


async def test_each_inventory_has_a_number_and_the_one_before_is_let_go_of_in_steps(monkeypatch):
    clock, service, let = HandClock(), FakeService(inventory(1, 2)), []

    async def noted(items) -> None:
        let.append(list(items))

    monkeypatch.setattr(_watch, "let_go", noted)
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
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock, max_age=200.0) as watch:
        await watch.ready()
        assert watch.judged(120.0) == "ready"
        assert watch.judged(120.1) == "stale"
        assert watch.judged(200.0, has_failed=True) == "stale"
        assert watch.judged(200.1, has_failed=True) == "failing"


def test_a_short_pause_after_a_failure_is_not_lengthened_without_a_retry_after():
    error = ServerError("bad", status=500)
    assert PollSchedule(0.5, lambda: 0.5).after_failure(error) == 0.5
    error.retry_after = 0.7
    assert PollSchedule(0.5, lambda: 0.5).after_failure(error) == 0.7


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


async def test_a_cache_that_takes_for_ever_does_not_keep_its_watch_from_ending(tmp_path, monkeypatch):
    never = anyio.Event()
    monkeypatch.setattr(_watch, "start", lambda *_: SimpleNamespace(over=never))
    monkeypatch.setattr(_watch, "_LAST_WRITE", 0.01)
    clock, service = HandClock(), FakeService(inventory(7))
    with anyio.fail_after(60):
        async with watch_of(service, clock, cache=cache_at(tmp_path / "cache")) as watch:
            await watch.refresh()
