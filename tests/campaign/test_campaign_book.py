"""What a campaign learns and asks for next, as plain decisions; its limits, moments and waits."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sampling_async import (
    ForbiddenError,
    InvalidRequestError,
    Invite,
    InviteOutcome,
    SamplingError,
    TransportError,
)
from sampling_async._protocol.lessons import rule_for, rules_of
from sampling_async.campaign import LESSONS, Lesson, Limits, Rule
from sampling_async.campaign._book import Book
from sampling_async.campaign._ledger_file import DueMember, Notes, PlannedQuota
from sampling_async.campaign._limits import InvitePace
from sampling_async.campaign._summing import SLOT, Moments, WaitLog, class_of, percentile, seconds_of

CODES = (1, 9, 14, 16, 28, 31, 36, 39, 41, 46, 99)


def quota(number: int, *, room: int = 10, survey: int | None = None, value: float = 1.0, cost: float = 0.0):
    return PlannedQuota(number, survey or 100 + number, 1, "a survey", 1, room, value, cost)


def book_of(*quotas, pending: int = 0, **more) -> Book:
    counts = [(each.id, "pending", pending, 0.0) for each in quotas if pending]
    return Book(quotas, counts, LESSONS, **more)


def member_of(*due: int, reserves=(), turn: int = 1, number: int = 1) -> DueMember:
    return DueMember(number, f"m{number}", None, list(reserves), turn, dict.fromkeys(due, 0), added=len(due))


def outcome(quota_id: int, status: str = "invited", code: int | None = 1, error=None, amount=None):
    invite = None
    if status == "invited":
        invite = Invite(100 + quota_id, 1, quota_id, 2.0, "https://entry.example/x", 10, 50, amount)
    return InviteOutcome("m1", quota_id, status, invite, code, None, error)


def asked(book, member, most: int = 100, notes=None):
    return book.ready(member, most, Notes() if notes is None else notes)


# --- Before a request


def test_what_is_open_is_requested_in_its_order():
    book, member = book_of(quota(1), quota(2), pending=1), member_of(2, 1)
    assert asked(book, member) == (2, 1)
    assert member.waiting == {1, 2}
    assert not member.due
    assert book.asked == 2


def test_a_closed_quota_gives_way_to_the_best_reserve_that_is_open_and_has_room():
    book = Book(
        [quota(1), quota(2, room=0), quota(3), quota(4)],
        [(1, "pending", 1, 0.0)],
        LESSONS,
        is_open=lambda quota_id: quota_id not in {1, 3},
    )
    member = member_of(1, reserves=[2, 3, 4])
    notes = Notes()
    assert asked(book, member, notes=notes) == (4,)
    (skipped,) = notes.ends
    assert (skipped.quota, skipped.state, skipped.reason) == (1, "skipped", "closed in the inventory")
    assert [(pair.quota, pair.turn) for pair in notes.pairs] == [(4, 1)]
    assert member.reserves == []
    assert book.pairs.planned == 2


def test_what_may_not_be_requested_yet_stays_due():
    book, member = book_of(quota(1), quota(2), pending=1), member_of(1, 2)
    assert asked(book, member, most=1) == (1,)
    assert member.due == {2: 0}


def test_nothing_is_requested_for_a_closed_member_and_it_gets_no_reserve():
    book, member = book_of(quota(1), quota(2), pending=1), member_of(1, reserves=[2])
    member.closed = "MEMBER_BLOCKED"
    notes = Notes()
    assert asked(book, member, notes=notes) == ()
    assert notes.pairs == []
    assert [end.reason for end in notes.ends] == ["MEMBER_BLOCKED"]


# --- After a request


def after(book, member, *outcomes):
    asked(book, member)
    return recorded(book, member, outcomes, 1000.0)


def recorded(book, member, outcomes, now: float = 0.0):
    notes = Notes()
    book.record(member, outcomes, now, notes)
    return notes


@pytest.mark.parametrize("code", [9, 28, 10, 8, 27, 45])
def test_a_full_quota_is_taken_out(code):
    book = book_of(quota(1), quota(2), pending=2)
    learned = after(book, member_of(1, reserves=[2]), outcome(1, "rejected", code))
    assert [quota_id for _, quota_id in learned.closed_quotas] == [1]
    assert [(pair.quota, pair.turn) for pair in learned.pairs] == [(2, 2)]
    assert asked(book, member_of(1, number=2)) == ()


def test_a_full_sub_quota_takes_the_quota_out_after_three_in_a_row():
    book = book_of(quota(1), pending=9)
    for number, code in enumerate((41, 41, 1, 41, 41)):
        status = "invited" if code == 1 else "rejected"
        assert not after(book, member_of(1, number=number), outcome(1, status, code)).closed_quotas
    assert after(book, member_of(1, number=9), outcome(1, "rejected", 41)).closed_quotas


def test_a_quota_that_matches_nobody_is_taken_out_after_twenty_in_a_row():
    book = book_of(quota(1), pending=40)
    for number in range(19):
        assert not after(book, member_of(1, number=number), outcome(1, "rejected", 16)).closed_quotas
    after(book, member_of(1, number=30), outcome(1))
    for number in range(40, 59):
        assert not after(book, member_of(1, number=number), outcome(1, "rejected", 16)).closed_quotas
    assert after(book, member_of(1, number=60), outcome(1, "rejected", 16)).closed_quotas


def test_a_survey_is_taken_out_with_all_its_quotas():
    book = book_of(quota(1, survey=7), quota(2, survey=7), quota(3), pending=1)
    learned = after(book, member_of(1), outcome(1, "rejected", 46))
    assert sorted(quota_id for _, quota_id in learned.closed_quotas) == [1, 2]


@pytest.mark.parametrize("code", [12, 13, 14, 22, 39, 40])
def test_a_member_that_may_not_have_more_gets_no_reserve(code):
    book, member = book_of(quota(1), quota(2), pending=1), member_of(1, reserves=[2])
    learned = after(book, member, outcome(1, "rejected", code))
    assert not learned.pairs
    assert member.closed
    assert learned.closed_members == [(member.closed, member.id)]


def test_a_refused_pair_makes_room_for_somebody_else():
    book = book_of(quota(1, room=1), pending=1)
    after(book, member_of(1), outcome(1, "rejected", 16))
    # The room that the first member has left goes to another one as its reserve.
    other = recorded(book, member := member_of(2, reserves=[1], number=2), ())
    assert not other.ends
    assert book._next_best(member, 2).quota == 1
    assert book._next_best(member_of(reserves=[1], number=3), 2) is None


def test_an_unknown_pair_keeps_its_room():
    book = book_of(quota(1, room=1), pending=1)
    after(book, member_of(1), outcome(1, "unknown", None, TransportError("cut", delivery="unknown")))
    assert book._next_best(member_of(reserves=[1], number=2), 2) is None
    assert book.committed == 1


def test_no_member_has_more_turns_than_max_turns():
    book = book_of(quota(1), quota(2), pending=1, max_turns=2)
    assert after(book, member_of(1, reserves=[2], turn=1), outcome(1, "rejected", 16)).pairs
    book = book_of(quota(1), quota(2), pending=1, max_turns=2)
    assert not after(book, member_of(1, reserves=[2], turn=2), outcome(1, "rejected", 16)).pairs


def test_a_technical_error_waits_and_ends_after_three_tries():
    book, member = book_of(quota(1), pending=1, retry_seconds=60), member_of(1)
    for tries in (1, 2):
        (end,) = after(book, member, outcome(1, "rejected", 36)).ends
        assert (end.state, end.tries, end.due, end.turn) == ("pending", tries, 1060.0, member.turn + 1)
        member.due = {1: end.tries}
    (end,) = after(book, member, outcome(1, "rejected", 36)).ends
    assert (end.state, end.code) == ("rejected", 36)


def test_what_was_answered_before_its_quota_closed_ends_with_that_answer():
    closed = set()
    book = book_of(quota(1), quota(2), pending=1, is_open=lambda quota_id: quota_id not in closed)
    member = member_of(1, 2)
    after(book, member, outcome(1, "rejected", 36))
    member.due, member.refused = {1: 1, 2: 0}, {1: 36}
    closed |= {1, 2}
    notes = Notes()
    asked(book, member, notes=notes)
    assert [(end.state, end.code, end.tries, end.quota) for end in notes.ends] == [
        ("rejected", 36, 1, 1),
        ("skipped", None, 0, 2),
    ]
    assert (book.pairs.rejected, book.pairs.skipped, book.pairs.pending) == (1, 1, 0)


def test_what_could_not_be_sent_waits_and_a_refused_key_leaves_it_as_it_was():
    book, member = book_of(quota(1), pending=1), member_of(1)
    (end,) = after(book, member, outcome(1, "not_sent", None, TransportError("no connection"))).ends
    assert (end.state, end.tries) == ("pending", 1)
    member.due = {1: 0}
    learned = after(book, member, outcome(1, "not_sent", 36, ForbiddenError("403")))
    assert not learned.ends
    assert book.asked == 0
    assert book.pairs.pending == 1


def test_a_refusal_of_the_whole_request_with_a_code_is_final():
    book, member = book_of(quota(1), pending=1), member_of(1)
    learned = after(book, member, outcome(1, "not_sent", 12, SamplingError("400")))
    assert [(end.state, end.code) for end in learned.ends] == [("not_sent", 12)]
    assert [reason for reason, _ in learned.closed_members] == ["NO_MEMBER_FOUND"]


def test_a_quota_given_twice_is_counted_once():
    book, member = book_of(quota(1), pending=1), member_of(1)
    learned = after(book, member, outcome(1), outcome(1))
    assert len(learned.invites) == 1
    assert book.pairs.invited == 1


def test_what_could_not_be_sent_keeps_its_room_since_the_next_run_requests_it():
    book = book_of(quota(1, room=1), quota(2), pending=1)
    member = member_of(1, reserves=[2])
    for _ in range(3):
        error = TransportError("no", endpoint="bulk_invite", delivery="not_sent")
        learned = after(book, member, outcome(1, "not_sent", None, error))
        member.due[1] = learned.ends[-1].tries
    assert [(end.state, end.tries) for end in learned.ends] == [("not_sent", 3)]
    assert learned.pairs == []
    refused = member_of(2, reserves=[1], number=2)
    assert after(book, refused, outcome(2, "rejected", 41)).pairs == []


def test_invites_of_earlier_plans_take_no_room_of_this_one():
    quotas = [quota(1, room=1), quota(2)]
    book = Book(
        quotas,
        [(1, "invited", 4, 6.0), (1, "unknown", 1, 1.5), (2, "pending", 1, 1.5)],
        LESSONS,
        earlier={1: 5},
    )
    learned = after(book, member_of(2, reserves=[1]), outcome(2, "rejected", 41))
    assert [pair.quota for pair in learned.pairs] == [1]


def test_the_cost_of_a_member_is_that_of_a_reserve_if_that_takes_a_place():
    book = book_of(quota(1, cost=1.0), quota(2, cost=5.0), pending=1)
    assert book.cost_of(member_of(1, reserves=[2, 77])) == 1.0
    book = Book([quota(1, cost=1.0), quota(2, cost=5.0)], [], LESSONS, is_open=lambda quota_id: quota_id == 2)
    assert book.cost_of(member_of(1, reserves=[2, 77])) == 5.0


def test_an_invite_costs_what_was_said_or_what_the_member_gets_if_that_is_more():
    book = book_of(quota(1, cost=0.5), quota(2, cost=0.5), pending=1)
    member = member_of(1, 2)
    asked(book, member)
    assert book.most_spent == 1.0
    recorded(book, member, (outcome(1), outcome(2, amount=0.8)))
    assert book.spent == book.most_spent == pytest.approx(1.3)
    assert book.expected == {1: 2.0}


@given(st.data())
def test_every_pair_is_somewhere_whatever_is_answered(data):
    quotas = [quota(number, room=data.draw(st.integers(0, 4)), survey=number // 2 + 1) for number in range(6)]
    plans = data.draw(st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), max_size=6))
    counts = Counter(quota_id for plan in plans for quota_id in plan)
    book = Book(quotas, [(quota_id, "pending", count, 0.0) for quota_id, count in counts.items()], LESSONS)
    members = [
        member_of(*plan, reserves=[q for q in range(6) if q not in plan], number=number)
        for number, plan in enumerate(plans)
    ]
    ended: Counter[tuple[int, int]] = Counter()
    queue = list(members)
    for _ in range(60):
        if not queue:
            break
        member = queue.pop(0)
        notes, outcomes = Notes(), []
        for quota_id in book.ready(member, data.draw(st.integers(1, 3)), notes):
            code = data.draw(st.sampled_from(CODES))
            status = data.draw(st.sampled_from(("rejected", "not_sent", "unknown"))) if code != 1 else "invited"
            outcomes.append(outcome(quota_id, status, None if status == "unknown" else code))
        learned = recorded(book, member, outcomes)
        for end in (*notes.ends, *learned.ends):
            if end.state != "pending":
                ended[end.member, end.quota] += 1
            else:
                member.due[end.quota] = end.tries
        for pair in learned.pairs:
            member.due[pair.quota] = 0
        assert not member.waiting
        if member.due:
            member.turn += 1
            queue.append(member)
    pairs = book.pairs
    assert all(count == 1 for count in ended.values()), "a pair ended twice"
    total = pairs.invited + pairs.rejected + pairs.not_sent + pairs.unknown + pairs.skipped
    assert ended.total() == total == pairs.planned - pairs.pending
    assert pairs.pending == sum(len(member.due) for member in members)
    assert book.asked == 0
    for each in quotas:
        planned_at_first = counts[each.id]
        place = book._places[each.id]
        # Reserves never take more than the room; what was planned at first may have been more.
        assert place.left >= min(0, each.room - planned_at_first)


# --- The table


def test_each_code_of_the_table_has_an_advice_and_changes_keep_it():
    assert all(rule.advice for rule in LESSONS.values())
    changed = rules_of({41: Lesson.PAIR, 28: Rule(Lesson.LATER, "mine"), 1234: Lesson.STOP})
    assert changed[41] == Rule(Lesson.PAIR, LESSONS[41].advice)
    assert changed[28].advice == "mine"
    assert changed[9] is LESSONS[9]
    assert rule_for(changed, 4321).lesson is Lesson.PAIR
    assert rules_of(None) is LESSONS
    with pytest.raises(TypeError):
        LESSONS[1] = Rule(Lesson.STOP)
    with pytest.raises(InvalidRequestError, match="in_a_row"):
        Rule(Lesson.QUOTA, in_a_row=0)


# --- Limits


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("hours", "zone", "now", "seconds"),
    [
        ("22:00-06:00", None, "2026-03-01T23:00:00", 0),
        ("22:00-06:00", None, "2026-03-01T05:59:59", 0),
        ("22:00-06:00", None, "2026-03-01T06:00:00", 16 * 3600),
        ("22:00-06:00", None, "2026-03-01T21:59:00", 60),
        ("08:30-17:00", None, "2026-03-01T08:30:00", 0),
        ("08:30-17:00", None, "2026-03-01T17:00:00", 15.5 * 3600),
        ("00:00-00:01", None, "2026-03-01T00:02:00", 86_400 - 120),
        ("09:00-10:00", "Europe/Berlin", "2026-07-01T07:30:00", 0),  # 09:30 there
        ("09:00-10:00", "Europe/Berlin", "2026-01-01T07:30:00", 1800),  # 08:30 there
        # In the night to 29 March the clock goes from 02:00 to 03:00: an hour less to wait.
        ("09:00-10:00", "Europe/Berlin", "2026-03-28T09:00:00", 22 * 3600),
    ],
)
def test_hours_are_those_of_the_zone(hours, zone, now, seconds):
    assert Limits(hours=hours, zone=zone).seconds_closed(at(now)) == seconds


_ZONES = [
    *("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Casablanca", "Asia/Kathmandu"),
    *("America/Santiago", "Pacific/Apia", "Pacific/Chatham", "Asia/Tehran", "Africa/Cairo", "UTC"),
]
_CHANGES = [  # in Berlin, New York and on Lord Howe, where the clocks change by half an hour
    *("2026-03-29T01:00:00", "2026-10-25T01:00:00", "2026-03-08T07:00:00", "2026-11-01T06:00:00"),
    *("2026-04-04T15:00:00", "2026-10-03T15:30:00"),
]
_MINUTES = st.integers(0, 24 * 60 - 1)


@settings(max_examples=300)
@given(
    zone=st.sampled_from(_ZONES),
    times=st.lists(_MINUTES, min_size=2, max_size=2, unique=True),
    now=st.builds(
        lambda change, seconds: at(change) + seconds, st.sampled_from(_CHANGES), st.floats(-30 * 3600, 3 * 3600)
    )
    | st.floats(at("2000-01-01T00:00:00"), at("2037-01-01T00:00:00")),
)
@example(zone="Europe/Berlin", times=[2 * 60 + 9, 6 * 60], now=at("2026-03-28T22:00:00"))  # in the gap
@example(zone="Europe/Berlin", times=[2 * 60 + 9, 2 * 60 + 30], now=at("2026-03-28T22:00:00"))  # all of it is
@example(zone="Europe/Berlin", times=[2 * 60, 2 * 60 + 30], now=at("2026-10-25T00:40:00"))  # twice a night
@example(zone="Europe/Berlin", times=[60 + 50, 2 * 60 + 30], now=at("2026-10-25T00:40:00"))
def test_hours_begin_when_the_clocks_of_the_zone_first_show_a_time_within_them(zone, times, now):
    first, last = times
    limits = Limits(hours=f"{first // 60:02}:{first % 60:02}-{last // 60:02}:{last % 60:02}", zone=zone)

    def is_open(moment: float) -> bool:
        wall = datetime.fromtimestamp(moment, ZoneInfo(zone))
        return (wall.hour * 60 + wall.minute - first) % 1440 < (last - first) % 1440

    closed = limits.seconds_closed(now)
    assert is_open(now + closed + 1e-3)
    assert not any(map(is_open, np.arange(now, now + closed - 1e-3, 60)))
    assert closed == 0 or not is_open(now + closed - 1e-3)


def test_without_hours_it_is_always_open():
    assert Limits().seconds_closed(at("2026-03-01T23:00:00")) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0},
        {"concurrency": 1.5},
        {"invites_per_minute": 0},
        {"max_invites": -1},
        {"max_spend": -0.1},
        {"hours": "24:00-01:00"},
        {"hours": "9-10"},
        {"hours": "09:00-09:00"},
        {"hours": 9},
        {"zone": "Nowhere/City"},
        {"zone": ""},
        {"zone": "../etc/passwd"},
    ],
)
def test_wrong_limits_are_refused_with_their_name(wrong):
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        Limits(**wrong)


def test_limits_survive_json_and_say_what_they_are():
    limits = Limits(concurrency=4, max_invites=2_000, hours="22:00-06:00", zone="Europe/Berlin", paused=True)
    assert Limits.from_json(limits.to_json()) == limits
    assert limits.in_words() == {
        "members asked for at once": "4",
        "invites in all": "2,000",
        "hours": "22:00-06:00",
        "time zone of the hours": "Europe/Berlin",
    }
    with pytest.raises(InvalidRequestError, match="no limit 'speed'; the limits are concurrency"):
        limits.changed(speed=9)


def test_the_pace_allows_what_a_minute_allows_and_gives_refusals_back():
    pace = InvitePace()
    made, seconds = 0, 0.0
    for _ in range(6000):
        seconds += 0.01
        if pace.has_token(seconds, made, 60.0):
            made += 1
    assert 60 <= made <= 62
    assert not pace.has_token(seconds, made, 60.0)
    assert pace.has_token(seconds, made - 3, 60.0)  # three were refused


def test_the_pace_does_not_save_up():
    pace = InvitePace()
    assert pace.has_token(0.0, 0, 60.0)
    made = 0
    while pace.has_token(3600.0, made, 60.0):
        made += 1
    assert made == 1


# --- Moments


@given(st.floats(0.0005, 5000))
def test_a_latency_is_kept_to_ten_percent(seconds):
    assert seconds_of(class_of(seconds)) == pytest.approx(max(seconds, 0.001), rel=0.1)


def test_percentiles_of_latencies():
    latencies = Counter({class_of(0.1): 90, class_of(1.0): 10})
    assert percentile(latencies, 50) == pytest.approx(0.1, rel=0.1)
    assert percentile(latencies, 95) == pytest.approx(1.0, rel=0.1)
    assert percentile({}, 50) is None


def test_moments_are_handed_out_once_and_again_when_they_change():
    moments = Moments(3)
    moments.add(100.0, 0.1, invited=2, rejected=1, failed=0)
    moments.add(105.0, 0.2, invited=1, rejected=0, failed=4)
    ((run, slot, requests, invited, rejected, failed, _, limit),) = moments.taken()
    assert (run, slot, requests, invited, rejected, failed, limit) == (3, 100, 2, 3, 1, 4, None)
    assert moments.taken() == []
    moments.note_limit(107.0, 8.0)
    assert moments.taken()[0][2] == 2
    moments.add(100.0 + SLOT, 0.1, invited=1, rejected=0, failed=0)
    # A clock that was set back does not change what was written.
    moments.add(50.0, 0.1, invited=1, rejected=0, failed=0)
    assert [row[1:4] for row in moments.taken()] == [(110, 2, 2)]


def test_waits_that_follow_each_other_are_one():
    waits = WaitLog(4)
    assert waits.extend("rate", 0.0, 1.0) == (5, 0.0, 1.0)
    assert waits.extend("rate", 2.0, 3.0) == (5, 0.0, 3.0)
    assert waits.extend("outage", 2.0, 3.0) == (6, 2.0, 3.0)
    assert waits.extend("rate", 60.0, 61.0) == (7, 60.0, 61.0)
