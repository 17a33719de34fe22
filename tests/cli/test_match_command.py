"""The command `match`: its inputs, its outputs, and its error messages."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import cli_kit
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_kit import on_terminal, to_install
from panel_kit import AGE, divide

from sampling_async import InviteRequest, Quotas, from_json, to_json
from sampling_async.matching import Allocate, PanelMatcher, QuestionKinds, QuotaIndex
from sampling_async.simulator import AGE_BANDS, Simulator, generate_inventory, generate_members

MEMBERS = list(generate_members(5, members=60))
INVENTORY = from_json(Quotas, to_json(generate_inventory(5, surveys=30)))
INDEX = QuotaIndex(INVENTORY, kinds=QuestionKinds.default().with_age(AGE, AGE_BANDS))


def first(answer):
    """Return the first of several answers; CSV and our Parquet files hold only one."""
    return min(answer) if isinstance(answer, frozenset) else answer


PROFILES = [{id_: first(answer) for id_, answer in member.profile.items()} for member in MEMBERS]
MATCHED = [INDEX.match(each) for each in PROFILES]


@pytest.fixture
def panel(tmp_path, monkeypatch):
    """Change to a folder with one panel in all kinds of files, and an inventory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "quotas.json").write_bytes(to_json(INVENTORY))
    (tmp_path / "bands.json").write_text(json.dumps(AGE_BANDS))
    questions = sorted({id_ for profile in PROFILES for id_ in profile})
    columns = {
        "member_code": [member.member_code for member in MEMBERS],
        **{str(id_): [profile.get(id_) for profile in PROFILES] for id_ in questions},
    }
    pq.write_table(pa.table(columns), "panel.parquet", row_group_size=25)
    with Path("panel.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    objects = [
        json.dumps({"member_code": member.member_code, **profile})
        for member, profile in zip(MEMBERS, PROFILES, strict=True)
    ]
    Path("panel.jsonl").write_text("\n".join(objects))
    return tmp_path


def run(*arguments, code: int = 0):
    given = ["match", *map(str, arguments), "--bands", "bands.json", "--workers", "1"]
    if "--live" not in given:
        given += ["--inventory", "quotas.json"]
    result = cli_kit.run(*(each for each in given if each != "--live"))
    assert result.exit_code == code, result.stderr
    return result


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def expected_counts() -> dict[int, tuple[int, int]]:
    return {
        id_: (sum(id_ in each.certain for each in MATCHED), sum(id_ in each.possible for each in MATCHED))
        for id_ in INDEX.quota_ids
    }


SOURCES = ["panel.parquet", "panel.csv", "panel.jsonl", "SELECT * FROM 'panel.parquet'"]


@pytest.mark.parametrize("source", SOURCES)
def test_counts_equal_those_of_the_index_for_every_kind_of_file(panel, source, monkeypatch):
    divide(monkeypatch, line_bytes=2000)  # a line begins in one block and ends in the next
    rows = lines(run(source).stdout)
    assert {row["QuotaID"]: (row["Certain"], row["Possible"]) for row in rows} == expected_counts()
    assert [row["QuotaID"] for row in rows] == list(INDEX.quota_ids)
    for row in rows:
        assert row["Shortfall"] == max(row["Needed"] - row["Certain"], 0)


@pytest.mark.parametrize("source", SOURCES)
def test_the_best_quotas_of_each_member(panel, source):
    rows = lines(run(source, "--top", 3).stdout)
    assert [row["MemberCode"] for row in rows] == [member.member_code for member in MEMBERS]
    assert [tuple(row["QuotaIDs"]) for row in rows] == [each.select(3) for each in MATCHED]


def test_requests_contain_only_members_that_match_a_quota(panel):
    requests = [
        InviteRequest(row["MemberCode"], tuple(row["QuotaIDs"]))
        for row in lines(run("panel.csv", "--requests", 3).stdout)
    ]
    assert requests == [
        InviteRequest(member.member_code, each.select(3))
        for member, each in zip(MEMBERS, MATCHED, strict=True)
        if each.certain or each.possible
    ]


