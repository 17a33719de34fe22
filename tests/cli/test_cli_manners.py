"""How every command behaves: --quiet, --json, colours, completion, and one table of exit codes."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_kit import DESCRIPTION, commands, member, on_terminal, panel_file, program, quota_ids, run
from panel_kit import AGE

import sampling_async
from sampling_async.simulator import Simulator

_COLOURS = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")


COMMANDS = dict(commands())


# --- --json and --quiet -----------------------------------------------------------------------------------


def test_every_command_that_prints_for_people_takes_json():
    """The others print nothing on stdout; `tail` prints JSON lines only."""
    silent = {"campaign report", "notifications replay", "notifications prune"}
    silent |= {"profile add", "profile set-key", "profile forget-key", "erase"}
    without = {name for name, options in COMMANDS.items() if "--json" not in options}
    assert without == silent | {"notifications tail"}


def test_every_command_that_writes_notes_to_stderr_takes_quiet():
    """The others write nothing to stderr but warnings and errors."""
    asking = {"quotas", "settings", "invite", "recontact"}
    about = {"campaign pause", "campaign resume", "campaign limit", "campaign status"}
    about |= {"notifications show", "notifications dead", "notifications tail", "notifications settings"}
    about |= {"notifications serve", "profile list", "profile show", "simulate", "top"}
    assert {name for name, options in COMMANDS.items() if "--quiet" not in options} == asking | about


@pytest.mark.parametrize("flag", [(), ("--debug",)])
def test_a_fault_of_the_program_is_one_line_without_what_it_was_about(sim, monkeypatch, capfd, flag):
    def broken(*_: object, **__: object) -> None:
        raise KeyError("the secret of m000001")

    monkeypatch.setattr("sampling_async._client.SamplingClient.get_settings", broken)
    monkeypatch.setattr(sys, "argv", ["sampling-async", "settings", *flag])
    result = run("settings", *flag)
    assert result.exit_code == 70
    last = result.stderr.splitlines()[-1]
    assert "a fault of this program: KeyError in test_cli_manners.py, line" in last
    assert "secret" not in last
    assert ("Traceback" in result.stderr) == bool(flag)


def test_quiet_leaves_the_summary_out_and_keeps_the_outcomes_and_errors(sim):
    ids = quota_ids(sim, 3)
    loud, quiet = run("bulk-invite", member(sim), *ids), run("bulk-invite", member(sim), *ids, "-q")
    assert "3 quota IDs in" in loud.stderr
    assert quiet.stderr == ""
    assert len(quiet.stdout.splitlines()) == 3
    wrong = run("bulk-invite", member(sim), "oops", "--quiet")
    assert "not a quota ID" in wrong.stderr
    assert "3 quota IDs in" in run("bulk-invite", member(sim), *ids).stderr  # of one command only


def test_quiet_fan_out_says_nothing_of_members_that_were_passed_over(sim, tmp_path):
    code = member(sim)
    file = tmp_path / "requests.jsonl"
    asked = [{"MemberCode": each, "QuotaIDs": quota_ids(sim, 2)} for each in (code, "other")]
    file.write_text("".join(json.dumps(each) + "\n" for each in asked))
    assert "skipped 1 request of other members" in run("bulk-invite", code, "--file", file).stderr
    assert run("bulk-invite", code, "--file", file, "--quiet").stderr == ""
    assert run("fan-out", file, "--quiet").stderr == ""


def test_csv_is_what_a_data_frame_reads(sim, panel, tmp_path):
    def read(*arguments):
        return list(csv.DictReader(io.StringIO(run(*arguments, "--csv").stdout)))

    assert [int(row["QuotaID"]) for row in read("quotas")] == quota_ids(sim)
    file = tmp_path / "none.json"
    file.write_text('{"CountryID":1,"CacheExpires":"2026-01-15T00:00:00Z","Surveys":[]}')
    matched = run("match", panel, "--csv").stdout.splitlines()
    assert run("match", panel, "--csv", "--inventory", file).stdout.splitlines() == matched[:1]
    outcome = read("bulk-invite", member(sim), *quota_ids(sim, 1))[0]
    assert (outcome["MemberCode"], outcome["Error"]) == (member(sim), "")


@pytest.fixture
def panel(tmp_path, sim):
    return panel_file(sim, tmp_path / "panel.jsonl")


def test_quiet_keeps_the_warnings_of_a_match(panel, tmp_path):
    rows = [json.loads(line) for line in panel.read_text().splitlines()]
    kept = ("member_code", str(AGE))  # no column for any other question
    panel.write_text("".join(json.dumps({name: row[name] for name in kept}) + "\n" for row in rows))
    loud, quiet = (
        run("match", panel, "--output", tmp_path / "counts.jsonl", "--workers", 1, *more)
        for more in ([], ["--quiet"])
    )
    assert loud.exit_code == quiet.exit_code == 0
    assert "members matched" in loud.stderr
    assert "members matched" not in quiet.stderr
    assert "the panel has no column for" in quiet.stderr


def test_a_quiet_campaign_writes_its_files_and_only_its_last_figures(panel, tmp_path, sim):
    out = tmp_path / "night"
    done = run("campaign", "run", panel, "--out", out, "--yes", "--quiet", "--workers", 1)
    assert done.exit_code == 0, done.stderr
    assert "Files:" not in done.stderr
    assert "The plan" not in done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert (out / "report.html").exists()
    assert run("campaign", "report", out, "--quiet").stderr == ""
    assert "Files:" in run("campaign", "report", out).stderr


def test_simulate_prints_its_address_as_json_on_request(monkeypatch):
    monkeypatch.setattr(Simulator, "run", lambda *_, **__: None)
    result = run("simulate", "--port", 0, "--json", "--members", 3)
    printed = json.loads(result.stdout)
    assert printed["BaseURL"].startswith("http://127.0.0.1:")
    assert printed["Members"] == 3
    assert {"PanelGUID", "APIKey"} <= printed.keys()


# --- Colours ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["settings"], ["doctor"], ["quotas"], ["--help"], ["doctor", "--help"]])
def test_no_color_turns_colours_off(sim, monkeypatch, arguments):
    on_terminal(monkeypatch)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = run(*arguments).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    plain = run(*arguments).stdout
    assert "\x1b[" in coloured
    assert not _COLOURS.search(plain)
    assert arguments != ["doctor"] or _COLOURS.search(coloured)


def test_a_summary_without_colours_has_none(sim, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = run("bulk-invite", member(sim), *quota_ids(sim, 3)).stderr
    assert "3 quota IDs" in shown
    assert not _COLOURS.search(shown)


# --- Completion -------------------------------------------------------------------------------------------


def completed(**variables):
    environment = {**os.environ, **variables}
    with program(env=environment) as process:
        out, err = process.communicate()
    assert (process.returncode, err) in {(0, ""), (1, "")}
    return out


@pytest.mark.parametrize(
    ("shell", "word"),
    [("bash", "complete -o default"), ("zsh", "#compdef sampling-async"), ("fish", "complete")],
)
def test_the_script_of_a_shell_is_printed(shell, word):
    script = completed(_SAMPLING_ASYNC_COMPLETE=f"source_{shell}")
    assert word in script
    assert f"complete_{shell}" in script


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_words_are_completed(shell):
    begun = "sampling-async notifications pr"
    found = completed(
        _SAMPLING_ASYNC_COMPLETE=f"complete_{shell}",
        COMP_WORDS=begun,
        COMP_CWORD="2",
        _TYPER_COMPLETE_ARGS=begun,
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    assert "prune" in found
    assert "replay" not in found


@pytest.mark.parametrize("number", ["1_0", "9" * 20])
def test_a_line_with_a_wrong_number_is_completed_too(number):
    words = f"sampling-async match --top {number} --req"
    found = completed(_SAMPLING_ASYNC_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD="4")
    assert "--requests" in found


def test_for_fish_each_option_is_one_line_with_its_help():
    lines = completed(
        _SAMPLING_ASYNC_COMPLETE="complete_fish",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
        _TYPER_COMPLETE_ARGS="sampling-async match --",
        COLUMNS="80",
    ).splitlines()
    assert max(map(len, lines)) > 80
    assert all(re.match(r"--[\w-]+\t", line) for line in lines)


def test_a_real_bash_completes_the_name_of_a_profile(tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    guid = "6f0c2b1e-3f0a-4a52-9b87-8d5a0d7a4c11"
    table = f'base_url = "https://x.example"\npanel = "{guid}"\nkey_variable = "KEY"\n'
    (tmp_path / "profiles.toml").write_text(f"[germany]\n{table}[us]\n{table}")
    command = tmp_path / "sampling-async"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m sampling_async "$@"\n')
    command.chmod(0o755)
    script = """
