"""The store in a SQLite file: what a fact is, what replaces what, and leases of handlers."""

from __future__ import annotations

import os
import random
import re
import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial

import pytest
from store_kit import (
    CLOSED,
    COMPLETION,
    MEMBER,
    PEER,
    SECRET,
    TERMINATE,
    encoded,
    entries_of,
    post,
    received,
    status,
)

from sampling_async import InvalidRequestError
from sampling_async.notifications import (
    Inbox,
    Kind,
    OutcomeLedger,
    PossibleInvite,
    SqliteStore,
    State,
    StoreError,
    UnknownNotification,
    Validity,
    kept_secrets,
    rotate_secrets,
)
from sampling_async.notifications._facts import Backlog, Hit, Receipt, Settled
from sampling_async.notifications._settling import RecordedInvite, record
from sampling_async.notifications._stores import in_transaction, run_once, store_of
from sampling_async.routing._links import Changes, abandon

WITHOUT_WAVE = {name: value for name, value in COMPLETION.items() if name != "WaveId"}
IN_BOTH_ORDERS = pytest.mark.parametrize(
    ("first", "second"), [(WITHOUT_WAVE, COMPLETION), (COMPLETION, {**COMPLETION, "WaveId": None})]
)
DAY = datetime(2026, 11, 22, 10, 1, tzinfo=UTC).timestamp()  # after the times of `status`


@pytest.fixture
def store(new_address):
    opened = store_of(new_address())
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def sqlite_store(tmp_path):
    opened = SqliteStore(tmp_path / "n.db")
    opened.open()
    yield opened
    opened.close()


def put(store, kind, fields, at=1.0):
    """Store what was posted, and return what became of it."""
    body = encoded(fields)
    with store.transaction():
        hit = Receipt(Kind(kind), at, body, "", [], PEER)
        return received(store, hit)


def facts(store, **only):
    return list(store.facts(**only))


def claim(store, owner="me", *, now=10.0, lease=5.0, kinds=(*Kind, None)):
    with store.transaction():
        return list(store.claim(owner, kinds, now, now + lease, 100))


def settle(store, fact, state=State.HANDLED, owner="me", due=0.0):
    with store.transaction():
        return store.settle(owner, Settled(fact_id=fact.id, state=state, due=due))


def test_a_repetition_is_counted(store):
    assert put(store, "completion", COMPLETION) == ["new"]
    assert put(store, "completion", COMPLETION, at=2.0) == ["repeated"]
    texts = {name.lower(): str(value) for name, value in COMPLETION.items()}
    assert put(store, "completion", texts) == ["repeated"]
    (fact,) = facts(store)
    assert (fact.receipts, fact.differing, fact.received_at.timestamp()) == (3, 0, 1.0)
    assert fact.fields == COMPLETION


def test_a_repetition_with_other_content_is_flagged(store):
    put(store, "completion", COMPLETION)
    assert put(store, "completion", {**COMPLETION, "DateTime": "2026-11-23 10:00:00"}) == ["differs"]
    (fact,) = facts(store)
    assert (fact.receipts, fact.differing) == (2, 1)
    assert fact.fields == COMPLETION


def test_another_revenue_is_a_correction_linked_to_the_first(store):
    put(store, "completion", COMPLETION)
    put(store, "completion", {**COMPLETION, "Revenue": 75})
    put(store, "completion", {**COMPLETION, "Revenue": 0})
    assert put(store, "completion", COMPLETION) == ["repeated"]
    first, *corrections = facts(store)
    assert first.corrects is None
    assert [fact.corrects for fact in corrections] == [first.id, first.id]
    assert [fact.notification.revenue for fact in facts(store)] == [Decimal("1.5"), Decimal("0.75"), Decimal(0)]


def test_a_revenue_can_be_corrected_back(store):
    def at(hour, revenue):
        fields = {**COMPLETION, "DateTime": f"2026-11-22 {hour}:00:00", "Revenue": revenue}
        return put(store, "completion", fields, at=DAY)

    said = [at(hour, revenue) for hour, revenue in ((10, 100), (11, 200), (12, 100), (13, 200))]
    assert said == [["new"]] * 4
    repeated = [at(hour, revenue) for hour, revenue in ((13, 200), (12, 100), (10, 100), (11, 200))]
    assert {verdict for (verdict,) in repeated} <= {"repeated", "differs"}
    first, *corrections = facts(store)
    assert [fact.corrects for fact in corrections] == [first.id] * 3
    assert len({fact.key for fact in facts(store)}) == 4


def test_a_late_terminate_does_not_replace_a_completion(store):
    put(store, "completion", COMPLETION)
    assert put(store, "terminate", TERMINATE) == ["overruled"]
    completion, terminate = facts(store)
    assert (completion.validity, completion.state) == (Validity.STANDS, State.PENDING)
    assert (terminate.validity, terminate.state) == (Validity.OVERRULED, State.SKIPPED)
    assert [fact.id for fact in claim(store)] == [completion.id]


def test_a_completion_overrules_an_earlier_terminate(store):
    put(store, "terminate", TERMINATE)
    put(store, "completion", COMPLETION)
    terminate, completion = facts(store)  # no correction: nobody has handled it
    assert (terminate.validity, terminate.state) == (Validity.OVERRULED, State.SKIPPED)
    assert completion.validity is Validity.STANDS


