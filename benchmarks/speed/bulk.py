"""The CPU cost of a bulk request in the client's process, from quota IDs to models and outcomes."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from scoreboard.board import at_least, at_most

from speed.canned_server import canned_service
from speed.contenders import AIOHTTP, BARE, COUNTED, ENGINES, HTTPX, OURS, PEERS, UVLOOP, WORKERS, contender
from speed.measuring import Measured, Spread, Table, interleaved, microseconds, ratio, several_times

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from scoreboard.board import Run

    from speed.canned_server import Address
    from speed.measuring import Sample

WIDTH: Final = 64


def measure(run: Run) -> Measured:
    """Measure the clients, then the engines under ours."""
    requests = run.of(100, 300)
    engines = [OURS, *ENGINES, *([UVLOOP] if find_spec("uvloop") else [])]
    with canned_service() as address:
        of_clients = samples_of((*PEERS, COUNTED), address, requests, run.of(3, 11))
        # The slow clients take most of the time of a round, so the fast ones are compared in many more.
        compared = several_times(
            run.of(3, 7),
            lambda: samples_of((OURS, AIOHTTP, WORKERS, BARE, COUNTED), address, requests, run.of(3, 9)),
        )
        of_engines = samples_of(engines, address, requests, run.of(1, 7))
    cpu = {name: [sample.cpu for sample in taken] for name, taken in compared.items()}
    times_less = ratio(*([sample.cpu for sample in of_clients[name]] for name in (HTTPX, OURS)))
    return Measured(
        goals=[
            at_most(
                f"CPU a bulk request, {WIDTH} wide: {AIOHTTP} is 1", 1.15, ratio(cpu[OURS], cpu[AIOHTTP]).median
            ),
            at_most(f"the same: {WORKERS} is 1", 0.85, ratio(cpu[OURS], cpu[WORKERS]).median),
            at_most(f"the same: {BARE} is 1", 1.7, ratio(cpu[OURS], cpu[BARE]).median),
            at_most(
                "the same for who takes result.invites and result.counts",
                1.0,
                ratio(cpu[COUNTED], cpu[AIOHTTP]).median,
            ),
            at_least(f"the same: times less than {HTTPX} + gather", 8, times_less.median),
        ],
        tables=[
            _table("The clients", "client", of_clients, requests),
            _table("The fast ones again, in more rounds and processes", "client", compared, requests),
            _table("Engines under sampling_async", "engine", of_engines, requests),
        ],
        samples={"requests": requests, "clients": of_clients, "compared": compared, "engines": of_engines},
    )


def samples_of(names: Iterable[str], address: Address, requests: int, rounds: int) -> dict[str, list[Sample]]:
    """Let clients, or engines under ours, make the same bulks in turn, each in its own process."""
    with ExitStack() as stack:
        processes = {name: stack.enter_context(contender(name, address)) for name in names}
        takers = {name: partial(each.call, "bulk", requests, WIDTH) for name, each in processes.items()}
        return interleaved(takers, rounds)


def _table(title: str, what: str, samples: Mapping[str, list[Sample]], requests: int) -> Table:
    columns = (what, "CPU us a request", "times ours", "wall us a request", "quota IDs a second")
    table = Table(title, columns)
    for name, taken in samples.items():
        times = ratio([sample.cpu for sample in taken], [sample.cpu for sample in samples[OURS]])
        wall = Spread.of(sample.wall / requests * 1e6 for sample in taken)
        cpu = Spread.of(microseconds(taken, requests))
        label = "its own" if what == "engine" and name == OURS else name
        table.rows.append((label, str(cpu), str(times), str(wall), round(100e6 / wall.median)))
    return table
