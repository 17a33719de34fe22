"""Panels: every member as the index says, whatever columns are made of, and however the panel is divided."""

from __future__ import annotations

import os
import pickle
import signal
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from multiprocessing import Pipe, active_children, get_context
from threading import Timer
from types import SimpleNamespace
from unittest import mock

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from attrs import asdict
from hypothesis import given, settings
from hypothesis import strategies as st
from matching_kit import (
    AGE,
    GENDER,
    KINDS,
    MALE,
    OTHER,
    PARTICIPATIONS,
    POSTAL,
    panel_of,
    policies,
    profiles,
    quota,
    quota_lists,
    row,
    sub_quota,
    survey,
)

from sampling_async import InvalidRequestError, InviteRequest, SurveyWaveExclusion
from sampling_async.matching import (
    Counts,
    PanelMatcher,
    Participation,
    QuestionKinds,
    QuotaIndex,
    Sample,
    TopK,
    Workers,
)
from sampling_async.matching.panel import (
    _classes,
    _columns,
    _consecutive,
    _kernel,
    _matcher,
    _plan,
    _rows,
    _workers,
)
from sampling_async.simulator import AGE_BANDS, Simulator, generate_inventory, generate_members

AGES = QuestionKinds.default().with_age(AGE, AGE_BANDS)
ALL = quota(quota_id=1)
MEN = quota([sub_quota(row(GENDER, MALE))], quota_id=2)


def counted(matcher: PanelMatcher, panel) -> dict[int, tuple[int, int]]:
    """Return the certain and possible members of each quota."""
    table = matcher.run(panel).read_all()
    return {one["quota_id"]: (one["certain"], one["possible"]) for one in table.to_pylist()}


def by_index(index: QuotaIndex, matched) -> dict[int, tuple[int, int]]:
    certain = Counter(id_ for each in matched for id_ in each.certain)
    possible = Counter(id_ for each in matched for id_ in each.possible)
    return {id_: (certain[id_], possible[id_]) for id_ in index.quota_ids}


@pytest.fixture
def small_pieces(monkeypatch):
    """Have everything done in so small pieces that there are several of each."""
    monkeypatch.setattr(_matcher, "_ROWS", 5)
    monkeypatch.setattr(_matcher, "CHUNK", 3)
    monkeypatch.setattr(_plan, "TOGETHER", 3)
    monkeypatch.setattr(_kernel, "_AT_ONCE", 2)
    monkeypatch.setattr(_rows, "TOGETHER", 3)
    monkeypatch.setattr(_kernel, "TOGETHER", 3)


# --- Against the index, and so against the reference


@settings(max_examples=250)
@given(quota_lists, st.lists(profiles, min_size=1, max_size=9), policies, st.sampled_from([1, 3, 50]))
def test_a_panel_agrees_with_the_index(of_quotas, members, policy, n):
    quotas = [quota(*each, quota_id=at, remaining=at % 3) for at, each in enumerate(of_quotas)]
    index = QuotaIndex(
        [survey(*quotas[:3], survey_id=1), survey(*quotas[3:], survey_id=2)], kinds=KINDS, policy=policy
    )
    matched = [index.match(profile) for profile in members]
    codes = [f"M{at}" for at in range(len(members))]
    panel = panel_of(members, member_code=codes)
    assert counted(PanelMatcher(index), panel) == by_index(index, matched)
    for one_per_survey in (True, False):
        best = PanelMatcher(index, TopK(n, one_per_survey=one_per_survey)).run(panel).read_all()
        selected = [each.select(n, one_per_survey=one_per_survey) for each in matched]
        assert best.column("member_code").to_pylist() == codes
        assert best.column("quota_ids").to_pylist() == [list(each) for each in selected]
        assert best.column("certain").to_pylist() == [
            sum(id_ in each.certain for id_ in ids) for each, ids in zip(matched, selected, strict=True)
        ]


@pytest.mark.usefixtures("small_pieces")
def test_it_does_so_in_small_pieces_with_devices_participations_lists_and_closed_quotas():
    simulator = Simulator(seed=11, members=23, surveys=40)
    index = QuotaIndex(simulator.inventory, kinds=AGES)
    members = list(simulator.members.values())
    index.close(next(iter(index.quota_ids)))
    listed = index.quota_ids[3]
    index.recontact(listed, [member.member_code for member in members[::2]])
    taken = [[3, *(survey_id for survey_id in range(at % 4))] for at in range(len(members))]
    matched = [
        index.match(
            member.profile,
            device_type=member.device_type_id,
            participations=member.participations,
            exclude_surveys=excluded,
            member_code=member.member_code,
        )
        for member, excluded in zip(members, taken, strict=True)
    ]
    panel = panel_of(
        [member.profile for member in members],
        member_code=[member.member_code for member in members],
        device_type=[member.device_type_id for member in members],
        exclude_surveys=taken,
        participations=pa.array(
            [[asdict(participation) for participation in member.participations] for member in members],
            type=PARTICIPATIONS,
        ),
    )
    assert sum(len(member.participations) for member in members) > 10
    assert counted(PanelMatcher(index), panel) == by_index(index, matched)
    best = PanelMatcher(index, TopK(7)).run(panel).read_all()
    assert best.column("quota_ids").to_pylist() == [list(each.select(7)) for each in matched]


