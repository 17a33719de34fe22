"""The metrics of a partner's process: notifications, inventory and clicks. See `sampling_async.health`."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opentelemetry.metrics import Observation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from opentelemetry.metrics import CallbackOptions, Meter


class Measurement(NamedTuple):
    """The value of a metric; `attributes` without the panel."""

    metric: str
    value: float
    attributes: Mapping[str, str]


_GAUGES: Final = (
    ("ready", "", "Whether the process can do its work: 1 or 0."),
    ("facts.pending", "{fact}", "Facts in the store that wait for their handler."),
    ("facts.lag", "s", "The age of the oldest fact that waits for its handler."),
    ("facts.dead", "{fact}", "Facts in the store that wait for a replay."),
    ("notifications.not_stored", "{notification}", "Notifications in a row that could not be stored."),
    ("inventory.age", "s", "The age of the inventory that members are matched against."),
    ("outage", "s", "How long the service has been away; 0 if it is there."),
    ("invites.unused", "{invite}", "Invites that were made for clicks, and that no click has got yet."),
)
_COUNTERS: Final = (
    ("handler.failures", "{call}", "Calls of handlers that have failed."),
    ("calls.too_late", "{call}", "Calls that ended unsent: the line was longer than their deadline."),
    ("clicks", "{click}", "Clicks that have ended, by status."),
    ("clicks.repeated", "{click}", "Clicks that got the link of an earlier one."),
    ("clicks.invites", "{invite}", "Invites that were made for clicks."),
)


class Vitals:
    """What one process, or one panel of it, measures.

    Attributes:
        read: Returns all values there are now. It may be called in any thread.
        panel: The attributes that name the panel.
    """

    def __init__(self, read: Callable[[], Iterable[Measurement]], panel: Mapping[str, Any]) -> None:
        self.read = read
        self.panel = panel


class VitalsMetrics:
    """The metrics of all processes' parts of one meter provider."""

    def __init__(self, meter: Meter) -> None:
        self.watched: weakref.WeakSet[Vitals] = weakref.WeakSet()
        for makes, rows in (
            (meter.create_observable_gauge, _GAUGES),
            (meter.create_observable_counter, _COUNTERS),
        ):
            for name, unit, what in rows:
                makes(f"sampling.{name}", [partial(self._observed, name)], unit=unit, description=what)

    def _observed(self, metric: str, _: CallbackOptions) -> Iterable[Observation]:
        for each in tuple(self.watched):
            for measured in each.read():
                if measured.metric == metric:
                    yield Observation(measured.value, {**measured.attributes, **each.panel})
