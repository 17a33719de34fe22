"""Quotas for each member, chosen together: rooms, values, caps, and a panel that is divided."""

from __future__ import annotations

import pickle
from collections import Counter

import pyarrow as pa
import pytest
from attrs import evolve
from panel_kit import (
    FEMALE,
    GENDER,
    MALE,
    OTHER,
    divide,
    generated_panel,
    panel_of,
    quota,
    row,
    sub_quota,
    survey,
)

from sampling_async import InvalidRequestError, Price
from sampling_async.matching import Allocate, Counts, LearnedRates, PanelMatcher, QuotaIndex, TopK

WORTH = {1: 2.0, 2: 1.0}
MEN_ONLY = survey(quota([sub_quota(row(GENDER, MALE))], quota_id=2), survey_id=30)
EVERYBODY = survey(quota(quota_id=1), survey_id=10)


def allocated(index, panel, output, **options) -> list[dict]:
    return PanelMatcher(index, output).run(panel, **options).read_all().to_pylist()


def people(men: int, women: int, **columns) -> pa.Table:
    profiles = [{GENDER: MALE}] * men + [{GENDER: FEMALE}] * women
    return panel_of(profiles, member_code=[f"m-{number}" for number in range(men + women)], **columns)


def counts_of(rows: list[dict]) -> Counter[int]:
    return Counter(quota_id for row in rows for quota_id in row["quota_ids"])


@pytest.fixture(scope="module")
def generated():
    return generated_panel()


def test_members_with_a_choice_leave_places_to_those_without():
    """Men fit both quotas, women only the better one. Its places are for the women."""
    index = QuotaIndex([EVERYBODY, MEN_ONLY])
    output = Allocate(1, room={1: 200, 2: 200}, value=WORTH)
    rows = allocated(index, people(200, 200), output)
    assert counts_of(rows) == {1: 200, 2: 200}
    worth = sum(WORTH[quota_id] for row in rows for quota_id in row["quota_ids"])
    assert worth == 600  # the optimum; the best quota for each, in turn, is worth 400
    assert all(row["quota_ids"] == [2] for row in rows[:200])


def test_no_quota_and_no_survey_gets_more_than_its_room(generated):
    index, panel = generated
    found = PanelMatcher(index, Counts()).run(panel).read_all().to_pylist()
    fits = {one["quota_id"]: one["certain"] + one["possible"] for one in found}
    of_survey = {one["quota_id"]: one["survey_id"] for one in found}
    room = {quota_id: 1 + number % 4 for number, quota_id in enumerate(fits)}
    caps = dict.fromkeys(list(of_survey.values())[::3], 3)
    output = Allocate(4, room=room, survey_room=caps)
    rows = allocated(index, panel, output)
    taken = counts_of(rows)
    assert len(rows) == len(panel)
    assert sum(taken.values()) > 50
    assert all(count <= room[quota_id] for quota_id, count in taken.items())
    by_survey = Counter(of_survey[quota_id] for quota_id in taken.elements())
    assert all(by_survey[survey_id] <= cap for survey_id, cap in caps.items())
    for one in rows:
        assert len(one["quota_ids"]) <= 4
        surveys = [of_survey[quota_id] for quota_id in one["quota_ids"]]
        assert len(surveys) == len(set(surveys))
    # More invites than what becomes of the best quotas of each member.
    best = counts_of(allocated(index, panel, TopK(4)))
    free = counts_of(allocated(index, panel, Allocate(4, room=room)))
    assert sum(free.values()) > 1.2 * sum(min(count, room[quota_id]) for quota_id, count in best.items())


def test_only_quotas_that_fit_are_given_certain_ones_first(generated):
    index, panel = generated
    every = allocated(index, panel, TopK(len(index), one_per_survey=False))
    rows = allocated(index, panel, Allocate(6, overshoot=3.0))
    assert any(one["certain"] < len(one["quota_ids"]) for one in rows)
    for one, fitting in zip(rows, every, strict=True):
        assert one["member_code"] == fitting["member_code"]
        certain, possible = (
            set(part)
            for part in (fitting["quota_ids"][: fitting["certain"]], fitting["quota_ids"][fitting["certain"] :])
        )
        assert set(one["quota_ids"][: one["certain"]]) <= certain
        assert set(one["quota_ids"][one["certain"] :]) <= possible


