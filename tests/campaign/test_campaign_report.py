"""The report of a campaign: what is in the page, and what a browser makes of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any, get_args
from xml.etree import ElementTree as ET

import pytest
from attrs import evolve, fields

from sampling_async._version import __version__
from sampling_async.campaign import (
    CampaignState,
    CodeCount,
    Conversion,
    Ends,
    Lesson,
    MemberGroup,
    Moment,
    Pairs,
    QuotaFill,
    Summary,
    Wait,
    WaitKind,
    compare,
)
from sampling_async.campaign._charts import Scale, Span, bar, compact
from sampling_async.campaign._inventory_page import inventory_page
from sampling_async.campaign._pages import duration, percent
from sampling_async.campaign._report import (
    FIRST_QUOTAS,
    MOST_QUOTAS,
    MOST_WAITS,
    comparison_page,
    report,
)
from sampling_async.simulator import generate_inventory

if TYPE_CHECKING:
    from pathlib import Path

BEGAN = datetime(2026, 3, 6, 9, 0, tzinfo=UTC)
VOID = {"meta"}
HOSTILE = "\"'><script>alert(1)</script>&\x00\x1b\n\u202e\u2066\ud800 tail"


class Page(HTMLParser):
    """A page that was read: it tells what is not closed, and what is where."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(attrs) == len(dict(attrs)), "an attribute twice"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.tags if found == tag]


def moments(number: int = 30, seconds: float = 60.0, **more: Any) -> tuple[Moment, ...]:
    values: dict[str, Any] = {"requests": 20, "invited": 90, "rejected": 40, "failed": 2, "limit": 12}
    values |= {"latency": 0.2, "latency_95": 0.5} | more
    ats = (BEGAN + timedelta(seconds=place * seconds) for place in range(number))
    return tuple(Moment(at=at, seconds=seconds, **values) for at in ats)


def wait(kind: WaitKind = "outage", minute: int = 5, minutes: float = 1.0) -> Wait:
    began = BEGAN + timedelta(minutes=minute)
    return Wait(kind=kind, began=began, ended=began + timedelta(minutes=minutes))


def quota(number: int = 0, **more: Any) -> QuotaFill:
    values: dict[str, Any] = {
        "survey_name": f"Survey {number}",
        "room": 100,
        "planned": 90,
        "invited": 43,
        "rejected": 31,
        "unknown": 2,
        "value": 1.0,
    }
    return QuotaFill(quota_id=70_000 + number, survey_id=1, wave_id=1, **(values | more))


def summary(**more: Any) -> Summary:
    values: dict[str, Any] = {
        "state": "finished",
        "planned_at": BEGAN - timedelta(minutes=5),
        "started_at": BEGAN,
        "ended_at": BEGAN + timedelta(minutes=30),
        "active_seconds": 1799.0,
        "runs": 2,
        "members": 5_000,
        "matched": 4_100,
        "invited_members": 1_234,
        "pairs": Pairs(
            planned=9_000, invited=4_321, rejected=3_000, not_sent=17, unknown=29, skipped=1_133, pending=500
        ),
        "requests": 1_500,
        "planned_value": 11_111.5,
        "expected_value": 5_432.1,
        "possible_value": 14_000.25,
        "spent": 987.65,
        "currency_id": 840,
        "codes": (
            CodeCount(result_code=0, result="Success", pairs=4_321, lesson="", advice="Send the invites."),
            CodeCount(result_code=24, result="QuotaFull", pairs=3_000, lesson="quota", advice="Nothing."),
            CodeCount(result_code=None, result="", pairs=46, lesson="later", advice="Look at the outages."),
        ),
        "skipped": {"the survey was closed": 133, "the quota is full": 1_000},
        "quotas": (quota(0), quota(1, closed="quota full")),
        "timeline": moments(),
        "waits": (wait(), wait("paused", 12, 4)),
        "limits": {"max_spend": "at most 5,000.00", "hours": "08:00 to 20:00"},
    }
    return Summary(**(values | more))


