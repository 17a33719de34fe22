"""Whose turn it is at a gate: lanes, weights, interactive calls, and permits that are renewed or withdrawn."""

from __future__ import annotations

import math

import anyio
import anyio.lowlevel
import doubles
import pytest
from anyio import wait_all_tasks_blocked
from doubles import fixed, held

from sampling_async._pacing.gate import Gate, Permit
from sampling_async._pacing.turns import Lane


async def served(shut: Gate, *joins: tuple[object, Lane]) -> list[object]:
    """Let permits be waited for one after the other, then release the one before them; return their order."""
    order: list[object] = []
    holder = await held(shut, "before")

    async def use(name: object, lane: Lane) -> None:
        permit = Permit(shut, lane)
        await permit.acquire()
        order.append(name)
        permit.release()

    async with anyio.create_task_group() as tasks:
        for name, lane in joins:
            tasks.start_soon(use, name, lane)
            await wait_all_tasks_blocked()
        holder.release()
    return order


async def test_waiters_are_served_first_come_first_served():
    joins = [(name, Lane("work")) for name in range(5)]
    assert await served(doubles.gate(1), *joins) == [0, 1, 2, 3, 4]


async def test_one_in_ten_goes_to_a_bulk_beside_calls_that_never_stop():
    """Also where calls may go beyond the maximum; and then never more of them than are reserved."""
    shut, granted, most = doubles.gate(8), [], 0
    bulk = Lane("bulk")

    async def again(lane: Lane) -> None:
        nonlocal most
        while len(granted) < 2_000:
            permit = Permit(shut, lane)
            await permit.acquire()
            granted.append(lane.kind)
            most = max(most, shut.running)
            await anyio.lowlevel.checkpoint()
            permit.release()

    async with anyio.create_task_group() as tasks:
        for _ in range(12):
            for lane in (bulk, shut.kind("settings").interactive, shut.kind("quotas").interactive):
                tasks.start_soon(again, lane)
    assert granted.count("bulk") > 150
    assert most <= 10


async def test_nine_interactive_permits_in_a_row_then_one_of_another_lane():
    shut, fan_out = doubles.gate(1), ("fan-out", Lane("work"))
    call = "call", shut.kind("work").interactive
    order = await served(shut, *[call] * 20, *[fan_out] * 2)
    assert order == ["call"] * 9 + ["fan-out"] + ["call"] * 9 + ["fan-out"] + ["call"] * 2


async def test_a_lane_of_twice_the_weight_gets_twice_the_permits():
    heavy, light = ("heavy", Lane("work", weight=2.0)), ("light", Lane("work", weight=1.0))
    order = await served(doubles.gate(1), *[heavy] * 6, *[light] * 6)
    assert order[:9].count("heavy") == 6
    assert order[9:] == ["light"] * 3


# --- Kinds of work


async def test_of_two_kinds_the_interactive_call_that_came_first_is_next():
    shut, kinds = doubles.gate(1), ["settings", "invite", "settings"]
    assert await served(shut, *[(kind, shut.kind(kind).interactive) for kind in kinds]) == kinds


# --- Permits that are renewed or withdrawn


async def waiting_for(shut: Gate, lane: Lane, tasks) -> Permit:
    """Return a permit that a task waits for."""
    permit = Permit(shut, lane)
    tasks.start_soon(permit.acquire)
    await wait_all_tasks_blocked()
    return permit


async def test_a_permit_is_renewed_in_front_of_its_own_lane_which_goes_on_waiting():
    shut, lane = doubles.gate(1), Lane("work")
    permit = Permit(shut, lane)
    assert not permit.renew()  # it is not held
    await permit.acquire()
    assert permit.renew()  # nobody waits
    async with anyio.create_task_group() as tasks:
        parked = await waiting_for(shut, lane, tasks)
        assert permit.renew()
        assert (permit.is_held, parked.is_held, shut.running, shut.waiting) == (True, False, 1, 1)
        permit.release()
    assert parked.is_held
    parked.release()


async def test_lanes_that_renew_their_permits_take_turns_by_weight():
    shut, order = doubles.gate(1), []
    lanes = {"heavy": Lane("work", weight=2.0), "light": Lane("work")}
    using, name = Permit(shut, lanes["heavy"]), "heavy"
    await using.acquire()
    async with anyio.create_task_group() as tasks:
        parked = {each: await waiting_for(shut, lanes[each], tasks) for each in lanes}
        while len(order) < 30:
            if not using.renew():
                (name,) = (each for each in lanes if parked[each].is_held)
                using, parked[name] = parked[name], await waiting_for(shut, lanes[name], tasks)
            order.append(name)
        using.release()
        for permit in parked.values():
            permit.withdraw()
    assert 19 <= order.count("heavy") <= 21
    assert "light light" not in " ".join(order)


