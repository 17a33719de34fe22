"""What the invites of a campaign have brought: joined from the ledger of outcomes, and in the report."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from panel_kit import all_of, campaign_of, page_of
from store_kit import SECRET

from sampling_async.campaign import Conversion, Ends, Summary, erase_from_ledger
from sampling_async.matching import Allocate, LearnedRates
from sampling_async.notifications import Inbox, OutcomeLedger, StoreError, erase_member
from sampling_async.simulator import Notifying, Simulator

BEGAN = datetime(2026, 3, 6, 9, 0, tzinfo=UTC)


class Night:
    """A campaign whose invites have ended, as far as they have."""

    def __init__(self, folder, *, recorded=True, **notifying) -> None:
        self.now = 1_700_000_000.0
        self.recorded = recorded
        self.folder = folder
        self.simulator = Simulator(3, surveys=12, members=80, notifying=Notifying(**notifying))
        self.ledger = OutcomeLedger(folder / "store.db", clock=lambda: self.now)

    async def run(self, *, deliver=True):
        async with (
            self.simulator.client() as client,
            Inbox(self.folder / "store.db", secrets=SECRET, clock=lambda: self.now) as inbox,
        ):
            self.campaign = campaign_of(self.simulator, client, self.folder, wall_clock=lambda: self.now)
            await self.campaign.plan()
            self.outcomes = [each for each in await all_of(self.campaign.run()) if each.status == "invited"]
            if self.recorded:
                await self.ledger.invited(self.outcomes)
            self.now += 3600
            if deliver:
                await self.simulator.notifications.deliver(inbox)
        return self


@pytest.mark.parametrize("recorded", [True, False])
async def test_the_ends_are_those_of_the_ledger_of_outcomes(tmp_path, recorded):
    night = await Night(tmp_path, recorded=recorded, completes=0.4, reconciled=0.2, corrected=0.3).run()
    funnel = await night.ledger.funnel()
    ends = (await night.campaign.summary(night.ledger)).ends
    assert ends.total.invited == len(night.outcomes)
    assert ends.total.completed == sum(each.completed for each in funnel) > 10
    assert ends.total.terminated == sum(each.terminated for each in funnel) > 10
    assert ends.total.reconciled == sum(each.reconciled for each in funnel) > 0
    assert ends.total.revenue == sum(each.revenue for each in funnel)
    assert sum(ends.reasons.values()) == ends.total.terminated
    of_funnel = {each.quota_id: (each.completed, each.revenue) for each in funnel if each.completed}
    assert {
        each.quota_id: (each.completed, each.revenue) for each in ends.quotas if each.completed
    } == of_funnel
    for several in (ends.surveys, ends.quotas):
        assert sum(each.invited for each in several) == ends.total.invited
        assert sum(each.revenue for each in several) == ends.total.revenue
        assert [each.revenue for each in several] == sorted((each.revenue for each in several), reverse=True)
    assert sum(each.completed for each in ends.hours) == ends.total.completed


async def test_what_was_expected_is_that_of_the_summary_and_later_more_has_ended(tmp_path):
    night = await Night(tmp_path, completes=1.0).run(deliver=False)
    before = await night.campaign.summary(night.ledger)
    assert before.ends.total.expected == pytest.approx(before.expected_value)
    assert (before.ends.total.completed, before.ends.total.open) == (0, len(night.outcomes))
    async with Inbox(tmp_path / "store.db", secrets=SECRET) as inbox:
        await night.simulator.notifications.deliver(inbox)
    after = (await night.campaign.summary(night.ledger)).ends.total
    assert (after.completed, after.open) == (len(night.outcomes), 0)


@pytest.mark.parametrize("recorded", [True, False])
async def test_what_erased_members_brought_still_counts(tmp_path, recorded):
    night = await Night(tmp_path, recorded=recorded, completes=0.6).run()
    before = (await night.campaign.summary(night.ledger)).ends
    for code in {each.member_code for each in night.outcomes[:40]}:
        erase_member(tmp_path / "store.db", code)
        assert erase_from_ledger(night.campaign.ledger, code)
    after = (await night.campaign.summary(night.ledger)).ends
    assert after.total == before.total
    assert after.quotas == before.quotas


async def test_entered_invites_are_counted(tmp_path):
    night = await Night(tmp_path).run()
    assert "entered" not in page_of(await night.campaign.summary(night.ledger))
    for outcome in night.outcomes[:7]:
        await night.ledger.entered(outcome.member_code, outcome.quota_id)
    summary = await night.campaign.summary(night.ledger)
    assert summary.ends.total.entered == 7
    assert "7 of all invites were entered" in page_of(summary)


async def test_ends_of_other_invites_are_not_those_of_the_campaign(tmp_path):
    night = await Night(tmp_path, completes=1.0).run()
    before = (await night.campaign.summary(night.ledger)).ends
    other = Night(tmp_path, recorded=False)
    async with other.simulator.client() as client:
        (tmp_path / "later").mkdir()
        later = campaign_of(other.simulator, client, tmp_path / "later", wall_clock=lambda: night.now + 86_400)
        await later.plan()
        await all_of(later.run())
    # The same members and quotas a day later: what has ended belongs to the invites of the day before.
    assert (await later.summary(night.ledger)).ends.total.completed == 0
    assert (await night.campaign.summary(night.ledger)).ends == before


async def test_the_files_have_them(tmp_path):
    night = await Night(tmp_path, completes=0.5).run()
    summary = await night.campaign.write(tmp_path / "out", outcomes=night.ledger)
    read = json.loads((tmp_path / "out" / "summary.json").read_text())["ends"]
    assert read["total"]["completed"] == summary.ends.total.completed
    assert Decimal(read["total"]["revenue"]) == summary.ends.total.revenue
    low, high = read["quotas"][0]["interval"]
    assert 0 <= low <= read["quotas"][0]["rate"] <= high <= 1
    page = (tmp_path / "out" / "report.html").read_text()
    assert "What the invites have brought" in page
    assert f"{summary.ends.total.revenue:,.2f}" in page
    await night.campaign.write(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["ends"] is None
    assert "What the invites have brought" not in (tmp_path / "out" / "report.html").read_text()


async def test_a_store_that_cannot_be_read_is_an_error_and_the_files_stay(tmp_path):
    night = await Night(tmp_path).run()
    await night.campaign.write(tmp_path / "out", outcomes=night.ledger)
    before = (tmp_path / "out" / "report.html").read_bytes()
    (tmp_path / "broken.db").write_bytes(b"no database" * 100)
    with pytest.raises(StoreError):
        await night.campaign.write(tmp_path / "out", outcomes=OutcomeLedger(tmp_path / "broken.db"))
    assert (tmp_path / "out" / "report.html").read_bytes() == before


@given(st.integers(1, 5000), st.floats(0, 1))
def test_the_interval_holds_the_share_and_gets_narrower_with_more_invites(invited, share):
    one = Conversion(invited=invited, completed=round(invited * share))
    low, high = one.interval
    assert 0 <= low <= one.rate <= high <= 1
    more = Conversion(invited=invited * 100, completed=one.completed * 100).interval
    assert more[1] - more[0] < high - low


def test_the_interval_is_that_of_wilson():
    # Agresti and Coull 1998: 0 of 20 and 15 of 30.
    assert Conversion(invited=20).interval == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert Conversion(invited=30, completed=15).interval == pytest.approx((0.3315, 0.6685), abs=1e-4)
    assert Conversion().interval is None


# --- Against the plan


def chances_of(night) -> dict[int, float]:
    surveys = night.simulator.inventory.surveys
    return {quota.quota_id: each.ir / 100 for each in surveys for quota in each.quotas}


@pytest.mark.parametrize(("completes", "is_off"), [(0.0, 1), (1.0, -1)])
async def test_a_plan_that_was_wrong_is_off_by_what_chance_does_not_explain(tmp_path, completes, is_off):
    night = await Night(tmp_path, completes=completes).run()
    ends = (await night.campaign.summary(night.ledger)).ends
    ir = chances_of(night)
    for each in ends.quotas:
        assert (
            each.completes_planned
            == each.completes_by_ir
            == pytest.approx(each.invited * ir[each.quota_id], abs=0.01)
        )
    promised = [each.completes_planned for each in ends.surveys]
    assert ends.total.completes_planned == pytest.approx(sum(promised), abs=0.1)
    assert ends.total.off_by * is_off > 0
    low, high = ends.total.span
    assert ends.total.off_by == pytest.approx(
        ends.total.completes_planned - (high if is_off > 0 else low), abs=0.01
    )
    assert all(each.completes_planned is None for each in ends.hours)


async def test_with_learned_rates_the_plan_counts_with_them_and_a_top_up_keeps_what_was_planned(tmp_path):
    night = Night(tmp_path)
    async with Inbox(tmp_path / "store.db", secrets=SECRET):
        pass  # makes the store
    surveys = night.simulator.inventory.surveys
    rates = LearnedRates(surveys={each.survey_id: (1_000_000, 250_000) for each in surveys})
    async with night.simulator.client() as client:
        allocate = Allocate(3, rates=rates)
        campaign = campaign_of(night.simulator, client, tmp_path, allocate=allocate)
        await campaign.plan()
        await all_of(campaign.run())
        total = (await campaign.summary(night.ledger)).ends.total
        assert total.completes_planned == pytest.approx(0.25 * total.invited, rel=0.01)
        assert total.completes_by_ir != pytest.approx(total.completes_planned, rel=0.01)
        # Another plan, with other rates: what was invited before is judged by the plan that it was made with.
        before = {each.survey_id: each.invited for each in (await campaign.summary(night.ledger)).ends.surveys}
        more = campaign_of(night.simulator, client, tmp_path, allocate=Allocate(6, rates=0.5, overshoot=9))
        await more.top_up()
        assert (await more.summary(night.ledger)).ends.total == total
        await all_of(more.run())
        ends = (await more.summary(night.ledger)).ends
    assert ends.total.invited > total.invited
    ir = {each.survey_id: each.ir / 100 for each in surveys}
    for each in ends.surveys:
        old = before.get(each.survey_id, 0)
        planned = 0.25 * old + 0.5 * ir[each.survey_id] * (each.invited - old)
        assert each.completes_planned == pytest.approx(planned, rel=0.01)
        assert each.completes_by_ir == pytest.approx(ir[each.survey_id] * each.invited, rel=0.01)
    assert ends.total.expected == pytest.approx((await more.summary()).expected_value)


async def test_of_a_plan_made_before_chances_were_written_nothing_is_said(tmp_path):
    night = await Night(tmp_path).run()
    with closing(sqlite3.connect(tmp_path / "run.ledger")) as database, database:
        database.execute("DELETE FROM facts WHERE name = 'chances'")
    summary = await night.campaign.summary(night.ledger)
    for each in (summary.ends.total, *summary.ends.surveys):
        assert each.completes_planned is each.completes_by_ir is each.off_by is None
    assert "Planned beyond chance" not in page_of(summary)


@pytest.mark.parametrize(
    ("planned", "off_by"), [(40.0, 22.56), (17.0, 0.0), (10.0, 0.0), (6.0, 0.0), (2.0, -3.52), (None, None)]
)
def test_within_the_interval_a_plan_is_off_by_nothing(planned, off_by):
    found = Conversion(invited=100, completed=10, completes_planned=planned)
    assert found.off_by == (None if off_by is None else pytest.approx(off_by, abs=0.01))
    assert found.to_dict().get("off_by") == found.off_by


def test_the_report_begins_with_the_ten_surveys_that_the_plan_was_most_wrong_about():
    surveys = [
        Conversion(
            survey_id=number,
            survey_name=f"S{number}",
            invited=100,
            completed=10,
            completes_planned=planned,
            completes_by_ir=9.0,
        )
        for number, planned in enumerate([10, 30, 11, 60, 1, *[12] * 8], 1)
    ]
    ends = Ends(total=Conversion(invited=1300), surveys=(*surveys, Conversion(survey_name="S99", invited=3)))
    page = page_of(Summary(state="finished", planned_at=BEGAN, ends=ends))
    table = page.partition("most wrong</caption>")[2].partition("</table>")[0]
    assert re.findall(r">(S\d+)<", table) == [
        "S4",
        "S2",
        "S5",
        "S1",
        "S3",
        *(f"S{each}" for each in range(6, 11)),
    ]
    assert re.findall(r"<td>([+-]\d+\.\d)</td>", table) == ["+42.6", "+12.6", "-4.5"]
    assert table.count("within") == 7
    assert "Completes by survey: the next 3 surveys" in page


def test_many_hours_are_few_bars_and_what_data_hold_is_escaped():
    hours = tuple(Conversion(hour=BEGAN + timedelta(hours=at), completed=1) for at in range(0, 1000, 3))
    quota = Conversion(quota_id=1, survey_name="<script>", invited=3, completed=1, revenue=Decimal(2))
    ends = Ends(
        total=evolve(quota, quota_id=None),
        reasons={"<b>": 2},
        surveys=(quota,) * 40,
        quotas=(quota,),
        hours=hours,
    )
    page = page_of(Summary(state="finished", planned_at=BEGAN, ends=ends))
    assert "<script>" not in page
    assert "<b>" not in page
    assert "completes in 6 hours" in page
    assert "The next 25 surveys" in page
    assert page.count('class="f-invited"') < 400