@pytest.mark.parametrize("codes", [255, 1], ids=["few classes", "many classes"])
@pytest.mark.parametrize("cost", [0, 40, 10**6], ids=["looked up", "whichever takes least", "put together"])
def test_it_does_so_however_rows_are_made(monkeypatch, cost, codes):
    monkeypatch.setattr(_plan, "_LOOKED_UP", cost)
    for module in (_classes, _plan, _kernel, _columns):
        monkeypatch.setattr(module, "MOST_CODES", codes)
    index = QuotaIndex(generate_inventory(6, surveys=40), kinds=AGES)
    members = [member.profile for member in generate_members(6, members=333)]
    # Lists of answers and single ones are read apart.
    single = [
        {id_: answer for id_, answer in each.items() if isinstance(answer, int | str)} for each in members
    ]
    for some in (members, single, [{}], single[:64]):
        matched = [index.match(profile) for profile in some]
        assert counted(PanelMatcher(index), panel_of(some)) == by_index(index, matched)


def test_what_one_wave_of_a_survey_excludes_another_one_may_not():
    exclusion = SurveyWaveExclusion(9, 0, (9,))
    index = QuotaIndex(
        [
            survey(quota(quota_id=1), survey_id=1, wave_id=1, survey_wave_exclusions=(exclusion,)),
            survey(quota(quota_id=2), survey_id=1, wave_id=2),
            survey(quota(quota_id=3), survey_id=2),
        ]
    )
    took = Participation(9, 4)
    one = pa.table({"member_code": ["a"], "participations": pa.array([[asdict(took)]], PARTICIPATIONS)})
    assert counted(PanelMatcher(index), one) == by_index(index, [index.match({}, participations=[took])])
    best = PanelMatcher(index, TopK(5)).run(one).read_all()
    assert best.column("quota_ids").to_pylist() == [[2, 3]]
    of_one = pa.table({"exclude_surveys": [[1, 7]]})
    assert counted(PanelMatcher(index), of_one) == {1: (0, 0), 2: (0, 0), 3: (1, 0)}


def test_an_updated_index_is_matched_with_as_a_whole():
    first = [survey(MEN, survey_id=1), *(survey(quota(quota_id=at), survey_id=at) for at in range(10, 30))]
    index = QuotaIndex(first).updated([survey(ALL, survey_id=1), *first[2:]])
    matched = index.match({GENDER: MALE})
    assert counted(PanelMatcher(index), panel_of([{GENDER: MALE}])) == by_index(index, [matched])
    assert 10 not in counted(PanelMatcher(index), panel_of([{GENDER: MALE}]))


def test_a_question_without_a_column_was_not_answered():
    index = QuotaIndex([survey(MEN, quota([sub_quota(row(OTHER, 1, routable=True))], quota_id=3))])
    panel = pa.table({"member_code": ["a", "b"]})
    assert counted(PanelMatcher(index), panel) == {2: (0, 0), 3: (0, 2)}
    assert PanelMatcher(index).questions == (GENDER, OTHER)


def test_an_empty_panel_and_an_empty_inventory_come_to_nothing():
    index = QuotaIndex([survey(MEN)])
    somebody = panel_of([{GENDER: MALE}], member_code=["a"])
    nobody = somebody.slice(0, 0)
    assert counted(PanelMatcher(QuotaIndex([])), somebody) == {}
    assert PanelMatcher(QuotaIndex([]), TopK(3)).run(somebody).read_all().to_pylist() == [
        {"member_code": "a", "quota_ids": [], "certain": 0}
    ]
    assert len(PanelMatcher(QuotaIndex([]), Sample(3)).run(somebody).read_all()) == 0
    for output in (Counts(), TopK(3), Sample(3)):
        assert PanelMatcher(index, output).run(nobody).schema == output.schema
    assert counted(PanelMatcher(index), nobody) == {2: (0, 0)}
    assert len(PanelMatcher(index, TopK(3)).run(nobody).read_all()) == 0
    assert len(PanelMatcher(index, Sample(3)).run(nobody).read_all()) == 0


# --- What columns may be made of


def _limits(kind) -> tuple[int, int]:
    limits = np.iinfo(kind.to_pandas_dtype())
    return int(limits.min), int(limits.max)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2, None], pa.int8()),
        pa.array([1, 2, None], pa.uint64()),
        pa.array([1.0, 2.0, float("nan")]),
        pa.array([1.0, 2.0, None], pa.float32()),
        pa.array([1, 2, None]).cast(pa.decimal128(20, 0)),
        pa.array(["1", " 2 ", ""]),
        pa.array(["1", "2", None], pa.large_string()),
        pa.array(["1", "2", None], pa.string_view()),
        pa.array(["1", "2", None]).dictionary_encode(),
        pa.array([1, 2, None]).dictionary_encode(),
        pa.array([1.0, 2.0, None]).dictionary_encode(),
        pa.array([[1], [2, 3], []]),
        pa.array([[1, None], [3, 2], None], pa.large_list(pa.int32())),
        pa.array([["1"], ["2"], [None]]),
        pa.array([[1.0], [2.0], [None]]),
        pa.array([9, 1, 2, None]).slice(1),
        pa.array([[9], [1], [2], None]).slice(1),
        pa.array(["9", "1", "2", None]).dictionary_encode().slice(1),
    ],
    ids=lambda column: str(column.type),
)
@pytest.mark.parametrize("more", [(), (2_000_247,), (2**62,)], ids=["near", "far", "farther"])
def test_answers_are_read_from_whatever_type_they_come_in(column, more):
    rows = {1: row(OTHER, 1), 2: row(OTHER, 2, *more), 8: row(OTHER, 8, routable=True)}
    index = QuotaIndex([survey(*(quota([sub_quota(each)], quota_id=at) for at, each in rows.items()))])
    panel = pa.table({str(OTHER): column})
    assert counted(PanelMatcher(index), panel) == {1: (1, 0), 2: (1, 0), 8: (0, 1)}


