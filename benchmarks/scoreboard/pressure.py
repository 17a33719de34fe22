"""Clicks and a fan-out in and after a storm of refusals, and under overload, in virtual time.

These are a few cells of the laboratory (`python benchmarks/pressure`), and its goals.
"""

from __future__ import annotations

from statistics import mean
from typing import Final

from pressure import goals, routed
from pressure.askers import ours
from pressure.cells import SHORT_STORM, WORKERS, Cell
from pressure.trial import tried, within

from scoreboard.board import Row, Run, at_least, at_most

WIDTH: Final = 8
DEADLINE: Final = 2.0
SECONDS: Final = 20.0
FAN_OUT: Final = Cell(SHORT_STORM, 0.5, DEADLINE, has_bulk=True, width=WIDTH, seconds=SECONDS)
CLICKS: Final = Cell(SHORT_STORM, 0.5, DEADLINE, width=WIDTH, seconds=SECONDS)
WARM: Final = 2.0


def rows(run: Run) -> list[Row]:
    """Measure the storm and the overload, each with some seeds."""
    seeds = [10 * run.seed + number for number in range(run.of(2, 6))]
    trouble = SHORT_STORM.trouble
    assert trouble is not None
    settled = trouble.end + goals.RECOVERED
    clicks = [tried(CLICKS, ours, seed) for seed in seeds]
    beside = [tried(FAN_OUT, ours, seed) for seed in seeds]
    fan_outs = [
        within(seen.bulks, settled, SECONDS)
        / (SECONDS - settled)
        / (within(seen.bulks, WARM, trouble.begin) / (trouble.begin - WARM))
        for seen in beside
    ]
    note = f"{len(seeds)} seeds; clicks of {DEADLINE:g} s at half of what the service takes"
    found = [
        at_most(
            "clicks after a storm of 429 of 4 s: recovered after, at most",
            goals.RECOVERED,
            max(goals.recovered(seen) for seen in clicks),
            unit="s",
            note=note,
        ),
        at_most(
            "the same beside a fan-out",
            goals.RECOVERED,
            max(goals.recovered(seen) for seen in beside),
            unit="s",
        ),
        at_least(
            "the fan-out beside them, from 3 s after the storm on, by before", goals.GOODPUT, mean(fan_outs)
        ),
        *(row for seed in seeds[:1] for row in routed.rows("storm of 429", seed)),
    ]
    for load in (2.0, 10.0):
        cell = Cell(WORKERS, load, DEADLINE, width=WIDTH, seconds=8.0)
        seen = [tried(cell, ours, seed) for seed in seeds]
        found += [
            at_least(
                f"clicks at {load:g} times what the service takes: answered by what was possible, worst",
                goals.GOODPUT,
                min(each.goodput for each in seen),
            ),
            at_most(
                "the same: requests whose answer nobody waited for any more",
                goals.WASTED,
                max(goals.wasted(each) for each in seen),
                unit="%",
            ),
        ]
    return found