def test_an_allocation_gives_no_quota_more_than_it_can_use(panel):
    found = lines(run("panel.csv", "--allocate", 3).stdout)
    table = pq.read_table("panel.parquet")
    expected = PanelMatcher(INDEX, Allocate(3)).run(table).read_all().to_pylist()
    assert [(row["MemberCode"], row["QuotaIDs"]) for row in found] == [
        (row["member_code"], row["quota_ids"]) for row in expected if row["quota_ids"]
    ]
    rooms = PanelMatcher(INDEX, Allocate(3)).terms().rooms
    given = Counter(quota_id for row in found for quota_id in row["QuotaIDs"])
    assert [quota_id for quota_id, count in given.items() if count > rooms[quota_id]] == []


def test_result_files_appear_when_the_run_is_complete(panel):
    for name in ("best.parquet", "best.csv", "best.jsonl"):
        assert f"60 members matched: {name}" in run("panel.csv", "--top", 2, "--output", name).stderr
    wanted = [list(each.select(2)) for each in MATCHED]
    assert pq.read_table("best.parquet").column("quota_ids").to_pylist() == wanted
    assert [row["QuotaIDs"] for row in lines((panel / "best.jsonl").read_text())] == wanted
    with Path("best.csv").open(newline="") as file:
        assert [list(map(int, row["quota_ids"].split())) for row in csv.DictReader(file)] == wanted
    assert not list(panel.glob("*.part"))


def test_a_failed_run_leaves_no_result_file(panel):
    (panel / "wrong.csv").write_text(f"member_code,{AGE}\n" + "m,30\n" * 40_000 + "m,old\n")
    result = run("wrong.csv", "--top", 2, "--output", "best.csv", code=2)
    assert "row 40000 of the panel: profile[1001538]: an age must be a whole number of years" in result.stderr
    assert not list(panel.glob("best.csv*"))


def test_a_sample_of_each_quota(panel):
    rows = lines(run("panel.parquet", "--sample", 2).stdout)
    counts = expected_counts()
    drawn = {id_: [row for row in rows if row["QuotaID"] == id_] for id_ in counts}
    assert {id_: len(each) for id_, each in drawn.items()} == {
        id_: min(2, certain + possible) for id_, (certain, possible) in counts.items()
    }


def test_columns_may_have_other_names(panel):
    table = pq.read_table("panel.parquet")
    names = {str(AGE): "age", "member_code": "id"}
    pq.write_table(
        table.rename_columns([names.get(name, name) for name in table.column_names]), "named.parquet"
    )
    result = run("named.parquet", "--top", 2, "--column", f"{AGE}=age", "--column", "member_code=id")
    assert result.stdout == run("panel.parquet", "--top", 2).stdout


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("SELECT * FROM 'panel.parquet'; COPY (SELECT 1) TO 'made.csv'", "SELECT, COPY"),
        ("SELECT 1; SELECT * FROM 'panel.parquet'", "SELECT, SELECT"),
        ("SELECT 1; ATTACH 'made.db'", "SELECT, ATTACH"),
        ("SELECT 1; INSTALL httpfs", "SELECT, LOAD"),
        ("SELECT 1; SET threads = 1; EXPORT DATABASE 'made'", "SELECT, SET, EXPORT"),
        ("FROM 'panel.parquet' SELECT *; CREATE TABLE made AS SELECT 1", "SELECT, CREATE"),
        ("WITH one AS (SELECT 1) INSERT INTO made SELECT * FROM one", "INSERT"),
    ],
)
def test_a_query_is_one_select_and_writes_nothing(panel, query, found):
    before = sorted(panel.iterdir())
    result = run(query, code=2)
    said = " ".join(result.stderr.split())
    assert f"must be one SELECT statement, which only reads, not {found}" in said
    assert sorted(panel.iterdir()) == before


def test_a_pivot_lists_its_columns(panel):
    answers = f"SELECT 'm' AS member_code, {AGE} AS q, 30 AS a"
    pivot = f"FROM (PIVOT ({answers}) ON q %s USING first(a) GROUP BY member_code)"
    said = " ".join(run(pivot % "", code=2).stderr.split())
    assert "list them, as in PIVOT ... ON column IN (1, 2)" in said
    run(pivot % f"IN ({AGE})")


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM 'panel.parquet'",
        "select * from read_parquet('panel.parquet'); -- COPY ... TO",
        "FROM 'panel.parquet'",
        "WITH all_of AS (SELECT * FROM 'panel.parquet') SELECT * FROM all_of WHERE member_code != '; COPY'",
    ],
)
def test_a_query_reads_the_files_that_it_names(panel, query):
    assert lines(run(query, "--json").stdout)


