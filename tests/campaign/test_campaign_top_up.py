"""Plans that top up a campaign: who is asked again, and who is not."""

from __future__ import annotations

import json

import pytest
from panel_kit import all_of, campaign_of, holds, planned_campaign, sql

from sampling_async import InvalidRequestError, ResultCode
from sampling_async.campaign import Campaign, Limits
from sampling_async.matching import Allocate
from sampling_async.simulator import Fault


async def test_a_top_up_asks_nobody_for_a_survey_that_they_have(sim, tmp_path):
    now = [1_700_000_000.0]
    async with planned_campaign(sim, tmp_path, wall_clock=lambda: now[0]) as campaign:
        await all_of(campaign.run())
        first = await campaign.summary()
        now[0] += 3 * 86_400
        plan = await campaign.top_up()
        assert plan.number == 2
        outcomes = await all_of(campaign.run())
        summary = await campaign.summary()
    assert summary.pairs.invited > first.pairs.invited
    assert 38 not in {outcome.result_code for outcome in outcomes}  # SURVEY_TAKEN
    holds(sim, summary)
    twice = sql(
        tmp_path / "run.ledger",
        "SELECT count(*) FROM invites GROUP BY member, survey HAVING count(*) > 1",
    )
    assert twice == []


@pytest.mark.parametrize(
    ("code", "is_asked_again"),
    [
        (ResultCode.QUOTA_FULL, True),
        (ResultCode.MAX_DAILY_EXCEEDED, True),
        (ResultCode.TECHNICAL_ERROR, True),
        (ResultCode.SURVEY_TAKEN, False),
        (ResultCode.MEMBER_DOES_NOT_MATCH_QUOTA, False),
    ],
)
async def test_a_top_up_asks_again_where_the_reason_of_a_refusal_may_have_passed(
    sim, tmp_path, code, is_asked_again
):
    path = tmp_path / "run.ledger"
    asked = (
        "SELECT DISTINCT p.member, q.survey FROM pairs AS p JOIN quotas AS q ON q.id = p.quota WHERE p.plan = ?"
    )
    async with planned_campaign(sim, tmp_path, retry_seconds=0.01) as campaign:
        sim.faults.add(Fault.refusal(code).on("bulk_invite"))
        await all_of(campaign.run())
        refused = set(sql(path, f"{asked} AND p.state = 'rejected'", 1))
        await campaign.top_up()
    assert refused
    assert bool(refused & set(sql(path, asked, 2))) is is_asked_again


async def test_invites_that_are_still_open_take_room_in_a_top_up(sim, tmp_path):
    room = {}
    async with sim.client() as client:
        quotas = await client.get_quotas()
        quota = max(
            (q for s in quotas.surveys for q in s.quotas), key=lambda q: q.estimated_completes_remaining
        )
        room = {quota.quota_id: 10}
        campaign = campaign_of(sim, client, tmp_path, inventory=quotas, allocate=Allocate(1, room=room))
        plan = await campaign.plan()
        await all_of(campaign.run())
        invited = (await campaign.summary()).pairs.invited
        assert 0 < invited <= plan.pairs <= 10
        again = await campaign.top_up()
        assert again.pairs <= 10 - invited
        later = await campaign.top_up(open_seconds=1e-9)
        assert later.number == 3


async def test_a_member_gets_no_more_by_a_top_up_while_its_invites_are_open(sim, tmp_path):
    now = [1_700_000_000.0]
    async with planned_campaign(sim, tmp_path, wall_clock=lambda: now[0]) as campaign:
        await all_of(campaign.run())
        most = sql(
            tmp_path / "run.ledger", "SELECT max(n) FROM (SELECT count(*) AS n FROM invites GROUP BY member)"
        )
        assert most == [(3,)]
        now[0] += 3600
        await campaign.top_up()
        await all_of(campaign.run())
        holds(sim, await campaign.summary())
    counts = sql(tmp_path / "run.ledger", "SELECT count(*) FROM invites GROUP BY member")
    # A member that was refused once gets one more, and no member more than three in all.
    assert max(count for (count,) in counts) <= 3


async def test_a_top_up_skips_what_was_pending(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, limits=Limits(max_invites=5))
        await campaign.plan()
        await all_of(campaign.run())
        before = await campaign.summary()
        await campaign.top_up()
        after = await campaign.summary()
        assert after.skipped["planned anew"] == before.pairs.pending
        with pytest.raises(InvalidRequestError, match="needs a panel"):
            await Campaign(client, ledger=tmp_path / "run.ledger").top_up()


async def test_a_top_up_after_a_kill_asks_nobody_again_for_what_was_in_flight(sim, tmp_path):
    path = tmp_path / "run.ledger"
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        ((code, quotas),) = sql(
            path,
            "SELECT m.code, json_group_array(p.quota) FROM pairs AS p JOIN members AS m ON m.id = p.member"
            " WHERE m.id = 1",
        )
        # The service has made the invites, and the process died before the response came.
        await client.bulk_invite(code, json.loads(quotas))
        sql(path, "INSERT INTO requests VALUES (1, 1, ?)", quotas)
        lost = len(json.loads(quotas))
        await campaign.top_up()
        assert (await campaign.summary()).pairs.unknown == lost
        outcomes = await all_of(campaign.run())
        summary = await campaign.summary()
    surveys = {invite.survey_id for invite in sim.ledger.invites if invite.member_code == code}
    assert len(surveys) == sum(invite.member_code == code for invite in sim.ledger.invites)
    assert not {o.quota_id for o in outcomes if o.member_code == code} & set(json.loads(quotas))
    assert summary.pairs.unknown == lost
    holds(sim, summary)
