"""One call from beginning to end: attempts, each under a permit, and the pauses between them."""

from __future__ import annotations

from array import array
from collections import deque
from contextlib import suppress
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar

from attrs import frozen

from sampling_async._calls.attempt import Attempts, Feedback
from sampling_async._calls.reports import CallTrack
from sampling_async._calls.retry import RetryBudget, RetryPolicy, is_refused_for_load, may_have_worked
from sampling_async._contract.errors import (
    BadRequestError,
    ClientClosedError,
    DecodeError,
    Delivery,
    Endpoint,
    OutageError,
    SamplingError,
    ServiceError,
    TransportTimeoutError,
    WithheldError,
)
from sampling_async._contract.exchange import MAX_RETRY_AFTER, TOO_MANY
from sampling_async._contract.logs import PanelLogger
from sampling_async._contract.timing import explain
from sampling_async._pacing.outage import logger
from sampling_async._pacing.timeline import BACKOFF, HOLD, PERMIT, Timeline

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from sampling_async._calls.reports import Hooks
    from sampling_async._contract.exchange import Call
    from sampling_async._contract.timing import Timing
    from sampling_async._pacing.gate import Gate, Permit
    from sampling_async._pacing.outage import Outage
    from sampling_async._wire.session import BodyReader, Session

_REMEMBERED: Final = 32_768
"""After this many links the older half is forgotten. They are the links of some hundred requests, a few MB."""


class InviteOwners:
    """The latest links of a client, each with the member who received it."""

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._latest: dict[int, str] = {}
        self._before: dict[int, str] = {}
        self._most = most
        # The links of the member who had the last response: until another member has one, nobody looks for them
        # by link. To put them into a dict would cost a large bulk of one member 12 % of its CPU time.
        self._member_code = ""
        self._of_member: deque[array[int]] = deque()
        self._number = 0  # of these links

    def assign(self, member_code: str, links: Sequence[str], path: str) -> None:
        """Record that a member received the links of one response.

        A link of another member raises a DecodeError: then nothing in this response can be trusted.
        """
        # This runs for every response, so it is a few steps in C over all links, without a Python loop. The
        # keys are hashes, which need the same memory for a link of any length.
        keys = array("q", [*map(hash, filter(None, links))])
        if not keys:
            return
        if member_code != self._member_code:
            self._file()
            self._member_code = member_code
        for known in filter(None, (self._latest, self._before)):
            owners = [*filter(None, map(known.get, keys))]
            if owners.count(member_code) != len(owners):
                raise DecodeError(
                    path, "expected an invite of this member, found a link that another member was given"
                )
        self._of_member.append(keys)
        self._number += len(keys)
        while self._number - len(self._of_member[0]) > self._most:
            self._number -= len(self._of_member.popleft())

    def _file(self) -> None:
        """Make the links of the last member known by link."""
        self._latest.update(dict.fromkeys(chain.from_iterable(self._of_member), self._member_code))
        self._of_member.clear()
        self._number = 0
        # Two generations: a full one becomes the older one, and the older one before it is dropped as a whole.
        if len(self._latest) > self._most:
            self._before, self._latest = self._latest, {}


T = TypeVar("T")

_LEAST_SECONDS: Final = 0.05
"""Another attempt begins only if this much is left of the deadline, or more if such calls take longer."""

_MOST_DOUBLINGS: Final = 7


@frozen
class Common:
    """What the callers of all clients with the same connections share."""

    links: InviteOwners
    feedback: Feedback
    budget: RetryBudget


