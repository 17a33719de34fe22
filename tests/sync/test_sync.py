"""The blocking client: it is the async one, called from threads that wait. It is offered on asyncio only."""

from __future__ import annotations

import asyncio
import gc
import inspect
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import closing, suppress
from contextvars import ContextVar
from pathlib import Path

import anyio
import httpx
import pytest
from doubles import KEY, PANEL

import sampling_async
from sampling_async import (
    ClientClosedError,
    InvalidRequestError,
    InviteRequest,
    Journal,
    OutagePolicy,
    RetryPolicy,
    ServerError,
    sync,
)
from sampling_async.simulator import Fault, Simulator
from sampling_async.sync import SamplingClient

ASYNC = sampling_async.SamplingClient

# What is not there, each with the reason; docs/howto/scripts.md says so too.
NOT_BLOCKING = {
    "aclose": "is close()",
    "watch_quotas": "is for services that answer from memory; a script calls get_quotas() again",
}


@pytest.fixture
def sim():
    return Simulator(seed=3, surveys=20, members=30, recontact_page_size=7)


@pytest.fixture
def client(sim):
    with client_of(sim) as client:
        yield client


def client_of(sim, **options):
    given = {"panel_guid": sim.panel_guid, "api_key": sim.api_key, "transport": sim.transport()}
    return SamplingClient(sim.base_url, **given | options)


def quota_ids_of(sim, most=1000):
    return [quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas][:most]


def requests_of(sim, *, each=5):
    return [InviteRequest(code, quota_ids_of(sim, each)) for code in sim.members]


def pairs(outcomes):
    return [(outcome.member_code, outcome.quota_id) for outcome in outcomes]


def public(cls):
    return {name for name in dir(cls) if not name.startswith("_")}


class Stuck(httpx.AsyncBaseTransport):
    """A service that does not answer. It calls a function when a request has come."""

    def __init__(self, then=bool):
        self.then, self.began, self.cancelled = then, threading.Event(), threading.Event()

    async def handle_async_request(self, request):
        try:
            self.began.set()
            self.then()
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)  # whoever does not wait for the end is here sooner
            self.cancelled.set()
            raise


def stuck_client(then=bool, **options):
    transport = Stuck(then)
    given = {"panel_guid": PANEL, "api_key": KEY, "transport": transport}
    return SamplingClient("https://service.example", **given | options), transport


def close_during(client, transport, call):
    """Close a client as soon as the call of another thread has sent its request."""
    thread = threading.Thread(target=call)
    thread.start()
    transport.began.wait(5)
    client.close()
    thread.join()


def press_ctrl_c():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


# --- The same as the async client


def test_every_public_name_of_the_async_client_is_there():
    assert public(SamplingClient) - {"close"} == public(ASYNC) - set(NOT_BLOCKING)


@pytest.mark.parametrize("name", sorted(public(ASYNC) - set(NOT_BLOCKING) - {"name"}))
def test_signature_and_documentation_are_those_of_the_async_client(name):
    blocking, method = getattr(SamplingClient, name), getattr(ASYNC, name)
    ours, theirs = inspect.signature(blocking), inspect.signature(method)
    assert ours.parameters == theirs.parameters
    assert not inspect.iscoroutinefunction(blocking)
    assert "Async" not in str(ours.return_annotation)
    assert not re.search(r"\b(await|async (with|for)|aclos\w+)\b", blocking.__doc__)
    assert len(blocking.__doc__.splitlines()) == len(method.__doc__.splitlines())


def test_the_constructor_takes_the_arguments_of_the_async_client():
    assert inspect.signature(SamplingClient).parameters == inspect.signature(ASYNC).parameters


@pytest.mark.parametrize("name", ["OutcomeStream", "RecontactStream"])
def test_streams_have_the_public_names_of_the_async_ones(name):
    blocking, asynchronous = getattr(sync, name), getattr(sampling_async, name)
    attributes = {"unrequested", "last_taken"} & {*vars(blocking)}  # of an object, in the async class
    assert public(blocking) - attributes == public(asynchronous) - {"fill", "next_now", "result"}


