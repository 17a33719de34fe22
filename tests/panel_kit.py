"""Quotas in short, strategies that generate them, members as tables, and campaigns for them."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable
from contextlib import asynccontextmanager, closing, contextmanager
from datetime import UTC, datetime
from functools import cache
from operator import index
from typing import TYPE_CHECKING

import pyarrow as pa
from attrs import asdict, evolve
from hypothesis import strategies as st

from sampling_async import Layer, Price, QuestionAndAnswers, Quota, SubQuota, Survey
from sampling_async.campaign import Campaign, CampaignComparison, Summary
from sampling_async.campaign._campaign import with_ledger
from sampling_async.campaign._inventory_page import inventory_page
from sampling_async.campaign._ledger import CampaignLedger
from sampling_async.campaign._report import comparison_page, report
from sampling_async.matching import (
    Allocate,
    Counts,
    MatchPolicy,
    PanelMatcher,
    QuestionKinds,
    QuotaIndex,
    Truth,
    _index,
)
from sampling_async.matching.panel import _allocate, _files, _matcher, _sample
from sampling_async.simulator import AGE_BANDS, Simulator, generate_inventory, generate_members

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator
    from pathlib import Path

    from sampling_async import SamplingClient


# --- Quotas and members


AGE, POSTAL, DMA, MSA, GENDER, OTHER = 1001538, 1001042, 1001568, 1001569, 1001007, 1009999
MALE, FEMALE = 2000247, 2000246
NOW = datetime(2026, 1, 15, tzinfo=UTC)
NO, POSSIBLE, CERTAIN = Truth
KINDS = QuestionKinds.default().with_age(AGE, {11: (18, 24), 12: (25, 99)})

PARTICIPATIONS = pa.list_(pa.struct([(name, pa.int64()) for name in ("survey_id", "wave_id", "status_id")]))


def row(question_id: int, *answers: int | str, routable: bool = False) -> QuestionAndAnswers:
    return QuestionAndAnswers(
        question_id,
        tuple(one for one in answers if isinstance(one, int)),
        tuple(one for one in answers if isinstance(one, str)),
        routable,
    )


def sub_quota(*rows: QuestionAndAnswers, full: bool = False) -> SubQuota:
    return SubQuota(1, 10 if full else 0, 10, rows)


def quota(*layers: list[SubQuota], quota_id: int = 7, remaining: int = 5) -> Quota:
    return Quota(quota_id, 10, remaining, tuple(Layer(1, tuple(layer)) for layer in layers))


def survey(*quotas: Quota, survey_id: int = 3, **changes) -> Survey:
    whole = Survey(survey_id, 1, 10, 30, 1, NOW, (1, 2, 3), False, 10, 5, Price(1.0, 1), quotas)
    return evolve(whole, **changes)


def panel_of(profiles, **columns) -> pa.Table:
    """Return members as a table; a column has lists if one of its answers is a list."""
    members = list(profiles)
    questions = {question_id for profile in members for question_id in profile}
    made = {str(id_): pa.array(_column([each.get(id_) for each in members])) for id_ in questions}
    for name, column in columns.items():
        made[name] = column if isinstance(column, pa.Array) else pa.array(column)
    return pa.table(made) if made else pa.table({"nothing": pa.nulls(len(members))})


def _column(answers):
    plain = [_plain(answer) for answer in answers]
    values = [one for answer in plain for one in (answer if isinstance(answer, list) else [answer])]
    if any(isinstance(one, str) for one in values):  # a column has one type
        plain = [_plain(answer, str) for answer in answers]
    if any(isinstance(answer, list) for answer in plain):
        return [answer if isinstance(answer, list) or answer is None else [answer] for answer in plain]
    return plain


def _plain(answer, kind=None):
    if answer is None:
        return None
    if isinstance(answer, Iterable) and not isinstance(answer, str):
        return [_plain(one, kind) for one in answer]
    return kind(answer) if kind else answer if isinstance(answer, str) else index(answer)


answers = st.integers(1, 4)
rows = st.one_of(
    st.builds(
        lambda q, ids, r: row(q, *ids, routable=r), st.sampled_from([1, 2, 3]), st.sets(answers), st.booleans()
    ),
    st.builds(
        lambda values, r: row(AGE, *values, routable=r),
        st.lists(st.sampled_from(["18-24", "20-30", "31-99", "65+", "40"]), max_size=3),
        st.booleans(),
    ),
    st.builds(lambda ids: row(AGE, *ids), st.sets(st.sampled_from([11, 12, 13]))),
    st.builds(
        lambda values: row(POSTAL, *values),
        st.lists(st.sampled_from(["1", "10", "101", "2", "a b", ""]), max_size=3) | st.just(["10101"] * 1000),
    ),
    st.builds(lambda values: row(DMA, *values), st.lists(st.sampled_from(["1", "2", "x"]), max_size=2)),
    st.builds(lambda value: row(4, value), st.sampled_from(["1", "2"])),
)
sub_quotas = st.builds(
    lambda rows, full: sub_quota(*rows, full=full), st.lists(rows, max_size=3), st.booleans()
)
layers = st.lists(sub_quotas, max_size=4)
quota_lists = st.lists(st.lists(layers, max_size=3), min_size=1, max_size=6)
profiles = st.fixed_dictionaries(
    {},
    optional={
        1: answers | st.sets(answers, max_size=3),
        2: answers | st.lists(answers, max_size=2),
        3: answers,
        4: answers,
        AGE: st.integers(0, 120),
        POSTAL: st.sampled_from(["10101", "1", "20000", "ab1"]),
        DMA: st.sampled_from([1, 2, "3"]),
    },
)
policies = st.builds(
    MatchPolicy,
    subquota_rule=st.sampled_from(["exactly_one", "at_least_one"]),
    missing=st.sampled_from(["routable", "possible", "no"]),
    truncated_postal=st.sampled_from(["possible", "no"]),
    full=st.sampled_from(["blocks", "ignored"]),
)


def surveys_compiled(monkeypatch) -> list[int]:
    """Return a list that gets the number of surveys of each part that an index compiles."""
    compiled: list[int] = []
    part = _index.CompiledPart

    def counted(surveys, *others):
        surveys = list(surveys)
        compiled.append(len(surveys))
        return part(surveys, *others)

    monkeypatch.setattr(_index, "CompiledPart", counted)
    return compiled


def truth(profile, asked: Quota, *, kinds: QuestionKinds = KINDS, **policy) -> Truth:
    """Return the result for a quota; the index, the reference and a panel of one member must agree."""
    index = QuotaIndex([survey(asked)], kinds=kinds, policy=MatchPolicy(**policy))
    matched = index.match(profile)
    found = CERTAIN if matched.certain else POSSIBLE if matched.possible else NO
    assert found == index.explain(profile, asked.quota_id).truth
    assert (len(matched.certain), len(matched.possible)) == (found == CERTAIN, found == POSSIBLE)
    (counted,) = PanelMatcher(index, Counts()).run(panel_of([profile])).read_all().to_pylist()
    assert (counted["certain"], counted["possible"]) == (found == CERTAIN, found == POSSIBLE)
    return found


def of_row(answer, asked: QuestionAndAnswers, **policy) -> Truth:
    profile = {} if answer is None else {asked.question_id: answer}
    return truth(profile, quota([sub_quota(asked)]), **policy)


A, B = row(OTHER, 1), row(OTHER, 2)
ASKED = row(1008888, 1, routable=True)


def many() -> QuotaIndex:
    surveys = [
        survey(
            quota([sub_quota(A)], quota_id=10 * at, remaining=at),
            quota([sub_quota(ASKED)], quota_id=10 * at + 1, remaining=50 - at),
            quota([sub_quota(A)], quota_id=10 * at + 2, remaining=100 + at),
            survey_id=at,
            device_type_ids=(1,) if at % 2 else (),
            price=Price(at, 1),
        )
        for at in range(1, 6)
    ]
    return QuotaIndex(surveys)


def of_some(*special: Survey) -> list[Survey]:
    """Return surveys of which only a few are special, so that an update does not compile all of them."""
    return [*special, *(survey(quota([sub_quota(ASKED)], quota_id=at), survey_id=at) for at in range(100, 160))]


# --- Panels


AGES = QuestionKinds.default().with_age(AGE, AGE_BANDS)
ALL = quota(quota_id=1)
MEN = quota([sub_quota(row(GENDER, MALE))], quota_id=2)


def divide(monkeypatch, *, rows=None, chunk=None, line_bytes=None, allocated=None, sampled=None) -> None:
    """Divide panels into small pieces, so that tests need no large ones.

    Args:
        monkeypatch: Takes the changes back.
        rows: The members of a piece.
        chunk: The members that are matched at once.
        line_bytes: The bytes that are read at once from lines of JSON.
        allocated: The members that are allocated at once.
        sampled: The members from which prices are learned.
    """
    parts = (
        (_files, "ROWS", rows),
        (_files, "_LINES_BYTES", line_bytes),
        (_matcher, "CHUNK", chunk),
        (_allocate, "_AT_ONCE", allocated),
        (_sample, "PRICE_MEMBERS", sampled),
    )
    for module, name, size in parts:
        if size is not None:
            monkeypatch.setattr(module, name, size)


def read_file(path: str, *names: str, renamed=None, texts=()) -> list[dict]:
    """Return the rows of a panel's file: columns of these names, some of them `renamed`, some read as texts."""
    batches = _files.opened(path, frozenset(names), renamed or {}, frozenset(texts)).batches
    return [row for batch in batches for row in batch.to_pylist()]


