"""The runs: cells in several processes, since each is a simulation of its own."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from pressure import routed
from pressure.askers import ours
from pressure.cells import FOR_PEERS, Cell, matrix
from pressure.peers import PEERS, opened, without
from pressure.trial import Seen, tried

if TYPE_CHECKING:
    from collections.abc import Collection

    from scoreboard.board import Row, Run

Part: TypeAlias = Literal["cells", "peers", "router"]
PARTS: Final[tuple[Part, ...]] = ("cells", "peers", "router")
OURS: Final = "this client"


@dataclass
class Results:
    """What was measured.

    Attributes:
        cells: This client in each cell of the matrix.
        peers: This client and the others in the cells for both; a text says why one was not measured.
        router: The rows of the router.
        cpu: Seconds of CPU, of all processes.
    """

    cells: list[Seen] = field(default_factory=list)
    peers: list[Seen | str] = field(default_factory=list)
    router: list[Row] = field(default_factory=list)
    cpu: float = 0.0


def measured(run: Run, parts: Collection[Part], jobs: int) -> Results:
    """Run the parts."""
    results = Results()
    cells = [cell for cell in matrix() if run.of(cell.is_short, True)] if "cells" in parts else []
    beside: list[tuple[Cell, str]] = []
    if "peers" in parts:
        chosen = [cell for cell in FOR_PEERS if run.of(cell.is_short, True)]
        beside = [(cell, who) for cell in chosen for who in (OURS, *PEERS) if not without(who)]
        results.peers += [reason for who in PEERS if (reason := without(who))]
    tasks = [*((cell, OURS) for cell in cells), *beside]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_quiet) as pool:
        futures = [pool.submit(_one, cell, who, run.seed) for cell, who in tasks]
        routes = [pool.submit(_routed, case, run.seed) for case in routed.CASES if "router" in parts]
        found = [future.result() for future in futures]
        rows = [future.result() for future in routes]
    results.cells = [seen for seen, _ in found[: len(cells)]]
    results.peers += [seen for seen, _ in found[len(cells) :]]
    results.router = [row for of_case, _ in rows for row in of_case]
    results.cpu = sum(cpu for _, cpu in (*found, *rows))
    return results


def _quiet() -> None:
    logging.getLogger("sampling_async").setLevel(logging.ERROR)  # outages are what the cells are about


def _one(cell: Cell, who: str, seed: int) -> tuple[Seen, float]:
    began = time.process_time()
    seen = tried(cell, ours if who == OURS else opened(who), seed, who)
    return seen, time.process_time() - began


def _routed(case: str, seed: int) -> tuple[list[Row], float]:
    began = time.process_time()
    found = routed.rows(case, seed)
    return found, time.process_time() - began
