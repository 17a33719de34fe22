"""Event loops, of asyncio and trio: which one runs, its clock, and waiting for a change of another task."""

from __future__ import annotations

import sys
import time
import types
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Generator
    from weakref import WeakMethod


class Notifier:
    """Something that changes many times. Tasks wait for the next change, and `notify` wakes all of them.

    There is an event only while a task waits, so `notify` costs next to nothing otherwise. A task that was
    woken must look again whether the change is the one that it needs.
    """

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    async def wait(self) -> None:
        self._event = self._event or anyio.Event()
        await self._event.wait()

    def notify(self) -> None:
        """Wake the tasks that wait now. Call it after the change, in the event loop of these tasks."""
        if self._event is not None:
            # Set before it is forgotten: a signal handler may raise in between, and an event that is forgotten
            # and not set would leave its tasks waiting.
            self._event.set()
            self._event = None


class OneShotEvent:
    """Something that happens once, and one task waits for it, on asyncio and on trio.

    On asyncio it is a bare future, which costs a third of an event. Only one task may wait: if it is cancelled,
    the future is too.
    """

    __slots__ = ("_event", "_future")

    def __init__(self) -> None:
        loop = asyncio_loop()
        self._future = None if loop is None else loop.create_future()
        self._event = anyio.Event() if loop is None else None

    async def wait(self) -> None:
        if self._event is not None:
            await self._event.wait()
        else:
            assert self._future is not None
            await self._future

    def set(self) -> None:
        """Note that it has happened, and wake the task. It may be called again, and after a cancellation."""
        if self._event is not None:
            self._event.set()
        elif self._future is not None and not self._future.done():
            self._future.set_result(None)


def asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running asyncio loop; None on trio."""
    # asyncio takes long to import, and a program on trio may never need it. This is called several times for
    # each request, and an `import` statement costs more than the look into the table of modules.
    # Another thread may be importing trio now: then it has no such function yet, and no task runs on it.
    in_trio_task = getattr(sys.modules.get("trio.lowlevel"), "in_trio_task", None)
    loaded = sys.modules.get("asyncio")
    # In its guest mode trio runs inside an asyncio loop, which asyncio finds there too.
    if loaded is None or (in_trio_task is not None and in_trio_task()):
        return None
    loop: asyncio.AbstractEventLoop = loaded.get_running_loop()
    return loop


def running_loop() -> object:
    """Return an object that identifies the running event loop, on asyncio or trio."""
    return asyncio_loop() or anyio.lowlevel.current_token()


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether an asyncio loop is running in the current thread."""
    import asyncio  # noqa: PLC0415  it is loaded: there is a loop

    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def while_alive(method: WeakMethod[Any], *args: object) -> None:
    """Call a method if its object still exists: what an event loop holds must keep no dropped object alive."""
    found = method()
    if found is not None:
        found(*args)


@types.coroutine
def _asyncio_round() -> Generator[None, None, None]:
    """On asyncio: let the event loop go round once, as `asyncio.sleep(0)` does, at a third of its cost."""
    yield


def round_here() -> Callable[[], Awaitable[object]]:
    """Return the function that lets the event loop that runs here go round once, on asyncio or trio."""
    return anyio.lowlevel.checkpoint if asyncio_loop() is None else _asyncio_round


def _trio_clock() -> Callable[[], float]:
    # Not `trio.current_time`, which works in the thread of the loop only. It is loaded, because it runs.
    trio: Any = sys.modules.get("trio")
    if trio is None:
        raise RuntimeError("there is no running event loop here")
    clock: Callable[[], float] = trio.lowlevel.current_clock().current_time
    return clock


def _asyncio_clock(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    import asyncio  # noqa: PLC0415  it is loaded: there is a loop

    # uvloop's clock counts whole milliseconds, and stands still while a callback runs: by it, decoding takes
    # no time. That of asyncio is a function in Python that calls this one in C; loops of tests have their own.
    is_usual = getattr(loop.time, "__func__", None) is asyncio.BaseEventLoop.time
    return loop.time if isinstance(loop, asyncio.BaseEventLoop) and not is_usual else time.monotonic


def loop_clock() -> Callable[[], float]:
    """Return the clock of the event loop, in seconds: of the one that runs here, or where it is first read."""
    with suppress(RuntimeError):  # no loop runs
        loop = asyncio_loop()
        # The usual clock is the same in all loops, so it may be read directly.
        if loop is not None and _asyncio_clock(loop) is time.monotonic:
            return time.monotonic
    return LoopClock()


class LoopClock:
    """The clock of the event loop in which it is first read, in seconds. Then any thread may read it.

    It measures. Deadlines of the loop are times of `loop.time`, which counts from another moment on some loops.
    It looks for the loop once: before Python 3.12, each look asks the system for the number of the process.
    """

    __slots__ = ("_time",)

    def __init__(self) -> None:
        self._time: Callable[[], float] | None = None

    def __call__(self) -> float:
        if self._time is None:
            loop = asyncio_loop()
            self._time = _trio_clock() if loop is None else _asyncio_clock(loop)
        return self._time()
