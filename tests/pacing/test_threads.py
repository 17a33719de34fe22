"""Functions in threads: results, errors, cancellation, and the end of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import pytest
import trio
from anyio import wait_all_tasks_blocked

from sampling_async._pacing import threads as _threads
from sampling_async._pacing.threads import Run, SharedRun, in_thread, run_cancellable


async def test_the_result_of_a_function_comes_from_another_thread():
    assert await in_thread(lambda a, b: (a + b, threading.current_thread().daemon), 1, 2) == (3, True)
    assert await in_thread(lambda: threading.current_thread().name) == "sampling_async"  # for who looks for it


async def test_a_thread_is_used_again_soon_after_its_function_has_ended(monkeypatch):
    monkeypatch.setattr(_threads, "_idle", [])
    first = await in_thread(threading.get_ident)
    await anyio.to_thread.run_sync(until, lambda: _threads._idle)
    assert await in_thread(threading.get_ident) == first


def until(is_so) -> None:
    while not is_so():
        time.sleep(0.0001)


async def test_functions_at_once_have_a_thread_each():
    found, together = set(), threading.Barrier(3)

    async def run() -> None:
        found.add(await in_thread(lambda: (together.wait(10), threading.get_ident())[1]))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(run)
    assert len(found) == 3


async def test_a_thread_that_gets_no_more_work_ends(monkeypatch):
    monkeypatch.setattr(_threads, "_IDLE_SECONDS", 0.0)
    monkeypatch.setattr(_threads, "_idle", [])
    thread = await in_thread(threading.current_thread)
    await anyio.to_thread.run_sync(thread.join)
    assert not _threads._idle
    assert await in_thread(threading.current_thread) is not thread


async def test_tasks_that_come_while_a_shared_function_runs_wait_for_its_next_run():
    begun, go_on = threading.Event(), threading.Semaphore(0)
    noted: list[str] = []
    written: list[list[str]] = []

    def prepare():
        some = noted.copy()
        noted.clear()
        return lambda: (begun.set(), go_on.acquire(timeout=10), written.append(some))

    shared = SharedRun(prepare)

    async def note(name: str) -> None:
        noted.append(name)
        await shared.until(lambda: any(name in some for some in written))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(note, "a")
        tasks.start_soon(note, "b")
        await anyio.to_thread.run_sync(begun.wait)
        tasks.start_soon(note, "c")
        tasks.start_soon(note, "d")
        await wait_all_tasks_blocked()
        go_on.release(2)
    assert [sorted(some) for some in written] == [["a", "b"], ["c", "d"]]
    go_on.release()
    await note("e")  # after a rest
    await shared.until(lambda: True)  # without a run


async def test_what_a_shared_function_raises_is_raised_in_each_task_that_waits():
    failures, done = [KeyError("x"), None], []

    def fail() -> None:
        if (failure := failures.pop(0)) is not None:
            raise failure
        done.append(1)

    shared, caught = SharedRun(lambda: fail), []

    async def wait() -> None:
        with pytest.raises(KeyError, match="x") as error:
            await shared.until(lambda: bool(done))
        caught.append(error.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        tasks.start_soon(wait)
    assert caught[0] is not caught[1]
    await shared.until(lambda: bool(done))


async def test_a_thread_that_cannot_be_started_is_an_error_of_who_waits(monkeypatch):
    def refuse(_thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_threads, "_idle", [])
    shared, done = SharedRun(lambda: partial(done.append, 1)), []
    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await shared.until(lambda: bool(done))
    await shared.until(lambda: bool(done))


async def test_a_cancelled_task_leaves_a_shared_function_to_the_others():
    begun, go_on, done = threading.Event(), threading.Event(), []
    shared = SharedRun(lambda: lambda: (begun.set(), go_on.wait(10), done.append(1)))

    async def cancelled(scope: anyio.CancelScope) -> None:
        with scope:
            await shared.until(lambda: bool(done))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancelled, scope := anyio.CancelScope())
        await anyio.to_thread.run_sync(begun.wait)
        tasks.start_soon(shared.until, lambda: bool(done))
        await wait_all_tasks_blocked()
        scope.cancel()
        await wait_all_tasks_blocked()
        go_on.set()
    assert done == [1]


async def test_the_exception_of_a_function_is_raised_in_the_caller():
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        await in_thread(fail)


async def test_a_function_that_nobody_wants_any_more_ends_at_its_next_check_and_is_waited_for():
    began, cancelled, seen = threading.Event(), threading.Event(), []

    def work(wanted) -> str:
        for number in wanted.each(range(3)):
            seen.append(number)
            if number == 1:
                began.set()
                cancelled.wait(10)
        return "done"

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_cancellable, work)
            await anyio.to_thread.run_sync(began.wait)
            scope.cancel()
            threading.Timer(0.02, cancelled.set).start()
    assert scope.cancelled_caught
    assert cancelled.is_set()
    assert seen == [0, 1]
    assert await run_cancellable(work) == "done"


@pytest.mark.asyncio
async def test_many_cancellations_do_not_leave_a_function_behind():
    go_on, over = threading.Event(), []

    def work(wanted) -> None:
        go_on.wait(10)
        over.append(1)
        wanted.check()

    task = asyncio.ensure_future(run_cancellable(work))
    for _ in range(3):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert over == [1]


async def test_a_cancelled_wait_ends_at_once_and_the_function_goes_on():
    go_on, done = threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait(10)
        done.set()

    with anyio.move_on_after(0.005) as scope:
        await in_thread(work)
    assert scope.cancelled_caught
    assert not done.is_set()
    go_on.set()
    assert done.wait(10)


def test_a_process_ends_without_waiting_for_running_functions():
    code = """
import asyncio, sys, time
from sampling_async._pacing.threads import in_thread

async def main():
    task = asyncio.create_task(in_thread(time.sleep, 60))
    await asyncio.sleep(0.01)
    sys.exit(7)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=20, check=False)
    assert done.returncode == 7


def test_a_function_that_outlasts_its_event_loop_ends_quietly():
    def closed(_: object) -> None:
        raise RuntimeError("Event loop is closed")

    run = Run(lambda: 3, (), None)
    run.over = SimpleNamespace(set=lambda: None)
    run.through(closed)
    assert run.result() == 3


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_older_releases_of_anyio_have_trio_s_own_token(anyio_backend, monkeypatch):
    monkeypatch.setattr(anyio.lowlevel, "current_token", trio.lowlevel.current_trio_token)
    assert await in_thread(lambda: 3) == 3
