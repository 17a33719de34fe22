"""Time limits of one attempt, by endpoint and number of quota IDs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import field, frozen

from sampling_async._contract.checks import not_negative, positive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sampling_async._contract.errors import (
        Endpoint,
    )


_READ_SECONDS: Final[Mapping[Endpoint, float]] = {
    "get_settings": 15,
    "generate_invite": 20,
    "get_quotas": 30,
    "recontact_members": 60,
}


_WALL_MARGIN: Final = 15.0


@frozen(kw_only=True)
class Timeouts:
    """Time limits of one attempt, in seconds.

    Attributes:
        connect: The time to open a connection, TLS included.
        write: The time between two parts of the request.
        read: The time between two parts of the response. None: settings 15, invite 20, quotas 30, recontact 60,
            bulk `bulk_base + bulk_per_id * IDs`, because the service needs more time for more IDs.
        wall: The time from the start to the last byte. It is needed because a body that arrives slowly but
            steadily never exceeds `read`. None: `read` + 15.
        bulk_base: The read limit of a bulk invite without its IDs.
        bulk_per_id: The seconds that each quota ID adds to it.

    Raises:
        InvalidRequestError: A limit is not above 0.
    """

    connect: float = field(default=5.0, validator=positive)
    write: float = field(default=10.0, validator=positive)
    read: float | None = field(default=None, validator=positive)
    wall: float | None = field(default=None, validator=positive)
    bulk_base: float = field(default=15.0, validator=positive)
    bulk_per_id: float = field(default=0.5, validator=not_negative)

    def read_limit(self, endpoint: Endpoint, quota_ids: int = 0) -> float:
        """Return the longest time, in seconds, to wait for the next part of a response."""
        if self.read is not None:
            return self.read
        if endpoint == "bulk_invite":
            return self.bulk_base + self.bulk_per_id * quota_ids
        return _READ_SECONDS[endpoint]

    def wall_limit(self, endpoint: Endpoint, quota_ids: int = 0) -> float:
        """Return the seconds that one attempt may take from start to end."""
        return self.wall if self.wall is not None else self.read_limit(endpoint, quota_ids) + _WALL_MARGIN
