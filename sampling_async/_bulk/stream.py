"""The fan-out: send chunks as parallel bulk invites, and yield one outcome for every quota ID."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, Final, Self

from attrs import evolve, frozen

from sampling_async._contract.checks import text_of
from sampling_async._contract.timing import Timing, explain
from sampling_async._pacing.jobs import JobStream
from sampling_async._pacing.steps import LoopYielder, pieces
from sampling_async._protocol.requests import MAX_QUOTA_IDS
from sampling_async._protocol.results import Answers, BulkInviteResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import TypeAlias

    from sampling_async._bulk.invites import Inviter
    from sampling_async._bulk.job import Job
    from sampling_async._bulk.source import ChunkSource
    from sampling_async._contract.checks import Text
    from sampling_async._pacing.gate import Permit
    from sampling_async._pacing.timeline import Timeline
    from sampling_async._protocol.requests import InviteRequest
    from sampling_async._protocol.results import InviteOutcome

    _Reply: TypeAlias = tuple[Sequence[int], Answers]
    """The quota IDs of a chunk and their results."""

_UNREQUESTED_KEPT: Final = 10_000
_STEPS_A_REPLY: Final = 4  # to put a reply in order takes as long as this many steps of a loop over quota IDs
_AT_ONCE: Final = 4096  # how many entries of a dict are freed before the event loop gets a turn


@frozen
class Progress:
    """The progress of a stream, see `OutcomeStream.progress`. The first four are numbers of quota IDs.

    Attributes:
        taken: IDs taken from the input, to be sent or to be looked up in the journal.
        answered: Those of them whose outcome you have received.
        replayed: Those of `answered` whose outcome is from an earlier run in the journal.
        total: All IDs of the input; None if the number is not known.
        seconds_left: The estimated seconds until all outcomes are known, at the rate so far; None while there
            is no estimate.
        per_second: The rate so far, in IDs; None before the first response.
        patience_left: During an outage of the service, the seconds that the stream still waits for its end;
            None if there is no outage.
    """

    taken: int
    answered: int
    replayed: int
    total: int | None
    seconds_left: float | None
    per_second: float | None
    patience_left: float | None = None


class OutcomeStream:
    """The outcomes of a fan-out, as they finish: an async context manager and, inside it, an async iterator.

    Memory is bounded by the client's `max_concurrency`, not by the input. If you leave the block early, or are
    cancelled in it, all running jobs are cancelled. Quota IDs taken from the input whose outcomes you have not
    received are then in `left_over`: received outcomes plus `left_over` are all IDs taken.

    If the input raises an exception or contains an invalid ID, the stream first yields the outcomes of all
    chunks that were sent, then raises. If several tasks read one stream, one of them gets the exception.

    Attributes:
        unrequested: The latest outcomes for quota IDs that were not requested, at most 10,000.
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
        ask = partial(inviter.ask, new_permit=permit)
        self._jobs = JobStream(
            permit, source, ask, window=window, needs_permit=needs_permit, confirm=inviter.written
        )
        # The jobs whose outcomes are being yielded: more than one only if several tasks read the stream.
        self._current: deque[tuple[Job, Iterator[InviteOutcome]]] = deque()
        self._left_over: tuple[InviteOutcome, ...] | None = None
        self._entered = False
        self._turns = LoopYielder()
        self._total = total
        self._clock = clock
        self._began = 0.0
        self._ended: float | None = None
        # Both count the jobs that the user has received completely. `progress` adds the open jobs.
        self._answered = 0
        self._replayed = 0

    @property
    def progress(self) -> Progress:
        """The progress so far, computed at each access.

        `total` is known for a collection of quota IDs, and for a list, tuple or set of at most 65,536 requests.
        The rate counts from the time the block was entered. It counts all known outcomes, which may be a few
        requests more than you have received, but no outcomes from the journal, because they take no time. The
        estimate of the time left assumes that none of the remaining outcomes is in the journal.
        """
        taken = known = answered = self._answered
        replayed = of_journal = self._replayed
        # A copy in one step: another thread may ask.
        for job in tuple(self._jobs.open):
            places = job.chunk.places
            taken += places
            answered += job.taken
            if job.answered is not None:
                known += places
                replayed += self._replayed_of(job, job.taken)
                of_journal += self._replayed_of(job, places)
        asked = known - of_journal
        rate = asked / seconds if asked and (seconds := self._seconds()) > 0 else None
        rest = None if self._total is None else self._total - known
        left = None if rest is None or (rest > 0 and rate is None) else max(0, rest) / (rate or 1.0)
        # The rest of a journal comes on top of the input.
        total = None if self._total is None else max(self._total, taken)
        return Progress(taken, answered, replayed, total, left, rate, self._inviter.patience_left)

    def _seconds(self) -> float:
        """Return the seconds since the block was entered, or between entering and leaving it."""
        return (self._clock() if self._ended is None else self._ended) - self._began

    def _replayed_of(self, job: Job, most: int) -> int:
        """Return how many of the first `most` outcomes of a job are from an earlier run."""
        if not (most and self._inviter.has_journal) or job.answered is None or job.is_begun:
            return 0
        return sum(outcome.replayed for outcome in islice(job.answered.outcomes(), most))

    def _release(self, job: Job) -> None:
        places = job.chunk.places
        self._answered += places
        self._replayed += self._replayed_of(job, places)
        self._jobs.release(job)

    @property
    def left_over(self) -> tuple[InviteOutcome, ...]:
        """After the block: the outcomes of all quota IDs taken from the input that you have not received.

        IDs of a finished request have its outcomes. IDs in flight are `unknown` (`not_sent` if no byte had
        left). The rest is `not_sent`. With a journal, IDs that were not looked up in it yet are `unknown`: an
        earlier run may have sent them.
        """
        if not self._jobs.left:
            raise RuntimeError("left_over is known only after the `async with` block has ended")
        if self._left_over is None:
            # A dict, because one job may be in both: it was added to `open` and not yet handed over.
            jobs = dict.fromkeys(chain(self._jobs.open, self._source.left()))
            self._left_over = tuple(chain.from_iterable(job.left() for job in jobs))
        return self._left_over

    def outcome_of(self, member_code: Text, quota_id: int) -> InviteOutcome | None:
        """Return the outcome of a pair that this fan-out has requested, as known now.

        It is for the rest of an input that was not read: what was requested already must not be called
        `not_sent`. The result is None if the pair was not requested, if the fan-out no longer remembers it (see
        `repeats` of `fan_out`), or if there is a journal, which is to be read instead.
        """
        return self._inviter.outcome_of(text_of(member_code), quota_id)

    @property
    def paused(self) -> bool:
        """Whether sending is paused, because of an outage of the service; see `OutagePolicy`."""
        return self._inviter.is_paused

    @property
    def is_entered(self) -> bool:
        """Whether the block was entered. A stream can be entered once."""
        return self._entered

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a stream can be entered only once; make a new one")
        self._entered = True
        try:
            await self._inviter.begin()
            self._began = self._clock()
            await self._jobs.__aenter__()
            # Inside `try`: a signal handler may raise here too, and then nobody else calls `__aexit__`.
            return self  # noqa: TRY300
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
            await self._inviter.end(lambda: (self.progress.taken, self.progress.answered))
        if exc_type is None:
            self._inviter.raise_test_failure()

    def __aiter__(self) -> Self:
        return self

    async def result(self, request: InviteRequest, began: float) -> BulkInviteResult:
        """Return the outcomes of a stream of one request, in the order given, faster than by iterating.

        Its check began at `began`, by the gate's clock.
        """
        # By their first quota ID. Only what the result needs: the garbage collector visits all that is kept.
        replies: dict[int, _Reply] = {}
        last: Job | None = None  # the one that ended last, of those that sent something
        while jobs := await self._jobs.several():
            for job in jobs:
                answer = job.account().answer
                self._release(job)
                if job.is_begun:
                    last = job
                self.unrequested.extend(answer.unrequested)
                replies[job.chunk.quota_ids[0]] = answer.quota_ids, answer.answers
            await self._turns.step(len(jobs) * _STEPS_A_REPLY)
        self._inviter.raise_test_failure()
        result = BulkInviteResult(
            unrequested=self.unrequested,
            member_code=request.member_code,
            quota_ids=request.quota_ids,
            answers=await self._in_order(request.quota_ids, replies),
        )
        if last is not None and last.timeline is not None:
            timing = self._timing(last, last.timeline)
            timing = evolve(timing, decode=timing.decode + self._began - began)
            explain(result, timing, self._inviter.headers_of(last))
        return result

    def _timing(self, last: Job, timeline: Timeline) -> Timing:
        """Return where the time since the beginning went, as seen from the request that ended last."""
        timing = timeline.timing(last.attempts)
        # Before it was formed, others may have waited for what would have held it up too.
        shut = timeline.holds.within(self._began, timeline.began)
        permit = timing.permit + timeline.began - self._began - shut
        return evolve(timing, permit=permit, hold=timing.hold + shut)

    async def _in_order(self, quota_ids: tuple[int, ...], replies: Mapping[int, _Reply]) -> list[Answers]:
        in_order: list[Answers] = []
        # Without repeated IDs, each reply has the results of the next IDs, in their order.
        known = 0
        while known < len(quota_ids) and (reply := replies.get(quota_ids[known])) is not None:
            asked, answers = reply
            if asked != quota_ids[known : known + len(asked)]:
                break
            in_order.append(answers)
            known += len(asked)
            await self._turns.step(_STEPS_A_REPLY)
        if known == len(quota_ids):
            return in_order
        # Where each ID has its result: `MAX_QUOTA_IDS * number of the reply + index in it`. In several dicts,
        # divided by the remainder of the ID: one huge dict blocks the event loop when it grows.
        given, divisor = list(replies.values()), pieces(len(quota_ids))
        places: list[dict[int, int]] = [{} for _ in range(divisor)]
        for number, (asked, _) in enumerate(given):
            for at, quota_id in enumerate(asked, number * MAX_QUOTA_IDS):
                places[quota_id % divisor][quota_id] = at
            await self._turns.step(len(asked))
        while known < len(quota_ids):
            number, at = divmod(places[quota_ids[known] % divisor][quota_ids[known]], MAX_QUOTA_IDS)
            asked, answers = given[number]
            # As many IDs as follow each other in both.
            pairs = zip(asked[at:], quota_ids[known : known + len(asked)], strict=False)
            length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            in_order.append(answers.part(at, at + length))
            known += length
            await self._turns.step(length)
        for some in places:
            some.clear()
            await self._turns.step(_AT_ONCE)
        return in_order

    async def __anext__(self) -> InviteOutcome:
        await self._turns.step()
        while (outcome := self.next_now()) is None:
            if not await self.fill():
                raise StopAsyncIteration
        return outcome

    def next_now(self) -> InviteOutcome | None:
        """Return the next outcome, or None if `fill` is needed; for other parts of this package."""
        while self._current and not self._jobs.left:
            job, outcomes = self._current[0]
            # `for` in place of `next()`: the end of the iterator is no exception, and costs nothing.
            for outcome in outcomes:
                job.taken += 1
                return outcome
            # An iterator that ends too early was ended by a signal handler that raised inside it. A new one
            # continues after the outcomes that were taken.
            if job.taken < job.chunk.places:
                self._current[0] = job, job.left()
                continue
            self._current.popleft()
            self._release(job)
        return None

    async def fill(self, *, most: int = 1) -> bool:
        """Wait for a request that is done, and take up to `most`, for `next_now`. Return False at the end."""
        job = await self._jobs.next()
        if job is None:
            self._inviter.raise_test_failure()
            return False
        while job is not None:
            self.unrequested.extend(job.account().answer.unrequested)
            self._current.append((job, job.left()))
            most -= 1
            job = self._jobs.next_now() if most else None
        return True
