"""The results of a section of the scoreboard, and the page that is made of all results."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")
Value: TypeAlias = int | float | str | None

AGENTS = ("ddtrace", "newrelic", "opentelemetry-instrumentation-httpx", "sentry-sdk")
LIBRARIES = ("httpx", "httpcore", "h11", "anyio", "attrs", "cattrs", "tenacity", "pydantic", *AGENTS)


INTRODUCTION = (
    "Written by `python benchmarks/scoreboard`; every figure was measured in this run. *naive* is the client "
    "of `benchmarks/peers/naive.py` (httpx, tenacity, pydantic, `asyncio.gather`), put through the same."
)


@dataclass(frozen=True)
class Run:
    """The settings of a run: how much is measured, and the seed."""

    version: Literal["short", "long"]
    seed: int

    def of(self, short: T, long: T) -> T:
        """Return the value for this version of the run."""
        return short if self.version == "short" else long


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        name: What was measured.
        goal: The goal in words; empty for a figure without a goal.
        ours: The value of our client; None if it could not be measured.
        met: Whether the goal is met; None without a goal.
        naive: The value of the naive client; None if it does not apply.
        unit: The unit of the numbers.
        note: An explanation that is needed to understand the figure.
    """

    name: str
    goal: str
    ours: Value
    met: bool | None
    naive: Value = None
    unit: str = ""
    note: str = ""


def exactly(name: str, wanted: int, ours: int, naive: Value = None, *, note: str = "") -> Row:
    """Return a row whose goal is one number."""
    return Row(name, f"{wanted:,}", ours, ours == wanted, naive, note=note)


def at_least(
    name: str, wanted: float, ours: float, naive: Value = None, *, unit: str = "", note: str = ""
) -> Row:
    """Return a row whose goal is at least a number: how much was tried, or how much better something is."""
    return Row(name, f"at least {shown(wanted, unit)}", ours, ours >= wanted, naive, unit, note)


def at_most(
    name: str, wanted: float, ours: float, naive: Value = None, *, unit: str = "", note: str = ""
) -> Row:
    """Return a row whose goal is at most a number."""
    return Row(name, f"at most {shown(wanted, unit)}", ours, ours <= wanted, naive, unit, note)


def published(name: str, ours: Value, naive: Value = None, *, unit: str = "", note: str = "") -> Row:
    """Return a row without a goal."""
    return Row(name, "", ours, None, naive, unit, note)


def missing(name: str, goal: str, why: str) -> Row:
    """Return a row for a figure that could not be measured. It counts as a missed goal."""
    return Row(name, goal, None, met=False, note=why)


@dataclass
class Section:
    """The rows of one section, and its duration."""

    name: str
    title: str
    command: str
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0


def shown(value: Value, unit: str = "") -> str:
    """Return a value as text for readers."""
    if value is None:
        return "not available"
    if isinstance(value, float):
        text = f"{round(value, 2) + 0.0:,.2f}" if abs(value) < 100 else f"{value:,.0f}"  # avoids "-0"
    else:
        text = f"{value:,}" if isinstance(value, int) else value
    return f"{text} {unit}".strip()


def header(run: Run, seconds: float, root: Path, libraries: tuple[str, ...] = LIBRARIES) -> dict[str, Any]:
    """Return the date, the platform and the versions of the run, without the name of the machine."""
    return {
        "commit": _commit(root),
        "version": run.version,
        "seed": run.seed,
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in ("sampling-async", *libraries)},
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(seconds),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit(root: Path) -> str:
    """Return the commit that was measured. The result files do not count as changes."""
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    changes = _git(root, "status", "--porcelain", "--", ".", ":!benchmarks/results")
    return f"{commit} with uncommitted changes" if changes else commit


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def markdown(head: dict[str, Any], sections: list[Section]) -> str:
    """Return the page."""
    rows = [row for section in sections for row in section.rows if row.met is not None]
    met = sum(bool(row.met) for row in rows)
    libraries = ", ".join(f"{name} {number}" for name, number in head["libraries"].items())
    lines = [
        "# Scoreboard",
        "",
        INTRODUCTION,
        "",
        f"**{met} of {len(rows)} goals met.**",
        "",
        f"- commit {head['commit']}, {head['version']} version, seed {head['seed']}",
        f"- {head['date']}, {head['seconds']} s in all",
        f"- Python {head['python']}; {libraries}",
        f"- {head['machine']}",
    ]
    for section in sections:
        lines += ["", f"## {section.title}", "", f"`{section.command}` ({section.seconds:.0f} s)", ""]
        lines += ["| figure | goal | ours | met | naive | note |", "|---|---|---:|---|---:|---|"]
        lines += [_line(row) for row in section.rows]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    met = {None: "", True: "yes", False: "**no**"}[row.met]
    naive = "" if row.naive is None else shown(row.naive, row.unit)
    cells = (row.name, row.goal, shown(row.ours, row.unit), met, naive, row.note)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def document(head: dict[str, Any], sections: list[Section]) -> str:
    """Return the results as JSON."""
    return json.dumps({"run": head, "sections": [asdict(section) for section in sections]}, indent=2) + "\n"
