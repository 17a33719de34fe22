"""A partner's day against a simulated service: what `sampling-async demo` does, without its display.

This is also the longest example of the package, so it uses public names only. Read `run_day` first. The service
runs in another process, so the times are those of the client. The demo ends by counts, not by a clock: each end
of a survey is sent until it is acknowledged, and only a receiver that refuses stops that.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections import Counter
from contextlib import asynccontextmanager, contextmanager, suppress
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import anyio
import uvicorn
from attrs import asdict, field, frozen

from sampling_async import Quotas, SamplingClient
from sampling_async.campaign import Campaign, Summary
from sampling_async.matching import Allocate, LiveIndex, QuestionKinds
from sampling_async.notifications import Inbox, Kind, OutcomeLedger, kept_secrets
from sampling_async.simulator import AGE_BANDS, Fault, Latency, Notifying, Simulator, Verdict

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
    from multiprocessing.connection import Connection

    from sampling_async import AttemptReport, InviteOutcome
    from sampling_async.campaign import CampaignRun, Plan
    from sampling_async.simulator import Outbox, SimulatedMember

PER_MEMBER: Final = 4  # how many quotas a member gets at most
_AGE: Final = 1001538  # the question about the age
_ENDS: Final = ("completion", "terminate")
_KINDS: Final = (Kind.COMPLETION, Kind.TERMINATE, Kind.QUOTA_STATUS, Kind.SURVEY_CLOSED)
_REFUSALS: Final = 4  # of each notification that is left, with no acknowledgement between them, end the sending


class DemoError(Exception):
    """The simulator's process did not start, or ended too early. The text says why."""


@frozen(kw_only=True)
class Demo:
    """The settings of a demo."""

    folder: Path  # where the panel, the ledgers and the report are written
    seed: int = 7  # of the simulator: everything follows from it, except the order of requests
    members: int = 600
    surveys: int = 120
    faults: bool = False  # whether the service sometimes answers 503, or drops a connection after it has acted
    latency: Latency = field(factory=lambda: Latency(a=0.01, b=0.0003, workers=8))  # of a bulk invite


class Ends(NamedTuple):
    """How many ends of surveys the service knows of, and how many of these were acknowledged."""

    heard: int
    known: int


Step: TypeAlias = "Quotas | Plan | CampaignRun | Ends"


@frozen(kw_only=True)
class ServiceReport:
    """What the simulator knows at the end."""

    verdict: Verdict = field(factory=Verdict)  # of the client's outcomes
    invites: int = 0  # how many it has made
    completions: int = 0  # how many it has notified of, or tried to
    terminates: int = 0
    unheard: int = 0  # how many of these ends nobody has acknowledged


@frozen(kw_only=True)
class Findings:
    """The results of a demo."""

    inventory: Quotas
    summary: Summary
    statuses: Counter[str]
    codes: Counter[tuple[int | None, str | None]]  # the number of outcomes by result code and result
    seconds: float  # of the campaign
    request_seconds: list[float]  # of the attempts of bulk invites, sorted
    recontact_quota_id: int
    recontact_pages: list[int]  # the number of member codes on each page of that quota
    received: tuple[int, int]  # completes and terminates in the inbox
    revenue: float
    service: ServiceReport

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
        expected = pairs.invited + len(service.verdict.unread)
        if not service.verdict.ok:
            return str(service.verdict).splitlines()[0]
        if service.invites != expected:
            return f"{service.invites:,} invites in the service's ledger, {expected:,} by the client"
        if pairs.pending:
            return f"{pairs.pending:,} pairs were never sent"
        if not 0 <= self.missing_ends <= service.unheard:
            acknowledged = service.completions + service.terminates - service.unheard
            return f"{acknowledged:,} ends were acknowledged, {sum(self.received):,} are in the inbox"
        if not service.unheard and self.received != (service.completions, service.terminates):
            return "completes and terminates were taken for each other"
        return ""

    def percentile(self, percent: int) -> float:
        """Return the seconds that `percent` percent of the bulk invites did not exceed."""
        times = self.request_seconds
        return times[max(0, ceil(len(times) * percent / 100) - 1)] if times else 0.0


# --- The partner's side