_KINDS = [getattr(pa, f"{sign}int{size}")() for sign in ("", "u") for size in (8, 16, 32, 64)]
_EDGES = [0, 1, 100, *(edge + by for kind in _KINDS for edge in _limits(kind) for by in (-2, -1, 0, 1))]
_IDS = range(-(2**63), 2**63)  # what the service's IDs are in


@st.composite
def _columns_of_ids(draw):
    """Return the first of some answer IDs, and a column of such as are near it, and of what else may come."""
    kind = draw(st.sampled_from(_KINDS))
    lowest, highest = _limits(kind)
    first = draw(st.sampled_from(_EDGES))
    likely = {lowest, highest, 0, *range(first - 2, first + 6)}
    there = [each for each in sorted(likely) if lowest <= each <= highest and each in _IDS]
    values = draw(st.lists(st.sampled_from([*there, None]), min_size=5, max_size=5))
    return first, pa.array([None, *values], kind).slice(1)


@settings(max_examples=300)
@given(
    st.lists(_columns_of_ids(), min_size=1, max_size=6),
    st.sampled_from([7, 12, 2**16]),
    st.sampled_from([1, 9]),
)
def test_answer_ids_next_to_each_other_are_told_apart_in_any_type(columns, together, long):
    asked = [
        row(OTHER + at, *ids)
        for at, (first, _) in enumerate(columns)
        for ids in ([first], [first + 1], [first, first + 3])
        if all(each in _IDS for each in ids)
    ]
    index = QuotaIndex([survey(*(quota([sub_quota(each)], quota_id=at) for at, each in enumerate(asked)))])
    panel = pa.table({str(OTHER + at): column for at, (_, column) in enumerate(columns)})
    profiles = [
        {int(name): answer for name, answer in each.items() if answer is not None} for each in panel.to_pylist()
    ]
    with (
        mock.patch.object(_consecutive, "_TOGETHER", together),
        mock.patch.object(_consecutive, "_LONG", long),
    ):
        assert counted(PanelMatcher(index), panel) == by_index(index, list(map(index.match, profiles)))


_CODES = [
    "1",
    "10",
    "100",
    "1001",
    "10011",
    "10012",
    "100111",
    "12345678",
    "123456789",
    "1234567890",
    "12345679",
    "sw1a1aa",
    "é9",
]


@given(
    st.lists(st.lists(st.sampled_from(_CODES), min_size=1, max_size=4, unique=True), min_size=1, max_size=4),
    st.lists(
        st.sampled_from(
            [*_CODES, "99", "100 11", "1234-56789", "SW1A 1AA", "sw1a", "É9x", " ", "-", "10\t0", None]
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]),
)
def test_beginnings_of_postal_codes_are_found_however_long(lists, codes, kind):
    quotas = [quota([sub_quota(row(POSTAL, *each))], quota_id=at) for at, each in enumerate(lists)]
    index = QuotaIndex([survey(*quotas)])
    panel = pa.table({str(POSTAL): pa.array(codes, kind)})
    assert counted(PanelMatcher(index), panel) == by_index(
        index, [index.match({POSTAL: code}) for code in codes]
    )


@pytest.mark.parametrize(
    ("answers", "certain"),
    [
        (["10 1-01", "20000", None], 1),
        (pa.array(["10101", "1", "ab1"]).dictionary_encode(), 1),
        (pa.array([None, None, None]), 0),
    ],
)
def test_postal_codes_are_texts(answers, certain):
    index = QuotaIndex([survey(quota([sub_quota(row(POSTAL, "101"))], quota_id=1))])
    assert counted(PanelMatcher(index), pa.table({str(POSTAL): answers})) == {1: (certain, 0)}


@pytest.mark.parametrize(
    ("name", "column", "words"),
    [
        (AGE, [30, None, 200], "row 2 of the panel.*an age is given in years.*not 200"),
        (AGE, [30.5], "not whole"),
        (AGE, ["30", "old"], "row 1 of the panel.*not 'old'"),
        (AGE, [True], "of type bool"),
        (OTHER, ["x"], "row 0 of the panel.*answer IDs"),
        (OTHER, [["1"], [], ["2", "y"]], "row 2 of the panel.*'y'"),
        (OTHER, [{"a": 1}], "of type struct"),
        (POSTAL, [10101], "row 0 of the panel.*a postal code is a text.*not 10101"),
        ("device_type", ["phone"], "'device_type'.*whole numbers"),
        ("exclude_surveys", [1], "'exclude_surveys'.*lists of survey IDs"),
        ("exclude_surveys", [["x"]], "'exclude_surveys'.*whole numbers"),
        ("participations", [[1]], "'participations'.*survey_id, wave_id, status_id"),
        ("participations", [[{"survey_id": 1}]], "'participations'.*no 'status_id'"),
        ("member_code", [1], "'member_code'.*texts"),
    ],
)
def test_what_is_no_answer_is_refused_by_column_and_row(name, column, words):

    rows = [row(OTHER, 1), row(AGE, "18-30"), row(POSTAL, "1")]
    index = QuotaIndex([survey(*(quota([sub_quota(each)], quota_id=at) for at, each in enumerate(rows)))])
    table = {"member_code": [f"M{at}" for at in range(len(column))], str(name): column}
    with pytest.raises(InvalidRequestError, match=words):
        PanelMatcher(index, TopK(2)).run(pa.table(table)).read_all()


