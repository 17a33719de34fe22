"""Requests and responses as values, and the state of a call between the two.

The subpackages pass these values to each other. Nothing in this module does I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from attrs import define, field

from sampling_async._contract.errors import ClientClosedError, Delivery, Endpoint
from sampling_async._contract.records import hidden
from sampling_async._contract.structs import value

if TYPE_CHECKING:
    from sampling_async._contract.timing import Timeline

T = TypeVar("T")

MAX_RETRY_AFTER: Final = 60.0
"""The longest Retry-After, in seconds, that the client waits for. With a longer one, the call fails."""

_LEADING: Final = 1024
"""Bytes in which the beginning of a page is looked for, after a byte order mark and white space."""


@value
class Call(Generic[T]):
    """One request, ready to be sent, and the function that reads the body of its 200.

    Attributes:
        endpoint: One of the five endpoints.
        method: GET, or POST for a bulk invite.
        target: The path and query below the base address, percent-encoded. It may hold a member code.
        read: Turns the body of a 200 into the call's result, or raises `DecodeError`.
        body: The JSON body, or None.
        quota_ids: The number of quota IDs in the request. Time limits grow with it.
        private: Texts that errors must not repeat from a response: the member code, plain and encoded.
        if_none_match: The ETag of an earlier response that the caller still has, or None. With it, a 304 is no
            refusal: the service has nothing newer.
    """

    endpoint: Endpoint
    method: Literal["GET", "POST"]
    target: str = field(repr=hidden)
    read: Callable[[bytes], T] = field(repr=False)
    body: bytes | None = field(default=None, repr=False)
    quota_ids: int = 0
    private: tuple[str, ...] = field(default=(), repr=False)
    if_none_match: str | None = field(default=None, repr=False)

    @property
    def has_effect(self) -> bool:
        """Whether the request makes the service create something: invites."""
        return self.endpoint in {"bulk_invite", "generate_invite"}


@value
class Reply:
    """One HTTP response: the status, the decoded body and the headers that the client uses.

    `is_whole` is False if the body of an error was cut or came too late. `is_followed` says that more came
    after an error, so that it may not be the response to this request. `result` holds the result of a body
    that was decoded while it arrived; `body` is empty then. `goes_on` says that more of the body is to
    come: the attempt ends with it.
    """

    status: int
    body: bytes = field(default=b"", repr=False)
    retry_after: str | None = None
    date: str | None = None
    is_whole: bool = True
    is_followed: bool = False
    result: Any = field(default=None, repr=False)
    goes_on: bool = False

    @property
    def is_page(self) -> bool:
        """Whether the body is a page of HTML or XML: then something else answered in place of the service."""
        return self.body[:_LEADING].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<"


@define
class Track:
    """Whether a running call may have had its effect.

    Attributes:
        sent: Whether bytes of the running attempt may have been sent.
        ambiguous: Whether an earlier attempt may have had the effect.
        attempts: The number of attempts that were begun.
        outcomes_delivered: Whether the user already has the outcomes of this call. Nothing is sent after that,
            because it would make these outcomes wrong.
        timeline: Records each stage that the call enters, if any.
        ended: Its attempts that have ended, if they are explained and anybody watches the client.
        is_explained: Whether somebody may ask for a report of these attempts.
        at_end: Called with the error or None when the attempt whose response goes on has ended.
        fan_out: What `Hooks.fan_out_began` returned, if the call belongs to a fan-out.
        response: The body of our engine for the last response: it holds its connection until it is judged. None
            then, and with other transports.
    """

    sent: bool = False
    ambiguous: bool = False
    attempts: int = 0
    outcomes_delivered: bool = False
    timeline: Timeline | None = None
    ended: tuple[Any, ...] = field(default=(), repr=False)
    is_explained: bool = True
    at_end: Callable[[BaseException | None], None] | None = field(default=None, repr=False)
    fan_out: object = field(default=None, repr=False)
    response: Any = field(default=None, repr=False)

    def may_send(self, may_be: bool) -> None:  # noqa: FBT001
        """Record whether bytes of the running attempt may have been sent, or may be from now on.

        Raises:
            ClientClosedError: The user already has the outcomes of this call.
        """
        if may_be and self.outcomes_delivered:
            raise ClientClosedError("the `async with` block of the fan-out has ended", delivery=self.delivery)
        self.sent = may_be

    def release_connection(self) -> None:
        """Return the connection of the last response to the pool."""
        response, self.response = self.response, None
        if response is not None:
            response.release()

    def discard_connection(self) -> None:
        """Close the connection of the last response, which may belong to another request.

        A second response may be on its way. The next request would take it for its own: in HTTP/1.1 a response
        does not name its request.
        """
        response, self.response = self.response, None
        if response is not None:
            response.discard()

    @property
    def delivery(self) -> Delivery:
        """The delivery of the call if it ends now."""
        return "unknown" if self.sent or self.ambiguous else "not_sent"
