"""What a campaign does after an answer, against a simulator that refuses."""

from __future__ import annotations

import time
from collections import Counter

import anyio
import pytest
from panel_kit import AGES, all_of, campaign_of, holds, planned_campaign, sql

from sampling_async import ForbiddenError, InvalidRequestError, OutagePolicy, RetryPolicy
from sampling_async.campaign import Campaign, Lesson, erase_from_ledger
from sampling_async.matching import LiveIndex
from sampling_async.simulator import Fault

# --- What it learns


def pairs_by_state(path, quota_id):
    return dict(sql(path, "SELECT state, count(*) FROM pairs WHERE quota = ? GROUP BY state", quota_id))


async def test_a_full_quota_is_requested_once_and_its_members_get_their_next_best(sim, tmp_path):
    async with planned_campaign(sim, tmp_path, max_concurrency=1) as campaign:
        path = tmp_path / "run.ledger"
        busiest, planned = sql(path, "SELECT quota, count(*) FROM pairs GROUP BY quota ORDER BY 2 DESC")[0]
        sim.faults.add(Fault.refusal(28).on("bulk_invite", quota_id=busiest))
        outcomes = await all_of(campaign.run())
        summary = await campaign.summary()
    # One job more than can run is drawn before the first answer.
    assert sum(o.quota_id == busiest for o in outcomes) <= 2 < planned
    states = pairs_by_state(path, busiest)
    assert states["skipped"] >= planned - 2
    assert summary.skipped["QUOTA_FULL"] >= states["skipped"]
    assert next(each for each in summary.quotas if each.quota_id == busiest).closed == "QUOTA_FULL"
    replaced = sql(path, "SELECT count(*) FROM pairs WHERE rank > 3 OR turn > 1")[0][0]
    assert replaced > 0
    assert summary.pairs.planned > planned
    holds(sim, summary, outcomes)


async def test_nothing_more_is_requested_for_a_blocked_member(sim, tmp_path):
    async with planned_campaign(sim, tmp_path) as campaign:
        path = tmp_path / "run.ledger"
        ((code,),) = sql(path, "SELECT code FROM members ORDER BY id LIMIT 1")
        sim.faults.add(Fault.refusal(14).on("bulk_invite", member_code=code))
        await all_of(campaign.run())
    assert sql(path, "SELECT closed FROM members WHERE code = ?", code) == [("MEMBER_BLOCKED",)]
    assert len(sim.ledger.requests(member_code=code)) == 1
    turns = sql(path, "SELECT max(turn) FROM pairs JOIN members AS m ON m.id = member WHERE m.code = ?", code)
    assert turns == [(1,)]


async def test_a_technical_error_is_requested_again_and_ends_after_three(sim, tmp_path):
    async with planned_campaign(sim, tmp_path, retry_seconds=0.01) as campaign:
        path = tmp_path / "run.ledger"
        (once,), (always,) = sql(path, "SELECT DISTINCT quota FROM pairs ORDER BY quota LIMIT 2")
        sim.faults.add(Fault.refusal(36).on("bulk_invite", quota_id=once, times=1))
        sim.faults.add(Fault.refusal(36).on("bulk_invite", quota_id=always))
        outcomes = await all_of(campaign.run())
        summary = await campaign.summary()
    assert sql(path, "SELECT DISTINCT tries, code FROM pairs WHERE quota = ? AND state = 'rejected'", always)
    assert {tries for (tries,) in sql(path, "SELECT tries FROM pairs WHERE quota = ?", always)} == {3}
    assert 36 not in {code for (code,) in sql(path, "SELECT code FROM pairs WHERE quota = ?", once)}
    holds(sim, summary)
    asked = [o for o in outcomes if o.quota_id == always]
    assert len(asked) == 3 * len({o.member_code for o in asked})


async def test_each_pair_that_the_service_saw_counts_as_requested(sim, tmp_path):
    """One quota answers with code 36 and then closes, while its pairs wait for another try."""
    async with sim.client() as client, client.watch_quotas(600) as watch:
        async with LiveIndex(watch, kinds=AGES) as live:
            await live.ready()
            campaign = campaign_of(sim, client, tmp_path, inventory=live, retry_seconds=0.01)
            await campaign.plan()
            path = tmp_path / "run.ledger"
            query = "SELECT quota FROM pairs GROUP BY quota ORDER BY count(*) DESC LIMIT 1"
            ((busiest,),) = sql(path, query)
            sim.faults.add(Fault.refusal(36).on("bulk_invite", quota_id=busiest))
            async with campaign.run() as run:
                async for outcome in run:
                    if outcome.quota_id == busiest:
                        watch.close_quota(busiest)
            summary = await campaign.summary()
    requests = sim.ledger.requests(endpoint="bulk_invite")
    seen = {(each.member_code, quota_id) for each in requests for quota_id in each.quota_ids}
    assert summary.asked == len(seen)
    assert sum(each.pairs for each in summary.codes) == len(seen)
    assert not summary.pairs.pending
    states = sql(path, "SELECT DISTINCT state, code, tries FROM pairs WHERE quota = ? AND tries", busiest)
    assert states == [("rejected", 36, 1)]
    holds(sim, summary)