eval "$(_SAMPLING_ASYNC_COMPLETE=source_bash sampling-async)"
COMP_WORDS=(sampling-async quotas --profile ge); COMP_CWORD=3
_sampling_async_completion sampling-async
echo "${COMPREPLY[@]}"
"""
    environment = {
        **os.environ,
        "SAMPLING_PROFILES": str(tmp_path / "profiles.toml"),
        "PYTHONPATH": str(Path(sampling_async.__file__).parents[1]),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "germany\n"


# --- Exit codes -------------------------------------------------------------------------------------------


def test_the_table_of_exit_codes_names_every_code_and_the_commands_that_need_it():
    table = DESCRIPTION.partition("Exit codes:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\d+):", table, re.MULTILINE) == [
        "0",
        "1",
        "2",
        "3",
        "4",
        "5",
        "6",
        "70",
        "129",
        "130",
        "143",
    ]
    needed = "doctor", "profile forget-key", "notifications settings", "outcomes --overdue", "replay", "top"
    for word in needed:
        assert word in " ".join(table.split())


# --- Numbers ----------------------------------------------------------------------------------------------


def _number_options():
    """Yield each option and argument that is a number: its command with what that needs, and its name."""
    shared = set()  # connection options, which many commands take: they are the same ones
    for name, params in commands(of=lambda command: command.params):
        needed = ["1" for each in params if each.param_type_name == "argument" and each.required]
        needed += [
            word for each in params if each.required for word in (each.opts[0], "x") if "-" in each.opts[0]
        ]
        for each in params:
            kind = f"{each.type_descriptor.annotation} {each.metavar}"
            if not re.search(r"int|float|[NX]\|none", kind) or each.name in shared:
                continue
            if getattr(each, "rich_help_panel", None) == "Connection":
                shared.add(each.name)
            if each.param_type_name == "argument":
                yield name.split(), needed[: -1 if each.required else None], each.metavar
            else:
                yield name.split(), needed, each.opts[0]


def test_a_number_that_nothing_can_mean_is_a_usage_error_that_names_the_option(sim):
    options = list(_number_options())
    assert len(options) > 40
    for command, needed, name in options:
        large = () if name in {"--timeout", "--patience"} else (2**64, "1e400", "1e308")  # these may be endless
        for number in (-(2**64), "nan", "1e-300", *large):
            result = run(*command, *needed, *([name, number] if name.startswith("--") else ["--", number]))
            assert (result.exit_code, name in result.stderr) == (2, True), (
                command,
                name,
                number,
                result.stderr,
            )


def test_a_sample_that_no_memory_holds_is_refused(panel):
    result = run("match", panel, "--sample", 2**31 - 1)
    assert result.exit_code == 2
    assert "--sample" in result.stderr


@pytest.mark.parametrize("option", ["--top", "--requests", "--allocate"])
def test_the_largest_number_that_an_option_takes_is_no_fault(panel, option):
    assert run("match", panel, option, 2**31 - 1).exit_code == 0


def test_rows_go_to_one_place(panel, tmp_path):
    result = run("match", panel, "--csv", "--output", tmp_path / "rows.csv")
    assert (result.exit_code, "--output" in result.stderr, "--csv" in result.stderr) == (2, True, True)
    result = run("outcomes", "--store", tmp_path / "new.db", "--csv", "--output", tmp_path / "rows.parquet")
    assert (result.exit_code, "--output" in result.stderr, "--csv" in result.stderr) == (2, True, True)
    assert not list(tmp_path.glob("rows.*"))


@pytest.mark.parametrize("columns", ["0", "00", "-5", "1", "many", "\u00b2", "9" * 12, ""])
def test_a_size_of_the_terminal_that_is_none_is_ignored(sim, monkeypatch, columns):
    on_terminal(monkeypatch)
    expected = run("quotas").stdout
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", columns)
    assert run("quotas").stdout == expected
    monkeypatch.setenv("COLUMNS", columns)
    assert "Usage" in run("--help").stdout
