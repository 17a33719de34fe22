"""Matching: what rows, sub-quotas, layers and quotas come to; the index agrees with the reference."""

from __future__ import annotations

import inspect
import pickle

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from matching_kit import (
    AGE,
    CERTAIN,
    DMA,
    FEMALE,
    GENDER,
    KINDS,
    MALE,
    MSA,
    NO,
    OTHER,
    POSSIBLE,
    POSTAL,
    panel_of,
    policies,
    profiles,
    quota,
    quota_lists,
    row,
    sub_quota,
    survey,
)

from sampling_async import (
    InvalidRequestError,
    InviteRequest,
    Price,
    QuestionAndAnswers,
    Quota,
    Quotas,
    SubQuota,
    Survey,
    SurveyWaveExclusion,
    from_json,
    matching,
    to_json,
)
from sampling_async.matching import (
    Counts,
    MatchPolicy,
    Member,
    PanelMatcher,
    Participation,
    QuestionKinds,
    QuotaIndex,
    TopK,
    Truth,
    _index,
    _segment,
)
from sampling_async.matching._bits import Unions, all_of, ascending, without
from sampling_async.matching._evaluate import evaluate
from sampling_async.simulator import AGE_BANDS, Simulator, generate_inventory, generate_members


def truth(profile, asked: Quota, *, kinds: QuestionKinds = KINDS, **policy) -> Truth:
    """Return what a quota comes to, by the index, the reference and a panel of one member alike."""
    index = QuotaIndex([survey(asked)], kinds=kinds, policy=MatchPolicy(**policy))
    matched = index.match(profile)
    found = CERTAIN if matched.certain else POSSIBLE if matched.possible else NO
    assert found == index.explain(profile, asked.quota_id).truth
    assert (len(matched.certain), len(matched.possible)) == (found == CERTAIN, found == POSSIBLE)
    (counted,) = PanelMatcher(index, Counts()).run(panel_of([profile])).read_all().to_pylist()
    assert (counted["certain"], counted["possible"]) == (found == CERTAIN, found == POSSIBLE)
    return found


def of_row(answer, asked: QuestionAndAnswers, **policy) -> Truth:
    profile = {} if answer is None else {asked.question_id: answer}
    return truth(profile, quota([sub_quota(asked)]), **policy)


# --- Conditions