@pytest.mark.parametrize("state", [State.HANDLED, State.PENDING])
def test_a_terminate_that_was_handled_and_then_overruled_is_corrected(store, state):
    """A handler may be working on it at this moment: then the correction waits until it has ended."""
    put(store, "terminate", TERMINATE)
    (fact,) = claim(store)
    if state is State.HANDLED:
        settle(store, fact)
    put(store, "completion", COMPLETION)
    put(store, "completion", {**COMPLETION, "Revenue": 75})
    if state is State.PENDING:
        assert claim(store) == []
        settle(store, fact)
    (completion,) = claim(store)
    settle(store, completion)
    (correction,) = claim(store)
    assert (correction.kind, correction.validity) == (Kind.TERMINATE, Validity.OVERRULED)
    assert (correction.corrects, correction.receipts) == (fact.id, 0)
    assert correction.notification == fact.notification
    settle(store, correction, State.DEAD)
    with store.transaction():
        assert store.replay() == 1
    assert [each.kind for each in facts(store)] == ["terminate", "completion", "terminate", "completion"]


def test_a_reconciliation_is_one_fact_and_overrules_nothing(store):
    put(store, "completion", COMPLETION)
    taken_back = {**TERMINATE, "ReconciliationID": 9, "ReconciliationDateTime": "2026-12-01 08:00:00"}
    assert put(store, "terminate", taken_back) == ["new"]
    assert put(store, "completion", {**taken_back, "Revenue": 150}) == ["differs"]
    assert put(store, "completion", {**taken_back, "ReconciliationID": 10}) == ["new"]
    assert put(store, "terminate", TERMINATE) == ["overruled"]
    found = facts(store)
    assert [fact.kind for fact in found] == ["completion", "reconciliation", "reconciliation", "terminate"]
    assert [fact.validity for fact in found] == [*[Validity.STANDS] * 3, Validity.OVERRULED]
    assert found[1].posted_as is Kind.TERMINATE
    assert [fact.kind for fact in claim(store)] == ["completion"]  # in order, for a member
    assert facts(store, kinds=[Kind.RECONCILIATION]) == found[1:3]


def test_a_closing_whose_time_cannot_be_read_closes_and_is_no_repetition(store):
    assert put(store, "survey_closed", {**CLOSED, "DateTime": "soon"}) == ["new"]
    assert put(store, "survey_closed", {**CLOSED, "DateTime": "later"}) == ["new"]
    assert put(store, "survey_closed", {**CLOSED, "DateTime": "soon"}) == ["repeated"]
    assert [fact.anomaly for fact in facts(store)] == ["datetime cannot be read"] * 2


def test_a_quota_closes_without_a_time_but_does_not_open(store):
    unclear = {"UpdateDateTimeUTC": "soon"}
    assert put(store, "quota_status", status(1, is_live=True), at=DAY) == ["new"]
    assert put(store, "quota_status", status(1, is_live=False) | unclear, at=DAY) == ["new"]
    assert put(store, "quota_status", status(1, is_live=False) | unclear, at=DAY + 1) == ["repeated"]
    assert put(store, "quota_status", status(2, is_live=True) | unclear, at=DAY + 2) == ["new"]
    assert [fact.kind for fact in facts(store)] == ["quota_status", "quota_status", None]
    assert [fact.validity for fact in facts(store)][:2] == [Validity.STALE, Validity.STANDS]
    closing = facts(store)[1]
    assert closing.notification.at is None
    assert (
        closing.anomaly
        == "a closing without its time counts from when it came; updatedatetimeutc cannot be read"
    )
    # What the service says later counts again.
    later = {"UpdateDateTimeUTC": "2026-11-22T10:02:00Z"}
    assert put(store, "quota_status", status(1, is_live=True) | later, at=DAY + 90) == ["new"]
    assert facts(store)[1].validity is Validity.STALE


def test_a_closing_without_a_time_counts_again_after_an_opening(store):
    closing = status(1, is_live=False) | {"UpdateDateTimeUTC": None}
    said = []
    for second in (10, 20):
        opening = status(second + 3, is_live=True)
        for fields, late in ((closing, 1), (closing, 2), (opening, 3), (closing, 4), (closing, 5)):
            said += put(store, "quota_status", fields, at=DAY - 60 + second + late + 0.5)
    again = ["new", "new", "repeated"]
    assert said == ["new", "repeated", *again, "repeated", "repeated", *again]
    assert [fact.notification.is_live for fact in facts(store) if fact.validity == "stands"] == [False]
    assert len({fact.key for fact in facts(store)}) == 5


@pytest.mark.parametrize("kind", ["quota_status", "survey_closed"])
def test_a_text_in_place_of_a_time_is_another_closing_on_another_day(store, kind):
    fields = {**CLOSED, "DateTime": "N/A"} if kind == "survey_closed" else status(1, is_live=False)
    fields = {name: "N/A" if "Date" in name else value for name, value in fields.items()}
    days = (DAY, DAY + 60, DAY + 86_400)
    assert [put(store, kind, fields, at=at) for at in days] == [["new"], ["repeated"], ["new"]]


def test_what_came_while_the_clock_was_ahead_does_not_silence_a_quota(store):
    closing = status(1, is_live=False) | {"UpdateDateTimeUTC": None}
    assert put(store, "quota_status", closing, at=DAY + 10 * MONTH) == ["new"]
    assert put(store, "quota_status", status(5, is_live=True), at=DAY) == ["new"]
    assert put(store, "quota_status", status(9, is_live=False), at=DAY) == ["new"]
    assert put(store, "quota_status", status(7, is_live=True), at=DAY) == ["stale"]


MONTH = 30 * 86_400.0


@IN_BOTH_ORDERS
def test_a_completion_with_and_without_its_wave_is_one(store, first, second):
    assert put(store, "completion", first) == ["new"]
    assert put(store, "completion", second) == ["differs"]
    assert put(store, "completion", first) == ["repeated"]
    assert put(store, "completion", {**second, "Revenue": 75}) == ["new"]
    whole, correction = facts(store)
    assert (whole.corrects, correction.corrects) == (None, whole.id)


