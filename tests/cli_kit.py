"""Helpers for tests of the command line: run it in this process, or as a program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from typer.testing import CliRunner

from sampling_async import _cli, to_json
from sampling_async._cli import _campaign_run, _connection, _rendering, _sources
from sampling_async._cli._commands import app_for
from sampling_async._cli._files import read_labels, read_rates
from sampling_async._cli._simulation import write_panel
from sampling_async.simulator import Fault, Simulator

if TYPE_CHECKING:
    import io
    from collections.abc import Generator

DESCRIPTION = _cli.__doc__ or ""
app = app_for()
main = _cli.main
KEY_NAMES = ("SAMPLING_BASE_URL", "SAMPLING_PANEL_GUID", "SAMPLING_API_KEY")
ENDINGS = {signal.SIGINT: 130, signal.SIGTERM: 143}
if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # it is ignored if nohup has started the tests
    ENDINGS[signal.SIGHUP] = 129


def point_at(monkeypatch, simulator, base_url: str) -> None:
    """Let commands use a simulator that is being served."""
    for name, value in zip(KEY_NAMES, (base_url, simulator.panel_guid, simulator.api_key), strict=True):
        monkeypatch.setenv(name, value)


@contextmanager
def served_panel(folder: Path, monkeypatch, *, members: int = 24, **options) -> Generator[Simulator]:
    """Serve a simulator whose panel and inventory are files in a folder, which is the current one."""
    monkeypatch.chdir(folder)
    simulator = Simulator(seed=4, surveys=20, members=members, **options)
    panel_file(simulator, Path("panel.jsonl"))
    Path("quotas.json").write_bytes(to_json(simulator.inventory))
    with simulator.serve() as base_url:
        point_at(monkeypatch, simulator, base_url)
        yield simulator


def on_terminal(monkeypatch, stderr: io.StringIO | None = None) -> None:
    """Let commands print what they print on a terminal; their stderr may be a screen of 80 columns."""
    monkeypatch.setattr(_rendering, "as_lines", lambda: _rendering.wanted.json)
    if stderr is not None:
        console = Console(file=stderr, force_terminal=True, width=80, highlight=False, color_system=None)
        monkeypatch.setattr(_rendering, "stderr_console", lambda: console)
        monkeypatch.setattr(_rendering, "errors", lambda: console)


def reader_gone(monkeypatch) -> list[bool]:
    """Let nobody read the figures of a campaign; return a list that grows when stdout is given up."""

    def gone(_):
        raise BrokenPipeError

    silenced: list[bool] = []
    monkeypatch.setattr(_rendering, "emit_json", gone)
    monkeypatch.setattr(_campaign_run, "silence_stdout", lambda: silenced.append(True))
    return silenced


def wait_after_signal(monkeypatch, seconds: float) -> None:
    """Let a campaign wait no longer than this for what is in flight at a signal."""
    monkeypatch.setattr(_campaign_run, "_GRACE", seconds)


def at_keyboard(monkeypatch) -> None:
    """Let commands find a person at the keyboard instead of a pipe."""
    monkeypatch.setattr(_connection, "somebody_is_there", lambda: True)
    monkeypatch.setattr(_sources, "stdin_is_terminal", lambda: True)


def command_tree():
    """Return the whole command line as click sees it."""
    return typer.main.get_command(app)


def _names_of_options(command):
    return {each for option in command.params for each in option.opts}


def commands(group=None, before="", of=_names_of_options):
    """Yield each command with its whole name, and its options; or something else `of` it."""
    for name, command in (group or command_tree()).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ", of)
        else:
            yield f"{before}{name}", of(command)


def panel_file(simulator, path: Path) -> Path:
    """Write the members of a simulator as a panel."""
    write_panel(simulator.members.values(), path)
    return path


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(each) for each in arguments], input=stdin, catch_exceptions=False)


def lines(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


def quota_ids(sim, count=None):
    return [quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas][:count]


def member(sim):
    return next(iter(sim.members))


class Program(subprocess.Popen):
    """A program that is killed if its test fails: else the end of the block would wait for it, and hide why."""

    def __exit__(self, kind, value, traceback):
        if kind is not None:
            self.kill()
        super().__exit__(kind, value, traceback)


def program(*arguments, **options):
    package = Path(_cli.__file__).parents[2]  # the package as it was imported here
    environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONWARNINGS": "error"}
    environment.pop("PYTHONUNBUFFERED", None)  # it would hide what the interpreter still writes at exit
    environment |= options.pop("env", {})
    command = [sys.executable, "-m", "sampling_async", *(str(each) for each in arguments)]
    pipes = {name: options.pop(name, subprocess.PIPE) for name in ("stdout", "stderr")} | {"text": True}
    # Some runners start programs with SIGINT ignored, and a child would inherit that.
    sigint = options.pop("sigint", signal.default_int_handler)
    options["preexec_fn"] = partial(signal.signal, signal.SIGINT, sigint)
    return Program(command, env=environment, **pipes, **options)


def wait_for_handlers(process) -> None:
    """Wait until a program handles SIGTERM and its event loop runs."""
    status = Path(f"/proc/{process.pid}/status")
    while len(list(status.parent.joinpath("task").iterdir())) < 2:  # until the reading thread exists
        time.sleep(0.01)
    time.sleep(0.1)


def interrupted_command(command, sim, number, *arguments, stdin=subprocess.DEVNULL, text=None):
    """Send a signal while the second bulk of a command is in flight; return outcomes, exit code and stderr.

    The service responds to no bulk after the first one, so that a signal which comes late finds it there.
    """
    sim.faults.add(Fault.delay(60).on("bulk_invite", after=1))
    before = sim.ledger.request_count
    pipe = stdin if text is None else subprocess.PIPE
    with program(command, *arguments, "--max-concurrency", 1, stdin=pipe) as process:
        if text is not None:
            process.stdin.write(text)
            process.stdin.flush()
        while sim.ledger.request_count < before + 2:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(number)
        out, errors = process.stdout.read(), process.stderr.read()
    sim.faults.clear()
    assert "Traceback" not in errors
    return [json.loads(line) for line in out.splitlines()], process.returncode, errors


FILES = {"labels": read_labels, "rates": read_rates}
"""How the files of options are read."""


def to_install(extra: str) -> str:
    """Return how an extra is installed, as messages say it."""
    return f'python -m pip install "sampling-async[{extra}]" (in a clone: ".[{extra}]")'