# --- Calls


def test_calls_return_what_the_async_client_returns(sim, client):
    quota_ids = quota_ids_of(sim)
    member = next(iter(sim.members))
    assert [each.quota_id for s in client.get_quotas().surveys for each in s.quotas] == quota_ids
    assert client.get_settings().panel_guid == sim.panel_guid
    result = client.bulk_invite(member, quota_ids)
    assert pairs(result) == [(member, quota_id) for quota_id in quota_ids]
    other = list(sim.members)[1]
    open_to = next(each for each in quota_ids if sim.eligible(other, each) == 1)
    assert client.generate_invite(other, open_to).quota_id == open_to
    assert pairs(client.bulk_invite(other, iter(quota_ids[:2]))) == [(other, each) for each in quota_ids[:2]]


def test_an_error_of_a_call_is_raised_where_it_was_made(sim, client):
    sim.faults.add(Fault.status(500))
    with pytest.raises(ServerError) as caught:
        client.with_options(retry=RetryPolicy(max_attempts=1)).get_settings()
    assert "test_an_error_of_a_call" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_settings_come_from_the_environment(sim, monkeypatch):
    with sim.serve() as url:
        monkeypatch.setenv("SAMPLING_BASE_URL", url)
        monkeypatch.setenv("SAMPLING_PANEL_GUID", sim.panel_guid)
        monkeypatch.setenv("SAMPLING_API_KEY", sim.api_key)
        with SamplingClient.from_env(name="us") as client:
            assert client.name == "us"
            assert client.get_settings()
            assert repr(client) == "<sync SamplingClient us at 127.0.0.1: 0 of 8 running, 0 waiting>"
    assert repr(client) == "<sync SamplingClient us at 127.0.0.1: closed, 0 waiting>"


