"""Limits of a campaign: caps, costs, pauses, hours and rates."""

from __future__ import annotations

import anyio
import httpx
import pytest
from attrs import evolve
from doubles import until
from panel_kit import all_of, campaign_of, holds, planned_campaign, sql

from sampling_async import InvalidRequestError, SamplingClient
from sampling_async.campaign import Campaign, Limits
from sampling_async.matching import Allocate, LiveIndex
from sampling_async.simulator import Fault, Latency, Simulator


async def test_a_cap_on_invites_is_never_exceeded_and_can_be_raised(sim, tmp_path):
    async with sim.client() as client:
        campaign = campaign_of(sim, client, tmp_path, limits=Limits(max_invites=25))
        plan = await campaign.plan()
        assert plan.expected_invites == 25
        await all_of(run := campaign.run())
        assert run.reason == "the cap of 25 invites is reached"
        assert len(sim.ledger.invites) == 25
        await campaign.limit(max_invites=40)
        await all_of(campaign.run())
        assert len(sim.ledger.invites) == 40
        await campaign.limit(max_invites=None)
        await all_of(campaign.run())
        summary = await campaign.summary()
    assert summary.state == "finished"
    holds(sim, summary)


async def test_a_cap_on_spend_is_never_exceeded(sim, tmp_path):
    async with planned_campaign(sim, tmp_path, cost=0.1, limits=Limits(max_spend=3.0)) as campaign:
        await all_of(run := campaign.run())
        summary = await campaign.summary()
    assert run.reason == "the cap on spend, 3.0, is reached"
    assert len(sim.ledger.invites) == 30
    assert summary.spent == pytest.approx(3.0)


async def test_what_an_invite_cost_and_is_worth_does_not_change_with_a_later_plan(sim, tmp_path):
    async with sim.client() as client:
        quotas = await client.get_quotas()
        given = {"inventory": quotas, "allocate": Allocate(1)}
        first = campaign_of(sim, client, tmp_path, cost=2.0, limits=Limits(max_spend=40.0), **given)
        await first.plan()
        sim.faults.add(Fault.cut(when="after").on("bulk_invite", every=7))
        await all_of(first.run())
        before = await first.summary()
        assert (before.pairs.invited + before.pairs.unknown, before.spent) == (20, 40.0)
        assert before.pairs.unknown
        dear = [evolve(survey, price=evolve(survey.price, amount=1000.0)) for survey in quotas.surveys]
        given = {"inventory": dear, "allocate": Allocate(3)}
        second = campaign_of(sim, client, tmp_path, cost=1.0, **given)
        await second.top_up()
        after = await second.summary()
        assert (after.spent, after.expected_value) == (40.0, before.expected_value)
        assert await all_of(run := second.run()) == []
        assert run.reason == "the cap on spend, 40.0, is reached"
        await second.limit(max_spend=50.0)
        await all_of(run := second.run())
        summary = await second.summary()
    new = summary.pairs.invited + summary.pairs.unknown - 20
    assert (new, summary.spent) == (10, 50.0)
    worth = {quota.quota_id: quota.value for quota in summary.quotas}
    invited = sql(tmp_path / "run.ledger", "SELECT quota FROM pairs WHERE plan = 2 AND state = 'invited'")
    gained = sum(worth[quota_id] for (quota_id,) in invited)
    assert gained > 100 * before.expected_value  # by the new prices
    assert summary.expected_value == pytest.approx(before.expected_value + gained) == run.expected_value


@pytest.mark.parametrize("limits", [Limits(max_invites=30), Limits(max_spend=30)])
async def test_unknown_pairs_count_against_each_cap(sim, tmp_path, limits):
    async with planned_campaign(sim, tmp_path, cost=1.0, limits=limits) as campaign:
        sim.faults.add(Fault.cut(when="after").on("bulk_invite", every=3))
        await all_of(campaign.run())
        pairs = (await campaign.summary()).pairs
        assert await all_of(campaign.run()) == []
    assert len(sim.ledger.invites) <= 30
    assert pairs.invited + pairs.unknown == 30
    assert pairs.unknown


async def waits_for(run, kind: str) -> None:
    """Read outcomes until the run waits for something of that kind."""
    with anyio.fail_after(60):
        while run.waiting_for != kind:
            with anyio.move_on_after(0.05):
                await anext(run)


async def test_a_pause_from_elsewhere_holds_a_run_until_it_is_resumed(sim, tmp_path):
    async with sim.client(max_concurrency=2) as client:
        campaign = campaign_of(sim, client, tmp_path)
        await campaign.plan()
        await campaign.pause("lunch")
        other = Campaign(client, ledger=tmp_path / "run.ledger")
        async with campaign.run() as run:
            await waits_for(run, "paused")
            assert not sim.ledger.requests(endpoint="bulk_invite")
            summary = await other.summary()
            assert (summary.state, summary.reason) == ("paused", "lunch")
            await other.resume()
            with anyio.fail_after(20):
                outcomes = [outcome async for outcome in run]
            assert run.waiting_for is None
    assert outcomes
    holds(sim, await campaign.summary())


async def test_outside_of_its_hours_a_run_waits(sim, tmp_path):
    now = [1_700_000_000.0]  # 22:13:20 UTC
    async with planned_campaign(
        sim, tmp_path, limits=Limits(hours="02:00-04:00"), wall_clock=lambda: now[0]
    ) as campaign:
        async with campaign.run() as run:
            await waits_for(run, "hours")
            now[0] += 4 * 3600
            with anyio.fail_after(20):
                assert [outcome async for outcome in run]
        summary = await campaign.summary()
    (wait,) = summary.waits
    assert (wait.kind, wait.seconds) == ("hours", pytest.approx(4 * 3600, abs=5))


