"""Work in the background for the time of a block. Knows anyio and nothing of surveys.

On asyncio the work is a task of its own, and no cancel scope is open in the task of the block. So it does no
harm that Python may leave the block in another task than the one that entered it, as it does with one inside
an async generator that nobody reads to its end (PEP 789). On trio there are no such tasks: the scope is open,
and a block that is left elsewhere is told of.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

import anyio

from sampling_async._cancellation import is_stray
from sampling_async._loops import asyncio_loop, event

if TYPE_CHECKING:
    import asyncio
    from types import TracebackType

    from anyio.abc import TaskGroup


class Background(ABC):
    """An async context manager with work that goes on meanwhile: entered once, and no ExceptionGroup leaves it.

    What fails in the work is kept for who takes its results, and raised after the last one.

    Attributes:
        left: Whether the block has been left.
        has_ended_the_loop: Whether what ended the work came from a task that it had begun. SystemExit and
            KeyboardInterrupt asyncio has let out of the event loop then, whoever waits for the task.
    """

    def __init__(self) -> None:
        self.left = False
        self.has_ended_the_loop = False
        self._is_of_the_work_itself = False  # what ends it, and not of a task that it has begun
        self._runner: _Task | _Nursery | None = None
        self._failure: Exception | None = None
        self._finished = False  # there is no more to come, for whatever reason
        self._came_to_its_end = False
        self._news: anyio.Event | None = None  # made only by who has to wait

    async def __aenter__(self) -> Self:
        if self._runner is not None:
            raise RuntimeError("a stream is entered once; make another one")
        self._runner = _Nursery(self) if asyncio_loop() is None else _Task(self)
        try:
            await self._runner.start()
        except BaseException:  # of a signal handler
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._runner is not None:  # else it was not begun
                await self._runner.end()
        finally:
            self.left = True

    @abstractmethod
    async def _work(self) -> None:
        """Do what the block is for, in a task of its own."""

    async def run(self) -> None:
        """Do the work, and say at its end that there is no more to come, whatever ended it."""
        try:
            await self._work()
        except BaseException as exc:  # noqa: BLE001  kept, or raised again
            self.has_ended_the_loop = isinstance(exc, BaseExceptionGroup) and not self._is_of_the_work_itself
            self._keep(_first_of(exc))
        finally:
            self.is_over()
        self._came_to_its_end = True

    def is_over(self, failure: BaseException | None = None) -> None:
        """Learn that there is no more to come, and perhaps why; may be called again."""
        if isinstance(failure, Exception):
            self._failure = self._failure or failure
        self._finished = True
        self._tell()

    def _must_be_inside(self) -> None:
        """Refuse what would wait for ever: there is nothing at work outside of the block."""
        if self._runner is None:
            raise RuntimeError("enter the stream first: async with ... as stream")
        if self.left and (self._has_more or not self._came_to_its_end):
            raise RuntimeError("the stream's block has been left before its end")

    @property
    @abstractmethod
    def _has_more(self) -> bool:
        """Whether there are results that nobody took."""

    async def _hear(self) -> None:
        """Wait for a result, or the end."""
        self._news = self._news or event()
        await self._news.wait()

    def _tell(self) -> None:
        """Wake the consumer: there is a result, or the end."""
        if self._news is not None:
            self._news.set()  # first: forgotten before, who waits for it would wait for ever
            self._news = None

    def _keep(self, exc: BaseException) -> None:
        """Keep what failed for the consumer, who is told after the results; the first one counts.

        What is not a failure, such as a cancellation that is meant for this task, is raised again. It ends the
        work before its time, which who waits for results must know.
        """
        if isinstance(exc, Exception):
            self._failure = self._failure or exc
            return
        if is_stray(exc):
            stray = RuntimeError("something awaited was cancelled, and not by who runs the stream")
            self._failure = self._failure or stray
            return
        self._failure = self._failure or RuntimeError(f"the stream was ended by {type(exc).__name__}")
        raise exc

    def _end(self) -> None:
        """Raise what failed, once, after the last result was handed over."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class _Task:
    """Runs the work on asyncio."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._scope = anyio.CancelScope()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        loop = asyncio_loop()
        assert loop is not None
        self._task = loop.create_task(self._run(), name="sampling_async")
        self._task.add_done_callback(self._over)  # should a signal handler raise before the work begins

    def _over(self, task: asyncio.Task[None]) -> None:
        self._background.is_over(None if task.cancelled() else task.exception())

    async def _run(self) -> None:
        with self._scope:
            try:
                await self._background.run()
            except (SystemExit, KeyboardInterrupt):
                # Once more, and what cancels all tasks after the first time would be cut off by it.
                if not self._background.has_ended_the_loop:
                    raise

    async def end(self) -> None:
        """Cancel the work and wait for its end, also while this is cancelled again and again."""
        import asyncio  # noqa: PLC0415  loaded by now

        if self._task is None:  # a signal handler raised before it began
            return
        self._scope.cancel()
        cancelled: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while not self._task.done():
                try:
                    await asyncio.wait([self._task])
                except asyncio.CancelledError as exc:
                    cancelled = exc
        if not self._task.cancelled():
            self._task.exception()  # SystemExit and its like, which asyncio lets out of the event loop itself
        if cancelled is not None:
            raise cancelled


class _Nursery:
    """Runs the work on trio."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._scope = anyio.CancelScope()
        self._tasks: TaskGroup = anyio.create_task_group()
        self._entered_by = anyio.get_current_task().id

    async def start(self) -> None:
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run)

    async def _run(self) -> None:
        with self._scope:
            await self._background.run()

    async def end(self) -> None:
        """Cancel the work and wait for its end."""
        self._scope.cancel()
        if anyio.get_current_task().id != self._entered_by:
            warnings.warn(
                "a stream of sampling_async was entered in one task and left in another: do not leave it open "
                "in an async generator that may not be read to its end (PEP 789); read it where it is entered, "
                "or close the generator with contextlib.aclosing",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        # The group is not shown the exception of the block: it would come back inside an ExceptionGroup.
        try:
            await self._tasks.__aexit__(None, None, None)
        except BaseExceptionGroup as group:  # SystemExit and its like
            raise _first_of(group) from None


def _first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
