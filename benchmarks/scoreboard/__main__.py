"""Measure the promises of the client, and a naive client under the same conditions. Write a page about it.

    python benchmarks/scoreboard [--short | --long] [--only NAME ...] [--output DIR] [--seed N]

Writes `scoreboard.md` and `scoreboard.json`, or `scoreboard-short.*`. Each section runs in its own
process, so that no section disturbs or crashes another. The exit code is 1 if a goal was missed. Needs the
dependency group `scoreboard`.
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

from scoreboard.board import Run, document, header, markdown  # noqa: E402
from scoreboard.sections import SECTIONS, measured  # noqa: E402


def main() -> int:
    """Run the sections and write the page; return the exit code."""
    options = _arguments()
    run = Run("long" if options.long else "short", options.seed)
    started = time.perf_counter()
    sections = [measured(name, run) for name in options.only or SECTIONS]
    head = header(run, time.perf_counter() - started, ROOT)
    options.output.mkdir(parents=True, exist_ok=True)
    page = options.output / ("scoreboard" if options.long else "scoreboard-short")
    page.with_suffix(".md").write_text(markdown(head, sections), encoding="utf-8")
    page.with_suffix(".json").write_text(document(head, sections), encoding="utf-8")
    missed = [row.name for section in sections for row in section.rows if row.met is False]
    print(f"{head['seconds']} s in all;", f"missed: {'; '.join(missed)}" if missed else "all goals met")
    return 1 if missed else 0


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
