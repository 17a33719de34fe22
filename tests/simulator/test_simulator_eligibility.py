"""Whether a member matches a quota, rule by rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import attrs
import pytest
from panel_kit import AGE, DMA, GENDER, POSTAL

from sampling_async import Layer, QuestionAndAnswers, Quota, SubQuota
from sampling_async.simulator import AGE_BANDS, SimulatedMember, Simulator, generate_inventory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sampling_async.simulator import ProfileAnswer

COLOUR = 7
FRUIT = 8


def ids(question_id: int, *answer_ids: int, routable: bool = False) -> QuestionAndAnswers:
    return QuestionAndAnswers(question_id, answer_ids=answer_ids, is_routable=routable)


def values(question_id: int, *answer_values: str) -> QuestionAndAnswers:
    return QuestionAndAnswers(question_id, answer_values=answer_values)


def sub_quota(*conditions: QuestionAndAnswers, done: int = 0) -> SubQuota:
    return SubQuota(1, done, 10, conditions)


def service_of(profile: Mapping[int, ProfileAnswer], *layers: list[SubQuota]) -> Simulator:
    """Return a service with one quota and one member."""
    quota = Quota(1, 10, 10, tuple(Layer(i, tuple(parts)) for i, parts in enumerate(layers)))
    inventory = generate_inventory(surveys=1)
    survey = attrs.evolve(inventory.surveys[0], quotas=(quota,), survey_wave_exclusions=())
    return Simulator(
        inventory=attrs.evolve(inventory, surveys=(survey,)), members=[SimulatedMember("m", profile)]
    )


def filled(profile: Mapping[int, ProfileAnswer], *layers: list[SubQuota]) -> tuple[int, ...] | None:
    """Return the sub-quota of each layer that an invite of the member fills, or None if there is no invite."""
    sim = service_of(profile, *layers)
    if sim.eligible("m", 1) != 1:
        return None

    async def invite() -> None:
        async with sim.client() as client:
            await client.generate_invite("m", 1)

    anyio.run(invite)
    (survey,) = sim.inventory.surveys
    counts = [[part.current_completes for part in layer.sub_quotas] for layer in survey.quotas[0].layers]
    return tuple(
        next(at for at, part in enumerate(parts) if count[at] > part.current_completes)
        for count, parts in zip(counts, layers, strict=True)
    )


def meets(answer: Any, condition: QuestionAndAnswers) -> bool:
    return service_of({condition.question_id: answer}, [sub_quota(condition)]).eligible("m", 1) == 1


@pytest.mark.parametrize(
    ("years", "ranges", "expected"),
    [
        (18, ["18-34"], True),
        (34, ["18-34"], True),
        (35, ["18-34"], False),
        (17, ["18-34"], False),
        (20, ["45-54", "18-44"], True),
        (44, [" 18 - 44 "], True),
        (99, ["65-99"], True),
        (104, ["65-99"], True),
        (104, ["65-100"], True),
        (104, ["65-98"], False),
        (40, ["40"], True),
        (40, ["40-"], False),
        (40, ["forty", "40+"], False),
        (40, [], False),
    ],
)
def test_age_ranges_include_both_ends(years: int, ranges: list[str], *, expected: bool):
    assert meets(years, values(AGE, *ranges)) is expected


def test_age_is_compared_with_the_bands_of_answer_ids():
    low, high = AGE_BANDS[2006353]
    assert [meets(years, ids(AGE, 2006353)) for years in (low - 1, low, high, high + 1)] == [0, 1, 1, 0]
    assert not meets(30, ids(AGE, 123))
    assert not meets("30", ids(AGE, 2006353))


@pytest.mark.parametrize(
    ("postal_code", "listed", "expected"),
    [
        ("90210", ["018", "90", "91"], True),
        ("01810", ["018"], True),
        ("1810", ["018"], False),
        ("sw1a 1aa", ["SW1A-1"], True),
        ("90210", ["902101"], False),
        ("90210", ["", " "], False),
    ],
)
def test_a_postal_code_begins_with_a_listed_value(postal_code: str, listed: list[str], *, expected: bool):
    assert meets(postal_code, values(POSTAL, *listed)) is expected


def test_other_questions_need_one_of_the_answers():
    assert meets(2, ids(COLOUR, 1, 2))
    assert not meets(3, ids(COLOUR, 1, 2))
    assert meets(frozenset({2, 9}), ids(COLOUR, 1, 2))
    assert not meets(frozenset(), ids(COLOUR, 1, 2))
    assert meets(2112286, values(DMA, "2112286", "2112282"))
    assert not meets(2, ids(COLOUR))


def test_rows_of_one_question_are_alternatives_and_all_questions_must_be_met():
    part = sub_quota(ids(COLOUR, 1), ids(COLOUR, 2), ids(GENDER, 5))
    assert filled({COLOUR: 2, GENDER: 5}, [part]) == (0,)
    assert filled({COLOUR: 2, GENDER: 6}, [part]) is None
    assert filled({COLOUR: 2}, [part]) is None


def test_each_layer_needs_exactly_one_fitting_sub_quota():
    colours = [sub_quota(ids(COLOUR, 1)), sub_quota(ids(COLOUR, 2))]
    overlapping = [sub_quota(ids(COLOUR, 1, 2)), sub_quota(ids(COLOUR, 2))]
    assert filled({COLOUR: 2}, colours) == (1,)
    assert filled({COLOUR: 1}, colours, overlapping) == (0, 0)
    assert filled({COLOUR: 2}, colours, overlapping) is None
    assert filled({COLOUR: 3}, colours) is None
    assert filled({COLOUR: 2}) == ()


def test_a_missing_answer_to_a_routable_question_fits():
    asked = [sub_quota(ids(FRUIT, 1, routable=True)), sub_quota(ids(FRUIT, 2, routable=True))]
    for either in (asked, asked[::-1]):
        assert filled({}, either) == (0,)
    assert filled({FRUIT: 2}, asked) == (1,)
    assert filled({FRUIT: 3}, asked) is None
    known = [*asked, sub_quota(ids(COLOUR, 1))]
    assert filled({COLOUR: 1}, known) == (2,)


def test_the_first_open_sub_quota_that_fits_is_taken():
    first, second = (ids(FRUIT, answer, routable=True) for answer in (1, 2))
    parts = [sub_quota(first, done=10), sub_quota(second, done=9), sub_quota(ids(COLOUR, 1))]
    assert filled({}, parts) == (1,)
    assert filled({}, parts[1:]) == (0,)
    assert filled({FRUIT: 1}, parts) is None
