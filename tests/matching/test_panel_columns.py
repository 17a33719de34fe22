"""Column types that a panel may have, and values that are refused."""

from __future__ import annotations

import io
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panel_kit import (
    AGE,
    ALL,
    GENDER,
    MALE,
    MEN,
    OTHER,
    PARTICIPATIONS,
    POSTAL,
    by_index,
    counted,
    quota,
    read_file,
    row,
    sub_quota,
    survey,
)
from pyarrow.json import read_json

from sampling_async import InvalidRequestError, SurveyWaveExclusion
from sampling_async.matching import (
    Allocate,
    Counts,
    PanelMatcher,
    Participation,
    QuotaIndex,
    Sample,
    TopK,
)


def _limits(kind) -> tuple[int, int]:
    limits = np.iinfo(kind.to_pandas_dtype())
    return int(limits.min), int(limits.max)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_texts_that_do_not_begin_at_the_start_of_their_buffer_are_read_where_they_are(kind):
    """Slices that went through pandas or a library in Rust: the array has no offset, but its first text has."""
    index = QuotaIndex(
        [survey(*(quota([sub_quota(row(POSTAL, each))], quota_id=int(each)) for each in ("100", "101", "9")))]
    )
    whole = pa.array(["10011"] * 40 + ["10122"] * 40 + ["9A9"] * 3, kind)
    codes = pa.Array.from_buffers(kind, 43, [None, _from(whole, 40), whole.buffers()[2]])
    codes.validate(full=True)
    assert codes.offset == 0
    assert counted(PanelMatcher(index), pa.table({str(POSTAL): codes})) == {
        100: (0, 0),
        101: (40, 0),
        9: (3, 0),
    }


def _from(texts, first: int):
    """Return the buffer of offsets without those of the first texts."""
    width = 8 if pa.types.is_large_string(texts.type) else 4
    return texts.buffers()[1].slice(first * width)


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
def test_answers_are_read_from_columns_of_any_type(column, more):
    rows = {1: row(OTHER, 1), 2: row(OTHER, 2, *more), 8: row(OTHER, 8, routable=True)}
    index = QuotaIndex([survey(*(quota([sub_quota(each)], quota_id=at) for at, each in rows.items()))])
    panel = pa.table({str(OTHER): column})
    assert counted(PanelMatcher(index), panel) == {1: (1, 0), 2: (1, 0), 8: (0, 1)}


_KINDS = [getattr(pa, f"{sign}int{size}")() for sign in ("", "u") for size in (8, 16, 32, 64)]


_EDGES = [0, 1, 100, *(edge + by for kind in _KINDS for edge in _limits(kind) for by in (-2, -1, 0, 1))]


_IDS = range(-(2**63), 2**63)  # the range of the IDs of the service


@st.composite
def _columns_of_ids(draw):
    """Return the first of some answer IDs, and a column of IDs near it and of other values."""
    kind = draw(st.sampled_from(_KINDS))
    lowest, highest = _limits(kind)
    first = draw(st.sampled_from(_EDGES))
    likely = {lowest, highest, 0, *range(first - 2, first + 6)}
    there = [each for each in sorted(likely) if lowest <= each <= highest and each in _IDS]
    values = draw(st.lists(st.sampled_from([*there, None]), min_size=5, max_size=5))
    return first, pa.array([None, *values], kind).slice(1)


