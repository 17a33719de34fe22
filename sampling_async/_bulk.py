"""The fan-out: chunks into parallel bulk invites, and one outcome for every ID."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Final, Self

from attrs import frozen

from sampling_async._outcomes import BulkInviteResult, InviteOutcome
from sampling_async._scheduler import JobStream
from sampling_async._stepwise import Turns, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from sampling_async._chunks import ChunkSource
    from sampling_async._gate import Permit
    from sampling_async._invites import Inviter
    from sampling_async._job import Job
    from sampling_async._outcomes import Answer
    from sampling_async._protocol import InviteRequest

_UNREQUESTED_KEPT: Final = 10_000
_AT_ONCE: Final = 4096
"""Quota IDs of a result that are put in order in one go; of more, the event loop gets its turns."""


@frozen
class Progress:
    """How far a stream has come, see `OutcomeStream.progress`. All but the last two are numbers of quota IDs.

    Attributes:
        taken: Taken from the input for requests, or for what a journal says of them.
        answered: Of these, those whose outcome you have.
        replayed: Of these, those whose outcome is of a journal of a run before.
        total: All that there are to be; None where that is not known.
        seconds_left: How long it will take, at the rate so far, until all outcomes are known; None as long as
            that cannot be said.
        per_second: The rate so far; None as long as no request was answered.
    """

    taken: int
    answered: int
    replayed: int
    total: int | None
    seconds_left: float | None
    per_second: float | None


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
        total: int | None,
        clock: Callable[[], float],
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
        self._total = total
        self._clock = clock
        self._began = 0.0
        self._ended: float | None = None
        self._answered = 0  # in jobs that were handed over whole
        self._replayed = 0  # likewise

    @property
    def progress(self) -> Progress:
        """How far it has come: made anew each time, from counts that are kept anyway.

        `total` is known where the input is a collection, of requests one of a list, tuple or set, at most
        65,536. The rate is that of the outcomes that are known, which may be a few requests more than you have
        seen, since the block was entered; those of a journal do not count, since they come at once. The time
        left is reckoned by it as if the journal knew nothing of the rest.
        """
        taken = known = answered = self._answered
        replayed = of_journal = self._replayed
        for job in self._jobs.open:
            places = _places(job)
            taken += places
            answered += job.taken
            if job.answered is not None:
                known += places
                replayed += self._replayed_of(job, job.taken)
                of_journal += self._replayed_of(job, places)
        asked = known - of_journal
        rate = asked / seconds if asked and (seconds := self._seconds()) > 0 else None
        rest = None if self._total is None else self._total - known
        left = 0.0 if rest == 0 else None if rest is None or rate is None else rest / rate
        return Progress(taken, answered, replayed, self._total, left, rate)

    def _seconds(self) -> float:
        """Return how long the block has been entered, or was."""
        return (self._clock() if self._ended is None else self._ended) - self._began

    def _replayed_of(self, job: Job, most: int) -> int:
        """Return how many of the first outcomes of a job are of a run before."""
        if not (most and self._inviter.has_journal and job.answered is not None):
            return 0
        count, answers = 0, job.answered.answer.answers
        for quota_id, times in job.chunk.places.items():
            answer = answers[quota_id]
            if isinstance(answer, InviteOutcome) and answer.replayed:
                count += min(times, most)
            most -= times
            if most <= 0:
                break
        return count

    def _release(self, job: Job) -> None:
        """Have done with a job: all of its outcomes were handed over."""
        places = _places(job)
        self._answered += places
        self._replayed += self._replayed_of(job, places)
        self._jobs.release(job)

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
            self._began = self._clock()
            await self._jobs.__aenter__()
            return self  # noqa: TRY300  also what strikes here finds it entered, and nobody to leave it
        except BaseException:
            await self.__aexit__(None, None, None)
            raise

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._ended = self._clock()
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
                self._release(job)
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
                if job.taken < _places(job):  # a signal handler raised in the iterator
                    self._current[0] = job, job.left()
                    continue
                self._current.popleft()
                self._release(job)
            job = await self._next_job()
            self.unrequested.extend(job.account().answer.unrequested)
            self._current.append((job, job.left()))

    async def _next_job(self) -> Job:
        job = await self._jobs.next()
        if job is None:
            raise StopAsyncIteration
        return job


def _places(job: Job) -> int:
    return sum(job.chunk.places.values())
