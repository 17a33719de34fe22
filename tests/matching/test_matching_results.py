"""Results of a match: quotas ordered by rank, a selection, requests."""

from __future__ import annotations

import pytest
from panel_kit import (
    OTHER,
    A,
    many,
    quota,
    sub_quota,
    survey,
)

from sampling_async import (
    InvalidRequestError,
    InviteRequest,
    SurveyWaveExclusion,
)
from sampling_async.matching import (
    Member,
    Participation,
    QuotaIndex,
)


def test_results_are_ordered_by_rank_with_the_most_wanted_first_by_default():
    matched = many().match({OTHER: 1})
    assert list(matched.certain) == [52, 42, 32, 22, 12, 50, 40, 30, 20, 10]
    assert list(matched.possible) == [11, 21, 31, 41, 51]
    surveys = {target.survey for target in many().quota_ids.targets()}
    dearest = QuotaIndex(surveys, rank=lambda survey, _: -survey.price.amount)
    assert list(dearest.match({OTHER: 1}).certain)[:3] == [50, 52, 40]


def test_results_are_sequences():
    certain = many().match({OTHER: 1}).certain
    assert (len(certain), certain[0], certain[-1], certain[2:4]) == (10, 52, 10, (32, 22))
    assert certain[::-1] == tuple(certain)[::-1]
    assert 52 in certain
    assert 11 not in certain
    assert "52" not in certain
    assert certain == list(certain)
    assert certain != [1]
    assert certain != [None] * 10
    assert certain != list(map(str, certain))
    assert list(reversed(certain)) == list(certain)[::-1]
    assert (certain.index(10), certain.count(10)) == (9, 1)
    with pytest.raises(ValueError, match="not in"):
        certain.index(11)
    assert repr(certain) == "<10 quota IDs: 52, 42, 32, ...>"
    for index in (10, -11):
        with pytest.raises(IndexError):
            certain[index]
    assert not many().match({}).certain


def test_best_selects_certain_quotas_first_and_one_of_each_survey():
    matched = many().match({OTHER: 1})
    assert matched.select(3) == (52, 42, 32)
    assert matched.select(100) == (52, 42, 32, 22, 12)
    assert matched.select(12, one_per_survey=False) == (*matched.certain, 11, 21)
    assert matched.select(0) == ()
    for wrong in (-1, 2.5, "3", True):
        with pytest.raises(InvalidRequestError, match="n must be"):
            matched.select(wrong)


def test_requests_are_accepted_by_a_fan_out():
    index = many()
    members = [
        Member("m1", {OTHER: 1}),
        Member("m2", {OTHER: 3, 1008888: 5}),
        Member("m3", {}),
        Member("m4", {OTHER: 1}, device_type=2, exclude_surveys=[4]),
    ]
    assert list(index.requests(members, n=2)) == [
        InviteRequest("m1", (52, 42)),
        InviteRequest("m3", (11, 21)),
        InviteRequest("m4", (22,)),
    ]
    assert "m1" not in repr(members)
    assert "1009999" not in repr(members)
    with pytest.raises(InvalidRequestError, match=r"members\[1\]: profile\[1009999\]: answers must be"):
        list(index.requests([members[0], Member("m2", {OTHER: 1.5})]))


def test_a_member_object_is_matched_with_all_its_data():
    exclusions = (SurveyWaveExclusion(70, 0, (9,)),)
    index = QuotaIndex(
        [
            survey(quota([sub_quota(A)], quota_id=1), survey_id=1, device_type_ids=(1,)),
            survey(quota([sub_quota(A)], quota_id=2), survey_id=2),
            survey(quota([sub_quota(A)], quota_id=3), survey_id=3, survey_wave_exclusions=exclusions),
            survey(quota([sub_quota(A)], quota_id=4), survey_id=4, is_survey_recontact=True),
        ]
    )
    index.recontact(4, ["m1"])
    member = Member("m1", {OTHER: 1}, 2, [2], [Participation(70, 1, 9)])
    by_hand = index.match(
        {OTHER: 1},
        device_type=2,
        exclude_surveys=[2],
        participations=[Participation(70, 1, 9)],
        member_code="m1",
    )
    assert list(index.match(member).certain) == list(by_hand.certain) == [4]
    assert list(index.match(member, device_type=1).certain) == [1, 4]
    assert list(index.match(member, exclude_surveys=[4]).certain) == [2]
    assert list(index.match(member, participations=[Participation(71, 1, 9)]).certain) == [3, 4]
    assert list(index.match(member, member_code="m9").certain) == []
    assert list(index.match(Member("m9", {OTHER: 1})).certain) == [1, 2, 3]
