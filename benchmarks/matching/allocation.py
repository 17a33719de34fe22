"""The value of allocations beside the optimum, which a linear programme bounds, and their speed beside `TopK`.

    python benchmarks/matching/allocation.py [--members N] [--quotas N] [--kind KIND] [--speed]

Five kinds of instance: places are scarce; places are plenty; one quota fits everybody; surveys of many quotas;
recontact lists. For each kind, the panel is matched, all pairs go into a linear programme (scipy, HiGHS), and
its solution is the bound: no allocation can be worth more. `TopK` is counted as what becomes of it: each quota
takes members until it is full.

With --speed, CPU time of a panel of a million members by 8,000 quotas, in turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from attrs import evolve
from scipy import sparse
from scipy.optimize import linprog

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from matching.inventories import inventory
from matching.panels import panel
from sampling_async.matching import Allocate, PanelMatcher, QuotaIndex, TopK

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from sampling_async import Quotas

PER_MEMBER: Final = 5
SLOTS: Final = {"scarce": 0.25, "plenty": 4.0, "one fits all": 0.7, "many sub-quotas": 1.0, "recontact": 0.7}
"""The kinds, and how many places there are for each that the members can take."""

MILLION: Final = 1_000_000
ROUNDS: Final = 3
LISTED: Final = 0.02
POSSIBLE: Final = 0.5


class Instance(NamedTuple):
    """A panel and an index, and what an invite is worth and how many there can be, by quota ID."""

    index: QuotaIndex
    panel: pa.Table
    values: dict[int, float]
    rooms: dict[int, int]
    survey_rooms: dict[int, int]


class Pairs(NamedTuple):
    """All pairs of an instance: the member and the quota of each by their places, and its worth."""

    members: NDArray[np.int64]
    quotas: NDArray[np.int64]
    worth: NDArray[np.float64]
    surveys: NDArray[np.int64]


def instance(kind: str, members: int, quotas: int, seed: int = 5) -> Instance:
    """Return an instance of a kind."""
    random, rng = Random(seed), np.random.default_rng(seed)
    quotas_a_survey = 4
    offered = inventory(quotas // quotas_a_survey, seed=seed)
    if kind == "one fits all":
        offered = _with_one_for_all(offered)
    if kind == "many sub-quotas":
        offered = _in_few_surveys(offered)
    if kind == "recontact":
        offered = evolve(
            offered,
            surveys=tuple(
                evolve(survey, is_survey_recontact=random.random() < 0.3) for survey in offered.surveys
            ),
        )
    people = panel(members, seed=seed).read_all()
    index = QuotaIndex(offered)
    codes = people.column("member_code").to_pylist()
    for survey in offered.surveys:
        for quota in survey.quotas:
            if survey.is_survey_recontact:
                index.recontact(quota.quota_id, random.sample(codes, max(1, int(LISTED * len(codes)))))
    ids = [quota.quota_id for survey in offered.surveys for quota in survey.quotas]
    values = {
        quota.quota_id: float(survey.price.amount) * max(survey.ir, 1) / 100
        for survey in offered.surveys
        for quota in survey.quotas
    }
    sizes = rng.pareto(1.5, len(ids)) + 0.2
    sizes *= members * PER_MEMBER * SLOTS[kind] / sizes.sum()
    rooms = {quota_id: max(1, round(size)) for quota_id, size in zip(ids, sizes.tolist(), strict=True)}
    if kind == "one fits all":
        rooms[ids[0]] = members // 3
        values[ids[0]] = 1.2 * max(values.values())
    survey_rooms: dict[int, int] = {}
    for survey in offered.surveys:
        total = sum(rooms[quota.quota_id] for quota in survey.quotas)
        survey_rooms[survey.survey_id] = max(1, int(0.8 * total))
    return Instance(index, people, values, rooms, survey_rooms)


def _with_one_for_all(offered: Quotas) -> Quotas:
    first = offered.surveys[0]
    quota = evolve(first.quotas[0], layers=())
    return evolve(offered, surveys=(evolve(first, quotas=(quota,)), *offered.surveys[1:]))


def _in_few_surveys(offered: Quotas) -> Quotas:
    """Join surveys, so that each has forty quotas."""
    joined = []
    for start in range(0, len(offered.surveys), 10):
        some = offered.surveys[start : start + 10]
        joined.append(evolve(some[0], quotas=tuple(quota for survey in some for quota in survey.quotas)))
    return evolve(offered, surveys=tuple(joined))


def pairs_of(case: Instance) -> Pairs:
    """Return all pairs, as `TopK` without a limit finds them."""
    ids = np.array(sorted(case.values))
    whole = PanelMatcher(case.index, TopK(len(ids), one_per_survey=False)).run(case.panel).read_all()
    members, found, is_certain = flat(whole)
    quotas = np.searchsorted(ids, found)
    of_quota = {quota.quota_id: survey.survey_id for survey, quota in _quotas(case.index)}
    surveys = np.array([of_quota[quota_id] for quota_id in ids.tolist()])
    value = np.array([case.values[quota_id] for quota_id in ids.tolist()])[quotas]
    return Pairs(members, quotas, value * np.where(is_certain, 1.0, POSSIBLE), surveys)


def _quotas(index: QuotaIndex) -> Iterator[tuple[Any, Any]]:
    for _, target in index.quota_ids.compiled():
        yield target.survey, target.quota


def flat(table: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return the member, the quota ID and the certainty of each pair of an output."""
    lists = table.column("quota_ids").combine_chunks()
    ends = lists.offsets.to_numpy()
    member = np.repeat(np.arange(len(table)), np.diff(ends))
    place = np.arange(len(member)) - ends[member]
    return member, lists.flatten().to_numpy(), place < table.column("certain").to_numpy()[member]


