"""Two currencies in one inventory: 1.70 of one and 150 of another do not add, and rank by rates."""

from __future__ import annotations

import json
import logging
import re

import pytest
from attrs import evolve
from panel_kit import GENDER, MALE, all_of, campaign_of, panel_of, quota, row, sub_quota, survey
from routing_kit import MEMBER, Panel, ids, live_of, router_of
from store_kit import SECRET

from sampling_async import CurrencyRates, InvalidRequestError, Price
from sampling_async._protocol.lessons import qualifying
from sampling_async.campaign._comparison import compare
from sampling_async.campaign._report import comparison_page
from sampling_async.matching import Allocate, PanelMatcher, QuotaIndex
from sampling_async.notifications import Inbox, OutcomeLedger
from sampling_async.routing import SurveyRouter
from sampling_async.simulator import Notifying, Simulator

USD, JPY = 1, 9
RATES = {USD: 1.0, JPY: 0.0064}  # 300 JPY are 1.92 USD
LACKING = "prices in currency 9, for which there is no rate: .*currency_rates=.*--currency-rates"


def of_price(quota_id: int, price: Price, **changes):
    men = quota([sub_quota(row(GENDER, MALE))], quota_id=quota_id, remaining=1)
    return survey(men, survey_id=quota_id * 100, price=price, estimated_completes_remaining=1, **changes)


# The dearer one by its number is the cheaper one.
SURVEYS = [of_price(5, Price(5.0, USD), ir=50), of_price(300, Price(300.0, JPY), ir=40)]
MAN = panel_of([{GENDER: MALE}], member_code=["m-1"])


def given(surveys, **options) -> list[int]:
    rows = PanelMatcher(QuotaIndex(surveys), Allocate(1, room={5: 1, 300: 1, 301: 1}, **options)).run(MAN)
    return rows.read_all().to_pylist()[0]["quota_ids"]


def warnings_in(caplog) -> list[str]:
    return [each.getMessage() for each in caplog.records if "several currencies" in each.getMessage()]


# --- Rates


def test_rates_are_above_0_and_by_a_whole_id():
    for wrong in ({1: 0}, {1: float("inf")}, {1: "1"}, {"1": 1.0}, {1: True}, [1.0], {1: -1}):
        with pytest.raises(InvalidRequestError, match=r"rate|currency"):
            CurrencyRates(wrong)
        with pytest.raises(InvalidRequestError, match=r"rate|currency"):
            Allocate(1, currency_rates=wrong)
    for wrong in ({1: ""}, {1: 7}, {"1": "USD"}, {1: "U\nSD"}):
        with pytest.raises(InvalidRequestError, match="name"):
            CurrencyRates(RATES, names=wrong)
    assert CurrencyRates(RATES).worth(Price(300.0, JPY)) == pytest.approx(1.92)
    with pytest.raises(InvalidRequestError, match="currency 7, 8, for which"):
        CurrencyRates(RATES).require({8, 7, 1})


# --- An allocation


def test_an_allocation_compares_by_rates(caplog):
    assert given(SURVEYS, currency_rates=RATES) == [5]
    assert given(SURVEYS, currency_rates=CurrencyRates({USD: 1.0, JPY: 1.0})) == [300]
    terms = PanelMatcher(QuotaIndex(SURVEYS), Allocate(1, currency_rates=RATES)).terms()
    assert terms.values == pytest.approx({5: 2.5, 300: 0.768})
    assert not warnings_in(caplog)


def test_without_rates_an_allocation_compares_by_ir_alone_and_says_so_once(caplog):
    assert given(SURVEYS) == [5]
    assert len(warnings_in(caplog)) == 1
    assert "(1, 9)" in warnings_in(caplog)[0]
    assert given([evolve(SURVEYS[0], ir=30), SURVEYS[1]]) == [300]
    assert PanelMatcher(QuotaIndex(SURVEYS), Allocate(1)).terms().values == pytest.approx({5: 0.5, 300: 0.4})


