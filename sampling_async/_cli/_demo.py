"""The demo without its display: a partner's day against a simulator of its own, and the results.

The inventory is watched, a panel in a file is matched and allocated, a campaign asks for the invites, the
service tells how each survey has ended, and at the end all of it is held against the simulator's own ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import uvicorn
from attrs import define, field, frozen

from sampling_async import InviteOutcome
from sampling_async._cli._demo_service import DemoError as DemoError  # noqa: PLC0414  with the others here
from sampling_async._cli._demo_service import ServiceLedger, ServiceSettings, simulator_process
from sampling_async._cli._tally import Tally
from sampling_async._pacing.threads import in_thread
from sampling_async.campaign import Campaign
from sampling_async.matching import Allocate, LiveIndex, QuestionKinds
from sampling_async.notifications import Inbox, Kind, OutcomeLedger, SqliteStore, kept_secrets
from sampling_async.simulator import AGE_BANDS, Verdict
from sampling_async.simulator._transport import listening

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Sequence

    from sampling_async import AttemptReport, Quotas, SamplingClient
    from sampling_async._cli._demo_service import SimulatorProcess
    from sampling_async.campaign import CampaignRun, Plan, Summary
    from sampling_async.simulator import LedgerEntry

_AGE: Final = 1001538
_RECONTACT_PAGE: Final = 25
_BATCH: Final = 200
_BACKLOG: Final = 128
_KINDS: Final = (Kind.COMPLETION, Kind.TERMINATE, Kind.QUOTA_STATUS, Kind.SURVEY_CLOSED)
"""What the service is asked to tell. It could also tell of each invite, which the partner knows by then."""


@frozen(kw_only=True)
class Demo:
    """The settings of a demo.

    Attributes:
        folder: Where the panel, the ledgers and the report are written.
        seed: The seed of the simulator.
        members: How many members the panel has.
        surveys: How many surveys the inventory has.
        per_member: How many quotas a member gets at most.
        faults: Whether the service sometimes answers 503 or drops a connection.
        latency: The seconds a bulk invite takes, as `a + b * IDs`, and how many the service works on at once.
    """

    folder: Path
    seed: int = 7
    members: int = 600
    surveys: int = 120
    per_member: int = 4
    faults: bool = False
    latency: tuple[float, float, int] = (0.01, 0.0003, 8)

    def service(self, urls: dict[str, str]) -> ServiceSettings:
        """Return the settings of the simulated service."""
        return ServiceSettings(
            seed=self.seed,
            members=self.members,
            surveys=self.surveys,
            faults=self.faults,
            latency=self.latency,
            panel=str(self.panel),
            urls=urls,
        )

    @property
    def panel(self) -> Path:
        """The panel's file."""
        return self.folder / "panel.parquet"

    @property
    def store(self) -> Path:
        """The file of the inbox."""
        return self.folder / "notifications.db"

    @property
    def report(self) -> Path:
        """The report's file."""
        return self.folder / "report.html"