def test_a_possible_match_counts_less_or_not_at_all():
    asked = survey(quota([sub_quota(row(OTHER, 1, routable=True))], quota_id=4), survey_id=40)
    index = QuotaIndex([EVERYBODY, asked])
    panel = people(1, 0)
    for possible, expected in ((0.4, [1]), (0.6, [4]), (0, [1])):
        output = Allocate(1, room={1: 9, 4: 9}, value={1: 1.0, 4: 2.0}, possible=possible)
        assert allocated(index, panel, output)[0]["quota_ids"] == expected
    assert allocated(index, panel, Allocate(5, room={4: 9}, possible=0))[0]["quota_ids"] == []


def test_the_division_of_a_panel_has_no_effect(generated, monkeypatch):
    index, panel = generated
    divide(monkeypatch, allocated=64)
    matcher = PanelMatcher(index, Allocate(3, overshoot=0.5))
    whole = matcher.run(panel).read_all()
    for size in (7, 100, 399):
        parts = pa.Table.from_batches(panel.to_batches(max_chunksize=size))
        assert matcher.run(parts).read_all() == whole
    sampler, parts = matcher.price_sampler(), [panel.slice(0, 150), panel.slice(150)]
    priced = matcher.with_prices([made for part in parts for made in sampler.map_batches(part.to_batches())])
    assert priced.output.prices.by_quota == matcher.derive_prices(panel).output.prices.by_quota
    copy = pickle.loads(pickle.dumps(priced))
    candidates = [made for part in parts for made in copy.map_batches(part.to_batches())]
    assert copy.part_schema == candidates[0].schema != copy.schema
    assert copy.merged(candidates) == whole
    assert copy.merged(pa.Table.from_batches(candidates)) == whole


def test_candidates_may_come_from_elsewhere(generated):
    index, panel = generated
    every = PanelMatcher(index, TopK(len(index), one_per_survey=False)).run(panel).read_all()
    matcher = PanelMatcher(index, Allocate(3, overshoot=0.5))
    whole, found = matcher.run(panel).read_all(), matcher.allocate(every).read_all()
    assert found.schema == matcher.schema
    assert found.column("member_code") == whole.column("member_code")
    given, expected = counts_of(found.to_pylist()), counts_of(whole.to_pylist())
    assert sum(given.values()) == pytest.approx(sum(expected.values()), rel=0.05)
    # Prices that are known already are used, and then a reader will do.
    priced = matcher.derive_prices(panel)
    reader = pa.RecordBatchReader.from_batches(every.schema, every.to_batches(max_chunksize=90))
    assert priced.allocate(reader).read_all() == priced.allocate(every).read_all()


def test_candidates_of_other_quotas_are_passed_over():
    index = QuotaIndex([EVERYBODY])
    candidates = pa.table(
        {
            "member_code": ["a", "b", "c"],
            "quota_ids": pa.array([[99, 1], [], [1, 2**60, 0]], pa.large_list(pa.int64())),
            "certain": pa.array([2, 0, 1], pa.int64()),
            "invites_left": [1, 1, 0],
        }
    )
    rows = PanelMatcher(index, Allocate(2, room={1: 5})).allocate(candidates).read_all().to_pylist()
    assert [row["quota_ids"] for row in rows] == [[1], [], []]
    assert PanelMatcher(QuotaIndex([]), Allocate()).allocate(candidates).read_all().num_rows == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"certain": None}, "no column 'certain'; they need member_code, quota_ids, certain"),
        ({"quota_ids": [["x"]]}, "no lists of quota IDs"),
        ({"quota_ids": [None]}, "have a null"),
        ({"quota_ids": [[1, None]]}, "have a null"),
        ({"member_code": [7]}, "must hold texts"),
    ],
)
def test_wrong_candidates_are_refused(changes, message):
    columns = {"member_code": ["a"], "quota_ids": [[1]], "certain": [1]} | changes
    candidates = pa.table({name: column for name, column in columns.items() if column is not None})
    with pytest.raises(InvalidRequestError, match=message):
        PanelMatcher(QuotaIndex([EVERYBODY]), Allocate()).allocate(candidates).read_all()
    with pytest.raises(InvalidRequestError, match=r"only Allocate\(n\) has prices"):
        PanelMatcher(QuotaIndex([EVERYBODY])).allocate(candidates).read_all()


