"""Surveys that lack a value, as a watch shows them."""

from __future__ import annotations

import anyio
import doubles
import httpx
import inventories
import pytest
from watch_kit import FakeService, HandClock, ids_of, inventory, poll_of, settle, watch_of, watching

from sampling_async import DecodeError, RetryPolicy


async def test_a_watch_says_which_surveys_its_inventory_lacks():
    service = FakeService(poll_of(1, 2, lacks=((300, 1),)))
    lacks = service.inventory.left_out
    async with watch_of(service, HandClock()) as watch:
        await watch.ready()
        assert watch.quotas.left_out == lacks != ()
        watch.close_quota(1)
        assert (ids_of(watch.quotas), watch.quotas.left_out) == ([2], lacks)


async def kinds_until_now(changes) -> list[tuple[str, int]]:
    found = []
    with anyio.move_on_after(0.01):
        async for change in changes:
            found.append((change.kind, change.survey_id))
    return found


@pytest.mark.parametrize("lacks", [(200, 1), (200, None), (None, 1), (None, None)])
async def test_a_survey_that_lacks_a_value_stays_as_it_was_until_it_is_really_gone(lacks):
    async with watching(inventory(1, 2, 3)) as (watch, service, _):
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
    async with watching(inventory(1, 2, 3)) as (watch, service, _):
        service.inventory = poll_of(1, lacks=(lacks,))
        await watch.refresh()
        assert ids_of(watch.quotas) == ([1, 2] if lacks[1] != 2 else [1])


@pytest.mark.parametrize("when", ["before", "while polling", "after"])
@pytest.mark.parametrize("lacks", [(200, 1), (None, None)])
async def test_what_was_said_to_be_closed_stays_closed_in_a_survey_that_lacks_a_value(when, lacks):
    async with watching(inventory(1, 2, 3)) as (watch, service, clock):
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
