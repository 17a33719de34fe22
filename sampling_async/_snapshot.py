"""The state of a client at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import frozen

from sampling_async._contract.errors import Endpoint
from sampling_async._pacing.latency import Percentiles


@frozen(kw_only=True)
class Connections:
    """The connections of a client's own engine, and the bytes that went over them.

    Attributes:
        open: Open now.
        idle: Those of them that carry no request.
        opened: Opened so far.
        reused: Requests that found an idle connection.
        bytes_sent: Bytes of requests, without TLS.
        bytes_received: Bytes of responses, without TLS, as they came over the wire (compressed).
    """

    open: int
    idle: int
    opened: int
    reused: int
    bytes_sent: int
    bytes_received: int


@frozen(kw_only=True)
class Snapshot:
    """The state of a client at one moment, for logs and metrics; of all clients with its connections together.

    Attributes:
        limit: The number of bulk invites that may run at once now. It adapts to the load that the service can
            take. Each other endpoint has a limit of its own.
        max_concurrency: The number of attempts that may run at once, for all endpoints together.
        running: The number of attempts that run now.
        waiting: The number of attempts that cannot begin yet: they wait for a permit or the end of a hold or
            outage, or the service allows no more in a second.
        held_for: Seconds until the longest hold ends. A hold is a pause that the service requested.
        breaker: `open` during an outage, when only probes are sent, see `OutagePolicy`; otherwise `closed`.
        away_for: Seconds since the outage began; 0 without an outage.
        requests_per_second: The number of bulk invites that may begin in a second; None unless the service
            has refused some for load.
        retry_tokens: The number of tokens left in the retry budget.
        seconds_per_request: The shortest time of a bulk invite without the time for its IDs, as measured so
            far; None before the first response.
        seconds_per_id: The seconds that each quota ID adds; None before the first response.
        attempts: Attempts that have ended, of all endpoints; without the probes of an outage.
        failures: Those of them that failed, refusals of the service included.
        too_late: Calls that ended unsent, because the line was longer than their deadline.
        unused_invites: Invites that a `SurveyRouter` got for clicks, and that no click has got yet.
        latency: How long answered attempts took, by endpoint; without endpoints that were not called lately.
        connections: Connections and bytes; None with a `transport` of your own.
    """

    limit: int
    max_concurrency: int
    running: int
    waiting: int
    held_for: float
    breaker: Literal["closed", "open"]
    away_for: float
    requests_per_second: float | None
    retry_tokens: float
    seconds_per_request: float | None
    seconds_per_id: float | None
    attempts: int
    failures: int
    too_late: int
    unused_invites: int
    latency: Mapping[Endpoint, Percentiles]
    connections: Connections | None
