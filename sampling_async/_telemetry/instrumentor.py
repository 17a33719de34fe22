"""The entry point through which `opentelemetry-instrument` and the like turn telemetry on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.instrumentation.instrumentor import (  # type: ignore[attr-defined]  # it has no types
    BaseInstrumentor,
)

from sampling_async._calls import reports
from sampling_async._telemetry.otel import Telemetry

if TYPE_CHECKING:
    from collections.abc import Collection


class SamplingAsyncInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """Gives telemetry to each `SamplingClient` that is made from now on and has no telemetry of its own."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return what must be installed: the package itself."""
        return ("sampling-async",)

    def _instrument(self, **kwargs: Any) -> None:
        reports.instrumented = Telemetry(kwargs.get("tracer_provider"), kwargs.get("meter_provider"))

    def _uninstrument(self, **_: Any) -> None:
        reports.instrumented = None
