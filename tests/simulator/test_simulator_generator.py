"""Generated inventories and members: the shape of real bodies, at any size."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st
from panel_kit import AGE, DMA, GENDER, MSA, NOW, POSTAL

from sampling_async import Quotas, from_json, to_json
from sampling_async.simulator import generate_inventory, generate_members

if TYPE_CHECKING:
    from sampling_async import QuestionAndAnswers


def conditions_of(inventory: Quotas) -> list[QuestionAndAnswers]:
    return [
        condition
        for survey in inventory.surveys
        for quota in survey.quotas
        for layer in quota.layers
        for part in layer.sub_quotas
        for condition in part.questions_and_answers
    ]


@settings(max_examples=25)
@given(seed=st.integers(), surveys=st.integers(0, 30))
def test_any_inventory_keeps_the_rules_of_real_bodies(seed: int, surveys: int):
    inventory = generate_inventory(seed, surveys=surveys)
    quotas = [quota for survey in inventory.surveys for quota in survey.quotas]
    assert len(inventory.surveys) == surveys
    assert len({(survey.survey_id, survey.wave_id) for survey in inventory.surveys}) == surveys
    assert len({quota.quota_id for quota in quotas}) == len(quotas)
    for survey in inventory.surveys:
        assert 1 <= len(survey.quotas) <= 10
        assert survey.scheduled_completion_date.tzinfo is None
        assert 0 < survey.estimated_completes_remaining <= survey.completes_required
        assert survey.price.amount > 0
    for quota in quotas:
        assert 0 < quota.estimated_completes_remaining <= quota.completes_required
        assert quota.layers
        for layer in quota.layers:
            assert layer.sub_quotas
            assert all(0 <= s.current_completes <= s.max_target_completes for s in layer.sub_quotas)
    for condition in conditions_of(inventory):
        assert bool(condition.answer_ids) != bool(condition.answer_values)
        assert len(condition.answer_values) <= 1000
    assert from_json(Quotas, to_json(inventory)) == inventory


def test_an_inventory_depends_only_on_the_seed():
    assert generate_inventory(4, surveys=9) == generate_inventory(Random("4/inventory"), surveys=9)
    assert generate_inventory(4, surveys=9) != generate_inventory(5, surveys=9)
    members = generate_members(4, members=9)
    assert members == generate_members(4, members=9)
    assert members != generate_members(5, members=9)


def test_a_large_inventory_has_all_features_of_real_ones():
    inventory = generate_inventory(2, surveys=400, as_of=NOW)
    surveys, conditions = inventory.surveys, conditions_of(inventory)
    spread = [len(survey.quotas) for survey in surveys]
    assert 2 <= statistics.mean(spread) <= 3
    assert max(spread) == 10
    assert {len(quota.layers) for survey in surveys for quota in survey.quotas} == {1, 2, 3, 4}
    assert any(condition.is_routable for condition in conditions)
    assert any(survey.survey_wave_exclusions for survey in surveys)
    assert sum(survey.is_survey_recontact for survey in surveys) == 20
    assert len({survey.device_type_ids for survey in surveys}) == 3
    past = sum(survey.scheduled_completion_date < NOW.replace(tzinfo=None) for survey in surveys)
    assert 0.2 < past / len(surveys) < 0.5


def test_every_kind_of_condition_occurs():
    conditions = conditions_of(generate_inventory(2, surveys=400))
    kinds = Counter((c.question_id, bool(c.answer_ids)) for c in conditions)
    assert {(AGE, True), (AGE, False), (GENDER, True), (POSTAL, False), (DMA, False), (MSA, False)} <= set(
        kinds
    )
    ages = {value for c in conditions if c.question_id == AGE for value in c.answer_values}
    assert all(re.fullmatch(r"\d\d-\d\d", value) for value in ages)
    assert any(value.endswith("-99") for value in ages)
    assert any(len(c.answer_values) > 1 for c in conditions if c.question_id == AGE)
    postal = [c.answer_values for c in conditions if c.question_id == POSTAL]
    assert any(len(listed) == 1000 for listed in postal)
    assert any(len(listed) > len(set(listed)) for listed in postal)
    assert any(max(map(len, listed)) == 3 for listed in postal)
    assert any(listed[0].startswith("0") for listed in postal)


def test_members_take_their_past_from_the_exclusions_of_the_inventory():
    inventory = generate_inventory(2, surveys=100)
    members = generate_members(2, members=40, inventory=inventory, first=41)
    named = {e.survey_id for survey in inventory.surveys for e in survey.survey_wave_exclusions}
    past = {p.survey_id for member in members for p in member.participations}
    assert past
    assert past <= named
    assert [member.member_code for member in members][:2] == ["m000041", "m000042"]
    assert all({AGE, GENDER, POSTAL, DMA, MSA} <= member.profile.keys() for member in members)
