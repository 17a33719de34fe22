"""The public API as a type checker sees it. mypy and pyright read this file; it never runs."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, assert_type
from uuid import UUID

import httpx
import httpx2

from sampling_async import (
    AttemptReport,
    BulkInviteResult,
    Change,
    Goal,
    Invite,
    InviteOutcome,
    InviteRequest,
    Journal,
    OutagePolicy,
    OutcomeStatus,
    OutcomeStream,
    PanelProfile,
    PartnerSettings,
    Progress,
    QuotaChanges,
    Quotas,
    QuotaWatch,
    RecontactMembers,
    RetryPolicy,
    SamplingClient,
    SamplingError,
    Setting,
    Snapshot,
    Survey,
    WatchStatus,
    from_json,
    make_converter,
    to_json,
)
from sampling_async import sync as blocking
from sampling_async.health import Health, HealthReport
from sampling_async.matching import (
    BatchReader,
    Counts,
    LiveIndex,
    MatchResult,
    Member,
    Output,
    PanelMatcher,
    QuotaIndex,
    Sample,
    TopK,
    Truth,
)
from sampling_async.notifications import Inbox, InboxStatus
from sampling_async.routing import RouterStatus, SurveyRouter
from sampling_async.simulator import Simulator


async def quota_ids() -> AsyncIterator[int]:
    yield 1


async def requests() -> AsyncIterator[InviteRequest]:
    yield InviteRequest("m", [1, 2])


def goal_of(*, is_urgent: bool) -> Goal:
    return "first" if is_urgent else "throughput"


async def use(client: SamplingClient) -> None:
    """Use each public call, and declare its result type."""
    assert_type(client.share(of=2), SamplingClient)
    assert_type(client.with_options(name="us", outage=OutagePolicy(patience=0)), SamplingClient)
    assert_type(await client.get_quotas(include_routables=False), Quotas)
    assert_type(await client.generate_invite("m", 1), Invite)
    assert_type(await client.get_settings(), PartnerSettings)
    result = await client.bulk_invite("m", [1, 2])
    assert_type(result, BulkInviteResult)
    assert_type(result[0], InviteOutcome)
    assert_type(result[0:1], tuple[InviteOutcome, ...])
    assert_type(result.resendable(), tuple[int, ...])
    assert_type(result.invites, tuple[Invite, ...])
    assert_type(result[0].replayed, bool)
    if result[0].status == "invited":
        assert_type(result[0].invite, Invite | None)
    assert_type(result[0].error, SamplingError | None)
    for source in ([1, 2], range(5), {1, 2}, (n for n in (1, 2))):
        async with client.stream_bulk_invite("m", source) as outcomes:
            assert_type(outcomes, OutcomeStream)
    async with client.stream_bulk_invite("m", quota_ids()) as outcomes:
        async for outcome in outcomes:
            assert_type(outcome, InviteOutcome)
    async with client.fan_out(requests(), goal=goal_of(is_urgent=True)) as outcomes:
        assert_type(outcomes.left_over, tuple[InviteOutcome, ...])
        assert_type(outcomes.progress, Progress)
        assert_type(outcomes.progress.seconds_left, float | None)
    journal = Journal("run.journal")
    async for outcome in journal.outcomes():
        assert_type(outcome, InviteOutcome)
    assert_type(await journal.counts(), dict[OutcomeStatus, int])
    async with client.fan_out([InviteRequest("m", range(3))], journal=journal) as outcomes:
        assert_type(await anext(outcomes), InviteOutcome)
    async for code in client.recontact_members(1, max_results=5, after="m"):
        assert_type(code, str)
    async for page in client.recontact_pages(1):
        assert_type(page, RecontactMembers)
    async with client.stream_recontact_members(1) as codes:
        assert_type(await anext(codes), str)
        assert_type(codes.last_taken, str | None)


def match(index: QuotaIndex, panel: object) -> None:
    """Match one member, and a panel."""
    outputs: list[Output] = [Counts(), TopK(3), Sample(5)]
    for output in outputs:
        assert_type(PanelMatcher(index, output).run(panel), BatchReader)
    assert_type(index.match(Member("m", {1: 2})), MatchResult)
    assert_type(index.explain(Member("m", {1: 2}), 7, device_type=1).truth, Truth)


def read(body: bytes) -> None:
    """Read and write records."""
    settings = from_json(PartnerSettings, body)
    assert_type(settings[0], Setting)
    assert_type(settings.max_surveys_to_fetch, int | None)
    assert_type(to_json(from_json(Quotas, body)), bytes)
    assert_type(make_converter().structure(body, Quotas), Quotas)


async def watch(client: SamplingClient) -> None:
    """Use the live inventory, and declare what it gives."""
    async with client.watch_quotas(60, cache="inventory.cache") as watched, LiveIndex(watched) as live:
        assert_type(watched, QuotaWatch)
        assert_type(watched.quotas, Quotas)
        assert_type(watched.status, WatchStatus)
        assert_type(watched.age, float | None)
        assert_type(await watched.refresh(), Quotas)
        assert_type(live.index, QuotaIndex)
        assert_type(live.match({1: 2}), MatchResult)
        async with watched.changes() as changes:
            assert_type(changes, QuotaChanges)
            async for change in changes:
                assert_type(change, Change)


async def health_of(client: SamplingClient, live: LiveIndex, inbox: Inbox, router: SurveyRouter) -> None:
    """Look at the health of a process."""
    health = Health(client=client, live=live, inbox=inbox, router=router, telemetry=True)
    report = await health.report(within=0.5)
    assert_type(report, HealthReport)
    assert_type(report.reasons, tuple[str, ...])
    assert_type(report.inventory, WatchStatus | None)
    assert_type(report.router, RouterStatus | None)
    assert_type(report.inbox, InboxStatus | None)
    assert_type(client.name, str | None)


def support(
    error: SamplingError, report: AttemptReport, result: BulkInviteResult, guid: UUID
) -> SamplingClient:
    """Name a request to the operator's support, and make a client of a profile."""
    assert_type(error.request_id, str | None)
    assert_type(report.headers, Mapping[str, str])
    assert_type(result.headers, Mapping[str, str])
    assert_type(result.request_id, str | None)
    profile = PanelProfile(
        name="us",
        base_url="https://sampling.example",
        panel=guid,
        api_key=lambda: guid,
        retry=RetryPolicy(max_attempts=2),
    )
    return SamplingClient.from_env(profile=profile)