def test_an_age_out_of_all_bounds_is_refused_in_a_later_batch_too():
    index = QuotaIndex([survey(quota([sub_quota(row(AGE, "18-30"))]))])
    batches = [
        pa.record_batch({str(AGE): pa.array([30] * 40_000)}),
        pa.record_batch({str(AGE): pa.array([30, -1])}),
    ]
    with pytest.raises(InvalidRequestError, match=r"row 40001 of the panel.*not -1"):
        list(PanelMatcher(index).map_batches(batches))


def test_a_panel_is_a_stream_with_each_column_once_and_with_codes_where_members_are_told():
    index = QuotaIndex([survey(MEN)])
    with pytest.raises(InvalidRequestError, match=r"an Arrow stream.*not list"):
        PanelMatcher(index).run([{GENDER: MALE}]).read_all()
    with pytest.raises(InvalidRequestError, match="several columns '1001007'"):
        PanelMatcher(index).run(pa.table([[1], [2]], names=[str(GENDER)] * 2)).read_all()
    with pytest.raises(InvalidRequestError, match="no column 'member_code'; it has '1001007'"):
        PanelMatcher(index, TopK(2)).run(pa.table({str(GENDER): [MALE]})).read_all()


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "2"])
def test_how_many_are_wanted_is_a_number(wrong):
    with pytest.raises(InvalidRequestError, match="n is a number from 1 on"):
        TopK(wrong)
    with pytest.raises(InvalidRequestError, match="per_quota is a number from 1 on"):
        Sample(wrong)
    with pytest.raises(InvalidRequestError, match="seed is a whole number of 64 bits at most"):
        Sample(5, seed=2**65)


def test_columns_may_change_from_batch_to_batch():
    index = QuotaIndex([survey(MEN)])
    batches = [
        pa.record_batch({str(GENDER): pa.array([MALE])}),
        pa.record_batch({str(GENDER): pa.array([[MALE, 4]])}),
        pa.record_batch({"member_code": pa.array(["a"])}),
    ]
    (made,) = PanelMatcher(index).map_batches(batches)
    assert made.column("certain").to_pylist() == [2]


def test_runs_of_one_matcher_at_the_same_time_do_not_disturb_each_other(monkeypatch):
    monkeypatch.setattr(_matcher, "CHUNK", 64)
    codes = [f"M{at}" for at in range(150)]
    parts = [panel_of([{GENDER: each}] * 150, member_code=codes) for each in (MALE, MALE + 1, MALE)]
    matcher = PanelMatcher(QuotaIndex([survey(MEN)]), TopK(1))
    runs = list(zip(*(matcher.map_batches(part.to_batches()) for part in parts), strict=True))
    assert len(runs) == 2
    for at, certain in enumerate((1, 0, 1)):
        assert [n for together in runs for n in together[at].column("certain").to_pylist()] == [certain] * 150


@pytest.mark.parametrize("library", ["polars", "pandas", "duckdb", "batches", "reader"])
def test_streams_come_from_many_libraries(generated, library):
    index, panel = generated
    plain = pa.table(
        {
            name: column
            for name, column in zip(panel.column_names, panel.columns, strict=True)
            if not pa.types.is_list(column.type)
        }
    )
    matcher = PanelMatcher(index, TopK(3))
    if library == "polars":
        stream = pl.from_arrow(plain)
        assert (
            PanelMatcher(index, Sample(3)).run(stream).read_all()
            == PanelMatcher(index, Sample(3)).run(plain).read_all()
        )
        with pytest.raises(InvalidRequestError, match=r"not LazyFrame: collect\(\) it first"):
            matcher.run(stream.lazy()).read_all()
    elif library == "pandas":
        stream = plain.to_pandas()  # whole numbers with gaps become floats there
        assert "float64" in set(map(str, stream.dtypes))
    elif library == "duckdb":
        stream = duckdb.sql("SELECT * FROM plain")
    else:
        stream = iter(plain.to_batches()) if library == "batches" else plain.to_reader()
    assert matcher.run(stream).read_all() == matcher.run(plain).read_all()


def test_numbers_too_wide_for_their_column_are_not_taken_for_others():
    index = QuotaIndex([survey(quota([sub_quota(row(OTHER, -100, -5, 100))], quota_id=1))])
    for column in (pa.array([100, 7], pa.int8()), pa.array([100, 2**64 - 5], pa.uint64())):
        assert counted(PanelMatcher(index), pa.table({str(OTHER): column})) == {1: (1, 0)}


