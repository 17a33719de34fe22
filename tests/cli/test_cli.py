"""The command line: what it reads and invites, how it ends, and the secrets that it never shows."""

from __future__ import annotations

import json
import os
import sys

import anyio
import doubles
import pytest
import wire
from cli_kit import (
    KEY_NAMES,
    at_keyboard,
    commands,
    lines,
    main,
    member,
    on_terminal,
    quota_ids,
    run,
    to_install,
)
from forward_proxy import ForwardProxy

from sampling_async import Quotas, from_json
from sampling_async import Survey as SurveyRecord
from sampling_async.simulator import Fault

UNKNOWN_KEY = "cafecafe-0000-4000-8000-00000000cafe"


# --- Reading


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


# --- Inviting


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


@pytest.mark.parametrize("wrong", ["1_0", "1_0.5", "\N{ARABIC-INDIC DIGIT FIVE}"])
@pytest.mark.parametrize("asked", [("demo", "--members="), ("outcomes", "--store", "x", "--overdue=")])
def test_a_number_that_only_python_reads_is_refused(wrong, asked):
    result = run(*asked[:-1], asked[-1] + wrong)
    assert result.exit_code == 2
    assert "Invalid value" in result.stderr


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


# --- How it ends


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


# --- As a program


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
    assert capsys.readouterr().err.strip().endswith(to_install("cli"))


# --- simulate


def test_a_member_code_with_a_line_break_is_printed_on_one_line(sim):
    quota_id = sim.recontact_quota_ids[0]
    sim.set_recontact_members(quota_id, ["a", "b\nc"])
    result = run("recontact", quota_id)
    assert (result.exit_code, result.stdout) == (4, "a\n")
    assert "--json" in result.stderr
    assert lines(run("recontact", quota_id, "--json"))[1] == {"MemberCode": "b\nc"}
