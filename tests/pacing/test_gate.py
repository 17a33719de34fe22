"""The gate: its limits, the pace of a kind of work, and the kinds that share it."""

from __future__ import annotations

from typing import ClassVar

import anyio
import anyio.lowlevel
import doubles
import pytest
from anyio import wait_all_tasks_blocked
from doubles import fixed, held

from sampling_async._pacing import gate
from sampling_async._pacing.gate import Gate, Permit
from sampling_async._pacing.turns import Lane, WorkKind


async def test_a_gate_gives_as_many_permits_as_its_limit():
    shut = doubles.gate(2)
    permits = [Permit(shut, Lane("work")) for _ in range(3)]
    async with anyio.create_task_group() as tasks:
        for permit in permits:
            tasks.start_soon(permit.acquire)
            await wait_all_tasks_blocked()
        assert (shut.running, shut.waiting) == (2, 1)
        permits[0].release()
        await wait_all_tasks_blocked()
        assert (shut.running, shut.waiting) == (2, 0)
    for permit in permits:
        permit.release()
        permit.release()  # releasing a permit that is not held does nothing
    assert shut.running == 0


async def test_the_limit_can_be_lowered_and_raised_without_overshoot():
    shut = doubles.gate(4)
    held = [Permit(shut, Lane("work")) for _ in range(4)]
    for permit in held:
        await permit.acquire()
    shut.kind("work").adaptive._limit = 1.0
    async with anyio.create_task_group() as tasks:
        late = [Permit(shut, Lane("work")) for _ in range(4)]
        for permit in late:
            tasks.start_soon(permit.acquire)
        await wait_all_tasks_blocked()
        shut.kind("work").adaptive._limit = 4.0
        shut.serve()
        await wait_all_tasks_blocked()
        assert (shut.kind("work").adaptive.limit, shut.running, shut.waiting) == (4, 4, 4)
        for permit in held:
            permit.release()
    assert shut.running == 4
    for permit in late:
        permit.release()


async def test_reports_of_two_kinds_that_are_two_seconds_apart_have_not_the_same_cause():
    time = doubles.FakeTime()
    shut = fixed(8, time)
    one, other, third = (Permit(shut, Lane(kind)) for kind in ("one", "other", "third"))
    for permit in (one, other, third):
        shut.grant(permit)
    shut.overloaded(one)
    time.now = gate._AT_ONCE
    shut.overloaded(other)
    assert [permit.kind.adaptive.limit for permit in (one, other, third)] == [4, 4, 8]


async def test_a_permit_is_released_if_its_waiter_is_cancelled_in_the_same_moment():
    shut = doubles.gate(1)
    first, second = Permit(shut, Lane("work")), Permit(shut, Lane("work"))
    await first.acquire()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(second.acquire)
        await wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        first.release()
    assert (shut.running, second.is_held) == (0, False)


# --- Kinds of work


async def test_overload_lowers_the_limit_of_one_kind_unless_two_report_it():
    time = doubles.FakeTime()
    shut = fixed(8, time)
    quotas, settings, bulk = (Permit(shut, Lane(kind)) for kind in ("quotas", "settings", "bulk"))
    for permit in (quotas, settings, bulk):
        await permit.acquire()
    shut.overloaded(quotas)
    assert [permit.kind.adaptive.limit for permit in (quotas, settings, bulk)] == [4, 8, 8]
    time.now += 60
    shut.overloaded(settings)
    assert [permit.kind.adaptive.limit for permit in (quotas, settings, bulk)] == [4, 4, 8]
    time.now += 1
    shut.overloaded(quotas)  # from an earlier generation: it says nothing new about its own kind
    assert [permit.kind.adaptive.limit for permit in (quotas, settings, bulk)] == [4, 4, 4]


async def test_all_kinds_together_get_no_more_permits_than_the_gate_has():
    shut = doubles.gate(3)
    permits = [Permit(shut, Lane(kind)) for kind in ("quotas", "bulk") for _ in range(3)]
    async with anyio.create_task_group() as tasks:
        for permit in permits:
            tasks.start_soon(permit.acquire)
        await wait_all_tasks_blocked()
        assert (shut.running, shut.waiting) == (3, 3)
        tasks.cancel_scope.cancel()