@IN_BOTH_ORDERS
def test_a_terminate_with_and_without_its_wave_is_overruled(store, first, second):
    first = {name: value for name, value in first.items() if name != "Revenue"}
    assert put(store, "terminate", first) == ["new"]
    (terminate,) = claim(store)
    settle(store, terminate)
    assert put(store, "completion", second) == ["new"]
    assert put(store, "terminate", first) == ["repeated"]
    (completion,) = claim(store)
    assert (completion.kind, completion.corrects) == (Kind.COMPLETION, None)
    settle(store, completion)
    (correction,) = claim(store)
    assert (correction.corrects, correction.validity) == (terminate.id, Validity.OVERRULED)


@IN_BOTH_ORDERS
def test_a_completion_overrules_a_later_terminate_with_or_without_its_wave(store, first, second):
    assert put(store, "completion", first) == ["new"]
    assert put(store, "terminate", {**second, "Revenue": None}) == ["overruled"]


def test_two_quotas_or_two_waves_are_two_ends(store):
    assert put(store, "completion", WITHOUT_WAVE) == ["new"]
    assert put(store, "completion", {**COMPLETION, "QuotaID": 2200, "WaveId": 78}) == ["new"]
    assert put(store, "completion", WITHOUT_WAVE) == ["repeated"]
    assert put(store, "completion", COMPLETION) == ["differs"]
    assert put(store, "completion", {**COMPLETION, "WaveId": 79}) == ["new"]
    assert put(store, "completion", {**WITHOUT_WAVE, "QuotaID": 2200}) == ["differs"]
    assert put(store, "completion", {**COMPLETION, "UniqueCode": "m-2"}) == ["new"]
    assert put(store, "completion", {**WITHOUT_WAVE, "SurveyId": 2402}) == ["new"]
    assert {fact.corrects for fact in facts(store)} == {None}


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_clock_that_is_set_back_makes_facts_due_again(store, is_settled):
    put(store, "completion", COMPLETION, at=MONTH)
    (fact,) = claim(store, "dead", now=MONTH)
    if is_settled:
        settle(store, fact, State.PENDING, "dead", due=MONTH + 600)
    assert [fact.attempts for fact in claim(store, now=10.0)] == [2]
    assert claim(store, now=11.0) == []  # it is ours now


def test_a_lease_that_was_prolonged_by_a_wrong_clock_ends_too(store):
    put(store, "completion", COMPLETION)
    (fact,) = claim(store, "dead", now=10.0)
    with store.transaction():
        store.extend("dead", [fact.id], MONTH + 5)
    assert claim(store, now=16.0, owner="other") == []
    assert len(claim(store, now=15.0)) == 1


def test_a_small_step_of_the_clock_leaves_leases_alone(store):
    put(store, "completion", COMPLETION)
    (fact,) = claim(store, "alive", now=70.0)
    assert claim(store, now=69.0) == []
    assert settle(store, fact, owner="alive")


def test_the_backlog_is_counted_by_kind(store):
    for number in range(3):
        put(store, "completion", {**COMPLETION, "WaveId": number}, at=5.0 + number)
    put(store, "invite", b"?", at=1.0)
    first, *_ = claim(store)
    settle(store, first, State.DEAD)
    backlog = {row.kind: row for row in store.backlog()}
    assert backlog == {
        Kind.COMPLETION: Backlog(kind=Kind.COMPLETION, pending=2, dead=1, oldest_at=6.0),
        None: Backlog(kind=None, pending=1, dead=0, oldest_at=1.0),
    }


def test_a_terminate_of_another_wave_stands(store):
    put(store, "completion", COMPLETION)
    assert put(store, "terminate", {**TERMINATE, "WaveId": 78}) == ["new"]


def test_the_newest_status_of_a_quota_stands(store):
    assert put(store, "quota_status", status(5, is_live=True), at=DAY) == ["new"]
    assert put(store, "quota_status", status(9, is_live=False), at=DAY) == ["new"]
    assert put(store, "quota_status", status(7, is_live=True), at=DAY) == ["stale"]
    assert put(store, "quota_status", status(9, is_live=False), at=DAY) == ["repeated"]
    assert put(store, "quota_status", status(1, is_live=True, quota_id=1101), at=DAY) == ["new"]
    assert [(fact.notification.at.second, fact.validity) for fact in facts(store)] == [
        (5, Validity.STALE),
        (9, Validity.STANDS),
        (7, Validity.STALE),
        (1, Validity.STANDS),
    ]


@pytest.mark.parametrize("first", [True, False])
def test_of_two_statuses_at_the_same_time_the_closed_one_stands(store, first):
    put(store, "quota_status", status(5, is_live=first), at=DAY)
    put(store, "quota_status", status(5, is_live=not first), at=DAY)
    (valid,) = [fact for fact in facts(store) if fact.validity is Validity.STANDS]
    assert not valid.notification.is_live


def test_a_status_of_another_year_does_not_silence_its_quota(store):
    far = {**status(5, is_live=False), "UpdateDateTimeUTC": "2062-11-22T10:00:05Z"}
    assert put(store, "quota_status", far, at=DAY) == ["new"]
    assert put(store, "quota_status", status(9, is_live=True), at=DAY) == ["stale"]
    assert put(store, "quota_status", far, at=DAY + 60) == ["repeated"]
    # An hour later it is as good as any other time.
    later = {**status(9, is_live=True), "UpdateDateTimeUTC": "2026-11-22T11:01:01Z"}
    assert put(store, "quota_status", later, at=DAY + 3_601) == ["new"]
    assert [fact.validity for fact in facts(store)] == [Validity.STALE, Validity.STALE, Validity.STANDS]
    assert facts(store)[0].notification.at.year == 2062  # as it came


