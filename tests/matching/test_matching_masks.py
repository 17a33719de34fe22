"""Reasons besides answers that exclude a member: devices, surveys, participations, lists, closed quotas."""

from __future__ import annotations

import pytest
from panel_kit import (
    CERTAIN,
    NO,
    OTHER,
    POSSIBLE,
    A,
    many,
    quota,
    sub_quota,
    survey,
)

from sampling_async import (
    InvalidRequestError,
    SurveyWaveExclusion,
)
from sampling_async.matching import (
    Member,
    Participation,
    QuotaIndex,
    Truth,
)


def test_surveys_for_other_devices_are_left_out():
    index = many()
    assert list(index.match({OTHER: 1}, device_type=2).certain) == [42, 22, 40, 20]
    assert len(index.match({OTHER: 1}, device_type=1).certain) == 10


def test_surveys_that_were_taken_are_left_out():
    assert list(many().match({OTHER: 1}, exclude_surveys={5, 4, 99}).certain) == [32, 22, 12, 30, 20, 10]


def test_an_empty_argument_replaces_what_the_member_brings():
    index = QuotaIndex(
        [survey(quota([sub_quota(A)]), survey_wave_exclusions=(SurveyWaveExclusion(70, 0, (9,)),))]
    )
    [quota_id] = index.quota_ids
    [target] = index.quota_ids.targets()
    took = Member("m1", {OTHER: 1}, exclude_surveys=[target.survey.survey_id])
    took_part = Member("m1", {OTHER: 1}, participations=[Participation(70, 1, 9)])
    assert not index.match(took).certain
    assert list(index.match(took, exclude_surveys=()).certain) == [quota_id]
    assert index.explain(took, quota_id).truth == NO
    assert index.explain(took, quota_id, exclude_surveys=()).truth == CERTAIN
    assert not index.match(took_part, exclude_surveys=()).certain
    assert list(index.match(took_part, participations=()).certain) == [quota_id]


def test_waves_that_exclude_a_participation_are_left_out():
    exclusions = (SurveyWaveExclusion(70, 0, (9, 10)), SurveyWaveExclusion(71, 5, (1,)))
    index = QuotaIndex([survey(quota([sub_quota(A)]), survey_wave_exclusions=exclusions)])

    def fits(*participation: int) -> bool:
        return bool(index.match({OTHER: 1}, participations=[Participation(*participation)]).certain)

    assert not fits(70, 123, 9)
    assert not fits(71, 5, 1)
    assert fits(70, 123, 3)
    assert fits(71, 6, 1)
    assert fits(72, 5, 1)


def test_a_closed_quota_is_left_out_at_once():
    index = many()
    before = index.match({OTHER: 1})
    assert index.close(52)
    assert not index.close(52)
    assert not index.close(12345)
    assert list(index.match({OTHER: 1}).certain)[:2] == [42, 32]
    assert list(before.certain)[:2] == [52, 42]
    assert len(index) == 14
    assert index.explain({OTHER: 1}, 52).truth == NO
    assert "closed" in str(index.explain({OTHER: 1}, 52))


def test_recontact_quotas_are_for_those_on_their_list():
    index = QuotaIndex([survey(quota([sub_quota(A)]), is_survey_recontact=True)])

    def found(member_code: str | None = None) -> Truth:
        matched = index.match({OTHER: 1}, member_code=member_code)
        return CERTAIN if matched.certain else POSSIBLE if matched.possible else NO

    assert found("m1") == POSSIBLE
    index.recontact(7, ["m1", "m2"])
    index.recontact(8, ["m1"])
    assert (found("m1"), found("m3"), found()) == (CERTAIN, NO, POSSIBLE)
    with pytest.raises(InvalidRequestError, match="a list or a set, not str"):
        index.recontact(7, "m1")


def test_a_list_counts_for_a_quota_of_any_survey():
    others = [[], [survey(quota([sub_quota(A)], quota_id=8), survey_id=4, is_survey_recontact=True)]]
    for more in others:
        index = QuotaIndex([survey(quota([sub_quota(A)])), *more])
        index.recontact(7, ["m1"])
        assert 7 in index.match({OTHER: 1}, member_code="m1").certain
        assert 7 not in index.match({OTHER: 1}, member_code="m2").certain
