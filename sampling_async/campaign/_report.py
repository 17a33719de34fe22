"""The report of a campaign, and the comparison of several: HTML pages that load nothing and run nothing.

The pages are in `templates/`. This module computes the figures that are not in a summary.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from sampling_async._contract.currencies import label_of, unit_of
from sampling_async._protocol.lessons import Lesson
from sampling_async.campaign import _charts as charts
from sampling_async.campaign._charts import TimeChart
from sampling_async.campaign._comparison import FIGURES, MONEY, SHARES, changed
from sampling_async.campaign._pages import LONGEST_NAME, LONGEST_TITLE, clean, clock, rendered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from sampling_async.campaign._charts import Values
    from sampling_async.campaign._comparison import CampaignComparison, ComparedNight, Figure
    from sampling_async.campaign._summary import Conversion, Ends, Labels, Moment, QuotaFill, Summary, WaitKind

FIRST_ENDS: Final = 15  # of so many surveys and quotas one sees at once what they have brought
FIRST_WRONG: Final = 10  # of so many surveys one sees at once how wrong the plan was
FIRST_QUOTAS: Final = 50  # so many quotas are seen at once
MOST_QUOTAS: Final = 2_000  # so many quotas are on the page
_HOUR: Final = 3600
_MOST_COLUMNS: Final = 168  # the hours of a week
_MOST_NIGHTS: Final = 30  # so many are drawn
_SHORT: Final = 15  # the name of a night below its bar
MOST_WAITS: Final = 50  # so many waits are in the table

_OUTCOMES: Final = {
    "invited": "Invited",
    "rejected": "Rejected",
    "not_sent": "Not sent",
    "unknown": "Unknown",
    "skipped": "Skipped",
    "pending": "Pending",
}
_BY_MINUTE: Final = {"invited": "Invited", "rejected": "Rejected", "not_sent": "Failed (not sent or unknown)"}
_LESSONS: Final[dict[str, str]] = {
    Lesson.PAIR: "leaves out this pair",
    Lesson.QUOTA: "takes out the quota",
    Lesson.SURVEY: "takes out the survey",
    Lesson.MEMBER: "takes out the member",
    Lesson.MEMBER_SURVEY: "leaves out the survey for this member",
    Lesson.LATER: "asks again later",
    Lesson.STOP: "stops",
}
_WAITS: Final[dict[WaitKind, str]] = {
    "outage": "Outage of the service",
    "paused": "Paused",
    "hours": "Outside the campaign's hours",
    "rate": "Limit of invites a minute",
}


def report(summary: Summary, *, title: str = "Campaign", labels: Labels | None = None) -> str:
    pairs = summary.pairs
    amounts = {kind: getattr(pairs, kind) for kind in _OUTCOMES}
    sum_of = " + ".join(f"{amount:,} {_OUTCOMES[kind].lower()}" for kind, amount in amounts.items())
    return rendered(
        "report.html",
        title=clean(title, LONGEST_TITLE) or "Campaign",
        summary=summary,
        currencies=_currencies(summary),
        unit=unit_of(summary.currency_id, summary.currency_rates),
        pairs=pairs,
        amounts=amounts,
        equation=f"{pairs.planned:,} planned = {sum_of}",
        fills=_fills(summary.quotas),
        drawn=_over_time(summary) if summary.timeline else {},
        brought=_brought(summary.ends.hours) if summary.ends and summary.ends.hours else "",
        outcomes=_OUTCOMES,
        by_minute=_BY_MINUTE,
        lessons=_LESSONS,
        waits=_WAITS,
        against_plan=_against_plan(summary.ends),
        groups=[
            (kind, list(some)) for kind, some in groupby(summary.groups, key=attrgetter("kind", "question"))
        ],
        labels=labels or {},
        first_ends=FIRST_ENDS,
        first_wrong=FIRST_WRONG,
        first_quotas=FIRST_QUOTAS,
        most_quotas=MOST_QUOTAS,
        most_waits=MOST_WAITS,
    )


def comparison_page(comparison: CampaignComparison, *, title: str = "Campaigns") -> str:
    """Return the page of a comparison."""
    nights = comparison.nights
    rows: list[tuple[str, bool, list[tuple[Figure, str]]]] = []
    for name, (text, read) in FIGURES.items():
        values = [read(night.summary) for night in nights]
        if any(value is not None for value in values):
            # What is in another currency has not changed by a percentage.
            is_one = name not in MONEY or len({night.currency for night in nights}) == 1
            changes = changed(values) if is_one else [""] * len(values)
            rows.append((text, name in SHARES, [*zip(values, changes, strict=True)]))
    quotas = list(comparison.quotas.items())
    names = {fill.quota_id: fill.survey_name for _, fills in quotas for fill in fills if fill is not None}
    return rendered(
        "compare.html",
        title=clean(title, LONGEST_TITLE) or "Campaigns",
        nights=nights,
        headings=[(clean(night.name, LONGEST_NAME) or "(no name)", "n") for night in nights],
        rows=rows,
        changes=comparison.changes(),
        trend=_trend(nights),
        codes=comparison.codes,
        asked=[night.summary.asked for night in nights],
        first=quotas[:FIRST_QUOTAS],
        rest=quotas[FIRST_QUOTAS:MOST_QUOTAS],
        number_of_quotas=len(quotas),
        names=names,
    )


def _against_plan(ends: Ends | None) -> list[Conversion]:
    """Return the surveys whose planned completes are known, those first about which the plan was most wrong."""
    known = [each for each in ends.surveys if each.off_by is not None] if ends else []
    return sorted(known, key=lambda each: -abs(each.off_by or 0.0))


def _trend(nights: Sequence[ComparedNight]) -> dict[str, Markup]:
    """Return the charts of completes, and of revenue in one currency, the oldest night first."""
    known = [night for night in nights[:_MOST_NIGHTS] if night.summary.ends is not None][::-1]
    ends = [night.summary.ends.total for night in known if night.summary.ends is not None]
    if len(ends) < 2:  # noqa: PLR2004  one is no trend
        return {}
    names = [clean(night.name, _SHORT) for night in known]
    spans = [each.span or (0.0, 0.0) for each in ends]
    label = "By night: " + "; ".join(
        f"{clean(night.name, LONGEST_NAME)}: {each.completed:,} completes, by chance {low:,.0f} to {high:,.0f},"
        f" {each.open:,} open, revenue {'not known' if each.revenue is None else f'{each.revenue:,.2f}'}"
        for night, each, (low, high) in zip(known, ends, spans, strict=True)
    )
    completes = [float(each.completed) for each in ends]
    drawn = {"Completes": charts.trend(names, completes, spans, unit="completes", label=label)}
    revenue = [float(each.revenue) for each in ends if each.revenue is not None]
    if len(revenue) == len(ends) and len({night.currency for night in known}) == 1:
        drawn["Revenue"] = charts.trend(names, revenue, unit=known[0].currency, label=label)
    return drawn


def _currencies(summary: Summary) -> dict[int, str]:
    """Return what each currency is called, if there are several."""
    found = sorted(summary.by_currency)
    return {each: label_of(each, summary.currency_rates) for each in found} if len(found) > 1 else {}


# --- Figures


def _fills(quotas: Sequence[QuotaFill]) -> Markup:
    bins = [0] * 11
    for quota in quotas:
        if quota.room > 0:
            bins[min(10 * quota.invited // quota.room, 9) if quota.invited <= quota.room else 10] += 1
    spans = [*(f"{low} to {low + 10}" for low in range(0, 100, 10)), "over 100"]
    label = ", ".join(f"{span} %: {number}" for span, number in zip(spans, bins, strict=True))
    edges = [str(low) for low in range(0, 110, 10)]
    return charts.histogram(
        bins, edges, label=f"Number of quotas by fill. {label}.", unit="quotas", below="fill, %"
    )


def _over_time(summary: Summary) -> dict[str, Markup]:
    """Return the charts of outcomes, latency and the limit; an empty text where there is nothing to draw."""
    timeline = summary.timeline
    chart = TimeChart(timeline, summary.waits)
    end = timeline[-1].at + timedelta(seconds=timeline[-1].seconds)
    period = f"from {clock(timeline[0].at)} to {clock(end)}"
    pairs = {
        "invited": [_per_minute(moment, moment.invited) for moment in timeline],
        "rejected": [_per_minute(moment, moment.rejected) for moment in timeline],
        "not_sent": [_per_minute(moment, moment.failed) for moment in timeline],
    }
    most = ", ".join(f"{_BY_MINUTE[kind].lower()} {_most(values)}" for kind, values in pairs.items())
    median, slow, limit = (
        [getattr(moment, name) for moment in timeline] for name in ("latency", "latency_95", "limit")
    )
    highest = f"Highest: median {_most(median)} s, 95 % {_most(slow)} s"
    return {
        "outcomes": chart.areas(pairs, unit="pairs a minute", label=f"Pairs a minute {period}. Most: {most}."),
        "latency": chart.curves(
            {"line": median, "unknown dashed": slow},
            unit="seconds",
            label=f"Seconds until a response {period}. {highest}.",
        ),
        "limit": chart.curves(
            {"line": limit},
            unit="requests at once",
            label=f"Limit of requests at once {period}. Highest: {_most(limit)}.",
        ),
    }


def _brought(hours: Sequence[Conversion]) -> Markup:
    """Return the chart of completes by hour; several hours are one bar if there are many."""
    numbers = [int(each.hour.timestamp()) // _HOUR for each in hours if each.hour is not None]
    width = max(1, -(-(numbers[-1] - numbers[0] + 1) // _MOST_COLUMNS))
    values = [0] * ((numbers[-1] - numbers[0]) // width + 1)
    for number, each in zip(numbers, hours, strict=True):
        values[(number - numbers[0]) // width] += each.completed
    began = datetime.fromtimestamp(numbers[0] * _HOUR, UTC)
    unit = "completes an hour" if width == 1 else f"completes in {width} hours"
    label = f"{unit.capitalize()} from {clock(began)} on. Most: {max(values):,}."
    return charts.columns(values, began, width * _HOUR, label=label, unit=unit)


def _per_minute(moment: Moment, pairs: int) -> float:
    return 60 * pairs / moment.seconds if moment.seconds > 0 else 0.0


def _most(values: Values) -> str:
    highest = charts.highest(values)
    return f"{round(highest):,}" if highest >= 100 else charts.compact(highest)  # noqa: PLR2004  three digits
