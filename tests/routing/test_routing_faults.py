"""The click when things go wrong: never two requests for a pair, and nothing that a member cannot use."""

from __future__ import annotations

import json
import sys
import tracemalloc
from contextlib import contextmanager
from functools import partial
from threading import get_ident

import anyio
import doubles
import httpx
import pytest
from anyio.lowlevel import checkpoint
from attrs import evolve
from doubles import until
from panel_kit import GENDER, MALE, quota, row, sub_quota
from routing_kit import LONG, MEMBER, Clock, Panel, click, ended, ids, live_of, router_of
from store_kit import SECRET, opened, post

from sampling_async import InvalidRequestError, Invite, InviteOutcome, ResultCode, RetryPolicy, from_json
from sampling_async.matching import LearnedRates, Member
from sampling_async.notifications import Inbox, OutcomeLedger, StoreError
from sampling_async.notifications._stores import store_of
from sampling_async.routing import Caps, RouteStatus, SurveyRouter
from sampling_async.routing._history import Histories, Link, MemberHistory
from sampling_async.routing._links import Changes, Wish, begin, settle
from sampling_async.routing._offers import RequestSizer

ROUTED, NONE_OPEN, UNAVAILABLE, UNCLEAR = RouteStatus


def two_of_a_survey():
    """Return a panel whose second survey has the quotas 2 and 5."""
    panel = Panel(1, 2)
    first, second = panel.inventory.surveys
    more = quota([sub_quota(row(GENDER, MALE))], quota_id=5, remaining=50)
    panel.inventory = evolve(panel.inventory, surveys=(first, evolve(second, quotas=(*second.quotas, more))))
    return panel


# --- One survey with several quotas


async def test_an_old_link_opens_its_survey_to_no_other_quota(new_address):
    panel, store, clock = two_of_a_survey(), new_address(), Clock()
    async with router_of(panel, store, clock=clock, lifetime=60) as router:
        assert (await click(router, quota_ids=[5])).status is ROUTED
        assert [offer.survey_id for offer in router.offers(MEMBER)] == [200, 100]
        clock.now += 61
        assert ids(router.offers(MEMBER)) == [1]
        assert (await click(router, quota_ids=[2, 5])).status is NONE_OPEN
    assert panel.asked == [("m-1", 5)]


async def test_a_link_of_a_closed_quota_opens_its_survey_to_no_other_quota(new_address):
    panel, store = two_of_a_survey(), new_address()
    async with live_of(panel) as (client, live), SurveyRouter(client, live, store=store) as router:
        assert (await click(router, quota_ids=[5])).status is ROUTED
        live.close_quota(5)
        assert ids(router.offers(MEMBER)) == [1]
        assert ids(router.offers(Member("m-2", MEMBER.profile))) == [2, 1]
        assert (await click(router, quota_ids=[2])).status is NONE_OPEN
        assert (await click(router)).invite.quota_id == 1
    assert panel.asked == [("m-1", 5), ("m-1", 1)]


@pytest.mark.parametrize("refused_first", [False, True])
async def test_a_pair_that_a_campaign_invites_is_not_requested_although_it_was_refused(
    new_address, refused_first
):
    panel, store, clock = Panel(1, 2), new_address(), Clock()
    async with router_of(panel, store, clock=clock) as router:
        if refused_first:
            panel.answers[2] = ResultCode.SUB_QUOTA_FULL
            assert (await click(router, quota_ids=[2])).status is NONE_OPEN
            panel.answers.clear()
        clock.now += 3_600
        await invited_by_a_campaign(store, clock, 2)
        clock.now += 86_400
        asked = len(panel.asked)
        assert (await click(router)).invite.quota_id == 1
    assert panel.asked[asked:] == [("m-1", 1)]
    async with router_of(panel, store, clock=clock) as router:
        assert ids(router.offers(MEMBER)) == [1]


