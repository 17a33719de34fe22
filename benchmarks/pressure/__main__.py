"""Put the client under pressure in virtual time, beside other clients, and write a page about it.

    python benchmarks/pressure [--short] [--seed N] [--only cells|peers|router] [--output DIR]

The whole run writes `pressure.md`, `pressure.png` and `pressure.json`. With `--short` or `--only` it prints the
rows and writes nothing. The exit code is 1 if a goal was missed. Needs the dependency groups `bench` and
`tests`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent.parent
sys.path[0] = str(HERE.parent)  # there, the modules of this folder are a package

from scoreboard.board import Run, header, told  # noqa: E402

from pressure import goals, page  # noqa: E402
from pressure.runs import PARTS, measured  # noqa: E402

LIBRARIES: Final = ("httpx", "anyio", "botocore")


def main() -> int:
    """Measure, print the rows and write the page. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="some cells of each kind; writes nothing")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=PARTS, help="a part of it; writes nothing")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8), help="processes")
    parser.add_argument("--output", type=Path, default=HERE.parent / "results", help="benchmarks/results")
    options = parser.parse_args()
    run, started = Run("short" if options.short else "long", options.seed), time.perf_counter()
    results = measured(run, PARTS if options.only is None else (options.only,), options.jobs)
    rows = [*(goals.rows(results.cells) if results.cells else []), *results.router]
    for row in rows:
        print(told(row))
    if results.peers:
        print(*page.of_peers(results.peers), sep="\n")
    seconds = time.perf_counter() - started
    print(f"{seconds:.0f} s in all, {results.cpu:.0f} s of CPU")
    if not options.short and options.only is None:
        head = header(run, seconds, ROOT, LIBRARIES) | {"cpu": round(results.cpu)}
        page.write(options.output, head, rows, results)
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