def test_a_panel_that_can_be_read_once_is_measured_first(generated):
    index, panel = generated
    matcher = PanelMatcher(index, Allocate(3))
    for once in (pa.RecordBatchReader.from_batches(panel.schema, panel.to_batches()), iter(panel.to_batches())):
        with pytest.raises(InvalidRequestError, match=r"can be read only once.*derive_prices"):
            matcher.run(once).read_all()
    reader = pa.RecordBatchReader.from_batches(panel.schema, panel.to_batches())
    assert matcher.derive_prices(panel).run(reader).read_all() == matcher.run(panel).read_all()
    with pytest.raises(InvalidRequestError, match="this allocation has no prices yet"):
        matcher.map_batches(panel.to_batches())


def test_prices_that_were_measured_before_can_be_given():
    index, panel = QuotaIndex([EVERYBODY, MEN_ONLY]), people(200, 200)
    output = Allocate(1, room={1: 200, 2: 200}, value=WORTH)
    priced = PanelMatcher(index, output).derive_prices(panel)
    given = PanelMatcher(index, evolve(output, prices=priced.output.prices))
    assert given._source.market.prices.tolist() == priced._source.market.prices.tolist()
    assert max(given._source.market.prices) > 0
    assert given.run(panel).read_all() == priced.run(panel).read_all()


def test_prices_are_for_allocations_only(generated):
    index, panel = generated
    for wrong in (PanelMatcher(index).derive_prices, PanelMatcher(index, TopK(3)).with_prices):
        with pytest.raises(InvalidRequestError, match=r"only Allocate\(n\) has prices"):
            wrong(panel)


def test_a_sample_stands_for_a_large_panel(monkeypatch):
    divide(monkeypatch, sampled=100)
    index = QuotaIndex([EVERYBODY, MEN_ONLY])
    panel = pa.concat_tables([people(200, 200), people(100, 100)])
    matcher = PanelMatcher(index, Allocate(1, room={1: 300, 2: 300}, value=WORTH))
    sample = matcher.price_sampler().run(pa.Table.from_batches(panel.to_batches(max_chunksize=90))).read_all()
    assert len(sample) == 100
    assert sum(sample.column("members").to_pylist()) == 600
    prices = matcher.derive_prices(panel).output.prices
    assert prices.by_quota[1] > prices.by_quota[2] + 0.5


def test_caps_of_a_member_and_its_weight_are_read():
    index = QuotaIndex([EVERYBODY, MEN_ONLY])
    panel = people(4, 0, invites_left=pa.array([0, 1, None, 9]), response=pa.array([1.0, 1.0, None, 5.0]))
    rows = allocated(index, panel, Allocate(2, room={1: 9, 2: 9}, value=WORTH))
    assert [len(row["quota_ids"]) for row in rows] == [0, 1, 2, 2]
    rows = allocated(index, panel, Allocate(2, room={1: 1, 2: 1}, value=WORTH, weight="response"))
    assert [len(row["quota_ids"]) for row in rows] == [0, 0, 0, 2]  # the best one gets both places


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"other": [1.0]}, "no column 'response'"),
        ({"response": ["high"]}, "'response' of the panel must hold numbers"),
        ({"response": [-1.0]}, "numbers from 0 on; row 0 does not"),
        ({"response": [float("nan")]}, "numbers from 0 on; row 0 does not"),
        (
            {"response": [1.0], "invites_left": ["x"]},
            "row 0 of the panel: column 'invites_left' must hold whole",
        ),
    ],
)
def test_a_wrong_column_is_named(column, message):
    with pytest.raises(InvalidRequestError, match=message):
        allocated(QuotaIndex([EVERYBODY]), people(1, 0, **column), Allocate(weight="response"))


def test_the_room_is_what_is_needed_by_the_rates():
    first = quota(quota_id=1, remaining=6)
    second = quota(quota_id=2, remaining=6)
    index = QuotaIndex(
        [
            survey(first, survey_id=10, ir=30, estimated_completes_remaining=100),
            survey(second, survey_id=20, ir=0, estimated_completes_remaining=3),
        ]
    )
    panel = people(300, 0)
    assert counts_of(allocated(index, panel, Allocate())) == {1: 20, 2: 3}  # the second one by its survey
    assert counts_of(allocated(index, panel, Allocate(rates=0.5))) == {1: 40, 2: 6}
    assert counts_of(allocated(index, panel, Allocate(rates={1: 0.25}, overshoot=1.5))) == {1: 120, 2: 5}
    assert counts_of(allocated(index, panel, Allocate(room={2: 50}))) == {2: 50}
    assert counts_of(allocated(index, panel, Allocate(room={1: 50, 2: 50}, survey_room={20: 7}))) == {
        1: 50,
        2: 7,
    }


