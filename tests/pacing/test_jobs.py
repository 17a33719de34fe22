"""The job stream and reading ahead."""

from __future__ import annotations

from functools import partial

import anyio
import anyio.lowlevel
import doubles
import pytest
from anyio import wait_all_tasks_blocked

from sampling_async._pacing.background import ReadAhead
from sampling_async._pacing.gate import Permit
from sampling_async._pacing.jobs import JobStream
from sampling_async._pacing.steps import pieces
from sampling_async._pacing.turns import Lane


async def numbers(count: int, drawn: list[int] | None = None):
    for number in range(count):
        if drawn is not None:
            drawn.append(number)
        yield number


class Number:
    """A job: a number to be doubled."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.result: int | None = None


class Items:
    """A plain iterable as an async iterator."""

    def __init__(self, items) -> None:
        self._items = iter(items)

    async def __anext__(self):
        for item in self._items:
            return item
        raise StopAsyncIteration


class Drawer:
    """A source of numbers from an iterator or async generator."""

    def __init__(self, numbers, drawn: list[int] | None = None) -> None:
        self.job: Number | None = None
        self._numbers = numbers if hasattr(numbers, "__anext__") else Items(numbers)
        self._drawn = [] if drawn is None else drawn

    async def draw(self) -> Number | None:
        assert self.job is None, "a job must be handed over before the next is drawn"
        number = await anext(self._numbers, None)
        if number is None:
            return None
        self._drawn.append(number)
        self.job = Number(number)
        return self.job

    def draw_now(self) -> Number | None:
        assert self.job is None
        for number in getattr(self._numbers, "_items", ()):
            self._drawn.append(number)
            self.job = Number(number)
            return self.job
        return None

    def handed_over(self) -> None:
        self.job = None

    async def aclose(self) -> None:
        if hasattr(self._numbers, "aclose"):
            await self._numbers.aclose()


async def double(job: Number, permit: Permit) -> None:
    await anyio.lowlevel.checkpoint()
    job.result = job.number * 2


async def results_of(stream: JobStream[Number], into: list[int] | None = None) -> list[int]:
    """Take and release all results."""
    results = [] if into is None else into
    while (job := await stream.next()) is not None:
        results.append(job.result)
        stream.release(job)
    return results


def stream_of(numbers, run=double, *, limit: int = 2, window: int = 2, shut=None, drawn=None):
    shut = shut or doubles.gate(limit)
    return JobStream(doubles.permits(shut), Drawer(numbers, drawn), run, window=window)


async def test_a_stream_gives_nothing_before_it_is_entered():
    stream = stream_of(range(3))
    for wait in (stream.next, stream.several):
        with pytest.raises(RuntimeError, match=r"enter the .* first"):
            await wait()


async def test_results_come_in_batches_and_a_full_window_does_not_stop_them():
    async with stream_of(range(600)) as stream:
        first = await stream.next()
        stream.release(first)
        await wait_all_tasks_blocked()
        assert stream._done  # the window is full
        results, sizes = [first.result], []
        while jobs := await stream.several():
            sizes.append(len(jobs))
            results += [job.result for job in jobs]
            for job in jobs:
                stream.release(job)
        assert sorted(results) == list(range(0, 1200, 2))
        assert sizes == [32] * 18 + [23]
    assert not stream.open


async def test_results_that_must_be_confirmed_are_returned_after_that_and_hold_up_no_other():
    go_on, settled = [anyio.Event(), anyio.Event()], []
    failures = [None, OSError("the disk is full")]

    async def confirm() -> None:
        await go_on[2 - len(failures)].wait()
        if (failure := failures.pop(0)) is not None:
            raise failure

    async def run(job: Number, permit: Permit):
        await double(job, permit)
        return partial(settled.append, job.number) if job.number in {0, 1, 5} else None

    source = Drawer(range(6))
    async with JobStream(doubles.permits(doubles.gate(1)), source, run, window=9, confirm=confirm) as stream:
        assert [(await stream.next()).number for _ in range(3)] == [2, 3, 4]
        await wait_all_tasks_blocked()
        assert (settled, stream._finished) == ([], False)
        go_on[0].set()
        assert (await stream.next()).number == 0
        await wait_all_tasks_blocked()
        go_on[1].set()  # for 1 and 5, which ended meanwhile
        with pytest.raises(OSError, match="the disk is full"):
            await stream.next()
    assert settled == [0, 1, 5]
    assert {job.number for job in stream.open} == set(range(6))


async def test_no_more_run_at_once_than_the_gate_permits():
    running = peak = 0
    all_three = anyio.Event()

    async def run(job: Number, permit: Permit) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        if running == 3:
            all_three.set()
        await all_three.wait()
        running -= 1

    async with stream_of(range(30), run, limit=3, window=10) as stream:
        assert len(await results_of(stream)) == 30
    assert peak == 3


async def test_leaving_early_stops_the_rest_and_accounts_for_every_drawn_job():
    drawn: list[int] = []
    shut = doubles.gate(2)

    async def run(job: Number, permit: Permit) -> None:
        if job.number > 3:
            await anyio.sleep_forever()
        await double(job, permit)

    async with stream_of(range(100), run, shut=shut, drawn=drawn, window=4) as stream:
        taken = await stream.next()
        stream.release(taken)
        await wait_all_tasks_blocked()
    assert [taken.number, *sorted(job.number for job in stream.open)] == drawn
    assert len(drawn) < 10
    assert (shut.running, shut.waiting) == (0, 0)


async def test_the_error_of_a_job_is_raised_bare_after_the_other_jobs_finish():
    async def run(job: Number, permit: Permit) -> None:
        if job.number == 1:
            raise RuntimeError("job 1")
        await anyio.sleep(0.001)
        await double(job, permit)

    results: list[int] = []
    async with stream_of(range(100), run, limit=4, window=4) as stream:
        with pytest.raises(RuntimeError, match="job 1"):
            await results_of(stream, results)
        assert await results_of(stream) == []
    assert 0 in results
    assert 2 not in results
    assert len(results) < 10
    assert 1 in [job.number for job in stream.open]


async def test_a_failing_job_ends_a_source_that_waits():
    async def source():
        yield 1
        await anyio.sleep_forever()

    async def run(job: Number, permit: Permit) -> None:
        raise RuntimeError("job")

    async with stream_of(source(), run, window=1) as stream:
        with pytest.raises(RuntimeError, match="job"):
            await stream.next()


async def fails_after_two():
    yield 1
    yield 2
    raise LookupError("source")


def fails_after_two_now():
    yield 1
    yield 2
    raise LookupError("source")


@pytest.mark.parametrize("source", [fails_after_two, fails_after_two_now])
async def test_a_source_that_fails_is_raised_after_the_results(source):
    for limit in (1, 2, 3, 4):
        results: list[int] = []
        async with stream_of(source(), limit=limit, window=9) as stream:
            with pytest.raises(LookupError, match="source"):
                await results_of(stream, results)
        assert sorted(results) == [2, 4]


async def test_an_exception_in_the_block_propagates_bare():
    with pytest.raises(ZeroDivisionError):
        async with stream_of(range(9)):
            raise ZeroDivisionError


async def test_cancellation_propagates():
    shut = doubles.gate(1)
    with anyio.move_on_after(0.005) as scope:
        async with stream_of(range(9), lambda *_: anyio.sleep_forever(), shut=shut) as stream:
            await stream.next()
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

    async with stream_of(source()) as stream:
        await stream.next()
    assert closed_in == [0]


async def test_a_consumer_can_use_the_gate_itself():
    """A result that waits to be taken holds no permit, so a call inside the loop cannot deadlock."""
    shut = doubles.gate(1)
    async with stream_of(range(5), shut=shut, window=1) as stream:
        while await stream.next() is not None:
            permit = Permit(shut, Lane("work"))
            await permit.acquire()
            permit.release()


async def test_the_task_that_ends_a_job_goes_on_with_the_next_one_at_once():
    order: list[str] = []
    ends = [anyio.Event() for _ in range(3)]

    async def run(job: Number, permit: Permit) -> None:
        assert permit.is_held
        order.append(f"{job.number} by {anyio.get_current_task().id}")
        await ends[job.number].wait()

    async with stream_of(range(3), run, limit=1, window=9) as stream:
        await wait_all_tasks_blocked()
        (first,) = order
        for each in ends:
            each.set()
            await wait_all_tasks_blocked()
        await results_of(stream)
    task = first.removeprefix("0 by ")
    assert order == [f"{number} by {task}" for number in range(3)]


async def test_tasks_draw_for_themselves_while_they_have_permits():
    class Counting(Drawer):
        draws = 0

        async def draw(self) -> Number | None:
            self.draws += 1
            return await super().draw()

    async def run(job: Number, permit: Permit) -> None:
        if job.number < 3:
            await all_begun.wait()
        await double(job, permit)

    source, all_begun = Counting(range(100)), anyio.Event()
    async with JobStream(doubles.permits(doubles.gate(3)), source, run, window=100) as stream:
        await wait_all_tasks_blocked()
        all_begun.set()
        assert sorted(await results_of(stream)) == list(range(0, 200, 2))
    assert source.draws == 5  # one for each permit, one to wait for another one, and the end


async def test_all_that_is_done_is_noted_before_new_jobs_begin():
    order: list[str] = []
    go = [anyio.Event() for _ in range(2)]

    async def run(job: Number, permit: Permit) -> None:
        order.append(f"begin {job.number}")
        await go[job.number // 3].wait()
        order.append(f"end {job.number}")

    async with stream_of(range(6), run, limit=3, window=9) as stream:
        await wait_all_tasks_blocked()
        assert order == ["begin 0", "begin 1", "begin 2"]
        order.clear()
        go[0].set()
        await wait_all_tasks_blocked()
        assert sorted(order[:3]) == ["end 0", "end 1", "end 2"]
        assert sorted(order[3:]) == ["begin 3", "begin 4", "begin 5"]
        go[1].set()
        await results_of(stream)


async def test_jobs_that_need_no_permit_are_run_at_once_by_whichever_task_draws_them():
    shut, seen = doubles.gate(1), []

    async def run(job: Number, permit: Permit) -> None:
        seen.append((job.number, permit.is_held))
        await anyio.lowlevel.checkpoint()

    stream = JobStream(
        doubles.permits(shut), Drawer(range(12)), run, window=20, needs_permit=lambda job: job.number % 3 != 2
    )
    async with stream:
        while await stream.several():
            pass
    assert sorted(seen) == [(number, number % 3 != 2) for number in range(12)]
    assert (shut.running, shut.waiting) == (0, 0)


async def test_a_failure_in_a_task_begins_no_job_that_waits():
    begun: list[int] = []

    async def run(job: Number, permit: Permit) -> None:
        begun.append(job.number)
        await anyio.lowlevel.checkpoint()
        raise RuntimeError("job")

    async with stream_of(range(9), run, limit=1, window=9) as stream:
        with pytest.raises(RuntimeError, match="job"):
            await results_of(stream)
    assert begun == [0]


async def cancelled_at(ticks: int, *, limit: int, busy: int, length: int) -> None:
    """Cancel a stream after some ticks, while another lane uses its gate, and account for every job."""
    shut, drawn, results = doubles.gate(limit), [], []

    async def run(job: Number, permit: Permit) -> None:
        for _ in range(length):
            await anyio.lowlevel.checkpoint()
        job.result = job.number

    async def other() -> None:
        permit = Permit(shut, Lane("work"))
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
            stream_of(range(9), run, shut=shut, drawn=drawn, window=4) as stream,
        ):
            tasks.start_soon(other)
            tasks.start_soon(cancel, scope)
            await results_of(stream, results)
    assert sorted([*results, *(job.number for job in stream.open)]) == drawn
    assert shut.running == 0


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("busy", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 2])
async def test_no_job_is_lost_or_counted_twice_whenever_it_is_cancelled(limit, busy, length):
    for ticks in range(25):
        await cancelled_at(ticks, limit=limit, busy=busy, length=length)


@pytest.mark.parametrize("failure", [SystemExit, KeyboardInterrupt])
async def test_a_source_that_ends_the_program_keeps_no_permit(failure):
    shut = doubles.gate(1)

    def numbers():
        yield 1
        yield 2
        raise failure

    async def run() -> None:
        async with stream_of(numbers(), shut=shut, window=9) as stream:
            await results_of(stream)

    with pytest.raises(failure):
        await doubles.alone(run)
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


async def test_reading_ahead_raises_an_error_after_the_items_before_it():
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


async def test_a_refused_second_entry_leaves_the_stream_usable():
    async with ReadAhead(numbers(3)) as ahead:
        assert await ahead.next() == 0
        with pytest.raises(RuntimeError, match="entered only once"):
            await ahead.__aenter__()
        assert [await ahead.next() for _ in range(3)] == [1, 2, None]


async def test_the_first_failure_is_the_one_raised():
    async def run(job: Number, permit: Permit) -> None:
        if job.number:
            await anyio.lowlevel.checkpoint()
        raise RuntimeError(f"job {job.number}")

    async with stream_of(range(2), run) as stream:
        with pytest.raises(RuntimeError, match="job 0"):
            await stream.next()


async def test_the_failure_of_the_source_comes_after_the_last_of_several_jobs():
    def numbers():
        yield from range(40)
        raise ZeroDivisionError

    got = []
    async with stream_of(numbers()) as stream:
        with pytest.raises(ZeroDivisionError):
            while jobs := await stream.several():
                got.extend(job.number for job in jobs)
    assert sorted(got) == list(range(40))


def test_entries_are_divided_among_dicts_of_some_thousand():
    assert [pieces(entries) for entries in (0, 1, 4095, 4096, 100_000)] == [1, 1, 1, 2, 25]
    assert type(pieces(100)) is int


async def test_a_task_without_a_job_waits_for_the_next_one():
    """To wake it costs less than a new task."""
    names, send, receive = set(), *anyio.create_memory_object_stream[int](9)

    async def run(job: Number, permit: Permit) -> None:
        task = anyio.get_current_task()
        names.add((task.id, task.name))
        await anyio.lowlevel.checkpoint()

    async with send, receive, stream_of(receive, run, limit=1, window=9):
        for number in range(3):
            await send.send(number)
            await wait_all_tasks_blocked()
    ((_, name),) = names
    assert "sampling_async" in name or "_run_jobs" in name


async def test_jobs_that_a_task_draws_for_itself_fill_the_window_too():
    drawn: list[int] = []
    async with stream_of(range(100), limit=1, window=5, drawn=drawn) as stream:
        for taken in range(20):
            await wait_all_tasks_blocked()
            assert len(drawn) == min(100, taken + 5)
            stream.release(await stream.next())


async def test_a_job_may_be_released_twice():
    async with stream_of(range(1)) as stream:
        job = await stream.next()
        stream.release(job)
        stream.release(job)
        assert not stream.open


async def test_32_results_do_not_wait_for_the_33rd():
    async def run(job: Number, permit: Permit) -> None:
        await double(job, permit)
        if job.number == 32:
            await anyio.sleep_forever()

    async with stream_of(range(33), run, window=64) as stream:
        with anyio.fail_after(60):
            assert len(await stream.several()) == 32
