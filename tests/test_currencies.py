"""Two currencies in one inventory: 1.70 of one and 150 of another do not add, and rank by rates."""

from __future__ import annotations

import logging
import re

import pytest
from attrs import evolve
from matching_kit import GENDER, MALE, panel_of, quota, row, sub_quota, survey
from routing_kit import MEMBER, Panel, ids, live_of, router_of

from sampling_async import CurrencyRates, InvalidRequestError, Price
from sampling_async.matching import Allocate, PanelMatcher, QuotaIndex
from sampling_async.routing import SurveyRouter

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
