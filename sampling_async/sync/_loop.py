"""An event loop in a thread of its own, and calls into it from threads that wait for the result.

A signal handler that raises may interrupt any line of a thread that waits. `concurrent.futures` and
`threading.Event` hold a lock of Python code while they wait: interrupted there, they raise something else, or
wait for ever. So a thread waits here for locks of C only, in one step: see `_Latch`.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import threading
import warnings
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeAlias, TypeVar

import anyio

from sampling_async._contract.errors import ClientClosedError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

T = TypeVar("T")
Given = ParamSpec("Given")

_Close: TypeAlias = "Callable[[], Awaitable[object]]"
_CLOSED: Final = "the client is closed; make a new one"
_TICK: Final = 0.001  # seconds
_RESULT_SECONDS: Final = 2.0  # for calls to return what they have, when the client is closed
_ENDING_SECONDS: Final = 5.0


class LoopThread:
    """Calls async functions for threads that wait for the result. Its event loop starts with the first call.

    Args:
        owner: The name of the client, for warnings.
        aclose: Called in the event loop, before it ends.

    Attributes:
        open: What is open, with functions that close it. They are called after `aclose`.
    """

    def __init__(self, owner: str, aclose: _Close) -> None:
        self.open: dict[object, _Close] = {}
        self._owner = owner
        self._aclose = aclose
        # Reentrant: if a signal handler raises as it is released, the same thread can go on.
        self._lock = threading.RLock()
        self._loop: _Loop | None = None
        self._is_closed = False

    def call(self, function: Callable[Given, Awaitable[T]], *args: Given.args, **kwargs: Given.kwargs) -> T:
        """Call an async function in the event loop, and wait for its result.

        If a signal handler raises meanwhile, as at Ctrl-C, the function is cancelled, this waits for its end,
        and the exception is raised. A second one ends this wait too.

        Raises:
            ClientClosedError: The event loop has ended, or ends meanwhile.
            RuntimeError: This is the thread of the event loop, or a process that was forked since its start.
        """
        call = _BlockingCall(partial(function, *args, **kwargs))
        try:
            self._enter(call).submit(call.begin)
            call.over.wait()
        except BaseException:
            call.cancel()
            raise
        finally:
            if call.loop is not None:
                call.loop.calls.discard(call)
        return call.result()

    def leave(self, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Call a function that closes something; if the client is being closed, wait for that in place of it.

        The garbage collector may want this in the thread of the event loop, where it is not waited for.
        """
        loop = self._loop
        if loop is None or loop.is_of_a_parent:
            return
        if loop.is_mine:
            loop.start_task(function)
            return
        try:
            self.call(function)
        except ClientClosedError:
            if not (self._is_closed or loop.is_ending):  # of another client
                raise
            loop.finish()

    def _enter(self, call: _BlockingCall[Any]) -> _Loop:
        """Return the event loop for a call. It does not end before the call is forgotten."""
        with self._lock:
            if self._is_closed:
                raise ClientClosedError(_CLOSED, delivery="not_sent")
            loop = self._started()
            loop.require_usable()
            # First this: whatever a signal handler interrupts from here on, the call is forgotten in the end.
            call.loop = loop
            loop.calls.add(call)
        loop.require_ready()
        return loop

    def _started(self) -> _Loop:
        if self._loop is None:
            self._loop = _Loop(self._aclose, self.open)
        # A signal handler may have raised between these lines, so each call looks whether all was done.
        if not self._loop.is_started:
            weakref.finalize(self, _drop, self._loop, self._owner).atexit = False
            _clients.add(self)
            self._loop.start()
        return self._loop

    @property
    def is_running(self) -> bool:
        """Whether calls are possible in this process."""
        loop = self._loop
        return loop is not None and not loop.is_of_a_parent and not loop.is_ending

    def close(self) -> None:
        """End all calls and the event loop, and wait for that. It may be called more than once."""
        with self._lock:
            loop = self._started()
            if not loop.is_of_a_parent:
                loop.require_usable()
            self._is_closed = True
        if not loop.is_of_a_parent:
            loop.finish()
            if loop.error is not None:
                raise loop.error


class _Latch:
    """What threads wait for until it is set, once. A signal handler that raises leaves nothing held."""

    def __init__(self) -> None:
        self.is_set = False
        self._waiters: list[_thread.LockType] = []

    def set(self) -> None:
        self.is_set = True
        while self._waiters:
            self._waiters.pop().release()

    def wait(self) -> None:
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        if self.is_set:  # maybe before this one was in the list
            return
        waiter.acquire()


