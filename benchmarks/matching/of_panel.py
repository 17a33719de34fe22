"""The cost of matching a panel: CPU time, memory, several cores, growth; compared with Polars and DuckDB.

Each figure is measured in its own process, so that it does not include the memory of another.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve
from scoreboard.board import Row, at_least, at_most, published
from speed.measuring import interleaved, peak_mib, ratio, resident_mib
from speed.remote import fresh, remote

from matching.inventories import inventory
from matching.panels import BLOCK, panel, profiles
from sampling_async import Quotas, from_json, to_json
from sampling_async.matching import Counts, PanelMatcher, QuotaIndex, Sample, TopK, Workers

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

SIZES: Final = (10_000, 100_000, 1_000_000, 10_000_000)
MILLION: Final = 1_000_000
OTHERS: Final = 300_000
ROUNDS: Final = 3
BETWEEN: Final = {10_000: 3, 100_000: 8, MILLION: 15}
"""After this many batches of the largest panel, the smaller panels are matched."""
CHECKED: Final = 300
PEER_SIZES: Final = ((8000, 200_000), (1000, 200_000))  # quotas and members
PEER_ROUNDS: Final = 3
CORES_ROUNDS: Final = 15
OUTPUTS: Final = {"counts": Counts(), "top 20": TopK(20), "sample of 100": Sample(100)}


def of_panel() -> Iterator[Row]:
    """Yield the rows."""
    yield from _costs()
    yield from _cores()
    yield from _peers()


def _costs() -> Iterator[Row]:
    fresh(agree)
    with remote(Matched, "counts", MILLION) as million, remote(Matched, "counts", SIZES[-1]) as most:
        seconds = statistics.median(million.call("seconds") for _ in range(ROUNDS))
        most.call("seconds")
        mib, most_mib, quotas = million.call("mib"), most.call("mib"), million.call("quotas")
    name = f"panel of {MILLION:,} members x {quotas:,} quotas, both values, counts"
    yield at_least(f"{name}: million pairs a second", 800.0, MILLION * quotas / seconds / 1e6)
    yield at_most(
        "the same: memory in addition to the panel, which is read in batches",
        300.0,
        mib,
        unit="MiB",
        note="with the matcher and its plan, without the index",
    )
    yield at_most(
        "the same: memory of 10,000,000 by that of 1,000,000 members",
        1.15,
        most_mib / mib,
        note=f"{most_mib:.0f} MiB",
    )
    beside = fresh(growth) | {SIZES[-1]: 1.0}
    yield at_most(
        "the same for 10,000 to 10,000,000 members: the highest cost of a member / the lowest",
        1.15,
        max(beside.values()) / min(beside.values()),
        note="beside one of 10,000,000: " + ", ".join(f"{beside[size]:.2f} of {size:,}" for size in SIZES),
    )
    for output in ("top 20", "sample of 100"):
        with remote(Matched, output, OTHERS) as other:
            seconds, mib = other.call("seconds"), other.call("mib")
        yield Row(
            f"panel of {OTHERS:,} members, {output}: million pairs a second",
            "",
            OTHERS * quotas / seconds / 1e6,
            None,
            note=f"{mib:.0f} MiB",
        )


def growth() -> dict[int, float]:
    """Match a large panel, and smaller ones at several points in between. Return the cost of their members.

    The cost is relative to that of the large panel's members just before and after, because the clock rate of
    the machine changes. The batch right after a small panel does not count: it has to refill the CPU caches.
    """
    index = QuotaIndex(decoded())
    large, small = PanelMatcher(index), PanelMatcher(index)
    for each in (large, small):
        list(each.map_batches(panel(100)))
    made = _Made()
    costs: list[float] = []  # cost of a member, for each batch of the large panel
    taken: list[tuple[int, int, float]] = []

    def batches() -> Iterator[Any]:
        for batch in panel(SIZES[-1]):
            for size, every in BETWEEN.items():
                if len(costs) % every == every // 2:
                    taken.append((size, len(costs), made.seconds(small, size) / size))
            started = time.process_time()
            yield batch
            costs.append((time.process_time() - started) / len(batch))

    for _ in large.map_batches(batches()):
        pass
    after = {at for _, at, _ in taken}
    beside: dict[int, list[float]] = {size: [] for size in BETWEEN}
    for size, at, cost in taken:
        reach = max(2, size // BLOCK // 2)
        around = [costs[each] for each in range(at - reach, at + reach) if each not in after]
        beside[size].append(cost / statistics.mean(around))
    return {size: statistics.median(found) for size, found in beside.items()}


class Matched:
    """Panels of one size, matched in their own process, so that no memory of other panels is measured."""

    def __init__(self, output: str, members: int) -> None:
        self._index = QuotaIndex(decoded())
        self._members = members
        self._made = _Made()
        list(PanelMatcher(self._index).map_batches(panel(100)))  # everything is imported now
        self._before = resident_mib()
        self._matcher = PanelMatcher(self._index, OUTPUTS[output])
        list(self._matcher.map_batches(panel(100)))  # the plan is made now

    def seconds(self) -> float:
        """Return the CPU seconds of matching, without the generation of the panel."""
        return self._made.seconds(self._matcher, self._members)

    def mib(self) -> float:
        """Return the peak of memory."""
        return peak_mib() - self._before

    def quotas(self) -> int:
        """Return the number of quotas."""
        return len(self._index)


class _Made:
    """A panel that is generated while it is read, and the time of the generation."""

    def seconds(self, matcher: PanelMatcher, members: int) -> float:
        """Return the CPU seconds of matching."""
        self._spent = 0.0
        started = time.process_time()
        for _ in matcher.map_batches(self._batches(members)):
            pass
        return time.process_time() - started - self._spent

    def _batches(self, members: int) -> Iterator[Any]:
        batches = iter(panel(members))
        while True:
            started = time.process_time()
            batch = next(batches, None)
            self._spent += time.process_time() - started
            if batch is None:
                return
            yield batch


def agree() -> None:
    """Check that a panel gives the results of the index: a wrong result would make the speed meaningless."""
    index = QuotaIndex(decoded())
    batch = next(iter(panel(CHECKED)))
    matched = [index.match(profile) for profile in profiles(batch)]
    (counts,) = PanelMatcher(index).map_batches([batch])
    certain = Counter(quota_id for each in matched for quota_id in each.certain)
    possible = Counter(quota_id for each in matched for quota_id in each.possible)
    for row in counts.to_pylist():
        assert (row["certain"], row["possible"]) == (certain[row["quota_id"]], possible[row["quota_id"]])
    (best,) = PanelMatcher(index, TopK(20)).map_batches([batch])
    assert best.column("quota_ids").to_pylist() == [list(each.select(20)) for each in matched]


def decoded() -> Quotas:
    """Return the inventory as the client decodes it from a response."""
    return from_json(Quotas, to_json(inventory()))


# --- Several cores


def _cores() -> Iterator[Row]:
    taken = fresh(walls)
    name = f"panel of {MILLION:,} members, counts: wall time of one process by that of two"
    yield _faster(f"{name}, kept from run to run", taken["one"], taken["kept"])
    yield _faster("the same, with a new second process", taken["one"], taken["anew"])
    twice = [2 * each for each in taken["one"]]
    what = "two independent processes with the same work: the limit of the machine"
    yield _faster(what, twice, taken["apart"])
    half = [each / 2 for each in taken["apart"]]
    yield _faster("two kept processes, by what two independent ones give", half, taken["kept"], 0.95)


def _faster(what: str, one: list[float], two: list[float], goal: float | None = None) -> Row:
    times = ratio(one, two)
    note = f"quartiles {times.low:.2f} to {times.high:.2f}; s: {_listed(one)} by {_listed(two)}"
    if goal is None:
        return published(what, times.median, note=note)
    return at_least(what, goal, times.median, note=note)


def _listed(seconds: list[float]) -> str:
    return " ".join(f"{each:.1f}" for each in seconds)


def walls() -> dict[str, list[float]]:
    """Return the wall seconds of one process and of two, for a panel in memory.

    For comparison, two independent processes match one panel each.
    """
    alone = _Alone()
    matcher, table = alone.matcher, alone.table

    def wall(workers: int | Workers) -> float:
        started = time.perf_counter()
        matcher.run(table, workers=workers).read_all()
        return time.perf_counter() - started

    with Workers(2) as kept, remote(_Alone) as other, ThreadPoolExecutor(1) as threads:

        def apart() -> float:
            started = time.perf_counter()
            others = threads.submit(other.call, "match")
            alone.match()
            others.result()
            return time.perf_counter() - started

        assert matcher.run(table, workers=kept).read_all() == matcher.run(table).read_all()
        takers = {
            "one": partial(wall, 1),
            "anew": partial(wall, 2),
            "kept": partial(wall, kept),
            "apart": apart,
        }
        return interleaved(takers, CORES_ROUNDS)


class _Alone:
    """A panel in memory, and its matcher."""

    def __init__(self) -> None:
        self.matcher = PanelMatcher(QuotaIndex(decoded()))
        self.table = panel(MILLION).read_all()
        list(self.matcher.map_batches(panel(100)))

    def match(self) -> None:
        """Match it."""
        self.matcher.run(self.table).read_all()


# --- Comparison with others


def _peers() -> Iterator[Row]:
    os.environ["POLARS_MAX_THREADS"] = "1"  # the processes read it at import
    for quotas, members in PEER_SIZES:
        seconds = _peer_seconds(quotas, members)
        for name, taken in seconds.items():
            speed = statistics.median(quotas * members / each / 1e6 for each in taken)
            times = "" if name == "ours" else f"ours is {ratio(taken, seconds['ours'])} times as fast"
            what = f"{members:,} members x {quotas:,} quotas, both values, counts, by {name}"
            yield Row(f"{what}: million pairs a second", "", speed, None, note=times)


def _peer_seconds(quotas: int, members: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each, after a check that all results are equal."""
    with ExitStack() as stack:
        of = {
            name: stack.enter_context(remote(Contender, name, quotas, members))
            for name in ("ours", "Polars", "DuckDB")
        }
        counts = [each.call("counts") for each in of.values()]
        assert counts[0] == counts[1] == counts[2]
        return interleaved({name: partial(each.call, "seconds") for name, each in of.items()}, PEER_ROUNDS)


