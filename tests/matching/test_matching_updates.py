"""An index that is updated to a newer inventory equals a fresh one, and costs less."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from panel_kit import (
    AGE,
    ASKED,
    OTHER,
    A,
    B,
    of_some,
    panel_of,
    quota,
    row,
    sub_quota,
    survey,
    surveys_compiled,
)

from sampling_async import (
    Quotas,
    Survey,
    from_json,
    to_json,
)
from sampling_async.matching import (
    PanelMatcher,
    QuotaIndex,
    TopK,
)
from sampling_async.simulator import generate_inventory, generate_members


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


def test_an_updated_index_equals_a_fresh_one():
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


def test_only_changed_surveys_are_compiled_again():
    inventory = generate_inventory(8, surveys=60)
    index = QuotaIndex(inventory)
    updated = index.updated(with_remaining(inventory, 3, 777))
    assert [len(part.targets) for part in updated._parts[1:]] == [len(inventory.surveys[3].quotas)]
    assert updated._parts[0] is index._parts[0]


@st.composite
def inventories_in_a_row(draw) -> list[list[Survey]]:
    """Return inventories of a few surveys whose quotas come, go, change and move; some list one twice."""
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


def contents(index: QuotaIndex) -> tuple[object, ...]:
    """Return all results of an index, and of a panel matched with it."""
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
def test_an_index_updated_many_times_equals_a_fresh_one(steps, still, data):
    # Surveys that never change, so that only a small part of the inventory does.
    others = [survey(quota([sub_quota(A)], quota_id=at), survey_id=at) for at in range(100, 100 + still)]
    index = QuotaIndex(others)
    seen: list[tuple[QuotaIndex, list[Survey]]] = []
    for special in steps:
        newer = [*special, *others]
        index = index.updated(newer)
        assert contents(index) == contents(QuotaIndex(newer))
        assert len(index._parts) <= 3
        seen.append((index, newer))
        index = index.updated(newer)  # nothing has changed: only closed quotas are open again
        closed = data.draw(st.sampled_from([None, *index.quota_ids]))
        if closed is not None:
            index.close(closed)
            assert closed not in index.quota_ids
            assert index.explain({}, closed).what is not None
            index.recontact(closed, ["m"])
    for older, inventory in seen:
        assert contents(older) == contents(QuotaIndex(inventory))
        assert contents(older.updated(others)) == contents(QuotaIndex(others))


def test_earlier_changes_are_not_compiled_again_with_later_ones(monkeypatch):
    compiled = surveys_compiled(monkeypatch)
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


def test_a_quota_that_is_listed_twice_counts_once():
    twice = quota([sub_quota(A)])
    surveys = [survey(twice), survey(twice)]
    for index in (QuotaIndex(surveys), QuotaIndex(surveys).updated(surveys), QuotaIndex([]).updated(surveys)):
        assert list(index.match({OTHER: 1}).certain) == [7]
        assert [odd.message for odd in index.diagnostics] == ["the quota is listed twice: the first one counts"]
        index.close(7)
        assert not index.match({OTHER: 1}).certain


def test_a_quota_listed_by_two_surveys_counts_once_after_an_update():
    old = [survey(quota([sub_quota(A)], quota_id=at), survey_id=at) for at in range(1, 40)]
    new = [*old, survey(quota([sub_quota(B)], quota_id=3), survey_id=99)]
    updated, fresh = QuotaIndex(old).updated(new), QuotaIndex(new)
    for answer in (1, 2):
        assert list(updated.match({OTHER: answer}).certain) == list(fresh.match({OTHER: answer}).certain)


def test_an_update_after_a_duplicate_equals_a_fresh_index():
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


def test_an_update_reopens_closed_quotas():
    inventory = generate_inventory(8, surveys=20)
    index = QuotaIndex(inventory)
    index.close(inventory.surveys[0].quotas[0].quota_id)
    assert len(index.updated(inventory)) == len(index) + 1