@settings(max_examples=300)
@given(st.lists(_columns_of_ids(), min_size=1, max_size=6))
def test_neighbouring_answer_ids_are_distinguished_in_any_type(columns):
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
            [
                *_CODES,
                *("99", "100 11", "1234-56789", "SW1A 1AA", "sw1a", "É9x", " ", "-", "10\t0", None),
                *(
                    '="10011"',
                    "'10011",
                    "10\u2212011",
                    "\uff11\uff10\u200b011",
                    "SW1A\u00a01AA",
                    "10011.0",
                    "'",
                ),
            ]
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]),
)
def test_prefixes_of_postal_codes_are_found_whatever_their_length(lists, codes, kind):
    quotas = [quota([sub_quota(row(POSTAL, *each))], quota_id=at) for at, each in enumerate(lists)]
    index = QuotaIndex([survey(*quotas)])
    panel = pa.table({str(POSTAL): pa.array(codes, kind)})
    assert counted(PanelMatcher(index), panel) == by_index(
        index, [index.match({POSTAL: code}) for code in codes]
    )


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_cells_that_no_list_can_contain_are_counted_and_logged_once(kind, caplog):
    codes = ["10101", None, "101-01", '="10101"', "#N/A", "10101.0", "é", "#N/A", "\uff11\uff10\uff11"]
    panel = pa.table({"member_code": list("abcdefghi"), str(POSTAL): pa.array(codes, kind)})
    index = QuotaIndex([survey(quota([sub_quota(row(POSTAL, "101"))], quota_id=1))])
    message = (
        "3 postal codes of the panel hold something else than letters and digits, so no list can contain "
        "them; the first is in row 4"
    )
    for output in (Counts(), Allocate(1)):
        caplog.clear()
        PanelMatcher(index, output).run(panel).read_all()
        assert [record.getMessage() for record in caplog.records] == [message]
    caplog.clear()
    PanelMatcher(index).run(panel.slice(0, 4)).read_all()
    assert not caplog.records


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
        (AGE, [30, None, 200], "row 2 of the panel.*an age must be a whole number of years.*not 200"),
        (AGE, [30, None, 30.5], "row 2 of the panel.*not 30.5"),
        (AGE, [[30]], f"column '{AGE}' of the panel holds lists"),
        (POSTAL, [["10101"]], f"column '{POSTAL}' of the panel holds lists"),
        (OTHER, [[1.0], [2.0, 1e30]], r"row 1 of the panel.*not 1e\+30"),
        (AGE, ["30", "old"], "row 1 of the panel.*not 'old'"),
        (AGE, [True], "of type bool"),
        (OTHER, ["x"], "row 0 of the panel.*answer IDs"),
        (OTHER, [["1"], [], ["2", "y"]], "row 2 of the panel.*'y'"),
        (OTHER, [{"a": 1}], "of type struct"),
        (POSTAL, [10101], "row 0 of the panel.*a postal code must be a text.*not 10101"),
        ("device_type", ["1", " 2", "", None, "phone"], "row 4 of the panel: .*'device_type'.*not 'phone'"),
        ("device_type", [1.0, 2.5], "row 1 of the panel: .*'device_type'.*not 2.5"),
        ("device_type", [True], "'device_type' of the panel must hold whole numbers, not bool"),
        ("exclude_surveys", [1], "'exclude_surveys'.*lists of survey IDs"),
        ("exclude_surveys", [["1", "2"], [], ["3", "x"]], "row 2 of the panel: .*'exclude_surveys'.*not 'x'"),
        ("exclude_surveys", [["4"], ["3", "x"]], "row 1 of the panel: .*'exclude_surveys'.*not 'x'"),
        ("participations", [[1]], "'participations'.*survey_id, wave_id, status_id"),
        ("participations", [[{"survey_id": 1}]], "'participations'.*no 'status_id'"),
        ("member_code", [1], "'member_code'.*texts"),
    ],
)
def test_an_invalid_answer_is_refused_with_column_and_row(name, column, words):

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


@pytest.mark.parametrize(("index", "words"), [(pa.int8(), 128), (pa.uint8(), 256)])
def test_nulls_in_a_full_dictionary_are_no_answers(index, words):
    column = pa.DictionaryArray.from_arrays(
        pa.array([5, *[None] * 300], index), pa.array([str(number) for number in range(words)])
    )
    asked = QuotaIndex([survey(quota([sub_quota(row(OTHER, 0, 1))], quota_id=1))])
    assert counted(PanelMatcher(asked), pa.table({str(OTHER): column})) == {1: (0, 0)}


@pytest.mark.parametrize("words", [pa.string(), pa.large_string(), pa.string_view()])
@pytest.mark.parametrize("in_lists", [False, True])
def test_batches_may_have_narrow_dictionaries_of_their_own(words, in_lists):
    index = QuotaIndex([survey(quota([sub_quota(row(OTHER, *range(0, 200, 2)))], quota_id=1))])

    def batches():
        for first in range(0, 200, 50):
            texts = pa.array([str(first + at) for at in range(50)]).cast(words)
            column = pa.DictionaryArray.from_arrays(pa.array([*range(50), None], pa.int8()), texts)
            if in_lists:
                column = pa.ListArray.from_arrays(pa.array([0, 2, None, 50, 51], pa.int32()), column)
            yield pa.record_batch({str(OTHER): column})

    expected = 8 if in_lists else 100
    assert counted(PanelMatcher(index), batches()) == {1: (expected, 0)}


