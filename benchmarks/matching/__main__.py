"""Measure the cost of matching, and write a page about it.

    python benchmarks/matching [--only members|panel|planning] [--output DIR]

The script writes `matching.md` and `matching.json`. The exit code is 1 if a goal was missed. Needs the
dependency groups `bench` and `tests`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

HERE: Final = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # there, the modules of this folder are a package

from attrs import evolve  # noqa: E402
from scoreboard.board import (  # noqa: E402
    Row,
    Run,
    at_most,
    beginning,
    ended,
    header,
    met,
    shown,
    table,
    told,
    written,
)
from speed.measuring import interleaved  # noqa: E402

from matching import of_hard  # noqa: E402
from matching.by_hand import ByHand, agree, cpu  # noqa: E402
from matching.inventories import inventory, members  # noqa: E402
from matching.of_panel import of_panel  # noqa: E402
from matching.of_planning import of_planning  # noqa: E402
from sampling_async import Quotas, from_json, to_json  # noqa: E402
from sampling_async._json.fast import KnownSurveys  # noqa: E402
from sampling_async._json.inventory import Inventory  # noqa: E402
from sampling_async.matching import QuestionKinds, QuotaIndex  # noqa: E402
from sampling_async.simulator import AGE_BANDS, generate_inventory, generate_members  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

AGE: Final = 1001538
TOP: Final = 20
WARM: Final = 3000
TIMED: Final = 3000
REFRESHES: Final = 40
BY_HAND: Final = 100
ROUNDS: Final = 7
PART: Final = 2**16
REAL_SIZE: Final = 142
LIBRARIES: Final = ("attrs", "msgspec", "numpy", "pyarrow", "polars", "duckdb")
WRITTEN: Final = (
    "Written by `python benchmarks/matching`; every figure was measured in this run: CPU time, one core."
)
ABOUT: Final = """\
The large inventory (`benchmarks/matching/inventories.py`) has two thousand surveys of four quotas, two hundred
questions of which a member has answered thirty, age ranges, postal lists and layers that cross gender with age.
Before anything is timed, a hundred members are held against the matching by hand (`by_hand.py`), each quota.
Members are new to the index when they are timed: what was remembered is of others.

The hard inventory (`hard.py`) has 9,500 quotas with 5.4 distinct conditions each, where real responses have 0.4
to 1.3: subsets of up to sixty answers drawn at random, lists of a thousand random postal codes, any ages. To a
third of its questions, members give several answers at once, which hardly occur twice. Its members are measured
right after building too, as after a refresh. The crossed inventory is like it, but three layers in ten cross
two questions: nine thousand layers with eleven sub-quotas each.

A plan of a campaign (`of_planning.py`) is made of the simulator's members and inventory, with participations in
the panel. Its floor reads the same file, matches it, and writes the same rows with bare statements of SQLite.

Panels (`panels.py`) are of such members too. They are made up as they are read, and that time is left out.
Each figure of `of_panel.py` is taken in a fresh process, and before it three hundred members are held against
the index, each quota. Polars and DuckDB (`by_polars.py`, `by_duckdb.py`) have one thread, answers as columns
and quotas as predicates, written with care and made ready before they are timed; all three count the same.
Where it says wall time, it is that."""


def main() -> int:
    """Measure, print the rows and write the page. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("members", "panel", "planning"), help="a part of it; writes nothing")
    parser.add_argument("--members", type=int, default=300_000, help="members of the campaign that is planned")
    parser.add_argument("--output", type=Path, default=HERE.parent / "results", help="benchmarks/results")
    options = parser.parse_args()
    started = time.perf_counter()
    rows: list[Row] = []
    if options.only in {None, "members"}:
        for measure in (of_many, of_few):
            rows += printed(measure())
        rows += printed(of_hard.of_members())
    if options.only in {None, "panel"}:
        rows += printed(of_panel())
        rows += printed(of_hard.of_panel())
    if options.only in {None, "planning"}:
        rows += printed(of_planning(options.members))
    if options.only:
        return 1 if any(row.met is False for row in rows) else 0
    run = Run("long", seed=1)
    head = header(run, time.perf_counter() - started, HERE.parent.parent, LIBRARIES)
    page = beginning("Matching", WRITTEN, head, rows)
    cells = [(row.name, row.goal, shown(row.ours, row.unit), met(row), row.note) for row in rows]
    page += [*table(("what", "goal", "measured", "met", "note"), cells), "", ABOUT]
    document = json.dumps({"run": head, "figures": [asdict(row) for row in rows]}, indent=1)
    written(options.output, "matching", page, document)
    return ended(head, rows)


def printed(rows: Iterable[Row]) -> Iterator[Row]:
    """Print rows as soon as they are measured."""
    for row in rows:
        print(told(row), flush=True)
        yield row


