"""The rules for single values on the wire: their bounds, and the words of what is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from sampling_async._contract.records import INT64_MAX
from sampling_async._json import rules
from sampling_async._json.rules import Mismatch


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "null"),
        (True, "a boolean"),
        (7, "a whole number"),
        (0.5, "a number with a fraction"),
        (float("inf"), "a number too large"),
        ("text", "text"),
        ("", "empty text"),
        ([], "an array"),
        ({}, "an object"),
    ],
)
def test_what_is_refused_is_named_by_its_kind(value, kind):
    assert str(rules.mismatch("a thing", value)) == f"expected a thing, found {kind}"


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (INT64_MAX, INT64_MAX),
        (-INT64_MAX, -INT64_MAX),
        (3.0, 3),
        (2.0**53, 2**53),
        (-(2.0**53), -(2**53)),
        (0, 0),
    ],
)
def test_whole_numbers_may_have_64_bits_and_doubles_53(value, read):
    number = rules.whole_number(value)
    assert (number, type(number)) == (read, int)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (INT64_MAX + 1, "expected a whole number of at most 64 bits"),
        (-INT64_MAX - 1, "expected a whole number of at most 64 bits"),
        (2.0**53 + 2, "expected a whole number, found a number with a fraction"),
        (3.5, "expected a whole number, found a number with a fraction"),
        (True, "expected a whole number, found a boolean"),
        ("3", "expected a whole number, found text"),
    ],
)
def test_other_whole_numbers_are_refused(value, why):
    with pytest.raises(Mismatch) as refused:
        rules.whole_number(value)
    assert str(refused.value) == why


@pytest.mark.parametrize("value", [0, 1.5, -1.5, INT64_MAX, -INT64_MAX])
def test_numbers_become_doubles(value):
    number = rules.number(value)
    assert (number, type(number)) == (float(value), float)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (INT64_MAX + 1, "a whole number"),
        (-INT64_MAX - 1, "a whole number"),
        (1e19, "a number with a fraction"),
        (-1e19, "a number with a fraction"),
        (float("inf"), "a number too large"),
        (False, "a boolean"),
    ],
)
def test_numbers_beyond_64_bits_are_refused(value, found):
    with pytest.raises(Mismatch, match=rf"^expected a number, found {found}$"):
        rules.number(value)


@pytest.mark.parametrize("value", ["", "text", "Zoë", "\ud7ff", "\ue000", "\U0001f600"])
def test_text_is_kept(value):
    assert rules.text(value) == value


@pytest.mark.parametrize("value", ["\ud800", "a\udfff", "\udc00b"])
def test_half_of_a_surrogate_pair_is_no_text(value):
    with pytest.raises(Mismatch, match=r"^expected text, found half of a surrogate pair$"):
        rules.text(value)


def at(hours: float) -> timezone:
    return timezone(timedelta(hours=hours))


def test_a_date_is_a_text():
    with pytest.raises(Mismatch, match=r"^expected a dateTime, found a whole number$"):
        rules.date_time(1580505570)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (datetime(2020, 1, 31, 21, 19, 30, tzinfo=UTC), "2020-01-31T21:19:30Z"),
        (datetime(2020, 1, 31, 21, 19, 30, 5, at(2)), "2020-01-31T21:19:30.000005+02:00"),
        (datetime(2020, 1, 31, 21, 19, 30), "2020-01-31T21:19:30"),  # noqa: DTZ001
    ],
)
def test_dates_are_written_with_a_z_for_utc(value, written):
    assert rules.written_date_time(value) == written
