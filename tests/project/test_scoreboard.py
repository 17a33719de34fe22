"""Sections of the scoreboard that take seconds meet their goals; bugs are planted that they find."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sampling_async

SCOREBOARD = Path(__file__).parents[2] / "benchmarks" / "scoreboard"


@pytest.mark.parametrize(
    "section", ["accounts", pytest.param("databases", marks=pytest.mark.postgres), "odd_files"]
)
def test_a_section_meets_its_goals(tmp_path, section):
    # The package as it was imported here, which may be a copy with a bug.
    environment = {**os.environ, "PYTHONPATH": str(Path(sampling_async.__file__).parents[1])}
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(
        [sys.executable, SCOREBOARD, "--only", section, "--output", tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "MISSED" not in done.stdout