class _Loop:
    """The event loop and its thread. It does not hold the client that uses it, which can be dropped."""

    _loop: asyncio.AbstractEventLoop | None = None
    _end: asyncio.Event

    def __init__(
        self,
        aclose: Callable[[], Awaitable[object]],
        still_open: Mapping[object, Callable[[], Awaitable[object]]],
    ) -> None:
        self.calls: set[_BlockingCall[Any]] = set()
        self._tasks: set[asyncio.Task[object]] = set()  # the event loop holds them weakly
        self.ready, self.ended = _Latch(), _Latch()
        self.error: BaseException | None = None  # that it has ended with
        self.is_started = self.is_ending = False
        self._starting = _thread.allocate_lock()  # taken by the one who starts it, for good
        self._aclose = aclose
        self._still_open = still_open
        self._process = os.getpid()
        # A daemon: the program may end without closing the client. `atexit` closes it then.
        self._thread = threading.Thread(target=self._run, name="sampling_async.sync", daemon=True)

    def start(self) -> None:
        # `Thread.start` waits for an event. A thread that no signal handler interrupts does that.
        _thread.start_new_thread(self._start, ())
        self.is_started = True

    def _start(self) -> None:
        if self._starting.acquire(blocking=False):  # twice if a signal handler raised in `start`
            self._thread.start()

    @property
    def is_of_a_parent(self) -> bool:
        """Whether this process was forked since the start, so that the thread is in another process."""
        return self._process != os.getpid()

    @property
    def is_mine(self) -> bool:
        """Whether this is the thread of the event loop."""
        return self._thread is threading.current_thread()

    def require_usable(self) -> None:
        if self.is_of_a_parent:
            raise RuntimeError(
                "the client was used before this process was forked, and its thread is in the parent process: "
                "make a client in each process, or do not use it before the fork"
            )
        if self.is_mine:
            raise RuntimeError(
                "this is the client's own thread, where a blocking call would wait for itself: hooks and "
                "transports run here, and cannot call the client"
            )

    def require_ready(self) -> None:
        """Wait until calls are possible."""
        self.ready.wait()
        if self.is_ending:
            raise (None if self.is_ready else self.error) or ClientClosedError(_CLOSED, delivery="not_sent")

    @property
    def is_ready(self) -> bool:
        """Whether there is an event loop, or has been one."""
        return self._loop is not None

    def _run(self) -> None:
        try:
            anyio.run(self._main, backend="asyncio")
        except BaseException as exc:  # noqa: BLE001  raised by `close`, and by calls if there is no loop at all
            self.is_ending, self.error = True, exc
        self._end_calls()
        self.ready.set()
        self.ended.set()

    async def _main(self) -> None:
        import asyncio  # noqa: PLC0415  it is loaded in this thread, while the one that waits does nothing

        self._end, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self.ready.set()
        try:
            await self._end.wait()
            await self._aclose()
            for close in tuple(self._still_open.values()):
                await close()
            await self._calls_over(_RESULT_SECONDS)  # closing has ended them, with outcomes
        finally:
            self.is_ending = True
            for each in tuple(self.calls):
                each.cancel_in_loop()
            # A thread may be about to start a call. It must find out that this has ended.
            await self._calls_over(_ENDING_SECONDS)

    async def _calls_over(self, seconds: float) -> None:
        with anyio.move_on_after(seconds, shield=True):
            while any(not call.over.is_set for call in tuple(self.calls)):  # noqa: ASYNC110  those threads have no event to set
                await anyio.sleep(_TICK)

    def start_task(self, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Begin a task, in the thread of the event loop and in the context of who calls this."""
        assert self._loop is not None
        task = self._loop.create_task(function())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def submit(self, function: Callable[[], object]) -> None:
        """Call a function in the event loop, after those submitted before, in the context of this thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # it has ended
            self._end_calls()

    def _end_calls(self) -> None:
        for call in tuple(self.calls):
            call.over.set()

    def end(self) -> None:
        """Begin to end it, from any thread and at any moment, also from the garbage collector."""
        self.ready.wait()
        if self.is_ready:
            self.submit(self._end.set)

    def finish(self) -> None:
        """End it, and wait for that: whoever waits may have been interrupted between the two."""
        self.end()
        self.ended.wait()


class _BlockingCall(Generic[T]):
    """One call. It may be cancelled at any moment, also before it begins."""

    def __init__(self, function: Callable[[], Awaitable[T]]) -> None:
        self.loop: _Loop | None = None  # None if it was refused
        self.over = _Latch()
        self._function = function
        self._has_begun = self._is_cancelled = False
        self._scope: anyio.CancelScope | None = None
        self._results: list[T] = []
        self._error: BaseException | None = None

    def begin(self) -> None:
        assert self.loop is not None
        if self.loop.is_ending or self._is_cancelled:
            self.over.set()
        else:
            self._has_begun = True
            # This is a copy of the caller's context, which may name the library of another event loop.
            if (sniffio := sys.modules.get("sniffio")) is not None:
                sniffio.current_async_library_cvar.set("asyncio")
            self.loop.start_task(self._run)

    async def _run(self) -> None:
        try:
            with anyio.CancelScope() as self._scope:
                if not self._is_cancelled:
                    self._results.append(await self._function())
        except Exception as exc:  # noqa: BLE001  raised by `result`
            self._error = exc
        finally:
            self.over.set()

    def result(self) -> T:
        """Return the result, or raise the error."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # it refers to this frame
        if self._results:
            return self._results[0]
        if not self._has_begun:
            raise ClientClosedError(_CLOSED, delivery="not_sent")
        raise ClientClosedError("the client was closed during the call", delivery="unknown")

    def cancel(self) -> None:
        """Cancel the call and wait for its end."""
        if self.loop is not None and self.loop.is_ready and not self.over.is_set:
            self.loop.submit(self.cancel_in_loop)
            self.over.wait()

    def cancel_in_loop(self) -> None:
        self._is_cancelled = True
        if self._scope is not None:
            self._scope.cancel()
        elif not self._has_begun:
            # Calls begin in the order in which they are submitted, so it never will.
            self.over.set()


_clients: Final[weakref.WeakSet[LoopThread]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for each in tuple(_clients):
        with suppress(BaseException):  # of the loop's end; the program ends anyway
            each.close()


def _drop(loop: _Loop, owner: str) -> None:
    """End the event loop of a client that nobody has closed and nobody holds. This may run in any thread."""
    if loop.is_of_a_parent or loop.is_ending:
        return
    loop.end()
    warnings.warn(f"unclosed {owner}: use `with`, or call close()", ResourceWarning, stacklevel=2)
