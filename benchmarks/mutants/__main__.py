"""Mutation tests of the core: change the code in small ways, one at a time, and see whether a test fails.

    python benchmarks/mutants _json _pacing --sample 150 --seed 1
    python benchmarks/mutants _calls --file retry --file learned

mutmut makes the mutants, and runs for each the tests that call its function, the quickest first, until one
fails. It forks a process that has collected the tests. So a mutant of what runs once, at an import or before a
cache, does not run in most of these tests, or in none. What survives, crashes or takes too long therefore runs
again, in a fresh process and with all tests of its package (`rooms.toml`), and is printed if it survives that
too. Kinds of changes that nobody could see do not run again (`_is_equal`), and count as equal. A line that ends
with `# pragma: no mutate: ` and a reason is not changed at all.

The table on the page is updated for the packages that were run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
PAGE: Final = ROOT / "benchmarks" / "results" / "mutants.md"
SECONDS: Final = 120
"""If the tests of a package take longer than this for a mutant, they hang, which counts as killed."""

DOUBTFUL: Final = {0, 5, 33, -11, -24, 24, 36, 152, 255}
"""mutmut's codes of mutants for which all tests passed, for which it knows no test, or whose process crashed or
took too long, or failed before it could say (255).

A crash proves nothing: on Python 3.11, threads of a forked process may crash with any mutant. Neither does a
timeout: it is short, and on a busy machine any mutant may exceed it.
"""

OPTIONS: Final = (
    "-p",
    "no:cacheprovider",
    "-o",
    "faulthandler_timeout=20",
    "-o",
    "faulthandler_exit_on_timeout=true",
)
"""A single test takes less than ten seconds, even on a busy machine. One that hangs ends the process."""

_CAST: Final = re.compile(r"(?<=\bcast\()[^,]+(?=, )")
_STRICT: Final = re.compile(r",? *(?:strict=\w+)?(?=\))")
_FALSE: Final = re.compile(r"(?<![\w.])(?:None|False|0(?:\.0)?|b?\"\"|\(\)|\[\])(?![\w.\"])")
_CASELESS: Final = re.compile(r"\.(?:execute|encode|decode|get)\(|\b(?:SELECT|INSERT|PRAGMA)\b")
_WINDOWS: Final = re.compile(r"win32|O_BINARY|msvcrt")

SETTINGS: Final = """
[tool.mutmut]
source_paths = ["sampling_async"]
only_mutate = [{files}]
also_copy = ["tests", "benchmarks", "docs", "README.md", "CHANGELOG.md", "LICENSE", "noxfile.py"]
pytest_add_cli_args = [{options}]
pytest_add_cli_args_test_selection = [{tests}]
process_isolation = "forkserver"  # threads and event loops of the tests must not live where mutants are forked
use_git_change_detection = false
timeout_constant = 4  # times 15 is a minute, so that a test that hangs ends by the limit of a single test
"""


@dataclass(frozen=True)
class Mutant:
    """A mutant that survived: its name, and the lines that it takes away and adds."""

    name: str
    old: str
    new: str

    @property
    def where(self) -> str:
        """The module and function, as in `_json.fast._read_surveys`."""
        module, _, function = self.name.partition("__mutmut_")[0].rpartition(".")
        parts = function.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
        return f"{module.removeprefix('sampling_async.')}.{parts}"


@dataclass(frozen=True)
class Verdict:
    """What became of the mutants of a package."""

    package: str
    made: int
    tried: int
    equal: int
    survivors: tuple[Mutant, ...]

    @property
    def row(self) -> str:
        """The row of the table."""
        survived = len(self.survivors)
        killed = self.tried - self.equal - survived
        share = f"{killed / (killed + survived):.1%}" if killed + survived else ""
        numbers = (self.made, self.tried, killed, self.equal, survived)
        cells = (f"`{self.package}`", *(f"{each:,}" for each in numbers), share, _commit())
        return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run the packages that are named, or all."""
    packages: dict[str, Any] = tomllib.loads((HERE / "rooms.toml").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"{', '.join(packages)}; default: all")
    parser.add_argument("--file", action="append", help="only these modules of the package; the table stays")
    parser.add_argument("--sample", type=int, help="how many mutants of each package are tried; default: all")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    parser.add_argument("--at-once", type=int, default=1, help="how many mutants are tried at once")
    parser.add_argument("--afresh", action="store_true", help="no fork: where that crashes, as in _wire")
    parser.add_argument("--work", type=Path, help="a folder for the copies; default: a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for package in given.packages or packages:
            place = _copy((given.work or Path(temporary)) / package)
            verdict = _verdict_on(place, package, packages[package], given)
            for where, survivors in groupby(verdict.survivors, key=lambda mutant: mutant.where):
                several = list(survivors)
                print(f"\n{where}: {len(several)} survived")
                for mutant in several:
                    print(f"  {mutant.name}\n  -{mutant.old}\n  +{mutant.new}")
            print(verdict.row, flush=True)
            if not given.file:
                _note(verdict)


def _copy(place: Path) -> Path:
    """Copy what git knows, as it is now."""
    shutil.rmtree(place, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def _verdict_on(place: Path, package: str, tests: dict[str, list[str]], given: argparse.Namespace) -> Verdict:
    source = place / "sampling_async" / package
    names = [f"{each}.py" for each in given.file or ()] or ["*"]
    of_package = [f"{package}/{name}" for name in names] if source.is_dir() else [f"{package}.py"]
    files = [f"sampling_async/{name}" for name in of_package]
    paths = [path for test in tests["tests"] for path in _files_of(place, test)]
    options = [*OPTIONS, *(f"--deselect=tests/{test}" for test in tests.get("without", []))]
    settings = SETTINGS.format(files=_quoted(files), tests=_quoted(paths), options=_quoted(options))
    with (place / "pyproject.toml").open("a", encoding="utf-8") as project:
        project.write(settings)
    _mutmut(place, "run", "--max-children", "1", "none", check=False)  # makes them, and finds what tests call
    made = _codes(place)
    if not made:  # the file has no functions
        return Verdict(package, 0, 0, 0, ())
    tried = sorted(made)
    if given.sample is not None and given.sample < len(tried):
        tried = sorted(random.Random(given.seed).sample(tried, given.sample))
    if not given.afresh:
        _mutmut(place, "run", "--max-children", str(given.at_once), *tried)
    codes = _codes(place)
    doubtful = [_shown(place, name) for name in tried if given.afresh or codes[name] in DOUBTFUL]
    unequal = [mutant for mutant in doubtful if not _is_equal(mutant)]
    if unequal and _fails_afresh(place / "mutants", "none", [*options, *paths]):
        raise RuntimeError(
            f"the tests of {package} fail without a mutant too: each mutant would count as killed"
        )
    with ThreadPoolExecutor(given.at_once) as threads:
        fails = threads.map(
            lambda mutant: _fails_afresh(place / "mutants", mutant.name, [*options, *paths]), unequal
        )
        survivors = tuple(mutant for mutant, is_killed in zip(unequal, fails, strict=True) if not is_killed)
    return Verdict(package, len(made), len(tried), len(doubtful) - len(unequal), survivors)


def _files_of(place: Path, pattern: str) -> list[str]:
    found = sorted(str(path.relative_to(place)) for path in place.glob(f"tests/{pattern}.py"))
    if not found:
        raise LookupError(f"there is no tests/{pattern}.py")
    return found


def _quoted(texts: Iterable[str]) -> str:
    return ", ".join(f'"{text}"' for text in texts)


def _mutmut(place: Path, *arguments: str, check: bool = True) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "mutmut", *arguments]
    done = subprocess.run(
        command,
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if check and done.returncode:
        raise RuntimeError(f"mutmut ended with exit code {done.returncode}: {done.stdout[-3000:]}")
    return done.stdout


def _codes(place: Path) -> dict[str, int | None]:
    """Return mutmut's exit code for each mutant; None for those it has not tried."""
    files = list((place / "mutants").rglob("*.meta"))
    if not files:
        raise RuntimeError("mutmut made no mutants")
    codes: dict[str, int | None] = {}
    for path in files:
        codes |= json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"]
    return codes


def _fails_afresh(mutants: Path, name: str, arguments: list[str]) -> bool:
    """Run all tests of the package in a new process, in which the mutant is there from the first import."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", *arguments]
    environment = {**os.environ, "MUTANT_UNDER_TEST": name}
    try:
        done = subprocess.run(
            command, cwd=mutants, env=environment, capture_output=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def _shown(place: Path, name: str) -> Mutant:
    """Return a mutant with the lines it changes."""
    lines = _mutmut(place, "show", name).splitlines()
    changed = {
        sign: " ".join(line[1:].strip() for line in lines if re.match(rf"\{sign}(?!\{sign}\{sign} )", line))
        for sign in "-+"
    }
    return Mutant(name, changed["-"], changed["+"])


def _is_equal(mutant: Mutant) -> bool:
    """Return whether nobody could see a change, by its kind.

    - Another type for `cast`, which does nothing at run time.
    - Another `strict` for `zip`: both have the same length, or the types or a test would say so.
    - A false value for another, such as None for False. The type checkers keep them apart.
    - SQL, or the name of an encoding or a header, in other letters: these have no case.
    - A line for Windows, where these tests do not run.
    """
    old, new = mutant.old, mutant.new
    if any(kind.sub("None", old) == kind.sub("None", new) for kind in (_CAST, _STRICT, _FALSE)):
        return True
    if _WINDOWS.search(old):
        return True
    return old.casefold() == new.casefold() and _CASELESS.search(old) is not None


def _commit() -> str:
    shown = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return shown.stdout.strip()


def _note(verdict: Verdict) -> None:
    """Put the row into the table of the page, in the place of an older one."""
    rows = PAGE.read_text(encoding="utf-8").splitlines()
    mine = [at for at, row in enumerate(rows) if row.startswith(f"| `{verdict.package}` |")]
    if len(mine) != 1:
        raise LookupError(f"{PAGE.name} has {len(mine)} rows of {verdict.package}, not one")
    rows[mine[0]] = verdict.row
    PAGE.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