def empty() -> Summary:
    return Summary(state="planned", planned_at=BEGAN)


def read(**more: Any) -> Page:
    return Page(report(summary(**more)))


def paths(text: str, kind: str) -> list[list[str]]:
    """Return the paths of the drawings of a kind: `areas` or `curves`."""
    drawings = re.findall(rf'<svg class="{kind}".*?</svg>', text, flags=re.DOTALL)
    return [[path.attrib["d"] for path in ET.fromstring(drawing).iter("path")] for drawing in drawings]


# --- What is in the page


def test_each_figure_is_there():
    page = Page(report(summary(), title="Spring wave"))
    for text in (
        "Spring wave",
        "Finished",
        "2026-03-06 08:55:00 UTC",
        "2026-03-06 09:00:00 UTC",
        "2026-03-06 09:30:00 UTC",
        "29 min 59 s in 2 runs",
        "58.7 %",
        "of 7,367 requested pairs",
        "4,321",
        "5,432.10 in currency 840",
        "2.88",
        "in 1,500 requests",
        "1,234 of 5,000 members",
        "4,100",
        "9,000 planned = 4,321 invited + 3,000 rejected + 17 not sent + 29 unknown + ",
        "29 unknown + 1,133 skipped + 500 pending",
        "An invite may exist, so it is not requested again.",
        "QuotaFull",
        "takes out the quota",
        "Look at the outages.",
        "no response",
        "the quota is full 1,000 88.3 %",
        "Survey 1",
        "70001",
        "quota full",
        "Outage of the service",
        "1 min 0 s",
        "4 min 0 s",
        "11,111.50",
        "14,000.25",
        "987.65",
        "max spend",
        "at most 5,000.00",
        "08:00 to 20:00",
        __version__,
    ):
        assert text in page.text, text


def test_the_page_is_well_formed_and_in_order():
    page = read()
    assert [tag for tag, _ in page.tags if tag in {"main", "h1"}] == ["main", "h1"]
    groups = (MemberGroup(kind="age", question="1001538", value="18-24", planned=5, invited=4),)
    headings = re.findall(r"<h2>(.*?)</h2>", report(summary(groups=groups)))
    assert headings == [
        "In short",
        "From the panel to invites",
        "By group of members",
        "Outcomes by result code",
        "Fill of each quota",
        "Over time",
        "Money expected",
        "Limits that held last",
    ]
    assert all(cell["scope"] in {"col", "row"} for cell in page.all("th"))
    assert page.all("html") == [{"lang": "en"}]


def test_each_kind_of_group_has_a_table_with_names_that_are_escaped_and_cut():
    ends = Conversion(invited=40, completed=10, terminated=5, revenue=Decimal("3.50"))
    groups = [
        MemberGroup(kind=kind, question=question, value=f"{number}", planned=50, invited=40, ends=ends)
        for kind, question in (("gender", "1001007"), ("region", "region"))
        for number in range(20)
    ]
    groups[21] = evolve(groups[21], value=HOSTILE, ends=evolve(ends, revenue=None))
    labels = {("1001007", "3"): HOSTILE, ("1001007", ""): HOSTILE, ("region", "2"): "R" * 1000}
    page = Page(report(summary(groups=tuple(groups), ends=Ends(total=ends)), labels=labels))
    assert "script" not in {tag for tag, _ in page.tags}
    assert all(cell["scope"] in {"col", "row"} for cell in page.all("th"))
    for text in (
        "By gender (\"'><script>alert(1)</script>&",
        "By region (region)",
        "2 50 40 5.0 % 10 25.0 % 14.2 % to 40.2 % 25 3.50",
        "10 25.0 % 14.2 % to 40.2 % 25 \N{EN DASH}",
        "The next 5 groups",
        "R" * 59 + "…",
    ):
        assert text in page.text, text
    assert "R" * 60 not in page.text


def test_nothing_is_loaded_or_run():
    text = report(summary(quotas=tuple(quota(number) for number in range(60))))
    page = Page(text)
    assert "http://" not in text
    assert "https://" not in text
    assert not {"src", "href", "action"} & {key for _, attributes in page.tags for key in attributes}
    assert not {"script", "link", "img", "iframe", "a"} & {tag for tag, _ in page.tags}
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on")]