async def test_a_pair_that_waits_for_another_try_was_requested_and_stays_so_in_a_new_plan(sim, tmp_path):
    path = tmp_path / "run.ledger"
    async with planned_campaign(sim, tmp_path) as campaign:
        assert (await campaign.summary()).asked == 0
        ((member, quota),) = sql(path, "SELECT member, quota FROM pairs LIMIT 1")
        which = "member = ? AND quota = ?"
        sql(path, f"UPDATE pairs SET code = 36, tries = 1 WHERE {which}", member, quota)
        assert (await campaign.summary()).asked == 1
        await campaign.top_up()
        summary = await campaign.summary()
    assert (summary.asked, summary.pairs.rejected) == (1, 1)
    query = f"SELECT state, code, reason FROM pairs WHERE plan = 1 AND {which}"
    assert sql(path, query, member, quota) == [("rejected", 36, "planned anew")]


async def test_the_table_of_codes_can_be_changed(sim, tmp_path):
    async with planned_campaign(
        sim, tmp_path, max_concurrency=1, lessons={28: Lesson.PAIR, 77: Lesson.STOP}
    ) as campaign:
        path = tmp_path / "run.ledger"
        busiest, planned = sql(path, "SELECT quota, count(*) FROM pairs GROUP BY quota ORDER BY 2 DESC")[0]
        sim.faults.add(Fault.refusal(28).on("bulk_invite", quota_id=busiest))
        outcomes = await all_of(campaign.run())
    assert sum(o.quota_id == busiest for o in outcomes) >= planned
    with pytest.raises(InvalidRequestError, match="a Lesson, such as"):
        Campaign(None, ledger=path, lessons={28: "quota"})


async def test_a_code_that_concerns_the_panel_stops_the_campaign(sim, tmp_path):
    async with planned_campaign(sim, tmp_path, max_concurrency=1) as campaign:
        sim.faults.add(Fault.refusal(4).on("bulk_invite"))
        async with campaign.run() as run:
            outcomes = [outcome async for outcome in run]
        assert "PANEL_NOT_ES_ENABLED (4)" in run.reason
        assert len(sim.ledger.requests(endpoint="bulk_invite")) <= 3
        assert len(outcomes) < 20
        summary = await campaign.summary()
        assert (summary.state, summary.reason) == ("stopped", run.reason)
        assert summary.pairs.pending > 0
        sim.faults.clear()
        await all_of(campaign.run())
        holds(sim, await campaign.summary())


async def test_the_invites_of_a_ledger_are_those_that_were_made_but_of_erased_members(sim, tmp_path):
    async with planned_campaign(sim, tmp_path, max_concurrency=2) as campaign:
        seen = []
        async with campaign.run() as run:
            async for outcome in run:
                seen.append(outcome)
                if len(seen) > 40:
                    break
        # What was made, and not seen before the run was left, is there too.
        there = [outcome async for outcome in campaign.invites()]
        pairs = Counter((each.member_code, each.quota_id) for each in there)
        assert pairs == Counter(sim.ledger.by_pair())
        made = {(each.member_code, each.quota_id): each.invite for each in there}
        assert all(made[each.member_code, each.quota_id] == each.invite for each in seen if each.invite)
        assert all(each.replayed and each.status == "invited" for each in there)
        assert erase_from_ledger(tmp_path / "run.ledger", there[0].member_code)
        left = [outcome async for outcome in Campaign(None, ledger=tmp_path / "run.ledger").invites()]
    assert left == [each for each in there if each.member_code != there[0].member_code]


@pytest.mark.parametrize("fault", [Fault.status(400, result_code=3), Fault.refusal(3)])
async def test_what_is_in_flight_when_the_panel_is_refused_is_requested_by_the_next_run(sim, tmp_path, fault):
    async with sim.client(max_concurrency=4) as client:
        campaign = campaign_of(sim, client, tmp_path)
        plan = await campaign.plan()
        async with campaign.run() as run:
            async for outcome in run:
                if outcome.invite is not None:
                    sim.faults.add(fault.on("bulk_invite"))
        stopped = await campaign.summary()
        assert (stopped.state, stopped.pairs.not_sent) == ("stopped", 0)
        refused = [code.pairs for code in stopped.codes if code.result_code == 3]
        assert len(refused) == 1
        assert stopped.pairs.pending > refused[0] > 0
        sim.faults.clear()
        async with campaign.run() as again:
            async for _ in again:
                pass
            assert again.members == plan.matched
        summary = await campaign.summary()
    assert (summary.state, summary.pairs.not_sent, summary.pairs.pending) == ("finished", 0, 0)
    assert all(code.result_code != 3 for code in summary.codes)
    holds(sim, summary)


