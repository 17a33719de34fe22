"""Checks of numbers that users give: the bounds, and what is said about a number beyond them."""

from __future__ import annotations

import math
from datetime import UTC, datetime, tzinfo

import pytest
from attrs import field, frozen

from sampling_async import InvalidRequestError
from sampling_async._contract import checks

TOO_LARGE = 10**400


@pytest.mark.parametrize("value", [1, 0.001, 10**308])
def test_a_number_above_0_is_returned_as_a_float(value):
    number = checks.number_above_0(value, "x")
    assert (number, type(number)) == (float(value), float)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (-1.5, "-1.5"),
        (math.nan, "nan"),
        (True, "True"),
        ("5", "'5'"),
        (None, "None"),
        (TOO_LARGE, "a number too large for a float"),
    ],
)
def test_other_values_are_shown_with_the_name_and_the_rule(value, shown):
    with pytest.raises(InvalidRequestError) as refused:
        checks.number_above_0(value, "Timeouts.read", "seconds")
    assert str(refused.value) == f"Timeouts.read must be seconds above 0, not {shown}"
    with pytest.raises(InvalidRequestError) as refused:
        checks.number_above_0(value, "x")
    assert str(refused.value) == f"x must be a number above 0, not {shown}"


@pytest.mark.parametrize("value", [0, 0.0, 7])
def test_a_number_from_0_may_be_0(value):
    number = checks.number_from_0(value, "x")
    assert (number, type(number)) == (float(value), float)


@pytest.mark.parametrize("value", [-0.001, math.nan, False, "5", TOO_LARGE])
def test_a_number_below_0_is_refused(value):
    with pytest.raises(InvalidRequestError, match=r"^x must be seconds, at least 0, not "):
        checks.number_from_0(value, "x", "seconds")
    with pytest.raises(InvalidRequestError, match=r"^x must be a number, at least 0, not "):
        checks.number_from_0(value, "x")


@pytest.mark.parametrize(("value", "options"), [(1, {}), (0, {"least": 0}), (5, {"most": 5}), (TOO_LARGE, {})])
def test_whole_numbers_include_their_bounds(value, options):
    assert checks.whole_number(value, "x", **options) == value


@pytest.mark.parametrize(
    ("value", "options", "said"),
    [
        (0, {}, "of at least 1, not 0"),
        (1.0, {}, "of at least 1, not 1.0"),
        (True, {}, "of at least 1, not True"),
        (2, {"least": 3}, "of at least 3, not 2"),
        (6, {"most": 5}, "from 1 to 5, not 6"),
        (1, {"least": 2, "most": 5}, "from 2 to 5, not 1"),
    ],
)
def test_whole_numbers_beyond_their_bounds_are_refused(value, options, said):
    with pytest.raises(InvalidRequestError) as refused:
        checks.whole_number(value, "x", **options)
    assert str(refused.value) == f"x must be a whole number {said}"


class Foreign:
    """A number of another library."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __index__(self) -> int:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value

    def __repr__(self) -> str:
        return "Foreign()"


def test_an_id_may_be_a_number_of_another_library():
    assert [checks.whole_id(value, "x") for value in (7, -7, 0, Foreign(7))] == [7, -7, 0, 7]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, "True"),
        (1.0, "1.0"),
        ("7", "'7'"),
        (Foreign(ZeroDivisionError()), "Foreign()"),
        ("x" * 99, "'" + "x" * 59),
    ],
)
def test_other_ids_are_refused_without_a_cause(value, shown):
    with pytest.raises(InvalidRequestError) as refused:
        checks.whole_id(value, "quota_id")
    assert str(refused.value) == f"quota_id must be a whole number, not {shown}"
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


@frozen
class Options:
    """What users give, checked as the options of the package are."""

    count: int = field(default=1, validator=checks.whole_from_1)
    pause: float = field(default=1.0, validator=checks.positive)
    wall: float | None = field(default=None, validator=checks.positive)
    share: float = field(default=0.0, validator=checks.not_negative)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"count": 0}, "count must be a whole number of at least 1, not 0"),
        ({"pause": 0}, "Options.pause must be a number above 0, not 0"),
        ({"pause": None}, "Options.pause must be a number above 0, not None"),
        ({"wall": 0}, "Options.wall must be a number above 0, not 0"),
        ({"share": -1}, "Options.share must be a number, at least 0, not -1"),
    ],
)
def test_fields_are_checked_and_named_with_their_class(given, said):
    with pytest.raises(InvalidRequestError) as refused:
        Options(**given)
    assert str(refused.value) == said


def test_none_is_valid_where_it_is_the_default():
    assert Options(count=2, pause=0.5, wall=None, share=0) == Options(2, 0.5, None, 0)


class Nowhere(tzinfo):
    """A time zone that does not know its offset, so that a time in it is no moment."""

    def utcoffset(self, moment: datetime | None) -> None:
        return None


@pytest.mark.parametrize("value", [datetime(2026, 1, 2), datetime(2026, 1, 2, tzinfo=Nowhere()), 5, None])  # noqa: DTZ001
def test_a_time_without_a_known_zone_is_refused(value):
    with pytest.raises(InvalidRequestError, match="x is a datetime with a time zone"):
        checks.moment_of(value, "x")
    assert checks.moment_of(datetime(1970, 1, 2, tzinfo=UTC), "x") == 86_400.0


@pytest.mark.parametrize("given", [None, 3, "print"])
def test_an_option_that_is_called_must_be_a_function(given):
    with pytest.raises(InvalidRequestError, match=r"^clock must be a function, not "):
        checks.require_functions(sleep=print, clock=given)
    if given is None:
        checks.require_functions(sleep=print, clock=given, or_none=True)
    else:
        with pytest.raises(InvalidRequestError, match=r"^clock must be a function, not "):
            checks.require_functions(sleep=print, clock=given, or_none=True)
