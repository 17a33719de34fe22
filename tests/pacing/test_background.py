"""Work that runs while a block is open: what it may do, how it fails, and what misuse says."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from sampling_async._pacing import background
from sampling_async._pacing.background import Background, Tasks, is_foreign_cancellation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def nothing() -> None:
    await anyio.lowlevel.checkpoint()


class Work(Background):
    """Work that is a function, and gives no results."""

    def __init__(self, does: Callable[[], Awaitable[object]] = nothing) -> None:
        super().__init__()
        self._does = does

    @property
    def _has_more(self) -> bool:
        return False

    async def _work(self) -> None:
        await self._does()

    async def over(self) -> None:
        """Wait for the end of the work, and raise its failure."""
        self._must_be_inside()
        while not self._finished:
            await self._progress.wait()
        self._end()


async def fails() -> None:
    await anyio.lowlevel.checkpoint()
    raise ValueError("broken")


async def test_a_failure_is_raised_bare_and_once():
    async with Work(fails) as work:
        with pytest.raises(ValueError, match=r"^broken$"):
            await work.over()
        await work.over()
    assert work.has_ended_the_loop is False


async def test_the_first_failure_counts():
    work = Work()
    work._keep(ValueError("first"))
    work._keep(KeyError("second"))
    with pytest.raises(ValueError, match=r"^first$"):
        work._end()


@pytest.mark.parametrize(("ended_by", "is_told"), [(KeyboardInterrupt("why"), True), (GeneratorExit(), False)])
async def test_what_ended_the_work_is_the_cause_unless_it_says_nothing(ended_by, is_told):
    work = Work()
    with pytest.raises(type(ended_by)):
        work._keep(ended_by)
    with pytest.raises(RuntimeError, match=f"^the stream was ended by {type(ended_by).__name__}$") as caught:
        work._end()
    assert caught.value.__cause__ is (ended_by if is_told else None)


async def test_a_handler_that_raises_at_the_beginning_ends_the_work(monkeypatch):
    ended = []

    async def slow() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    class Struck(Work):
        def _must_be_inside(self) -> None:
            pass

    work = Struck(slow)
    for runner in (background._Task, background._Nursery):
        start = runner.start

        async def strikes(self, of, start=start) -> None:
            await start(self, of)
            await anyio.wait_all_tasks_blocked()
            raise KeyboardInterrupt

        monkeypatch.setattr(runner, "start", strikes)
    with pytest.raises(KeyboardInterrupt):
        async with work:
            pass
    assert (ended, work.left) == ([True], True)


async def test_it_can_be_entered_once():
    async with Work() as work:
        with pytest.raises(RuntimeError, match=r"^a stream can be entered only once; make a new one$"):
            await work.__aenter__()


async def test_outside_of_its_block_it_says_what_to_do():
    work = Work()
    with pytest.raises(RuntimeError, match=r"^enter the stream first: async with \.\.\. as stream$"):
        await work.over()


async def test_after_a_block_that_cut_the_work_off_there_is_no_more():
    async with Work(anyio.sleep_forever) as work:
        pass
    with pytest.raises(
        RuntimeError, match=r"^the `async with` block of the stream has ended, so it gives no more$"
    ):
        await work.over()


async def test_after_a_block_whose_work_has_ended_the_end_is_reported_again():
    async with Work() as work:
        await work.over()
    assert work.left
    await work.over()


async def test_leaving_a_block_that_was_not_entered_does_nothing():
    work = Work()
    await work.__aexit__(None, None, None)
    assert work.left


async def test_work_is_cancelled_and_waited_for_when_its_block_is_left():
    ended = []

    async def slow() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            ended.append(True)

    async with Work(slow):
        await anyio.wait_all_tasks_blocked()
    assert ended == [True]


@pytest.mark.asyncio
async def test_the_end_of_tasks_is_waited_for_however_often_the_wait_is_cancelled():
    cancelled, ended = [], []

    async def slow() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            ended.append(True)

    async def block() -> None:
        async with Tasks(asyncio.get_running_loop()) as tasks:
            tasks.start_soon(slow)
            tasks.start_soon(slow)

    blocked = asyncio.create_task(block())
    await anyio.wait_all_tasks_blocked()
    while not blocked.done():
        blocked.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await blocked
    assert (len(cancelled), len(ended)) == (2, 2)


@pytest.mark.asyncio
async def test_a_cancellation_from_elsewhere_is_a_failure_that_says_so():
    async def awaits_what_is_cancelled() -> None:
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.cancel)
        await future

    async with Work(awaits_what_is_cancelled) as work:
        with pytest.raises(
            RuntimeError,
            match=r"^something that the stream awaited was cancelled, but the stream's own task was not$",
        ):
            await work.over()


@pytest.mark.asyncio
async def test_what_ended_the_loop_is_not_raised_a_second_time():
    async def loses_a_task() -> None:
        # What a task group raises when one of its tasks has raised SystemExit out of the event loop.
        raise BaseExceptionGroup("", [SystemExit(3)])

    async with Work(loses_a_task) as work:
        with pytest.raises(RuntimeError, match=r"^the stream was ended by SystemExit$"):
            await work.over()
    assert work.has_ended_the_loop is True


@pytest.mark.asyncio
async def test_a_task_that_is_cancelled_ends_the_work_and_the_reader_hears_of_it():
    async with Work(anyio.sleep_forever) as work:
        await anyio.wait_all_tasks_blocked()
        (task,) = (each for each in asyncio.all_tasks() if each.get_name() == "sampling_async")
        task.cancel()
        with pytest.raises(RuntimeError, match=r"^the stream was ended by CancelledError$"):
            await work.over()


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_leaving_in_another_task_warns_on_trio(anyio_backend):
    work = Work()
    said: list[str] = []

    async def leaves() -> None:
        with pytest.warns(RuntimeWarning) as warned:
            await work.__aexit__(None, None, None)
        said.extend(str(each.message) for each in warned)

    await work.__aenter__()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leaves)
    await work._runner._tasks.__aexit__(None, None, None)
    (message,) = said
    assert message == (
        "a stream of sampling_async was entered in one task and left in another. An async generator that is "
        "not read to its end does this (PEP 789). Read it where it is entered, or close the generator with "
        "contextlib.aclosing"
    )


@pytest.mark.asyncio
async def test_a_block_cannot_be_left_by_its_own_work_or_by_a_task_of_it():
    refused = []

    async def leave() -> None:
        with pytest.raises(RuntimeError, match="the stream cannot be left from within"):
            await work.__aexit__(None, None, None)
        refused.append(asyncio.current_task())

    async def leaves() -> None:
        await leave()
        async with Tasks(asyncio.get_running_loop()) as tasks:
            tasks.start_soon(leave)

    async with Work(leaves) as work:
        await work.over()
    assert len(set(refused)) == 2


@pytest.mark.asyncio
async def test_nothing_is_left_for_the_event_loop_to_log():
    logged: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))

    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def interrupted() -> None:
        raise BaseExceptionGroup("", [GeneratorExit()])

    work = Work(anyio.sleep_forever)
    await work.__aenter__()
    work._runner._task.cancel()  # before its first step
    await work.__aexit__(None, None, None)
    async with Work(interrupted) as broken:
        with pytest.raises(RuntimeError, match=r"^the stream was ended by GeneratorExit$"):
            await broken.over()
    async with Tasks(asyncio.get_running_loop()) as tasks:
        tasks.start_soon(cancelled)
        tasks.start_soon(fails)
    del work, broken, tasks
    gc.collect()
    await asyncio.sleep(0)
    assert logged == []


@pytest.mark.asyncio
async def test_the_tasks_of_one_that_failed_go_with_it():
    """The frames of its traceback hold them, and they may hold connections and input."""
    started = []

    async def starts() -> None:
        async with Tasks(asyncio.get_running_loop()) as tasks:
            tasks.start_soon(nothing)
            (held,) = tasks._running
        started.append(weakref.ref(held))
        raise ValueError("broken")

    await asyncio.gather(asyncio.create_task(starts()), return_exceptions=True)
    await asyncio.sleep(0)  # the event loop holds the task that it has just told us of
    gc.collect()
    assert started[0]() is None


@pytest.mark.asyncio
async def test_tasks_can_be_distinguished_from_those_of_the_host():
    names = []

    async def noted() -> None:
        names.append(asyncio.current_task().get_name())

    async with Tasks(asyncio.get_running_loop()) as tasks:
        tasks.start_soon(noted)
    async with Work(noted):
        await anyio.wait_all_tasks_blocked()
    assert names == ["sampling_async"] * 2


# --- Cancellations that are not meant for the current task


async def test_an_ordinary_error_is_not_a_stray_cancellation():
    assert not is_foreign_cancellation(ValueError())


async def test_a_cancellation_by_a_scope_is_not_stray():
    caught = None
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep_forever()
        except BaseException as exc:
            caught = is_foreign_cancellation(exc)
            raise
    assert caught is False


@pytest.mark.asyncio
async def test_a_cancellation_of_the_task_is_not_stray():
    caught = []

    async def work() -> None:
        try:
            await asyncio.sleep(9)
        except asyncio.CancelledError as exc:
            caught.append(is_foreign_cancellation(exc))
            raise

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert caught == [False]


async def test_a_cancellation_from_elsewhere_is_stray():
    assert is_foreign_cancellation(asyncio.CancelledError())


async def test_no_cancellation_is_stray_without_asyncio(monkeypatch):
    error = asyncio.CancelledError()
    monkeypatch.delitem(sys.modules, "asyncio")
    assert not is_foreign_cancellation(error)


class EndsSlowly(Background):
    """Work that ends when it may, after it was cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cancelled, self.may_end = anyio.Event(), anyio.Event()
        self.has_ended = False

    @property
    def _has_more(self) -> bool:
        return False

    async def _work(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                self.is_cancelled.set()
                await self.may_end.wait()
            self.has_ended = True


@pytest.mark.asyncio
async def test_cancellations_while_the_work_ends_are_raised_after_its_end():
    work = EndsSlowly()

    async def host() -> None:
        async with work:
            await anyio.lowlevel.checkpoint()

    task = asyncio.create_task(host())
    await work.is_cancelled.wait()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.has_ended


def test_work_that_was_not_entered_has_nothing_to_end():
    work = EndsSlowly()
    anyio.run(work.__aexit__, None, None, None)
    assert work.left