def test_learned_rates_are_the_value_and_the_room_in_place_of_the_incidence_rate():
    index = QuotaIndex(
        [
            survey(quota(quota_id=1, remaining=6), survey_id=10, ir=50, price=Price(1.0, 1)),
            survey(quota(quota_id=2, remaining=6), survey_id=20, ir=50, price=Price(1.5, 1)),
        ]
    )
    learned = LearnedRates(surveys={10: (980, 490), 20: (980, 0)}, quotas={2: (980, 0)}, weight=20)
    assert counts_of(allocated(index, people(2, 0), Allocate(1))) == {2: 2}  # the higher price
    assert counts_of(allocated(index, people(2, 0), Allocate(1, rates=learned))) == {1: 2}
    terms = PanelMatcher(index, Allocate(rates=learned)).terms()
    assert (
        repr(terms)
        == "Terms(rooms=<2 quotas>, values=<2 quotas>, chances=<2 quotas>, survey_rooms=<2 surveys>)"
    )
    assert terms.rooms[1] == pytest.approx(6 / 0.4951, abs=1)
    assert terms.values[1] == pytest.approx(0.4951, abs=0.0001)
    assert terms.values[2] < 0.01


@pytest.mark.parametrize("remaining", [0, -10, -10_000])
def test_an_overfilled_quota_or_survey_takes_no_room_from_the_others(remaining):
    full = quota(quota_id=99, remaining=remaining)
    others = [
        survey(
            quota(quota_id=at, remaining=10),
            survey_id=at,
            ir=100,
            price=Price(1 + at / 50, 1),
            estimated_completes_remaining=50,
        )
        for at in range(1, 41)
    ]
    full_survey = survey(full, quota(quota_id=98), survey_id=50, ir=10, estimated_completes_remaining=remaining)
    taken = counts_of(allocated(QuotaIndex([*others, full_survey]), people(400, 0), Allocate(1)))
    assert set(taken) <= set(range(1, 41))
    assert sum(taken.values()) > 320