async def run_day(demo: Demo, watch: Callable[[Step], object] = lambda _: None) -> Findings:
    """Run a demo from beginning to end, on asyncio. A service that cannot go on is a `DemoError`.

    `watch` is called with the inventory, the plan, the run after each outcome, and how many ends are heard.
    """
    outcomes: list[InviteOutcome] = []
    request_seconds: list[float] = []

    def note_attempt(report: AttemptReport) -> None:
        if report.endpoint == "bulk_invite":
            request_seconds.append(report.timing.total)

    store = demo.folder / "notifications.db"
    inbox, ledger = Inbox(store, secrets=kept_secrets(store)), OutcomeLedger(store)
    async with inbox, _receiving(inbox) as base, _simulated_service(demo, inbox.urls(base)) as service:
        base_url, panel_guid, api_key, members = await _next_message(service)
        panel = demo.folder / "panel.jsonl"
        _write_panel(members, panel)
        kinds = QuestionKinds.default().with_age(_AGE, AGE_BANDS)
        async with (
            SamplingClient(base_url, panel_guid=panel_guid, api_key=api_key, on_attempt=note_attempt) as client,
            client.watch_quotas() as quotas,
            LiveIndex(quotas, kinds=kinds) as live,
            live.follow(inbox),  # quotas that close meanwhile are not requested
        ):
            await live.ready()
            inventory = quotas.quotas
            watch(inventory)
            recontact_quota_id, recontact_pages = await _read_recontacts(client, live, inventory)

            file, allocate = demo.folder / "campaign.ledger", _allocation(inventory)
            campaign = Campaign(client, panel, live, ledger=file, allocate=allocate)
            watch(await campaign.plan())

            began = time.perf_counter()
            async with campaign.run() as run:
                async for outcome in run:
                    outcomes.append(outcome)
                    watch(run)
            seconds = time.perf_counter() - began
            await ledger.invited(outcomes)
            summary = await campaign.write(demo.folder, title="A day with the simulator")
        # All that the service got a 200 for is in the inbox, so the inbox is read once, after the last one.
        with suppress(OSError):  # the service has ended, as the next message will say
            service.send(outcomes)
        while not isinstance(report := await _next_message(service), ServiceReport):
            watch(report)
    funnel = await ledger.funnel()
    return Findings(
        inventory=inventory,
        summary=summary,
        statuses=Counter(outcome.status for outcome in outcomes),
        codes=Counter((outcome.result_code, outcome.result) for outcome in outcomes),
        seconds=seconds,
        request_seconds=sorted(request_seconds),
        recontact_quota_id=recontact_quota_id,
        recontact_pages=recontact_pages,
        received=(sum(quota.completed for quota in funnel), sum(quota.terminated for quota in funnel)),
        revenue=float(sum(quota.revenue for quota in funnel)),
        service=report,
    )


def _write_panel(members: Iterable[SimulatedMember], output: Path) -> None:
    """Write a panel as JSON lines: a member a line, with the answers by question ID."""
    with output.open("w", encoding="utf-8") as file:
        for member in members:
            row = {
                "member_code": member.member_code,
                "device_type": member.device_type_id,
                "participations": [asdict(one) for one in member.participations],
                **{
                    str(question_id): sorted(answer) if isinstance(answer, frozenset) else answer
                    for question_id, answer in member.profile.items()
                },
            }
            file.write(json.dumps(row) + "\n")


async def _read_recontacts(client: SamplingClient, live: LiveIndex, inventory: Quotas) -> tuple[int, list[int]]:
    """Read the members of recontact quotas, page by page; return the last quota and the sizes of its pages."""
    quota_id, sizes = 0, list[int]()
    for survey in inventory.surveys:
        for quota in survey.quotas if survey.is_survey_recontact else ():
            quota_id = quota.quota_id
            pages = [page.member_codes async for page in client.recontact_pages(quota_id, max_results=25)]
            sizes = [len(page) for page in pages]
            live.index.recontact(quota_id, [code for page in pages for code in page])
    return quota_id, sizes


