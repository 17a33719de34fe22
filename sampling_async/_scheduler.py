"""Run jobs concurrently, each under a permit. Knows anyio and nothing of surveys.

A `JobStream` draws jobs, runs them in tasks and hands them over as they are done; it holds at most `window`
jobs that were drawn and not taken. `ReadAhead` runs a generator one item ahead.

Every moment may be the last one: tasks are cancelled before their first step, and a signal handler may raise
between any two lines. So who owns a job never depends on a line that is still to come. A job stays in `open`
from its being drawn until its consumer has done with it, and it knows itself how far it has come.
"""

from __future__ import annotations

from collections import deque
from contextlib import aclosing
from inspect import CORO_CREATED, getcoroutinestate
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel

from sampling_async._background import Background
from sampling_async._loops import asyncio_loop, event

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
    from types import TracebackType

    from anyio.abc import TaskGroup

    from sampling_async._gate import Permit

Job = TypeVar("Job")
Job_co = TypeVar("Job_co", covariant=True)
Item = TypeVar("Item")

_BATCH: Final = 256
"""Jobs that `several` returns: of more at once, the garbage collector would have much to look at."""


class Source(Protocol[Job_co]):
    """Where jobs come from."""

    async def draw(self) -> Job_co | None:
        """Return the next job, or None after the last. It is the source's until `handed_over`."""

    def handed_over(self) -> None:
        """Learn that the job drawn last has another owner."""

    async def aclose(self) -> None:
        """Close the input."""