async def test_offers_learn_within_a_second_whom_others_invite_and_send_on(new_address):
    panel, store, clock = Panel(1, 2), new_address(), Clock()
    async with router_of(panel, store, clock=clock) as router:
        await until(lambda: ids(router.offers(MEMBER)) == [2, 1])
        # Their times may lie in the past: a campaign tells of its invites when it has ended.
        await invited_by_a_campaign(store, lambda: clock.now - 9_000, 2)
        await until(lambda: ids(router.offers(MEMBER)) == [1])
        await invited_by_a_campaign(store, clock, 1, "m-2")
        await OutcomeLedger(store, clock=clock).entered("m-2", 1)
        await until(lambda: ids(router.offers(Member("m-2", MEMBER.profile))) == [2])


async def invited_by_a_campaign(store, clock, quota_id, member_code="m-1", wave=1):
    invite = doubles.item(quota_id, 1)["Invite"] | {"SurveyID": quota_id * 100, "WaveID": wave}
    invite = from_json(Invite, json.dumps(invite))
    outcome = InviteOutcome(member_code=member_code, quota_id=quota_id, status="invited", invite=invite)
    assert await OutcomeLedger(store, clock=clock).invited([outcome]) == 1


@pytest.mark.parametrize("then", [httpx.ConnectError("gone"), httpx.Response(429)], ids=["gone", "load"])
async def test_a_click_is_not_told_of_no_survey_if_the_service_refused_one_and_was_then_away(then):
    panel = Panel(1, 2)
    panel.answers = {2: ResultCode.SUB_QUOTA_FULL, 1: then}
    async with router_of(panel) as router:
        assert (await click(router)).status is UNAVAILABLE
        assert ids(router.offers(MEMBER)) == [1]


async def test_a_click_is_not_told_of_no_survey_if_there_was_no_time_for_the_next(monkeypatch):
    panel = Panel(1, 2)
    panel.answers = {2: ResultCode.SUB_QUOTA_FULL, 1: ResultCode.SUB_QUOTA_FULL}
    monkeypatch.setattr(RequestSizer, "most", lambda *_: 1)
    monkeypatch.setattr(RequestSizer, "has_time", lambda *_: False)
    async with router_of(panel) as router:
        assert (await click(router)).status is UNAVAILABLE
        assert (await click(router)).status is NONE_OPEN
    assert panel.asked == [("m-1", 2), ("m-1", 1)]


async def test_an_invite_that_another_process_gives_is_not_counted_as_unused(new_address):
    panel, store = Panel(1), new_address()
    late = panel.answers[1] = anyio.Event()
    async with router_of(panel, store) as one, router_of(panel, store) as other:
        assert (await click(one, within=0.3)).status is UNCLEAR
        late.set()
        await until(lambda: one.status.unused == 1)
        route = await click(other)
        assert (route.status, route.is_repeat) == (ROUTED, True)
        await route.entered()
        await until(lambda: one.status.unused == 0)


@pytest.mark.parametrize(
    ("known", "wave"),
    [*((known, wave) for known in ("entered", "campaign", "ended") for wave in (1, 2)), ("ended", 0)],
)
async def test_another_wave_is_another_survey_and_an_end_without_its_wave_is_of_any(new_address, known, wave):
    panel, store, clock = Panel(2, wave_id=wave or 1), new_address(), Clock()
    panel.instead = {"WaveID": wave or 1}
    async with (
        router_of(panel, store, clock=clock) as router,
        Inbox(store, secrets=SECRET, clock=clock) as inbox,
    ):
        match known:
            case "entered":
                await (await click(router)).entered()
            case "campaign":
                await invited_by_a_campaign(store, clock, 2, wave=wave)
            case "ended":
                await ended(inbox, "terminate", 2, WaveId=wave or None, Reason="SCREENED_OUT")
        assert (await click(router)).status is NONE_OPEN
    panel = Panel(2, wave_id=2)
    panel.instead = {"WaveID": 2}
    async with router_of(panel, store, clock=clock) as router:
        is_open = wave == 1
        assert ids(router.offers(MEMBER)) == [2] * is_open
        assert (await click(router)).status is (ROUTED if is_open else NONE_OPEN)