async def test_a_top_up_plans_again_what_was_refused_with_the_panel(sim, tmp_path):
    async with planned_campaign(sim, tmp_path, max_concurrency=1) as campaign:
        sim.faults.add(Fault.status(400, result_code=3).on("bulk_invite"))
        await all_of(campaign.run())
        for _ in range(2):
            await campaign.top_up()
    query = "SELECT member, quota FROM pairs WHERE plan = ?"
    first, *others = (set(sql(tmp_path / "run.ledger", query, plan)) for plan in (1, 2, 3))
    assert others == [first, first]


async def test_a_refused_key_stops_the_campaign_and_everything_stays_pending(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        plan = await campaign.plan()
        sim.faults.add(Fault.status(403).on("bulk_invite"))
        with anyio.fail_after(20):
            outcomes = await all_of(run := campaign.run())
        assert any(isinstance(outcome.error, ForbiddenError) for outcome in outcomes)
        assert "403" in run.reason
        summary = await campaign.summary()
        assert summary.pairs.pending == plan.pairs
        sim.faults.clear()
        await all_of(campaign.run())
        holds(sim, await campaign.summary())


async def test_an_outage_that_is_too_long_stops_the_campaign_and_it_goes_on_later(sim, tmp_path):
    quick = {"outage": OutagePolicy(patience=0.2), "retry": RetryPolicy(max_attempts=1)}
    async with sim.client(**quick) as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        sim.faults.add(Fault.cut(when="before"))
        with anyio.fail_after(30):
            async with campaign.run() as run:
                async for _ in run:
                    pass
        assert run.reason
        summary = await campaign.summary()
        assert summary.state == "stopped"
        sim.faults.clear()
    async with sim.client() as client:
        again = Campaign(client, ledger=tmp_path / "run.ledger")
        await all_of(again.run())
        summary = await again.summary()
    assert summary.pairs.pending == 0
    holds(sim, summary)


async def test_lost_responses_are_unknown_and_never_asked_again(sim, tmp_path):
    async with planned_campaign(sim, tmp_path) as campaign:
        sim.faults.add(Fault.cut(when="after").on("bulk_invite", every=5))
        outcomes = await all_of(campaign.run())
        summary = await campaign.summary()
        assert summary.pairs.unknown > 0
        assert await all_of(campaign.run()) == []
    holds(sim, summary, outcomes)


async def test_quotas_that_close_in_a_live_index_are_not_requested(sim, tmp_path):
    async with sim.client(max_concurrency=1) as client, client.watch_quotas(600) as watch:
        async with LiveIndex(watch, kinds=AGES) as live:
            await live.ready()
            campaign = campaign_of(sim, client, tmp_path, inventory=live)
            await campaign.plan()
            path = tmp_path / "run.ledger"
            busiest, planned = sql(path, "SELECT quota, count(*) FROM pairs GROUP BY quota ORDER BY 2 DESC")[0]
            async with campaign.run() as run:
                await anext(run)
                assert watch.close_quota(busiest)
                outcomes = [outcome async for outcome in run]
    assert sum(o.quota_id == busiest for o in outcomes) <= 3
    states = pairs_by_state(path, busiest)
    assert states["skipped"] >= planned - 3
    reasons = {
        reason
        for (reason,) in sql(path, "SELECT reason FROM pairs WHERE quota = ? AND state = 'skipped'", busiest)
    }
    assert reasons == {"closed in the inventory"}


# --- Limits


async def test_a_clock_that_is_set_back_delays_a_repetition_by_no_more_than_usual(sim, tmp_path):
    ahead = [365 * 86_400.0]

    def wall_clock() -> float:
        return time.time() + ahead[0]

    async with planned_campaign(sim, tmp_path, retry_seconds=0.01, wall_clock=wall_clock) as campaign:
        sim.faults.add(Fault.refusal(36).on("bulk_invite", times=10))

        async def outcomes():
            async with campaign.run() as run:
                async for outcome in run:
                    if outcome.result_code == 36:
                        ahead[0] = 0.0
                    yield outcome

        with anyio.fail_after(20):
            assert [outcome async for outcome in outcomes()]
        holds(sim, summary := await campaign.summary())
    assert (summary.state, summary.pairs.pending) == ("finished", 0)
