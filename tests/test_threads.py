"""Functions in threads: results, errors, cancellation, and the end of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import pytest
import trio

from sampling_async._pacing.threads import Run, in_thread, run_cancellable


async def test_the_result_of_a_function_comes_from_another_thread():
    assert await in_thread(lambda a, b: (a + b, threading.current_thread().daemon), 1, 2) == (3, True)
    assert await in_thread(lambda: threading.current_thread().name) == "sampling_async"  # for who looks for it


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
