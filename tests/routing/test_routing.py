"""The click: the best link in time, one for each pair, over restarts and processes."""

from __future__ import annotations

import math
import pickle
import sqlite3
import threading
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial

import anyio
import httpx
import numpy as np
import pytest
from anyio import wait_all_tasks_blocked
from attrs import evolve
from doubles import until
from panel_kit import FEMALE, GENDER, quota, row, sub_quota
from routing_kit import LONG, MEMBER, NOT_SENT, Clock, Panel, click, ended, ids, live_of, router_of
from store_kit import SECRET, post

from sampling_async import InvalidRequestError, Price, ResultCode
from sampling_async.matching import Member
from sampling_async.notifications import Inbox, OutcomeLedger, StoreError
from sampling_async.routing import Caps, RouteStatus, SurveyRouter
from sampling_async.routing._history import MemberHistory
from sampling_async.routing._offers import RequestSizer

ROUTED, NONE_OPEN, UNAVAILABLE, UNCLEAR = RouteStatus


@asynccontextmanager
async def both_of(panel, store, clock, **options):
    """Yield a router and an inbox over the same store."""
    async with (
        router_of(panel, store, clock=clock, **options) as router,
        Inbox(store, secrets=SECRET, clock=clock) as inbox,
    ):
        yield router, inbox


# --- Offers


async def test_offers_are_the_best_first_and_make_no_request():
    panel = Panel(1, 3, 2)
    async with router_of(panel) as router:
        assert ids(router.offers(MEMBER)) == [3, 2, 1]
        assert ids(router.offers(MEMBER, most=2)) == [3, 2]
        assert router.offers(Member("w", {GENDER: FEMALE})) == []
        (best, *_) = router.offers(MEMBER)
    assert panel.asked == []
    assert (best.survey_id, best.wave_id, best.loi, best.ir) == (300, 1, 10, 30)
    assert (best.price, best.value, best.is_certain) == (Price(3.0, 1), pytest.approx(0.9), True)


async def test_offers_have_one_quota_of_a_survey():
    panel = Panel(1, 2)
    first, second = panel.inventory.surveys
    more = quota([sub_quota(row(GENDER, 2000247))], quota_id=5, remaining=50)
    panel.inventory = evolve(panel.inventory, surveys=(first, evolve(second, quotas=(*second.quotas, more))))
    async with router_of(panel) as router:
        # Of one survey, the quota that needs most.
        assert ids(router.offers(MEMBER)) == [5, 1]


async def test_a_quota_that_may_fit_has_half_the_value():
    panel = Panel(2, 3)
    first, second = panel.inventory.surveys
    asks_more = quota([sub_quota(row(GENDER, 2000247))], [sub_quota(row(77, 1, routable=True))], quota_id=3)
    panel.inventory = evolve(panel.inventory, surveys=(first, evolve(second, quotas=(asks_more,))))
    async with router_of(panel) as router:
        certain, possible = router.offers(MEMBER)
    assert (certain.quota_id, certain.value, certain.is_certain) == (2, pytest.approx(0.6), True)
    assert (possible.quota_id, possible.value, possible.is_certain) == (3, pytest.approx(0.45), False)


async def test_the_chance_is_learned_from_the_ledger_of_outcomes(new_address):
    store, clock = new_address(), Clock()
    async with router_of(Panel(1, 2), store, clock=clock) as router:
        for number in range(40):
            await click(router, Member(f"a{number}", MEMBER.profile), quota_ids=[1])
            await router.entered(f"a{number}", 1)
            await click(router, Member(f"b{number}", MEMBER.profile), quota_ids=[2])
            await router.entered(f"b{number}", 2)
    async with Inbox(store, secrets=SECRET, clock=clock) as inbox:
        for number in range(40):
            await ended(inbox, "completion", 1, member=f"a{number}", Revenue=100)
    clock.now += 7200
    async with router_of(Panel(1, 2), store, clock=clock) as router:
        best, other = router.offers(MEMBER)
    # 40 of 40, and 20 more of which 30 % complete; of the other none of 40.
    assert (best.quota_id, best.value) == (1, pytest.approx(46 / 60))
    assert (other.quota_id, other.value) == (2, pytest.approx(2 * 6 / 60))