def test_other_kinds_are_facts_once(store):
    for kind, fields in (("invite", MEMBER), ("survey_closed", CLOSED), ("terminate", TERMINATE)):
        assert put(store, kind, fields) == ["new"]
        assert put(store, kind, fields) == ["repeated"]
    assert [fact.kind for fact in facts(store)] == ["invite", "survey_closed", "terminate"]


def test_what_is_not_understood_is_kept_whole(store):
    assert put(store, "completion", b"\xffhello") == ["new"]
    assert put(store, "completion", b"\xffhello") == ["repeated"]
    assert put(store, "terminate", b"\xffhello") == ["new"]
    assert put(store, "completion", {"Revenue": 5}) == ["new"]
    garbled, _, nameless = facts(store)
    assert garbled.kind is None
    assert garbled.posted_as is Kind.COMPLETION
    reason = "neither JSON nor XML nor a form"
    assert garbled.notification == UnknownNotification(kind=Kind.COMPLETION, body=b"\xffhello", reason=reason)
    assert claim(store)[0].notification == garbled.notification
    assert nameless.fields == {"Revenue": 5}
    assert "uniquecode is missing" in nameless.notification.reason


def test_facts_are_read_by_kind_place_and_state(store):
    put(store, "completion", COMPLETION)
    put(store, "quota_status", status(1, is_live=True))
    put(store, "invite", b"?")
    assert [fact.kind for fact in facts(store, kinds=[Kind.COMPLETION, None])] == ["completion", None]
    assert [fact.kind for fact in facts(store, after=1)] == ["quota_status", None]
    assert facts(store, state=State.DEAD) == []
    settle(store, claim(store)[0], State.DEAD)
    assert [fact.id for fact in facts(store, state=State.DEAD)] == [1]


def test_many_facts_are_read_in_pages(store):
    put(store, "quota_status", [status(1, is_live=True, quota_id=number) for number in range(1, 801)])
    put(store, "quota_status", [status(1, is_live=True, quota_id=number) for number in range(801, 1601)])
    put(store, "quota_status", [status(1, is_live=True, quota_id=number) for number in range(1601, 2402)])
    assert [fact.notification.quota_id for fact in facts(store)] == list(range(1, 2402))


# --- Leases


def test_a_fact_is_leased_to_one(store):
    put(store, "completion", COMPLETION)
    (fact,) = claim(store)
    assert fact.attempts == 1
    assert claim(store, "another", now=14.9) == []
    (again,) = claim(store, "another", now=15.0)
    assert (again.id, again.attempts) == (fact.id, 2)
    assert not settle(store, fact)
    assert settle(store, again, owner="another")
    assert facts(store)[0].state is State.HANDLED


def test_a_lease_is_prolonged_or_released(store):
    put(store, "completion", COMPLETION)
    (fact,) = claim(store)
    with store.transaction():
        store.extend("me", [fact.id], 100.0)
        store.extend("another", [fact.id], 0.0)
    assert claim(store, now=99.0) == []
    with store.transaction():
        store.release("another")
        store.release("me")
    (again,) = claim(store)
    assert again.attempts == 1


def test_facts_of_a_key_come_one_after_the_other(store):
    put(store, "terminate", TERMINATE)
    put(store, "terminate", {**TERMINATE, "UniqueCode": "m-2"})
    put(store, "completion", COMPLETION)
    put(store, "completion", {**COMPLETION, "Revenue": 75})
    other, first = claim(store)
    assert first.notification.revenue == Decimal("1.5")
    assert other.notification.member_code == "m-2"
    assert claim(store) == []
    settle(store, first, State.PENDING, due=20.0)
    settle(store, other)
    assert claim(store, now=19.0) == []
    (retried,) = claim(store, now=20.0)
    assert retried.id == first.id
    settle(store, retried)
    (second,) = claim(store, now=21.0)
    assert second.notification.revenue == Decimal("0.75")


def test_a_dead_fact_does_not_hold_up_others_and_can_be_replayed(store):
    put(store, "completion", COMPLETION)
    put(store, "completion", {**COMPLETION, "Revenue": 75})
    (first,) = claim(store)
    settle(store, first, State.DEAD)
    (second,) = claim(store)
    assert second.id != first.id
    settle(store, second)
    with store.transaction():
        assert store.replay() == 1
    (again,) = claim(store)
    assert (again.id, again.attempts) == (first.id, 1)
    with store.transaction():
        assert store.replay([second.id, 999]) == 1


def test_kinds_without_a_handler_hold_nobody_up(store):
    put(store, "terminate", TERMINATE)
    put(store, "invite", b"?")
    put(store, "terminate", {**TERMINATE, "UniqueCode": "m-2"})
    put(store, "completion", {**COMPLETION, "UniqueCode": "m-2"})
    assert [fact.kind for fact in claim(store, kinds=[Kind.COMPLETION])] == ["completion"]
    assert [fact.kind for fact in claim(store, kinds=[None])] == [None]


def test_a_fact_that_was_overruled_while_it_was_handled_stays_skipped(store):
    put(store, "terminate", TERMINATE)
    (terminate,) = claim(store)
    put(store, "completion", COMPLETION)
    settle(store, terminate, State.PENDING)
    assert facts(store)[0].state is State.SKIPPED


# --- The file


def test_a_transaction_is_whole_or_not_there(store):
    def stored_then_failed() -> None:
        with store.transaction():
            hit = Receipt(Kind.INVITE, 1.0, b"x")
            received(store, hit)
            raise LookupError

    with pytest.raises(LookupError):
        stored_then_failed()
    assert facts(store) == []
    assert put(store, "invite", b"x") == ["new"]