@pytest.mark.parametrize("kind", [pa.decimal32(4, 0), pa.decimal64(9, 2), pa.decimal128(20), pa.float16()])
def test_whole_numbers_may_be_decimals_or_floats_of_any_width(kind):
    index = QuotaIndex([survey(quota([sub_quota(row(OTHER, 20))], quota_id=1))])
    column = pa.array(["20", None, "7"]).cast(pa.float32()).cast(kind)
    assert counted(PanelMatcher(index), pa.table({str(OTHER): column})) == {1: (1, 0)}


def test_whole_numbers_may_be_texts_as_pandas_writes_them_beside_gaps():
    index = QuotaIndex([survey(quota([sub_quota(row(OTHER, 20))], quota_id=1), device_type_ids=(2,))])
    columns = {
        str(OTHER): ["20.0", "20", "20"],
        "device_type": ["2.0", "", "1.0"],
        "invites_left": ["1.0", None, "0"],
    }
    assert counted(PanelMatcher(index), pa.table(columns)) == {1: (2, 0)}
    table = pa.table({"member_code": ["a", "b", "c"], **columns})
    allocated = PanelMatcher(index, Allocate(3)).run(table).read_all()
    assert [len(each) for each in allocated["quota_ids"].to_pylist()] == [1, 1, 0]


def test_numbers_too_wide_for_their_column_are_not_taken_for_others():
    index = QuotaIndex([survey(quota([sub_quota(row(OTHER, -100, -5, 100))], quota_id=1))])
    for column in (pa.array([100, 7], pa.int8()), pa.array([100, 2**64 - 5], pa.uint64())):
        assert counted(PanelMatcher(index), pa.table({str(OTHER): column})) == {1: (1, 0)}


def test_a_null_in_a_participation_hides_the_value_under_it():
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


@pytest.mark.parametrize("wave", ["", '"wave_id": null, '])
def test_a_participation_without_a_wave_is_one_of_all_waves(wave):
    """Older partners learn of no waves."""
    exclusions = (SurveyWaveExclusion(9, 0, (3,)), SurveyWaveExclusion(8, 1, (3,)))
    surveys = [
        survey(quota(quota_id=at), survey_id=at, survey_wave_exclusions=(each,))
        for at, each in enumerate(exclusions, 1)
    ]
    lines = b"".join(
        b'{"participations": [{"survey_id": %d, %b"status_id": 3}]}\n' % (survey_id, wave.encode())
        for survey_id in (9, 8)
    )
    index = QuotaIndex(surveys)
    assert counted(PanelMatcher(index), read_json(io.BytesIO(lines))) == {1: (1, 0), 2: (2, 0)}
    for survey_id, quota_ids in ((9, [2]), (8, [1, 2])):
        found = index.match({}, participations=[Participation(survey_id, None, 3)])
        assert sorted(found.certain) == quota_ids


@pytest.mark.parametrize("name", [b"wave", b"wave_\xe9"])
def test_participations_without_a_field_are_refused_whatever_the_others_are_called(name):
    index = QuotaIndex([survey(ALL, survey_wave_exclusions=(SurveyWaveExclusion(9, 0, (3,)),))])
    lines = b'{"participations": [{"survey_id": 9, "wave_id": 3, "%b": 1}]}' % name
    with pytest.raises(InvalidRequestError, match="'participations' of the panel has no 'status_id' in"):
        PanelMatcher(index).run(read_json(io.BytesIO(lines))).read_all()


@pytest.mark.parametrize("kind", [pa.null(), pa.list_(pa.null()), pa.list_(pa.int64())], ids=str)
def test_an_empty_list_of_participations_may_have_any_type(kind):
    index = QuotaIndex([survey(ALL)])
    columns = {"exclude_surveys": pa.nulls(2, kind)}
    if not pa.types.is_list(kind) or not pa.types.is_integer(kind.value_type):
        columns["participations"] = pa.nulls(2, kind)
    assert counted(PanelMatcher(index), pa.table(columns)) == {1: (2, 0)}


def test_texts_that_are_not_utf_8_are_refused():
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    index = QuotaIndex([survey(MEN)])
    with pytest.raises(InvalidRequestError, match="'1001007' of the panel has texts that are not UTF-8"):
        PanelMatcher(index).run(pa.table({str(GENDER): broken})).read_all()
    with pytest.raises(InvalidRequestError, match="'member_code' of the panel has texts that are not UTF-8"):
        PanelMatcher(index, TopK(1)).run(pa.table({"member_code": broken})).read_all()


