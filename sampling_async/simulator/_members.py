"""The simulated reference data, the members of a panel, and whether a member matches a quota.

The rules are written to be easy to compare with the contract, and not to be fast. Three of them it leaves open:
a postal code is met if it begins with a listed value, even if the service has cut the list; a routable question
without an answer counts as met, because the service asks it, and members of the simulator then answer it so; a
condition whose list is empty or cannot be read is met by nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from random import Random
from typing import TYPE_CHECKING, Final, TypeAlias

from attrs import field, frozen

from sampling_async._contract.records import AGE_BANDS, OPEN_AGE, Participation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sampling_async import QuestionAndAnswers, Quota, Quotas, SubQuota

# --- The reference data. Inventories are generated from it too, so that generated members fit generated quotas.
# The IDs of age, postal code, DMA, MSA and gender are those of real bodies; all others are made up.

AGE: Final = 1001538
POSTAL_CODE: Final = 1001042
DMA: Final = 1001568
MSA: Final = 1001569
GENDER: Final = 1001007
REGION: Final = 1003001
FEMALE: Final = 2000246
MALE: Final = 2000247

REGION_ANSWERS: Final = (2003001, 2003002, 2003003, 2003004)
EXPOSED_POSTAL_CODES: Final = 1000
"""The number of postal codes of a list that Get Quotas exposes: the first ones."""

_AREAS: Final = 48
# Prefixes of an area, with 30 to 89 codes each: some areas have fewer codes than are exposed, others far more.
_AREA_PREFIXES: Final = (4, 12, 24, 32)


@frozen
class Question:
    """A question with answer IDs to choose from; `common` is the share of members who have answered it."""

    question_id: int
    answer_ids: tuple[int, ...]
    common: float
    is_multiple: bool = False
    is_routable: bool = False


def question_bank() -> tuple[Question, ...]:
    """Return the choice questions except gender and region: ordinary ones, then routable ones."""
    long = (9, 10, 12)
    sizes = (6, 8, 7, 5, 12, 4, 2, 3, 9, 10, 2, 5)
    ordinary = [
        Question(1003101 + i, _answer_ids(i, size), 0.92, is_multiple=size in long)
        for i, size in enumerate(sizes)
    ]
    niche = [
        Question(1012301 + i, _answer_ids(50 + i, 2 + i % 9), 0.25, is_multiple=i % 3 == 0, is_routable=True)
        for i in range(14)
    ]
    return (*ordinary, *niche)


def question_ids() -> tuple[int, ...]:
    """Return the IDs of all questions that members may have answered and quotas may ask."""
    return (AGE, POSTAL_CODE, DMA, MSA, GENDER, REGION, *(each.question_id for each in question_bank()))


def _answer_ids(number: int, size: int) -> tuple[int, ...]:
    # A hundred numbers for each question, so that no two questions share an answer ID.
    return tuple(range(2010001 + 100 * number, 2010001 + 100 * number + size))


@frozen
class Area:
    """A part of the made-up country; `prefixes` are the first three digits of its postal codes."""

    number: int
    prefixes: tuple[str, ...]
    postal_codes: tuple[str, ...] = field(repr=False)

    @property
    def region(self) -> int:
        return REGION_ANSWERS[self.number % len(REGION_ANSWERS)]

    def dma(self, postal_code: str) -> int:
        """Return the DMA answer ID of a postal code; each area has four."""
        return 2112100 + 4 * self.number + int(postal_code[2]) % 4

    def msa(self, postal_code: str) -> int:
        """Return the MSA answer ID of a postal code; each area has three."""
        return 2113100 + 3 * self.number + int(postal_code[1:3]) % 3


@cache  # making it takes 20 ms, and each simulator asks for it twice
def country() -> tuple[Area, ...]:
    """Return the made-up country: areas of about 200 to 1,900 five-digit postal codes each."""
    areas: list[Area] = []
    # The first prefix is 010, so that codes with a leading zero exist.
    start = 10
    for number in range(_AREAS):
        size = _AREA_PREFIXES[number % len(_AREA_PREFIXES)]
        prefixes = tuple(f"{prefix:03}" for prefix in range(start, start + size))
        # 30 to 89 codes with each prefix: multiples of a prime vary them, without a random generator.
        codes = tuple(f"{each}{last:02}" for each in prefixes for last in range(30 + int(each) * 7919 % 60))
        areas.append(Area(number, prefixes, codes))
        start += size
    return tuple(areas)


# --- Who matches

Fit: TypeAlias = tuple[int, ...]
"""The positions of the sub-quotas of one layer that a member can take.

