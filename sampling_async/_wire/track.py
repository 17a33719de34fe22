"""Whether a running call may have had its effect, and the connection of its last response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, field

from sampling_async._contract.errors import ClientClosedError

if TYPE_CHECKING:
    from sampling_async._contract.errors import Delivery
    from sampling_async._pacing.clock import Timeline


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
        response: The body of our engine for the last response: it holds its connection until it is judged. None
            then, and with other transports.
    """

    sent: bool = False
    ambiguous: bool = False
    attempts: int = 0
    outcomes_delivered: bool = False
    timeline: Timeline | None = None
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