@pytest.mark.skipif(os.name == "nt", reason="there are no such modes on Windows")
def test_only_its_owner_can_read_the_file(sqlite_store):
    put(sqlite_store, "completion", COMPLETION)
    for path in sqlite_store.path.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_secrets_are_kept(tmp_path):
    path = tmp_path / "n.db"
    made = kept_secrets(path)
    assert set(made) == set(Kind)
    assert len({secret for (secret,) in made.values()}) == len(Kind)
    assert kept_secrets(SqliteStore(path)) == made


@pytest.mark.parametrize("keep", [0, -1, "2", None])
def test_one_secret_at_least_is_kept(tmp_path, keep):
    secrets = kept_secrets(tmp_path / "n.db")
    with pytest.raises(InvalidRequestError, match="keep must be a whole number of at least 1"):
        rotate_secrets(tmp_path / "n.db", keep=keep)
    assert kept_secrets(tmp_path / "n.db") == secrets


def test_rotated_secrets_stand_before_the_old_ones(tmp_path):
    path = tmp_path / "n.db"
    old = kept_secrets(path)
    new = rotate_secrets(path)
    assert all(new[kind][1:] == old[kind] for kind in Kind)
    newest = rotate_secrets(path)
    assert all(newest[kind][1] == new[kind][0] and len(newest[kind]) == 2 for kind in Kind)
    assert kept_secrets(path) == newest


def test_a_file_of_something_else_is_refused_and_not_touched(tmp_path):
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE things (a)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="database of something else"):
        SqliteStore(path).open()
    assert path.read_bytes() == before
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match="cannot be opened: file is not a database"):
        SqliteStore(path).open()


@pytest.mark.parametrize(
    ("form", "reason"),
    [(99, "made by a newer version"), (-3, r"n\.db says that its form is -3, .* bring back a copy")],
)
def test_a_form_that_is_not_known_is_refused(tmp_path, form, reason):
    path = tmp_path / "n.db"
    kept_secrets(path)
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version = {form}")
    database.close()
    with pytest.raises(StoreError, match=reason):
        SqliteStore(path).open()


def test_a_store_that_cannot_be_opened_says_why(tmp_path):
    with pytest.raises(StoreError, match="cannot be opened: No such file"):
        SqliteStore(tmp_path / "no" / "n.db").open()
    with pytest.raises(StoreError, match="cannot be read"):
        facts(SqliteStore(tmp_path / "no.db"))
    assert not (tmp_path / "no.db").exists()


def test_a_closed_store_says_so(store):
    store.close()
    with pytest.raises(StoreError, match="is not open"), store.transaction():
        pass


def test_a_full_disk_is_an_error_and_then_it_is_not(sqlite_store):
    put(sqlite_store, "completion", COMPLETION)
    database = sqlite_store._open
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match="full"):
        for number in range(200):
            put(sqlite_store, "completion", {**COMPLETION, "UniqueCode": f"m-{number}", "SurveyRef": "x" * 900})
    kept = len(facts(sqlite_store))
    database.execute("PRAGMA max_page_count = 1000000")
    assert put(sqlite_store, "completion", {**COMPLETION, "UniqueCode": "new"}) == ["new"]
    assert len(facts(sqlite_store)) == kept + 1


def test_two_stores_share_a_database(store):
    another = store.copy()
    another.open()
    try:
        assert put(another, "completion", COMPLETION) == ["new"]
        assert put(store, "completion", COMPLETION) == ["repeated"]
        assert len(claim(another, "b")) == 1
        assert claim(store, "a") == []
    finally:
        another.close()


def odd_hits(seed: int) -> list[Hit]:
    """Return hits that have much to do with one another, and some that have not."""
    rng = random.Random(seed)

    def fields() -> tuple[str, object]:
        member = {**MEMBER, "UniqueCode": f"m-{rng.randrange(4)}", "SurveyId": rng.choice([1, 2])}
        member |= {"WaveId": rng.choice([0, 77, 78, None]), "QuotaID": rng.choice([1, 2, None])}
        return rng.choice(
            [
                ("completion", {**member, "Revenue": rng.choice([100, 200])}),
                ("terminate", {**member, "Reason": rng.choice(["A", "B"])}),
                ("terminate", {**member, "ReconciliationID": rng.randrange(3)}),
                ("invite", member),
                (
                    "quota_status",
                    status(rng.randrange(9), is_live=rng.random() < 0.5, quota_id=rng.randrange(3)),
                ),
                ("survey_closed", {**CLOSED, "WaveId": rng.choice([1, 2])}),
                ("invite", b"?%d" % rng.randrange(3)),
                ("completion", {**COMPLETION, "UniqueCode": f"new-{rng.random()}"}),
            ]
        )

    hits = []
    for number in range(300):
        kind, posted = fields()
        if not isinstance(posted, bytes) and rng.random() < 0.2:
            posted = [posted, {**posted, "UniqueCode": "in-a-list"}, posted]
        receipt = Receipt(Kind(kind), DAY + number, encoded(posted), "", [("host", "x")], PEER)
        hits.append(Hit(receipt, list(entries_of(receipt)), "refused" if rng.random() < 0.1 else ""))
    return hits


@pytest.mark.parametrize("seed", range(8))
def test_hits_that_are_stored_together_become_what_they_become_one_by_one(new_address, seed):
    hits = odd_hits(seed)
    tables = []
    for is_together in (True, False):
        opened = store_of(new_address())
        opened.open()
        settling, begin = random.Random(seed), 0
        while begin < len(hits):
            group = hits[begin : begin + settling.randrange(1, 70)]
            with opened.transaction():
                if is_together:
                    opened.receive_all(group)
                else:
                    for hit in group:
                        opened.receive_all([hit])
            # Handlers have some of the facts, and are done with others.
            for fact in claim(opened, now=DAY + 1_000 + begin, lease=50.0):
                if settling.random() < 0.5:
                    settle(opened, fact)
            begin += len(group)
        with opened.transaction():
            tables.append(
                [opened.execute(f"SELECT * FROM {name} ORDER BY id") for name in ("facts", "receipts")]
            )
        opened.close()
    assert tables[0] == tables[1]
    assert len(tables[0][0]) > 100
    assert len(tables[0][1]) == 300


