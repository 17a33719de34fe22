"""`fan-out`, and requests as `bulk-invite` reads them: an account of every quota ID, whatever happens."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from cli_kit import (
    ENDINGS,
    at_keyboard,
    interrupted_command,
    lines,
    member,
    on_terminal,
    quota_ids,
    run,
)


def written(requests) -> str:
    return "".join(json.dumps({"MemberCode": code, "QuotaIDs": list(ids)}) + "\n" for code, ids in requests)


def pairs(outcomes) -> list[tuple[str, int]]:
    return sorted((each["MemberCode"], each["QuotaID"]) for each in outcomes)


def asked_by(requests) -> list[tuple[str, int]]:
    return sorted((code, quota_id) for code, ids in requests for quota_id in ids)


def test_requests_come_from_an_argument_an_option_and_stdin(sim, tmp_path):
    requests = [(code, quota_ids(sim, 7)) for code in list(sim.members)[:5]]
    file = tmp_path / "requests.jsonl"
    file.write_text(written(requests))
    for result in (
        run("fan-out", file),
        run("fan-out", "--file", file),
        run("fan-out", stdin=file.read_text()),
        run("fan-out", "-", stdin=file.read_text()),
        run("fan-out", file, "--goal", "first"),
        run("fan-out", file, "--goal", "throughput", "--max-concurrency", 1),
    ):
        assert result.exit_code == 0
        assert pairs(lines(result)) == asked_by(requests)
        assert "35 quota IDs in" in result.stderr


def test_fan_out_reads_the_output_of_match(sim, tmp_path, monkeypatch):
    """The first day of a partner: an inventory, a panel, and requests to send."""
    monkeypatch.chdir(tmp_path)
    rows = ["member_code,1001538,1001007", *(f"{code},30,2000247" for code in sim.members)]
    Path("panel.csv").write_text("\n".join(rows))
    Path("quotas.json").write_text(run("quotas", "--json").stdout)
    Path("quotas.jsonl").write_text(run("quotas").stdout)
    seen = [
        run("match", "panel.csv", "--inventory", name, "--requests", 3, "--workers", 1)
        for name in ("quotas.json", "quotas.jsonl")
    ]
    assert seen[0].stdout == seen[1].stdout
    requests = [(each["MemberCode"], each["QuotaIDs"]) for each in lines(seen[0])]
    assert requests
    assert pairs(lines(run("fan-out", stdin=seen[0].stdout))) == asked_by(requests)
    code, ids = requests[3]
    of_one = run("bulk-invite", code, stdin=seen[0].stdout)
    assert [each["QuotaID"] for each in lines(of_one)] == ids
    assert f"skipped {len(requests) - 1} requests of other members" in of_one.stderr


def test_a_pair_that_comes_again_is_asked_once_unless_repetitions_are_wanted(sim, tmp_path):
    one, two = list(sim.members)[:2]
    ids = quota_ids(sim, 2)
    requests = written([(one, ids), (two, ids), (one, ids)])

    before = sim.ledger.request_count
    result = run("fan-out", stdin=requests)
    assert (result.exit_code, len(lines(result)), sim.ledger.request_count - before) == (0, 6, 2)
    again = run("fan-out", "--repeats", "ask", stdin=requests)
    assert (again.exit_code, len(lines(again)), sim.ledger.request_count - before) == (0, 6, 5)
    refused = run("fan-out", "--repeats", "ask", "--journal", tmp_path / "j", stdin=requests)
    assert refused.exit_code == 2
    assert "a journal sends each pair once" in refused.stderr


def test_requests_for_other_members_only_are_an_error(sim):
    result = run("bulk-invite", member(sim), stdin=written([("somebody", [1, 2])]))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no request is for this member" in result.stderr
    assert "somebody" not in result.stderr


def test_a_second_run_resumes_from_the_journal(sim, tmp_path):
    requests = [(code, quota_ids(sim)) for code in list(sim.members)[10:14]]
    first = run("fan-out", "--journal", tmp_path / "journal", stdin=written(requests))
    before = sim.ledger.request_count
    again = run("fan-out", "--journal", tmp_path / "journal", stdin=written(requests))
    assert sim.ledger.request_count == before
    assert {each["Replayed"] for each in lines(first)} == {False}
    assert {each["Replayed"] for each in lines(again)} == {True}
    assert pairs(lines(again)) == pairs(lines(first)) == asked_by(requests)


def test_outcomes_on_a_terminal_name_the_member(sim, monkeypatch):
    on_terminal(monkeypatch)
    codes = list(sim.members)[20:22]
    shown = run("fan-out", stdin=written([(code, quota_ids(sim, 3)) for code in codes])).stdout.splitlines()
    assert len(shown) == 6
    assert all(any(code in line for code in codes) for line in shown)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the input has no requests"),
        ("\n \n", "the input has no requests"),
        ("1 2 3", "stdin, line 1: not JSON"),
        ("[]", "stdin, line 1: a request must be a JSON object"),
        ('{"MemberCode": "m"}', 'this line has "MemberCode"'),
        ('{"MemberCode": "m", "QuotaIDs": 5}', "a list"),
        ('{"MemberCode": 5, "QuotaIDs": [5]}', "a member code must be a str, not int"),
        ('{"MemberCode": "", "QuotaIDs": [5]}', "a member code cannot be empty"),
        ('{"MemberCode": "m", "QuotaIDs": [1, 2.5]}', "a quota ID must be a whole number"),
        ('{"MemberCode": "m", "QuotaIDs": ["1"]}', "a quota ID must be a whole number"),
        ('{"QuotaID": 5, "Certain": 7}', 'this line has "QuotaID", "Certain"'),
        ('{"MemberCode": "m", "QuotaIDs": [1], "QuotaIDs": [2]}', "line 1: 'QuotaIDs' is there twice"),
        ('{"MemberCode": "m", "QuotaIDs": [1], "quota_ids": [2]}', '"QuotaIDs" or "quota_ids", not both'),
        ('{"\x1b[31m": 5}', "not JSON"),
        ('{"\\u001b[31m": 5}', r"\\u001b[31m"),
        ("[" * 100_000, "not JSON"),
        ("PAR1 and more", "this is Parquet"),
    ],
)
def test_an_invalid_request_is_reported_with_its_line(sim, text, words):
    result = run("fan-out", stdin=text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words.replace("\\\\", "\\") in result.stderr
    assert "Traceback" not in result.stderr


def test_a_bad_line_does_not_lose_the_requests_before_it(sim, tmp_path):
    requests = [(code, quota_ids(sim, 3)) for code in list(sim.members)[:4]]
    file = tmp_path / "requests.jsonl"
    file.write_text(written(requests) + "\noops\n" + written([("later", [5])]))
    result = run("fan-out", file)
    assert result.exit_code == 2
    assert pairs(lines(result)) == asked_by(requests)
    assert f"{file}, line 6: not JSON" in result.stderr


@pytest.mark.parametrize("command", [["fan-out"], ["bulk-invite", "m1", "--file"]])
def test_a_missing_file_is_named(sim, tmp_path, command):
    folder = run(*command, tmp_path)
    missing = run(*command, tmp_path / "nix")
    assert folder.exit_code == missing.exit_code == 2
    assert f"{tmp_path} is a folder, not a file" in folder.stderr
    assert f"{tmp_path / 'nix'}: the file does not exist" in missing.stderr


def test_requests_are_accepted_from_one_source_only(sim, tmp_path, monkeypatch):
    (tmp_path / "requests").write_text("")
    assert "not both" in run("fan-out", tmp_path / "requests", "--file", tmp_path / "requests").stderr
    at_keyboard(monkeypatch)
    result = run("fan-out")
    assert result.exit_code == 2
    assert "give requests as a file, or through a pipe" in result.stderr


# --- How it ends

MANY = [(f"m{at:06}", range(1, 101)) for at in range(40)]


interrupted = partial(interrupted_command, "fan-out")


@pytest.mark.parametrize("number", ENDINGS)
@pytest.mark.parametrize("source", ["file", "stdin"])
def test_a_signal_accounts_for_every_id(slow, tmp_path, source, number):
    file = tmp_path / "requests.jsonl"
    file.write_text(written(MANY))
    if source == "file":
        outcomes, code, errors = interrupted(slow, number, file)
    else:
        outcomes, code, errors = interrupted(slow, number, text=file.read_text())  # from a pipe that stays open
        assert "has not ended" in errors
    assert code == ENDINGS[number]
    assert pairs(outcomes) == asked_by(MANY)
    assert {"rejected", "unknown", "not_sent"} >= {each["Status"] for each in outcomes}
    assert sum(each["Status"] == "unknown" for each in outcomes) == 100
    assert "4,000 quota IDs" in errors
