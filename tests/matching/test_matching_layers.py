"""Results for sub-quotas, layers and quotas."""

from __future__ import annotations

import pytest
from panel_kit import (
    ASKED,
    CERTAIN,
    FEMALE,
    GENDER,
    MALE,
    NO,
    OTHER,
    POSSIBLE,
    A,
    B,
    quota,
    row,
    sub_quota,
    survey,
    truth,
)

from sampling_async import (
    SubQuota,
)
from sampling_async.matching import (
    QuotaIndex,
)


def test_rows_of_the_same_question_are_alternatives():
    assert truth({OTHER: 2}, quota([sub_quota(row(OTHER, 1), row(OTHER, 2))])) == CERTAIN
    assert truth({OTHER: 3}, quota([sub_quota(row(OTHER, 1), row(OTHER, 2))])) == NO


def test_different_questions_must_all_be_met_and_the_weakest_counts():
    both = quota([sub_quota(row(GENDER, MALE), row(OTHER, 1, routable=True))])
    assert truth({GENDER: MALE, OTHER: 1}, both) == CERTAIN
    assert truth({GENDER: MALE}, both) == POSSIBLE
    assert truth({GENDER: FEMALE}, both) == NO
    assert truth({GENDER: MALE, OTHER: 2}, both) == NO


def test_a_sub_quota_without_questions_is_possible_with_a_diagnostic():
    assert truth({}, quota([sub_quota()])) == POSSIBLE
    assert truth({GENDER: MALE}, quota([sub_quota(), sub_quota(row(GENDER, MALE))])) == POSSIBLE
    assert len(QuotaIndex([survey(quota([sub_quota()]))]).diagnostics) == 1


@pytest.mark.parametrize(
    ("layer", "answer", "exactly", "at_least"),
    [
        ([sub_quota(A), sub_quota(B)], 1, CERTAIN, CERTAIN),
        ([sub_quota(A), sub_quota(B)], 3, NO, NO),
        ([sub_quota(A), sub_quota(B)], [1, 2], NO, CERTAIN),
        ([sub_quota(A, full=True), sub_quota(B)], 1, NO, NO),
        ([sub_quota(A, full=True), sub_quota(B)], 2, CERTAIN, CERTAIN),
        ([sub_quota(A, full=True), sub_quota(B)], [1, 2], NO, NO),
        ([sub_quota(A, full=True), sub_quota(B, full=True)], 1, NO, NO),
        ([sub_quota(A), sub_quota(ASKED)], 1, POSSIBLE, CERTAIN),
        ([sub_quota(A), sub_quota(ASKED)], 3, POSSIBLE, POSSIBLE),
        ([sub_quota(A), sub_quota(ASKED, full=True)], 1, POSSIBLE, POSSIBLE),
        ([sub_quota(A), sub_quota(ASKED, full=True)], 3, NO, NO),
        ([sub_quota(A, full=True), sub_quota(ASKED)], 1, NO, NO),
        ([sub_quota(ASKED, full=True)], 1, NO, NO),
        ([], 1, NO, NO),
    ],
)
def test_a_layer_holds_by_its_certain_possible_open_and_full_sub_quotas(layer, answer, exactly, at_least):
    assert truth({OTHER: answer}, quota(layer)) == exactly
    assert truth({OTHER: answer}, quota(layer), subquota_rule="at_least_one") == at_least


def test_full_sub_quotas_count_as_open_if_fullness_is_ignored():
    assert truth({OTHER: 1}, quota([sub_quota(A, full=True), sub_quota(B)]), full="ignored") == CERTAIN


def test_a_sub_quota_without_a_target_counts_as_full_with_a_diagnostic():
    none = SubQuota(1, 0, 0, (A,))
    assert truth({OTHER: 1}, quota([none])) == NO
    (odd,) = QuotaIndex([survey(quota([none]))]).diagnostics
    assert "MaxTargetCompletes" in odd.message


def test_a_quota_is_as_its_weakest_layer_and_open_to_all_without_layers():
    assert truth({}, quota()) == CERTAIN
    assert truth({OTHER: 1, GENDER: MALE}, quota([sub_quota(A)], [sub_quota(row(GENDER, MALE))])) == CERTAIN
    assert truth({OTHER: 1}, quota([sub_quota(A)], [sub_quota(ASKED)])) == POSSIBLE
    assert truth({OTHER: 2}, quota([sub_quota(A)], [sub_quota(ASKED)])) == NO


# --- The rule of a layer