class Contender:
    """One way to count a panel, prepared, in its own process."""

    def __init__(self, name: str, number: int, members: int) -> None:
        quotas = decoded()
        table = panel(members).read_all()
        if name == "ours":
            some = tuple(islice(quotas.surveys, number // 4))
            matcher = PanelMatcher(QuotaIndex(evolve(quotas, surveys=some)))
            list(matcher.map_batches(panel(100)))
            self._count = lambda: ours(matcher, table)
        elif name == "Polars":
            import polars as pl  # noqa: PLC0415  in this process only, with one thread

            from matching.by_polars import ByPolars  # noqa: PLC0415

            by_polars, frame = ByPolars(quotas, number), pl.from_arrow(table)
            self._count = lambda: by_polars.counts(frame)
        else:
            from matching.by_duckdb import ByDuckDB  # noqa: PLC0415

            by_duckdb = ByDuckDB(quotas, number)
            self._count = lambda: by_duckdb.counts(table)

    def counts(self) -> list[tuple[int, int, int]]:
        """Return the counts."""
        return sorted(self._count())

    def seconds(self) -> float:
        """Return the CPU seconds of counting."""
        started = time.process_time()
        self._count()
        return time.process_time() - started


def ours(matcher: PanelMatcher, table: pa.Table) -> list[tuple[int, int, int]]:
    """Return the counts in the form of the peers."""
    made = matcher.run(table).read_all()
    columns = [made.column(name).to_pylist() for name in ("quota_id", "certain", "possible")]
    return list(zip(*columns, strict=True))