class Caller:
    """The calls of one client, under one gate and one retry policy."""

    def __init__(
        self,
        session: Session,
        gate: Gate,
        outage: Outage,
        policy: RetryPolicy,
        common: Common,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]],
        random: Callable[[], float],
        patience: float = 0.0,
        hooks: Hooks | None = None,
        name: str | None = None,
    ) -> None:
        self._session = session
        self.hooks = hooks
        self._gate = gate
        self.outage = outage
        self.policy = policy
        self.patience = patience  # of a fan-out, in an outage
        self.clock = clock
        self._sleep = sleep
        self._random = random
        self.links, self.feedback, self.budget = common.links, common.feedback, common.budget
        self._log = PanelLogger(logger, name)
        self.attempts = Attempts(session, self.feedback, hooks, policy.unprocessed, name)

    async def call(
        self,
        call: Call[T],
        permit: Permit,
        track: CallTrack | None = None,
        read: BodyReader | None = None,
        check: Callable[[T], object] | None = None,
    ) -> T:
        """Make a call like `run`, note on its result or error where the time went, and report it.

        `check` checks the result, and may raise.
        """
        track = track or self.track(call.endpoint)
        try:
            answer = await self.run(call, permit, track, read)
            if check is not None:
                check(answer)
            track.release_connection()
        except BaseException as exc:
            track.discard_connection()
            self.ended(call, track, exc)
            raise
        finally:
            permit.release()
        explain(answer, self.ended(call, track), self.attempts.headers_of(call.private, track))
        return answer

    def timeline(self, endpoint: Endpoint) -> Timeline:
        """Start the clock of a call."""
        return Timeline(self.clock, self._gate.kind(endpoint).shut)

    def track(self, endpoint: Endpoint) -> CallTrack:
        """Return the track of a new call, and start its clock."""
        timeline = self.timeline(endpoint)
        return CallTrack(timeline=timeline, enter=timeline.enter)

    def ended(self, call: Call[Any], track: CallTrack, error: BaseException | None = None) -> Timing:
        """Report a call that has ended, and return where its time went; its error gets that too."""
        at_end, track.at_end = track.at_end, None
        if at_end is not None:
            at_end(error)
        timing = track.timeline.timing(track.attempts)  # also ends the stage that was cut off
        if isinstance(error, SamplingError):
            error.timing = timing
            self.note_headers(error, call, track)
        self._report(call, track, error)
        return timing

    def _report(self, call: Call[Any], track: CallTrack, error: BaseException | None) -> None:
        if self.hooks is None:
            return
        delivery: Delivery = "answered" if error is None else track.delivery
        if isinstance(error, SamplingError):
            delivery = error.delivery
        outcomes: dict[tuple[str, int | None], int] = {}
        if call.endpoint == "generate_invite":
            code = error.result_code if isinstance(error, ServiceError) else None
            # As for the IDs of a bulk: a refusal that is not about the quota was not processed.
            is_rejected = isinstance(error, BadRequestError) and delivery == "answered"
            status = "rejected" if is_rejected else "unknown" if delivery == "unknown" else "not_sent"
            outcomes = {("invited", 1) if error is None else (status, code): 1}
        self.hooks.call_ended(
            call.endpoint,
            call.quota_ids,
            track.timeline,
            track.ended,
            began=track.attempts,
            error=error,
            delivery=delivery,
            outcomes=outcomes,
        )

    async def run(
        self, call: Call[T], permit: Permit, track: CallTrack | None = None, read: BodyReader | None = None
    ) -> T:
        """Make a call, repeat it as the policy allows, and return its decoded response.

        The caller judges the response, and then calls `track.release_connection` or `track.discard_connection`.
        If this fails, it has discarded the connection. The permit may be held already for the first attempt.
        After a success or a cancellation it may still be held: its owner releases or renews it. `read` reads
        the body of a 200 in place of `Session`, and may decode it part by part.
        """
        track = track or self.track(call.endpoint)
        started = self.clock()
        failures: list[SamplingError] = []
        put_back = 0
        answer: T | SamplingError
        while True:
            answered_at = self.outage.answered_at
            needs_permit = not permit.is_held or permit.remaining <= 0
            refused = (await self._refused(permit) if needs_permit else None) or _unwanted(track)
            if refused is None:
                answer = await self.attempts.make(call, permit, track, read)
            else:
                answer = refused
            if not isinstance(answer, SamplingError):
                self.budget.deposit()
                return answer
            self._note(answer, call, track, started)
            # A fan-out waits during an outage. Before it repeats anything, it finds out whether one has begun.
            if permit.lane.patience:
                track.timeline.enter(HOLD)
                with self._session.until_closed(permit.remaining):
                    await self.outage.probe_if_stuck(lambda: not permit.kind.has_room)
            if self._goes_back(answer, permit, answered_at):
                put_back += 1
                if self.clock() - started > permit.lane.patience:
                    answer = self._refused_for_long(answer, permit, started)
                    self._note(answer, call, track, started)
                    break
                wait = self._in_time(self._rest(answer, put_back), call, permit, answer)
                if wait is None:
                    break
            else:
                failures.append(answer)
                if not self.policy.allows(call.endpoint, failures):
                    break
                wait = self._in_time(self.policy.backoff(failures, self._random), call, permit, answer)
                if wait is None or not self.budget.spend():
                    break
            self._log.debug("%s: attempt %d is repeated in %.3f s", call.endpoint, track.attempts, wait)
            track.timeline.enter(BACKOFF)
            with self._session.until_closed():
                await self._sleep(wait)
            track.timeline.enter(PERMIT)
        self._log.debug("%s: not repeated after attempt %d", call.endpoint, track.attempts)
        answer.timing = track.timeline.timing(track.attempts)
        answer.delivery = _delivery_of_all(call, answer, ambiguous=track.ambiguous)
        try:
            raise answer
        finally:
            # The error's traceback holds this frame. Without `del`, the frame would hold the error, and both
            # would stay in memory until the next garbage collection.
            del answer, failures

    def _goes_back(self, error: SamplingError, permit: Permit, answered_at: float) -> bool:
        """Return whether a chunk goes back into its lane and the attempt is not counted.

        This needs two conditions. The chunk was certainly not processed, and the cause concerns all chunks: no
        connection, or too many requests. A 503 while other requests succeed may be about this chunk, so it
        counts.
        """
        passes = error.retry_after is None or error.retry_after <= MAX_RETRY_AFTER
        may_repeat = permit.lane.patience and self.policy.max_attempts > 1 and not error.permanent
        if not (may_repeat and passes and self.policy.says_unprocessed(error)):
            return False
        if isinstance(error, ServiceError):
            others_answered = self.outage.answered_at > answered_at
            return error.status == TOO_MANY or (is_refused_for_load(error) and not others_answered)
        return True

    def _refused_for_long(self, error: SamplingError, permit: Permit, started: float) -> SamplingError:
        if self.outage.answered_at >= started:
            return error
        return OutageError(
            f"the service processed no request for {permit.lane.patience:.0f} s; the last failure: "
            f"{error.args[0]}"
        )

    def _rest(self, error: SamplingError, put_back: int) -> float:
        """Return the pause before a chunk that went back `put_back` times joins its lane again."""
        if self.outage.is_on or is_refused_for_load(error):
            # No pause here: the gate makes it wait for the end of the outage or of the hold.
            return 0.0
        # As many failures as it went back, so the pause doubles each time.
        return self.policy.backoff([error] * min(put_back, _MOST_DOUBLINGS), self._random)

    def _in_time(self, wait: float, call: Call[Any], permit: Permit, error: SamplingError) -> float | None:
        """Return the pause, shortened so that the next attempt can end in time; None if it cannot."""
        remaining = permit.remaining
        if remaining == inf:
            return wait
        # Example: 10 s remain and such a call takes 2 s, so the pause must be shorter than 8 s. A backoff of
        # 6 s is shortened to half of that, 4 s. A Retry-After of 6 s is kept, one of 9 s gives None.
        line = permit.kind.adaptive.latency.line
        longest = remaining - max(_LEAST_SECONDS, 0.0 if line is None else line(call.quota_ids))
        wait = max(error.retry_after or 0.0, min(wait, longest / 2))
        return wait if 0 <= wait < longest else None

    def must_be_of_this_loop(self) -> None:
        """Refuse use from another event loop than before: a task there would never get a permit."""
        # A closed client is no error here. Each chunk gets it as its outcome.
        with suppress(ClientClosedError):
            self._session.check_usable()

    def assign_links(
        self,
        member_code: str,
        links: Sequence[str],
        call: Call[Any],
        track: CallTrack,
        *,
        path: str,
        started: float,
    ) -> None:
        """Record that the links of a response belong to a member.

        If a link was recorded for another member, the response belongs to another call, and a DecodeError is
        raised. The right response may still arrive, so the idle connections are closed and not used again.
        """
        try:
            self.links.assign(member_code, links, path)
        except DecodeError as exc:
            exc.endpoint = call.endpoint
            exc.attempts = track.attempts
            exc.elapsed = self.clock() - started
            self.note_headers(exc, call, track)
            # The request was sent, and its own response is still unknown.
            track.ambiguous = True
            self._session.close_idle()
            raise

    def wall_limit(self, call: Call[Any]) -> float:
        return self._session.timeouts.wall_limit(call.endpoint)

    async def go_on(
        self, call: Call[Any], track: CallTrack, run: Callable[[], Awaitable[T]], seconds: float
    ) -> T:
        """Read the next part of a response whose first part the caller has already.

        A failure is not repeated, because a part of the response was used.
        """
        began = self.clock()
        try:
            return await self._session.guarded(track, seconds, run)
        except SamplingError as exc:
            self._note(exc, call, track, began)
            # The traceback and the context have frames that hold the body.
            failure = exc.with_traceback(None)
            failure.__context__ = None
        raise failure

    async def _refused(self, permit: Permit) -> SamplingError | None:
        try:
            # Checked before queueing: the gate of another event loop would never wake this task.
            self._session.check_usable()
        except SamplingError as exc:
            return exc
        with self._session.until_closed():
            if await permit.acquire():
                return None
        if self.outage.is_on and permit.remaining > 0:
            return OutageError(
                f"the service has been away for {self.outage.away_for():.1f} s; the last failure: "
                f"{self.outage.cause}. Until it responds, only Get Settings is sent"
            )
        self.feedback.too_late += 1
        late = TransportTimeoutError("the line is longer than the deadline: this cannot be sent in time")
        late.retry_after = permit.held_for or None
        return late

    def note_headers(self, error: SamplingError, call: Call[Any], track: CallTrack) -> None:
        """Note on an error which response was the last, for support cases."""
        if track.raw_headers is not None and not error.headers:
            error.headers = self.attempts.headers_of(call.private, track)()

    def _note(self, error: SamplingError, call: Call[Any], track: CallTrack, started: float) -> None:
        """Add the call's state so far to an error, and apply the hold that the service requests."""
        error.endpoint = call.endpoint
        error.attempts = track.attempts
        error.elapsed = self.clock() - started
        self.note_headers(error, call, track)
        track.ambiguous = track.ambiguous or may_have_worked(error)
        track.sent = False
        if isinstance(error, ServiceError) and error.retry_after and error.retry_after <= MAX_RETRY_AFTER:
            # The service counts requests by key, so a 429 concerns all calls. Other statuses concern the
            # endpoint.
            self._log.debug("%s: held for %.3f s, as the service requests", call.endpoint, error.retry_after)
            self._gate.hold(error.retry_after, None if error.status == TOO_MANY else call.endpoint)
        # A regular rejection comes from a healthy service, so it counts as a success for the retry budget.
        if isinstance(error, BadRequestError) and not may_have_worked(error):
            self.budget.deposit()


def _unwanted(track: CallTrack) -> SamplingError | None:
    if track.is_wanted is None or not track.attempts or track.is_wanted():
        return None
    return WithheldError(permanent=True)  # so it is not repeated


def _delivery_of_all(call: Call[Any], last: SamplingError, *, ambiguous: bool) -> Delivery:
    """Return the delivery of a call after all its attempts.

    For a call with an effect, a later response does not prove that an earlier attempt had no effect. Example:
    the quota is full now, and the invite that filled it may be the one whose response was lost.
    """
    return "unknown" if ambiguous and (last.delivery == "not_sent" or call.has_effect) else last.delivery