def test_the_policy_forbids_all_but_inline_style():
    [policy] = [meta["content"] for meta in read().all("meta") if "http-equiv" in meta]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def test_every_chart_says_what_it_shows():
    text = report(summary())
    images = [attributes for attributes in Page(text).all("svg") if attributes.get("role") == "img"]
    labels = [str(attributes["aria-label"]) for attributes in images]
    assert len(labels) == 5
    assert text.count("<title>") == 1 + len(labels)
    assert labels[1].startswith("Number of quotas by fill. 0 to 10 %: 0, ")
    assert "40 to 50 %: 2, " in labels[1]
    assert labels[2] == (
        "Pairs a minute from 2026-03-06 09:00:00 UTC to 2026-03-06 09:30:00 UTC. "
        "Most: invited 90, rejected 40, failed (not sent or unknown) 2."
    )
    others = [attributes for attributes in Page(text).all("svg") if set(attributes) == {"aria-hidden"}]
    assert len(others) == 6 + 3 + 2 + 2 + 4


@pytest.mark.parametrize(
    ("state", "reason", "shown"),
    [
        ("paused", "A person paused it.", "Paused A person paused it."),
        ("stopped", "No money is left.", "Stopped No money is left."),
        ("finished", "never shown", "Finished Planned"),
    ],
)
def test_the_state_and_its_reason(state: CampaignState, reason: str, shown: str):
    assert shown in read(state=state, reason=reason).text


def test_a_running_campaign_has_not_ended():
    page = read(state="running", ended_at=None)
    assert "Ended still running" in page.text
    assert "None" not in page.text


def test_an_empty_summary():
    page = Page(report(empty()))
    for text in (
        "Started not yet",
        "Ended not yet",
        "0.0 s in 0 runs",
        "of 0 requested pairs",
        "0 planned = 0 invited + ",
        "There is no response yet.",
        "No pair was skipped.",
        "No quota was planned.",
        "Nothing was requested yet.",
        "There were none.",
    ):
        assert text in page.text, text


def test_huge_numbers():
    huge = 10**18
    text = report(
        summary(
            members=huge,
            pairs=Pairs(planned=2 * huge, invited=huge, pending=huge),
            expected_value=1e300,
            spent=float("inf"),
            quotas=(
                quota(room=huge, invited=2 * huge),
                quota(1, room=0, invited=3),
                quota(2, room=0, invited=0),
            ),
            timeline=moments(3, invited=huge, latency=float("nan"), latency_95=1e9, limit=float("inf")),
        )
    )
    page = Page(text)
    assert "1,000,000,000,000,000,000" in page.text
    assert "Not counted here: 2 quotas without room." in page.text
    assert not re.search(r'="[^"]*\b(nan|inf)\b', text)


def test_times_are_in_utc():
    elsewhere = timezone(timedelta(hours=5, minutes=30))
    page = read(
        started_at=datetime(2026, 3, 6, 14, 30, tzinfo=elsewhere),
        ended_at=datetime(2026, 3, 6, 9, 30),  # noqa: DTZ001  without a zone: UTC
    )
    assert "Started 2026-03-06 09:00:00 UTC" in page.text
    assert "Ended 2026-03-06 09:30:00 UTC" in page.text


def test_every_outcome_lesson_and_wait_has_its_text_and_colour():
    """A new one belongs into the tables of `_report.py`, its colour into `report.css`."""
    outcomes = [each.name for each in fields(Pairs) if each.name != "planned"]
    numbers = {name: 1_001 + place for place, name in enumerate(outcomes)}
    codes = [CodeCount(result_code=1, result="", pairs=1, lesson=lesson, advice="") for lesson in Lesson]
    waits = [wait(kind) for kind in get_args(WaitKind)]
    text = report(
        summary(pairs=Pairs(planned=sum(numbers.values()), **numbers), codes=tuple(codes), waits=tuple(waits))
    )
    for name, number in numbers.items():
        assert f"{number:,} {name.replace('_', ' ')}" in text
    for name in [*outcomes, *get_args(WaitKind)]:
        assert f".f-{name} {{" in text
    for kind in get_args(WaitKind):
        assert f'<pattern id="wait-{kind}"' in text
        assert text.count(f'fill="url(#wait-{kind})"') == 1 + 3
    assert not re.findall(rf'<td class="w">(?:{"|".join(Lesson)})</td>', text)


