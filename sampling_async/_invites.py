"""What one chunk comes to: asked, in parts where one ID spoils it, written down, and true when cut off."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from anyio.lowlevel import checkpoint
from attrs import evolve

from sampling_async._chunks import Answered, Job
from sampling_async._errors import (
    BadRequestError,
    ClientClosedError,
    ForbiddenError,
    InvalidRequestError,
    SamplingError,
    ServiceError,
    delivered,
)
from sampling_async._models import ResultCode
from sampling_async._outcomes import InviteOutcome, OutcomeStatus
from sampling_async._policy import MAX_RETRY_AFTER
from sampling_async._protocol import Chunk, bulk_invite, cut
from sampling_async._replies import BulkAnswer
from sampling_async._session import Track

if TYPE_CHECKING:
    from sampling_async._calls import Caller
    from sampling_async._errors import Delivery
    from sampling_async._gate import Permit
    from sampling_async._journal import Journal

_MOST_PARTS: Final = 16  # finds one ID among 100, which takes 14 requests
_TRIED_IN_VAIN: Final = 4
_UNAVAILABLE: Final = 503
_NOT_OF_A_QUOTA: Final = frozenset(
    {
        ResultCode.PANEL_DOES_NOT_EXIST,
        ResultCode.PANEL_NOT_ES_ENABLED,
        ResultCode.NO_MEMBER_FOUND,
        ResultCode.MEMBER_NOT_ROUTABLE,
        ResultCode.MEMBER_BLOCKED,
        ResultCode.NO_PANEL_GUID,
        ResultCode.NO_MEMBER_CODE,
        ResultCode.PANEL_INVALID_ES_REQUEST,
        ResultCode.MEMBER_NOT_ACTIVE,
        ResultCode.UNABLE_TO_GET_GID,
        ResultCode.MAX_DAILY_EXCEEDED,
        ResultCode.MAX_WEEKLY_EXCEEDED,
    }
)


class Inviter:
    """Asks the chunks of one fan-out.

    Args:
        caller: Makes the calls.
        panel_guid: The panel.
        journal: Where to write down what is sent and answered.

    Attributes:
        cut_off: What is known of chunks whose asking was cut off.
    """

    def __init__(self, caller: Caller, panel_guid: str, journal: Journal | None = None) -> None:
        self.cut_off: list[Answered] = []
        self._caller = caller
        self._panel_guid = panel_guid
        self._journal = journal
        self._stopped_by: SamplingError | None = None
        self._isolates = True
        self._answered = 0

    async def begin(self) -> None:
        """Open the journal, if there is one."""
        if self._journal is not None:
            await self._journal.open()

    async def end(self) -> None:
        """Close it."""
        if self._journal is not None:
            await self._journal.close()

    async def ask(self, job: Job, permit: Permit) -> Answered:
        """Return what a chunk's quota IDs come to; failures of requests are outcomes."""
        if isinstance(job, Answered):
            return await self._without_asking(job)
        try:
            return await self._ask(job, permit)
        finally:
            if self._journal is not None:
                self._journal.settle(job)

    async def _without_asking(self, answered: Answered) -> Answered:
        """Return what needs no request, with a turn for the event loop: there may be thousands of them."""
        try:
            await checkpoint()
        except BaseException:
            self.cut_off.append(answered)
            raise
        return answered

    async def _ask(self, chunk: Chunk, permit: Permit) -> Answered:
        journal = self._journal
        if self._stopped_by is not None:
            return await self._without_asking(failed(chunk, self._stopped_by))
        known: list[Answered] = []  # of parts of the chunk, also when this is cut off
        number = 0
        try:
            if journal is not None:
                number = journal.note_sent(chunk)
                await journal.written()
            await self._find_out(chunk, permit, known)
            answered = _put_together(chunk, known)
            if journal is not None:
                journal.note_answered(number, answered.answer.outcomes())
                await journal.written()
        except BaseException:
            answered = _put_together(chunk, known)
            self.cut_off.append(answered)
            if journal is not None:
                journal.note_answered(number, answered.answer.outcomes())
            raise
        return answered

    async def _find_out(self, chunk: Chunk, permit: Permit, known: list[Answered]) -> None:
        """Ask a chunk, in parts where one of its IDs may be what is refused."""
        parts = deque([chunk])
        answered_before = self._answered
        asked = accepted = 0
        refused: SamplingError | None = None
        while parts:
            part = parts.popleft()
            if refused is not None and not self._goes_on(refused, asked, accepted):
                known.append(failed(part, refused))
                continue
            asked += 1
            try:
                known.append(await self._request(part, permit, known))
                accepted += 1
                self._answered += 1
            except InvalidRequestError:  # of the wrong event loop: the caller's error, not the call's
                raise
            except SamplingError as exc:
                self._stop(exc)
                if self._may_be_of_one(part, exc, others_answered=self._answered > answered_before):
                    refused = exc
                    parts.extend(cut(part, (len(part.places) + 1) // 2))
                else:
                    known.append(failed(part, exc))
        if refused is not None and not accepted:
            self._isolates = False  # what is refused whole and in parts is not refused for one ID

    def _goes_on(self, refused: SamplingError, asked: int, accepted: int) -> bool:
        """Return whether to ask another part of what was refused."""
        in_vain = asked > _TRIED_IN_VAIN and not accepted
        if self._stopped_by is not None or asked > _MOST_PARTS or in_vain:
            return False
        # A 503 may be about the load all the same, which more requests do not help: each costs as a retry does.
        return isinstance(refused, BadRequestError) or self._caller.budget.spend()

    def _may_be_of_one(self, chunk: Chunk, error: SamplingError, *, others_answered: bool) -> bool:
        """Return whether a refusal, by which nothing was processed, may be due to one ID of several.

        A 503 is taken for the load, unless other requests were answered all the while.
        """
        if len(chunk.places) == 1 or not self._isolates or error.delivery != "answered":
            return False
        if isinstance(error, BadRequestError):
            return error.result_code not in _NOT_OF_A_QUOTA
        unavailable = isinstance(error, ServiceError) and error.status == _UNAVAILABLE
        return unavailable and error.retry_after is None and error.attempts > 1 and others_answered

    async def _request(self, chunk: Chunk, permit: Permit, known: list[Answered]) -> Answered:
        track = Track(ambiguous=chunk.asked_before)
        try:
            call = bulk_invite(self._panel_guid, chunk.member_code, chunk.quota_ids)
            answer = await self._caller.run(call, permit, track)
        except SamplingError:
            raise
        except BaseException:
            known.append(interrupted(chunk, track.delivery))
            raise
        for error in answer.errors:
            error.attempts = track.attempts
        return Answered(chunk, _resent(answer) if track.ambiguous else answer)

    def _stop(self, error: SamplingError) -> None:
        """Send no further chunks after what is true of them all: a refused key, a wait we do not wait for."""
        too_long = error.retry_after is not None and error.retry_after > MAX_RETRY_AFTER
        if self._stopped_by is None and (too_long or isinstance(error, ForbiddenError | ClientClosedError)):
            self._stopped_by = delivered(error, "not_sent")
            self._stopped_by.attempts = 0


def failed(chunk: Chunk, error: SamplingError) -> Answered:
    """Return what a failed request says of each of its IDs."""
    code, result = (error.result_code, error.result) if isinstance(error, ServiceError) else (None, None)
    if chunk.asked_before and error.delivery != "unknown":
        error = delivered(error, "unknown")  # nothing that happens now takes an earlier request back
    status: OutcomeStatus = "unknown" if error.delivery == "unknown" else "not_sent"
    outcomes = {
        quota_id: InviteOutcome(chunk.member_code, quota_id, status, None, code, result, error)
        for quota_id in chunk.places
    }
    return Answered(chunk, BulkAnswer(chunk.member_code, outcomes))


def interrupted(chunk: Chunk, delivery: Delivery) -> Answered:
    """Return what is known of a chunk whose asking was ended from outside."""
    error = SamplingError(
        "interrupted: the fan-out ended before this was answered", endpoint="bulk_invite", delivery=delivery
    )
    return failed(chunk, error)


def _put_together(chunk: Chunk, known: list[Answered]) -> Answered:
    """Return what is known of a chunk from what is known of its parts; the rest of it was not sent."""
    if len(known) == 1 and known[0].chunk is chunk:
        return known[0]
    answers = dict(interrupted(chunk, "not_sent").answer.answers)
    for part in known:
        answers.update(part.answer.answers)
    unrequested = tuple(outcome for part in known for outcome in part.answer.unrequested)
    return Answered(chunk, BulkAnswer(chunk.member_code, answers, unrequested))


_RESENT: Final = "sent again after an attempt that may have worked: an earlier invite may exist"


def _resent(answer: BulkAnswer) -> BulkAnswer:
    """Say what a second answer means after a first attempt that may have worked.

    A rejection proves nothing then: the member may be refused because of the very invite that was lost.
    """
    return evolve(answer, answers={outcome.quota_id: _doubted(outcome) for outcome in answer.outcomes()})


def _doubted(outcome: InviteOutcome) -> InviteOutcome:
    outcome = evolve(outcome, anomaly="; ".join(filter(None, (outcome.anomaly, _RESENT))))
    if outcome.status != "rejected":
        return outcome
    error = SamplingError(f"rejected when {_RESENT}", endpoint="bulk_invite", delivery="unknown")
    return evolve(outcome, status="unknown", error=error)