class Whole:
    """A whole number that is no int, as those of other libraries are."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __index__(self) -> int:
        return self._number


def test_an_answer_id_that_is_listed_is_certain():
    assert of_row(MALE, row(GENDER, MALE)) == CERTAIN
    assert of_row(FEMALE, row(GENDER, MALE)) == NO
    assert of_row([5, 6], row(OTHER, 4, 6)) == CERTAIN
    assert of_row({"6"}, row(OTHER, 4, 6)) == CERTAIN
    assert of_row(str(MALE), row(GENDER, MALE)) == CERTAIN
    assert of_row(Whole(MALE), row(GENDER, MALE)) == CERTAIN


@pytest.mark.parametrize(
    ("years", "values", "expected"),
    [
        (18, ("18-24",), CERTAIN),
        (24, ("18-24",), CERTAIN),
        (25, ("18-24",), NO),
        (17, ("18-24",), NO),
        (50, ("45-54", "18-44"), CERTAIN),
        (30, ("45-54", "18-44"), CERTAIN),
        (101, ("65-99",), CERTAIN),
        (101, ("65-100",), CERTAIN),
        (101, ("65-98",), NO),
        (21, ("21",), CERTAIN),
        (30, (" 18 - 44 ",), CERTAIN),
        ("30", ("18-44",), CERTAIN),
    ],
)
def test_age_is_in_inclusive_ranges_of_which_those_to_99_are_open(years, values, expected):
    assert of_row(years, row(AGE, *values)) == expected


def test_age_bands_by_answer_ids_are_met_by_the_same_age():
    assert of_row(20, row(AGE, 11)) == CERTAIN
    assert of_row(30, row(AGE, 11)) == NO
    assert of_row(120, row(AGE, 12)) == CERTAIN
    assert of_row(30, row(AGE, 11, "30-40")) == CERTAIN


@pytest.mark.parametrize("value", ["65+", "18-", "old", "", "44-18", "18-24-30"])
def test_an_unreadable_age_range_is_possible_with_a_diagnostic(value):
    asked = row(AGE, value, "30-40")
    assert of_row(20, asked) == POSSIBLE
    assert of_row(35, asked) == CERTAIN
    (odd,) = QuotaIndex([survey(quota([sub_quota(asked)]))]).diagnostics
    assert (odd.survey_id, odd.quota_id, odd.path) == (3, 7, "Layers[0].SubQuotas[0]")
    assert "no range of years" in odd.message


def test_an_unknown_band_of_age_is_possible_with_a_diagnostic():
    assert of_row(20, row(AGE, 99999)) == POSSIBLE
    (odd,) = QuotaIndex([survey(quota([sub_quota(row(AGE, 99999))]))]).diagnostics
    assert "no known band" in odd.message


def test_dma_and_msa_carry_answer_ids_as_texts():
    for question_id in (DMA, MSA):
        assert of_row(501, row(question_id, "501", " 502")) == CERTAIN
        assert of_row(502, row(question_id, "501", " 502")) == CERTAIN
        assert of_row(503, row(question_id, "501", " 502")) == NO
        assert of_row(503, row(question_id, "501", "x")) == POSSIBLE


def test_a_postal_code_is_matched_by_its_beginning_without_blanks_hyphens_and_case():
    assert of_row("10011", row(POSTAL, "100", "200")) == CERTAIN
    assert of_row("10111", row(POSTAL, "100", "200")) == NO
    assert of_row("sw1a-1AA", row(POSTAL, "SW1A 1")) == CERTAIN
    assert of_row("SW1 A1AA", row(POSTAL, "sw-1a")) == CERTAIN
    assert of_row("sw1a 1aa", row(POSTAL, "100", "SW1A")) == CERTAIN
    assert of_row("SW1A 1AA", row(POSTAL, "100", "sw1a")) == CERTAIN
    assert of_row("100", row(POSTAL, "10011")) == NO


def test_a_miss_in_a_cut_postal_list_is_possible():
    """Counted as they came: published lists of a thousand hold some codes twice."""
    cut = row(POSTAL, *["10001", "10001"] * 500)
    assert of_row("99999", cut) == POSSIBLE
    assert of_row("10001", cut) == CERTAIN
    assert of_row("99999", cut, truncated_postal="no") == NO
    assert of_row("99999", row(POSTAL, *["10001"] * 999)) == NO


def test_no_answer_is_no_more_possible_for_a_cut_list_than_for_a_whole_one():
    cut = ["10001"] * 1000
    assert of_row(None, row(POSTAL, *cut)) == NO
    assert of_row(None, row(POSTAL, *cut, routable=True)) == POSSIBLE
    assert of_row(None, row(POSTAL, *cut, routable=True), missing="no") == NO
    assert of_row(None, row(POSTAL, *cut), missing="possible") == POSSIBLE


def test_an_empty_postal_code_matches_nobody_and_is_told():
    assert of_row("10001", row(POSTAL, "", "2")) == POSSIBLE
    assert of_row("20001", row(POSTAL, "", "2")) == CERTAIN


def test_answer_ids_of_a_postal_code_are_not_understood():
    assert of_row("10001", row(POSTAL, 5)) == POSSIBLE


def test_no_answer_is_possible_where_the_service_asks():
    assert of_row(None, row(OTHER, 1, routable=True)) == POSSIBLE
    assert of_row(None, row(OTHER, 1)) == NO
    assert of_row(None, row(OTHER, 1), missing="possible") == POSSIBLE
    assert of_row(None, row(OTHER, 1, routable=True), missing="no") == NO
    for nothing in ([], (), set(), None, "", "  "):
        assert truth({OTHER: nothing}, quota([sub_quota(row(OTHER, 1, routable=True))])) == POSSIBLE


def test_an_unregistered_question_with_values_only_is_possible_with_a_diagnostic():
    assert of_row(5, row(OTHER, "5")) == POSSIBLE
    assert of_row(None, row(OTHER, "5")) == POSSIBLE
    assert of_row(5, row(OTHER, 5, "x")) == CERTAIN
    (odd,) = QuotaIndex([survey(quota([sub_quota(row(OTHER, "5"))]))]).diagnostics
    assert "no registered kind" in odd.message


def test_a_row_that_lists_nothing_is_possible_with_a_diagnostic():
    for question_id in (AGE, POSTAL, DMA, OTHER):
        assert of_row("30", row(question_id)) == POSSIBLE
        (odd,) = QuotaIndex([survey(quota([sub_quota(row(question_id))]))]).diagnostics
        assert "neither" in odd.message


# --- Sub-quotas


def test_rows_of_the_same_question_are_alternatives():
    assert truth({OTHER: 2}, quota([sub_quota(row(OTHER, 1), row(OTHER, 2))])) == CERTAIN
    assert truth({OTHER: 3}, quota([sub_quota(row(OTHER, 1), row(OTHER, 2))])) == NO


def test_different_questions_must_all_be_met_and_the_weakest_counts():
    both = quota([sub_quota(row(GENDER, MALE), row(OTHER, 1, routable=True))])
    assert truth({GENDER: MALE, OTHER: 1}, both) == CERTAIN
    assert truth({GENDER: MALE}, both) == POSSIBLE
    assert truth({GENDER: FEMALE}, both) == NO
    assert truth({GENDER: MALE, OTHER: 2}, both) == NO


def test_a_sub_quota_without_questions_is_possible_with_a_diagnostic():
    assert truth({}, quota([sub_quota()])) == POSSIBLE
    assert truth({GENDER: MALE}, quota([sub_quota(), sub_quota(row(GENDER, MALE))])) == POSSIBLE
    assert len(QuotaIndex([survey(quota([sub_quota()]))]).diagnostics) == 1


# --- Layers

A, B = row(OTHER, 1), row(OTHER, 2)
ASKED = row(1008888, 1, routable=True)


@pytest.mark.parametrize(
    ("layer", "answer", "exactly", "at_least"),
    [
        ([sub_quota(A), sub_quota(B)], 1, CERTAIN, CERTAIN),
        ([sub_quota(A), sub_quota(B)], 3, NO, NO),
        ([sub_quota(A), sub_quota(B)], [1, 2], NO, CERTAIN),
        ([sub_quota(A, full=True), sub_quota(B)], 1, NO, NO),
        ([sub_quota(A, full=True), sub_quota(B)], 2, CERTAIN, CERTAIN),
        ([sub_quota(A, full=True), sub_quota(B)], [1, 2], NO, NO),
        ([sub_quota(A, full=True), sub_quota(B, full=True)], 1, NO, NO),
        ([sub_quota(A), sub_quota(ASKED)], 1, POSSIBLE, CERTAIN),
        ([sub_quota(A), sub_quota(ASKED)], 3, POSSIBLE, POSSIBLE),
        ([sub_quota(A), sub_quota(ASKED, full=True)], 1, POSSIBLE, POSSIBLE),
        ([sub_quota(A), sub_quota(ASKED, full=True)], 3, NO, NO),
        ([sub_quota(A, full=True), sub_quota(ASKED)], 1, NO, NO),
        ([sub_quota(ASKED, full=True)], 1, NO, NO),
        ([], 1, NO, NO),
    ],
)
def test_a_layer_holds_by_what_is_certain_possible_open_and_full(layer, answer, exactly, at_least):
    assert truth({OTHER: answer}, quota(layer)) == exactly
    assert truth({OTHER: answer}, quota(layer), subquota_rule="at_least_one") == at_least


def test_full_sub_quotas_count_as_open_where_they_are_to_be_ignored():
    assert truth({OTHER: 1}, quota([sub_quota(A, full=True), sub_quota(B)]), full="ignored") == CERTAIN


def test_no_target_counts_as_full_with_a_diagnostic():
    none = SubQuota(1, 0, 0, (A,))
    assert truth({OTHER: 1}, quota([none])) == NO
    (odd,) = QuotaIndex([survey(quota([none]))]).diagnostics
    assert "MaxTargetCompletes" in odd.message


# --- Quotas


def test_a_quota_is_its_weakest_layer_and_without_layers_for_everybody():
    assert truth({}, quota()) == CERTAIN
    assert truth({OTHER: 1, GENDER: MALE}, quota([sub_quota(A)], [sub_quota(row(GENDER, MALE))])) == CERTAIN
    assert truth({OTHER: 1}, quota([sub_quota(A)], [sub_quota(ASKED)])) == POSSIBLE
    assert truth({OTHER: 2}, quota([sub_quota(A)], [sub_quota(ASKED)])) == NO


# --- The index against the reference


@settings(max_examples=400)
@given(quota_lists, st.lists(profiles, min_size=1, max_size=4), policies)
def test_the_index_agrees_with_the_reference(of_quotas, members, policy):
    quotas = [quota(*each, quota_id=at) for at, each in enumerate(of_quotas)]
    index = QuotaIndex([survey(*quotas)], kinds=KINDS, policy=policy)
    for profile in members * 2:  # the second time from what is remembered
        matched = index.match(profile)
        for each in quotas:
            expected = evaluate(profile, each, KINDS, policy).truth
            found = (each.quota_id in matched.certain) * 2 or (each.quota_id in matched.possible) * 1
            assert found == expected


def test_it_does_so_on_a_generated_inventory_and_when_nothing_can_be_remembered(monkeypatch):
    inventory = generate_inventory(5, surveys=60)
    kinds = QuestionKinds.default().with_age(AGE, AGE_BANDS)
    for remembered in (2**25, 0):
        monkeypatch.setattr(_segment, "_REMEMBERED_BYTES", remembered)
        monkeypatch.setattr(_segment, "_UNIONS_BYTES", remembered)
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


def test_the_simulator_accepts_what_is_certain_and_refuses_what_is_not_possible():
    """Its own eligibility was written separately, against the contract."""
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


# --- Bits


@given(st.lists(st.integers(0, 2**70), max_size=40), st.data())
def test_sets_of_bits_are_sets(sets, data):
    places = data.draw(st.sets(st.integers(0, max(0, len(sets) - 1)), max_size=len(sets)))
    bits = all_of(1 << place for place in places)
    assert list(ascending(bits)) == sorted(places)
    chosen = set().union(*(set(ascending(sets[place])) for place in places if sets))
    for most in (0, 10**6):
        unions = Unions(sets, most)
        for _ in range(2):
            assert set(ascending(unions.of(bits if sets else 0))) == chosen
    if sets:
        assert without(sets[0], sets[-1]) == sets[0] & ~sets[-1]


# --- Results


def many() -> QuotaIndex:
    surveys = [
        survey(
            quota([sub_quota(A)], quota_id=10 * at, remaining=at),
            quota([sub_quota(ASKED)], quota_id=10 * at + 1, remaining=50 - at),
            quota([sub_quota(A)], quota_id=10 * at + 2, remaining=100 + at),
            survey_id=at,
            device_type_ids=(1,) if at % 2 else (),
            price=Price(at, 1),
        )
        for at in range(1, 6)
    ]
    return QuotaIndex(surveys)


def test_results_are_in_the_order_of_the_rank_by_default_the_most_wanted_first():
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


def test_the_best_are_selected_certain_ones_first_and_one_of_a_survey():
    matched = many().match({OTHER: 1})
    assert matched.select(3) == (52, 42, 32)
    assert matched.select(100) == (52, 42, 32, 22, 12)
    assert matched.select(12, one_per_survey=False) == (*matched.certain, 11, 21)
    assert matched.select(0) == ()
    for wrong in (-1, 2.5, "3"):
        with pytest.raises(InvalidRequestError, match="how many"):
            matched.select(wrong)


def test_requests_are_what_a_fan_out_takes():
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
    with pytest.raises(InvalidRequestError, match=r"members\[1\]: profile\[1009999\]: answers are"):
        list(index.requests([members[0], Member("m2", {OTHER: 1.5})]))


# --- Masks


def test_surveys_for_other_devices_are_left_out_and_those_that_name_none_are_not():
    index = many()
    assert list(index.match({OTHER: 1}, device_type=2).certain) == [42, 22, 40, 20]
    assert len(index.match({OTHER: 1}, device_type=1).certain) == 10


def test_surveys_that_were_taken_are_left_out():
    assert list(many().match({OTHER: 1}, exclude_surveys={5, 4, 99}).certain) == [32, 22, 12, 30, 20, 10]


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


def test_closing_a_quota_takes_it_out_at_once():
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
    with pytest.raises(InvalidRequestError, match="not as one text"):
        index.recontact(7, "m1")


def test_a_list_counts_for_a_quota_of_any_survey():
    others = [[], [survey(quota([sub_quota(A)], quota_id=8), survey_id=4, is_survey_recontact=True)]]
    for more in others:
        index = QuotaIndex([survey(quota([sub_quota(A)])), *more])
        index.recontact(7, ["m1"])
        assert 7 in index.match({OTHER: 1}, member_code="m1").certain
        assert 7 not in index.match({OTHER: 1}, member_code="m2").certain


# --- Newer inventories


def with_remaining(inventory: Quotas, at: int, remaining: int) -> Quotas:
    surveys = list(inventory.surveys)
    first, *others = surveys[at].quotas
    surveys[at] = evolve(surveys[at], quotas=(evolve(first, estimated_completes_remaining=remaining), *others))
    return evolve(inventory, surveys=tuple(surveys))


def same(index: QuotaIndex, fresh: QuotaIndex, profiles) -> bool:
    pairs = [(index.match(profile), fresh.match(profile)) for profile in profiles]
    return all(
        list(one.certain) == list(other.certain)
        and list(one.possible) == list(other.possible)
        and one.select(20) == other.select(20)
        for one, other in pairs
    )


def test_an_updated_index_is_as_a_fresh_one():
    inventory = generate_inventory(8, surveys=60)
    people = [member.profile for member in generate_members(8, members=10)]
    index = first = QuotaIndex(inventory)
    steps = [
        with_remaining(inventory, 3, 777),
        with_remaining(with_remaining(inventory, 3, 777), 9, 0),
        evolve(inventory, surveys=inventory.surveys[4:]),
        inventory,
        evolve(inventory, surveys=(*inventory.surveys[1:], *generate_inventory(9, surveys=2).surveys)),
        generate_inventory(10, surveys=30),
        evolve(inventory, surveys=()),
        inventory,
    ]
    for newer in steps:
        newer = from_json(Quotas, to_json(newer))  # noqa: PLW2901  nothing of it is the same object
        index = index.updated(newer)
        fresh = QuotaIndex(newer)
        assert same(index, fresh, people)
        assert len(index) == len(fresh)
        assert sorted(map(str, index.diagnostics)) == sorted(map(str, fresh.diagnostics))
    assert same(first, QuotaIndex(inventory), people)


def test_only_what_changed_is_compiled_again():
    inventory = generate_inventory(8, surveys=60)
    index = QuotaIndex(inventory)
    updated = index.updated(with_remaining(inventory, 3, 777))
    assert [len(part.targets) for part in updated._parts[1:]] == [len(inventory.surveys[3].quotas)]
    assert updated._parts[0] is index._parts[0]


@st.composite
def inventories_in_a_row(draw) -> list[list[Survey]]:
    """Return inventories of a few surveys, into which quotas come, go, change and move; some list one twice."""
    rows = st.sampled_from((A, B, ASKED, row(AGE, "old"), row(OTHER)))
    number = st.integers(1, 12)
    surveys: dict[int, Survey] = {}
    steps: list[list[Survey]] = []
    for _ in range(draw(st.integers(2, 8))):
        for survey_id in draw(st.lists(number, max_size=3, unique=True)):
            ids = draw(st.lists(number, max_size=3, unique=True))
            if not draw(st.integers(0, 9)):
                taken: set[int] = set()
            else:
                taken = {each.quota_id for one in surveys.values() for each in one.quotas}
            quotas = [
                quota([sub_quota(draw(rows))], quota_id=id_, remaining=draw(st.integers(1, 2)))
                for id_ in ids
                if id_ not in taken
            ]
            if draw(st.booleans()):
                surveys.pop(survey_id, None)
            else:
                surveys[survey_id] = survey(*quotas, survey_id=survey_id)
        listed = list(surveys.values())
        if not draw(st.integers(0, 9)):
            listed += listed[:1]
        # Some are the same objects as before, others only equal.
        steps.append([evolve(each) if draw(st.booleans()) else each for each in listed])
    return steps


def told(index: QuotaIndex) -> tuple[object, ...]:
    """Return all that an index says, and a panel matched with it."""
    profiles = ({}, {OTHER: 1}, {OTHER: 2}, {OTHER: 9, AGE: 30})
    matched = [index.match(profile) for profile in profiles]
    return (
        list(index.quota_ids),
        sorted(map(str, index.diagnostics)),
        [(list(each.certain), list(each.possible), each.select(5)) for each in matched],
        [(id_, str(index.explain(profile, id_))) for profile in profiles for id_ in index.quota_ids],
        [id_ for id_ in range(1, 13) if not is_explained(index, id_)],
        PanelMatcher(index, TopK(50)).run(panel_of(profiles, member_code=list("abcd"))).read_all(),
    )


def is_explained(index: QuotaIndex, quota_id: int) -> bool:
    try:
        index.explain({}, quota_id)
    except KeyError:
        return False
    return True


@given(inventories_in_a_row(), st.integers(0, 40), st.data())
def test_an_index_updated_again_and_again_is_as_a_fresh_one(steps, still, data):
    # What never changes, so that little of the inventory does.
    others = [survey(quota([sub_quota(A)], quota_id=at), survey_id=at) for at in range(100, 100 + still)]
    index = QuotaIndex(others)
    seen: list[tuple[QuotaIndex, list[Survey]]] = []
    for special in steps:
        newer = [*special, *others]
        index = index.updated(newer)
        assert told(index) == told(QuotaIndex(newer))
        assert len(index._parts) <= 3
        seen.append((index, newer))
        index = index.updated(newer)  # nothing has changed: what was closed is open again, here only
        closed = data.draw(st.sampled_from([None, *index.quota_ids]))
        if closed is not None:
            index.close(closed)
            assert closed not in index.quota_ids
            assert index.explain({}, closed).what is not None
            index.recontact(closed, ["m"])
    for older, inventory in seen:
        assert told(older) == told(QuotaIndex(inventory))
        assert told(older.updated(others)) == told(QuotaIndex(others))


def test_what_changed_before_is_not_compiled_with_every_later_change(monkeypatch):
    compiled: list[int] = []
    part = _index._Part

    def counted(surveys, *others):
        surveys = list(surveys)
        compiled.append(len(surveys))
        return part(surveys, *others)

    monkeypatch.setattr(_index, "_Part", counted)
    listed = {at: survey(quota([sub_quota(A)], quota_id=at), survey_id=at) for at in range(1000)}
    index = QuotaIndex(listed.values())
    for step in range(400):
        listed[step * 10 % 999] = survey(
            quota([sub_quota(B)], quota_id=step * 10 % 999), survey_id=step * 10 % 999, loi=step
        )
        index = index.updated(listed.values())
        assert len(index._parts) <= 3
        assert sum(len(each.targets) for each in index._parts) < 1500
    assert compiled[:3] == [1000, 1, 2]
    assert sum(compiled[1:]) / 400 < 30
    assert same(index, QuotaIndex(listed.values()), [{OTHER: 1}, {OTHER: 2}])


def test_surveys_without_quotas_make_no_parts():
    listed = [survey(quota([sub_quota(A)], quota_id=at), survey_id=at) for at in range(100)]
    index = QuotaIndex(listed)
    for step in range(20):
        index = index.updated([*listed, survey(survey_id=1000, loi=step)])
    assert len(index._parts) == 1
    assert len(index) == 100


def test_what_is_listed_twice_counts_once():
    twice = quota([sub_quota(A)])
    surveys = [survey(twice), survey(twice)]
    for index in (QuotaIndex(surveys), QuotaIndex(surveys).updated(surveys), QuotaIndex([]).updated(surveys)):
        assert list(index.match({OTHER: 1}).certain) == [7]
        assert [odd.message for odd in index.diagnostics] == [
            "a quota that is listed twice: the first one counts"
        ]
        index.close(7)
        assert not index.match({OTHER: 1}).certain


def test_a_quota_that_another_survey_lists_too_counts_once_after_an_update():
    old = [survey(quota([sub_quota(A)], quota_id=at), survey_id=at) for at in range(1, 40)]
    new = [*old, survey(quota([sub_quota(B)], quota_id=3), survey_id=99)]
    updated, fresh = QuotaIndex(old).updated(new), QuotaIndex(new)
    for answer in (1, 2):
        assert list(updated.match({OTHER: answer}).certain) == list(fresh.match({OTHER: answer}).certain)


def of_some(*special: Survey) -> list[Survey]:
    """Return surveys of which a few are special, so that an update does not compile all of them."""
    return [*special, *(survey(quota([sub_quota(ASKED)], quota_id=at), survey_id=at) for at in range(100, 160))]


def test_an_update_after_something_was_listed_twice_is_as_a_fresh_index():
    first = survey(quota([sub_quota(A)], quota_id=1), survey_id=1)
    second = survey(quota([sub_quota(B)], quota_id=1), survey_id=2)
    changed = evolve(second, loi=99)
    alike = survey(quota([sub_quota(B)], quota_id=2), survey_id=1)  # the same survey and wave
    steps = [
        ((first, second), (first,)),
        ((first, second), (second,)),
        ((first, second), (first, changed)),
        ((first, second), (second, first)),
        ((first, alike), (alike,)),
        ((first, alike), ()),
        ((first, first), (first,)),
    ]
    for before, after in steps:
        updated = QuotaIndex(of_some(*before)).updated(of_some(*after))
        fresh = QuotaIndex(of_some(*after))
        assert same(updated, fresh, [{OTHER: 1}, {OTHER: 2}])
        assert updated.diagnostics == fresh.diagnostics


def test_a_quota_that_is_gone_is_not_explained_as_closed():
    gone = survey(quota([sub_quota(A)], quota_id=1), survey_id=1)
    index = QuotaIndex(of_some(gone)).updated(of_some())
    with pytest.raises(KeyError):
        index.explain({OTHER: 1}, 1)


def test_what_is_remembered_is_bounded_whatever_the_answers(monkeypatch):
    monkeypatch.setattr(_segment, "_REMEMBERED_BYTES", 100_000)
    index = QuotaIndex(of_some(survey(quota([sub_quota(A, row(POSTAL, "1"))]))))
    segment = index._parts[0].segment
    for number in range(2000):
        index.match({OTHER: range(number, number + 1 + number % 100), POSTAL: str(number) * (number % 50)})
        kept = [key for each in segment._remembered for key in each]
        assert sum(100 + 100 * len(key) for key in kept) <= 150_000
        assert all(len(key) <= 64 for key in kept)


def test_an_answer_that_can_be_read_once_is_read_once():
    old = [survey(quota([sub_quota(A)], quota_id=at), survey_id=at) for at in range(1, 40)]
    index = QuotaIndex(old).updated([*old, survey(quota([sub_quota(A)], quota_id=99), survey_id=99)])
    assert len(index._parts) == 2
    assert len(index.match({OTHER: (one for one in (1, 5))}).certain) == 40
    assert index.explain({OTHER: iter([1])}, 99).truth == CERTAIN

    class Once:
        def __init__(self) -> None:
            self._answers = iter([1])

        def __iter__(self):
            return self._answers

    assert len(index.match({OTHER: Once()}).certain) == 40
    assert index.explain({OTHER: Once()}, 99).truth == CERTAIN


def test_an_update_opens_again_what_was_closed():
    inventory = generate_inventory(8, surveys=20)
    index = QuotaIndex(inventory)
    index.close(inventory.surveys[0].quotas[0].quota_id)
    assert len(index.updated(inventory)) == len(index) + 1


# --- Bad input


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ({AGE: 2006352}, "an age is given in years, 0 to 150, not 2006352"),
        ({AGE: -1}, "an age"),
        ({AGE: True}, "an age"),
        ({AGE: "old"}, "an age"),
        ({AGE: 30.5}, "an age"),
        ({POSTAL: 1001}, "a postal code is a text"),
        ({POSTAL: ["1001"]}, "a postal code is a text"),
        ({OTHER: "many"}, "answer IDs"),
        ({OTHER: 1.5}, "answer IDs"),
        ({OTHER: True}, "answer IDs"),
        ({OTHER: [1, None]}, "answer IDs"),
        ({OTHER: {1: 2}}, "answer IDs"),
        ({OTHER: b"1"}, "answer IDs"),
        ({OTHER: "9" * 5000}, "answer IDs"),
        ({AGE: "9" * 5000}, "an age"),
    ],
)
def test_an_answer_that_is_none_is_refused_by_name(profile, words):
    asked = quota([sub_quota(row(AGE, "18-24"), row(POSTAL, "1"), A)])
    index = QuotaIndex([survey(asked)])
    index.match({OTHER: 1, AGE: 1, POSTAL: "1"})  # remembered
    ((question_id, _),) = profile.items()
    with pytest.raises(InvalidRequestError, match=rf"profile\[{question_id}\]: .*{words}"):
        index.match(profile)
    with pytest.raises(InvalidRequestError, match=words):
        index.explain(profile, 7)


def test_policies_and_kinds_are_checked():
    with pytest.raises(
        InvalidRequestError, match="missing is one of 'routable', 'possible', 'no', not 'maybe'"
    ):
        MatchPolicy(missing="maybe")
    for nothing in (None, [], "x"):
        with pytest.raises(InvalidRequestError, match="a profile is a mapping"):
            many().match(nothing)
    with pytest.raises(InvalidRequestError, match="question IDs are whole numbers, not texts"):
        many().match({"1009999": 1})
    with pytest.raises(InvalidRequestError, match="device_type is a number"):
        many().match({}, device_type="1")
    with pytest.raises(InvalidRequestError, match="ends before"):
        QuestionKinds.default().with_age(AGE, {1: (30, 20)})
    with pytest.raises(InvalidRequestError, match="not of int"):
        QuotaIndex([1])
    with pytest.raises(KeyError):
        many().explain({}, 99999)


def test_the_reasons_are_told_down_to_the_question():
    asked = quota([sub_quota(row(GENDER, MALE), row(AGE, "18-24")), sub_quota(row(GENDER, FEMALE), full=True)])
    reason = QuotaIndex([survey(asked)]).explain({GENDER: MALE, AGE: 30}, 7)
    assert str(reason).splitlines() == [
        "no       quota 7: all layers must hold",
        "  no       layer 1: no open sub-quota fits",
        "    no       sub-quota 1, 0 of 10 completes: all its questions must be met",
        "      certain  question 1001007: an answer is listed",
        "      no       question 1001538: the answer is not listed",
        "    no       sub-quota 1, 10 of 10 completes: all its questions must be met",
        "      no       question 1001007: the answer is not listed",
    ]
    assert str(MALE) not in str(reason)


def test_records_of_matching_can_be_pickled():
    reason = many().explain({OTHER: 1}, 52)
    for each in (MatchPolicy(missing="no"), KINDS, reason, *many().diagnostics):
        assert pickle.loads(pickle.dumps(each)) == each


def test_every_export_is_documented():
    assert matching.__all__ == sorted(matching.__all__)
    for name in matching.__all__:
        thing = getattr(matching, name)
        if not isinstance(thing, type):
            continue  # an alias or a function, whose text is below or in it
        assert inspect.getdoc(thing), name
        for attribute, member in vars(thing).items():
            if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                assert inspect.getdoc(member), f"{name}.{attribute}"