def test_hostile_texts_stay_texts():
    text = report(
        summary(
            state="stopped",
            reason=HOSTILE,
            codes=(CodeCount(result_code=1, result=HOSTILE, pairs=1, lesson=HOSTILE, advice=HOSTILE),),
            skipped={HOSTILE: 3},
            quotas=(quota(survey_name=HOSTILE, closed=HOSTILE), quota(survey_name="x" * 5_000)),
            limits={HOSTILE: HOSTILE},
        ),
        title=HOSTILE,
    )
    page = Page(text)
    assert not page.all("script")
    assert page.text.count("\"'><script>alert(1)</script>& � tail") == 11
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e\u2066]", text)
    assert text.encode()
    assert "x" * 59 + "…" in page.text
    assert "x" * 60 not in text


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a" * 60, "a" * 60),
        ("a" * 61, "a" * 59 + "…"),
        ("\u202e \x00\n", "(no name)"),
        ("a\n\tb\u2028c", "a b c"),
        ("\u200b" * 5_000 + "tail", "…"),
        ("a\u200cb", "a\u200cb"),
        ("<b>", "&lt;b&gt;"),
    ],
)
def test_names_are_short_and_on_one_line(name: str, shown: str):
    assert f"<bdi>{shown}</bdi>" in report(summary(quotas=(quota(survey_name=name),)))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colours_differ_enough_from_the_ground(scheme: str):
    style = report(empty()).partition("</style>")[0]
    light, _, rest = style.partition("@media screen and (prefers-color-scheme: dark)")
    found = re.findall(r"--(\w+): (#\w{6})", light)
    if scheme == "dark":
        found += re.findall(r"--(\w+): (#\w{6})", rest.partition("@media")[0])
    colours = dict(found)
    for key in ("text", "soft"):
        assert min(contrast(colours[key], colours[ground]) for ground in ("ground", "sheet")) >= 4.5
    for key in colours.keys() - {"ground", "sheet", "edge", "track"}:
        assert contrast(colours[key], colours["ground"]) >= 3, key


def contrast(one: str, other: str) -> float:
    """Return the ratio that WCAG defines."""
    low, high = sorted((brightness(one), brightness(other)))
    return (high + 0.05) / (low + 0.05)


def brightness(colour: str) -> float:
    shares = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    parts = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


# --- Quotas


def test_many_quotas_fold():
    number = MOST_QUOTAS + 500
    text = report(
        summary(quotas=tuple(quota(place, survey_name="Cars, <Spain>, 2026") for place in range(number)))
    )
    page = Page(text)
    assert len(text.encode()) < 700_000
    assert f"The {FIRST_QUOTAS} quotas with most room" in page.text
    assert "2,450 more quotas together 43.0 % 105,350 245,000 4,900 75,950 0 closed" in page.text
    assert len(page.all("details")) == 1
    assert "The next 1,950 quotas" in page.text
    assert "The file summary.json has all 2,500 quotas." in page.text
    assert str(70_000 + MOST_QUOTAS - 1) in page.text
    assert str(70_000 + MOST_QUOTAS) not in page.text


def test_few_quotas_do_not_fold():
    page = read(quotas=tuple(quota(number) for number in range(FIRST_QUOTAS)))
    assert "All quotas" in page.text
    assert "summary.json has all" not in page.text
    assert not page.all("details")