def test_a_query_sees_no_variables_of_the_program(panel):
    result = run("SELECT * FROM renamed", code=2)
    assert "the query failed" in result.stderr


@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_results_are_for_their_owner_only_whatever_was_there(panel, ending):
    (panel / f"second.{ending}").touch(mode=0o666)
    for name in ("first", "second"):
        run("panel.csv", "--output", f"{name}.{ending}")
        assert (panel / f"{name}.{ending}").stat().st_mode & 0o777 == 0o600


def test_results_follow_a_symbolic_link_and_change_no_other_file(panel):
    (panel / "real").mkdir()
    (panel / "best.csv.part").write_text("mine")
    (panel / "best.csv").symlink_to(panel / "real" / "best.csv")
    run("panel.csv", "--top", 2, "--output", "best.csv")
    assert (panel / "best.csv").is_symlink()
    assert (panel / "real" / "best.csv").read_text().startswith('"member_code"')
    assert [file.name for file in (panel / "real").iterdir()] == ["best.csv"]
    assert (panel / "best.csv.part").read_text() == "mine"


def test_the_inventory_comes_from_the_service_unless_a_file_is_given(panel, monkeypatch):
    simulator = Simulator(seed=5, surveys=30, members=1)
    with simulator.serve() as base_url:
        monkeypatch.setenv("SAMPLING_BASE_URL", base_url)
        monkeypatch.setenv("SAMPLING_PANEL_GUID", simulator.panel_guid)
        monkeypatch.setenv("SAMPLING_API_KEY", simulator.api_key)
        live = run("panel.parquet", "--live")
    assert len(lines(live.stdout)) == sum(len(survey.quotas) for survey in simulator.inventory.surveys)


def test_on_a_terminal_there_is_a_table_of_the_first_and_a_sum(panel, monkeypatch, capsys):
    on_terminal(monkeypatch)
    shown = run("panel.parquet").stdout
    rows = expected_counts()
    assert "Shortfall" in shown
    assert f"and {len(rows) - 40} more; a pipe or --output FILE gets all" in shown
    assert f"60 members, {len(rows)} quotas:" in shown


@pytest.mark.parametrize("columns", ["60", "140"])
@pytest.mark.parametrize("option", ["--top", "--requests", "--sample", "--allocate"])
def test_on_a_terminal_there_are_the_first_rows_of_all_outputs(panel, monkeypatch, option, columns):
    on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", columns)
    shown = run("panel.parquet", option, 20).stdout
    assert len(shown.splitlines()) < (100 if columns == "60" else 60)  # 40 rows of one or two lines
    assert "more; a pipe or --output FILE gets all" in shown
    assert ("sampling-async fan-out" in shown) == (option in {"--requests", "--allocate"})
    if option in {"--top", "--requests"}:
        certain = sum(bool(each.certain) for each in MATCHED)
        possible = sum(bool(each.possible) and not each.certain for each in MATCHED)
        rest = len(MATCHED) - certain - possible
        printed = f"60 members: {certain} match a quota for certain, {possible} possibly, {rest} none."
        assert printed in " ".join(shown.split())
        assert " ".join(map(str, MATCHED[0].select(2))) in shown or columns == "60"
    assert len(lines(run("panel.parquet", option, 20, "--json").stdout)) > 20


@pytest.mark.parametrize(
    "form",
    [
        lambda body: body,
        lambda body: json.dumps(json.loads(body), indent=2).encode(),
        lambda body: b"\xef\xbb\xbf" + body,
        lambda body: body.decode().encode("utf-16"),
        lambda _: b"".join(to_json(survey) + b"\r\n\n" for survey in INVENTORY.surveys),
        lambda _: b"\xef\xbb\xbf" + b"\n".join(map(to_json, INVENTORY.surveys)),
        lambda _: b'{"X": "' + b"x" * 9999 + b'", ' + to_json(INVENTORY)[1:],
    ],
    ids=["document", "indented", "marked", "UTF-16", "lines", "marked lines", "late"],
)
def test_an_inventory_is_read_in_all_forms_it_is_written_in(panel, form):
    (panel / "quotas.json").write_bytes(form(to_json(INVENTORY)))
    assert {row["QuotaID"]: (row["Certain"], row["Possible"]) for row in lines(run("panel.csv").stdout)} == (
        expected_counts()
    )


