"""Panels: every member has the result of the index, and so of the reference."""

from __future__ import annotations

import pyarrow as pa
import pytest
from attrs import asdict
from hypothesis import given, settings
from hypothesis import strategies as st
from panel_kit import (
    AGES,
    ALL,
    GENDER,
    KINDS,
    MALE,
    MEN,
    OTHER,
    PARTICIPATIONS,
    by_index,
    counted,
    panel_of,
    policies,
    profiles,
    quota,
    quota_lists,
    row,
    sub_quota,
    survey,
)

from sampling_async import SurveyWaveExclusion
from sampling_async.matching import (
    Counts,
    PanelMatcher,
    Participation,
    QuotaIndex,
    Sample,
    TopK,
)
from sampling_async.matching.panel import (
    _columns,
    _files,
    _kernel,
    _matcher,
    _plan,
    _rows,
)
from sampling_async.simulator import Simulator, generate_inventory, generate_members


@pytest.fixture
def small_pieces(monkeypatch):
    """Make all pieces so small that there are several of each."""
    monkeypatch.setattr(_files, "ROWS", 5)
    monkeypatch.setattr(_matcher, "CHUNK", 3)
    monkeypatch.setattr(_plan, "TOGETHER", 3)
    monkeypatch.setattr(_kernel, "_AT_ONCE", 2)
    monkeypatch.setattr(_rows, "TOGETHER", 3)
    monkeypatch.setattr(_kernel, "TOGETHER", 3)


@settings(max_examples=250)
@given(quota_lists, st.lists(profiles, min_size=1, max_size=9), policies, st.sampled_from([1, 3, 50]))
def test_a_panel_agrees_with_the_index(of_quotas, members, policy, n):
    quotas = [quota(*each, quota_id=at, remaining=at % 3) for at, each in enumerate(of_quotas)]
    index = QuotaIndex(
        [survey(*quotas[:3], survey_id=1), survey(*quotas[3:], survey_id=2)], kinds=KINDS, policy=policy
    )
    matched = [index.match(profile) for profile in members]
    codes = [f"M{at}" for at in range(len(members))]
    panel = panel_of(members, member_code=codes)
    assert counted(PanelMatcher(index), panel) == by_index(index, matched)
    for one_per_survey in (True, False):
        best = PanelMatcher(index, TopK(n, one_per_survey=one_per_survey)).run(panel).read_all()
        selected = [each.select(n, one_per_survey=one_per_survey) for each in matched]
        assert best.column("member_code").to_pylist() == codes
        assert best.column("quota_ids").to_pylist() == [list(each) for each in selected]
        assert best.column("certain").to_pylist() == [
            sum(id_ in each.certain for id_ in ids) for each, ids in zip(matched, selected, strict=True)
        ]


@pytest.mark.usefixtures("small_pieces")
def test_a_panel_in_small_pieces_agrees_with_the_index_on_all_masks():
    simulator = Simulator(seed=11, members=23, surveys=40)
    index = QuotaIndex(simulator.inventory, kinds=AGES)
    members = list(simulator.members.values())
    index.close(next(iter(index.quota_ids)))
    listed = index.quota_ids[3]
    index.recontact(listed, [member.member_code for member in members[::2]])
    taken = [[3, *(survey_id for survey_id in range(at % 4))] for at in range(len(members))]
    matched = [
        index.match(
            member.profile,
            device_type=member.device_type_id,
            participations=member.participations,
            exclude_surveys=excluded,
            member_code=member.member_code,
        )
        for member, excluded in zip(members, taken, strict=True)
    ]
    panel = panel_of(
        [member.profile for member in members],
        member_code=[member.member_code for member in members],
        device_type=[member.device_type_id for member in members],
        exclude_surveys=taken,
        participations=pa.array(
            [[asdict(participation) for participation in member.participations] for member in members],
            type=PARTICIPATIONS,
        ),
    )
    assert sum(len(member.participations) for member in members) > 10
    assert counted(PanelMatcher(index), panel) == by_index(index, matched)
    best = PanelMatcher(index, TopK(7)).run(panel).read_all()
    assert best.column("quota_ids").to_pylist() == [list(each.select(7)) for each in matched]


