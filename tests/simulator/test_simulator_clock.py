"""The virtual clock: sleepers wake in the right order, and no real time passes."""

from __future__ import annotations

import time

import anyio
import anyio.lowlevel
import pytest

from sampling_async.simulator import Fault, Latency, Simulator, VirtualClock


async def test_sleepers_wake_in_the_order_of_their_times_and_see_their_own():
    clock, woken = VirtualClock(10.0), []

    async def sleep(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((seconds, clock()))

    began = time.monotonic()
    async with anyio.create_task_group() as group:
        for seconds in (300.0, 1.0, 20.0, 0.0, 1.0, 86_400.0):
            group.start_soon(sleep, seconds)
    assert woken == [(0.0, 10.0), (1.0, 11.0), (1.0, 11.0), (20.0, 30.0), (300.0, 310.0), (86_400.0, 86_410.0)]
    assert time.monotonic() - began < 60  # in place of a day


async def test_a_later_sleeper_that_is_due_earlier_wakes_earlier():
    clock, woken = VirtualClock(), []

    async def late() -> None:
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        for at in range(3):
            await clock.sleep(1.0)
            woken.append((at, clock()))

    async with anyio.create_task_group() as group:
        group.start_soon(late)
        await clock.sleep(10.0)
        woken.append(("last", clock()))
    assert woken == [(0, 1.0), (1, 2.0), (2, 3.0), ("last", 10.0)]


async def test_a_cancelled_sleeper_does_not_delay_others():
    clock = VirtualClock()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(clock.sleep, 5.0)
            await anyio.lowlevel.checkpoint()
            scope.cancel()
    await clock.sleep(7.0)
    assert clock() == 7.0


async def test_advance_lets_time_pass():
    clock, woken = VirtualClock(), []

    async def sleep(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    async with anyio.create_task_group() as group:
        for seconds in (5.0, 50.0):
            group.start_soon(sleep, seconds)
        for _ in range(3):  # on trio the next task to run may be the last of three
            await anyio.lowlevel.checkpoint()
        clock.advance(40.0)
        await anyio.lowlevel.checkpoint()
    assert (woken, clock()) == ([5.0, 50.0], 50.0)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="time does not go back"):
            clock.advance(wrong)


async def test_a_simulator_on_a_virtual_clock_takes_no_real_time():
    clock = VirtualClock()
    sim = Simulator(
        surveys=20, members=1, latency=Latency(a=2.0, workers=2), clock=clock, sleep=clock.sleep,
        faults=[Fault.delay(5).on("bulk_invite", times=1)],
    )  # fmt: skip
    async with sim.client() as client:
        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(client.get_settings)
        assert clock() == 6.0  # two at a time
        await client.bulk_invite("m000001", [1])
    assert clock() == 13.0
    assert [record.time for record in sim.ledger.requests(endpoint="bulk_invite")] == [6.0]
