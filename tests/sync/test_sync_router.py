"""The blocking router: clicks of threads, routed by the async one."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_sync import Stuck, client_of, press_ctrl_c, public, until

from sampling_async import InvalidRequestError, routing, sync
from sampling_async.matching import Member
from sampling_async.notifications import StoreError
from sampling_async.simulator import Fault, Simulator
from sampling_async.sync import SurveyRouter

LONG = 60.0  # no click of the tests takes so long


@pytest.fixture
def sim():
    return Simulator(seed=3, surveys=20, members=30)


@pytest.fixture
def client(sim):
    with client_of(sim) as client:
        yield client


def members_of(sim):
    return [Member(code, member.profile) for code, member in sim.members.items()]


# --- The same as the async router


def test_it_has_the_public_names_of_the_async_router():
    background = {"has_ended_the_loop", "is_over", "must_be_outside", "run"}
    assert public(SurveyRouter) - {"close", "ready"} == public(routing.SurveyRouter) - background
    assert public(sync.Route) == public(routing.Route)


@pytest.mark.parametrize("name", ["route", "offers", "entered"])
def test_signature_and_documentation_are_those_of_the_async_router(name):
    blocking, method = getattr(SurveyRouter, name), getattr(routing.SurveyRouter, name)
    assert inspect.signature(blocking).parameters == inspect.signature(method).parameters
    assert not inspect.iscoroutinefunction(blocking)
    assert not re.search(r"\b(await|live)\b", blocking.__doc__)
    assert blocking.__module__ == "sampling_async.sync._router"


def test_its_options_are_those_of_the_async_router_and_of_the_watch():
    def options(function):
        found = inspect.signature(function).parameters.values()
        return {each.name: each.default for each in found if each.name not in {"self", "client", "live"}}

    given, theirs = options(SurveyRouter), options(routing.SurveyRouter)
    assert {name: given[name] for name in theirs} == theirs
    assert given.keys() - theirs.keys() == {"every", "cache", "kinds", "policy", "rank"}


# --- Clicks


def test_thirty_clicks_of_eight_threads_each_end_in_a_link_or_a_truthful_nothing(sim, client):
    with SurveyRouter(client, store=None) as router, ThreadPoolExecutor(8) as threads:
        clicked = members_of(sim)
        routes = [*threads.map(lambda member: router.route(member, within=LONG), clicked)]
        invited = {invite.member_code for invite in sim.ledger.invites}
        for member, route in zip(clicked, routes, strict=True):
            assert route.status == ("routed" if member.member_code in invited else "none_open")
            assert (route.url is not None) == (route.status == "routed")
        assert len(invited) > 20
        assert sum(router.status.clicks.values()) == 30
    assert max(sim.ledger.by_pair().values()) == 1


def test_clicks_of_a_member_in_several_threads_get_one_link(sim, client):
    with SurveyRouter(client, store=None) as router, ThreadPoolExecutor(8) as threads:
        router.ready(LONG)
        member = next(each for each in members_of(sim) if router.offers(each))
        routes = [*threads.map(lambda _: router.route(member, within=LONG), range(8))]
        assert len({route.url for route in routes}) == len(sim.ledger.invites) == 1
        assert router.route(member, within=LONG).is_repeat
        routes[0].entered()
        router.entered(member.member_code, 1)
        assert router.route(member, within=LONG).url != routes[0].url


def test_ctrl_c_in_a_click_loses_no_pair(sim):
    """The request goes on, and the next click gets its link."""

    class Slow(Stuck):
        async def handle_async_request(self, request):
            if request.method == "POST" and not self.began.is_set():
                self.began.set()
                press_ctrl_c()
            return await inner.handle_async_request(request)

    inner = sim.transport()
    with client_of(sim, transport=Slow()) as client, SurveyRouter(client, store=None) as router:
        router.ready(LONG)
        member = next(each for each in members_of(sim) if router.offers(each))
        with pytest.raises(KeyboardInterrupt):
            router.route(member, within=LONG)
        until(lambda: router.status.invited)
        assert router.route(member, within=LONG).is_repeat
    assert [*sim.ledger.by_pair().values()] == [1]


def test_a_service_that_is_away_from_the_start_ends_a_click_in_time(sim):
    sim.faults.add(Fault.status(503))
    with client_of(sim) as client, SurveyRouter(client, store=None) as router:
        assert router.route(members_of(sim)[0], within=0.2).status == "unavailable"
        assert router.status.reason == "there is no inventory yet"
        with pytest.raises(TimeoutError):
            router.ready(0)
        with pytest.raises(RuntimeError, match=r"router\.ready"):
            router.offers(members_of(sim)[0])


def test_a_store_that_cannot_be_opened_is_tried_again_with_the_next_call(sim, client, tmp_path):
    router = SurveyRouter(client, store=tmp_path / "later" / "links.db")
    assert router.route(members_of(sim)[0], within=LONG).status == "unavailable"
    assert not router.status.is_ready
    with pytest.raises(StoreError), router:
        pass
    (tmp_path / "later").mkdir()
    with SurveyRouter(client, store=tmp_path / "later" / "links.db") as router:
        router.ready(LONG)
        assert router.status.is_ready


# --- Its life


def test_invalid_options_are_refused_at_once(client):
    with pytest.raises(InvalidRequestError, match=r"sync\.SamplingClient"):
        SurveyRouter(object(), store=None)
    for wrong in ({"every": 0}, {"lifetime": -1}, {"caps": 3}, {"rank": 3}):
        with pytest.raises(InvalidRequestError):
            SurveyRouter(client, store=None, **wrong)
    with SurveyRouter(client, store=None) as router, pytest.raises(InvalidRequestError, match="within"):
        router.route(Member("m", {}), within=0)


def test_a_closed_router_says_so_and_leaves_its_client_open(sim, client):
    router = SurveyRouter(client, store=None)
    router.close()
    with SurveyRouter(client, store=None) as router:
        router.ready(LONG)
    router.close()
    assert router.status.reason == "the router is closed"
    with pytest.raises(RuntimeError, match="the survey router is closed"):
        router.route(members_of(sim)[0])
    assert client.get_settings()


def test_a_client_that_is_closed_closes_its_router(sim):
    client = client_of(sim)
    router = SurveyRouter(client, store=None)
    router.ready(LONG)
    client.close()
    assert not {"notifications", "sampling_async.sync"} & {thread.name for thread in threading.enumerate()}
    router.close()


_PROGRAM = """
import os, warnings
from sampling_async.matching import Member
from sampling_async.simulator import Simulator
from sampling_async.sync import SamplingClient, SurveyRouter

warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
sim = Simulator(seed=3, surveys=20, members=30)
client = SamplingClient(sim.base_url, panel_guid=sim.panel_guid, api_key=sim.api_key, transport=sim.transport())
router = SurveyRouter(client, store="links.db")
members = [Member(code, each.profile) for code, each in sim.members.items()]
"""


def run(program, folder):
    command = [sys.executable, "-W", "error", "-c", _PROGRAM + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.skipif(sys.platform == "win32", reason="it knows no forks")
def test_a_router_that_was_made_before_a_fork_works_in_each_process(tmp_path):
    """The store is that of both: a member who has a link in one process gets it in the other."""
    program = """
child = os.fork()
if child:
    os.waitpid(child, 0)
routes = [router.route(each, within=60) for each in members]
print(sum(route.url is not None and not route.is_repeat for route in routes), flush=True)
"""
    links = [int(count) for count in run(program, tmp_path)]
    assert len(links) == 2
    assert links[0] > 20
    assert links[1] == 0


@pytest.mark.skipif(sys.platform == "win32", reason="it knows no forks")
def test_a_router_that_was_used_before_a_fork_says_so_in_the_child(tmp_path):
    program = """
router.ready()
child = os.fork()
if not child:
    try:
        router.route(members[0])
    except RuntimeError as exc:
        print("forked" in str(exc), flush=True)
    router.close()
    os._exit(0)
os.waitpid(child, 0)
print(router.status.is_ready)
"""
    assert run(program, tmp_path) == ["True", "True"]
