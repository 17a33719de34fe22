"""The limits of a campaign, which can be changed while it runs."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from math import ceil, floor, inf
from typing import TYPE_CHECKING, Any, Final, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from attrs import asdict, evolve, field, fields, frozen

from sampling_async._contract.checks import number_above_0, number_from_0, whole_number
from sampling_async._contract.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import tzinfo

    from attrs import Attribute

_HOURS: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_DAY: Final = 24 * 60
_MINUTE: Final = 60.0


def _checked(check: Callable[[Any, str], object]) -> Callable[[object, Attribute[Any], Any], None]:
    def validate(_: object, attribute: Attribute[Any], value: object) -> None:
        if value is not None and check(value, attribute.name) == inf:
            raise InvalidRequestError(f"{attribute.name} must be a finite number; None is no limit")

    return validate


def _instance_of(kind: type) -> Callable[[object, Attribute[Any], Any], None]:
    def validate(_: object, attribute: Attribute[Any], value: object) -> None:
        if not isinstance(value, kind):
            raise InvalidRequestError(f"{attribute.name} must be a {kind.__name__}, not {value!r:.40}")

    return validate


def _times(value: object, name: str) -> None:
    if not isinstance(value, str) or _HOURS.fullmatch(value) is None or value[:5] == value[6:]:
        raise InvalidRequestError(f"{name} must be two different times, such as 22:00-06:00, not {value!r:.40}")


def _zone(value: object, name: str) -> None:
    try:
        ZoneInfo(value)  # type: ignore[arg-type]  # that is what is checked
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):
        raise InvalidRequestError(
            f"{name} must be a time zone that this machine knows, such as Europe/Berlin, not {value!r:.40}"
        ) from None


@frozen(kw_only=True)
class Limits:
    """The limits of a campaign. They are in its ledger, and a run applies changes within a second.

    Attributes:
        concurrency: The most members in flight at once. Default: the client's `max_concurrency`.
        invites_per_minute: The most invites a minute.
        max_invites: The most invites in all. Pairs whose outcome is unknown count, since an invite may exist.
        max_spend: The most that the invites may cost, see `Campaign(cost=...)`.
        hours: The times of the day between which it sends requests, such as "22:00-06:00".
        zone: The time zone of `hours`. Default: UTC.
        paused: Whether it pauses. Responses to what is in flight are still processed.
        reason: Why it pauses, for the report.
    """

    concurrency: int | None = field(default=None, validator=_checked(whole_number))
    invites_per_minute: float | None = field(default=None, validator=_checked(number_above_0))
    max_invites: int | None = field(default=None, validator=_checked(lambda v, n: whole_number(v, n, least=0)))
    max_spend: float | None = field(default=None, validator=_checked(number_from_0))
    hours: str | None = field(default=None, validator=_checked(_times))
    zone: str | None = field(default=None, validator=_checked(_zone))
    paused: bool = field(default=False, validator=_instance_of(bool))
    reason: str = field(default="", validator=_instance_of(str))

    def changed(self, **changes: Any) -> Self:
        """Return these limits with some changes.

        Raises:
            InvalidRequestError: A limit is unknown, or its value is not possible.
        """
        known = [each.name for each in fields(type(self))]
        for name in changes:
            if name not in known:
                raise InvalidRequestError(f"there is no limit {name!r}; the limits are {', '.join(known)}")
        return evolve(self, **changes)

    def seconds_closed(self, now: float) -> float:
        """Return the seconds until the hours begin; 0 within them. `now` is in seconds since 1970."""
        if self.hours is None:
            return 0.0
        zone: tzinfo = UTC if self.zone is None else ZoneInfo(self.zone)
        found = _HOURS.fullmatch(self.hours)
        assert found is not None
        first, last = (int(found[at]) * 60 + int(found[at + 1]) for at in (1, 3))
        began = moment = datetime.fromtimestamp(now, UTC)
        while True:
            wall = moment.astimezone(zone)
            minute = wall.hour * 60 + wall.minute
            # From 22:00 to 06:00, the hours are 8 long, and 01:30 is 3.5 hours after their beginning.
            if (minute - first) % _DAY < (last - first) % _DAY:
                return (moment - began).total_seconds()
            within = timedelta(seconds=wall.second, microseconds=wall.microsecond)
            moment = _at_change(moment, moment + timedelta(minutes=(first - minute) % _DAY) - within, zone)

    def to_json(self) -> str:
        """Return the limits as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return limits from JSON."""
        return cls(**json.loads(text))

    def in_words(self) -> dict[str, str]:
        """Return the limits that are set, as a report shows them."""
        names = {
            "concurrency": "members asked for at once",
            "invites_per_minute": "invites a minute",
            "max_invites": "invites in all",
            "max_spend": "spend in all",
            "hours": "hours",
            "zone": "time zone of the hours",
        }
        values = {label: getattr(self, name) for name, label in names.items()}
        given = {label: value for label, value in values.items() if value is not None}
        return {label: value if isinstance(value, str) else f"{value:,}" for label, value in given.items()}


def _at_change(moment: datetime, end: datetime, zone: tzinfo) -> datetime:
    """Return when the clocks of a zone change between two moments, or the end if they do not.

    A change may skip the beginning of the hours, or lead into the middle of them.
    """

    def offset(seconds: float) -> timedelta | None:
        return datetime.fromtimestamp(seconds, zone).utcoffset()

    low, high = floor(moment.timestamp()), ceil(end.timestamp())
    before = offset(moment.timestamp())
    if offset(high) == before:
        return end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if offset(middle) == before else (low, middle)
    return datetime.fromtimestamp(high, UTC)


class InvitePace:
    """Whether the invites a minute allow one more. A refusal costs nothing, since it makes no invite."""

    def __init__(self) -> None:
        self._tokens = 1.0
        self._at: float | None = None
        self._made = 0

    def has_token(self, now: float, made: int, per_minute: float) -> bool:
        """Return whether the next request may be sent, after so many invites that were or may be made."""
        per_second = per_minute / _MINUTE
        if self._at is not None:
            # Several pairs of a member are requested at once, so that there may be less than no token.
            self._tokens += (now - self._at) * per_second - (made - self._made)
        self._tokens = min(self._tokens, max(1.0, per_second))
        self._at, self._made = now, made
        return self._tokens > 0
