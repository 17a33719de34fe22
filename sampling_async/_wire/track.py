"""Whether a running call may have had its effect, and the connection of its last response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, field

from sampling_async._contract.errors import ClientClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sampling_async._contract.errors import Delivery


@define
class Track:
    """Whether a running call may have had its effect."""

    sent: bool = False  # bytes of the running attempt may have been sent
    ambiguous: bool = False  # an earlier attempt may have had the effect
    attempts: int = 0  # how many were begun
    # The user has the outcomes already. Sending something would make them wrong.
    outcomes_delivered: bool = False
    enter: Callable[[int], object] = field(default=bool, repr=False)  # notes which stage begins
    # Our engine's body of the last response: it holds its connection until it is judged.
    response: Any = field(default=None, repr=False)
    # Of the latest response, as they came: pairs of bytes, or httpx's object. None before one came.
    raw_headers: Any = field(default=None, repr=False)

    def may_send(self, may_be: bool) -> None:  # noqa: FBT001
        """Record whether bytes of the running attempt may have been sent, or may be from now on."""
        if may_be and self.outcomes_delivered:
            raise ClientClosedError("the `async with` block of the fan-out has ended", delivery=self.delivery)
        self.sent = may_be

    def release_connection(self) -> None:
        response, self.response = self.response, None
        if response is not None:
            response.release()

    def discard_connection(self) -> None:
        """Close the connection of the last response, which may belong to another request.

        The right one may be on its way, and the next request would take it for its own.
        """
        response, self.response = self.response, None
        if response is not None:
            response.discard()

    @property
    def delivery(self) -> Delivery:
        return "unknown" if self.sent or self.ambiguous else "not_sent"
