"""Reports of attempts and calls for those who watch a client: hooks of the user, and OpenTelemetry.

A report holds no member code, no key, no PanelGUID and no URL.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final, Protocol

from anyio import get_cancelled_exc_class
from attrs import define, field, frozen

from sampling_async._contract.errors import Delivery, Endpoint, InvalidRequestError, SamplingError, ServiceError
from sampling_async._contract.headers import HeaderReader, no_headers, request_id_of
from sampling_async._contract.logs import PanelLogger
from sampling_async._contract.timing import STAGES, Timing
from sampling_async._wire.session import Track

if TYPE_CHECKING:
    from collections.abc import Callable

    from sampling_async._contract.exchange import Call, Reply
    from sampling_async._pacing.timeline import Timeline

instrumented: Any = None
"""The `Telemetry` of clients that are given none, if an instrumentor has set one."""

MOST_ATTEMPTS: Final = 32  # in the report of a call: a chunk may go back into its lane for minutes

logger: Final = logging.getLogger("sampling_async.calls")


@define
class CallTrack(Track):
    """What is known of a running call, with its clock and what its reports need."""

    timeline: Timeline = field(kw_only=True, repr=False)
    # attempts that have ended, if they are explained and anybody watches the client
    ended: tuple[Ended, ...] = field(default=(), repr=False)
    is_explained: bool = True  # whether somebody may ask for a report of these attempts
    # called with the error or None when the attempt whose response goes on has ended
    at_end: Callable[[BaseException | None], None] | None = field(default=None, repr=False)
    # asked before each attempt but the first
    is_wanted: Callable[[], bool] | None = field(default=None, repr=False)
    # what `Hooks.fan_out_began` returned, if the call belongs to a fan-out
    fan_out: object = field(default=None, repr=False)


@frozen(kw_only=True)
class AttemptReport:
    """One attempt that has ended, for `on_attempt`.

    Attributes:
        endpoint: The endpoint.
        number: 1 for the first attempt of a request, 2 for the first repetition.
        quota_ids: The number of quota IDs in the request.
        status: The HTTP status, or None if there was no response.
        error: The name of the error's class; None if the response could be read. Missing items of a bulk, or
            items of other quota IDs, show in its outcomes only.
        delivery: Whether the attempt reached the service; `answered` after a response.
        began: Seconds from the beginning of the call to the beginning of the attempt.
        timing: Where the time went: `connect`, `send`, `first_byte` and `body`.
        headers: Headers of the response for support cases, see `SamplingError`; empty if none came.
    """

    endpoint: Endpoint
    number: int
    quota_ids: int
    status: int | None
    error: str | None
    delivery: Delivery
    began: float
    timing: Timing
    headers: Mapping[str, str] = field(factory=dict[str, str], hash=False)

    @property
    def request_id(self) -> str | None:
        """The ID that the service, or else a proxy, gave the request in a header; None if there was none."""
        return request_id_of(self.headers)


@frozen(kw_only=True)
class CallReport:
    """One call that has ended, for `on_outcome`: one request of a bulk, or one call of another endpoint.

    Attributes:
        endpoint: The endpoint.
        quota_ids: The number of quota IDs in the request.
        error: The name of the error's class, or None if the call succeeded.
        delivery: Whether the call may have had its effect; `answered` if it succeeded.
        outcomes: For invites, the number of quota IDs by status and result code, such as
            `{("invited", 1): 41, ("rejected", 9): 59}`; see `InviteOutcome.status`. Empty for other endpoints.
        attempts: The latest 32 attempts.
        timing: Where the time of the whole call went.
    """

    endpoint: Endpoint
    quota_ids: int
    error: str | None
    delivery: Delivery
    outcomes: Mapping[tuple[str, int | None], int]
    attempts: Sequence[AttemptReport]
    timing: Timing


@define
class Ended:
    """An attempt that has ended, as kept for a report that may be wanted later. It is cheap to make."""

    number: int  # 1 for the first attempt of a request
    quota_ids: int
    status: int | None
    before: Sequence[float]  # the seconds in each stage of the call when the attempt began
    after: Sequence[float]  # the same when it ended
    error: str | None = None  # the name of the failure
    delivery: Delivery = "answered"
    headers: HeaderReader = no_headers

    def report(self, endpoint: Endpoint) -> AttemptReport:
        spent = (then - now for now, then in zip(self.before, self.after, strict=True))
        return AttemptReport(
            endpoint=endpoint,
            number=self.number,
            quota_ids=self.quota_ids,
            status=self.status,
            error=self.error,
            delivery=self.delivery,
            began=sum(self.before),
            timing=Timing(**dict(zip(STAGES, spent, strict=True)), attempts=1),
            headers=self.headers(),
        )


class Spans(Protocol):
    """What makes spans and metrics of what ends."""

    def attempt_ended(
        self, endpoint: Endpoint, status: int | None, error: str | None, seconds: float, fan_out: object
    ) -> None:
        """Record the end of an attempt, of a fan-out if its span is given."""

    def count(self, endpoint: Endpoint, outcomes: Mapping[tuple[str, int | None], int]) -> None:
        """Record outcomes of a call that gets no span."""

    def call_ended(
        self,
        endpoint: Endpoint,
        seconds: float,
        outcomes: Mapping[tuple[str, int | None], int],
        report: Callable[[], CallReport],
        fan_out: object,
    ) -> None:
        """Record the end of a call, of a fan-out if its span is given; `report` makes the report."""

    def fan_out_began(self) -> object:
        """Return the span of a fan-out that begins, for `fan_out_ended`."""

    def needs_reports(self, fan_out: object) -> bool:
        """Return whether the reports of the requests of a fan-out may be read."""
        ...

    def fan_out_ended(self, fan_out: object, taken: int, answered: int) -> None:
        """Record the end of a fan-out."""


class Hooks:
    """Those who watch a client. A failure in one is logged once, and is never the caller's."""

    def __init__(
        self,
        on_attempt: Callable[[AttemptReport], object] | None,
        on_outcome: Callable[[CallReport], object] | None,
        spans: Spans | None,
        name: str | None = None,
    ) -> None:
        self._logger = PanelLogger(logger, name)
        for which, hook in (("on_attempt", on_attempt), ("on_outcome", on_outcome)):
            if iscoroutinefunction(hook) or iscoroutinefunction(getattr(hook, "__call__", None)):  # noqa: B004
                raise InvalidRequestError(
                    f"{which} must be a plain function: a coroutine would never be awaited"
                )
        self._on_attempt = on_attempt
        self._on_outcome = on_outcome
        self._spans = spans
        self._failed: set[str] = set()

    def _notify(self, name: str, hook: Callable[..., object], *given: object) -> object:
        try:
            return hook(*given)
        except (Exception, get_cancelled_exc_class()):
            # A plain function cannot be cancelled: such an error comes from something it looked at.
            if name not in self._failed:
                self._failed.add(name)
                self._logger.exception("%s failed; this is logged once, and the call goes on", name)
        return None

    def attempt_ended(
        self,
        call: Call[Any],
        track: CallTrack,
        answer: Reply | SamplingError | None,
        error: BaseException | None,
        *,
        seconds: float,
        before: Sequence[float],
        headers: HeaderReader,
    ) -> None:
        """Report an attempt, and note it for the report of its call.

        The attempt was cut off if there is neither a response nor a failure.
        """
        status, name = _status_of(answer), None if error is None else type(error).__name__
        if self._spans is not None:
            attempt = call.endpoint, status, name, seconds, track.fan_out
            self._notify("telemetry", self._spans.attempt_ended, *attempt)
        if not track.is_explained:
            return
        ended = Ended(
            track.attempts,
            call.quota_ids,
            status,
            before,
            tuple(track.timeline.seconds),
            name,
            delivery_of_attempt(track, error),
            headers,
        )
        track.ended = (*track.ended[1 - MOST_ATTEMPTS :], ended)
        if self._on_attempt is not None:
            self._notify("on_attempt", self._on_attempt, ended.report(call.endpoint))

    def call_ended(
        self,
        endpoint: Endpoint,
        quota_ids: int,
        timeline: Timeline,
        attempts: Sequence[Ended],
        *,
        began: int,
        error: BaseException | None,
        delivery: Delivery,
        outcomes: Mapping[tuple[str, int | None], int],
        fan_out: object = None,
    ) -> None:
        """Report a call: its latest attempts, how many `began`, and its quota IDs by status and result code."""

        def report() -> CallReport:
            return CallReport(
                endpoint=endpoint,
                quota_ids=quota_ids,
                error=None if error is None else type(error).__name__,
                delivery=delivery,
                outcomes=outcomes,
                attempts=tuple(each.report(endpoint) for each in attempts),
                timing=timeline.timing(began),
            )

        if self._spans is not None:
            seconds = timeline.since - timeline.began
            self._notify("telemetry", self._spans.call_ended, endpoint, seconds, outcomes, report, fan_out)
        if self._on_outcome is not None:
            self._notify("on_outcome", self._on_outcome, report())

    def count(self, endpoint: Endpoint, outcomes: Mapping[tuple[str, int | None], int]) -> None:
        """Report the outcomes of a call whose report nobody needs: see `needs_reports`."""
        if self._spans is not None:
            self._notify("telemetry", self._spans.count, endpoint, outcomes)

    def fan_out_began(self) -> object:
        return None if self._spans is None else self._notify("telemetry", self._spans.fan_out_began)

    def needs_reports(self, fan_out: object) -> bool:
        if self._on_attempt is not None or self._on_outcome is not None:
            return True
        return self._spans is not None and self._notify("telemetry", self._spans.needs_reports, fan_out) is True

    def fan_out_ended(self, fan_out: object, taken: int, answered: int) -> None:
        if self._spans is not None:
            self._notify("telemetry", self._spans.fan_out_ended, fan_out, taken, answered)


def delivery_of_attempt(track: Track, ended: object) -> Delivery:
    """Return whether an attempt reached the service, by the error with which it ended, if it did."""
    if isinstance(ended, SamplingError):
        return ended.delivery
    return track.delivery if isinstance(ended, BaseException) else "answered"


def _status_of(answer: Reply | SamplingError | None) -> int | None:
    if isinstance(answer, ServiceError):
        return answer.status
    return None if answer is None or isinstance(answer, SamplingError) else answer.status
