"""One call from beginning to end: attempts, each under a permit, with the waits between them."""

from __future__ import annotations

import logging
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import anyio

from sampling_async._errors import (
    BadRequestError,
    ClientClosedError,
    DecodeError,
    Delivery,
    OutageError,
    SamplingError,
    ServiceError,
    TransportTimeoutError,
)
from sampling_async._links import Links
from sampling_async._policy import (
    MAX_RETRY_AFTER,
    TOO_MANY,
    RetryBudget,
    RetryPolicy,
    is_refused_for_load,
    may_have_worked,
    shows_outage,
    shows_overload,
)
from sampling_async._replies import OK, disguised_refusal, refusal
from sampling_async._session import BodyReader, Session, Track
from sampling_async._threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from sampling_async._gate import Gate, Permit
    from sampling_async._outage import Outage
    from sampling_async._protocol import Call
    from sampling_async._replies import Reply

T = TypeVar("T")

_THREADS: Final = 4
_THREADED_BYTES: Final = 2**20
"""Bodies from this size on are decoded in a thread, so that the event loop gets its turns."""

_LEAST_SECONDS: Final = 0.05
"""What must be left of a deadline for another attempt to begin, and more where it is known to take longer."""

_MOST_DOUBLINGS: Final = 7
_NO_TIME: Final = 0.001

logger: Final = logging.getLogger("sampling_async")


