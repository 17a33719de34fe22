"""A partner's day against a simulated service: what `sampling-async demo` does, without its display.

This is also the longest example of the package, so it uses public names only: read `run_day`. The simulator
serves on a local port, and posts its notifications to the inbox. The demo ends by counts, not by a clock: each
end of a survey is posted until the inbox stores it, or has refused it some times.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import anyio
from attrs import asdict, define, field, frozen

from sampling_async import InviteOutcome, Percentiles, Quotas, SamplingClient
from sampling_async.campaign import Campaign, Plan, Summary
from sampling_async.matching import Allocate, LiveIndex, Member, QuestionKinds
from sampling_async.notifications import Inbox, OutcomeLedger, kept_secrets
from sampling_async.routing import Route, SurveyRouter
from sampling_async.simulator import AGE_BANDS, Fault, Latency, Notifying, Simulator, Verdict

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable
    from pathlib import Path

    from sampling_async.campaign import CampaignRun
    from sampling_async.simulator import Outbox, SimulatedMember

PER_MEMBER: Final = 4  # how many quotas a member gets at most
CLICKING: Final = 50  # members who are in no campaign, and click on the partner's page
_AGE: Final = 1001538  # the question about the age
_NO_REQUEST: Final = Percentiles(count=0, p50=0.0, p90=0.0, p99=0.0, longest=0.0)
_LATENCY: Final = Latency(a=0.01, b=0.0003, workers=8)  # of a bulk invite
ENDS: Final = ("completion", "terminate")
_POSTING_SECONDS: Final = 0.05
_ROUNDS: Final = 4  # how often a notification that is refused is posted at the end


@define(kw_only=True)
class Demo:
    """The settings of a demo, and how far it is. Whoever shows it looks at it from time to time."""

    folder: Path  # where the panel, the ledgers and the report are written
    seed: int = 7  # of the simulator: everything follows from it, except the order of requests
    members: int = 600
    surveys: int = 120
    faults: bool = False  # whether the service sometimes answers 503, or drops a connection after it has acted
    latency: Latency = _LATENCY

    run: CampaignRun | None = field(default=None, init=False)
    outbox: Outbox | None = field(default=None, init=False)

    def simulator(self) -> Simulator:
        notifying = Notifying(completes=0.4, survey_seconds=0.5, repeated=0.05)
        simulator = Simulator(
            self.seed,
            surveys=self.surveys,
            members=self.members + CLICKING,
            latency=self.latency,
            notifying=notifying,
        )
        if self.faults:
            simulator.faults.add(Fault.status(503, retry_after=0.1).on("bulk_invite", every=60))
            simulator.faults.add(Fault.cut(when="after").on("bulk_invite", every=90))
        return simulator


@frozen(kw_only=True)
class Findings:
    """The results of a demo: first what the client and the inbox say, then what the simulator says."""

    inventory: Quotas
    plan: Plan
    summary: Summary
    latency: Percentiles  # of the bulk requests
    recontacts: Mapping[int, int]  # the number of member codes by quota ID
    clicks: Sequence[Route]
    received: tuple[int, int]  # completes and terminates in the inbox
    revenue: float
    verdict: Verdict  # of the client's outcomes
    invites: int
    posted: tuple[int, int]  # completes and terminates that were posted, or will be
    unheard: int  # how many of them the inbox has not acknowledged

    @property
    def agrees(self) -> bool:
        """Whether client and service agree: on every pair, and on the end of every invite's survey."""
        return not self.disagreement and not self.missing_ends

    @property
    def missing_ends(self) -> int:
        """How many ends of surveys are not in the inbox."""
        return sum(self.posted) - sum(self.received)

    @property
    def links(self) -> int:
        """How many links were made for clicks."""
        return sum(route.url is not None and not route.is_repeat for route in self.clicks)

    @property
    def without_link(self) -> int:
        """How many clicks got no link."""
        return sum(route.url is None for route in self.clicks)

    @property
    def disagreement(self) -> str:
        """What client and service disagree on; empty if on nothing. An end that was not heard yet is none."""
        pairs = self.summary.pairs
        expected = pairs.invited + self.links + len(self.verdict.unread)
        if not self.verdict.ok:
            return str(self.verdict).splitlines()[0]
        if self.invites != expected:
            return f"{self.invites:,} invites in the service's ledger, {expected:,} by the client"
        if pairs.pending:
            return f"{pairs.pending:,} pairs were never sent"
        if not 0 <= self.missing_ends <= self.unheard:
            acknowledged = sum(self.posted) - self.unheard
            return f"{acknowledged:,} ends were acknowledged, {sum(self.received):,} are in the inbox"
        if not self.unheard and self.received != self.posted:
            return "completes and terminates were taken for each other"
        return ""