def test_only_the_used_entries_of_a_dictionary_column_are_read():
    index = QuotaIndex([survey(MEN)])
    words = pa.DictionaryArray.from_arrays(pa.array([1]), pa.array(["no answer", str(MALE), "neither"]))
    assert counted(PanelMatcher(index), pa.table({str(GENDER): words})) == {2: (1, 0)}
    with pytest.raises(InvalidRequestError, match="is of type list"):
        lists = pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([[1, 2]]))
        PanelMatcher(index).run(pa.table({str(POSTAL): lists, str(GENDER): lists})).read_all()


UUIDS = [UUID(int=2**100 + number) for number in range(5)]
_BYTES = [each.bytes for each in UUIDS]
_MEN = QuotaIndex([survey(MEN)])


def _takes_objects() -> bool:
    try:
        pa.array(UUIDS)
    except pa.ArrowInvalid:
        return False
    return True


@pytest.mark.parametrize(
    "codes",
    [
        pa.array(_BYTES, pa.uuid()),
        pa.array([None, *_BYTES], pa.uuid()).slice(1),
        pa.array(_BYTES, pa.binary(16)),
        pa.DictionaryArray.from_arrays(pa.array(range(5)), pa.array(_BYTES, pa.binary(16))),
        pytest.param(
            UUIDS,
            marks=pytest.mark.skipif(not _takes_objects(), reason="this pyarrow makes no column of UUIDs"),
        ),
    ],
    ids=["uuid", "slice", "bytes", "dictionary", "objects"],
)
def test_member_codes_that_are_uuids_are_read_as_their_canonical_texts(codes, tmp_path):
    matcher = PanelMatcher(_MEN, TopK(1))
    table = pa.table({"member_code": codes, str(GENDER): [MALE] * 5})
    expected = list(map(str, UUIDS))
    assert matcher.run(table).read_all()["member_code"].to_pylist() == expected
    frame = table.to_pandas() if codes is UUIDS else table
    assert [request.member_code for request in matcher.requests(frame)] == expected
    path = tmp_path / "panel.parquet"
    pq.write_table(table, path)
    assert read_file(str(path), "member_code") == [{"member_code": code} for code in expected]
    candidates = pa.table(
        {"member_code": codes, "quota_ids": [[2]] * 5, "certain": pa.array([1] * 5, pa.int32())}
    )
    allocated = PanelMatcher(_MEN, Allocate(1)).allocate(candidates).read_all()
    assert allocated["member_code"].to_pylist() == expected


def test_a_missing_uuid_is_a_missing_member_code():
    table = pa.table({"member_code": pa.array([*_BYTES[:1], None], pa.uuid()), str(GENDER): [MALE] * 2})
    with pytest.raises(InvalidRequestError, match="row 1 of the panel has no member_code"):
        PanelMatcher(_MEN, TopK(1)).run(table).read_all()


@pytest.mark.parametrize("code", ["", ".", "..", "SECRET\n", "SECRET\x9f"])
@pytest.mark.parametrize("output", [TopK(1), Sample(3), Allocate(1)])
def test_a_member_code_that_no_request_can_carry_is_refused_by_its_row(output, code):
    table = pa.table({"member_code": ["a", "\u00a0\u00e9 ...", code], str(GENDER): [MALE] * 3})
    with pytest.raises(InvalidRequestError, match="row 2 of the panel: a member code cannot") as caught:
        PanelMatcher(_MEN, output).run(table).read_all()
    assert "SECRET" not in str(caught.value)
    PanelMatcher(_MEN, Counts()).run(table).read_all()  # it needs no codes
    assert PanelMatcher(_MEN, output).run(table.slice(0, 2)).read_all().num_rows


@pytest.mark.parametrize("twice", ["member_code", str(POSTAL)])
def test_a_needed_column_that_stands_there_twice_is_refused_and_another_one_is_not(twice):
    matcher = PanelMatcher(QuotaIndex([survey(quota([sub_quota(row(POSTAL, "1"))]))]), TopK(1))
    names = ["member_code", str(POSTAL)]
    table = pa.Table.from_arrays([pa.array(["1"])] * 3, names=[*names, twice])
    with pytest.raises(InvalidRequestError, match=f"several columns '{twice}': rename or drop"):
        matcher.run(table).read_all()
    assert (
        len(matcher.run(pa.Table.from_arrays([pa.array(["1"])] * 4, names=[*names, "x", "x"])).read_all()) == 1
    )