def test_an_inventory_may_come_from_a_pipe(panel):
    result = cli_kit.run("match", "panel.csv", "--inventory", "-", "--workers", 1, stdin=to_json(INVENTORY))
    assert len(lines(result.stdout)) == len(expected_counts())


def test_a_file_named_stdin_is_a_file(panel):
    (panel / "quotas.json").rename(panel / "stdin")
    arguments = ["match", "panel.csv", "--inventory", "stdin", "--workers", "1"]
    assert len(lines(cli_kit.run(*arguments).stdout)) == len(expected_counts())


def test_age_bands_beside_a_panel_count_unless_others_are_given(panel):
    (panel / "bands.json").rename(panel / "panel.bands.json")
    arguments = ["match", "panel.csv", "--inventory", "quotas.json", "--workers", "1"]
    result = cli_kit.run(*arguments)
    assert result.stderr == ""
    assert {
        row["QuotaID"]: (row["Certain"], row["Possible"]) for row in lines(result.stdout)
    } == expected_counts()
    (panel / "none.json").write_text("{}")
    assert "oddities" in cli_kit.run(*arguments, "--bands", "none.json").stderr


def test_a_column_that_first_appears_late_in_json_lines_is_read(panel, monkeypatch):
    divide(monkeypatch, line_bytes=50)
    rows = [{"member_code": f"m{at}"} for at in range(9)]
    (panel / "late.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"member_code": "n", "age": 30}])))
    assert lines(run("late.jsonl", "--top", 1, "--column", f"{AGE}=age").stdout)[-1]["MemberCode"] == "n"
    assert "there is no column 'alter'" in run("late.jsonl", "--column", f"{AGE}=alter", code=2).stderr


def test_a_simulated_panel_is_matched_without_a_warning(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(Simulator, "run", lambda sim, **_: ran.append(sim))
    monkeypatch.chdir(tmp_path)
    made = cli_kit.run(
        "simulate", "--port", 0, "--members", 12, "--members", "p.parquet", "--members", "p.jsonl"
    )
    assert made.exit_code == 0, made.stderr
    assert "sampling-async match p.jsonl" in made.stdout
    (sim,) = ran
    Path("quotas.json").write_bytes(to_json(sim.inventory))
    printed = [
        cli_kit.run("match", name, "--inventory", "quotas.json", "--workers", 1, "--top", 5)
        for name in ("p.parquet", "p.jsonl")
    ]
    assert [each.stderr for each in printed] == ["", ""]
    assert printed[0].stdout == printed[1].stdout
    index = QuotaIndex(sim.inventory, kinds=QuestionKinds.default().with_age(AGE, AGE_BANDS))
    for row, each in zip(lines(printed[0].stdout), sim.members.values(), strict=True):
        matched = index.match(each.profile, device_type=each.device_type_id, participations=each.participations)
        assert (row["MemberCode"], tuple(row["QuotaIDs"])) == (each.member_code, matched.select(5))


def test_missing_columns_and_odd_values_of_a_panel_are_reported(panel):
    (panel / "few.csv").write_text(f"{AGE}\n30\n")
    printed = run("few.csv").stderr
    assert "questions, so they count as not answered: " in printed
    (panel / "bands.json").write_text("{}")
    odd = run("panel.csv").stderr
    assert "oddities, which count as possible; the first: quota" in odd
    assert "give the age bands with --bands FILE" in odd


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nix.csv"], "nix.csv: the file does not exist"),
        (["."], "neither a query (SELECT ...) nor a file that ends in .parquet, .csv, .jsonl, .ndjson"),
        (["folder.csv"], "folder.csv is a folder, not a file"),
        (["empty.jsonl"], "empty.jsonl is empty"),
        (["panel.csv", "--inventory", "folder.csv"], "folder.csv: Is a directory"),
        (
            ["panel.csv", "--inventory", "empty.csv"],
            "empty.csv is empty; write one with `sampling-async quotas",
        ),
        (["panel.csv", "--inventory", "panel.csv"], "panel.csv is not an inventory: $: expected JSON"),
        (["panel.csv", "--inventory", "panel.parquet"], "panel.parquet is not an inventory"),
        (["panel.csv", "--inventory", "panel.jsonl"], "panel.jsonl, line 1 is not a survey: $.SurveyID"),
        (["panel.csv", "--inventory", "cut.jsonl"], "cut.jsonl, line 3 is not a survey: $: expected JSON"),
        (["panel.csv", "--inventory", "wrong.json"], "wrong.json is not an inventory: $.Surveys[0]."),
        (
            ["panel.csv", "--column", "1001538=alter"],
            "panel.csv: --column 1001538=alter: there is no column 'alter'",
        ),
        (["panel.parquet", "--column", "1001538=alter"], "the columns are 'member_code', '1001007'"),
        (
            ["SELECT 1 AS age", "--column", "1001538=alter"],
            "the query: --column 1001538=alter: there is no column",
        ),
        (["panel.csv", "--column", "1001538=a", "--column", "1001007=a"], "was given before"),
        (["panel.csv", "--column", "1001538=a", "--column", "1001538=b"], "was given before"),
        (
            ["panel.csv", "--column", "member_code=1001538"],
            "panel.csv: --column member_code=1001538: there is also a column",
        ),
        (["named.csv"], "it has 'id', 'age', 'ZIP code'"),
        (["named.csv"], "--column 1001538=age --column '1001042=ZIP code' --column member_code=id"),
        (["named.csv", "--top", "2", "--column", "1001538=age"], "Give --column member_code=id"),
        (["SELECT * FROM 'nix.parquet'"], "the query failed"),
        (["SELEKT.csv"], "the file does not exist"),
        (["panel.csv", "--top", "2", "--sample", "2"], "give only one of --top"),
        (["panel.csv", "--top", "0"], "--top"),
        (["panel.csv", "--column", "age"], "--column must be QUESTION=NAME, such as 1001538=age"),
        (["panel.csv", "--output", "x.txt"], "--output must end in .parquet, .csv, .jsonl"),
        (["panel.csv", "--output", "nix/x.csv"], "the folder does not exist"),
        (["panel.csv", "--inventory", "nix.json"], "nix.json: No such file"),
        (["panel.csv", "--bands", "nix.json"], "nix.json: No such file"),
        (["panel.csv", "--bands", "quotas.json"], "age bands must be a JSON object of answer IDs"),
        (["panel.csv", "--bands", "endless.json"], "age bands must be a JSON object of answer IDs"),
        (["empty.csv"], "empty.csv"),
        (["unknown.csv"], "unknown.csv: the panel has no column for any question of the inventory, such as"),
        (["unknown.csv"], "Name the columns: --column 1001007=NAME"),
        (["twice.csv", "--top", "1"], "twice.csv has 2 columns '1001538'"),
        (["broken.parquet"], "broken.parquet"),
        (["broken.jsonl"], "broken.jsonl, line 2: each line of a panel must be a JSON object"),
        (["short.csv"], "short.csv, row 1 of the panel has 1 column in place of 2: texts with commas"),
        (["panel.csv", "--output", "panel.csv"], "--output panel.csv is the panel itself"),
        (["panel.csv", "--inventory", "stock.jsonl", "--output", "stock.jsonl"], "is the inventory itself"),
        (["panel.csv", "--bands", "half.json"], "age bands must be a JSON object of answer IDs"),
        (["zero.jsonl"], "zero.jsonl, line 3: '1001042' must be a text in quotation marks"),
        (["number.jsonl", "--column", "member_code=id"], "number.jsonl, line 1: 'id' must be a text"),
        (["panel.csv", "--output", "folder.csv"], "--output folder.csv is a folder"),
        (["nobody.csv", "--top", "1"], "nobody.csv: row 1 of the panel has no member_code"),
        (["large.jsonl"], "large.jsonl: "),
        (
            ["no_codes.csv", "--top", "2"],
            "no_codes.csv: the panel has no column 'member_code', which is needed to name members; it has",
        ),
    ],
)
def test_errors_are_reported_in_one_line(panel, arguments, words):
    (panel / "empty.csv").write_text("")
    (panel / "unknown.csv").write_text("a,b\n1,2\n")
    (panel / "twice.csv").write_text(f"member_code,{AGE},{AGE}\nm,1,2\n")
    (panel / "broken.parquet").write_bytes(b"PAR1 no")
    (panel / "broken.jsonl").write_text('{"1001538": 30}\n{"1001538": \n')
    (panel / "no_codes.csv").write_text(f"{AGE}\n30\n")
    (panel / "half.json").write_text('{"2006351": [18.9, 24]}')
    (panel / "zero.jsonl").write_text('{"1001042": "01023"}\n\n{"1001042": 1023}\n')
    (panel / "number.jsonl").write_text('{"id": 123, "1001538": 30}\n{"id": "m"}\n')
    (panel / "short.csv").write_text(f"member_code,{AGE}\nm,1\nSECRET\n")
    (panel / "nobody.csv").write_text(f"member_code,{AGE}\nm,1\n,2\n")
    (panel / "large.jsonl").write_text(f'{{"{AGE}": {2**70}}}\n{{"{AGE}": true}}')
    (panel / "folder.csv").mkdir()
    (panel / "endless.json").write_text('{"2006351": [18, 1e999]}')
    (panel / "empty.jsonl").write_text("")
    (panel / "named.csv").write_text("id,age,ZIP code\nm,30,01234\n")
    surveys = [to_json(survey) for survey in INVENTORY.surveys[:2]]
    (panel / "stock.jsonl").write_bytes(b"\n".join(surveys))
    (panel / "cut.jsonl").write_bytes(b"\n".join([*surveys, surveys[0][:500]]))
    (panel / "wrong.json").write_text(
        '{"CountryID": 1, "CacheExpires": "2026-01-15T00:00:00Z", "Surveys": [{"SurveyID": 1}]}'
    )
    given = ["match", *arguments]
    for name, file in (("--inventory", "quotas.json"), ("--bands", "bands.json")):
        if name not in arguments:
            given += [name, file]
    result = cli_kit.run(*given)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("\u2502", " ").split())
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "SECRET" not in result.stderr


