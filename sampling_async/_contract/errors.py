"""The errors that this package raises.

    SamplingError
    ├── InvalidRequestError        refused by the client, before anything was sent (also a ValueError)
    ├── TransportError             no usable HTTP response: refused, cut, garbled
    │   └── TransportTimeoutError  the same, because a time limit passed
    ├── ServiceError               the service refused the request or failed
    │   ├── BadRequestError        400
    │   ├── ForbiddenError         403
    │   ├── ServerError            5xx
    │   └── UnexpectedStatusError  any other, or an error body under a 200
    ├── DecodeError                a 200 whose body breaks the contract
    ├── PagingError                a recontact list that does not advance
    ├── IncompleteBulkError        raised on request, by BulkInviteResult.raise_for_incomplete()
    ├── JournalError               the journal of a fan-out cannot be opened, read or written
    ├── OutageError                nothing was sent, because there is an outage
    └── ClientClosedError          the client was closed before or during the call

The text of an error never contains the key, a URL or a member code. All errors can be pickled.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from sampling_async._contract.headers import request_id_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sampling_async._contract.timing import Timing


Delivery: TypeAlias = Literal["not_sent", "unknown", "answered"]
"""Whether a failed call reached the service.

`not_sent`: no byte of it was sent. `answered`: the service refused it. `unknown`: it was sent, or may have
been, and no usable response came, so it may have had its effect.
"""

Endpoint: TypeAlias = Literal[
    "get_quotas", "bulk_invite", "generate_invite", "get_settings", "recontact_members"
]
"""The five endpoints of the contract, named like the client's methods."""


E = TypeVar("E", bound="SamplingError")


class SamplingError(Exception):
    """The base class of all errors of this package.

    Attributes:
        endpoint: The endpoint that was called, or None if there was no call.
        attempts: The number of attempts that were begun, the first one included.
        elapsed: Seconds from the start of the call to the error, waits between attempts included.
        delivery: Whether the call may have had its effect, see `Delivery`. It covers all attempts: if one
            attempt to make an invite may have been processed, a later attempt does not change that.
        retry_after: Seconds that the service asked to wait (429, 503), or None if it did not ask.
        permanent: Whether another attempt cannot help: a refused certificate, a body beyond the limits.
        timing: Where the time of the call went, or None if there was no call.
        headers: Headers of the last response for support cases, such as `x-request-id` and `date`, by names in
            lower case; empty if no response came. Values are printable ASCII of at most 200 characters, without
            the key, the panel and the member code. They are never part of the error's text.
    """

    endpoint: Endpoint | None
    attempts: int
    elapsed: float
    delivery: Delivery
    retry_after: float | None
    permanent: bool
    timing: Timing | None
    headers: Mapping[str, str]

    def __init__(
        self,
        message: str = "",
        *,
        endpoint: Endpoint | None = None,
        delivery: Delivery = "not_sent",
        permanent: bool = False,
    ) -> None:
        super().__init__(message)
        self.endpoint = endpoint
        self.attempts = 0
        self.elapsed = 0.0
        self.delivery = delivery
        self.retry_after = None
        self.permanent = permanent
        self.timing = None
        self.headers = {}

    @property
    def request_id(self) -> str | None:
        """The ID that the service, or else a proxy, gave the request in a header; None if there was none."""
        return request_id_of(self.headers)

    def __str__(self) -> str:
        message = super().__str__()
        return f"{self.endpoint}: {message}" if self.endpoint else message


def delivered(error: E, delivery: Delivery) -> E:
    """Return a copy of an error with another delivery.

    `copy.copy` is not safe here: tblib, which dask.distributed installs, makes it share the attributes with the
    original.
    """
    # `__new__` sets `args` and skips `__init__`, whose parameters differ between the classes.
    other = type(error).__new__(type(error), *error.args)
    vars(other).update(vars(error), delivery=delivery)
    return other


def is_test_failure(exc: BaseException) -> bool:
    """Return whether an exception fails or skips a test. Then it must reach the test unchanged.

    Such an exception comes from a mock in which an assertion failed, or `pytest.fail` was called.
    """
    # Not imported for this check: what is not loaded raises nothing.
    pytest = sys.modules.get("_pytest.outcomes")
    return isinstance(exc, AssertionError) or (pytest is not None and isinstance(exc, pytest.OutcomeException))