def test_the_fill_of_quotas_is_counted_in_tenths():
    filled = (0, 9, 10, 99, 100, 101)
    text = report(summary(quotas=tuple(quota(invited=invited) for invited in filled)))
    [label] = re.findall(r'aria-label="Number of quotas by fill\. ([^"]*)"', text)
    counts = dict(re.findall(r"(\S+ (?:to )?\d+) %: (\d+)", label))
    assert {text: number for text, number in counts.items() if number != "0"} == {
        "0 to 10": "2",
        "10 to 20": "1",
        "90 to 100": "2",
        "over 100": "1",
    }


def test_a_fill_bar_never_leaves_its_box():
    drawn = bar(100, {"invited": 90, "unknown": 30})
    widths = [rect.get("width") for rect in ET.fromstring(drawn)]
    assert widths == ["90%", "10%"]
    assert len(list(ET.fromstring(bar(0, {"invited": 3})))) == 0


# --- Over time


def test_outcomes_are_stacked():
    [areas] = paths(report(summary(timeline=moments(2))), "areas")
    assert areas == [
        "M0 180V72H500V180ZM500 180V72H1000V180Z",
        "M0 72V24H500V72ZM500 72V24H1000V72Z",
        "M0 24V21.6H500V24ZM500 24V21.6H1000V24Z",
    ]


def test_a_moment_without_requests_is_a_gap():
    first, *_, last = moments(5)
    silent = Moment(at=BEGAN + timedelta(minutes=2), seconds=60)
    [[median, _], [limit]] = paths(report(summary(timeline=(first, silent, last))), "curves")
    assert median.count("M") == 2
    assert "180" not in median.replace("H", " ").split()
    assert limit.count("M") == 2


def test_moments_apart_are_not_connected():
    first, _, third = moments(3)
    [[median, _], _] = paths(report(summary(timeline=(first, third))), "curves")
    assert median.count("M") == 2


def test_one_moment_and_240():
    [areas] = paths(report(summary(timeline=moments(1))), "areas")
    assert areas[0].startswith("M0 180V")
    [[median, _], _] = paths(report(summary(timeline=moments(1))), "curves")
    assert re.fullmatch(r"M0 [\d.]+H1000", median)
    assert len(report(summary(timeline=moments(240)))) < 120_000


def test_a_timeline_without_times_of_requests():
    page = read(timeline=moments(3, requests=0, latency=None, latency_95=None, limit=None))
    assert "No request was timed yet." in page.text
    assert "The limit of requests at once is not known." in page.text


def test_a_moment_of_no_length():
    page = read(timeline=moments(1, seconds=0.0))
    assert "Outcomes a minute" in page.text


def test_waits_are_bands_in_each_chart_and_rows_of_a_table():
    text = report(summary(waits=(wait("outage", 3), wait("hours", 300))))
    assert text.count('fill="url(#wait-outage)"') == 1 + 3
    assert text.count('fill="url(#wait-hours)"') == 1  # in the legend, as it is after the charts
    page = Page(text)
    assert "Outage of the service 1 min 0 s 2026-03-06 09:03:00 UTC 2026-03-06 09:04:00 UTC" in page.text
    assert "Paused" not in page.text


def test_many_waits_are_summed_up():
    waits = tuple(wait("rate", minute, 0.99) for minute in range(1_000))
    text = report(summary(waits=waits, timeline=moments(240, seconds=300)))
    assert f"{1_000 - MOST_WAITS} more waits together" in Page(text).text
    assert text.count('fill="url(#wait-rate)"') == 1 + 3


@pytest.mark.parametrize("seconds", [0.01, 1, 59, 60, 3_600, 86_400, 30 * 86_400, 4_000 * 86_400])
def test_ticks_are_few_and_within_the_chart(seconds: float):
    begin = BEGAN.timestamp() + 7
    ticks = Span(begin, begin + seconds).ticks()
    assert 1 <= len(ticks) <= 7
    assert ticks[0][2]
    assert all(begin <= stamp <= begin + seconds for stamp, _, _ in ticks)
    assert len({(time, day) for _, time, day in ticks}) == len(ticks)