def counted(matcher: PanelMatcher, panel) -> dict[int, tuple[int, int]]:
    """Return the certain and possible members of each quota."""
    table = matcher.run(panel).read_all()
    return {one["quota_id"]: (one["certain"], one["possible"]) for one in table.to_pylist()}


def by_index(index: QuotaIndex, matched) -> dict[int, tuple[int, int]]:
    certain = Counter(id_ for each in matched for id_ in each.certain)
    possible = Counter(id_ for each in matched for id_ in each.possible)
    return {id_: (certain[id_], possible[id_]) for id_ in index.quota_ids}


@cache
def generated_panel():
    """Return an index of a generated inventory, and a panel of generated members."""
    index = QuotaIndex(generate_inventory(9, surveys=30), kinds=AGES)
    members = list(generate_members(9, members=400))
    panel = panel_of([each.profile for each in members], member_code=[each.member_code for each in members])
    return index, panel


# --- Campaigns


def table_of(members) -> pa.Table:
    """Return members of a simulator as a panel, with all that the service knows of them."""
    members = list(members)
    taken = [[asdict(each) for each in member.participations] for member in members]
    return panel_of(
        [each.profile for each in members],
        member_code=[each.member_code for each in members],
        device_type=[each.device_type_id for each in members],
        participations=pa.array(taken, PARTICIPATIONS),
    )