async def test_a_kind_at_its_limit_does_not_delay_other_kinds():
    shut = doubles.gate(4)
    shut.kind("bulk").adaptive._limit = 1.0
    bulk = [Permit(shut, Lane("bulk")) for _ in range(3)]
    recontact = Permit(shut, Lane("recontact"))
    async with anyio.create_task_group() as tasks:
        for permit in bulk:
            tasks.start_soon(permit.acquire)
        await wait_all_tasks_blocked()
        with anyio.fail_after(60):
            assert await recontact.acquire()
        assert sum(permit.is_held for permit in bulk) == 1
        tasks.cancel_scope.cancel()


async def test_a_limit_lowered_for_another_kind_does_not_lower_all_again():
    """While one kind continues to fail, one failure of a second kind must not lower all limits repeatedly."""
    time = doubles.FakeTime()
    shut = fixed(64, time)
    quotas, settings, bulk = (Permit(shut, Lane(kind)) for kind in ("quotas", "settings", "bulk"))
    for permit in (quotas, settings, bulk):
        await permit.acquire()
    bulk.kind.adaptive._limit = 64.0
    shut.overloaded(settings)
    for _ in range(60):
        time.now += 0.5
        quotas.generation = quotas.kind.adaptive.generation
        shut.overloaded(quotas)
    assert bulk.kind.adaptive.limit >= 32


async def test_a_permit_with_a_deadline_is_granted_before_it():
    time = doubles.FakeTime()
    shut = Gate(1, clock=time.clock, sleep=time.sleep, random=lambda: 1.0)
    permit = Permit(shut, Lane("work"), until=5.0)
    assert (permit.remaining, permit.held_for) == (5.0, 0.0)
    assert await permit.acquire()
    assert await permit.acquire()  # it is held already
    assert shut.running == 1
    permit.release()


async def test_a_permit_whose_deadline_has_passed_is_of_no_use():
    time = doubles.FakeTime()
    shut = Gate(1, clock=time.clock, sleep=time.sleep, random=lambda: 1.0)
    permit = Permit(shut, Lane("work"), until=5.0)
    assert await permit.acquire()
    time.now = 5.0
    assert not await permit.acquire()
    permit.release()


@pytest.mark.parametrize(("is_measured", "limit"), [(True, 8), (False, 4)])
async def test_a_refusal_halves_the_limit_unless_the_rate_was_measured(is_measured, limit):
    shut = doubles.gate(8)
    permit = await held(shut, "work")
    pace = permit.kind.pace
    pace._rate, pace._is_measured = 100.0, is_measured
    shut.refused(permit)
    assert (permit.kind.adaptive.limit, permit.kind.adaptive.generation) == (limit, 1)


async def test_refusals_of_attempts_that_ran_at_once_lower_the_rate_once():
    shut = doubles.gate(8)
    permits = [await held(shut, "work") for _ in range(4)]
    for permit in permits:
        shut.refused(permit)
    assert permits[0].kind.pace.rate == 10.0
    assert permits[0].kind.adaptive.limit == 4


async def test_a_kind_that_was_lowered_just_now_is_not_lowered_for_others():
    time = doubles.FakeTime()
    shut = Gate(8, clock=time.clock, sleep=time.sleep, random=lambda: 1.0)
    first, second, third = [await held(shut, kind) for kind in ("first", "second", "third")]
    shut.overloaded(third)
    time.now = gate._AT_ONCE / 2
    shut.overloaded(second)  # two report it: the first is lowered too, the third just was
    assert [each.kind.adaptive.limit for each in (first, second, third)] == [4, 4, 4]
    time.now = gate._AT_ONCE
    shut.overloaded(await held(shut, "first"))  # for the third, that is long enough ago
    assert [each.kind.adaptive.limit for each in (first, second, third)] == [2, 4, 2]


# --- Permits that are renewed or withdrawn


async def test_each_attempt_waits_for_the_pace_of_its_kind_however_its_permit_was_granted():
    time = doubles.FakeTime()
    shut = fixed(2, time)
    shut.kind("work").pace.refused(0.0)
    permit, other = Permit(shut, Lane("work")), Permit(shut, Lane("work"))
    assert await permit.acquire()
    assert time.slept == [pytest.approx(0.1)]
    assert await permit.acquire()  # it is held already
    assert len(time.slept) == 1
    assert await other.acquire()
    assert len(time.slept) == 2
    permit.release()
    other.release()


GUESSED = 1.0


