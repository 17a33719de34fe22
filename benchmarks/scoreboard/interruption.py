"""Interruptions at every moment: all tasks are cancelled at every tick, or a handler raises at every line."""

from __future__ import annotations

import asyncio
import logging
import sys
import warnings
from contextlib import redirect_stderr
from io import StringIO
from typing import TYPE_CHECKING, Final

from scoreboard.board import Row, Run, exactly, published
from scoreboard.testkit import tool

if TYPE_CHECKING:
    from types import ModuleType

EVERY: Final = 20
"""The short version tries one moment in this many."""


def rows(run: Run) -> list[Row]:
    """Run the sweeps of the tests, including the moments that the tests leave out."""
    modes = tool("test_modes_shutdown")
    ticks, found = _cancelled(modes)
    struck, untrue = _struck(modes, run.of(EVERY, 1))
    what = "a fan-out of 60 IDs over sockets: IDs in no account, lies, permits kept, later calls that hang"
    lines = (
        "SystemExit, KeyboardInterrupt and an exception of the application, at the first and the last time "
        "that each line of the package is passed: IDs in no account, lies, requests sent twice, hangs"
    )
    return [
        published("ticks tried, each with all tasks cancelled", ticks),
        exactly("of these, with something wrong", 0, len(found), note="; ".join(found)[:300] or what),
        published("moments tried, each with a handler that raised", struck),
        exactly("of these, with something wrong", 0, len(untrue), note="; ".join(untrue)[:300] or lines),
    ]


def _cancelled(modes: ModuleType) -> tuple[int, list[str]]:
    try:
        return asyncio.run(modes.cancel_all_sweep()), []
    except (AssertionError, TimeoutError) as exc:
        return 0, [str(exc) or type(exc).__name__]


def _struck(modes: ModuleType, every: int) -> tuple[int, list[str]]:
    """Return the number of moments tried, and the problems found."""
    warnings.simplefilter("ignore")  # the garbage of interrupted calls
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None
    tried, found = 0, list[str]()
    for first, exception in enumerate((SystemExit, KeyboardInterrupt, modes.Alarm)):
        with redirect_stderr(StringIO()):
            moments, wrong = modes.strike_sweep(exception, first, every)
        tried += moments
        found += wrong
    return tried, found