async def test_a_permit_is_not_renewed_before_an_interactive_call():
    shut, lane = doubles.gate(1), Lane("work")
    permit = Permit(shut, lane)
    await permit.acquire()
    async with anyio.create_task_group() as tasks:
        parked = await waiting_for(shut, lane, tasks)
        call = await waiting_for(shut, shut.kind("work").interactive, tasks)
        assert not permit.renew()
        assert (permit.is_held, parked.is_held, call.is_held) == (False, False, True)
        await wait_all_tasks_blocked()
        call.release()
    assert parked.is_held
    parked.release()


async def test_after_nine_interactive_calls_a_permit_is_renewed_in_front_of_the_next():
    shut, lane = doubles.gate(1), Lane("work")
    permit = Permit(shut, lane)
    await permit.acquire()
    async with anyio.create_task_group() as tasks:
        parked = await waiting_for(shut, lane, tasks)
        calls = [await waiting_for(shut, shut.kind("work").interactive, tasks) for _ in range(2)]
        shut._line.in_a_row = 9
        assert permit.renew()
        assert not permit.renew()  # that was the turn of the other lanes
        for call in (*calls, parked):
            await wait_all_tasks_blocked()
            assert call.is_held
            call.release()


async def test_a_permit_is_not_renewed_when_no_attempt_may_begin():
    time = doubles.FakeTime()
    shut = fixed(2, time)
    permit, other = Permit(shut, Lane("work"), until=9.0), Permit(shut, Lane("work"))

    async def taken() -> Permit:
        await permit.acquire()
        return permit

    shut_by = [
        lambda: shut.hold(0.5, "work"),
        lambda: setattr(shut.kind("work").pace, "_next_at", time.now + 0.5),
        lambda: setattr(shut.kind("work").adaptive, "_limit", 1.0),  # and another one is held
        lambda: setattr(time, "now", 9.0),  # the deadline
    ]
    for make in shut_by:
        await taken()
        await other.acquire()
        make()
        assert not permit.renew()
        permit.release()
        other.release()
        shut.kind("work").adaptive._limit = 2.0
        assert shut.running == 0


async def test_a_renewed_permit_knows_the_state_of_the_gate_now():
    shut = doubles.gate(3)
    permit, other = Permit(shut, Lane("work")), Permit(shut, Lane("work"))
    await permit.acquire()
    shut.kind("work").stale.add(permit)  # it was granted before an outage
    shut.kind("work").adaptive.generation = 7
    await other.acquire()
    assert permit.renew()
    assert (permit.generation, permit.among) == (7, 2)
    assert not shut.kind("work").stale


async def test_a_renewed_permit_lets_others_in_when_the_limit_has_grown():
    shut = doubles.gate(4)
    shut.kind("work").adaptive._limit = 1.0
    lane = Lane("work")
    permit = Permit(shut, lane)
    await permit.acquire()
    async with anyio.create_task_group() as tasks:
        late = await waiting_for(shut, lane, tasks)
        shut.kind("work").adaptive._limit = 2.0
        assert permit.renew()
        await wait_all_tasks_blocked()
        assert late.is_held
        late.release()
        permit.release()
    assert shut.running == 0


@pytest.mark.parametrize("is_granted", [False, True])
async def test_a_withdrawn_permit_ends_the_wait_and_is_not_held(is_granted):
    shut, results = doubles.gate(1), []
    holder, permit, later = Permit(shut, Lane("work")), Permit(shut, Lane("work")), Permit(shut, Lane("work"))
    await holder.acquire()

    async def wait() -> None:
        results.append(await permit.acquire())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await wait_all_tasks_blocked()
        tasks.start_soon(later.acquire)
        await wait_all_tasks_blocked()
        if is_granted:  # its task does not know yet
            holder.release()
        permit.withdraw()
        assert not permit.is_held
        await wait_all_tasks_blocked()
        assert results == [False]
        holder.release()
    assert later.is_held
    assert not await permit.acquire()
    later.release()
    assert shut.running == shut.waiting == 0


async def test_a_permit_that_was_waited_for_can_be_withdrawn_later():
    shut, lane = doubles.gate(1), Lane("work")
    holder = Permit(shut, lane)
    await holder.acquire()
    async with anyio.create_task_group() as tasks:
        permit = await waiting_for(shut, lane, tasks)
        holder.release()
    assert permit.is_held
    permit.withdraw()
    assert not permit.is_held