@define
class Findings:
    """The results of a demo.

    Attributes:
        inventory: The inventory that Get Quotas returned.
        plan: The plan of the campaign.
        summary: What became of the campaign.
        tally: The counts of outcomes.
        seconds: How long the campaign took.
        request_seconds: How long the attempts of bulk invites took, sorted.
        recontact_quota_id: The quota whose recontact list was read last.
        recontact_pages: The number of member codes on each page of that list.
        received: How many completions and terminates the inbox holds.
        service: What the simulator knows at the end.
        revenue: What the completes have brought.
        verdict: The result of checking the outcomes against the ledger.
    """

    inventory: Quotas
    plan: Plan
    summary: Summary
    tally: Tally
    seconds: float = 0.0
    request_seconds: list[float] = field(factory=list[float])
    recontact_quota_id: int = 0
    recontact_pages: list[int] = field(factory=list[int])
    received: tuple[int, int] = (0, 0)
    service: ServiceLedger = field(factory=lambda: ServiceLedger([], 0, 0, 0))
    revenue: float = 0.0
    verdict: Verdict = field(factory=Verdict)

    @property
    def agrees(self) -> bool:
        """Whether client and service agree: on every pair, and on the end of every invite's survey."""
        return not self.disagreement and not self.missing_ends

    @property
    def missing_ends(self) -> int:
        """How many ends of surveys are not in the inbox."""
        return self.service.completions + self.service.terminates - sum(self.received)

    @property
    def disagreement(self) -> str:
        """What client and service disagree on; empty if on nothing. An end that was not heard yet is none."""
        pairs, service = self.summary.pairs, self.service
        expected = pairs.invited + len(self.verdict.unread)
        if not self.verdict.ok:
            return str(self.verdict).splitlines()[0]
        if len(service.invites) != expected:
            return f"{len(service.invites):,} invites in the service's ledger, {expected:,} by the client"
        if pairs.pending:
            return f"{pairs.pending:,} pairs were never asked for"
        if not 0 <= self.missing_ends <= service.unheard:
            acknowledged = service.completions + service.terminates - service.unheard
            return f"{acknowledged:,} ends were acknowledged, {sum(self.received):,} are in the inbox"
        if not service.unheard and self.received != (service.completions, service.terminates):
            return "completes and terminates were taken for each other"
        return ""

    def percentile(self, percent: int) -> float:
        """Return the seconds that `percent` percent of the bulk invites did not exceed."""
        # Nearest rank, rounded up: the 90th percentile of 25 times is the 23rd.
        times = self.request_seconds
        return times[max(0, -(-len(times) * percent // 100) - 1)] if times else 0.0


@define
class Watcher:
    """The functions that a demo notifies of its progress.

    Attributes:
        inventory: Called with the inventory.
        planned: Called with the plan, and the seconds that it took.
        outcome: Called after every outcome with the run.
        hearing: Called in a thread while notifications come in, with the ends of surveys so far and in all.
        finished: Called when all of it is over.
    """

    inventory: Callable[[Quotas], object] = lambda _inventory: None
    planned: Callable[[Plan, float], object] = lambda _plan, _seconds: None
    outcome: Callable[[CampaignRun], object] = lambda _run: None
    hearing: Callable[[int, int], object] = lambda _heard, _invites: None
    finished: Callable[[], object] = lambda: None


def run_demo(demo: Demo, watcher: Watcher | None = None) -> Findings:
    """Run a demo from beginning to end.

    Raises:
        DemoError: The simulator's process failed.
        SamplingError: A call failed, and the demo cannot go on without it.
    """
    return anyio.run(partial(_day, demo, watcher or Watcher()))


async def _day(demo: Demo, watcher: Watcher) -> Findings:
    store = SqliteStore(demo.store)
    inbox = Inbox(store, secrets=kept_secrets(store))
    async with _receiving(inbox) as base:
        urls = {str(kind): url for kind, url in inbox.urls(base).items() if kind in _KINDS}
        with simulator_process(demo.service(urls)) as simulator:
            times: list[float] = []

            def note(report: AttemptReport) -> None:
                if report.endpoint == "bulk_invite":
                    times.append(report.timing.total)

            async with simulator.client(on_attempt=note) as client:
                findings, outcomes = await _asked(client, inbox, demo, watcher)
            findings.request_seconds = sorted(times)
            await _compare(findings, simulator, outcomes, OutcomeLedger(demo.store), watcher)
            watcher.finished()
    return findings


@asynccontextmanager
async def _receiving(inbox: Inbox) -> AsyncGenerator[str, None]:
    """Receive notifications over HTTP while the block is open; yield the base of the URLs."""
    with listening("127.0.0.1", 0) as listener:
        listener.listen(_BACKLOG)
        config = uvicorn.Config(inbox.app, lifespan="off", ws="none", access_log=False, log_level="error")
        server = _Server(config)
        async with inbox:
            # A plain task: a task group would raise the failures of the block in a group.
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                await serving


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the demo: they end all of it."""
        yield


async def _asked(
    client: SamplingClient, inbox: Inbox, demo: Demo, watcher: Watcher
) -> tuple[Findings, list[InviteOutcome]]:
    """Read, match, plan and ask, while the inventory is watched and notifications come in."""
    kinds = QuestionKinds.default().with_age(_AGE, AGE_BANDS)
    async with client.watch_quotas() as watch, LiveIndex(watch, kinds=kinds) as live:
        await live.ready()
        inventory = watch.quotas
        watcher.inventory(inventory)
        async with live.follow(inbox):
            recontact = await _read_recontacts(client, live)
            began = time.perf_counter()
            campaign = _campaign(client, demo, live, inventory)
            plan = await campaign.plan()
            watcher.planned(plan, time.perf_counter() - began)
            tally, outcomes = await _run(campaign, demo.store, watcher)
            seconds = tally.seconds
            summary = await campaign.write(demo.folder, title="A day with the simulator")
    findings = Findings(inventory, plan, summary, tally, seconds, [], *recontact)
    return findings, outcomes


def _campaign(client: SamplingClient, demo: Demo, live: LiveIndex, inventory: Quotas) -> Campaign:
    # The simulator counts each invite as a complete. So a quota has room for as many invites as it needs
    # completes, and not for those that will not end in one.
    rooms = {
        quota.quota_id: quota.estimated_completes_remaining for s in inventory.surveys for quota in s.quotas
    }
    survey_rooms: Counter[int] = Counter()
    for survey in inventory.surveys:
        survey_rooms[survey.survey_id] += survey.estimated_completes_remaining
    allocate = Allocate(demo.per_member, room=rooms, survey_room=survey_rooms)
    return Campaign(client, demo.panel, live, ledger=demo.folder / "campaign.ledger", allocate=allocate)


async def _read_recontacts(client: SamplingClient, live: LiveIndex) -> tuple[int, list[int]]:
    """Read the members of recontact quotas, page by page; return the last quota and its pages."""
    last, pages = 0, list[int]()
    for target in list(live.index.quota_ids.targets()):
        if target.survey.is_survey_recontact:
            last, pages, codes = target.quota.quota_id, [], list[str]()
            async for page in client.recontact_pages(last, max_results=_RECONTACT_PAGE):
                pages.append(len(page.member_codes))
                codes += page.member_codes
            live.index.recontact(last, codes)
    return last, pages


async def _run(campaign: Campaign, store: Path, watcher: Watcher) -> tuple[Tally, list[InviteOutcome]]:
    """Ask, and note each invite beside the notifications, which will tell how it has ended."""
    tally, outcomes, ledger = Tally(), list[InviteOutcome](), OutcomeLedger(store)
    noted = 0
    async with campaign.run() as run:
        async for outcome in run:
            outcomes.append(outcome)
            tally.add(outcome)
            watcher.outcome(run)
            if len(outcomes) - noted == _BATCH:
                await ledger.invited(outcomes[noted:])
                noted = len(outcomes)
    await ledger.invited(outcomes[noted:])
    return tally, outcomes


async def _compare(
    findings: Findings,
    simulator: SimulatorProcess,
    outcomes: Sequence[InviteOutcome],
    ledger: OutcomeLedger,
    watcher: Watcher,
) -> None:
    """Ask the service what it knows, which it says when it has sent all notifications, and compare."""
    # All that the service was answered 200 for is in the inbox, so one look at the end tells.
    service = await in_thread(simulator.ledger, watcher.hearing)
    funnel = await ledger.funnel()
    findings.received = (
        sum(quota.completed for quota in funnel),
        sum(quota.terminated for quota in funnel),
    )
    findings.revenue = float(sum(quota.revenue for quota in funnel))
    findings.service = service
    findings.verdict = _verdict(service.invites, outcomes)


def _verdict(entries: Sequence[LedgerEntry], outcomes: Sequence[InviteOutcome]) -> Verdict:
    from sampling_async.simulator._ledger import verdict  # noqa: PLC0415  the simulator is an extra

    return verdict(entries, outcomes)