def of_many() -> list[Row]:
    """Measure an inventory of 8,000 quotas: members, building, a refresh."""
    known = KnownSurveys()  # as in a client
    before = decoded(inventory(), known)
    index = QuotaIndex(before)
    by_hand = ByHand(before)
    people = members(WARM + TIMED)
    agree(index, by_hand, islice(people, BY_HAND))
    for profile in islice(people, WARM - BY_HAND):
        index.match(profile).select(TOP)
    timed = list(people)
    seconds = [cpu(lambda: index.match(profile).select(TOP)) for profile in timed]  # noqa: B023  at once
    hand = [cpu(lambda: top_by_hand(by_hand, profile)) for profile in timed[:BY_HAND]]  # noqa: B023
    found = [index.match(profile) for profile in timed[:500]]
    share = sum(len(each.certain) for each in found), sum(len(each.possible) for each in found)
    percents = [100 * each / len(found) / len(index) for each in share]
    random = Random(5)
    after = decoded(changed(before, random), known)
    others = decoded(after, KnownSurveys())
    runs = (lambda: QuotaIndex(before), lambda: index.updated(after), lambda: index.updated(others))
    built, updated, compared = interleaved({run: partial(settled, run) for run in runs}, ROUNDS).values()
    assert len(index.updated(after)) == len(index)
    latest, refreshes = index, list[float]()
    for _ in range(REFRESHES):
        after = decoded(changed(after, random), known)
        refreshes.append(settled(lambda: latest.updated(after)))  # noqa: B023  at once
        latest = latest.updated(after)
    fresh = QuotaIndex(after)
    for profile in timed[: TIMED // 2]:
        assert fresh.match(profile).select(TOP) == latest.match(profile).select(TOP)
    slower = [
        [cpu(lambda: each.match(profile).select(TOP)) for each in (latest, fresh)]  # noqa: B023  at once
        for profile in timed[TIMED // 2 :]
    ]
    ratio = statistics.median(of_latest / of_fresh for of_latest, of_fresh in slower)
    return [
        at_most(
            f"one member against {len(index):,} quotas, both values, top {TOP}: median",
            1.0,
            1e3 * statistics.median(seconds),
            unit="ms",
            note=f"{percents[0]:.1f} % of pairs certain, {percents[1]:.1f} % possible",
        ),
        at_most("the same: 99th percentile", 2.0, 1e3 * percentile(seconds, 99), unit="ms"),
        Row(
            "the same by hand, with conditions cached per member: median",
            "",
            1e3 * statistics.median(hand),
            None,
            unit="ms",
            note=f"{statistics.median(hand) / statistics.median(seconds):.0f} times as long",
        ),
        at_most(f"building the index of {len(index):,} quotas", 1.2, statistics.median(built), unit="s"),
        at_most("a refresh in which 1 % of surveys changed", 60.0, 1e3 * statistics.median(updated), unit="ms"),
        Row(
            "the same, with all surveys as new objects",
            "",
            1e3 * statistics.median(compared),
            None,
            unit="ms",
            note="read by another client, or the first time",
        ),
        at_most(
            f"{REFRESHES} such refreshes, one after the other: median",
            60.0,
            1e3 * statistics.median(refreshes),
            unit="ms",
            note=f"mean {1e3 * statistics.mean(refreshes):.0f}, longest {1e3 * max(refreshes):.0f} ms; "
            f"one member takes {ratio:.2f} times as long as against a fresh index",
        ),
    ]


def of_few() -> list[Row]:
    """Measure an inventory of the size of a real, published one."""
    surveys: list[Any] = []
    for survey in generate_inventory(7, surveys=100).surveys:
        left = REAL_SIZE - sum(len(each.quotas) for each in surveys)
        surveys.append(evolve(survey, quotas=survey.quotas[:left]))
    few = from_json(Quotas, to_json(Quotas(1, generate_inventory(7, surveys=0).cache_expires, tuple(surveys))))
    index = QuotaIndex(few, kinds=QuestionKinds.default().with_age(AGE, AGE_BANDS))
    people = [member.profile for member in generate_members(7, members=WARM)]
    for profile in people:
        index.match(profile).select(TOP)
    seconds = [cpu(lambda: index.match(profile).select(TOP)) for profile in people]  # noqa: B023  at once
    name = f"one member against {len(index)} generated quotas: median"
    return [at_most(name, 150.0, 1e6 * statistics.median(seconds), unit="us")]


def top_by_hand(by_hand: ByHand, profile: dict[int, Any]) -> list[int]:
    """Select quotas like `MatchResult.select`."""
    selected: list[int] = []
    surveys: set[int] = set()
    for id_, survey_id, _ in sorted(by_hand.match(profile), key=lambda found: -found[2]):
        if survey_id not in surveys and len(selected) < TOP:
            surveys.add(survey_id)
            selected.append(id_)
    return selected


def changed(quotas: Quotas, random: Random) -> Quotas:
    """Return the inventory of a minute later, with one survey in a hundred changed."""
    surveys = list(quotas.surveys)
    for at in random.sample(range(len(surveys)), len(surveys) // 100):
        of_survey = tuple(
            evolve(quota, estimated_completes_remaining=quota.estimated_completes_remaining + 1)
            for quota in surveys[at].quotas
        )
        surveys[at] = evolve(surveys[at], quotas=of_survey)
    return evolve(quotas, surveys=tuple(surveys))


def decoded(quotas: Quotas, known: KnownSurveys) -> Quotas:
    """Return the inventory as from `client.get_quotas()`: unchanged surveys are the same objects."""
    reader, body = Inventory(known), to_json(quotas)
    surveys = [survey for at in range(0, len(body), PART) for survey in reader.feed(body[at : at + PART])]
    surveys += reader.end()
    return evolve(reader.frame(), surveys=tuple(surveys))


def settled(run: Callable[[], object]) -> float:
    """Return the CPU seconds of a run, after a garbage collection for what came before it."""
    gc.collect()
    return cpu(run)


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile."""
    return statistics.quantiles(values, n=100)[percent - 1]


if __name__ == "__main__":
    sys.exit(main())
