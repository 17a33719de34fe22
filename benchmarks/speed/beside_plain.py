"""What a fan-out costs with something added, beside a plain one of the same requests in the same process."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from scoreboard.board import at_most

from speed.canned_server import canned_service
from speed.measuring import Measured, Spread, Table, interleaved, microseconds, ratio
from speed.remote import remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from scoreboard.board import Run

    from speed.canned_server import Address
    from speed.measuring import Sample

WIDTHS: Final = (8, 64)
IDS: Final = 5
"""Quota IDs of a request."""


def beside_plain(
    run: Run,
    make: Callable[..., object],
    kinds: Mapping[str, str],
    *,
    most: float,
    goal: str,
    title: str,
    note: str,
) -> Measured:
    """Measure kinds of fan-outs at each width, interleaved. One of them is "plain", and the others go by it.

    `make` makes a client with the methods `prepare(requests)`, `cost(kind)` and `finish()`.
    """
    requests, rounds = run.of((1_000, 3), (5_000, 7))
    table = Table(title.format(requests, IDS), ("width", "kind", "CPU us a request", "by plain"))
    goals, samples = [], {}
    with canned_service() as address:
        for width in WIDTHS:
            samples[width] = samples_of(make, address, kinds, width=width, requests=requests, rounds=rounds)
            cost = {kind: microseconds(each, requests) for kind, each in samples[width].items()}
            for kind, meaning in kinds.items():
                times = ratio(cost[kind], cost["plain"])
                table.rows.append((width, meaning, str(Spread.of(cost[kind])), str(times)))
                if kind != "plain":
                    goals.append(at_most(goal.format(meaning, width), most, times.median))
    return Measured(goals=goals, tables=[table], samples={"samples": samples}, notes=[note])


def samples_of(
    make: Callable[..., object],
    address: Address,
    kinds: Iterable[str],
    *,
    width: int,
    requests: int,
    rounds: int,
) -> dict[str, list[Sample]]:
    """Let a client make each kind of fan-out in turn, in a process of its own."""
    with remote(make, address, width) as process:
        process.call("prepare", requests)
        taken = interleaved({kind: partial(process.call, "cost", kind) for kind in kinds}, rounds)
        process.call("finish")
    return taken