async def run_day(demo: Demo) -> Findings:
    """Run a demo from beginning to end, on asyncio."""
    simulator = demo.simulator()
    outbox = demo.outbox = simulator.notifications
    panel, store = demo.folder / "panel.jsonl", demo.folder / "notifications.db"
    members = list(simulator.members.values())
    _write_panel(members[CLICKING:], panel)
    inbox, ledger = Inbox(store, secrets=kept_secrets(store)), OutcomeLedger(store)
    kinds = QuestionKinds.default().with_age(_AGE, AGE_BANDS)
    with simulator.serve() as base_url:
        async with inbox:
            async with (
                _receiving(inbox, outbox),
                SamplingClient(base_url, panel_guid=simulator.panel_guid, api_key=simulator.api_key) as client,
                client.watch_quotas() as quotas,
                LiveIndex(quotas, kinds=kinds) as live,
                live.follow(inbox),  # quotas that close meanwhile are not requested
            ):
                await live.ready()
                inventory = quotas.quotas
                recontacts = await _read_recontacts(client, live, inventory)

                file, allocate = demo.folder / "campaign.ledger", _allocation(inventory)
                campaign = Campaign(client, panel, live, ledger=file, allocate=allocate)
                plan = await campaign.plan()
                async with campaign.run() as run:
                    demo.run = run
                    outcomes = [outcome async for outcome in run]
                await ledger.invited(outcomes)
                latency = client.snapshot().latency.get("bulk_invite", _NO_REQUEST)

                simulator.faults.clear()  # the campaign was at night
                async with SurveyRouter(client, live, store=store) as router:
                    clicks = await _click(router, members[:CLICKING])
            for _ in range(_ROUNDS):
                await outbox.deliver(inbox)
            # In the morning: with what the invites have brought.
            summary = await campaign.write(demo.folder, title="A day with the simulator", outcomes=ledger)
        funnel = await ledger.funnel()
    # The links of clicks as outcomes, for the comparison with the service.
    links = [
        InviteOutcome(code, route.invite.quota_id, "invited", route.invite, result_code=1)
        for code, route in clicks
        if route.invite is not None and not route.is_repeat
    ]
    posted = Counter(posting.kind for posting in outbox.told)
    return Findings(
        inventory=inventory,
        plan=plan,
        summary=summary,
        latency=latency,
        recontacts=recontacts,
        clicks=[route for _, route in clicks],
        received=(sum(quota.completed for quota in funnel), sum(quota.terminated for quota in funnel)),
        revenue=float(sum(quota.revenue for quota in funnel)),
        verdict=simulator.ledger.check([*outcomes, *links]),
        invites=len(simulator.ledger.invites),
        posted=(posted["completion"], posted["terminate"]),
        unheard=sum(posting.kind in ENDS for posting in outbox.unheard),
    )


async def _click(router: SurveyRouter, members: Iterable[SimulatedMember]) -> list[tuple[str, Route]]:
    """Have each member click twice at the same moment, and enter the link; return its code with each route."""
    clicks: list[tuple[str, Route]] = []
    for each in members:
        member = Member(each.member_code, each.profile, each.device_type_id, participations=each.participations)
        twice = await asyncio.gather(router.route(member), router.route(member))
        await twice[0].entered()
        clicks += [(each.member_code, route) for route in twice]
    return clicks


@asynccontextmanager
async def _receiving(inbox: Inbox, outbox: Outbox) -> AsyncGenerator[None]:
    """Post notifications to the inbox while the block is open. A service would do it over HTTP."""

    async def post() -> None:
        while True:
            await outbox.deliver(inbox, everything=False)
            await anyio.sleep(_POSTING_SECONDS)

    # A plain task: a task group would raise the failures of the block in a group.
    task = asyncio.create_task(post())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _write_panel(members: Iterable[SimulatedMember], output: Path) -> None:
    """Write a panel as JSON lines: a member a line, with the answers by question ID."""
    with output.open("w", encoding="utf-8") as file:
        for member in members:
            row: dict[Any, Any] = {
                "member_code": member.member_code,
                "device_type": member.device_type_id,
                "participations": [asdict(one) for one in member.participations],
                **member.profile,
            }
            file.write(json.dumps(row, default=sorted) + "\n")  # several answers are a set


async def _read_recontacts(client: SamplingClient, live: LiveIndex, inventory: Quotas) -> dict[int, int]:
    """Read the members of recontact quotas; return their number by quota ID."""
    found = dict[int, int]()
    for survey in inventory.surveys:
        for quota in survey.quotas if survey.is_survey_recontact else ():
            codes = [code async for code in client.recontact_members(quota.quota_id)]
            live.index.recontact(quota.quota_id, codes)
            found[quota.quota_id] = len(codes)
    return found


def _allocation(inventory: Quotas) -> Allocate:
    # The simulator counts each invite as a complete. So a quota has room for as many invites as it needs
    # completes, and not for those that will not end in one.
    room, survey_room = dict[int, int](), Counter[int]()
    for survey in inventory.surveys:
        survey_room[survey.survey_id] += survey.estimated_completes_remaining
        room |= {quota.quota_id: quota.estimated_completes_remaining for quota in survey.quotas}
    return Allocate(PER_MEMBER, room=room, survey_room=survey_room)
