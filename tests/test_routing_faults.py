"""The click when things go wrong: never two requests for a pair, and nothing that a member cannot use."""

from __future__ import annotations

import httpx
import pytest
import httpx
import pytest
from attrs import evolve
from matching_kit import GENDER, MALE, quota, row, sub_quota
from routing_kit import MEMBER, Clock, Panel, click, ids, live_of, router_of

from sampling_async import InviteOutcome
from sampling_async.matching import Member
from sampling_async.notifications import OutcomeLedger
from sampling_async.routing import Caps, RouteStatus, SurveyRouter
from sampling_async.routing._tempo import Tempo

ROUTED, NONE_OPEN, UNAVAILABLE, UNCLEAR = RouteStatus


def two_of_a_survey():
    """Return a panel whose second survey has the quotas 2 and 5."""
    panel = Panel(1, 2)
    first, second = panel.inventory.surveys
    more = quota([sub_quota(row(GENDER, MALE))], quota_id=5, remaining=50)
    panel.inventory = evolve(panel.inventory, surveys=(first, evolve(second, quotas=(*second.quotas, more))))
    return panel


# --- One survey with several quotas


@pytest.mark.parametrize("fate", ["unclear", "entered"])
async def test_an_old_link_opens_no_survey_that_is_unclear_or_was_entered(new_address, fate):
    panel, store, clock = two_of_a_survey(), new_address(), Clock()
    async with router_of(panel, store, clock=clock, lifetime=60) as router:
        assert (await click(router, quota_ids=[5])).status is ROUTED
        clock.now += 61
        if fate == "unclear":
            panel.answers[2] = httpx.ReadError("cut")
        route = await click(router, quota_ids=[2])
        await route.entered()
        panel.answers.clear()
        for _ in range(2):
            assert (await click(router, quota_ids=[2, 5])).status is NONE_OPEN
    assert panel.asked == [("m-1", 5), ("m-1", 2)]


async def test_one_quota_of_a_survey_is_requested_at_once(monkeypatch):
    panel = two_of_a_survey()
    monkeypatch.setattr(Tempo, "most", lambda *_: 3)
    async with router_of(panel) as router:
        await click(router, quota_ids=[2, 5, 1])
    assert panel.asked == [("m-1", 2), ("m-1", 1)]


async def test_a_click_on_another_quota_of_a_survey_gets_the_link_that_waits():
    panel = two_of_a_survey()
    async with router_of(panel) as router:
        first = await click(router, quota_ids=[2])
        second = await click(router, quota_ids=[5])
        assert (second.url, second.is_repeat) == (first.url, True)
        assert (await click(router, quota_ids=[1])).invite.quota_id == 1
    assert panel.asked == [("m-1", 2), ("m-1", 1)]


async def test_a_quota_that_opens_again_in_the_middle_of_a_click_is_not_requested_again(monkeypatch):
    panel = Panel(1, 2)
    async with live_of(panel) as (client, live), SurveyRouter(client, live, store=None) as router:
        assert (await click(router)).invite.quota_id == 2
        with monkeypatch.context() as patch:
            patch.setattr(live, "is_open", lambda _: False)  # at the look at it, but not a moment later
            assert (await click(router)).invite.quota_id == 1
    assert panel.asked == [("m-1", 2), ("m-1", 1)]


# --- Others who invite, and caps


async def test_a_survey_to_which_a_campaign_has_invited_the_member_is_left_out(new_address):
    panel, store, clock = Panel(1, 2), new_address(), Clock()
    async with router_of(panel, store, clock=clock) as router:
        invite = (await click(router, Member("m-2", MEMBER.profile))).invite
        outcome = InviteOutcome(member_code="m-1", quota_id=2, status="invited", invite=invite)
        await OutcomeLedger(store, clock=clock).invited([outcome])
        assert (await click(router)).invite.quota_id == 1
    async with router_of(panel, store, clock=clock) as router:
        assert ids(router.offers(MEMBER)) == [1]
        # Those of routers are no others.
        assert ids(router.offers(Member("m-2", MEMBER.profile))) == [2, 1]
    assert panel.asked == [("m-2", 2), ("m-1", 1)]


async def test_a_link_that_waits_is_not_given_beyond_a_cap():
    panel = Panel(1, 2, 3)
    async with router_of(panel, caps=Caps(starts=1)) as router:
        first, other = await click(router), await click(router, quota_ids=[2])
        await first.entered()
        assert (await click(router)).status is NONE_OPEN
        assert (await click(router, quota_ids=[2])).status is NONE_OPEN
    assert other.status is ROUTED
