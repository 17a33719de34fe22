"""Send one chunk: record it in the journal, and split it if one bad quota ID makes the service refuse it."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final

from anyio.lowlevel import checkpoint
from attrs import evolve

from sampling_async._bulk.job import Answered, Job, failed
from sampling_async._bulk.options import BULK
from sampling_async._contract.errors import (
    BadRequestError,
    ClientClosedError,
    ForbiddenError,
    InvalidRequestError,
    OutageError,
    SamplingError,
    ServiceError,
    TransportError,
    WithheldError,
    delivered,
    is_test_failure,
)
from sampling_async._contract.exchange import MAX_RETRY_AFTER, UNAVAILABLE
from sampling_async._contract.headers import no_headers
from sampling_async._contract.result_codes import ResultCode
from sampling_async._contract.structs import replace
from sampling_async._pacing.timeline import DECODE, JOURNAL, PERMIT
from sampling_async._protocol.requests import Chunk, bulk_invite, cut, private_texts
from sampling_async._protocol.results import Listed

if TYPE_CHECKING:
    from collections.abc import Callable

    from sampling_async._bulk.asked import RequestedPairs
    from sampling_async._bulk.job import EarlierOutcomes
    from sampling_async._calls.call import Caller
    from sampling_async._calls.reports import CallTrack, Hooks
    from sampling_async._contract.headers import HeaderReader
    from sampling_async._journal.run import Recorder, Replay
    from sampling_async._pacing.blocks import Block
    from sampling_async._pacing.gate import Permit
    from sampling_async._protocol.bulk_reply import BulkReply
    from sampling_async._protocol.results import InviteOutcome

# Halving finds one bad ID among 100 with 14 requests: two for each of the sizes 50, 25, 13, 7, 4, 2 and 1.
_MOST_PARTS: Final = 16
_TRIED_WITHOUT_SUCCESS: Final = 4
"""If more requests than this were sent and none was accepted, the refusal is not about one quota ID."""

# Refusals with these codes are about the panel or the member. Splitting the chunk would not change them.
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
    """The sender of the chunks of one fan-out.

    Args:
        caller: Makes the calls.
        panel_guid: The panel.
        recorder: Records what is sent and what came back, if given.
        replay: Gets the chunks that are no longer in flight, if given.
        asked: Remembers the pairs that were requested, if repetitions are not sent and there is no journal.
    """

    def __init__(
        self,
        caller: Caller,
        panel_guid: str,
        recorder: Recorder | None = None,
        replay: Replay | None = None,
        asked: RequestedPairs | None = None,
        *,
        base_url: str | None = None,
    ) -> None:
        self._caller = caller
        self._panel_guid = panel_guid
        self._base_url = base_url  # of a record that is claimed; None: it was claimed before
        self._recorder = recorder
        self._replay = replay
        self.is_recorded = recorder is not None  # outcomes are shown only when they are on disk
        self.has_journal = replay is not None  # which may give outcomes of earlier runs
        self._asked = asked
        self._is_open = False
        self._stopped_by: SamplingError | None = None
        self._test_failure: BaseException | None = None
        # For each request whose outcomes are not on disk yet: reports them, and has them shown.
        self._unsettled: dict[int, Callable[[], None]] = {}
        self._isolates = True
        self._answered = 0
        self._span: object = None
        self._is_explained = False  # whether somebody may ask for reports of its requests

    @property
    def is_paused(self) -> bool:
        """Whether sending is paused, because of an outage of the service."""
        return self._caller.outage.is_on

    def outcome_of(self, member_code: str, quota_id: int) -> InviteOutcome | None:
        """Return the outcome of a pair that this fan-out has requested, if it is in memory."""
        return None if self._asked is None else self._asked.outcome_of(member_code, quota_id)

    @property
    def patience_left(self) -> float | None:
        """The seconds that the fan-out still waits for the end of an outage; None if there is none."""
        caller, outage = self._caller, self._caller.outage
        return max(0.0, caller.patience - outage.away_for()) if outage.is_on else None

    @property
    def has_given_up(self) -> bool:
        """Whether an outage lasted longer than the fan-out's patience."""
        return isinstance(self._stopped_by, OutageError)

    async def written(self) -> None:
        """Wait until all that was recorded so far is on disk."""
        if self._recorder is not None:
            await self._recorder.written()

    async def begin(self) -> None:
        """Open the record, if there is one, and notify those who watch the client.

        Raises:
            InvalidRequestError: The client belongs to another event loop, which may be using it.
            JournalError: The journal cannot be opened.
        """
        self._caller.must_be_of_this_loop()
        if self._recorder is not None:
            # Again: another client may have made a stream with the same journal since.
            if self._base_url is not None:
                self._recorder.claim(self._base_url, self._panel_guid)
            await self._recorder.open()
            self._is_open = True
        if self._caller.hooks is not None:
            self._span = self._caller.hooks.fan_out_began()
            self._is_explained = self._caller.hooks.needs_reports(self._span)

    async def end(self, reached: Callable[[], tuple[int, int]]) -> None:
        """Close the record, if `begin` opened it. Otherwise another fan-out may be using it.

        Args:
            reached: Returns how many IDs were taken, and answered. It is called only if somebody watches the
                client.
        """
        try:
            if self._recorder is not None and self._is_open:
                self._is_open = False
                await self._recorder.close()
        finally:
            for settle in list(self._unsettled.values()):
                settle()
            # Last: nothing that is done for those who watch may keep the record open.
            if self._caller.hooks is not None:
                self._caller.hooks.fan_out_ended(self._span, *reached())

    def headers_of(self, job: Job) -> HeaderReader:
        """Return what reads the headers of the latest response to a job."""
        if job.track is None:
            return no_headers
        private = private_texts(self._panel_guid, job.chunk.member_code)
        return self._caller.attempts.headers_of(private, job.track)

    def raise_test_failure(self) -> None:
        """Raise what a mock has raised to fail a test, once. Called when each ID has its outcome."""
        failure, self._test_failure = self._test_failure, None
        if failure is not None:
            raise failure

    def needs_permit(self, job: Job) -> bool:
        """Return whether a job needs a request: its outcomes are not known, and sending has not stopped.

        The first time, its clock starts.
        """
        if job.answered is not None or job.repetition is not None or self._stopped_by is not None:
            return False
        job.timeline = job.timeline or self._caller.timeline(BULK)
        return True

    async def ask(
        self, job: Job, permit: Permit, new_permit: Callable[[], Permit]
    ) -> Callable[[], object] | None:
        """Run a job: find the outcomes of its quota IDs. A failed request becomes outcomes.

        Args:
            job: The job.
            permit: Its permit. It is held if the job needs one.
            new_permit: Makes a permit, for a repetition that must be sent after all.

        Returns:
            If the outcomes are not on disk yet, a function to call when `written` has returned.
        """
        if job.repetition is not None:
            await self._ask_repeated(job, job.repetition, new_permit)
        elif self._recorder is None or not self.needs_permit(job):
            await self._ask(job, job.chunk, permit)
        else:
            return await self._ask_on_record(job, permit, self._recorder)
        return None

    async def ask_alone(self, chunk: Chunk, permit: Permit, wait: Block) -> tuple[InviteOutcome, ...]:
        """Find the outcomes of a chunk that belongs to no stream. `wait` ends when the client is closed."""
        job = Job(chunk)
        await self.begin()
        try:
            if self.needs_permit(job):
                with wait:
                    await permit.acquire()
            await self._ask(job, chunk, permit)
        finally:
            permit.release()
            await self.end(lambda: (len(chunk.quota_ids), len(chunk.quota_ids)))
        return tuple(job.account().answer.outcomes())

    async def _ask(self, job: Job, chunk: Chunk, permit: Permit) -> None:
        """Find the outcomes of the quota IDs of a job that are not known: of all, or of a part."""
        try:
            if job.answered is None and self._stopped_by is not None:
                job.note(failed(chunk, self._stopped_by))
                job.answered = job.account()
            if job.answered is not None:
                # Thousands of such jobs may follow each other, so each gives the event loop a turn.
                await checkpoint()
                return
            await self._ask_in_parts(job, chunk, permit)
            job.answered = job.account()
        finally:
            self._settle(job, chunk)

    def _settle(self, job: Job, chunk: Chunk) -> None:
        """Note that a job is no longer in flight, and report it."""
        if self._asked is not None:
            self._asked.settle(job)
        elif self._replay is not None:
            self._replay.settle(job.chunk)
        if job.timeline is not None:
            job.timeline.enter(DECODE)
        if self._caller.hooks is not None:
            self._report(job, chunk, self._caller.hooks)

    async def _ask_repeated(
        self, job: Job, repetition: EarlierOutcomes, new_permit: Callable[[], Permit]
    ) -> None:
        """Wait for the earlier requests about the same pairs. Send only what they did not send."""
        await checkpoint()
        outcomes = await repetition.settled()
        # No `await` up to `take_up`: of several places that wait here, only one sends a pair.
        known = tuple([outcome for outcome in outcomes if outcome.status != "not_sent"])
        known_ids = tuple([outcome.quota_id for outcome in known])
        places = Counter(job.chunk.each_place())
        rest = Chunk.of(
            job.chunk.member_code,
            {quota_id: places[quota_id] for quota_id in job.chunk.quota_ids if quota_id not in known_ids},
        )
        job.note(Answered.of(Chunk(rest.member_code, known_ids), Listed(known)))
        job.repetition = None
        if not rest.quota_ids or self._asked is None:
            job.answered = job.account()
            return
        self._asked.take_up(job, rest.quota_ids)
        permit, job.timeline = new_permit(), self._caller.timeline(BULK)
        try:
            await self._ask(job, rest, permit)
        finally:
            permit.release()

    def _report(self, job: Job, chunk: Chunk, hooks: Hooks) -> None:
        answers = job.account().answer.answers
        # What is repeated was reported before, and what was withheld comes again.
        if chunk is not job.chunk or any(isinstance(error, WithheldError) for error in answers.errors):
            kept = [
                outcome
                for outcome in job.account().answer.outcomes()
                if outcome.quota_id in chunk.quota_ids and not isinstance(outcome.error, WithheldError)
            ]
            answers = Listed(tuple(kept))
        outcomes = answers.tally()
        if not self._is_explained:
            hooks.count("bulk_invite", outcomes)
        elif outcomes:  # none if all are from a journal
            error = next(iter(answers.errors), None)
            hooks.call_ended(
                "bulk_invite",
                len(chunk.quota_ids),
                job.timeline or self._caller.timeline(BULK),
                job.ended,
                began=job.attempts,
                error=error,
                delivery="answered" if error is None else error.delivery,
                outcomes=outcomes,
                fan_out=self._span,
            )

    async def _ask_on_record(self, job: Job, permit: Permit, recorder: Recorder) -> Callable[[], object] | None:
        # The order protects against a second invite: nothing is sent before its row is on disk, and the user
        # receives no outcome before that is on disk too.
        timeline = job.timeline
        assert timeline is not None
        if not recorder.may_send(job.chunk):
            recorder.note_withheld(job.chunk)
            job.note(failed(job.chunk, WithheldError()))
            job.answered = job.account()
            return None
        number = recorder.note_sent(job.chunk)

        try:
            timeline.enter(JOURNAL)
            await recorder.written()
            timeline.enter(PERMIT)
            await self._ask_in_parts(job, job.chunk, permit)
            job.answered = job.account()
        except BaseException:
            # The outcomes known by now are written with the next rows.
            recorder.note_answered(number, job.account().answer.outcomes())
            self._settle(job, job.chunk)
            raise
        # As a list, so that the user gets the same objects, and they are made once.
        outcomes = tuple(job.answered.answer.outcomes())
        job.answered = Answered.of(job.chunk, Listed(outcomes), job.answered.answer.unrequested)
        recorder.note_answered(number, outcomes)
        timeline.enter(JOURNAL)

        # The disk takes its time. Meanwhile this task goes on with the next job.
        settle = self._unsettled[number] = partial(self._settle_recorded, number, job)
        return settle

    def _settle_recorded(self, number: int, job: Job) -> None:
        if self._unsettled.pop(number, None) is not None:
            self._settle(job, job.chunk)

    async def _ask_in_parts(self, job: Job, chunk: Chunk, permit: Permit) -> None:
        """Send a chunk. If it is refused because of one of its IDs, send it again in halves."""
        # Example: of the IDs 1 to 4 the service refuses 3. The requests are (1 2 3 4), then (1 2), (3 4), then
        # (3), (4). Only 3 ends refused.
        parts = [chunk]
        answered_before = self._answered
        asked = accepted = 0
        refused: SamplingError | None = None
        while parts:
            part = parts.pop(0)
            if refused is not None and not self._continues_splitting(refused, asked, accepted):
                job.note(failed(part, refused))
                continue
            asked += 1
            track = job.begin(part, is_explained=self._is_explained, fan_out=self._span)
            if self._recorder is not None:
                track.is_wanted = partial(self._recorder.may_send, part)
            try:
                job.note(await self._request(part, permit, track))
                accepted += 1
                self._answered += 1
            except InvalidRequestError:  # pragma: no cover  the first request of a wrong loop raises earlier
                # The client is used from a wrong event loop. That is the caller's error, not an outcome.
                raise
            except SamplingError as exc:
                self._stop(exc)
                if self._may_be_about_one_id(part, exc, others_answered=self._answered > answered_before):
                    refused = exc
                    parts.extend(cut(part, (len(part.quota_ids) + 1) // 2))
                else:
                    job.note(failed(part, exc))
            except BaseException as exc:
                if not is_test_failure(exc):
                    raise
                self._test_failure = self._test_failure or exc
                job.note(failed(part, _of_a_mock(exc, track)))
        if refused is not None and not accepted:
            # All parts were refused too, so no single ID is the reason. Do not split further chunks.
            self._isolates = False

    def _continues_splitting(self, refused: SamplingError, asked: int, accepted: int) -> bool:
        """Return whether to send another part of a refused chunk."""
        in_vain = asked > _TRIED_WITHOUT_SUCCESS and not accepted
        if self._stopped_by is not None or asked > _MOST_PARTS or in_vain:
            return False
        # A 503 may still be about load, and more requests make that worse. So each part costs a retry token.
        return isinstance(refused, BadRequestError) or self._caller.budget.spend()

    def _may_be_about_one_id(self, chunk: Chunk, error: SamplingError, *, others_answered: bool) -> bool:
        """Return whether one ID of several may be the reason for a refusal that processed nothing.

        A 503 counts as overload, unless other requests were successful at the same time.
        """
        if len(chunk.quota_ids) == 1 or not self._isolates or error.delivery != "answered":
            return False
        if isinstance(error, BadRequestError):
            return error.result_code not in _NOT_OF_A_QUOTA
        if not (
            isinstance(error, ServiceError) and error.status == UNAVAILABLE in self._caller.policy.unprocessed
        ):
            return False
        return error.retry_after is None and error.attempts > 1 and others_answered

    async def _request(self, chunk: Chunk, permit: Permit, track: CallTrack) -> Answered:
        call, started = bulk_invite(self._panel_guid, chunk.member_code, chunk.quota_ids), self._caller.clock()
        try:
            answer = await self._caller.run(call, permit, track)
            self._caller.assign_links(
                chunk.member_code, answer.links(), call, track, path="$.Invites", started=started
            )
        except BaseException:
            track.discard_connection()
            raise
        errors = answer.answers.errors
        if answer.unrequested or errors:
            # It may be the response to another request, and the right one may still come.
            track.discard_connection()
        else:
            track.release_connection()
        for error in errors:
            error.attempts = track.attempts
            error.elapsed = self._caller.clock() - started
            self._caller.note_headers(error, call, track)
        return Answered(chunk, _reply_to_resent(answer) if track.ambiguous else answer)

    def _stop(self, error: SamplingError) -> None:
        """Send no more chunks after an error that concerns all of them, such as a refused key or an outage.

        A Retry-After that is too long to wait for is such an error too.
        """
        too_long = error.retry_after is not None and error.retry_after > MAX_RETRY_AFTER
        stops = isinstance(error, ForbiddenError | ClientClosedError | OutageError)
        if self._stopped_by is None and (too_long or stops):
            # The remaining chunks get this error without having been sent, so it counts no attempt and no time.
            self._stopped_by = delivered(error, "not_sent")
            self._stopped_by.attempts, self._stopped_by.elapsed, self._stopped_by.timing = 0, 0.0, None


def _of_a_mock(exc: BaseException, track: CallTrack) -> TransportError:
    error = TransportError(
        f"the transport raised {type(exc).__name__}", endpoint="bulk_invite", delivery=track.delivery
    )
    error.attempts = track.attempts
    return error


_RESENT: Final = "this was sent again after an attempt that may have worked: an earlier invite may exist"


def _reply_to_resent(answer: BulkReply) -> BulkReply:
    """Mark the outcomes of a response that followed an attempt which may have worked.

    A rejection proves nothing in this case: the service may reject the member because of the lost invite.
    """
    return evolve(answer, answers=Listed(tuple([_marked_as_resent(outcome) for outcome in answer.outcomes()])))


def _marked_as_resent(outcome: InviteOutcome) -> InviteOutcome:
    outcome = replace(outcome, anomaly="; ".join(filter(None, (outcome.anomaly, _RESENT))))
    if outcome.status != "rejected":
        return outcome
    error = SamplingError(f"rejected when {_RESENT}", endpoint="bulk_invite", delivery="unknown")
    return replace(outcome, status="unknown", error=error)
