"""One attempt of a call: sent under a permit, decoded, reported; and what it shows of the service."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import anyio

from sampling_async._calls.reports import delivery_of_attempt
from sampling_async._calls.retry import (
    is_refused_for_load,
    may_concern_one_endpoint,
    shows_outage,
    shows_overload,
)
from sampling_async._contract.errors import (
    DecodeError,
    Endpoint,
    SamplingError,
    ServiceError,
    TransportTimeoutError,
)
from sampling_async._contract.exchange import ANSWERS, Reply
from sampling_async._contract.headers import no_headers, request_id_of
from sampling_async._contract.logs import PanelLogger
from sampling_async._pacing.latency import LatencyHistogram
from sampling_async._pacing.outage import Away
from sampling_async._pacing.threads import in_thread
from sampling_async._pacing.timeline import CONNECT, DECODE
from sampling_async._protocol.refusals import ReceivedHeaders, disguised_refusal, refusal
from sampling_async._wire.session import Track

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from sampling_async._calls.reports import CallTrack, Hooks
    from sampling_async._contract.exchange import Call
    from sampling_async._pacing.gate import Gate, Permit
    from sampling_async._pacing.outage import Outage
    from sampling_async._wire.session import BodyReader, Session

_NO_TIME: Final = 0.001
"""A failure with less than this left of the deadline is due to the deadline, not to the service."""


class Feedback:
    """What the attempts of all clients with the same connections show of the service.

    Attributes:
        ended: Attempts that have ended.
        failed: Those of them that failed.
        too_late: Calls that could not be sent before their deadline.
        unused: Invites of clicks that no click has got yet.
        latency: Durations of answered attempts, by endpoint.
    """

    def __init__(self, gate: Gate, outage: Outage) -> None:
        self._gate = gate
        self._outage = outage
        self.ended = self.failed = self.too_late = self.unused = 0
        self.latency: dict[Endpoint, LatencyHistogram] = {}

    def attempt_ended(
        self,
        call: Call[Any],
        permit: Permit,
        answer: Reply | SamplingError,
        began: float,
        now: float,
        *,
        read_limit: Callable[[Endpoint, int], float],
    ) -> None:
        permit.kind.rest(now - began, now)
        if isinstance(answer, SamplingError):
            # After the deadline, the failure itself says nothing about the service.
            if permit.remaining > _NO_TIME:
                self._record_failure(call, permit, answer, began, now)
            elif permit.kind.was_cut_off(now - began, now):
                self._gate.overloaded(permit, was_late=permit.is_waited_for)
            return
        if answer.is_page:
            # With a page a proxy announces its maintenance, and the status may be any.
            permit.kind.pace.answered(now)
            self._went_away(call, "a page came in place of the service's JSON", began, is_certain=False)
            return
        histogram = self.latency.get(call.endpoint)
        if histogram is None:
            histogram = self.latency[call.endpoint] = LatencyHistogram()
        histogram.add(now - began, now)
        self._outage.answered(now)
        limit, generation, running = permit.kind.adaptive, permit.generation, len(permit.kind.held)
        permit.kind.pace.answered(now, is_news=generation == limit.generation)
        if call.quota_ids:
            limit.answered_in(
                now - began,
                quota_ids=call.quota_ids,
                patience=read_limit(call.endpoint, call.quota_ids),
                callers=self._gate.callers.at(now),
                generation=generation,
                running=running,
                among=permit.among,
            )
        else:
            limit.answered(generation, running)
        if call.endpoint != "bulk_invite":
            permit.kind.took(now - began, self._gate.callers.at(now))

    def attempt_cancelled(self, permit: Permit, seconds: float, seconds_of_call: float) -> None:
        """Record that a host cancelled a call while an attempt had no response."""
        now = self._gate.clock()
        if permit.was_cancelled(seconds_of_call):
            permit.kind.rest(seconds, now)
            if permit.kind.was_cut_off(seconds, now):
                self._gate.overloaded(permit, was_late=True)

    def _record_failure(
        self, call: Call[Any], permit: Permit, error: SamplingError, began: float, now: float
    ) -> None:
        if is_refused_for_load(error):
            self._gate.refused(permit)
        elif shows_overload(error):
            self._gate.overloaded(permit)
        else:
            permit.kind.pace.answered(now)
        is_away = shows_outage(error)
        if is_away:
            is_certain = not may_concern_one_endpoint(error)
            self._went_away(call, str(error.args[0]), began, error.retry_after or 0.0, is_certain=is_certain)
        elif is_away is False:
            self._outage.answered(now)

    def _went_away(
        self, call: Call[Any], cause: str, began: float, retry_after: float = 0.0, *, is_certain: bool
    ) -> None:
        # Get Settings does not begin an outage. It is also the test whether the outage has ended, so if only
        # this endpoint failed, the outage would never end.
        if call.endpoint != "get_settings":
            self._outage.failed(cause, began, retry_after=retry_after, is_certain=is_certain)


T = TypeVar("T")

_THREADS: Final = 4
_THREADED_BYTES: Final = 2**20
"""Bodies of at least this size are decoded in a thread, so that they do not block the event loop."""

logger: Final = logging.getLogger("sampling_async.calls")


class Attempts:
    """The attempts of one client's calls."""

    def __init__(
        self,
        session: Session,
        feedback: Feedback,
        hooks: Hooks | None,
        unprocessed: AbstractSet[int],
        name: str | None,
    ) -> None:
        self._logger = PanelLogger(logger, name)
        self._session = session
        self._feedback = feedback
        self._hooks = hooks
        self._unprocessed = unprocessed
        self._threads: anyio.CapacityLimiter | None = None

    async def make(
        self, call: Call[T], permit: Permit, track: CallTrack, read: BodyReader | None
    ) -> T | SamplingError:
        """Make one attempt under a permit, and decode the response.

        After a success the permit is still held. The caller judges the result, and then calls
        `track.release_connection` or `track.discard_connection`.
        """
        began, number = track.timeline.enter(CONNECT), track.attempts
        before = tuple(track.timeline.seconds) if self._hooks is not None and track.is_explained else ()
        answer: Reply | SamplingError | None = None
        now = began
        result: T | SamplingError
        try:
            answer = await self._answer(call, permit, track, read)
            if track.attempts == number:  # the client is closed, so nothing was begun
                permit.release()
                return cast("SamplingError", answer)
            now = track.timeline.enter(DECODE)
            limit = self._session.read_limit
            self._feedback.attempt_ended(call, permit, answer, began, now, read_limit=limit)
            if isinstance(answer, SamplingError):
                result = answer
            elif len(answer.body) < _THREADED_BYTES:
                result = self._decoded(call, answer)
            else:
                result = await self._decoded_in_thread(call, permit, answer)
        except BaseException as exc:  # the call was cancelled, or a signal handler raised
            if track.attempts > number:
                if answer is None:
                    now = track.timeline.enter(DECODE)
                    self._feedback.attempt_cancelled(permit, now - began, sum(track.timeline.seconds))
                self._end(call, track, answer, exc, seconds=now - began, before=before)
            raise
        failure = result if isinstance(result, SamplingError) else None
        if failure is not None:
            permit.release()
        if isinstance(answer, Reply) and answer.goes_on:
            earlier = sum(track.timeline.seconds) - (now - began)
            end = partial(self._end, call, track, answer, before=before)
            track.at_end = partial(self._at_end, track, earlier, end)
        else:
            # Reported now, because a response that cannot be read is a failed attempt.
            self._end(call, track, answer, failure, seconds=now - began, before=before)
        return result

    def _at_end(
        self, track: CallTrack, earlier: float, end: Callable[..., None], error: BaseException | None
    ) -> None:
        """End an attempt whose response goes on after its first part; the time of its reader does not count."""
        track.timeline.enter(DECODE)
        end(error, seconds=sum(track.timeline.seconds) - earlier)

    def _end(
        self,
        call: Call[Any],
        track: CallTrack,
        answer: Reply | SamplingError | None,
        error: BaseException | None,
        *,
        seconds: float,
        before: Sequence[float],
    ) -> None:
        """Count and log an attempt that has ended, and call the hooks. Judge the response of a failed one."""
        if isinstance(error, ServiceError) and error.result_code is not None:
            track.release_connection()  # the service's own refusal; others may belong to another request
        elif error is not None:
            track.discard_connection()
        self._feedback.ended += 1
        self._feedback.failed += isinstance(error or answer, SamplingError)
        self._log(call, track, seconds, error or answer)
        if self._hooks is not None:
            headers = self.headers_of(call.private, track) if track.is_explained else no_headers
            self._hooks.attempt_ended(
                call, track, answer, error, seconds=seconds, before=before, headers=headers
            )

    async def _answer(
        self, call: Call[T], permit: Permit, track: CallTrack, read: BodyReader | None
    ) -> Reply | SamplingError:
        try:
            reply = await self._session.attempt(call, track, permit.remaining, read)
        except SamplingError as exc:
            # The traceback has this frame, and would keep it until a garbage collection.
            return exc.with_traceback(None)
        if reply.status in ANSWERS or reply.result is not None:  # a 304 stands for what the user holds
            return reply
        return refusal(reply, private=self._secrets_of(call), unprocessed=self._unprocessed) or reply

    async def _decoded_in_thread(self, call: Call[T], permit: Permit, reply: Reply) -> T | SamplingError:
        permit.release()
        with anyio.move_on_after(permit.remaining):
            self._threads = self._threads or anyio.CapacityLimiter(_THREADS)
            async with self._threads:
                return await in_thread(self._decoded, call, reply)
        return TransportTimeoutError("the deadline passed while the response was decoded", delivery="unknown")

    def _decoded(self, call: Call[T], reply: Reply) -> T | SamplingError:
        if reply.result is not None:
            return cast("T", reply.result)
        try:
            return call.read(reply.body)
        except DecodeError as exc:
            exc.__context__ = None
            # The traceback's frames hold the body in their local variables, and the body may repeat secrets.
            return disguised_refusal(reply, private=self._secrets_of(call)) or exc.with_traceback(None)

    async def probe(self, call: Call[Any], seconds: float) -> Away | None:
        """Make one attempt without a permit, of a call without effect; return None if the service responds."""
        error: SamplingError | None
        track = Track()
        try:
            reply = await self._session.attempt(call, track, seconds)
            error = refusal(reply)
            if error is None and reply.is_page:
                return Away(is_certain=False)
        except SamplingError as exc:
            error = exc.with_traceback(None)
        finally:
            track.discard_connection()  # its body is not read
        if error is None or not shows_outage(error):
            return None
        return Away(error.retry_after or 0.0, not may_concern_one_endpoint(error))

    def headers_of(self, private: tuple[str, ...], track: Track) -> ReceivedHeaders:
        """Return the headers of the latest response to a call, not to repeat the texts in `private`."""
        return ReceivedHeaders(track.raw_headers, private, self._session.private)

    def _secrets_of(self, call: Call[Any]) -> tuple[str, ...]:
        return *call.private, *self._session.private()

    def _log(self, call: Call[Any], track: CallTrack, seconds: float, answer: object) -> None:
        """Log the result of an attempt by the endpoint's name, never with a URL or a member code."""
        if not logger.isEnabledFor(logging.DEBUG):
            return
        ended = str(answer.status) if isinstance(answer, Reply | ServiceError) else type(answer).__name__
        headers = self.headers_of(call.private, track)()
        request_id = request_id_of(headers)
        delivery = delivery_of_attempt(track, answer)
        self._logger.debug(
            "%s %s: %s after %.3f s, attempt %d, %d quota IDs, %s, request ID %s",
            call.method,
            call.endpoint,
            ended,
            seconds,
            track.attempts,
            call.quota_ids,
            delivery,
            request_id or "-",
            extra={
                "endpoint": call.endpoint,
                "ended": ended,
                "seconds": seconds,
                "attempt": track.attempts,
                "quota_ids": call.quota_ids,
                "delivery": delivery,
                "request_id": request_id,
                "headers": headers,
            },
        )
