"""Everything this package raises.

    SamplingError
    ├── InvalidRequestError        refused here, before anything was sent (also a ValueError)
    ├── TransportError             no usable HTTP answer: refused, cut, garbled
    │   └── TransportTimeoutError  the same, because time ran out
    ├── ServiceError               the service answered, and it was not 200
    │   ├── BadRequestError        400
    │   ├── ForbiddenError         403
    │   ├── ServerError            5xx
    │   └── UnexpectedStatusError  any other, or an error body under a 200
    ├── DecodeError                a 200 whose body is not what the contract says
    ├── PagingError                a recontact list that does not advance
    ├── IncompleteBulkError        raised on request, by BulkInviteResult.raise_for_incomplete()
    ├── JournalError               the journal of a fan-out cannot be opened, read or written
    ├── OutageError                the service is away, so nothing was sent
    └── ClientClosedError          the client was closed before or during the call

No text of these errors holds the key, a URL or a member code, and all of them survive pickling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

    from sampling_async._outcomes import BulkInviteResult

Delivery: TypeAlias = Literal["not_sent", "unknown", "answered"]
"""What is known about a failed call: `not_sent`, no byte of it left; `answered`, the service said no;
`unknown`, it was sent (or may have been) and no usable answer came, so it may have had its effect."""

Endpoint: TypeAlias = Literal[
    "get_quotas", "bulk_invite", "generate_invite", "get_settings", "recontact_members"
]
"""The five endpoints of the contract, by the name of the client's method."""


E = TypeVar("E", bound="SamplingError")


class SamplingError(Exception):
    """Base of all errors of this package.

    Attributes:
        endpoint: The endpoint that was called, or None where no call was made.
        attempts: How many attempts were begun, the first one included.
        elapsed: Seconds from the start of the call to the error, waits between attempts included.
        delivery: What is known about the call's effect, see `Delivery`. It covers all attempts: once an attempt
            to make an invite may have been processed, no later one takes that back.
        retry_after: Seconds the service asked to wait, where it did (429, 503), else None.
        permanent: Whether asking again cannot help: a refused certificate, a body beyond the limits.
    """

    endpoint: Endpoint | None
    attempts: int
    elapsed: float
    delivery: Delivery
    retry_after: float | None
    permanent: bool

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

    def __str__(self) -> str:
        message = super().__str__()
        return f"{self.endpoint}: {message}" if self.endpoint else message


def delivered(error: E, delivery: Delivery) -> E:
    """Return an error like another one, with another delivery.

    `copy` would not do: a library with its own way of pickling errors (tblib, which dask.distributed brings)
    makes it return one that shares its attributes with the first, which would then be changed as well.
    """
    other = type(error).__new__(type(error), *error.args)
    vars(other).update(vars(error), delivery=delivery)
    return other


class InvalidRequestError(SamplingError, ValueError):
    """An argument breaks the contract; nothing was sent. The text names the rule and the way out."""


class TransportError(SamplingError):
    """The call ended without a usable HTTP answer. `delivery` says whether it had been sent."""


class TransportTimeoutError(TransportError):
    """The call ended because a time limit of `Timeouts` passed."""


class ServiceError(SamplingError):
    """The service answered with an error.

    Attributes:
        status: The HTTP status.
        result: The error name of the service (`PANEL_DOES_NOT_EXIST`), or None if the body held none.
        result_code: The error number of the service, or None; see `ResultCode`.
        body_excerpt: The first 200 characters of the body, printable, without the key and the member code.
            Never part of the error's text.
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
    """400: the service refused the request; `result` and `result_code` say why, where it told."""


class ForbiddenError(ServiceError):
    """403: the key was refused, or a proxy on the way dropped its header."""


class ServerError(ServiceError):
    """5xx. It leaves open whether the request was processed; `delivery` is `unknown` then.

    It is `answered` where `RetryPolicy.unprocessed` holds the status, or a 503 has the service's own body.
    """


class UnexpectedStatusError(ServiceError):
    """A status the contract does not know (a redirect, 404, 429 ...), or an error body under a 200."""


class DecodeError(SamplingError):
    """A body that cannot be read as the contract says.

    Attributes:
        path: Where, in the wire's own names: `$.Surveys[3].Quotas[0].QuotaID`.
        rule: What was expected there, and what kind of thing was found. Never the found value.
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
        self.args = (path, rule)  # what unpickling calls this with
        self.path = path
        self.rule = rule

    def __str__(self) -> str:
        text = f"{self.path}: {self.rule}"
        return f"{self.endpoint}: {text}" if self.endpoint else text


class PagingError(SamplingError):
    """The recontact list does not advance: going on would loop for ever.

    Attributes:
        cursor: The last member code received, to resume from with `after=`; None if there was none.
        member_codes: The codes of the page that did not advance. They were not handed over: some may be new.

    Both are member codes, so they are not in the error's text.
    """

    cursor: str | None
    member_codes: tuple[str, ...]

    def __init__(
        self, message: str = "", *, cursor: str | None = None, member_codes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, endpoint="recontact_members", delivery="answered")
        self.cursor = cursor
        self.member_codes = member_codes


class IncompleteBulkError(SamplingError):
    """Some quota IDs of a bulk invite ended without an answer (`not_sent` or `unknown`).

    Attributes:
        bulk_result: The whole result, the answered IDs included.
    """

    bulk_result: BulkInviteResult

    def __init__(self, message: str = "", *, bulk_result: BulkInviteResult | None = None) -> None:
        super().__init__(message, endpoint="bulk_invite", delivery="unknown")
        if bulk_result is not None:
            self.bulk_result = bulk_result


class JournalError(SamplingError):
    """The journal of a fan-out is damaged, or cannot be opened, read or written.

    The text shows no member code and no invite link.

    Attributes:
        path: The file.
    """

    path: Path | None

    def __init__(self, reason: str = "", *, path: Path | None = None) -> None:
        super().__init__(reason, endpoint="bulk_invite")
        self.path = path

    def __str__(self) -> str:
        return f"the journal {self.path} {self.args[0]}"


class OutageError(SamplingError):
    """The service is away, or refuses everything, so this was not sent; see `OutagePolicy`.

    The text says since when, and what failed last.
    """


class ClientClosedError(SamplingError):
    """The client was closed, by `aclose()` or by leaving its block, before or during the call."""
