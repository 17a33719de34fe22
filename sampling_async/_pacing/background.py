"""Run work in the background while a block is open. Depends on anyio and knows nothing of surveys.

On asyncio the work runs in a separate task, and no cancel scope is open in the task of the block. So the block
may be left in another task than it was entered in, as in an async generator that is not read to its end (PEP
789). Trio has no such tasks: there a cancel scope is open in the block, and leaving it elsewhere gives a
warning.
"""

from __future__ import annotations

import logging
import sys
import warnings
from abc import ABC, abstractmethod
from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, TypeVar
from weakref import WeakKeyDictionary, ref

import anyio

from sampling_async._pacing.loops import Notifier, asyncio_loop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
    from types import TracebackType

    from anyio.abc import TaskGroup

_LOG: Final = logging.getLogger("sampling_async.pacing")


def is_foreign_cancellation(exc: BaseException) -> bool:
    """Return whether an exception is an asyncio cancellation that is not meant for the current task.

    If a task awaits a future that is cancelled, it gets the same CancelledError as for its own cancellation. A
    stray one must be reported as a failure. Otherwise it would end the current task silently.
    """
    if "asyncio" not in sys.modules:
        return False
    import asyncio  # noqa: PLC0415  a third of this package's import time, and some hosts run trio

    if not isinstance(exc, asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # trio runs, and its cancellations are of another kind
        return True
    # Two ways to cancel this task: `Task.cancel` of asyncio, which `cancelling` counts, and a scope of anyio.
    return task is None or not (task.cancelling() or anyio.get_current_task().has_pending_cancellation())


class Background(ABC):
    """An async context manager with work that runs while its block is open. It can be entered once.

    An exception of the work is kept for the consumer of the results and raised after the last result, without
    an ExceptionGroup around it.
    """

    _called: ClassVar[str] = "stream"  # in errors and warnings
    _works_in_groups: ClassVar[bool] = False

    def __init__(self) -> None:
        self.left = False
        # Whether the exception came from a task that the work started. asyncio has raised a SystemExit or
        # KeyboardInterrupt of such a task out of the event loop already.
        self.has_ended_the_loop = False
        self._runner: _Task | _Nursery | None = None
        self._failure: Exception | None = None
        self._finished = False  # whether no more results will come, for any reason
        self._was_cancelled = False
        self._came_to_its_end = False  # whether the work was not cut off
        self._progress = Notifier()  # there is a result, or no more will come

    async def __aenter__(self) -> Self:
        if self._runner is not None:
            raise RuntimeError(f"a {self._called} can be entered only once; make a new one")
        loop = asyncio_loop()
        self._runner = _Nursery(self._called) if loop is None else _Task(loop)
        try:
            await self._runner.start(self)
        except BaseException:  # pragma: no cover  swept in tests/faults
            # A signal handler may raise after the work began. Python does not call `__aexit__` in this case.
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.must_be_outside()
        try:
            if self._runner is not None:  # None if the block was not entered
                await self._runner.end()
        finally:
            self.left = True

    def must_be_outside(self) -> None:
        """Raise if the block is left by its own work, such as a handler. It would wait for its own end."""
        if isinstance(self._runner, _Task) and self._runner.is_within(in_groups=self._works_in_groups):
            raise RuntimeError(
                f"the {self._called} cannot be left from within: have another task leave its `async with` block"
            )

    @abstractmethod
    async def _work(self) -> None:
        """Do the work of the block. It runs in a separate task."""

    async def run(self) -> None:
        """Do the work. At its end, whatever the reason, notify the consumer that no more results will come."""
        try:
            await self._work()
        except BaseException as exc:  # noqa: BLE001  kept, or raised again
            # A task group raises the exceptions of its tasks as a group. asyncio has already raised SystemExit
            # of a task out of the event loop, but not that of the work itself.
            self.has_ended_the_loop = isinstance(exc, BaseExceptionGroup)
            self._keep(_first_of(exc))
        finally:
            self.is_over()
        self._came_to_its_end = True

    def is_over(self) -> None:
        self._finished = True
        self._progress.notify()

    def _must_be_inside(self) -> None:
        """Raise if the block is not open. Outside of it no work runs, and a wait for results would not end."""
        if self._runner is None:
            raise RuntimeError(f"enter the {self._called} first: async with ... as {self._called}")
        if self.left and (self._has_more or not self._came_to_its_end):
            raise RuntimeError(f"the `async with` block of the {self._called} has ended, so it gives no more")

    @property
    @abstractmethod
    def _has_more(self) -> bool:
        """Whether there are results that the consumer has not taken."""

    def _keep(self, exc: BaseException) -> None:
        """Keep the first failure for the consumer. It is raised after the last result.

        Other exceptions, such as a cancellation of this task, are raised again. They end the work too early, so
        the consumer gets a RuntimeError that names them.
        """
        if isinstance(exc, Exception):
            self._failure = self._failure or exc
            return
        if is_foreign_cancellation(exc):
            stray = RuntimeError(
                f"something that the {self._called} awaited was cancelled, but the {self._called}'s own"
                " task was not"
            )
            self._failure = self._failure or stray
            return
        if self._failure is None:
            self._failure = RuntimeError(f"the {self._called} was ended by {type(exc).__name__}")
            self._was_cancelled = isinstance(exc, (GeneratorExit, anyio.get_cancelled_exc_class()))
            if not self._was_cancelled:
                self._failure.__cause__ = exc  # its text says more: it may be from a hook of the host
        try:
            raise exc
        finally:
            del exc  # the traceback has this frame: both would stay until a garbage collection

    def _end(self) -> None:
        """Raise the failure, if there is one, once. Called after the last result."""
        failure, self._failure = self._failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # as in `_keep`


class _Task:
    """Runs the work on asyncio, in a task outside of any task group.

    It does not keep what it runs: both would stay, with all the input, until a garbage collection.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._scope = anyio.CancelScope()
        self._task: asyncio.Task[None] | None = None

    async def start(self, background: Background) -> None:
        def over(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                task.exception()  # marks it as seen, or asyncio logs it
            background.is_over()

        self._task = self._loop.create_task(self._run(background), name="sampling_async")
        # The consumer is notified even if the task ends before its first step.
        self._task.add_done_callback(over)

    async def _run(self, background: Background) -> None:
        with self._scope:
            try:
                await background.run()
            except (SystemExit, KeyboardInterrupt):  # pragma: no cover  swept in tests/faults
                # asyncio has raised it out of the event loop already, and `asyncio.run` is now cancelling all
                # tasks. If it were raised a second time, that would be cut off.
                if not background.has_ended_the_loop:
                    raise

    def is_within(self, *, in_groups: bool) -> bool:
        """Return whether the current task is that of the work, or was started by it, maybe in a group."""
        import asyncio  # noqa: PLC0415  loaded by now

        current = asyncio.current_task()
        if self._task is None or current is None:
            return False
        starter = _STARTED_BY.get(current)
        if self._task is current or (starter is not None and starter() is self._task):
            return True
        return in_groups and anyio.get_current_task().parent_id == id(self._task)

    async def end(self) -> None:
        """Cancel the work and wait for its end. Cancellations during the wait are raised after it."""
        if self._task is None:  # pragma: no cover  a signal handler raised before the task was created
            return
        self._scope.cancel()
        # A shield, because the scopes of the caller would deliver their cancellation again and again.
        with anyio.CancelScope(shield=True):
            await outlast({self._task})


_STARTED_BY: Final[WeakKeyDictionary[asyncio.Task[Any], ref[asyncio.Task[Any]]]] = WeakKeyDictionary()
"""The tasks of `Tasks`, with the task that has started each. That one is held weakly too: if it ended by an
exception, the frames of the traceback hold the tasks that it has started, and none of them would ever go."""


class Tasks:
    """A task group on asyncio for tasks that note their own failures.

    A task of anyio's own groups costs seven times as much. If the block ends by an exception, or is cancelled
    while it waits for the tasks, they are cancelled.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: set[asyncio.Task[object]] = set()
        self._owner: ref[asyncio.Task[Any]] | None = None

    async def __aenter__(self) -> Self:
        import asyncio  # noqa: PLC0415  loaded by now

        current = asyncio.current_task()
        self._owner = None if current is None else ref(current)
        return self

    def start_soon(self, function: Callable[..., Coroutine[Any, Any, object]], *args: Any) -> None:
        # One statement: if a signal handler raised in between, nobody would wait for the task.
        self._running.add(task := self._loop.create_task(function(*args), name="sampling_async"))
        if self._owner is not None:
            _STARTED_BY[task] = self._owner

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None:
            self._cancel()
        await outlast(self._running, on_cancel=self._cancel)
        for task in self._running:
            if not task.cancelled():
                task.exception()  # marks it as seen, or asyncio logs it
        self._running.clear()

    def _cancel(self) -> None:
        for task in self._running:
            task.cancel()


async def outlast(tasks: Collection[asyncio.Task[Any]], on_cancel: Callable[[], object] = lambda: None) -> None:
    """Wait until tasks have ended, however often this is cancelled; then raise the cancellation."""
    import asyncio  # noqa: PLC0415  loaded by now

    cancelled: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as exc:
            if cancelled is None:
                on_cancel()
            cancelled = exc
    if cancelled is not None:
        try:
            raise cancelled
        finally:
            del cancelled


class _Nursery:
    """Runs the work on trio, in a task group that is open in the task of the block."""

    def __init__(self, called: str) -> None:
        self._called = called
        self._scope = anyio.CancelScope()
        self._tasks: TaskGroup = anyio.create_task_group()
        self._entered_by = anyio.get_current_task().id

    async def start(self, background: Background) -> None:
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run, background)

    async def _run(self, background: Background) -> None:
        with self._scope:
            await background.run()

    async def end(self) -> None:
        self._scope.cancel()
        if anyio.get_current_task().id != self._entered_by:
            warnings.warn(
                f"a {self._called} of sampling_async was entered in one task and left in another. An async "
                "generator that is not read to its end does this (PEP 789). Read it where it is entered, "
                "or close the generator with contextlib.aclosing",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        # The task group does not get the exception of the block, or it would raise it inside an ExceptionGroup.
        try:
            await self._tasks.__aexit__(None, None, None)
        except BaseExceptionGroup as group:  # of SystemExit and the like; failures are kept for the consumer
            raise _first_of(group) from None


def _first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class BackgroundService(Background):
    """A background whose results are its state. A failure of the work is raised when the block is left.

    A service leaves the block only when it ends, so the failure is logged too, at once. A cancellation is no
    failure: mostly it is that of the block.
    """

    _works_in_groups = True

    def __init__(self) -> None:
        super().__init__()
        self._is_leaving = False
        self._is_logged = False

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Work that is still running, or was when the block was left before, is ended by that: no failure.
        had_ended, self._is_leaving = self._finished and not self._is_leaving, True
        await super().__aexit__(exc_type, exc, traceback)
        if had_ended and exc_type is None:
            self._end()

    def is_over(self) -> None:
        super().is_over()
        if self._broken_by is not None and not self._is_logged:
            self._is_logged = True
            if self._was_cancelled:
                _LOG.info("the %s was cancelled", self._called)
                return
            # Its text may hold what a log must not.
            name = type(self._broken_by).__name__
            _LOG.error("the %s was ended by %s, which is raised when its block is left", self._called, name)

    @property
    def _has_more(self) -> bool:
        return False

    @property
    def _broken_by(self) -> Exception | None:
        return None if self._is_leaving else self._failure

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a state of the work, or raise a RuntimeError if the work has ended."""
        if self._runner is None:
            self._must_be_inside()
        while not is_so():
            if self._finished:
                raise self._ended()
            await self._progress.wait()

    def _ended(self) -> RuntimeError:
        failure = self._broken_by
        if failure is None:
            return RuntimeError(f"the {self._called} has ended")
        error = RuntimeError(f"the {self._called} was ended by {type(failure).__name__}: {failure}")
        error.__cause__ = failure
        return error


Item = TypeVar("Item")


class ReadAhead(Background, Generic[Item]):
    """An async generator that runs in a separate task, one item ahead of its consumer."""

    def __init__(self, items: AsyncGenerator[Item, None]) -> None:
        super().__init__()
        self._items = items
        self._ready: deque[Item] = deque()  # holds one item at most
        self._taken = Notifier()  # the consumer took that item

    @property
    def _has_more(self) -> bool:
        return bool(self._ready)

    async def next(self) -> Item | None:
        """Return the next item, or None at the end. No item is lost if this is cancelled."""
        self._must_be_inside()
        while not self._ready:
            if self._finished:
                self._end()
                return None
            await self._progress.wait()
        # Notify before the item is taken: a signal handler may raise in between, and the item must not be lost.
        self._taken.notify()
        return self._ready.popleft()

    async def _work(self) -> None:
        try:
            async with aclosing(self._items) as items:
                async for item in items:
                    self._ready.append(item)
                    self._progress.notify()
                    while self._ready:
                        await self._taken.wait()
        except BaseException as exc:  # noqa: BLE001  raised by _end
            self._keep(exc)