@pytest.mark.parametrize("codes", [255, 1], ids=["few classes", "many classes"])
@pytest.mark.parametrize("cost", [0, 40, 10**6], ids=["looked up", "whichever takes least", "put together"])
def test_a_panel_agrees_with_the_index_however_rows_are_made(monkeypatch, cost, codes):
    monkeypatch.setattr(_plan, "_LOOKED_UP", cost)
    for module in (_rows, _plan, _kernel, _columns):
        monkeypatch.setattr(module, "MOST_CODES", codes)
    index = QuotaIndex(generate_inventory(6, surveys=40), kinds=AGES)
    members = [member.profile for member in generate_members(6, members=333)]
    # Lists of answers and single answers are read separately.
    single = [
        {id_: answer for id_, answer in each.items() if isinstance(answer, int | str)} for each in members
    ]
    for some in (members, single, [{}], single[:64]):
        matched = [index.match(profile) for profile in some]
        assert counted(PanelMatcher(index), panel_of(some)) == by_index(index, matched)


def test_each_wave_of_a_survey_has_its_own_exclusions():
    exclusion = SurveyWaveExclusion(9, 0, (9,))
    index = QuotaIndex(
        [
            survey(quota(quota_id=1), survey_id=1, wave_id=1, survey_wave_exclusions=(exclusion,)),
            survey(quota(quota_id=2), survey_id=1, wave_id=2),
            survey(quota(quota_id=3), survey_id=2),
        ]
    )
    took = Participation(9, 4)
    one = pa.table({"member_code": ["a"], "participations": pa.array([[asdict(took)]], PARTICIPATIONS)})
    assert counted(PanelMatcher(index), one) == by_index(index, [index.match({}, participations=[took])])
    best = PanelMatcher(index, TopK(5)).run(one).read_all()
    assert best.column("quota_ids").to_pylist() == [[2, 3]]
    of_one = pa.table({"exclude_surveys": [[1, 7]]})
    assert counted(PanelMatcher(index), of_one) == {1: (0, 0), 2: (0, 0), 3: (1, 0)}


def test_a_panel_is_matched_against_the_whole_of_an_updated_index():
    first = [survey(MEN, survey_id=1), *(survey(quota(quota_id=at), survey_id=at) for at in range(10, 30))]
    index = QuotaIndex(first).updated([survey(ALL, survey_id=1), *first[2:]])
    matched = index.match({GENDER: MALE})
    assert counted(PanelMatcher(index), panel_of([{GENDER: MALE}])) == by_index(index, [matched])
    assert 10 not in counted(PanelMatcher(index), panel_of([{GENDER: MALE}]))


def test_a_question_without_a_column_was_not_answered():
    index = QuotaIndex([survey(MEN, quota([sub_quota(row(OTHER, 1, routable=True))], quota_id=3))])
    panel = pa.table({"member_code": ["a", "b"]})
    assert counted(PanelMatcher(index), panel) == {2: (0, 0), 3: (0, 2)}
    assert PanelMatcher(index).questions == (GENDER, OTHER)


def test_an_empty_panel_or_inventory_gives_empty_results():
    index = QuotaIndex([survey(MEN)])
    somebody = panel_of([{GENDER: MALE}], member_code=["a"])
    nobody = somebody.slice(0, 0)
    assert counted(PanelMatcher(QuotaIndex([])), somebody) == {}
    assert PanelMatcher(QuotaIndex([]), TopK(3)).run(somebody).read_all().to_pylist() == [
        {"member_code": "a", "quota_ids": [], "certain": 0}
    ]
    assert len(PanelMatcher(QuotaIndex([]), Sample(3)).run(somebody).read_all()) == 0
    for output in (Counts(), TopK(3), Sample(3)):
        assert PanelMatcher(index, output).run(nobody).schema == output.schema
    assert counted(PanelMatcher(index), nobody) == {2: (0, 0)}
    assert len(PanelMatcher(index, TopK(3)).run(nobody).read_all()) == 0
    assert len(PanelMatcher(index, Sample(3)).run(nobody).read_all()) == 0