async def test_invites_a_minute_are_kept_to(sim, tmp_path):
    clock = [0.0]
    async with planned_campaign(
        sim, tmp_path, max_concurrency=4, limits=Limits(invites_per_minute=600), clock=lambda: clock[0]
    ) as campaign:
        async with campaign.run() as run:
            for second in range(1, 4):
                with anyio.fail_after(60):
                    while len(sim.ledger.invites) < 8 * (second - 1):
                        await anext(run)
                await waits_for(run, "rate")
                # Ten a second, and the pairs of one member more, which are asked for together.
                assert len(sim.ledger.invites) <= 10 * second + 3
                clock[0] += 1


async def test_invites_without_a_limit_do_not_count_against_a_later_one(sim, tmp_path):
    clock = [0.0]
    sim = Simulator(7, surveys=30, members=120, latency=Latency(a=0.02))
    async with planned_campaign(
        sim, tmp_path, max_concurrency=2, limits=Limits(invites_per_minute=6000), clock=lambda: clock[0]
    ) as campaign:
        async with campaign.run() as run:
            await anext(run)
            for limit in (None, 6000):
                await campaign.limit(invites_per_minute=limit)
                with anyio.fail_after(60):
                    while run.limits.invites_per_minute != limit:
                        await anext(run)
                if limit is None:
                    for _ in range(200):
                        await anext(run)
            await waits_for(run, "rate")
            made = len(sim.ledger.invites)
            clock[0] += 1
            with anyio.fail_after(20):  # a busy machine takes its time
                while len(sim.ledger.invites) <= made:
                    await anext(run)
            assert len(sim.ledger.invites) > made


async def test_no_more_members_are_requested_at_once_than_the_limit_says(tmp_path):
    at_once = []
    sim = Simulator(7, surveys=30, members=60)
    async with planned_campaign(sim, tmp_path, max_concurrency=8, limits=Limits(concurrency=2)) as campaign:
        async with campaign.run() as run:
            async for _ in run:
                at_once.append(run._record.members)
        await campaign.summary()
    assert max(at_once) <= 2


async def test_limits_are_checked_and_kept(sim, tmp_path):
    async with planned_campaign(sim, tmp_path, limits=Limits(concurrency=3)) as campaign:
        assert (await campaign.limit(invites_per_minute=60)).concurrency == 3
        for wrong in (
            {"concurrency": 0},
            {"max_invites": -1},
            {"hours": "25:00-26:00"},
            {"zone": "Moon"},
            {"max_spend": float("inf")},
            {"invites_per_minute": float("inf")},
            {"paused": "false"},
            {"reason": 7},
            {"paused": None},
            {"x": 1},
        ):
            with pytest.raises(InvalidRequestError):
                await campaign.limit(**wrong)
        summary = await campaign.summary()
    assert summary.limits == {"members asked for at once": "3", "invites a minute": "60"}


class Refusing(httpx.AsyncBaseTransport):
    """A simulator that refuses bulks for load, as long as `refuses` says so."""

    def __init__(self, sim: Simulator, answer: httpx.Response) -> None:
        self.inner, self.answer = sim.transport(), answer
        self.refuses = True
        self.refused: set[str] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST" and self.refuses:
            self.refused.add(request.url.path.split("/")[-2])
            return self.answer
        return await self.inner.handle_async_request(request)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("way", ["paused", "hours", "closed", "capped"])
async def test_what_was_refused_for_load_is_sent_again_only_within_the_limits_of_that_moment(
    sim, tmp_path, status, way
):
    now, outcomes = [1_700_000_000.0], []
    limits = Limits(hours="00:00-23:00")
    transport = Refusing(sim, httpx.Response(status, json={"Result": "BUSY", "ResultCode": 99}))
    given = {"panel_guid": sim.panel_guid, "api_key": sim.api_key, "transport": transport}

    async def follow() -> None:
        outcomes.extend([outcome async for outcome in run])

    async with (
        SamplingClient(sim.base_url, **given) as client,
        client.watch_quotas(every=3600) as watch,
        LiveIndex(watch) as live,
    ):
        await live.ready()
        campaign = campaign_of(sim, client, tmp_path, inventory=live, limits=limits, wall_clock=lambda: now[0])
        await campaign.plan()
        async with campaign.run() as run, anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            # Else a request that is just being written down is sent once.
            await until(lambda: len(transport.refused) == run.requests > 3)
            if way == "paused":
                await campaign.pause()
                await until(lambda: run.limits.paused)
            elif way == "hours":
                now[0] += 3_600
            elif way == "capped":
                await campaign.limit(max_invites=2)
                await until(lambda: run.limits.max_invites == 2)
            else:
                for quota_id in list(live.index.quota_ids):
                    live.close_quota(quota_id)
            transport.refuses = False
            if way in {"paused", "hours"}:
                await waits_for(run, way)
                await until(lambda: not run._record.members)
                assert (run.pairs.invited, outcomes) == (0, [])
                assert not sim.ledger.requests(endpoint="bulk_invite")
                now[0] += 3 * 3_600
                await campaign.resume()
        summary = await campaign.summary()
    if way == "capped":
        assert summary.pairs.invited == 2
    else:
        assert (summary.pairs.pending, summary.pairs.not_sent) == (0, 0)
        assert bool(summary.pairs.invited) == (way != "closed")
        assert run.members == len({outcome.member_code for outcome in outcomes})
    assert summary.pairs.invited == len(sim.ledger.invites)
    if way == "closed":
        assert not sim.ledger.requests(endpoint="bulk_invite")
