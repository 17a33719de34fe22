"""The demo without its display: a fan-out of a panel against a simulator of its own, and the results.

The simulator runs in a child process. Service and client then do not share an interpreter, so the figures are
those of the client. Over its stdin and stdout, which nobody else can reach, the child gets the plan and returns
its ledger. The child ends when its stdin is closed, so also when this process is killed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs
from attrs import define, field, frozen

from sampling_async import InviteOutcome, InviteRequest, OutcomeStream, Quotas, SamplingClient
from sampling_async._cli._tally import Tally
from sampling_async.simulator import LedgerEntry, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

_LEDGER_FIELDS: Final = tuple(each.name for each in attrs.fields(LedgerEntry))
_ENDING_SECONDS: Final = 5.0
_RECONTACT_PAGE: Final = 25


class DemoError(Exception):
    """The simulator's process did not start, or ended too early. The text says why."""


@frozen(kw_only=True)
class Plan:
    """The settings of a demo. Everything follows from the seed, except the order in which requests finish.

    Attributes:
        seed: The seed of the simulator.
        members: How many members to fan out.
        quota_ids: How many quota IDs to ask for in all, at least. The inventory is made large enough.
        faults: Whether the simulator responds 503 now and then, and drops connections after acting.
        latency: The seconds a bulk invite takes, as `a + b * IDs`, and how many the service works on at once.
    """

    seed: int = 7
    members: int = 200
    quota_ids: int = 50_000
    faults: bool = False
    latency: tuple[float, float, int] = (0.02, 0.0003, 8)

    @property
    def surveys(self) -> int:
        """How many surveys to generate, so that there are enough quotas."""
        # Surveys have two and a half quotas on average, or a little less, so dividing by 2 gives enough.
        # Example: 50,000 IDs for 200 members need 250 quotas, from 125 surveys.
        return max(5, -(-self.quota_ids // self.members) // 2)


@define
class Findings:
    """The results of a demo.

    Attributes:
        inventory: The inventory that Get Quotas returned.
        tally: The counts of outcomes.
        seconds: How long the fan-out took.
        request_seconds: How long the attempts of bulk invites took, sorted.
        recontact_quota_id: The quota whose recontact list was read.
        recontact_pages: The number of member codes on each page of that list.
        ledger_invites: How many invites the simulator's ledger holds.
        verdict: The result of checking the outcomes against the ledger.
    """

    inventory: Quotas
    tally: Tally
    seconds: float = 0.0
    request_seconds: list[float] = field(factory=list[float])
    recontact_quota_id: int = 0
    recontact_pages: list[int] = field(factory=list[int])
    ledger_invites: int = 0
    verdict: Verdict = field(factory=Verdict)

    @property
    def agrees(self) -> bool:
        """Whether client and ledger agree on every ID: nothing false, nothing unexplained, all counted."""
        invited = self.tally.statuses["invited"]
        return self.verdict.ok and self.ledger_invites == invited + len(self.verdict.unread)

    def percentile(self, percent: int) -> float:
        """Return the seconds that `percent` percent of the bulk invites did not exceed."""
        # Nearest rank, rounded up: the 90th percentile of 25 times is the 23rd.
        times = self.request_seconds
        return times[max(0, -(-len(times) * percent // 100) - 1)] if times else 0.0


@define
class Watcher:
    """The functions that a demo notifies of its progress.

    Attributes:
        inventory: Called with the inventory and the number of quota IDs that will be asked for.
        outcome: Called after every outcome with the stream, which knows its progress.
        finished: Called after the last outcome.
    """

    inventory: Callable[[Quotas, int], object] = lambda _inventory, _total: None
    outcome: Callable[[OutcomeStream], object] = lambda _stream: None
    finished: Callable[[], object] = lambda: None


def run_demo(plan: Plan, watcher: Watcher | None = None) -> Findings:
    """Run a demo from beginning to end.

    Raises:
        DemoError: The simulator's process failed.
        SamplingError: A call failed, and the demo cannot go on without it.
    """
    with simulator_process(plan) as simulator:
        findings, outcomes = anyio.run(partial(_run_client, simulator, watcher or Watcher()))
        entries = simulator.ledger()
    findings.ledger_invites = len(entries)
    findings.verdict = _verdict(entries, outcomes)
    return findings


async def _run_client(simulator: SimulatorProcess, watcher: Watcher) -> tuple[Findings, list[InviteOutcome]]:
    """Read the inventory, fan out every member to all quotas, and page through a recontact list."""
    outcomes: list[InviteOutcome] = []
    async with simulator.client() as client:
        inventory = await client.get_quotas()
        quota_ids = tuple(quota.quota_id for survey in inventory.surveys for quota in survey.quotas)
        requests = [InviteRequest(member_code, quota_ids) for member_code in simulator.member_codes]
        watcher.inventory(inventory, len(requests) * len(quota_ids))
        findings = Findings(inventory, Tally())
        with _timed_requests() as seconds:
            async with client.fan_out(requests) as stream:
                async for outcome in stream:
                    outcomes.append(outcome)
                    findings.tally.add(outcome)
                    watcher.outcome(stream)
        findings.seconds = findings.tally.seconds
        findings.request_seconds = sorted(seconds)
        watcher.finished()
        await _page(client, findings)
    return findings, outcomes


async def _page(client: SamplingClient, findings: Findings) -> None:
    quotas = (quota for each in findings.inventory.surveys if each.is_survey_recontact for quota in each.quotas)
    for quota in islice(quotas, 1):
        findings.recontact_quota_id = quota.quota_id
        async for page in client.recontact_pages(quota.quota_id, max_results=_RECONTACT_PAGE):
            findings.recontact_pages.append(len(page.member_codes))


class _RequestTimes(logging.Handler):
    """Collects the times of bulk invites from the package's DEBUG log, which has one record an attempt."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seconds: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the time of an attempt."""
        match record.args:
            case (_, "bulk_invite", _, float(seconds), *_):
                self.seconds.append(seconds)
            case _:
                pass


@contextmanager
def _timed_requests() -> Generator[list[float]]:
    logger, times = logging.getLogger("sampling_async"), _RequestTimes()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(times)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield times.seconds
    finally:
        logger.removeHandler(times)
        logger.setLevel(level)
        logger.propagate = propagate


def _verdict(entries: Sequence[LedgerEntry], outcomes: Sequence[InviteOutcome]) -> Verdict:
    from sampling_async.simulator._verdict import verdict  # noqa: PLC0415  the simulator is an extra

    return verdict(entries, outcomes)


class SimulatorProcess:
    """A simulator in a child process, as the parent process sees it."""

    def __init__(self, process: subprocess.Popen[str], greeting: dict[str, Any]) -> None:
        self._process = process
        self._greeting = greeting
        self.base_url: str = greeting["base_url"]
        self.member_codes: list[str] = greeting["member_codes"]

    def client(self) -> SamplingClient:
        """Return a client of its panel."""
        key, panel_guid = self._greeting["api_key"], self._greeting["panel_guid"]
        return SamplingClient(self.base_url, panel_guid=panel_guid, api_key=key)

    def ledger(self) -> list[LedgerEntry]:
        """End the service and return its ledger: every invite it has made.

        Raises:
            DemoError: The process has ended.
        """
        rows = _answer_of(self._process, "ledger\n")
        return [LedgerEntry(**dict(zip(_LEDGER_FIELDS, row, strict=True))) for row in rows]


@contextmanager
def simulator_process(plan: Plan) -> Generator[SimulatorProcess]:
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
            yield SimulatorProcess(process, _answer_of(process, json.dumps(attrs.asdict(plan)) + "\n"))
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
    """Run the child: serve until stdin says `ledger` or ends; after `ledger`, write the ledger to stdout."""
    from sampling_async.simulator import Fault, Latency, Simulator  # noqa: PLC0415  the child's work only

    # A terminal sends Ctrl-C to parent and child. The parent handles it; the child sees the end of its stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plan = Plan(**json.loads(sys.stdin.readline()))
    a, b, workers = plan.latency
    latency = Latency(a=a, b=b, workers=workers)
    simulator = Simulator(plan.seed, surveys=plan.surveys, members=plan.members, latency=latency)
    if plan.faults:
        simulator.faults.add(Fault.status(503, retry_after=0.1).on("bulk_invite", every=60))
        simulator.faults.add(Fault.cut(when="after").on("bulk_invite", every=90))
    with simulator.serve() as base_url:
        greeting = {
            "base_url": base_url,
            "panel_guid": simulator.panel_guid,
            "api_key": simulator.api_key,
            "member_codes": list(simulator.members),
        }
        _say(greeting)
        is_wanted = sys.stdin.readline() == "ledger\n"
    if is_wanted:
        _say([attrs.astuple(entry) for entry in simulator.ledger.invites])


def _say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve_demo()