def test_the_value_is_the_price_by_the_ir_unless_it_is_given():
    surveys = [
        survey(quota(quota_id=1), survey_id=10, ir=50, price=Price(2.0, 1)),
        survey(quota(quota_id=2), survey_id=20, ir=20, price=Price(4.0, 1)),
    ]
    index, panel, room = QuotaIndex(surveys), people(1, 0), {1: 1, 2: 1}

    def first(value) -> list[int]:
        return allocated(index, panel, Allocate(1, room=room, value=value))[0]["quota_ids"]

    assert first(None) == [1]
    assert first(lambda survey, quota: survey.price.amount + 0 * quota.quota_id) == [2]
    assert first({2: 0.1}) == [2]
    assert first({}) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_member": 0}, "per_member must be a whole number"),
        ({"overshoot": 0}, "overshoot must be times what is needed above 0"),
        ({"possible": 1.5}, "possible must be from 0 to 1"),
        ({"possible": True}, "possible must be from 0 to 1"),
        ({"seed": 2**70}, "seed must be a whole number"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        Allocate(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"room": {1: -1}}, "room of quota 1 must be 0 or more"),
        ({"room": {1: "9"}}, "room of quota 1 must be a number"),
        ({"room": {1: 9}, "survey_room": {10: "1"}}, "survey_room of survey 10 must be a number"),
        ({"value": {1: float("nan")}}, "value of quota 1 must be a number"),
        ({"value": lambda *_: True}, "value of quota 1 must be a number"),
        ({"rates": 0}, "rate of quota 1 must be above 0"),
        ({"rates": {1: 1.2}}, "rate of quota 1 must be above 0 and at most 1"),
    ],
)
def test_numbers_of_quotas_are_checked(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        PanelMatcher(QuotaIndex([EVERYBODY]), Allocate(**options))


def test_recontact_lists_and_exclusions_hold():
    listed = survey(quota(quota_id=5), survey_id=50, is_survey_recontact=True)
    index = QuotaIndex([EVERYBODY, listed])
    index.recontact(5, ["m-1"])
    panel = people(3, 0, exclude_surveys=[[10], [], []])
    rows = allocated(index, panel, Allocate(5, room={1: 9, 5: 9}))
    assert [sorted(row["quota_ids"]) for row in rows] == [[], [1, 5], [1]]


def test_empty_and_small_inputs():
    index = QuotaIndex([EVERYBODY])
    assert allocated(index, people(0, 0), Allocate()) == []
    assert [row["quota_ids"] for row in allocated(QuotaIndex([]), people(2, 0), Allocate())] == [[], []]
    with pytest.raises(InvalidRequestError, match="Allocate names members by their codes"):
        allocated(index, people(1, 0).drop_columns("member_code"), Allocate())


def test_quota_ids_that_are_far_apart_are_found():
    far = survey(quota(quota_id=2**50), survey_id=60)
    index = QuotaIndex([EVERYBODY, far])
    rows = allocated(index, people(2, 0), Allocate(2, room={1: 2, 2**50: 1}))
    assert counts_of(rows) == {1: 2, 2**50: 1}


def test_requests_are_made_of_an_allocation():
    index = QuotaIndex([EVERYBODY])
    requests = list(PanelMatcher(index, Allocate(1, room={1: 2})).requests(people(5, 0)))
    assert [request.quota_ids for request in requests] == [(1,), (1,)]
    with pytest.raises(InvalidRequestError, match=r"TopK\(n\) or Allocate\(n\)"):
        next(PanelMatcher(index).requests(people(1, 0)))


def test_chances_are_spread_evenly():
    index = QuotaIndex([survey(quota(quota_id=id_), survey_id=id_) for id_ in (1, 2, 3)])
    rows = allocated(index, people(1000, 0), Allocate(2, room=dict.fromkeys((1, 2, 3), 1000)))
    pairs = Counter(tuple(sorted(each["quota_ids"])) for each in rows)
    assert pairs.keys() == {(1, 2), (1, 3), (2, 3)}
    assert all(count == pytest.approx(1000 / 3, abs=60) for count in pairs.values())


def test_many_quotas_do_not_all_get_the_same_candidates():
    """A list holds only some candidates of a member, and all members rank the quotas alike."""
    surveys = [survey(quota(quota_id=number), survey_id=10 * number) for number in range(1, 201)]
    index = QuotaIndex([evolve(each, price=Price(1 + each.survey_id / 1e4, 1)) for each in surveys])
    rows = allocated(index, people(400, 0), Allocate(1, room=dict.fromkeys(range(1, 201), 2)))
    assert sum(counts_of(rows).values()) > 300


def test_pairs_that_gain_the_same_keep_the_order_of_their_ranks():
    """A weight of 0 makes all quotas of a member worth nothing."""
    index = QuotaIndex([survey(quota(quota_id=id_), survey_id=10 * id_) for id_ in range(1, 40)])
    panel = people(200, 200).append_column("w", pa.array([0.0, 1.0] * 200))
    output = Allocate(1, weight="w", reserves=39, room=dict.fromkeys(range(1, 40), 400))
    best = [row["quota_ids"][:8] for row in allocated(index, panel, TopK(39))]  # the candidates of a member
    assert [row["reserves"] for row in allocated(index, panel, output)][::2] == best[::2]


def test_reserves_are_the_next_best_quotas_of_other_surveys():
    index, panel = generated_panel()
    allocate = Allocate(2, reserves=3)
    rows = PanelMatcher(index, allocate).run(panel).read_all().to_pylist()
    without = PanelMatcher(index, Allocate(2)).run(panel).read_all()
    surveys = {target.quota.quota_id: target.survey.survey_id for target in index.quota_ids.targets()}
    assert [each["quota_ids"] for each in rows] == without.column("quota_ids").to_pylist()
    assert "reserves" not in without.schema.names
    assert max(len(each["reserves"]) for each in rows) == 3
    for each in rows:
        chosen = [surveys[quota_id] for quota_id in (*each["quota_ids"], *each["reserves"])]
        assert len(chosen) == len(set(chosen))


def test_terms_are_the_rooms_and_values_of_an_allocation():
    index, _ = generated_panel()
    some = index.quota_ids[0]
    terms = PanelMatcher(index, Allocate(1, room={some: 7}, value={some: 2.5})).terms()
    assert (terms.rooms[some], terms.values[some]) == (7, 2.5)
    assert set(terms.rooms) == set(terms.values) == set(index.quota_ids)
    assert terms.survey_rooms == {}
    capped = PanelMatcher(index, Allocate(1)).terms().survey_rooms
    surveys = {target.survey.survey_id: target.survey for target in index.quota_ids.targets()}
    assert set(capped) == set(surveys)
    assert all(capped[id_] >= each.estimated_completes_remaining for id_, each in surveys.items())
    with pytest.raises(InvalidRequestError, match="Allocate"):
        PanelMatcher(index).terms()
