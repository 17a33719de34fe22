"""The click of a member: the best link within a second or two, once for each member, in one process or many.

`SurveyRouter` needs a client, a live index and a store. See `docs/howto/click-time.md`.
"""

from __future__ import annotations

from sampling_async.routing._history import Caps
from sampling_async.routing._route import Offer, Route, RouterStatus, RouteStatus
from sampling_async.routing._router import SurveyRouter

__all__ = ["Caps", "Offer", "Route", "RouteStatus", "RouterStatus", "SurveyRouter"]
