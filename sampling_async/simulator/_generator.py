# ruff: noqa: PLR2004  the numbers are the spread of real bodies
"""Generate an inventory in the shape of real Get Quotas bodies, at any size."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Final, TypeVar

from attrs import define, field

from sampling_async._contract.records import Layer, Price, Quota, Quotas, SubQuota, Survey, SurveyWaveExclusion
from sampling_async.simulator._members import QUALIFIED, QUOTA_FULL, STARTED, TERMINATED
from sampling_async.simulator._targeting import Conditions, Targeting

if TYPE_CHECKING:
    from collections.abc import Sequence

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

T = TypeVar("T")


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
        quotas = tuple(self.quota() for _ in range(_drawn(random, _QUOTAS_OF_SURVEY)))
        required = sum(quota.completes_required for quota in quotas)
        remaining = sum(quota.estimated_completes_remaining for quota in quotas)
        # The survey's limit can be lower than the sum over its quotas.
        capped = max(1, round(remaining * random.uniform(0.6, 0.95))) if random.random() < 0.3 else remaining
        survey = Survey(
            survey_id=self.survey_id,
            wave_id=wave_id,
            loi=_drawn(random, _LOI),
            ir=_drawn(random, _IR),
            study_type_id=_drawn(random, _STUDY_TYPES),
            scheduled_completion_date=self.closing(),
            device_type_ids=_drawn(random, _DEVICES),
            is_survey_recontact=number % _RECONTACT_EVERY == 4,
            completes_required=required if capped == remaining else max(capped, round(required * 0.9)),
            estimated_completes_remaining=capped,
            price=Price(_price(random), 1),
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
        layouts = self.targeting.layouts(_drawn(random, _LAYERS_OF_QUOTA))
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


def _drawn(random: Random, spread: tuple[Sequence[T], Sequence[int]]) -> T:
    return random.choices(spread[0], spread[1])[0]


def _price(random: Random) -> float:
    """Draw the price of a complete: mostly a little over 1, in steps of 0.05, with a tail up to 12."""
    # Twenty steps to a unit: 1.37 becomes round(27.4) / 20, which is 1.35.
    return round(20 * min(12.0, random.lognormvariate(0.4, 0.4))) / 20
