"""Shared fixtures: both event loops, repeatable hypothesis tests, services for the command line."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import threading
import time
from contextlib import suppress
from inspect import iscoroutinefunction
from itertools import count

import pytest
import typer.rich_utils  # noqa: F401  it reads FORCE_COLOR when it is imported, and some tests set that
from cli_kit import point_at
from hypothesis import HealthCheck, settings
from store_kit import Cluster, missing

from sampling_async.simulator import Latency, Simulator

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


# uvicorn runs services on uvloop, so `nox -s uvloop` sets this variable.
BACKENDS = [("asyncio", {"use_uvloop": True})] if os.environ.get("ON_UVLOOP") else ["asyncio", "trio"]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend if isinstance(backend, str) else "uvloop")
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """Run async tests on both event loops, or on uvloop."""
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    """Mark async tests with `anyio`, except those that are marked `asyncio`: pytest-asyncio runs these.

    anyio's hook of the same name reads the mark, so this one must run first. It does: of the hooks that want to
    be first, pytest calls the one that was registered last, and a conftest is registered after plugins.
    """
    if not collector.istestfunction(obj, name):
        return
    test = obj.hypothesis.inner_test if hasattr(obj, "hypothesis") else obj
    marks = {mark.name for mark in (*getattr(obj, "pytestmark", ()), *collector.iter_markers())}
    if iscoroutinefunction(test) and marks.isdisjoint({"asyncio", "anyio"}):
        pytest.mark.anyio(obj)


@pytest.fixture(scope="module", autouse=True)
def _earlier_objects_are_collected_once():
    """Hide what exists before a module from the garbage collector.

    The tests themselves are half a million objects, which each full collection would visit: 0.25 s, and there
    are hundreds. The garbage of earlier modules is collected first, so that none of it is kept.
    """
    gc.collect()
    gc.freeze()


# --- Runs that hang


class SilentWorkers:
    """End the processes of a parallel run that says nothing for long, after the stacks of their threads.

    A process may hang between two tests, where pytest does not look, or may be stopped. xdist replaces it, and
    reports its test as failed.
    """

    SECONDS = 400.0

    def __init__(self) -> None:
        self._processes: list[int] = []
        self._latest = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node) -> None:
        self._processes.append(node.gateway._io.popen.pid)  # execnet tells it nowhere else

    def pytest_runtest_logreport(self) -> None:
        self._latest = time.monotonic()

    def _watch(self) -> None:
        while True:
            time.sleep(5)
            if time.monotonic() - self._latest > self.SECONDS:
                self._latest = time.monotonic()
                faulthandler.dump_traceback()
                for each in self._processes:
                    with suppress(ProcessLookupError):
                        os.kill(each, signal.SIGCONT)
                        os.kill(each, signal.SIGABRT)
                self._processes.clear()


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what runs in its background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SilentWorkers())


# --- Services for commands


@pytest.fixture(scope="module")
def served():
    sim = Simulator(seed=3, surveys=20, members=30)
    with sim.serve() as base_url:
        yield sim, base_url


@pytest.fixture
def sim(served, monkeypatch):
    simulator, base_url = served
    point_at(monkeypatch, simulator, base_url)
    yield simulator
    simulator.faults.clear()


@pytest.fixture
def slow(monkeypatch):
    """Serve a slow simulator, so that a signal reaches a program in the middle of its work."""
    simulator = Simulator(seed=3, surveys=60, members=1, latency=Latency(a=0.2))
    with simulator.serve() as base_url:
        point_at(monkeypatch, simulator, base_url)
        yield simulator


# --- Databases


@pytest.fixture(scope="session")
def postgres():
    """Start a PostgreSQL server for all tests of this process that need one."""
    if reason := missing():
        pytest.skip(reason)
    cluster = Cluster()
    yield cluster
    cluster.remove()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def new_address(request, tmp_path):
    """Return a function for the address of a new store: the path of a file, or a schema in PostgreSQL."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres").new_dsn
    numbers = count()
    return lambda: str(tmp_path / f"{next(numbers)}.db")
