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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
from attrs import field, frozen

from sampling_async import SamplingClient
from sampling_async.simulator import LedgerEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from sampling_async.simulator import Outbox

_LEDGER_FIELDS: Final = tuple(each.name for each in attrs.fields(LedgerEntry))
_COMPLETES: Final = 0.4
_SURVEY_SECONDS: Final = 0.5
_REPEATED: Final = 0.05
_ENDS: Final = ("completion", "terminate")
_PROGRESS_SECONDS: Final = 0.1
_REFUSALS: Final = 4
"""So many refusals of each notification that is left, with no acknowledgement between them, end the sending."""


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
class ServiceLedger:
    """What the simulator knows at the end.

    Attributes:
        invites: Every invite that it has made.
        completions: How many completes it has notified of, or tried to.
        terminates: How many terminates.
        unheard: How many of these nobody has acknowledged.
    """

    invites: list[LedgerEntry]
    completions: int
    terminates: int
    unheard: int


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

    def ledger(self, hearing: Callable[[int, int], object]) -> ServiceLedger:
        """End the service and return what it knows. It sends all notifications first, however long that takes.

        Args:
            hearing: Called now and then with the ends of surveys that were acknowledged, and with all of them.

        Raises:
            DemoError: The process has ended.
        """
        reply = _request(self._process, "ledger\n")
        while "invites" not in reply:
            hearing(reply["ends"] - reply["unheard"], reply["ends"])
            reply = _reply(self._process)
        invites = [LedgerEntry(**dict(zip(_LEDGER_FIELDS, row, strict=True))) for row in reply.pop("invites")]
        return ServiceLedger(invites, **reply)


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
            yield SimulatorProcess(process, _request(process, json.dumps(attrs.asdict(settings)) + "\n"))
        except BaseException:
            # It may be waiting until all its notifications are sent, which nobody hears any more.
            process.kill()
            raise
        finally:
            # The child ends when its stdin does; leaving `Popen` waits for that.
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # the child has ended already
                process.stdin.close()


def _environment() -> dict[str, str]:
    """Return an environment in which the child imports this same package, wherever it was imported from."""
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _request(process: subprocess.Popen[str], line: str) -> Any:
    """Send one line to the child's stdin, and return its reply."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the child has ended, as the missing reply will show
        process.stdin.write(line)
        process.stdin.flush()
    return _reply(process)


def _reply(process: subprocess.Popen[str]) -> Any:
    """Return the JSON of the next line from the child's stdout."""
    assert process.stdout is not None
    reply = process.stdout.readline()
    # readline() returns an empty string only at the end of the stream: the child has ended.
    if not reply:
        raise DemoError(f"the simulator's process ended: {_last_line_of_stderr(process)}")
    return json.loads(reply)


def _last_line_of_stderr(process: subprocess.Popen[str]) -> str:
    process.kill()
    lines = process.stderr.read().strip().splitlines() if process.stderr else []
    return lines[-1] if lines else "it gave no reason"


def serve_demo() -> None:
    """Run the child: serve until stdin says `ledger` or ends; after `ledger`, write what is known to stdout."""
    from sampling_async._cli._panel_files import write_panel  # noqa: PLC0415  the child's work only
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
            _send_all(simulator.notifications)
    if is_wanted:
        kinds = [posting.kind for posting in simulator.notifications.told]
        _say(
            {
                "invites": [attrs.astuple(entry) for entry in simulator.ledger.invites],
                "completions": kinds.count("completion"),
                "terminates": kinds.count("terminate"),
                "unheard": _unheard(simulator.notifications),
            }
        )


def _send_all(outbox: Outbox) -> None:
    """Wait until all notifications are acknowledged, or are refused again and again. Say how far it is."""
    ends = sum(posting.kind in _ENDS for posting in outbox.told)
    while (waiting := outbox.waiting) and outbox.refusals < _REFUSALS * waiting:
        _say({"ends": ends, "unheard": _unheard(outbox)})
        time.sleep(_PROGRESS_SECONDS)


def _unheard(outbox: Outbox) -> int:
    return sum(posting.kind in _ENDS for posting in outbox.unheard)


def _say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve_demo()
