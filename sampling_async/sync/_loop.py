"""An event loop in a thread of its own, and calls into it from threads that wait for the result."""

from __future__ import annotations

import atexit
import threading
import warnings
import weakref
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeAlias, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from sampling_async._contract.errors import ClientClosedError
from sampling_async._wire.sockets import forks

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Mapping

T = TypeVar("T")
Given = ParamSpec("Given")

_Close: TypeAlias = "Callable[[], Awaitable[object]]"
_CLOSED: Final = "the client is closed; make a new one"
_TICK: Final = 0.001  # seconds
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
            return self._entered(call).start_task_soon(call.run).result()
        except CancelledError:
            raise ClientClosedError("the client was closed during the call", delivery="unknown") from None
        except BaseException as exc:
            if call.loop is None:  # it was refused
                raise
            if isinstance(exc, RuntimeError) and not call.has_begun and call.loop.is_ending:
                raise ClientClosedError(_CLOSED, delivery="not_sent") from None
            call.cancel()
            raise
        finally:
            if call.loop is not None:
                call.loop.calls.discard(call)

    def _entered(self, call: _BlockingCall[Any]) -> BlockingPortal:
        """Return the portal for a call. The event loop does not end before the call is forgotten."""
        with self._lock:
            if self._is_closed:
                raise ClientClosedError(_CLOSED, delivery="not_sent")
            loop = self._started()
            loop.require_usable()
            # First this: whatever a signal handler interrupts from here on, the call is forgotten in the end.
            call.loop = loop
            loop.calls.add(call)
        loop.ready.result()
        assert loop.portal is not None
        return loop.portal

    def _started(self) -> _Loop:
        if self._loop is None:
            self._loop = _Loop(self._aclose, self.open)
        # A signal handler may have raised between these lines, so each call looks whether all was done.
        if self._loop.thread.ident is None:
            weakref.finalize(self, _drop, self._loop, self._owner).atexit = False
            _clients.add(self)
            self._loop.thread.start()
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
            loop.end()
            loop.ended.result()


class _Loop:
    """The event loop and its thread. It does not hold the client that uses it, which can be dropped."""

    portal: BlockingPortal | None = None
    _loop: asyncio.AbstractEventLoop
    _end: asyncio.Event

    def __init__(
        self,
        aclose: Callable[[], Awaitable[object]],
        still_open: Mapping[object, Callable[[], Awaitable[object]]],
    ) -> None:
        self.calls: set[_BlockingCall[Any]] = set()
        self.ready: Future[None] = Future()
        self.ended: Future[None] = Future()
        self.is_ending = False
        self._aclose = aclose
        self._still_open = still_open
        self._forks = forks.count
        # A daemon: the program may end without closing the client. `atexit` closes it then.
        self.thread = threading.Thread(target=self._run, name="sampling_async.sync", daemon=True)

    @property
    def is_of_a_parent(self) -> bool:
        """Whether this process was forked since the start, so that the thread is in another process."""
        return self._forks != forks.count

    def require_usable(self) -> None:
        if self.is_of_a_parent:
            raise RuntimeError(
                "the client was used before this process was forked, and its thread is in the parent process: "
                "make a client in each process, or do not use it before the fork"
            )
        if self.thread is threading.current_thread():
            raise RuntimeError(
                "this is the client's own thread, where a blocking call would wait for itself: hooks and "
                "transports run here, and cannot call the client"
            )

    def _run(self) -> None:
        try:
            anyio.run(self._main, backend="asyncio")
        except BaseException as exc:  # noqa: BLE001  raised by `close`, and by calls if there is no loop at all
            self.is_ending = True
            if not self.ready.done():
                self.ready.set_exception(exc)
            self.ended.set_exception(exc)
        else:
            self.ended.set_result(None)

    async def _main(self) -> None:
        import asyncio  # noqa: PLC0415  it is loaded in this thread, while the one that waits does nothing

        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with BlockingPortal() as portal:
            self.portal = portal
            self.ready.set_result(None)
            try:
                await self._end.wait()
                await self._aclose()
                for close in tuple(self._still_open.values()):
                    await close()
            finally:
                self.is_ending = True
                await portal.stop(cancel_remaining=True)
                with anyio.move_on_after(_ENDING_SECONDS, shield=True):
                    # A thread may be about to start a call. It must find out that this has ended.
                    while any(not call.over.is_set() for call in tuple(self.calls)):  # noqa: ASYNC110  those threads have no event to set
                        await anyio.sleep(_TICK)

    def end(self) -> None:
        """Begin to end it, from any thread and at any moment, also from the garbage collector."""
        if self.ready.exception() is not None:
            return
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._end.set)


class _BlockingCall(Generic[T]):
    """One call. It may be cancelled at any moment, also before it begins."""

    def __init__(self, function: Callable[[], Awaitable[T]]) -> None:
        self.loop: _Loop | None = None
        self.has_begun = False
        self._function = function
        self.over = threading.Event()
        self._scope: anyio.CancelScope | None = None

    async def run(self) -> T:
        self.has_begun = True
        try:
            with anyio.CancelScope() as self._scope:
                return await self._function()
            raise RuntimeError("cancelled")  # nobody waits for it
        finally:
            self.over.set()

    def cancel(self) -> None:
        """Cancel the call and wait for its end."""
        portal = None if self.loop is None else self.loop.portal
        if portal is not None and not self.over.is_set():
            with suppress(RuntimeError):  # the loop has ended, and this call with it
                portal.start_task_soon(self._cancel)
                self.over.wait()

    def _cancel(self) -> None:
        # Calls begin in the order in which they are started, so one that has not begun by now never will.
        if self._scope is None:
            self.over.set()
        else:
            self._scope.cancel()


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
