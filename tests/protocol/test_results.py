"""The result of a bulk invite, and the answers it is made of."""

from __future__ import annotations

import gc
import pickle

import doubles
import pytest
from anyio import run
from hypothesis import given
from hypothesis import strategies as st

from sampling_async import BulkInviteResult, IncompleteBulkError, Invite, InviteOutcome, SamplingError
from sampling_async._protocol.results import SUCCESS, Columns, Failed, Listed, outcomes_from

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


def test_every_outcome_has_exactly_one_status(result):
    kinds = (result.invited, result.rejected, result.not_sent, result.unknown)
    assert [len(kind) for kind in kinds] == [1, 1, 2, 1]
    assert sum(map(len, kinds)) == len(result)
    assert result.unrequested == (STRAY,)
    assert result.invites == ()


def test_only_not_sent_ids_are_safe_to_send_again(result):
    assert result.resendable() == (3,)


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


def columns_of(*invited: int) -> Columns:
    """Return results with an invite for each of these places of five, and two kinds of rejections."""
    numbers = bytes(0 if place in invited else 1 + place % 2 for place in range(5))
    invites = tuple(Invite(1, 2, place, 1.5, f"https://s.example/{place}", 9, 30) for place in invited)
    return Columns(numbers, (SUCCESS, ("rejected", 9, "NOT_LIVE"), ("rejected", 16, "FULL")), invites)


UNREAD = Failed(2, "unknown", None, None, SamplingError("lost"))
MIXED = [columns_of(0, 3), UNREAD, Listed(tuple(OUTCOMES)), columns_of(), columns_of(0, 1, 2, 3, 4)]


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


# --- The three forms of answers to one request


def invite(quota_id: int) -> Invite:
    """Return an invite to a quota."""
    return Invite(1, 2, quota_id, 1.5, f"https://s.example/{quota_id}", 9, 30)


OTHER_NAME = ("invited", 1, "OK")
COLUMNS = Columns(
    bytes([0, 2, 1, 3, 2]),
    (SUCCESS, OTHER_NAME, ("rejected", 9, "NOT_LIVE"), ("rejected", 16, "FULL")),
    (invite(11), invite(13)),
)
LOST = SamplingError("lost")
FAILED = Failed(3, "unknown", 13, "FAILED", LOST)
LISTED = Listed(
    (
        InviteOutcome("m", 1, "not_sent", error=LOST),
        InviteOutcome("m", 2, "rejected", result_code=9, replayed=True),
        InviteOutcome("m", 3, "rejected", result_code=9),
        InviteOutcome("m", 4, "rejected", result_code=9),
    )
)


def test_columns_make_the_outcomes_of_their_ids():
    made = list(outcomes_from([COLUMNS], "m", range(11, 16)))
    said = [(outcome.quota_id, outcome.status, outcome.result_code, outcome.result) for outcome in made]
    assert said == [
        (11, *SUCCESS),
        (12, "rejected", 9, "NOT_LIVE"),
        (13, *OTHER_NAME),
        (14, "rejected", 16, "FULL"),
        (15, "rejected", 9, "NOT_LIVE"),
    ]
    assert [None if each.invite is None else each.invite.quota_id for each in made] == [
        11,
        None,
        13,
        None,
        None,
    ]
    assert {(each.member_code, each.error, each.anomaly, each.replayed) for each in made} == {
        ("m", None, None, False)
    }
    assert [invite.url for invite in COLUMNS.invites] == ["https://s.example/11", "https://s.example/13"]


@pytest.mark.parametrize(
    ("answers", "counts", "tally"),
    [
        (COLUMNS, (2, 3, 0, 0), {("invited", 1): 2, ("rejected", 9): 2, ("rejected", 16): 1}),
        (FAILED, (0, 0, 0, 3), {("unknown", 13): 3}),
        (LISTED, (0, 3, 1, 0), {("not_sent", None): 1, ("rejected", 9): 2}),
    ],
)
def test_results_are_counted(answers, counts, tally):
    """The tally leaves out what is from a journal: it was counted when it was received."""
    counted = dict(answers.counts())
    assert tuple(counted.get(status, 0) for status in ("invited", "rejected", "not_sent", "unknown")) == counts
    assert answers.tally() == tally
    assert len(answers) == sum(counts)


def test_what_nobody_said_is_not_counted():
    nothing = Columns(b"", (SUCCESS, ("rejected", 9, "NOT_LIVE")), ())
    assert nothing.tally() == {}
    assert len(nothing) == sum(dict(nothing.counts()).values()) == 0


@pytest.mark.parametrize("answers", [COLUMNS, FAILED, LISTED])
def test_a_part_has_the_outcomes_of_its_places(answers):
    ids = range(1, len(answers) + 1)
    whole = list(outcomes_from([answers], "m", ids))
    for start in range(len(answers) + 1):
        for end in range(start, len(answers) + 3):
            part = answers.part(start, end)
            assert len(part) == len(whole[start:end])
            assert len(part.invites) == dict(part.counts()).get("invited", 0)
            assert list(outcomes_from([part], "m", ids[start:])) == whole[start:end]


@pytest.mark.parametrize("answers", [COLUMNS, FAILED, LISTED])
def test_outcomes_end_with_the_ids(answers):
    whole = list(outcomes_from([answers], "m", range(1, 9)))
    assert list(outcomes_from([answers, answers], "m", (1, 2))) == whole[:2]


def test_the_failure_of_a_request_is_the_outcome_of_each_of_its_ids():
    first, *others = outcomes_from([FAILED], "m", (5, 6, 7))
    assert first == InviteOutcome("m", 5, "unknown", None, 13, "FAILED", LOST)
    assert [(each.member_code, each.quota_id) for each in others] == [("m", 6), ("m", 7)]


def test_errors_are_those_of_the_ids_without_an_answer_in_this_run():
    replayed = Listed((InviteOutcome("m", 1, "unknown", error=LOST, replayed=True), *LISTED.listed[1:]))
    assert replayed.errors == ()
    assert (COLUMNS.errors, FAILED.errors, LISTED.errors) == ((), (LOST,), (LOST,))
    assert (FAILED.invites, LISTED.invites) == ((), ())


def test_the_garbage_collector_visits_no_columns():
    """It would visit them for each of a million quota IDs; see the module."""
    invites = COLUMNS.part(0, 5)
    gc.collect()
    assert not gc.is_tracked(invites)
    assert not gc.is_tracked(invites.invites)


def test_no_repr_shows_a_link():
    for shown in (COLUMNS, LISTED, FAILED):
        assert "s.example" not in repr(shown)