def script(client: blocking.SamplingClient) -> None:
    """Use each public call of the blocking client, and declare its result type."""
    assert_type(client.share(of=2), blocking.SamplingClient)
    assert_type(client.with_options(name="us", outage=OutagePolicy(patience=0)), blocking.SamplingClient)
    assert_type(client.get_quotas(include_routables=False), Quotas)
    assert_type(client.generate_invite("m", 1, deadline=5), Invite)
    assert_type(client.get_settings(), PartnerSettings)
    assert_type(client.bulk_invite("m", (n for n in (1, 2))), BulkInviteResult)
    assert_type(client.snapshot(), Snapshot)
    assert_type(client.name, str | None)
    for survey in client.iter_surveys(strict=True):
        assert_type(survey, Survey)
    for code in client.recontact_members(1, max_results=5, after="m"):
        assert_type(code, str)
    for page in client.recontact_pages(1):
        assert_type(page, RecontactMembers)
    with client.stream_recontact_members(1) as codes:
        assert_type(next(codes), str)
        assert_type(codes.last_taken, str | None)
    requests = (InviteRequest("m", [1]) for _ in range(3))
    with client.fan_out(requests, goal=goal_of(is_urgent=True), journal="run.journal") as outcomes:
        assert_type(outcomes, blocking.OutcomeStream)
        for outcome in outcomes:
            assert_type(outcome, InviteOutcome)
        assert_type(outcomes.left_over, tuple[InviteOutcome, ...])
        assert_type(outcomes.progress, Progress)
    with client.serve_snapshots("night.sock"), client.stream_bulk_invite("m", range(3)) as outcomes:
        assert_type(list(outcomes), list[InviteOutcome])


def with_transports(url: str, app: Any) -> None:
    """Give transports of httpx and of httpx2."""
    key = UUID(int=1)
    SamplingClient(
        url, panel_guid=key, api_key=key, transport=httpx.MockTransport(lambda _: httpx.Response(200))
    )
    SamplingClient(url, panel_guid=key, api_key=key, transport=httpx.AsyncHTTPTransport())
    SamplingClient(url, panel_guid=key, api_key=key, transport=httpx2.ASGITransport(app))
    SamplingClient(url, panel_guid=key, api_key=key, transport=Simulator().transport())
    SamplingClient(
        url, panel_guid=key, api_key=key, http_client=httpx.AsyncClient(), headers={"X-Gateway": "g"}
    )
    SamplingClient(url, panel_guid=key, api_key=key, http_client=httpx2.AsyncClient(), user_agent="panel/1.4")
    blocking: Any = {"panel_guid": key, "api_key": key}
    SamplingClient(url, **blocking, http_client=httpx.Client())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


class Mine(blocking.SamplingClient):
    """A client of a partner."""


assert_type(Mine.from_env(profile="us"), Mine)
assert_type(Mine("https://service.example", panel_guid=UUID(int=1), api_key="key").with_options(), Mine)
