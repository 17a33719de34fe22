"""When to give up on an answer, when to ask again and how long to wait before: numbers in, decision out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import Attribute, field, frozen

from sampling_async._errors import (
    DecodeError,
    Endpoint,
    InvalidRequestError,
    SamplingError,
    ServiceError,
    TransportError,
)
from sampling_async._models import ResultCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

REFUSED_UNPROCESSED: Final = frozenset({408, 425, 429})
"""Statuses that say, whoever answers, that a request was not processed: it came too late, early or often."""

PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may be others by the next attempt."""

TOO_MANY: Final = 429
_FAILURES: Final = 5
_UNAVAILABLE: Final = 503
_THROTTLED: Final = frozenset({TOO_MANY, _UNAVAILABLE})
_AWAY: Final = frozenset({502, _UNAVAILABLE, 504})
MAX_RETRY_AFTER: Final = 60.0
"""The longest Retry-After, in seconds, that is waited for; a longer one is left to the caller."""

_READ_SECONDS: Final[Mapping[Endpoint, float]] = {
    "get_settings": 15,
    "generate_invite": 20,
    "get_quotas": 30,
    "recontact_members": 60,
}
_WALL_MARGIN: Final = 15.0


def _positive(owner: object, attribute: Attribute[Any], value: float | None) -> None:
    if value is not None and not value > 0:
        name = f"{type(owner).__name__}.{attribute.name}"
        raise InvalidRequestError(f"{name} is a number above 0, not {value!r}")


def _status_set(value: Iterable[int]) -> frozenset[int]:
    try:
        return frozenset(value)
    except TypeError:
        raise InvalidRequestError(
            f"RetryPolicy.unprocessed is a set of HTTP statuses, not {type(value).__name__}"
        ) from None


def _statuses(owner: object, attribute: Attribute[Any], value: frozenset[int]) -> None:
    if not all(type(status) is int and 400 <= status <= 599 for status in value):  # noqa: PLR2004
        name = f"{type(owner).__name__}.{attribute.name}"
        raise InvalidRequestError(f"{name} holds HTTP statuses from 400 to 599, not {sorted(value, key=str)!r}")


def _not_negative(owner: object, attribute: Attribute[Any], value: float) -> None:
    if not value >= 0:
        raise InvalidRequestError(f"{type(owner).__name__}.{attribute.name} is at least 0, not {value!r}")


@frozen(kw_only=True)
class Timeouts:
    """Time limits of one attempt, in seconds.

    Attributes:
        connect: To open a connection, TLS included.
        write: Between two parts of the request.
        read: Between two parts of the answer. None: settings 15, invite 20, quotas 30, recontact 60, bulk
            `bulk_base + bulk_per_id * IDs`, since the service takes longer the more IDs it is asked.
        wall: From the start to the last byte, since a slow drip never exceeds `read`. None: `read` + 15.
        bulk_base: Read limit of a bulk invite without its IDs.
        bulk_per_id: What each quota ID adds to it.

    Raises:
        InvalidRequestError: A limit is not above 0.
    """

    connect: float = field(default=5.0, validator=_positive)
    write: float = field(default=10.0, validator=_positive)
    read: float | None = field(default=None, validator=_positive)
    wall: float | None = field(default=None, validator=_positive)
    bulk_base: float = field(default=15.0, validator=_positive)
    bulk_per_id: float = field(default=0.5, validator=_not_negative)

    def read_limit(self, endpoint: Endpoint, quota_ids: int = 0) -> float:
        """Return the seconds to wait for the next part of an answer."""
        if self.read is not None:
            return self.read
        if endpoint == "bulk_invite":
            return self.bulk_base + self.bulk_per_id * quota_ids
        return _READ_SECONDS[endpoint]

    def wall_limit(self, endpoint: Endpoint, quota_ids: int = 0) -> float:
        """Return the seconds one attempt may take in all."""
        return self.wall if self.wall is not None else self.read_limit(endpoint, quota_ids) + _WALL_MARGIN


