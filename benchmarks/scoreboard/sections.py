"""The sections. Each runs in its own process, so that no section disturbs or crashes another."""

from __future__ import annotations

import importlib
import multiprocessing
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

from scoreboard.board import Row, Run, Section, missing, shown

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SECTIONS: Final = {
    "truth": "Truth: one true outcome for every quota ID",
    "repeats": "Repeats: a pair that comes again is asked for once; plans while quotas close",
    "pager": "Pager: every recontact row once",
    "sweeps": "Sweeps: cut at every byte, cancelled at every tick",
    "interruption": "Interruption: all tasks cancelled at every tick, a handler that raises at every line",
    "manners": "Manners: the load on a failing service",
    "brownout": "Brown-out: a service that slows down",
    "outages": "Outages and limits: a service that is away, a gateway with a request limit",
    "pressure": "Pressure: clicks and a fan-out in and after a storm, and under overload",
    "refusals": "Refusals for load: by a rate, and by chance",
    "retry_after": "Retry-After: never early",
    "churn": "Churn: calls cut off in every phase, then calls with enough time",
    "leaks": "Clean-up after faults and cancellations",
    "kill": "Kill: the process is killed during a run with a journal",
    "stalls": "Stalls: inputs that never fill a request, or hold a million IDs",
    "journal_lock": "Two processes with one journal, which is also opened in other ways",
    "bad_inputs": "Bad inputs: only typed errors",
    "secrecy": "Secrecy: the key and member codes stay where they belong",
    "accounts": "Accounts: resumed runs, Ctrl-C, money in currencies and money taken back",
    "databases": "Databases: behind a pooler, published, in another language, with lost answers",
    "odd_files": "Odd files: an answer to each, and reading changes nothing",
    "notifications": "Notifications: what the field sends is read, and handlers hold up nobody else",
    "busy": "A busy machine: what the demo says",
    "planted_bugs": "Planted bugs: which bugs the tests find",
}
LIMITS: Final = {"short": 1200.0, "long": 3600.0}
"""Seconds after which a section counts as hung. The planted bugs take longest: half an hour and more."""


def measured(name: str, run: Run) -> Section:
    """Measure one section in a fresh process, and print its progress."""
    command = f"python benchmarks/scoreboard --{run.version} --only {name} --seed {run.seed}"
    section = Section(name, SECTIONS[name], command)
    print(f"{section.title} ...", flush=True)
    started = time.perf_counter()
    section.rows = _in_process(name, run)
    section.seconds = time.perf_counter() - started
    for row in section.rows:
        verdict = {None: "", True: "met", False: "MISSED"}[row.met]
        print(f"  {verdict:7}{row.name}: {shown(row.ours, row.unit)}   [naive {shown(row.naive, row.unit)}]")
    print(f"  {section.seconds:.0f} s", flush=True)
    return section


def _in_process(name: str, run: Run) -> list[Row]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(theirs, name, run))
    process.start()
    theirs.close()
    try:
        if not ours.poll(LIMITS[run.version]):
            return [missing(name, "to end", "hung: stopped at its time limit")]
        rows: list[Row] = ours.recv()
    except EOFError:
        return [missing(name, "to end", "its process ended without a result")]
    else:
        return rows
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()


def _measure(pipe: Connection, name: str, run: Run) -> None:
    try:
        rows = importlib.import_module(f"scoreboard.{name}").rows(run)
    except Exception as exc:  # noqa: BLE001  a section that fails must not take the others with it
        print(_told(exc))
        rows = [missing(name, "to run", f"failed with {type(exc).__name__}")]
    pipe.send(rows)


def _told(exc: Exception) -> str:
    """Return a traceback without the paths of this machine."""
    frames = traceback.extract_tb(exc.__traceback__)
    places = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
    return f"  {places}: {type(exc).__name__}: {exc}"
