"""The result of a bulk invite."""

from __future__ import annotations

import pickle

import doubles
import httpx
import pytest
from anyio import run
from hypothesis import given
from hypothesis import strategies as st

from sampling_async import BulkInviteResult, IncompleteBulkError, Invite, InviteOutcome, SamplingError
from sampling_async._protocol.results import SUCCESS, Columns, Failed, Listed

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


def test_the_invites_of_a_result_are_equal_each_time():
    invites = as_they_came().invites
    assert (type(invites), len(invites)) == (tuple, 3)
    assert [type(invite) for invite in invites] == [Invite] * 3
    assert invites == as_they_came().invites
    assert hash(invites) == hash(as_they_came().invites)


def columns_of(*invited: int) -> Columns:
    """Return results with an invite for each of these places of five, and two kinds of rejections."""
    numbers = bytes(0 if place in invited else 1 + place % 2 for place in range(5))
    invites = tuple(Invite(1, 2, place, 1.5, f"https://s.example/{place}", 9, 30) for place in invited)
    return Columns(numbers, (SUCCESS, ("rejected", 9, "NOT_LIVE"), ("rejected", 16, "FULL")), invites)


FAILED = Failed(2, "unknown", None, None, SamplingError("lost"))
MIXED = [columns_of(0, 3), FAILED, Listed(tuple(OUTCOMES)), columns_of(), columns_of(0, 1, 2, 3, 4)]


def mixed() -> tuple[BulkInviteResult, BulkInviteResult]:
    """Return a result of parts of all kinds, and the same of outcomes."""
    quota_ids = tuple(range(101, 101 + sum(map(len, MIXED))))
    result = BulkInviteResult(member_code="m", quota_ids=quota_ids, answers=MIXED)
    return result, BulkInviteResult(tuple(result))


def test_parts_of_all_kinds_are_one_sequence():
    result, flat = mixed()
    assert result == flat
    assert len(result) == len(flat) == len(list(result)) == 22
    assert tuple(reversed(result)) == tuple(result)[::-1]
    # The quota IDs are those of the request, except where there was an outcome already.
    of_outcomes = [outcome.quota_id for outcome in OUTCOMES]
    assert [outcome.quota_id for outcome in result] == [*range(101, 108), *of_outcomes, *range(113, 123)]
    assert result.invites == flat.invites == tuple(o.invite for o in result if o.invite is not None)
    assert len(result.invites) == 7
    assert result.counts == flat.counts == {"invited": 8, "rejected": 9, "not_sent": 2, "unknown": 3}
    for status in ("invited", "rejected", "not_sent", "unknown"):
        assert getattr(result, status) == tuple(outcome for outcome in flat if outcome.status == status)


@given(st.slices(22), st.integers(-22, 21))
def test_any_outcomes_of_the_sequence_can_be_taken(some, one):
    result, flat = mixed()
    assert result[some] == tuple(flat)[some]
    assert result[one] == tuple(flat)[one]


@pytest.mark.parametrize("place", [22, -23])
def test_a_place_outside_is_an_index_error(place):
    with pytest.raises(IndexError):
        mixed()[0][place]


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


@pytest.mark.parametrize(("status", "told"), [("not_sent", (1, 0)), ("unknown", (0, 1))])
def test_one_id_without_an_answer_makes_a_bulk_incomplete(status, told):
    result = BulkInviteResult([OUTCOMES[0], InviteOutcome("member-1", 2, status)])
    with pytest.raises(IncompleteBulkError) as caught:
        result.raise_for_incomplete()
    assert caught.value.args == (
        (
            f"{told[0]} of 2 quota IDs were not sent, and {told[1]} have an unknown outcome; "
            "resendable() gives those that are safe to send again"
        ),
    )
    assert caught.value.bulk_result is result
    assert (caught.value.endpoint, caught.value.delivery) == ("bulk_invite", "unknown")


def test_an_error_of_an_incomplete_bulk_may_be_made_by_hand():
    error = IncompleteBulkError()
    assert error.args == ("",)
    assert not hasattr(error, "bulk_result")
