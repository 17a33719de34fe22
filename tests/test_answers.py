"""What the service said of the quota IDs of one request: the three forms of results."""

from __future__ import annotations

import gc

import pytest

from sampling_async import Invite, InviteOutcome, SamplingError
from sampling_async._protocol.results import SUCCESS, Columns, Failed, Listed, outcomes_from


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
    assert COLUMNS.links() == ["https://s.example/11", "https://s.example/13"]


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


def test_each_part_takes_as_many_ids_as_it_has_results():
    made = list(outcomes_from([COLUMNS, FAILED, LISTED, FAILED, COLUMNS], "m", range(1, 21)))
    assert [outcome.quota_id for outcome in made] == [*range(1, 9), 1, 2, 3, 4, *range(13, 21)]


def test_errors_are_those_of_the_ids_without_an_answer_in_this_run():
    replayed = Listed((InviteOutcome("m", 1, "unknown", error=LOST, replayed=True), *LISTED.listed[1:]))
    assert replayed.errors == ()
    assert (COLUMNS.errors, FAILED.errors, LISTED.errors) == ((), (LOST,), (LOST,))
    assert (FAILED.invites, FAILED.links(), LISTED.links()) == ((), (), [])


def test_the_garbage_collector_visits_no_columns():
    """It would visit them for each of a million quota IDs; see the module."""
    invites = COLUMNS.part(0, 5)
    gc.collect()
    assert not gc.is_tracked(invites)
    assert not gc.is_tracked(invites.invites)


def test_no_repr_shows_a_link():
    for shown in (COLUMNS, LISTED, FAILED):
        assert "s.example" not in repr(shown)