def bound(case: Instance, pairs: Pairs) -> float:
    """Return the value of the best fractional allocation."""
    ids = sorted(case.values)
    survey_ids, survey = np.unique(pairs.surveys, return_inverse=True)
    count = len(pairs.members)
    column = np.arange(count)

    def grouped(rows: NDArray[np.int64], size: int) -> Any:
        return sparse.csr_matrix((np.ones(count), (rows, column)), (size, count))

    both = pairs.members * len(survey_ids) + survey[pairs.quotas]
    _, of_both, times = np.unique(both, return_inverse=True, return_counts=True)
    several = np.flatnonzero(times > 1)
    limits = [
        (grouped(pairs.members, len(case.panel)), np.full(len(case.panel), PER_MEMBER)),
        (grouped(pairs.quotas, len(ids)), np.array([case.rooms[quota_id] for quota_id in ids])),
        (
            grouped(survey[pairs.quotas], len(survey_ids)),
            np.array([case.survey_rooms[survey_id] for survey_id in survey_ids.tolist()]),
        ),
        (grouped(of_both, len(times))[several], np.ones(len(several))),
    ]
    solved = linprog(
        -pairs.worth,
        A_ub=sparse.vstack([rows for rows, _ in limits]).tocsr(),
        b_ub=np.concatenate([most for _, most in limits]),
        bounds=(0, 1),
        method="highs-ipm" if count > 200_000 else "highs",
    )
    if solved.fun is None:
        raise RuntimeError(solved.message)
    return -float(solved.fun)


def worth(case: Instance, table: pa.Table) -> float:
    """Return what an output is worth: each quota and each survey takes members until it is full."""
    of_quota = {quota.quota_id: survey.survey_id for survey, quota in _quotas(case.index)}
    rooms, survey_rooms, total = dict(case.rooms), dict(case.survey_rooms), 0.0
    taken: set[tuple[int, int]] = set()
    for member, quota_id, is_certain in zip(*(each.tolist() for each in flat(table)), strict=True):
        survey_id = of_quota[quota_id]
        if rooms[quota_id] and survey_rooms[survey_id] and (member, survey_id) not in taken:
            rooms[quota_id] -= 1
            survey_rooms[survey_id] -= 1
            taken.add((member, survey_id))
            total += case.values[quota_id] * (1.0 if is_certain else POSSIBLE)
    return total


def main() -> None:
    """Print a line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--members", type=int, default=10_000)
    parser.add_argument("--quotas", type=int, default=600)
    parser.add_argument("--kind", choices=list(SLOTS))
    parser.add_argument("--speed", action="store_true", help="only the speed")
    options = parser.parse_args()
    for kind in [] if options.speed else [options.kind] if options.kind else SLOTS:
        case = instance(kind, options.members, options.quotas)
        pairs = pairs_of(case)
        began = time.perf_counter()
        most = bound(case, pairs)
        seconds = time.perf_counter() - began
        output = Allocate(
            PER_MEMBER, room=case.rooms, survey_room=case.survey_rooms, value=case.values, possible=POSSIBLE
        )
        allocated = PanelMatcher(case.index, output).run(case.panel).read_all()
        asked = len(flat(allocated)[0])
        found = worth(case, allocated)
        best = worth(case, PanelMatcher(case.index, TopK(PER_MEMBER)).run(case.panel).read_all())
        print(
            f"{kind}: {len(case.panel):,} members x {len(case.values):,} quotas, {len(pairs.members):,} pairs: "
            f"Allocate {found / most:.4f} of the bound with {asked:,} invites, TopK({PER_MEMBER}) "
            f"{best / most:.4f} with {PER_MEMBER * len(case.panel):,}; bound {most:,.0f} in {seconds:.0f} s",
            flush=True,
        )
    if options.speed:
        speed()


def speed() -> None:
    """Print the pairs a second of a large panel, for `Allocate` (both passes) and for `TopK`."""
    index = QuotaIndex(inventory(2_000))
    people = panel(MILLION).read_all()
    room = dict.fromkeys(index.quota_ids, MILLION * PER_MEMBER // len(index.quota_ids))
    outputs = {"Allocate(5)": Allocate(PER_MEMBER, room=room), "TopK(5)": TopK(5), "TopK(20)": TopK(20)}
    seconds: dict[str, list[float]] = {name: [] for name in outputs}
    for _ in range(ROUNDS):
        for name, output in outputs.items():
            matcher = PanelMatcher(index, output)
            began = time.process_time()
            for _batch in matcher.run(people):
                pass
            seconds[name].append(time.process_time() - began)
    pairs = MILLION * len(index.quota_ids)
    for name, each in seconds.items():
        print(f"{name}: {pairs / median(each) / 1e6:,.0f} million pairs a second ({median(each):.1f} s)")


if __name__ == "__main__":
    main()