async def test_one_quota_of_a_survey_is_requested_at_once(monkeypatch):
    panel = two_of_a_survey()
    monkeypatch.setattr(RequestSizer, "most", lambda *_: 3)
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
        looks = iter([True, False])  # it is closed at the second look, and open again a moment later
        monkeypatch.setattr(live, "is_open", lambda _: next(looks, True))
        assert (await click(router)).invite.quota_id == 1
        assert next(looks, None) is None
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


@pytest.mark.parametrize("wave", [1, 2])
async def test_a_link_counts_as_one_start_also_if_its_invite_is_of_another_wave(wave):
    panel = Panel(1, 2, 3)
    panel.instead = {"WaveID": wave}
    async with router_of(panel, caps=Caps(starts=2)) as router:
        for status in (ROUTED, ROUTED, NONE_OPEN):
            route = await click(router)
            assert route.status is status
            if route.url is not None:
                await route.entered()


async def test_a_link_that_waits_is_not_given_beyond_a_cap():
    panel = Panel(1, 2, 3)
    async with router_of(panel, caps=Caps(starts=1)) as router:
        first, other = await click(router), await click(router, quota_ids=[2])
        await first.entered()
        assert (await click(router)).status is NONE_OPEN
        assert (await click(router, quota_ids=[2])).status is NONE_OPEN
    assert other.status is ROUTED


# --- What the service answers


async def test_an_invite_of_another_survey_is_that_of_the_quota_that_was_requested(new_address):
    panel, store, clock = Panel(1, 2), new_address(), Clock()
    panel.instead = {"SurveyID": 777, "QuotaID": 7}
    async with (
        router_of(panel, store, clock=clock) as router,
        Inbox(store, secrets=SECRET, clock=clock) as inbox,
    ):
        first = await click(router)
        assert (await click(router)).url == first.url
        await ended(inbox, "terminate", 7, SurveyId=777, Reason="SCREENED_OUT")
        panel.instead = {"SurveyID": 888, "QuotaID": 8}
        second = await click(router)
        assert (second.is_repeat, second.invite.survey_id) == (False, 888)
        await second.entered()
        assert (await click(router)).status is NONE_OPEN
        assert router.status.unused == 0
        rows = {row.survey_id: row for row in await OutcomeLedger(store).rows()}
    assert rows[888].entered_at is not None
    assert panel.asked == [("m-1", 2), ("m-1", 1)]


async def test_a_link_that_is_entered_before_it_can_be_stored_is_so_in_the_ledger(new_address, monkeypatch):
    panel, store = Panel(1), new_address()
    fails = [True]

    def settle_now_and_then(*args, **options):
        if fails[0]:
            raise StoreError("the disk is full")
        return settle(*args, **options)

    monkeypatch.setattr("sampling_async.routing._router._SETTLING", (0.01,) * 1000)
    monkeypatch.setattr("sampling_async.routing._router.settle", settle_now_and_then)
    async with router_of(panel, store) as router:
        route = await click(router)
        await route.entered()
        fails.clear()
        fails.append(False)
        ledger, rows = OutcomeLedger(store), []
        with anyio.fail_after(30):
            while not rows:
                rows = await ledger.rows()
                await anyio.sleep(0.01)
    assert rows[0].entered_at is not None


# --- Clocks that differ, and transactions


async def test_a_link_that_was_entered_by_a_clock_that_is_ahead_is_not_given_again(new_address):
    panel, store, clock, ahead = Panel(1, 2), new_address(), Clock(), Clock()
    ahead.now += 30
    async with (
        router_of(panel, store, clock=clock) as one,
        router_of(panel, store, clock=ahead) as other,
    ):
        await (await click(other)).entered()
        clock.now += 10
        assert (await click(one)).invite.quota_id == 1


