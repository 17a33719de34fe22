"""The simulated reference data: questions, their answers, and a made-up country of postal codes.

The generators of members and of inventories both use it, so that generated members fit generated quotas. The
IDs of age, postal code, DMA, MSA and gender are those of real bodies; all other question and answer IDs are
made up.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from attrs import field, frozen

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
