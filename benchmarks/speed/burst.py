"""The CPU cost of a first burst: a client is made, opens its connections, and sends a bulk."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Final

from scoreboard.board import at_most

from speed.canned_server import canned_service
from speed.contenders import AIOHTTP, OURS, contender
from speed.measuring import Measured, Spread, Table, interleaved, microseconds, ratio

if TYPE_CHECKING:
    from scoreboard.board import Run

WIDTH: Final = 64
REQUESTS: Final = 300
NOTE: Final = (
    "The process has used such a client before. The very first client of a process also imports what it needs, "
    "which takes some twenty milliseconds; a client made with aiohttp has paid for that at its import."
)


def measure(run: Run) -> Measured:
    """Measure our client and the one written by hand."""
    with canned_service() as address, ExitStack() as stack:
        clients = {name: stack.enter_context(contender(name, address)) for name in (OURS, AIOHTTP)}
        takers = {name: partial(each.call, "burst", REQUESTS, WIDTH) for name, each in clients.items()}
        for take in takers.values():
            take()
        taken = interleaved(takers, run.of(5, 21))
    cpu = {name: [sample.cpu for sample in samples] for name, samples in taken.items()}
    table = Table(f"{REQUESTS} requests of a new client, {WIDTH} wide", ("client", "CPU us a request"))
    for name, samples in taken.items():
        table.rows.append((name, str(Spread.of(microseconds(samples, REQUESTS)))))
    goal = at_most(f"CPU of a new client's burst: {AIOHTTP} is 1", 1.0, ratio(cpu[OURS], cpu[AIOHTTP]).median)
    return Measured([goal], [table], {"requests": REQUESTS, "clients": taken}, notes=[NOTE])
