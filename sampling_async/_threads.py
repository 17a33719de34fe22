"""Running a function in a thread of our own, which nobody waits for when the process ends.

Neither asyncio's default executor nor anyio's worker threads serve here. The first belongs to the host
application, which may keep all of it busy; the second are joined at the end of the process, and a process whose
event loop was left by an exception of a signal handler would wait for them for ever.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import anyio
import anyio.lowlevel

from sampling_async._loops import asyncio_loop, event

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_CallSoon: TypeAlias = "Callable[[Callable[[], object]], object]"


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a function in a thread and return what it returns.

    Cancelled, this returns at once; the function goes on to its end, and what comes of it is dropped.
    """
    run = begun(function, *args)
    await run.over.wait()
    return run.result()


def begun(function: Callable[..., T], *args: Any) -> Run[T]:
    """Begin to call a function in a thread."""
    run = Run(function, args, event())
    threading.Thread(target=run.through, args=(_caller(),), name="sampling_async", daemon=True).start()
    return run


class Run(Generic[T]):
    """One call of a function, and what comes of it.

    Attributes:
        over: Set in the event loop that began it, when it has ended.
    """

    def __init__(self, function: Callable[..., T], args: tuple[Any, ...], over: anyio.Event) -> None:
        self.over = over
        self._function = function
        self._args = args
        self._result: T
        self._failure: BaseException | None = None

    def through(self, call_soon: _CallSoon) -> None:
        """Call the function, in the thread that runs this, and have `over` set in that of the event loop."""
        try:
            self._result = self._function(*self._args)
        except BaseException as exc:  # noqa: BLE001  raised where it is waited for
            self._failure = exc
        with suppress(RuntimeError):  # the event loop has ended, and nobody waits any more
            call_soon(self.over.set)

    def result(self) -> T:
        """Return what the function returned, or raise what it raised, which can be had once."""
        failure, self._failure = self._failure, None
        if failure is None:
            return self._result
        try:
            raise failure
        finally:
            del failure  # an error whose traceback holds itself lives until the next collection


def _caller() -> _CallSoon:
    """Return what calls a function in the thread of the event loop that runs this."""
    loop = asyncio_loop()
    if loop is not None:
        return loop.call_soon_threadsafe
    token: Any = anyio.lowlevel.current_token()
    run_sync_soon: _CallSoon = getattr(token, "native_token", token).run_sync_soon
    return run_sync_soon
