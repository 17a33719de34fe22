"""Names of questions and answers: `--labels`, the forms of its file, and what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_kit import FILES, on_terminal, run, served_panel

from sampling_async import InvalidRequestError

HEAD = "question,question name,answer,answer name\n"
NAMES = {("1001007", ""): "Gender", ("1001007", "2000246"): "Female", ("device_type", "1"): "Desktop"}
DOCUMENT = {
    "1001007": {"name": "Gender", "answers": {"2000246": "Female"}, "more": [1]},
    "device_type": {"answers": {"1": "Desktop"}},
}
ANY_ORDER = (
    "Answer_Name,x,ANSWER ID,Question-ID,Question_Name\nFemale,,2000246,1001007,Gender\n"
    '\n"Desktop",5,1,device_type'
)
ROWS = f"{HEAD}1001007,Gender,2000246,Female\ndevice_type,,1,Desktop\n"


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(DOCUMENT).encode(),
        b"\xef\xbb\xbf" + json.dumps(DOCUMENT, indent=4).encode(),
        ROWS.encode(),
        b"\xef\xbb\xbf" + ROWS.replace(",", ";").replace("\n", "\r\n").encode(),
        ROWS.replace(",", "\t").encode(),
        ANY_ORDER.encode(),
    ],
)
def test_names_are_read_from_json_and_csv(tmp_path, content):
    (tmp_path / "names").write_bytes(content)
    assert FILES["labels"](tmp_path / "names") == NAMES
    assert FILES["labels"](None) == {}


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "row 1: there must be the columns"),
        (b"\x89PNG\r\n\xff\xfe", "is not UTF-8"),
        (b"a\0b", "row 1: there must be the columns"),
        (b"[1]", r"must be a JSON object, as in .*, not \[1\]"),
        (b'{"1": 5}', "question '1' must be a JSON object"),
        (b'{"1": {"name": 5}}', "question '1': the name must be a text, not 5"),
        (b'{"1": {"answers": [2]}}', r"question '1', answers must be a JSON object, as in .*, not \[2\]"),
        (b'{"1": {"answers": {"2": null, "x": "y"}}}', "question '1', answer 'x': an ID must have digits only"),
        (b'{"Gender": {"name": "x"}}', "question 'Gender': an ID must have digits only"),
        (b'{"1": {"name": "x"}', "is not JSON: Expecting ',' delimiter: line 1"),
        (b"[" * 100_000, "is not JSON: maximum recursion depth"),
        (b'{"1": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"question,question,answer,answer name\n", "row 1: there must be the columns .*, each once"),
        (f"{HEAD}1,a,2,b\n1,a,2,c\n".encode(), "row 3: question '1', answer '2' has two names: 'b' and 'c'"),
        (f"{HEAD},,2,b\n".encode(), "row 2: question '': an ID must have digits only"),
        (f'{HEAD}1,a,2,"b\n'.encode(), "line 2: this is not CSV"),
        (HEAD.encode() + b"1," + b"a" * 200_000, "line 2: this is not CSV: field larger than"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path, content, error):
    path = tmp_path / "names.json"
    path.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=error) as caught:
        FILES["labels"](path)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_is_none_or_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sampling_async._cli._files._MOST_BYTES", 2**20)
    (tmp_path / "large").write_bytes(b" " * (2**20 + 1))
    for name, error in (("large", "is larger than 1 MB"), ("none", "No such file"), (".", "Is a directory")):
        with pytest.raises(InvalidRequestError, match=error):
            FILES["labels"](tmp_path / name)


@pytest.fixture
def service(tmp_path, monkeypatch):
    with served_panel(tmp_path, monkeypatch) as simulator:
        questions = {
            str(each.question_id): {"name": f"Q<{each.question_id % 1000}>"}
            for survey in simulator.inventory.surveys
            for quota in survey.quotas
            for layer in quota.layers
            for sub in layer.sub_quotas
            for each in sub.questions_and_answers
        }
        Path("names.json").write_text(json.dumps(questions))
        yield simulator


def test_the_page_of_a_match_names_questions(service):
    arguments = ("match", "panel.jsonl", "--inventory", "quotas.json", "--workers", 1)
    assert run(*arguments, "--html", "plain.html").exit_code == 0
    done = run(*arguments, "--html", "named.html", "--labels", "names.json")
    assert done.exit_code == 0, done.stderr
    assert "Q&lt;538&gt;" in Path("named.html").read_text()
    assert "1001538" in Path("plain.html").read_text()
    assert "1001538" not in Path("named.html").read_text()


def test_the_table_of_a_survey_names_questions(service, monkeypatch):
    on_terminal(monkeypatch)
    asked = next(each for each in service.inventory.surveys if any(quota.layers for quota in each.quotas))
    arguments = ("quotas", "--survey", asked.survey_id)
    assert "Q<" not in run(*arguments).stdout
    assert "Q<" in run(*arguments, "--labels", "names.json").stdout


def test_a_bad_file_is_an_error_of_use_before_anything_is_asked(service):
    Path("bad.json").write_text('{"1": 5}')
    for command in (
        ("match", "panel.jsonl", "--inventory", "quotas.json", "--html", "x.html"),
        ("quotas",),
        ("campaign", "report", "out"),
    ):
        result = run(*command, "--labels", "bad.json")
        assert (result.exit_code, result.stdout) == (2, ""), result.stderr
        assert "bad.json, question '1' must be a JSON object" in result.stderr
    assert run("match", "panel.jsonl", "--labels", "names.json").exit_code == 2
    assert not Path("x.html").exists()
