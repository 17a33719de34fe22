"""What is wanted of all cells together, and whether it was met."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

from scoreboard.board import Row, at_least, at_most, published

from pressure.cells import CHANCE, CHANCE_HELD, FREE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pressure.trial import Seen

GOODPUT: Final = 0.90
WORST_GOODPUT: Final = 0.80
RECOVERED: Final = 3.0
WASTED: Final = 3.0
SILENT: Final = 1.0
_P50: Final = 1.15
_P99: Final = 2.0
_LIMITED: Final = 0.90
_BY_CHANCE: Final = 0.80


def rows(seen: Sequence[Seen]) -> list[Row]:
    """Return the rows of all goals that cells were measured for."""
    found: list[Row] = []
    for load in (2.0, 10.0):
        found += _goodput(load, [each for each in seen if each.cell.load == load])
    troubled = [each for each in seen if each.recovered is not None]
    wide = f"{len(seen)} cells"
    found += [
        _worst("recovered after a storm, an outage or a brown-out", RECOVERED, "s", troubled, recovered),
        _worst("requests whose answer nobody waited for any more", WASTED, "%", seen, wasted),
        _worst("nothing is sent though callers wait and nothing forbids it", SILENT, "s", seen, silent),
        published(
            "the same, of the time in which the service could do more: worst",
            max(each.idle for each in seen),
            unit="s",
            note=max(seen, key=lambda each: each.idle).cell.name,
        ),
        *_beside(seen),
        *_of_today(seen),
    ]
    both = [each.progress for each in seen if each.progress is not None]
    if both:
        name = "spans of two seconds in which a click and a part of the fan-out were answered: least share"
        found.append(published(name, min(both), note=f"{len(both)} cells that have both; without troubles"))
    late = max(each.late for each in seen)
    found.append(published("a click ends after its time, at most", max(0.0, 1e3 * late), unit="ms", note=wide))
    return found


def recovered(seen: Seen) -> float:
    """Return the seconds until the old rate was back."""
    return 0.0 if seen.recovered is None else seen.recovered


def wasted(seen: Seen) -> float:
    """Return the percentage of requests whose answer nobody waited for any more."""
    return 100 * seen.wasted_share


def silent(seen: Seen) -> float:
    """Return the longest silence in seconds."""
    return seen.silent


def _goodput(load: float, seen: Sequence[Seen]) -> list[Row]:
    if not seen:
        return []
    steady = [each.goodput for each in seen if each.cell.service.trouble is None]
    worst = min(seen, key=lambda each: each.goodput)
    short = sum(each.goodput < WORST_GOODPUT for each in seen)
    name = f"goodput by what was possible, load {load:g}"
    note = f"{len(seen)} cells; without a trouble: median {median(steady):.2f}, worst {min(steady):.2f}"
    return [
        at_least(f"{name}: median", GOODPUT, median(each.goodput for each in seen), note=note),
        at_least(
            f"{name}: worst",
            WORST_GOODPUT,
            worst.goodput,
            note=f"{short} of {len(seen)} cells miss it; {worst.cell.name}",
        ),
    ]


def _worst(name: str, goal: float, unit: str, seen: Sequence[Seen], measure: Callable[[Seen], float]) -> Row:
    if not seen:
        return published(name, "no cell for it in this run")
    worst = max(seen, key=measure)
    missed = sum(measure(each) > goal for each in seen)
    middle = median(measure(each) for each in seen)
    note = f"{missed} of {len(seen)} cells miss it; median {middle:.2f} {unit}; {worst.cell.name}"
    return at_most(f"{name}: worst", goal, measure(worst), unit=unit, note=note)


def _beside(seen: Sequence[Seen]) -> list[Row]:
    found: list[Row] = []
    idle = [each for each in seen if each.cell.service.name == FREE.name]
    for alone in idle:
        for both in idle:
            if alone.cell.has_bulk or not both.cell.has_bulk or alone.cell.width != both.cell.width:
                continue
            name = f"a click of an idle service beside a fan-out {alone.cell.width} wide, by one alone"
            found += [
                at_most(f"{name}: {percent}th percentile", goal, both.took(percent) / alone.took(percent))
                for percent, goal in ((50, _P50), (99, _P99))
            ]
    return found


def _of_today(seen: Sequence[Seen]) -> list[Row]:
    found: list[Row] = []
    for each in seen:
        cell = each.cell
        if cell.load or cell.seconds < 60 or cell.service.trouble:
            continue
        goal = _BY_CHANCE if cell.service in {CHANCE, CHANCE_HELD} else _LIMITED
        note = f"{len(each.answered)} of {each.possible.count} in {cell.seconds:g} s"
        found.append(at_least(f"{cell.name}: by what was possible", goal, each.goodput, note=note))
    return found
