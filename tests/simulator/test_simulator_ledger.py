"""The ledger, and its verdict on the report of a client."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Literal

import anyio
import httpx
import pytest

from sampling_async import Invite, InviteOutcome, RetryPolicy, ServerError
from sampling_async.simulator import Fault, LedgerEntry, SimulatedMember, Simulator, VirtualClock


def outcome(
    status: Literal["invited", "rejected", "not_sent", "unknown"],
    entry: LedgerEntry | None = None,
    *,
    member_code: str = "nobody",
    quota_id: int = 5,
    url: str | None = None,
) -> InviteOutcome:
    if entry is not None:
        member_code, quota_id = entry.member_code, entry.quota_id
        url = url or entry.url
    invite = Invite(1, 1, quota_id, 1.0, url or "", 1, 1) if status == "invited" else None
    return InviteOutcome(member_code, quota_id, status, invite)


async def with_invites(members: int = 12, **arguments: int) -> Simulator:
    """Return a simulator with bulk invites for all quotas of some members."""
    sim = Simulator(surveys=10, members=members, **arguments)
    ids = [quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas]
    headers = {"API_AUTH_KEY": sim.api_key}
    async with httpx.AsyncClient(transport=sim.transport(), base_url=sim.base_url, headers=headers) as client:
        for member_code in sim.members:
            path = f"/IPExternalSamplingService/ExternalSample/{sim.panel_guid}/{member_code}/Invites"
            await client.post(path, json={"QuotaIDs": ids})
    assert len(sim.ledger.invites) > 3
    return sim


async def test_the_ledger_holds_invites_and_requests():
    sim = await with_invites()
    ledger, first = sim.ledger, sim.ledger.invites[0]
    assert first.sequence_number == 0
    assert first.panel_guid == sim.panel_guid
    assert first.request_number == ledger.requests[0].number == 0
    assert first.quota_id in ledger.requests[0].quota_ids
    assert ledger.requests[0].member_code == "m000001"
    assert {(r.endpoint, r.status, r.is_processed) for r in ledger.requests} == {("bulk_invite", 200, True)}
    assert list(ledger.invites) == list(ledger.invites[:])
    assert ledger.invites[-1].sequence_number == len(ledger.invites) - 1
    assert len({entry.url for entry in ledger.invites}) == len(ledger.invites)
    assert repr(ledger) == f"<Ledger invites={len(ledger.invites)} requests=12>"
    assert repr(ledger.invites) == f"<{len(ledger.invites)} invites>"
    with pytest.raises(IndexError):
        ledger.invites[len(ledger.invites)]


async def test_counts_by_pair_follow_the_invites():
    sim = await with_invites()
    first = sim.ledger.invites[0]
    assert sim.ledger.by_pair() == Counter((e.member_code, e.quota_id) for e in sim.ledger.invites)
    assert sim.ledger.count(first.member_code, first.quota_id) == 1
    assert sim.ledger.count("nobody", first.quota_id) == 0


async def test_counts_by_pair_are_right_when_several_threads_ask():
    sim = await with_invites(300)
    expected = Counter((entry.member_code, entry.quota_id) for entry in sim.ledger.invites)
    pairs = list(expected)[:20]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            counts = list(pool.map(lambda pair: sim.ledger.count(*pair), pairs * 8))
    finally:
        sys.setswitchinterval(switch)
    assert counts == [expected[pair] for pair in pairs * 8]
    assert sim.ledger.by_pair() == expected


@pytest.mark.parametrize(("keep", "kept"), [(True, 12), (5, 5), (False, 0), (0, 0)])
async def test_the_latest_requests_are_kept_and_all_are_counted(keep: int, kept: int):
    sim = await with_invites(keep_requests=keep)
    assert [record.number for record in sim.ledger.requests] == list(range(12 - kept, 12))
    assert sim.ledger.request_count == 12


async def test_a_request_is_kept_with_its_time_its_query_and_its_headers_but_not_the_key():
    clock = VirtualClock(100.0)
    sim = Simulator(surveys=3, members=2, clock=clock, sleep=clock.sleep)
    headers = {"API_AUTH_KEY": sim.api_key, "X-Trace": "7"}
    path = f"/IPExternalSamplingService/ExternalSample/{sim.panel_guid}/Quotas"
    async with httpx.AsyncClient(transport=sim.transport(), base_url=sim.base_url, headers=headers) as client:
        await client.get(path, params={"includeRoutables": "false"})
        clock.advance(2.5)
        await client.get(path)
    first, second = sim.ledger.requests
    assert (first.time, second.time) == (0.0, 2.5)
    assert first.query == {"includeRoutables": "false"}
    assert first.headers["x-trace"] == "7"
    assert first.headers["api_auth_key"] == "<hidden>"
    assert sim.api_key.encode() not in pickle.dumps(first)
    assert sim.api_key not in repr(first)


async def test_requests_can_be_filtered_by_endpoint_and_end():
    sim = await with_invites(members=3)
    sim.faults.add(Fault.status(503).on("get_settings"))
    async with sim.client(retry=RetryPolicy(max_attempts=1)) as client:
        await client.get_quotas()
        with pytest.raises(ServerError):
            await client.get_settings()
    requests = sim.ledger.requests
    assert len(requests(endpoint="bulk_invite")) == 3
    assert [each.endpoint for each in requests(status=503)] == ["get_settings"]
    (of_member,) = requests(member_code="m000002")
    assert requests(quota_id=of_member.quota_ids[0], member_code="m000002") == (of_member,)
    assert requests(endpoint="bulk_invite")(status=503) == ()
    assert requests() == requests == tuple(requests)
    with pytest.raises(ValueError, match="no endpoint 'quotas'; the endpoints are get_quotas"):
        requests(endpoint="quotas")  # type: ignore[arg-type]


async def test_a_true_report_is_ok():
    sim = await with_invites()
    reported = [outcome("invited", entry) for entry in sim.ledger.invites]
    reported += [outcome("rejected"), outcome("not_sent")]
    verdict = sim.ledger.check(reported)
    assert verdict.ok
    assert (verdict.lies, verdict.unread, verdict.unexplained, verdict.lost) == ((), (), (), ())
    assert str(verdict) == "ok: 0 lies, 0 unexplained, 0 unread, 0 lost"


async def test_a_reported_invite_that_was_never_made_is_false():
    sim = await with_invites()
    first, second, *rest = sim.ledger.invites
    reported = [outcome("invited", entry) for entry in rest]
    made_up = outcome("invited", first, url="https://entry.example/never")
    foreign = outcome("invited", second, url=first.url)
    nothing = outcome("invited", url=first.url)
    verdict = sim.ledger.check([*reported, made_up, foreign, nothing])
    assert [lie.outcome for lie in verdict.lies] == [made_up, foreign, nothing]
    assert verdict.unexplained == (first, second)
    assert not verdict.ok
    assert "NOT ok: 3 lies, 2 unexplained" in str(verdict)


@pytest.mark.parametrize("status", ["rejected", "not_sent"])
async def test_denying_an_invite_is_false(status: Literal["rejected", "not_sent"]):
    sim = await with_invites()
    first, *rest = sim.ledger.invites
    reported = [outcome("invited", entry) for entry in rest]
    denial = outcome(status, first)
    assert [lie.outcome for lie in sim.ledger.check([*reported, denial]).lies] == [denial]
    # The same report is true if another outcome has the invite, or says that it may exist.
    assert sim.ledger.check([*reported, denial, outcome("invited", first)]).ok
    admitted = sim.ledger.check([*reported, denial, outcome("unknown", first)])
    assert admitted.ok
    assert admitted.unread == (first,)


async def test_an_unreported_invite_is_unexplained():
    sim = await with_invites()
    first, *rest = sim.ledger.invites
    verdict = sim.ledger.check(outcome("invited", entry) for entry in rest)
    assert verdict.unexplained == (first,)
    assert not verdict.ok
    assert f"invite 0 to quota {first.quota_id} unexplained" in str(verdict)


async def test_an_unknown_outcome_without_an_invite_is_lost_and_no_fault():
    sim = await with_invites()
    reported = [outcome("invited", entry) for entry in sim.ledger.invites]
    unknown = outcome("unknown")
    verdict = sim.ledger.check([*reported, unknown])
    assert verdict.ok
    assert verdict.lost == (unknown,)


async def test_panels_that_share_member_codes_are_checked_one_by_one():
    sim = await with_invites()
    other = sim.add_panel(members=[SimulatedMember("m000001")])
    reported = [outcome("invited", entry) for entry in sim.ledger.invites]
    assert sim.ledger.check(reported, panel_guid=sim.panel_guid).ok
    assert len(sim.ledger.check(reported, panel_guid=other.panel_guid).lies) == len(reported)


def test_an_outcome_of_no_known_status_is_refused():
    reported = InviteOutcome("m000001", 5, "perhaps")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="perhaps"):
        Simulator(surveys=1, members=1).ledger.check([reported])


def test_an_unknown_panel_is_refused():
    sim = Simulator(surveys=2, members=2)
    assert sim.ledger.check([], panel_guid=sim.panel_guid.upper()).ok
    with pytest.raises(KeyError, match="no panel 'TYPO'"):
        sim.ledger.check([], panel_guid="TYPO")


def test_a_second_unread_invite_of_a_pair_is_unexplained():
    """One outcome accounts for one invite, by its link, and not for all invites of the pair."""
    sim = Simulator(surveys=1, members=1)
    survey = sim.inventory.surveys[0]
    quota = SimpleNamespace(survey=SimpleNamespace(survey=survey), quota=survey.quotas[0])
    for number in range(2):  # no call of the client makes the second one
        sim.ledger.record_invite(
            quota, panel_guid=sim.panel_guid, member_code="m", endpoint="bulk_invite", request_number=number
        )
    first, second = sim.ledger.invites
    assert (first.member_code, first.quota_id) == (second.member_code, second.quota_id)
    read = outcome("invited", first)
    assert sim.ledger.check([read]).unexplained == (second,)
    admitted = InviteOutcome("m", first.quota_id, "unknown")
    assert sim.ledger.check([read, admitted]).unread == (second,)


def test_sub_quotas_fill_as_invites_are_given():
    sim = Simulator(seed=3, surveys=5, members=40)

    def completes() -> int:
        return sum(
            part.current_completes
            for survey in sim.inventory.surveys
            for quota in survey.quotas
            if quota.quota_id == quota_id
            for layer in quota.layers[:1]
            for part in layer.sub_quotas
        )

    member_code, quota_id = next(
        (code, quota.quota_id)
        for code in sim.members
        for survey in sim.inventory.surveys
        for quota in survey.quotas
        if quota.layers and quota.estimated_completes_remaining > 1 and sim.eligible(code, quota.quota_id) == 1
    )
    before = completes()

    async def invite() -> None:
        async with sim.client() as client:
            await client.generate_invite(member_code, quota_id)

    anyio.run(invite)
    assert completes() == before + 1
