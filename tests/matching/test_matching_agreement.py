"""The index agrees with the reference, and with the simulator."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panel_kit import (
    AGE,
    CERTAIN,
    FEMALE,
    GENDER,
    KINDS,
    MALE,
    NO,
    OTHER,
    POSSIBLE,
    POSTAL,
    A,
    of_some,
    policies,
    profiles,
    quota,
    quota_lists,
    row,
    sub_quota,
    survey,
)

from sampling_async.matching import (
    MatchPolicy,
    QuestionKinds,
    QuotaIndex,
    Truth,
    _question,
    _segment,
)
from sampling_async.matching._bits import all_of, ascending, of_places, without
from sampling_async.matching._conditions import fitting
from sampling_async.matching._evaluate import evaluate, layer_truth
from sampling_async.matching._segment import Unions
from sampling_async.simulator import AGE_BANDS, Simulator, generate_inventory, generate_members


@settings(max_examples=400)
@given(quota_lists, st.lists(profiles, min_size=1, max_size=4), policies, st.booleans())
def test_the_index_agrees_with_the_reference(of_quotas, members, policy, is_large):
    quotas = [quota(*each, quota_id=at) for at, each in enumerate(of_quotas)]
    with pytest.MonkeyPatch.context() as patch:
        if is_large:  # all is as with thousands of quotas, of crossed layers and of postal codes
            patch.setattr(_question, "_LONG", 0)
            patch.setattr(_question, "_MANY", 2)
            patch.setattr(_question, "NARROW", 0)
            patch.setattr(_segment, "NARROW", 0)
            patch.setattr(_question, "_SPARSE", 4)
        index = QuotaIndex([survey(*quotas)], kinds=KINDS, policy=policy)
    for profile in members * 2:  # the second time from the cache
        matched = index.match(profile)
        for each in quotas:
            expected = evaluate(profile, each, KINDS, policy).truth
            found = (each.quota_id in matched.certain) * 2 or (each.quota_id in matched.possible) * 1
            assert found == expected


def test_the_index_agrees_with_the_reference_on_a_generated_inventory_and_without_a_cache(monkeypatch):
    inventory = generate_inventory(5, surveys=60)
    kinds = QuestionKinds.default().with_age(AGE, AGE_BANDS)
    for remembered in (2**25, 0):
        monkeypatch.setattr(_segment, "_REMEMBERED_BYTES", remembered)
        index = QuotaIndex(inventory, kinds=kinds)
        for member in generate_members(5, members=12):
            matched = index.match(member.profile)
            certain, possible = set(matched.certain), set(matched.possible)
            for each in inventory.surveys:
                for asked in each.quotas:
                    expected = evaluate(member.profile, asked, kinds, index.policy).truth
                    if each.is_survey_recontact:
                        expected = min(expected, POSSIBLE)
                    id_ = asked.quota_id
                    assert (id_ in certain) * 2 + (id_ in possible) == expected


def test_the_simulator_accepts_certain_quotas_and_refuses_impossible_ones():
    """The eligibility of the simulator was written separately, from the contract."""
    simulator = Simulator(seed=11, members=25, surveys=80)
    index = QuotaIndex(
        simulator.inventory, kinds=QuestionKinds.default().with_age(AGE, AGE_BANDS), policy=MatchPolicy()
    )
    counted = {CERTAIN: 0, POSSIBLE: 0, NO: 0}
    for member in simulator.members.values():
        matched = index.match(
            member.profile,
            device_type=member.device_type_id,
            participations=member.participations,
        )
        for quota_id in index.quota_ids:
            code = simulator.eligible(member.member_code, quota_id)
            if quota_id in matched.certain:
                counted[CERTAIN] += 1
                assert code == 1
            elif quota_id in matched.possible:
                counted[POSSIBLE] += 1
            else:
                counted[NO] += 1
                assert code != 1
    assert min(counted.values()) > 100


def test_long_postal_lists_answer_the_same_while_they_move_to_a_table():
    lists = [[f"{first * 100 + code:05}" for code in range(0, 200, 2)] for first in range(6)]
    quotas = [quota([sub_quota(row(POSTAL, *codes))], quota_id=at) for at, codes in enumerate(lists)]
    index = QuotaIndex([survey(*quotas)])
    for code in range(0, 720, 16):  # each answer is a new one, and moves one list more
        found = set(index.match({POSTAL: f"{code:05}"}).certain)
        assert found == {at for at, codes in enumerate(lists) if f"{code:05}" in codes}


@given(st.sets(st.integers(0, 10**4)) | st.sets(st.integers(0, 300)))
def test_a_set_is_made_of_places(places):
    assert list(ascending(of_places(places))) == sorted(places)


@given(st.lists(st.lists(st.integers(0, 2000), max_size=5), max_size=200), st.data())
def test_bit_sets_behave_like_sets(sets, data):
    chosen = data.draw(st.sets(st.integers(0, max(0, len(sets) - 1)), max_size=len(sets)))
    bits = all_of(1 << place for place in chosen)
    assert list(ascending(bits)) == sorted(chosen)
    united = Unions(sets).of(bits if sets else 0)
    assert set(ascending(united)) == set().union(*(sets[place] for place in chosen if sets))
    assert set(ascending(without(bits, united))) == chosen - set(ascending(united))


def test_the_cache_is_bounded_whatever_the_answers(monkeypatch):
    monkeypatch.setattr(_segment, "_REMEMBERED_BYTES", 100_000)
    index = QuotaIndex(of_some(survey(quota([sub_quota(A, row(POSTAL, "1"))]))))
    segment = index._parts[0].segment
    for number in range(2000):
        index.match({OTHER: range(number, number + 1 + number % 100), POSTAL: str(number) * (number % 50)})
        kept = [key for each in segment._remembered for key in each]
        assert sum(100 + 100 * len(key) for key in kept) <= 150_000
        assert all(len(key) <= 64 for key in kept)


@pytest.mark.parametrize("remembered", [2**25, 3000, 0])
@pytest.mark.parametrize("sparse", [1, 4, 1000])
def test_crossed_layers_answer_the_same_however_many_needs_are_met_and_answers_remembered(
    monkeypatch, sparse, remembered
):
    """Needs are kept as lists, as lists and sets, or as sets; the cache is large, soon full, or none."""
    monkeypatch.setattr(_question, "NARROW", 0)
    monkeypatch.setattr(_segment, "NARROW", 0)
    monkeypatch.setattr(_question, "_SPARSE", sparse)
    monkeypatch.setattr(_segment, "_REMEMBERED_BYTES", remembered)
    genders, routable = (
        [row(GENDER, FEMALE), row(GENDER, MALE)],
        [row(OTHER, 1, 2, routable=True), row(OTHER, 3)],
    )
    ages = [row(AGE, "18-34"), row(AGE, "30-99")]
    crossed = [
        [sub_quota(*rows, full=at == full) for at, rows in enumerate(product(*questions))]
        for full in (-1, 1)
        for questions in ((genders, ages), (genders, routable), (genders, ages, routable), (ages, routable))
    ]
    crossed.append([sub_quota(*genders, ages[0]), sub_quota(ages[1]), sub_quota()])
    quotas = [quota(*layers, quota_id=at) for at, layers in enumerate(product(crossed, crossed))]
    index = QuotaIndex([survey(*quotas)], kinds=KINDS)
    answered = product((None, MALE, FEMALE, [MALE, FEMALE]), (None, 20, 32, 50), (None, 1, 3, [2, 3]))
    for gender, age, other in list(answered) * 2:
        profile = {GENDER: gender, AGE: age, OTHER: other}
        matched = index.match(profile)
        certain, possible = set(matched.certain), set(matched.possible)
        for each in quotas:
            expected = evaluate(profile, each, KINDS, index.policy).truth
            assert (each.quota_id in certain) * 2 + (each.quota_id in possible) == expected


def by_counting(truths, full, *, exactly_one: bool) -> Truth:
    """Return the result of a layer for one member, from the counts of its sub-quotas."""
    pairs = list(zip(truths, full, strict=True))
    certain_full = sum(truth == CERTAIN and is_full for truth, is_full in pairs)
    certain_open = sum(truth == CERTAIN and not is_full for truth, is_full in pairs)
    possible_full = sum(truth >= POSSIBLE and is_full for truth, is_full in pairs)
    possible_open = sum(truth >= POSSIBLE and not is_full for truth, is_full in pairs)
    if certain_full or not possible_open or (exactly_one and certain_open > 1):
        return NO
    if exactly_one:
        return CERTAIN if certain_open == possible_open + possible_full == 1 else POSSIBLE
    return CERTAIN if certain_open and not possible_full else POSSIBLE


@pytest.mark.parametrize("exactly_one", [True, False])
@pytest.mark.parametrize("count", range(5))
def test_the_rule_of_a_layer_agrees_with_counting_in_all_cases(count, exactly_one):
    """For one member at a time, and for all members at once, one bit each."""
    cases = [
        (truths, full)
        for truths in product(Truth, repeat=count)
        for full in product((False, True), repeat=count)
    ]
    everybody = (1 << len(cases)) - 1
    sets = [
        tuple(
            sum(1 << member for member, (truths, full) in enumerate(cases) if fits(truths[at], full[at]))
            for fits in (
                lambda truth, _: truth == CERTAIN,
                lambda truth, _: truth >= POSSIBLE,
                lambda _, is_full: is_full,
            )
        )
        for at in range(count)
    ]
    together = fitting(sets, 0, exactly_one=exactly_one)
    assert together.certain | together.possible == together.possible <= everybody
    policy = MatchPolicy(subquota_rule="exactly_one" if exactly_one else "at_least_one")
    for member, (truths, full) in enumerate(cases):
        expected = by_counting(truths, full, exactly_one=exactly_one)
        found = together.certain >> member & 1, together.possible >> member & 1
        assert found == (expected == CERTAIN, expected >= POSSIBLE)
        assert layer_truth(truths, full, policy)[0] == expected
