"""`top`: the view of a running client, and how the command ends."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import doubles
import pytest
from attrs import asdict
from cli_kit import run
from rich.console import Console

from sampling_async._cli import _top as top
from sampling_async._telemetry import board


def shown(state, before=None, seconds=1.0, width=80) -> str:
    out = StringIO()
    Console(file=out, width=width, no_color=True).print(top.view(state, before, seconds, width))
    return out.getvalue()


async def state_of(**changes):
    async with doubles.client(doubles.Service([])) as client:
        await client.get_settings()
        return {"pid": 17, "version": "1", "host": "x.example", **asdict(client.snapshot()), **changes}


@pytest.fixture
def state():
    return anyio.run(state_of)


@pytest.fixture
def path():
    # The path of a Unix socket may have about 100 characters; those of pytest are longer on some systems.
    with TemporaryDirectory() as folder:
        yield Path(folder) / "s"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name the SOCKET of a program, or the folder of a campaign with --out"),
        (("a.sock", "--out", "night"), "name a SOCKET, or the folder of a campaign with --out, and not both"),
        (("--out", "night"), "night: no campaign runs there now"),
    ],
)
def test_a_socket_or_a_campaign_is_named(arguments, message):
    result = run("top", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@contextmanager
def serving(path: Path, *lines: bytes):
    """Answer each connection with the next line, then stop."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def work() -> None:
        for line in lines:
            stream, _ = listener.accept()
            with stream:
                stream.sendall(line)
        listener.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(5)


def test_the_view_of_a_quiet_client(state):
    text = shown(state)
    assert "x.example  process 17" in text
    assert "0 of 8, limit 8" in text
    assert "not limited" in text
    assert "get_settings" in text
    assert "open," not in text  # a transport of its own has no connections that are known


def test_the_view_of_a_client_in_trouble(state):
    wires = {
        "open": 3,
        "idle": 1,
        "opened": 2000,
        "reused": 7,
        "bytes_sent": 5_000,
        "bytes_received": 2_500_000,
    }
    before = {**state, "connections": {**wires, "bytes_sent": 0, "bytes_received": 0}}
    trouble = {
        "breaker": "open",
        "away_for": 31.4,
        "held_for": 2.5,
        "requests_per_second": 12.34,
        "attempts": 101,
        "failures": 40,
        "too_late": 12,
        "unused_invites": 3,
        "seconds_per_request": 0.02,
        "seconds_per_id": 0.0005,
        "latency": {},
        "connections": wires,
    }
    text = shown({**state, **trouble}, before, 2.0)
    for part in (
        "OPEN for 31 s",
        "2.5 s",
        "12.3 bulk invites a second",
        "101, 50.0/s",
        "40, 20.0/s",
        "12, 6.00/s",
        "unused invites  3",
        "20.0 ms + 0.50 ms a quota ID",
        "3 open, 1 idle",
        "2,000 opened, 7 times used again",
        "2.50 kB/s sent, 1,250 kB/s received",
        "no request was answered",
    ):
        assert part in text


def test_it_fits_eighty_columns(state):
    assert max(map(len, shown(state).splitlines())) <= 80


def test_on_a_narrow_terminal_columns_are_left_out_and_no_unit_is_cut(state):
    text = shown(state, width=44)
    assert "get_settings" in text
    assert "p99" in text
    assert "narrow: answered, p90, longest" in text


def test_a_process_that_stands_still_at_the_first_look_is_distinguished(monkeypatch, path, state):
    def looked(_: object) -> object:
        raise TimeoutError

    monkeypatch.setattr(top, "looked", looked)
    assert "its event loop stands still" in run("top", str(path)).stderr


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.00042, "0.42 ms"), (0.0412, "41.2 ms"), (1.2, "1.20 s"), (1234.0, "1,234 s")]
)
def test_durations_have_units(seconds, text):
    assert top.duration(seconds) == text


def test_one_look_in_a_pipe_is_a_line(path, state):
    with serving(path, json.dumps(state).encode() + b"\n"):
        done = run("top", str(path), "--once")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["host"] == "x.example"


def test_it_ends_when_the_process_goes_away(path, state):
    line = json.dumps(state).encode() + b"\n"
    with serving(path, line, line):
        done = run("top", str(path), "--every", "0.1")
    assert done.exit_code == 1
    assert len(done.stdout.splitlines()) == 2
    assert "no longer answers" in done.stderr


@pytest.mark.parametrize("line", [b"", b"no json\n", b"\xff\n", b'{"limit": %b}\n' % (b"9" * 5_000)])
def test_what_is_no_snapshot_is_refused(path, line):
    with serving(path, line):
        done = run("top", str(path), "--once")
    assert done.exit_code == 2
    assert "no process shows its snapshots there" in done.stderr


@pytest.mark.parametrize("more", [[], ["--json"], ["--once"]])
@pytest.mark.parametrize(
    "line", [b"[]", b"7", b'{"another": 1}', b'{"limit":1}', b"[" * 100_000, b'{"limit":' * 100_000]
)
def test_what_is_no_snapshot_of_this_version_is_refused(path, line, more):
    with serving(path, line + b"\n"):
        done = run("top", str(path), *more)
    assert done.exit_code == 2
    assert "is not a snapshot of this version" in done.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"retry_tokens": "1"},
        {"held_for": "1"},
        {"latency": [1]},
        {"connections": 3},
        {"limit": ...},
        {"away_for": 10**400, "breaker": "open"},
    ],
)
def test_a_snapshot_with_another_kind_of_field_is_refused(path, state, change):
    changed = {name: value for name, value in {**state, **change}.items() if value is not ...}
    with serving(path, json.dumps(changed).encode() + b"\n"):
        assert run("top", str(path), "--once").exit_code == 2


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e300", "86401", "0.01", "-inf"])
def test_a_pause_that_is_no_time_or_too_long_is_refused(path, seconds):
    done = run("top", str(path), "--every", seconds)
    assert done.exit_code == 2
    assert "--every" in done.stderr


