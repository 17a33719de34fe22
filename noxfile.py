"""The project's checks: `nox` runs lint, types and tests; the others are named with `-s`."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_existing_virtualenvs = True

CORE = [
    *(
        f"sampling_async/_{package}/*"
        for package in (
            "bulk",
            "calls",
            "contract",
            "journal",
            "json",
            "pacing",
            "protocol",
            "telemetry",
            "watch",
            "wire",
        )
    ),
    "sampling_async/_client.py",
    "sampling_async/_profiles.py",
    "sampling_async/_snapshot.py",
    "sampling_async/_private_files.py",
]
PYPROJECT = nox.project.load_toml("pyproject.toml")
# Two a core, because a third of the time tests wait: for programs that they start, and for real sockets.
WORKERS = str(min(2 * (os.cpu_count() or 1), 16))
# Compile each module once, also where the host forbids it: the tests start a hundred programs. Workers of xdist
# know nothing of `-W`, but heed the variable.
TESTS_ENV = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONWARNINGS": "error"}


# Of each dependency, what uses most of it. None of them waits or starts programs, but Chromium and
# PostgreSQL where they are.
FAST = [
    f"tests/{name}.py"
    for name in (
        "bulk/test_stream",
        "campaign/test_campaign_ends",
        "campaign/test_campaign_report",
        "cli/test_cli",
        "cli/test_cli_output",
        "cli/test_match_command",
        "client/test_client",
        "client/test_mocks",
        "client/test_options",
        "contract/test_structs",
        "frames/test_frames",
        "json/test_converter",
        "json/test_fast",
        "json/test_pydantic",
        "matching/test_panel_agreement",
        "matching/test_panel_columns",
        "matching/test_panel_outputs",
        "notifications/test_notifications_app",
        "notifications/test_notifications_bodies",
        "pacing/test_gate",
        "pacing/test_gate_turns",
        "pacing/test_jobs",
        "profiles/test_profiles",
        "protocol/test_bulk_reply",
        "simulator/test_simulator",
        "sync/test_sync",
        "telemetry/test_telemetry",
        "wire/test_bodies",
        "wire/test_closing",
        "wire/test_engine",
        "wire/test_http1",
        "wire/test_idle_connections",
        "wire/test_responses_of_others",
        "wire/test_session",
    )
]


def install(session: nox.Session, *groups: str, constrained_by: str = "") -> None:
    """Install the package with all extras, and dependency groups of pyproject.toml."""
    needed = nox.project.dependency_groups(PYPROJECT, *groups)
    if constrained_by:
        # httpx2 takes no anyio and idna as old as ours.
        needed = tuple(each for each in needed if Requirement(each).name != "httpx2")
    constraints = ("-c", constrained_by) if constrained_by else ()
    session.install("-e", ".[all]", *needed, *constraints)


@nox.session
def lint(session: nox.Session) -> None:
    """Hold the rules and the format."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy (strict) and pyright: the package, a typing test, and the examples of the pages."""
    install(session, "types")
    examples = f"{session.create_tmp()}/examples"
    session.run("python", "tests/project/docs_kit.py", examples)

    def mypy() -> None:
        session.run("mypy")
        session.run("mypy", examples)

    with ThreadPoolExecutor() as side_by_side:  # each uses one core
        checks = [side_by_side.submit(check) for check in (mypy, lambda: session.run("pyright"))]
    for check in checks:
        check.result()


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests in parallel; arguments after `--` go to pytest, `-- -n 0` runs them in one process."""
    install(session, "tests")
    # Before the workers, each of which would compile the package for itself.
    session.run("python", "-m", "compileall", "-q", "-j", "0", "sampling_async")
    command = ("python", "-W", "error", "-m", "pytest", "-n", WORKERS, "--dist", "worksteal")
    session.run(*command, *session.posargs, env=TESTS_ENV)


@nox.session(python=PYPROJECT["project"]["requires-python"].removeprefix(">="))
def floors(session: nox.Session) -> None:
    """Run the fast tests with the lowest version of each dependency, on the lowest Python."""
    project = PYPROJECT["project"]
    optional = itertools.chain(*project["optional-dependencies"].values())
    given = [Requirement(each) for each in (*project["dependencies"], *optional)]
    pins = {
        f"{each.name}=={bound.version}" for each in given for bound in each.specifier if bound.operator == ">="
    }
    lowest = Path(session.create_tmp(), "floors.txt")
    lowest.write_text("\n".join(sorted(pins)))
    install(session, "tests", constrained_by=str(lowest))
    command = ("python", "-W", "error", "-m", "pytest", "-q", "-n", WORKERS, "--dist", "worksteal")
    session.run(*command, *(session.posargs or FAST), env=TESTS_ENV)


@nox.session
def distributed(session: nox.Session) -> None:
    """Match on Spark, Dask and Ray, ask on Dask, and compare every row and invite; Spark takes Java."""
    install(session, "distributed")
    session.run(
        *("python", "-W", "error", "-m", "pytest", "tests/clusters", *session.posargs),
        env={"EVERY_ENGINE": "1"},  # so that none is skipped
    )


@nox.session
def durable(session: nox.Session) -> None:
    """Run a campaign as one task of Prefect and one activity of Temporal; their own venv, as they pin much."""
    install(session, "durable")
    tests = ("tests/clusters/test_prefect.py", "tests/clusters/test_temporal.py")
    session.run("python", "-m", "pytest", *tests, *session.posargs)


@nox.session
def recipes(session: nox.Session) -> None:
    """Run the client in Django, Celery, Dagster, Jupyter, SQLAlchemy and Redis; says what it could not find."""
    install(session, "recipes")
    places = ("tests/recipes", "tests/project/test_deploy.py")
    session.run("python", "-W", "error", "-m", "pytest", *places, "-rs", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html; check its links, and what its search finds first."""
    install(session, "docs")
    session.run("sphinx-build", "-W", "--keep-going", "-E", "docs", "docs/_build/html", *session.posargs)
    session.run("python", "docs/check_links.py", "docs/_build/html")
    session.run("python", "docs/check_search.py", "docs/_build/html")