def guessed(shut: Gate) -> WorkKind:
    """Return a kind whose rate is guessed as one in a second, after refusals and nothing else."""
    kind = shut.kind("work")
    for _ in range(6):
        kind.pace.refused(0.0)
    assert kind.pace.wait(0.0) == pytest.approx(GUESSED)
    return kind


async def test_a_call_that_somebody_waits_for_waits_a_quarter_second_for_a_guessed_rate():
    time = doubles.FakeTime()
    shut = fixed(2, time)
    lane = guessed(shut).interactive
    permits = [Permit(shut, lane) for _ in range(2)]
    for permit in permits:
        assert await permit.acquire()
    assert time.slept == [0.25, 0.25]
    for permit in permits:
        permit.release()


@pytest.mark.parametrize(("deadline", "waits"), [(1.0, 0.25), (2.5, 0.25), (8.0, 0.8), (3600.0, GUESSED)])
async def test_a_bulk_waits_for_a_guessed_rate_as_its_deadline_allows(deadline, waits):
    time = doubles.FakeTime()
    shut = fixed(2, time)
    guessed(shut)
    permit = Permit(shut, Lane("work", patience=600.0), until=deadline)
    assert await permit.acquire()
    assert time.slept == [pytest.approx(waits)]
    permit.release()


async def test_a_call_that_somebody_waits_for_heeds_a_measured_rate():
    time = doubles.FakeTime()
    shut = fixed(2, time)
    kind = guessed(shut)
    kind.pace._is_measured, kind.pace._pause = True, 0.0
    permit = Permit(shut, kind.interactive)
    assert await permit.acquire()
    assert time.slept == [pytest.approx(GUESSED)]
    permit.release()


async def test_a_permit_whose_turn_by_the_pace_is_too_late_is_refused_at_once_and_uses_no_turn():
    time = doubles.FakeTime()
    shut = fixed(2, time)
    pace = guessed(shut).pace
    pace._is_measured, pace._pause, pace._next_at = True, 0.0, 5.0
    for until in (2.0, 5.0):
        assert not await Permit(shut, Lane("work"), until=until).acquire()
    assert (time.slept, shut.running, pace.wait(0.0)) == ([], 0, 5.0)
    assert await Permit(shut, Lane("work"), until=5.1).acquire()
    assert time.slept == [5.0]


async def test_only_one_of_a_kind_waits_for_its_turn_and_leaves_it_to_the_next_if_it_gives_up():
    shut = doubles.gate(8)
    shut._sleep = anyio.sleep
    pace = guessed(shut).pace
    pace._is_measured, pace._pause, pace._next_at = True, 0.0, shut.clock() + 1000.0
    permits = [Permit(shut, Lane("work")) for _ in range(4)]
    scopes = [anyio.CancelScope() for _ in permits]

    async def acquire(permit: Permit, scope: anyio.CancelScope) -> None:
        with scope:
            await permit.acquire()

    async with anyio.create_task_group() as tasks:
        for permit, scope in zip(permits, scopes, strict=True):
            tasks.start_soon(acquire, permit, scope)
            await wait_all_tasks_blocked()
        assert [permit.is_held for permit in permits] == [True, False, False, False]
        assert await Permit(shut, Lane("other")).acquire()  # the others leave the places to it
        scopes[0].cancel()
        await wait_all_tasks_blocked()
        assert [permit.is_held for permit in permits] == [False, True, False, False]
        pace._next_at = 0.0
        shut.unhold()
        await wait_all_tasks_blocked()
        assert sum(permit.is_held for permit in permits) == 2  # it began, and the next one waits for its turn
        tasks.cancel_scope.cancel()


async def test_a_closed_gate_waits_for_no_pace():
    time = doubles.FakeTime()
    shut = fixed(2, time)
    shut.kind("work").pace.refused(0.0)
    shut.close(wakes=True)
    permit = Permit(shut, Lane("work"))
    assert await permit.acquire()
    assert time.slept == []
    permit.release()


@pytest.mark.parametrize("wakes", [False, True])
async def test_a_gate_that_is_closed_closes_its_outage_in_the_same_way(wakes):
    class Closed:
        is_on = False
        told: ClassVar[list[bool]] = []

        def close(self, *, wakes: bool) -> None:
            self.told.append(wakes)

    time = doubles.FakeTime()
    outage = Closed()
    Gate(2, clock=time.clock, sleep=time.sleep, random=lambda: 0.0, outage=outage).close(wakes=wakes)
    assert outage.told.pop() is wakes


# --- A limit below one


