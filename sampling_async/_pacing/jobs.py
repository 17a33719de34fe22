"""Run jobs concurrently, each under a permit. Depends on anyio and knows nothing of surveys.

A `JobStream` draws jobs from a source, runs them in tasks and returns them when they are done. It holds at most
`window` jobs that were drawn and not yet returned.

The work may be cut off at any moment: a task may be cancelled before its first step, and a signal handler may
raise between any two lines. So each job has an owner after every line, and no later line is needed to keep it
from being lost. A job stays in `open` from the moment when it is drawn until its consumer releases it, and the
job itself records its progress.
"""

from __future__ import annotations

from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel

from sampling_async._pacing.background import Background, Tasks
from sampling_async._pacing.loops import Notifier, OneShotEvent, asyncio_loop, round_here

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from anyio.abc import TaskGroup

    from sampling_async._pacing.gate import Permit

Job = TypeVar("Job")
Job_co = TypeVar("Job_co", covariant=True)

# Jobs that `several` returns at once. With more of them, the garbage collector would visit many new objects.
_BATCH: Final = 32


class JobSource(Protocol[Job_co]):
    """The source of the jobs of a `JobStream`."""

    async def draw(self) -> Job_co | None:
        """Return the next job, or None after the last. The source owns it until `handed_over`."""

    def draw_now(self) -> Job_co | None:
        """Draw the next job if that takes no wait; otherwise return None, and `draw` gets it."""

    def handed_over(self) -> None:
        """Record that the job drawn last has another owner now."""

    async def aclose(self) -> None:
        """Close the input."""


