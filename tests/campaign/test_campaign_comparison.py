"""Several campaigns side by side: figures, changes, refusals and the fill of each quota."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from attrs import evolve
from panel_kit import page_of

from sampling_async.campaign import (
    CodeCount,
    Conversion,
    Ends,
    Pairs,
    QuotaFill,
    Summary,
    compare,
)

BEGAN = datetime(2026, 3, 6, 9, 0, tzinfo=UTC)


def fill(quota_id: int, invited: int, room: int, name: str = "Coffee") -> QuotaFill:
    return QuotaFill(
        quota_id=quota_id,
        survey_id=1,
        wave_id=2,
        survey_name=name,
        room=room,
        planned=room,
        invited=invited,
        rejected=0,
        unknown=0,
        value=1.0,
    )


def night(day: int, *, invited: int, full: int, **more) -> Summary:
    codes = (
        CodeCount(result_code=1, result="SUCCESS", pairs=invited, lesson="", advice=""),
        CodeCount(result_code=28, result="QUOTA_FULL", pairs=full, lesson="quota", advice="a"),
        CodeCount(result_code=None, result="no response", pairs=0, lesson="", advice="b"),
    )
    pairs = Pairs(planned=invited + full, invited=invited, rejected=full)
    planned_at = BEGAN + timedelta(days=day)
    given = {"codes": codes, "pairs": pairs, "planned_at": planned_at, "members": 50, **more}
    return Summary(state="finished", **given)


ENDS = Ends(total=Conversion(invited=80, completed=20, terminated=60, revenue=Decimal("31.5")))
FIRST = night(0, invited=80, full=20, quotas=(fill(7, 40, 50), fill(8, 40, 400)))
SECOND = night(1, invited=60, full=140, quotas=(fill(7, 60, 60), fill(9, 1, 2)), ends=ENDS)


def test_the_newest_campaign_stands_first():
    found = compare({"a": FIRST, "b": SECOND})
    assert [each.name for each in found.nights] == ["b", "a"]
    assert [each.figures["invited"] for each in found.nights] == [60, 80]
    assert [each.figures["revenue"] for each in found.nights] == [31.5, None]
    assert found.codes == {"28 QUOTA_FULL": [140, 20], "no response": [0, 0]}


def test_a_night_whose_surveys_are_open_is_compared_by_what_has_ended():
    last = evolve(
        SECOND, planned_at=BEGAN, ends=Ends(total=Conversion(invited=400, completed=200, terminated=190))
    )
    new = evolve(SECOND, ends=Ends(total=Conversion(invited=400, completed=3, terminated=3)))
    found = compare({"last": last, "new": new})
    assert [each.figures["open"] for each in found.nights] == [394, 10]
    assert [round(each.figures["conversion"], 3) for each in found.nights] == [0.5, 0.513]
    assert [text for text in found.changes() if "onversion" in text] == [
        "Conversion of ended: 51.3% before, 50.0% now"
    ]
    nothing = evolve(SECOND, ends=Ends(total=Conversion(invited=400)))
    assert compare({"a": nothing}).nights[0].figures["conversion"] is None


def test_counts_are_whole_numbers_in_json():
    (night,) = compare({"b": SECOND}).to_dict()["nights"]
    found = {name: night[name] for name in ("invited", "completed", "reconciled", "revenue")}
    assert json.dumps(found) == '{"invited": 60, "completed": 20, "reconciled": 0, "revenue": 31.5}'


def test_what_has_changed_most_is_said_first():
    assert compare({"a": FIRST, "b": SECOND}).changes() == [
        "Success rate: 80.0% before, 30.0% now",
        "28 QUOTA_FULL: 20.0% of requested pairs before, 70.0% now",
    ]
    assert compare({"a": FIRST}).changes() == []
    assert compare({"a": FIRST, "b": evolve(FIRST, planned_at=BEGAN + timedelta(days=1))}).changes() == []


def test_another_name_of_a_code_and_a_revenue_below_0_are_compared_as_what_they_are():
    renamed = tuple(evolve(each, result=f"{each.result}_2") for each in FIRST.codes)
    found = compare({"a": FIRST, "b": evolve(FIRST, codes=renamed, planned_at=BEGAN + timedelta(days=1))})
    assert (found.codes["28 QUOTA_FULL"], found.changes()) == ([20, 20], [])
    page = page_of(
        compare({each: ended_night(day, 5, revenue=each) for day, each in enumerate(("-10", "5", "-9"))})
    )
    assert "-280 %" in page
    assert "+150 %" in page


def test_the_fill_of_a_quota_stands_beside_that_of_the_other_nights():
    quotas = compare({"a": FIRST, "b": SECOND}).quotas
    assert list(quotas) == [8, 7, 9]  # most room first
    assert [each and each.invited for each in quotas[7]] == [60, 40]
    assert quotas[9][1] is None


def test_it_is_json():
    found = json.loads(json.dumps(compare({"a": FIRST, "b": SECOND}).to_dict()))
    assert found["nights"][0]["conversion"] == 0.25
    assert found["nights"][1]["conversion"] is None
    assert str(found["nights"][0]["completed"]) == "20"
    assert found["nights"][0]["codes"]["28 QUOTA_FULL"] == 140
    assert found["quotas"][1] == {
        "quota_id": 7,
        "fills": [{"invited": 60, "room": 60}, {"invited": 40, "room": 50}],
    }


def test_the_page_has_all_of_it_and_escapes_names():
    hostile = '"><script>alert(1)</script>'
    page = page_of(compare({hostile: evolve(FIRST, quotas=(fill(7, 1, 2, hostile),)), "b": SECOND}))
    assert "<script" not in page
    assert "Content-Security-Policy" in page
    for text in ("-25 %", "+600 %", "28 QUOTA_FULL", "31.50", "25.0 %"):
        assert text in page, text
    many = tuple(fill(number, 1, 2) for number in range(2500))
    page = page_of(compare({"a": evolve(FIRST, quotas=many)}))
    assert "The next 1,950 quotas" in page
    assert "there are all 2,500 quotas" in page


def test_nothing_planned_is_no_error():
    empty = Summary(state="planned", planned_at=BEGAN)
    assert "No quota was planned" in page_of(compare({"a": empty, "b": empty}))


def ended_night(day: int, completed: int, *, revenue: str | None = "12.5", **more) -> Summary:
    total = Conversion(
        invited=100,
        completed=completed,
        terminated=30,
        revenue=None if revenue is None else Decimal(revenue),
        currency_id=1,
    )
    return night(day, invited=100, full=0, ends=Ends(total=total), **{"currency_id": 1, **more})


def test_completes_and_revenue_are_drawn_over_the_nights_the_oldest_first():
    nights = {"late": ended_night(1, 20), 'early"><script>!': ended_night(0, 10), "other": FIRST}
    page = page_of(compare(nights))
    assert "<script" not in page
    low, high = Conversion(invited=100, completed=10).interval
    assert (f"{100 * low:,.0f}", f"{100 * high:,.0f}") == ("6", "17")
    label = (
        "By night: early&#34;&gt;&lt;script&gt;!: 10 completes, by chance 6 to 17, 60 open, revenue 12.50;"
        " late: 20 completes, by chance 13 to 29, 50 open, revenue 12.50"
    )
    assert page.count(f'role="img" aria-label="{label}"') == page.count(f"<title>{label}</title>") == 2
    assert page.count('class="span"') == 2
    # On two lines in turn, as a phone has no room for names side by side.
    first = page.index('y="221" class="middle">early&#34;&gt;&lt;script…<')
    assert first < page.index('y="236" class="middle">late<')


def test_one_night_is_no_trend_and_revenue_in_several_currencies_none():
    assert "Night by night" not in page_of(compare({"a": ended_night(0, 5), "b": FIRST}))
    several = compare({"a": ended_night(0, 5), "b": ended_night(1, 5, currency_id=9)})
    without = compare({"a": ended_night(0, 5), "b": ended_night(1, 5, revenue=None)})
    for each in (several, without):
        assert page_of(each).count('role="img"') == 1
    many = {str(day): ended_night(day, 0, revenue="-3") for day in range(40)}
    assert page_of(compare(many)).count('class="span"') == 30
