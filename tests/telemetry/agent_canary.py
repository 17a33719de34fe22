"""A process that a monitoring agent watches; shows which of our secrets the agent would transmit.

    python tests/telemetry/agent_canary.py AGENT CALLER

Each agent is one of `AGENTS`, set up as its maker says. Nothing leaves the process. `plain` is an
httpx.AsyncClient that makes the same bulk invite; it proves that a hit can be seen.
The other callers are our client: over its own engine, over that of httpx, loaded before the agent, and, with
OpenTelemetry, making spans and metrics itself. One JSON object on stdout says how many texts were searched, and
which secrets were found.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import zlib
from collections import Counter
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

KEY: Final = "c0ffee00-5ec2-4e7c-a11a-0ddba11deca1"
PANEL: Final = "0ddba11d-0000-4e7c-a11a-c0ffee005ec2"
MEMBER: Final = "canary member/zykovqx"
FORMS: Final = {
    "key": re.compile(f"{KEY}|{KEY.replace('-', '')}|{KEY[:13]}", re.IGNORECASE),
    "member code": re.compile("zykovqx", re.IGNORECASE),
    "panel": re.compile(f"{PANEL}|{PANEL.replace('-', '')}|{PANEL[:13]}", re.IGNORECASE),
    "URL": re.compile(
        r"IntegratedPanelService|ExternalSample|https?://(localhost|127\.0\.0\.1):\d", re.IGNORECASE
    ),
}
"""The secrets, in every form they may take."""

CALLERS: Final = ("plain", "engine", "transport", "loaded first")
TELEMETRY: Final = "telemetry"
"""One more caller, for OpenTelemetry only. It has templates of addresses in its spans, which are no secret."""
IDS: Final = range(1, 251)


class Sentry:
    """sentry-sdk with its defaults and tracing."""

    module = "sentry_sdk"

    def __init__(self) -> None:
        import sentry_sdk  # noqa: PLC0415  installed or not
        from sentry_sdk.transport import Transport  # noqa: PLC0415

        texts: list[str] = []

        class Kept(Transport):
            """Keeps the payloads that would be sent."""

            def capture_envelope(self, envelope: Any) -> None:
                texts.append(envelope.serialize().decode())

        self._sentry = sentry_sdk
        self._texts = texts
        sentry_sdk.init(dsn="https://public@sentry.example/1", traces_sample_rate=1.0, transport=Kept)

    def transaction(self) -> AbstractContextManager[object]:
        return self._sentry.start_transaction(name="canary", op="task")

    def told(self, error: BaseException) -> None:
        """Report an error; its report includes the breadcrumbs."""
        self._sentry.capture_exception(error)

    def texts(self) -> list[str]:
        self._sentry.flush()
        return [line for text in self._texts for line in text.splitlines()]


class OpenTelemetry:
    """OpenTelemetry's instrumentation of httpx: its spans, with all headers, and its metrics."""

    module = "opentelemetry.instrumentation.httpx"

    def __init__(self) -> None:
        os.environ["OTEL_INSTRUMENTATION_HTTP_CAPTURE_HEADERS_CLIENT_REQUEST"] = ".*"
        from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor  # noqa: PLC0415
        from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: PLC0415
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: PLC0415

        self._spans, self._metrics = InMemorySpanExporter(), InMemoryMetricReader()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self._tracer = provider.get_tracer("canary")
        meters = MeterProvider([self._metrics])
        HTTPXClientInstrumentor().instrument(tracer_provider=provider, meter_provider=meters)
        self.providers = provider, meters

    def transaction(self) -> AbstractContextManager[object]:
        return self._tracer.start_as_current_span("canary")

    def told(self, error: BaseException) -> None:
        from opentelemetry import trace  # noqa: PLC0415

        trace.get_current_span().record_exception(error)

    def texts(self) -> list[str]:
        metrics = self._metrics.get_metrics_data()
        spans = [span.to_json() for span in self._spans.get_finished_spans()]
        return [*spans, metrics.to_json() if metrics else ""]


class NewRelic:
    """New Relic's agent, which sends to a collector in its own process (its developer mode)."""

    module = "newrelic"

    def __init__(self) -> None:
        os.environ.update(
            NEW_RELIC_DEVELOPER_MODE="true",
            NEW_RELIC_LICENSE_KEY="0" * 40,
            NEW_RELIC_APP_NAME="canary",
            NEW_RELIC_TRANSACTION_TRACER_TRANSACTION_THRESHOLD="0",
            NEW_RELIC_LOG="stderr",
            NEW_RELIC_LOG_LEVEL="critical",
        )
        import newrelic.agent  # noqa: PLC0415
        from newrelic.common.agent_http import DeveloperModeClient  # noqa: PLC0415

        self._agent, self._texts = newrelic.agent, list[str]()
        send = DeveloperModeClient.send_request

        def kept(client: Any, *args: Any, **options: Any) -> Any:
            self._texts.append(_readable(options.get("payload")))
            return send(client, *args, **options)

        DeveloperModeClient.send_request = kept
        newrelic.agent.initialize()
        self._application = newrelic.agent.register_application(timeout=10.0)

    def transaction(self) -> AbstractContextManager[object]:
        return self._agent.BackgroundTask(self._application, name="canary", group="Task")

    def told(self, error: BaseException) -> None:
        self._agent.notice_error((type(error), error, error.__traceback__))

    def texts(self) -> list[str]:
        self._agent.shutdown_agent(timeout=10.0)
        return self._texts


