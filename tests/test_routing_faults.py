"""The click when things go wrong: never two requests for a pair, and nothing that a member cannot use."""

from __future__ import annotations

import httpx
import pytest
from attrs import evolve
from matching_kit import GENDER, MALE, quota, row, sub_quota
from routing_kit import Clock, Panel, click, router_of

from sampling_async.routing import RouteStatus

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
