"""A difficult inventory, and members for it: many questions, with few conditions in common.

The numbers are those of real responses (layers of a quota, sub-quotas of a layer, rows of a sub-quota,
truncated postal lists, one full sub-quota in thirty). There are two hundred questions, and a member has
answered thirty.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count, pairwise
from random import Random
from typing import TYPE_CHECKING, Any, Final

from sampling_async import Layer, Price, QuestionAndAnswers, Quota, Quotas, SubQuota, Survey

if TYPE_CHECKING:
    from collections.abc import Iterator

AGE: Final = 1001538
POSTAL: Final = 1001042
DMA: Final = 1001568
GENDER: Final = 1001007
FEMALE, MALE = 2000246, 2000247
COMMON: Final = 200
ANSWERED: Final = 27 / COMMON  # of the common questions; with age, gender, postal code and DMA, thirty in all
AREAS: Final = 400
_NOW: Final = datetime(2026, 1, 15, 9, 30, tzinfo=UTC)

Rows = tuple[QuestionAndAnswers, ...]


def questions() -> dict[int, tuple[int, ...]]:
    """Return the common questions, each with its answer IDs: two to twelve."""
    return {
        1010000 + at: tuple(range(2100000 + 20 * at, 2100000 + 20 * at + 2 + at * 7 % 11))
        for at in range(COMMON)
    }


def inventory(surveys: int = 2000, *, seed: int = 1) -> Quotas:
    """Return an inventory with four quotas per survey. It is the same each time."""
    return Maker(Random(seed), questions()).inventory(surveys)


class Maker:
    """A maker of surveys whose questions have these answer IDs."""

    def __init__(self, random: Random, questions: dict[int, tuple[int, ...]]) -> None:
        self._random = random
        self._questions = questions
        # The most frequent question occurs a hundred times as often as the rarest one.
        self._names = tuple(self._questions)
        self._weights = [1 / (3 + at) for at in range(len(self._names))]
        self._ids = count(1)

    def inventory(self, surveys: int) -> Quotas:
        """Return an inventory of so many surveys."""
        return Quotas(1, _NOW, tuple(self._survey() for _ in range(surveys)))

    def _survey(self) -> Survey:
        random = self._random
        quotas = tuple(self._quota() for _ in range(4))
        return Survey(
            survey_id=next(self._ids),
            wave_id=next(self._ids),
            loi=random.choice((5, 10, 15, 20)),
            ir=random.randint(0, 100),
            study_type_id=1,
            scheduled_completion_date=_NOW,
            device_type_ids=random.choice(((1, 2, 3), (1, 2, 3), (1,))),
            is_survey_recontact=False,
            completes_required=sum(quota.completes_required for quota in quotas),
            estimated_completes_remaining=sum(quota.estimated_completes_remaining for quota in quotas),
            price=Price(random.randint(10, 120) / 20, 1),
            quotas=quotas,
        )

    def _quota(self) -> Quota:
        random = self._random
        required = random.choice((50, 100, 200, 400))
        layers = tuple(self._layer() for _ in range(random.choices((1, 2, 3, 4, 5), (15, 28, 30, 20, 7))[0]))
        return Quota(next(self._ids), required, random.randint(1, required), layers)

    def _layer(self) -> Layer:
        parts = self._parts()
        return Layer(next(self._ids), tuple(self._sub_quota(rows) for rows in parts))

    def _sub_quota(self, rows: Rows) -> SubQuota:
        target = self._random.randint(5, 200)
        done = target if self._random.random() < 0.033 else self._random.randrange(target)
        return SubQuota(next(self._ids), done, target, rows)

    def _parts(self) -> list[Rows]:
        """Return the rows of the sub-quotas of a layer."""
        random = self._random
        kind = random.random()
        if kind < 0.14:
            parts = [(gender, *age) for gender in self._genders() for age in self._ages()]
        elif kind < 0.3:
            parts = self._ages()
        elif kind < 0.38:
            parts = [(gender,) for gender in self._genders()]
        elif kind < 0.44:
            parts = [(gender, *other) for gender in self._genders() for other in self._groups()]
        elif kind < 0.5:
            parts = [self._postal()]
        elif kind < 0.53:
            parts = [self._dma()]
        else:
            parts = self._groups()
        if random.random() < 0.6:
            return [random.choice(parts)]
        return parts

    def _genders(self) -> Rows:
        return QuestionAndAnswers(GENDER, (MALE,)), QuestionAndAnswers(GENDER, (FEMALE,))

    def _ages(self) -> list[Rows]:
        random = self._random
        borders = sorted({18, *random.sample(range(20, 75), random.randint(1, 4)), 100})
        return [
            (QuestionAndAnswers(AGE, answer_values=(f"{low}-{high - 1}",)),) for low, high in pairwise(borders)
        ]

    def _groups(self) -> list[Rows]:
        random = self._random
        question_id = random.choices(self._names, self._weights)[0]
        answers = self._questions[question_id]
        routable = random.random() < 0.25
        if len(answers) < 4 or random.random() < 0.6:
            wanted = random.sample(answers, random.randint(1, (len(answers) + 1) // 2))
            return [(QuestionAndAnswers(question_id, tuple(sorted(wanted)), is_routable=routable),)]
        cut = random.randint(1, len(answers) - 1)
        return [(QuestionAndAnswers(question_id, part),) for part in (answers[:cut], answers[cut:])]

    def _postal(self) -> Rows:
        random = self._random
        areas = random.sample(range(AREAS), random.randint(1, 12))
        if random.random() < 0.4:
            return (QuestionAndAnswers(POSTAL, answer_values=tuple(f"{100 + area:03}" for area in areas)),)
        codes = [
            f"{100 + area:03}{last:02}" for area in areas for last in range(0, 100, random.choice((1, 2, 3)))
        ]
        return (QuestionAndAnswers(POSTAL, answer_values=tuple(codes[:1000])),)

    def _dma(self) -> Rows:
        ids = self._random.sample(range(500, 500 + AREAS // 2), self._random.randint(1, 8))
        return (QuestionAndAnswers(DMA, answer_values=tuple(map(str, ids))),)


def members(number: int, *, seed: int = 2) -> Iterator[dict[int, Any]]:
    """Yield profiles. They are the same each time."""
    random, common = Random(seed), questions()
    for _ in range(number):
        area = random.randrange(AREAS)
        profile: dict[int, Any] = {
            AGE: random.randint(16, 90),
            GENDER: random.choice((FEMALE, MALE)),
            POSTAL: f"{100 + area:03}{random.randrange(100):02}",
            DMA: 500 + area // 2,
        }
        for question_id, answers in common.items():
            if random.random() < ANSWERED:
                profile[question_id] = random.choice(answers)
        yield profile