class Datadog:
    """ddtrace, configured to record the header of the key; its spans are read where they would be written."""

    module = "ddtrace"

    def __init__(self) -> None:
        os.environ.update(
            DD_INSTRUMENTATION_TELEMETRY_ENABLED="0",
            DD_REMOTE_CONFIGURATION_ENABLED="0",
            DD_TRACE_HEADER_TAGS="API_AUTH_KEY:header",
            DD_TRACE_STARTUP_LOGS="0",
            DD_TRACE_STATS_COMPUTATION_ENABLED="0",
        )
        import ddtrace  # noqa: PLC0415
        from ddtrace.trace import TraceFilter, tracer  # noqa: PLC0415

        texts: list[str] = []

        class Kept(TraceFilter):
            """Keeps the spans that would be written."""

            def process_trace(self, trace: Any) -> None:
                texts.extend(_datadog_text(span) for span in trace)

        tracer.configure(trace_processors=[Kept()])
        ddtrace.patch(httpx=True)
        self._tracer, self._texts = tracer, texts

    def transaction(self) -> AbstractContextManager[object]:
        return self._tracer.trace("canary")

    def told(self, error: BaseException) -> None:
        self._tracer.current_span().set_exc_info(type(error), error, error.__traceback__)

    def texts(self) -> list[str]:
        return self._texts


AGENTS: Final[dict[str, Any]] = {
    "sentry": Sentry,
    "opentelemetry": OpenTelemetry,
    "newrelic": NewRelic,
    "ddtrace": Datadog,
}


def _datadog_text(span: Any) -> str:
    tags = {**span.get_tags(), **span.get_metrics()} if hasattr(span, "get_tags") else vars(span)
    return json.dumps([span.name, span.resource, span.service, tags], default=str)


def _readable(payload: Any) -> str:
    """Return the text of a payload, including what is packed inside it."""
    raw = payload or b""
    for unpack in (gzip.decompress, zlib.decompress):
        with suppress(Exception):
            raw = unpack(raw)
    text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)
    return "\n".join([text, *_packed(text)])


def _packed(text: str) -> Iterator[str]:
    """Yield the parts of a text that are deflated and base64-encoded, as transaction traces are."""
    import base64  # noqa: PLC0415

    for found in re.findall(r'"(eJ[\w+/=]{20,})"', text):
        with suppress(Exception):
            yield zlib.decompress(base64.b64decode(found)).decode("utf-8", "replace")


def bulk_answer(request: bytes) -> bytes:
    """Return a correct response to the first request, and a failure to the others."""
    import wire  # noqa: PLC0415

    if b'"QuotaIDs"' not in request:
        return wire.answer(b"[]")
    asked = json.loads(request.partition(b"\r\n\r\n")[2])["QuotaIDs"]
    return wire.answer(b"{}", "500 Internal Server Error") if 201 in asked else wire.bulk_answer(request)


async def plain(url: str) -> None:
    """Make a bulk invite with plain httpx."""
    import httpx  # noqa: PLC0415

    from sampling_async._protocol import requests as _protocol  # noqa: PLC0415

    call = _protocol.bulk_invite(PANEL, MEMBER, list(IDS)[:100])
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{url}{call.target}", content=call.body, headers={"API_AUTH_KEY": KEY})
        answer.raise_for_status()


async def ours(url: str, agent: Any, transport: Any = None, *, telemetry: Any = False) -> None:
    """Make a bulk invite with one failing request, then a single invite, and report the failure."""
    from sampling_async import RetryPolicy, SamplingClient, SamplingError  # noqa: PLC0415

    options: dict[str, Any] = {"panel_guid": PANEL, "api_key": KEY, "retry": RetryPolicy(max_attempts=1)}
    async with SamplingClient(url, transport=transport, telemetry=telemetry, **options) as client:
        result = await client.bulk_invite(MEMBER, IDS)
        statuses = Counter(outcome.status for outcome in result)
        assert statuses == {"rejected": 200, "unknown": 50}, statuses
        # Otherwise the agent interferes.
        assert client._session._sender().knows_what_was_sent is (transport is None)
        agent.told(result.unknown[0].error)
        with suppress(SamplingError):
            await client.generate_invite(MEMBER, 1)
        await client.get_settings()


def main(agent_name: str, caller: str) -> dict[str, Any]:
    """Let the agent watch the caller; return which secrets it would transmit."""
    import anyio  # noqa: PLC0415

    if caller == "loaded first":
        import_module("sampling_async").SamplingClient  # noqa: B018
    agent = AGENTS[agent_name]()
    import wire  # noqa: PLC0415

    with wire.serve(wire.serve_each(bulk_answer)) as url:

        async def watched() -> None:
            with agent.transaction():
                if caller == "plain":
                    await plain(url)
                elif caller == TELEMETRY:
                    telemetry = import_module("sampling_async").Telemetry(*agent.providers)
                    await ours(url, agent, telemetry=telemetry)
                elif caller == "transport":
                    httpx = import_module("httpx")
                    await ours(url, agent, httpx.AsyncHTTPTransport())
                else:
                    await ours(url, agent)
            if agent_name == "sentry":  # breadcrumbs are sent with errors
                agent.told(RuntimeError("the end"))

        anyio.run(watched)
    texts = agent.texts()
    if caller == TELEMETRY:
        templates = import_module("sampling_async._protocol.requests").TEMPLATES
        for _, template in templates.values():
            texts = [text.replace(template, "") for text in texts]
    hits = {name: sum(bool(form.search(text)) for text in texts) for name, form in FORMS.items()}
    shown = [text for text in texts if any(form.search(text) for form in FORMS.values())]
    return {"texts": len(texts), "characters": sum(map(len, texts)), "hits": hits, "shown": shown[:3]}


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))  # of `wire`
    sys.stdout.write(json.dumps(main(sys.argv[1], sys.argv[2])) + "\n")
