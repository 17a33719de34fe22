"""Spans and metrics of a client for OpenTelemetry, by its conventions for HTTP clients.

All spans are made when the call has ended, with the times of its report. So no span is current while your code
runs, and a cancelled call leaves none open. The parent is the span that is current where the call was made. The
service's addresses hold the PanelGUID and member codes: `url.template` is given and never `url.full`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict, deque
from contextlib import suppress
from functools import cached_property, partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field
from opentelemetry import metrics, trace
from opentelemetry.metrics import MeterProvider, Observation
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode

from sampling_async._contract.timing import STAGES
from sampling_async._protocol.requests import TEMPLATES
from sampling_async._telemetry.vitals import Vitals, VitalsMetrics
from sampling_async._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from opentelemetry.context import Context
    from opentelemetry.metrics import CallbackOptions
    from opentelemetry.trace import TracerProvider

    from sampling_async._calls.reports import AttemptReport, CallReport
    from sampling_async._contract.errors import Endpoint
    from sampling_async._contract.timing import Timing
    from sampling_async._telemetry.vitals import Measurement

_SCOPE: Final = "sampling_async"
_SCHEMA: Final = "https://opentelemetry.io/schemas/1.37.0"
# The boundaries that the conventions ask for, in seconds.
_BOUNDARIES: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_NANO: Final = 1_000_000_000
_FEWEST_FAILURES: Final = 400  # a status from here on is an error by the conventions
# Durations of a fan-out that are recorded at once, and the seconds after which fewer are.
_AT_ONCE: Final = 64
_AT_LATEST: Final = 1.0


_serial: Final = count(1)
_NAMES: Final = {endpoint: f"sampling_async.{endpoint}" for endpoint in TEMPLATES}


class Telemetry:
    """Where the spans and metrics of clients go: `SamplingClient(..., telemetry=Telemetry(...))`.

    `telemetry=True` is `Telemetry()`. One may be given to several clients.

    Args:
        tracer_provider, meter_provider: Make the spans and the metrics; default, the global ones.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        self._tracer = trace.get_tracer(_SCOPE, __version__, tracer_provider, _SCHEMA)
        self._metrics = _metrics_of(meter_provider)

    def of_client(
        self, address: str, port: int, state: Callable[[], Mapping[str, float]] | None, name: str | None
    ) -> ClientTelemetry:
        """Return the telemetry of one client, and the name of its panel if it has one.

        `state` returns the values of the gauges, by name; without it there are none.
        """
        bound = ClientTelemetry(self._tracer, self._metrics, address=address, port=port, state=state, name=name)
        self._metrics.watched.add(bound)
        return bound

    def of_process(self, read: Callable[[], Iterable[Measurement]], name: str | None) -> Vitals:
        """Return what has the values that `read` returns collected for as long as it is kept."""
        bound = Vitals(read, _panel(name))
        self._metrics.vitals.watched.add(bound)
        return bound


class _Metrics:
    """The metrics of all clients of one meter provider.

    There is one for each provider, for as long as it lives: the SDK takes an observable instrument once, and
    drops the callbacks of a second one with the same name.
    """

    def __init__(self, provider: MeterProvider | None) -> None:
        self._meter = meter = metrics.get_meter(_SCOPE, __version__, provider, _SCHEMA)
        self.duration = meter.create_histogram(
            "http.client.request.duration",
            unit="s",
            description="Duration of HTTP client requests.",
            explicit_bucket_boundaries_advisory=_BOUNDARIES,
        )
        # Quota IDs by endpoint, status and result code. They are counted by hand, and read when they are
        # collected: to add to a counter of the SDK takes 3 % of the time of a bulk request.
        self._counts: defaultdict[tuple[str | None, str], dict[tuple[str, int | None], int]] = defaultdict(dict)
        self.watched: weakref.WeakSet[ClientTelemetry] = weakref.WeakSet()
        self._alone = threading.Lock()  # clients of several threads may share the counts
        meter.create_observable_counter(
            "sampling.outcomes",
            [self._counted],
            unit="{quota_id}",
            description="Quota IDs by outcome and result code.",
        )
        for name, unit, what in (
            ("limit", "{request}", "Bulk requests that may run at once now."),
            ("waiting", "{request}", "Requests that cannot begin yet."),
            ("retry_tokens", "{token}", "Tokens left in the retry budget."),
        ):
            callback = partial(self._observed, name)
            meter.create_observable_gauge(f"sampling.{name}", [callback], unit=unit, description=what)

    @cached_property
    def vitals(self) -> VitalsMetrics:
        """The metrics of the process around the clients, if somebody measures it."""
        return VitalsMetrics(self._meter)

    def count(
        self, name: str | None, endpoint: Endpoint, outcomes: Mapping[tuple[str, int | None], int]
    ) -> None:
        counts = self._counts[name, endpoint]
        with self._alone:
            for outcome, number in outcomes.items():
                counts[outcome] = counts.get(outcome, 0) + number

    def _counted(self, _: CallbackOptions) -> Iterable[Observation]:
        # What waits is recorded before the histogram is read. In an outage no attempt ends that would do it.
        for client in tuple(self.watched):
            client.record_all()
        for (name, endpoint), counts in tuple(self._counts.items()):
            for (status, code), number in tuple(counts.items()):
                attributes = {"sampling.endpoint": endpoint, "sampling.status": status, **_panel(name)}
                if code is not None:
                    attributes["sampling.result_code"] = code
                yield Observation(number, attributes)

    def _observed(self, name: str, _: CallbackOptions) -> Iterable[Observation]:
        for each in tuple(self.watched):
            if each.state is not None:
                yield Observation(each.state()[name], each.identity)