def test_what_is_null_in_a_participation_is_not_what_lies_under_it():
    exclusion = SurveyWaveExclusion(9, 0, (3,))
    index = QuotaIndex([survey(quota(quota_id=1), survey_wave_exclusions=(exclusion,))])
    fields = list(PARTICIPATIONS.value_type)
    masked = pa.StructArray.from_arrays(
        [pa.array([9]), pa.array([1]), pa.array([3])], fields=fields, mask=pa.array([True])
    )
    no_status = pa.array([{"survey_id": 9, "wave_id": 1, "status_id": None}], PARTICIPATIONS.value_type)
    for values in (masked, no_status):
        column = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), values)
        assert counted(PanelMatcher(index), pa.table({"participations": column})) == {1: (1, 0)}


@pytest.mark.parametrize("kind", [pa.null(), pa.list_(pa.null()), pa.list_(pa.int64())], ids=str)
def test_nothing_taken_is_nothing_whatever_its_type(kind):
    index = QuotaIndex([survey(ALL)])
    columns = {"exclude_surveys": pa.nulls(2, kind)}
    if not pa.types.is_list(kind) or not pa.types.is_integer(kind.value_type):
        columns["participations"] = pa.nulls(2, kind)
    assert counted(PanelMatcher(index), pa.table(columns)) == {1: (2, 0)}


@pytest.mark.parametrize("output", [TopK(2), Sample(2)])
def test_a_member_without_a_code_is_refused_by_row(output):
    panel = pa.table({"member_code": ["a", None]})
    with pytest.raises(InvalidRequestError, match="row 1 of the panel: there is no member_code"):
        PanelMatcher(QuotaIndex([survey(ALL)]), output).run(panel).read_all()


def test_texts_that_are_not_utf_8_are_refused():
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    index = QuotaIndex([survey(MEN)])
    with pytest.raises(InvalidRequestError, match="'1001007' of the panel has texts that are not UTF-8"):
        PanelMatcher(index).run(pa.table({str(GENDER): broken})).read_all()
    with pytest.raises(InvalidRequestError, match="'member_code' of the panel has texts that are not UTF-8"):
        PanelMatcher(index, TopK(1)).run(pa.table({"member_code": broken})).read_all()


def test_of_a_dictionary_what_is_in_use_is_read():
    index = QuotaIndex([survey(MEN)])
    words = pa.DictionaryArray.from_arrays(pa.array([1]), pa.array(["no answer", str(MALE), "neither"]))
    assert counted(PanelMatcher(index), pa.table({str(GENDER): words})) == {2: (1, 0)}
    with pytest.raises(InvalidRequestError, match="is of type list"):
        lists = pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([[1, 2]]))
        PanelMatcher(index).run(pa.table({str(POSTAL): lists, str(GENDER): lists})).read_all()


# --- Parts of a panel


@pytest.fixture(scope="module")
def generated():
    index = QuotaIndex(generate_inventory(9, surveys=30), kinds=AGES)
    members = list(generate_members(9, members=400))
    panel = panel_of([each.profile for each in members], member_code=[each.member_code for each in members])
    return index, panel


@pytest.mark.parametrize("output", [Counts(), TopK(5), Sample(6), Sample(6, seed=-3)])
def test_parts_come_to_the_same_as_the_whole(generated, output):
    index, panel = generated
    matcher = PanelMatcher(index, output)
    whole = matcher.run(panel).read_all()
    copies = [pickle.loads(pickle.dumps(matcher)) for _ in range(3)]
    parts = [
        batch
        for copy, part in zip(copies, (panel.slice(0, 130), panel.slice(130, 1), panel.slice(131)), strict=True)
        for batch in copy.map_batches(part.to_batches())
    ]
    merged = matcher.merged(parts)
    assert merged.schema == matcher.schema == whole.schema
    assert merged == whole == matcher.merged(pa.Table.from_batches(parts))
    if not isinstance(output, TopK):
        assert matcher.merged(parts[::-1]) == whole


@pytest.mark.parametrize("output", [Counts(), TopK(5), Sample(6)])
def test_parts_may_come_back_in_types_of_an_engine_which_has_no_unsigned_ones(generated, output):
    index, panel = generated
    matcher = PanelMatcher(index, output)
    whole = matcher.run(panel).read_all()
    assert not any(pa.types.is_unsigned_integer(kind) for kind in whole.schema.types)
    other = {
        pa.string(): pa.large_string(),
        pa.list_(pa.int64()): pa.list_(pa.field("element", pa.int64(), nullable=False)),
    }
    schema = pa.schema([(each.name, other.get(each.type, each.type)) for each in whole.schema])
    back = whole.cast(schema).append_column("partition", pa.nulls(len(whole)))
    assert matcher.merged(back) == whole
    assert matcher.merged(back).schema == matcher.schema


def test_a_matcher_is_small_to_send(generated):
    index, panel = generated
    matcher = PanelMatcher(index)
    before = len(pickle.dumps(matcher))
    list(matcher.map_batches(panel.to_batches()))
    assert len(pickle.dumps(matcher)) < 2 * before < 1_000_000


