"""What commands have in common: CSV, errors as JSON, colours, and where their help points."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from cli_kit import commands, program, run, served_panel

from sampling_async.simulator import Fault

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def sim(tmp_path, monkeypatch):
    with served_panel(tmp_path, monkeypatch) as simulator:
        yield simulator


def rows_of(*arguments, stdin=None, code=0) -> list[dict[str, str]]:
    result = run(*arguments, "--csv", stdin=stdin)
    assert result.exit_code == code, result.stderr
    return list(csv.DictReader(io.StringIO(result.stdout)))


def quotas_of(sim) -> list:
    return [quota for survey in sim.inventory.surveys for quota in survey.quotas]


# --- CSV


def test_quotas_are_a_row_each(sim):
    rows = rows_of("quotas")
    assert [int(row["QuotaID"]) for row in rows] == [quota.quota_id for quota in quotas_of(sim)]
    survey = sim.inventory.surveys[0]
    assert (rows[0]["SurveyID"], rows[0]["LOI"]) == (str(survey.survey_id), str(survey.loi))
    assert rows[0]["DeviceTypeIDs"] == " ".join(map(str, survey.device_type_ids))
    assert {row["SurveyID"] for row in rows_of("quotas", "--survey", survey.survey_id)} == {
        str(survey.survey_id)
    }


def test_outcomes_have_the_same_columns_whatever_they_are(sim):
    ids = [quota.quota_id for quota in quotas_of(sim)]
    rows = rows_of("bulk-invite", "m000001", *ids)
    made = {str(invite.quota_id): invite.url for invite in sim.ledger.invites}
    assert {row["QuotaID"]: row["URL"] for row in rows if row["Status"] == "invited"} == made
    assert {row["Replayed"] for row in rows} == {"false"}
    requests = json.dumps({"MemberCode": 'a,"b', "QuotaIDs": ids[:2]})
    assert [row["MemberCode"] for row in rows_of("fan-out", stdin=requests)] == ['a,"b'] * 2


def test_other_tables_are_rows_too(sim, tmp_path):
    assert rows_of("settings")[0].keys() >= {"Name", "Value"}
    matched = rows_of("match", "panel.jsonl", "--inventory", "quotas.json", "--workers", 1)
    assert {int(row["QuotaID"]) for row in matched} == {quota.quota_id for quota in quotas_of(sim)}
    best = rows_of("match", "panel.jsonl", "--inventory", "quotas.json", "--workers", 1, "--top", 2)
    assert best[0].keys() == {"MemberCode", "QuotaIDs", "Certain"}
    started = run("campaign", "panel.jsonl", "--out", "night", "--yes", "--workers", 1)
    assert started.exit_code == 0
    assert [row["Name"] for row in rows_of("campaign", "compare", "night")] == ["night"]
    funnel = rows_of("outcomes", "--store", "store.db", "--invites", "night/campaign.ledger")
    assert sum(int(row["Invited"]) for row in funnel) == len(sim.ledger.invites)
    assert len(rows_of("outcomes", "--store", "store.db", "--rows")) == len(sim.ledger.invites)


def test_csv_and_json_are_not_both(sim):
    result = run("settings", "--csv", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "not both" in result.stderr


def test_the_next_command_of_a_process_is_json_again(sim):
    rows_of("settings")
    assert json.loads(run("settings").stdout.splitlines()[0])["Name"]


# --- Errors as JSON


def error_of(*arguments, env=None) -> tuple[int, dict]:
    process = program(*arguments, env=env or {})
    stdout, stderr = process.communicate(timeout=30)
    assert stdout == ""
    (line,) = stderr.splitlines()
    return process.returncode, json.loads(line)


def test_errors_are_json_where_json_is_wanted(sim):
    code, error = error_of("invite", "nobody", 1, "--json")
    assert (code, error["ExitCode"], error["ResultCode"]) == (3, 3, 12)
    assert error["RequestID"]
    code, error = error_of("settings", "--json", env={"SAMPLING_API_KEY": ""})
    assert (code, error) == (2, error)
    assert "SAMPLING_API_KEY" in error["Error"]
    code, error = error_of("quotas", "--json", "--nonsense")
    assert (code, error["ExitCode"]) == (2, 2)
    assert "--nonsense" in error["Error"]
    sim.faults.add(Fault.status(503))
    code, error = error_of("settings", "--json", "--attempts", 1)
    assert (code, error["ExitCode"]) == (4, 4)


def test_without_json_they_are_a_line(sim):
    result = run("invite", "nobody", 1)
    assert result.stderr.startswith("sampling-async: generate_invite: the service answered 400 12")


def test_success_ends_with_0_under_json(sim):
    process = program("settings", "--json")
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (0, "")
    assert json.loads(stdout.splitlines()[0])


# --- Colours, help


@pytest.mark.parametrize("place", [0, 1, 2])
def test_colours_can_be_switched_off_anywhere(place):
    arguments = ["campaign", "run"]
    arguments.insert(place, "--no-color")
    process = program(*arguments, "--help", env={"FORCE_COLOR": "1", "COLUMNS": "100"})
    stdout, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "\x1b[3" not in stdout  # bold and dim stay, as with NO_COLOR
    assert "campaign run" in stdout


def test_each_help_names_a_page_that_is_there_and_connection_options_stand_once():
    pages = set()
    for name, _ in commands():
        shown = run(*name.split(), "--help").stdout
        pages.add(page := shown.partition("More: ")[2].split()[0])
        assert (DOCS.parent / page).is_file(), name
        assert "--client-cert" not in shown
    assert len(pages) == 10  # most groups of commands have their own
    assert run("--help").stdout.count("--client-cert") == 1


@pytest.mark.parametrize("columns", [60, 80])
def test_the_help_of_the_program_has_the_connection_options_at_any_width(columns):
    shown, _ = program("--help", env={"COLUMNS": str(columns)}).communicate(timeout=30)
    assert max(len(line) for line in shown.splitlines() if "https://" not in line) <= columns
    for option in ("--profile", "--base-url", "--max-concurrency", "--client-cert"):
        assert option in shown
    assert "[bold]" not in shown
