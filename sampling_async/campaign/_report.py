"""The report of a campaign: one HTML page that loads nothing and runs nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from sampling_async._version import __version__
from sampling_async.campaign import _charts as charts
from sampling_async.campaign._charts import Curve, Part, TimeChart
from sampling_async.campaign._lessons import Lesson
from sampling_async.campaign._markup import (
    Html,
    clean,
    clock,
    count,
    duration,
    join,
    money,
    name,
    percent,
    prose,
    tag,
    timed,
)
from sampling_async.campaign._page import Column, Row, key, nothing, number_of, section, table, terms
from sampling_async.campaign._report_style import STYLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sampling_async.campaign._summary import CodeCount, Moment, QuotaFill, Summary, Wait, WaitKind

FIRST_QUOTAS: Final = 50
"""So many quotas are seen at once."""

MOST_QUOTAS: Final = 2_000
"""So many quotas are on the page."""

MOST_WAITS: Final = 50
"""So many waits are in the table."""

# Safe from what data might hold, whatever escapes us: nothing is loaded, run or sent.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_LONGEST_TITLE: Final = 120

_UNKNOWN: Final = (
    "Unknown: it was sent, and no usable response came. An invite may exist, so it is not asked for again."
)

_OUTCOMES: Final = {
    "invited": "Invited",
    "rejected": "Rejected",
    "not_sent": "Not sent",
    "unknown": "Unknown",
    "skipped": "Skipped",
    "pending": "Pending",
}
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


def report(summary: Summary, *, title: str = "Campaign") -> str:
    """Return the report of a campaign as one HTML page.

    Args:
        summary: The figures of the campaign.
        title: What the page is about.
    """
    title = clean(title, _LONGEST_TITLE) or "Campaign"
    head = tag("head", *_metadata(), tag("title", f"{title}: {summary.state}"), tag("style", Html(STYLE)))
    sections = (
        _header(summary, title),
        _figures(summary),
        _funnel(summary),
        _codes(summary),
        _quotas(summary.quotas),
        _over_time(summary),
        _money(summary),
        _limits(summary),
        _foot(),
    )
    body = tag("body", charts.hatches(), tag("main", *sections))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _metadata() -> Iterable[Html]:
    yield Html('<meta charset="utf-8">\n')
    yield Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n')
    yield Html('<meta name="viewport" content="width=device-width, initial-scale=1">\n')
    yield Html('<meta name="color-scheme" content="light dark">\n')
    yield Html('<meta name="robots" content="noindex">\n')


# --- What it is, and the figures


def _header(summary: Summary, title: str) -> Html:
    state = summary.state
    reason = prose(summary.reason) if state in {"paused", "stopped"} else ""
    ended = "still running" if state == "running" else "not yet"
    times = (
        ("Planned", timed(summary.planned_at, "")),
        ("Started", timed(summary.started_at, "not yet")),
        ("Ended", timed(summary.ended_at, ended)),
        ("Active", f"{duration(summary.active_seconds)} in {number_of(summary.runs, 'run')}"),
    )
    shown = tag("p", tag("span", state.capitalize(), class_=f"state {state}"), reason)
    return tag("header", tag("h1", tag("bdi", title)), shown, terms("times", times))


def _figures(summary: Summary) -> Html:
    pairs = summary.pairs
    asked = summary.asked
    currency = "" if summary.currency_id is None else f"in currency {summary.currency_id}"
    figures = (
        (
            "Success rate",
            percent(pairs.invited, asked),
            f"of {number_of(asked, 'asked pair')} ended in an invite",
        ),
        ("Invites", count(pairs.invited), f"of {number_of(pairs.planned, 'planned pair')}"),
        ("Expected value", money(summary.expected_value), currency),
        (
            "Invites per request",
            f"{summary.invites_per_request:,.2f}",
            f"in {number_of(summary.requests, 'request')}",
        ),
        (
            "Members with an invite",
            count(summary.invited_members),
            f"of {number_of(summary.members, 'member')}",
        ),
    )
    entries = ((term, join(figure, tag("small", note) if note else "")) for term, figure, note in figures)
    return section("In short", terms("figures", entries))


def _funnel(summary: Summary) -> Html:
    pairs = summary.pairs
    members = (
        ("In the panel", summary.members),
        ("Matched", summary.matched),
        ("With an invite", summary.invited_members),
    )
    asked = (("Planned", pairs.planned), ("Asked for", summary.asked), ("Invited", pairs.invited))
    return section(
        "From the panel to invites",
        tag("div", _stages("Members", members), _stages("Pairs of a member and a quota", asked), class_="two"),
        _account(summary),
    )


def _stages(caption: str, stages: Sequence[tuple[str, int]]) -> Html:
    whole = stages[0][1]
    columns = (Column("Stage"), Column("Number", "n"), Column("Share", "n"), Column("", "b"))
    rows = (
        (stage, count(number), percent(number, whole), charts.bar([Part("line", number)], whole))
        for stage, number in stages
    )
    return table(caption, columns, rows)


def _account(summary: Summary) -> Html:
    pairs = summary.pairs
    amounts = [(kind, text, int(getattr(pairs, kind))) for kind, text in _OUTCOMES.items()]
    sum_of = " + ".join(f"{count(number)} {text.lower()}" for _, text, number in amounts)
    equation = f"{count(pairs.planned)} planned = {sum_of}"
    legend = (
        join(charts.swatch(kind), f"{text}: {count(number)} ({percent(number, pairs.planned)})")
        for kind, text, number in amounts
    )
    return tag(
        "figure",
        tag("figcaption", "What became of the planned pairs", tag("small", equation)),
        charts.stacked_bar([Part(kind, number) for kind, _, number in amounts], equation),
        key(legend),
        tag("p", _UNKNOWN),
        tag(
            "p",
            "Not sent: it could not be sent, several times. Skipped: others showed that asking was in vain.",
        ),
    )


# --- Outcomes and quotas


def _codes(summary: Summary) -> Html:
    whole = sum(code.pairs for code in summary.codes)
    columns = (
        Column("Code", "n"),
        Column("Result", "w"),
        Column("Pairs", "n"),
        Column("Share", "n"),
        Column("", "b"),
        Column("The campaign", "w"),
        Column("What you can do", "x"),
    )
    rows = [_code_row(code, whole) for code in summary.codes]
    responses = (
        table("Pairs by result code", columns, rows, kind="codes")
        if rows
        else nothing("There is no response yet.")
    )
    return section("Outcomes by result code", responses, _skipped(summary))


def _code_row(code: CodeCount, whole: int) -> Row:
    return (
        "none" if code.result_code is None else str(code.result_code),
        name(code.result or "no response"),
        count(code.pairs),
        percent(code.pairs, whole),
        charts.bar([Part("line", code.pairs)], whole),
        prose(_LESSONS.get(code.lesson, code.lesson)),
        prose(code.advice),
    )


def _skipped(summary: Summary) -> Html:
    whole = sum(summary.skipped.values())
    if not whole:
        return nothing("No pair was skipped.")
    columns = (Column("Reason", "w"), Column("Pairs", "n"), Column("Share", "n"), Column("", "b"))
    most_first = sorted(summary.skipped.items(), key=lambda entry: -entry[1])
    rows = (
        (prose(reason), count(pairs), percent(pairs, whole), charts.bar([Part("skipped", pairs)], whole))
        for reason, pairs in most_first
    )
    return table("Skipped pairs by reason", columns, rows)


_QUOTA_COLUMNS: Final = (
    Column("Survey", "w"),
    Column("Fill", "n"),
    Column("", "b"),
    Column("Invited", "n"),
    Column("Room", "n"),
    Column("Unknown", "n"),
    Column("Rejected", "n"),
    Column("Quota ID", "n"),
    Column("Closed", "w"),
)


def _quotas(quotas: Sequence[QuotaFill]) -> Html:
    if not quotas:
        return section("Fill of each quota", nothing("No quota was planned."))
    more = quotas[FIRST_QUOTAS:]
    caption = f"The {number_of(len(quotas[:FIRST_QUOTAS]), 'quota')} with most room" if more else "All quotas"
    rows = (_quota_row(quota) for quota in quotas[:FIRST_QUOTAS])
    legend = (
        join(charts.swatch("invited"), "invited, as a share of the room"),
        join(charts.swatch("unknown"), "unknown: an invite may exist"),
    )
    first = table(caption, _QUOTA_COLUMNS, rows, foot=_sums(more) if more else None)
    return section("Fill of each quota", _fill_histogram(quotas), key(legend), first, *_more_quotas(quotas))


def _quota_row(quota: QuotaFill) -> Row:
    return (
        name(quota.survey_name),
        percent(quota.invited, quota.room),
        charts.bar([Part("invited", quota.invited), Part("unknown", quota.unknown)], quota.room),
        count(quota.invited),
        count(quota.room),
        count(quota.unknown),
        count(quota.rejected),
        str(quota.quota_id),
        "" if quota.closed is None else clean(quota.closed, 60) or "yes",
    )


def _sums(quotas: Sequence[QuotaFill]) -> Row:
    room = sum(quota.room for quota in quotas)
    invited = sum(quota.invited for quota in quotas)
    unknown = sum(quota.unknown for quota in quotas)
    return (
        f"{number_of(len(quotas), 'more quota')} together",
        percent(invited, room),
        charts.bar([Part("invited", invited), Part("unknown", unknown)], room),
        count(invited),
        count(room),
        count(unknown),
        count(sum(quota.rejected for quota in quotas)),
        "",
        f"{count(sum(quota.closed is not None for quota in quotas))} closed",
    )


def _more_quotas(quotas: Sequence[QuotaFill]) -> Iterable[Html]:
    shown = quotas[FIRST_QUOTAS:MOST_QUOTAS]
    if shown:
        caption = f"The next {number_of(len(shown), 'quota')}"
        rows = (_quota_row(quota) for quota in shown)
        yield tag("details", tag("summary", caption), table(caption, _QUOTA_COLUMNS, rows))
        yield tag("p", "On a screen, this page lists more quotas.", class_="on-paper")
    if len(quotas) > MOST_QUOTAS:
        yield nothing(f"The file summary.json has all {count(len(quotas))} quotas.")


def _fill_histogram(quotas: Sequence[QuotaFill]) -> Html:
    with_room = [quota for quota in quotas if quota.room > 0]
    bins = [0] * 11
    for quota in with_room:
        bins[_bin(quota)] += 1
    edges = [str(10 * place) for place in range(11)]
    words = ", ".join(f"{text} %: {number}" for text, number in zip(_BIN_WORDS, bins, strict=True))
    label = f"Number of quotas by fill. {words}."
    note = "Invites as a share of the room, in steps of 10 %; over: more invites than room."
    without = len(quotas) - len(with_room)
    return tag(
        "figure",
        tag("figcaption", "How full the quotas are", tag("small", note)),
        charts.histogram(bins, edges, label=label, unit="quotas", below="fill, %"),
        tag("p", f"Not counted here: {number_of(without, 'quota')} without room.") if without else "",
    )


_BIN_WORDS: Final = (*(f"{10 * place} to {10 * place + 10}" for place in range(10)), "over 100")


def _bin(quota: QuotaFill) -> int:
    if quota.invited > quota.room:
        return 10
    return min(10 * quota.invited // quota.room, 9)


# --- Over time


def _over_time(summary: Summary) -> Html:
    drawn = _drawn(summary) if summary.timeline else nothing("Nothing was asked for yet.")
    return section("Over time", drawn, _waits(summary.waits))


def _drawn(summary: Summary) -> Html:
    kinds = {wait.kind for wait in summary.waits}
    bands = [join(charts.wait_swatch(kind), text) for kind, text in _WAITS.items() if kind in kinds]
    return join(
        tag("p", "All times are in UTC.", " Bands are times in which nothing was asked for:" if bands else ""),
        key(bands) if bands else "",
        _outcomes_chart(summary),
        _latency_chart(summary),
        _limit_chart(summary),
    )


def _outcomes_chart(summary: Summary) -> Html:
    layers = [
        ("invited", "Invited", [_per_minute(moment, moment.invited) for moment in summary.timeline]),
        ("rejected", "Rejected", [_per_minute(moment, moment.rejected) for moment in summary.timeline]),
        (
            "not_sent",
            "Failed (not sent or unknown)",
            [_per_minute(moment, moment.failed) for moment in summary.timeline],
        ),
    ]
    highest = ", ".join(f"{text.lower()} {charts.most(values)}" for _, text, values in layers)
    chart = _chart(summary, "pairs a minute", f"Pairs a minute {_period(summary)}. Most: {highest}.")
    areas = chart.areas([(kind, values) for kind, _, values in layers])
    legend = (join(charts.swatch(kind), text) for kind, text, _ in layers)
    return _figure("Outcomes a minute", "Stacked: the top is the sum.", areas, legend)


def _latency_chart(summary: Summary) -> Html:
    median, slow = (
        Curve("line", [moment.latency for moment in summary.timeline]),
        Curve("unknown", [moment.latency_95 for moment in summary.timeline], dashed=True),
    )
    if not charts.has_values(median, slow):
        return nothing("No request was timed yet.")
    highest = f"Highest: median {charts.most(median.values)} s, 95 % {charts.most(slow.values)} s"
    chart = _chart(summary, "seconds", f"Seconds until a response {_period(summary)}. {highest}.")
    legend = (
        join(charts.line_swatch(median), "median"),
        join(charts.line_swatch(slow), "95 % took no longer"),
    )
    note = "A gap: there were no requests."
    return _figure("Latency of requests", note, chart.curves([median, slow]), legend)


def _limit_chart(summary: Summary) -> Html:
    limit = Curve("line", [moment.limit for moment in summary.timeline])
    if not charts.has_values(limit):
        return nothing("The limit of requests at once is not known.")
    text = f"Limit of requests at once {_period(summary)}. Highest: {charts.most(limit.values)}."
    drawn = _chart(summary, "requests at once", text).curves([limit])
    note = "So many the client thought the service could take."
    return _figure("Limit of requests at once", note, drawn, ())


def _per_minute(moment: Moment, pairs: int) -> float:
    return 60 * pairs / moment.seconds if moment.seconds > 0 else 0.0


def _period(summary: Summary) -> str:
    begin, last = summary.timeline[0], summary.timeline[-1]
    end = last.at + timedelta(seconds=last.seconds)
    return f"from {clock(begin.at)} to {clock(end)}"


def _chart(summary: Summary, unit: str, label: str) -> TimeChart:
    return TimeChart(moments=summary.timeline, waits=summary.waits, unit=unit, label=label)


def _figure(caption: str, note: str, drawn: Html, legend: Iterable[Html]) -> Html:
    entries = key(legend)
    return tag("figure", tag("figcaption", caption, tag("small", note)), drawn, entries)


def _waits(waits: Sequence[Wait]) -> Html:
    if not waits:
        return nothing("It never waited for the service, a pause, its hours or its invites a minute.")
    columns = (Column("Wait", "w"), Column("Lasted", "n"), Column("From", "t"), Column("To", "t"))
    rows = (
        (_WAITS[wait.kind], duration(wait.seconds), timed(wait.began, ""), timed(wait.ended, ""))
        for wait in waits[:MOST_WAITS]
    )
    more = waits[MOST_WAITS:]
    seconds = duration(sum(wait.seconds for wait in more))
    foot = (f"{number_of(len(more), 'more wait')} together", seconds, "", "") if more else None
    return table("Times in which nothing was asked for", columns, rows, foot=foot)


# --- Money, limits and the foot


def _money(summary: Summary) -> Html:
    amounts = (
        ("Planned", "invited", "if each planned pair got an invite", summary.planned_value),
        ("Expected", "invited", "price times incidence rate of each invite", summary.expected_value),
        ("Possible", "invited", "if each invite ends in a complete", summary.possible_value),
        ("Spent", "rejected", "what the invites cost you at most", summary.spent),
    )
    highest = max(amount for *_, amount in amounts)
    columns = (Column("Value", "w"), Column("Amount", "n"), Column("", "b"))
    rows = (
        (join(text, ": ", note), money(amount), charts.bar([Part(kind, amount)], highest))
        for text, kind, note, amount in amounts
    )
    return section("Money expected", table(_currency(summary), columns, rows))


def _currency(summary: Summary) -> str:
    if summary.currency_id is None:
        return "The prices are in several currencies, or none is known: these are sums of their plain numbers."
    return f"In currency {summary.currency_id}"


def _limits(summary: Summary) -> Html:
    entries = [(prose(limit).replace("_", " "), prose(text)) for limit, text in summary.limits.items()]
    return section(
        "Limits that held last", terms("limits", entries) if entries else nothing("There were none.")
    )


def _foot() -> Html:
    made = f"Made by sampling_async {__version__} from the figures that are in summary.json. "
    return tag(
        "footer", made, "This page is one file: it loads nothing and runs nothing. No member is named in it."
    )
