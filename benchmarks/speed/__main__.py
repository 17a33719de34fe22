"""Measure the speed of the client and of others in the same run, and write a page with plots.

    python benchmarks/speed [--quick] [--only NAME ...] [--output DIR]

Writes `speed.md`, `speed.json` and plots. The files are `speed-quick.*` with `--quick`, and `speed-part.*` if
`--only` leaves sections out, so that a part never replaces the whole. The exit code is 1 if a goal was missed.
Needs the dependency group `bench`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent.parent
sys.path[0] = str(HERE.parent)  # there, the modules of this folder are a package

from scoreboard.board import Run, ended, header, written  # noqa: E402

from speed.page import LIBRARIES, document, markdown  # noqa: E402
from speed.sections import SECTIONS, run_section  # noqa: E402


def main() -> int:
    """Run the sections and write the page; return the exit code."""
    options = _arguments()
    run = Run("short" if options.quick else "long", seed=1)
    started = time.perf_counter()
    sections = [run_section(name, run) for name in options.only or SECTIONS]
    head = header(run, time.perf_counter() - started, ROOT, LIBRARIES)
    head |= {"version": "quick" if options.quick else "full"}
    del head["seed"]
    stem = "speed-quick" if options.quick else "speed-part" if options.only else "speed"

    from speed.plots import draw  # noqa: PLC0415  not while something is measured

    options.output.mkdir(parents=True, exist_ok=True)
    plots = draw(sections, options.output, stem)
    written(options.output, stem, markdown(head, sections, plots), document(head, sections))
    return ended(head, [row for section in sections for row in section.measured.goals])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="everything, smaller: some minutes, not twelve")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--output", type=Path, default=HERE.parent / "results", help="benchmarks/results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