def test_a_hit_that_cannot_be_stored_leaves_nothing_of_its_group(sqlite_store):
    sqlite_store._open.execute(
        "CREATE TRIGGER bad BEFORE INSERT ON facts WHEN new.member = '\"m-7\"'"
        " BEGIN SELECT RAISE(FAIL, 'bad'); END"
    )
    receipts = [
        Receipt(Kind.COMPLETION, DAY, encoded({**COMPLETION, "UniqueCode": f"m-{number}"}))
        for number in range(9)
    ]
    with pytest.raises(StoreError, match="bad"), sqlite_store.transaction():
        sqlite_store.receive_all([Hit(receipt, list(entries_of(receipt))) for receipt in receipts])
    assert facts(sqlite_store) == []
    assert sqlite_store._open.execute("SELECT count(*) FROM receipts").fetchone() == (0,)


def test_a_file_whose_index_of_standing_facts_has_all_of_them_is_read_on(sqlite_store):
    """Files made by versions before have such an index."""
    put(sqlite_store, "quota_status", status(1, is_live=True))
    sqlite_store._open.execute("DROP INDEX facts_standing")
    sqlite_store._open.execute("CREATE INDEX facts_standing ON facts (key, rank) WHERE standing = 'stands'")
    assert put(sqlite_store, "quota_status", status(2, is_live=False)) == ["new"]
    assert put(sqlite_store, "quota_status", status(0, is_live=True)) == ["stale"]
    assert [fact.validity for fact in facts(sqlite_store)] == ["stale", "stands", "stale"]


def test_receipts_are_pruned_and_facts_stay(store):
    put(store, "completion", COMPLETION, at=DAY)
    put(store, "completion", COMPLETION, at=DAY + 1)
    put(store, "completion", b"no form", at=DAY)
    for number in range(1_500):
        put(store, "invite", {**MEMBER, "UniqueCode": f"m-{number}"}, at=DAY)
    put(store, "terminate", {**TERMINATE, "WaveId": 78}, at=DAY + 3_600)
    before = datetime.fromtimestamp(DAY, UTC) + timedelta(hours=1)
    with pytest.raises(InvalidRequestError, match="before is a datetime with a time zone"):
        store.prune(before.replace(tzinfo=None))
    assert store.prune(before) == 1_502
    assert store.prune(before) == 0
    with store.transaction():
        kept = store.execute("SELECT posted_as, at FROM receipts ORDER BY id")
    assert kept == [("completion", DAY), ("terminate", DAY + 3_600)]
    assert [fact.notification.body for fact in facts(store, kinds=[None])] == [b"no form"]
    assert len(facts(store)) == 1_503
    # A late repetition is one.
    assert put(store, "completion", COMPLETION, at=DAY + 7_200) == ["repeated"]


def test_a_store_that_cannot_be_pruned_says_why(tmp_path):
    with pytest.raises(StoreError, match="cannot be pruned"):
        SqliteStore(tmp_path / "no.db").prune(datetime.now(UTC))


def test_a_check_for_writing_changes_nothing(store):
    put(store, "completion", COMPLETION)
    in_transaction(store, lambda each: each.check_writable())
    assert [fact.receipts for fact in facts(store)] == [1]


def test_what_was_stored_is_there_when_the_store_is_opened_again(store):
    put(store, "completion", COMPLETION)
    settle(store, claim(store)[0])
    with store.transaction():
        secrets = store.secrets({kind: f"secret of {kind}" for kind in Kind})
    store.close()
    store.open()
    assert [fact.state for fact in facts(store)] == [State.HANDLED]
    with store.transaction():
        assert store.secrets(dict.fromkeys(Kind, "another")) == secrets


def test_a_hit_may_have_any_number_of_entries(store):
    """A list of notifications gives a fact each; a refused hit has none, and only its receipt is kept."""
    several = [{**COMPLETION, "UniqueCode": f"m-{number}"} for number in range(70)]
    assert put(store, "completion", [*several, several[0], {"x": 1}]) == [*["new"] * 70, "repeated", "new"]
    with store.transaction():
        assert store.receive_all([Hit(Receipt(Kind.COMPLETION, DAY, b"?"), (), "refused")]) == [[]]
    assert len(facts(store)) == 71


def test_any_text_can_be_stored(store):
    """Member codes and fields may hold zeros, line ends and other characters, and be long."""
    codes = ["\0", "a\n", "'; DROP TABLE facts; --", "%s", "😀" * 400]
    for code in codes:
        fields = {**COMPLETION, "UniqueCode": code}
        assert put(store, "completion", {**fields, "SurveyRef": code * 999}) == ["new"]
        assert put(store, "completion", fields) == ["differs"]
    assert [fact.notification.member_code for fact in facts(store)] == codes
    assert put(store, "terminate", {**TERMINATE, "UniqueCode": "\ud800"}) == ["new"]


def test_at_most_so_many_are_leased_and_of_these_kinds(store):
    """`only` leases some of the `kinds`; facts of all of them keep the order of their keys."""
    for number in range(5):
        put(store, "completion", {**COMPLETION, "UniqueCode": f"m-{number}"})
    put(store, "terminate", {**TERMINATE, "UniqueCode": "m-0", "ReconciliationID": 9})
    put(store, "invite", b"?")
    with store.transaction():
        for kinds, only, found in (
            ((*Kind, None), [Kind.RECONCILIATION, None], [None]),
            ([Kind.RECONCILIATION], None, [Kind.RECONCILIATION]),
        ):
            claimed = store.claim("a", kinds, DAY, DAY + 5, 9, **({} if only is None else {"only": only}))
            assert [fact.kind for fact in claimed] == found
        assert len(store.claim("a", (*Kind, None), DAY, DAY + 5, 2)) == 2