@pytest.mark.parametrize("step", [-30, 30])
async def test_clicks_on_hosts_whose_clocks_differ_make_one_request(new_address, monkeypatch, step):
    monkeypatch.setattr("sampling_async.routing._click._WATCH_SECONDS", LONG)
    panel, store, clock, other_clock = Panel(1, 2), new_address(), Clock(), Clock()
    other_clock.now += step
    panel.answers[2] = anyio.Event()
    async with (
        router_of(panel, store, clock=clock) as one,
        router_of(panel, store, clock=other_clock) as other,
        anyio.create_task_group() as tasks,
    ):
        urls = []

        async def go(router, within):
            urls.append((await click(router, within=within)).url)

        tasks.start_soon(go, one, 10)
        await panel.began.wait()
        tasks.start_soon(go, other, LONG)
        await anyio.sleep(0.1)  # it looks now and then
        panel.answers[2].set()
    assert len(set(urls)) == 1
    assert panel.asked == [("m-1", 2)]


async def test_a_click_of_any_length_holds_its_member_for_a_minute_at_most(new_address):
    panel, store, clock = Panel(1, 2), new_address(), Clock()
    panel.answers[2] = anyio.Event()
    async with router_of(panel, store, clock=clock) as one:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(click, one, MEMBER, 1e9)
            await panel.began.wait()
            tasks.cancel_scope.cancel()
        clock.now += 62
        async with router_of(panel, store, clock=clock) as other:
            assert (await click(other, within=5)).invite.quota_id == 1


async def test_a_transaction_whose_end_was_lost_is_not_taken_for_another_click(new_address, monkeypatch):
    panel, lost = Panel(1, 2), []
    async with router_of(panel, new_address()) as router:
        store = router._committer._store
        transaction = store.transaction

        @contextmanager
        def committed_and_lost():
            with transaction():
                yield
            if not lost:
                lost.append(1)
                raise StoreError("the connection was lost")

        monkeypatch.setattr(store, "transaction", committed_and_lost)
        route = await click(router, within=2.0)
        assert lost
        assert (route.status, route.invite.quota_id) == (ROUTED, 2)
    assert panel.asked == [("m-1", 2)]


@pytest.mark.parametrize("way", ["the next click", "the router by itself"])
async def test_a_lease_whose_commit_is_in_doubt_is_found_out(new_address, monkeypatch, way):
    """The commit worked, its end was lost, and the store is away for a while: nothing was sent."""
    panel, lost, store = Panel(1, 2), [], new_address()
    monkeypatch.setattr("sampling_async.routing._router._RETRY_SECONDS", 0.01)
    if way == "the next click":
        monkeypatch.setattr("sampling_async.routing._router._RETRY_SECONDS", LONG)
        monkeypatch.setattr("sampling_async.routing._router._FOLLOW_SECONDS", LONG)
    async with router_of(panel, store) as router:
        own = router._committer._store
        transaction = own.transaction

        @contextmanager
        def committed_and_lost():
            if lost:
                raise StoreError("the database is away")
            with transaction():
                yield
            lost.append(1)
            raise StoreError("the connection was lost")

        with monkeypatch.context() as patch:
            patch.setattr(own, "transaction", committed_and_lost)
            assert (await click(router, within=2.0)).status is UNAVAILABLE
        assert lost
        assert panel.asked == []
        if way == "the next click":
            route = await click(router)
        else:
            await until(lambda: not router._abandoned)
            async with router_of(panel, store) as other:
                route = await click(other)
        assert (route.status, route.invite.quota_id) == (ROUTED, 2)
    assert panel.asked == [("m-1", 2)]


# --- The panel, the client, and the end of the router