class JobStream(Background, Generic[Job]):
    """Runs jobs as the gate permits and yields them as they are done.

    Use it as `async with JobStream(...) as stream: async for job in stream`. Leaving the block cancels what
    runs and waits for its end; jobs that were drawn and not released are then in `open`, done or not.

    An exception of `run`, or of the source of the jobs, stops the drawing; what runs is finished and handed
    over, then the iteration raises it, bare.

    Args:
        permit: Makes a permit; it is acquired before a job is given to a task.
        source: Where jobs are drawn from, in a task of its own, which closes it at the end.
        run: Runs one job, and notes in it what comes of it. It owns the permit, which is released at the latest
            when it returns, and which is not held where it did not come in time. It must give the event loop a
            turn: the next job may follow without one.
        window: How many jobs may be drawn and not taken: the bound of the memory used.
        needs_permit: Says of a job whether it is to wait for its permit.

    Attributes:
        open: Jobs that were drawn, with their permits, in that order, until `release`.
    """

    def __init__(
        self,
        permit: Callable[[], Permit],
        source: Source[Job],
        run: Callable[[Job, Permit], Awaitable[object]],
        *,
        window: int,
        needs_permit: Callable[[Job], bool] = lambda _: True,
    ) -> None:
        super().__init__()
        self.open: dict[Job, Permit] = {}
        self._permit = permit
        self._source = source
        self._run = run
        self._needs_permit = needs_permit
        self._done: deque[Job] = deque()
        self._idle: list[_Idle[Job]] = []
        self._coroutines: list[Coroutine[Any, Any, None]] = []  # of the tasks
        self._drawing: anyio.CancelScope | None = None
        self._drawn = False
        self._window = window
        self._in_batches = False
        self._room: anyio.Event | None = None  # made only where the window is full

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(exc_type, exc, traceback)
        finally:
            for permit in self.open.values():  # of jobs that no task has taken up
                permit.release()
            for coroutine in self._coroutines:
                if getcoroutinestate(coroutine) == CORO_CREATED:  # its task was cancelled before its first step
                    coroutine.close()

    @property
    def _has_more(self) -> bool:
        return bool(self._done)

    async def next(self) -> Job | None:
        """Return a job that is done, or None after the last. It stays in `open` until `release`."""
        self._must_be_inside()
        while not self._done:
            if self._finished:
                self._end()
                return None
            await self._hear()
        job = self._done.popleft()
        self._leave_window()
        return job

    def release(self, job: Job) -> None:
        """Forget a job that its consumer has done with."""
        self.open.pop(job, None)

    async def several(self) -> list[Job]:
        """Return jobs that are done, up to 256 of them, or none after the last, for who keeps them all anyway.

        The window bounds nothing then, and the consumer is woken once for so many, which costs less than
        `next`. They stay in `open` until `release`.
        """
        self._must_be_inside()
        if not self._in_batches:
            self._in_batches = True
            for _ in self._done:
                self._leave_window()
        while len(self._done) < _BATCH and not self._finished:
            await self._hear()
        jobs = [self._done.popleft() for _ in range(min(_BATCH, len(self._done)))]
        if not jobs:
            self._end()
        return jobs

    async def _work(self) -> None:
        """Hand jobs to tasks; returns when all of them have ended."""
        async with anyio.create_task_group() as running:
            with anyio.CancelScope() as self._drawing:
                try:
                    await self._hand_out(running)
                except BaseException as exc:  # noqa: BLE001  raised by _end
                    self._is_of_the_work_itself = isinstance(exc, SystemExit | KeyboardInterrupt)
                    self._keep(exc)
            self._drawn = True
            for idle in self._idle:
                idle.woken.set()

    async def _hand_out(self, running: TaskGroup) -> None:
        """Draw job after job, and let a task run each."""
        shuffled = asyncio_loop() is None  # trio starts tasks of the same moment in any order
        async with aclosing(self._source) as source:
            while (job := await self._draw(source)) is not None:
                permit = self.open[job] = self._permit()
                source.handed_over()
                if self._needs_permit(job):
                    await permit.acquire()
                self._set_to_work(job, running)
                if shuffled:
                    await anyio.lowlevel.checkpoint()

    async def _draw(self, source: Source[Job]) -> Job | None:
        while self._window == 0:
            self._room = self._room or event()
            await self._room.wait()
        job = await source.draw()
        self._window -= 1
        return job

    def _set_to_work(self, job: Job, running: TaskGroup) -> None:
        if self._idle:  # waking a task costs less than a new one
            idle = self._idle[-1]
            idle.job = job
            idle.woken.set()
            self._idle.pop()  # last: one that is not in the list and not woken would wait for ever
            return
        coroutine = self._run_jobs(job)
        self._coroutines.append(coroutine)
        running.start_soon(lambda: coroutine)

    async def _run_jobs(self, first: Job) -> None:
        """Run a job, and others as they are given, until there are no more."""
        job: Job | None = first
        while job is not None:
            await self._run_one(job, self.open[job])
            job = None if self._drawn else await self._wait_for_job()

    async def _wait_for_job(self) -> Job | None:
        idle: _Idle[Job] = _Idle()
        self._idle.append(idle)
        try:
            await idle.woken.wait()
        finally:
            if idle in self._idle:  # cancelled
                self._idle.remove(idle)
        return idle.job

    def _leave_window(self) -> None:
        self._window += 1
        if self._room is not None:
            self._room.set()
            self._room = None

    async def _run_one(self, job: Job, permit: Permit) -> None:
        try:
            await self._run(job, permit)
        except BaseException as exc:  # noqa: BLE001  raised by _end
            self._fail(exc)
        else:
            self._done.append(job)
        finally:
            permit.release()
        if self._in_batches:
            self._leave_window()
        if not self._in_batches or len(self._done) >= _BATCH:
            self._tell()

    def _fail(self, exc: BaseException) -> None:
        """Draw no more because of a failure."""
        assert self._drawing is not None
        self._drawing.cancel()
        self._keep(exc)


class _Idle(Generic[Job]):
    """A task that waits for a job."""

    __slots__ = ("job", "woken")

    def __init__(self) -> None:
        self.woken = event()
        self.job: Job | None = None


class ReadAhead(Background, Generic[Item]):
    """Runs an async generator in a task of its own, one item ahead of who takes the items.

    An exception of the generator is raised in its turn, bare.
    """

    def __init__(self, items: AsyncGenerator[Item, None]) -> None:
        super().__init__()
        self._items = items
        self._ready: deque[Item] = deque()  # one at most
        self._taken: anyio.Event | None = None  # of the item that is ready

    @property
    def _has_more(self) -> bool:
        return bool(self._ready)

    async def next(self) -> Item | None:
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