def test_a_sample_is_of_certain_members_first_and_then_of_possible_ones(generated):
    index, panel = generated
    drawn: dict[int, dict[bool, set[str]]] = {}
    for one in PanelMatcher(index, Sample(6)).run(panel).read_all().to_pylist():
        drawn.setdefault(one["quota_id"], {True: set(), False: set()})[one["certain"]].add(one["member_code"])
    members = list(generate_members(9, members=400))
    matching: dict[int, dict[bool, set[str]]] = {id_: {True: set(), False: set()} for id_ in index.quota_ids}
    for member in members:
        matched = index.match(member.profile)
        for is_certain, ids in ((True, matched.certain), (False, matched.possible)):
            for id_ in ids:
                matching[id_][is_certain].add(member.member_code)
    for id_, of in matching.items():
        got = drawn.get(id_, {True: set(), False: set()})
        certain = min(6, len(of[True]))
        assert got[True] <= of[True]
        assert got[False] <= of[False]
        assert (len(got[True]), len(got[False])) == (certain, min(6 - certain, len(of[False])))


def test_a_sample_favours_nobody_and_differs_by_quota_and_seed():
    index = QuotaIndex([survey(*(quota(quota_id=at) for at in range(400)))])
    panel = pa.table({"member_code": [f"M{at}" for at in range(100)]})
    drawn = PanelMatcher(index, Sample(20)).run(panel).read_all().to_pylist()
    times = Counter(one["member_code"] for one in drawn)
    assert len(drawn) == 400 * 20
    assert len(times) == 100  # each 80 times on the average, and none out of all proportion
    assert max(times.values()) < 400
    of_quota: dict[int, set[str]] = {}
    for one in drawn:
        of_quota.setdefault(one["quota_id"], set()).add(one["member_code"])
    assert len(set(map(frozenset, of_quota.values()))) > 50
    other = PanelMatcher(index, Sample(20, seed=1)).run(panel).read_all().to_pylist()
    assert {one["member_code"] for one in other if one["quota_id"] == 0} != of_quota[0]


def test_a_sample_loses_nobody_in_a_small_last_piece(monkeypatch):
    monkeypatch.setattr(_matcher, "_ROWS", 512)
    index = QuotaIndex([survey(*(quota(quota_id=at) for at in range(40)))])
    matcher = PanelMatcher(index, Sample(30))
    for count in (513, 514, 515):
        panel = pa.table({"member_code": [f"M{at}" for at in range(count)]})
        turned = pa.concat_tables([panel.slice(512), panel.slice(0, 512)])
        assert matcher.run(panel).read_all() == matcher.run(turned).read_all()


def test_requests_are_what_a_fan_out_takes():
    index = QuotaIndex([survey(ALL, survey_id=1), survey(MEN, survey_id=2)])
    panel = panel_of([{GENDER: MALE}, {GENDER: 5}], member_code=["a", "b"])
    assert list(PanelMatcher(index, TopK(2)).requests(panel)) == [
        InviteRequest("a", (1, 2)),
        InviteRequest("b", (1,)),
    ]
    with pytest.raises(InvalidRequestError, match=r"requests are made of TopK\(n\), not of Counts"):
        next(PanelMatcher(index).requests(panel))


def test_without_the_extra_the_rest_of_matching_works_and_a_panel_says_what_is_missing():
    script = """
import sys
sys.modules["pyarrow"] = None
from sampling_async.matching import QuotaIndex
try:
    from sampling_async.matching import PanelMatcher
except ImportError as exc:
    print(exc)

"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "needs pyarrow: python -m pip install 'sampling-async[panel]'" in ran.stdout


def test_pandas_is_not_imported_to_match(generated, tmp_path):
    index, panel = generated
    with pa.OSFile(str(tmp_path / "panel"), "wb") as file, pa.ipc.new_stream(file, panel.schema) as writer:
        writer.write_table(panel)
    for output in (Counts(), TopK(5)):
        (tmp_path / "matcher").write_bytes(pickle.dumps(PanelMatcher(index, output)))
        script = """
import pickle, sys
import pyarrow
with open("matcher", "rb") as file, pyarrow.OSFile("panel") as panel:
    assert pickle.load(file).run(pyarrow.ipc.open_stream(panel)).read_all().num_rows