_of_global: list[_Metrics] = []
_of_others: weakref.WeakKeyDictionary[MeterProvider, _Metrics] = weakref.WeakKeyDictionary()


def _metrics_of(provider: MeterProvider | None) -> _Metrics:
    current = metrics.get_meter_provider()
    provider = current if provider is None else provider
    if provider is current and provider not in _of_others:  # nor given before it was made global
        # Before the application sets its global provider, there is another one in its place, which hands over.
        if not _of_global:
            _of_global.append(_Metrics(provider))
        return _of_global[0]
    if provider not in _of_others:
        _of_others[provider] = _Metrics(provider)
    return _of_others[provider]


class ClientTelemetry:
    """The spans and metrics of one client."""

    def __init__(
        self,
        tracer: trace.Tracer,
        shared: _Metrics,
        *,
        address: str,
        port: int,
        state: Callable[[], Mapping[str, float]] | None,
        name: str | None,
    ) -> None:
        # the attributes that name the service and the panel
        self.server: dict[str, Any] = {"server.address": address, "server.port": port, **_panel(name)}
        # Two clients of one service have gauges of their own.
        # the same, and a number for the client: 1 for the first one of the process
        self.identity = {**self.server, "sampling.client": next(_serial)}
        self.state = state  # returns the values of the gauges, by name
        self._tracer = tracer
        self._duration = shared.duration
        self.count = partial(shared.count, name)
        # The attributes of a request, by endpoint, status and error: there are few, and they are made once.
        self._attributes: dict[tuple[object, ...], dict[str, Any]] = {}
        self._fan_outs: weakref.WeakValueDictionary[int, _FanOut] = weakref.WeakValueDictionary()  # not ended
        self._of_call = {
            endpoint: {**self.server, "sampling.endpoint": endpoint, "url.template": template}
            for endpoint, (_, template) in TEMPLATES.items()
        }

    def attempt_ended(
        self, endpoint: Endpoint, status: int | None, error: str | None, seconds: float, fan_out: object
    ) -> None:
        """Record the duration of an attempt; in a fan-out, record several together.

        The SDK takes 7 µs for one, and three times as long if other work comes in between. They are kept by
        fan-out, because the SDK looks at the context: it shows some of them with the trace that they belong to.
        """
        if not isinstance(fan_out, _FanOut):
            self._duration.record(seconds, self._of_attempt(endpoint, status, error))
            return
        fan_out.durations.append((endpoint, status, error, seconds))
        if len(fan_out.durations) >= _AT_ONCE or time.monotonic() - fan_out.recorded_at > _AT_LATEST:
            self._record(fan_out)

    def record_all(self) -> None:
        """Record all durations that are still kept: metrics are being collected, perhaps in a thread."""
        for reference in self._fan_outs.valuerefs():  # a copy, made in one step
            fan_out = reference()
            if fan_out is not None:
                self._record(fan_out)

    def _record(self, fan_out: _FanOut) -> None:
        fan_out.recorded_at = time.monotonic()
        # Each is taken before it is recorded: another thread may be recording them too.
        with suppress(IndexError):
            while True:
                endpoint, status, error, seconds = fan_out.durations.popleft()
                self._duration.record(seconds, self._of_attempt(endpoint, status, error))

    def call_ended(
        self,
        endpoint: Endpoint,
        seconds: float,
        outcomes: Mapping[tuple[str, int | None], int],
        report: Callable[[], CallReport],
        fan_out: object,
    ) -> None:
        """Count the outcomes of a call, and make its spans, if they are recorded, of what `report` returns."""
        self.count(endpoint, outcomes)
        if isinstance(fan_out, _FanOut) and not self.needs_reports(fan_out):
            return
        end = time.time_ns()
        began = end - int(seconds * _NANO)
        span = self._tracer.start_span(
            _NAMES[endpoint],
            kind=SpanKind.CLIENT,
            attributes=self._of_call[endpoint],
            links=fan_out.links if isinstance(fan_out, _FanOut) else None,
            start_time=began,
        )
        if span.is_recording():
            self._explain(span, report(), began)
        span.end(end)

    def _explain(self, span: Span, report: CallReport, began: int) -> None:
        span.set_attribute("sampling.delivery", report.delivery)
        if report.quota_ids:
            span.set_attribute("sampling.quota_ids", report.quota_ids)
        for (status, code), number in report.outcomes.items():
            span.set_attribute(f"sampling.outcomes.{status}" + ("" if code is None else f".{code}"), number)
        _set_timing(span, report.timing)
        if report.error is not None:
            span.set_attribute("error.type", report.error)
            span.set_status(Status(StatusCode.ERROR))
        inside = trace.set_span_in_context(span)
        for attempt in report.attempts:
            self._span_of_attempt(attempt, inside, began)

    def _span_of_attempt(self, report: AttemptReport, inside: Context, call_began: int) -> None:
        method, template = TEMPLATES[report.endpoint]
        began = call_began + int(report.began * _NANO)
        attributes = dict(self._of_attempt(report.endpoint, report.status, report.error))
        if report.number > 1:
            attributes["http.request.resend_count"] = report.number - 1
        span = self._tracer.start_span(
            f"{method} {template}",
            context=inside,
            kind=SpanKind.CLIENT,
            attributes=attributes,
            start_time=began,
        )
        _set_timing(span, report.timing)
        if "error.type" in attributes:
            span.set_status(Status(StatusCode.ERROR))
        span.end(began + int(report.timing.total * _NANO))

    def _of_attempt(self, endpoint: Endpoint, status: int | None, error: str | None) -> dict[str, Any]:
        key = endpoint, status, error
        found = self._attributes.get(key)
        if found is not None:
            return found
        method, template = TEMPLATES[endpoint]
        made: dict[str, Any] = {**self.server, "http.request.method": method, "url.template": template}
        if status is not None:
            made["http.response.status_code"] = status
            if status >= _FEWEST_FAILURES:
                made["error.type"] = str(status)
        if error is not None:
            made.setdefault("error.type", error)
        self._attributes[key] = made
        return made

    def fan_out_began(self) -> _FanOut:
        """Begin the span of a fan-out. It is not made current: your code runs while it is open."""
        span = self._tracer.start_span("sampling_async.fan_out", attributes=self.server)
        fan_out = _FanOut(span, [Link(span.get_span_context())], time.monotonic())
        self._fan_outs[id(fan_out)] = fan_out
        return fan_out

    @staticmethod
    def needs_reports(fan_out: object) -> bool:
        """Return whether the requests of a fan-out have spans: none if its own is sampled out."""
        return isinstance(fan_out, _FanOut) and fan_out.span.is_recording()

    def fan_out_ended(self, fan_out: object, taken: int, answered: int) -> None:
        """End the span of a fan-out: IDs that were taken from the input, and those with an outcome."""
        if isinstance(fan_out, _FanOut):
            self._fan_outs.pop(id(fan_out), None)
            self._record(fan_out)
            fan_out.span.set_attribute("sampling.quota_ids", taken)
            fan_out.span.set_attribute("sampling.quota_ids_received", answered)
            fan_out.span.end()


@define
class _FanOut:
    """The span of a fan-out."""

    span: Span
    links: list[Link]  # the link to it that all its requests share
    recorded_at: float  # when durations were last recorded
    # attempts that are not recorded yet: endpoint, status, error and seconds
    durations: deque[tuple[Endpoint, int | None, str | None, float]] = field(factory=deque)


def _panel(name: str | None) -> dict[str, Any]:
    return {} if name is None else {"sampling.panel": name}


def _set_timing(span: Span, timing: Timing) -> None:
    for stage in STAGES:
        seconds = getattr(timing, stage)
        if seconds:
            span.set_attribute(f"sampling.seconds.{stage}", round(seconds, 6))
