"""The current event loop and its clock, on asyncio and on trio."""

from __future__ import annotations

import sys
import time
import types
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator


def asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running asyncio loop; None on trio."""
    # asyncio takes long to import, and a program on trio may never need it. This is called several times for
    # each request, and an `import` statement costs more than the look into the table of modules.
    loaded = sys.modules.get("asyncio")
    if loaded is None:
        return None
    if "trio" not in sys.modules:
        current: asyncio.AbstractEventLoop = loaded.get_running_loop()
        return current
    import asyncio  # noqa: PLC0415

    # In its guest mode trio runs inside an asyncio loop. Then `get_running_loop` finds the asyncio loop, but
    # this task belongs to trio. The token of anyio is that of the library that runs the task.
    try:
        token: object = anyio.lowlevel.current_token()
    except RuntimeError:
        # No task runs, for example in a callback of an asyncio loop. trio always runs one.
        running: asyncio.AbstractEventLoop = loaded.get_running_loop()
        return running
    loop = getattr(token, "native_token", token)
    return loop if isinstance(loop, asyncio.AbstractEventLoop) else None


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


def _trio_clock() -> Callable[[], float]:
    # Not `trio.current_time`, which works in the thread of the loop only. It is loaded, because it runs.
    trio: Any = sys.modules["trio"]
    clock: Callable[[], float] = trio.lowlevel.current_clock().current_time
    return clock


def _asyncio_clock(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    import asyncio  # noqa: PLC0415  it is loaded: there is a loop

    # uvloop's clock counts whole milliseconds, and stands still while a callback runs: by it, decoding takes
    # no time. That of asyncio is a function in Python that calls this one in C; loops of tests have their own.
    is_usual = getattr(loop.time, "__func__", None) is asyncio.BaseEventLoop.time
    return loop.time if isinstance(loop, asyncio.BaseEventLoop) and not is_usual else time.monotonic


@types.coroutine
def next_round() -> Generator[None, None, None]:
    """On asyncio: let the event loop go round once, as `asyncio.sleep(0)` does, at a third of its cost."""
    yield


class LoopClock:
    """The clock of the event loop in which it is first read, in seconds. Then any thread may read it.

    It measures. Deadlines of the loop are times of `loop.time`, which counts from another moment on some loops.
    It looks for the loop once: before Python 3.12, each look asks the system for the number of the process.
    """

    __slots__ = ("_time",)

    def __init__(self) -> None:
        self._time: Callable[[], float] | None = None

    def __call__(self) -> float:
        """Return the time."""
        if self._time is None:
            loop = asyncio_loop()
            self._time = _trio_clock() if loop is None else _asyncio_clock(loop)
        return self._time()
