"""What attempts teach about the service: its limits, whether it is there, how long it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sampling_async._calls.retry import (
    is_refused_for_load,
    may_concern_one_endpoint,
    shows_outage,
    shows_overload,
)
from sampling_async._contract.errors import Endpoint, SamplingError
from sampling_async._pacing.sketch import Sketch

if TYPE_CHECKING:
    from sampling_async._contract.exchange import Call, Reply
    from sampling_async._pacing.gate import Gate, Permit
    from sampling_async._pacing.outage import Outage
    from sampling_async._wire.timeouts import Timeouts

_NO_TIME: Final = 0.001
"""A failure with less than this left of the deadline is due to the deadline, not to the service."""


class Learned:
    """What the attempts of one client have taught.

    Args:
        gate: Lowers its limits after an overload.
        outage: Notices that an outage began.
        timeouts: A response that is fast by their measure is never slow.

    Attributes:
        latency: The durations of answered attempts, by endpoint.
    """

    def __init__(self, gate: Gate, outage: Outage, timeouts: Timeouts) -> None:
        self._gate = gate
        self._outage = outage
        self._timeouts = timeouts
        self.latency: dict[Endpoint, Sketch] = {}

    def attempt_ended(
        self, call: Call[Any], permit: Permit, answer: Reply | SamplingError, began: float, now: float
    ) -> None:
        """Update limits, outage and durations from the result of an attempt."""
        if isinstance(answer, SamplingError):
            # After the deadline, the failure says nothing about the service.
            if permit.remaining > _NO_TIME:
                self._learn_failure(call, permit, answer, began, now)
            return
        if answer.is_page:
            # With a page a proxy tells people of its maintenance, and the status may be any.
            permit.kind.pace.answered(now)
            self._went_away(call, "a page came in place of the service's JSON", began, is_certain=False)
            return
        sketch = self.latency.get(call.endpoint)
        if sketch is None:
            sketch = self.latency[call.endpoint] = Sketch()
        sketch.add(now - began, now)
        self._outage.answered(now)
        permit.kind.pace.answered(now)
        limit, generation, running = permit.kind.adaptive, permit.generation, len(permit.kind.held)
        if call.endpoint == "bulk_invite":
            limit.answered_in(
                now - began,
                quota_ids=call.quota_ids,
                patience=self._timeouts.read_limit(call.endpoint, call.quota_ids),
                generation=generation,
                running=running,
                among=permit.among,
            )
        else:
            limit.answered(generation, running)

    def _learn_failure(
        self, call: Call[Any], permit: Permit, error: SamplingError, began: float, now: float
    ) -> None:
        if is_refused_for_load(error):
            self._gate.refused(permit)
        elif shows_overload(error):
            self._gate.overloaded(permit)
        else:
            permit.kind.pace.answered(now)
        is_away = shows_outage(error)
        if is_away:
            is_certain = not may_concern_one_endpoint(error)
            self._went_away(call, str(error.args[0]), began, error.retry_after or 0.0, is_certain=is_certain)
        elif is_away is False:
            self._outage.answered(now)

    def _went_away(
        self, call: Call[Any], cause: str, began: float, retry_after: float = 0.0, *, is_certain: bool
    ) -> None:
        # Get Settings does not begin an outage. It is also the test whether the outage has ended, so if only
        # this endpoint failed, the outage would never end.
        if call.endpoint != "get_settings":
            self._outage.failed(cause, began, retry_after=retry_after, is_certain=is_certain)