async def test_a_panel_that_is_refused_is_told_at_once_and_no_reason_to_leave_pairs_out_for_a_day():
    panel, clock = Panel(1, 2, 3), Clock()
    panel.answers = {3: ResultCode.QUOTA_FULL, 2: ResultCode.PANEL_NOT_ES_ENABLED}
    async with router_of(panel, clock=clock) as router:
        route = await click(router)
        assert (route.status, route.asked) == (UNAVAILABLE, 2)
        assert (await click(router, quota_ids=[2])).asked == 0
        panel.answers.clear()
        clock.now += 601
        assert (await click(router, quota_ids=[2])).status is ROUTED


async def test_a_client_that_repeats_what_may_have_worked_does_not_for_a_click():
    panel = Panel(1, 2)
    panel.answers[2] = httpx.ReadError("cut")
    retry = RetryPolicy(max_attempts=3, retry_ambiguous=True)
    async with (
        live_of(panel, retry=retry) as (client, live),
        SurveyRouter(client, live, store=None) as router,
    ):
        assert (await click(router)).invite.quota_id == 1
    assert panel.asked == [("m-1", 2), ("m-1", 1)]


async def test_a_client_that_is_closed_sends_nothing_and_settles_it(new_address):
    panel, store = Panel(1, 2), new_address()
    async with live_of(panel) as (client, live), SurveyRouter(client, live, store=store) as router:
        await client.aclose()
        assert (await click(router)).status is UNAVAILABLE
    async with router_of(panel, store) as router:
        assert (await click(router)).invite.quota_id == 2
    assert panel.asked == [("m-1", 2)]


async def test_closing_ends_the_clicks_that_wait_and_says_whether_an_invite_was_requested(monkeypatch):
    monkeypatch.setattr("sampling_async.routing._router._GRACE_SECONDS", 0.05)
    panel, routes = Panel(1, 2), []
    panel.answers[2] = anyio.Event()

    async def go(router, number):
        routes.append(await click(router, Member(f"m-{number}", MEMBER.profile)))

    async with anyio.create_task_group() as tasks, router_of(panel) as router:
        for number in range(8):
            tasks.start_soon(go, router, number % 4)
        await until(lambda: len(panel.asked) == 4)
    assert [route.status for route in routes] == [UNCLEAR] * 8
    assert sum(route.asked for route in routes) == 4


# --- What is known of all members