async def test_offers_leave_out_what_was_started_ended_and_refused(new_address):
    panel, store, clock = Panel(1, 2, 3, 4), new_address(), Clock()
    panel.answers = {4: ResultCode.MEMBER_DOES_NOT_MATCH_QUOTA, 3: 1}
    async with router_of(panel, store, clock=clock) as router:
        assert (await click(router)).invite.quota_id == 3
        # A link that was not entered can still be clicked on.
        assert ids(router.offers(MEMBER)) == [3, 2, 1]
        await router.entered("m-1", 3)
        assert ids(router.offers(MEMBER)) == [2, 1]
        async with Inbox(store, secrets=SECRET, clock=clock) as inbox:
            await ended(inbox, "terminate", 2, Reason="SCREENED_OUT")
        await until(lambda: ids(router.offers(MEMBER)) == [1])
        assert ids(router.offers(Member("another", MEMBER.profile))) == [4, 3, 2, 1]


async def test_what_another_router_has_stored_is_known_soon(new_address):
    panel, store = Panel(1, 2), new_address()
    async with router_of(panel, store) as one, router_of(panel, store) as two:
        route = await click(one)
        await route.entered()
        await until(lambda: ids(two.offers(MEMBER)) == [1])


# --- Clicks


async def test_a_click_gets_the_link_of_the_best_quota():
    panel = Panel(1, 2)
    async with router_of(panel) as router:
        route = await click(router)
    assert (route.status, route.is_repeat, route.asked) == (ROUTED, False, 1)
    assert route.url == route.invite.url == "https://survey.example/m-1/2/1"
    assert 0 < route.seconds < LONG
    assert panel.asked == [("m-1", 2)]
    assert "survey.example" not in repr(route)


async def test_the_next_click_gets_the_same_link_until_it_is_entered():
    panel = Panel(1, 2)
    async with router_of(panel) as router:
        first, second = await click(router), await click(router)
        assert (second.status, second.is_repeat, second.asked) == (ROUTED, True, 0)
        assert second.url == first.url
        await second.entered()
        third = await click(router)
        assert (third.is_repeat, third.invite.quota_id) == (False, 1)
    assert panel.asked == [("m-1", 2), ("m-1", 1)]


async def test_a_herd_of_one_member_is_one_question_to_the_store_and_one_request():
    panel, wishes = Panel(1, 2), []
    panel.answers[2] = anyio.Event()
    async with router_of(panel) as router, anyio.create_task_group() as tasks:
        routes = []
        run = router._committer.run

        async def counted(operation, **options):
            wishes.append(operation)
            return await run(operation, **options)

        router._committer.run = counted

        async def go():
            routes.append(await click(router))

        for _ in range(2_000):
            tasks.start_soon(go)
        await panel.began.wait()
        await wait_all_tasks_blocked()
        panel.answers[2].set()
    assert {(route.status, route.url) for route in routes} == {(ROUTED, "https://survey.example/m-1/2/1")}
    assert sum(route.is_repeat for route in routes) == 1_999
    assert len(wishes) == 2  # the lease, and what became of it
    assert panel.asked == [("m-1", 2)]


async def test_clicks_that_share_a_request_each_wait_for_their_own_time():
    panel, routes = Panel(1, 2), {}
    panel.answers[2] = anyio.Event()
    async with router_of(panel) as router, anyio.create_task_group() as tasks:

        async def go(name, within):
            routes[name] = await click(router, within=within)

        tasks.start_soon(go, "short", 2.5)  # enough for the other to join, on a busy machine
        await panel.began.wait()
        tasks.start_soon(go, "long", LONG)
        await until(lambda: "short" in routes)
        panel.answers[2].set()
    assert (routes["short"].status, routes["short"].asked) == (UNCLEAR, 1)
    assert (routes["long"].status, routes["long"].is_repeat) == (ROUTED, True)
    assert panel.asked == [("m-1", 2)]


async def test_the_next_request_of_a_shared_click_has_the_time_of_the_longest():
    panel, routes = Panel(1, 2), {}
    full = anyio.Event()
    panel.answers[2] = (full, ResultCode.QUOTA_FULL)
    async with router_of(panel) as router, anyio.create_task_group() as tasks:

        async def go(name, within):
            routes[name] = await click(router, within=within)

        tasks.start_soon(go, "short", 2.5)  # enough for the other to join, on a busy machine
        await panel.began.wait()
        tasks.start_soon(go, "long", LONG)
        await until(lambda: "short" in routes)
        full.set()
    assert routes["long"].invite.quota_id == 1
    assert panel.asked == [("m-1", 2), ("m-1", 1)]


