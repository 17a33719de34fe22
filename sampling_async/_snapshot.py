"""What a client is doing, at one moment."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Snapshot:
    """The state of a client at one moment, for logs, metrics and the curious.

    Attributes:
        limit: How many bulk invites may run at once now; it adapts to what the service can take. Each other
            endpoint has a limit of its own.
        max_concurrency: How many attempts may run at once, of all endpoints.
        running: How many attempts run.
        waiting: How many wait to be let in.
        held_for: Seconds for which the service asked to send nothing, still to go.
        away_for: Seconds for which the service has been away, see `OutagePolicy`; 0 while it is there.
        requests_per_second: How many bulk invites may begin in a second, where the service refused some for
            load; None where it did not.
        retry_tokens: What is left of the retry budget.
        seconds_per_request: What a bulk invite takes at best without its IDs, as learned so far; None before
            the first answer.
        seconds_per_id: What each quota ID adds to it.
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