async def test_once_a_day_what_is_older_than_the_router_remembers_goes(new_address, monkeypatch):
    monkeypatch.setattr("sampling_async.routing._router._FOLLOW_SECONDS", 0.01)
    panel, store, clock = Panel(1, 2), new_address(), Clock()
    async with router_of(panel, store, clock=clock, remembers=1) as router:
        monkeypatch.setattr(router._book._changes, "all", None)  # it is not read anew
        await (await click(router)).entered()
        clock.now += 43_200  # another day, but remembered
        await until(lambda: router._book._cleared_on == clock.now // 86_400)
        assert ids(router.offers(MEMBER)) == [1]
        clock.now += 86_400
        await until(lambda: not len(router._book._histories))
        # The store knows all the same.
        assert (await click(router)).invite.quota_id == 1
    assert panel.asked == [("m-1", 2), ("m-1", 1)]


def open_quota(_quota_id: int) -> bool:
    return True


async def test_histories_forget_refusals_that_have_ended_and_keep_the_rest():
    histories, now = Histories(), 1_000_000.0
    history = MemberHistory()
    for quota_id, until_ in ((1, now - 1), (2, now + 1)):
        link = Link(quota_id, 100 * quota_id, 1, "refused", None, now - 9, until_, 10, None, None)
        history.add_link(link, now)
    history.add_start(300, 1, 3, now - 50)
    histories.put("m", history)
    await histories.forget(now - 100, now)
    assert histories.of("m").left_out(now, open_quota) == ({(300, 1)}, {2})
    await histories.forget(now - 10, now + 2)
    assert not len(histories)


def test_a_history_is_the_same_when_it_was_packed():
    history, now = MemberHistory(), 1_800_000_000.0
    most = 2**63 - 1
    history.add_start(most, most, most, now)
    history.add_end("completion", 7, 2, 8, now)
    history.add_invite(9, 3, now)
    history.add_link(Link(1, 5, 1, "asking", "me", now, now + 3, None, None, None), now)
    history.add_link(Link(2, 6, 1, "invited", None, now, now + 60, 1, None, None), now)
    history.add_link(Link(4, 40, 1, "unclear", None, now, now, None, None, None), now)
    histories = Histories()
    histories.put("m", history)
    assert histories.of("m").facts == history.facts
    surveys = {(most, most), (7, 2), (8, 0), (9, 3), (40, 1)}
    assert histories.of("m").left_out(now, open_quota) == (surveys, set())
    assert histories.of("m").left_out(now + 100, open_quota) == (surveys | {(5, 1), (6, 1)}, set())
    assert histories.of("m").left_out(now, lambda _: False) == (surveys | {(6, 1)}, set())
    assert histories.of("another").facts == {}


def test_a_member_takes_less_than_400_bytes():
    """A code of 36 characters, a start and its end, a refusal: as a member of the field has them."""
    histories, members = Histories(), [f'"{number:036}"' for number in range(20_000)]
    tracemalloc.start()
    try:
        for member in members:
            history = MemberHistory()
            history.add_start(1_234_567, 1, 9_876_543, 1.8e9)
            history.add_end("completion", 1_234_567, 1, None, 1.8e9)
            history.add_link(Link(7_654_321, 99_999, 1, "refused", None, 1.8e9, 1.8e9, 10, None, None), 1.8e9)
            histories.put(member, history)
        a_member = tracemalloc.get_traced_memory()[0] / len(members) + sys.getsizeof(members[0])
    finally:
        tracemalloc.stop()
    assert a_member < 400


async def test_quotas_are_valued_off_the_event_loop(monkeypatch):
    """Also when the shares of completes are read anew: 8,000 quotas take some milliseconds."""
    monkeypatch.setattr("sampling_async.routing._router._FOLLOW_SECONDS", 0.01)
    chance, threads, clock = LearnedRates.chance, [], Clock()

    def noted(*arguments):
        threads.append(get_ident())
        return chance(*arguments)

    monkeypatch.setattr(LearnedRates, "chance", noted)
    async with router_of(Panel(1, 2), clock=clock) as router:
        assert ids(router.offers(MEMBER)) == [2, 1]
        clock.now += 601
        await until(lambda: len(threads) == 4 and router._book._values)
        assert ids(router.offers(MEMBER)) == [2, 1]
    assert len(threads) == 4
    assert get_ident() not in threads


async def test_what_was_read_a_moment_ago_is_not_applied_again(new_address):
    panel, store, clock = Panel(1, 2), new_address(), Clock()
    async with router_of(panel, store, clock=clock) as router:
        changes = Changes(store_of(store).copy())
        assert not len(changes.all(0.0, clock.now)[0])
        await click(router)
        ((member, what, values),) = changes.added(clock.now)
        assert (member, what, values[:4]) == ('"m-1"', "link", (2, 200, 1, "invited"))
        assert "https" not in repr(values)
        clock.now += 1
        assert changes.added(clock.now) == []
        await router.entered("m-1", 2)
        assert sorted(what for _, what, _ in changes.added(clock.now)) == ["link", "start"]


async def test_facts_of_quotas_are_not_read_again_and_ends_that_become_visible_late_are_not_missed(new_address):
    store, clock = new_address(), Clock()

    async def quota_closes(number):
        fields = {"SurveyId": 5, "QuotaId": number, "Status": "Closed"}
        assert (await post(inbox, "quota_status", fields)).status == 200

    async with Inbox(store, secrets=SECRET, clock=clock) as inbox:
        await ended(inbox, "completion", 2, Revenue=100)
        changes = Changes(store_of(store).copy())
        assert len(changes.all(0.0, clock.now)[0]) == 1
        for number in range(3):
            await quota_closes(number)
            assert changes.added(clock.now) == []
            assert [*changes._facts._marks] == [number + 2]
        await ended(inbox, "terminate", 3, Reason="SCREENED_OUT")
        await quota_closes(9)
        with opened(store) as mine:
            mine.execute("UPDATE facts SET id = -5 WHERE id = 5")  # as if it were not committed yet
        assert changes.added(clock.now) == []
        with opened(store) as mine:
            mine.execute("UPDATE facts SET id = 5 WHERE id = -5")
        ((member, what, _),) = changes.added(clock.now)
        assert (member, what) == ('"m-1"', "end")
        assert changes.added(clock.now) == []
        assert [*changes._facts._marks] == [6]


async def test_what_a_reading_that_fails_has_looked_at_is_read_again(new_address, monkeypatch):
    store, clock = new_address(), Clock()
    await OutcomeLedger(store, clock=clock).invited([])  # makes the tables
    opened_store = store_of(store).copy()
    changes, reading = Changes(opened_store), opened_store.reading
    changes.all(0.0, clock.now)
    await invited_by_a_campaign(store, clock, 2)

    @contextmanager
    def failing(*given, **named):
        with reading(*given, **named) as run:

            def run_but_links(query, *values):
                if "FROM links WHERE changed" in query:
                    raise StoreError("away")
                return run(query, *values)

            yield run_but_links

    monkeypatch.setattr(opened_store, "reading", failing)
    for _ in range(2):
        with pytest.raises(StoreError, match="away"):
            changes.added(clock.now)
    monkeypatch.undo()
    assert [member for member, *_ in changes.added(clock.now)] == ['"m-1"']


async def test_invites_of_a_campaign_are_read_once(new_address):
    store, clock = new_address(), Clock()
    await OutcomeLedger(store, clock=clock).invited([])  # makes the tables
    changes = Changes(store_of(store).copy())
    changes.all(0.0, clock.now)
    for number in range(3):
        await invited_by_a_campaign(store, clock, 2, f"m-{number}")
        assert [member for member, *_ in changes.added(clock.now)] == [f'"m-{number}"']
        assert len(changes._seen) == 1  # none of those before
    assert changes.added(clock.now) == []


@pytest.mark.parametrize(
    ("column", "value"),
    [("until", "later"), ("survey", "a survey"), ("asked", "noon"), ("entered", "noon"), ("invite", "{")],
)
async def test_a_damaged_link_concerns_its_member_alone(tmp_path, column, value):
    store = tmp_path / "s.db"
    async with router_of(Panel(1, 2), store) as router:
        await click(router)
        with opened(store) as mine:
            mine.execute(f"UPDATE links SET {column} = ?", (value,))
        for _ in range(2):
            with pytest.raises(StoreError, match="is damaged: it holds a value that no inbox writes"):
                await click(router)
        assert router.status.is_ready
        assert (await click(router, Member("m-2", MEMBER.profile))).status == "routed"


async def test_a_damaged_row_keeps_no_other_one_from_being_known(tmp_path, caplog):
    clock, store = Clock(), tmp_path / "s.db"

    def said() -> list[str]:
        return [record.message for record in caplog.records if "damaged" in record.message]

    async with router_of(Panel(1, 2), store, clock=clock) as router:
        await click(router)
        with opened(store) as mine:
            mine.execute("UPDATE links SET survey = 'a survey', changed = ?", (clock.now + 1,))
            columns = "member, quota, survey, wave, state, asked, until, changed"
            for number in range(300):
                link = (f'"other-{number}"', 2, 200, 1, "unclear", clock.now, clock.now, clock.now + 1)
                mine.execute(f"INSERT INTO links ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", link)
        clock.now += 2
        await until(said)
        assert len(router._book._histories) >= 300
        assert router.status.is_ready
    async with router_of(Panel(1, 2), store, clock=clock) as again:
        assert ids(again.offers(Member("other-7", MEMBER.profile))) == [1]
        await until(lambda: len(said()) == 2)
    assert {*said()} == {"some members cannot be served: the store is damaged in 1 row; use a backup"}


async def test_offers_leave_out_what_a_dead_process_was_asking_for(tmp_path, monkeypatch):
    monkeypatch.setattr("sampling_async.routing._router._FOLLOW_SECONDS", 0.01)
    panel, store, clock = Panel(1, 2), tmp_path / "s.db", Clock()
    async with router_of(panel, store, clock=clock) as router:
        wish = Wish(
            owner="dead",
            member_code="m-1",
            offers=router.offers(MEMBER, most=1),
            most=1,
            quota_ids=None,
            takes_links=True,
            caps=Caps(),
            watches=True,
            began=clock.now,
            seconds=3.0,
        )
        await router._committer.run(partial(begin, wish=wish, clock=clock))
        clock.now += 1
        await until(lambda: router._book._changes._read_at == clock.now)
        assert ids(router.offers(MEMBER)) == [2, 1]
        clock.now += 4
        await until(lambda: ids(router.offers(MEMBER)) == [1])


# --- Cancelled at any moment


async def test_a_click_that_is_cancelled_in_any_turn_of_the_loop_costs_no_second_request(tmp_path):
    panel, turns, is_over = Panel(1, 2, 3), 0, False
    panel.answers = {3: ResultCode.QUOTA_FULL}
    async with router_of(panel, tmp_path / "s.db") as router:
        while not is_over:
            member, routes = Member(f"m-{turns}", MEMBER.profile), []

            async def go(member=member, routes=routes):
                routes.append(await click(router, member))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(go)
                for _ in range(turns):
                    await checkpoint()
                tasks.cancel_scope.cancel()
            first = await click(router, member)
            await first.entered()
            second = await click(router, member)
            assert (first.status, first.invite and first.invite.quota_id) == (ROUTED, 2)
            assert (second.status, second.invite and second.invite.quota_id) == (ROUTED, 1)
            turns, is_over = turns + 1, bool(routes)
    assert turns > 5
    assert len(panel.asked) == len(set(panel.asked))


# --- Arguments, and times that cannot be


async def test_what_cannot_be_stored_is_refused_and_ends_no_other_click(tmp_path, monkeypatch):
    async with router_of(Panel(1, 2), tmp_path / "s.db") as router:
        for code, quota_id in (("m-1", 2**63), ("m-1", "x"), (None, 1), (b"\xff", 1), ("", 1)):
            with pytest.raises(InvalidRequestError):
                await router.entered(code, quota_id)
        monkeypatch.setattr("sampling_async.routing._router._SETTLING", (0.0,))
        monkeypatch.setattr("sampling_async.routing._router._STORED_SECONDS", 0.0)
        monkeypatch.setattr("sampling_async.routing._router.enter", lambda *_, **__: 1 / 0)
        await router.entered("m-1", 1)
        for _ in range(20):
            await checkpoint()
        assert (await click(router)).status == "routed"
    with pytest.raises(InvalidRequestError):
        await OutcomeLedger(tmp_path / "s.db").entered("m-1", 2**63)


@pytest.mark.parametrize("date", ["9999-12-31T23:59:59", "0001-01-01T00:00:00", "2020-01-01"])
async def test_completes_with_impossible_times_count_on_the_day_they_came(tmp_path, date):
    store, clock = tmp_path / "s.db", Clock()
    async with Inbox(store, secrets=SECRET, clock=clock) as inbox:
        for number in range(5):
            await ended(inbox, "completion", 10 + number, Revenue=1, DateTime=date)
    async with router_of(Panel(1, 2), store, clock=clock, caps=Caps(completes=5)) as router:
        assert (await click(router)).status != "routed"
        clock.now += 86_400
        assert (await click(router)).status == "routed"