def test_a_currency_without_a_rate_is_named():
    with pytest.raises(InvalidRequestError, match=LACKING):
        PanelMatcher(QuotaIndex(SURVEYS), Allocate(1, currency_rates={USD: 1.0}))


def test_one_currency_and_values_of_your_own_need_no_rates(caplog):
    dear = [of_price(5, Price(5.0, JPY), ir=50), of_price(300, Price(300.0, JPY), ir=40)]
    assert given(dear) == [300]
    assert PanelMatcher(QuotaIndex(dear), Allocate(1)).terms().values == pytest.approx({5: 2.5, 300: 120.0})
    assert given(SURVEYS, value={5: 1.0, 300: 2.0}, currency_rates={USD: 1.0}) == [300]
    assert not warnings_in(caplog)


def test_an_index_can_be_ranked_by_rates():
    rates = CurrencyRates(RATES)
    index = QuotaIndex(SURVEYS, rank=lambda survey, _: -rates.worth(survey.price))
    assert list(index.match({GENDER: MALE}).certain) == [5, 300]


# --- A router


def panel_of_two(*, ir: int = 40) -> Panel:
    panel = Panel()
    panel.inventory = evolve(panel.inventory, surveys=(SURVEYS[0], evolve(SURVEYS[1], ir=ir)))
    return panel


@pytest.mark.parametrize(("ir", "options", "best"), [
    (40, {"currency_rates": RATES}, [5, 300]),
    (90, {"currency_rates": RATES}, [5, 300]),
    (90, {"currency_rates": CurrencyRates({USD: 1.0, JPY: 1.0})}, [300, 5]),
    (40, {}, [5, 300]),
    (90, {}, [300, 5]),
])  # fmt: skip
async def test_a_router_ranks_by_rates_or_by_ir_alone(ir, options, best, caplog):
    async with router_of(panel_of_two(ir=ir), **options) as router:
        assert ids(router.offers(MEMBER)) == best
        await router._book.follow()
    assert len(warnings_in(caplog)) == (not options)


async def test_a_router_names_the_currency_that_has_no_rate_when_it_is_entered():
    async with live_of(panel_of_two()) as (client, live):
        router = SurveyRouter(client, live, store=None, currency_rates={USD: 1.0})
        with pytest.raises(InvalidRequestError, match=LACKING):
            await router.__aenter__()


async def test_a_new_currency_changes_the_ranks_of_what_was_there(caplog):
    """Rates stay those of the user: what has none is offered last, and clicks go on."""
    panel, both = Panel(), panel_of_two(ir=90).inventory
    panel.inventory = evolve(both, surveys=both.surveys[:1])
    for options, best in ({}, [300, 5]), ({"currency_rates": {USD: 1.0}}, [5, 300]):
        panel.inventory = evolve(both, surveys=both.surveys[:1])
        caplog.clear()
        async with live_of(panel) as (client, live):
            async with SurveyRouter(client, live, store=None, **options) as router:
                assert [each.value for each in router.offers(MEMBER)] == pytest.approx([2.5])
                live._index = live.index.updated(both)
                assert ids(router.offers(MEMBER)) == best
                await router._book.follow()
                assert ids(router.offers(MEMBER)) == best
        levels = [each.levelno for each in caplog.records if "currenc" in each.getMessage()]
        assert levels == [logging.WARNING if not options else logging.ERROR]
        assert not options or re.search(LACKING, caplog.text)


# --- A campaign


def in_two(surveys) -> list:
    """Return surveys of which every other one is paid in yen."""
    return [
        evolve(each, price=Price(each.price.amount * (100 if number % 2 else 1), JPY if number % 2 else USD))
        for number, each in enumerate(surveys)
    ]


def in_yen(surveys) -> list:
    return [evolve(each, price=Price(100 * each.price.amount, JPY)) for each in surveys]