async def test_below_one_a_kind_rests_after_each_attempt_and_who_has_no_time_for_that_leaves_at_once():
    time = doubles.FakeTime()
    shut, lane = fixed(8, time), Lane("work")
    kind = shut.kind("work")
    kind.adaptive._limit = 0.25
    first = Permit(shut, lane)
    assert await first.acquire()
    time.now = 0.2
    kind.rest(0.2, time.now)
    first.release()
    hasty = Permit(shut, kind.interactive, until=0.5)
    assert not await hasty.acquire()
    assert time.slept == []
    second = Permit(shut, lane)
    assert await second.acquire()
    assert time.slept == [pytest.approx(0.6)]
    second.release()


def test_responses_that_hardly_come_in_time_do_not_hide_those_that_come_too_late():
    for seconds, is_overload in ((0.1, False), (0.2, True)):
        kind = WorkKind("work", 8)
        for now in (1.0, 2.0):
            shown = kind.was_cut_off(0.3, now)
            kind.took(seconds, callers=0.3)
        assert shown is is_overload


def test_a_few_responses_that_hardly_come_in_time_end_a_row():
    kind = WorkKind("work", 8)
    for now in (1.0, 2.0, 3.0):
        assert not kind.was_cut_off(0.3, now)
        for _ in range(4):
            kind.took(0.2, callers=0.3)


# --- Holds


async def test_a_wait_is_for_the_hold_of_its_own_kind_and_leaves_nothing_behind():
    time = doubles.FakeTime()
    shut = fixed(2, time)
    shut.hold(5.0, "one")
    shut.kind("other").held_until = 1.0
    permit = Permit(shut, Lane("other"))
    await permit.acquire()
    assert time.slept == [1.0]
    assert shut._held_back == set()
    permit.release()


async def test_attempts_that_cannot_begin_yet_are_distinguished_from_those_that_run():
    told = []

    async def sleep(seconds: float) -> None:
        told.append((shut.at_work, shut.in_wait))
        time.now += seconds

    time = doubles.FakeTime()
    shut = Gate(2, clock=time.clock, sleep=sleep, random=lambda: 0.0)
    other, permit = Permit(shut, Lane("other")), Permit(shut, Lane("work"))
    await other.acquire()
    shut.hold(5.0, "work")
    permit.kind.pace.refused(5.0)
    await permit.acquire()
    assert told == [(1, 1), (1, 1)]  # first the hold, then the pace
    assert (shut.at_work, shut.in_wait) == (2, 0)
    other.release()
    permit.release()
    assert (shut.at_work, shut.in_wait) == (0, 0)


async def test_a_hold_of_all_is_about_no_kind():
    time = doubles.FakeTime()
    shut = fixed(2, time)
    shut.hold(1.0)
    assert shut._kinds == {}
    shut.hold(1.0, "one")
    shut.hold(2.0)
    assert set(shut._kinds) == {"one"}


async def test_a_held_gate_grants_no_permit_before_the_end_of_the_hold():
    time = doubles.FakeTime()
    shut = Gate(1, clock=time.clock, sleep=time.sleep, random=lambda: 1.0)
    shut.hold(5)
    shut.hold(2)
    permit = Permit(shut, Lane("work"))
    await permit.acquire()
    assert (time.now, time.slept) == (5.5, [5.5])  # spread over a tenth of the hold
    permit.release()


@pytest.mark.parametrize(
    ("seconds", "random", "slept"), [(5, 0.0, 5.0), (5, 0.5, 5.25), (10, 1.0, 11.0), (300, 1.0, 301.0)]
)
async def test_waiters_resume_within_a_tenth_of_the_hold_and_within_a_second(seconds, random, slept):
    time = doubles.FakeTime()
    shut = Gate(1, clock=time.clock, sleep=time.sleep, random=lambda: random)
    shut.hold(seconds)
    await Permit(shut, Lane("work")).acquire()
    assert time.slept == [pytest.approx(slept)]


@pytest.mark.parametrize(("held_at", "slept"), [(5.0, 5 + 1.0), (6.0, 5 + 0.5)])
async def test_the_hold_that_ends_later_or_that_of_all_kinds_says_how_waiters_spread(held_at, slept):
    time = doubles.FakeTime()
    shut = Gate(1, clock=time.clock, sleep=time.sleep, random=lambda: 1.0)
    shut.hold(10)
    time.now = held_at
    shut.hold(5, "work")
    await Permit(shut, Lane("work")).acquire()
    assert time.slept == [pytest.approx(slept)]


