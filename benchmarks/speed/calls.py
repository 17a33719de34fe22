"""The CPU cost of calls by our client and by the fastest one that is written by hand: single ones, and a burst.

*Single*: one Generate Invite after the other, as a click service does it. *Burst*: a client is made, opens its
connections, and sends a bulk.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from scoreboard.board import at_most

from speed.canned_server import canned_service
from speed.contenders import AIOHTTP, OURS, contender
from speed.measuring import Measured, Spread, Table, interleaved, microseconds, ratio

if TYPE_CHECKING:
    from scoreboard.board import Run

WIDTH: Final = 64
BURST: Final = 300
NOTE: Final = (
    "The process has used such a client before. The very first client of a process also imports what it needs, "
    "which takes some twenty milliseconds; a client made with aiohttp has paid for that at its import."
)


def single(run: Run) -> Measured:
    """Measure calls of one quota ID."""
    requests, what = run.of(200, 500), f"CPU of generate_invite: {AIOHTTP} is 1"
    return _beside(run, "One call after the other", what, 1.2, "single", requests)


def burst(run: Run) -> Measured:
    """Measure new clients."""
    title = f"{BURST} requests of a new client, {WIDTH} wide"
    found = _beside(run, title, f"CPU of a new client's burst: {AIOHTTP} is 1", 1.0, "burst", BURST, WIDTH)
    found.notes.append(NOTE)
    return found


def _beside(run: Run, title: str, goal: str, most: float, *asked: Any) -> Measured:
    """Let both clients make these requests in turn, each in its own process, once before they are measured."""
    method, requests, *more = asked
    with canned_service() as address, ExitStack() as stack:
        clients = {name: stack.enter_context(contender(name, address)) for name in (OURS, AIOHTTP)}
        takers = {name: partial(each.call, method, requests, *more) for name, each in clients.items()}
        for take in takers.values():
            take()
        taken = interleaved(takers, run.of(5, 21))
    cpu = {name: microseconds(samples, requests) for name, samples in taken.items()}
    table = Table(title, ("client", "CPU us a request", "wall us a request"))
    for name, samples in taken.items():
        wall = Spread.of(sample.wall / requests * 1e6 for sample in samples)
        table.rows.append((name, str(Spread.of(cpu[name])), str(wall)))
    row = at_most(goal, most, ratio(cpu[OURS], cpu[AIOHTTP]).median)
    return Measured([row], [table], {"requests": requests, "clients": taken})