async def night_of(folder, *, currencies=in_two, **options):
    """Return plan, run, summary and inventory of a campaign whose invites have ended."""
    simulator = Simulator(3, surveys=12, members=80, notifying=Notifying(completes=0.6))
    now = 1_700_000_000.0
    outcomes = OutcomeLedger(folder / "store.db", clock=lambda: now + 3600)
    async with simulator.client() as client, Inbox(folder / "store.db", secrets=SECRET) as inbox:
        surveys = currencies((await client.get_quotas()).surveys)
        campaign = campaign_of(
            simulator,
            client,
            folder,
            inventory=surveys,
            allocate=Allocate(3, **options),
            wall_clock=lambda: now,
        )
        plan = await campaign.plan()
        run = campaign.run()
        await outcomes.invited([each for each in await all_of(run) if each.status == "invited"])
        await simulator.notifications.deliver(inbox)
        summary = await campaign.write(folder / "out", outcomes=outcomes)
    return plan, run, summary, surveys


def page_of(folder) -> str:
    return " ".join((folder / "out" / "report.html").read_text().split())


async def test_a_campaign_in_two_currencies_without_rates_adds_nothing(tmp_path, caplog):
    plan, run, summary, surveys = await night_of(tmp_path)
    assert [each for each in plan.warnings if "several currencies (1, 9)" in each] == [plan.warnings[0]]
    assert not warnings_in(caplog)  # once
    assert (plan.expected_value, plan.currency_id) == (None, None)
    assert set(plan.by_currency) == {USD, JPY}
    assert plan.worth in str(plan)
    assert plan.worth == f"{plan.by_currency[1]:,.2f} in currency 1, {plan.by_currency[9]:,.2f} in currency 9"
    assert run.expected_value is None
    assert re.fullmatch(r"[\d,.]+ in currency 1, [\d,.]+ in currency 9", run.worth)
    assert (summary.expected_value, summary.planned_value, summary.possible_value) == (None, None, None)
    # What is in each currency is price times IR of its quotas.
    worth = {each.survey_id: (each.price, qualifying(each)) for each in surveys}
    for currency, sums in summary.by_currency.items():
        of_it = [each for each in summary.quotas if each.currency_id == currency]
        assert sums.expected_value == pytest.approx(
            sum(each.invited * worth[each.survey_id][0].amount * worth[each.survey_id][1] for each in of_it)
        )
        assert sums.revenue == sum(each.revenue for each in summary.ends.quotas if each.currency_id == currency)
        assert sums.revenue > 0
    assert (summary.ends.total.revenue, summary.ends.total.expected) == (None, None)
    assert all(each.currency_id == worth[each.survey_id][0].currency_id for each in summary.ends.surveys)
    page, figures = page_of(tmp_path), json.loads((tmp_path / "out" / "summary.json").read_text())
    assert figures["by_currency"]["9"]["expected_value"] == pytest.approx(summary.by_currency[9].expected_value)
    assert (figures["expected_value"], figures["ends"]["total"].get("revenue")) == (None, None)
    assert summary.worth() in page
    assert summary.worth("revenue") in page
    assert "their amounts do not add" in page


async def test_with_rates_a_campaign_is_in_their_unit_and_names_each_currency(tmp_path):
    rates = CurrencyRates(RATES, names={USD: "USD", JPY: "JPY"})
    plan, run, summary, _ = await night_of(tmp_path, currency_rates=rates)
    assert not any("currenc" in each for each in plan.warnings)
    assert plan.expected_value == pytest.approx(plan.by_currency[USD] + 0.0064 * plan.by_currency[JPY])
    assert plan.currency_rates == summary.currency_rates == rates
    for name in ("planned_value", "expected_value", "possible_value"):
        sums = {each: getattr(of, name) for each, of in summary.by_currency.items()}
        assert getattr(summary, name) == pytest.approx(sums[USD] + 0.0064 * sums[JPY])
    assert run.expected_value == pytest.approx(summary.expected_value)
    revenue = {each: float(of.revenue) for each, of in summary.by_currency.items()}
    assert float(summary.ends.total.revenue) == pytest.approx(revenue[USD] + 0.0064 * revenue[JPY], abs=0.01)
    assert summary.worth().startswith(f"{summary.expected_value:,.2f} by the rates of currencies: ")
    assert " USD, " in summary.worth()
    assert summary.worth().endswith(" JPY")
    page = page_of(tmp_path)
    assert "In the unit of the rates" in page
    assert '<th scope="row" class="w">JPY</th>' in page