@pytest.mark.parametrize(
    "highest", [0, 1e-9, 0.3, 1, 3, 7, 99, 100, 101, 12_345, 1e18, float("nan"), float("inf")]
)
def test_an_axis_reaches_its_highest_value(highest: float):
    scale = Scale(highest)
    assert scale.ticks[0] == 0
    assert 3 <= len(scale.ticks) <= 5
    assert not 0 < highest < 1e300 or highest <= scale.ticks[-1] * (1 + 1e-9) <= 2.6 * highest
    assert len({compact(tick) for tick in scale.ticks}) == len(scale.ticks)


def test_numbers_in_words():
    assert [percent(*pair) for pair in ((0, 0), (0, 5), (1, 10**6), (10**6 - 1, 10**6), (1, 1), (3, 2))] == [
        "\u2013",
        "0.0 %",
        "< 0.1 %",
        "> 99.9 %",
        "100.0 %",
        "150.0 %",
    ]
    assert [duration(seconds) for seconds in (0, 59.96, 60, 3_599.9, 90_000, float("nan"))] == [
        "0.0 s",
        "1 min 0 s",
        "1 min 0 s",
        "1 h 0 min",
        "1 d 1 h",
        "\u2013",
    ]
    assert [compact(value) for value in (0, 0.25, 999, 999.9, 1_500, 999_999, 20e6, 1e18)] == [
        "0",
        "0.25",
        "999",
        "1k",
        "1.5k",
        "1M",
        "20M",
        "1e+18",
    ]


# --- In a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


def chromium(tmp_path: Path, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path / 'profile'}"),
        *options,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, check=True, timeout=60, encoding="utf-8")


def full() -> Summary:
    quotas = tuple(quota(number, survey_name=f"{number} " + "W" * 90, closed="x" * 90) for number in range(80))
    waits = (wait(), wait("paused", 9), wait("hours", 14), wait("rate", 20))
    return summary(quotas=quotas, waits=waits, state="stopped", reason="R" * 300, members=10**18)


@browser
def test_a_browser_shows_it_and_complains_of_nothing(tmp_path: Path):
    page = tmp_path / "report.html"
    page.write_text(report(full(), title="Spring wave"), encoding="utf-8")
    shot = tmp_path / "shot.png"
    done = chromium(tmp_path, page, "--dump-dom", f"--screenshot={shot}", "--window-size=800,900")
    assert "CONSOLE" not in done.stderr
    shown = Page(done.stdout)
    assert "Spring wave" in shown.text
    assert "Outcomes a minute" in shown.text
    assert "Refused" not in done.stderr


def _in_frame(tmp_path: Path, text: str, numbers: str, *, width: int) -> list[int]:
    """Return numbers of a page, given in JavaScript, in a frame: a window cannot be as narrow as a phone."""
    # The script that measures is only in this copy.
    measure = f"<script>parent.postMessage([{numbers}].join(), '*')</script>"
    text = re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</body>", f"{measure}</body>")
    (tmp_path / "copy.html").write_text(text, encoding="utf-8")
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(
        "<title>-</title><script>onmessage = event => { document.title = event.data }</script>"
        f'<iframe src="copy.html" style="width: {width}px; height: 800px; border: 0"></iframe>'
    )
    done = chromium(tmp_path, wrapper, "--dump-dom", "--virtual-time-budget=5000")
    [found] = re.findall(r"<title>(\d+(?:,\d+)*)</title>", done.stdout)
    return list(map(int, found.split(",")))


@browser
def test_a_phone_does_not_scroll_it_sideways(tmp_path: Path):
    text = report(full(), title="T" * 200).replace("<details>", "<details open>")
    content, frame = _in_frame(tmp_path, text, "document.documentElement.scrollWidth, innerWidth", width=360)
    assert frame == 360
    assert 300 < content <= 360


@browser
def test_it_prints(tmp_path: Path):
    page, paper = tmp_path / "report.html", tmp_path / "report.pdf"
    page.write_text(report(full()), encoding="utf-8")
    chromium(tmp_path, page, f"--print-to-pdf={paper}", "--no-pdf-header-footer")
    assert paper.read_bytes().startswith(b"%PDF")


