"""Run a function in a separate daemon thread, which does not delay the end of the process.

Neither asyncio's default executor nor anyio's worker threads are suitable. The executor belongs to the host
application, which may keep all its threads busy. Worker threads are joined at the end of the process: if an
exception of a signal handler has ended the event loop, that join would never return.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from copy import copy
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

import anyio
import anyio.lowlevel

from sampling_async._pacing.loops import asyncio_loop, round_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")
_CallSoon: TypeAlias = "Callable[[Callable[[], object]], object]"


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a function in a thread and return its result.

    If this is cancelled, it ends at once. The function still runs to its end, and its result is dropped.
    """
    run = start(function, *args)
    await run.over.wait()
    return run.result()


async def join_uncancelled(run: Run[T], on_cancel: Callable[[], object] = lambda: None) -> T:
    """Wait for a run in a thread to its end, and return its result. Cancellations are raised only then.

    Use it if the thread must not run on, because its work would conflict with what follows.

    Args:
        run: The run.
        on_cancel: Called at the first cancellation; it may make the function end early.
    """
    cancelled: BaseException | None = None
    with anyio.CancelScope() as scope:
        while not run.over.is_set():
            try:
                await run.over.wait()
            except anyio.get_cancelled_exc_class() as exc:
                if cancelled is None:
                    on_cancel()
                # A shield does not stop `Task.cancel` of asyncio, and there may be several.
                cancelled, scope.shield = exc, True
    if cancelled is not None:
        try:
            raise cancelled
        finally:
            del cancelled  # the traceback has this frame
    return run.result()


class CancelFlag:
    """A flag that ends a function in a thread at its next check."""

    def __init__(self) -> None:
        self._is_cancelled = False

    def cancel(self) -> None:
        """Have the function end at its next check. It may be called in any thread."""
        self._is_cancelled = True

    def check(self) -> None:
        """Raise if the flag was set."""
        if self._is_cancelled:
            raise RuntimeError("the task that waited for this was cancelled")

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items, with a check before each."""
        for item in items:
            self.check()
            yield item


async def run_cancellable(function: Callable[[CancelFlag], T]) -> T:
    """Call a function in a thread. If this is cancelled, the function ends at its next check, and this then."""
    flag = CancelFlag()
    return await join_uncancelled(start(function, flag), flag.cancel)


def start(function: Callable[..., T], *args: Any) -> Run[T]:
    """Start a function in a thread and return at once."""
    run = Run(function, args, anyio.Event())
    work = partial(run.through, call_soon_here())
    try:
        _idle.pop().put(work)
    except IndexError:
        waiting: _Queue = SimpleQueue()
        threading.Thread(target=_work, args=(waiting,), name="sampling_async", daemon=True).start()
        waiting.put(work)
    return run


# To start a thread holds the event loop up until it runs, a fifth of a millisecond. So threads wait a little
# for more work, the latest one first.
_Queue: TypeAlias = "SimpleQueue[Callable[[], None]]"
_idle: Final[list[_Queue]] = []
_IDLE_SECONDS: Final = 0.5


def _work(waiting: _Queue) -> None:
    while True:
        try:
            waiting.get(timeout=_IDLE_SECONDS)()  # kept nowhere: the result belongs to who waits for it
        except Empty:
            try:
                _idle.remove(waiting)
            except ValueError:  # it has just got work
                continue
            return
        _idle.append(waiting)


if hasattr(os, "register_at_fork"):  # pragma: no branch  Windows has no forks
    os.register_at_fork(after_in_child=_idle.clear)  # the threads are in the parent only


class Run(Generic[T]):
    """One run of a function in a thread, with its result.

    Attributes:
        over: Set in the event loop that started the function, when the function has ended.
    """

    def __init__(self, function: Callable[..., T], args: tuple[Any, ...], over: anyio.Event) -> None:
        self.over = over
        self._function = function
        self._args = args
        self._result: T
        self._failure: BaseException | None = None

    def through(self, call_soon: _CallSoon) -> None:
        """Call the function in the current thread, then have `over` set in the thread of the event loop."""
        try:
            self._result = self._function(*self._args)
        except BaseException as exc:  # noqa: BLE001  raised where it is waited for
            self._failure = exc
        with suppress(RuntimeError):  # the event loop has ended, so no task waits
            call_soon(self.over.set)

    def check(self) -> None:
        """Raise a copy of the function's exception, if it has raised one: several tasks may wait."""
        if self._failure is not None:
            self._failure = self._failure.with_traceback(None)
            raise copy(self._failure)

    def result(self) -> T:
        """Return the function's result, or raise its exception. It can be called once."""
        # A cycle of an exception, its traceback and a frame would keep all locals of the frame until the next
        # garbage collection. So neither this object nor this frame keeps the exception.
        failure, self._failure = self._failure, None
        if failure is None:
            return self._result
        try:
            raise failure
        finally:
            del failure


class SharedRun:
    """A function in a thread that many tasks wait for together, such as a commit of what they all have noted.

    `prepare` is called in the event loop before each run, and returns the function. Tasks that come while it
    runs wait for the next run.
    """

    def __init__(self, prepare: Callable[[], Callable[[], object]]) -> None:
        self._prepare = prepare
        self._latest: Run[object] | None = None

    async def until(self, is_done: Callable[[], bool]) -> None:
        """Run the function until something is done. What it raises is raised in each task that waits."""
        if is_done():
            return
        # Two rounds of the loop: by then all tasks of this one have noted what they have, and those that went
        # on to their next job, what they need for that.
        turn = round_here()
        for _ in range(2):
            await turn()
        while not is_done():
            run = self._latest
            if run is None or run.over.is_set():
                run = self._latest = start(self._prepare())
            await run.over.wait()
            run.check()


def call_soon_here() -> _CallSoon:
    """Return a thread-safe function that has a function called in the running event loop."""
    loop = asyncio_loop()
    if loop is not None:
        return loop.call_soon_threadsafe
    token: Any = anyio.lowlevel.current_token()
    run_sync_soon: _CallSoon = getattr(token, "native_token", token).run_sync_soon
    return run_sync_soon