async def test_a_campaign_in_one_currency_is_as_it_was(tmp_path):
    plan, run, summary, _ = await night_of(tmp_path, currencies=list)
    assert plan.currency_id == summary.currency_id is not None
    assert plan.by_currency == {plan.currency_id: plan.expected_value}
    sums = summary.by_currency[summary.currency_id]
    assert (sums.expected_value, sums.possible_value) == (summary.expected_value, summary.possible_value)
    assert summary.ends.total.revenue == sums.revenue
    assert run.expected_value == pytest.approx(summary.expected_value)
    assert summary.worth() == f"{summary.expected_value:,.2f} (currency {summary.currency_id})"
    assert "What is in each currency" not in page_of(tmp_path)


async def test_a_campaign_names_the_currency_without_a_rate_before_it_asks(tmp_path):
    with pytest.raises(InvalidRequestError, match=LACKING):
        await night_of(tmp_path, currency_rates={USD: 1.0})


async def test_values_of_your_own_are_one_unit_whatever_the_currencies(tmp_path):
    plan, _, summary, _ = await night_of(tmp_path, value=lambda *_: 2.0)
    assert plan.warnings == ()
    assert plan.expected_value == pytest.approx(2.0 * plan.expected_invites, abs=2.0)
    assert summary.expected_value == pytest.approx(2.0 * summary.pairs.invited)
    assert summary.possible_value is None


async def test_one_currency_with_a_rate_is_in_the_unit_of_the_rates(tmp_path):
    plan, _, summary, _ = await night_of(tmp_path, currencies=in_yen, currency_rates=RATES)
    assert plan.currency_id == JPY
    assert plan.expected_value == pytest.approx(0.0064 * plan.by_currency[JPY])
    assert summary.expected_value == pytest.approx(0.0064 * summary.by_currency[JPY].expected_value)
    assert summary.worth().endswith(f"{summary.by_currency[JPY].expected_value:,.2f} in currency 9")
    assert "In the unit of the rates" in page_of(tmp_path)


async def test_nights_in_different_currencies_have_no_change_of_money(tmp_path):
    nights = {}
    for name, currencies in {"usd": list, "jpy": in_yen, "both": in_two}.items():
        (tmp_path / name).mkdir()
        _, _, nights[name], _ = await night_of(tmp_path / name, currencies=currencies)
    comparison = compare(nights)
    found = {night.name: (night.currency, night.figures["expected_value"]) for night in comparison.nights}
    assert found["usd"][0] == f"currency {nights['usd'].currency_id}"
    assert found["jpy"] == ("currency 9", nights["jpy"].expected_value)
    assert found["both"] == ("several, or not known", None)
    rows = " ".join(comparison_page(comparison).split()).split("<tr>")
    (money,) = [each for each in rows if "Expected value" in each]
    assert "%" not in money


async def test_a_top_up_says_it_once_too_and_new_rates_count_for_all_plans(tmp_path, caplog):
    simulator = Simulator(3, surveys=12, members=80)
    async with simulator.client() as client:
        surveys = in_two((await client.get_quotas()).surveys)
        found = []
        for rates in (None, None, RATES):
            campaign = campaign_of(
                simulator, client, tmp_path, inventory=surveys, allocate=Allocate(1, currency_rates=rates)
            )
            plan = await (campaign.top_up() if found else campaign.plan())
            found.append(plan)
            await all_of(campaign.run())
        summary = await campaign.summary()
    assert [each.number for each in found] == [1, 2, 3]
    assert [sum("several currencies" in text for text in each.warnings) for each in found] == [1, 1, 0]
    assert not warnings_in(caplog)
    sums = {each: of.expected_value for each, of in summary.by_currency.items()}
    assert summary.expected_value == pytest.approx(sums[USD] + 0.0064 * sums[JPY])
    assert sums[JPY] > 0 < sums[USD]
