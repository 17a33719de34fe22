"""The fan-out: chunks into parallel bulk invites, and one outcome for every ID."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Final, Self

from sampling_async._outcomes import BulkInviteResult
from sampling_async._scheduler import JobStream
from sampling_async._stepwise import Turns, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from sampling_async._chunks import ChunkSource
    from sampling_async._gate import Permit
    from sampling_async._invites import Inviter
    from sampling_async._job import Job
    from sampling_async._outcomes import Answer, InviteOutcome
    from sampling_async._protocol import InviteRequest

_UNREQUESTED_KEPT: Final = 10_000
_AT_ONCE: Final = 4096
"""Quota IDs of a result that are put in order in one go; of more, the event loop gets its turns."""


class OutcomeStream:
    """The outcomes of a fan-out, as they finish: an async context manager and, inside it, an async iterator.

    Memory is bounded by the client's `max_concurrency`, not by the input. Leaving the block early, or being
    cancelled in it, stops what runs; what then was taken from the input and not handed over is in `left_over`,
    so that outcomes seen plus `left_over` account for every quota ID taken.

    An exception of the input, or an ID in it that is none, ends the iteration after the outcomes of all chunks
    that were sent. Where several tasks read one stream, one of them is told.

    Attributes:
        unrequested: The latest answers, at most 10,000, under quota IDs that nobody asked for.
    """

    def __init__(
        self,
        inviter: Inviter,
        source: ChunkSource,
        permit: Callable[[], Permit],
        *,
        window: int,
    ) -> None:
        self.unrequested: deque[InviteOutcome] = deque(maxlen=_UNREQUESTED_KEPT)
        self._inviter = inviter
        self._source = source
        needs_permit = inviter.needs_permit
        self._jobs = JobStream(permit, source, inviter.ask, window=window, needs_permit=needs_permit)
        self._current: deque[tuple[Job, Iterator[InviteOutcome]]] = deque()  # several where several tasks read
        self._left_over: tuple[InviteOutcome, ...] | None = None
        self._entered = False
        self._turns = Turns()

    @property
    def left_over(self) -> tuple[InviteOutcome, ...]:
        """After the block: outcomes of everything taken from the input that was not handed over.

        What had finished is as it finished, what was in flight is `unknown` (`not_sent` if no byte had left),
        the rest is `not_sent`. With a journal, what it was not asked about yet is `unknown`: an earlier run may
        have sent it.
        """
        if not self._jobs.left:
            raise RuntimeError("left_over is known when the block has been left")
        if self._left_over is None:
            jobs = dict.fromkeys(chain(self._jobs.open, self._source.left()))  # in between, one may be in both
            self._left_over = tuple(chain.from_iterable(job.left() for job in jobs))
        return self._left_over

    @property
    def paused(self) -> bool:
        """Whether nothing is sent now, because the service is away; see `OutagePolicy`."""
        return self._inviter.is_paused

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a stream is entered once; make another one")
        self._entered = True
        try:
            await self._inviter.begin()
            await self._jobs.__aenter__()
            return self  # noqa: TRY300  also what strikes here finds it entered, and nobody to leave it
        except BaseException:
            await self.__aexit__(None, None, None)
            raise

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._jobs.__aexit__(exc_type, exc, traceback)
        finally:
            await self._inviter.end()

    def __aiter__(self) -> Self:
        return self

    async def result(self, request: InviteRequest) -> BulkInviteResult:
        """Return what became of all that was asked, where that is one request; this costs less than a loop."""
        divisor = pieces(len(request.quota_ids))
        answers: list[dict[int, Answer]] = [{} for _ in range(divisor)]
        in_order: list[Answer] = []
        while jobs := await self._jobs.several():
            for job in jobs:
                answer = job.account().answer
                self._jobs.release(job)
                self.unrequested.extend(answer.unrequested)
                if divisor == 1:
                    answers[0].update(answer.answers)
                else:
                    for quota_id, each in answer.answers.items():
                        answers[quota_id % divisor][quota_id] = each
                await self._turns.step(len(answer.answers))
        for start in range(0, len(request.quota_ids), _AT_ONCE):
            in_order += [answers[id_ % divisor][id_] for id_ in request.quota_ids[start : start + _AT_ONCE]]
            await self._turns.step(_AT_ONCE)
        for some in answers:
            some.clear()
            await self._turns.step(_AT_ONCE)
        code, asked = request.member_code, request.quota_ids
        return BulkInviteResult(in_order, self.unrequested, member_code=code, quota_ids=asked)

    async def __anext__(self) -> InviteOutcome:
        await self._turns.step()
        while True:
            while self._current and not self._jobs.left:
                job, outcomes = self._current[0]
                for outcome in outcomes:
                    job.taken += 1
                    return outcome
                if job.taken < sum(job.chunk.places.values()):  # a signal handler raised in the iterator
                    self._current[0] = job, job.left()
                    continue
                self._current.popleft()
                self._jobs.release(job)
            job = await self._next_job()
            self.unrequested.extend(job.account().answer.unrequested)
            self._current.append((job, job.left()))

    async def _next_job(self) -> Job:
        job = await self._jobs.next()
        if job is None:
            raise StopAsyncIteration
        return job
