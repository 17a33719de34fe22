"""Running many jobs, each with leave of the gate, without surprises. Knows anyio and nothing of surveys.

A `JobStream` draws jobs, runs them in tasks and hands the results over as they finish; it holds at most
`window` jobs that were drawn and whose result was not taken. `ReadAhead` runs a generator one item ahead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import anyio
import anyio.lowlevel

from sampling_async._cancellation import is_stray
from sampling_async._loops import asyncio_loop, event

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
    from types import TracebackType

    from anyio.abc import TaskGroup

    from sampling_async._gate import Permit

Job = TypeVar("Job")
Result = TypeVar("Result")


class _Background(ABC):
    """A task group for the time of a block: entered once, and no ExceptionGroup leaves it."""

    def __init__(self) -> None:
        self._tasks: TaskGroup | None = None
        self._failure: Exception | None = None
        self._finished = False
        self._news: anyio.Event | None = None  # made only by who has to wait
        self.left = False

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise RuntimeError("a stream is entered once; make another one")
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._work)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The group is not shown the exception of the block: it would come back inside an ExceptionGroup.
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        except BaseExceptionGroup as group:  # SystemExit and its like: what tasks raise else is in _failure
            raise _first_of(group) from None
        finally:
            self.left = True

    @abstractmethod
    async def _work(self) -> None:
        """Do what the block is for, in a task of its own."""

    def _must_be_inside(self) -> None:
        """Refuse what would wait for ever: there is nothing at work outside of the block."""
        if self._tasks is None:
            raise RuntimeError("enter the stream first: async with ... as stream")
        if self.left and (self._has_more or not self._finished):
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
            self._news.set()
            self._news = None

    def _keep(self, exc: BaseException) -> None:
        """Keep what failed for the consumer, who is told after the results; the first one counts.

        What is not a failure, a cancellation that is meant for this task, is raised again.
        """
        if isinstance(exc, Exception):
            self._failure = self._failure or exc
        elif is_stray(exc):
            stray = RuntimeError("something awaited was cancelled, and not by who runs the stream")
            stray.__cause__ = exc
            self._failure = self._failure or stray
        else:
            raise exc

    def _end(self) -> None:
        """Raise what failed, once, after the last result was handed over."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def _first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class JobStream(_Background, Generic[Job, Result]):
    """Runs jobs as the gate allows and yields their results as they finish.

    Use it as `async with JobStream(...) as stream: async for result in stream`. Leaving the block cancels
    what runs and waits for its end. What then was drawn but has no result taken is in `unstarted` (jobs) and
    `untaken` (results); a job cancelled in mid-run is its own `run`'s to account for.

    An exception of `run`, or of the source of the jobs, stops the drawing; what runs is finished and handed
    over, then the iteration raises it, bare.

    Args:
        permit: Makes a permit; it is acquired before a job's task is spawned.
        batches: Where jobs are drawn from, in a task of its own, which closes it at the end: iterators of some
            jobs each, that give them without waiting. A task that has ended its job draws from the latest one
            too, rather than wait to be given a job.
        run: Runs one job. It owns the permit, which is given back at the latest when it returns, and which is
            not held where it did not come in time. It must give the event loop a turn: the next job may follow
            without one.
        window: How many jobs may be drawn without their result taken: the bound of the memory used.
    """

    def __init__(
        self,
        permit: Callable[[], Permit],
        batches: AsyncGenerator[Iterator[Job], None],
        run: Callable[[Job, Permit], Awaitable[Result]],
        *,
        window: int,
    ) -> None:
        super().__init__()
        self.unstarted: list[Job] = []
        self.untaken: deque[Result] = deque()
        self._permit = permit
        self._batches = batches
        self._batch: Iterator[Job] = iter(())
        self._run = run
        self._resting: list[_Rest[Job]] = []
        self._next: tuple[Job, Permit] | None = None  # drawn, and waiting for leave
        self._drawing: anyio.CancelScope | None = None
        self._drawn = False
        self._window = window
        self._is_awaited_whole = False
        self._room: anyio.Event | None = None  # made only where the window is full

    @property
    def _has_more(self) -> bool:
        return bool(self.untaken)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Result:
        self._must_be_inside()
        while not self.untaken:
            if self._finished:
                self._end()
                raise StopAsyncIteration
            await self._hear()
        self._leave_window()
        return self.untaken.popleft()

    async def remaining(self) -> deque[Result]:
        """Return all results not taken yet, once the last one is there: for who keeps them all anyway."""
        self._must_be_inside()
        self._is_awaited_whole = True
        for _ in self.untaken:
            self._leave_window()
        while not self._finished:
            await self._hear()
        results, self.untaken = self.untaken, deque()
        self._end()
        return results

    async def _work(self) -> None:
        """Hand jobs to tasks; returns when all of them have ended."""
        async with anyio.create_task_group() as running:
            with anyio.CancelScope() as self._drawing:
                try:
                    await self._hand_out(running)
                except BaseException as exc:  # noqa: BLE001  raised by _end
                    self._keep(exc)
            self._drawn = True
            while self._resting:
                self._resting.pop().give(None)
        self._finished = True
        self._tell()

    async def _hand_out(self, running: TaskGroup) -> None:
        """Draw job after job, and hand each to a task."""
        shuffled = asyncio_loop() is None  # trio starts tasks of the same moment in any order
        async with aclosing(self._batches) as batches:
            async for self._batch in batches:
                for job in self._batch:
                    given = await self._leave_for(job)
                    if given is None:
                        continue
                    if self._resting:  # waking a task costs less than a new one
                        self._resting.pop().give(given)
                    else:
                        running.start_soon(self._run_jobs, *given)
                    if shuffled:
                        await anyio.lowlevel.checkpoint()

    async def _leave_for(self, job: Job) -> tuple[Job, Permit] | None:
        """Wait for leave to run a job, and return both; None if a task that had just ended took them."""
        self.unstarted.append(job)
        while self._window == 0:
            self._room = self._room or event()
            await self._room.wait()
        self._window -= 1
        self._next = job, self._permit()
        await self._next[1].acquire()
        return self._take_next()

    def _take_next(self) -> tuple[Job, Permit] | None:
        given, self._next = self._next, None
        if given is not None:
            self.unstarted.pop()
        return given

    def _leave_window(self) -> None:
        self._window += 1
        if self._room is not None:
            self._room.set()
            self._room = None

    async def _run_jobs(self, job: Job, permit: Permit) -> None:
        """Run a job, and others as they come, until there are no more."""
        given: tuple[Job, Permit] | None = (job, permit)
        while given is not None:
            await self._run_one(*given)
            given = self._draw()
            if given is None and not self._drawn:
                given = await self._rest()

    def _draw(self) -> tuple[Job, Permit] | None:
        """Return another job that may run now, if there is one at hand: no other task need wake for that."""
        if self._failure is not None:
            return None
        if self._next is not None and self._next[1].take():
            return self._take_next()
        permit = self._permit()
        if self.unstarted or self._window == 0 or not permit.acquire_now():
            return None  # what was drawn before goes first
        try:
            for job in self._batch:
                self._window -= 1
                return job, permit
        except BaseException as exc:  # noqa: BLE001  raised by _end
            permit.release()
            self._fail(exc)
        else:
            permit.release()
        return None

    def _fail(self, exc: BaseException) -> None:
        """Draw no more because of a failure."""
        self._keep(exc)
        assert self._drawing is not None
        self._drawing.cancel()

    async def _rest(self) -> tuple[Job, Permit] | None:
        """Wait for a job."""
        rest: _Rest[Job] = _Rest()
        self._resting.append(rest)
        try:
            return await rest.wait()
        except BaseException:
            if rest in self._resting:
                self._resting.remove(rest)
            if rest.given is not None:  # in the same moment
                self.unstarted.insert(0, rest.given[0])  # the last one is the drawer's
                rest.given[1].release()
            raise

    async def _run_one(self, job: Job, permit: Permit) -> None:
        try:
            self.untaken.append(await self._run(job, permit))
        except BaseException as exc:  # noqa: BLE001  raised by _end
            self._fail(exc)
        finally:
            permit.release()
        if self._is_awaited_whole:
            self._leave_window()
        else:
            self._tell()


