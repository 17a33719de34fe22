"""The rows of figures, with their goals, and what all pages of figures are made of."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

T = TypeVar("T")
Value: TypeAlias = int | float | str | None

AGENTS = ("ddtrace", "newrelic", "opentelemetry-instrumentation-httpx", "sentry-sdk")
LIBRARIES = ("httpx", "httpcore", "h11", "anyio", "attrs", "cattrs", "tenacity", "pydantic", *AGENTS)


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


def told(row: Row) -> str:
    """Return a row as it is printed when it has been measured."""
    verdict = {None: "", True: "met", False: "MISSED"}[row.met]
    goal = f"  [{row.goal}]" if row.goal else ""
    naive = "" if row.naive is None else f"  [naive {shown(row.naive, row.unit)}]"
    note = f"  ({row.note})" if row.note else ""
    return f"{verdict:7}{row.name}: {shown(row.ours, row.unit)}{goal}{naive}{note}"


def met(row: Row) -> str:
    """Return whether the goal of a row is met, as pages say it."""
    return {None: "", True: "yes", False: "**no**"}[row.met]


def beginning(title: str, about: str, head: dict[str, Any], rows: Iterable[Row], *more: str) -> list[str]:
    """Return the first lines of a page: what it is, how many goals are met, and which run it is of."""
    goals = [row for row in rows if row.met is not None]
    libraries = ", ".join(f"{name} {number}" for name, number in head["libraries"].items())
    return [
        *(f"# {title}", "", about, "", f"**{sum(bool(row.met) for row in goals)} of {len(goals)} goals met.**"),
        *("", f"- commit {', '.join((head['commit'], *more))}"),
        f"- {head['date']}, {head['seconds']} s in all",
        *(f"- Python {head['python']}; {libraries}", f"- {head['machine']}", ""),
    ]


def table(columns: Sequence[str], rows: Iterable[Iterable[Value]]) -> list[str]:
    """Return a table. Columns are of numbers, but for the first one and those that explain."""
    sides = ["---", *("---" if name in {"note", "command", "who"} else "---:" for name in columns[1:])]
    lines = [" | ".join(columns), "|".join(sides)]
    lines += [" | ".join(shown(cell).replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows]
    return [f"| {line} |" for line in lines]


def written(folder: Path, stem: str, page: Iterable[str], document: str) -> None:
    """Write a page, and its figures as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    (folder / f"{stem}.json").write_text(f"{document}\n", encoding="utf-8")


def ended(head: dict[str, Any], rows: Iterable[Row]) -> int:
    """Print what was missed. Return the exit code."""
    missed = [row.name for row in rows if row.met is False]
    print(f"{head['seconds']} s in all;", f"missed: {'; '.join(missed)}" if missed else "all goals met")
    return 1 if missed else 0