async def order_of(deadlines: list[float], *, waited: float) -> list[int]:
    """Let calls with deadlines join one after the other; return in which order they are served after a time."""
    time = doubles.FakeTime()
    shut, order = fixed(1, time), []
    holder = Permit(shut, Lane("other"))
    await holder.acquire()

    async def use(number: int, until: float) -> None:
        permit = Permit(shut, shut.kind("work").interactive, until)
        if await permit.acquire():
            order.append(number)
        permit.release()

    async with anyio.create_task_group() as tasks:
        for number, until in enumerate(deadlines):
            tasks.start_soon(use, number, until)
            await wait_all_tasks_blocked()
        time.now = waited
        holder.release()
    return order


@pytest.mark.parametrize(
    ("deadlines", "waited", "order"),
    [
        ([9.0] * 4, 0.4, [0, 1, 2, 3]),
        ([9.0] * 4, 0.5, [3, 2, 1, 0]),
        ([900.0, 9.0], 0.5, [1, 0]),
        ([0.2] * 4, 0.04, [0, 1, 2, 3]),
        ([0.2] * 4, 0.05, [3, 2, 1, 0]),  # well before they leave: otherwise the newest would never be first
        ([math.inf] * 4, 0.4, [0, 1, 2, 3]),
        ([math.inf] * 4, 9.0, [0, 1, 2, 3]),  # nobody is known to give up
        ([math.inf, 9.0, 9.0], 0.5, [2, 1, 0]),  # who has no deadline gets the time of the others
        ([math.inf] * 42 + [9.0], 0.5, [*range(42, 3, -1), 0, 3, 2, 1]),  # and one in forty is the oldest
    ],
)
async def test_the_newest_goes_first_once_the_first_has_waited_for_long(deadlines, waited, order):
    assert await order_of(deadlines, waited=waited) == order


@pytest.mark.parametrize(("seconds", "is_granted"), [(3.0, False), (3.1, True)])
async def test_soon_after_a_storm_a_call_may_go_beyond_the_maximum_again(seconds, is_granted):
    time = doubles.FakeTime()
    shut = fixed(8, time)
    held = [Permit(shut, Lane("work")) for _ in range(8)]
    for permit in held:
        await permit.acquire()
    shut.overloaded(held[0])
    time.now = seconds
    async with anyio.create_task_group() as tasks:
        call = await waiting_for(shut, shut.kind("settings").interactive, tasks)
        assert call.is_held is is_granted
        tasks.cancel_scope.cancel()


async def test_a_call_leaves_the_line_when_twice_its_usual_time_is_left():
    time = doubles.FakeTime()
    shut = fixed(1, time)
    shut.kind("work").took(0.5, math.inf)
    lane = shut.kind("work").interactive
    for until, leaves in ((10.0, 9.0), (2.0, 1.0), (1.0, 0.5), (math.inf, math.inf)):
        permit = Permit(shut, lane, until)
        await permit.acquire()
        assert permit.leaves_at == leaves
        permit.release()


async def test_a_permit_with_little_time_left_is_granted_and_renewed():
    time = doubles.FakeTime()
    shut = fixed(2, time)
    permit = Permit(shut, Lane("work"), until=0.5)
    assert await permit.acquire()
    assert permit.renew()
    permit.release()


async def test_a_permit_that_is_not_renewed_makes_place_for_another_kind():
    shut = doubles.gate(2)
    lane = Lane("work")
    held = [Permit(shut, lane) for _ in range(2)]
    for permit in held:
        await permit.acquire()
    async with anyio.create_task_group() as tasks:
        other = await waiting_for(shut, Lane("other"), tasks)
        shut.kind("work").adaptive._limit = 1.0
        assert not held[0].renew()
        assert other.is_held
        other.release()
        held[1].release()


async def test_after_a_renewal_with_nobody_else_nine_interactive_calls_go_first():
    shut, lane, order = doubles.gate(1), Lane("work"), []
    permit = Permit(shut, lane)
    await permit.acquire()
    shut._line.in_a_row = 9
    assert permit.renew()

    async def use(name: str, lane: Lane) -> None:
        each = Permit(shut, lane)
        await each.acquire()
        order.append(name)
        each.release()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(use, "other", lane)
        await wait_all_tasks_blocked()
        for _ in range(12):
            tasks.start_soon(use, "call", shut.kind("work").interactive)
            await wait_all_tasks_blocked()
        permit.release()
    assert order == ["call"] * 9 + ["other"] + ["call"] * 3


async def test_lanes_of_different_kinds_take_turns():
    one, two = ("one", Lane("one")), ("two", Lane("two"))
    assert await served(doubles.gate(1), *[one] * 4, *[two] * 4) == ["one", "two"] * 4
