"""What it costs to watch a client: hooks, and OpenTelemetry with and without recorded spans."""

from __future__ import annotations

import asyncio
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from scoreboard.board import at_most

from sampling_async import SamplingClient, Telemetry
from speed.canned_server import canned_service
from speed.measuring import Measured, Spread, Table, Watch, interleaved, microseconds, ratio

if TYPE_CHECKING:
    from scoreboard.board import Run

    from speed.canned_server import Address
    from speed.measuring import Sample

WIDTH: Final = 64
REQUESTS: Final = 100
PLAIN: Final = "nobody watches"
SAMPLED_OUT: Final = "OpenTelemetry: metrics, spans sampled out"
ALONE: Final = "nobody; after the bulk, one record of the SDK's histogram for each request"
"""What no client that reports each request can be below: the SDK's part, in a loop of its own."""

ATTRIBUTES: Final[dict[str, str | int]] = {
    "server.address": "127.0.0.1",
    "server.port": 8080,
    "http.request.method": "POST",
    "url.template": "/{PanelGUID}/{MemberCode}/Invites",
    "http.response.status_code": 200,
}
"""Those that the conventions require, and the template."""


def _ways() -> dict[str, dict[str, Any]]:
    recorded = TracerProvider()
    recorded.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    meters = MeterProvider([InMemoryMetricReader()])
    unsampled = TracerProvider(sampler=ALWAYS_OFF)
    return {
        PLAIN: {},
        "the same again": {},
        ALONE: {},
        "both hooks": {"on_attempt": bool, "on_outcome": bool},
        "OpenTelemetry: no metrics, spans sampled out": {"telemetry": Telemetry(unsampled)},
        SAMPLED_OUT: {"telemetry": Telemetry(unsampled, meters)},
        "OpenTelemetry: metrics, all spans recorded": {"telemetry": Telemetry(recorded, meters)},
    }


class _Watched:
    """One client for each way to watch it, in one event loop."""

    def __init__(self, address: Address) -> None:
        self._code = address.member_code
        self._runner = asyncio.Runner()
        meter = MeterProvider([InMemoryMetricReader()]).get_meter("alone")
        self._histogram = meter.create_histogram("http.client.request.duration", unit="s")
        self._clients = {
            name: SamplingClient(
                address.url,
                panel_guid=address.panel_guid,
                api_key=address.api_key,
                max_concurrency=WIDTH,
                **options,
            )
            for name, options in _ways().items()
        }
        for name in self._clients:
            self.sample(name)
            self.sample(name)
        self.takers = {name: partial(self.sample, name) for name in self._clients}

    def sample(self, name: str) -> Sample:
        return self._runner.run(self._bulk(self._clients[name], REQUESTS if name == ALONE else 0))

    async def _bulk(self, client: SamplingClient, records: int) -> Sample:
        watch = Watch()
        await client.bulk_invite(self._code, range(1, 100 * REQUESTS + 1))
        for _ in range(records):
            self._histogram.record(0.005, ATTRIBUTES)
        return watch.sample()

    def close(self) -> None:
        for client in self._clients.values():
            self._runner.run(client.aclose())
        self._runner.close()


def measure(run: Run) -> Measured:
    """Measure all ways in one process, interleaved."""
    with canned_service() as address, closing(_Watched(address)) as watched:
        taken = interleaved(watched.takers, run.of(9, 41))
    cpu = {name: microseconds(samples, REQUESTS) for name, samples in taken.items()}
    table = Table(f"A bulk request, {WIDTH} wide", ("who watches", "CPU us a request", "times nobody"))
    for name, values in cpu.items():
        table.rows.append((name, str(Spread.of(values)), str(ratio(values, cpu[PLAIN]))))
    goal = at_most(
        "CPU a bulk request with OpenTelemetry, spans sampled out: without is 1",
        1.05,
        ratio(cpu[SAMPLED_OUT], cpu[PLAIN]).median,
        note=f"the SDK's histogram alone: {ratio(cpu[ALONE], cpu[PLAIN]).median:.2f}",
    )
    return Measured([goal], [table], {"cpu_us": cpu})
