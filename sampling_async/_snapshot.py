"""The state of a client at one moment."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Snapshot:
    """The state of a client at one moment, for logs and metrics.

    Attributes:
        limit: The number of bulk invites that may run at once now. It adapts to the load that the service can
            take. Each other endpoint has a limit of its own.
        max_concurrency: The number of attempts that may run at once, for all endpoints together.
        running: The number of attempts that run now.
        waiting: The number of attempts that wait for a permit.
        held_for: Seconds until the longest hold ends. A hold is a pause that the service asked for.
        away_for: Seconds since the outage began, see `OutagePolicy`; 0 without an outage.
        requests_per_second: The number of bulk invites that may begin in a second; None unless the service
            has refused some for load.
        retry_tokens: The number of tokens left in the retry budget.
        seconds_per_request: The shortest time of a bulk invite without the time for its IDs, as learned so
            far; None before the first response.
        seconds_per_id: The seconds that each quota ID adds; None before the first response.
    """

    limit: int
    max_concurrency: int
    running: int
    waiting: int
    held_for: float
    away_for: float
    requests_per_second: float | None
    retry_tokens: float
    seconds_per_request: float | None
    seconds_per_id: float | None