def test_an_attempt_that_asked_for_time_does_not_count(store):
    put(store, "completion", COMPLETION)
    (fact,) = claim(store)
    with store.transaction():
        store.settle("me", Settled(fact_id=fact.id, state=State.PENDING, due=0.0, counts=False))
    assert [again.attempts for again in claim(store)] == [1]


def test_new_secrets_stand_before_old_ones(store):
    """`secrets` keeps what is there; `rotate` adds, and keeps the newest of each kind."""
    with store.transaction():
        assert store.secrets({}) == {}
        assert store.secrets({Kind.INVITE: "a"}) == {Kind.INVITE: ["a"]}
        for secret in ("b", "c"):
            store.rotate({Kind.INVITE: secret}, keep=2)
        assert store.secrets({Kind.INVITE: "d"}) == {Kind.INVITE: ["c", "b"]}


# --- Several processes


AT_ONCE, EACH = 4, 25


def work_at_once(store, work) -> None:
    """Work in threads that have stores over one database, the last of them in this one."""

    def run(place: int) -> None:
        with closing(store.copy()) as another:
            another.open()
            work(another, place)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        others = [threads.submit(run, place) for place in range(AT_ONCE - 1)]
        work(store, AT_ONCE - 1)
        for other in others:
            other.result()


def test_the_same_notification_is_one_fact_whoever_received_it(store):
    def receive(store, _place) -> None:
        for number in range(EACH):
            put(store, "completion", {**COMPLETION, "UniqueCode": f"m-{number}"})

    work_at_once(store, receive)
    assert [fact.receipts for fact in facts(store)] == [AT_ONCE] * EACH


def test_whoever_reads_on_after_an_id_misses_nothing(store):
    """A fact that can be read later never has a lower ID: others may have read on after that."""
    seen = []

    def receive(store, place) -> None:
        for number in range(EACH):
            if place:
                put(store, "completion", {**COMPLETION, "UniqueCode": f"m-{place}-{number}"})
            else:
                seen.extend(fact.id for fact in store.facts(after=seen[-1] if seen else 0))

    work_at_once(store, receive)
    seen += [fact.id for fact in store.facts(after=seen[-1] if seen else 0)]
    assert seen == [fact.id for fact in facts(store)]


def test_each_fact_is_handled_once_and_in_the_order_of_its_key(store):
    handled = []

    def handle_some(store, owner) -> bool:
        claimed = claim(store, owner, now=DAY)
        for fact in claimed:
            handled.append((fact.notification.member_code, fact.id))
            settle(store, fact, owner=owner)
        return bool(claimed)

    def handle(store, place) -> None:
        put(store, "completion", {**COMPLETION, "Revenue": place})
        for number in range(EACH):
            put(store, "completion", {**COMPLETION, "UniqueCode": f"m-{number}", "Revenue": place})
            handle_some(store, f"owner {place}")

    work_at_once(store, handle)
    while handle_some(store, "me"):
        pass
    assert sorted(number for _, number in handled) == [fact.id for fact in facts(store)]
    for code, _ in handled:
        of_member = [number for member, number in handled if member == code]
        assert of_member == sorted(of_member)


# --- Keys


def keys_of(store, hits):
    with store.transaction():
        store.receive_all(hits)
    return [fact.key for fact in facts(store)]


@pytest.mark.parametrize("seed", range(4))
def test_keys_are_one_for_each_fact_and_the_same_in_every_store(new_address, tmp_path, seed):
    """Also if handlers have seen some facts, and if the hits come a second time, as after a restore."""
    hits, found = odd_hits(seed), []
    for address in (new_address(), new_address(), tmp_path / "another.db"):
        with closing(store_of(address)) as opened:
            opened.open()
            keys_of(opened, hits[:150])
            for fact in claim(opened, now=DAY + 1_000):
                settle(opened, fact)
            keys_of(opened, hits)
            found.append(keys_of(opened, hits))
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == len(found[0]) > 100
    assert all(re.fullmatch(r"[0-9a-f]{32}(-overruled)?", key) for key in found[0])


def test_an_end_that_is_moved_into_its_wave_keeps_its_key(store):
    put(store, "terminate", {**WITHOUT_WAVE, "Revenue": None})
    (terminate,) = claim(store)
    settle(store, terminate)
    put(store, "completion", COMPLETION)
    (completion,) = claim(store)
    settle(store, completion)
    (correction,) = claim(store)
    moved = facts(store)[0]
    assert (moved.id, moved.key) == (terminate.id, terminate.key)
    assert correction.key == f"{terminate.key}-overruled"


def test_ends_of_two_quotas_that_come_without_their_wave_have_two_keys(store):
    """The first is moved into its wave; then the second has the identity that the first one had."""
    for fields in (WITHOUT_WAVE, COMPLETION, {**WITHOUT_WAVE, "QuotaID": 2200}, {**COMPLETION, "WaveId": 0}):
        put(store, "completion", fields)
    assert len({fact.key for fact in facts(store)}) == len(facts(store)) == 2


def test_the_key_of_a_fact_does_not_depend_on_what_came_before(new_address):
    found = []
    for order in ((COMPLETION, TERMINATE), (TERMINATE, COMPLETION)):
        with closing(store_of(new_address())) as opened:
            opened.open()
            for fields in order:
                put(opened, "terminate" if "Reason" in fields else "completion", fields)
            found.append({fact.kind: fact.key for fact in facts(opened)})
    assert found[0] == found[1]


