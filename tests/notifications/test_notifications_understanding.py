"""Notifications as records: any spelling of names, and values that are never guessed."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_kit import CLOSED, COMPLETION, MEMBER, TERMINATE, status

from sampling_async.notifications import (
    Completion,
    InviteNotification,
    Kind,
    QuotaStatus,
    Reconciliation,
    SurveyClosed,
    Terminate,
)
from sampling_async.notifications._bodies import NotUnderstoodError
from sampling_async.notifications._understanding import FieldReader, kind_of_fields, parse

AT = datetime(2026, 11, 22, 10, 0, tzinfo=UTC)


def read(kind, fields):
    return parse(Kind(kind), FieldReader(fields))


def test_a_completion_as_services_send_it():
    assert read("completion", {**COMPLETION, "IsAutoRouted": "true", "OriginalSurveyID": 3}) == Completion(
        member_code="m-1",
        survey_id=2401,
        wave_id=77,
        revenue=Decimal("1.50"),
        at=AT,
        quota_id=1100,
        survey_ref="S-2401",
        additional_data="invite=1&quota=1100",
        is_auto_routed=True,
        original_survey_id=3,
    )


def test_a_terminate_as_services_send_it():
    assert read("terminate", {**TERMINATE, "RejectionID": 4, "RejectionName": "AGE"}) == Terminate(
        member_code="m-1",
        survey_id=2401,
        wave_id=77,
        reason="SCREENED_OUT",
        at=AT,
        quota_id=1100,
        survey_ref="S-2401",
        additional_data="invite=1&quota=1100",
        rejection_id=4,
        rejection_name="AGE",
    )


def test_a_closed_survey_and_a_quota_status_as_services_send_them():
    closed = SurveyClosed(survey_id=2401, wave_id=77, survey_ref="S-2401", at=AT)
    assert read("survey_closed", CLOSED) == closed
    at = AT + timedelta(seconds=5, microseconds=123456)
    live = QuotaStatus(quota_id=1100, is_live=True, at=at, survey_id=2401, wave_id=77)
    assert read("quota_status", status(5, is_live=True)) == live


def test_an_invite_names_a_member_and_what_the_member_is_invited_to():
    assert read("invite", MEMBER).quota_id == 1100
    assert read("invite", {"MemberCode": 5, "quota_id": "9"}) == InviteNotification(member_code="5", quota_id=9)
    with pytest.raises(NotUnderstoodError, match="neither a survey nor a quota"):
        read("invite", {"UniqueCode": "m"})


SPELLINGS = [str.lower, str.upper, "_".join, lambda name: name.replace("I", "-i")]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("completion", COMPLETION),
        ("terminate", TERMINATE),
        ("survey_closed", CLOSED),
        ("quota_status", status(1, is_live=False)),
        ("invite", MEMBER),
    ],
)
def test_any_spelling_is_the_same(kind, fields, spelling):
    respelled = {spelling(name): value for name, value in fields.items()}
    assert read(kind, respelled) == read(kind, fields)
    assert FieldReader(respelled).digest() == FieldReader(fields).digest()


def test_values_as_texts_are_the_same():
    for kind, fields in (("completion", COMPLETION), ("quota_status", status(1, is_live=True))):
        texts = {name: str(value) for name, value in fields.items()}
        assert read(kind, texts) == read(kind, fields)
        assert FieldReader(texts).digest() == FieldReader(fields).digest()


def test_the_digest_sees_every_other_value_but_the_signature():
    plain = FieldReader(COMPLETION).digest()
    assert FieldReader({**COMPLETION, "EncryptedValue": "00"}).digest() == plain
    for name in COMPLETION:
        assert FieldReader({**COMPLETION, name: "9"}).digest() != plain


@pytest.mark.parametrize(
    ("revenue", "expected"),
    [(150, "1.50"), ("150", "1.50"), (150.0, "1.50"), ("150.00", "1.50"), (0, "0.00"), (-150, "-1.50")],
)
def test_revenue_is_hundredths(revenue, expected):
    assert str(read("completion", {**COMPLETION, "Revenue": revenue}).revenue) == expected


@pytest.mark.parametrize("revenue", [1.5, "1.50", "1,50", "", None, True, "x", [1], 1e300, 10**400, "9" * 20])
def test_revenue_is_never_guessed(revenue):
    with pytest.raises(NotUnderstoodError, match="revenue"):
        read("completion", {**COMPLETION, "Revenue": revenue})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("UniqueCode", "SurveyId", "Revenue")
            for value in (None, "", [], {"a": 1})
        ),
        *(("WaveId", value) for value in ([], {"a": 1}, "x", -1)),
    ],
)
def test_what_makes_a_completion_is_needed(name, value):
    with pytest.raises(NotUnderstoodError, match=name.lower()):
        read("completion", {**COMPLETION, name: value})


@pytest.mark.parametrize("live", ["maybe", 2, None, 1.0, []])
def test_a_quota_is_live_or_not(live):
    with pytest.raises(NotUnderstoodError, match="islive"):
        read("quota_status", {**status(1, is_live=True), "IsLive": live})


@pytest.mark.parametrize("moment", ["yesterday", 5, None, "2026-13-01 00:00:00", "9999999-01-01", "/Date(x)/"])
def test_a_quota_status_has_a_time(moment):
    with pytest.raises(NotUnderstoodError, match="updatedatetimeutc"):
        read("quota_status", {**status(1, is_live=True), "UpdateDateTimeUTC": moment})


@pytest.mark.parametrize(
    "moment",
    [
        "2026-11-22T12:00:00+02:00",
        " 2026-11-22 10:00 ",
        "/Date(1795341600000)/",
        "/Date(1795341600000+0200)/",
        "2026-11-22 12:00:00.0000000 +0200",
        "2026-11-22 10:00:00.  00:00",  # from a form in which the plus was not escaped
    ],
)
def test_times_are_utc_unless_they_have_a_zone(moment):
    assert read("quota_status", {**status(1, is_live=True), "UpdateDateTimeUTC": moment}).at == AT


def test_a_time_that_cannot_be_read_is_left_out_where_it_is_not_needed():
    assert read("completion", {**COMPLETION, "DateTime": "soon"}).at is None


@pytest.mark.parametrize("fraction", ["", ".", ".99", ".990", ".9900", ".99000", ".990000", ".9900000"])
@pytest.mark.parametrize("zone", ["", "Z", " Z", "+00:00", " +00:00", " +0000", "-00:00"])
@pytest.mark.parametrize("between", ["T", " "])
def test_every_form_of_the_inventory_is_a_time(between, fraction, zone):
    moment = f"2026-11-26{between}19:58:42{fraction}{zone}"
    at = read("quota_status", {**status(1, is_live=False), "UpdateDateTimeUTC": moment}).at
    assert at == datetime(2026, 11, 26, 19, 58, 42, 990_000 if "9" in fraction else 0, UTC)
    assert read("survey_closed", {**CLOSED, "DateTime": moment}).at == at


@pytest.mark.parametrize("moment", ["soon", 5, "26/11/2026 19:58"])
def test_a_time_that_cannot_be_read_is_an_anomaly(moment):
    for kind, fields, name in (
        ("completion", COMPLETION, "DateTime"),
        ("survey_closed", CLOSED, "DateTime"),
        ("quota_status", status(1, is_live=False), "UpdateDateTimeUTC"),
    ):
        named = FieldReader({**fields, name: moment})
        assert parse(Kind(kind), named).at is None
        assert f"{name.lower()} cannot be read" in named.anomaly
    assert anomaly_of("completion", COMPLETION) is None


def test_a_revenue_below_0_is_an_anomaly():
    below = {**COMPLETION, "Revenue": -100}
    assert read("completion", below).revenue == Decimal(-1)
    assert anomaly_of("completion", below).startswith("the revenue is below 0")


def anomaly_of(kind, fields):
    named = FieldReader(fields)
    parse(Kind(kind), named)
    return named.anomaly


@pytest.mark.parametrize("wave", [{}, {"WaveId": None}, {"WaveId": ""}])
@pytest.mark.parametrize(("kind", "fields"), [("completion", COMPLETION), ("terminate", TERMINATE)])
def test_without_a_wave_it_is_wave_0(kind, fields, wave):
    fields = {name: value for name, value in fields.items() if name != "WaveId"} | wave
    assert read(kind, fields).wave_id == 0
    assert anomaly_of(kind, fields) == "there is no WaveId: it counts as wave 0"
    assert anomaly_of(kind, {**fields, "WaveId": 0}) is None


RECONCILIATION = {
    **MEMBER,
    "Revenue": -150,
    "Reason": "FRAUD",
    "ReconciliationID": 9,
    "ReconciliationDateTime": "2026-12-01 08:00:00",
}


def test_a_reconciliation_takes_money_back():
    assert read("reconciliation", RECONCILIATION) == Reconciliation(
        member_code="m-1",
        survey_id=2401,
        wave_id=77,
        reconciliation_id="9",
        amount=Decimal("1.50"),
        reason="FRAUD",
        at=datetime(2026, 12, 1, 8, tzinfo=UTC),
        quota_id=1100,
        survey_ref="S-2401",
        additional_data="invite=1&quota=1100",
    )
    assert read("reconciliation", {**MEMBER, "reconciliation_id": "r-9"}).amount is None
    with pytest.raises(NotUnderstoodError, match="reconciliationid"):
        read("reconciliation", {**RECONCILIATION, "ReconciliationID": ["9"]})


@pytest.mark.parametrize("amount", ["0.50", 0.5, "50 cents", "1,50", True, [50], 1e300])
@pytest.mark.parametrize("name", ["Revenue", "Amount", "ReconciliationAmount"])
def test_what_is_taken_back_is_never_guessed(name, amount):
    with pytest.raises(NotUnderstoodError, match=f"{name.lower()} is no hundredths"):
        read("reconciliation", {**MEMBER, "ReconciliationID": 1, name: amount})
    if name != "Revenue":
        with pytest.raises(NotUnderstoodError, match=f"{name.lower()} is no hundredths"):
            read("reconciliation", {**RECONCILIATION, name: amount})


@pytest.mark.parametrize("posted_as", ["invite", "completion", "terminate"])
def test_a_reconciliation_comes_to_any_url_of_members(posted_as):
    assert kind_of_fields(Kind(posted_as), FieldReader(RECONCILIATION)) is Kind.RECONCILIATION
    only_time = {**RECONCILIATION, "ReconciliationID": None}
    assert kind_of_fields(Kind(posted_as), FieldReader(only_time)) is Kind.RECONCILIATION


NO_IDS = [
    *(None, "", " ", 0, "0", 0.0, "0.0", -1, "-1", -5.0, False, "false", "null", "NULL", "(null)", "None"),
    *("n/a", "-"),
    *("00000000-0000-0000-0000-000000000000", "{00000000-0000-0000-0000-000000000000}"),
]
NO_TIMES = [
    *(
        None,
        "",
        0,
        "null",
        False,
        "0001-01-01T00:00:00",
        "0001-01-01",
        "1/1/0001 12:00:00 AM",
        "01/01/0001 00:00:00",
    ),
    *("1900-01-01T00:00:00", "1900-01-01 00:00:00.000", "1753-01-01", "1970-01-01T00:00:00Z", "1/1/1900"),
    *("/Date(-62135596800000)/", "9999-12-31T23:59:59.9999999", "0000-00-00 00:00:00"),
]


@pytest.mark.parametrize("kind", ["invite", "completion", "terminate"])
@pytest.mark.parametrize("no_id", NO_IDS)
def test_a_field_without_a_value_makes_no_reconciliation(no_id, kind):
    for no_time in NO_TIMES:
        fields = {**COMPLETION, "ReconciliationID": no_id, "ReconciliationDateTime": no_time}
        assert kind_of_fields(Kind(kind), FieldReader(fields)) is Kind(kind)
    assert kind_of_fields(Kind.QUOTA_STATUS, FieldReader(RECONCILIATION)) is Kind.QUOTA_STATUS


@pytest.mark.parametrize("number", [1, "1", 9.0, "007", "r-9", "0f8fad5b-d9cb-469f-a165-70867728950e", 10**15])
def test_a_real_id_makes_a_reconciliation(number):
    fields = {**COMPLETION, "ReconciliationID": number, "ReconciliationDateTime": "0001-01-01T00:00:00"}
    assert kind_of_fields(Kind.COMPLETION, FieldReader(fields)) is Kind.RECONCILIATION
    assert read("reconciliation", fields).reconciliation_id == ("9" if number == 9 else str(number))


@pytest.mark.parametrize("no_id", NO_IDS)
def test_a_time_alone_does_not_take_a_completion_away(no_id):
    fields = {**COMPLETION, "ReconciliationID": no_id, "ReconciliationDateTime": "2026-12-01 08:00:00"}
    assert kind_of_fields(Kind.COMPLETION, FieldReader(fields)) is Kind.COMPLETION
    assert "it counts as a completion" in anomaly_of("completion", fields)


@pytest.mark.parametrize("odd", [{"ReconciliationDateTime": "2026-12-01 08:00:00"}, {"ReconciliationID": [9]}])
def test_a_completion_that_is_half_a_reconciliation_is_odd(odd):
    fields = {**COMPLETION, **odd}
    assert kind_of_fields(Kind.COMPLETION, FieldReader(fields)) is Kind.COMPLETION
    assert read("completion", fields).revenue == Decimal("1.5")
    assert "reconciliation" in anomaly_of("completion", fields)


@pytest.mark.parametrize("kind", ["invite", "completion", "terminate"])
def test_a_reconciliation_without_an_id_is_known_by_its_time(kind):
    fields = {**MEMBER, "ReconciliationID": 0, "ReconciliationDateTime": "2026-12-01 08:00:00"}
    assert kind_of_fields(Kind(kind), FieldReader(fields)) is Kind.RECONCILIATION
    known_by = read("reconciliation", fields).reconciliation_id
    respelled = {**fields, "ReconciliationDateTime": "2026-12-01T08:00:00.000Z"}
    assert read("reconciliation", respelled).reconciliation_id == known_by
    american = {**fields, "ReconciliationDateTime": "12/1/2026 8:00:00 AM"}
    assert kind_of_fields(Kind(kind), FieldReader(american)) is Kind.RECONCILIATION
    assert read("reconciliation", american).reconciliation_id == "12/1/2026 8:00:00 AM"
    with pytest.raises(NotUnderstoodError, match="reconciliationid"):
        read("reconciliation", MEMBER)


def test_a_survey_that_is_not_closed_is_not_understood():
    with pytest.raises(NotUnderstoodError, match="not Closed"):
        read("survey_closed", {**CLOSED, "Status": "Open"})
    assert read("survey_closed", {"SurveyID": 1, "status": "CLOSED"}) == SurveyClosed(survey_id=1)


def test_two_spellings_with_two_values_are_not_understood():
    with pytest.raises(NotUnderstoodError, match="two spellings"):
        read("completion", {**COMPLETION, "revenue": 900})
    assert read("completion", {**COMPLETION, "revenue": 150}).revenue == Decimal("1.5")


def test_a_member_code_is_taken_as_it_is():
    assert read("completion", {**COMPLETION, "UniqueCode": " m 1 "}).member_code == " m 1 "
    with pytest.raises(NotUnderstoodError, match="uniquecode"):
        read("completion", {**COMPLETION, "UniqueCode": "m" * 1001})


def test_no_record_shows_a_member_code():
    for kind, fields in (("completion", COMPLETION), ("terminate", TERMINATE), ("invite", MEMBER)):
        assert "m-1" not in repr(read(kind, fields))
        assert "invite=1" not in repr(read(kind, fields))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
NAMES = st.sampled_from([*COMPLETION, *TERMINATE, *CLOSED, *status(1, is_live=True), "x"])


@given(st.sampled_from(list(Kind)), st.dictionaries(NAMES, VALUES, max_size=12))
def test_no_fields_raise_anything_else(kind, fields):
    with suppress(NotUnderstoodError):
        named = FieldReader(fields)
        assert len(named.digest()) == 64
        assert parse(kind, named).kind is kind