print("pandas" in sys.modules)
"""
        given = [sys.executable, "-c", script]
        ran = subprocess.run(given, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert ran.stdout == "False\n"


# --- Several processes


class Crew:
    """The processes that were started, and how many pieces they were given."""

    def __init__(self, monkeypatch):
        self.workers, self.given = [], 0
        begin, give = _workers._Worker.__init__, _workers._Worker.give

        def begins(worker, *of):
            begin(worker, *of)
            self.workers.append(worker)

        def gives(worker, *piece):
            give(worker, *piece)
            self.given += 1

        monkeypatch.setattr(_workers._Worker, "__init__", begins)
        monkeypatch.setattr(_workers._Worker, "give", gives)

    def awaited(self, batches):
        """Yield batches, but only some of them before all processes are there: this one could do without."""
        assert len(batches) >= 10
        for number, batch in enumerate(batches):
            if number == 6:
                assert self.workers
                there = [each for each in self.workers if not each.connection.closed]
                assert all(worker.is_ready or worker.connection.poll(60) for worker in there)
            yield batch


@pytest.fixture
def crew(monkeypatch):
    monkeypatch.setattr(_matcher, "_ROWS", 40)
    yield Crew(monkeypatch)
    assert not active_children()


@pytest.mark.parametrize("output", [Counts(), TopK(5), Sample(6)], ids=lambda output: type(output).__name__)
def test_several_processes_say_what_one_does_in_the_same_order(generated, crew, output):
    index, panel = generated
    matcher = PanelMatcher(index, output)
    batches = panel.to_batches(max_chunksize=40)
    assert matcher.run(crew.awaited(batches), workers=3).read_all() == matcher.run(panel).read_all()
    assert len(crew.workers) == 2
    assert 2 <= crew.given < len(batches)


def test_processes_that_start_too_late_are_not_waited_for(generated, crew):
    index, panel = generated
    matcher = PanelMatcher(index, TopK(5))
    assert matcher.run(panel, workers=2).read_all() == matcher.run(panel).read_all()
    assert len(crew.workers) == 1


def test_pieces_that_are_far_ahead_of_one_that_is_not_done_wait_for_it(generated, crew, monkeypatch):
    index, panel = generated
    monkeypatch.setattr(_workers, "_AHEAD", 2)
    matcher = PanelMatcher(index, TopK(5))
    large = pa.concat_tables([panel] * 8)
    made, ahead = [], []

    def watched():
        for number, batch in enumerate(crew.awaited(large.to_batches(max_chunksize=40))):
            ahead.append(number - len(made))
            if number == 12:
                pid = crew.workers[0]._process.pid
                os.kill(pid, signal.SIGSTOP)
                Timer(0.2, os.kill, (pid, signal.SIGCONT)).start()
            yield batch

    for batch in matcher.run(watched(), workers=2):
        made.append(batch)  # noqa: PERF402  its length is looked at in between
    assert pa.Table.from_batches(made) == matcher.run(large).read_all()
    assert max(ahead) <= 2 * 2 + 8  # some are read ahead, or done and not handed out yet; else it is over 30


@pytest.mark.parametrize("rooms", [[], [1], [10**6]], ids=["of no such place", "of one page", "of many"])
def test_pieces_that_have_no_room_in_memory_go_by_other_files(generated, crew, monkeypatch, tmp_path, rooms):
    index, panel = generated
    monkeypatch.setattr(_matcher, "_ROWS", 2400)
    (tmp_path / "memory").mkdir()
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(_workers, "_IN_MEMORY", str(tmp_path / ("memory" if rooms else "missing")))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    free = [SimpleNamespace(f_bavail=pages, f_frsize=4096) for pages in rooms]
    statvfs = os.statvfs
    monkeypatch.setattr(_workers.os, "statvfs", lambda path: free[0] if free else statvfs(path))
    matcher = PanelMatcher(index, TopK(5))
    large = pa.concat_tables([panel] * 60)  # pieces, and what comes of them, are more than a pipe holds
    batches = large.combine_chunks().to_batches(max_chunksize=2400)
    made = matcher.run(crew.awaited(batches), workers=2)
    some = [made.read_next_batch()]
    (used,) = tmp_path.glob("*/*")
    assert used.parent.name == ("memory" if rooms == [10**6] else "disk")
    assert stat.S_IMODE(used.stat().st_mode) == 0o700
    assert pa.Table.from_batches([*some, *made]) == matcher.run(large).read_all()
    assert crew.given
    assert not used.exists()


def test_a_process_whose_parent_is_gone_tidies_up_after_it(generated, tmp_path, monkeypatch):
    index, _ = generated
    monkeypatch.setattr(_workers, "_IN_MEMORY", str(tmp_path))
    (tmp_path / "work").write_bytes(pickle.dumps(PanelMatcher(index)._matched))
    (tmp_path / "3").write_bytes(b"a piece")
    ours, theirs = Pipe()
    process = get_context("spawn").Process(target=_workers._work, args=(theirs,))
    process.start()
    theirs.close()
    ours.send(tmp_path)
    ours.send(None)
    assert ours.poll(60)
    ours.close()
    process.join(60)
    assert process.exitcode == 0
    assert not tmp_path.exists()


@pytest.mark.parametrize("at", [170, 210, 250, 290])
def test_an_error_is_raised_as_its_own_whichever_process_meets_it(generated, crew, at):
    index, panel = generated
    ages = [30] * len(panel)
    ages[at] = -1
    wrong = panel.set_column(panel.column_names.index(str(AGE)), str(AGE), pa.array(ages))
    with pytest.raises(InvalidRequestError, match=rf"row {at} of the panel.*not -1"):
        PanelMatcher(index).run(crew.awaited(wrong.to_batches(max_chunksize=40)), workers=2).read_all()


@pytest.mark.usefixtures("crew")
def test_what_cannot_be_read_of_the_panel_is_raised_while_workers_work(generated):
    index, panel = generated

    def breaking():
        yield from panel.to_batches(max_chunksize=40)[:5]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        PanelMatcher(index).run(breaking(), workers=2).read_all()


def test_a_worker_that_is_killed_is_told(generated, crew):
    index, panel = generated

    def murderous():
        for number, batch in enumerate(crew.awaited(panel.to_batches(max_chunksize=40))):
            if number == 7:
                for child in active_children():
                    child.kill()
            yield batch

    with pytest.raises(ChildProcessError, match="ended with exit code -9"):
        PanelMatcher(index).run(murderous(), workers=2).read_all()


@pytest.mark.usefixtures("crew")
def test_a_result_that_is_not_read_to_its_end_leaves_no_process(generated):
    index, panel = generated
    made = PanelMatcher(index, TopK(2))._matched_by(Workers(2), panel.to_batches())
    assert len(next(made)) == 40
    assert active_children()
    made.close()


@pytest.mark.parametrize(("workers", "pieces"), [(2, 4), (4, 4), (8, 7)])
def test_a_panel_of_few_pieces_starts_no_process(generated, crew, workers, pieces):
    index, panel = generated
    matcher = PanelMatcher(index, TopK(2))
    few, more = panel.slice(0, 40 * pieces), panel.slice(0, 40 * pieces + 1)
    assert len(matcher.run(few, workers=workers).read_all()) == len(few)
    assert not crew.workers
    assert len(matcher.run(more, workers=workers).read_all()) == len(more)
    assert len(crew.workers) == workers - 1


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_process_that_is_stopped_or_ignores_its_end_ends(generated, crew, is_idle):
    index, panel = generated
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Workers(2) as workers:
            made = PanelMatcher(index, TopK(2)).run(panel, workers=workers)
            made.read_next_batch()
            if is_idle:
                made.read_all()
            os.kill(crew.workers[0]._process.pid, signal.SIGSTOP)
            del made
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not active_children()


def test_the_end_of_a_run_may_come_with_a_garbage_collection(generated, crew, monkeypatch, tmp_path):
    """While processes of another run are put back, those of one are that nobody reads any more."""
    index, panel = generated
    workers = Workers(2)
    unread = workers._taking_part(tmp_path)

    class Collecting(list):
        def append(self, worker):
            nonlocal unread
            super().append(worker)
            if unread is not None:
                ended, unread = unread, None
                ended.__exit__(None, None, None)

    with workers:
        (done,) = unread.__enter__()
        monkeypatch.setattr(workers, "_idle", Collecting())
        made = PanelMatcher(index, TopK(2)).run(panel, workers=workers)
        made.read_next_batch()
        done.leave()
        made.read_all()
        assert unread is None
        assert len(active_children()) == 1  # one is kept


def test_kept_processes_match_for_one_run_after_the_other(generated, crew):
    index, panel = generated
    batches = panel.to_batches(max_chunksize=40)
    with Workers(3) as workers:
        for output in (Counts(), TopK(5), Sample(6)):
            matcher = PanelMatcher(index, output)
            given = crew.given
            made = matcher.run(crew.awaited(batches), workers=workers).read_all()
            assert made == matcher.run(panel).read_all()
            assert 2 <= crew.given - given < len(batches)
        assert len(crew.workers) == len(active_children()) == 2


def test_processes_that_are_kept_are_waited_for(generated, crew):
    """They came too late for the first run; the next one has them."""
    index, panel = generated
    matcher = PanelMatcher(index, TopK(5))
    with Workers(4) as workers:
        for _ in range(3):
            assert matcher.run(panel, workers=workers).read_all() == matcher.run(panel).read_all()
            assert len(crew.workers) == len(active_children()) == 3


def test_kept_processes_end_with_a_run_that_fails_and_the_next_one_has_others(generated, crew):
    index, panel = generated
    matcher = PanelMatcher(index, TopK(5))
    ages = pa.array([30] * 210 + [-1] * (len(panel) - 210))
    wrong = panel.set_column(panel.column_names.index(str(AGE)), str(AGE), ages)
    with Workers(2) as workers:
        for number in (1, 2):
            with pytest.raises(InvalidRequestError, match=r"of the panel: .* not -1"):
                matcher.run(crew.awaited(wrong.to_batches(max_chunksize=40)), workers=workers).read_all()
            assert not active_children()
            assert len(crew.workers) == number
        assert matcher.run(panel, workers=workers).read_all() == matcher.run(panel).read_all()


def test_a_kept_process_that_was_killed_in_between_is_replaced(generated, crew):
    index, panel = generated
    matcher = PanelMatcher(index, TopK(5))
    with Workers(2) as workers:
        for number in (1, 2):
            assert matcher.run(panel, workers=workers).read_all() == matcher.run(panel).read_all()
            assert len(crew.workers) == number
            for child in active_children():
                child.kill()
                child.join()


def test_runs_at_the_same_time_have_processes_of_their_own(generated, crew):
    index, panel = generated
    matcher = PanelMatcher(index, TopK(5))
    expected = matcher.run(panel).read_all()
    with Workers(2) as workers:
        runs = [matcher.run(panel, workers=workers) for _ in range(3)]
        made = [[run.read_next_batch()] for run in runs]
        assert len(crew.workers) == 3
        made[0] += runs[0]
        made[1] += runs[1]
        assert len(active_children()) == 2  # one that is kept, and that of the third
    made[2] += runs[2]
    assert not active_children()
    assert [pa.Table.from_batches(some) for some in made] == [expected] * 3


def test_workers_are_kept_by_one_block():
    with Workers(2) as workers, pytest.raises(InvalidRequestError, match="kept already"), workers:
        pass
    with workers:
        pass


def test_a_process_that_has_nothing_to_do_ends_with_its_parent():
    ours, theirs = Pipe()
    process = get_context("spawn").Process(target=_workers._work, args=(theirs,))
    process.start()
    theirs.close()
    ours.close()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", None])
def test_workers_are_a_number(generated, wrong):
    with pytest.raises(InvalidRequestError, match="workers is a number of processes from 1 on"):
        PanelMatcher(generated[0]).run(generated[1], workers=wrong)
