"""Blocks of code that end at a deadline, or all together when their owner is closed. Depends on anyio.

A cancel scope with a deadline has a timer of its own, which costs as much as the scope. Nearly all blocks end
long before. So on asyncio one timer serves all blocks: it is set for the earliest deadline, and not touched
when that block ends. Blocks around this package's code need no scope either: they cancel as `asyncio.timeout`
does.
"""

from __future__ import annotations

import sys
import weakref
from contextvars import Context
from math import inf
from typing import TYPE_CHECKING, Final, Self, TypeAlias

import anyio

from sampling_async._pacing.loops import asyncio_loop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from types import TracebackType

_TICK: Final = 0.001  # seconds; a timer may fire this much too early


class DeadlineScopes:
    """The open blocks of one owner, in one event loop."""

    def __init__(self) -> None:
        self._deadlines: dict[Scope, float] = {}  # of the open blocks
        self._now: Callable[[], float] = anyio.current_time  # of the event loop's own clock, as deadlines are
        self._is_new = True  # until the first block
        self._loop: asyncio.AbstractEventLoop | None = None  # None on trio
        self._timer: asyncio.Handle | None = None
        self._rings_at = inf  # no later than the earliest deadline; uvloop's timers do not always say
        self._is_shut = False
        self._none_left: anyio.Event | None = None

    def __len__(self) -> int:
        return len(self._deadlines)

    def within(self, seconds: float, *, is_ours: bool = False) -> Block:
        """Return a block that is cancelled after a number of seconds, or when its owner is closed.

        `is_ours` means that only code of this package runs in the block. Then on asyncio it is cancelled as
        `asyncio.timeout` does it: once, and without regard to anyio's shields. Foreign code may need more, and
        a cancel scope takes 4 % of the time of a bulk request.
        """
        if self._is_new:
            self._is_new, self._loop = False, asyncio_loop()
            if self._loop is not None:  # before Python 3.12, `current_time` asks the system for the process
                self._now = self._loop.time
        until = inf if seconds == inf else self._now() + seconds
        if seconds > 0 and self._loop is not None:
            # Not after `shut`: a task that cancels itself at the start of a block may feel it behind the block.
            if is_ours and not self._is_shut:
                return _NativeBlock(self, until)
            return _ScopedBlock(self, anyio.CancelScope(), until)
        return _ScopedBlock(self, anyio.CancelScope(deadline=until), inf)

    def enter(self, scope: Scope, until: float) -> None:
        """Note that a block has begun. After `shut` it is cancelled at once."""
        if self._is_shut:
            scope.cancel()
        self._deadlines[scope] = until
        # After `shut` another event loop may be running, and that of the timer may be closed.
        if until < self._rings_at and not self._is_shut:
            self._set_timer(until)

    def leave(self, scope: Scope) -> None:
        self._deadlines.pop(scope, None)
        if self._none_left is not None and not self._deadlines:
            self._none_left.set()

    def _set_timer(self, until: float) -> None:
        # Not the loop that runs now: after the timer has fired, no task runs, which looks the same as on trio.
        assert self._loop is not None
        alive: weakref.ref[DeadlineScopes] = weakref.ref(self)
        # In a context of its own: that of the task may hold the data of a request that ended long before.
        earlier, self._timer = self._timer, self._loop.call_at(until, _ring, alive, context=Context())
        self._rings_at = until
        # Last: a signal handler may raise between these lines. A timer too many does no harm.
        if earlier is not None:
            earlier.cancel()

    def ring(self) -> None:
        self._timer, self._rings_at = None, inf
        now, earliest = self._now(), inf
        for scope, until in tuple(self._deadlines.items()):
            if until - now <= _TICK:
                scope.cancel()
                self._deadlines[scope] = inf
            else:
                earliest = min(earliest, until)
        if earliest < inf:
            self._set_timer(earliest)

    def shut(self) -> None:
        self._is_shut = True

    async def end(self, seconds: float) -> None:
        """Cancel the open blocks, and wait some seconds at most until all of them have been left."""
        for scope in tuple(self._deadlines):
            if isinstance(scope, _NativeBlock) and scope.is_abandoned:
                self.leave(scope)
            else:
                scope.cancel()
        if self._deadlines:
            self._none_left = self._none_left or anyio.Event()
            with anyio.move_on_after(seconds):
                await self._none_left.wait()


def _ring(blocks: weakref.ref[DeadlineScopes]) -> None:
    alive = blocks()
    if alive is not None:
        alive.ring()


class _ScopedBlock:
    """A block with a cancel scope. It is a class because a generator would cost four times as much."""

    __slots__ = ("_blocks", "_scope", "_until")

    def __init__(self, blocks: DeadlineScopes, scope: anyio.CancelScope, until: float) -> None:
        self._blocks = blocks
        self._scope = scope
        self._until = until

    def __enter__(self) -> anyio.CancelScope:
        scope = self._scope.__enter__()
        try:
            self._blocks.enter(scope, self._until)
        except BaseException:  # pragma: no cover  a signal handler may raise anywhere
            self._blocks.leave(self._scope)
            self._scope.__exit__(*sys.exc_info())
            raise
        return scope

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            self._blocks.leave(self._scope)
        finally:
            suppresses = self._scope.__exit__(exc_type, exc, traceback)
        return suppresses


class _NativeBlock:
    """A block that cancels its task itself, and takes that cancellation back at its end."""

    __slots__ = ("_before", "_blocks", "_task", "_until", "cancel_called", "cancelled_caught")

    def __init__(self, blocks: DeadlineScopes, until: float) -> None:
        self._blocks = blocks
        self._until = until
        self._task: asyncio.Task[object] | None = None
        self._before = 0  # the cancellations of the task that others have requested
        self.cancel_called = self.cancelled_caught = False

    @property
    def is_abandoned(self) -> bool:
        """Whether its task is over: a signal handler raised just before the block was left."""
        return self._task is not None and self._task.done()

    def cancel(self) -> None:
        if self._task is not None and not self.cancel_called:
            self.cancel_called = True
            self._task.cancel()

    def __enter__(self) -> Self:
        task = sys.modules["asyncio"].current_task()
        assert task is not None
        self._task, self._before = task, task.cancelling()
        try:
            self._blocks.enter(self, self._until)
        except BaseException:  # pragma: no cover  a signal handler may raise anywhere
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._blocks.leave(self)
        task, self._task = self._task, None
        if task is None or not self.cancel_called:
            return False
        # With more requests than at the beginning, somebody else wants to cancel the task too: that goes on.
        is_only_ours = task.uncancel() <= self._before
        self.cancelled_caught = is_only_ours and isinstance(exc, sys.modules["asyncio"].CancelledError)
        return self.cancelled_caught


Scope: TypeAlias = anyio.CancelScope | _NativeBlock
"""What a block gives: it can be cancelled, and says whether it was."""

Block: TypeAlias = _ScopedBlock | _NativeBlock
"""A block of `DeadlineScopes`: `with blocks.within(5) as scope`."""
