"""A chunk on its way, and what is known of it at each moment, also if that is the last one.

Nothing here waits for a line that is still to come: a job that is cut off, by a cancellation or by a signal
handler that raises, is asked what is known of it, and answers from what was noted before anything was sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain, repeat
from typing import TYPE_CHECKING

from attrs import frozen

from sampling_async._errors import SamplingError, ServiceError, delivered
from sampling_async._outcomes import Failure, InviteOutcome, OutcomeStatus, made
from sampling_async._protocol import Chunk
from sampling_async._replies import BulkAnswer
from sampling_async._session import Track

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sampling_async._errors import Delivery


@frozen
class Answered:
    """A chunk, and what its IDs came to."""

    chunk: Chunk
    answer: BulkAnswer

    def outcomes(self) -> Iterator[InviteOutcome]:
        """Yield an outcome for each place, repeated IDs included."""
        answers = map(self.answer.answers.__getitem__, self._places())
        return made(self.chunk.member_code, self._places(), answers)

    def _places(self) -> Iterator[int]:
        places = self.chunk.places
        return chain.from_iterable(map(repeat, places, places.values()))


class Job:
    """A chunk on its way.

    Args:
        chunk: What to ask.
        answered: What is known of it already, if it need not be asked.

    Attributes:
        answered: What it came to in the end, once that is known.
        taken: How many of its outcomes were handed to the user.
    """

    __slots__ = ("_is_told", "_known", "_part", "_track", "answered", "chunk", "taken")

    def __init__(self, chunk: Chunk, answered: Answered | None = None) -> None:
        self.chunk = chunk
        self.answered = answered
        self.taken = 0
        self._known: list[Answered] = []
        self._part: Chunk | None = None
        self._track = Track()
        self._is_told = False

    def __repr__(self) -> str:
        state = "answered" if self.answered else "in flight" if self._part else "not sent"
        return f"<Job of {len(self.chunk.places)} quota IDs: {state}>"

    def begin(self, part: Chunk) -> Track:
        """Note that a part of it is going to be asked; returns where to note what is sent of that."""
        track = Track(ambiguous=part.asked_before, is_told=self._is_told)
        self._part, self._track = part, track
        return track

    def note(self, answered: Answered) -> None:
        """Note what a part of it came to."""
        self._known.append(answered)

    def account(self) -> Answered:
        """Return what is known of it now: what is in flight is as its `Track` says, the rest not sent."""
        if self.answered is not None:
            return self.answered
        known = list(self._known)
        part = self._part
        if part is not None and all(each.chunk is not part for each in known):
            known.append(interrupted(part, self._track.delivery))
        return _put_together(self.chunk, known)

    def left(self) -> Iterator[InviteOutcome]:
        """Yield the outcomes that were not handed to the user; nothing of it is sent from now on."""
        self._is_told = self._track.is_told = True
        outcomes = self.account().outcomes()
        for _ in zip(range(self.taken), outcomes, strict=False):
            pass
        return outcomes


def failed(chunk: Chunk, error: SamplingError) -> Answered:
    """Return what a failed request says of each of its IDs."""
    code, result = (error.result_code, error.result) if isinstance(error, ServiceError) else (None, None)
    if chunk.asked_before and error.delivery != "unknown":
        error = delivered(error, "unknown")  # nothing that happens now takes an earlier request back
    error = error.with_traceback(None)  # whose frames hold the job; outcomes are kept by the thousand
    status: OutcomeStatus = "unknown" if error.delivery == "unknown" else "not_sent"
    alike = _Alike(chunk.places, Failure(status, code, result, error))
    return Answered(chunk, BulkAnswer(chunk.member_code, alike))


class _Alike(Mapping[int, Failure]):
    """One failure for all IDs of a chunk. Of a million IDs, the garbage collector has nothing to visit then."""

    __slots__ = ("_failure", "_quota_ids")

    def __init__(self, quota_ids: Collection[int], failure: Failure) -> None:
        self._quota_ids = quota_ids
        self._failure = failure

    def __getitem__(self, quota_id: int) -> Failure:
        if quota_id in self._quota_ids:
            return self._failure
        raise KeyError(quota_id)

    def __iter__(self) -> Iterator[int]:
        return iter(self._quota_ids)

    def __len__(self) -> int:
        return len(self._quota_ids)


def interrupted(chunk: Chunk, delivery: Delivery) -> Answered:
    """Return what is known of a chunk whose asking was ended from outside."""
    error = SamplingError(
        "interrupted: the fan-out ended before this was answered", endpoint="bulk_invite", delivery=delivery
    )
    return failed(chunk, error)


def _put_together(chunk: Chunk, known: Iterable[Answered]) -> Answered:
    """Return what is known of a chunk from what is known of its parts; the rest of it was not sent."""
    parts = tuple(known)
    if len(parts) == 1 and parts[0].chunk is chunk:
        return parts[0]
    answers = dict(interrupted(chunk, "not_sent").answer.answers)
    for part in parts:
        answers.update(part.answer.answers)
    unrequested = tuple(outcome for part in parts for outcome in part.answer.unrequested)
    return Answered(chunk, BulkAnswer(chunk.member_code, answers, unrequested))
