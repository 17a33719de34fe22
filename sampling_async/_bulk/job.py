"""A job: one chunk, with everything that is known about it at any moment.

A job can end at any line, by a cancellation or because a signal handler raises. So everything is noted in the
job before it happens, and `Job.account` gives correct outcomes at any moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from sampling_async._calls.reports import MOST_ATTEMPTS, CallTrack
from sampling_async._contract.errors import SamplingError, ServiceError, delivered
from sampling_async._contract.structs import value
from sampling_async._protocol.bulk_reply import BulkReply
from sampling_async._protocol.requests import Chunk
from sampling_async._protocol.results import Failed, Listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sampling_async._calls.reports import Ended
    from sampling_async._contract.errors import Delivery
    from sampling_async._pacing.timeline import Timeline
    from sampling_async._protocol.results import Answers, InviteOutcome, OutcomeStatus


@value
class Answered:
    """A chunk with the outcomes of its quota IDs."""

    chunk: Chunk
    answer: BulkReply

    @classmethod
    def of(cls, chunk: Chunk, answers: Answers, unrequested: tuple[InviteOutcome, ...] = ()) -> Self:
        return cls(chunk, BulkReply(chunk.member_code, chunk.quota_ids, answers, unrequested))

    def outcomes(self) -> Iterator[InviteOutcome]:
        """Yield one outcome for each place. An ID that was given twice has two places."""
        outcomes = self.answer.outcomes()
        if not self.chunk.repeated:
            return outcomes
        outcome_of = {outcome.quota_id: outcome for outcome in outcomes}
        return map(outcome_of.__getitem__, self.chunk.each_place())


class EarlierOutcomes(Protocol):
    """Quota IDs of one member that the fan-out has requested before; see `Repetition`."""

    def part(self, quota_ids: Sequence[int]) -> EarlierOutcomes: ...

    def outcomes(self) -> tuple[InviteOutcome, ...]: ...

    async def settled(self) -> tuple[InviteOutcome, ...]: ...


class Job:
    """One chunk to send, and what is known about it so far."""

    __slots__ = (
        "_attempts",
        "_ended",
        "_is_delivered",
        "_known",
        "_part",
        "answered",
        "chunk",
        "repetition",
        "taken",
        "timeline",
        "track",
    )

    def __init__(
        self, chunk: Chunk, answered: Answered | None = None, repetition: EarlierOutcomes | None = None
    ) -> None:
        self.chunk = chunk
        self.answered = answered  # the final outcomes, once they are known
        # set if all its quota IDs were requested before, until it is known what must be sent
        self.repetition = repetition
        self.taken = 0  # how many of its outcomes the user has received
        self._known: tuple[Answered, ...] = ()
        self._part: Chunk | None = None
        self.track: CallTrack | None = None  # of that part
        self._is_delivered = False
        self.timeline: Timeline | None = None  # of its request, if it needs one
        # Both of the parts before the latest one.
        self._attempts = 0
        self._ended: tuple[Ended, ...] = ()

    def __repr__(self) -> str:
        state = "answered" if self.answered else "in flight" if self._part else "not sent"
        return f"<Job of {len(self.chunk.quota_ids)} quota IDs: {state}>"

    def begin(self, part: Chunk, *, is_explained: bool, fan_out: object) -> CallTrack:
        """Note that a part of the chunk is sent next. Return the track that records whether bytes left."""
        self._attempts, self._ended = self.attempts, self.ended
        assert self.timeline is not None
        track = CallTrack(
            timeline=self.timeline,
            enter=self.timeline.enter,
            ambiguous=part.asked_before,
            outcomes_delivered=self._is_delivered,
            is_explained=is_explained,
            fan_out=fan_out,
        )
        # One assignment: if a signal handler raises, part and track still belong together.
        self._part, self.track = part, track
        return track

    @property
    def is_begun(self) -> bool:
        """Whether a request was made for it."""
        return self.track is not None

    @property
    def attempts(self) -> int:
        return self._attempts + (0 if self.track is None else self.track.attempts)

    @property
    def ended(self) -> tuple[Ended, ...]:
        """The latest attempts of all parts that have ended, if anybody watches the client."""
        ended = self._ended if self.track is None else self._ended + self.track.ended
        return ended[-MOST_ATTEMPTS:]

    def note(self, answered: Answered) -> None:
        self._known += (answered,)

    def account(self) -> Answered:
        """Return the outcomes as known now: a part in flight as its track says, the rest `not_sent`."""
        if self.answered is not None:
            return self.answered
        if self.repetition is not None:
            return Answered.of(self.chunk, Listed(self.repetition.outcomes()))
        known = self._known
        # One read of both: they belong together.
        part, track = self._part, self.track
        if part is not None and track is not None and all(each.chunk is not part for each in known):
            # First, because what is known replaces it: a part that was refused and cut is not in flight.
            known = (interrupted(part, track.delivery), *known)
        return _put_together(self.chunk, known)

    def left(self) -> Iterator[InviteOutcome]:
        """Yield the outcomes that the user has not received. From now on nothing of this job is sent."""
        # Set before the account is taken: a send that begins later is refused, so the outcomes stay true.
        self._is_delivered = True
        if self.track is not None:
            self.track.outcomes_delivered = True
        outcomes = self.account().outcomes()
        # Skip the outcomes that the user has.
        for _ in zip(range(self.taken), outcomes, strict=False):
            pass
        return outcomes


def failed(chunk: Chunk, error: SamplingError) -> Answered:
    """Return the outcomes of a chunk whose request failed: the same failure for each quota ID."""
    code, result = (error.result_code, error.result) if isinstance(error, ServiceError) else (None, None)
    if chunk.asked_before and error.delivery != "unknown":
        # An earlier request about these IDs may have worked. A failure now does not change that.
        error = delivered(error, "unknown")
    # The traceback's frames hold the job. Users keep thousands of outcomes, which would keep all jobs alive.
    error = error.with_traceback(None)
    status: OutcomeStatus = "unknown" if error.delivery == "unknown" else "not_sent"
    return Answered.of(chunk, Failed(len(chunk.quota_ids), status, code, result, error))


def interrupted(chunk: Chunk, delivery: Delivery) -> Answered:
    """Return the outcomes of a chunk whose request was cancelled or never begun."""
    what = "this was sent" if delivery == "not_sent" else "the response came"
    error = SamplingError(
        f"interrupted: the fan-out ended before {what}", endpoint="bulk_invite", delivery=delivery
    )
    return failed(chunk, error)


def _put_together(chunk: Chunk, parts: tuple[Answered, ...]) -> Answered:
    """Return the outcomes of a chunk from those of its parts. Quota IDs in no part are `not_sent`."""
    if len(parts) == 1 and parts[0].chunk is chunk:  # as nearly always
        return parts[0]
    # Begin with `not_sent` for all quota IDs. The parts then replace what is known better.
    outcomes: dict[int, InviteOutcome] = {}
    for part in (interrupted(chunk, "not_sent"), *parts):
        outcomes.update((outcome.quota_id, outcome) for outcome in part.answer.outcomes())
    unrequested = tuple(outcome for part in parts for outcome in part.answer.unrequested)
    return Answered.of(chunk, Listed(tuple(outcomes.values())), unrequested)
