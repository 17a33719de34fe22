"""What a router returns: offers, and the route of a click."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import Final

from attrs import field, frozen

from sampling_async import Invite, Price
from sampling_async._contract.records import hidden


class RouteStatus(StrEnum):
    """How a click has ended. `text` is what a web page may say.

    `ROUTED`: there is a link: redirect the member to it. `NONE_OPEN`: no survey that is open now takes the
    member. `UNAVAILABLE`: the service or the store is away or too slow, and no invite was made: the member may
    try again. `UNCLEAR`: an invite was requested and no usable response came in time. The next click may get
    its link, if the response came late, or else gets another survey.
    """

    ROUTED = "routed"
    NONE_OPEN = "none_open"
    UNAVAILABLE = "unavailable"
    UNCLEAR = "unclear"

    @property
    def text(self) -> str:
        """A sentence for the member."""
        return _TEXTS[self]


_TEXTS: Final = {
    RouteStatus.ROUTED: "Your survey is ready.",
    RouteStatus.NONE_OPEN: "There is no survey for you right now. Please come back later.",
    RouteStatus.UNAVAILABLE: "Surveys are not available at the moment. Please try again in a minute.",
    RouteStatus.UNCLEAR: "This survey did not answer in time. Please try again.",
}


@frozen(kw_only=True)
class Offer:
    """A quota that a member fits now.

    Attributes:
        quota_id: The quota, for `SurveyRouter.route(quota_ids=...)`.
        survey_id: Its survey, with `wave_id`.
        wave_id: The wave.
        loi: The length of the survey in minutes.
        ir: Its incidence rate in percent.
        price: What the operator pays for a complete.
        value: The expected value: the price times the chance of a complete, from 0 to 1. A quota that the
            member may match, because an answer is missing, has half of it. With several currencies and
            no rates, each price counts as 1.
        is_certain: Whether the member certainly matches the quota.
        survey_name: The name of the survey, if the service gives one.
    """

    quota_id: int
    survey_id: int
    wave_id: int
    loi: int
    ir: int
    price: Price
    value: float
    is_certain: bool
    survey_name: str | None = None


@frozen(kw_only=True)
class Route:
    """How the click of a member has ended.

    Attributes:
        status: How it has ended; see `RouteStatus`.
        invite: The invite, if there is a link.
        is_repeat: Whether the link is that of an earlier click, which the member has not entered yet.
        asked: How many quotas were requested for this click.
        seconds: How long it took.
    """

    status: RouteStatus
    invite: Invite | None = field(default=None, repr=hidden)
    is_repeat: bool = False
    asked: int = 0
    seconds: float = 0.0
    _enter: Callable[[], Awaitable[object]] | None = field(default=None, repr=False, eq=False, alias="enter")

    @property
    def url(self) -> str | None:
        """The link; None unless the status is `routed`. It identifies the member: keep it out of logs."""
        return None if self.invite is None else self.invite.url

    async def entered(self) -> None:
        """Record that the member was sent to the link. It is not given again then.

        It returns within half a second. If the store is away, this is stored later, three times within 11
        seconds; if that fails too, an error is logged, and the link may be given again. Without a link it does
        nothing.
        """
        if self._enter is not None:
            await self._enter()


@frozen(kw_only=True)
class RouterStatus:
    """What a router has done since it was made.

    Attributes:
        is_ready: Whether clicks can be routed: there is an inventory, and the store can be read.
        reason: Why not; empty if it is.
        clicks: Clicks that have ended, by status.
        repeats: Clicks that got the link of an earlier one.
        asked: Quotas that were requested.
        invited: Invites that were made.
        unused: Those of them that no click has got yet.
    """

    is_ready: bool
    reason: str
    clicks: Mapping[RouteStatus, int]
    repeats: int
    asked: int
    invited: int
    unused: int
