"""An index that follows a watch, and notifications that take effect on it."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from datetime import UTC, datetime
from unittest.mock import Mock

import pytest
from attrs import evolve
from doubles import until
from panel_kit import OTHER, B, quota, sub_quota, survey
from store_kit import CLOSED, SECRET, post, read_again_soon
from watch_kit import FakeService, HandClock, ids_of, inventory, watch_of

from sampling_async import InvalidRequestError, ServerError
from sampling_async.matching import LiveIndex, MatchPolicy, QuestionKinds
from sampling_async.notifications import HandlerPolicy, Inbox, StoreError

FITS = {OTHER: 1}


def open_in(live: LiveIndex) -> list[int]:
    return sorted(live.index.quota_ids)


async def test_the_index_is_that_of_the_newest_inventory():
    clock, service = HandClock(), FakeService(inventory(1, 2))
    async with watch_of(service, clock) as watch:
        live = LiveIndex(watch, kinds=QuestionKinds.default(), policy=MatchPolicy(), rank=lambda _, __: 0)
        assert repr(live) == "<LiveIndex starting>"
        with pytest.raises(RuntimeError, match="enter the live index first"):
            await live.ready()
        with pytest.raises(RuntimeError, match="no index yet"):
            live.match(FITS)
        async with live:
            await live.ready()
            assert repr(live) == "<LiveIndex ready, 0 s old>"
            assert list(live.match(FITS).certain) == [1, 2]
            assert live.explain(FITS, 1).truth.name == "CERTAIN"
            assert live.index.policy == MatchPolicy()
            first = live.index
            service.inventory = inventory(2, 3)
            await clock.advance(60)
            await until(lambda: live.index is not first)
            assert list(live.match(FITS).certain) == [2, 3]
            assert (live.age, live.status) == (0, "ready")
            await clock.advance(10)
            assert live.age == 10


async def test_what_is_closed_at_the_watch_is_closed_at_once():
    clock, service = HandClock(), FakeService(inventory(1, 2, 3))
    async with watch_of(service, clock) as watch, LiveIndex(watch) as live:
        await live.ready()
        watch.close_quota(1)
        assert open_in(live) == [2, 3]
        watch.close_survey(200)
        assert open_in(live) == [3]
        live.index.recontact(3, ["m"])
        service.inventory = inventory(1, 2, 3, 4)
        old = live.index
        await watch.refresh()
        await until(lambda: live.index is not old)
        assert open_in(live) == [1, 2, 3, 4]
        assert live.index.recontact_lists == {3: frozenset({"m"})}


class Held:
    """Holds compilations until a test lets them go."""

    def __init__(self, monkeypatch) -> None:
        self.gate = threading.Event()
        self.begun = 0
        made = LiveIndex._made

        def slowly(live, *arguments):
            self.begun += 1
            assert self.gate.wait(60)
            return made(live, *arguments)

        monkeypatch.setattr(LiveIndex, "_made", slowly)


async def test_a_closing_during_a_compilation_counts(monkeypatch):
    clock, service = HandClock(), FakeService(inventory(1, 2))
    held = Held(monkeypatch)
    async with watch_of(service, clock) as watch, LiveIndex(watch) as live:
        await until(lambda: held.begun == 1)
        assert live.status == "starting"
        assert live.age is None
        watch.close_quota(1)
        held.gate.set()
        await live.ready()
        assert open_in(live) == [2]


async def test_a_poll_during_a_compilation_counts(monkeypatch):
    clock, service = HandClock(), FakeService(inventory(1, 2))
    held = Held(monkeypatch)
    async with watch_of(service, clock) as watch, LiveIndex(watch) as live:
        await until(lambda: held.begun == 1)
        service.inventory = inventory(2, 3)
        clock.now += 10
        await watch.refresh()
        held.gate.set()
        await live.ready()
        await until(lambda: open_in(live) == [2, 3])
        # Of an inventory that is not compiled yet, the quotas that are gone are closed at once.
        held.gate.clear()
        service.inventory = inventory(3, 4)
        clock.now += 10
        await watch.refresh()
        assert open_in(live) == [3]
        assert (live.age, watch.age) == (10, 0)
        watch.close_quota(3)
        assert open_in(live) == []
        held.gate.set()
        await until(lambda: open_in(live) == [4])


async def test_a_first_index_may_be_one_poll_behind(monkeypatch):
    clock, service = HandClock(), FakeService(inventory(1, 2))
    held = Held(monkeypatch)
    seen: list[list[int]] = []
    async with watch_of(service, clock) as watch, LiveIndex(watch) as live:
        telling = Mock(wraps=live._progress)
        telling.notify.side_effect = lambda: seen.append(open_in(live))
        monkeypatch.setattr(live, "_progress", telling)
        await until(lambda: held.begun == 1)
        service.inventory = inventory(2, 3)
        await watch.refresh()
        held.gate.set()
        await until(lambda: len(seen) == 2)
    assert seen[:2] == [[2], [2, 3]]


async def test_unchanged_surveys_are_not_compiled_again(monkeypatch):
    clock, service = HandClock(), FakeService(inventory(*range(1, 40)))
    async with watch_of(service, clock) as watch, LiveIndex(watch) as live:
        await live.ready()
        first = live.index
        changed = survey(quota([sub_quota(B)], quota_id=1), survey_id=100)
        service.inventory = evolve(service.inventory, surveys=(changed, *service.inventory.surveys[1:]))
        await watch.refresh()
        await until(lambda: live.index is not first)
        assert live.index._parts[0] is first._parts[0]
        assert len(live.match(FITS).certain) == 38


async def test_a_failing_service_leaves_the_index_and_its_age():
    clock, service = HandClock(), FakeService(inventory(1))
    async with watch_of(service, clock) as watch, LiveIndex(watch) as live:
        await live.ready()
        service.error = ServerError("bad", status=500)
        await clock.advance(1000)
        assert (live.status, live.age) == ("failing", 1000)
        assert open_in(live) == [1]


async def test_an_error_of_a_compilation_is_raised_when_the_block_is_left():
    clock, service = HandClock(), FakeService(inventory(1))

    def rank(*_):
        raise ZeroDivisionError

    async with watch_of(service, clock) as watch:
        with pytest.raises(ZeroDivisionError):
            async with LiveIndex(watch, rank=rank) as live:
                with pytest.raises(RuntimeError, match="the live index was ended by ZeroDivisionError"):
                    await live.ready()


async def test_what_the_block_raises_is_not_hidden_by_an_error_of_a_compilation():
    clock, service = HandClock(), FakeService(inventory(1))

    def rank(*_):
        raise ZeroDivisionError

    async with watch_of(service, clock) as watch:
        with pytest.raises(LookupError, match="of the block"):
            async with LiveIndex(watch, rank=rank) as live:
                with pytest.raises(RuntimeError):
                    await live.ready()
                raise LookupError("of the block")


async def test_an_inventory_that_cannot_be_compiled_leaves_the_index_before_it(caplog):
    clock, service = HandClock(), FakeService(inventory(1, 2, 3))
    async with watch_of(service, clock) as watch:
        async with LiveIndex(watch, rank=lambda survey, _: 60 // survey.loi) as live:
            await live.ready()
            service.inventory = inventory(2, 3, 4, loi=0)
            await watch.refresh()
            await until(lambda: live.last_error is not None)
            assert isinstance(live.last_error, ZeroDivisionError)
            # What is closed is closed, whether a poll or a notification says so.
            assert open_in(live) == [2, 3]
            watch.close_quota(2)
            assert open_in(live) == [3]
            await clock.advance(50)
            assert live.status == "ready"
            await clock.advance(200)
            assert (live.status, watch.status) == ("stale", "ready")
            await clock.advance(500)
            assert (live.status, watch.status) == ("failing", "ready")
            service.inventory = inventory(2, 3, 4)
            await watch.refresh()
            await until(lambda: live.status == "ready")
            assert open_in(live) == [2, 3, 4]
        assert live.status == "failing"
        assert "cannot be compiled" in caplog.text


async def test_an_index_whose_watch_has_ended_is_failing_and_closes_what_notifications_close(caplog):
    clock, service = HandClock(), FakeService(inventory(1, 2))
    with pytest.raises(MemoryError):
        async with watch_of(service, clock) as watch, LiveIndex(watch) as live:
            await live.ready()
            service.error = MemoryError("no more")
            await clock.advance(60)
            assert (watch.status, live.status) == ("failing", "failing")
            watch.close_quota(1)
            assert open_in(live) == [2]
            assert "the watch was ended by MemoryError" in caplog.text


async def test_an_index_needs_a_watch_that_was_entered():
    watch = watch_of(FakeService(inventory(1)), HandClock())
    with pytest.raises(RuntimeError, match="enter the watch first"):
        async with LiveIndex(watch):
            pytest.fail("was entered")


async def test_a_list_of_a_quota_that_is_gone_for_good_is_dropped():
    clock, service = HandClock(), FakeService(inventory(1, 2))
    async with watch_of(service, clock) as watch, LiveIndex(watch) as live:
        await live.ready()
        live.index.recontact(1, ["m"])
        kept = []
        for number in (3, 4, 5):
            service.inventory, old = inventory(2, number), live.index
            await watch.refresh()
            await until(lambda old=old: live.index is not old)
            kept.append(set(live.index.recontact_lists))
        assert kept == [{1}, set(), set()]


async def test_a_watch_that_ends_before_the_first_index():
    clock, service = HandClock(), FakeService(inventory(1))
    service.error = ZeroDivisionError("oops")
    with pytest.raises(ZeroDivisionError):
        async with watch_of(service, clock) as watch, LiveIndex(watch) as live:
            with pytest.raises(RuntimeError, match="the live index has ended"):
                await live.ready()
            assert live.status == "failing"


# --- Notifications


def inbox_at(path, clock) -> Inbox:
    return Inbox(path / "inbox.db", secrets=SECRET, clock=clock, handling=HandlerPolicy(poll=0.001))


def status(clock: HandClock, quota_id: int, *, is_live: bool, seconds: float = 0) -> dict[str, object]:
    at = datetime.fromtimestamp(clock() + seconds, UTC)
    return {"QuotaID": quota_id, "IsLive": is_live, "UpdateDateTimeUTC": at.isoformat()}


async def test_notifications_take_effect(tmp_path):
    clock, service = HandClock(), FakeService(inventory(1, 2, 3))
    async with watch_of(service, clock) as watch, LiveIndex(watch) as live, inbox_at(tmp_path, clock) as inbox:
        await live.ready()
        async with live.follow(inbox):
            await clock.advance(10)
            await post(inbox, "quota_status", status(clock, 1, is_live=False))
            await until(lambda: open_in(live) == [2, 3])
            await post(inbox, "survey_closed", CLOSED | {"SurveyID": 200, "WaveId": 1})
            await until(lambda: open_in(live) == [3])
            assert service.polls == 1
            gate = service.hold()
            # The service's own time of this is before the poll, so the watch polls to make sure.
            await post(inbox, "quota_status", status(clock, 3, is_live=False, seconds=-60))
            await until(lambda: service.polls == 2)
            assert open_in(live) == []
            gate.set()


async def test_a_closing_whose_time_cannot_be_read_takes_effect(tmp_path):
    clock, service = HandClock(), FakeService(inventory(1, 2, 3))
    async with watch_of(service, clock) as watch, LiveIndex(watch) as live, inbox_at(tmp_path, clock) as inbox:
        await live.ready()
        async with live.follow(inbox):
            await clock.advance(10)
            for moment in ("soon", "later"):
                await post(inbox, "survey_closed", {"SurveyID": 200, "WaveId": 1, "DateTime": moment})
            await until(lambda: open_in(live) == [1, 3])
            unclear = {"UpdateDateTimeUTC": "soon"}
            await post(inbox, "quota_status", status(clock, 3, is_live=False) | unclear)
            await until(lambda: open_in(live) == [1])


async def test_a_notification_before_the_poll_has_no_effect(tmp_path):
    clock, service = HandClock(), FakeService(inventory(1, 2, 3))
    async with inbox_at(tmp_path, clock) as inbox:
        await post(inbox, "quota_status", status(clock, 1, is_live=False))
        await post(inbox, "quota_status", status(clock, 3, is_live=True))
        await clock.advance(10)
        async with watch_of(service, clock) as watch, LiveIndex(watch) as live:
            await live.ready()
            async with live.follow(inbox) as followed:
                await until(lambda: followed.after == 2)
                assert open_in(live) == [1, 2, 3]
                await clock.advance(59)
                assert service.polls == 1


async def test_a_quota_that_is_live_again_is_requested(tmp_path):
    clock, service = HandClock(), FakeService(inventory(1, 2))
    async with watch_of(service, clock) as watch, LiveIndex(watch) as live, inbox_at(tmp_path, clock) as inbox:
        await live.ready()
        async with live.follow(inbox) as followed:
            await clock.advance(30)
            service.inventory = inventory(1, 2, 3)
            await post(inbox, "quota_status", status(clock, 3, is_live=True))
            await until(lambda: open_in(live) == [1, 2, 3])
            # A status that is older than another one is stale.
            await post(inbox, "quota_status", status(clock, 3, is_live=False, seconds=-60))
            await until(lambda: followed.after == 2)
            assert open_in(live) == [1, 2, 3]


async def test_a_poll_that_began_before_the_notification_does_not_open_again(tmp_path):
    clock, service = HandClock(), FakeService(inventory(1, 2))
    async with watch_of(service, clock) as watch, LiveIndex(watch) as live, inbox_at(tmp_path, clock) as inbox:
        await live.ready()
        async with live.follow(inbox):
            gate = service.hold()
            await clock.advance(60)
            clock.now += 1
            await post(inbox, "quota_status", status(clock, 1, is_live=False))
            await until(lambda: open_in(live) == [2])
            first = live.index
            gate.set()
            await until(lambda: live.index is not first)
            assert open_in(live) == [2]
            assert ids_of(watch.quotas) == [2]
            first = live.index
            await clock.advance(60)
            await until(lambda: live.index is not first)
            assert open_in(live) == [1, 2]


async def test_a_quota_that_is_said_to_be_live_and_is_open_costs_no_poll(tmp_path):
    clock, service = HandClock(), FakeService(inventory(1, 2))
    async with watch_of(service, clock) as watch, LiveIndex(watch) as live, inbox_at(tmp_path, clock) as inbox:
        await live.ready()
        async with live.follow(inbox) as followed:
            await clock.advance(30)
            for seconds in range(5):
                await post(inbox, "quota_status", status(clock, 1, is_live=True, seconds=seconds))
            await post(inbox, "quota_status", status(clock, 9, is_live=True, seconds=-86_400))
            await until(lambda: followed.after == 6)
            await clock.advance(10)
            assert service.polls == 1


async def test_a_survey_can_be_closed_a_second_time(tmp_path):
    clock, service = HandClock(), FakeService(inventory(1, 2))
    async with watch_of(service, clock) as watch, LiveIndex(watch) as live, inbox_at(tmp_path, clock) as inbox:
        await live.ready()
        async with live.follow(inbox):
            for wave, moment in ((1, "2026-11-22 10:00:00"), (0, "2026-11-22 11:00:00")):
                clock.now += 10
                closed = CLOSED | {"SurveyID": 100, "WaveId": wave, "DateTime": moment}
                await post(inbox, "survey_closed", closed)
                await until(lambda: open_in(live) == [2])
                clock.now += 10
                first = live.index
                await watch.refresh()
                await until(lambda first=first: live.index is not first)
                assert open_in(live) == [1, 2]


@pytest.mark.parametrize("after", ["0", None, 1.5, -1])
async def test_following_checks_its_arguments(tmp_path, after):
    clock = HandClock()
    async with watch_of(FakeService(inventory(1)), clock) as watch, LiveIndex(watch) as live:
        with pytest.raises(InvalidRequestError, match="follow takes an Inbox, not a str"):
            live.follow("inbox.db")
        with pytest.raises(InvalidRequestError, match="after must be a whole number"):
            live.follow(inbox_at(tmp_path, clock), after=after)


async def test_a_store_that_cannot_be_read_is_tried_again(tmp_path, monkeypatch, caplog):
    clock, service = HandClock(), FakeService(inventory(1, 2))
    read_again_soon(monkeypatch)
    async with watch_of(service, clock) as watch, LiveIndex(watch) as live, inbox_at(tmp_path, clock) as inbox:
        await live.ready()
        read, failures = inbox.store.facts, [StoreError("locked")]

        def failing(**arguments):
            if failures:
                raise failures.pop()
            return read(**arguments)

        monkeypatch.setattr(inbox.store, "facts", failing)
        async with live.follow(inbox):
            await post(inbox, "survey_closed", CLOSED | {"SurveyID": 100, "WaveId": None, "DateTime": None})
            await until(lambda: open_in(live) == [2])
    assert "tried again: locked" in caplog.text


async def test_a_damaged_closing_is_left_out_and_a_poll_decides(tmp_path, caplog):
    clock, service = HandClock(), FakeService(inventory(1, 2, 3))
    async with watch_of(service, clock) as watch, LiveIndex(watch) as live, inbox_at(tmp_path, clock) as inbox:
        await live.ready()
        await clock.advance(30)
        for quota_id in (1, 2):
            await post(inbox, "quota_status", status(clock, quota_id, is_live=False))
        with closing(sqlite3.connect(inbox.store.path)) as database, database:
            database.execute("UPDATE facts SET fields = '[' WHERE id = 1")
        service.inventory = inventory(3)
        async with live.follow(inbox) as followed:
            await until(lambda: followed.after == 2)
            await until(lambda: open_in(live) == [3])
    assert "it is in fact 1" in caplog.text
    assert service.polls == 2


@pytest.mark.parametrize("zone", ["", "Z", "+00:00"])
async def test_times_without_a_zone_are_utc(tmp_path, zone):
    clock, service = HandClock(), FakeService(inventory(1, 2))
    async with watch_of(service, clock) as watch, LiveIndex(watch) as live, inbox_at(tmp_path, clock) as inbox:
        await live.ready()
        async with live.follow(inbox):
            await clock.advance(10)
            before = datetime.fromtimestamp(clock() - 60, UTC).isoformat().removesuffix("+00:00") + zone
            await post(inbox, "survey_closed", CLOSED | {"SurveyID": 100, "WaveId": 1, "DateTime": before})
            await until(lambda: service.polls == 2)  # it is from before the first poll