async def test_clicks_with_other_wishes_or_answers_are_no_part_of_it():
    panel, routes = Panel(1, 2, 3), []
    panel.answers[3] = anyio.Event()
    async with router_of(panel) as router, anyio.create_task_group() as tasks:

        async def go(member=MEMBER, **options):
            routes.append(await click(router, member, **options))

        tasks.start_soon(go)
        await panel.began.wait()
        for _ in range(2):
            tasks.start_soon(partial(go, quota_ids=[1]))
            tasks.start_soon(go, Member("m-1", {GENDER: FEMALE}))
        await wait_all_tasks_blocked()
        assert panel.asked == [("m-1", 3)]
        panel.answers[3].set()
    # A link that waits is given whatever the answers are now.
    assert [route.status for route in routes] == [ROUTED] * 5
    assert sum(not route.is_repeat for route in routes) == 2
    assert panel.asked == [("m-1", 3), ("m-1", 1)]


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_double_click_gets_the_link_that_the_first_click_has_entered(new_address, processes):
    panel, store, clock = Panel(1, 2), new_address(), Clock()
    panel.answers[2] = anyio.Event()
    async with (
        router_of(panel, store, clock=clock) as one,
        router_of(panel, store, clock=clock) as other,
        anyio.create_task_group() as tasks,
    ):
        urls = []

        async def go(router):
            route = await click(router)
            await route.entered()
            urls.append(route.url)

        tasks.start_soon(go, one)
        await panel.began.wait()
        tasks.start_soon(go, other if processes == 2 else one)
        await wait_all_tasks_blocked()
        clock.now += 1
        panel.answers[2].set()
        await until(lambda: len(urls) == 2)
        assert len(set(urls)) == 1
        clock.now += 1
        assert (await click(one)).invite.quota_id == 1


async def test_clicks_in_two_processes_make_one_request(new_address):
    panel = Panel(1, 2)
    panel.answers[2] = anyio.Event()
    store = new_address()
    async with (
        router_of(panel, store) as one,
        router_of(panel, store) as two,
        anyio.create_task_group() as tasks,
    ):
        routes = []

        async def go(router):
            routes.append(await click(router))

        tasks.start_soon(go, one)
        await panel.began.wait()
        tasks.start_soon(go, two)
        await anyio.sleep(0.1)  # it looks now and then
        assert routes == []
        panel.answers[2].set()
    assert len({route.url for route in routes}) == 1
    assert panel.asked == [("m-1", 2)]


async def test_a_restart_remembers(new_address):
    panel, store = Panel(1, 2), new_address()
    async with router_of(panel, store) as router:
        first = await click(router)
    async with router_of(panel, store) as router:
        assert ids(router.offers(MEMBER)) == [2, 1]
        second = await click(router)
        assert (second.url, second.is_repeat) == (first.url, True)
        await second.entered()
    async with router_of(panel, store) as router:
        assert ids(router.offers(MEMBER)) == [1]
    assert panel.asked == [("m-1", 2)]


async def test_a_refusal_moves_on_to_the_next_best():
    panel = Panel(1, 2, 3)
    panel.answers = {3: ResultCode.MEMBER_DOES_NOT_MATCH_QUOTA, 2: ResultCode.SURVEY_TAKEN}
    async with router_of(panel) as router:
        route = await click(router)
        assert (route.status, route.invite.quota_id, route.asked) == (ROUTED, 1, 3)
        await route.entered()
        # A pair that was refused is not requested again.
        assert (await click(router)).status is NONE_OPEN
    assert panel.asked == [("m-1", 3), ("m-1", 2), ("m-1", 1)]


async def test_if_all_refuse_nothing_is_open():
    panel = Panel(1, 2)
    panel.answers = dict.fromkeys((1, 2), ResultCode.MEMBER_DOES_NOT_MATCH_QUOTA)
    async with router_of(panel) as router:
        route = await click(router)
        assert (route.status, route.url, route.asked) == (NONE_OPEN, None, 2)
        await route.entered()  # of no use, and no error
        assert (await click(router)).asked == 0


async def test_a_member_who_fits_nothing_costs_no_request():
    panel = Panel(1)
    async with router_of(panel) as router:
        assert (await click(router, Member("w", {GENDER: FEMALE}))).status is NONE_OPEN
    assert panel.asked == []


