"""The cost of a request by the number of concurrent requests."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Final

from scoreboard.board import at_most

from speed.canned_server import canned_service
from speed.contenders import AIOHTTP, GENERATED, HTTPX, OURS, PEERS, contender
from speed.measuring import Measured, Paired, Spread, Table, flatness, interleaved, several_times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from scoreboard.board import Run

    from speed.canned_server import Address
    from speed.measuring import Sample
    from speed.remote import Remote

WIDTHS: Final = (1, 2, 8, 32, 64, 128, 256, 512)
FEW: Final = (1, 8, 64)
REFERENCE: Final = 64
TOGETHER: Final = 8
"""From this width on, several responses are there when the event loop looks."""

REQUESTS: Final = 1024
"""In each sample of the fast clients, whatever the width: two for each slot of the widest."""

FEW_REQUESTS: Final = 150
"""In each sample of the others, which take up to forty times as long."""

NOTE: Final = (
    f"Each sample is followed at once by one of the same client that is {REFERENCE} wide. The goal is about "
    "the ratios within these pairs: a machine changes its speed from one second to the next, and both of "
    "a pair meet the same. All samples of a client have as many requests: what a client remembers, and the "
    "outcomes that are kept until the end of a bulk, fill the caches of the machine at any width. One or two "
    "at once cost more with any client: the process falls asleep before each response, and the event loop goes "
    "round for each response alone."
)


def measure(run: Run) -> Measured:
    """Measure our client and the fastest other one at all widths, and the rest at a few in the full run."""
    widths = run.of(FEW, WIDTHS)
    with canned_service() as address:
        pairs = several_times(run.of(1, 5), lambda: _pairs((OURS, AIOHTTP), widths, address, REQUESTS, 3))
        pairs |= _pairs((HTTPX, GENERATED), FEW, address, FEW_REQUESTS, run.of(0, 2))
        with contender(OURS, address) as ours:
            times = {width: ours.call("percentiles", REQUESTS, width) for width in widths}
    together = [width for width in widths if width >= TOGETHER]
    flat = {
        (name, some[0]): flatness([pair.relative for pair in pairs[name, width]] for width in some)
        for name, some in product((OURS, AIOHTTP), (widths, together))
    }
    goal = f"CPU a request, {widths[0]} to {widths[-1]} wide: highest / lowest"
    note = (
        f"{AIOHTTP}: {flat[AIOHTTP, 1]:.2f}; from {TOGETHER} wide on: {flat[OURS, TOGETHER]:.2f}, "
        f"{AIOHTTP}: {flat[AIOHTTP, TOGETHER]:.2f}"
    )
    return Measured(
        goals=[at_most(goal, 1.1, flat[OURS, 1], note=note)],
        tables=[
            _table("CPU us a request", widths, pairs, lambda pair: pair.cpu),
            _table(f"The same, by that at {REFERENCE} wide", widths, pairs, lambda pair: pair.relative),
            _table("Quota IDs a second", widths, pairs, lambda pair: pair.ids),
            Table(
                "Milliseconds a request of sampling_async takes",
                ("requests at once", *times[widths[0]]),
                [(width, *found.values()) for width, found in times.items()],
            ),
        ],
        samples={
            "percentiles_ms": times,
            "pairs": {name: {at: pairs[name, at] for at in widths if pairs.get((name, at))} for name in PEERS},
        },
        notes=[NOTE],
    )


def _pairs(
    names: Iterable[str], widths: Iterable[int], address: Address, requests: int, rounds: int
) -> dict[tuple[str, int], list[Paired]]:
    """Take pairs of each client at each width, each client in its own process."""
    with ExitStack() as stack:
        clients = {name: stack.enter_context(contender(name, address)) for name in names}
        takers = {
            (name, width): partial(_pair, clients[name], requests, width)
            for name, width in product(clients, widths)
        }
        return interleaved(takers, rounds)


def _pair(client: Remote, requests: int, width: int) -> Paired:
    sample: Sample = client.call("bulk", requests, width)
    after: Sample = client.call("bulk", requests, REFERENCE)
    return Paired.of(sample, requests, after, requests)


def _table(
    title: str,
    widths: Iterable[int],
    pairs: Mapping[tuple[str, int], list[Paired]],
    value: Callable[[Paired], float],
) -> Table:
    table = Table(title, ("requests at once", *PEERS))
    for width in widths:
        cells = [pairs.get((name, width), []) for name in PEERS]
        table.rows.append((width, *(str(Spread.of(map(value, cell))) if cell else "" for cell in cells)))
    return table
