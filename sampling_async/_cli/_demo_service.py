"""The service of the demo: a simulator in a child process, as its parent sees it, and the child itself.

Service and client do not share an interpreter, so the figures are those of the client. Over its stdin and
stdout, which nobody else can reach, the child gets its settings and returns its ledger. The child ends when its
stdin is closed, so also when this process is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
from attrs import field, frozen

from sampling_async import SamplingClient
from sampling_async.simulator import LedgerEntry

if TYPE_CHECKING:
    from collections.abc import Generator

    from sampling_async.simulator import Simulator

_LEDGER_FIELDS: Final = tuple(each.name for each in attrs.fields(LedgerEntry))
_ENDING_SECONDS: Final = 5.0
_COMPLETES: Final = 0.4
_SURVEY_SECONDS: Final = 0.5
_REPEATED: Final = 0.05
_SENDING_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.1
_IDLE_LOOKS: Final = 3


class DemoError(Exception):
    """The simulator's process did not start, or ended too early. The text says why."""


@frozen(kw_only=True)
class ServiceSettings:
    """The settings of the simulated service. Everything follows from the seed, except the order of requests.

    Attributes:
        seed: The seed of the simulator.
        members: How many members the panel has.
        surveys: How many surveys the inventory has.
        faults: Whether the simulator responds 503 now and then, and drops connections after acting.
        latency: The seconds a bulk invite takes, as `a + b * IDs`, and how many the service works on at once.
        panel: The file that the panel is written to.
        urls: Where the kinds of notifications are posted to.
    """

    seed: int
    members: int
    surveys: int
    faults: bool
    latency: tuple[float, float, int]
    panel: str
    urls: Mapping[str, str] = field(factory=dict[str, str], repr=False)


@frozen
class Told:
    """What the simulator knows at the end.

    Attributes:
        invites: Every invite that it has made.
        completions: How many completes its notifications tell of.
        terminates: How many terminates they tell of.
    """

    invites: list[LedgerEntry]
    completions: int
    terminates: int


class SimulatorProcess:
    """A simulator in a child process, as the parent process sees it."""

    def __init__(self, process: subprocess.Popen[str], greeting: dict[str, Any]) -> None:
        self._process = process
        self._greeting = greeting
        self.base_url: str = greeting["base_url"]

    def client(self, **options: Any) -> SamplingClient:
        """Return a client of its panel, with options of the constructor."""
        key, panel_guid = self._greeting["api_key"], self._greeting["panel_guid"]
        return SamplingClient(self.base_url, panel_guid=panel_guid, api_key=key, **options)

    def told(self) -> Told:
        """End the service and return what it knows.

        Raises:
            DemoError: The process has ended.
        """
        told = _answer_of(self._process, "ledger\n")
        rows = told["invites"]
        invites = [LedgerEntry(**dict(zip(_LEDGER_FIELDS, row, strict=True))) for row in rows]
        return Told(invites, told["completions"], told["terminates"])


@contextmanager
def simulator_process(settings: ServiceSettings) -> Generator[SimulatorProcess]:
    """Run a simulator in a child process while the `with` block runs.

    Raises:
        DemoError: The process did not start.
    """
    with subprocess.Popen(  # noqa: S603  this interpreter, this module
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
        encoding="utf-8",
    ) as process:
        try:
            yield SimulatorProcess(process, _answer_of(process, json.dumps(attrs.asdict(settings)) + "\n"))
        except BaseException:
            # It may be waiting until all its notifications are sent, which nobody hears any more.
            process.kill()
            raise
        finally:
            _end(process)


def _environment() -> dict[str, str]:
    """Return an environment in which the child imports this same package, wherever it was imported from."""
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _answer_of(process: subprocess.Popen[str], request: str) -> Any:
    """Send one line to the child's stdin, and return the JSON of the next line from its stdout."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = ""
    # readline() returns an empty string only at the end of the stream: the child has ended.
    if not answer:
        raise DemoError(f"the simulator's process ended: {_last_line_of_stderr(process)}")
    return json.loads(answer)


def _last_line_of_stderr(process: subprocess.Popen[str]) -> str:
    process.kill()
    lines = process.stderr.read().strip().splitlines() if process.stderr else []
    return lines[-1] if lines else "it gave no reason"


def _end(process: subprocess.Popen[str]) -> None:
    """Close the child's stdin, which ends the child; kill it if it does not end in time."""
    try:
        if process.stdin is not None:
            process.stdin.close()
    except BrokenPipeError:
        # The child has ended already.
        pass
    try:
        process.wait(_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def serve_demo() -> None:
    """Run the child: serve until stdin says `ledger` or ends; after `ledger`, write what is known to stdout."""
    from sampling_async._cli._panel_writing import write_panel  # noqa: PLC0415  the child's work only
    from sampling_async.simulator import (  # noqa: PLC0415
        AGE_BANDS,
        Fault,
        Latency,
        Notifying,
        Simulator,
    )

    # A terminal sends Ctrl-C to parent and child. The parent handles it; the child sees the end of its stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = ServiceSettings(**json.loads(sys.stdin.readline()))
    a, b, workers = settings.latency
    simulator = Simulator(
        settings.seed,
        surveys=settings.surveys,
        members=settings.members,
        latency=Latency(a=a, b=b, workers=workers),
        notifying=Notifying(completes=_COMPLETES, survey_seconds=_SURVEY_SECONDS, repeated=_REPEATED),
    )
    if settings.faults:
        simulator.faults.add(Fault.status(503, retry_after=0.1).on("bulk_invite", every=60))
        simulator.faults.add(Fault.cut(when="after").on("bulk_invite", every=90))
    members = simulator.members.values()
    questions = sorted({question_id for member in members for question_id in member.profile})
    write_panel(members, questions, AGE_BANDS, Path(settings.panel))
    with simulator.serve() as base_url, simulator.notifications.sending_to(settings.urls):
        _say({"base_url": base_url, "panel_guid": simulator.panel_guid, "api_key": simulator.api_key})
        is_wanted = sys.stdin.readline() == "ledger\n"
        if is_wanted:
            _send_all(simulator)
    if is_wanted:
        kinds = [posting.kind for posting in simulator.notifications.told]
        _say(
            {
                "invites": [attrs.astuple(entry) for entry in simulator.ledger.invites],
                "completions": kinds.count("completion"),
                "terminates": kinds.count("terminate"),
            }
        )


def _send_all(simulator: Simulator) -> None:
    """Wait until all notifications are sent, or cannot be sent."""
    until = time.monotonic() + _SENDING_SECONDS
    idle = 0
    # One is taken from what waits before it is posted, so look a few times.
    while idle < _IDLE_LOOKS and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
        idle = 0 if simulator.notifications.waiting else idle + 1


def _say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve_demo()
