"""The command line: its output, its exit codes, and the secrets that it never shows."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import anyio
import doubles
import pytest
import typer
import wire
from cli_kit import (
    ENDINGS,
    KEY_NAMES,
    at_keyboard,
    commands,
    lines,
    main,
    member,
    on_terminal,
    program,
    quota_ids,
    run,
    wait_for_handlers,
)
from forward_proxy import ForwardProxy

from sampling_async import Quotas, SamplingClient, from_json
from sampling_async import Survey as SurveyRecord
from sampling_async._contract.extras import install
from sampling_async.simulator import Fault, Simulator

UNKNOWN_KEY = "cafecafe-0000-4000-8000-00000000cafe"
ROOT = Path(__file__).parents[2]


# --- Reading ----------------------------------------------------------------------------------------------


def test_piped_quotas_are_surveys_with_the_names_of_the_contract(sim):
    result = run("quotas")
    assert result.exit_code == 0
    surveys = tuple(from_json(SurveyRecord, line) for line in result.stdout.splitlines())
    assert surveys == sim.inventory.surveys
    assert {"SurveyID", "WaveID", "LOI", "IR", "Price", "Quotas"} <= lines(result)[0].keys()
    assert result.stderr == ""


def test_quotas_can_be_limited_to_one_survey_and_without_routables(sim):
    wanted = sim.inventory.surveys[2].survey_id
    assert [each["SurveyID"] for each in lines(run("quotas", "--survey", wanted, "--no-routables"))] == [wanted]
    missing = run("quotas", "--survey", 1)
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "survey 1 has no open quotas" in missing.stderr


def test_quotas_on_a_terminal_are_a_table(sim, monkeypatch):
    on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    survey = sim.inventory.surveys[0]
    table = run("quotas").stdout
    assert str(survey.survey_id) in table
    assert "Recontact" in table
    assert "20 surveys (1 recontact)" in table
    assert max(map(len, table.splitlines())) <= 80
    assert str(survey.quotas[0].quota_id) in run("quotas", "--survey", survey.survey_id).stdout
    assert "Qualified URL" in run("settings").stdout
    assert from_json(Quotas, run("quotas", "--json").stdout).surveys == sim.inventory.surveys


def test_quotas_as_json_are_one_document_as_the_service_sends_it(sim):
    whole = run("quotas", "--json").stdout
    assert from_json(Quotas, whole) == sim.inventory
    assert whole.count("\n") == 1
    wanted = sim.inventory.surveys[2]
    (document,) = lines(run("quotas", "--survey", wanted.survey_id, "--json"))
    assert document.keys() == {"CountryID", "CacheExpires", "Surveys"}
    assert [each["SurveyID"] for each in document["Surveys"]] == [wanted.survey_id]


@pytest.mark.parametrize("columns", [30, 60, 80, 140])
def test_the_inventory_is_never_wider_than_the_terminal_and_cuts_no_number(sim, monkeypatch, columns):
    on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = run("quotas").stdout
    assert (
        all(len(line) <= columns for line in shown.splitlines()[: len(sim.inventory.surveys)]) or columns < 60
    )
    for survey in sim.inventory.surveys:
        assert str(survey.survey_id) in shown
        assert f"{survey.estimated_completes_remaining:,}" in shown
    assert ("Not shown, because the terminal is narrow" in " ".join(shown.split())) == (columns < 80)


@pytest.mark.parametrize(("columns", "is_stacked"), [(60, True), (140, False)])
def test_a_value_that_is_too_long_for_its_line_is_printed_below_its_name(sim, monkeypatch, columns, is_stacked):
    on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = run("settings").stdout.splitlines()
    assert ("Qualified URL" in shown) == is_stacked
    assert all(len(line) <= columns for line in shown)


def test_the_reference_data_key_is_masked_everywhere(sim, monkeypatch):
    async def settings():
        async with sim.client() as client:
            return await client.get_settings()

    secret = anyio.run(settings).reference_data_api_auth_key
    assert secret
    piped = run("settings")
    on_terminal(monkeypatch)
    for result in (piped, run("settings"), run("settings", "--debug")):
        assert result.exit_code == 0
        assert secret not in result.output
        assert "<hidden>" in result.stdout
    assert {"Name", "Description", "Value"} == lines(piped)[0].keys()


def test_a_placeholder_is_no_markup_and_control_characters_are_seen(sim, monkeypatch):
    on_terminal(monkeypatch)
    url = "https://partner.example/?id=[pid]&x=\x1b[31m"
    settings = [{"Name": "Qualified URL", "Description": "", "Value": url}]
    with wire.serve(wire.serve_each(lambda _: wire.answer(json.dumps(settings).encode()))) as base_url:
        monkeypatch.setenv("SAMPLING_BASE_URL", base_url)
        shown = run("settings").stdout
    assert shown.startswith("Qualified URL")
    assert "id=[pid]&x=\N{REPLACEMENT CHARACTER}[31m" in shown


def test_recontact_codes_are_printed_one_per_line(sim):
    quota_id = sim.recontact_quota_ids[0]
    everyone = run("recontact", quota_id, "--max-results", 3).stdout.split()
    assert everyone == sorted(everyone)
    assert len(everyone) > 4
    assert run("recontact", quota_id, "--after", everyone[1]).stdout.split() == everyone[2:]
    assert run("recontact", quota_id, "--limit", 2).stdout.split() == everyone[:2]
    assert lines(run("recontact", quota_id, "--json"))[0] == {"MemberCode": everyone[0]}


def test_a_failed_recontact_list_says_how_to_resume(sim):
    sim.faults.add(Fault.status(400, result_code=6).on("recontact_members", after=1))
    result = run("recontact", sim.recontact_quota_ids[0], "--max-results", 3)
    assert result.exit_code == 3
    codes = result.stdout.split()
    assert len(codes) == 3
    assert "resume with --after <the last code printed>" in result.stderr
    assert not any(code in result.stderr for code in codes)


# --- Inviting ---------------------------------------------------------------------------------------------


def test_invite_prints_one_invite(sim):
    wanted = next(
        (code, quota_id)
        for code in sim.members
        for quota_id in quota_ids(sim)
        if sim.eligible(code, quota_id) == 1
    )
    (made,) = lines(run("invite", *wanted))
    assert made["QuotaID"] == wanted[1]
    assert made["URL"].startswith("https://")


def test_a_refused_invite_ends_with_3_and_one_line(sim):
    result = run("invite", member(sim), 999)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "NO_QUOTA_ID" in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_invite_that_may_exist_says_so(sim):
    sim.faults.add(Fault.cut(when="after").on("generate_invite"))
    result = run("invite", member(sim), quota_ids(sim, 1)[0], "--attempts", 1)
    assert result.exit_code == 4
    assert "an invite may exist" in result.stderr


def test_quota_ids_from_arguments_file_and_stdin(sim, tmp_path):
    asked = quota_ids(sim, 30)
    text = (
        "\n".join(map(str, asked[:10]))
        + ", "
        + ",".join(map(str, asked[10:20]))
        + "\t"
        + " ".join(map(str, asked[20:]))
    )
    file = tmp_path / "quota-ids.txt"
    file.write_text(text)
    code = member(sim)
    results = [
        run("bulk-invite", code, *asked),
        run("bulk-invite", code, ",".join(map(str, asked))),
        run("bulk-invite", code, "--file", file),
        run("bulk-invite", code, stdin=text),
        run("bulk-invite", code, "-", stdin=text),
    ]
    for result in results:
        assert result.exit_code == 0
        assert [each["QuotaID"] for each in lines(result)] == asked
        assert "30 quota IDs in" in result.stderr
    first = lines(results[0])[0]
    assert {
        "MemberCode",
        "QuotaID",
        "Status",
        "Invite",
        "ResultCode",
        "Result",
        "Error",
        "Anomaly",
        "Replayed",
    } == first.keys()


def test_outcomes_agree_with_the_summary(sim):
    result = run("bulk-invite", member(sim), *quota_ids(sim))
    statuses = [each["Status"] for each in lines(result)]
    for status in ("invited", "rejected"):
        assert f"{statuses.count(status)} {status}" in result.stderr
    assert "MEMBER_DOES_NOT_MATCH_QUOTA" in result.stderr


def test_a_second_run_resumes_from_the_journal(sim, tmp_path):
    code, asked = list(sim.members)[7], quota_ids(sim)
    text = " ".join(map(str, asked))
    before = len(sim.ledger.requests)
    first = lines(run("bulk-invite", code, "--journal", tmp_path / "journal", stdin=text))
    sent = len(sim.ledger.requests)
    again = lines(run("bulk-invite", code, *asked, "--journal", tmp_path / "journal"))
    assert {each.pop("Replayed") for each in first} == {False}
    assert {each.pop("Replayed") for each in again} == {True}
    assert sorted(map(str, first)) == sorted(map(str, again))
    assert len(again) == len(asked)
    assert sent > before
    assert len(sim.ledger.requests) == sent
    broken = run("bulk-invite", code, 1, "--journal", tmp_path)
    assert "the journal" in broken.stderr
    assert broken.exit_code != 0


def test_outcomes_on_a_terminal_are_readable_lines(sim, monkeypatch):
    on_terminal(monkeypatch)
    code, asked = list(sim.members)[5], quota_ids(sim)
    result = run("bulk-invite", code, *asked)
    assert result.exit_code == 0
    shown = result.stdout.splitlines()
    assert len(shown) == len(asked)
    assert any(line.startswith("invited") and "https://" in line for line in shown)


def test_empty_stdin_is_an_error(sim):
    result = run("bulk-invite", member(sim), stdin="")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the input has no quota IDs" in result.stderr


@pytest.mark.parametrize("arguments", [[""], [" , "], ["-"]])
def test_arguments_without_a_quota_id_are_an_error(sim, arguments):
    """A variable of a script that is empty must not look like work that is done."""
    result = run("bulk-invite", member(sim), "--", *arguments, stdin="")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the input has no quota IDs" in result.stderr


def test_a_dash_for_a_file_is_stdin(sim):
    result = run("bulk-invite", member(sim), "--file", "-", stdin="1 2")
    assert [line["QuotaID"] for line in lines(result)] == [1, 2]


def test_a_link_is_never_wrapped(sim, monkeypatch):
    on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "40")
    link = "https://entry.example/" + "x" * 100
    answer = json.dumps({**doubles.invite(7), "URL": link}).encode()
    with wire.serve(wire.serve_each(lambda _: wire.answer(answer))) as base_url:
        monkeypatch.setenv("SAMPLING_BASE_URL", base_url)
        assert f"\n  {link}\n" in run("invite", member(sim), 7).stdout


@pytest.mark.parametrize("wrong", ["abc", "-5", "1.5", "1_000", "9" * 30, "\N{ARABIC-INDIC DIGIT FIVE}"])
def test_an_invalid_quota_id_is_reported(sim, wrong):
    result = run("bulk-invite", member(sim), "--", wrong)
    assert result.exit_code == 2
    assert "not a quota ID" in result.stderr


def test_a_bad_id_in_a_stream_does_not_lose_the_ids_before_it(sim):
    asked = quota_ids(sim, 7)
    result = run("bulk-invite", member(sim), stdin=" ".join(map(str, asked)) + " oops 12")
    assert result.exit_code == 2
    assert [each["QuotaID"] for each in lines(result)] == asked
    assert {each["Status"] for each in lines(result)} == {"not_sent"}
    assert "7 not sent" in result.stderr
    assert "'oops'" in result.stderr


def test_quota_ids_are_accepted_from_one_source_only(sim, tmp_path, monkeypatch):
    file = tmp_path / "ids"
    file.write_text("1")
    assert run("bulk-invite", member(sim), 5, "--file", file).exit_code == 2
    assert run("bulk-invite", member(sim), "--file", tmp_path / "none").exit_code == 2
    at_keyboard(monkeypatch)
    result = run("bulk-invite", member(sim))
    assert result.exit_code == 2
    assert "through a pipe" in result.stderr


# --- How it ends ------------------------------------------------------------------------------------------


def test_incomplete_outcomes_end_with_exit_code_1(sim):
    sim.faults.add(Fault.cut(when="after").on("bulk_invite", after=1))
    asked = range(1, 251)
    result = run("bulk-invite", member(sim), "--max-concurrency", 1, stdin=" ".join(map(str, asked)))
    assert result.exit_code == 1
    statuses = [each["Status"] for each in lines(result)]
    assert len(statuses) == len(asked)
    assert {"unknown"} < set(statuses)
    assert "may make a second one" in result.stderr


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault.status(400, result_code=10), 3),
        (Fault.status(400, result_code=36), 4),
        (Fault.status(429), 3),
        (Fault.status(500), 4),
        (Fault.cut(), 4),
    ],
)
@pytest.mark.parametrize("command", ["quotas", "bulk-invite"])
def test_each_failure_has_its_exit_code(sim, command, fault, code):
    sim.faults.add(fault)
    arguments = [member(sim), *quota_ids(sim, 3)] if command == "bulk-invite" else []
    result = run(command, *arguments, "--attempts", 1)
    assert result.exit_code == code
    assert "Traceback" not in result.output


def test_a_wrong_key_ends_with_3_and_is_never_shown(sim, monkeypatch):
    monkeypatch.setenv("SAMPLING_API_KEY", UNKNOWN_KEY)
    for command in (["quotas"], ["settings"], ["invite", "M", 5], ["recontact", 5], ["bulk-invite", "M", 5]):
        result = run(*command, "--debug")
        assert result.exit_code == 3
        assert "403" in result.stderr
        assert UNKNOWN_KEY not in result.output


def test_a_refused_connection_is_reported(sim, monkeypatch):
    monkeypatch.setenv("SAMPLING_BASE_URL", "http://127.0.0.1:9")
    result = run("settings", "--attempts", 1)
    assert result.exit_code == 4
    assert "Connection refused), on the way to 127.0.0.1:9" in result.stderr
    assert sim.api_key not in result.output


@pytest.mark.parametrize("name", KEY_NAMES)
def test_missing_settings_are_named(sim, monkeypatch, name):
    monkeypatch.delenv(name)
    result = run("quotas")
    assert result.exit_code == 2
    assert name in result.stderr


def test_an_invalid_key_is_not_shown(sim, monkeypatch):
    monkeypatch.setenv("SAMPLING_API_KEY", "sesame-open")
    result = run("quotas")
    assert result.exit_code == 2
    assert "sesame" not in result.output


def test_options_count_over_the_environment(sim, monkeypatch):
    base_url, panel_guid = os.environ["SAMPLING_BASE_URL"], sim.panel_guid
    monkeypatch.setenv("SAMPLING_BASE_URL", "http://service.example")
    monkeypatch.setenv("SAMPLING_PANEL_GUID", UNKNOWN_KEY)
    assert run("settings", "--base-url", base_url, "--panel", panel_guid).exit_code == 0
    refused = run("settings")
    assert refused.exit_code == 2
    assert "--allow-http" in refused.stderr


def test_the_key_is_read_without_echo(sim, monkeypatch):
    monkeypatch.delenv("SAMPLING_API_KEY")
    at_keyboard(monkeypatch)
    asked = []
    monkeypatch.setattr("getpass.getpass", lambda text, **_: asked.append(text) or sim.api_key)
    result = run("settings")
    assert result.exit_code == 0
    assert asked == ["API key (not shown; SAMPLING_API_KEY is not set): "]
    assert sim.api_key not in result.output


def test_the_key_cannot_be_given_as_an_argument():
    for option in ("--key", "--api-key"):
        result = run("settings", option, UNKNOWN_KEY)
        assert result.exit_code == 2
        assert UNKNOWN_KEY not in result.output


def test_a_proxy_is_an_option_and_its_password_is_not(sim, monkeypatch):
    with ForwardProxy(credentials="agent:sesame") as proxy:
        plain = proxy.url.replace("agent:sesame@", "")
        refused = run("settings", "--proxy", plain, "--attempts", 1)
        assert refused.exit_code == 4
        assert "the proxy answered 407: check the user" in refused.stderr
        shown = run("settings", "--proxy", proxy.url)
        assert shown.exit_code == 2
        assert "SAMPLING_PROXY" in shown.stderr
        assert "sesame" not in shown.output
        monkeypatch.setenv("SAMPLING_PROXY", proxy.url)
        assert run("settings").exit_code == 0
    assert b"/api/Settings" in proxy.seen[-1]
    assert "sesame" not in run("settings", "--debug").output


@pytest.mark.parametrize("option", ["--ca-file", "--client-cert"])
def test_files_of_tls_are_options(sim, option, tmp_path, monkeypatch):
    missing = tmp_path / "missing.pem"
    variable = {"--ca-file": "SAMPLING_CA_FILE", "--client-cert": "SAMPLING_CLIENT_CERT"}[option]
    result = run("settings", option, missing)
    assert result.exit_code == 2
    assert f"{variable}, its option or the profile names {missing}" in result.stderr
    monkeypatch.setenv(variable, str(missing))
    assert run("settings").exit_code == 2


def test_the_debug_log_shows_attempts_without_secrets(sim):
    result = run("bulk-invite", member(sim), *quota_ids(sim, 3), "--debug")
    assert "POST bulk_invite: 200" in result.stderr
    assert member(sim) not in result.stderr
    assert sim.api_key not in result.output


def test_help_of_every_command_has_examples_that_can_be_copied(monkeypatch):
    assert "130 interrupted" in " ".join(run("--help").stdout.split())
    for command, _ in commands():
        copied = []
        for columns in ("60", "140"):
            monkeypatch.setenv("COLUMNS", columns)
            shown = run(*command.split(), "--help").stdout
            assert "bool" not in shown
            _, _, examples = shown.partition("Example")
            copied.append([line for line in examples.splitlines() if line.startswith("   ")])
        assert copied[0] == copied[1], command  # nothing is wrapped
        assert f"sampling-async {command}" in "".join(copied[0]), command
        assert max(map(len, copied[0])) <= 60, command
    assert "bool" not in run("--help").stdout


def test_names_of_options_are_lower_case():
    names = [name for _, options in commands() for name in options]
    assert names
    assert [name for name in names if len(name) > 2 and name != name.lower()] == []


# --- As a program -----------------------------------------------------------------------------------------


def test_a_closed_output_pipe_ends_a_command_quietly(sim):
    with program("quotas") as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def interrupted(sim, number, *arguments, stdin=subprocess.DEVNULL, text=None, requests=2, **options):
    """Send a signal in the middle of a run; return the outcomes, the exit code and stderr."""
    arguments = ("bulk-invite", member(sim), *arguments, "--max-concurrency", 1)
    before = sim.ledger.request_count
    with program(*arguments, stdin=stdin if text is None else subprocess.PIPE, **options) as process:
        if text is not None:
            process.stdin.write(text)
            process.stdin.flush()
        while sim.ledger.request_count < before + requests:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(number)
        out, errors = process.stdout.read(), process.stderr.read()
    assert "Traceback" not in errors
    return [json.loads(line) for line in out.splitlines()], process.returncode, errors


ASKED = range(1, 3002)


@pytest.mark.parametrize("number", ENDINGS)
@pytest.mark.parametrize("source", ["arguments", "file", "stdin", "stdin of a file"])
def test_a_signal_accounts_for_every_id(slow, tmp_path, source, number):
    file = tmp_path / "ids"
    file.write_text("\n".join(map(str, ASKED)))
    match source:
        case "arguments":
            outcomes, code, errors = interrupted(slow, number, *ASKED)
        case "file":
            outcomes, code, errors = interrupted(slow, number, "--file", file)
        case "stdin":
            outcomes, code, errors = interrupted(
                slow, number, text=file.read_text()
            )  # from a pipe that stays open
            assert "has not ended" in errors
        case _:
            with file.open("rb") as stdin:
                outcomes, code, errors = interrupted(slow, number, stdin=stdin)
    asked = (
        ASKED[:-1] if source == "stdin" else ASKED
    )  # without the end of input, the number 3001 may be incomplete
    assert code == ENDINGS[number]
    assert sorted(each["QuotaID"] for each in outcomes) == list(asked)
    assert {"rejected", "unknown", "not_sent"} == {each["Status"] for each in outcomes}
    assert sum(each["Status"] == "unknown" for each in outcomes) == 100
    assert f"{len(asked):,} quota IDs" in errors
    assert ("interrupted" if number == signal.SIGINT else "terminated by SIGTERM") in errors


@pytest.mark.parametrize("source", ["arguments", "file", "stdin"])
def test_a_lasting_outage_ends_the_run_and_every_id_is_accounted_for(slow, tmp_path, monkeypatch, source):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setenv("SAMPLING_BASE_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
    (tmp_path / "ids").write_text("\n".join(map(str, ASKED)))
    given = {"arguments": ASKED, "file": ["--file", tmp_path / "ids"], "stdin": ["-"]}[source]
    with (tmp_path / "ids").open("rb") as stdin:
        with program("bulk-invite", member(slow), "--patience", 0.2, *given, stdin=stdin) as process:
            outcomes = [json.loads(line) for line in process.stdout]
            errors = process.stderr.read()
    assert process.returncode == 4
    assert sorted(each["QuotaID"] for each in outcomes) == list(ASKED)
    assert {each["Status"] for each in outcomes} == {"not_sent"}
    assert "the service is away" in errors


@pytest.mark.parametrize("number", ENDINGS)
def test_after_a_signal_a_pipe_is_read_to_its_end_if_that_comes_soon(slow, number):
    writer = subprocess.Popen(
        ["sh", "-c", "seq 1 500; sleep 0.6; seq 501 900; sleep 0.2; seq 901 1000"], stdout=subprocess.PIPE
    )
    with writer:
        outcomes, code, errors = interrupted(slow, number, stdin=writer.stdout)
    assert code == ENDINGS[number]
    assert sorted(each["QuotaID"] for each in outcomes) == [*range(1, 1001)]
    assert "has not ended" not in errors


def test_after_a_signal_an_endless_pipe_is_read_for_a_short_time_only(slow):
    endless = "import itertools; [print(number) for number in itertools.count(1)]"
    with subprocess.Popen(
        [sys.executable, "-c", endless], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as writer:
        outcomes, code, errors = interrupted(slow, signal.SIGTERM, stdin=writer.stdout)
        writer.kill()
    assert code == 143
    assert "has not ended" in errors
    assert sorted(each["QuotaID"] for each in outcomes) == [*range(1, len(outcomes) + 1)]


def test_after_a_signal_an_invalid_quota_id_ends_the_input(slow, tmp_path):
    file = tmp_path / "ids"
    file.write_text("\n".join(map(str, [*range(1, 20_001), "oops", 5])))
    outcomes, code, errors = interrupted(slow, signal.SIGTERM, "--file", file)
    assert code == 143
    assert [each["QuotaID"] for each in sorted(outcomes, key=lambda each: each["QuotaID"])] == [
        *range(1, 20_001)
    ]
    assert "'oops'" in errors


@pytest.mark.parametrize("source", ["arguments", "file"])
def test_a_signal_with_a_journal_reports_the_outcomes_of_the_journal(slow, tmp_path, source):
    code = member(slow)
    first = lines(run("bulk-invite", code, *range(2501, 2601), "--journal", tmp_path / "journal"))
    file = tmp_path / "ids"
    file.write_text("\n".join(map(str, ASKED)))
    given = ("--file", file) if source == "file" else ASKED
    outcomes, _, _ = interrupted(slow, signal.SIGTERM, *given, "--journal", tmp_path / "journal")
    by_id = {each["QuotaID"]: each for each in outcomes}
    assert len(outcomes) == len(by_id) == len(ASKED)
    assert [each["Status"] for each in first] == [by_id[each["QuotaID"]]["Status"] for each in first]
    assert {quota_id for quota_id, each in by_id.items() if each["Replayed"]} == set(range(2501, 2601))
    assert sum(each["Status"] == "unknown" for each in outcomes) == 100  # only those in flight
    again = lines(run("bulk-invite", code, *ASKED, "--journal", tmp_path / "journal"))
    processed = {quota_id for quota_id, each in by_id.items() if each["Status"] != "not_sent"}
    assert {each["QuotaID"] for each in again if each["Replayed"]} == processed


def test_a_signal_before_all_was_read_asks_the_journal_too(slow, tmp_path):
    run("bulk-invite", member(slow), *range(11, 21), "--journal", tmp_path / "journal")
    with program(
        "bulk-invite", member(slow), "--journal", tmp_path / "journal", stdin=subprocess.PIPE
    ) as process:
        process.stdin.write("\n".join(map(str, range(1, 101))) + "\n")
        process.stdin.flush()
        wait_for_handlers(process)
        process.send_signal(signal.SIGTERM)
        outcomes = [json.loads(line) for line in process.stdout.read().splitlines()]
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 143
    assert [each["QuotaID"] for each in outcomes] == [*range(1, 101)]
    assert {each["QuotaID"] for each in outcomes if each["Replayed"]} == set(range(11, 21))
    assert {each["Status"] for each in outcomes if not each["Replayed"]} == {"not_sent"}


@pytest.mark.parametrize("number", ENDINGS)
@pytest.mark.parametrize("with_journal", [False, True])
def test_a_signal_before_a_command_has_begun_accounts_for_every_id_too(slow, tmp_path, number, with_journal):
    arguments = ["bulk-invite", member(slow), *ASKED]
    if with_journal:
        run("bulk-invite", member(slow), 7, "--journal", tmp_path / "journal")
        arguments += ["--journal", tmp_path / "journal"]
    before = slow.ledger.request_count
    with program(*arguments, stdin=subprocess.DEVNULL) as process:
        held = partial(Path(f"/proc/{process.pid}/status").read_text)
        while not int(held().partition("SigBlk:")[2].split()[0], 16) >> (number - 1) & 1:
            if slow.ledger.request_count > before or process.poll() is not None:
                process.kill()
                pytest.fail("signals were never held back")
            time.sleep(0.002)
        process.send_signal(number)
        outcomes = [json.loads(line) for line in process.stdout]
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == ENDINGS[number]
    assert sorted(each["QuotaID"] for each in outcomes) == list(ASKED)
    assert {each["QuotaID"]: each["Status"] for each in outcomes if each["Status"] != "not_sent"} == (
        {7: "rejected"} if with_journal else {}
    )


@pytest.mark.parametrize("number", ENDINGS)
def test_a_second_signal_ends_at_once(slow, number):
    """This holds even if nobody reads the output."""
    arguments = ("bulk-invite", member(slow), *range(1, 20_001), "--max-concurrency", 1)
    with program(*arguments, stdin=subprocess.DEVNULL) as process:
        while slow.ledger.request_count < 2:
            time.sleep(0.01)
        process.send_signal(number)
        time.sleep(0.5)
        assert process.poll() is None  # it is blocked on a full pipe
        process.send_signal(number)
        assert process.wait(60) == ENDINGS[number]
        process.stdout.close()


@pytest.mark.parametrize("command", [["quotas"], ["bulk-invite", "m1", "1"]])
def test_sigterm_works_if_ctrl_c_is_ignored(slow, command):
    """A script that runs the program in the background ignores it."""
    slow.faults.add(Fault.delay(20))
    process = program(*command, stdin=subprocess.DEVNULL, sigint=signal.SIG_IGN)
    while not slow.ledger.request_count:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    slow.faults.clear()
    assert process.returncode == 143
    assert "Traceback" not in errors
    assert len(out.splitlines()) == (command[0] == "bulk-invite")


def test_sigterm_before_a_command_has_begun_gives_its_exit_code(monkeypatch):
    monkeypatch.setattr(typer.Typer, "__call__", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(
        signal.SIGTERM, signal.SIG_DFL
    )  # a plugin of pytest may have its own handler, which stays
    try:
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_help_does_not_import_a_server():
    code = "import sys, sampling_async._cli._commands; print({'starlette', 'uvicorn'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_a_missing_extra_is_named_with_what_to_install(name, monkeypatch, capsys):
    for module in {name} | {each for each in sys.modules if each.startswith(f"{name}.")}:
        monkeypatch.setitem(sys.modules, module, None)
    for module in [each for each in sys.modules if each.startswith("sampling_async._cli._")]:
        package, _, attribute = module.rpartition(".")
        monkeypatch.delitem(sys.modules, module)
        monkeypatch.delattr(sys.modules[package], attribute, raising=False)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip().endswith(install("cli"))


# --- simulate ---------------------------------------------------------------------------------------------


def test_simulate_prints_the_settings_to_copy(monkeypatch):
    ran = []
    monkeypatch.setattr(Simulator, "run", lambda sim, **options: ran.append((sim, options)))
    result = run("simulate", "--port", 0, "--seed", 5, "--members", 3)
    assert result.exit_code == 0
    ((sim, options),) = ran
    assert f"export SAMPLING_BASE_URL=http://127.0.0.1:{options['port']}\n" in result.stdout
    assert f"export SAMPLING_PANEL_GUID={sim.panel_guid}\n" in result.stdout
    assert f"export SAMPLING_API_KEY={sim.api_key}\n" in result.stdout
    assert len(sim.members) == 3


def sourced(script, command):
    """Return what a command prints in a shell that has sourced a script."""
    environment = {"PATH": os.environ["PATH"], "SAMPLING_PANEL_GUID": "left over"}
    shell = ["sh", "-c", f". {script}; {command}"]
    return subprocess.run(shell, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.fixture
def simulated(monkeypatch):
    """Return what `simulate` prints with options, and its simulator."""
    ran = []
    monkeypatch.setattr(Simulator, "run", lambda sim, **_: ran.append(sim))

    def simulate(*options):
        result = run("simulate", "--port", 0, "--members", 3, *options)
        assert result.exit_code == 0, result.stderr
        return result.stdout, ran[-1]

    return simulate


def test_several_panels_are_simulated_and_a_shell_can_source_them(simulated, tmp_path):
    printed, sim = simulated("--panels", 3)
    script = tmp_path / "panels.sh"
    script.write_text(printed)
    assert len({panel.panel_guid for panel in sim.panels}) == 3
    assert {panel.api_key for panel in sim.panels} == {sim.api_key}  # as of one partner
    assert [len(panel.members) for panel in sim.panels] == [3, 3, 3]
    names = "$SAMPLING_PANEL_GUID $SAMPLING_API_KEY $SAMPLING_PANEL_GUID_P3"
    assert sourced(script, f"echo {names}").split() == [
        sim.panel_guid,
        sim.api_key,
        sim.panels[2].panel_guid,
    ]


def test_simulated_panels_come_as_profiles(simulated, tmp_path, monkeypatch):
    for name in KEY_NAMES:
        monkeypatch.delenv(name, raising=False)
    file, script = tmp_path / "my panels.toml", tmp_path / "panels.sh"
    printed, sim = simulated("--panels", 2, "--profiles", file)
    assert "quotas --profile p1" in printed
    script.write_text(printed)
    for name, value in (
        line.partition("=")[::2] for line in sourced(script, "env").splitlines() if line.startswith("SAMPLING_")
    ):
        monkeypatch.setenv(name, value)
    assert "SAMPLING_PANEL_GUID" not in os.environ
    shown = [json.loads(line) for line in run("profile", "list").stdout.splitlines()]
    assert [(each["PanelGUID"], each["Key"]) for each in shown] == [
        (sim.panels[0].panel_guid, "variable SAMPLING_API_KEY: set"),
        (sim.panels[1].panel_guid, "variable SAMPLING_API_KEY: set"),
    ]
    assert SamplingClient.from_env(profile="p2")
    assert sim.api_key not in file.read_text()
    simulated("--panels", 1, "--profiles", file)  # its own file is replaced
    assert "[p2]" not in file.read_text()


def test_profiles_of_somebody_are_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(Simulator, "run", lambda *_, **__: None)
    file = tmp_path / "profiles.toml"
    file.write_text("[us]\n")
    result = run("simulate", "--port", 0, "--profiles", file)
    assert result.exit_code == 2
    assert "holds other profiles; name another file" in " ".join(result.stderr.split())
    assert file.read_text() == "[us]\n"


def test_the_settings_of_all_panels_are_one_object_of_json(simulated):
    printed, sim = simulated("--panels", 2, "--json")
    panels = json.loads(printed)["Panels"]
    assert [(each["PanelGUID"], each["APIKey"], each["Members"]) for each in panels] == [
        (panel.panel_guid, panel.api_key, 3) for panel in sim.panels
    ]


@pytest.mark.parametrize(
    ("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("localhost", "localhost")]
)
def test_simulate_prints_an_address_that_can_be_asked(host, shown, monkeypatch):
    monkeypatch.setattr(Simulator, "run", lambda *_, **__: None)
    result = run("simulate", "--port", 0, "--host", host, "--members", 1)
    assert f"export SAMPLING_BASE_URL=http://{shown}:" in result.stdout


def test_simulate_takes_faults_and_writes_its_members(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(Simulator, "run", lambda sim, **_: ran.append(sim))
    monkeypatch.chdir(tmp_path)
    Path("faults.json").write_text('[{"Fault": "refusal", "ResultCode": 39, "On": {"MemberCode": "m000001"}}]')
    result = run("simulate", "--port", 0, "--members", "p.jsonl", "--faults", "faults.json")
    assert result.exit_code == 0
    assert [fault.result_code for fault, _ in ran[0].faults.struck()] == [39]
    rows = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    assert [row["member_code"] for row in rows] == list(ran[0].members)
    assert len(rows) == 200
    assert json.loads(Path("p.bands.json").read_text())["2006352"] == [18, 24]
    assert Path("p.jsonl").stat().st_mode & 0o777 == 0o600  # it holds member codes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--members", "0"], "--members must be one number from 1 to 10,000,000, or files, or both, not 0"),
        (["--members", "5", "--members", "6"], "not 5 6"),
        (["--members", "-5"], "not -5"),
        (["--members", "panel.csv"], "a number, or a file that ends in .parquet or .jsonl, not panel.csv"),
        (["--members", "many"], "not many"),
        (["--members", "+-5"], "a number, or a file that ends in .parquet or .jsonl, not +-5"),
        (["--notify", "http://["], "--notify http://[: no http URL, and no file"),
        (["--notify", "urls.json"], "urls.json: expected one JSON object of URLs by kind"),
        (["--faults", "status.json"], "status from 200 to 599"),
        (["--members", "nix/panel.jsonl"], "the folder does not exist"),
        (["--members", "folder.jsonl"], "--members folder.jsonl is a folder"),
        (["--faults", "nix.json"], "nix.json: No such file"),
        (["--faults", "folder.jsonl"], "folder.jsonl: Is a directory"),
        (["--faults", "wrong.json"], "wrong.json: $[0].On.Every: expected a whole number, found 'x'"),
    ],
)
def test_invalid_options_of_simulate_are_reported_in_one_line(monkeypatch, tmp_path, arguments, words):
    monkeypatch.setattr(Simulator, "run", lambda *_, **__: pytest.fail("it ran"))
    monkeypatch.chdir(tmp_path)
    Path("folder.jsonl").mkdir()
    Path("wrong.json").write_text('[{"Fault": "null", "On": {"Every": "x"}}]')
    Path("status.json").write_text('[{"Fault": "status", "Status": 999}]')
    Path("urls.json").write_text('{"invite": null, "completion": 5}')
    result = run("simulate", "--port", 0, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_latency_that_is_no_number_is_reported(monkeypatch):
    monkeypatch.setattr(Simulator, "run", lambda *_, **__: pytest.fail("it ran"))
    result = run("simulate", "--port", 0, "--latency-base", "nan")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.strip()  # newer versions of typer refuse it themselves, in other words


def test_simulate_on_a_port_that_is_taken(sim):
    result = run("simulate", "--port", os.environ["SAMPLING_BASE_URL"].rpartition(":")[2])
    assert result.exit_code == 4
    assert result.stderr.startswith("sampling-async: 127.0.0.1, port ")
    assert "in use; --port takes another" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["simulate", "demo"])
def test_a_missing_simulator_extra_is_named_with_what_to_install(command, monkeypatch):
    for name in ("starlette", "uvicorn", "pyarrow", "jinja2"):
        monkeypatch.setitem(sys.modules, name, None)
    result = run(command)
    assert result.exit_code == 2
    extras = "simulator,panel" if command == "demo" else "simulator"
    assert f'pip install "sampling-async[{extras}]"' in result.stderr


def test_simulate_writes_lines_of_json_without_the_extra_of_panels(tmp_path, monkeypatch):
    for name in ("numpy", "pyarrow", "sampling_async._cli._panel_files"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(Simulator, "run", lambda *_, **__: None)
    file = tmp_path / "panel.jsonl"
    result = run("simulate", "--port", 0, "--members", 3, "--members", file)
    assert (result.exit_code, result.stderr) == (0, "")
    assert len(file.read_text().splitlines()) == 3
    result = run("simulate", "--port", 0, "--members", tmp_path / "panel.parquet")
    assert result.exit_code == 2
    assert "panel.parquet needs pyarrow" in result.stderr


def test_a_full_disk_does_not_lose_the_account(sim):
    """Requests were sent, even if their outcomes could not be written."""
    asked = quota_ids(sim, 40)
    with Path("/dev/full").open("wb") as full:
        process = program("bulk-invite", member(sim), *asked, stdin=subprocess.DEVNULL, stdout=full)
        _, errors = process.communicate(timeout=30)
    assert f"{len(asked)} quota IDs" in errors
    assert process.returncode == 4


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--no-such-option"], 2)])
def test_a_disk_that_is_full_for_stderr_changes_no_exit_code(sim, tmp_path, arguments, code):
    asked = quota_ids(sim, 40)
    with Path("/dev/full").open("wb") as full, (tmp_path / "out").open("wb") as out:
        given = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": full}
        process = program("bulk-invite", member(sim), *asked, *arguments, **given)
        process.communicate(timeout=30)
    assert process.returncode == code
    assert len((tmp_path / "out").read_bytes().splitlines()) == (0 if code else len(asked))


@pytest.mark.parametrize("asked", ["--help", "--version"])
def test_a_full_disk_is_one_line_for_the_help_too(asked):
    with Path("/dev/full").open("wb") as full:
        process = program(asked, stdin=subprocess.DEVNULL, stdout=full)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (4, "sampling-async: No space left on device\n")


def test_a_closed_stdin_is_no_crash(sim):
    process = program("bulk-invite", member(sim), 1, stdin=subprocess.DEVNULL)
    out, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors
    assert json.loads(out)["QuotaID"] == 1


def test_a_member_code_with_a_line_break_is_printed_on_one_line(sim):
    quota_id = sim.recontact_quota_ids[0]
    sim.set_recontact_members(quota_id, ["a", "b\nc"])
    result = run("recontact", quota_id)
    assert (result.exit_code, result.stdout) == (4, "a\n")
    assert "--json" in result.stderr
    assert lines(run("recontact", quota_id, "--json"))[1] == {"MemberCode": "b\nc"}