class InvalidRequestError(SamplingError, ValueError):
    """An argument breaks the contract, and nothing was sent. The text names the rule and what to do."""


class TransportError(SamplingError):
    """The call ended without a usable HTTP response. `delivery` says whether it was sent."""


class TransportTimeoutError(TransportError):
    """The call ended because a time limit of `Timeouts` passed."""


class ServiceError(SamplingError):
    """The service responded with an error.

    Attributes:
        status: The HTTP status.
        result: The service's name for the error (`PANEL_DOES_NOT_EXIST`), or None if the body gave none.
        result_code: The service's number for the error, see `ResultCode`, or None if the body gave none.
        body_excerpt: The first 200 characters of the body, printable, without the key, the panel and the member
            code. It is never part of the error's text.
    """

    status: int
    result: str | None
    result_code: int | None
    body_excerpt: str

    def __init__(
        self,
        message: str = "",
        *,
        endpoint: Endpoint | None = None,
        delivery: Delivery = "answered",
        status: int = 0,
        result: str | None = None,
        result_code: int | None = None,
        body_excerpt: str = "",
    ) -> None:
        super().__init__(message, endpoint=endpoint, delivery=delivery)
        self.status = status
        self.result = result
        self.result_code = result_code
        self.body_excerpt = body_excerpt


class BadRequestError(ServiceError):
    """400: the service refused the request. `result` and `result_code` give the reason, if the body does."""


class ForbiddenError(ServiceError):
    """403: the service refused the key, or a proxy on the way dropped the header with the key."""


class ServerError(ServiceError):
    """5xx: the service, or a proxy in front of it, failed.

    Such a status does not say whether the request was processed, so `delivery` is `unknown`. It is `answered`
    if `RetryPolicy.unprocessed` holds the status, or if a 503 has the service's own body.
    """


class UnexpectedStatusError(ServiceError):
    """A status that the contract does not list (a redirect, 404, 429 ...), or an error body under a 200."""


class DecodeError(SamplingError):
    """A body breaks the contract.

    Attributes:
        path: The place in the body, in the names of the wire: `$.Surveys[3].Quotas[0].QuotaID`.
        rule: The value expected there, and the kind of value found. Never the found value itself.
    """

    path: str
    rule: str

    def __init__(
        self,
        path: str = "$",
        rule: str = "unreadable",
        *,
        endpoint: Endpoint | None = None,
        delivery: Delivery = "unknown",
        permanent: bool = False,
    ) -> None:
        super().__init__(endpoint=endpoint, delivery=delivery, permanent=permanent)
        # Unpickling calls the class with `args`, so they must fit this constructor.
        self.args = (path, rule)
        self.path = path
        self.rule = rule

    def __str__(self) -> str:
        text = f"{self.path}: {self.rule}"
        return f"{self.endpoint}: {text}" if self.endpoint else text


class PagingError(SamplingError):
    """The recontact list does not advance: reading on would never end.

    Attributes:
        cursor: The last member code received, to resume with `after=`; None if no code was received.
        member_codes: The codes of the page that did not advance. They were not returned; some may be new.

    Both hold member codes, so neither is in the error's text.
    """

    cursor: str | None
    member_codes: tuple[str, ...]

    def __init__(
        self, message: str = "", *, cursor: str | None = None, member_codes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, endpoint="recontact_members", delivery="answered")
        self.cursor = cursor
        self.member_codes = member_codes


class JournalError(SamplingError):
    """The journal of a fan-out is damaged, or cannot be opened, read or written.

    The text contains no member code and no invite link.

    Attributes:
        path: The path of the journal's file.
        in_use: Whether the only reason is that another run, or another program, is using it now.
    """

    path: Path | None
    in_use: bool

    def __init__(self, reason: str = "", *, path: Path | None = None, in_use: bool = False) -> None:
        super().__init__(reason, endpoint="bulk_invite")
        self.path = path
        self.in_use = in_use

    def __str__(self) -> str:
        return f"the journal {self.path} {self.args[0]}"


class WithheldError(SamplingError):
    """This was not to be sent any more. It ends a request of a campaign, which shows it to nobody."""


class OutageError(SamplingError):
    """Nothing was sent, because there is an outage or the service refuses all requests; see `OutagePolicy`.

    The text gives the duration and the last failure.
    """


class ClientClosedError(SamplingError):
    """The client was closed, by `aclose()` or by leaving its block, before or during the call."""
