"""The retry decisions, as plain functions without I/O: whether to repeat a call, and after which pause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import Attribute, field, frozen

from sampling_async._contract.checks import is_flag, not_negative, positive
from sampling_async._contract.errors import (
    DecodeError,
    Endpoint,
    InvalidRequestError,
    SamplingError,
    ServiceError,
    TransportError,
)
from sampling_async._contract.exchange import (
    MAX_RETRY_AFTER,
    NOT_FOUND,
    TOO_MANY,
    UNAVAILABLE,
    Meaning,
    statuses,
)
from sampling_async._contract.result_codes import ResultCode
from sampling_async._pacing.patience import doubled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


_PASSING: Final = statuses(Meaning.PASSING)
_UNPROCESSED: Final = statuses(Meaning.UNPROCESSED)
_LOAD: Final = statuses(Meaning.LOAD)
_AWAY: Final = statuses(Meaning.AWAY)
_OVERLOAD: Final = statuses(Meaning.LOAD | Meaning.AWAY)
_ELSEWHERE: Final = statuses(Meaning.ELSEWHERE)


def _status_set(value: Iterable[int]) -> frozenset[int]:
    try:
        return frozenset(value)
    except TypeError:
        raise InvalidRequestError(
            f"RetryPolicy.unprocessed must be a set of HTTP statuses, not {type(value).__name__}"
        ) from None


def _statuses(owner: object, attribute: Attribute[Any], value: frozenset[int]) -> None:
    if not all(type(status) is int and 400 <= status <= 599 for status in value):  # noqa: PLR2004
        name = f"{type(owner).__name__}.{attribute.name}"
        raise InvalidRequestError(
            f"{name} must hold HTTP statuses from 400 to 599, not {sorted(value, key=str)!r}"
        )


@frozen(kw_only=True)
class RetryPolicy:
    """The rules for repeating failed calls.

    Attributes:
        max_attempts: The most attempts of a call; 1 means no retries. A chunk of a fan-out that could not be
            sent, or was refused with 429, was not processed. It goes back into its lane, and the attempt is not
            counted, for as long as `OutagePolicy.patience`.
        base: The longest first backoff, in seconds. It doubles with each attempt. The pause is a random part of
            it, from 0 up.
        throttled_base: The same after 429 and 503.
        cap: The longest backoff, in seconds.
        budget: Retries that the whole client may make in a row without a success, so that retries do not
            multiply the load during an outage. Each retry takes one token.
        deposit: The part of a token that each success puts back.
        retry_ambiguous: Whether a bulk invite that may have been processed is sent once more. Off by default:
            there is no idempotency key, so a second invite may be made. Outcomes after such a retry say so in
            `anomaly`.
        retry_ambiguous_reads: Whether Generate Invite, a GET that has an effect, is repeated if it may have
            been processed. Calls without an effect are always repeated.
        unprocessed: Statuses that prove, with any body, that a request was not processed. After them a bulk
            invite is sent again, or its IDs end `not_sent`. 503 is not among them, because a proxy also sends
            it if a backend has processed a request and then failed. You may add it if there is no proxy in
            between.

    Raises:
        InvalidRequestError: A number is out of its range.
    """

    max_attempts: int = field(default=3, validator=positive)
    base: float = field(default=0.25, validator=not_negative)
    throttled_base: float = field(default=1.0, validator=not_negative)
    cap: float = field(default=20.0, validator=not_negative)
    budget: float = field(default=10.0, validator=not_negative)
    deposit: float = field(default=0.2, validator=not_negative)
    retry_ambiguous: bool = field(default=False, validator=is_flag)
    retry_ambiguous_reads: bool = field(default=True, validator=is_flag)
    unprocessed: frozenset[int] = field(default=_UNPROCESSED, converter=_status_set, validator=_statuses)

    def allows(self, endpoint: Endpoint, failures: Sequence[SamplingError]) -> bool:
        """Return whether to repeat a call after these failures of it, in the order they happened."""
        last = failures[-1]
        if len(failures) >= self.max_attempts or last.permanent:
            return False
        if last.retry_after is not None and last.retry_after > MAX_RETRY_AFTER:
            return False
        if self.says_unprocessed(last):
            return True
        # A second body that cannot be decoded is not a passing problem.
        if isinstance(last, DecodeError) and any(isinstance(error, DecodeError) for error in failures[:-1]):
            return False
        if not _passing(last):
            return False
        if endpoint == "bulk_invite":
            return self.retry_ambiguous and not any(may_have_worked(error) for error in failures[:-1])
        return self.retry_ambiguous_reads if endpoint == "generate_invite" else True

    def says_unprocessed(self, error: SamplingError) -> bool:
        """Return whether a failure proves that the request was not processed, and its cause may pass."""
        if isinstance(error, ServiceError):
            is_said = error.status in self.unprocessed or error.status == UNAVAILABLE
            return is_said and error.delivery == "answered"
        return isinstance(error, TransportError) and error.delivery == "not_sent"

    def backoff(self, failures: Sequence[SamplingError], random: Callable[[], float]) -> float:
        """Return the seconds to wait before the next attempt; `random` returns numbers from 0 to 1."""
        # Example with base 0.25: after the first failure 0 to 0.25 s, after the second 0 to 0.5 s, after the
        # third 0 to 1 s, and never more than `cap`.
        last = failures[-1]
        throttled = isinstance(last, ServiceError) and last.status in _LOAD
        base = self.throttled_base if throttled else self.base
        jittered = random() * doubled(base, len(failures) - 1, self.cap)
        if last.retry_after is None:
            return jittered
        # Never earlier than Retry-After. All clients may have received it at the same moment, so a random part
        # spreads them: with 5 s, they return after 5 to 5.5 s.
        return max(last.retry_after, jittered) + random() * min(1.0, 0.1 * last.retry_after)


def may_have_worked(error: SamplingError) -> bool:
    return error.delivery == "unknown"


def shows_overload(error: SamplingError) -> bool:
    if isinstance(error, ServiceError):
        return error.status in _OVERLOAD
    return isinstance(error, TransportError) and not error.permanent


def is_refused_for_load(error: SamplingError) -> bool:
    """Return whether the service, or a proxy in front of it, refused a request because of too much load."""
    return isinstance(error, ServiceError) and error.status in _LOAD


def shows_outage(error: SamplingError) -> bool | None:
    """Return True for a failure as in an outage, False for a service that works, None if both are possible."""
    if isinstance(error, ServiceError):
        if error.status == TOO_MANY:
            return None
        return error.status in _AWAY or may_concern_one_endpoint(error)
    if isinstance(error, TransportError) and not error.permanent:
        return True
    return None


def may_concern_one_endpoint(error: SamplingError) -> bool:
    """Return whether a failure that looks like an outage may concern one endpoint only.

    A proxy redirects, or returns its own 404 page, while it has no service to send a request to. A 404 in JSON,
    or without a body, comes from a program and is about one address.
    """
    if not isinstance(error, ServiceError):
        return False
    is_foreign_404 = error.status == NOT_FOUND and error.body_excerpt.lstrip()[:1] not in {"", "{", "["}
    return is_foreign_404 or error.status in _ELSEWHERE


def _passing(error: SamplingError) -> bool:
    if isinstance(error, ServiceError):
        return error.status in _PASSING or error.result_code == ResultCode.TECHNICAL_ERROR
    return isinstance(error, TransportError | DecodeError)


class RetryBudget:
    """The client's tokens for retries: each retry takes one, each success puts a part of one back."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._size = policy.budget
        self._deposit = policy.deposit
        self.tokens = policy.budget

    def spend(self) -> bool:
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True

    def deposit(self) -> None:
        self.tokens = min(self._size, self.tokens + self._deposit)