def test_a_name_in_brackets_is_shown_as_it_is(state):
    assert "[/x]" in shown({**state, "latency": {"[/x]": state["latency"]["get_settings"]}})


@pytest.mark.parametrize("tokens", [None, float("inf")])
def test_a_budget_without_an_end_is_unlimited(state, tokens):
    assert "unlimited" in shown({**state, "retry_tokens": tokens})


def test_no_rate_is_reported_against_a_client_without_known_connections(state):
    wires = dict.fromkeys(("open", "idle", "opened", "reused", "bytes_sent", "bytes_received"), 1)
    assert "- sent, - received" in shown({**state, "connections": wires}, state)


def test_no_rate_is_reported_against_another_process_or_a_count_that_fell(state):
    assert "3, 2" in shown({**state, "attempts": 3}, {**state, "attempts": 1})
    for before in ({**state, "attempts": 900}, {**state, "attempts": 1, "pid": state["pid"] + 1}):
        assert "3, -" in shown({**state, "attempts": 3}, before)
        assert "3, --" not in shown({**state, "attempts": 3}, before)


def test_a_process_that_is_busy_is_asked_again(monkeypatch, state):
    looks = iter([state, TimeoutError(), TimeoutError(), state, ConnectionRefusedError()])

    def looked(_: object) -> object:
        look = next(looks)
        if isinstance(look, Exception):
            raise look
        return look

    monkeypatch.setattr(top, "looked", looked)
    assert [*top._looks(Path("x"), 0.0, is_once=False)] == [state, state]


def test_a_host_is_shown_without_control_characters(state):
    assert "\x1b" not in shown({**state, "host": "a\x1b[2Jb"})


def test_without_a_socket_the_message_says_what_to_do(tmp_path):
    done = run("top", str(tmp_path / "nothing"))
    assert done.exit_code == 2
    assert "serve_snapshots" in done.stderr


async def test_a_client_shows_its_snapshots_to_each_connection(path):
    async with doubles.client(doubles.Service([])) as client:
        async with client.serve_snapshots(path):
            for calls in range(3):
                state = await anyio.to_thread.run_sync(top.looked, path)
                assert (state["attempts"], state["host"]) == (calls, "service.example")
                await client.get_settings()
            assert path.stat().st_mode & 0o777 == 0o600
        assert not path.exists()


async def test_a_socket_that_cannot_be_made_is_an_error(tmp_path):
    async with doubles.client(doubles.Service([])) as client:
        with pytest.raises(OSError):  # noqa: PT011  the system's own
            async with client.serve_snapshots(tmp_path / "no folder" / "s"):
                pass


async def test_a_server_that_is_cancelled_leaves_no_socket_behind(path):
    async with doubles.client(doubles.Service([])) as client:
        for ticks in range(12):
            async with anyio.create_task_group() as tasks:
                entered = anyio.Event()

                async def serve(entered=entered):
                    entered.set()
                    async with client.serve_snapshots(path):
                        await anyio.sleep_forever()

                tasks.start_soon(serve)
                await entered.wait()
                for _ in range(ticks):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            assert not path.exists()


async def test_a_reader_that_reads_nothing_harms_nobody(path):
    async with doubles.client(doubles.Service([])) as client:
        async with client.serve_snapshots(path):
            with socket.socket(socket.AF_UNIX) as idle:
                idle.connect(str(path))
                assert (await anyio.to_thread.run_sync(top.looked, path))["attempts"] == 0


async def test_only_the_socket_that_it_made_is_removed(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    async with doubles.client(doubles.Service([])) as client:
        async with client.serve_snapshots("s"):
            monkeypatch.chdir("/")
        assert not path.exists()
        async with client.serve_snapshots(path):
            async with client.serve_snapshots(path):
                newer = path.stat().st_ino
                path.rename(path.with_suffix(".newer"))
                path.write_text("of the host")
            assert path.read_text() == "of the host"
            path.unlink()
            path.with_suffix(".newer").rename(path)
        assert path.stat().st_ino == newer


async def test_a_process_without_descriptors_goes_on_and_accepts_again_later(path, monkeypatch, caplog):
    monkeypatch.setattr(board, "_PAUSE", 0.0)
    async with doubles.client(doubles.Service([])) as client:
        server = client.serve_snapshots(path)
        async with server:
            accepted, failing = server._accepted, [OSError(24, "too many open files")] * 3

            def sometimes():
                if failing:
                    raise failing.pop()
                return accepted()

            monkeypatch.setattr(server, "_accepted", sometimes)
            for _ in range(2):
                assert (await anyio.to_thread.run_sync(top.looked, path))["attempts"] == 0
            assert not failing
    assert caplog.text.count("cannot accept connections") == 1


async def test_a_snapshot_that_fails_ends_no_block(path, monkeypatch, caplog):
    async with doubles.client(doubles.Service([])) as client:
        server = client.serve_snapshots(path)
        monkeypatch.setattr(server, "_read", lambda: 1 / 0)
        async with server:
            with pytest.raises(ValueError):  # noqa: PT011  nothing was said
                await anyio.to_thread.run_sync(top.looked, path)
    assert "a snapshot could not be shown" in caplog.text
