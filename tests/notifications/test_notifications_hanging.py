"""Handlers that hang or take long: they end, or give up their places, and hold up no other kind."""

from __future__ import annotations

import threading

import anyio
from attrs import evolve
from doubles import until
from store_kit import COMPLETION, MEMBER, TERMINATE, facts_of, pause_extra_place, post, status
from test_notifications_handling import QUICK, new_inbox, until_states, with_fallback

from sampling_async.notifications import (
    Completion,
    Fact,
    HandlerPolicy,
    Inbox,
    InviteNotification,
    QuotaStatus,
    Reconciliation,
    State,
    Terminate,
)


async def test_a_handler_that_hangs_is_cancelled_and_tried_again(tmp_path):
    inbox, seen = with_fallback(new_inbox(tmp_path, evolve(QUICK, timeout=0.02, at_once=2))), []

    @inbox.on(Completion)
    async def hangs(fact: Fact[Completion]) -> None:
        seen.append(fact.id)
        if fact.attempts == 1:
            await anyio.sleep_forever()

    async with inbox:
        for wave in range(6):
            await post(inbox, "completion", {**COMPLETION, "WaveId": wave})
        await until_states(inbox, *[State.HANDLED] * 6)
        errors = {fact.error for fact in await facts_of(inbox)}
    assert sorted(seen) == sorted([*range(1, 7)] * 2)
    assert errors == {None}


async def test_a_timeout_is_a_failure_with_its_reason(tmp_path):
    policy = evolve(QUICK, timeout=0.01, attempts=1)
    inbox = with_fallback(new_inbox(tmp_path, policy))

    @inbox.on(Completion)
    async def hangs(_fact: Fact[Completion]) -> None:
        await anyio.sleep_forever()

    async with inbox:
        await post(inbox, "completion", COMPLETION)
        await until_states(inbox, State.DEAD)
        (fact,) = await facts_of(inbox)
    assert fact.error == "TimeoutError: no end after 0.01 seconds (HandlerPolicy.timeout)"


async def test_a_thread_that_hangs_gives_up_its_place_and_keeps_its_fact(tmp_path, caplog):
    inbox, seen = with_fallback(new_inbox(tmp_path, evolve(QUICK, timeout=0.02, at_once=2))), []
    go_on = threading.Event()

    @inbox.on(Completion)
    def hangs(fact: Fact[Completion]) -> None:
        seen.append(fact.id)
        if fact.id <= 2:
            go_on.wait(20)

    async with inbox:
        for wave in range(4):
            await post(inbox, "completion", {**COMPLETION, "WaveId": wave})
        await until_states(inbox, *[State.PENDING] * 2, *[State.HANDLED] * 2)
        go_on.set()
        await until_states(inbox, *[State.HANDLED] * 4)
    assert sorted(seen) == [1, 2, 3, 4]
    assert "fact 1: the completion handler" in caplog.text
    assert "hangs: it has been running" in caplog.text


async def test_a_kind_whose_handler_hangs_holds_up_no_other_one(tmp_path):
    inbox, seen = with_fallback(new_inbox(tmp_path, HandlerPolicy(at_once=2, poll=0.01))), []
    go_on = anyio.Event()

    @inbox.on(Completion)
    async def hangs(_fact: Fact[Completion]) -> None:
        seen.append("completion")
        await go_on.wait()

    inbox.on(QuotaStatus)(lambda fact: seen.append(fact.notification.quota_id))

    async with inbox:
        for wave in range(5):
            await post(inbox, "completion", {**COMPLETION, "WaveId": wave})
        await until(lambda: seen == ["completion"] * 2)
        for quota_id in (7, 8):
            await post(inbox, "quota_status", status(1, is_live=False, quota_id=quota_id))
        await until(lambda: seen[2:] == [7, 8])
        go_on.set()
        await until_states(inbox, *[State.HANDLED] * 7)


async def hanging_inbox(tmp_path, policy: HandlerPolicy) -> tuple[Inbox, list[int]]:
    """Return an inbox whose handler of completions hangs, and the quotas that its other handler gets."""
    inbox, seen = with_fallback(new_inbox(tmp_path, policy)), []

    @inbox.on(Completion)
    async def hangs(_fact: Fact[Completion]) -> None:
        await anyio.sleep_forever()

    @inbox.on(QuotaStatus)
    async def note(fact: Fact[QuotaStatus]) -> None:
        seen.append(fact.notification.quota_id)

    return inbox, seen


