"""Send one chunk: split it around a bad ID, journal it, and note in its job what is known at each moment."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from anyio.lowlevel import checkpoint
from attrs import evolve

from sampling_async._errors import (
    BadRequestError,
    ClientClosedError,
    ForbiddenError,
    InvalidRequestError,
    OutageError,
    SamplingError,
    ServiceError,
    delivered,
)
from sampling_async._job import Answered, failed
from sampling_async._models import ResultCode
from sampling_async._policy import MAX_RETRY_AFTER
from sampling_async._protocol import Chunk, bulk_invite, cut

if TYPE_CHECKING:
    from sampling_async._calls import Caller
    from sampling_async._gate import Permit
    from sampling_async._job import Job
    from sampling_async._journal_run import JournalRun
    from sampling_async._outcomes import InviteOutcome
    from sampling_async._replies import BulkAnswer
    from sampling_async._session import Track

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
    """

    def __init__(self, caller: Caller, panel_guid: str, journal: JournalRun | None = None) -> None:
        self._caller = caller
        self._panel_guid = panel_guid
        self._journal = journal
        self._is_open = False
        self._stopped_by: SamplingError | None = None
        self._isolates = True
        self._answered = 0

    @property
    def is_paused(self) -> bool:
        """Whether nothing is sent now, because the service is away."""
        return self._caller.outage.is_on

    @property
    def has_given_up(self) -> bool:
        """Whether the service was away for longer than is waited for."""
        return isinstance(self._stopped_by, OutageError)

    @property
    def has_journal(self) -> bool:
        """Whether there is a journal, of which outcomes of runs before may come."""
        return self._journal is not None

    async def begin(self) -> None:
        """Open the journal, if there is one.

        Raises:
            InvalidRequestError: The client belongs to another event loop, in which it may be busy.
            JournalError: The journal cannot be opened.
        """
        self._caller.must_be_of_this_loop()
        if self._journal is not None:
            await self._journal.open()
            self._is_open = True

    async def end(self) -> None:
        """Close it, if this opened it: another fan-out may be using it."""
        if self._journal is not None and self._is_open:
            self._is_open = False
            await self._journal.close()

    def needs_permit(self, job: Job) -> bool:
        """Return whether a job takes a request: what is known already, or is not sent any more, takes none."""
        return job.answered is None and self._stopped_by is None

    async def ask(self, job: Job, permit: Permit) -> None:
        """Find out what a job's quota IDs come to; failures of requests are outcomes."""
        try:
            if job.answered is None and self._stopped_by is not None:
                job.answered = failed(job.chunk, self._stopped_by)
            if job.answered is None:
                await self._ask(job, permit)
            else:
                await checkpoint()  # there may be thousands of them
        finally:
            if self._journal is not None:
                self._journal.settle(job.chunk)

    async def _ask(self, job: Job, permit: Permit) -> None:
        journal = self._journal
        if journal is None:
            await self._find_out(job, permit)
            job.answered = job.account()
            return
        number = journal.note_sent(job.chunk)
        try:
            await journal.written()
            await self._find_out(job, permit)
        finally:  # cut off here, what is known is written down all the same
            journal.note_answered(number, job.account().answer.outcomes())
        await journal.written()
        job.answered = job.account()

    async def _find_out(self, job: Job, permit: Permit) -> None:
        """Ask a chunk, in parts where one of its IDs may be what is refused."""
        parts = deque([job.chunk])
        answered_before = self._answered
        asked = accepted = 0
        refused: SamplingError | None = None
        while parts:
            part = parts.popleft()
            if refused is not None and not self._goes_on(refused, asked, accepted):
                job.note(failed(part, refused))
                continue
            asked += 1
            try:
                job.note(await self._request(part, permit, job.begin(part)))
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
                    job.note(failed(part, exc))
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
        unavailable = unavailable and _UNAVAILABLE in self._caller.policy.unprocessed
        return unavailable and error.retry_after is None and error.attempts > 1 and others_answered

    async def _request(self, chunk: Chunk, permit: Permit, track: Track) -> Answered:
        call, started = bulk_invite(self._panel_guid, chunk.member_code, chunk.quota_ids), self._caller.clock()
        answer = await self._caller.run(call, permit, track)
        self._caller.hand(chunk.member_code, answer.links, call, track, path="$.Invites", started=started)
        for error in answer.errors:
            error.attempts = track.attempts
            error.elapsed = self._caller.clock() - started
        return Answered(chunk, _resent(answer) if track.ambiguous else answer)

    def _stop(self, error: SamplingError) -> None:
        """Send no further chunks after what is true of them all: a refused key, a wait we do not wait for."""
        too_long = error.retry_after is not None and error.retry_after > MAX_RETRY_AFTER
        stops = isinstance(error, ForbiddenError | ClientClosedError | OutageError)
        if self._stopped_by is None and (too_long or stops):
            self._stopped_by = delivered(error, "not_sent")
            self._stopped_by.attempts = 0


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