@frozen(kw_only=True)
class RetryPolicy:
    """How failed calls are repeated.

    Attributes:
        max_attempts: Attempts of a call in all; 1 means never to repeat. A chunk of a fan-out that could not be
            sent, or was refused with 429, was not processed: it goes back into the queue, and uses up none, as
            long as `OutagePolicy.patience` lasts.
        base: Seconds of the first backoff at most; it doubles with each attempt and is drawn from 0 up.
        throttled_base: The same after 429 and 503.
        cap: Longest backoff in seconds.
        budget: Retries the whole client may make in a row without a success: an outage must not be met with
            a multiple of the load. Each retry takes one.
        deposit: What a success puts back into the budget.
        retry_ambiguous: Whether a bulk invite that may have been processed is sent once more. Off, because no
            idempotency key exists: a second invite may be made. Outcomes that followed from it say so in
            `anomaly`.
        retry_ambiguous_reads: Whether Generate Invite, a GET that makes something, is repeated when it may
            have been processed. The other reads always are.
        unprocessed: Statuses that prove, whatever the body, that a request was not processed: a bulk invite is
            sent again after them, and else its IDs end `not_sent`. 503 is not among them: a proxy says it too
            when a backend has processed a request and then failed. Who knows that there is nothing in between
            may add it.

    Raises:
        InvalidRequestError: A number is out of its range.
    """

    max_attempts: int = field(default=3, validator=_positive)
    base: float = field(default=0.25, validator=_not_negative)
    throttled_base: float = field(default=1.0, validator=_not_negative)
    cap: float = field(default=20.0, validator=_not_negative)
    budget: float = field(default=10.0, validator=_not_negative)
    deposit: float = field(default=0.2, validator=_not_negative)
    retry_ambiguous: bool = False
    retry_ambiguous_reads: bool = True
    unprocessed: frozenset[int] = field(default=REFUSED_UNPROCESSED, converter=_status_set, validator=_statuses)

    def allows(self, endpoint: Endpoint, failures: Sequence[SamplingError]) -> bool:
        """Return whether to ask again after these failures of one call, the last one being the latest."""
        last = failures[-1]
        if len(failures) >= self.max_attempts or last.permanent:
            return False
        if last.retry_after is not None and last.retry_after > MAX_RETRY_AFTER:
            return False
        if self.says_unprocessed(last):
            return True
        if isinstance(last, DecodeError) and any(isinstance(error, DecodeError) for error in failures[:-1]):
            return False
        if not _passing(last):
            return False
        if endpoint == "bulk_invite":
            return self.retry_ambiguous and not any(may_have_worked(error) for error in failures[:-1])
        return self.retry_ambiguous_reads if endpoint == "generate_invite" else True

    def says_unprocessed(self, error: SamplingError) -> bool:
        """Return whether the failure surely came before the request was processed, and may have gone since."""
        if isinstance(error, ServiceError):
            told_by_service = error.status == _UNAVAILABLE and error.delivery == "answered"
            return error.status in self.unprocessed or told_by_service
        return isinstance(error, TransportError) and error.delivery == "not_sent"

    def backoff(self, failures: Sequence[SamplingError], random: Callable[[], float]) -> float:
        """Return the seconds to wait before the next attempt; `random` gives numbers from 0 to 1."""
        last = failures[-1]
        throttled = isinstance(last, ServiceError) and last.status in _THROTTLED
        base = self.throttled_base if throttled else self.base
        jittered = random() * min(self.cap, base * 2.0 ** (len(failures) - 1))
        if last.retry_after is None:
            return jittered
        # Spread what all were told at the same moment, and never come earlier than told.
        return max(last.retry_after, jittered) + random() * min(1.0, 0.1 * last.retry_after)


@frozen(kw_only=True)
class OutagePolicy:
    """What to do when the service is away: when that is taken to be so, and for how long to wait.

    After some failures in a row (no connection, one that is cut, a time limit, 502, 503, 504), with no answer
    in between, nothing is sent but Get Settings, which has no effect. When that is answered, work goes on, one
    request at a time at first.

    Attributes:
        patience: Seconds that a fan-out waits for the service to come back, or to let anything in. What is left
            then ends `not_sent`, and nothing more is taken from an input that can be read only once. Calls that
            somebody waits for do not wait: they fail with `OutageError`.
        failures: How many in a row. None: five, or `max_concurrency` where that is lower, and two at least.
            Where three requests of ten fail, in the worst hour of a service that still works, five in a row
            come once in four hundred requests, and cost one question; in an outage, five requests are fewer
            than what is under way anyway.
        first_pause: Seconds until Get Settings is asked first; it doubles each time, and is drawn from its half
            up.
        longest_pause: The longest of these pauses. With one question in so many seconds from each client, a
            service that comes back is noticed soon, and not overrun.

    Raises:
        InvalidRequestError: A number is out of its range.
    """

    patience: float = field(default=600.0, validator=_not_negative)
    failures: int | None = field(default=None, validator=_positive)
    first_pause: float = field(default=0.25, validator=_positive)
    longest_pause: float = field(default=1.5, validator=_positive)

    def enough(self, under_way: int) -> int:
        """Return how many failures in a row make an outage where so many requests may be under way."""
        return self.failures or min(_FAILURES, max(2, under_way))


def may_have_worked(error: SamplingError) -> bool:
    """Return whether the failed attempt may have had its effect all the same."""
    return error.delivery == "unknown"


def shows_overload(error: SamplingError) -> bool:
    """Return whether the failed attempt says that the service, or the way to it, had enough."""
    if isinstance(error, ServiceError):
        return error.status in _AWAY or error.status == TOO_MANY
    return isinstance(error, TransportError) and not error.permanent


def is_refused_for_load(error: SamplingError) -> bool:
    """Return whether the service, or what is in front of it, said that there are too many requests."""
    return isinstance(error, ServiceError) and error.status in _THROTTLED


def shows_outage(error: SamplingError) -> bool | None:
    """Return whether an attempt failed as it does when the service is away; None if it says neither."""
    if isinstance(error, ServiceError):
        return error.status in _AWAY or (None if error.status == TOO_MANY else False)
    if isinstance(error, TransportError) and not error.permanent:
        return True
    return None


def _passing(error: SamplingError) -> bool:
    """Return whether the cause may have gone by the next attempt."""
    if isinstance(error, ServiceError):
        return error.status in PASSING or error.result_code == ResultCode.TECHNICAL_ERROR
    return isinstance(error, TransportError | DecodeError)


class RetryBudget:
    """The tokens a client has for retries: spent one by one, put back in parts by successes."""

    __slots__ = ("_deposit", "_size", "tokens")

    def __init__(self, size: float, deposit: float) -> None:
        self._size = size
        self._deposit = deposit
        self.tokens = size

    def spend(self) -> bool:
        """Take a token for a retry; False if there is none, and the retry must not be made."""
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True

    def deposit(self) -> None:
        """Put back what a success is worth."""
        self.tokens = min(self._size, self.tokens + self._deposit)
