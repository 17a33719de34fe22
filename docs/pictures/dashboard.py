"""Draw the dashboard of docs/howto/monitoring.md without Grafana, from metrics of a service that has run.

    python docs/pictures/dashboard.py          # draws dashboard.svg from dashboard.json
    python docs/pictures/dashboard.py --run    # runs the service for a minute first, and writes dashboard.json

The service runs with the simulator and members who click. From second 15 to 25 the operator's service is away,
from second 35 to 45 the handler of completions fails. The charts are the first of grafana-dashboard.json.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias

from drawing import HERE, Drawing
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from sampling_async import SamplingClient, Telemetry
from sampling_async.health import Health
from sampling_async.matching import LiveIndex, Member
from sampling_async.notifications import (
    Completion,
    Fact,
    HandlerPolicy,
    Inbox,
    InviteNotification,
    QuotaStatus,
    Terminate,
    UnknownNotification,
)
from sampling_async.routing import SurveyRouter
from sampling_async.simulator import Fault, Latency, Notifying, Simulator

DATA: Final = HERE / "dashboard.json"
DASHBOARD: Final = HERE.parent / "files" / "grafana-dashboard.json"
TITLE: Final = "Eight charts of a service that ran for a minute, with an outage and a handler that failed"
SECONDS: Final = 60
AWAY: Final = range(15, 25)
FAILING: Final = range(35, 45)
CLICKS_A_SECOND: Final = 20
CHARTS: Final = 8  # of the dashboard, from its top
WIDTH, HEIGHT, COLUMNS = 430, 168, 2
LEFT, RIGHT, TOP, BOTTOM = 48, 22, 34, 40  # the edges of a chart
COLOURS: Final = ("strong", "bad", "good", "plain", "held", "soft")
Series: TypeAlias = "dict[str, list[float | None]]"


# --- Running the service -------------------------------------------------------------------------------------


async def run() -> list[dict[str, float]]:
    """Run the service; return the value of each series at each second, by its Prometheus name."""
    sim = Simulator(
        seed=1,
        surveys=60,
        members=2_000,
        latency=Latency(a=0.08),
        notifying=Notifying(completes=0.5),
    )
    reader = InMemoryMetricReader()
    samples: list[dict[str, float]] = []
    with TemporaryDirectory() as folder, sim.serve() as url:
        store, second = Path(folder) / "partner.db", 0
        inbox = Inbox(
            store, secrets="a-secret-of-the-picture", handling=HandlerPolicy(first_wait=1, attempts=4)
        )

        @inbox.on(Completion, UnknownNotification)
        async def credit(_: Fact[Completion | UnknownNotification]) -> None:
            if second in FAILING:
                raise ConnectionError

        @inbox.on(InviteNotification, QuotaStatus, Terminate)
        async def note(_: object) -> None:
            pass

        async with (
            SamplingClient(url, panel_guid=sim.panel_guid, api_key=sim.api_key) as client,
            client.watch_quotas(every=2) as watch,
            LiveIndex(watch) as live,
            inbox,
            SurveyRouter(client, live, store=store) as router,
            asyncio.TaskGroup() as clicks,
        ):
            telemetry = Telemetry(meter_provider=MeterProvider([reader]))
            health = Health(client=client, live=live, inbox=inbox, router=router, telemetry=telemetry)
            await live.ready(timeout=10)
            members = random.Random(1).sample(sorted(sim.members), SECONDS * CLICKS_A_SECOND)  # noqa: S311

            async def click(code: str) -> None:
                member = Member(code, sim.members[code].profile)
                await (await router.route(member, within=2.0)).entered()

            for second in range(SECONDS):
                if second == AWAY.start:
                    sim.faults.add(Fault.cut(when="before"))
                if second == AWAY.stop:
                    sim.faults.clear()
                for code in members[second * CLICKS_A_SECOND :][:CLICKS_A_SECOND]:
                    clicks.create_task(click(code))
                    await asyncio.sleep(1 / CLICKS_A_SECOND)
                await sim.notifications.deliver(inbox)
                samples.append(_prometheus(await asyncio.to_thread(reader.get_metrics_data)))
            del health
    return samples


def _prometheus(data: Any) -> dict[str, float]:
    """Return all values by the names that Prometheus makes of them, with the kind or status behind."""
    found: dict[str, float] = {}
    scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
    for metric in (each for scope in scopes for each in scope.metrics if each.name.startswith("sampling.")):
        seconds = "_seconds" if metric.unit == "s" else ""
        total = "_total" if hasattr(metric.data, "is_monotonic") else ""
        name = f"{metric.name.replace('.', '_')}{seconds}{total}"
        for point in metric.data.data_points:
            label = next(iter(point.attributes.values()), "")  # its kind or status: there is one panel
            found[f"{name} {label}".strip()] = round(point.value, 3)
    return found


# --- Drawing -------------------------------------------------------------------------------------------------


def series_of(query: str, samples: list[dict[str, float]]) -> Series:
    """Return what a query of the dashboard says about one process: its series, by their label."""
    match = re.search(r"sampling_\w+", re.sub(r"by \(\w+\)", "", query))
    assert match is not None
    keys = sorted({key for sample in samples for key in sample if key.split()[0] == match[0]})
    found: Series = {}
    for key in keys:
        values = [sample.get(key) for sample in samples]
        if query.startswith("count("):
            values = [None if value is None else 1.0 for value in values]
        if "rate(" in query:
            rises = [(later or 0.0) - (before or 0.0) for before, later in pairwise(values)]
            values = [0.0, *rises]
        if any(values) or len(keys) == 1:
            found[key.partition(" ")[2]] = values
    return found


def picture() -> str:
    """Return the picture."""
    samples = json.loads(DATA.read_text())
    charts = json.loads(DASHBOARD.read_text())["panels"][:CHARTS]
    rows = -(-len(charts) // COLUMNS)
    draw = Drawing(COLUMNS * WIDTH + 16, rows * HEIGHT + 16, TITLE)
    for number, chart in enumerate(charts):
        x, y = 8 + number % COLUMNS * WIDTH, 8 + number // COLUMNS * HEIGHT
        series: Series = {}
        for target in chart["targets"]:
            label = re.sub(r" *{{\w+}}", "", target["legendFormat"])
            found = series_of(target["expr"], samples)
            series |= {name or label: values for name, values in found.items()}
        _draw(draw, x, y, chart["title"], series, unit=chart["fieldConfig"]["defaults"]["unit"])
    return draw.svg()


def _draw(draw: Drawing, x: float, y: float, title: str, series: Series, *, unit: str) -> None:
    draw.box(x + 4, y + 4, WIDTH - 8, HEIGHT - 8, fill="box", edge="edge")
    draw.text(x + 14, y + 22, title, size=12.5, anchor="start", bold=True)
    most = max([1.0, *(value or 0.0 for values in series.values() for value in values)])
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    bottom = y + TOP + height
    for part in (0, 0.5, 1):
        level = bottom - part * height
        draw.line([(x + LEFT, level), (x + LEFT + width, level)], colour="edge", width=0.8)
        draw.text(
            x + LEFT - 5, level + 4, f"{most * part:.3g}{' s' if unit == 's' else ''}", size=10, anchor="end"
        )
    for second in range(0, SECONDS + 1, 15):
        draw.text(x + LEFT + width * second / SECONDS, bottom + 13, f"{second} s", size=10, colour="soft")
    at = x + LEFT
    for (name, values), colour in zip(series.items(), COLOURS, strict=False):
        points = [
            (x + LEFT + width * second / (SECONDS - 1), bottom - height * value / most)
            for second, value in enumerate(values)
            if value is not None
        ]
        draw.line(points, colour=colour)
        draw.text(at, y + HEIGHT - 12, name, size=11, anchor="start", colour=colour)
        at += 12 + 6.4 * len(name)


if __name__ == "__main__":
    if "--run" in sys.argv[1:]:
        samples = asyncio.run(run())
        # Of a kind that never came, or a metric that is not in the picture, nothing is kept.
        kept = {name for sample in samples for name, value in sample.items() if value or " " not in name}
        rows = [{name: sample[name] for name in sorted(kept & sample.keys())} for sample in samples]
        lines = ",\n".join(json.dumps(row) for row in rows)
        DATA.write_text(f"[\n{lines}\n]\n")
    (HERE / "dashboard.svg").write_text(picture())
