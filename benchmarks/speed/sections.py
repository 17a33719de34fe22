"""The sections. Each runs in a fresh process, so that no section affects another."""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from scoreboard.board import missing, told

from speed.measuring import Measured
from speed.remote import RemoteError, fresh

if TYPE_CHECKING:
    from scoreboard.board import Run

SECTIONS: Final = {
    "bulk": "Bulk: the cost of a request, compared with other clients and engines",
    "layers": "Layers: where the CPU of a bulk request goes",
    "burst": "Burst: a new client, its connections, and a bulk",
    "single": "Single: one call of one quota ID after the other",
    "journal": "Journal: what it costs that each request is on disk before it is sent",
    "campaign": "Campaign: what its requests cost, by those of a plain fan-out",
    "watching": "Watching: what hooks and OpenTelemetry cost",
    "click": "Click: an invite that somebody waits for, beside a fan-out",
    "width": "Width: from one request at a time to hundreds",
    "queued": "Queued: from ten waiting chunks to a hundred thousand",
    "latency": "Latency: the duration of a request by its number of quota IDs",
    "inventory": "Inventory: bytes to models",
    "stalls": "Stalls: the event loop while an inventory is read",
    "refresh": "Refresh: the event loop while a live index takes a new inventory",
    "makespan": "Makespan: the time of the last response",
    "memory": "Memory: millions of quota IDs and of recontact codes",
    "recontact": "Recontact: reading ahead",
}
_HOMES: Final = {"burst": "calls", "single": "calls"}
"""The module of a section, where it does not have its name."""

LIMITS: Final = {"short": 240.0, "long": 900.0}
"""Seconds after which a section counts as hung."""


@dataclass
class Section:
    """The results of one section, and its duration."""

    name: str
    title: str
    command: str
    measured: Measured
    seconds: float


def run_section(name: str, run: Run) -> Section:
    """Measure one section, and print its progress."""
    command = f"python benchmarks/speed{' --quick' if run.version == 'short' else ''} --only {name}"
    print(f"{SECTIONS[name]} ...", flush=True)
    started = time.perf_counter()
    try:
        measured = fresh(_measure, name, run, limit=LIMITS[run.version])
    except RemoteError as exc:
        print(f"  {exc}")
        measured = Measured([missing(name, "to be measured", "failed: what it printed says why")], [], {})
    section = Section(name, SECTIONS[name], command, measured, time.perf_counter() - started)
    for row in measured.goals:
        print(f"  {told(row)}")
    print(f"  {section.seconds:.0f} s", flush=True)
    return section


def _measure(name: str, run: Run) -> Measured:
    module = importlib.import_module(f"speed.{_HOMES.get(name, name)}")
    measured: Measured = getattr(module, name if name in _HOMES else "measure")(run)
    return measured
