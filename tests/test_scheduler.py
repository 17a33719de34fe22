"""The gate, the job stream and reading ahead."""

from __future__ import annotations

from functools import partial

import anyio
import anyio.lowlevel
import doubles
import pytest
from anyio import wait_all_tasks_blocked

from sampling_async._scheduler import Gate, JobStream, Lane, Permit, ReadAhead

pytestmark = pytest.mark.anyio


def gate(limit: int = 2) -> Gate:
    time = doubles.FakeTime()
    return Gate(limit, clock=time.clock, sleep=time.sleep, random=lambda: 1.0)


def permits(shut: Gate) -> partial[Permit]:
    """Return what makes the permits of one user of a gate."""
    return partial(Permit, shut, Lane())


async def numbers(count: int, drawn: list[int] | None = None):
    for number in range(count):
        if drawn is not None:
            drawn.append(number)
        yield number


async def double(job: int, permit: Permit) -> int:
    await anyio.lowlevel.checkpoint()
    return job * 2


async def test_a_gate_gives_as_many_permits_as_its_limit():
    shut = gate(2)
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
    shut, order = gate(1), []

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
    shut = gate(4)
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


async def test_the_rest_is_everything_not_taken_yet_and_the_window_does_not_stop_it():
    async with JobStream(permits(gate()), numbers(50), double, window=2) as stream:
        first = await anext(stream)
        await wait_all_tasks_blocked()
        assert stream.untaken  # the window is full
        assert sorted([first, *await stream.rest()]) == [2 * number for number in range(50)]


async def test_all_jobs_are_run():
    async with JobStream(permits(gate()), numbers(50), double, window=2) as stream:
        results = [result async for result in stream]
    assert sorted(results) == [2 * n for n in range(50)]


async def test_no_more_is_drawn_than_the_window_holds():
    drawn: list[int] = []
    async with JobStream(permits(gate(2)), numbers(100, drawn), double, window=3) as stream:
        for taken in range(1, 6):
            await anext(stream)
            await wait_all_tasks_blocked()
            assert len(drawn) <= taken + 3 + 1  # what the window holds, and one in the hand


async def test_no_more_run_at_once_than_the_gate_lets_through():
    running = peak = 0
    all_three = anyio.Event()

    async def run(job: int, permit: Permit) -> int:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        if running == 3:
            all_three.set()
        await all_three.wait()
        running -= 1
        return job

    async with JobStream(permits(gate(3)), numbers(30), run, window=10) as stream:
        assert len([result async for result in stream]) == 30
    assert peak == 3


async def test_leaving_early_stops_the_rest_and_accounts_for_all_that_was_drawn():
    drawn: list[int] = []
    cut_off: list[int] = []
    shut = gate(2)

    async def run(job: int, permit: Permit) -> int:
        try:
            if job > 3:
                await anyio.sleep_forever()
        except BaseException:
            cut_off.append(job)
            raise
        return job

    async with JobStream(permits(shut), numbers(100, drawn), run, window=4) as stream:
        taken = [await anext(stream)]
        await wait_all_tasks_blocked()
    assert sorted(taken + cut_off + list(stream.untaken) + stream.unstarted) == drawn
    assert len(drawn) < 10
    assert (shut.running, shut.waiting) == (0, 0)


async def test_a_job_that_fails_lets_its_siblings_finish_and_is_raised_bare():
    async def run(job: int, permit: Permit) -> int:
        if job == 1:
            raise RuntimeError("job 1")
        await anyio.sleep(0.001)
        return job

    results = []
    async with JobStream(permits(gate(4)), numbers(100), run, window=4) as stream:
        with pytest.raises(RuntimeError, match="job 1"):
            async for result in stream:
                results.append(result)
        assert [result async for result in stream] == []
    assert 0 in results
    assert 1 not in results
    assert len(results) < 10


async def test_a_failing_job_ends_a_source_that_waits():
    async def source():
        yield 1
        await anyio.sleep_forever()

    async def run(job: int, permit: Permit) -> int:
        raise RuntimeError("job")

    async with JobStream(permits(gate()), source(), run, window=1) as stream:
        with pytest.raises(RuntimeError, match="job"):
            await anext(stream)


