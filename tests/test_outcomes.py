"""The result of a bulk invite."""

from __future__ import annotations

import pickle

import pytest

from sampling_async import BulkInviteResult, InviteOutcome

OUTCOMES = [
    InviteOutcome("member-1", 1, "invited"),
    InviteOutcome("member-1", 2, "rejected", result_code=9),
    InviteOutcome("member-1", 3, "not_sent"),
    InviteOutcome("member-1", 4, "unknown"),
    InviteOutcome("member-1", 3, "not_sent"),
]
STRAY = InviteOutcome("member-1", 99, "invited")


@pytest.fixture
def result() -> BulkInviteResult:
    return BulkInviteResult(OUTCOMES, [STRAY])


def test_it_is_a_sequence_in_the_callers_order(result):
    assert list(result) == OUTCOMES
    assert (len(result), result[1], result[-2:]) == (5, OUTCOMES[1], tuple(OUTCOMES[-2:]))


def test_every_outcome_is_of_one_kind(result):
    kinds = (result.invited, result.rejected, result.not_sent, result.unknown)
    assert [len(kind) for kind in kinds] == [1, 1, 2, 1]
    assert sum(map(len, kinds)) == len(result)
    assert result.unrequested == (STRAY,)


def test_only_what_was_not_sent_is_safe_to_send_again(result):
    assert result.resendable() == (3,)


def test_a_complete_result_raises_nothing():
    BulkInviteResult(OUTCOMES[:2]).raise_for_incomplete()


def test_the_repr_counts_and_shows_no_member(result):
    assert repr(result) == ("<BulkInviteResult invited=1 rejected=1 not_sent=2 unknown=1 unrequested=1>")
    assert "member-1" not in repr(OUTCOMES)


def test_results_compare_by_content_and_are_not_hashable(result):
    assert pickle.loads(pickle.dumps(result)) == result
    assert result != BulkInviteResult(OUTCOMES)
    assert result != OUTCOMES
    with pytest.raises(TypeError):
        hash(result)