@pytest.mark.parametrize("code", [ResultCode.QUOTA_FULL, ResultCode.SURVEY_COMPLETES_CAP_ACHIEVED])
async def test_a_quota_or_survey_that_takes_nobody_is_closed_for_all(code):
    panel = Panel(1, 2)
    panel.answers[2] = code
    async with router_of(panel) as router:
        assert (await click(router)).invite.quota_id == 1
        assert ids(router.offers(Member("another", MEMBER.profile))) == [1]


async def test_a_member_who_is_refused_as_such_gets_nothing_more_on_this_day():
    panel, clock = Panel(1, 2), Clock()
    panel.answers[2] = ResultCode.MAX_DAILY_EXCEEDED
    async with router_of(panel, clock=clock) as router:
        assert (await click(router)).status is NONE_OPEN
        assert router.offers(MEMBER) == []
        assert panel.asked == [("m-1", 2)]
        panel.answers.clear()
        midnight = (clock.now // 86_400 + 1) * 86_400
        clock.now = midnight - 1
        assert (await click(router)).status is NONE_OPEN
        clock.now = midnight + 1  # the operators count by UTC days
        assert (await click(router)).status is ROUTED


async def test_answers_that_are_arrays_are_compared_too():
    member = Member("m-1", {**MEMBER.profile, 5: np.array([1, 2])})
    async with router_of(Panel(1)) as router:
        results = [await click(router, member), await click(router, member, within=math.inf)]
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(click, router, Member("m-2", dict(member.profile)))
    assert [each.status for each in results] == [ROUTED, ROUTED]


async def test_surveys_to_leave_out_are_left_out_of_each_request():
    panel = Panel(1, 2)
    panel.answers[2] = ResultCode.MEMBER_DOES_NOT_MATCH_QUOTA
    async with router_of(panel) as router:
        surveys = [offer.survey_id for offer in router.offers(MEMBER) if offer.quota_id == 1]
        member = Member("m-1", MEMBER.profile, exclude_surveys=iter(surveys))
        assert (await click(router, member)).status is NONE_OPEN
    assert panel.asked == [("m-1", 2)]


async def test_a_fault_of_the_service_leaves_the_pair_out_for_minutes():
    panel, clock = Panel(1), Clock()
    panel.answers[1] = ResultCode.TECHNICAL_ERROR
    async with router_of(panel, clock=clock) as router:
        assert (await click(router)).status is NONE_OPEN
        assert (await click(router)).asked == 0
        panel.answers.clear()
        clock.now += 601
        assert (await click(router)).status is ROUTED


async def test_a_click_on_an_offer_asks_for_that_offer():
    panel = Panel(1, 2, 3)
    panel.answers[1] = ResultCode.MEMBER_DOES_NOT_MATCH_QUOTA
    async with router_of(panel) as router:
        best = await click(router)
        assert best.invite.quota_id == 3
        # The link that waits is not the one that was clicked on.
        route = await click(router, quota_ids=[1, 2])
        assert (route.invite.quota_id, route.asked) == (2, 2)
        again = await click(router, quota_ids=[2])
        assert (again.url, again.is_repeat) == (route.url, True)
        assert (await click(router, quota_ids=[99])).status is NONE_OPEN
        assert (await click(router, quota_ids=[])).status is NONE_OPEN
    assert panel.asked == [("m-1", 3), ("m-1", 1), ("m-1", 2)]


async def test_what_is_not_sent_may_be_requested_at_the_next_click():
    panel = Panel(1)
    panel.answers[1] = NOT_SENT
    async with router_of(panel) as router:
        assert (await click(router)).status is UNAVAILABLE
        assert ids(router.offers(MEMBER)) == [1]
        panel.answers.clear()
        assert (await click(router)).status is ROUTED


async def test_a_refused_panel_is_unavailable():
    panel = Panel(1, 2)
    panel.answers[2] = httpx.Response(400, json={"ResultCode": 3, "Result": "PANEL_DOES_NOT_EXIST"})
    async with router_of(panel) as router:
        route = await click(router)
        assert (route.status, route.asked) == (UNAVAILABLE, 1)
        assert ids(router.offers(MEMBER)) == [2, 1]


# --- What is unclear


async def test_a_pair_whose_fate_is_unclear_is_not_requested_again(new_address):
    panel, store = Panel(1, 2, 3, 4), new_address()
    panel.answers = {4: httpx.ReadError("cut")}
    async with router_of(panel, store) as router:
        route = await click(router)
        # Another survey was requested: there may be an invite for the first, but the member has none.
        assert (route.status, route.invite.quota_id, route.asked) == (ROUTED, 3, 2)
        panel.answers.clear()
        await route.entered()
        assert ids(router.offers(MEMBER)) == [2, 1]
        assert (await click(router, quota_ids=[4])).status is NONE_OPEN
    async with router_of(panel, store) as router:
        assert (await click(router, quota_ids=[4])).status is NONE_OPEN
    assert panel.asked.count(("m-1", 4)) == 1


async def test_a_click_stops_after_two_requests_without_a_response():
    panel = Panel(1, 2, 3, 4)
    panel.answers = {quota_id: httpx.ReadError("cut") for quota_id in (4, 3, 2)}
    async with router_of(panel) as router:
        route = await click(router)
        assert (route.status, route.asked) == (UNCLEAR, 2)


async def test_a_link_that_comes_late_is_given_to_the_next_click():
    panel = Panel(1, 2)
    late = panel.answers[2] = anyio.Event()
    async with router_of(panel) as router:
        route = await click(router, within=1.1)
        assert (route.status, route.url, route.asked) == (UNCLEAR, None, 1)
        late.set()
        await until(lambda: router.status.invited == 1)
        assert router.status.unused == 1
        second = await click(router)
        assert (second.status, second.is_repeat, second.invite.quota_id) == (ROUTED, True, 2)
        assert router.status.unused == 0
    assert panel.asked == [("m-1", 2)]


async def test_a_click_that_is_cancelled_loses_nothing():
    panel = Panel(1, 2)
    answer = panel.answers[2] = anyio.Event()
    async with router_of(panel) as router:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(click, router)
            await panel.began.wait()
            tasks.cancel_scope.cancel()
        answer.set()
        await until(lambda: router.status.invited == 1)
        route = await click(router)
        assert (route.is_repeat, route.invite.quota_id) == (True, 2)
    assert panel.asked == [("m-1", 2)]


async def test_a_process_that_dies_leaves_the_pair_unclear(tmp_path):
    panel, store, clock = Panel(1, 2), tmp_path / "s.db", Clock()
    async with router_of(panel, store, clock=clock) as router:
        await click(router)
    # As a process leaves it that was killed after the request: its lease ends three seconds later.
    with sqlite3.connect(store) as database:
        change = "UPDATE links SET state = 'asking', owner = 'dead', asked = ?, until = ?, invite = NULL"
        database.execute(change, (clock.now, clock.now + 3))
    database.close()
    async with router_of(panel, store, clock=clock) as router:
        # Until then it may be running, and another process waits for it.
        assert (await click(router, within=0.3)).status is UNCLEAR
        clock.now += 4
        assert (await click(router)).invite.quota_id == 1
    assert panel.asked == [("m-1", 2), ("m-1", 1)]


async def test_a_clock_that_was_set_back_does_not_hold_the_member(tmp_path):
    panel, store, clock = Panel(1, 2), tmp_path / "s.db", Clock()
    async with router_of(panel, store, clock=clock) as router:
        await click(router)
    with sqlite3.connect(store) as database:
        change = "UPDATE links SET state = 'asking', owner = 'dead', asked = ?, until = ?, invite = NULL"
        database.execute(change, (clock.now + 3600, clock.now + 3603))
    database.close()
    async with router_of(panel, store, clock=clock) as router:
        assert (await click(router)).invite.quota_id == 1


# --- Away


async def test_an_outage_is_told_at_once():
    panel = Panel(1, 2)
    async with router_of(panel) as router:
        panel.is_away = True
        for number in range(6):  # the first ones find out
            assert (await click(router, Member(f"m{number}", MEMBER.profile))).status in {UNAVAILABLE, UNCLEAR}
        route = await click(router)
        assert route.status is UNAVAILABLE
        panel.is_away = False
        assert ids(router.offers(MEMBER)) == [2, 1]


async def test_without_an_inventory_a_router_opens_and_gives_links_that_wait(new_address):
    panel, store = Panel(1, 2), new_address()
    async with router_of(panel, store) as router:
        first = await click(router)
    panel.is_away = True
    async with router_of(panel, store) as router:
        assert (router.status.is_ready, router.status.reason) == (False, "there is no inventory yet")
        again = await click(router)
        assert (again.url, again.is_repeat) == (first.url, True)
        assert (await click(router, Member("another", MEMBER.profile))).status is UNAVAILABLE
        with pytest.raises(RuntimeError, match="no index yet"):
            router.offers(MEMBER)


async def test_a_store_that_fails_costs_no_request(new_address, monkeypatch):
    panel = Panel(1)
    async with router_of(panel, new_address()) as router:

        def fail(*_):
            raise StoreError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(router._committer._store, "execute", fail)
            assert (await click(router)).status is UNAVAILABLE
            assert router.status.reason == "the disk is full"
        assert panel.asked == []
        assert (await click(router)).status is ROUTED


async def test_a_link_that_cannot_be_stored_is_given_and_stored_later(new_address, monkeypatch):
    panel, store = Panel(1), new_address()
    answer = panel.answers[1] = anyio.Event()
    async with router_of(panel, store) as router:
        execute, routes = router._committer._store.execute, []

        async def go():
            routes.append(await click(router))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(go)
            await panel.began.wait()

            def fail(*_):
                raise StoreError("the disk is full")

            monkeypatch.setattr(router._committer._store, "execute", fail)
            answer.set()
        assert routes[0].status is ROUTED
        monkeypatch.setattr(router._committer._store, "execute", execute)
        ledger = OutcomeLedger(store)
        with anyio.fail_after(30):
            while not await ledger.rows():  # noqa: ASYNC110  nobody tells
                await anyio.sleep(0.01)


async def test_a_member_who_has_a_link_does_not_wait_for_a_store_that_hangs(monkeypatch):
    go_on = threading.Event()
    async with router_of(Panel(1, 2)) as router:
        route = await click(router)
        store = router._committer._store
        execute = store.execute

        def hang(*given):
            go_on.wait(30)
            return execute(*given)

        monkeypatch.setattr(store, "execute", hang)
        with anyio.fail_after(15):
            await route.entered()
        assert ids(router.offers(MEMBER)) == [2, 1]  # it is not stored yet
        go_on.set()
        await until(lambda: ids(router.offers(MEMBER)) == [1])


async def test_a_link_is_given_although_the_store_hangs_after_the_response(monkeypatch):
    panel, go_on = Panel(1, 2), threading.Event()
    answer = panel.answers[2] = anyio.Event()
    async with router_of(panel) as router:
        store, routes = router._committer._store, []
        execute = store.execute

        def hang(*given):
            go_on.wait(30)
            return execute(*given)

        async def go():
            routes.append(await click(router))

        with anyio.fail_after(15):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(go)
                await panel.began.wait()
                monkeypatch.setattr(store, "execute", hang)
                answer.set()
        assert routes[0].status is ROUTED
        go_on.set()
        again = await click(router)
        assert (again.is_repeat, again.url) == (True, routes[0].url)


async def test_an_entry_that_cannot_be_stored_is_stored_later(monkeypatch):
    async with router_of(Panel(1, 2)) as router:
        route = await click(router)
        store = router._committer._store
        execute, fails = store.execute, [1] * 3

        def fail(*given):
            if fails:
                fails.pop()
                raise StoreError("the disk is full")
            return execute(*given)

        monkeypatch.setattr(store, "execute", fail)
        await route.entered()
        await until(lambda: ids(router.offers(MEMBER)) == [1])
        assert not fails


# --- Links


async def test_a_link_falls_away_with_its_quota():
    panel = Panel(1, 2)
    async with live_of(panel) as (client, live), SurveyRouter(client, live, store=None) as router:
        assert (await click(router)).invite.quota_id == 2
        live.close_quota(2)
        route = await click(router)
        assert (route.invite.quota_id, route.is_repeat) == (1, False)


async def test_a_link_that_is_not_entered_is_given_again_and_never_requested_again(new_address):
    panel, clock, store = Panel(1), Clock(), new_address()
    async with router_of(panel, store, clock=clock) as router:
        first = await click(router)
        for _ in range(4):
            clock.now += 1800
            again = await click(router)
            assert (again.url, again.is_repeat) == (first.url, True)
        clock.now += 40 * 86_400
        assert (await click(router)).url == first.url
    assert panel.asked == [("m-1", 1)]


async def test_a_link_older_than_its_lifetime_is_not_given_and_its_pair_not_requested_again(new_address):
    panel, clock, store = Panel(1, 2), Clock(), new_address()
    async with router_of(panel, store, clock=clock, lifetime=60) as router:
        first = await click(router)
        clock.now += 59
        assert (await click(router)).url == first.url
        assert ids(router.offers(MEMBER)) == [2, 1]
        clock.now += 2
        assert ids(router.offers(MEMBER)) == [1]
        assert (await click(router)).invite.quota_id == 1
        clock.now += 61
        assert (await click(router)).status is NONE_OPEN
    assert panel.asked == [("m-1", 2), ("m-1", 1)]


async def test_a_quota_that_closes_and_opens_again_gives_the_link_that_there_is():
    panel, clock = Panel(1, 2), Clock()
    async with live_of(panel) as (client, live), SurveyRouter(client, live, store=None, clock=clock) as router:
        first = await click(router)
        is_open = live.is_open
        live.is_open = lambda quota_id: quota_id != 2 and is_open(quota_id)
        assert (await click(router, quota_ids=[2])).status is NONE_OPEN
        del live.is_open
        assert (await click(router, quota_ids=[2])).url == first.url
    assert panel.asked == [("m-1", 2)]


async def test_a_link_falls_away_when_its_survey_has_ended_for_the_member(new_address):
    panel, store, clock = Panel(1, 2), new_address(), Clock()
    async with (
        router_of(panel, store, clock=clock) as router,
        Inbox(store, secrets=SECRET, clock=clock) as inbox,
    ):
        assert (await click(router)).invite.quota_id == 2
        await ended(inbox, "completion", 2, Revenue=100)
        route = await click(router)
        assert (route.invite.quota_id, route.is_repeat) == (1, False)


async def test_an_end_without_a_wave_counts(new_address):
    panel, store, clock = Panel(1, 2), new_address(), Clock()
    async with (
        router_of(panel, store, clock=clock) as router,
        Inbox(store, secrets=SECRET, clock=clock) as inbox,
    ):
        fields = {"UniqueCode": "m-1", "SurveyId": 200, "Reason": "SCREENED_OUT"}
        assert (await post(inbox, "terminate", fields)).status == 200
        assert (await click(router)).invite.quota_id == 1


async def test_what_the_ledger_says_was_entered_counts(new_address):
    panel, store = Panel(1, 2), new_address()
    async with router_of(panel, store) as router:
        await click(router)
        await OutcomeLedger(store).entered("m-1", 2)
        assert (await click(router)).invite.quota_id == 1


async def test_invites_are_in_the_ledger_of_outcomes(new_address):
    panel, store, clock = Panel(1, 2), new_address(), Clock()
    async with (
        router_of(panel, store, clock=clock) as router,
        Inbox(store, secrets=SECRET, clock=clock) as inbox,
    ):
        route = await click(router)
        await route.entered()
        await ended(inbox, "completion", 2, Revenue=100)
        (outcome,) = await OutcomeLedger(store).rows()
    assert (outcome.member_code, outcome.quota_id, outcome.ending) == ("m-1", 2, "completed")
    now = datetime.fromtimestamp(clock.now, UTC)
    assert (outcome.invited_at, outcome.entered_at) == (now, now)


async def test_the_caps_of_a_day_are_heeded(new_address):
    panel, store, clock = Panel(*range(1, 10)), new_address(), Clock()
    caps = Caps(starts=3, completes=1)
    async with both_of(panel, store, clock, caps=caps) as (router, inbox):
        for _ in range(3):
            await (await click(router)).entered()
        assert router.offers(MEMBER) == []
        assert (await click(router)).status is NONE_OPEN
        other = Member("m-2", MEMBER.profile)
        await (await click(router, other)).entered()
        now = datetime.fromtimestamp(clock.now, UTC)
        await ended(inbox, "completion", 9, member="m-2", Revenue=100, DateTime=f"{now:%Y-%m-%d %H:%M:%S}")
        assert (await click(router, other)).status is NONE_OPEN
        clock.now += 86_400
        assert (await click(router)).status is ROUTED
        assert (await click(router, other)).status is ROUTED


def test_the_caps_are_those_of_the_field():
    assert (Caps().starts, Caps().completes) == (25, 5)
    with pytest.raises(InvalidRequestError, match="starts"):
        Caps(starts=0)


# --- How many at once


def test_one_quota_at_a_time_while_there_is_time():
    sizer = RequestSizer()
    for _ in range(100):
        sizer.ended(0.2, 1, 0)
    assert sizer.most(2.0) == sizer.most(0.25) == 1
    for _ in range(100):
        sizer.ended(0.2, 10, 4)
    assert sizer.usual == pytest.approx(0.2, abs=0.01)
    assert sizer.most(2.0) == 1  # with time for nine requests
    assert sizer.most(0.45) == 3  # 0.4 ** (3 * 2) is 0.4 %
    assert sizer.most(0.25) == 3  # more would waste more than one invite


def test_if_nearly_all_is_refused_more_are_requested():
    sizer = RequestSizer()
    for _ in range(100):
        sizer.ended(1.0, 10, 9)
    assert sizer.most(1.5) == 10


def test_a_request_that_needs_more_time_than_there_is_is_not_made():
    sizer = RequestSizer()
    for seconds in [0.9, 1.1] * 50:
        sizer.ended(seconds, 1, 0)
    assert sizer.has_time(1.0)
    assert not sizer.has_time(0.5)


async def test_what_is_invited_beyond_the_need_is_given_at_the_next_click(monkeypatch):
    panel = Panel(1, 2, 3)
    monkeypatch.setattr(RequestSizer, "most", lambda *_: 2)
    async with router_of(panel) as router:
        first = await click(router)
        assert (first.invite.quota_id, first.asked) == (3, 2)
        assert (router.status.invited, router.status.unused) == (2, 1)
        await first.entered()
        second = await click(router)
        assert (second.invite.quota_id, second.is_repeat, second.asked) == (2, True, 0)
        assert router.status.unused == 0
    assert panel.asked == [("m-1", 3), ("m-1", 2)]


# --- The rest


async def test_the_status_counts_clicks():
    panel = Panel(1, 2)
    async with router_of(panel) as router:
        await click(router)
        await click(router)
        await click(router, Member("w", {GENDER: FEMALE}))
        status = router.status
    assert (status.is_ready, status.reason) == (True, "")
    assert status.clicks == {ROUTED: 2, NONE_OPEN: 1}
    assert (status.repeats, status.asked, status.invited, status.unused) == (1, 1, 1, 0)
    assert router.status.reason == "the router is closed"


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"within": 0}, "within must be"),
        ({"within": "2"}, "within must be"),
        ({"quota_ids": ["1"]}, "each of quota_ids must be"),
        ({"member": "m-1"}, "member must be a Member"),
        ({"member": Member("..", {})}, "member code"),
    ],
)
async def test_wrong_arguments_are_refused_and_cost_nothing(given, rule):
    panel = Panel(1)
    async with router_of(panel) as router:
        with pytest.raises(InvalidRequestError, match=rule):
            await router.route(**({"member": MEMBER} | given))
        with pytest.raises(InvalidRequestError, match="answers must be"):
            await click(router, Member("m-1", {GENDER: "x"}))
        assert (await click(router)).status is ROUTED
    assert panel.asked == [("m-1", 1)]


