"""The job stream and reading ahead."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import doubles
import pytest
from anyio import wait_all_tasks_blocked

from sampling_async._gate import Lane, Permit
from sampling_async._scheduler import JobStream, ReadAhead

pytestmark = pytest.mark.anyio


async def numbers(count: int, drawn: list[int] | None = None):
    for number in range(count):
        if drawn is not None:
            drawn.append(number)
        yield number


async def batches(count: int, drawn: list[int] | None = None, *, size: int = 1):
    """Yield iterators of `size` numbers each."""

    def each(start: int):
        for number in range(start, min(start + size, count)):
            if drawn is not None:
                drawn.append(number)
            yield number

    for start in range(0, count, size):
        yield each(start)


ONE_BY_ONE_AND_AT_ONCE = pytest.mark.parametrize("size", [1, 7, 1000])


async def double(job: int, permit: Permit) -> int:
    await anyio.lowlevel.checkpoint()
    return job * 2


async def test_the_rest_is_everything_not_taken_yet_and_the_window_does_not_stop_it():
    async with JobStream(doubles.permits(doubles.gate()), batches(50), double, window=2) as stream:
        first = await anext(stream)
        await wait_all_tasks_blocked()
        assert stream.untaken  # the window is full
        assert sorted([first, *await stream.remaining()]) == [2 * number for number in range(50)]


@ONE_BY_ONE_AND_AT_ONCE
async def test_all_jobs_are_run(size):
    async with JobStream(doubles.permits(doubles.gate()), batches(50, size=size), double, window=2) as stream:
        results = [result async for result in stream]
    assert sorted(results) == [2 * n for n in range(50)]


@ONE_BY_ONE_AND_AT_ONCE
async def test_no_more_is_drawn_than_the_window_holds(size):
    drawn: list[int] = []
    async with JobStream(
        doubles.permits(doubles.gate(2)), batches(100, drawn, size=size), double, window=3
    ) as stream:
        for taken in range(1, 6):
            await anext(stream)
            await wait_all_tasks_blocked()
            assert len(drawn) <= taken + 3 + 1  # what the window holds, and one in the hand


@ONE_BY_ONE_AND_AT_ONCE
async def test_no_more_run_at_once_than_the_gate_lets_through(size):
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

    async with JobStream(doubles.permits(doubles.gate(3)), batches(30, size=size), run, window=10) as stream:
        assert len([result async for result in stream]) == 30
    assert peak == 3


@ONE_BY_ONE_AND_AT_ONCE
async def test_leaving_early_stops_the_rest_and_accounts_for_all_that_was_drawn(size):
    drawn: list[int] = []
    cut_off: list[int] = []
    shut = doubles.gate(2)

    async def run(job: int, permit: Permit) -> int:
        try:
            if job > 3:
                await anyio.sleep_forever()
        except BaseException:
            cut_off.append(job)
            raise
        return job

    async with JobStream(doubles.permits(shut), batches(100, drawn, size=size), run, window=4) as stream:
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
    async with JobStream(doubles.permits(doubles.gate(4)), batches(100), run, window=4) as stream:
        with pytest.raises(RuntimeError, match="job 1"):
            async for result in stream:
                results.append(result)
        assert [result async for result in stream] == []
    assert 0 in results
    assert 1 not in results
    assert len(results) < 10


async def test_a_failing_job_ends_a_source_that_waits():
    async def source():
        yield iter((1,))
        await anyio.sleep_forever()

    async def run(job: int, permit: Permit) -> int:
        raise RuntimeError("job")

    async with JobStream(doubles.permits(doubles.gate()), source(), run, window=1) as stream:
        with pytest.raises(RuntimeError, match="job"):
            await anext(stream)


async def test_a_source_that_fails_is_raised_after_the_results():
    async def source():
        yield iter((1,))
        yield iter((2,))
        raise LookupError("source")

    results = []
    async with JobStream(doubles.permits(doubles.gate(1)), source(), double, window=1) as stream:
        with pytest.raises(LookupError, match="source"):
            async for result in stream:
                results.append(result)
    assert results == [2, 4]


async def test_an_exception_of_the_block_leaves_it_bare():
    with pytest.raises(ZeroDivisionError):
        async with JobStream(doubles.permits(doubles.gate()), batches(9), double, window=2):
            raise ZeroDivisionError


@ONE_BY_ONE_AND_AT_ONCE
async def test_cancellation_passes_through(size):
    shut = doubles.gate(1)
    with anyio.move_on_after(0.005) as scope:
        async with JobStream(
            doubles.permits(shut), batches(9, size=size), lambda *_: anyio.sleep_forever(), window=2
        ) as stream:
            await anext(stream)
    assert scope.cancelled_caught
    assert shut.running == 0


async def test_the_source_is_closed_in_its_own_task():
    closed_in: list[int] = []

    async def source():
        started_in = anyio.get_current_task().id
        try:
            while True:
                yield iter((1,))
        finally:
            closed_in.append(anyio.get_current_task().id - started_in)

    async with JobStream(doubles.permits(doubles.gate()), source(), double, window=2) as stream:
        await anext(stream)
    assert closed_in == [0]


async def test_a_consumer_that_needs_the_gate_itself_gets_through():
    """A result that waits to be taken holds no permit, so a call inside the loop cannot dead-lock."""
    shut = doubles.gate(1)
    async with JobStream(doubles.permits(shut), batches(5), double, window=1) as stream:
        async for _ in stream:
            permit = Permit(shut, Lane())
            await permit.acquire()
            permit.release()


async def test_a_task_that_has_ended_its_job_draws_the_next_one_itself():
    tasks = set()

    async def run(job: int, permit: Permit) -> int:
        tasks.add(anyio.get_current_task().id)
        await anyio.lowlevel.checkpoint()
        return job

    async with JobStream(doubles.permits(doubles.gate(2)), batches(100, size=100), run, window=100) as stream:
        assert len(await stream.remaining()) == 100
    assert len(tasks) <= 2


async def test_a_batch_that_fails_is_raised_after_the_results_whoever_draws_from_it():
    def batch():
        yield 1
        yield 2
        yield 3
        raise LookupError("batch")

    async def source():
        yield batch()
        await anyio.sleep_forever()

    for limit in (1, 2, 3, 4):
        results = []
        async with JobStream(doubles.permits(doubles.gate(limit)), source(), double, window=9) as stream:
            with pytest.raises(LookupError, match="batch"):
                async for result in stream:
                    results.append(result)
        assert sorted(results) == [2, 4, 6]
        assert stream.unstarted == []


async def test_what_was_drawn_first_is_not_overtaken_for_ever():
    """The drawer waits for room in the window with a job in its hand; a task that ends must not draw others."""
    order: list[int] = []

    async def run(job: int, permit: Permit) -> int:
        order.append(job)
        await anyio.lowlevel.checkpoint()
        return job

    async with JobStream(doubles.permits(doubles.gate(2)), batches(30, size=30), run, window=2) as stream:
        async for _ in stream:
            await wait_all_tasks_blocked()
    assert all(abs(place - job) <= 2 for place, job in enumerate(order))


async def cancelled_at(ticks: int, *, limit: int, busy: int, length: int) -> None:
    """Cancel a stream after so many ticks, beside another user of its gate, and account for every job."""
    shut, cut_off, drawn, results = doubles.gate(limit), [], [], []

    async def run(job: int, permit: Permit) -> int:
        try:
            for _ in range(length):
                await anyio.lowlevel.checkpoint()
        except BaseException:
            cut_off.append(job)
            raise
        return job

    async def other() -> None:
        permit = Permit(shut, Lane())
        await permit.acquire()
        try:
            for _ in range(busy):
                await anyio.lowlevel.checkpoint()
        finally:
            permit.release()

    async def cancel(scope: anyio.CancelScope) -> None:
        for _ in range(ticks):
            await anyio.lowlevel.checkpoint()
        scope.cancel()

    with anyio.CancelScope() as scope:
        async with (
            anyio.create_task_group() as tasks,
            JobStream(doubles.permits(shut), batches(9, drawn, size=ticks % 3 + 1), run, window=4) as stream,
        ):
            tasks.start_soon(other)
            tasks.start_soon(cancel, scope)
            async for result in stream:
                results.append(result)
    assert sorted([*results, *cut_off, *stream.untaken, *stream.unstarted]) == drawn
    assert shut.running == 0


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("busy", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 2])
async def test_no_job_is_lost_or_counted_twice_whenever_it_is_cancelled(limit, busy, length):
    for ticks in range(25):
        await cancelled_at(ticks, limit=limit, busy=busy, length=length)


@pytest.mark.parametrize("failure", [SystemExit, KeyboardInterrupt])
async def test_a_batch_that_ends_the_program_keeps_no_permit(failure):
    shut = doubles.gate(1)

    def batch():
        yield 1
        yield 2
        raise failure

    async def source():
        yield batch()

    with pytest.raises(failure):
        async with JobStream(doubles.permits(shut), source(), double, window=9) as stream:
            async for _ in stream:
                pass
    assert shut.running == 0


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

    async with JobStream(doubles.permits(doubles.gate(2)), batches(2), run, window=2) as stream:
        with pytest.raises(RuntimeError, match="job 0"):
            await anext(stream)
