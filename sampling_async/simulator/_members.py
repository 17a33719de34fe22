"""Members of a simulated panel, and their generation."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, Final, TypeAlias

from attrs import field, frozen

from sampling_async._contract.records import Participation
from sampling_async.simulator._questions import (
    AGE,
    DMA,
    FEMALE,
    GENDER,
    MALE,
    MSA,
    POSTAL_CODE,
    REGION,
    Area,
    Question,
    country,
    question_bank,
)

if TYPE_CHECKING:
    from sampling_async._contract.records import Quotas

ProfileAnswer: TypeAlias = int | str | frozenset[int]
"""A member's answer: the age in years, a postal code as text, or else one answer ID or a set of them."""

STARTED: Final = 1
TERMINATED: Final = 3
QUALIFIED: Final = 9
QUOTA_FULL: Final = 10


@frozen
class SimulatedMember:
    """A member of a simulated panel.

    Attributes:
        member_code: Any text; unique in its panel.
        profile: The member's answers by question ID. A question that is missing was never answered.
        device_type_id: The device that the member uses, compared with the survey's `device_type_ids`.
        participations: The member's past participations, compared with the survey's wave exclusions.
    """

    member_code: str
    profile: Mapping[int, ProfileAnswer] = field(factory=dict[int, ProfileAnswer])
    device_type_id: int = 1
    participations: tuple[Participation, ...] = ()


def generate_members(
    seed: int | str | Random, *, members: int, inventory: Quotas | None = None, first: int = 1
) -> tuple[SimulatedMember, ...]:
    """Generate members whose profiles fit generated inventories.

    Args:
        seed: A seed, or a random generator. The same seed makes the same members.
        members: How many.
        inventory: The source of past participations: they are drawn from the surveys that its exclusions name.
        first: The number in the first member code.
    """
    random = seed if isinstance(seed, Random) else Random(f"{seed}/members")  # noqa: S311  no secret
    areas, bank, taken = country(), question_bank(), _excluded_waves(inventory)
    return tuple(
        SimulatedMember(
            member_code=f"m{number:06}",
            profile=_profile(random, areas, bank),
            device_type_id=random.choices((1, 2, 3), (60, 30, 10))[0],
            participations=_participations(random, taken),
        )
        for number in range(first, first + members)
    )


def _excluded_waves(inventory: Quotas | None) -> tuple[tuple[int, int], ...]:
    surveys = inventory.surveys if inventory else ()
    # A dict as an ordered set: members must follow from the seed only.
    waves = {(e.survey_id, e.wave_id): None for survey in surveys for e in survey.survey_wave_exclusions}
    return tuple(waves)


def _profile(random: Random, areas: tuple[Area, ...], bank: tuple[Question, ...]) -> dict[int, ProfileAnswer]:
    area = random.choice(areas)
    postal_code = random.choice(area.postal_codes)
    # The ages 16 and 17 are rare (weight 2), 18 to 64 are common (5), 65 to 89 are in between (3).
    profile: dict[int, ProfileAnswer] = {
        AGE: random.choices(range(16, 90), [2] * 2 + [5] * 47 + [3] * 25)[0],
        GENDER: random.choice((FEMALE, MALE)),
        POSTAL_CODE: postal_code,
        DMA: area.dma(postal_code),
        MSA: area.msa(postal_code),
        REGION: area.region,
    }
    for question in bank:
        if random.random() < question.common:
            profile[question.question_id] = _chosen(random, question)
    return profile


def _chosen(random: Random, question: Question) -> ProfileAnswer:
    if not question.is_multiple:
        return random.choice(question.answer_ids)
    count = random.randint(1, min(3, len(question.answer_ids)))
    return frozenset(random.sample(question.answer_ids, count))


def _participations(random: Random, waves: tuple[tuple[int, int], ...]) -> tuple[Participation, ...]:
    """Draw a member's past: up to a quarter of the excluded waves, at most 40, with any status."""
    taken = random.sample(waves, min(40, round(random.random() * len(waves) / 4)))
    # In an exclusion, wave 0 means any wave; a participation needs a real one.
    return tuple(
        Participation(survey_id, wave_id or random.randint(1, 9), _status(random))
        for survey_id, wave_id in taken
    )


def _status(random: Random) -> int:
    return random.choices((STARTED, TERMINATED, QUALIFIED, QUOTA_FULL), (2, 3, 4, 1))[0]