def test_a_refused_key_is_in_no_frame_of_the_traceback():
    secret = "this-is-no-guid-but-secret"
    for make in (SamplingClient, SamplingClient.from_env):
        with pytest.raises(InvalidRequestError) as caught:
            make(base_url="https://service.example", panel_guid=PANEL, api_key=secret)
        frames = [frame.f_locals for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
        assert secret not in repr(frames[1:])


def test_context_variables_of_the_caller_are_those_of_the_call(sim):
    variable = ContextVar("variable", default="unset")
    seen = []
    with client_of(sim, on_outcome=lambda _: seen.append(variable.get())) as client:
        variable.set("of the caller")
        client.get_settings()
        with client.fan_out(requests_of(sim)[:1]) as outcomes:
            list(outcomes)
    assert seen == ["of the caller", "of the caller"]


def test_a_running_event_loop_of_the_caller_is_not_used(sim):
    async def in_a_notebook():
        with client_of(sim) as client, client.fan_out(requests_of(sim)) as outcomes:
            return client.get_settings(), len(list(outcomes))

    for backend in ("asyncio", "trio"):
        settings, count = anyio.run(in_a_notebook, backend=backend)
        assert settings
        assert count == 5 * len(sim.members)


def test_several_threads_share_one_client_and_its_limit(sim):
    most, failed, quota_ids = [], [], quota_ids_of(sim)

    def work(client, code):
        try:
            assert len(client.bulk_invite(code, quota_ids)) == len(quota_ids)
            with client.fan_out([InviteRequest(code, quota_ids[:3])]) as outcomes:
                assert len(list(outcomes)) == 3
        except BaseException as exc:
            failed.append(exc)
            raise

    with client_of(
        sim, max_concurrency=2, on_attempt=lambda _: most.append(client.snapshot().running)
    ) as client:
        threads = [threading.Thread(target=work, args=(client, code)) for code in list(sim.members)[:8]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []
    assert max(most) <= 2
    assert threading.active_count() == 1 or not any(
        t.name == "sampling_async.sync" for t in threading.enumerate()
    )


# --- Streams


def test_a_fan_out_has_an_outcome_for_every_pair(sim, client):
    requests = requests_of(sim)
    with client.fan_out(requests) as outcomes:
        seen = list(outcomes)
        assert outcomes.progress.answered == outcomes.progress.total == len(seen)
        assert next(outcomes, None) is None
    assert sorted(pairs(seen)) == sorted((each.member_code, q) for each in requests for q in each.quota_ids)
    assert outcomes.left_over == ()
    assert not outcomes.paused
    assert outcomes.outcome_of(*pairs(seen)[0]) is not None
    assert list(outcomes.unrequested) == []


def test_one_call_into_the_event_loop_brings_many_outcomes(sim, client, monkeypatch):
    calls, step = [], sync._streams.BlockingStream._step
    monkeypatch.setattr(sync._streams.BlockingStream, "_step", counted(step, calls))
    with client.fan_out(requests_of(sim)[:9]) as outcomes:
        next(outcomes)
        until(lambda: client.snapshot().attempts == 9 and not client.snapshot().running)
        assert len(list(outcomes)) == 9 * 5 - 1
    assert len(calls) <= 3


def until(is_so):
    deadline = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def counted(method, calls):
    async def call(self):
        calls.append(self)
        return await method(self)

    return call


def test_an_iterator_is_read_in_the_thread_that_gave_it(sim, client):
    """A cursor of SQLite refuses every other thread."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE panel (member TEXT)")
        database.executemany("INSERT INTO panel VALUES (?)", [(code,) for code in sim.members])
        members = (code for (code,) in database.execute("SELECT member FROM panel"))
        with client.fan_out(InviteRequest(code, quota_ids_of(sim, 5)) for code in members) as outcomes:
            assert len(list(outcomes)) == 5 * len(sim.members)


def test_an_iterator_may_use_the_client(sim, client):
    quota_id = sim.recontact_quota_ids[0]
    sim.set_recontact_members(quota_id, sim.members)
    requests = (InviteRequest(code, [quota_id]) for code in client.recontact_members(quota_id))
    with client.fan_out(requests) as outcomes:
        assert len(list(outcomes)) == len(sim.members)


def test_an_iterator_is_read_at_once_after_each_item_that_takes_long(sim, client):
    """An item is sent before the next one is there: a queue gives the next one only after its outcome."""
    answered = threading.Event()

    def quota_ids():
        for quota_id in quota_ids_of(sim, 3):
            yield quota_id
            answered.wait(0.004)

    with client.stream_bulk_invite(next(iter(sim.members)), quota_ids(), chunk_size=1) as outcomes:
        first = next(outcomes)
        answered.set()
        assert [first.quota_id, *(each.quota_id for each in outcomes)] == quota_ids_of(sim, 3)


def test_an_exception_of_an_iterator_comes_after_the_outcomes_before_it(sim, client):
    def quota_ids():
        yield from quota_ids_of(sim, 7)
        raise ZeroDivisionError("of the input")

    seen = []
    with client.stream_bulk_invite(next(iter(sim.members)), quota_ids(), chunk_size=3) as outcomes:
        with pytest.raises(ZeroDivisionError, match="of the input"):
            seen.extend(outcome.quota_id for outcome in outcomes)
    assert sorted([*seen, *(each.quota_id for each in outcomes.left_over)]) == sorted(quota_ids_of(sim, 7))


def test_what_follows_an_invalid_item_of_the_input_is_not_sent(sim, client):
    first, second = requests_of(sim)[:2]
    with client.fan_out(iter([first, "invalid", second, None])) as outcomes:
        with pytest.raises(InvalidRequestError, match="fan_out takes requests"):
            list(outcomes)
    statuses = {each.status for each in outcomes.left_over if each.member_code == second.member_code}
    assert statuses <= {"not_sent"}
    with client.stream_bulk_invite("m", iter([*quota_ids_of(sim, 3), -1, 5, "x"]), chunk_size=2) as outcomes:
        with pytest.raises(InvalidRequestError, match="quota ID"):
            list(outcomes)
    assert {each.status for each in outcomes.left_over} <= {"not_sent"}


@pytest.mark.parametrize("kind", [list, iter])
def test_a_fan_out_that_is_left_early_accounts_for_all_that_was_read(sim, client, kind):
    read = []

    def requests():
        for request in requests_of(sim):
            read.append(request)
            yield request

    with client.fan_out(requests() if kind is iter else requests_of(sim)) as outcomes:
        seen = [next(outcomes) for _ in range(7)]
        taken = outcomes.progress
    expected = [(each.member_code, q) for each in read for q in each.quota_ids]
    if kind is iter:
        assert sorted(pairs(seen) + pairs(outcomes.left_over)) == sorted(expected)
    assert taken.answered == 7
    made = {(each.member_code, each.quota_id) for each in sim.ledger.invites}
    known = {*pairs(each for each in (*seen, *outcomes.left_over) if each.status in {"invited", "unknown"})}
    assert made <= known
    with pytest.raises(RuntimeError, match="inside its block"):
        next(outcomes)


def test_items_that_were_read_ahead_are_unknown_if_a_journal_was_not_asked_about_them(sim, client, tmp_path):
    journal = Journal(tmp_path / "run.journal")
    with client.fan_out(requests_of(sim)[:4], journal=journal) as outcomes:
        first = list(outcomes)
    with client.fan_out(iter(requests_of(sim)), journal=journal) as outcomes:
        seen = [next(outcomes)]
    replayed = {*pairs(first)}
    assert not [
        each for each in outcomes.left_over if each.status == "not_sent" and pairs([each])[0] in replayed
    ]
    with client.fan_out(iter(requests_of(sim)), journal=journal) as outcomes:
        again = list(outcomes)
    assert len(again) == 5 * len(sim.members)
    assert {(each.member_code, each.quota_id): each.status for each in again}.items() >= {
        (each.member_code, each.quota_id): each.status for each in (*first, *seen)
    }.items()


def test_after_the_deadline_nothing_more_is_read(sim):
    now = [0.0]
    read = []

    def requests():
        for request in requests_of(sim):
            read.append(request)
            now[0] += 1
            yield request

    with client_of(sim, clock=lambda: now[0]) as client:
        with client.fan_out(requests(), deadline=2.5) as outcomes:
            seen = list(outcomes)
        assert len(read) < len(sim.members)
        assert len(seen) + len(outcomes.left_over) == 5 * len(read)


def test_a_stream_must_be_entered(sim, client):
    with pytest.raises(RuntimeError, match="inside its block"):
        next(client.fan_out([]))


def test_an_invalid_argument_is_refused_at_once(sim, client):
    with pytest.raises(InvalidRequestError, match="repeats"):
        client.fan_out([], repeats="never")
    with pytest.raises(InvalidRequestError, match="iterable"):
        client.fan_out(5)


def test_recontact_lists_are_read_page_by_page(sim, client):
    quota_id = sim.recontact_quota_ids[0]
    sim.set_recontact_members(quota_id, sim.members)
    codes = sorted(sim.members)
    assert list(client.recontact_members(quota_id)) == codes
    assert [len(page.member_codes) for page in client.recontact_pages(quota_id)] == [7, 7, 7, 7, 2]
    with client.stream_recontact_members(quota_id) as stream:
        assert [next(stream) for _ in range(9)] == codes[:9]
        assert stream.last_taken == codes[8]
    with client.stream_recontact_members(quota_id, after=stream.last_taken) as stream:
        assert list(stream) == codes[9:]
    before = sim.ledger.request_count
    members = client.recontact_members(quota_id)
    assert [next(members) for _ in range(7)] == codes[:7]
    members.close()
    assert sim.ledger.request_count == before + 1, "a page is read when all codes before it were taken"


def test_surveys_are_yielded_as_they_arrive_and_may_be_left(sim, client):
    assert [survey.survey_id for survey in client.iter_surveys()] == [
        s.survey_id for s in sim.inventory.surveys
    ]
    surveys = client.iter_surveys()
    next(surveys)
    surveys.close()
    assert client.snapshot().running == 0
    del surveys
    half_read = client.iter_surveys()
    next(half_read)
    client.close()
    half_read.close()


def test_snapshots_are_served_while_the_block_is_open(client):
    # The path of a socket may have some hundred characters, and that of a test's folder more.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "snapshots")
        with client.serve_snapshots(path):
            assert path.is_socket()
        assert not path.exists()


# --- Ctrl-C


def test_ctrl_c_cancels_the_call_and_waits_for_its_end():
    client, transport = stuck_client(press_ctrl_c)
    with client:
        with pytest.raises(KeyboardInterrupt):
            client.get_settings()
        assert transport.cancelled.is_set()
        assert client.snapshot().running == 0


def test_any_exception_of_a_signal_handler_does_the_same(monkeypatch):
    def stop(*_):
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        client, transport = stuck_client(
            lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        )
        with client, pytest.raises(SystemExit):
            client.bulk_invite("m", [1, 2])
        assert transport.cancelled.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_after_ctrl_c_a_fan_out_says_what_may_exist():
    client, _ = stuck_client(press_ctrl_c, max_concurrency=1)
    with client, pytest.raises(KeyboardInterrupt):
        with client.fan_out(InviteRequest(f"m{number}", [1, 2]) for number in range(500)) as outcomes:
            list(outcomes)
    statuses = [each.status for each in outcomes.left_over]
    assert statuses[:2] == ["unknown", "unknown"]
    assert set(statuses[2:]) <= {"not_sent"}
    assert len({*pairs(outcomes.left_over)}) == len(statuses)


def test_ctrl_c_while_the_input_is_read_loses_nothing(sim, client):
    def requests():
        for number, request in enumerate(requests_of(sim)):
            yield request
            if number == 12:
                raise KeyboardInterrupt

    seen = []
    with pytest.raises(KeyboardInterrupt):
        with client.fan_out(requests()) as outcomes:
            seen.extend(outcomes)
    assert len({*pairs(seen), *pairs(outcomes.left_over)}) == 5 * 13


@pytest.mark.parametrize("after", range(12))
def test_a_fan_out_goes_on_after_a_ctrl_c_that_was_caught(sim, after):
    """No outcome is lost, wherever it strikes."""
    requests, count = requests_of(sim, each=3), [0]

    def strike(_):
        count[0] += 1
        if count[0] == 2 * after:
            press_ctrl_c()

    seen = []
    with client_of(sim, on_outcome=strike) as client, client.fan_out(iter(requests)) as outcomes:
        while True:
            try:
                for outcome in outcomes:
                    seen.append(outcome)  # noqa: PERF402  one by one
                break
            except KeyboardInterrupt:
                pass
    assert len({*pairs(seen)}) >= 3 * len(requests) - 1  # the one that was being appended
    assert len(seen) == len({*pairs(seen)})


def test_ctrl_c_as_a_call_begins_leaves_nothing_that_closing_would_wait_for(sim, monkeypatch):
    client, submit = client_of(sim), asyncio.BaseEventLoop.call_soon_threadsafe

    def interrupted(*_, **__):
        monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", submit)
        raise KeyboardInterrupt

    client.get_settings()
    monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.get_settings()
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("kind", [list, iter])
def test_ctrl_c_at_any_line_loses_nothing_and_leaves_no_thread(kind):
    """As a signal handler does, a trace function raises in this thread, at one line after the other."""
    line, step = 1, 13
    while interrupted_at(line, kind):
        line += step
    assert line > 10 * step


INTERRUPTED = """
import signal
from sampling_async import InviteRequest
from sampling_async.simulator import Simulator
from sampling_async.sync import SamplingClient

class Interrupted(BaseException):
    pass

def strike(*_):
    global strikes
    if is_armed:
        strikes += 1
        raise Interrupted

signal.signal(signal.SIGALRM, strike)
requests, strikes = [InviteRequest(f"m{number}", range(1, 201)) for number in range(30)], 0
for number in range(10):
    sim, seen, is_armed = Simulator(seed=3, surveys=5, members=6), [], False
    with SamplingClient(
        sim.base_url, panel_guid=sim.panel_guid, api_key=sim.api_key, transport=sim.transport()
    ) as client, client.fan_out(KIND(requests), chunk_size=20) as outcomes:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005 + number * 0.0002)
        while not is_armed:
            try:
                is_armed = True
                seen.extend(outcomes)  # in C: nothing can be lost on this side
            except Interrupted:
                is_armed = False
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    found = {(each.member_code, each.quota_id) for each in seen}
    print(len(seen), len(found), len(outcomes.left_over))
print(strikes > 20)
"""


@pytest.mark.parametrize("kind", ["list", "iter"])
def test_a_stream_that_is_interrupted_hundreds_of_times_loses_nothing_and_never_hangs(kind):
    """Real signals, at moments that no line of code can choose: in the waits and in the steps between them."""
    program = [sys.executable, "-c", INTERRUPTED.replace("KIND", kind)]
    # Handlers that raise in a `__del__` are told on stderr, by Python itself.
    done = subprocess.run(
        program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == ["6000 6000 0"] * 10 + ["True"]


def test_what_is_collected_in_the_thread_of_the_event_loop_is_closed_without_a_word(sim):
    abandoned = []

    def collect(_):
        if abandoned:
            abandoned.clear()

    with client_of(sim, on_attempt=collect) as client:
        surveys = client.iter_surveys()
        next(surveys)
        abandoned.append(surveys)
        del surveys
        client.get_settings()
        client.get_settings()
    assert not abandoned


def assert_no_thread():
    until = time.monotonic() + 10  # one that has done its work may need a moment to end
    while any(each.name == "sampling_async.sync" for each in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.001)


def interrupted_at(line, kind):
    sim, count, seen, read, outcomes = Simulator(seed=3, surveys=5, members=6), 0, [], [], None
    requests = requests_of(sim, each=3)

    def trace(frame, event, _):
        nonlocal count
        if not re.search(r"sampling_async/(sync/|_bulk/stream)", frame.f_code.co_filename):
            return None
        count += 1
        if count == line:
            raise KeyboardInterrupt
        return trace

    def reading():
        for request in requests:
            read.append(request)
            yield request

    client, before = client_of(sim), sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt), client:
            outcomes = client.fan_out(reading() if kind is iter else requests)
            with outcomes:
                seen.extend(outcomes)
    finally:
        sys.settrace(before)
    client.close()
    assert_no_thread()
    if outcomes is not None and seen:  # it was entered
        found = {*pairs(seen), *pairs(outcomes.left_over)}
        assert len(found) == len(seen) + len(outcomes.left_over)
        expected = {(each.member_code, quota_id) for each in read for quota_id in each.quota_ids}
        assert len(expected - found) <= 1  # the one that was being returned
        made = {(each.member_code, each.quota_id) for each in sim.ledger.invites}
        known = [each for each in (*seen, *outcomes.left_over) if each.status in {"invited", "unknown"}]
        assert len(made - {*pairs(known)}) <= 1
    return count >= line


# --- The end


def test_closing_may_be_repeated_and_ends_everything(sim):
    client = client_of(sim)
    client.get_settings()
    view = client.with_options(name="view")
    client.close()
    client.close()
    view.close()
    for closed in (client, view):
        with pytest.raises(ClientClosedError, match="make a new one"):
            closed.get_settings()
        with pytest.raises(ClientClosedError):
            closed.fan_out([])
        assert closed.snapshot().running == 0
    assert_no_thread()


def test_an_unused_client_can_be_closed(sim):
    with client_of(sim) as client:
        pass
    assert "closed" in repr(client)


def test_a_view_is_closed_alone(sim, client):
    view = client.with_options(outage=OutagePolicy(patience=0), name="clicks")
    assert view.get_settings()
    view.close()
    with pytest.raises(ClientClosedError):
        view.get_settings()
    assert client.get_settings()


def test_a_share_is_independent(sim):
    with sim.serve() as url:
        with SamplingClient(url, panel_guid=sim.panel_guid, api_key=sim.api_key) as client:
            share = client.share(of=2)
            assert share.get_settings()
        assert share.snapshot().max_concurrency == 4
        assert share.get_settings()
        share.close()


def test_closing_ends_the_calls_of_other_threads():
    client, transport = stuck_client()
    raised = []

    def call():
        with pytest.raises(ClientClosedError) as caught:
            client.get_settings()
        raised.append(caught.value)

    close_during(client, transport, call)
    assert transport.cancelled.is_set()
    assert raised[0].delivery == "unknown"


def test_closing_leaves_open_streams_with_a_truthful_account():
    client, transport = stuck_client(max_concurrency=1)
    with client.fan_out([InviteRequest("m", [1]), InviteRequest("n", [2])]) as outcomes:
        transport.began.wait(5)
        client.close()
        with pytest.raises(ClientClosedError, match="during the block"):
            next(outcomes)
    assert {each.member_code: each.status for each in outcomes.left_over} == {"m": "unknown", "n": "not_sent"}


def test_a_block_that_the_garbage_collector_leaves_while_the_client_is_closed_does_not_hold_that_up(
    sim, monkeypatch
):
    client, submit = client_of(sim), asyncio.BaseEventLoop.call_soon_threadsafe

    def half_read():
        with client.fan_out(requests_of(sim)) as outcomes:
            yield from outcomes

    def collecting(*given, **named):
        monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", submit)
        gc.collect()
        return submit(*given, **named)

    gc.disable()
    try:
        reader = half_read()
        next(reader)
        cycle = [reader]
        cycle.append(cycle)  # only the collector ends it
        del reader, cycle
        monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", collecting)
        client.close()
    finally:
        gc.enable()
    assert_no_thread()


def test_a_thread_whose_stream_is_closed_with_the_client_gets_all_outcomes():
    client, transport = stuck_client(max_concurrency=1)
    seen = []

    def read():
        outcomes = client.fan_out([InviteRequest("m", [1]), InviteRequest("n", [2])])
        with suppress(ClientClosedError), outcomes:
            seen.extend(outcomes)
        seen.extend(outcomes.left_over)

    close_during(client, transport, read)
    assert {each.member_code: each.status for each in seen} == {"m": "unknown", "n": "not_sent"}


def test_closing_returns_what_the_call_of_another_thread_has_by_then(sim):
    class Halfway(Stuck):
        async def handle_async_request(self, request):
            if not sim.ledger.requests:
                return await sim.transport().handle_async_request(request)
            return await super().handle_async_request(request)

    transport, results = Halfway(), []
    client = client_of(sim, transport=transport, max_concurrency=1)
    close_during(client, transport, lambda: results.append(client.bulk_invite("m", range(1, 151))))
    assert dict(results[0].counts) == {"invited": 0, "rejected": 100, "not_sent": 0, "unknown": 50}


def test_a_hook_cannot_call_the_client(sim):
    raised = []

    def hook(_):
        try:
            client.get_settings()
        except RuntimeError as exc:
            raised.append(str(exc))

    with client_of(sim, on_outcome=hook) as client:
        client.get_settings()
    assert "own thread" in raised[0]


def test_an_event_loop_that_is_ended_by_a_hook_ends_the_client(sim):
    codes = [5]

    def hook(_):
        if codes:
            raise SystemExit(codes.pop())

    client = client_of(sim, on_outcome=hook)
    with pytest.raises((ClientClosedError, SystemExit)):
        client.get_settings()
    with pytest.raises(ClientClosedError):
        client.get_settings()
    with pytest.raises(SystemExit):
        client.close()


def test_a_client_that_is_dropped_ends_its_thread_with_a_warning(sim):
    client = client_of(sim)
    client.get_settings()
    [thread] = [thread for thread in threading.enumerate() if thread.name == "sampling_async.sync"]
    with pytest.warns(
        ResourceWarning, match=r"unclosed <sync SamplingClient localhost.*use `with`, or call close"
    ):
        del client
    thread.join(5)
    assert not thread.is_alive()


PROGRAM = """
import logging, os, sys
# In its development mode asyncio tells of steps that take long, as all do on a busy machine.
logging.getLogger("asyncio").addFilter(lambda record: not str(record.msg).startswith("Executing"))
from sampling_async import InviteRequest
from sampling_async.simulator import Simulator
from sampling_async.sync import SamplingClient
sim = Simulator(seed=3, surveys=5, members=5)
client = SamplingClient(sim.base_url, panel_guid=sim.panel_guid, api_key=sim.api_key, transport=sim.transport())
"""


def run(program):
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", PROGRAM + program],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize(
    "rest",
    ["", "outcomes = client.fan_out([InviteRequest('m', [1])]); outcomes.__enter__(); next(outcomes)"],
)
def test_a_program_that_does_not_close_its_client_ends(rest):
    assert run(f"print(len(client.get_settings()) > 3)\n{rest}") == ["True"]


@pytest.mark.skipif(sys.platform == "win32", reason="it knows no forks")
def test_a_client_that_was_used_before_a_fork_says_so_in_the_child():
    program = """
client.get_settings()
child = os.fork()
if not child:
    try:
        client.get_settings()
    except RuntimeError as exc:
        print("forked" in str(exc), flush=True)
    with client:
        pass
    os._exit(0)
os.waitpid(child, 0)
print(len(client.get_settings()) > 3)
client.close()
"""
    assert run(program) == ["True", "True"]


@pytest.mark.skipif(sys.platform == "win32", reason="it knows no forks")
def test_a_client_that_was_not_used_before_a_fork_works_in_the_child():
    program = """
child = os.fork()
if not child:
    with client:
        print(len(client.get_settings()) > 3, flush=True)
    os._exit(0)
os.waitpid(child, 0)
with client:
    print(len(client.get_settings()) > 3)
"""
    assert run(program) == ["True", "True"]


def test_an_event_loop_that_cannot_be_started_is_an_error_of_the_call(sim, monkeypatch):
    def run(*_, **__):
        raise OSError(24, "Too many open files")

    client = client_of(sim)
    monkeypatch.setattr(anyio, "run", run)
    for call in (client.get_settings, client.get_settings, client.close):
        with pytest.raises(OSError, match="Too many open files"):
            call()


def test_a_slow_close_of_one_thread_is_waited_for_by_the_other(sim):
    client = client_of(sim)
    client.get_settings()
    threads = [threading.Thread(target=client.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


def test_no_thread_hangs_if_calls_begin_while_the_client_is_closed(sim):
    for _ in range(20):
        client = client_of(sim)
        client.get_settings()
        ends = []

        def call(client=client, ends=ends):
            try:
                while True:
                    client.get_settings()
            except ClientClosedError:
                ends.append(True)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        client.close()
        for thread in threads:
            thread.join(5)
        assert ends == [True] * 3


def test_a_subclass_keeps_its_attributes_in_views(sim):
    class Mine(SamplingClient):
        label = "mine"

    with Mine(
        sim.base_url, panel_guid=sim.panel_guid, api_key=sim.api_key, transport=sim.transport()
    ) as client:
        client.colour = "green"
        view = client.with_options(name="view")
        assert (type(view), view.colour, view.label, view.name) == (Mine, "green", "mine", "view")
