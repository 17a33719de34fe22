"""Running many jobs under one limit: bounded, fair, without surprises. Knows anyio and nothing of surveys.

A `Gate` is the limit of a whole client. A `Permit` is leave for one attempt under it, taken before the work
is spawned and given back when the attempt ends. A `JobStream` draws jobs, runs each in a task and hands the
results over as they finish; it holds at most `window` jobs that were drawn and whose result was not taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import anyio

from sampling_async._cancellation import is_stray

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
    from types import TracebackType

    from anyio.abc import TaskGroup

Job = TypeVar("Job")
Result = TypeVar("Result")


class Gate:
    """A fair limit on what runs at once, adjustable at any time, that can be held shut for a while.

    Waiters are served first come, first served. Each call of a client waits with one waiter at most, so a
    large fan-out takes turns with the others and does not stand in front of them with its whole length.
    """

    def __init__(
        self, limit: int, *, clock: Callable[[], float], sleep: Callable[[float], Awaitable[object]]
    ) -> None:
        self._limiter = anyio.CapacityLimiter(limit)
        self._clock = clock
        self._sleep = sleep
        self._held_until = float("-inf")
        self._held_back: set[anyio.CancelScope] = set()

    @property
    def limit(self) -> int:
        """How many permits there are. Lowering it takes effect as running attempts end."""
        return int(self._limiter.total_tokens)

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limiter.total_tokens = limit

    @property
    def running(self) -> int:
        """How many permits are out."""
        return int(self._limiter.borrowed_tokens)

    @property
    def waiting(self) -> int:
        """How many wait for a permit."""
        return self._limiter.statistics().tasks_waiting

    def hold(self, seconds: float) -> None:
        """Give no new permits for so long; the longest hold counts."""
        self._held_until = max(self._held_until, self._clock() + seconds)

    def unhold(self) -> None:
        """End the hold now."""
        self._held_until = float("-inf")
        for scope in self._held_back:
            scope.cancel()

    async def acquire(self, permit: Permit) -> None:
        """Wait for a permit, and for the end of a hold; the permit is not kept meanwhile."""
        while True:
            await self._limiter.acquire_on_behalf_of(permit)
            wait = self._held_until - self._clock()
            if wait <= 0:
                return
            self._limiter.release_on_behalf_of(permit)
            with anyio.CancelScope() as scope:
                self._held_back.add(scope)
                try:
                    await self._sleep(wait)
                finally:
                    self._held_back.discard(scope)

    def release(self, permit: Permit) -> None:
        """Take a permit back."""
        self._limiter.release_on_behalf_of(permit)


class Permit:
    """Leave to have one attempt in flight: acquired for each attempt, never held through a backoff."""

    __slots__ = ("_gate", "_held")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._held = False

    async def acquire(self) -> None:
        """Wait for leave; returns at once if it is held already."""
        if not self._held:
            await self._gate.acquire(self)
            self._held = True

    def release(self) -> None:
        """Give leave back, if it is held."""
        if self._held:
            self._held = False
            self._gate.release(self)


class _Background(ABC):
    """A task group for the time of a block: entered once, and no ExceptionGroup leaves it."""

    def __init__(self) -> None:
        self._tasks: TaskGroup | None = None
        self._failure: Exception | None = None
        self._finished = False
        self._news = anyio.Event()
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
        if self.left and not self._finished:
            raise RuntimeError("the stream's block has been left before its end")

    def _tell(self) -> None:
        """Wake the consumer: there is a result, or the end."""
        self._news.set()
        self._news = anyio.Event()

    @contextmanager
    def _failures_kept(self) -> Generator[None]:
        """Keep what fails in a block for the consumer, who is told after the results; the first one counts."""
        try:
            yield
        except Exception as exc:  # noqa: BLE001  raised by _end
            self._failure = self._failure or exc
        except BaseException as exc:
            if not is_stray(exc):
                raise
            stray = RuntimeError("something awaited was cancelled, and not by who runs the stream")
            stray.__cause__ = exc
            self._failure = self._failure or stray

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
        gate: The limit; a permit is acquired before a job's task is spawned.
        jobs: Where jobs are drawn from, one at a time, in a task of its own, which closes it at the end.
        run: Runs one job. It owns the permit, which is given back at the latest when it returns.
        window: How many jobs may be drawn without their result taken: the bound of the memory used.
    """

    def __init__(
        self,
        gate: Gate,
        jobs: AsyncGenerator[Job, None],
        run: Callable[[Job, Permit], Awaitable[Result]],
        *,
        window: int,
    ) -> None:
        super().__init__()
        self.unstarted: list[Job] = []
        self.untaken: deque[Result] = deque()
        self._gate = gate
        self._jobs = jobs
        self._run = run
        self._window = anyio.Semaphore(window)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Result:
        self._must_be_inside()
        while not self.untaken:
            if self._finished:
                self._end()
                raise StopAsyncIteration
            await self._news.wait()
        result = self.untaken.popleft()
        self._window.release()
        return result

    async def _work(self) -> None:
        """Spawn a task for each job; returns when all of them have ended."""
        async with anyio.create_task_group() as running:
            with self._failures_kept(), anyio.CancelScope() as drawing:
                async with aclosing(self._jobs) as jobs:
                    async for job in jobs:
                        self.unstarted.append(job)
                        await self._window.acquire()
                        permit = Permit(self._gate)
                        await permit.acquire()
                        self.unstarted.pop()
                        running.start_soon(self._run_one, job, permit, drawing)
        self._finished = True
        self._tell()

    async def _run_one(self, job: Job, permit: Permit, drawing: anyio.CancelScope) -> None:
        try:
            with self._failures_kept():
                self.untaken.append(await self._run(job, permit))
        finally:
            permit.release()
        if self._failure is not None:
            drawing.cancel()
        self._tell()


class ReadAhead(_Background, Generic[Result]):
    """Runs an async generator in a task of its own, one item ahead of who takes the items.

    An exception of the generator is raised in its turn, bare.
    """

    def __init__(self, items: AsyncGenerator[Result, None]) -> None:
        super().__init__()
        self._items = items
        self._ready: deque[Result] = deque()  # one at most
        self._taken = anyio.Event()

    async def next(self) -> Result | None:
        """Return the next item, or None after the last. Cancelled while it waits, it loses nothing."""
        self._must_be_inside()
        while not self._ready:
            if self._finished:
                self._end()
                return None
            await self._news.wait()
        self._taken.set()
        return self._ready.popleft()

    async def _work(self) -> None:
        with self._failures_kept():
            async with aclosing(self._items) as items:
                async for item in items:
                    self._taken = anyio.Event()
                    self._ready.append(item)
                    self._tell()
                    await self._taken.wait()
        self._finished = True
        self._tell()
