"""One click, and how far it is."""

from __future__ import annotations

from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Final

import anyio
from attrs import define, field

from sampling_async.routing._route import RouteStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sampling_async import Invite
    from sampling_async.matching import Member
    from sampling_async.routing._route import Offer

_STORING_SECONDS: Final = 0.02  # kept of a click's time for the store


@define
class Click:
    """A click, and how far it is."""

    member: Member
    quota_ids: Sequence[int] | None
    began: float  # in seconds since 1970
    ends_at: float  # by the event loop's clock, as the next
    watches_until: float
    asked: int = 0
    unclear: int = 0
    is_asking: bool = False  # a request is on its way
    is_refused: bool = False  # no quota is left, or all were refused
    is_busy: bool = False  # another process is asking for the member
    invite: Invite | None = None
    quota_id: int = 0  # for which it was requested; the service may have chosen another one
    is_repeat: bool = False
    takes_links: bool = True
    is_over: bool = False

    @property
    def status(self) -> RouteStatus:
        if self.invite is not None:
            return RouteStatus.ROUTED
        if self.is_asking or self.unclear or self.is_busy:
            return RouteStatus.UNCLEAR
        return RouteStatus.NONE_OPEN if self.is_refused else RouteStatus.UNAVAILABLE

    @property
    def left(self) -> float:
        """The seconds that are left for requests."""
        return self.ends_at - anyio.current_time() - _STORING_SECONDS


@define
class RouteStep:
    """One question of a click to the store, and the request that may follow."""

    click: Click
    offers: Sequence[Offer]
    owner: str = field(factory=partial(token_hex, 8))
    over: anyio.Event = field(factory=anyio.Event)
    goes_on: bool = False  # whether the click needs another one
    failure: Exception | None = None