@pytest.mark.parametrize(
    "more", [["--top", 2, "--output", "new.parquet"], ["--html", "new.html"], ["--allocate", 3], []]
)
def test_a_panel_without_members_is_an_error_and_leaves_nothing(panel, more):
    (panel / "none.csv").write_text(f"member_code,{AGE}\n")
    before = set(panel.iterdir())
    result = cli_kit.run("match", "none.csv", "--inventory", "quotas.json", *more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "none.csv: the panel has no members" in result.stderr
    assert set(panel.iterdir()) == before


@pytest.mark.parametrize("missing", ["pyarrow", "numpy"])
def test_a_missing_extra_is_named_with_what_to_install(panel, missing):
    script = f"import sys; sys.modules[{missing!r}] = None; from sampling_async import _cli; _cli.main()"
    ran = subprocess.run(
        [sys.executable, "-c", script, "match", "panel.csv", "--inventory", "quotas.json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert ran.returncode == 2
    assert ran.stderr == f"sampling-async: match needs {missing}: {to_install('panel')}\n"


def test_a_query_without_duckdb_says_what_to_install(panel, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    result = run("SELECT 1", code=2)
    assert f"a query needs duckdb: {to_install('duckdb')}" in result.stderr


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("option", ["--requests", "--allocate"])
def test_a_panel_with_a_member_twice_gives_no_requests(tmp_path, monkeypatch, form, option):
    monkeypatch.chdir(tmp_path)
    Path("quotas.json").write_bytes(to_json(INVENTORY))
    columns = {"member_code": ["zz7", "b", None, None, "zz7"], str(AGE): [30, 40, 50, 50, 30]}
    if form == "parquet":
        pq.write_table(pa.table(columns), "panel.parquet")
    elif form == "csv":
        rows = [
            ",".join(columns),
            *(f"{code or ''},{age}" for code, age in zip(*columns.values(), strict=True)),
        ]
        Path("panel.csv").write_text("\n".join(rows))
    else:
        keys = list(columns)
        rows = [json.dumps(dict(zip(keys, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        Path("panel.jsonl").write_text("\n".join(rows))
    result = cli_kit.run("match", f"panel.{form}", "--inventory", "quotas.json", option, 3, "--workers", 1)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "row 4 has the member code of an earlier row; each member must have one row" in result.stderr
    assert "zz7" not in result.stderr
