"""Handlers: at least once, in order for each key, again after a failure, and never for what does not stand."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

import anyio
import pytest
from doubles import until
from store_kit import COMPLETION, MEMBER, SECRET, TERMINATE, facts_of, opened, post, status

from sampling_async import InvalidRequestError
from sampling_async.notifications import (
    Completion,
    Fact,
    GiveUp,
    HandlerPolicy,
    Inbox,
    InviteNotification,
    Kind,
    KindStatus,
    QuotaStatus,
    Reconciliation,
    RetryLater,
    SqliteStore,
    State,
    StoreError,
    SurveyClosed,
    Terminate,
    UnknownNotification,
    Validity,
)

QUICK = HandlerPolicy(first_wait=0.001, longest_wait=0.002, poll=0.01, attempts=3, grace=1.0)


def new_inbox(tmp_path, policy=QUICK, **options) -> Inbox:
    return Inbox(tmp_path / "n.db", secrets=SECRET, handling=policy, **options)


def with_fallback(inbox: Inbox) -> Inbox:
    inbox.on(UnknownNotification)(lambda _fact: None)
    return inbox


async def states(inbox: Inbox) -> list[State]:
    return [fact.state for fact in await facts_of(inbox)]


async def until_states(inbox: Inbox, *expected: State) -> None:
    with anyio.fail_after(10):
        while await states(inbox) != list(expected):  # noqa: ASYNC110  likewise
            await anyio.sleep(0.002)


async def test_each_handler_gets_its_facts(tmp_path):
    inbox, seen = new_inbox(tmp_path), []

    @inbox.on(Completion, Terminate)
    async def member(fact: Fact[Completion | Terminate]) -> None:
        seen.append(fact.notification.member_code)

    @inbox.on(UnknownNotification)
    def unknown(fact: Fact[UnknownNotification]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        seen.append(fact.notification.body)

    async with inbox:
        await post(inbox, "completion", COMPLETION)
        await post(inbox, "terminate", {**TERMINATE, "UniqueCode": "m-2"})
        await post(inbox, "terminate", b"?")
        await until_states(inbox, *[State.HANDLED] * 3)
    assert sorted(map(str, seen)) == ["b'?'", "m-1", "m-2"]


async def test_callables_that_return_awaitables_are_awaited(tmp_path):
    inbox, seen = with_fallback(new_inbox(tmp_path)), []

    async def note(what: str, fact: Fact[Completion]) -> None:
        seen.append((what, fact.id))

    class Noting:
        async def __call__(self, fact: Fact[Terminate]) -> None:
            await note("terminate", fact)

    inbox.on(Completion)(partial(note, "completion"))
    inbox.on(Terminate)(Noting())
    async with inbox:
        await post(inbox, "completion", COMPLETION)
        await post(inbox, "terminate", {**TERMINATE, "WaveId": 5})
        await until(lambda: len(seen) == 2)
    assert sorted(seen) == [("completion", 1), ("terminate", 2)]


async def test_a_handler_that_fails_is_called_again_until_the_fact_is_dead(tmp_path, caplog):
    inbox, seen = with_fallback(new_inbox(tmp_path)), []

    @inbox.on(Completion)
    async def fails(fact: Fact[Completion]) -> None:
        seen.append(fact.attempts)
        raise LookupError("m-1 has no account")

    async with inbox:
        await post(inbox, "completion", COMPLETION)
        await until_states(inbox, State.DEAD)
    assert seen == [1, 2, 3]
    (fact,) = await facts_of(inbox)
    assert fact.error == "LookupError: m-1 has no account"
    assert [fact.id async for fact in inbox.facts(state=State.DEAD)] == [1]
    assert "raised LookupError in attempt 3; it is dead" in caplog.text
    assert "m-1" not in caplog.text


async def test_a_fact_that_kills_its_process_is_dead_in_the_end(tmp_path, caplog):
    async with new_inbox(tmp_path) as receiver:
        await post(receiver, "completion", COMPLETION)
    store = SqliteStore(tmp_path / "n.db")
    store.open()
    for _ in range(QUICK.attempts):
        with store.transaction():  # by a process that is never heard of again, so its lease runs out
            assert len(store.claim("dead", [Kind.COMPLETION], time.time(), 0.0, 1)) == 1
    store.close()
    inbox, seen = with_fallback(new_inbox(tmp_path)), []
    inbox.on(Completion)(seen.append)
    async with inbox:
        await until_states(inbox, State.DEAD)
    assert not seen
    assert "each time the process died" in (await facts_of(inbox))[0].error
    assert "fact 1: no attempt has ended" in caplog.text


async def test_a_handler_may_give_up_or_ask_for_time(tmp_path):
    inbox, seen = with_fallback(new_inbox(tmp_path)), []

    @inbox.on(Completion)
    async def gives_up(_fact: Fact[Completion]) -> None:
        raise GiveUp("no such member")

    @inbox.on(QuotaStatus)
    async def later(fact: Fact[QuotaStatus]) -> None:
        seen.append(fact.attempts)
        if len(seen) <= 5:
            raise RetryLater(0)

    async with inbox:
        await post(inbox, "completion", COMPLETION)
        await post(inbox, "quota_status", status(1, is_live=True))
        await until_states(inbox, State.DEAD, State.HANDLED)
    assert seen == [1] * 6  # attempts that ask for time do not count
    assert (await facts_of(inbox))[0].attempts == 1


@pytest.mark.parametrize("seconds", [-1, float("nan"), "soon", None, 1e308, float("inf")])
def test_a_wait_is_a_number_of_seconds(seconds):
    with pytest.raises(InvalidRequestError, match="seconds"):
        RetryLater(seconds)


async def test_facts_of_a_key_are_handled_in_order(tmp_path):
    inbox, seen = with_fallback(new_inbox(tmp_path)), []

    @inbox.on(Completion)
    async def slow_at_first(fact: Fact[Completion]) -> None:
        if fact.attempts == 1:
            raise LookupError
        await anyio.sleep(0.002)
        seen.append((fact.notification.member_code, fact.notification.revenue * 100))

    async with inbox:
        for revenue in range(4):
            for member in range(3):
                await post(inbox, "completion", {**COMPLETION, "UniqueCode": str(member), "Revenue": revenue})
        await until(lambda: len(seen) == 12)
    for member in "012":
        assert [revenue for code, revenue in seen if code == member] == [0, 1, 2, 3]


async def test_at_most_so_many_are_handled_at_once(tmp_path):
    policy, three_run = HandlerPolicy(at_once=3, poll=0.01), anyio.Event()
    inbox, running, most = with_fallback(new_inbox(tmp_path, policy)), 0, 0

    @inbox.on(Completion)
    async def slow(_fact: Fact[Completion]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            three_run.set()
        with anyio.move_on_after(5):
            await three_run.wait()
        running -= 1

    async with inbox:
        for member in range(12):
            await post(inbox, "completion", {**COMPLETION, "UniqueCode": str(member)})
        await until_states(inbox, *[State.HANDLED] * 12)
    assert most == 3


async def test_what_does_not_stand_is_not_handled(tmp_path):
    inbox, seen = with_fallback(new_inbox(tmp_path)), []

    @inbox.on(Terminate, Completion, QuotaStatus)
    async def note(fact: Fact[Terminate | Completion | QuotaStatus]) -> None:
        seen.append(fact.id)

    async with inbox:
        await post(inbox, "completion", COMPLETION)
        await post(inbox, "terminate", TERMINATE)
        await post(inbox, "quota_status", status(5, is_live=False))
        await post(inbox, "quota_status", status(1, is_live=True))
        await until_states(inbox, State.HANDLED, State.SKIPPED, State.HANDLED, State.SKIPPED)
    assert seen == [1, 3]


async def test_what_one_inbox_has_stored_another_one_handles(tmp_path):
    storing, seen = new_inbox(tmp_path), []
    handling = with_fallback(new_inbox(tmp_path))

    @handling.on(Completion)
    async def note(fact: Fact[Completion]) -> None:
        seen.append(fact.id)

    async with handling, storing:
        await post(storing, "completion", COMPLETION)
        await until(lambda: seen == [1])


async def test_kinds_without_a_handler_wait_for_one(tmp_path):
    async with with_fallback(new_inbox(tmp_path)) as first:
        await post(first, "invite", MEMBER)
        await post(first, "invite", b"?")
        await until_states(first, State.PENDING, State.HANDLED)
    second, seen = with_fallback(new_inbox(tmp_path)), []
    second.on(InviteNotification)(lambda fact: seen.append(fact.id))
    async with second:
        await until(lambda: seen == [1])


async def test_leases_of_a_handler_that_was_cut_off_end_with_the_inbox(tmp_path):
    policy = HandlerPolicy(grace=0.01, lease=1000.0, poll=0.01)
    first, begun = with_fallback(new_inbox(tmp_path, policy)), anyio.Event()

    @first.on(Completion)
    async def hangs(_fact: Fact[Completion]) -> None:
        begun.set()
        await anyio.sleep_forever()

    async with first:
        await post(first, "completion", COMPLETION)
        await begun.wait()
    second, attempts = with_fallback(new_inbox(tmp_path)), []
    second.on(Completion)(lambda fact: attempts.append(fact.attempts))
    async with second:
        await until(lambda: attempts == [1])


async def test_handlers_that_run_may_end(tmp_path):
    inbox, begun, ended = with_fallback(new_inbox(tmp_path)), anyio.Event(), []

    @inbox.on(Completion)
    async def takes_its_time(fact: Fact[Completion]) -> None:
        begun.set()
        await anyio.sleep(0.05)
        ended.append(fact.id)

    async with inbox:
        await post(inbox, "completion", COMPLETION)
        await begun.wait()
    assert ended == [1]
    assert await states(inbox) == [State.HANDLED]


async def test_leases_are_prolonged_while_a_handler_runs(tmp_path):
    policy = HandlerPolicy(lease=0.3, poll=0.005)
    first, second = (with_fallback(new_inbox(tmp_path, policy)) for _ in range(2))
    seen = []

    async def slow(fact: Fact[Completion]) -> None:
        seen.append(fact.attempts)
        await anyio.sleep(0.7)

    first.on(Completion)(slow)
    second.on(Completion)(slow)
    async with first, second:
        await post(first, "completion", COMPLETION)
        await until_states(first, State.HANDLED)
    assert seen == [1]


class Odd(BaseException):
    """What no program should raise, with a text that cannot be read."""

    def __str__(self) -> str:
        raise LookupError


@pytest.mark.parametrize("is_async", [True, False])
async def test_whatever_a_handler_raises_the_others_go_on(tmp_path, is_async):
    inbox, seen = with_fallback(new_inbox(tmp_path)), []

    def odd(fact: Fact[Completion]) -> None:
        if fact.notification.member_code == "odd":
            raise Odd
        seen.append(fact.id)

    async def odd_too(fact: Fact[Completion]) -> None:
        odd(fact)

    inbox.on(Completion)(odd_too if is_async else odd)
    async with inbox:
        await post(inbox, "completion", {**COMPLETION, "UniqueCode": "odd"})
        await until_states(inbox, State.DEAD)
        await post(inbox, "completion", COMPLETION)
        await until(lambda: seen == [2])
    assert (await facts_of(inbox))[0].error == "Odd: its text cannot be read"


@pytest.mark.asyncio
async def test_a_cancellation_of_something_that_a_handler_awaits_is_its_failure(tmp_path):
    inbox, seen = with_fallback(new_inbox(tmp_path)), []

    @inbox.on(Completion)
    async def awaits(fact: Fact[Completion]) -> None:
        if fact.attempts == 1:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        seen.append(fact.id)

    async with inbox:
        await post(inbox, "completion", COMPLETION)
        await until(lambda: seen == [1])


@pytest.mark.asyncio
async def test_a_handler_whose_task_somebody_cancels_has_failed_and_the_others_go_on(tmp_path, caplog):
    inbox, seen = with_fallback(new_inbox(tmp_path)), []

    @inbox.on(Completion)
    async def cancelled(fact: Fact[Completion]) -> None:
        if fact.attempts < 3:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_soon(task.cancel)
            await asyncio.sleep(10)
        seen.append(fact.id)

    async with inbox:
        await post(inbox, "completion", COMPLETION)
        await post(inbox, "completion", {**COMPLETION, "UniqueCode": "m-2"})
        await until_states(inbox, State.HANDLED, State.HANDLED)
    assert sorted(seen) == [1, 2]
    assert caplog.text.count("raised CancelledError in attempt 2") == 2


async def test_handling_that_has_ended_is_logged_and_raised_at_the_end(tmp_path, monkeypatch, caplog):
    inbox = with_fallback(new_inbox(tmp_path))
    inbox.on(Completion)(lambda _fact: None)

    async def no_memory() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        async with inbox:
            assert inbox._handling is not None
            monkeypatch.setattr(inbox._handling, "_claim", no_memory)
            await post(inbox, "completion", COMPLETION)
            await until(lambda: "ended by MemoryError" in caplog.text)
    assert "the handling of notifications was ended by MemoryError" in caplog.text


@pytest.mark.asyncio
async def test_a_handler_cannot_close_the_inbox(tmp_path):
    inbox, other = with_fallback(new_inbox(tmp_path)), []

    @inbox.on(Completion)
    async def closes(fact: Fact[Completion]) -> None:
        if fact.attempts == 1:
            await inbox.__aexit__(None, None, None)
        # Another task may, and waits for this handler.
        other.append(asyncio.create_task(inbox.__aexit__(None, None, None)))

    async with inbox:
        await post(inbox, "completion", COMPLETION)
        await until(lambda: bool(other))
        await other[0]
    (fact,) = await facts_of(inbox)
    assert (fact.state, fact.attempts) == (State.HANDLED, 2)


async def test_what_came_while_the_clock_was_ahead_is_handled_at_once(tmp_path):
    ahead, seen = 86_400.0, []

    def clock() -> float:
        return time.time() + ahead

    inbox = with_fallback(new_inbox(tmp_path, clock=clock))
    inbox.on(Completion)(lambda fact: seen.append(fact.id))
    async with new_inbox(tmp_path, clock=clock) as other:
        await post(other, "completion", COMPLETION)
    ahead = 0.0
    async with inbox:
        await until_states(inbox, State.HANDLED)
        ahead = 86_400.0
        await post(inbox, "completion", {**COMPLETION, "UniqueCode": "m-2"})
        await until_states(inbox, *[State.HANDLED] * 2)
    assert seen == [1, 2]


async def test_what_was_put_off_while_the_clock_was_ahead_is_handled_again(tmp_path):
    ahead, seen = 30 * 86_400.0, []
    patient = HandlerPolicy(first_wait=86_400.0, longest_wait=86_400.0, poll=0.01)

    def with_handler() -> Inbox:
        inbox = with_fallback(new_inbox(tmp_path, patient, clock=lambda: time.time() + ahead))
        inbox.on(Completion)(handler)
        return inbox

    def handler(fact: Fact[Completion]) -> None:
        seen.append(fact.attempts)
        if ahead:
            raise LookupError

    async with with_handler() as inbox:
        await post(inbox, "completion", COMPLETION)
        await until(lambda: seen == [1])
    ahead = 0.0
    async with with_handler() as inbox:
        await until_states(inbox, State.HANDLED)
    assert seen == [1, 2]


@pytest.mark.parametrize("name", ["first_wait", "longest_wait", "lease"])
def test_what_is_added_to_a_time_has_an_end(name):
    with pytest.raises(InvalidRequestError, match=f"HandlerPolicy.{name} must be finite, not inf"):
        HandlerPolicy(**{name: float("inf")})


async def test_a_handler_is_notified_that_its_terminate_was_overruled(tmp_path):
    inbox, seen = with_fallback(new_inbox(tmp_path)), []
    inbox.on(Completion)(lambda fact: seen.append("completion"))

    @inbox.on(Terminate)
    async def ended(fact: Fact[Terminate]) -> None:
        seen.append((fact.corrects, fact.validity, fact.notification.reason))
        if fact.corrects and fact.attempts == 1:
            raise LookupError  # a correction is tried again, as any fact

    async with inbox:
        await post(inbox, "terminate", TERMINATE)
        await until_states(inbox, State.HANDLED)
        await post(inbox, "completion", COMPLETION)
        await until_states(inbox, *[State.HANDLED] * 3)
    corrections = [(1, Validity.OVERRULED, "SCREENED_OUT")] * 2
    assert seen == [(None, Validity.STANDS, "SCREENED_OUT"), "completion", *corrections]


async def test_a_reconciliation_has_a_handler_of_its_own(tmp_path):
    inbox, seen = with_fallback(new_inbox(tmp_path)), []

    @inbox.on(Completion, Terminate, Reconciliation)
    async def member(fact: Fact[Completion | Terminate | Reconciliation]) -> None:
        seen.append((fact.kind, fact.posted_as))

    async with inbox:
        await post(inbox, "completion", COMPLETION)
        await post(inbox, "completion", {**COMPLETION, "ReconciliationID": 5})
        await until_states(inbox, *[State.HANDLED] * 2)
        assert (await post(inbox, "reconciliation", {**MEMBER, "ReconciliationID": 6})).status == 200
        await until_states(inbox, *[State.HANDLED] * 3)
    assert seen == [("completion",) * 2, ("reconciliation", "completion"), ("reconciliation",) * 2]


async def test_a_reconciliation_without_a_handler_is_notified_once(tmp_path, caplog):
    inbox = with_fallback(new_inbox(tmp_path))
    async with inbox:
        for number in (1, 2):
            await post(inbox, "terminate", {**TERMINATE, "ReconciliationID": number})
    assert caplog.text.count("a reconciliation came, and there is no handler for it") == 1


async def test_a_traceback_is_logged_without_member_codes_and_secrets(tmp_path, caplog):
    inbox = new_inbox(tmp_path)

    @inbox.on(Completion)
    async def credits_nobody(fact: Fact[Completion]) -> None:
        try:
            {}[fact.notification.member_code]
        except KeyError as exc:
            raise LookupError(f"no account {fact.notification.additional_data} {SECRET} of the panel") from exc

    @inbox.on(UnknownNotification)
    def looks(fact: Fact[UnknownNotification]) -> None:
        raise ValueError(fact.notification.body)

    async with inbox:
        await post(inbox, "completion", {**COMPLETION, "UniqueCode": "m\u00e9 7"})
        await post(inbox, "invite", b"?m-8")
        await until_states(inbox, *[State.DEAD] * 2)
    lines = caplog.text.splitlines()
    assert lines.count("KeyError: '<hidden>'") == 3
    assert lines.count("LookupError: no account <hidden> <hidden> of the panel") == 3
    assert "in credits_nobody" in caplog.text
    assert lines.count("ValueError: <hidden>") == 3
    assert "in looks" in caplog.text
    for secret in ("m\u00e9 7", "invite=1", SECRET, "m-8"):
        assert secret not in caplog.text
    levels = [record.levelname for record in caplog.records if "credits_nobody" in record.message]
    assert levels == ["WARNING", "WARNING", "ERROR"]
    assert all(record.exc_info is None for record in caplog.records)  # agents would show local variables


async def test_the_status_counts_what_waits_and_what_failed(tmp_path):
    now = 1_000.0
    inbox = with_fallback(new_inbox(tmp_path, clock=lambda: now))

    @inbox.on(Completion)
    def fails(_fact: Fact[Completion]) -> None:
        raise GiveUp

    async with inbox:
        await post(inbox, "completion", COMPLETION)
        await post(inbox, "terminate", {**TERMINATE, "UniqueCode": "m-2"})  # it has no handler
        await until_states(inbox, State.DEAD, State.PENDING)
        now += 50
        status_now = await inbox.status()
    assert (status_now.is_open, status_now.not_stored) == (True, 0)
    assert (status_now.pending, status_now.dead, status_now.failed) == (1, 1, 1)
    assert status_now.oldest_seconds == 50
    assert status_now.by_kind[Kind.COMPLETION] == KindStatus(dead=1, failed=1, has_handler=True)
    assert status_now.by_kind[Kind.TERMINATE] == KindStatus(pending=1, oldest_seconds=50)
    assert status_now.by_kind[None] == KindStatus(has_handler=True)
    closed = inbox.read_status()
    assert (closed.is_open, closed.pending, closed.dead) == (False, 1, 1)


def test_a_handler_is_registered_for_records(tmp_path):
    inbox = new_inbox(tmp_path)

    def handler(_fact: object) -> None: ...

    for misuse in ((), (handler,), ("completion",), (Completion, handler)):
        with pytest.raises(InvalidRequestError, match="Completion"):
            inbox.on(*misuse)
    assert inbox.on(Completion)(handler) is handler


def test_a_handler_is_annotated_for_its_records(tmp_path):
    inbox = new_inbox(tmp_path)

    def ended(fact: Fact[Terminate]) -> None: ...

    async def ends(fact: Fact[Completion | Terminate]) -> None: ...

    def bare(fact: Terminate) -> None: ...

    def either(fact: Fact[Completion] | Fact[Terminate]) -> None: ...

    class Handles:
        async def __call__(self, fact: Fact[Terminate]) -> None: ...

    def local(fact: Fact[NotThere]) -> None: ...  # noqa: F821

    for handler in (ended, ends, bare, either, Handles(), partial(ended)):
        with pytest.raises(InvalidRequestError, match=r"annotated for (Completion, )?Terminate"):
            inbox.on(QuotaStatus)(handler)
    for handler, record in (
        (ends, Completion),
        (ended, Terminate),
        (local, QuotaStatus),
        (print, SurveyClosed),
    ):
        inbox.on(record)(handler)


async def test_what_is_replayed_is_due_whatever_the_clock_was(tmp_path):
    ahead, seen = 86_400.0, []

    def handler(fact: Fact[Completion]) -> None:
        seen.append(fact.id)
        if ahead:
            raise GiveUp

    def with_handler() -> Inbox:
        inbox = with_fallback(new_inbox(tmp_path, clock=lambda: time.time() + ahead))
        inbox.on(Completion)(handler)
        return inbox

    async with with_handler() as inbox:
        await post(inbox, "completion", COMPLETION)
        await until_states(inbox, State.DEAD)
    ahead = 0.0
    async with with_handler() as inbox:
        await post(inbox, "completion", {**COMPLETION, "UniqueCode": "m-2"})
        await until_states(inbox, State.DEAD, State.HANDLED)
        numbers = [1, 2**63, 10**30]
        store = SqliteStore(tmp_path / "n.db")
        store.open()
        with store.transaction():
            assert store.replay(numbers) == 1
        store.close()
        await until_states(inbox, State.HANDLED, State.HANDLED)
    assert seen == [1, 2, 1]


async def test_a_handler_in_a_thread_keeps_its_fact_while_the_inbox_closes(tmp_path):
    policy = HandlerPolicy(lease=0.6, poll=0.005, grace=0.001)
    running, seen, go_on = [], [], threading.Event()

    def handler(fact: Fact[Completion]) -> None:
        running.append(fact.id)
        seen.append(len(running))
        go_on.wait(60)
        running.remove(fact.id)

    inboxes = [with_fallback(new_inbox(tmp_path, policy)) for _ in range(2)]
    for inbox in inboxes:
        inbox.on(Completion)(handler)
    async with inboxes[0]:
        async with anyio.create_task_group() as tasks:
            async with inboxes[1]:
                await post(inboxes[1], "completion", COMPLETION)
                await until(lambda: seen)
                tasks.start_soon(_set_after, 1.2, go_on)  # after two leases
        await until_states(inboxes[0], State.HANDLED)
    assert seen == [1]


async def _set_after(seconds: float, event: threading.Event) -> None:
    await anyio.sleep(seconds)
    event.set()


async def test_a_fact_that_comes_back_while_its_handler_runs_is_not_handled_twice_at_once(tmp_path):
    now = 1000.0
    inbox, running, most = with_fallback(new_inbox(tmp_path, clock=lambda: now)), 0, 0

    @inbox.on(Completion)
    async def slow(_fact: Fact[Completion]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await anyio.sleep(0.1)
        running -= 1

    async with inbox:
        await post(inbox, "completion", COMPLETION)
        await until(lambda: running == 1)
        now += 10_000  # a machine that slept: all leases are over
        await post(inbox, "completion", {**COMPLETION, "UniqueCode": "m-2"})
        await until(lambda: running == 0)
        await post(inbox, "completion", {**COMPLETION, "UniqueCode": "m-3"})
        await until(lambda: running == 0)
    assert most <= 2


async def test_order_is_kept_if_a_fact_falls_while_its_handler_runs(tmp_path):
    inbox, log, go_on = with_fallback(new_inbox(tmp_path)), [], anyio.Event()

    @inbox.on(QuotaStatus)
    async def slow(fact: Fact[QuotaStatus]) -> None:
        log.append(("begin", fact.notification.is_live))
        if fact.notification.is_live:
            await go_on.wait()
        log.append(("end", fact.notification.is_live))

    async with inbox:
        await post(inbox, "quota_status", status(1, is_live=True))
        await until(lambda: log)
        await post(inbox, "quota_status", status(2, is_live=False))
        await anyio.sleep(0.05)
        go_on.set()
        await until_states(inbox, State.HANDLED, State.HANDLED)
    assert log == [("begin", True), ("end", True), ("begin", False), ("end", False)]


async def test_an_error_of_the_store_does_not_end_the_handling(tmp_path, monkeypatch, caplog):
    inbox, seen = with_fallback(new_inbox(tmp_path)), []
    inbox.on(Completion)(lambda fact: seen.append(fact.id))
    async with inbox:
        database = inbox.store._open
        monkeypatch.setattr(inbox.store, "_database", None)
        await until(lambda: "facts cannot be read" in caplog.text)
        monkeypatch.setattr(inbox.store, "_database", database)
        await post(inbox, "completion", COMPLETION)
        await until(lambda: seen == [1])


async def test_a_result_that_cannot_be_stored_is_stored_later(tmp_path, monkeypatch, caplog):
    """The handler is not called again, though the store was away when it had succeeded."""
    inbox, seen = with_fallback(new_inbox(tmp_path)), []

    @inbox.on(Completion)
    async def handle(fact: Fact[Completion]) -> None:
        seen.append(fact.id)
        monkeypatch.setattr(inbox.store, "_database", None)

    async with inbox:
        database = inbox.store._open
        await post(inbox, "completion", COMPLETION)
        await until(lambda: "results of handlers cannot be stored" in caplog.text)
        monkeypatch.setattr(inbox.store, "_database", database)
        await until_states(inbox, State.HANDLED)
    assert len(seen) == 1


def test_a_fallback_is_needed_beside_any_handler(tmp_path):
    inbox = new_inbox(tmp_path)
    inbox.on(Completion)(lambda _fact: None)
    with pytest.raises(InvalidRequestError, match="register a handler for UnknownNotification"):
        anyio.run(inbox.__aenter__)


async def test_handlers_are_registered_before_the_inbox_is_opened(tmp_path):
    async with new_inbox(tmp_path) as inbox:
        with pytest.raises(RuntimeError, match="before the inbox is opened"):
            inbox.on(Completion)(lambda _fact: None)


def test_a_handler_takes_notifications_and_each_has_one(tmp_path):
    inbox = new_inbox(tmp_path)
    inbox.on(Completion)(lambda _fact: None)
    with pytest.raises(InvalidRequestError, match="Completion has a handler already"):
        inbox.on(SurveyClosed, Completion)(lambda _fact: None)
    inbox.on(SurveyClosed)(lambda _fact: None)
    with pytest.raises(InvalidRequestError, match="is no notification"):
        inbox.on(int)(lambda _fact: None)


@pytest.mark.parametrize(
    "name", ["at_once", "attempts", "first_wait", "longest_wait", "lease", "poll", "grace"]
)
@pytest.mark.parametrize("value", [0, -1, "many", True])
def test_a_policy_has_numbers_above_0(name, value):
    with pytest.raises(InvalidRequestError, match=name):
        HandlerPolicy(**{name: value})


def test_waits_grow_to_the_longest():
    policy = HandlerPolicy(first_wait=1.0, longest_wait=60.0)
    assert [policy.wait(attempts, 1.0) for attempts in (1, 2, 3, 7, 5000)] == [1.0, 2.0, 4.0, 60.0, 60.0]
    assert policy.wait(2, 0.0) == 1.0


async def test_a_store_that_is_away_for_long_is_logged_once_and_its_return_too(tmp_path, monkeypatch, caplog):
    inbox, asked, handled = new_inbox(tmp_path), [], []
    inbox.on(Completion)(handled.append)
    with_fallback(inbox)
    claim = inbox.store.claim

    def away(*given, **named):
        asked.append(1)
        if len(asked) > 5:
            return claim(*given, **named)
        raise StoreError("the database is away")

    monkeypatch.setattr(inbox.store, "claim", away)
    async with inbox:
        await post(inbox, "completion", COMPLETION)
        await until_states(inbox, State.HANDLED)
    lines = [record.getMessage() for record in caplog.records if "facts cannot be read" in record.getMessage()]
    assert lines == [
        "facts cannot be read, and are looked for again: the database is away",
        "facts cannot be read, and are looked for again: this is over",
    ]
    assert len(handled) == 1


async def test_a_rollback_does_not_forget_that_the_clock_was_set_back(tmp_path):
    store, clock = tmp_path / "n.db", [2_000_000.0]
    async with Inbox(store, secrets=SECRET, clock=lambda: clock[0]) as inbox:
        await post(inbox, "completion", COMPLETION)
    clock[0] -= 86_400
    mine = SqliteStore(store)
    mine.open()
    with pytest.raises(ZeroDivisionError), mine.transaction():
        assert len(mine.claim("me", [Kind.COMPLETION], clock[0], clock[0] + 9, 1)) == 1
        raise ZeroDivisionError
    with mine.transaction():
        assert len(mine.claim("me", [Kind.COMPLETION], clock[0], clock[0] + 9, 1)) == 1
    mine.close()


async def test_a_dead_fact_that_is_true_no_longer_is_skipped(tmp_path):
    async with Inbox(tmp_path / "n.db", secrets=SECRET) as inbox:
        await post(inbox, "terminate", TERMINATE)
        with opened(tmp_path / "n.db") as mine:
            mine.execute("UPDATE facts SET state = 'dead'")
        await post(inbox, "completion", COMPLETION)
        assert (await inbox.status()).dead == 0
        first, _ = await facts_of(inbox)
    assert (first.state, first.validity) == (State.SKIPPED, Validity.OVERRULED)
