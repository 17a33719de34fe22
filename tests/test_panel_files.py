"""Files of members as a stream of batches: CSV, lines of JSON and Parquet."""

from __future__ import annotations

import json

import pytest
from matching_kit import AGE
from panel_kit import divide

from sampling_async import InvalidRequestError
from sampling_async.matching.panel import _files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_postal_code_in_csv_keeps_its_zeros(folder):
    (folder / "zeros.csv").write_text("member_code,1001042\nm,01234\n")
    opened = _files.opened("zeros.csv", frozenset({"1001042"}), {})
    assert [row for batch in opened.batches for row in batch.to_pylist()] == [{"1001042": "01234"}]


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_columns_that_are_not_divided_by_commas_are_refused_with_a_query_that_reads_them(folder, mark):
    (folder / "FILE").write_text(f"member_code{mark}{AGE}\nm1{mark}30\n")
    (folder / "other.csv").write_text((folder / "FILE").read_text())
    with pytest.raises(InvalidRequestError, match=r"commas must divide its columns") as caught:
        _files.opened("other.csv", frozenset({"member_code", str(AGE)}), {})
    opened = _files.opened(str(caught.value).rpartition(": ")[2], frozenset({"member_code", str(AGE)}), {})
    rows = [row for batch in opened.batches for row in batch.to_pylist()]
    assert rows == [{"member_code": "m1", str(AGE): "30"}]


def test_a_csv_text_of_two_lines_belongs_to_one_member(folder):
    rows = "".join(f'm{at},30,"street\nGHOST,20,city"\n' for at in range(60_000))
    (folder / "two.csv").write_text(f"member_code,{AGE},note\np,1,\n{rows}")
    opened = _files.opened("two.csv", frozenset({"member_code", str(AGE)}), {})
    codes = [code for batch in opened.batches for code in batch.column("member_code").to_pylist()]
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
    opened = _files.opened("two.jsonl", frozenset({"member_code", "1", "participations"}), {})
    (batch,) = opened.batches
    assert batch.column("participations").to_pylist() == [each["participations"] for each in lines_of_two]
    assert batch.column("1").to_pylist() == [[1], [1, 2]]


def test_columns_of_json_lines_may_have_other_names(folder):
    (folder / "named.jsonl").write_text('{"age": 30, "id": "m"}')
    opened = _files.opened(
        "named.jsonl", frozenset({str(AGE), "member_code"}), {"age": str(AGE), "id": "member_code"}
    )
    assert [row for batch in opened.batches for row in batch.to_pylist()] == [
        {str(AGE): 30, "member_code": "m"}
    ]


def test_a_renamed_column_of_json_lines_counts_once(folder):
    rows = [{"member_code": "a", "device_type": 5}, {"member_code": "b", "device_type": 6}]
    (folder / "renamed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    opened = _files.opened("renamed.jsonl", frozenset({"1", "device_type"}), {"device_type": "1"})
    (batch,) = opened.batches
    assert batch.to_pydict() == {"1": [5, 6]}


def test_member_codes_of_json_lines_may_look_like_dates(folder):
    rows = [{"member_code": "2024-01-05"}, {"member_code": None}, {}, {"member_code": "2024-01-06 10:00:00"}]
    (folder / "dates.jsonl").write_text("\n".join(map(json.dumps, rows)))
    opened = _files.opened("dates.jsonl", frozenset({"member_code"}), {}, frozenset({"member_code"}))
    assert opened.columns == ("member_code",)
    (batch,) = opened.batches
    assert batch.to_pylist() == [{"member_code": row.get("member_code")} for row in rows]


@pytest.mark.parametrize("block_bytes", [10, 10_000])
def test_json_lines_may_have_a_key_late_and_lists_in_some_lines(folder, monkeypatch, block_bytes):
    divide(monkeypatch, line_bytes=block_bytes)
    text = '{"1": 5}\n{"1": [5, 6]}\n\n{"2": "x", "other": {"a": 1}}\n{"1": 7, "2": 3}\n{"1": null}'
    (folder / "late.jsonl").write_text(text)
    opened = _files.opened("late.jsonl", frozenset({"1", "2"}), {})
    rows = [row for batch in opened.batches for row in batch.to_pylist()]

    def plain(answer):
        return [] if answer is None else list(map(str, answer if isinstance(answer, list) else [answer]))

    assert [(plain(row["1"]), plain(row["2"])) for row in rows] == [
        (["5"], []),
        (["5", "6"], []),
        ([], ["x"]),
        (["7"], ["3"]),
        ([], []),
    ]