async def test_the_longest_of_all_holds_is_reported():
    time = doubles.FakeTime()
    shut = Gate(1, clock=time.clock, sleep=time.sleep, random=lambda: 1.0)
    assert (shut.held_for(), shut.held_for(shut.kind("work"))) == (0.0, 0.0)
    shut.hold(5, "work")
    assert (shut.held_for(), shut.held_for(shut.kind("work")), shut.held_for(shut.kind("other"))) == (5, 5, 0)
    time.now = 4.0
    shut.hold(2)
    assert (shut.held_for(), shut.held_for(shut.kind("work")), shut.held_for(shut.kind("other"))) == (2, 2, 2)
    time.now = 6.0
    assert shut.held_for() == 0.0


async def test_no_permit_is_held_during_a_hold():
    time = doubles.FakeTime()
    running: list[int] = []

    async def sleep(seconds: float) -> None:
        running.append(shut.running)
        await time.sleep(seconds)

    shut = Gate(1, clock=time.clock, sleep=sleep, random=lambda: 1.0)
    shut.hold(5)
    permit = Permit(shut, Lane("work"))
    await permit.acquire()
    assert running == [0]
    permit.release()


async def test_a_permit_granted_during_a_hold_is_released_until_its_end():
    time = doubles.FakeTime()
    shut = fixed(1, time)
    first, second = Permit(shut, Lane("work")), Permit(shut, Lane("work"))
    await first.acquire()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(second.acquire)
        await wait_all_tasks_blocked()
        shut.hold(5)
        first.release()
    assert (time.slept, shut.running) == ([5], 1)
    second.release()


async def test_a_hold_is_about_one_kind_of_work_unless_two_are_held():
    time = doubles.FakeTime()
    shut = fixed(4, time)
    for kind in ("quotas", "bulk", "settings"):
        shut.kind(kind)
    shut.hold(10, "quotas")
    assert [shut.held_for(shut.kind(kind)) for kind in ("quotas", "bulk", "settings")] == [10, 0, 0]
    shut.hold(5, "quotas")
    assert shut.held_for(shut.kind("bulk")) == 0
    shut.hold(3, "settings")
    assert [shut.held_for(shut.kind(kind)) for kind in ("quotas", "bulk", "settings")] == [10, 3, 3]
    assert shut.held_for() == 10


async def test_a_closed_gate_ignores_holds():
    shut = doubles.gate(1)
    shut.hold(60)
    shut.close(wakes=True)
    shut.hold(60)
    assert shut.held_for() == 0


async def test_a_hold_that_outlasts_the_deadline_is_not_waited_for():
    time = doubles.FakeTime()
    shut = Gate(1, clock=time.clock, sleep=time.sleep, random=lambda: 1.0)
    shut.hold(5)
    for until, is_granted in ((5.0, False), (5.5, False), (5.6, True)):
        permit = Permit(shut, Lane("work"), until=until)
        assert await permit.acquire() is is_granted
        permit.release()
    assert time.slept == [5.5]


async def test_a_permit_that_is_withdrawn_during_a_hold_is_not_waited_for_again():
    time = doubles.FakeTime()
    permits: list[Permit] = []

    async def sleep(seconds: float) -> None:
        await time.sleep(seconds)
        permits[0].withdraw()

    shut = Gate(1, clock=time.clock, sleep=sleep, random=lambda: 0.0)
    shut.hold(5.0)
    permits.append(Permit(shut, Lane("work")))
    assert not await permits[0].acquire()
    assert shut.running == 0


async def test_a_hold_is_over_at_its_end_and_then_for_no_time():
    time = doubles.FakeTime()
    shut = fixed(2, time)
    shut.hold(5.0, "one")
    time.now = 5.0
    shut.hold(5.0, "two")  # no other kind is held now, so it is about this one only
    assert (shut.held_for(shut.kind("one")), shut.held_for(shut.kind("two"))) == (0.0, 5.0)
    time.now = 60.0
    assert shut.held_for(shut.kind("one")) == shut.held_for() == 0.0


async def test_a_permit_is_renewed_during_the_hold_of_another_kind():
    time = doubles.FakeTime()
    shut = fixed(2, time)
    permit = Permit(shut, Lane("work"))
    await permit.acquire()
    shut.hold(5.0, "other")
    assert permit.renew()
    permit.release()
