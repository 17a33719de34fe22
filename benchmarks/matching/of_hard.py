"""The cost of matching with the inventories of `hard.py`: first and later members, building, and a panel."""

from __future__ import annotations

import gc
import statistics
import time
from typing import TYPE_CHECKING, Any, Final

from scoreboard.board import Row, at_least, at_most, published
from speed.remote import fresh

from matching import hard
from matching.by_hand import ByHand, agree, cpu
from sampling_async import Quotas, from_json, to_json
from sampling_async.matching import Counts, PanelMatcher, QuotaIndex

if TYPE_CHECKING:
    from collections.abc import Iterator

WARM: Final = 3000
TIMED: Final = 3000
BY_HAND: Final = 20
BUILT: Final = 5
MEMBERS: Final = 200_000
RUNS: Final = 5
TOP: Final = 20


def of_members() -> Iterator[Row]:
    """Yield the rows of members."""
    yield from _of_members("hard", built=1.5, first=50)
    yield from _of_members("crossed", built=1.2, first=20)


def _of_members(kind: str, *, built: float, first: int) -> Iterator[Row]:
    taken: dict[str, Any] = fresh(members, kind)
    index, at_first, later = taken["quotas"], taken["seconds"][:first], taken["seconds"][WARM:]
    yield at_most(
        f"{kind} inventory: building the index of {index:,} quotas",
        built,
        statistics.median(taken["built"]),
        unit="s",
    )
    yield at_most(
        f"the same: the first {first} members after building: the longest",
        10.0,
        1e3 * max(at_first),
        unit="ms",
        note=f"median {1e3 * statistics.median(at_first):.1f} ms",
    )
    yield at_most(
        f"the same: a member after {WARM:,} others: median",
        3.0,
        1e3 * statistics.median(later),
        unit="ms",
        note=f"99th percentile {1e3 * statistics.quantiles(later, n=100)[98]:.1f} ms",
    )


def of_panel() -> Iterator[Row]:
    """Yield the rows of a panel."""
    taken: dict[str, Any] = fresh(panel)
    pairs = MEMBERS * taken["quotas"] / 1e6
    name = f"hard inventory: panel of {MEMBERS:,} members, both values, counts: million pairs a second"
    yield at_least(name, 400.0, pairs / statistics.median(taken["runs"]))
    yield published(
        "the same, with the making of the matcher and its plan",
        pairs / (taken["plan"] + statistics.median(taken["runs"])),
        note=f"which takes {taken['plan']:.1f} s, once for an inventory",
    )


def members(kind: str) -> dict[str, Any]:
    """Return the CPU seconds of building and of members."""
    quotas = decoded(kind)
    built: list[float] = []
    for _ in range(BUILT):
        index = None
        gc.collect()
        started = time.process_time()
        index = QuotaIndex(quotas)
        built.append(time.process_time() - started)
    assert index is not None
    people = list(hard.members(WARM + TIMED))
    seconds = [cpu(lambda: index.match(profile).select(TOP)) for profile in people]  # noqa: B023  at once
    agree(index, ByHand(quotas), people[:BY_HAND])
    return {"quotas": len(index), "built": built, "seconds": seconds}


def panel() -> dict[str, Any]:
    """Return the CPU seconds of making the plan for a panel, and of matching it."""
    index = QuotaIndex(decoded("hard"))
    batches = list(hard.panel(MEMBERS))
    few = batches[0].slice(0, 100)
    started = time.process_time()
    matcher = PanelMatcher(index, Counts())
    (counts,) = matcher.map_batches([few])
    plan = time.process_time() - started
    matched = [index.match(profile) for profile in hard.profiles(few)]
    assert sum(counts.column("certain").to_pylist()) == sum(len(each.certain) for each in matched)
    assert sum(counts.column("possible").to_pylist()) == sum(len(each.possible) for each in matched)
    runs = [cpu(lambda: list(matcher.map_batches(iter(batches)))) for _ in range(RUNS)]
    return {"quotas": len(index), "plan": plan, "runs": runs}


def decoded(kind: str) -> Quotas:
    """Return an inventory as the client decodes it from a response."""
    quotas = hard.crossed_inventory() if kind == "crossed" else hard.inventory()
    return from_json(Quotas, to_json(quotas))