async def test_a_source_that_fails_is_raised_after_the_results():
    async def source():
        yield 1
        yield 2
        raise LookupError("source")

    results = []
    async with JobStream(permits(gate(1)), source(), double, window=1) as stream:
        with pytest.raises(LookupError, match="source"):
            async for result in stream:
                results.append(result)
    assert results == [2, 4]


async def test_an_exception_of_the_block_leaves_it_bare():
    with pytest.raises(ZeroDivisionError):
        async with JobStream(permits(gate()), numbers(9), double, window=2):
            raise ZeroDivisionError


async def test_cancellation_passes_through():
    shut = gate(1)
    with anyio.move_on_after(0.005) as scope:
        async with JobStream(permits(shut), numbers(9), lambda *_: anyio.sleep_forever(), window=2) as stream:
            await anext(stream)
    assert scope.cancelled_caught
    assert shut.running == 0


async def test_the_source_is_closed_in_its_own_task():
    closed_in: list[int] = []

    async def source():
        started_in = anyio.get_current_task().id
        try:
            while True:
                yield 1
        finally:
            closed_in.append(anyio.get_current_task().id - started_in)

    async with JobStream(permits(gate()), source(), double, window=2) as stream:
        await anext(stream)
    assert closed_in == [0]


async def test_a_consumer_that_needs_the_gate_itself_gets_through():
    """A result that waits to be taken holds no permit, so a call inside the loop cannot dead-lock."""
    shut = gate(1)
    async with JobStream(permits(shut), numbers(5), double, window=1) as stream:
        async for _ in stream:
            permit = Permit(shut, Lane())
            await permit.acquire()
            permit.release()


async def test_reading_ahead_keeps_one_item_ready():
    made: list[int] = []
    async with ReadAhead(numbers(10, made)) as ahead:
        await wait_all_tasks_blocked()
        assert made == [0]
        assert await ahead.next() == 0
        await wait_all_tasks_blocked()
        assert made == [0, 1]
        assert [await ahead.next() for _ in range(10)] == [1, 2, 3, 4, 5, 6, 7, 8, 9, None]
    assert await ahead.next() is None


async def test_reading_ahead_raises_in_turn():
    async def source():
        yield 1
        raise LookupError("second")

    async with ReadAhead(source()) as ahead:
        assert await ahead.next() == 1
        with pytest.raises(LookupError, match="second"):
            await ahead.next()
        assert await ahead.next() is None


async def test_reading_ahead_can_be_left_at_any_time():
    async with ReadAhead(numbers(10)):
        pass
    with pytest.raises(ZeroDivisionError):
        async with ReadAhead(numbers(10)) as ahead:
            await ahead.next()
            raise ZeroDivisionError


async def test_reading_ahead_loses_nothing_when_cancelled():
    async def slow():
        for number in range(5):
            await anyio.lowlevel.checkpoint()
            yield number

    taken = []
    async with ReadAhead(slow()) as ahead:
        for ticks in range(40):
            with anyio.CancelScope() as scope:

                async def cancel(scope=scope, ticks=ticks) -> None:
                    for _ in range(ticks % 7):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(cancel)
                    taken.append(await ahead.next())
    assert [item for item in taken if item is not None] == [0, 1, 2, 3, 4]


async def test_a_refused_second_entry_does_no_harm():
    async with ReadAhead(numbers(3)) as ahead:
        assert await ahead.next() == 0
        with pytest.raises(RuntimeError, match="entered once"):
            await ahead.__aenter__()
        assert [await ahead.next() for _ in range(3)] == [1, 2, None]


async def test_the_first_failure_is_the_one_told():
    async def run(job: int, permit: Permit) -> int:
        if job:
            await anyio.lowlevel.checkpoint()
        raise RuntimeError(f"job {job}")

    async with JobStream(permits(gate(2)), numbers(2), run, window=2) as stream:
        with pytest.raises(RuntimeError, match="job 0"):
            await anext(stream)
