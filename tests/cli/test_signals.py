"""A program that gets a signal, or whose input or output ends, accounts for every quota ID."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import typer
from cli_kit import (
    ENDINGS,
    interrupted_command,
    lines,
    main,
    member,
    program,
    quota_ids,
    run,
    wait_for_handlers,
)

from sampling_async.simulator import Fault

# --- As a program


def test_a_closed_output_pipe_ends_a_command_quietly(sim):
    with program("quotas") as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


interrupted = partial(interrupted_command, "bulk-invite")
ASKED = range(1, 3002)


@pytest.mark.parametrize("number", ENDINGS)
@pytest.mark.parametrize("source", ["arguments", "file", "stdin", "stdin of a file"])
def test_a_signal_accounts_for_every_id(slow, tmp_path, source, number):
    file = tmp_path / "ids"
    file.write_text("\n".join(map(str, ASKED)))
    match source:
        case "arguments":
            outcomes, code, errors = interrupted(slow, number, member(slow), *ASKED)
        case "file":
            outcomes, code, errors = interrupted(slow, number, member(slow), "--file", file)
        case "stdin":
            outcomes, code, errors = interrupted(
                slow, number, member(slow), text=file.read_text()
            )  # a pipe that stays open
            assert "has not ended" in errors
        case _:
            with file.open("rb") as stdin:
                outcomes, code, errors = interrupted(slow, number, member(slow), stdin=stdin)
    asked = (
        ASKED[:-1] if source == "stdin" else ASKED
    )  # without the end of input, the number 3001 may be incomplete
    assert code == ENDINGS[number]
    assert sorted(each["QuotaID"] for each in outcomes) == list(asked)
    assert {"rejected", "unknown", "not_sent"} == {each["Status"] for each in outcomes}
    assert sum(each["Status"] == "unknown" for each in outcomes) == 100
    assert f"{len(asked):,} quota IDs" in errors
    name = signal.Signals(number).name
    assert ("interrupted" if number == signal.SIGINT else f"terminated by {name}") in errors


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
        outcomes, code, errors = interrupted(slow, number, member(slow), stdin=writer.stdout)
    assert code == ENDINGS[number]
    assert sorted(each["QuotaID"] for each in outcomes) == [*range(1, 1001)]
    assert "has not ended" not in errors


def test_after_a_signal_an_endless_pipe_is_read_for_a_short_time_only(slow):
    endless = "import itertools; [print(number) for number in itertools.count(1)]"
    with subprocess.Popen(
        [sys.executable, "-c", endless], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as writer:
        outcomes, code, errors = interrupted(slow, signal.SIGTERM, member(slow), stdin=writer.stdout)
        writer.kill()
    assert code == 143
    assert "has not ended" in errors
    assert sorted(each["QuotaID"] for each in outcomes) == [*range(1, len(outcomes) + 1)]


def test_after_a_signal_an_invalid_quota_id_ends_the_input(slow, tmp_path):
    file = tmp_path / "ids"
    file.write_text("\n".join(map(str, [*range(1, 20_001), "oops", 5])))
    outcomes, code, errors = interrupted(slow, signal.SIGTERM, member(slow), "--file", file)
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
    outcomes, _, _ = interrupted(slow, signal.SIGTERM, member(slow), *given, "--journal", tmp_path / "journal")
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_before_a_command_has_begun_gives_its_exit_code(monkeypatch, number, code):
    monkeypatch.setattr(typer.Typer, "__call__", lambda *_, **__: signal.raise_signal(number))
    before = signal.signal(number, signal.SIG_DFL)  # a plugin of pytest may have its own handler, which stays
    try:
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_hangup_that_is_ignored_at_the_start_stays_ignored(monkeypatch):
    """As nohup asks for it."""
    monkeypatch.setattr(typer.Typer, "__call__", lambda *_, **__: signal.raise_signal(signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        main()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# --- simulate


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
