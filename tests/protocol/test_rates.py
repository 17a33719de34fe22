"""The share of invites that end in a complete, learned from those so far."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from sampling_async import InvalidRequestError
from sampling_async.matching import LearnedRates
from sampling_async.simulator import generate_inventory

SURVEY = evolve(generate_inventory(1, surveys=1).surveys[0], survey_id=7, ir=40)
counts = st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(lambda pair: (max(pair), min(pair)))


def test_without_invites_it_is_the_incidence_rate():
    rates = LearnedRates()
    assert rates.chance(SURVEY) == rates.chance(SURVEY, 1) == pytest.approx(0.4)
    assert rates.chance(evolve(SURVEY, ir=0)) == 1.0  # not known
    assert rates.chance(evolve(SURVEY, ir=130)) == 1.0


def test_a_survey_is_drawn_towards_its_incidence_rate_and_a_quota_towards_its_survey():
    rates = LearnedRates(surveys={7: (80, 8)}, quotas={1: (20, 8)}, weight=20)
    of_survey = (8 + 20 * 0.4) / 100
    assert rates.chance(SURVEY) == rates.chance(SURVEY, 2) == pytest.approx(of_survey)
    assert rates.chance(SURVEY, 1) == pytest.approx((8 + 20 * of_survey) / 40)


def test_what_members_follow_is_learned_for_surveys_of_which_nothing_is_known():
    other = evolve(SURVEY, survey_id=8, ir=20)
    rates = LearnedRates(surveys={7: (2000, 80)}).fitted([SURVEY, SURVEY, other])
    assert rates.follow == pytest.approx((80 + 20) / (2000 * 0.4 + 20))  # a survey counts once
    assert rates.chance(other) == pytest.approx(rates.follow * 0.2)


@given(counts, counts, st.integers(0, 100))
def test_a_chance_is_between_0_and_1_and_more_completes_never_lower_it(survey, quota, ir):
    of = evolve(SURVEY, ir=ir)
    rates = LearnedRates(surveys={7: survey}, quotas={1: quota}).fitted([of])
    assert 0 <= rates.chance(of, 1) <= 1
    invites, completes = quota
    if completes < invites:
        more = evolve(rates, quotas={1: (invites, completes + 1)})
        assert more.chance(of, 1) > rates.chance(of, 1)


def test_a_chance_is_at_most_1_and_weights_are_above_0():
    rates = LearnedRates(surveys={7: (1, 50)}, quotas={1: (0, 90)}).fitted([SURVEY])
    assert rates.chance(SURVEY) == rates.chance(SURVEY, 1) == 1.0
    for weight in (0, -1, float("nan")):
        with pytest.raises(InvalidRequestError, match="weight must be a number above 0"):
            LearnedRates(weight=weight)
