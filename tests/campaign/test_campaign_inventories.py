"""Campaigns and what inventories say: nothing at all, rooms of surveys, waves, other needs each morning."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pyarrow as pa
import pytest
from attrs import evolve
from panel_kit import GENDER, MALE, NOW, all_of, quota, row, sub_quota, survey

from sampling_async import InvalidRequestError, Price, Quotas, ResultCode
from sampling_async.campaign import Campaign
from sampling_async.matching import Allocate, LiveIndex
from sampling_async.simulator import Fault, SimulatedMember, Simulator

FEMALE = MALE + 1
PANEL = pa.table({"member_code": [f"m{number}" for number in range(30)], str(GENDER): [MALE] * 30})
EMPTY = b'{"Surveys":[],"CountryID":1,"CacheExpires":"2026-11-30T00:00:00Z"}'


def of(survey_id: int, *quota_ids: int, wave=1, price=1.0, needs=100, answer=MALE):
    open_to = evolve(sub_quota(row(GENDER, answer)), max_target_completes=1000)
    quotas = [quota([open_to], quota_id=each, remaining=needs) for each in quota_ids]
    more = {"price": Price(price, 1), "ir": 100, "estimated_completes_remaining": needs}
    return survey(*quotas, survey_id=survey_id, wave_id=wave, **more)


@asynccontextmanager
async def serving(*surveys, panel=PANEL):
    answers = zip(panel.column(0).to_pylist(), panel.column(1).to_pylist(), strict=True)
    members = [SimulatedMember(code, {GENDER: answer}) for code, answer in answers]
    simulator = Simulator(members=members, inventory=Quotas(1, NOW, surveys))
    async with simulator.client() as client:
        yield simulator, client


# --- Nothing at all


async def test_a_first_inventory_without_any_quota_is_looked_at_again_and_costs_no_pair(tmp_path):
    async with serving(of(1, 11)) as (simulator, client):
        campaign = Campaign(client, PANEL, ledger=tmp_path / "l", allocate=Allocate(1))
        assert (await campaign.plan()).pairs == 30
        simulator.faults.add(Fault.body(EMPTY).on("get_quotas", times=1))
        async with client.watch_quotas(every=0.2) as watch, LiveIndex(watch) as live:
            await live.ready()
            campaign = Campaign(client, PANEL, live, ledger=tmp_path / "l", allocate=Allocate(1))
            await all_of(campaign.run())
        assert (await campaign.summary()).pairs.invited == 30


async def test_nothing_is_planned_over_an_inventory_without_any_quota_and_the_plan_before_it_stays(tmp_path):
    async with serving(of(1, 11)) as (simulator, client):
        campaign = Campaign(client, PANEL, ledger=tmp_path / "l", allocate=Allocate(1))
        simulator.faults.add(Fault.body(EMPTY).on("get_quotas", times=2))
        with pytest.raises(InvalidRequestError, match="has no quota that is open, so nothing is planned"):
            await campaign.plan()
        simulator.faults.clear()
        assert (await campaign.plan()).pairs == 30
        simulator.faults.add(Fault.body(EMPTY).on("get_quotas", times=1))
        with pytest.raises(InvalidRequestError, match="has no quota that is open"):
            await campaign.top_up()
        assert (await campaign.summary()).pairs.pending == 30


# --- Rooms


@pytest.mark.parametrize("given", [True, False])
async def test_replacements_take_no_more_than_a_survey_has_room_for(tmp_path, given):
    second = evolve(of(2, 21, 22), estimated_completes_remaining=100 if given else 5)
    allocate = Allocate(1, survey_room={2: 5} if given else None)
    async with serving(of(1, 11, price=9.0), second) as (simulator, client):
        campaign = Campaign(client, PANEL, ledger=tmp_path / "l", allocate=allocate)
        await campaign.plan()
        simulator.close_quota(11)
        await all_of(campaign.run())
        summary = await campaign.summary()
    assert (summary.pairs.planned, summary.pairs.invited) == (35, 5)


async def test_the_room_of_a_quota_counts_what_earlier_plans_have_invited(tmp_path):
    now, asked = [1_700_000_000.0], set()
    async with serving(of(1, 11)) as (_, client):
        for day, needs in enumerate((10, 6, 3)):
            inventory = Quotas(1, NOW, (of(1, 11, needs=needs), of(2, *((21,) if not day else ()))))
            campaign = Campaign(
                client,
                PANEL,
                inventory,
                ledger=tmp_path / "l",
                allocate=Allocate(1),
                wall_clock=lambda: now[0],
            )
            plan = await (campaign.top_up() if day else campaign.plan())
            run = campaign.run()
            asked |= {outcome.member_code for outcome in await all_of(run)}
            assert run.members == len(asked)  # each once, also who gets something in several plans
            now[0] += 90_000
        fills = {each.quota_id: each for each in (await campaign.summary()).quotas}
    assert (plan.pairs, plan.room) == (3, 3)
    assert (fills[11].invited, fills[11].room) == (19, 19)
    assert fills[21].room == 100  # of the first plan alone


async def test_invites_of_a_quota_that_has_left_the_inventory_count_once_against_its_survey(tmp_path):
    now = [1_700_000_000.0]
    nights = (
        ((of(3, 1, 2),), {1: 0, 2: 10}, PANEL.slice(0, 10)),
        ((of(3, 1), of(5, 9, price=9.0)), {1: 10, 9: 10}, PANEL.slice(10, 10)),
    )
    for surveys, room, members in nights:
        async with serving(*surveys) as (simulator, client):
            allocate = Allocate(1, room=room, survey_room={3: 20})
            campaign = Campaign(
                client, members, ledger=tmp_path / "l", allocate=allocate, wall_clock=lambda: now[0]
            )
            await (campaign.top_up() if 9 in room else campaign.plan())
            if 9 in room:
                simulator.close_quota(9)
            await all_of(campaign.run())
            now[0] += 60
    fills = {each.quota_id: each.invited for each in (await campaign.summary()).quotas}
    assert fills == {1: 10, 2: 10, 9: 0}


# --- Waves


async def test_a_top_up_gives_the_next_wave_of_a_survey_to_those_who_have_the_one_before(tmp_path):
    now = [1_700_000_000.0]
    for wave in (1, 2, 2):
        inventory = of(7, 10 + wave, wave=wave)
        async with serving(inventory) as (_, client):
            campaign = Campaign(
                client, PANEL, ledger=tmp_path / "l", allocate=Allocate(1), wall_clock=lambda: now[0]
            )
            plan = await (campaign.plan() if wave == 1 else campaign.top_up())
            await all_of(campaign.run())
            now[0] += 90_000
        assert plan.pairs == (0 if plan.number == 3 else 30)


async def test_the_cap_of_one_wave_closes_no_other(tmp_path):
    answers = [MALE] * 15 + [FEMALE] * 15
    panel = PANEL.set_column(1, str(GENDER), pa.array(answers))
    surveys = of(7, 11), of(7, 12, wave=2, answer=FEMALE)
    async with serving(*surveys, panel=panel) as (simulator, client):
        simulator.faults.add(
            Fault.refusal(ResultCode.SURVEY_COMPLETES_CAP_ACHIEVED).on("bulk_invite", quota_id=11)
        )
        campaign = Campaign(client, panel, ledger=tmp_path / "l", allocate=Allocate(1))
        await campaign.plan()
        await all_of(campaign.run())
        fills = {each.quota_id: each for each in (await campaign.summary()).quotas}
    assert (fills[11].invited, fills[11].closed) == (0, "SURVEY_COMPLETES_CAP_ACHIEVED")
    assert (fills[12].invited, fills[12].closed) == (15, None)