@nox.session
def package(session: nox.Session) -> None:
    """Build the archives, check them as an index does, and install the wheel without anything else."""
    install(session, "package")
    session.run(
        "python", "-W", "error", "-m", "pytest", "tests/project/test_package.py", "-rs", *session.posargs
    )


@nox.session
def coverage(session: nox.Session) -> None:
    """Measure branch coverage; the core must be covered whole."""
    install(session, "tests")
    session.run("coverage", "erase")
    session.run("coverage", "run", "-m", "pytest", "-q", *session.posargs)
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report", f"--include={','.join(CORE)}", "--fail-under=100")
    session.run("coverage", "report")


@nox.session
def mutants(session: nox.Session) -> None:
    """Change the core in small ways and see whether a test fails; after `--`: packages, and `--sample 150`."""
    install(session, "mutants")
    session.run(
        *("python", "benchmarks/mutants", "--work", session.create_tmp(), *session.posargs),
        env={"PYTHONDONTWRITEBYTECODE": None},  # each doubtful mutant has a process of its own
    )


@nox.session
def scoreboard(session: nox.Session) -> None:
    """Measure what is promised, beside a naive client; `-- --long` writes the page that is committed."""
    install(session, "scoreboard")
    session.run("python", "benchmarks/scoreboard", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure how fast the client is beside others, and write the page; `-- --quick` takes two minutes."""
    install(session, "bench")
    session.run("python", "benchmarks/speed", *session.posargs)


@nox.session
def guard(session: nox.Session) -> None:
    """Hold ratios of CPU time, with room enough for any machine."""
    install(session, "peers")
    session.run("python", "benchmarks/speed/guard.py")


@nox.session
def engines(session: nox.Session) -> None:
    """Put other engines under the client through the fault tests, and show what they fail."""
    install(session, "bench", "tests")
    for engine in ("http_client", "httpx", "httpx-aiohttp", "pyreqwest"):
        session.run(
            *("python", "-m", "pytest", "-q", "--tb=no", "-k", "asyncio", "tests/faults", *session.posargs),
            env={"FAULT_KIT_ENGINE": engine},
            success_codes=[0, 1],
        )


@nox.session
def proxies(session: nox.Session) -> None:
    """Put the client behind real proxies (nginx, Varnish, squid, tinyproxy); says which it could not find."""
    install(session, "tests")
    session.run("python", "-W", "error", "-m", "pytest", "tests/proxies", "-rs", *session.posargs)


@nox.session
def postgres(session: nox.Session) -> None:
    """Run the tests that take a PostgreSQL server, which they start; says if there is none to start."""
    install(session, "tests")
    session.run("python", "-W", "error", "-m", "pytest", "-m", "postgres", "-rs", *session.posargs)


@nox.session
def uvloop(session: nox.Session) -> None:
    """Run the tests that take an event loop on uvloop, which uvicorn runs services on."""
    install(session, "tests")
    command = ("python", "-W", "error", "-m", "pytest", "-n", WORKERS, "--dist", "worksteal", "-k", "uvloop")
    session.run(*command, *session.posargs, env={**TESTS_ENV, "ON_UVLOOP": "1"})
