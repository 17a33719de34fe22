"""A picture of an inventory: price by LOI by IR, where room is, and what a panel fits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Final, TypeAlias

from attrs import frozen

from sampling_async import Quota, Survey
from sampling_async._contract.checks import count_of
from sampling_async._contract.currencies import (
    add_to,
    each_in_words,
    label_of,
    money_in_words,
    must_count_alike,
    prices_in_one,
    total_of,
)
from sampling_async._protocol.lessons import qualifying
from sampling_async.campaign import _charts as charts
from sampling_async.campaign._charts import Dot
from sampling_async.campaign._pages import LONGEST_NAME, LONGEST_TITLE, clean, rendered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from markupsafe import Markup

    from sampling_async import CurrencyRates, Price
    from sampling_async.campaign._summary import Labels

Fits: TypeAlias = "Mapping[int, tuple[int, int]]"
"""How many members of a panel fit a quota, by its ID: certainly, and possibly."""

_FIRST: Final = 25  # so many rows of a table are seen at once
_MOST: Final = 500  # so many are on the page
_DOTS: Final = 2_000  # so many surveys are drawn, those with most room
_QUESTIONS: Final = 8  # so many questions of a quota are named
# The upper ends of bands, each with what it is called; of IR, with its colour too.
_LOI: Final = ((5, "to 5 min"), (10, "6 to 10"), (15, "11 to 15"), (20, "16 to 20"), (30, "21 to 30"))
_LONGER: Final = "over 30"
_IR: Final = ((15, "to 15 %", "not_sent"), (35, "16 to 35", "rejected"), (65, "36 to 65", "line"))
_HIGHER, _UNKNOWN = ("over 65", "invited"), ("not known", "pending")


@frozen
class _QuotaRow:
    """A quota with its survey, and how many members fit it: None without a panel."""

    survey: Survey
    quota: Quota
    fits: tuple[int, int] | None

    @property
    def room(self) -> int:
        return max(0, self.quota.estimated_completes_remaining)

    @property
    def worth(self) -> float:
        """What its room is worth."""
        return self.room * self.survey.price.amount

    @property
    def filled(self) -> int:
        """How much of its room the members that certainly fit can fill, if each completes."""
        return 0 if self.fits is None else min(self.room, self.fits[0])

    def questions(self, labels: Labels) -> str:
        """Return what the first questions that it asks are called."""
        asked = dict.fromkeys(
            each.question_id
            for layer in self.quota.layers
            for sub_quota in layer.sub_quotas
            for each in sub_quota.questions_and_answers
        )
        names = [clean(labels.get((str(each), ""), str(each)), LONGEST_NAME) for each in asked]
        more = f" and {len(names) - _QUESTIONS} more" if len(names) > _QUESTIONS else ""
        return ", ".join(names[:_QUESTIONS]) + more


@frozen
class _SurveyBand:
    """Surveys of one LOI band and one IR band."""

    surveys: int
    room: int
    prices: Mapping[int, float]  # the median by currency


def inventory_page(
    surveys: Sequence[Survey],
    fits: Fits | None = None,
    *,
    members: int = 0,
    title: str = "Inventory",
    currency_rates: CurrencyRates | None = None,
    labels: Labels | None = None,
) -> str:
    """Return the page of an inventory.

    Args:
        surveys: The surveys.
        fits: What a panel fits, if there is one; a quota that is missing is fitted by nobody.
        members: How many members that panel has.
        title: The title of the page.
        currency_rates: The worth of one unit of each currency, if there are several, and their names. Without
            it, sums and pictures are by currency, and the order is by room and IR alone.
        labels: The names of questions.
    """
    found = {survey.price.currency_id for survey in surveys}
    price_of = prices_in_one(found, currency_rates)
    rows = [
        _QuotaRow(survey, quota, None if fits is None else fits.get(quota.quota_id, (0, 0)))
        for survey in surveys
        for quota in survey.quotas
    ]
    rows.sort(key=lambda row: (-row.room * price_of(row.survey.price), row.quota.quota_id))
    nobody = [row for row in rows if row.room and row.fits is not None and not sum(row.fits)]
    bands = [*(band for _, *band in _IR), _HIGHER, _UNKNOWN]
    currencies = {each: label_of(each, currency_rates) for each in sorted(found)} if len(found) > 1 else {}
    return rendered(
        "inventory.html",
        title=clean(title, LONGEST_TITLE) or "Inventory",
        surveys=surveys,
        rows=rows,
        best=_best(surveys, price_of),
        nobody=nobody,
        few=[row for row in rows if row.fits is not None and sum(row.fits) > 0 and row.fits[0] < row.room],
        has_panel=fits is not None,
        labels=labels or {},
        members=members,
        currencies=currencies,
        currency=label_of(min(found), currency_rates) if len(found) == 1 else "",
        is_alike=must_count_alike(found, currency_rates),
        worth_of=partial(_worth_of, rates=currency_rates),
        in_words=partial(each_in_words, rates=currency_rates),
        plots={
            each: _plot([survey for survey in surveys if survey.price.currency_id == each])
            for each in sorted(found)
        },
        legend={
            kind: f"IR {text}" for text, kind in (*((text, kind) for _, text, kind in _IR), _HIGHER, _UNKNOWN)
        },
        loi_bands=[*(text for _, text in _LOI), _LONGER],
        ir_bands=[text for text, _ in bands],
        headings=[(f"IR {text}", "n") for text, _ in bands],
        cells=_cells(surveys),
        first=_FIRST,
        most=_MOST,
    )


def _room(survey: Survey) -> int:
    return max(0, survey.estimated_completes_remaining)


def _worth_of(rows: Iterable[_QuotaRow], rates: CurrencyRates | None) -> str:
    """Return what the room of some quotas is worth, in words."""
    sums: dict[int, float] = {}
    for row in rows:
        add_to(sums, row.survey.price.currency_id, row.worth)
    if len(sums) < 2:  # noqa: PLR2004  one needs no name beside each sum
        return f"{sum(sums.values(), 0.0):,.2f}"
    return money_in_words(total_of(sums, rates), None, sums, rates)


def _best(surveys: Sequence[Survey], price_of: Callable[[Price], float]) -> list[tuple[Survey, float, float]]:
    """Return the surveys with room by what a member earns you a minute: price times IR by LOI.

    Each with that in its currency, and with that by which it is compared.
    """
    shares = [(each, qualifying(each) / max(1, each.loi)) for each in surveys if _room(each)]
    worth = [(each, each.price.amount * share, price_of(each.price) * share) for each, share in shares]
    return sorted(worth, key=lambda each: (-each[2], each[0].survey_id))


def _loi_band(survey: Survey) -> str:
    return next((text for end, text in _LOI if survey.loi <= end), _LONGER)


def _ir_band(survey: Survey) -> tuple[str, str]:
    """Return the name and the colour of a survey's IR band."""
    if survey.ir <= 0:
        return _UNKNOWN
    return next(((text, kind) for end, text, kind in _IR if survey.ir <= end), _HIGHER)