That is the one sub-quota that fits by profile, or all those that only routable questions still decide.
"""

_Questions: TypeAlias = "tuple[tuple[int, bool, tuple[Callable[[ProfileAnswer], bool], ...]], ...]"
"""The questions of a sub-quota: each with its ID, whether it is routable, and the tests of its conditions."""


Targets: TypeAlias = "tuple[tuple[_Questions, ...], ...]"
"""The questions of a quota, by layer and sub-quota."""


def targets_of(quota: Quota) -> Targets:
    return tuple(tuple(map(_questions, layer.sub_quotas)) for layer in quota.layers)


def fits_of(targets: Targets, profile: Mapping[int, ProfileAnswer]) -> tuple[Fit, ...] | None:
    """Return the sub-quotas that the member can take in each layer, or None if a layer does not hold."""
    fits: list[Fit] = []
    for layer in targets:
        fit = _layer_fit(layer, profile)
        if not fit:
            return None
        fits.append(fit)
    return tuple(fits)


def _questions(sub_quota: SubQuota) -> _Questions:
    by_question: dict[int, list[QuestionAndAnswers]] = {}
    for condition in sub_quota.questions_and_answers:
        by_question.setdefault(condition.question_id, []).append(condition)
    return tuple(
        (question_id, any(c.is_routable for c in conditions), tuple(map(_test, conditions)))
        for question_id, conditions in by_question.items()
    )


def _layer_fit(layer: Sequence[_Questions], profile: Mapping[int, ProfileAnswer]) -> Fit:
    held = [_holds(questions, profile) for questions in layer]
    certain = tuple(position for position, each in enumerate(held) if each)
    # Exactly one sub-quota must fit by profile: with two, the layer does not hold.
    if certain:
        return certain if len(certain) == 1 else ()
    return tuple(position for position, each in enumerate(held) if each is None)


def _holds(questions: _Questions, profile: Mapping[int, ProfileAnswer]) -> bool | None:
    """Return whether a member fits, or None if that depends on routable questions not yet answered."""
    asks = False
    for question_id, is_routable, tests in questions:
        answer = profile.get(question_id)
        if answer is None:
            if not is_routable:
                return False
            asks = True
        elif not any(test(answer) for test in tests):
            return False
    return None if asks else True


def _test(condition: QuestionAndAnswers) -> Callable[[ProfileAnswer], bool]:
    if condition.question_id == AGE:
        bands = [AGE_BANDS[answer_id] for answer_id in condition.answer_ids if answer_id in AGE_BANDS]
        spans = [span for span in (*bands, *map(_age_range, condition.answer_values)) if span]
        return lambda answer: (
            isinstance(answer, int)
            and any(low <= answer and (answer <= high or high >= OPEN_AGE) for low, high in spans)
        )
    if condition.question_id == POSTAL_CODE:
        listed = {postal for value in condition.answer_values if (postal := _plain(value))}
        # One lookup for each length that occurs, however long the list is. With "02139" and "100" listed, the
        # first 3 and the first 5 characters of a member's code are looked up.
        lengths = sorted({len(value) for value in listed})

        def begins(answer: ProfileAnswer) -> bool:
            postal = _plain(str(answer))
            return any(postal[:length] in listed for length in lengths)

        return begins
    wanted = {str(answer_id) for answer_id in condition.answer_ids} | set(condition.answer_values)
    return lambda answer: any(
        str(one) in wanted for one in (answer if isinstance(answer, AbstractSet | list | tuple) else (answer,))
    )


def _age_range(value: str) -> tuple[int, int] | None:
    # A single number, such as "35", is a range of one year.
    low, dash, high = (part.strip() for part in value.partition("-"))
    if not low.isdecimal() or (dash and not high.isdecimal()):
        return None
    return int(low), int(high if dash else low)


def _plain(postal_code: str) -> str:
    return postal_code.replace(" ", "").replace("-", "").casefold()


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
    areas, bank, surveys = country(), question_bank(), inventory.surveys if inventory else ()
    # A dict as an ordered set: members must follow from the seed only.
    waves = {(e.survey_id, e.wave_id): None for survey in surveys for e in survey.survey_wave_exclusions}
    taken = tuple(waves)
    return tuple(
        SimulatedMember(
            member_code=f"m{number:06}",
            profile=_profile(random, areas, bank),
            device_type_id=random.choices((1, 2, 3), (60, 30, 10))[0],
            participations=_participations(random, taken),
        )
        for number in range(first, first + members)
    )


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
    statuses, weights = (STARTED, TERMINATED, QUALIFIED, QUOTA_FULL), (2, 3, 4, 1)
    return tuple(
        Participation(survey_id, wave_id or random.randint(1, 9), random.choices(statuses, weights)[0])
        for survey_id, wave_id in taken
    )
