"""What is shown of an inventory: what a poll gave, without what was told to be closed since."""

from __future__ import annotations

import doubles
import pytest
from panel_kit import NOW, A, quota, sub_quota, survey
from watch_kit import FakeService, HandClock, inventory, watch_of

from sampling_async import Quotas
from sampling_async._watch.shown import Closings, Shown


def of_two(survey_id: int, *quota_ids: int, wave: int = 1):
    quotas = [quota([sub_quota(A)], quota_id=quota_id) for quota_id in quota_ids]
    return survey(*quotas, survey_id=survey_id, wave_id=wave)


async def shown_of(closings: Closings, *surveys) -> Shown:
    shown = Shown(Quotas(1, NOW, surveys), 1, 0.0)
    await shown.fill(closings, None)
    return shown


@pytest.mark.parametrize("what", [7, (70, 1), (70, None)])
def test_of_two_closings_of_one_thing_the_later_counts(what):
    closings = Closings()
    for begun, later in ((0, 0), (3, 3), (1, 3), (5, 5)):
        closings.close(what, begun)
        assert {**closings.quotas, **closings.surveys} == {what: later}
        assert closings.since(later).quotas.keys() | closings.since(later).surveys.keys() == {what}
        assert not closings.since(later + 1).quotas
        assert not closings.since(later + 1).surveys


async def test_of_several_waves_those_that_look_different_are_reported():
    closings = Closings()
    shown = await shown_of(closings, of_two(70, 1, wave=1), of_two(70, 2, wave=2), of_two(80, 3))
    closings.close((70, 1), 1)
    assert list(shown.hide(shown.about((70, 1)), closings)) == [(70, 1)]
    closings.close((70, None), 1)
    assert shown.about((70, None)) == ((70, 1), (70, 2))
    assert list(shown.hide(shown.about((70, None)), closings)) == [(70, 2)]  # the first one was closed before
    assert shown.hide(shown.about((70, None)), closings) == {}
    assert list(shown.view) == [(80, 1)]
    assert sorted(shown.hidden(closings)) == [1, 1, 2]
    assert shown.about((70, 9)) == shown.about(99) == ()


async def test_a_survey_of_which_a_quota_is_closed_is_shown_without_it():
    closings = Closings()
    shown = await shown_of(closings, of_two(70, 1, 2))
    assert shown.quotas() is shown.given
    closings.close(1, 1)
    assert list(shown.hide(shown.about(1), closings)) == [(70, 1)]
    assert [each.quota_id for each in shown.view[70, 1].quotas] == [2]
    assert shown.size() == 1
    assert shown.quotas().surveys == tuple(shown.view.values())
    closings.close(2, 1)
    shown.hide(shown.about(2), closings)
    assert (shown.view, shown.size()) == ({}, 0)


async def test_a_quota_is_open_while_it_is_shown():
    service, clock = FakeService(inventory(1, 2)), HandClock()
    service.inventory = Quotas(1, NOW, (*inventory(1).surveys, of_two(200, 2, 3)))
    async with watch_of(service, clock) as watch:
        assert not watch.is_open(1)
        assert watch.hidden() == []
        await watch.ready()
        assert [watch.is_open(quota_id) for quota_id in (1, 2, 3, 4)] == [True, True, True, False]
        assert watch.close_quota(2)
        assert watch.close_survey(100)
        assert [watch.is_open(quota_id) for quota_id in (1, 2, 3, 4)] == [False, False, True, False]
        assert sorted(watch.hidden()) == [1, 2]


async def test_what_is_equal_by_value_has_not_changed():
    before = await shown_of(Closings(), of_two(70, 1, 2), of_two(80, 3), of_two(90, 4))
    now = Shown(Quotas(1, NOW, (of_two(70, 1, 2), of_two(80, 5), before.view[90, 1])), 2, 0.0)
    assert list(await now.fill(Closings(), before)) == [(80, 1)]


def test_a_survey_of_which_nothing_is_closed_is_the_very_same():
    whole = of_two(70, 1, 2)
    assert Closings({9: 1}).left_of(whole) is whole
    assert Closings({}, {(80, 1): 1}).left_of(whole) is whole
    assert Closings({1: 1, 2: 1}).left_of(whole) is None


async def test_others_get_turns_by_the_number_of_quotas(monkeypatch):
    steps = doubles.steps_of_turns(monkeypatch)
    await shown_of(Closings(), of_two(70, 1, 2), of_two(80, 3))
    assert steps == [3, 2]


async def test_a_survey_without_quotas_is_closed_too():
    closings = Closings()
    shown = await shown_of(closings, of_two(70), of_two(80, 3))
    closings.close((70, 1), 1)
    assert list(shown.hide(shown.about((70, 1)), closings)) == [(70, 1)]
    assert [each.survey_id for each in shown.quotas().surveys] == [80]


async def test_of_a_survey_that_is_listed_twice_only_the_first_listing_is_anywhere(caplog):
    service, clock = FakeService(inventory(1)), HandClock()
    service.inventory = Quotas(1, NOW, (of_two(70, 1), of_two(70, 2), of_two(80, 3)))
    async with watch_of(service, clock) as watch:
        await watch.ready()
        for _ in range(2):
            assert [each.survey_id for each in watch.quotas.surveys] == [70, 80]
            assert watch.given is watch.quotas
            assert [watch.is_open(quota_id) for quota_id in (1, 2, 3)] == [True, False, True]
            await clock.advance(60)
        assert watch.close_quota(1)
        assert not watch.close_quota(2)
        assert [each.survey_id for each in watch.quotas.surveys] == [80]
    assert caplog.messages == ["surveys that are listed twice: 1; of each, the first listing counts"]