def panel_table(sim: Simulator, count: int | None = None) -> pa.Table:
    return table_of(list(sim.members.values())[:count])


def campaign_of(sim: Simulator, client: SamplingClient, folder: Path, **more) -> Campaign:
    """Return a campaign for the panel of a simulator."""
    arguments = {"allocate": Allocate(3), "kinds": AGES, "ledger": folder / "run.ledger", **more}
    panel = arguments.pop("panel", None)
    inventory = arguments.pop("inventory", None)
    return Campaign(client, panel_table(sim) if panel is None else panel, inventory, **arguments)


@asynccontextmanager
async def planned_campaign(
    sim: Simulator, folder: Path, max_concurrency: int = 8, **more
) -> AsyncGenerator[Campaign]:
    """Make a campaign and its plan; its client is open meanwhile."""
    async with sim.client(max_concurrency=max_concurrency) as client:
        campaign = campaign_of(sim, client, folder, **more)
        await campaign.plan()
        yield campaign


def page_of(shown, *more, **options) -> str:
    """Return the page of a summary, of a comparison, or of the surveys of an inventory."""
    page = {Summary: report, CampaignComparison: comparison_page}.get(type(shown), inventory_page)
    return page(shown, *more, **options)


async def all_of(run) -> list:
    """Return all outcomes of a run."""
    async with run:
        return [outcome async for outcome in run]


def forget_command(path: Path) -> None:
    """Leave out of a ledger how it was planned, as another program that made it does."""
    with_ledger(path, lambda ledger: ledger.note(command="{}"))


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold a ledger as a run in another process does."""
    ledger = CampaignLedger(path)
    ledger.lock()
    try:
        yield
    finally:
        ledger.close()


def holds(sim: Simulator, summary, outcomes=()) -> None:
    """Check that a ledger adds up, and agrees with the simulator's to the last pair."""
    pairs = summary.pairs
    assert pairs.planned == (
        pairs.invited + pairs.rejected + pairs.not_sent + pairs.unknown + pairs.skipped + pairs.pending
    )
    invites = Counter(sim.ledger.by_pair())
    assert all(count == 1 for count in invites.values()), "a pair was invited twice"
    assert pairs.invited <= invites.total() <= pairs.invited + pairs.unknown
    verdict = sim.ledger.check(outcomes)
    if outcomes:
        assert verdict.ok, verdict


def sql(path, query, *values) -> list[tuple]:
    """Run a statement on a ledger, beside its campaign; return the rows."""
    with closing(sqlite3.connect(path)) as database, database:
        return database.execute(query, values).fetchall()