def with_ends(number: int = 80) -> Summary:
    ends = tuple(
        Conversion(
            survey_id=2_400_000 + at,
            wave_id=7,
            quota_id=1_100_000 + at,
            survey_name="Travelling with children under twelve",
            invited=12_400,
            completed=4_810,
            terminated=3_390,
            expected=15_231.12,
            revenue=Decimal("12345.67"),
        )
        for at in range(number)
    )
    return evolve(full(), ends=Ends(total=ends[0], surveys=ends, quotas=ends))


def _on_paper(tmp_path: Path, text: str, names: str) -> list[int]:
    """Return the height of the tallest of some elements and the width of a page, by the rules for print.

    They are those of a frame as wide as a page of A4 between its margins.
    """
    text = text.replace("@media print", "@media all").replace("@media screen", "@media not all")
    tallest = f"Math.max(...[...document.querySelectorAll('{names}')].map(each => each.offsetHeight))"
    return _in_frame(tmp_path, text, f"{tallest}, document.documentElement.scrollWidth", width=688)


@browser
def test_names_are_readable_on_a_narrow_sheet_of_paper(tmp_path: Path):
    tallest, width = _on_paper(tmp_path, report(with_ends()), ".ends tbody th")
    assert 0 < tallest < 80  # four lines
    assert width <= 688


@browser
def test_ten_nights_fit_on_a_narrow_sheet_of_paper(tmp_path: Path):
    nights = {f"monday-2026-03-{at + 1:02}": evolve(with_ends(), members=20_000) for at in range(10)}
    tallest, width = _on_paper(tmp_path, comparison_page(compare(nights)), "tbody th")
    assert 0 < tallest < 160  # of survey names
    assert width <= 688


@browser
@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="there is no pdftotext here")
@pytest.mark.parametrize("size", ["A4", "Letter"])
def test_printed_pages_break_no_word_into_letters(tmp_path: Path, size: str):
    """What a reader prints: the pages of a PDF, and the words on them."""
    nights = {f"monday-2026-03-{at + 1:02}": evolve(with_ends(), members=20_000) for at in range(10)}
    for name, text in {"report": report(with_ends()), "compare": comparison_page(compare(nights))}.items():
        page, pdf = tmp_path / f"{name}.html", tmp_path / f"{name}.pdf"
        sized = text.replace("@page { margin: 14mm; }", f"@page {{ margin: 14mm; size: {size} portrait; }}")
        assert sized != text
        page.write_text(sized, encoding="utf-8")
        chromium(tmp_path, page, f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
        words = subprocess.run(
            ["pdftotext", pdf, "-"], capture_output=True, check=True, text=True
        ).stdout.split()
        letters = [word for word in words if len(word) == 1 and word.isalpha()]
        assert len(letters) < 0.01 * len(words), (name, letters[:20])
        if name == "report":  # it shows thirty surveys by name
            assert all(words.count(word) >= 30 for word in ["Travelling", "children", "twelve"])


INVENTORY = generate_inventory(5, surveys=60).surveys


def _pages() -> dict[str, str]:
    quotas = [quota.quota_id for survey in INVENTORY for quota in survey.quotas]
    fits = {quota_id: (at % 2, 0) for at, quota_id in enumerate(quotas)}  # half of them fit nobody
    return {
        "report": report(with_ends()),
        "compare": comparison_page(compare({"one": full(), "two": with_ends()})),
        "inventory": inventory_page(INVENTORY, fits, members=5),
    }


def test_each_region_of_a_page_has_a_name_of_its_own():
    for name, text in _pages().items():
        regions = re.findall(r'role="region" aria-label="([^"]*)"', text)
        assert len(regions) > 2, name
        assert len(set(regions)) == len(regions), (name, sorted(regions))


def test_what_is_not_printed_is_said_where_it_stands():
    for name, text in _pages().items():
        assert text.count("<details>") == text.count('<p class="on-paper">') > 0, name
