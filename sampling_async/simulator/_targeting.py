# ruff: noqa: PLR2004  the numbers are the spread of real bodies
"""The conditions of generated quotas: the sub-quotas of a layer, by kind of layer."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

from sampling_async._contract.records import QuestionAndAnswers
from sampling_async.simulator._questions import (
    AGE,
    AGE_BANDS,
    DMA,
    EXPOSED_POSTAL_CODES,
    FEMALE,
    GENDER,
    MALE,
    MSA,
    OPEN_END,
    POSTAL_CODE,
    REGION,
    REGION_ANSWERS,
    Area,
    Question,
    country,
    question_bank,
)

if TYPE_CHECKING:
    from random import Random

Conditions: TypeAlias = tuple[QuestionAndAnswers, ...]
"""The conditions of one sub-quota."""

Layout: TypeAlias = tuple[Conditions, ...]
"""The conditions of the sub-quotas of one layer."""

_AGE_BORDERS: Final = (
    (18, 25, 35, 45, 55, 65, OPEN_END + 1),
    (18, 35, 50, OPEN_END + 1),
    (18, 35, 55, OPEN_END + 1),
    (16, 30, 40, 56, 75),
    (18, 45, 65),
    (18, 50, OPEN_END + 1),
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
        """Split the answers into two to four groups that do not overlap."""
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
