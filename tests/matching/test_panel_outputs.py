"""Results of a panel: counts, the best quotas of members, samples, requests."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest
from panel_kit import (
    ALL,
    GENDER,
    MALE,
    MEN,
    divide,
    generated_panel,
    panel_of,
    quota,
    survey,
)

from sampling_async import InvalidRequestError, InviteRequest
from sampling_async.matching import (
    PanelMatcher,
    QuotaIndex,
    Sample,
    TopK,
)
from sampling_async.simulator import generate_members


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "2"])
def test_the_size_of_a_sample_must_be_a_number(wrong):
    with pytest.raises(InvalidRequestError, match="n must be a whole number from 1"):
        TopK(wrong)
    with pytest.raises(InvalidRequestError, match="per_quota must be a whole number from 1"):
        Sample(wrong)
    with pytest.raises(InvalidRequestError, match="seed must be a whole number of at most 64 bits"):
        Sample(5, seed=2**65)
    with pytest.raises(InvalidRequestError, match="seed must be a whole number"):
        Sample(5, seed=True)


@pytest.mark.parametrize("output", [TopK(2), Sample(2)])
def test_a_member_without_a_code_is_refused_by_row(output):
    panel = pa.table({"member_code": ["a", None]})
    with pytest.raises(InvalidRequestError, match="row 1 of the panel has no member_code"):
        PanelMatcher(QuotaIndex([survey(ALL)]), output).run(panel).read_all()


@pytest.fixture(scope="module")
def generated():
    return generated_panel()


def test_a_sample_takes_certain_members_before_possible_ones(generated):
    index, panel = generated
    drawn: dict[int, dict[bool, set[str]]] = {}
    for one in PanelMatcher(index, Sample(6)).run(panel).read_all().to_pylist():
        drawn.setdefault(one["quota_id"], {True: set(), False: set()})[one["certain"]].add(one["member_code"])
    members = list(generate_members(9, members=400))
    matching: dict[int, dict[bool, set[str]]] = {id_: {True: set(), False: set()} for id_ in index.quota_ids}
    for member in members:
        matched = index.match(member.profile)
        for is_certain, ids in ((True, matched.certain), (False, matched.possible)):
            for id_ in ids:
                matching[id_][is_certain].add(member.member_code)
    for id_, of in matching.items():
        got = drawn.get(id_, {True: set(), False: set()})
        certain = min(6, len(of[True]))
        assert got[True] <= of[True]
        assert got[False] <= of[False]
        assert (len(got[True]), len(got[False])) == (certain, min(6 - certain, len(of[False])))


def test_a_sample_favours_nobody_and_differs_by_quota_and_seed():
    index = QuotaIndex([survey(*(quota(quota_id=at) for at in range(400)))])
    panel = pa.table({"member_code": [f"M{at}" for at in range(100)]})
    drawn = PanelMatcher(index, Sample(20)).run(panel).read_all().to_pylist()
    times = Counter(one["member_code"] for one in drawn)
    assert len(drawn) == 400 * 20
    assert len(times) == 100  # each 80 times on average, without outliers
    assert max(times.values()) < 400
    of_quota: dict[int, set[str]] = {}
    for one in drawn:
        of_quota.setdefault(one["quota_id"], set()).add(one["member_code"])
    assert len(set(map(frozenset, of_quota.values()))) > 50
    other = PanelMatcher(index, Sample(20, seed=1)).run(panel).read_all().to_pylist()
    assert {one["member_code"] for one in other if one["quota_id"] == 0} != of_quota[0]


def test_a_sample_includes_members_of_a_small_last_piece(monkeypatch):
    divide(monkeypatch, rows=512)
    index = QuotaIndex([survey(*(quota(quota_id=at) for at in range(40)))])
    matcher = PanelMatcher(index, Sample(30))
    for count in (513, 514, 515):
        panel = pa.table({"member_code": [f"M{at}" for at in range(count)]})
        turned = pa.concat_tables([panel.slice(512), panel.slice(0, 512)])
        assert matcher.run(panel).read_all() == matcher.run(turned).read_all()


def test_requests_are_accepted_by_a_fan_out():
    index = QuotaIndex([survey(ALL, survey_id=1), survey(MEN, survey_id=2)])
    panel = panel_of([{GENDER: MALE}, {GENDER: 5}], member_code=["a", "b"])
    assert list(PanelMatcher(index, TopK(2)).requests(panel)) == [
        InviteRequest("a", (1, 2)),
        InviteRequest("b", (1,)),
    ]
    with pytest.raises(
        InvalidRequestError, match=r"requests are made from TopK\(n\) or Allocate\(n\), not from Counts"
    ):
        next(PanelMatcher(index).requests(panel))
