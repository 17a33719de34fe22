"""The CPU cost of one Generate Invite, called one after the other as a click service does."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from scoreboard.board import at_most

from speed.canned_server import canned_service
from speed.contenders import AIOHTTP, OURS, contender
from speed.measuring import Measured, Spread, Table, interleaved, microseconds, ratio

if TYPE_CHECKING:
    from scoreboard.board import Run


def measure(run: Run) -> Measured:
    """Measure our client and the one written by hand."""
    requests = run.of(200, 500)
    with canned_service() as address, ExitStack() as stack:
        clients = {name: stack.enter_context(contender(name, address)) for name in (OURS, AIOHTTP)}
        taken = interleaved(
            {name: partial(each.call, "single", requests) for name, each in clients.items()}, run.of(5, 21)
        )
    cpu = {name: [sample.cpu for sample in samples] for name, samples in taken.items()}
    table = Table("One call after the other", ("client", "CPU us a call", "wall us a call"))
    for name, samples in taken.items():
        wall = Spread.of(sample.wall / requests * 1e6 for sample in samples)
        table.rows.append((name, str(Spread.of(microseconds(samples, requests))), str(wall)))
    goal = at_most(f"CPU of generate_invite: {AIOHTTP} is 1", 1.2, ratio(cpu[OURS], cpu[AIOHTTP]).median)
    return Measured([goal], [table], {"requests": requests, "clients": taken})