class _Rest(Generic[Job]):
    """Where a task waits for its next job."""

    __slots__ = ("_came", "given")

    def __init__(self) -> None:
        self._came = event()
        self.given: tuple[Job, Permit] | None = None

    def give(self, given: tuple[Job, Permit] | None) -> None:
        """Give it a job, or None: there are no more."""
        self.given = given
        self._came.set()

    async def wait(self) -> tuple[Job, Permit] | None:
        """Wait for what is given."""
        await self._came.wait()
        return self.given


class ReadAhead(_Background, Generic[Result]):
    """Runs an async generator in a task of its own, one item ahead of who takes the items.

    An exception of the generator is raised in its turn, bare.
    """

    def __init__(self, items: AsyncGenerator[Result, None]) -> None:
        super().__init__()
        self._items = items
        self._ready: deque[Result] = deque()  # one at most
        self._taken: anyio.Event | None = None  # of the item that is ready

    @property
    def _has_more(self) -> bool:
        return bool(self._ready)

    async def next(self) -> Result | None:
        """Return the next item, or None after the last. Cancelled while it waits, it loses nothing."""
        self._must_be_inside()
        while not self._ready:
            if self._finished:
                self._end()
                return None
            await self._hear()
        assert self._taken is not None
        self._taken.set()
        return self._ready.popleft()

    async def _work(self) -> None:
        try:
            async with aclosing(self._items) as items:
                async for item in items:
                    self._taken = event()
                    self._ready.append(item)
                    self._tell()
                    await self._taken.wait()
        except BaseException as exc:  # noqa: BLE001  raised by _end
            self._keep(exc)
        self._finished = True
        self._tell()
