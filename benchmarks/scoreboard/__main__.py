"""Measure the promises of the client, and a naive client under the same conditions. Write a page about it.

    python benchmarks/scoreboard [--short | --long] [--only NAME ...] [--output DIR] [--seed N]

Writes `scoreboard.md` and `scoreboard.json`, or `scoreboard-short.*`. Each section runs in its own
process, so that no section disturbs or crashes another. The exit code is 1 if a goal was missed. Needs the
dependency group `scoreboard`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent.parent
sys.path[0] = str(HERE.parent)  # there, the modules of this folder are a package

from scoreboard.board import Run, beginning, ended, header, met, shown, table, written  # noqa: E402
from scoreboard.sections import SECTIONS, measured  # noqa: E402

ABOUT: Final = (
    "Written by `python benchmarks/scoreboard`; every figure was measured in this run. *naive* is the client "
    "of `benchmarks/peers/naive.py` (httpx, tenacity, pydantic, `asyncio.gather`), put through the same."
)


def main() -> int:
    """Run the sections and write the page; return the exit code."""
    options = _arguments()
    run = Run("long" if options.long else "short", options.seed)
    started = time.perf_counter()
    sections = [measured(name, run) for name in options.only or SECTIONS]
    head = header(run, time.perf_counter() - started, ROOT)
    rows = [row for section in sections for row in section.rows]
    page = beginning("Scoreboard", ABOUT, head, rows, f"{head['version']} version", f"seed {head['seed']}")
    for section in sections:
        page += [f"## {section.title}", "", f"`{section.command}` ({section.seconds:.0f} s)", ""]
        cells = [
            (
                *(row.name, row.goal, shown(row.ours, row.unit), met(row)),
                *("" if row.naive is None else shown(row.naive, row.unit), row.note),
            )
            for row in section.rows
        ]
        page += [*table(("figure", "goal", "ours", "met", "naive", "note"), cells), ""]
    document = json.dumps({"run": head, "sections": [asdict(each) for each in sections]}, indent=2)
    written(options.output, "scoreboard" if options.long else "scoreboard-short", page[:-1], document)
    return ended(head, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--short", action="store_true", help="some thirteen minutes; the default")
    size.add_argument("--long", action="store_true", help="an hour and more")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--output", type=Path, default=HERE.parent / "results", help="benchmarks/results")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
