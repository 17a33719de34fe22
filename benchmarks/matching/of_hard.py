"""The cost of matching with the inventory of `hard.py`: the first members, later ones, building and a panel."""

from __future__ import annotations

import gc
import statistics
import time
from typing import TYPE_CHECKING, Any, Final

from scoreboard.board import Row, at_least, at_most, published
from speed.remote import fresh

from matching import hard
from matching.by_hand import CERTAIN, POSSIBLE, ByHand
from sampling_async import Quotas, from_json, to_json
from sampling_async.matching import Counts, PanelMatcher, QuotaIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIRST: Final = 50
WARM: Final = 3000
TIMED: Final = 3000
BY_HAND: Final = 20
BUILT: Final = 5
MEMBERS: Final = 200_000
RUNS: Final = 5
TOP: Final = 20


def of_members() -> Iterator[Row]:
    """Yield the rows of members."""
    taken: dict[str, Any] = fresh(members)
    index, first, later = taken["quotas"], taken["first"], taken["later"]
    yield at_most(
        f"hard inventory: building the index of {index:,} quotas",
        1.5,
        statistics.median(taken["built"]),
        unit="s",
    )
    yield at_most(
        f"the same: the first {FIRST} members after building: the longest",
        10.0,
        1e3 * max(first),
        unit="ms",
        note=f"median {1e3 * statistics.median(first):.1f} ms",
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


def members() -> dict[str, Any]:
    """Return the CPU seconds of building and of members."""
    quotas = decoded()
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
    return {"quotas": len(index), "built": built, "first": seconds[:FIRST], "later": seconds[WARM:]}


def panel() -> dict[str, Any]:
    """Return the CPU seconds of making the plan for a panel, and of matching it."""
    index = QuotaIndex(decoded())
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


def agree(index: QuotaIndex, by_hand: ByHand, people: list[dict[int, Any]]) -> None:
    """Check that both give the same result: a wrong result would make the speed meaningless."""
    for profile in people:
        found, matched = list(by_hand.match(profile)), index.match(profile)
        assert [id_ for id_, _, truth in found if truth == CERTAIN] == list(matched.certain)
        assert [id_ for id_, _, truth in found if truth == POSSIBLE] == list(matched.possible)


def decoded() -> Quotas:
    """Return the inventory as the client decodes it from a response."""
    return from_json(Quotas, to_json(hard.inventory()))


def cpu(run: Callable[[], object]) -> float:
    """Return the CPU seconds of a run."""
    started = time.process_time()
    run()
    return time.process_time() - started
