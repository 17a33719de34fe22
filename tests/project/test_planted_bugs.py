"""The bugs that the scoreboard plants: who changes the code that has one must change the bug too."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import sampling_async

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_each_bug_has_its_place_in_the_package(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    planted_bugs = import_module("scoreboard.planted_bugs")
    package = Path(sampling_async.__file__).parent
    bugs = planted_bugs.listed_bugs()
    assert len(bugs) > 150
    assert [bug.name for bug in bugs if planted_bugs.with_bug_of(bug, package)[2] is None] == []
