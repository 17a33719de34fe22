"""The demo beside busy processes: whether its verdict depends on how fast the machine is."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from scoreboard.board import Row, Run, at_least, exactly, published
from scoreboard.testkit import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

DEMOS: Final = 3
BUSY: Final = 4


def rows(run: Run) -> list[Row]:
    """Run several demos at once."""
    began = time.perf_counter()
    with _busy(), tempfile.TemporaryDirectory() as folder:
        demos = [_started(Path(folder) / str(number), run.of(100, 600)) for number in range(DEMOS)]
        found = [json.loads(demo.communicate()[0] or "{}") for demo in demos]
    ends = sum(
        each.get("Notifications", {}).get(name, 0) for each in found for name in ("Completions", "Terminates")
    )
    note = f"{DEMOS} demos of {run.of(100, 600)} members at once, beside {BUSY} busy processes"
    return [
        exactly(
            "demos whose client and service do not agree",
            0,
            sum(not _agrees(each) for each in found),
            note=note,
        ),
        at_least("ends of surveys that were compared", 100, ends),
        published("the same: in all", time.perf_counter() - began, unit="s"),
    ]


def _agrees(figures: dict[str, Any]) -> bool:
    return figures.get("Agrees") is True


def _started(folder: Path, members: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sampling_async", "demo", "--json", "--members", str(members)]
    return subprocess.Popen([*command, "--out", str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@contextmanager
def _busy() -> Iterator[None]:
    """Keep the machine busy while the block runs."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