def _allocation(inventory: Quotas) -> Allocate:
    # The simulator counts each invite as a complete. So a quota has room for as many invites as it needs
    # completes, and not for those that will not end in one.
    room, survey_room = dict[int, int](), Counter[int]()
    for survey in inventory.surveys:
        survey_room[survey.survey_id] += survey.estimated_completes_remaining
        room |= {quota.quota_id: quota.estimated_completes_remaining for quota in survey.quotas}
    return Allocate(PER_MEMBER, room=room, survey_room=survey_room)


@asynccontextmanager
async def _receiving(inbox: Inbox) -> AsyncGenerator[str]:
    """Receive notifications over HTTP while the block is open; yield the base of the URLs."""
    # With IPPROTO_TCP, asyncio turns Nagle's algorithm off, which delays each response by 40 ms.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = _NotificationServer(uvicorn.Config(inbox.app, lifespan="off", ws="none", log_level="error"))
        # A plain task: a task group would raise the failures of the block in a group.
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


class _NotificationServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield  # signals end the whole demo


# --- The service's side, in another process


@asynccontextmanager
async def _simulated_service(demo: Demo, urls: Mapping[Kind, str]) -> AsyncGenerator[Connection]:
    """Run the simulated service in a process while the block is open; it posts notifications to these URLs."""
    context = get_context("spawn")
    pipe, child_pipe = context.Pipe()
    posted = {str(kind): urls[kind] for kind in _KINDS}
    process = context.Process(target=_serve, args=(child_pipe, demo, posted), daemon=True)
    process.start()
    child_pipe.close()  # only the process has it now, so its end ends the pipe, and the other way round
    try:
        yield pipe
    except EOFError:
        process.join()
        raise DemoError(f"the simulator's process ended with exit code {process.exitcode}") from None
    except BaseException:
        # It may be waiting until its notifications are acknowledged, and nobody receives them any more.
        process.kill()
        raise
    finally:
        process.join()
        pipe.close()


async def _next_message(pipe: Connection) -> Any:
    """Wait for the next message of the process. Its end is an EOFError, and a failure there a DemoError."""
    try:
        message = await anyio.to_thread.run_sync(pipe.recv, abandon_on_cancel=True)
    except OSError:
        raise EOFError from None
    if isinstance(message, DemoError):
        raise message
    return message


def _serve(pipe: Connection, demo: Demo, urls: Mapping[str, str]) -> None:
    """Serve until the client's outcomes arrive on the pipe; reply with a `ServiceReport`."""
    # A terminal sends Ctrl-C to both processes. The parent handles it, and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with suppress(EOFError, ConnectionError):  # the parent has ended
            _simulate(pipe, demo, urls)
    except Exception as exc:  # noqa: BLE001  the parent says what it is
        pipe.send(DemoError(f"the simulator failed: {exc}"))


def _simulate(pipe: Connection, demo: Demo, urls: Mapping[str, str]) -> None:
    simulator = Simulator(
        demo.seed,
        surveys=demo.surveys,
        members=demo.members,
        latency=demo.latency,
        notifying=Notifying(completes=0.4, survey_seconds=0.5, repeated=0.05),
    )
    if demo.faults:
        simulator.faults.add(Fault.status(503, retry_after=0.1).on("bulk_invite", every=60))
        simulator.faults.add(Fault.cut(when="after").on("bulk_invite", every=90))
    outbox = simulator.notifications
    with simulator.serve() as base_url, outbox.sending_to(urls):
        members = tuple(simulator.members.values())
        pipe.send((base_url, simulator.panel_guid, simulator.api_key, members))
        outcomes = pipe.recv()
        while (waiting := outbox.waiting) and outbox.refusals < _REFUSALS * waiting:
            ends = sum(posting.kind in _ENDS for posting in outbox.told)
            pipe.send(Ends(ends - _unheard(outbox), ends))
            time.sleep(0.1)
    kinds = Counter(posting.kind for posting in outbox.told)
    report = ServiceReport(
        verdict=simulator.ledger.check(outcomes),
        invites=len(simulator.ledger.invites),
        completions=kinds["completion"],
        terminates=kinds["terminate"],
        unheard=_unheard(outbox),
    )
    pipe.send(report)


def _unheard(outbox: Outbox) -> int:
    return sum(posting.kind in _ENDS for posting in outbox.unheard)
