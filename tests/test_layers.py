"""The layers of the package: imports go one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sampling_async

ROOT = Path(sampling_async.__file__).parent

# Each module, and what it may import of this package: itself nothing above it.
LAYERS = {
    "_version": set(),
    "_errors": {"_outcomes"},  # for a type only
    "_models": set(),
    "_settings": {"_errors", "_models"},
    "_outcomes": {"_drafts", "_errors", "_fastlane", "_models"},
    "_loops": set(),
    "_forks": set(),
    "_threads": {"_loops"},
    "_lookups": {"_forks", "_threads"},
    "_drafts": set(),
    "_coercions": set(),
    "_fastlane": {"_coercions", "_drafts", "_models", "_settings"},
    "_slowlane": {"_coercions", "_errors", "_models", "_settings"},
    "_codec": {"_errors", "_fastlane", "_slowlane"},
    "_collector": set(),
    "_inventory": {"_codec", "_errors", "_models"},
    "_replies": {"_codec", "_errors", "_fastlane", "_models", "_outcomes", "_policy"},
    "_protocol": {"_codec", "_errors", "_models", "_replies", "_settings"},
    "_policy": {"_errors", "_models"},
    "_cancellation": set(),
    "_limit": set(),
    "_snapshot": set(),
    "_outage": {"_loops", "_policy"},
    "_gate": {"_limit", "_loops", "_outage"},
    "_background": {"_cancellation", "_loops"},
    "_scheduler": {"_background", "_gate", "_loops"},
    "_configuration": {"_errors"},
    "_stepwise": set(),
    "_bodies": {"_errors", "_stepwise"},
    "_alerts": set(),
    "_trust": {"_errors"},
    "_sockets": {"_alerts", "_forks", "_lookups", "_loops"},
    "_answers": set(),
    "_failures": {"_alerts", "_errors"},
    "_idling": set(),
    "_tunnels": {"_answers", "_configuration", "_failures", "_policy", "_sockets"},
    "_engine": {
        "_alerts",
        "_answers",
        "_bodies",
        "_configuration",
        "_failures",
        "_idling",
        "_lookups",
        "_loops",
        "_sockets",
        "_trust",
        "_tunnels",
    },
    "_session": {
        "_bodies",
        "_cancellation",
        "_configuration",
        "_engine",
        "_errors",
        "_failures",
        "_loops",
        "_policy",
        "_protocol",
        "_replies",
        "_version",
    },
    "_links": {"_errors"},
    "_calls": {
        "_errors",
        "_gate",
        "_links",
        "_outage",
        "_policy",
        "_protocol",
        "_replies",
        "_session",
        "_threads",
    },
    "_journal_lock": {"_errors"},
    "_journal_rows": {"_errors", "_journal_lock"},
    "_journal_file": {"_errors", "_journal_lock", "_journal_rows"},
    "_journal_lines": {"_codec", "_errors", "_models", "_outcomes"},
    "_journal_run": {
        "_codec",
        "_errors",
        "_journal_file",
        "_journal_lines",
        "_journal_rows",
        "_outcomes",
        "_protocol",
        "_threads",
    },
    "_journal": {
        "_errors",
        "_journal_file",
        "_journal_lines",
        "_journal_rows",
        "_journal_run",
        "_outcomes",
        "_threads",
    },
    "_job": {"_errors", "_outcomes", "_protocol", "_replies", "_session"},
    "_inputs": {"_errors", "_stepwise"},
    "_chunks": {
        "_errors",
        "_inputs",
        "_job",
        "_journal_run",
        "_limit",
        "_outcomes",
        "_protocol",
        "_replies",
        "_stepwise",
    },
    "_invites": {
        "_calls",
        "_errors",
        "_gate",
        "_job",
        "_journal_run",
        "_models",
        "_outcomes",
        "_policy",
        "_protocol",
        "_replies",
        "_session",
    },
    "_bulk": {"_chunks", "_gate", "_invites", "_job", "_outcomes", "_protocol", "_scheduler", "_stepwise"},
    "_recontact": {"_calls", "_errors", "_gate", "_models", "_protocol", "_scheduler", "_session"},
    "_quotas": {
        "_bodies",
        "_calls",
        "_collector",
        "_gate",
        "_inventory",
        "_models",
        "_protocol",
        "_replies",
        "_session",
    },
    "_client": {
        "_bodies",
        "_bulk",
        "_calls",
        "_chunks",
        "_codec",
        "_configuration",
        "_errors",
        "_gate",
        "_inputs",
        "_invites",
        "_journal",
        "_journal_run",
        "_loops",
        "_models",
        "_outage",
        "_outcomes",
        "_policy",
        "_protocol",
        "_quotas",
        "_recontact",
        "_session",
        "_settings",
        "_snapshot",
        "_trust",
    },
}
TOOLS = {"_cli", "_demo", "matching", "simulator"}
THIRD_PARTY = {
    "httpx": {
        "_session",
        "_failures",
        "_bodies",
        "_configuration",
        "_engine",
        "_answers",
        "_trust",
        "_tunnels",
    },
    "httptools": {"_answers"},
    "httpcore": set(),
    "msgspec": {"_codec", "_fastlane", "_outcomes"},
    "cattrs": {"_slowlane"},
}


def imported(path: Path, *, at_run_time: bool = False) -> set[str]:
    """Return the modules a file imports, those for type checking only left out on request."""
    tree = ast.parse(path.read_text())
    if at_run_time:
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.If) and "TYPE" in ast.dump(node.test))
        ]
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def ours(names: set[str]) -> set[str]:
    parts = [name.split(".") for name in names]
    known = set(LAYERS) | TOOLS
    return {part[1] for part in parts if part[0] == "sampling_async" and len(part) > 1 and part[1] in known}


def test_every_module_has_its_layer():
    modules = {path.stem for path in ROOT.glob("_*.py")} - {"__init__", "__main__"}
    assert modules - TOOLS == set(LAYERS)


@pytest.mark.parametrize("module", LAYERS)
def test_imports_go_one_way(module):
    assert ours(imported(ROOT / f"{module}.py")) <= LAYERS[module]


def test_there_is_no_circle_at_run_time():
    order: list[str] = []
    while len(order) < len(LAYERS):
        ready = [
            module
            for module in LAYERS
            if module not in order and ours(imported(ROOT / f"{module}.py", at_run_time=True)) <= set(order)
        ]
        assert ready, f"a circle among {set(LAYERS) - set(order)}"
        order += ready


@pytest.mark.parametrize(("library", "modules"), THIRD_PARTY.items())
def test_each_library_has_one_module_that_knows_it(library, modules):
    users = {
        module
        for module in LAYERS
        if library in {name.split(".")[0] for name in imported(ROOT / f"{module}.py", at_run_time=True)}
    }
    assert users == modules


def test_the_client_imports_no_tool():
    for module in LAYERS:
        assert not ours(imported(ROOT / f"{module}.py")) & TOOLS


def test_only_panels_need_numpy_and_pyarrow():
    users = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if {name.split(".")[0] for name in imported(path)} & {"numpy", "pyarrow"}
    }
    assert users
    assert all(user.startswith(("matching/panel/", "_cli/_panel_files")) for user in users)
