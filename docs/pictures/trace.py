"""Show the trace of one fan-out, as OpenTelemetry's console exporter prints it.

    python docs/pictures/trace.py            # prints it
    python docs/pictures/trace.py --write    # and puts it into docs/howto/seeing.md

Two requests go to the simulator, which refuses the first one with a 429 at first. The exporter has a formatter
that leaves out what is the same in all spans.
"""

from __future__ import annotations

import asyncio
import sys
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from sampling_async import InviteRequest, SamplingClient, Telemetry
from sampling_async.simulator import Fault, Simulator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

PAGE: Final = Path(__file__).parents[1] / "howto" / "seeing.md"
MARK: Final = "<!-- run: trace -->\n"
_SAME: Final = {"server.address", "server.port", "url.template", "sampling.endpoint"}


def shown(span: ReadableSpan) -> str:
    """Return a span as some lines: its name, who it belongs to, how long it took, its attributes."""
    assert span.start_time is not None
    assert span.end_time is not None
    own, parent = _short(span.context), "-" if span.parent is None else _short(span.parent)
    links = "".join(f" link={_short(link.context)}" for link in span.links)
    took = (span.end_time - span.start_time) / 1e6
    lines = [f"{span.name}", f"  span={own} parent={parent}{links} {span.kind.name} {took:.1f} ms"]
    given = span.attributes or {}
    lines += [f"  {name}={value}" for name, value in given.items() if name not in _SAME]
    return "\n".join(lines) + "\n"


def _short(context: object) -> str:
    return format(context.span_id, "016x")[:6]  # type: ignore[attr-defined]


async def fan_out(base_url: str, simulator: Simulator, telemetry: Telemetry) -> None:
    """Ask for invites to 150 quotas, in two requests."""
    async with (
        SamplingClient(
            base_url,
            panel_guid=simulator.panel_guid,
            api_key=simulator.api_key,
            telemetry=telemetry,
            random=lambda: 0.5,
        ) as client,
        client.fan_out([InviteRequest("m000001", range(1, 151))]) as outcomes,
    ):
        async for _ in outcomes:
            pass


def trace() -> str:
    """Return the trace."""
    out = StringIO()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=out, formatter=shown)))
    # One 429, which always means that nothing was processed: so the request is repeated.
    fault = Fault.status(429, retry_after=0.02).on(times=1)
    simulator = Simulator(seed=0, surveys=20, members=200, faults=[fault])
    with simulator.serve() as base_url:
        asyncio.run(fan_out(base_url, simulator, Telemetry(tracers)))
    return out.getvalue().rstrip()


def main() -> None:
    """Print the trace, and write the page if that is wanted."""
    made = trace()
    print(made)
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text().partition(f"{MARK}```text\n")
        after = rest[rest.index("```\n") :]
        PAGE.write_text(f"{before}{MARK}```text\n{made}\n{after}")


if __name__ == "__main__":
    main()
