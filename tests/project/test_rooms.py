"""The private packages: what each may import. Imports go in one direction."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import sampling_async
from sampling_async import sync

ROOT = Path(sampling_async.__file__).parent

# Each package, and the packages it may import from. A file at the top is a package of its own.
PACKAGES = {
    "_version": set(),
    "_contract": set(),
    "_snapshot": {"_contract", "_pacing"},
    "_private_files": set(),
    "_json": {"_contract"},
    "_protocol": {"_contract", "_json"},
    "_pacing": {"_contract"},
    "_wire": {"_contract", "_pacing", "_version"},
    "_calls": {"_contract", "_json", "_pacing", "_protocol", "_wire"},
    "_journal": {"_contract", "_json", "_pacing", "_private_files", "_protocol"},
    "_watch": {"_contract", "_json", "_pacing", "_private_files"},
    "_telemetry": {"_calls", "_contract", "_json", "_pacing", "_protocol", "_snapshot", "_version"},
    "_bulk": {"_calls", "_contract", "_journal", "_pacing", "_protocol"},
    "_profiles": {"_calls", "_contract", "_pacing", "_private_files", "_wire"},
    "_log": {"_contract"},
    "_client": {
        "_bulk",
        "_calls",
        "_contract",
        "_journal",
        "_json",
        "_log",
        "_pacing",
        "_profiles",
        "_protocol",
        "_snapshot",
        "_telemetry",
        "_watch",
        "_wire",
    },
}
TOOLS = {
    "_cli",
    "_following",
    "_live",
    "campaign",
    "frames",
    "health",
    "matching",
    "notifications",
    "routing",
    "simulator",
    "sync",
}
THIRD_PARTY = {
    "httpx": {"_wire"},  # httpx2 is imported nowhere: the user has it; tests/wire/test_clients.py
    "httpx2": set(),
    "certifi": {"_wire/trust"},
    "httptools": {"_wire/http1"},
    "httpcore": set(),
    "msgspec": {"_contract", "_json/converter", "_json/fast", "_protocol/results"},
    "cattrs": {"_json/converter"},
    "sqlite3": {"_journal"},
    "opentelemetry": {"_telemetry"},
}


def files_of(package: str) -> list[Path]:
    return sorted((ROOT / package).glob("*.py")) if (ROOT / package).is_dir() else [ROOT / f"{package}.py"]


FILES = [path for package in PACKAGES for path in files_of(package)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


def imported(path: Path, *, at_run_time: bool = False) -> set[str]:
    """Return the modules that a file imports; on request without those for type checking only."""
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
    known = set(PACKAGES) | TOOLS
    return {part[1] for part in parts if part[0] == "sampling_async" and len(part) > 1 and part[1] in known}


def test_every_file_is_in_a_package():
    packages = {path.name for path in ROOT.glob("_*") if path.is_dir() and path.name != "__pycache__"}
    files = {path.stem for path in ROOT.glob("_*.py")} - {"__init__", "__main__"}
    assert (packages | files) - TOOLS == set(PACKAGES)


def test_the_page_about_the_design_lists_the_files_of_each_package():
    page = Path(__file__).parents[2] / "docs" / "explanation" / "design.md"
    rows = [[cell.strip() for cell in row.split("|")] for row in page.read_text().splitlines() if "| `_" in row]
    listed = {row[1].strip("`"): set(row[3].split(", ")) for row in rows}
    packages = [package for package in PACKAGES if (ROOT / package).is_dir()]
    assert listed == {package: {path.stem for path in files_of(package)} - {"__init__"} for package in packages}


def test_the_guide_for_contributors_names_files_that_exist():
    guide = (ROOT.parent / ".github" / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w./*]+\.(?:py|toml|md|json))`", guide)
    assert len(named) > 40
    assert [
        name
        for name in named
        if not any(list((ROOT.parent / top).glob(name)) for top in ("", "sampling_async", "tests"))
    ] == []


def test_no_file_is_too_long_for_one_decision():
    lines = {name_of(path): len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert {name: count for name, count in lines.items() if count > 500 and name != "_client"} == {}


def test_a_class_name_stands_once_in_the_package():
    places = defaultdict(list)
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            # The blocking client and its streams are called as the async ones.
            is_blocking = name_of(path).startswith("sync/") and getattr(node, "name", "") in sync.__all__
            if isinstance(node, ast.ClassDef) and not is_blocking:
                places[node.name.lstrip("_")].append(name_of(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_nobody_imports_what_another_module_marks_as_private():
    taken = [
        f"{name_of(path)}: {node.module}.{alias.name}"
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.name.startswith("_")
        and not (ROOT.parent / Path(*node.module.split("."), f"{alias.name}.py")).exists()
        and alias.name != "__version__"
    ]
    assert taken == []


def test_rooms_have_no_subfolders():
    """A package has one subject, and its files can be seen at a glance."""
    assert [path for package in PACKAGES for path in (ROOT / package).glob("*/*.py")] == []


def test_importing_a_package_loads_nothing():
    assert [path for path in FILES if path.name == "__init__.py" and path.read_text()] == []


def test_imports_follow_the_arrows():
    wrong = {}
    for path in FILES:
        package = name_of(path).split("/")[0]
        wrong[name_of(path)] = ours(imported(path)) - {package} - PACKAGES[package]
    assert {name: packages for name, packages in wrong.items() if packages} == {}


def test_each_allowed_arrow_is_used():
    """The picture should have no unused arrows."""
    for package, allowed in PACKAGES.items():
        used = set().union(*(ours(imported(path)) for path in files_of(package)))
        assert used - {package} == allowed, package


def test_there_is_no_cycle_of_packages():
    TopologicalSorter(PACKAGES).prepare()


def test_no_files_import_each_other_in_a_circle():
    """Neither when the package runs nor for its types: each file can be read after those that it names."""
    modules = {f"sampling_async/{name_of(path)}".removesuffix("/__init__"): path for path in ROOT.rglob("*.py")}
    needs = {}
    for module, path in modules.items():
        named = {name.replace(".", "/") for name in imported(path)} & (set(modules) - {module})
        # `from a import b` names the file a/b.py, if there is one, and else a/__init__.py.
        needs[module] = {name for name in named if not any(other.startswith(f"{name}/") for other in named)}
    TopologicalSorter(needs).prepare()


@pytest.mark.parametrize(("library", "places"), THIRD_PARTY.items())
def test_each_library_is_imported_in_one_place(library, places):
    users = {
        name_of(path)
        for path in FILES
        if library in {name.split(".")[0] for name in imported(path, at_run_time=True)}
    }
    assert {place for place in places if not any(user.startswith(place) for user in users)} == set()
    assert {user for user in users if not user.startswith(tuple(places))} == set()


def test_the_client_imports_no_tool():
    for path in FILES:
        assert not ours(imported(path)) & TOOLS


def test_only_panels_need_numpy_and_pyarrow():
    users = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if {name.split(".")[0] for name in imported(path)} & {"numpy", "pyarrow"}
    }
    assert users
    assert all(user.startswith(("matching/panel/", "_cli/_match_run")) for user in users)