def _cells(surveys: Sequence[Survey]) -> dict[tuple[str, str], _SurveyBand]:
    by_band: dict[tuple[str, str], list[Survey]] = {}
    for survey in surveys:
        by_band.setdefault((_loi_band(survey), _ir_band(survey)[0]), []).append(survey)
    return {
        bands: _SurveyBand(len(found), sum(map(_room, found)), _medians(found))
        for bands, found in by_band.items()
    }


def _medians(surveys: Sequence[Survey]) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for survey in surveys:
        found.setdefault(survey.price.currency_id, []).append(survey.price.amount)
    return {currency: median(prices) for currency, prices in found.items()}


def _plot(surveys: Sequence[Survey]) -> Markup | str:
    shown = sorted(surveys, key=lambda survey: (-_room(survey), survey.survey_id))[:_DOTS]
    if not shown:
        return ""
    largest = max(1, *map(_room, shown))
    dots = [
        Dot(
            float(survey.loi),
            survey.price.amount,
            _room(survey) / largest,
            _ir_band(survey)[1],
            f"{clean(survey.survey_name or str(survey.survey_id), 60)}: {survey.price.amount:,.2f},"
            f" {survey.loi} min, IR {survey.ir} %, room for {_room(survey):,}",
        )
        for survey in shown
    ]
    label = (
        f"{count_of(len(shown), 'survey')} by LOI in minutes and price; the size of a dot is its room, the"
        " colour its IR. The table below has the same in bands."
    )
    return charts.scatter(dots, across="LOI, minutes", unit="price", label=label)