class JobStream(Background, Generic[Job]):
    """A stream of jobs that run concurrently under permits, returned as they are done.

    Enter it with `async with JobStream(...) as stream`, then call `await stream.next()` until it returns None.
    Leaving the block cancels the running jobs and waits for their end. After that, `open` holds the jobs that
    were drawn and not released, done or not.

    If `run` or the source raises an exception, no more jobs are drawn. The running jobs finish and are
    returned, then `next` raises the exception itself, without an ExceptionGroup around it.

    Args:
        permit: Makes a permit. It is acquired before a task gets the job.
        source: The source of the jobs. A separate task draws from it and closes it at the end.
        run: Runs one job, and notes the result in the job. It may release the permit, which is otherwise used
            for the next job or released after it. The permit is not held if its deadline passed first. `run`
            must give the event loop a turn, because its task may start the next job without one. If the result
            must be confirmed first, `run` returns a function that is called after that.
        window: The number of jobs that may be drawn and not yet returned. It bounds the memory.
        needs_permit: Returns whether a job must wait for its permit.
        confirm: Waits until the results of all jobs that have ended may be returned.

    Attributes:
        open: The drawn jobs and their permits, in the order of drawing, until `release`.
    """

    def __init__(
        self,
        permit: Callable[[], Permit],
        source: JobSource[Job],
        run: Callable[[Job, Permit], Awaitable[Callable[[], object] | None]],
        *,
        window: int,
        needs_permit: Callable[[Job], bool] = lambda _: True,
        confirm: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        super().__init__()
        self.open: dict[Job, Permit] = {}
        self._permit = permit
        self._source = source
        self._run = run
        self._needs_permit = needs_permit
        self._confirm = confirm
        self._unconfirmed: list[tuple[Job, Callable[[], object]]] = []
        self._is_confirming = False
        self._running: TaskGroup | Tasks
        self._waiting: Permit | None = None  # what the task that draws waits for
        self._done: deque[Job] = deque()
        self._idle: list[_Idle[Job]] = []
        self._parked: Job | None = None  # drawn, and waiting for a permit
        self._drawing: anyio.CancelScope | None = None
        self._drawn = False  # whether no more jobs will be drawn
        self._window = window  # the places that are free
        self._in_batches = False
        self._next_round: Callable[[], Awaitable[object]] = anyio.lowlevel.checkpoint
        self._room = Notifier()  # a place in the window is free

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(exc_type, exc, traceback)
        finally:
            # A job that no task has begun may still hold its permit. For all others, `release` has no effect.
            for permit in self.open.values():
                permit.release()
            if self._waiting is not None:  # a signal handler may have raised while `_go_on` gave it another job
                self._waiting.release()

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
            await self._progress.wait()
        return self.next_now()

    def next_now(self) -> Job | None:
        """Return a job that is done, or None if there is none now. It stays in `open` until `release`."""
        if not self._done:
            return None
        job = self._done.popleft()
        self._leave_window()
        return job

    def release(self, job: Job) -> None:
        """Forget a job, because its consumer no longer needs it."""
        self.open.pop(job, None)

    async def several(self) -> list[Job]:
        """Return up to 32 jobs that are done, or none after the last.

        This is for a consumer that keeps all results: the window no longer bounds the memory. The consumer
        wakes up once for 32 jobs, which costs less than `next`. The jobs stay in `open` until `release`.
        """
        self._must_be_inside()
        if not self._in_batches:
            self._in_batches = True
            # From now on a job leaves the window when it is done. These jobs were done before.
            for _ in self._done:
                self._leave_window()
        while len(self._done) < _BATCH and not self._finished:
            await self._progress.wait()
        jobs = [self._done.popleft() for _ in range(min(_BATCH, len(self._done)))]
        if not jobs:
            self._end()
        return jobs

    async def _work(self) -> None:
        """Draw jobs and run them in tasks; return when all tasks have ended."""
        loop = asyncio_loop()
        self._next_round = round_here()
        async with anyio.create_task_group() if loop is None else Tasks(loop) as running:
            self._running = running
            try:
                with anyio.CancelScope() as self._drawing:
                    try:
                        await self._hand_out(running)
                    except BaseException as exc:  # noqa: BLE001  raised by _end
                        self._keep(exc)
            finally:
                # Set before the idle tasks wake up: they end if they get no job and `_drawn` is set.
                self._drawn = True
                for idle in self._idle:
                    idle.woken.set()

    async def _hand_out(self, running: TaskGroup | Tasks) -> None:
        """Draw one job after the other, and give each to a task."""
        # Trio starts the new tasks of one moment in random order. A checkpoint after each one keeps the order.
        shuffled = not isinstance(running, Tasks)
        async with aclosing(self._source) as source:
            while (job := await self._draw(source)) is not None:
                # Stored first, then released by the source: in between both own the job, and it cannot be lost.
                self.open[job] = self._permit()
                source.handed_over()
                if self._needs_permit(job) and (job := await self._permitted(job)) is None:
                    continue
                self._set_to_work(job, running)
                if shuffled:
                    await anyio.lowlevel.checkpoint()

    async def _permitted(self, job: Job) -> Job | None:
        """Wait for a permit and return the job for it: a later one if a task took this one, or None."""
        permit = self._waiting = self.open[job]
        try:
            self._parked = job
            await permit.acquire()
            return self._parked
        finally:
            if self._parked is None:  # it may have been granted after a failure, and is of no use
                permit.release()
            self._parked = None

    def _go_on(self, permit: Permit) -> Job | None:
        """Return the job that waits for a permit, if this permit can be used for it; otherwise release it.

        The next job of the source takes its place. So while a stream has its permits, its tasks go from job to
        job, and the task that draws sleeps. To wake that one costs more than all other steps between two jobs.
        """
        job = self._parked
        if job is None or not permit.renew():
            permit.release()
            return None
        waiting, self.open[job] = self.open[job], permit
        following = self._drawn_now()
        self._parked = following
        if following is not None:
            self.open[following] = waiting
            self._source.handed_over()
            self._window -= 1
        if following is None or not self._needs_permit(following):
            waiting.withdraw()  # wakes the task that draws
        return job

    def _drawn_now(self) -> Job | None:
        try:
            return self._source.draw_now() if self._window else None
        except BaseException as exc:  # noqa: BLE001  raised by _end
            self._fail(exc)
            return None

    async def _draw(self, source: JobSource[Job]) -> Job | None:
        while self._window == 0:
            await self._room.wait()
        job = await source.draw()
        self._window -= 1
        return job

    def _set_to_work(self, job: Job, running: TaskGroup | Tasks) -> None:
        if self._idle:  # waking a task costs less than starting a new one
            # Removed from the list last: a signal handler may raise between these lines, and a task that is
            # neither in the list nor woken would never end.
            idle = self._idle[-1]
            idle.job = job
            idle.woken.set()
            self._idle.pop()
        else:
            running.start_soon(self._run_jobs, job)

    async def _run_jobs(self, job: Job) -> None:
        """Run a job, then each further job that this task gets, until there are no more."""
        permit = self.open[job]
        try:
            while True:
                try:
                    settle = await self._run(job, permit)
                except BaseException as exc:  # noqa: BLE001  raised by _end
                    self._fail(exc)
                else:
                    if settle is None:
                        self._is_done(job)
                    else:
                        self._confirm_soon(job, settle)
                following = self._go_on(permit)
                if following is not None:
                    # So all tasks that have a response handle it first, and then all send their next requests
                    # at once. Requests that follow each other closely cost less on both sides: a service that
                    # has nothing to do goes to sleep, and waking it takes time from the one that sends.
                    await self._next_round()
                elif not self._drawn:
                    following = await self._wait_for_job()
                if following is None:
                    return
                job, permit = following, self.open[following]
        except BaseException as exc:  # noqa: BLE001  raised by _end
            permit.release()
            self._fail(exc)

    def _confirm_soon(self, job: Job, settle: Callable[[], object]) -> None:
        self._unconfirmed.append((job, settle))
        if not self._is_confirming:
            self._running.start_soon(self._confirm_all)
            self._is_confirming = True

    async def _confirm_all(self) -> None:
        """Confirm jobs that have ended, as many at a time as there are, while their tasks run others."""
        assert self._confirm is not None
        try:
            while self._unconfirmed:
                some, self._unconfirmed = self._unconfirmed, []
                is_confirmed = True
                try:
                    await self._confirm()
                except Exception as exc:  # noqa: BLE001  raised by _end
                    is_confirmed = False
                    self._fail(exc)
                for job, settle in some:
                    settle()
                    if is_confirmed:
                        self._is_done(job)
        except BaseException as exc:  # noqa: BLE001  raised by _end
            self._fail(exc)
        finally:
            self._is_confirming = False

    def _is_done(self, job: Job) -> None:
        self._done.append(job)
        if self._in_batches:
            self._leave_window()
        if not self._in_batches or len(self._done) >= _BATCH:
            self._progress.notify()

    async def _wait_for_job(self) -> Job | None:
        idle: _Idle[Job] = _Idle()
        self._idle.append(idle)
        try:
            await idle.woken.wait()
        finally:
            if idle in self._idle:  # the task was cancelled while it waited
                self._idle.remove(idle)
        return idle.job

    def _leave_window(self) -> None:
        self._window += 1
        self._room.notify()

    def _fail(self, exc: BaseException) -> None:
        """Keep a failure for the consumer, and draw no more jobs."""
        assert self._drawing is not None
        self._drawing.cancel()
        self._parked = None
        self._keep(exc)


class _Idle(Generic[Job]):
    """A task that waits for its next job."""

    __slots__ = ("job", "woken")

    def __init__(self) -> None:
        self.woken = OneShotEvent()
        self.job: Job | None = None
