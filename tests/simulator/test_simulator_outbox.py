"""Notifications of the simulator: caused by what happens in it, and delivered badly on request."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal

import anyio
import anyio.lowlevel
import anyio.to_thread
import httpx
import pytest

from sampling_async import InviteRequest
from sampling_async.notifications import Completion, Inbox, Kind, QuotaStatus, SurveyClosed, Terminate, Validity
from sampling_async.simulator import Notifying, Simulator, VirtualClock

SECRET = "a-secret-of-the-tests"


def inbox_at(path, **options) -> Inbox:
    return Inbox(path / "n.db", secrets=SECRET, **options)


async def invite_all(sim: Simulator) -> int:
    """Ask for every quota and member; return the number of invites."""
    quota_ids = [quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas]
    async with (
        sim.client() as client,
        client.fan_out(InviteRequest(m, quota_ids) for m in sim.members) as stream,
    ):
        return sum([outcome.invite is not None async for outcome in stream])


def kinds_of(sim: Simulator) -> Counter[str]:
    return Counter(posting.kind for posting in sim.notifications.told)


async def facts_of(inbox: Inbox, *records):
    return [fact async for fact in inbox.facts(*records)]


def test_its_kinds_are_those_of_the_inbox():
    *with_url, last = Kind
    assert last == "reconciliation"  # it goes to the URL of completions
    sim = Simulator(surveys=1, members=1)
    with pytest.raises(ValueError, match=f"is no kind of notification: {', '.join(with_url)}$"):
        with sim.notifications.sending_to({"x": "http://x"}):
            pytest.fail("there is no such kind")


async def test_what_a_cancelled_delivery_has_taken_is_delivered_later(tmp_path):
    sim = Simulator(seed=5, surveys=8, members=20, notifying=Notifying())
    await invite_all(sim)
    outbox = sim.notifications
    async with inbox_at(tmp_path) as inbox:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(outbox.deliver, inbox)
                while not outbox.sent:
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
        assert 0 < len(outbox.unheard) <= outbox.waiting
        await outbox.deliver(inbox)
        assert len(await facts_of(inbox)) == len(outbox.told)
    assert outbox.waiting == len(outbox.unheard) == 0


async def test_every_invite_ends_in_a_completion_or_a_terminate(tmp_path):
    sim = Simulator(seed=5, surveys=8, members=20, notifying=Notifying(completes=0.5))
    invites = await invite_all(sim)
    assert invites > 20
    async with inbox_at(tmp_path) as inbox:
        assert await sim.notifications.deliver(inbox) == len(sim.notifications.told)
        facts = await facts_of(inbox)
        ended = await facts_of(inbox, Completion, Terminate)
        pairs = {(fact.notification.member_code, fact.notification.quota_id) for fact in ended}
    assert kinds_of(sim)["invite"] == invites
    assert kinds_of(sim)["completion"] + kinds_of(sim)["terminate"] == invites
    assert 0.3 < kinds_of(sim)["completion"] / invites < 0.7
    assert pairs == set(sim.ledger.by_pair())
    assert all(fact.kind for fact in facts)
    prices = {survey.survey_id: survey.price.amount for survey in sim.inventory.surveys}
    for fact in ended:
        if isinstance(fact.notification, Completion) and fact.notification.survey_id in prices:
            assert fact.notification.revenue == Decimal(str(prices[fact.notification.survey_id]))


async def test_a_quota_that_closes_or_opens_is_reported_and_a_survey_without_quotas(tmp_path):
    sim = Simulator(seed=5, surveys=3, notifying=Notifying())
    survey = sim.inventory.surveys[0]
    quota_ids = [quota.quota_id for quota in survey.quotas]
    for quota_id in quota_ids:
        sim.close_quota(quota_id)
    sim.close_quota(quota_ids[0])  # nothing changes
    sim.open_quota(quota_ids[0])
    async with inbox_at(tmp_path) as inbox:
        await sim.notifications.deliver(inbox)
        statuses = await facts_of(inbox, QuotaStatus)
        closed = await facts_of(inbox, SurveyClosed)
    assert [(fact.notification.quota_id, fact.notification.is_live) for fact in statuses] == [
        *((quota_id, False) for quota_id in quota_ids),
        (quota_ids[0], True),
    ]
    assert [fact.notification.survey_id for fact in closed] == [survey.survey_id]
    standing = {fact.notification.quota_id: fact.notification.is_live for fact in statuses if is_true(fact)}
    assert standing == {quota_id: quota_id == quota_ids[0] for quota_id in quota_ids}


def is_true(fact) -> bool:
    return fact.validity is Validity.STANDS


async def test_a_quota_that_fills_is_closed(tmp_path):
    sim = Simulator(seed=5, surveys=3, members=60, notifying=Notifying())
    for survey in sim.inventory.surveys:
        for quota in survey.quotas:
            sim.open_quota(quota.quota_id, remaining=1)
    await invite_all(sim)
    opened = {quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas}
    async with inbox_at(tmp_path) as inbox:
        await sim.notifications.deliver(inbox)
        statuses = [fact.notification for fact in await facts_of(inbox, QuotaStatus) if is_true(fact)]
    assert statuses
    assert {status.quota_id for status in statuses if not status.is_live}.isdisjoint(opened)


BADLY = Notifying(
    late=0.3,
    late_seconds=100.0,
    repeated=0.3,
    forged=0.3,
    drifted=0.5,
    corrected=0.2,
    terminated_late=0.2,
    reconciled=0.2,
    survey_seconds=600.0,
)


@pytest.mark.parametrize("shared_secret", ["", "shared with the operator"])
async def test_however_badly_they_are_delivered_the_facts_are_the_same(tmp_path, shared_secret):
    import attrs  # noqa: PLC0415

    notifying = attrs.evolve(BADLY, shared_secret=shared_secret)
    clock = VirtualClock()
    sim = Simulator(seed=7, surveys=10, members=30, notifying=notifying, clock=clock, sleep=clock.sleep)
    await invite_all(sim)
    options = {"shared_secrets": shared_secret, "require_signature": True} if shared_secret else {}
    async with inbox_at(tmp_path, **options) as inbox:
        posted = await sim.notifications.deliver(inbox)
        facts = await facts_of(inbox)
    true = sim.notifications.told
    assert posted > len(true) * 1.3
    assert sim.notifications.sent < posted
    assert Counter(fact.kind for fact in facts) == Counter(posting.kind for posting in true)
    completions = [fact for fact in facts if fact.kind == "completion"]
    assert sum(fact.corrects is not None for fact in completions) > 0
    assert max(fact.notification.revenue for fact in completions) < 100
    overruled = [fact for fact in facts if fact.validity is Validity.OVERRULED]
    assert overruled
    assert all(fact.kind == "terminate" for fact in overruled)
    members = {fact.notification.member_code for fact in completions}
    assert {fact.notification.member_code for fact in overruled} <= members
    taken_back = [fact for fact in facts if fact.kind == "reconciliation"]
    assert {fact.notification.member_code for fact in taken_back} <= members
    assert {fact.posted_as for fact in taken_back} == {"completion"}
    if shared_secret:
        assert all(fact.verified for fact in [*completions, *overruled, *taken_back])


async def test_what_is_not_due_waits(tmp_path):
    clock = VirtualClock()
    notifying = Notifying(survey_seconds=600.0, completes=1.0)
    sim = Simulator(surveys=5, members=10, notifying=notifying, clock=clock, sleep=clock.sleep)
    invites = await invite_all(sim)
    async with inbox_at(tmp_path) as inbox:
        await sim.notifications.deliver(inbox, everything=False)
        assert {fact.kind for fact in await facts_of(inbox)} == {"invite"}
        clock.advance(600.0)
        await sim.notifications.deliver(inbox, everything=False)
        assert len(await facts_of(inbox, Completion)) == invites
    assert sim.notifications.waiting == 0
    assert repr(sim.notifications) == f"<Outbox told={2 * invites} waiting=0 sent={2 * invites}>"


async def test_what_was_not_taken_is_sent_again(tmp_path):
    sim = Simulator(surveys=3, notifying=Notifying())
    quota_id = sim.inventory.surveys[0].quotas[0].quota_id
    sim.close_quota(quota_id)
    closed = inbox_at(tmp_path)
    waiting = sim.notifications.waiting
    due = list(sim.notifications._due())
    urls = {str(kind): url for kind, url in closed.urls("http://inbox.example").items()}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(closed.app)) as http:
        for posting in due:
            await sim.notifications._post(http, urls, posting)
    assert sim.notifications.waiting == waiting
    async with inbox_at(tmp_path) as inbox:
        await sim.notifications.deliver(inbox)
        assert quota_id in [fact.notification.quota_id for fact in await facts_of(inbox, QuotaStatus)]


async def test_a_simulator_reports_nothing_unless_asked(tmp_path):
    sim = Simulator(surveys=3)
    await invite_all(sim)
    sim.close_quota(sim.inventory.surveys[0].quotas[0].quota_id)
    assert sim.notifications.told == ()
    async with inbox_at(tmp_path) as inbox:
        with pytest.raises(RuntimeError, match="notifying=Notifying"):
            await sim.notifications.deliver(inbox)


@pytest.mark.asyncio
async def test_they_are_sent_over_http_from_a_thread(tmp_path):
    import uvicorn  # noqa: PLC0415

    sim = Simulator(surveys=5, members=10, notifying=Notifying(completes=1.0))
    inbox = inbox_at(tmp_path)
    server = uvicorn.Server(uvicorn.Config(inbox.app, port=0, log_level="critical", lifespan="off"))
    async with inbox, anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve)
        while not server.started:  # noqa: ASYNC110  there is no event
            await anyio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        sim.notification_urls = inbox.urls(f"http://127.0.0.1:{port}")
        invites = await invite_all(sim)

        def send_all() -> None:
            with sim.notifications.sending_to({**sim.notification_urls, "invite": "http://127.0.0.1:1/"}):
                while sim.notifications.sent < invites:
                    pass

        with anyio.fail_after(20):
            await anyio.to_thread.run_sync(send_all)
        server.should_exit = True
    assert len(await facts_of(inbox, Completion)) == invites
    async with sim.client() as client:
        settings = await client.get_settings()
    assert settings.completion_notification_url == sim.notification_urls["completion"]


def test_urls_are_by_kind():
    with (
        pytest.raises(ValueError, match="is no kind of notification"),
        Simulator(notifying=Notifying()).notifications.sending_to({"complete": "http://x"}),
    ):
        pass


@pytest.mark.parametrize("name", ["completes", "late", "repeated", "forged", "drifted", "corrected"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_shares_are_from_0_to_1(name, value):
    with pytest.raises(ValueError, match=f"'{name}' must be [<>]= [01]"):
        Notifying(**{name: value})


@pytest.mark.parametrize("name", ["survey_seconds", "late_seconds"])
@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_times_are_seconds(name, value):
    with pytest.raises(ValueError, match=f"'{name}' must be >= 0"):
        Notifying(**{name: value})


@pytest.mark.sampling_simulator(notifying=Notifying(completes=1.0))
async def test_the_fixtures_work_together(sampling_simulator, sampling_inbox):
    invites = await invite_all(sampling_simulator)
    async with sampling_inbox:
        await sampling_simulator.notifications.deliver(sampling_inbox)
    assert len(await facts_of(sampling_inbox, Completion)) == invites > 0