NEVER = 10_000.0


async def test_facts_behind_a_kind_that_hangs_are_handled_one_after_the_other(tmp_path, monkeypatch):
    # Neither the next look nor the pause of the extra place comes in the time of this test.
    pause_extra_place(monkeypatch, NEVER)
    inbox, seen = await hanging_inbox(tmp_path, HandlerPolicy(at_once=2, poll=NEVER, grace=0.001))
    storing = new_inbox(tmp_path)
    async with storing:
        for wave in range(5):
            await post(storing, "completion", {**COMPLETION, "WaveId": wave})
        for quota_id in range(10):
            await post(storing, "quota_status", status(1, is_live=False, quota_id=100 + quota_id))
    async with inbox:
        await until(lambda: len(seen) == 10)
    assert seen == [*range(100, 110)]


async def test_a_fact_that_comes_in_the_pause_of_the_extra_place_waits_for_its_end_only(tmp_path):
    inbox, seen = await hanging_inbox(tmp_path, HandlerPolicy(at_once=2, poll=NEVER, grace=0.001))
    async with inbox:
        for wave in range(2):
            await post(inbox, "completion", {**COMPLETION, "WaveId": wave})
        for quota_id in range(100, 105):
            await post(inbox, "quota_status", status(1, is_live=False, quota_id=quota_id))
            await until(lambda: seen[-1:] == [quota_id])  # noqa: B023  called in this turn
    assert seen == [*range(100, 105)]


async def test_an_extra_place_keeps_the_order_of_a_member(tmp_path):
    """The place is for completions here, and this one comes after a terminate that waits for a place."""
    inbox, seen = with_fallback(new_inbox(tmp_path, HandlerPolicy(at_once=2, poll=0.01))), []
    go_on = anyio.Event()

    @inbox.on(Terminate)
    async def hangs(fact: Fact[Terminate]) -> None:
        seen.append(fact.id)
        await go_on.wait()

    inbox.on(Reconciliation)(lambda fact: seen.append(fact.id))

    async with inbox:
        for wave in range(3):
            await post(inbox, "terminate", {**TERMINATE, "WaveId": wave})
        await post(inbox, "terminate", {**TERMINATE, "WaveId": 2, "ReconciliationID": 1})
        await post(inbox, "terminate", {**TERMINATE, "WaveId": 3, "ReconciliationID": 1})
        await until(lambda: seen == [1, 2, 5])
        go_on.set()
        await until_states(inbox, *[State.HANDLED] * 5)
    assert seen == [1, 2, 5, 3, 4]


async def test_with_one_place_there_is_no_extra_one(tmp_path):
    inbox, seen = with_fallback(new_inbox(tmp_path, HandlerPolicy(at_once=1, poll=0.001))), []
    go_on = anyio.Event()

    @inbox.on(Completion)
    async def slow(_fact: Fact[Completion]) -> None:
        seen.append("begins")
        await go_on.wait()
        seen.append("ends")

    inbox.on(InviteNotification)(lambda _fact: seen.append("invite"))

    async with inbox:
        await post(inbox, "completion", COMPLETION)
        await until(lambda: seen == ["begins"])
        await post(inbox, "invite", MEMBER)
        await anyio.sleep(0.01)
        go_on.set()
        await until_states(inbox, *[State.HANDLED] * 2)
    assert seen == ["begins", "ends", "invite"]


async def test_a_handler_that_takes_long_is_logged(tmp_path, caplog):
    inbox = with_fallback(new_inbox(tmp_path, evolve(QUICK, lease=0.03)))

    @inbox.on(Completion)
    async def slow(_fact: Fact[Completion]) -> None:
        await until(lambda: "its lease is prolonged" in caplog.text)

    async with inbox:
        await post(inbox, "completion", COMPLETION)
        await until_states(inbox, State.HANDLED)
    assert caplog.text.count("its lease is prolonged") == 1
