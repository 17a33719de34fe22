"""Plant bugs into a copy of the package, one at a time, and check that a test fails for each of them.

The bugs are in `planted/bugs.toml`: the name of a function, a text that occurs in it once, the text that
replaces it, and arguments of pytest that select a few tests.
"""

from __future__ import annotations

import ast
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import sampling_async
from scoreboard.board import Row, Run, at_least, exactly
from scoreboard.testkit import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

BUGS: Final = Path(__file__).parent / "planted" / "bugs.toml"
WANTED: Final = 20
AT_ONCE: Final = 2
SECONDS: Final = 90.0
"""If the tests take longer than this, they hang, which counts as a failure."""

FAILED: Final = 1
"""pytest's exit code for failed tests. Higher codes mean that the tests could not run."""

FOUND: Final = {"caught", "hung", "crashed"}
"""The verdicts on a bug that the tests have noticed."""


@dataclass(frozen=True)
class Bug:
    """A bug to plant.

    Attributes:
        name: What is wrong with the package that has the bug.
        where: A class, function or constant of the package, such as `RetryPolicy.allows`, in any file. If
            several have the name, the file stands before it. A file alone is for code outside of them.
        old: The text that is replaced. It must occur there exactly once.
        new: The text with the bug.
        tests: Arguments of pytest.
    """

    name: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]


def rows(run: Run) -> list[Row]:
    """Plant all bugs. The short version plants every fourth one, and the seed selects which."""
    listed = listed_bugs()
    bugs = run.of(listed[run.seed % 4 :: 4], listed)
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(AT_ONCE):
            copies.put(_copy(Path(folder) / str(number)))
        unplanted = _green(bugs, copies)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            verdicts = dict(zip(bugs, pool.map(lambda bug: _planted(bug, copies), bugs), strict=True))
    caught = [bug for bug, verdict in verdicts.items() if verdict in FOUND]
    others = [f"{bug.name}: {verdict}" for bug, verdict in verdicts.items() if bug not in caught]
    note = "; ".join(others) or "for each bug a test failed that passes without it"
    return [
        at_least("bugs planted, one at a time", WANTED, len(bugs)),
        exactly("bugs that the tests find", len(bugs), len(caught), note=note),
        Row("the same tests without bugs", "green", unplanted, unplanted == "green"),
    ]


def listed_bugs() -> list[Bug]:
    """Return all bugs of the list."""
    listed = tomllib.loads(BUGS.read_text(encoding="utf-8"))["bug"]
    return [Bug(**{**each, "tests": tuple(each["tests"])}) for each in listed]


