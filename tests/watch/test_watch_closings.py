"""Closings that somebody tells a watch, and inventories that it holds back."""

from __future__ import annotations

from datetime import datetime

import anyio
import pytest
from attrs import evolve
from watch_kit import (
    FakeService,
    HandClock,
    after_the_second_is_arranged,
    ids_of,
    inventory,
    moment,
    one,
    settle,
    watch_of,
    watching,
)

from sampling_async import InvalidRequestError

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
    async with watching(inventory(1, 2, 3)) as (watch, service, clock):
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

    def close() -> None:
        assert watch.close_quota(1)
        assert watch.close_survey(200)
        assert not watch.close_quota(50)

    after_the_second_is_arranged(monkeypatch, close)
    async with watch_of(service, clock) as watch:
        await watch.ready()
        service.inventory = inventory(*range(1, 31))
        await watch.refresh()
        assert ids_of(watch.quotas) == list(range(3, 31))
        await watch.refresh()
        assert ids_of(watch.quotas) == list(range(1, 31))


async def test_a_closing_before_a_poll_does_not_count_while_that_poll_is_arranged(monkeypatch):
    clock, service = HandClock(), FakeService(inventory(1, 2))
    told = []

    def close() -> None:
        watch.close_quota(1, at=moment(clock, -1))
        watch.close_survey(200, at=moment(clock, -1))

    after_the_second_is_arranged(monkeypatch, close)
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
    after_the_second_is_arranged(monkeypatch, lambda: watch.close_quota(Odd()))
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


@pytest.mark.parametrize("then", [(7,), ()])
async def test_a_first_inventory_without_any_quota_is_looked_at_again_in_five_seconds(then):
    clock, service = HandClock(), FakeService(inventory())
    async with watch_of(service, clock) as watch:
        await settle()
        assert (watch.status, watch.held_back) == ("starting", True)
        service.inventory = inventory(*then)
        await clock.advance(4.9)
        assert service.polls == 1
        await clock.advance(0.2)
        assert (watch.status, watch.held_back, service.polls) == ("ready", False, 2)
        assert ids_of(watch.quotas) == list(then)


async def test_an_inventory_that_is_suddenly_near_empty_is_held_back_once(caplog):
    async with watching(inventory(*range(1, 31))) as (watch, service, clock):
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


# --- With a client


@pytest.mark.parametrize(
    ("before", "after", "is_held_back"), [(20, 1, True), (19, 1, False), (30, 2, True), (30, 3, False)]
)
async def test_of_twenty_quotas_or_more_less_than_a_tenth_is_held_back(before, after, is_held_back):
    async with watching(inventory(*range(1, before + 1))) as (watch, service, clock):
        service.inventory = inventory(*range(1, after + 1))
        await clock.advance(60)
        assert watch.held_back is is_held_back
