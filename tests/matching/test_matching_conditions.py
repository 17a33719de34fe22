"""The result of a condition (a row of QuestionsAndAnswers) for an answer."""

from __future__ import annotations

import pytest
from panel_kit import (
    AGE,
    CERTAIN,
    DMA,
    FEMALE,
    GENDER,
    MALE,
    MSA,
    NO,
    OTHER,
    POSSIBLE,
    POSTAL,
    of_row,
    quota,
    row,
    sub_quota,
    survey,
    truth,
)

from sampling_async.matching import (
    QuotaIndex,
)


class Whole:
    """A whole number that is not an int, like those of other libraries."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __index__(self) -> int:
        return self._number


def test_a_listed_answer_id_is_certain():
    assert of_row(MALE, row(GENDER, MALE)) == CERTAIN
    assert of_row(FEMALE, row(GENDER, MALE)) == NO
    assert of_row([5, 6], row(OTHER, 4, 6)) == CERTAIN
    assert of_row({"6"}, row(OTHER, 4, 6)) == CERTAIN
    assert of_row(str(MALE), row(GENDER, MALE)) == CERTAIN
    assert of_row(Whole(MALE), row(GENDER, MALE)) == CERTAIN


@pytest.mark.parametrize(
    ("years", "values", "expected"),
    [
        (18, ("18-24",), CERTAIN),
        (24, ("18-24",), CERTAIN),
        (25, ("18-24",), NO),
        (17, ("18-24",), NO),
        (50, ("45-54", "18-44"), CERTAIN),
        (30, ("45-54", "18-44"), CERTAIN),
        (101, ("65-99",), CERTAIN),
        (101, ("65-100",), CERTAIN),
        (101, ("65-98",), NO),
        (21, ("21",), CERTAIN),
        (30, (" 18 - 44 ",), CERTAIN),
        ("30", ("18-44",), CERTAIN),
    ],
)
def test_age_ranges_are_inclusive_and_open_above_99(years, values, expected):
    assert of_row(years, row(AGE, *values)) == expected


def test_age_bands_by_answer_ids_are_met_by_the_same_ages():
    assert of_row(20, row(AGE, 11)) == CERTAIN
    assert of_row(30, row(AGE, 11)) == NO
    assert of_row(120, row(AGE, 12)) == CERTAIN
    assert of_row(30, row(AGE, 11, "30-40")) == CERTAIN


@pytest.mark.parametrize("value", ["65+", "18-", "old", "", "44-18", "18-24-30"])
def test_an_unreadable_age_range_is_possible_with_a_diagnostic(value):
    asked = row(AGE, value, "30-40")
    assert of_row(20, asked) == POSSIBLE
    assert of_row(35, asked) == CERTAIN
    (odd,) = QuotaIndex([survey(quota([sub_quota(asked)]))]).diagnostics
    assert (odd.survey_id, odd.quota_id, odd.path) == (3, 7, "Layers[0].SubQuotas[0]")
    assert "not a range of years" in odd.message


def test_an_unknown_band_of_age_is_possible_with_a_diagnostic():
    assert of_row(20, row(AGE, 99999)) == POSSIBLE
    (odd,) = QuotaIndex([survey(quota([sub_quota(row(AGE, 99999))]))]).diagnostics
    assert "no known band" in odd.message


def test_dma_and_msa_conditions_hold_answer_ids_as_texts():
    for question_id in (DMA, MSA):
        assert of_row(501, row(question_id, "501", " 502")) == CERTAIN
        assert of_row(502, row(question_id, "501", " 502")) == CERTAIN
        assert of_row(503, row(question_id, "501", " 502")) == NO
        assert of_row(503, row(question_id, "501", "x")) == POSSIBLE


def test_a_postal_code_is_matched_by_prefix_without_blanks_hyphens_and_case():
    assert of_row("10011", row(POSTAL, "100", "200")) == CERTAIN
    assert of_row("10111", row(POSTAL, "100", "200")) == NO
    assert of_row("sw1a-1AA", row(POSTAL, "SW1A 1")) == CERTAIN
    assert of_row("SW1 A1AA", row(POSTAL, "sw-1a")) == CERTAIN
    assert of_row("sw1a 1aa", row(POSTAL, "100", "SW1A")) == CERTAIN
    assert of_row("SW1A 1AA", row(POSTAL, "100", "sw1a")) == CERTAIN
    assert of_row("100", row(POSTAL, "10011")) == NO


def test_a_miss_in_a_cut_postal_list_is_possible():
    """Codes are counted with duplicates: published lists of a thousand contain some codes twice."""
    cut = row(POSTAL, *["10001", "10001"] * 500)
    assert of_row("99999", cut) == POSSIBLE
    assert of_row("10001", cut) == CERTAIN
    assert of_row("99999", cut, truncated_postal="no") == NO
    assert of_row("99999", row(POSTAL, *["10001"] * 999)) == NO


def test_a_missing_answer_is_treated_alike_for_cut_and_complete_lists():
    cut = ["10001"] * 1000
    assert of_row(None, row(POSTAL, *cut)) == NO
    assert of_row(None, row(POSTAL, *cut, routable=True)) == POSSIBLE
    assert of_row(None, row(POSTAL, *cut, routable=True), missing="no") == NO
    assert of_row(None, row(POSTAL, *cut), missing="possible") == POSSIBLE


def test_an_empty_postal_code_matches_nobody_and_is_reported():
    assert of_row("10001", row(POSTAL, "", "2")) == POSSIBLE
    assert of_row("20001", row(POSTAL, "", "2")) == CERTAIN


def test_answer_ids_of_a_postal_question_are_not_understood():
    assert of_row("10001", row(POSTAL, 5)) == POSSIBLE


def test_a_missing_answer_to_a_routable_question_is_possible():
    assert of_row(None, row(OTHER, 1, routable=True)) == POSSIBLE
    assert of_row(None, row(OTHER, 1)) == NO
    assert of_row(None, row(OTHER, 1), missing="possible") == POSSIBLE
    assert of_row(None, row(OTHER, 1, routable=True), missing="no") == NO
    for nothing in ([], (), set(), None, "", "  "):
        assert truth({OTHER: nothing}, quota([sub_quota(row(OTHER, 1, routable=True))])) == POSSIBLE


def test_an_unregistered_question_with_values_only_is_possible_with_a_diagnostic():
    assert of_row(5, row(OTHER, "5")) == POSSIBLE
    assert of_row(None, row(OTHER, "5")) == POSSIBLE
    assert of_row(5, row(OTHER, 5, "x")) == CERTAIN
    (odd,) = QuotaIndex([survey(quota([sub_quota(row(OTHER, "5"))]))]).diagnostics
    assert "its kind is not registered" in odd.message


def test_an_empty_condition_is_possible_with_a_diagnostic():
    for question_id in (AGE, POSTAL, DMA, OTHER):
        assert of_row("30", row(question_id)) == POSSIBLE
        (odd,) = QuotaIndex([survey(quota([sub_quota(row(question_id))]))]).diagnostics
        assert "neither" in odd.message
