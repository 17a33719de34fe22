"""Bugs planted into a copy of the package, one at a time, and the tests that should turn red.

They are data, in `planted/bugs.toml`: a file of the package, a text that occurs in it once, what takes its
place, and the arguments of pytest that name a few tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Literal

import sampling_async
from scoreboard.board import Row, Run, at_least, exactly
from scoreboard.testkit import ROOT

BUGS: Final = Path(__file__).parent / "planted" / "bugs.toml"
WANTED: Final = 20
AT_ONCE: Final = 2
SECONDS: Final = 90.0
"""A run of some tests that takes longer hangs, which is a way of being red."""

FAILED: Final = 1
"""pytest's exit code for tests that failed; others say that they could not be run."""

Verdict = Literal["caught", "hung", "survived", "text not found", "tests did not run"]


@dataclass(frozen=True)
class Bug:
    """A bug to plant.

    Attributes:
        name: What is wrong with the package then.
        file: The module, below the package's folder.
        old: What stands there, once.
        new: What stands there instead.
        tests: Arguments of pytest.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def rows(run: Run) -> list[Row]:
    """Plant all of them; the short version each third one, which of them the seed says."""
    listed = tomllib.loads(BUGS.read_text(encoding="utf-8"))["bug"]
    listed = run.of(listed[run.seed % 3 :: 3], listed)
    bugs = [Bug(**{**each, "tests": tuple(each["tests"])}) for each in listed]
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(AT_ONCE):
            copies.put(_copy(Path(folder) / str(number)))
        unplanted = _green(bugs, copies)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            verdicts = dict(zip(bugs, pool.map(lambda bug: _planted(bug, copies), bugs), strict=True))
    caught = [bug for bug, verdict in verdicts.items() if verdict in {"caught", "hung"}]
    others = [f"{bug.name}: {verdict}" for bug, verdict in verdicts.items() if bug not in caught]
    note = "; ".join(others) or "each turned a test red that is green without it"
    return [
        at_least("bugs planted, one at a time", WANTED, len(bugs)),
        exactly("bugs that the tests notice", len(bugs), len(caught), note=note),
        Row("the same tests without a bug", "green", unplanted, unplanted == "green"),
    ]


def _copy(place: Path) -> Path:
    """Copy the package, and make sure that the copy is what the tests will import."""
    shutil.copytree(
        Path(sampling_async.__file__).parent,
        place / "sampling_async",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    done = _python(place, "-c", "import sampling_async; print(sampling_async.__file__)")
    if Path(done.stdout.strip()).parent != place / "sampling_async":
        raise RuntimeError("the tests would import another package than the copy")
    return place


def _python(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # A safe path keeps the project's folder, which has the package too, from coming first.
    environment = {
        **os.environ,
        "PYTHONPATH": str(place),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONSAFEPATH": "1",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def _pytest(place: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    return _python(place, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests)


def _green(bugs: list[Bug], copies: SimpleQueue[Path]) -> str:
    """Run every named test on the untouched copy; return `green` or what failed."""
    sets = {bug.tests for bug in bugs}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = pool.map(lambda tests: _without_bug(tests, copies), sorted(sets))
    return "; ".join(result for result in results if result) or "green"


def _without_bug(tests: tuple[str, ...], copies: SimpleQueue[Path]) -> str:
    place = copies.get()
    try:
        done = _pytest(place, *tests)
    except subprocess.TimeoutExpired:
        return f"{' '.join(tests)} hung"
    finally:
        copies.put(place)
    return "" if done.returncode == 0 else f"{' '.join(tests)} ended with exit code {done.returncode}"


def _planted(bug: Bug, copies: SimpleQueue[Path]) -> Verdict:
    place = copies.get()
    module = place / "sampling_async" / bug.file
    text = module.read_text(encoding="utf-8") if module.exists() else ""
    try:
        if text.count(bug.old) != 1:
            return "text not found"
        module.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
        code = _pytest(place, *bug.tests).returncode
    except subprocess.TimeoutExpired:
        return "hung"
    finally:
        if text:
            module.write_text(text, encoding="utf-8")
        copies.put(place)
    if code == 0:
        return "survived"
    return "caught" if code == FAILED else "tests did not run"
