# ruff: noqa: PLR2004  the numbers are the spread of real bodies
"""Generate an inventory in the shape of real Get Quotas bodies, at any size."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Final, TypeAlias

from attrs import define, field

from sampling_async import (
    Layer,
    Price,
    QuestionAndAnswers,
    Quota,
    Quotas,
    SubQuota,
    Survey,
    SurveyWaveExclusion,
)
from sampling_async._contract.records import AGE_BANDS, OPEN_AGE
from sampling_async.simulator._members import (
    AGE,
    DMA,
    EXPOSED_POSTAL_CODES,
    FEMALE,
    GENDER,
    MALE,
    MSA,
    POSTAL_CODE,
    QUALIFIED,
    QUOTA_FULL,
    REGION,
    REGION_ANSWERS,
    STARTED,
    TERMINATED,
    Area,
    Question,
    country,
    question_bank,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

Conditions: TypeAlias = tuple[QuestionAndAnswers, ...]
"""The conditions of one sub-quota."""

Layout: TypeAlias = tuple[Conditions, ...]
"""The conditions of the sub-quotas of one layer."""

_AGE_BORDERS: Final = (
    (18, 25, 35, 45, 55, 65, OPEN_AGE + 1),
    (18, 35, 50, OPEN_AGE + 1),
    (18, 35, 55, OPEN_AGE + 1),
    (16, 30, 40, 56, 75),
    (18, 45, 65),
    (18, 50, OPEN_AGE + 1),
)
_KINDS: Final = {
    "gender_age": 32,
    "gender": 6,
    "age": 12,
    "gender_age_other": 10,
    "other": 16,
    "region": 8,
    "postal": 6,
    "dma": 3,
    "msa": 2,
    "routable": 7,
}


class Targeting:
    """Draws the layouts of layers, all from one country and one question bank."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._areas = country()
        bank = question_bank()
        self._ordinary = [question for question in bank if not question.is_routable]
        self._routable = [question for question in bank if question.is_routable]

    def layouts(self, layers: int) -> tuple[Layout, ...]:
        """Draw the layouts of the layers of one quota, each of a different kind."""
        # A dict as an ordered set: a kind that is drawn twice counts once.
        kinds: dict[str, None] = {}
        while len(kinds) < layers:
            kinds[self._random.choices(tuple(_KINDS), tuple(_KINDS.values()))[0]] = None
        return tuple(self._layout(kind) for kind in kinds)

    def _layout(self, kind: str) -> Layout:
        match kind:
            case "gender_age":
                parts = _crossed(self._genders(), self._ages())
            case "gender":
                parts = self._genders()
            case "age":
                parts = self._ages()
            case "gender_age_other":
                parts = _crossed(_crossed(self._genders(), self._ages()), self._answers(self._ordinary))
            case "other":
                parts = self._answers(self._ordinary)
            case "region":
                parts = self._split(REGION, REGION_ANSWERS)
            case "routable":
                parts = self._answers(self._routable)
            case _:
                parts = self._places(kind)
        return self._narrowed(parts)

    def _narrowed(self, parts: Layout) -> Layout:
        """Keep all sub-quotas, some, or one: most layers of real bodies have just one."""
        chance = self._random.random()
        if chance < 0.72 and len(parts) > 1:
            return (self._random.choice(parts),)
        if chance < 0.85:
            kept = self._random.randint(1, len(parts))
            return tuple(self._random.sample(parts, kept))
        return parts

    def _genders(self) -> Layout:
        return ((_choice(GENDER, MALE),), (_choice(GENDER, FEMALE),))

    def _ages(self) -> Layout:
        """Split ages into groups: by answer IDs or by ranges, of which a few overlap or stand in pairs."""
        random = self._random
        chance = random.random()
        if chance < 0.2:
            # All bands but the first, which is under 18; cuts are positions between bands.
            bands = tuple(AGE_BANDS)[1:]
            cuts = sorted({0, len(bands), *random.sample(range(1, len(bands)), random.randint(0, 2))})
            return tuple((_choice(AGE, *bands[low:high]),) for low, high in pairwise(cuts))
        borders = random.choice(_AGE_BORDERS)
        ranges = [f"{low}-{high - 1}" for low, high in pairwise(borders)]
        if chance < 0.24:
            # It overlaps the next range: members in both fit two sub-quotas, so the layer does not hold.
            ranges[0] = f"{borders[0]}-{borders[1] + 4}"
        # Two ranges in one condition, the later one first.
        if chance > 0.96 and len(ranges) > 2:
            return ((_values(AGE, ranges[1], ranges[0]),), *((_values(AGE, text),) for text in ranges[2:]))
        if chance > 0.9:
            return ((_values(AGE, f"{borders[0]}-{borders[-1] - 1}"),),)
        return tuple((_values(AGE, text),) for text in ranges)

    def _answers(self, questions: list[Question]) -> Layout:
        question = self._random.choice(questions)
        if question.is_multiple or question.is_routable:
            wanted = self._random.sample(question.answer_ids, (len(question.answer_ids) + 2) // 3)
            return ((_choice(question.question_id, *sorted(wanted), is_routable=question.is_routable),),)
        return self._split(question.question_id, question.answer_ids)

    def _split(self, question_id: int, answer_ids: tuple[int, ...]) -> Layout:
        # Example: 7 answers in 3 groups have the borders 0, 2, 5 and 7.
        groups = min(len(answer_ids), self._random.randint(2, 4))
        borders = [round(i * len(answer_ids) / groups) for i in range(groups + 1)]
        return tuple((_choice(question_id, *answer_ids[low:high]),) for low, high in pairwise(borders))

    def _places(self, kind: str) -> Layout:
        areas = self._random.sample(self._areas, self._random.choice((1, 1, 2)))
        if kind == "postal":
            return tuple((_values(POSTAL_CODE, *self._postal_codes(area)),) for area in areas)
        # DMA and MSA follow from the first three digits, so one code of each prefix is enough.
        question_id, of = (DMA, Area.dma) if kind == "dma" else (MSA, Area.msa)
        return tuple(
            (_values(question_id, *sorted({str(of(area, prefix + "00")) for prefix in area.prefixes})),)
            for area in areas
        )

    def _postal_codes(self, area: Area) -> tuple[str, ...]:
        """Return the prefixes of an area, or its codes, cut as the service cuts them; rarely with repeats."""
        chance = self._random.random()
        if chance < 0.25:
            return area.prefixes
        codes = area.postal_codes[:EXPOSED_POSTAL_CODES]
        # The first twelve codes replace the last twelve, so the length stays the same.
        return (*codes[:-12], *codes[:12]) if chance > 0.85 else codes


def _choice(question_id: int, *answer_ids: int, is_routable: bool = False) -> QuestionAndAnswers:
    return QuestionAndAnswers(question_id, answer_ids=answer_ids, is_routable=is_routable)


def _values(question_id: int, *values: str) -> QuestionAndAnswers:
    return QuestionAndAnswers(question_id, answer_values=values)


def _crossed(first: Layout, second: Layout) -> Layout:
    # Every part of one with every part of the other: 2 genders and 6 age groups make 12 sub-quotas.
    return tuple((*one, *other) for one in first for other in second)


COUNTRY_ID: Final = 2000223
AS_OF: Final = datetime(2026, 1, 15, 9, 30, 12, 575327, tzinfo=UTC)
"""The default moment of a generated inventory. It is fixed, so that the inventory depends on the seed only."""

# Values with their weights: 48 of 100 surveys have one quota, 20 have two, and so on.
_QUOTAS_OF_SURVEY: Final = ((1, 2, 3, 4, 5, 6, 8, 10), (48, 20, 12, 7, 5, 3, 3, 2))
_LAYERS_OF_QUOTA: Final = ((1, 2, 3, 4), (35, 33, 23, 9))
_LOI: Final = ((2, 5, 8, 10, 12, 15, 18, 20, 25, 30, 35), (1, 3, 5, 12, 8, 30, 8, 20, 5, 6, 2))
_IR: Final = (
    (0, 1, 5, 10, 12, 15, 20, 30, 40, 50, 60, 80, 90, 100),
    (1, 2, 4, 6, 6, 6, 8, 8, 14, 13, 12, 7, 6, 7),
)
_STUDY_TYPES: Final = ((2040, 2038, 1, 101735, 2051), (58, 15, 12, 10, 5))
_DEVICES: Final = (((1, 2, 3), (1,), (1, 2)), (86, 9, 5))
_RECONTACT_EVERY: Final = 20


def generate_inventory(seed: int | str | Random = 0, *, surveys: int = 20, as_of: datetime = AS_OF) -> Quotas:
    """Generate an inventory: realistic in shape and spread, different in every number from any real one.

    One survey in twenty is a recontact survey, beginning with the fifth.

    Args:
        seed: A seed, or a random generator. The same seed makes the same inventory.
        surveys: How many surveys, with two to three quotas each on average.
        as_of: The moment of the inventory. A third of the scheduled completion dates lie before it.
    """
    random = seed if isinstance(seed, Random) else Random(f"{seed}/inventory")  # noqa: S311  no secret
    plan = _InventoryPlan(random, as_of)
    return Quotas(
        country_id=COUNTRY_ID,
        cache_expires=as_of,
        surveys=tuple(plan.survey(number) for number in range(surveys)),
    )


@define
class _InventoryPlan:
    """Makes surveys one after another; remembers the last IDs and the waves that an exclusion can name."""

    random: Random
    as_of: datetime
    targeting: Targeting = field(init=False)
    waves: list[tuple[int, int]] = field(factory=list[tuple[int, int]])
    survey_id: int = 2400000
    quota_id: int = 1100000
    layer_id: int = 2700000
    sub_quota_id: int = 10500000

    def __attrs_post_init__(self) -> None:
        self.targeting = Targeting(self.random)
        self.survey_id += self.random.randint(1, 9999)

    def survey(self, number: int) -> Survey:
        random = self.random
        self.survey_id += random.randint(1, 60)
        wave_id = 770000 + random.randint(0, 9999) + number
        quotas = tuple(self.quota() for _ in range(random.choices(*_QUOTAS_OF_SURVEY)[0]))
        required = sum(quota.completes_required for quota in quotas)
        remaining = sum(quota.estimated_completes_remaining for quota in quotas)
        # The survey's limit can be lower than the sum over its quotas.
        capped = max(1, round(remaining * random.uniform(0.6, 0.95))) if random.random() < 0.3 else remaining
        survey = Survey(
            survey_id=self.survey_id,
            wave_id=wave_id,
            loi=random.choices(*_LOI)[0],
            ir=random.choices(*_IR)[0],
            study_type_id=random.choices(*_STUDY_TYPES)[0],
            scheduled_completion_date=self.closing(),
            device_type_ids=random.choices(*_DEVICES)[0],
            is_survey_recontact=number % _RECONTACT_EVERY == 4,
            completes_required=required if capped == remaining else max(capped, round(required * 0.9)),
            estimated_completes_remaining=capped,
            # Mostly a little over 1, with a tail up to 12. Twenty steps to a unit: 1.37 becomes 1.35.
            price=Price(round(20 * min(12.0, random.lognormvariate(0.4, 0.4))) / 20, 1),
            quotas=quotas,
            survey_name=f"{random.randint(1600000, 1699999)}-US",
            survey_wave_exclusions=self.exclusions(),
        )
        self.waves.append((survey.survey_id, wave_id))
        return survey

    def closing(self) -> datetime:
        """Draw a completion date without a time zone; a third of the dates are past."""
        random = self.random
        days = -random.expovariate(1 / 5) if random.random() < 0.33 else random.expovariate(1 / 12)
        moment = (self.as_of + timedelta(days=days)).replace(tzinfo=None)
        return moment.replace(microsecond=random.choice((0, 0, 510000, 607000)))

    def exclusions(self) -> tuple[SurveyWaveExclusion, ...]:
        """Draw exclusions of earlier surveys for four surveys in ten; half of them exclude any wave."""
        random = self.random
        if not self.waves or random.random() > 0.4:
            return ()
        named = random.sample(self.waves[-200:], min(len(self.waves), random.choice((1, 1, 2, 3))))
        statuses = ((QUALIFIED,), (QUALIFIED,), (QUALIFIED, QUOTA_FULL), (STARTED, TERMINATED, QUALIFIED))
        return tuple(
            SurveyWaveExclusion(survey_id, random.choice((0, wave_id)), random.choice(statuses))
            for survey_id, wave_id in named
        )

    def quota(self) -> Quota:
        random = self.random
        self.quota_id += random.randint(1, 15)
        required = random.choice((30, 50, 62, 100, 128, 161, 180, 240, 400, 700, 1000))
        progress = random.choice((0.0, random.random() * 0.5, random.random()))
        layouts = self.targeting.layouts(random.choices(*_LAYERS_OF_QUOTA)[0])
        return Quota(
            quota_id=self.quota_id,
            completes_required=required,
            estimated_completes_remaining=max(1, round(required * (1 - progress))),
            layers=tuple(self.layer(layout, required, progress) for layout in layouts),
        )

    def layer(self, layout: Sequence[Conditions], required: int, progress: float) -> Layer:
        self.layer_id += self.random.randint(1, 30)
        return Layer(
            self.layer_id, tuple(self.sub_quota(part, required / len(layout), progress) for part in layout)
        )

    def sub_quota(self, conditions: Conditions, share: float, progress: float) -> SubQuota:
        """Make a sub-quota. Targets do not add up to the quota's target; one sub-quota in thirty is full."""
        random = self.random
        self.sub_quota_id += random.randint(1, 3)
        target = max(1, round(share * random.choice((1, 1, 1, 1.05, 1.2))))
        # At most 0.99, so that a sub-quota that was not drawn as full keeps at least one open place.
        done = 1.0 if random.random() < 0.033 else min(0.99, progress * random.uniform(0.5, 1.1))
        return SubQuota(self.sub_quota_id, int(target * done), target, conditions)
