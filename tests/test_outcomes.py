"""The result of a bulk invite."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import doubles
import httpx
import pytest
from anyio import run
from attrs import evolve

from sampling_async import BulkInviteResult, Invite, InviteOutcome, SamplingError
from sampling_async._json.fast import WireItem
from sampling_async._protocol.outcomes import Failure, Rejection

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


def test_a_result_is_a_sequence_in_the_order_of_the_caller(result):
    assert list(result) == OUTCOMES
    assert (len(result), result[1], result[-2:]) == (5, OUTCOMES[1], tuple(OUTCOMES[-2:]))


def test_counts_and_invites_agree_with_the_outcomes():
    async def main() -> BulkInviteResult:
        def answer(request):
            return httpx.Response(200, json=doubles.bulk(request))

        async with doubles.client(answer) as client:
            return await client.bulk_invite("m", [*range(1, 12), 4])

    result = run(main)
    assert result.counts == {"invited": 6, "rejected": 6, "not_sent": 0, "unknown": 0}
    assert [invite.quota_id for invite in result.invites] == [2, 4, 6, 8, 10, 4]
    assert result.invites == tuple(outcome.invite for outcome in result.invited)
    with pytest.raises(AssertionError):
        BulkInviteResult([object()]).counts  # noqa: B018


def test_every_outcome_has_exactly_one_status(result):
    kinds = (result.invited, result.rejected, result.not_sent, result.unknown)
    assert [len(kind) for kind in kinds] == [1, 1, 2, 1]
    assert sum(map(len, kinds)) == len(result)
    assert result.unrequested == (STRAY,)
    assert result.invites == ()


def test_only_not_sent_ids_are_safe_to_send_again(result):
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


# --- Outcomes as they were received


def as_they_came() -> BulkInviteResult:
    """Return the result of a bulk whose service invites to the even quota IDs."""

    async def main() -> BulkInviteResult:
        async with doubles.client(doubles.Service(doubles.bulk)) as client:
            return await client.bulk_invite("member-1", [4, 3, 2, 1, 4])

    return run(main)


def test_outcomes_are_created_when_they_are_read_and_equal_each_time():
    result = as_they_came()
    assert [outcome.quota_id for outcome in result] == [4, 3, 2, 1, 4]
    assert [type(outcome) for outcome in result] == [InviteOutcome] * 5
    assert result[0] == result[0] == result[-1] == next(iter(result))
    assert result[1:3] == tuple(result)[1:3]
    assert [outcome.quota_id for outcome in result.invited] == [4, 2, 4]
    assert [outcome.quota_id for outcome in result.rejected] == [3, 1]
    assert result.not_sent == result.unknown == ()
    assert result.invites == tuple(outcome.invite for outcome in result.invited)
    assert [invite.quota_id for invite in result.invites] == [4, 2, 4]
    with pytest.raises(IndexError):
        result[5]
    result.raise_for_incomplete()
    assert repr(result) == "<BulkInviteResult invited=3 rejected=2 not_sent=0 unknown=0 unrequested=0>"


def test_invites_are_created_when_they_are_read_and_equal_each_time():
    invites = as_they_came().invites
    assert isinstance(invites, Sequence)
    assert (len(invites), bool(invites), repr(invites)) == (3, True, "<3 invites>")
    assert [type(invite) for invite in invites] == [Invite] * 3
    assert invites[0] == invites[0] == invites[-1] == next(iter(invites))
    assert invites[1:] == tuple(invites)[1:]
    assert invites == as_they_came().invites
    assert hash(invites) == hash(tuple(invites))
    assert invites != invites[1:]
    assert invites != list(invites)
    with pytest.raises(IndexError):
        invites[3]


def test_invites_of_all_kinds_of_results_are_found():
    came = as_they_came()
    from_journal = evolve(came[0], replayed=True)
    other_name = WireItem(QuotaID=2, Invite=came._answers[2], ResultCode=1, Result="OK")
    failure = Failure("unknown", None, None, SamplingError("lost"))
    mixed = BulkInviteResult(
        [from_journal, Rejection(9, "NO"), other_name, failure, came[1]],
        member_code="m",
        quota_ids=(4, 3, 2, 1, 3),
    )
    assert mixed.invites == (came[0].invite, came[2].invite)
    assert mixed.invites == tuple(outcome.invite for outcome in mixed.invited)
    assert mixed.counts == {"invited": 2, "rejected": 2, "not_sent": 0, "unknown": 1}


def test_created_outcomes_equal_constructed_ones():
    invited, rejected = as_they_came()[0], as_they_came()[1]
    invite = invited.invite
    assert invite is not None
    fields = ("survey_id", "wave_id", "quota_id", "partner_amount", "url", "loi", "ir", "member_amount")
    rebuilt = Invite(**{name: getattr(invite, name) for name in fields})
    assert (type(invite), invite, hash(invite)) == (Invite, rebuilt, hash(rebuilt))
    assert invited == InviteOutcome("member-1", 4, "invited", rebuilt, 1, "SUCCESS")
    assert invited.replayed is rejected.replayed is False
    assert rejected == InviteOutcome("member-1", 3, "rejected", result_code=9, result=rejected.result)
    with pytest.raises(AttributeError):
        invited.status = "unknown"


def test_a_result_equals_its_pickled_copy_and_one_made_by_hand():
    result = as_they_came()
    assert pickle.loads(pickle.dumps(result)) == result == BulkInviteResult(tuple(result))
    assert result != BulkInviteResult(tuple(result)[:4])


def test_outcomes_of_a_subclass_are_accepted():
    class Marked(InviteOutcome):
        pass

    result = BulkInviteResult([Marked("member-1", 1, "not_sent")])
    assert [type(outcome) for outcome in result] == [Marked]
    assert (result.resendable(), len(result.not_sent)) == ((1,), 1)
