"""The ledger of outcomes: invites joined with their notifications, and the money."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from decimal import Context, Decimal, Inexact, localcontext
from itertools import permutations
from typing import Any

import pytest
from attrs import evolve
from store_kit import COMPLETION, SECRET, TERMINATE, post

from sampling_async import InvalidRequestError, Invite, InviteOutcome, InviteRequest
from sampling_async._journal.database import connected_to_read as database_connected
from sampling_async.notifications import (
    Inbox,
    OutcomeLedger,
    OutcomeRow,
    QuotaFunnel,
    StoreError,
    SurveyEnding,
    _sqlite,
)
from sampling_async.notifications._stores import store_of
from sampling_async.simulator import Notifying, Simulator

NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


@pytest.fixture
def path(new_address):
    return new_address()


@pytest.fixture
def ledger(path):
    return OutcomeLedger(path, clock=NOW.timestamp)


def invited(member: str, quota_id: int = 1100, survey_id: int = 2401, wave_id: int = 77) -> InviteOutcome:
    invite = Invite(
        survey_id=survey_id,
        wave_id=wave_id,
        quota_id=quota_id,
        partner_amount=1.5,
        url="https://x",
        loi=5,
        ir=50,
        member_amount=0.0,
    )
    return InviteOutcome(member_code=member, quota_id=quota_id, status="invited", invite=invite)


def fields_of(member: str, fields=COMPLETION, **more):
    return {**fields, "UniqueCode": member, **more}


TAKEN_BACK = {**COMPLETION, "ReconciliationID": 1, "ReconciliationDateTime": "2026-12-01 08:00:00"}
WITHOUT_WAVE = {name: value for name, value in COMPLETION.items() if name != "WaveId"}


ENDED = datetime(2026, 11, 22, 10, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)


async def rows_after(path, ledger, *hits) -> list[tuple[str, Decimal]]:
    async with Inbox(path, secrets=SECRET, clock=(ENDED + 5 * HOUR).timestamp) as inbox:
        for kind, fields in hits:
            assert (await post(inbox, kind, fields)).status == 200
    return [(row.ending, row.revenue) for row in await ledger.rows()]


async def test_reading_costs_as_much_a_row_of_a_large_store(tmp_path, monkeypatch):
    steps: list[int] = []

    def counted(*given: Any) -> Any:
        database = database_connected(*given)
        database.set_progress_handler(lambda: steps.append(1), 100)
        return database

    monkeypatch.setattr(_sqlite, "connected_to_read", counted)
    costs = []
    for members in (50, 400):
        ledger = OutcomeLedger(tmp_path / f"{members}.db", clock=NOW.timestamp)
        await ledger.invited([invited(f"m{number}") for number in range(members)])
        async with Inbox(tmp_path / f"{members}.db", secrets=SECRET) as inbox:
            for number in range(members):
                await post(inbox, "completion", fields_of(f"m{number}", SurveyId=2401, WaveId=77))
        steps.clear()
        rows = await ledger.rows()
        assert [row.ending for row in rows] == [SurveyEnding.COMPLETED] * members
        costs.append(len(steps) / members)
    assert costs[1] < 2 * costs[0]


@pytest.mark.parametrize("is_invited", [True, False])
@pytest.mark.parametrize(
    ("amount", "expected"), [({"Revenue": 100}, "-1"), ({"Revenue": -100}, "-1"), ({"Revenue": None}, "-1.5")]
)
async def test_a_reconciliation_is_money_taken_back(path, ledger, amount, expected, is_invited):
    if is_invited:
        await ledger.invited([invited("m-1")])
    hits = [("terminate", {**TAKEN_BACK, **amount}), ("completion", COMPLETION)]
    found = await rows_after(path, ledger, *hits, hits[0], ("terminate", TERMINATE))
    assert found == [(SurveyEnding.COMPLETED, Decimal("1.5")), (SurveyEnding.RECONCILED, Decimal(expected))]
    (quota,) = await ledger.funnel()
    assert (quota.completed, quota.reconciled, quota.terminated, quota.open) == (1, 1, 0, 0)
    assert quota.revenue == Decimal("1.5") + Decimal(expected)
    assert (quota.invited, quota.uninvited) == ((1, 0) if is_invited else (0, 1))


async def test_what_is_corrected_and_taken_back_twice_leaves_nothing(path, ledger):
    await ledger.invited([invited("m-1")])
    unclear = {**TAKEN_BACK, "Revenue": None}
    found = await rows_after(
        path,
        ledger,
        ("completion", COMPLETION),
        ("completion", {**COMPLETION, "Revenue": 75}),
        ("completion", {**unclear, "WaveId": None}),
        ("completion", {**unclear, "ReconciliationID": 2}),
    )
    assert found == [
        (SurveyEnding.COMPLETED, Decimal("1.5")),
        (SurveyEnding.CORRECTED, Decimal("-0.75")),
        (SurveyEnding.RECONCILED, Decimal("-0.75")),
        (SurveyEnding.RECONCILED, Decimal(0)),
    ]


@pytest.mark.parametrize("order", list(permutations((10, 11, 12))))
async def test_the_latest_revenue_counts_in_whatever_order_they_come(path, ledger, order):
    await ledger.invited([invited("m-1")])
    revenues = {10: 100, 11: 150, 12: 120}
    found = await rows_after(
        path,
        ledger,
        *(
            ("completion", {**COMPLETION, "Revenue": revenues[hour], "DateTime": f"2026-11-22 {hour}:00:00"})
            for hour in (*order, *order)
        ),
    )
    assert sum(revenue for _, revenue in found) == Decimal("1.2")
    async with Inbox(path, secrets=SECRET) as inbox:
        facts = [fact async for fact in inbox.facts()]
    late = [at for at, hour in enumerate(order) if any(before > hour for before in order[:at])]
    assert [at for at, fact in enumerate(facts) if fact.validity == "stale"] == late
    assert {fact.receipts for fact in facts} == {2}


@pytest.mark.parametrize("times", [("9999-12-31 23:59:59", "10:00:00"), ("10:00:00", "0001-01-01T00:00:00")])
async def test_a_time_that_cannot_be_true_takes_no_correction_away(path, ledger, times):
    await ledger.invited([invited("m-1")])
    first, second = (each if "-" in each else f"2026-11-22 {each}" for each in times)
    found = await rows_after(
        path,
        ledger,
        ("completion", {**COMPLETION, "DateTime": first}),
        ("completion", {**COMPLETION, "Revenue": 170, "DateTime": second}),
    )
    assert [revenue for _, revenue in found] == [Decimal("1.5"), Decimal("0.2")]


async def test_what_is_older_than_any_before_it_is_late_although_the_last_has_no_time(path, ledger):
    await ledger.invited([invited("m-1")])
    hits = ((100, "2026-11-22 10:00:00"), (200, None), (300, "2026-11-22 09:00:00"))
    fields = ({**COMPLETION, "Revenue": revenue, "DateTime": at} for revenue, at in hits)
    found = await rows_after(path, ledger, *(("completion", each) for each in fields))
    assert sum(revenue for _, revenue in found) == 2


@pytest.mark.parametrize("order", [1, -1])
async def test_what_is_taken_back_whole_and_in_part_leaves_nothing(path, ledger, order):
    await ledger.invited([invited("m-1")])
    whole = ("completion", {**TAKEN_BACK, "Revenue": None})
    part = ("completion", {**TAKEN_BACK, "ReconciliationID": 2, "Revenue": 100})
    found = await rows_after(path, ledger, ("completion", COMPLETION), *[whole, part][::order])
    assert [revenue for _, revenue in found] == [Decimal("1.5"), Decimal(-1), Decimal("-0.5")]


@pytest.mark.parametrize(("amount", "left"), [(None, "0"), (100, "0.5")])
@pytest.mark.parametrize("is_terminated_first", [True, False])
async def test_a_reconciliation_may_name_the_survey_of_the_invite(
    path, ledger, amount, left, is_terminated_first
):
    await ledger.invited([invited("m-1")])
    routed = {"SurveyId": 9, "WaveId": 3, "OriginalSurveyID": 2401}
    hits = [("completion", {**COMPLETION, **routed}), ("completion", {**TAKEN_BACK, "Revenue": amount})]
    if is_terminated_first:
        hits = [("terminate", TERMINATE), *hits]
    found = await rows_after(path, ledger, *hits)
    assert sum(revenue for _, revenue in found) == Decimal(left)


async def test_a_second_reconciliation_of_a_survey_takes_nothing_from_another(path, ledger):
    await ledger.invited([invited("m-1")])
    routed = {"SurveyId": 9, "WaveId": 3, "OriginalSurveyID": 2401}
    taken = {**TAKEN_BACK, "Revenue": None}
    found = await rows_after(
        path,
        ledger,
        ("completion", COMPLETION),
        ("completion", {**COMPLETION, **routed, "Revenue": 80}),
        ("completion", taken),
        ("completion", {**taken, "ReconciliationID": 2}),
    )
    assert sum(revenue for _, revenue in found) == Decimal("0.8")


async def test_an_invite_whose_completion_is_not_known_is_not_open_when_it_is_taken_back(path, ledger):
    await ledger.invited([invited("m-1")])
    assert await rows_after(path, ledger, ("invite", TAKEN_BACK)) == [
        (SurveyEnding.RECONCILED, Decimal("-1.5"))
    ]
    (quota,) = await ledger.funnel()
    assert (quota.invited, quota.open, quota.completed) == (1, 0, 0)
    assert await ledger.overdue(0) == []


async def test_a_completion_without_a_wave_belongs_to_the_invite_of_its_quota(path, ledger):
    await ledger.invited([invited("m-1", 1100, wave_id=1)], at=ENDED - HOUR * 2)
    await ledger.invited([invited("m-1", 2200, wave_id=2)], at=ENDED - HOUR)
    taken_back = {**WITHOUT_WAVE, "ReconciliationID": 1, "QuotaID": None}
    await rows_after(path, ledger, ("completion", WITHOUT_WAVE), ("completion", taken_back))
    found = [(row.wave_id, row.quota_id, row.ending) for row in await ledger.rows()]
    assert found == [
        (1, 1100, SurveyEnding.COMPLETED),
        (1, 1100, SurveyEnding.RECONCILED),
        (2, 2200, SurveyEnding.OPEN),
    ]


@pytest.mark.parametrize("is_invited", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
async def test_what_comes_with_and_without_its_wave_is_paid_once(path, ledger, is_invited, is_first):
    if is_invited:
        await ledger.invited([invited("m-1")])
    hits = [("completion", WITHOUT_WAVE), ("completion", COMPLETION)]
    found = await rows_after(path, ledger, *(hits if is_first else reversed(hits)))
    assert found == [(SurveyEnding.COMPLETED, Decimal("1.5"))]
    assert [row.wave_id for row in await ledger.rows()] == [77]


@pytest.mark.parametrize("is_invited", [True, False])
@pytest.mark.parametrize("completion", [WITHOUT_WAVE, COMPLETION])
@pytest.mark.parametrize("is_late", [True, False])
async def test_a_reconciliation_meets_its_completion_with_or_without_a_wave(
    path, ledger, completion, is_invited, is_late
):
    if is_invited:
        await ledger.invited([invited("m-1")])
    other = COMPLETION if completion is WITHOUT_WAVE else WITHOUT_WAVE
    taken_back = {**other, "ReconciliationID": 1, "Revenue": None}
    hits = [("completion", completion), ("completion", taken_back)]
    found = await rows_after(path, ledger, *(hits if is_late else reversed(hits)))
    assert found == [(SurveyEnding.COMPLETED, Decimal("1.5")), (SurveyEnding.RECONCILED, Decimal("-1.5"))]
    (quota,) = await ledger.funnel()
    assert (quota.wave_id, quota.completed, quota.reconciled, quota.revenue) == (77, 1, 1, 0)


@pytest.mark.parametrize("late", [timedelta(hours=-1), timedelta(hours=1)])
@pytest.mark.parametrize("quota_id", [1100, 3300, None])
async def test_a_later_invite_takes_no_older_completion(path, ledger, quota_id, late):
    await ledger.invited([invited("m-1", wave_id=1)], at=ENDED + late)
    correction = fields_of("m-1", WITHOUT_WAVE, QuotaID=quota_id, Revenue=75, DateTime="2026-11-25 10:00:00")
    await rows_after(
        path,
        ledger,
        ("completion", fields_of("m-1", WITHOUT_WAVE, QuotaID=quota_id)),
        ("completion", correction),
    )
    await ledger.invited([invited("m-1", wave_id=2)], at=ENDED + HOUR * 24)
    found = [(row.wave_id, row.ending) for row in await ledger.rows()]
    assert found == [(1, SurveyEnding.COMPLETED), (1, SurveyEnding.CORRECTED), (2, SurveyEnding.OPEN)]


async def test_a_completion_without_a_wave_belongs_to_the_invite_of_its_survey(path, ledger):
    await ledger.invited([invited("m-1"), invited("m-1", survey_id=1), invited("m-2")])
    await rows_after(path, ledger, ("completion", WITHOUT_WAVE), ("completion", fields_of("m-3", WITHOUT_WAVE)))
    ends = [(row.ending, row.is_auto_routed) for row in await ledger.rows()]
    assert ends == [
        (SurveyEnding.COMPLETED, False),
        (SurveyEnding.OPEN, False),
        (SurveyEnding.OPEN, False),
        (SurveyEnding.COMPLETED, False),
    ]
    assert [row.member_code for row in await ledger.uninvited()] == ["m-3"]


async def test_each_invite_has_its_end(path, ledger):
    outcomes = [invited(member) for member in ("m-1", "m-2", "m-3")]
    rejected = InviteOutcome(member_code="m-4", quota_id=1100, status="rejected")
    assert await ledger.invited([*outcomes, rejected]) == 3
    assert await ledger.invited(outcomes) == 0
    assert await ledger.entered("m-1", 1100)
    assert not await ledger.entered("m-1", 9)
    async with Inbox(path, secrets=SECRET) as inbox:
        await post(inbox, "completion", fields_of("m-1"))
        await post(inbox, "terminate", fields_of("m-2", TERMINATE))
    at = datetime(2026, 11, 22, 10, 0, tzinfo=UTC)
    row = OutcomeRow(
        member_code="m-1",
        survey_id=2401,
        wave_id=77,
        quota_id=1100,
        ending=SurveyEnding.COMPLETED,
        revenue=Decimal("1.50"),
        invited_at=NOW,
        entered_at=NOW,
        ended_at=at,
        fact_id=1,
    )
    ended = evolve(
        row, member_code="m-2", ending=SurveyEnding.TERMINATED, revenue=Decimal(0), entered_at=None, fact_id=2
    )
    still_open = evolve(ended, member_code="m-3", ending=SurveyEnding.OPEN, ended_at=None, fact_id=None)
    assert await ledger.rows() == [row, evolve(ended, reason="SCREENED_OUT"), still_open]
    assert await ledger.funnel() == [
        QuotaFunnel(
            survey_id=2401,
            wave_id=77,
            quota_id=1100,
            invited=3,
            entered=1,
            completed=1,
            terminated=1,
            reasons={"SCREENED_OUT": 1},
            open=1,
            revenue=Decimal("1.50"),
        )
    ]
    assert "m-1" not in repr(await ledger.rows())


async def test_corrections_are_rows_and_the_sum_is_what_is_paid(path, ledger):
    await ledger.invited([invited("m-1"), invited("m-2")])
    async with Inbox(path, secrets=SECRET) as inbox:
        for revenue in (150, 100, 0, 100, 150):
            await post(inbox, "completion", fields_of("m-1", Revenue=revenue))
        await post(inbox, "completion", fields_of("m-2", Revenue=150))
        await post(inbox, "terminate", fields_of("m-2", TERMINATE))
    rows = await ledger.rows()
    assert [(row.ending, row.revenue) for row in rows] == [
        (SurveyEnding.COMPLETED, Decimal("1.50")),
        (SurveyEnding.CORRECTED, Decimal("-0.50")),
        (SurveyEnding.CORRECTED, Decimal("-1.00")),
        (SurveyEnding.COMPLETED, Decimal("1.50")),
    ]
    (funnel,) = await ledger.funnel()
    assert (funnel.invited, funnel.completed, funnel.corrected, funnel.terminated) == (2, 2, 2, 0)
    assert funnel.revenue == Decimal("1.50")


@pytest.mark.parametrize("context", [Context(prec=3), Context(prec=5, traps=[Inexact])], ids=["short", "trap"])
async def test_money_is_exact_in_any_decimal_context(path, ledger, context):
    with localcontext(context):
        await ledger.invited([invited("m-1"), invited("m-2")])
        async with Inbox(path, secrets=SECRET) as inbox:
            for member, revenue in (("m-1", 123456), ("m-1", 123460), ("m-2", 100001)):
                await post(inbox, "completion", fields_of(member, Revenue=revenue))
        # In this thread: another one has a context of its own.
        amounts = [str(row.revenue) for row in ledger.read_rows()]
        (funnel,) = ledger.read_funnel()
    assert amounts == ["1234.56", "0.04", "1000.01"]
    assert str(funnel.revenue) == "2234.61"


@pytest.mark.parametrize(
    ("at", "shown"),
    [("9999-12-31T23:59:59.9999999", "9999-12-31"), ("0001-01-01T00:00:00", "0001-01-01")],
)
async def test_the_first_and_the_last_moment_that_a_service_knows_of_are_no_error(path, ledger, at, shown):
    async with Inbox(path, secrets=SECRET) as inbox:
        await post(inbox, "completion", fields_of("m-1", DateTime=at))
        await post(inbox, "completion", fields_of("m-2"))
    assert [str(row.ended_at)[:10] for row in await ledger.rows()] == [shown, "2026-11-22"]
    assert [str(row.ended_at)[:10] for row in await ledger.uninvited()] == [shown, "2026-11-22"]
    assert (await ledger.to_arrow()).num_rows == 2


async def test_a_revenue_of_any_size_can_be_exported(path, ledger):
    async with Inbox(path, secrets=SECRET) as inbox:
        for member, revenue in (("m-1", 2**63 - 1), ("m-2", 1 - 2**63), ("m-3", 150)):
            await post(inbox, "completion", fields_of(member, Revenue=revenue))
        facts = await inbox.facts().to_arrow()
    revenues = [Decimal("92233720368547758.07"), Decimal("-92233720368547758.07"), Decimal("1.50")]
    assert (await ledger.to_arrow()).column("revenue").to_pylist() == revenues
    assert facts.column("revenue").to_pylist() == revenues


@pytest.mark.parametrize("routed_at", [0, 1])
async def test_a_correction_joins_the_invite_of_what_it_corrects(path, ledger, routed_at):
    """Services fill the fields of routing in one of two notifications only."""
    await ledger.invited([invited("m-1", survey_id=1, quota_id=5), invited("m-2", survey_id=7, quota_id=9)])
    routing = {"IsAutoRouted": True, "OriginalSurveyId": 1}
    async with Inbox(path, secrets=SECRET) as inbox:
        await post(inbox, "completion", fields_of("m-2", SurveyId=7, Revenue=300))
        for number, revenue in enumerate((150, 100)):
            more = routing if number == routed_at else {}
            await post(inbox, "completion", fields_of("m-1", SurveyId=2, Revenue=revenue, **more))
    rows = await ledger.rows()
    assert [(row.member_code, row.quota_id, row.ending, row.revenue) for row in rows] == [
        ("m-1", 5, SurveyEnding.COMPLETED, Decimal("1.50")),
        ("m-1", 5, SurveyEnding.CORRECTED, Decimal("-0.50")),
        ("m-2", 9, SurveyEnding.COMPLETED, Decimal(3)),
    ]
    assert [row.is_auto_routed for row in rows] == [True, True, False]
    assert await ledger.uninvited() == []


@pytest.mark.parametrize("hours", ["24", float("nan"), -1])
async def test_a_number_of_hours_is_needed_to_be_overdue(ledger, hours):
    with pytest.raises(InvalidRequestError, match="hours must be a number, at least 0"):
        await ledger.overdue(hours)


async def test_nothing_is_overdue_for_longer_than_there_is_time(ledger):
    await ledger.invited([invited("m-1")], at=NOW)
    assert len(await ledger.overdue(0)) == 1
    for hours in (1e9, float("inf")):
        assert await ledger.overdue(hours) == []


async def test_completes_without_an_invite_are_found(path, ledger):
    async with Inbox(path, secrets=SECRET) as inbox:
        await post(inbox, "completion", fields_of("m-1"))
        await post(inbox, "completion", fields_of("m-1", Revenue=75))
        await post(inbox, "terminate", fields_of("m-2", TERMINATE))
        await post(inbox, "completion", fields_of("m-3", QuotaID=None, WaveId=78))
    assert [(row.member_code, row.ending) for row in await ledger.uninvited()] == [
        ("m-1", SurveyEnding.COMPLETED),
        ("m-1", SurveyEnding.CORRECTED),
        ("m-3", SurveyEnding.COMPLETED),
    ]
    first, second = await ledger.funnel()
    assert (first.uninvited, first.invited, first.terminated) == (1, 0, 1)
    assert (second.quota_id, second.uninvited) == (None, 1)
    await ledger.invited([invited("m-1")])  # it was recorded late
    assert [row.member_code for row in await ledger.uninvited()] == ["m-3"]


async def test_a_routed_member_belongs_to_the_original_invite(path, ledger):
    await ledger.invited([invited("m-1", survey_id=9, wave_id=1, quota_id=5), invited("m-2")])
    async with Inbox(path, secrets=SECRET) as inbox:
        await post(inbox, "completion", fields_of("m-1", OriginalSurveyID=9, IsAutoRouted=True))
        await post(inbox, "completion", fields_of("m-1", OriginalSurveyID=9, SurveyId=2500))
        await post(inbox, "completion", fields_of("m-2", OriginalSurveyID=9))
        await post(inbox, "completion", fields_of("m-3", OriginalSurveyID=9))
    rows = await ledger.rows()
    assert [(row.member_code, row.survey_id, row.is_auto_routed) for row in rows] == [
        ("m-1", 9, True),
        ("m-1", 9, True),
        ("m-2", 2401, False),
        ("m-3", 2401, True),
    ]
    assert [(quota.quota_id, quota.invited, quota.completed) for quota in await ledger.funnel()] == [
        (5, 1, 2),
        (1100, 1, 2),
    ]


async def test_invites_without_an_end_are_overdue_after_hours(path, ledger):
    await ledger.invited([invited("m-1")], at=datetime(2026, 11, 22, 6, 0, tzinfo=UTC))
    await ledger.invited([invited("m-2")], at=datetime(2026, 11, 22, 11, 0, tzinfo=UTC))
    await ledger.invited([invited("m-3")], at=datetime(2026, 11, 21, 11, 0, tzinfo=UTC))
    async with Inbox(path, secrets=SECRET) as inbox:
        await post(inbox, "terminate", fields_of("m-3", TERMINATE))
    assert [row.member_code for row in await ledger.overdue(2)] == ["m-1"]
    assert [row.member_code for row in await ledger.overdue(0.5)] == ["m-1", "m-2"]


async def test_a_time_without_a_zone_is_refused(ledger):
    naive = NOW.replace(tzinfo=None)
    for call in (ledger.invited([], at=naive), ledger.entered("m-1", 1, at=naive)):
        with pytest.raises(InvalidRequestError, match="at is a datetime with a time zone"):
            await call


async def test_only_the_first_entry_counts(ledger):
    await ledger.invited([invited("m-1")])
    first = datetime(2026, 11, 22, 6, 0, tzinfo=UTC)
    assert await ledger.entered("m-1", 1100, at=first)
    assert await ledger.entered("m-1", 1100)
    assert [row.entered_at for row in await ledger.rows()] == [first]


async def test_it_can_be_read_as_arrow(path, ledger):
    await ledger.invited([invited("m-1"), invited("\ud800")])
    async with Inbox(path, secrets=SECRET) as inbox:
        await post(inbox, "completion", fields_of("m-1"))
    table = await ledger.to_arrow()
    assert table.column_names[:3] == ["member_code", "survey_id", "wave_id"]
    assert table["ending"].to_pylist() == ["completed", "open"]
    assert table["revenue"].to_pylist() == [Decimal("1.50"), Decimal("0.00")]
    assert table["member_code"].to_pylist() == ["m-1", "?"]
    assert table["invited_at"][0].as_py() == NOW


async def test_a_store_that_is_not_there_is_an_error_when_it_is_read(ledger):
    with pytest.raises(StoreError, match="cannot be read"):
        await ledger.rows()


@pytest.mark.parametrize("seed", [1, 2])
async def test_it_agrees_with_the_simulator(path, seed):
    notifying = Notifying(
        completes=0.4, repeated=0.2, drifted=0.2, corrected=0.2, terminated_late=0.2, late=0.2
    )
    sim = Simulator(seed=seed, surveys=10, members=30, notifying=notifying)
    store = store_of(path)
    ledger = OutcomeLedger(store)
    quota_ids = [quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas]
    async with (
        sim.client() as client,
        client.fan_out(InviteRequest(m, quota_ids) for m in sim.members) as stream,
    ):
        count = await ledger.invited([outcome async for outcome in stream])
    assert count == len(sim.ledger.invites)
    async with Inbox(store, secrets=SECRET) as inbox:
        await sim.notifications.deliver(inbox)
    kinds = Counter(posting.kind for posting in sim.notifications.told)
    funnel = await ledger.funnel()
    assert sum(quota.invited for quota in funnel) == count
    assert sum(quota.completed + quota.terminated for quota in funnel) == count
    assert sum(quota.completed + quota.corrected for quota in funnel) == kinds["completion"]
    paid = {}
    for posting in sorted(sim.notifications.told, key=lambda each: each.number):
        if posting.kind == "completion":
            paid.setdefault((posting.fields["UniqueCode"], posting.fields["SurveyId"]), []).append(
                posting.fields["Revenue"]
            )
    rows = await ledger.rows()
    for (member, survey_id), amounts in paid.items():
        of_pair = [row for row in rows if (row.member_code, row.survey_id) == (member, survey_id)]
        assert sum(row.revenue for row in of_pair) * 100 in amounts
        assert len(of_pair) == len(set(amounts))
    assert [quota for quota in funnel if quota.open or quota.uninvited] == []


# --- Learned rates


async def test_rates_are_the_share_of_invites_that_ended_in_a_complete(ledger, path):
    made = [invited(f"m{n}", 1100 + n % 2) for n in range(10)]
    await ledger.invited(made, at=NOW - timedelta(hours=7))
    await ledger.invited([invited("young")], at=NOW - timedelta(hours=1))
    await ledger.invited([invited("old")], at=NOW - timedelta(days=40))
    async with Inbox(path, secrets=SECRET, clock=NOW.timestamp) as inbox:
        for number in (0, 2, 3):
            await post(inbox, "completion", fields_of(f"m{number}"))
        await post(inbox, "completion", fields_of("m3", Revenue=1))  # a correction is no second complete
        await post(inbox, "terminate", fields_of("m4", TERMINATE))
        await post(inbox, "completion", fields_of("m5"))
        await post(inbox, "reconciliation", fields_of("m5", TAKEN_BACK))  # it pays nothing
    rates = await ledger.rates(since=NOW - timedelta(days=30))
    assert (rates.surveys, rates.quotas) == ({2401: (10, 3)}, {1100: (5, 2), 1101: (5, 1)})
    assert (await ledger.rates()).surveys == {2401: (11, 3)}
    assert (await ledger.rates(younger=0)).surveys == {2401: (12, 3)}
    with pytest.raises(InvalidRequestError, match="time zone"):
        await ledger.rates(since=datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(InvalidRequestError, match="younger"):
        await ledger.rates(younger=-1)


async def test_rates_count_completes_without_a_wave_too(ledger, path):
    made = [invited("m-1"), invited("m-2"), invited("m-1", 5, survey_id=9)]
    await ledger.invited(made, at=ENDED)
    async with Inbox(path, secrets=SECRET) as inbox:
        await post(inbox, "completion", WITHOUT_WAVE)
        await post(inbox, "completion", fields_of("m-2", WITHOUT_WAVE, SurveyId=9, OriginalSurveyID=2401))
    assert [quota.completed for quota in await ledger.funnel()] == [0, 2]
    assert (await ledger.rates(younger=0)).surveys == {2401: (2, 2), 9: (1, 0)}


async def test_a_complete_without_a_wave_counts_for_one_invite_in_the_rates_too(ledger, path):
    made = [invited(f"m-{number}", 1000 + wave, wave_id=wave) for number in range(3) for wave in (1, 2)]
    await ledger.invited(made, at=ENDED - HOUR)
    async with Inbox(path, secrets=SECRET) as inbox:
        for number in range(3):
            await post(inbox, "completion", fields_of(f"m-{number}", WITHOUT_WAVE, QuotaID=1002))
    assert {each.quota_id: each.completed for each in await ledger.funnel()} == {1001: 0, 1002: 3}
    assert (await ledger.rates(younger=0)).quotas == {1001: (3, 0), 1002: (3, 3)}