def _copy(place: Path) -> Path:
    """Copy the package, and check that the tests will import the copy."""
    shutil.copytree(
        Path(sampling_async.__file__).parent,
        place / "sampling_async",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    done = _python(place, "-c", "import sampling_async; print(sampling_async.__file__)")
    if Path(done.stdout.strip()).parent != place / "sampling_async":
        raise RuntimeError("the tests would import another package than the copy")
    return place


def _python(place: Path, *arguments: str, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    # With a safe path, the project's folder, which has the package too, does not come first.
    # Compiled code is kept beside the copy: to compile all again took most of the time of a bug.
    environment = {
        **os.environ,
        "PYTHONPATH": str(place),
        "PYTHONPYCACHEPREFIX": str(place / "compiled"),
        "PYTHONSAFEPATH": "1",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def _pytest(place: Path, *tests: str, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    return _python(place, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests, seconds=seconds)


def _green(bugs: list[Bug], copies: SimpleQueue[Path]) -> str:
    """Run all selected tests on a copy without bugs, file by file. Return `green` or what failed."""
    selected: dict[tuple[str, ...], set[str]] = {}
    for bug in bugs:
        files = tuple(each for each in bug.tests if each.startswith("tests/"))
        selected.setdefault(files, set()).add(" ".join(bug.tests[len(files) + 1 :]))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = pool.map(lambda each: _without_bug(each[0], each[1], copies), sorted(selected.items()))
    return "; ".join(result for result in results if result) or "green"


def _without_bug(files: tuple[str, ...], expressions: set[str], copies: SimpleQueue[Path]) -> str:
    chosen = () if "" in expressions else ("-k", " or ".join(f"({each})" for each in sorted(expressions)))
    place = copies.get()
    try:
        done = _pytest(place, *files, *chosen, seconds=len(expressions) * SECONDS)
    except subprocess.TimeoutExpired:
        return f"{' '.join(files)} hung"
    finally:
        copies.put(place)
    return "" if done.returncode == 0 else f"{' '.join(files)} ended with exit code {done.returncode}"


def _planted(bug: Bug, copies: SimpleQueue[Path]) -> str:
    """Plant a bug, and return one of `FOUND`, or in what way it was not noticed."""
    place = copies.get()
    module, text, with_bug = with_bug_of(bug, place / "sampling_async")
    try:
        if with_bug is None:
            return "text not found"
        _write(module, with_bug)
        done = _pytest(place, *bug.tests)
    except subprocess.TimeoutExpired:
        return "hung"
    finally:
        _write(module, text)
        copies.put(place)
    if done.returncode < 0:  # a signal ended the interpreter, which no test survives
        return "crashed"
    if done.returncode > FAILED:
        last = (done.stdout + done.stderr).strip().rpartition("\n")[2]
        return f"the tests did not run: exit code {done.returncode}: {last}"
    return "caught" if done.returncode == FAILED else "survived"


def _write(module: Path, text: str) -> None:
    """Write a module, and let it look newer: compiled code counts as old by whole seconds and the size."""
    newer = int(module.stat().st_mtime) + 1
    module.write_text(text, encoding="utf-8")
    os.utime(module, (newer, newer))


def with_bug_of(bug: Bug, package: Path) -> tuple[Path, str, str | None]:
    """Return the file of a bug, its text, and its text with the bug; None if the place is not as it was."""
    module, text, start, end = _found(package, bug.where)
    code, old = without_comments(text[start:end]), without_comments(bug.old)
    if code.count(old) != 1:
        return module, text, None
    return module, text, f"{text[:start]}{code.replace(old, bug.new)}{text[end:]}"


def without_comments(code: str) -> str:
    """Return code, or a part of it, without comments: a bug must be found even if a comment has changed."""
    lines = code.splitlines(keepends=True)
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    except (tokenize.TokenError, IndentationError):  # a part of code that cannot be parsed alone
        return re.sub(r"(?m)^[ \t]*#.*\n|[ \t]+# .*$", "", code)
    for token in reversed(tokens):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            kept = lines[line - 1][:column].rstrip()
            lines[line - 1] = f"{kept}\n" if kept else ""
    return "".join(lines)


def _found(package: Path, where: str) -> tuple[Path, str, int, int]:
    """Return the file of a definition, the file's text, and the start and end of the definition in it."""
    file, _, name = where.rpartition(" ") if " " in where or not where.endswith(".py") else (where, "", "")
    places: list[tuple[Path, str, int, int]] = []
    for module in [package / file] if file else sorted(package.rglob("*.py")):
        text = module.read_text(encoding="utf-8")
        if not name:
            return module, text, 0, len(text)
        lines = text.splitlines(keepends=True)
        for node in _definitions(_statements(text), name.split(".")):
            start = min(each.lineno for each in (node, *getattr(node, "decorator_list", [])))
            end = sum(map(len, lines[: node.end_lineno]))
            places.append((module, text, sum(map(len, lines[: start - 1])), end))
    if len(places) != 1:
        raise LookupError(f"{where!r} of planted/bugs.toml is {len(places)} places of the package, not one")
    return places[0]


@cache
def _statements(code: str) -> list[ast.stmt]:
    return ast.parse(code).body


def _definitions(body: list[ast.stmt], name: list[str]) -> Iterator[ast.stmt]:
    """Find the definitions of a name, or of a name inside a class."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name[0]:
                yield from _definitions(node.body, name[1:]) if len(name) > 1 else (node,)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if len(name) == 1 and any(isinstance(each, ast.Name) and each.id == name[0] for each in targets):
                yield node
        elif isinstance(node, ast.If):
            yield from _definitions(node.body, name)
