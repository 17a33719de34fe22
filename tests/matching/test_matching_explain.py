"""Reasons: why a member matches a quota or not."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panel_kit import (
    AGE,
    ASKED,
    CERTAIN,
    FEMALE,
    GENDER,
    KINDS,
    MALE,
    NO,
    OTHER,
    POSSIBLE,
    A,
    layers,
    many,
    of_some,
    policies,
    profiles,
    quota,
    row,
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
    UnknownQuotaError,
)


def test_a_removed_quota_is_not_explained_as_closed():
    gone = survey(quota([sub_quota(A)], quota_id=1), survey_id=1)
    index = QuotaIndex(of_some(gone)).updated(of_some())
    with pytest.raises(KeyError):
        index.explain({OTHER: 1}, 1)


def test_reasons_go_down_to_the_question():
    asked = quota([sub_quota(row(GENDER, MALE), row(AGE, "18-24")), sub_quota(row(GENDER, FEMALE), full=True)])
    reason = QuotaIndex([survey(asked)]).explain({GENDER: MALE, AGE: 30}, 7)
    assert str(reason).splitlines() == [
        "no       quota 7: all layers must hold",
        "  no       layer 1: no open sub-quota fits",
        "    no       sub-quota 1, 0 of 10 completes: all its questions must be met",
        "      certain  question 1001007: one of the answers is listed",
        "      no       question 1001538: the answer is not listed",
        "    no       sub-quota 1, 10 of 10 completes: all its questions must be met",
        "      no       question 1001007: the answer is not listed",
    ]
    assert str(MALE) not in str(reason)


devices = st.none() | st.integers(1, 4)
taken = st.sets(st.sampled_from([1, 2, 99]), max_size=2)
participations = st.lists(
    st.builds(Participation, st.sampled_from([70, 71]), st.sampled_from([1, 5]), st.sampled_from([1, 9])),
    max_size=2,
)
codes = st.sampled_from([None, "m1", "m2"])
SURVEYS = st.lists(
    st.builds(
        lambda ids, devices, recontact, exclusions: (ids, devices, recontact, exclusions),
        st.lists(layers, max_size=2),
        st.sampled_from([(), (1,), (2, 3)]),
        st.booleans(),
        st.lists(
            st.builds(
                SurveyWaveExclusion,
                st.sampled_from([70, 71]),
                st.sampled_from([0, 5]),
                st.sampled_from([(1,), (9, 10)]),
            ),
            max_size=2,
        ),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=300)
@given(SURVEYS, profiles, policies, devices, taken, participations, codes, st.data())
def test_an_explanation_never_contradicts_the_match(  # noqa: PLR0917  hypothesis gives them so
    surveys, profile, policy, device, excluded, took_part, code, data
):
    made = [
        survey(
            quota(*of_quota, quota_id=at),
            survey_id=at,
            device_type_ids=device_ids,
            is_survey_recontact=recontact,
            survey_wave_exclusions=tuple(exclusions),
        )
        for at, (of_quota, device_ids, recontact, exclusions) in enumerate(surveys, start=1)
    ]
    index = QuotaIndex(made, kinds=KINDS, policy=policy)
    ids = range(1, len(made) + 1)
    for quota_id in data.draw(st.sets(st.sampled_from(ids))):
        index.recontact(quota_id, data.draw(st.sets(st.sampled_from(["m1", "m3"]))))
    for quota_id in data.draw(st.sets(st.sampled_from(ids), max_size=1)):
        index.close(quota_id)
    known = {
        "device_type": device,
        "exclude_surveys": excluded,
        "participations": took_part,
        "member_code": code,
    }
    matched = index.match(profile, **known)
    for quota_id in ids:
        found = CERTAIN if quota_id in matched.certain else POSSIBLE if quota_id in matched.possible else NO
        reason = index.explain(profile, quota_id, **known)
        assert reason.truth == found, str(reason)
        if code is not None:
            member = Member(code, profile, device, excluded, took_part)
            assert index.explain(member, quota_id) == reason


def test_reasons_besides_the_answers_are_explained():
    asked = survey(
        quota([sub_quota(A)]),
        device_type_ids=(2, 3),
        is_survey_recontact=True,
        survey_wave_exclusions=(SurveyWaveExclusion(70, 0, (9,)),),
    )
    index = QuotaIndex([asked])
    index.recontact(7, ["m2"])
    member = Member("m1", {OTHER: 1}, 1, (3,), (Participation(70, 1, 9),))
    explained = index.explain(member, 7)
    assert explained.truth == NO
    assert [(each.what, each.why) for each in explained.parts[:-1]] == [
        ("device 1", "the survey accepts only devices 2, 3"),
        ("survey 3", "the survey is in exclude_surveys"),
        ("participation in survey 70", "the survey excludes members with such a participation"),
        ("recontact list", "the member is not on it"),
    ]
    assert explained.parts[-1].truth == CERTAIN
    assert "m1" not in str(explained)
    for code, words in ((None, "no member code was given"), ("m2", "")):
        reason = index.explain({OTHER: 1}, 7, member_code=code)
        assert words in str(reason)
        assert reason.truth == (CERTAIN if code else POSSIBLE)


@pytest.mark.parametrize("wrong", [99999, "52", None, 5.0, True, [52]])
def test_a_missing_quota_has_its_own_error(wrong):
    index = many()
    with pytest.raises(UnknownQuotaError, match="is not in this index") as caught:
        index.explain({OTHER: 1}, wrong)
    assert caught.value.quota_id is wrong
    assert isinstance(caught.value, InvalidRequestError)
    assert isinstance(caught.value, KeyError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_explanation_reports_an_invalid_answer():
    index = QuotaIndex([survey(quota([sub_quota(A)], quota_id=1), quota([sub_quota(ASKED)], quota_id=2))])
    for profile in ({OTHER: 1.5}, {"1009999": 1}):
        with pytest.raises(InvalidRequestError, match="profile"):
            index.match(profile)
        with pytest.raises(InvalidRequestError, match="profile"):
            index.explain(profile, 2)
