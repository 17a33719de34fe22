"""The cost of a request by the number of concurrent requests."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Final

from scoreboard.board import at_most

from speed.canned_server import canned_service
from speed.contenders import AIOHTTP, GENERATED, HTTPX, OURS, PEERS, contender
from speed.measuring import Measured, Paired, Spread, Table, flatness, interleaved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from scoreboard.board import Run

    from speed.measuring import Sample
    from speed.remote import Remote

WIDTHS: Final = (1, 2, 8, 32, 64, 128, 256, 512)
FEW: Final = (1, 8, 64)
REFERENCE: Final = 64
NOTE: Final = (
    f"Each sample is followed at once by one of the same client that is {REFERENCE} wide. The goal is about "
    "the ratios within these pairs: a machine changes its speed from one second to the next, and both of "
    "a pair meet the same."
)


def measure(run: Run) -> Measured:
    """Measure our client and the fastest other one at all widths, and the rest at a few in the full run."""
    widths = run.of(FEW, WIDTHS)
    with canned_service() as address, ExitStack() as stack:
        clients = {name: stack.enter_context(contender(name, address)) for name in PEERS}

        def takers(names: Iterable[str], at: Iterable[int]) -> dict[tuple[str, int], Callable[[], Paired]]:
            return {(name, width): partial(_pair, clients[name], width) for name, width in product(names, at)}

        pairs = interleaved(takers((OURS, AIOHTTP), widths), run.of(3, 11))
        pairs |= interleaved(takers((HTTPX, GENERATED), FEW), run.of(0, 2))
        times = {width: clients[OURS].call("percentiles", _requests(width), width) for width in widths}
    flat = {
        name: flatness([pair.relative for pair in pairs[name, width]] for width in widths)
        for name in (OURS, AIOHTTP)
    }
    goal = f"CPU a request, {widths[0]} to {widths[-1]} wide: highest / lowest"
    return Measured(
        goals=[at_most(goal, 1.1, flat[OURS], note=f"{AIOHTTP}: {flat[AIOHTTP]:.2f}")],
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


def _pair(client: Remote, width: int) -> Paired:
    requests, reference = _requests(width), _requests(REFERENCE)
    sample: Sample = client.call("bulk", requests, width)
    after: Sample = client.call("bulk", reference, REFERENCE)
    return Paired.of(sample, requests, after, reference)


def _requests(width: int) -> int:
    """Return the number of requests in a sample: few, so that a pair is short, but two for each slot."""
    return max(150, 2 * width)


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
