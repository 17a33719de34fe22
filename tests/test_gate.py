"""The gate: its limit, its order, and being held."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import doubles
import pytest
from anyio import wait_all_tasks_blocked

from sampling_async._gate import Gate, Lane, Permit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anyio.abc import TaskGroup

pytestmark = pytest.mark.anyio


async def test_a_gate_gives_as_many_permits_as_its_limit():
    shut = doubles.gate(2)
    permits = [Permit(shut, Lane()) for _ in range(3)]
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
        permit.release()  # giving back what is not held does nothing
    assert shut.running == 0


async def test_waiters_are_served_first_come_first_served():
    shut, order = doubles.gate(1), []

    async def use(name: int) -> None:
        permit = Permit(shut, Lane())
        await permit.acquire()
        order.append(name)
        await anyio.lowlevel.checkpoint()
        permit.release()

    holder = Permit(shut, Lane())
    await holder.acquire()
    async with anyio.create_task_group() as tasks:
        for name in range(5):
            tasks.start_soon(use, name)
            await wait_all_tasks_blocked()
        holder.release()
    assert order == [0, 1, 2, 3, 4]


async def test_the_limit_can_be_lowered_and_raised_without_overshoot():
    shut = doubles.gate(4)
    held = [Permit(shut, Lane()) for _ in range(4)]
    for permit in held:
        await permit.acquire()
    shut.adaptive._limit = 1.0
    async with anyio.create_task_group() as tasks:
        late = [Permit(shut, Lane()) for _ in range(4)]
        for permit in late:
            tasks.start_soon(permit.acquire)
        await wait_all_tasks_blocked()
        shut.adaptive._limit = 4.0
        shut.serve()
        await wait_all_tasks_blocked()
        assert (shut.limit, shut.running, shut.waiting) == (4, 4, 4)
        for permit in held:
            permit.release()
    assert shut.running == 4
    for permit in late:
        permit.release()


async def test_a_held_gate_gives_no_permit_before_its_time():
    time = doubles.FakeTime()
    shut = Gate(1, clock=time.clock, sleep=time.sleep, random=lambda: 1.0)
    shut.hold(5)
    shut.hold(2)
    permit = Permit(shut, Lane())
    await permit.acquire()
    assert (time.now, time.slept) == (5.5, [5.5])  # spread over a tenth of the hold
    permit.release()


async def test_a_permit_is_not_kept_while_the_gate_is_held():
    time = doubles.FakeTime()
    running: list[int] = []

    async def sleep(seconds: float) -> None:
        running.append(shut.running)
        await time.sleep(seconds)

    shut = Gate(1, clock=time.clock, sleep=sleep, random=lambda: 1.0)
    shut.hold(5)
    permit = Permit(shut, Lane())
    await permit.acquire()
    assert running == [0]
    permit.release()


async def test_a_permit_whose_turn_comes_in_a_hold_is_given_back_until_its_end():
    time = doubles.FakeTime()
    shut = Gate(1, clock=time.clock, sleep=time.sleep, random=lambda: 0.0)
    first, second = Permit(shut, Lane()), Permit(shut, Lane())
    await first.acquire()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(second.acquire)
        await wait_all_tasks_blocked()
        shut.hold(5)
        first.release()
    assert (time.slept, shut.running) == ([5], 1)
    second.release()


# --- Leave without waking


async def test_leave_at_once_is_had_where_there_is_room_and_nobody_to_go_first():
    shut = doubles.gate(1)
    first, second = Permit(shut, Lane()), Permit(shut, Lane())
    assert first.acquire_now()
    assert not second.acquire_now()
    assert (shut.running, first.is_held, second.is_held) == (1, True, False)
    first.release()
    shut.hold(10)
    assert not second.acquire_now()
    shut.unhold()
    assert not Permit(shut, Lane(), until=shut.clock()).acquire_now()
    assert second.acquire_now()
    second.release()
    assert shut.running == 0


@asynccontextmanager
async def one_waits(shut: Gate) -> AsyncIterator[tuple[Permit, Permit, TaskGroup]]:
    """Hold the one permit of a gate, and let another wait for it in a task."""
    first, second = Permit(shut, Lane()), Permit(shut, Lane())
    await first.acquire()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(second.acquire)
        await wait_all_tasks_blocked()
        yield first, second, tasks


async def test_leave_that_came_can_be_taken_before_its_waiter_wakes():
    shut = doubles.gate(1)
    assert not Permit(shut, Lane()).take()
    async with one_waits(shut) as (first, second, _):
        assert not second.take()
        first.release()
        assert second.take()
        assert not second.take()
        second.release()  # before its waiter wakes, who must not give it back again
        assert first.acquire_now()
    assert shut.running == 1
    first.release()


async def test_leave_that_was_taken_stays_so_where_its_waiter_is_cancelled_in_that_moment():
    shut = doubles.gate(1)
    async with one_waits(shut) as (first, second, tasks):
        first.release()
        assert second.take()
        tasks.cancel_scope.cancel()
    assert (shut.running, second.is_held) == (1, True)
    second.release()


async def test_leave_whose_waiter_gave_up_cannot_be_taken():
    shut = doubles.gate(1)
    async with one_waits(shut) as (first, second, tasks):
        tasks.cancel_scope.cancel()
        first.release()  # the leave comes, and goes to who gives up in the same moment
    assert shut.running == 0
    assert not second.take()


async def test_leave_that_came_in_a_hold_is_not_taken():
    shut = doubles.gate(1)
    async with one_waits(shut) as (first, second, tasks):
        first.release()
        shut.hold(10)
        assert not second.take()
        tasks.cancel_scope.cancel()
    assert shut.running == 0


async def test_leave_that_was_given_back_for_a_hold_cannot_be_taken_when_the_hold_is_over():
    """Who waited sleeps a little longer than the hold; what came before it is not its any more."""
    now, woken = [0.0], anyio.Event()

    async def sleep(_: float) -> None:
        await woken.wait()

    shut = Gate(1, clock=lambda: now[0], sleep=sleep, random=lambda: 1.0)
    async with one_waits(shut) as (first, second, _):
        first.release()
        shut.hold(5)
        await wait_all_tasks_blocked()
        now[0] = 5.2
        assert not second.take()
        assert shut.running == 0
        now[0] = 6.0
        woken.set()
    assert (shut.running, second.is_held) == (1, True)


async def test_who_would_have_to_wait_behind_another_lane_gets_none_at_once():
    shut = doubles.gate(1)
    first, earlier, late = (Permit(shut, Lane()) for _ in range(3))
    await first.acquire()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(earlier.acquire)
        await wait_all_tasks_blocked()
        shut.adaptive._limit = 2.0  # and nobody was served since
        shut.adaptive.maximum = 2
        assert not late.acquire_now()
    assert (earlier.is_held, late.is_held, shut.running) == (True, False, 2)
    first.release()
    assert shut.running == 1