class Caller:
    """Makes calls under one gate, one retry policy and one retry budget.

    Args:
        session: Carries single attempts.
        gate: The limit of the whole client, also held shut while the service asks to wait.
        outage: Whether the service is there at all.
        policy: Whether and when to ask again.
        clock: Seconds, from any start.
        sleep: Waits a number of seconds.
        random: Draws from 0 to 1.
    """

    def __init__(
        self,
        session: Session,
        gate: Gate,
        outage: Outage,
        policy: RetryPolicy,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]],
        random: Callable[[], float],
    ) -> None:
        self._session = session
        self._gate = gate
        self.outage = outage
        self.policy = policy
        self.clock = clock
        self._sleep = sleep
        self._random = random
        self._threads: anyio.CapacityLimiter | None = None
        self.links = Links()
        self.budget = RetryBudget(policy.budget, policy.deposit)

    async def run(
        self, call: Call[T], permit: Permit, track: Track | None = None, read: BodyReader | None = None
    ) -> T:
        """Make a call, again where the policy allows, and return what its body says.

        Args:
            call: What to ask.
            permit: Leave for the attempts; it may be held already for the first one. Its end is the deadline.
            track: Where to note what may have been sent, for a caller that is interrupted.
            read: Reads the body of a 200, and may work on it meanwhile.

        Raises:
            SamplingError: The last failure, with what is known of all attempts.
        """
        track = track or Track()
        started = self.clock()
        failures: list[SamplingError] = []
        put_back = 0
        while True:
            answered_at = self.outage.answered_at
            answer = await self._try(call, permit, track, read)
            if not isinstance(answer, SamplingError):
                self.budget.deposit()
                return answer
            self._note(answer, call, track, started)
            if permit.lane.patience:
                with self._session.until_closed(permit.remaining):
                    await self.outage.make_sure(lambda: not permit.kind.has_room)
            if self._goes_back(answer, permit, answered_at):
                put_back += 1
                if self.clock() - started > permit.lane.patience:
                    answer = self._refused_for_long(answer, permit, started)
                    break
                wait = self._in_time(self._rest(answer, put_back), call, permit, answer)
                if wait is None:
                    break
            else:
                failures.append(answer)
                wait = self._in_time(self.policy.backoff(failures, self._random), call, permit, answer)
                if wait is None or not (self.policy.allows(call.endpoint, failures) and self.budget.spend()):
                    break
            with self._session.until_closed():
                await self._sleep(wait)
        answer.delivery = _delivery_of_all(call, answer, ambiguous=track.ambiguous)
        try:
            raise answer
        finally:
            del answer, failures  # an error whose traceback holds itself lives until the next collection

    def _goes_back(self, error: SamplingError, permit: Permit, answered_at: float) -> bool:
        """Return whether a chunk goes back into the queue, without having used up an attempt.

        So it does where it surely was not processed, and what is wrong is wrong for all: no connection, or too
        many requests. A 503 that counts as one of these, while others are answered, may be about the chunk.
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
        return OutageError(f"nothing was let in for {permit.lane.patience:.0f} s, at last: {error.args[0]}")

    def _rest(self, error: SamplingError, put_back: int) -> float:
        """Return the seconds until a chunk queues again that was put back so often."""
        if self.outage.is_on or is_refused_for_load(error):
            return 0.0  # what it waits for then, it waits for in the queue
        return self.policy.backoff([error] * min(put_back, _MOST_DOUBLINGS), self._random)

    def _in_time(self, wait: float, call: Call[Any], permit: Permit, error: SamplingError) -> float | None:
        """Return a wait that leaves another attempt the time such a call takes; None where there is less."""
        remaining = permit.remaining
        if remaining == inf:
            return wait
        line = permit.kind.adaptive.latency.line
        longest = remaining - max(_LEAST_SECONDS, 0.0 if line is None else line(call.quota_ids))
        wait = max(error.retry_after or 0.0, min(wait, longest / 2))
        return wait if 0 <= wait < longest else None

    def must_be_of_this_loop(self) -> None:
        """Refuse what is asked from another event loop than before; there, its turn would never come."""
        with suppress(ClientClosedError):  # which is told of each chunk
            self._session.check_usable()

    def hand(
        self,
        member_code: str,
        links: Sequence[str],
        call: Call[Any],
        track: Track,
        *,
        path: str,
        started: float,
    ) -> None:
        """Take note that the links of an answer are handed to a member.

        Raises:
            DecodeError: One of them is another member's, so this is not the answer to the call. The right one
                may still be on its way, on a connection that must not carry another request then.
        """
        try:
            self.links.hand(member_code, links, path)
        except DecodeError as exc:
            exc.endpoint = call.endpoint
            exc.attempts = track.attempts
            exc.elapsed = self.clock() - started
            track.ambiguous = True
            self._session.close_idle()
            raise

    def wall_limit(self, call: Call[Any]) -> float:
        """Return the seconds one attempt may take in all."""
        return self._session.timeouts.wall_limit(call.endpoint, call.quota_ids)

    async def go_on(self, call: Call[Any], track: Track, run: Callable[[], Awaitable[T]], seconds: float) -> T:
        """Read on in an answer that was handed over before its end.

        Raises:
            SamplingError: It failed. It is not repeated: a part of the answer has been used.
        """
        began = self.clock()
        try:
            return await self._session.guarded(run, track, seconds)
        except SamplingError as exc:
            self._note(exc, call, track, began)
            failure = exc.with_traceback(None)  # the frames hold the body
            failure.__context__ = None
        raise failure

    async def _try(
        self, call: Call[T], permit: Permit, track: Track, read: BodyReader | None
    ) -> T | SamplingError:
        if not permit.is_held or permit.remaining <= 0:
            try:
                self._session.check_usable()  # before the queue, where another event loop would never wake it
            except SamplingError as exc:
                return exc
            with self._session.until_closed():
                if not await permit.acquire():
                    return self._not_let_in(permit)
        try:
            answer = await self._attempt(call, permit, track, read)
        finally:
            permit.release()
        if isinstance(answer, SamplingError):
            return answer
        if answer.result is not None:
            return cast("T", answer.result)
        if len(answer.body) < _THREADED_BYTES:
            return self._decoded(call, answer)
        with anyio.move_on_after(permit.remaining):
            self._threads = self._threads or anyio.CapacityLimiter(_THREADS)
            async with self._threads:
                return await in_thread(self._decoded, call, answer)
        return TransportTimeoutError("the deadline passed while the answer was read", delivery="unknown")

    def _not_let_in(self, permit: Permit) -> SamplingError:
        if self.outage.is_on and permit.remaining > 0:
            return OutageError(
                f"the service has been away for {self.outage.away_for():.1f} s, the last failure: "
                f"{self.outage.cause}; nothing is sent but Get Settings, until that is answered"
            )
        late = TransportTimeoutError("the deadline passes before this could be sent")
        late.retry_after = permit.held_for or None
        return late

    async def ask_whether_away(self, call: Call[Any], seconds: float) -> float | None:
        """Make a call without an effect once, past all queues.

        Returns:
            None if the service is there, else for how many seconds it wants to be left alone.
        """
        error: SamplingError | None
        try:
            error = refusal(await self._session.attempt(call, Track(), seconds))
        except SamplingError as exc:
            error = exc.with_traceback(None)
        if error is None or not shows_outage(error):
            return None
        return error.retry_after or 0.0

    async def _attempt(
        self, call: Call[T], permit: Permit, track: Track, read: BodyReader | None
    ) -> Reply | SamplingError:
        began = self.clock()
        answer: Reply | SamplingError
        try:
            answer = await self._session.attempt(call, track, permit.remaining, read)
        except SamplingError as exc:
            answer, ended = exc, type(exc).__name__
        else:
            ended = str(answer.status)
            if answer.status != OK:
                unprocessed = self.policy.unprocessed
                answer = refusal(answer, private=self._private(call), unprocessed=unprocessed) or answer
        now = self.clock()
        self._learn(call, permit, answer, began, now)
        self._log(call, track, now - began, ended)
        return answer

    def _learn(
        self, call: Call[Any], permit: Permit, answer: Reply | SamplingError, began: float, now: float
    ) -> None:
        """Let the limits of the client, and what it takes for an outage, follow from how an attempt ended."""
        if isinstance(answer, SamplingError):
            if permit.remaining > _NO_TIME:  # else it was the caller's hurry
                self._learn_failure(call, permit, answer, began, now)
            return
        self.outage.answered(now)
        permit.kind.pace.answered(now)
        limit, generation, running = permit.kind.adaptive, permit.generation, len(permit.kind.held)
        if call.endpoint == "bulk_invite":
            limit.answered_in(
                now - began,
                quota_ids=call.quota_ids,
                patience=self._session.timeouts.read_limit(call.endpoint, call.quota_ids),
                generation=generation,
                running=running,
                among=permit.among,
            )
        else:
            limit.answered(generation, running)

    def _learn_failure(
        self, call: Call[Any], permit: Permit, error: SamplingError, began: float, now: float
    ) -> None:
        if is_refused_for_load(error):
            self._gate.refused(permit)
        elif shows_overload(error):
            self._gate.overloaded(permit)
        else:
            permit.kind.pace.answered(now)
        is_away = shows_outage(error)
        if is_away and call.endpoint != "get_settings":  # which may fail alone, and would never say it is over
            self.outage.failed(str(error.args[0]), began, alone_for=error.retry_after or 0.0)
        elif is_away is False:
            self.outage.answered(now)

    def _decoded(self, call: Call[T], reply: Reply) -> T | SamplingError:
        try:
            return call.read(reply.body)
        except DecodeError as exc:
            exc.__context__ = None
            # The frames that read the body hold it in their locals, with whatever it repeats.
            return disguised_refusal(reply, private=self._private(call)) or exc.with_traceback(None)

    def _note(self, error: SamplingError, call: Call[Any], track: Track, started: float) -> None:
        """Say on the error what is known of the call so far, and obey what the service asks of the client."""
        error.endpoint = call.endpoint
        error.attempts = track.attempts
        error.elapsed = self.clock() - started
        track.ambiguous = track.ambiguous or may_have_worked(error)
        track.sent = False
        if isinstance(error, ServiceError) and error.retry_after and error.retry_after <= MAX_RETRY_AFTER:
            # Requests are counted by key, so a limit on them is about all calls; else it is about the endpoint.
            self._gate.hold(error.retry_after, None if error.status == TOO_MANY else call.endpoint)
        if isinstance(error, BadRequestError) and not may_have_worked(error):
            self.budget.deposit()  # a considered no is the answer of a healthy service

    def _private(self, call: Call[Any]) -> tuple[str, ...]:
        return *call.private, *self._session.private()

    def _log(self, call: Call[Any], track: Track, seconds: float, ended: str) -> None:
        """Say how an attempt ended, by the endpoint's name; URLs and member codes stay out of every log."""
        if not logger.isEnabledFor(logging.DEBUG):
            return
        logger.debug(
            "%s %s: %s after %.3f s, attempt %d, %d quota IDs",
            call.method,
            call.endpoint,
            ended,
            seconds,
            track.attempts,
            call.quota_ids,
        )


def _delivery_of_all(call: Call[Any], last: SamplingError, *, ambiguous: bool) -> Delivery:
    """Return what is known of a call after all its attempts.

    Where asking has an effect, no later answer takes back that an earlier attempt may have had it: a quota that
    is full by now may have been filled by the invite whose answer was lost.
    """
    return "unknown" if ambiguous and (last.delivery == "not_sent" or call.has_effect) else last.delivery