def test_the_key_shows_no_member(store):
    put(store, "completion", {**COMPLETION, "UniqueCode": "abcdef"})
    assert "abcdef" not in facts(store)[0].key


@pytest.mark.parametrize("code", ["\U0001f600" * 190, "\\" * 1_000, '"' * 1_000, "\x7f" * 5_000])
def test_what_is_indexed_is_bounded_for_any_member_code(store, code):
    """PostgreSQL's indexes take at most 2,700 bytes."""
    taken_back = {**TERMINATE, "UniqueCode": code, "ReconciliationID": "\u00e4" * 2_000}
    receipt = Receipt(Kind.TERMINATE, DAY, encoded(taken_back))
    (entry,) = entries_of(receipt)
    assert max(len(entry.key), len(entry.identity)) < 2_700
    assert put(store, "terminate", taken_back) == ["new"]
    assert put(store, "terminate", taken_back) == ["repeated"]


# --- A value that nobody has written

READINGS = {
    "facts": lambda store: list(store.facts()),
    "backlog": lambda store: store.backlog(),
    "rows": lambda store: list(OutcomeLedger(store).read_rows()),
    "history": lambda store: run_once(store.copy(), partial(abandon, member_code="m-1", owners=(), now=2.0)),
    "secrets": lambda store: in_transaction(store, lambda each: each.secrets({})),
}


@pytest.mark.parametrize(
    ("table", "column", "value", "reading"),
    [
        ("facts", "kind", "completed", "facts"),
        ("facts", "posted_as", "", "facts"),
        ("facts", "state", "pend", "facts"),
        ("facts", "standing", "stays", "facts"),
        ("facts", "at", "yesterday", "facts"),
        ("facts", "at", "yesterday", "backlog"),
        ("facts", "at", "", "backlog"),
        ("facts", "fields", "[1]", "facts"),
        ("facts", "fields", '{"UniqueCode": ', "facts"),
        ("facts", "label", "[", "rows"),
        ("invites", "member", "m-1", "rows"),
        ("invites", "member", "5", "rows"),
        ("invites", "survey", "a survey", "rows"),
        ("invites", "invited", "now", "rows"),
        ("links", "until", "later", "history"),
        ("links", "survey", "a survey", "history"),
        ("links", "asked", "noon", "history"),
        ("secrets", "kind", "completed", "secrets"),
    ],
)
def test_a_value_that_no_inbox_writes_is_a_damaged_store(sqlite_store, table, column, value, reading):
    put(sqlite_store, "terminate", TERMINATE)
    made, unknown = RecordedInvite("m-1", 1100, 2401, 77, 1.0), PossibleInvite("m-1", 1101, 2402, 77, 0.5)
    record(sqlite_store, [made], [unknown], now=1.0)
    with sqlite_store.transaction():
        sqlite_store.secrets({Kind.COMPLETION: "s"})
        sqlite_store.run("UPDATE links SET state = 'refused', code = 36")
    READINGS[reading](sqlite_store)
    with sqlite_store.transaction():
        sqlite_store.run(f"UPDATE {table} SET {column} = ?", (value,))
    with pytest.raises(StoreError) as caught:
        READINGS[reading](sqlite_store)
    said = f"the store {sqlite_store.path} is damaged: it holds a value that no inbox writes; use a backup"
    where = "; it is in fact 1, and after=1 reads on behind it" if reading == "facts" else ""
    assert str(caught.value) == said + where
    assert caught.value.permanent


@pytest.mark.parametrize(("column", "value"), [("fields", "{"), ("at", "noon"), ("posted_as", "")])
def test_a_damaged_fact_is_dead_and_keeps_no_others_waiting(sqlite_store, caplog, column, value):
    for number in range(3):
        put(sqlite_store, "completion", {**COMPLETION, "UniqueCode": f"m-{number}"})
    with sqlite_store.transaction():
        sqlite_store.run(f"UPDATE facts SET {column} = ? WHERE id = 2", (value,))
    assert [fact.id for fact in claim(sqlite_store)] == [1, 3]
    assert "fact 2" in caplog.text
    assert claim(sqlite_store, now=100.0, owner="other", kinds=[Kind.COMPLETION])[0].id == 1
    rows = sqlite_store._open.execute("SELECT id, state FROM facts WHERE error LIKE '%is damaged%'").fetchall()
    assert rows == [(2, "dead")]


async def test_what_stands_before_and_behind_a_damaged_fact_can_be_read(tmp_path):
    async with Inbox(tmp_path / "n.db", secrets=SECRET) as inbox:
        for number in range(4):
            await post(inbox, "completion", {**COMPLETION, "UniqueCode": f"m-{number}"})
        run_once(store_of(tmp_path / "n.db"), lambda store: store.run("UPDATE facts SET at = 'x' WHERE id = 3"))
        found, stream = [], inbox.facts()
        with pytest.raises(StoreError, match="it is in fact 3, and after=3 reads on behind it"):
            async for fact in stream:
                found.append(fact.id)
        assert found == [1, 2]
        assert [fact.id async for fact in inbox.facts(after=3)] == [4]


def test_damaged_rows_are_left_out_of_the_histories_of_all_members(sqlite_store):
    record(
        sqlite_store, [], [PossibleInvite(f"m-{number}", 1101, 2402, 77, 0.5) for number in range(3)], now=1.0
    )
    with sqlite_store.transaction():
        sqlite_store.run("UPDATE links SET survey = 'a survey' WHERE member = ?", ('"m-1"',))
    histories, damaged = Changes(sqlite_store).all(0.0, 2.0)
    assert (len(histories), damaged) == (2, 1)
