"""The sections. Each runs in its own process, so that no section disturbs or crashes another."""

from __future__ import annotations

import importlib
import time
from typing import Final

from speed.remote import RemoteError, fresh

from scoreboard.board import Row, Run, Section, missing, told

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
    "settled": "Settled: unknown pairs of which notifications prove an invite",
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
    try:
        section.rows = fresh(_measure, name, run, limit=LIMITS[run.version])
    except RemoteError as exc:
        print(f"  {exc}")
        section.rows = [missing(name, "to be measured", "failed: what it printed says why")]
    section.seconds = time.perf_counter() - started
    for row in section.rows:
        print(f"  {told(row)}")
    print(f"  {section.seconds:.0f} s", flush=True)
    return section


def _measure(name: str, run: Run) -> list[Row]:
    rows: list[Row] = importlib.import_module(f"scoreboard.{name}").rows(run)
    return rows