async def test_a_router_checks_what_it_is_made_of():
    async with live_of(Panel(1)) as (client, live):
        for given, rule in (
            ({"client": 1}, "client must be a SamplingClient"),
            ({"live": 1}, "live must be a LiveIndex"),
            ({"lifetime": 0}, "lifetime must be"),
            ({"remembers": -1}, "remembers must be"),
            ({"caps": 25}, "caps must be a Caps"),
            ({"clock": 1}, "clock must be"),
        ):
            with pytest.raises(InvalidRequestError, match=rule):
                SurveyRouter(**({"client": client, "live": live, "store": None} | given))


async def test_a_router_is_used_inside_its_block():
    async with live_of(Panel(1)) as (client, live):
        router = SurveyRouter(client, live, store=None)
        with pytest.raises(RuntimeError):
            await router.route(MEMBER)
        async with router:
            pass
        with pytest.raises(RuntimeError):
            await router.route(MEMBER)


async def test_closing_waits_for_a_response_that_is_due(new_address):
    panel, store = Panel(1), new_address()
    answer = panel.answers[1] = anyio.Event()
    async with router_of(panel, store) as router, anyio.create_task_group() as tasks:
        assert (await click(router, within=0.5)).status is UNCLEAR

        async def respond():
            await wait_all_tasks_blocked()
            answer.set()

        tasks.start_soon(respond)
    async with router_of(panel, store) as router:
        assert (await click(router)).is_repeat
    assert panel.asked == [("m-1", 1)]


def test_a_route_says_what_a_page_may_say():
    assert all(status.text for status in RouteStatus)
    assert pickle.loads(pickle.dumps(UNCLEAR)) is UNCLEAR


def test_a_history_without_anything_leaves_nothing_out():
    assert MemberHistory().left_out(0.0, bool) == (set(), set())
    assert not MemberHistory().gets_nothing(Caps(), 0.0)
