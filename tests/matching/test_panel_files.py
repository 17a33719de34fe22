"""Files of members as a stream of batches: CSV, lines of JSON and Parquet."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from panel_kit import AGE, divide, read_file

from sampling_async import InvalidRequestError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_postal_code_in_csv_keeps_its_zeros(folder):
    (folder / "zeros.csv").write_text("member_code,1001042\nm,01234\n")
    assert read_file("zeros.csv", "1001042") == [{"1001042": "01234"}]


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_columns_that_are_not_divided_by_commas_are_refused_with_a_query_that_reads_them(folder, mark):
    (folder / "FILE").write_text(f"member_code{mark}{AGE}\nm1{mark}30\n")
    (folder / "other.csv").write_text((folder / "FILE").read_text())
    with pytest.raises(InvalidRequestError, match=r"commas must divide its columns") as caught:
        read_file("other.csv", "member_code", str(AGE))
    rows = read_file(str(caught.value).rpartition(": ")[2], "member_code", str(AGE))
    assert rows == [{"member_code": "m1", str(AGE): "30"}]


def test_a_csv_text_of_two_lines_belongs_to_one_member(folder):
    rows = "".join(f'm{at},30,"street\nGHOST,20,city"\n' for at in range(60_000))
    (folder / "two.csv").write_text(f"member_code,{AGE},note\np,1,\n{rows}")
    codes = [each["member_code"] for each in read_file("two.csv", "member_code", str(AGE))]
    assert len(codes) == 60_001
    assert "GHOST" not in codes


def test_json_lines_keep_participations_and_lists_of_answers_and_skip_other_keys(folder):
    lines_of_two = [
        {
            "member_code": "a",
            "1": 1,
            "x": 1,
            "participations": [{"survey_id": 9, "wave_id": 1, "status_id": 3}],
        },
        {"member_code": "b", "1": [1, 2], "x": {"y": 2**70}, "participations": []},
    ]
    (folder / "two.jsonl").write_text("\n".join(map(json.dumps, lines_of_two)))
    rows = read_file("two.jsonl", "member_code", "1", "participations")
    assert [row["participations"] for row in rows] == [each["participations"] for each in lines_of_two]
    assert [row["1"] for row in rows] == [[1], [1, 2]]


def test_columns_of_json_lines_may_have_other_names(folder):
    (folder / "named.jsonl").write_text('{"age": 30, "id": "m"}')
    rows = read_file("named.jsonl", str(AGE), "member_code", renamed={"age": str(AGE), "id": "member_code"})
    assert rows == [{str(AGE): 30, "member_code": "m"}]


def test_a_renamed_column_of_json_lines_counts_once(folder):
    rows = [{"member_code": "a", "device_type": 5}, {"member_code": "b", "device_type": 6}]
    (folder / "renamed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_file("renamed.jsonl", "1", "device_type", renamed={"device_type": "1"}) == [{"1": 5}, {"1": 6}]


def test_member_codes_of_json_lines_may_look_like_dates(folder):
    rows = [{"member_code": "2024-01-05"}, {"member_code": None}, {}, {"member_code": "2024-01-06 10:00:00"}]
    (folder / "dates.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read_file("dates.jsonl", "member_code", texts={"member_code"})
    assert found == [{"member_code": row.get("member_code")} for row in rows]


@pytest.mark.parametrize("block_bytes", [10, 10_000])
def test_json_lines_may_have_a_key_late_and_lists_in_some_lines(folder, monkeypatch, block_bytes):
    divide(monkeypatch, line_bytes=block_bytes)
    text = '{"1": 5}\n{"1": [5, 6]}\n\n{"2": "x", "other": {"a": 1}}\n{"1": 7, "2": 3}\n{"1": null}'
    (folder / "late.jsonl").write_text(text)
    rows = read_file("late.jsonl", "1", "2")

    def plain(answer):
        return [] if answer is None else list(map(str, answer if isinstance(answer, list) else [answer]))

    assert [(plain(row["1"]), plain(row["2"])) for row in rows] == [
        (["5"], []),
        (["5", "6"], []),
        ([], ["x"]),
        (["7"], ["3"]),
        ([], []),
    ]


WANTED = ("member_code", "1001042")


def codes_of(path: str) -> list[str]:
    return [row["member_code"] for row in read_file(path, *WANTED)]


def _written(name: str, header: list[str], row: list[str]) -> None:
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_arrays([pa.array([each]) for each in row], names=header), name)
    elif name.endswith(".csv"):
        Path(name).write_text(f"{','.join(header)}\n{','.join(row)}\n")
    else:
        pairs = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in zip(header, row, strict=True))
        Path(name).write_text("{" + ", ".join(pairs) + "}\n")


@pytest.mark.parametrize("name", ["panel.csv", "panel.parquet", "panel.jsonl"])
@pytest.mark.parametrize("twice", WANTED)
def test_a_needed_column_that_stands_there_twice_is_refused_with_the_file_the_column_and_the_way_out(
    folder, name, twice
):
    _written(name, ["member_code", "1001042", twice], ["a", "01234", "b"])
    with pytest.raises(InvalidRequestError, match=rf"{name}.*'{twice}'.*all but one"):
        codes_of(name)
    # It does not matter how often a column stands there that nobody needs.
    _written(name, ["note", "member_code", "1001042", "note"], ["x", "a", "01234", "y"])
    assert codes_of(name) == ["a"]


def test_two_columns_that_a_rename_makes_one_are_refused(folder):
    _written("panel.csv", ["zip", "zip", "member_code"], ["1", "2", "a"])
    with pytest.raises(InvalidRequestError, match="2 columns 'zip'"):
        read_file("panel.csv", *WANTED, renamed={"zip": "1001042"})


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("a\xe9,01234\n".encode("latin-1"), "row 1 of the panel is not UTF-8: .*'latin-1'"),
        (b"a,\n" * 400_000 + b"\xe9,\n", "row 400001 of the panel is not UTF-8"),
        (b"\n\na\n", "row 1 of the panel has 1 column in place of 2: texts with commas"),
        (b'"a\n",\n' * 400_000 + b"x,y,SECRET\n", "row 400001 of the panel has 3 columns in place of 2"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_and_not_shown(folder, content, error):
    Path("panel.csv").write_bytes(b"member_code,1001042\nm,1\n" + content)
    with pytest.raises(InvalidRequestError, match=rf"^panel\.csv, {error}") as caught:
        codes_of("panel.csv")
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        (
            "panel.csv",
            "\ufeffmember_code\n".encode("utf-16-le"),
            "is UTF-16: convert it to UTF-8, or .*'utf-16'",
        ),
        ("panel.jsonl", '\ufeff{"member_code": "a"}'.encode("utf-16-be"), "is UTF-16: convert it to UTF-8$"),
        ("panel.csv", b"member_code,\xe9\na,b\n", "is not UTF-8: convert it to UTF-8, or .*'latin-1'"),
        ("panel.csv", b"PK\x03\x04\x14", "is a workbook of Excel, or another archive: save it as CSV"),
        ("panel.jsonl", b"\x1f\x8b\x08\x00", "is compressed by gzip: unpack it"),
        ("panel.csv", b"PAR1", "is Parquet: let its name end in .parquet"),
    ],
)
def test_a_file_that_is_something_else_is_refused_by_what_it_is(folder, name, content, error):
    Path(name).write_bytes(content)
    with pytest.raises(InvalidRequestError, match=f"^{name} {error}"):
        codes_of(name)


@pytest.mark.parametrize("first", [None, []])
def test_a_list_that_begins_with_null_moves_no_answer_to_another_member(folder, first):
    answers = [first, [None, 5], [1, 2], [3]]
    text = "".join(json.dumps({"member_code": f"m{at}", "1": each}) + "\n" for at, each in enumerate(answers))
    Path("panel.jsonl").write_text(text)
    assert [row["1"] for row in read_file("panel.jsonl", "member_code", "1")] == answers


@pytest.mark.parametrize("levels", [1_000, 20_000, 200_000])
def test_json_that_is_nested_without_end_is_no_crash(folder, levels):
    Path("panel.jsonl").write_text(f'{{"member_code": "a"}}\n{{"x": {"[" * levels}{"]" * levels}}}\n')
    if levels == 1_000:  # Arrow reads these
        assert read_file("panel.jsonl", "member_code") == [{"member_code": "a"}, {"member_code": None}]
        return
    with pytest.raises(InvalidRequestError, match=r"panel\.jsonl, line 2: each line of a panel must be a JSON"):
        read_file("panel.jsonl", "member_code")


@pytest.mark.parametrize("at", [0, 2, 70_000])
def test_a_long_text_in_a_column_that_nobody_needs_is_passed_over(folder, at):
    rows = [f"m{number},{'y' * 3_000_000 if number == at else 'x'},01234\n" for number in range(at + 20_000)]
    Path("panel.csv").write_text("member_code,note,1001042\n" + "".join(rows))
    assert codes_of("panel.csv") == [f"m{number}" for number in range(at + 20_000)]


def test_a_long_header_is_read(folder):
    Path("panel.csv").write_text(f"member_code,{'z' * 3_000_000},1001042\na,b,c\n")
    assert codes_of("panel.csv") == ["a"]


def test_a_row_that_is_longer_than_any_row_is_refused_by_its_place(folder, monkeypatch):
    monkeypatch.setattr("sampling_async.matching.panel._files._MOST_BLOCK", 2**21)
    Path("panel.csv").write_text("member_code,note,1001042\n" + "a,b,c\n" * 9 + "a," + "y" * 9_000_000 + ",c\n")
    with pytest.raises(
        InvalidRequestError, match=r"panel\.csv, row 9 or one after it is longer than 2 MB: is a quotation mark"
    ):
        codes_of("panel.csv")
