"""Spans and metrics for OpenTelemetry: what they hold, how they hang together, and what they never hold."""

from __future__ import annotations

import gc
import json
import sys
import threading
from contextlib import aclosing
from importlib.metadata import entry_points

import doubles
import httpx
import inventories
import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from sampling_async import (
    AttemptReport,
    BadRequestError,
    CallReport,
    InvalidRequestError,
    InviteRequest,
    RetryPolicy,
    Telemetry,
    TransportError,
)

CANARY = "member-canary"
INVITES = "/IPExternalSamplingService/ExternalSample/{PanelGUID}/{MemberCode}/Invites"


class Collected:
    """Providers that keep all spans and metrics in memory."""

    def __init__(self, **options: object) -> None:
        self._spans = InMemorySpanExporter()
        self.tracers = TracerProvider(**options)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self._reader = InMemoryMetricReader()
        self.meters = MeterProvider([self._reader])

    def telemetry(self) -> Telemetry:
        return Telemetry(self.tracers, self.meters)

    def spans(self, name: str = ""):
        return [each for each in self._spans.get_finished_spans() if name in each.name]

    def metrics(self) -> dict[str, list]:
        found = self._reader.get_metrics_data()
        return {
            metric.name: list(metric.data.data_points)
            for resource in (found.resource_metrics if found else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def collected():
    return Collected()


def bulk(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json=doubles.bulk(request))


async def test_a_call_is_a_span_with_a_child_for_each_attempt(collected):
    service = doubles.Service(httpx.Response(500), [])
    policy = RetryPolicy(base=4.0)
    async with doubles.client(service, retry=policy, telemetry=collected.telemetry()) as client:
        with collected.tracers.get_tracer("host").start_as_current_span("host") as host:
            await client.get_settings()
    (call,) = collected.spans("sampling_async.get_settings")
    first, second = collected.spans("GET /IntegratedPanelService/api/Settings")
    assert call.parent.span_id == host.get_span_context().span_id
    assert {first.parent.span_id, second.parent.span_id} == {call.context.span_id}
    assert {each.kind for each in (call, first, second)} == {SpanKind.CLIENT}
    assert (
        dict(first.attributes).items()
        >= {
            "http.request.method": "GET",
            "server.address": "service.example",
            "server.port": 443,
            "url.template": "/IntegratedPanelService/api/Settings",
            "http.response.status_code": 500,
            "error.type": "500",
        }.items()
    )
    assert first.status.status_code is StatusCode.ERROR
    assert second.attributes["http.request.resend_count"] == 1
    assert "http.request.resend_count" not in first.attributes
    assert call.attributes["sampling.delivery"] == "answered"
    assert call.status.status_code is StatusCode.UNSET
    assert call.start_time <= first.start_time <= first.end_time <= second.start_time
    assert second.end_time <= call.end_time


async def test_a_failed_call_is_a_failed_span(collected):
    refusal = httpx.Response(400, json={"Result": "MEMBER_BLOCKED", "ResultCode": 13})
    async with doubles.client(doubles.Service(refusal), telemetry=collected.telemetry()) as client:
        with pytest.raises(BadRequestError):
            await client.generate_invite(CANARY, 5)
    (call,) = collected.spans("sampling_async.generate_invite")
    assert call.status.status_code is StatusCode.ERROR
    assert call.attributes["error.type"] == "BadRequestError"
    assert call.attributes["sampling.outcomes.rejected.13"] == 1


async def test_durations_of_a_fan_out_are_there_whenever_metrics_are_collected(collected):
    """Nothing may end for minutes: in an outage, or while the input rests."""

    def recorded() -> int:
        return sum(point.count for point in collected.metrics().get("http.client.request.duration", ()))

    async with doubles.client(bulk, telemetry=collected.telemetry()) as client:
        requests = [InviteRequest(f"m{number}", [1, 2]) for number in range(9)]
        for seen in (9, 18):
            async with client.fan_out(requests) as outcomes:
                async for _ in outcomes:
                    pass
                assert recorded() == seen
            assert recorded() == seen
        left = client.fan_out(requests)
        await left.__aenter__()  # and never left
        async for _ in left:
            pass
    assert recorded() == 27


async def test_an_inventory_that_breaks_off_is_a_failed_request_of_its_whole_time(collected):
    time, body = doubles.FakeTime(), json.dumps(inventories.quotas(inventories.survey())).encode()

    class Arriving(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield body[:-3]
            time.now += 3.0
            raise httpx.ReadError("cut")

    def answer(_: httpx.Request) -> httpx.Response:
        time.now += 2.0
        return httpx.Response(200, stream=Arriving())

    async with doubles.client(answer, time, telemetry=collected.telemetry()) as client:
        async with aclosing(client.iter_surveys()) as surveys:
            with pytest.raises(TransportError):
                async for _ in surveys:
                    time.now += 100.0  # the time of the user
    (point,) = collected.metrics()["http.client.request.duration"]
    assert (point.count, point.sum, point.attributes["error.type"]) == (1, 5.0, "TransportError")
    (attempt,) = collected.spans("GET ")
    assert attempt.status.status_code is StatusCode.ERROR


async def test_a_provider_that_is_made_global_later_is_that_of_all_clients(collected, monkeypatch):
    first = doubles.client(bulk, telemetry=collected.telemetry())
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: collected.meters)
    monkeypatch.setattr(metrics, "get_meter", lambda *names: collected.meters.get_meter(names[0]))
    second = doubles.client(bulk, telemetry=True)
    async with first, second:
        for client in (first, second):
            await client.bulk_invite(CANARY, [2])
    found = collected.metrics()
    assert sum(point.value for point in found["sampling.outcomes"]) == 2
    assert len(found["sampling.limit"]) == 2


async def test_the_requests_of_a_fan_out_link_to_its_span(collected):
    async with doubles.client(bulk, telemetry=collected.telemetry()) as client:
        with collected.tracers.get_tracer("host").start_as_current_span("host") as host:
            requests = [InviteRequest(f"m{number}", range(1, 151)) for number in range(2)]
            async with client.fan_out(requests) as outcomes:
                async for _ in outcomes:
                    # No span of the client is current in the block of its user.
                    from opentelemetry import trace  # noqa: PLC0415

                    assert trace.get_current_span() is host
    (fan_out,) = collected.spans("sampling_async.fan_out")
    calls = collected.spans("sampling_async.bulk_invite")
    assert len(calls) == 4
    for call in calls:
        assert [link.context.span_id for link in call.links] == [fan_out.context.span_id]
        assert call.parent.span_id == host.get_span_context().span_id
    assert fan_out.attributes["sampling.quota_ids"] == fan_out.attributes["sampling.quota_ids_received"] == 300
    assert len(collected.spans(f"POST {INVITES}")) == 4


async def test_metrics_count_requests_and_outcomes(collected):
    async with doubles.client(bulk, telemetry=collected.telemetry()) as client:
        await client.bulk_invite(CANARY, range(1, 151))
        found = collected.metrics()
    (duration,) = found["http.client.request.duration"]
    assert duration.count == 2
    assert duration.explicit_bounds[:3] == (0.005, 0.01, 0.025)
    assert dict(duration.attributes) == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "server.address": "service.example",
        "server.port": 443,
        "url.template": INVITES,
    }
    counted = {each.attributes["sampling.status"]: each.value for each in found["sampling.outcomes"]}
    assert counted == {"invited": 75, "rejected": 75}
    assert [each.value for each in found["sampling.limit"]] == [8]
    assert [each.value for each in found["sampling.waiting"]] == [0]
    assert [each.value for each in found["sampling.retry_tokens"]] == [10]


async def test_several_clients_share_counters_and_have_gauges_of_their_own(collected):
    telemetry = collected.telemetry()
    async with doubles.client(bulk, telemetry=telemetry) as one:
        async with doubles.client(bulk, telemetry=telemetry, max_concurrency=3) as other:
            await one.bulk_invite("a", [1])
            await other.bulk_invite("b", [1])
            found = collected.metrics()
    assert [each.value for each in found["sampling.outcomes"]] == [2]
    assert sorted(each.value for each in found["sampling.limit"]) == [3, 8]


async def test_clients_of_two_threads_lose_no_count(collected):
    async with doubles.client(bulk, telemetry=collected.telemetry()) as client:
        count = client._caller.hooks._spans.count
        outcome = "invited", 1
        other = threading.Thread(target=count, args=("bulk_invite", {outcome: 1}))

        class Slow(int):
            """A number during whose addition another thread counts, or tries to."""

            def __radd__(self, before: int) -> int:
                other.start()
                other.join(0.05)
                return before + int(self)

        count("bulk_invite", {outcome: Slow(1)})
        other.join()
    assert [each.value for each in collected.metrics()["sampling.outcomes"]] == [2]


async def test_counters_outlive_their_clients_and_are_shared_by_all_telemetry_of_a_provider(collected):
    for code in "ab":
        async with doubles.client(bulk, telemetry=collected.telemetry()) as client:
            await client.bulk_invite(code, [1])
        del client
        gc.collect()
    assert [each.value for each in collected.metrics()["sampling.outcomes"]] == [2]


def test_telemetry_of_the_global_provider_is_made_once():
    given = Telemetry(meter_provider=metrics.get_meter_provider())
    assert Telemetry()._metrics is given._metrics
    other = MeterProvider()
    assert Telemetry(meter_provider=other)._metrics is Telemetry(meter_provider=other)._metrics
    assert Telemetry(meter_provider=other)._metrics is not given._metrics


async def test_nothing_private_is_in_any_span_or_metric(collected):
    private = CANARY, doubles.PANEL, doubles.KEY, "https://", doubles.invite(2)["URL"]
    service = doubles.Service(httpx.ReadError(CANARY), httpx.Response(500, text=CANARY), bulk)
    async with doubles.client(service, telemetry=collected.telemetry()) as client:
        await client.bulk_invite(CANARY, range(1, 5))
        with pytest.raises(Exception):  # noqa: B017, PT011  whatever it is
            await client.generate_invite(CANARY, 4)
    shown = "".join(span.to_json() for span in collected.spans()) + repr(collected.metrics())
    assert shown.count("sampling_async.bulk_invite") == 1
    for text in private:
        assert text not in shown


async def test_spans_that_are_not_sampled_cost_no_report(monkeypatch):
    collected = Collected(sampler=ALWAYS_OFF)
    made = []
    monkeypatch.setattr(AttemptReport, "__init__", lambda *_, **__: made.append("attempt"))
    monkeypatch.setattr(CallReport, "__init__", lambda *_, **__: made.append("call"))
    async with doubles.client(bulk, telemetry=collected.telemetry()) as client:
        await client.bulk_invite(CANARY, range(1, 151))
    assert collected.spans() == []
    assert not made
    async with doubles.client(bulk, on_attempt=bool, on_outcome=bool) as client:
        await client.bulk_invite(CANARY, [1])
    assert made == ["attempt", "attempt", "call"]
    (duration,) = collected.metrics()["http.client.request.duration"]
    assert duration.count == 2


async def test_the_instrumentor_gives_telemetry_to_clients_that_have_none(collected):
    (entry,) = entry_points(group="opentelemetry_instrumentor", name="sampling_async")
    instrumentor = entry.load()()
    assert list(instrumentor.instrumentation_dependencies()) == ["sampling-async"]
    instrumentor.instrument(tracer_provider=collected.tracers, meter_provider=collected.meters)
    try:
        async with doubles.client(doubles.Service([])) as client:
            await client.get_settings()
    finally:
        instrumentor.uninstrument()
    assert len(collected.spans("sampling_async.get_settings")) == 1
    async with doubles.client(doubles.Service([])) as client:
        assert client._caller.hooks is None
        await client.get_settings()
    assert len(collected.spans("sampling_async.get_settings")) == 1


@pytest.mark.parametrize("wrong", ["yes", 1.5, object()])
def test_telemetry_of_another_type_is_refused(wrong):
    with pytest.raises(InvalidRequestError, match="telemetry must be True, False or a Telemetry"):
        doubles.client(doubles.Service([]), telemetry=wrong)


def test_without_opentelemetry_the_message_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "sampling_async._telemetry.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(InvalidRequestError, match=r'install "sampling-async\[otel\]"'):
        doubles.client(doubles.Service([]), telemetry=True)


async def test_the_name_of_a_panel_is_on_spans_and_metrics(collected):
    async with doubles.client(
        doubles.Service(doubles.bulk), telemetry=collected.telemetry(), name="us"
    ) as client:
        other = client.with_options(name="de")
        async with client.fan_out([InviteRequest("m", [1, 2])]) as outcomes:
            async for _ in outcomes:
                pass
        await other.bulk_invite("m", [2])
        metrics = collected.metrics()
    panels = [(each.attributes.get("sampling.panel"), each.name.split(".")[-1]) for each in collected.spans()]
    calls = [("us", "bulk_invite"), ("de", "bulk_invite")]
    assert [panel for panel in panels if panel[1] == "bulk_invite"] == calls
    assert {panel for panel, _ in panels} == {"us", "de"}
    counted = {
        (point.attributes["sampling.panel"], point.attributes["sampling.status"]): point.value
        for point in metrics["sampling.outcomes"]
    }
    assert counted == {("us", "invited"): 1, ("us", "rejected"): 1, ("de", "invited"): 1}
    durations = metrics["http.client.request.duration"]
    assert {point.attributes["sampling.panel"] for point in durations} == {"us", "de"}
    # One limit has one gauge: that of the client which was made first.
    assert [point.attributes["sampling.panel"] for point in metrics["sampling.limit"]] == ["us"]
