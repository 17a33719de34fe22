"""The simulated reference data: questions, their answers, and a made-up country of postal codes.

Both generators draw from here, so that generated members fit generated quotas. The IDs of age, postal code,
DMA, MSA and gender are those seen in real bodies; all other question and answer IDs are made up.
"""

from __future__ import annotations

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

OPEN_END: Final = 99
"""An age range that ends here or above means "and over"."""

AGE_BANDS: Final = {
    2006351: (13, 17),
    2006352: (18, 24),
    2006353: (25, 34),
    2006354: (35, 44),
    2006355: (45, 54),
    2006356: (55, 64),
    2006357: (65, OPEN_END),
}
"""What the answer IDs of the age question mean: both ends of the band, in years."""

REGION_ANSWERS: Final = (2003001, 2003002, 2003003, 2003004)
EXPOSED_POSTAL_CODES: Final = 1000
"""Get Quotas exposes the first so many postal codes of a list."""

_AREAS: Final = 48
_AREA_PREFIXES: Final = (4, 12, 24, 32)  # areas below and far above the 1000 codes that are exposed


@frozen
class Question:
    """A question with answer IDs to choose from; `common` is the share of members who answered it."""

    question_id: int
    answer_ids: tuple[int, ...]
    common: float
    is_multiple: bool = False
    is_routable: bool = False


def question_bank() -> tuple[Question, ...]:
    """Return the choice questions apart from gender and region: ordinary ones, then routable ones."""
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


def _answer_ids(number: int, size: int) -> tuple[int, ...]:
    return tuple(range(2010001 + 100 * number, 2010001 + 100 * number + size))


@frozen
class Area:
    """A part of the made-up country; its codes share the first digits in `prefixes`."""

    number: int
    prefixes: tuple[str, ...]
    postal_codes: tuple[str, ...] = field(repr=False)

    @property
    def region(self) -> int:
        """The answer ID of the region question."""
        return REGION_ANSWERS[self.number % len(REGION_ANSWERS)]

    def dma(self, postal_code: str) -> int:
        """Return the DMA answer ID of a postal code: four to an area."""
        return 2112100 + 4 * self.number + int(postal_code[2]) % 4

    def msa(self, postal_code: str) -> int:
        """Return the MSA answer ID of a postal code: three to an area."""
        return 2113100 + 3 * self.number + int(postal_code[1:3]) % 3


def country() -> tuple[Area, ...]:
    """Return the made-up country: areas of some 200 to 1,900 five-digit postal codes."""
    areas: list[Area] = []
    start = 10  # 01000: codes with a leading zero exist
    for number in range(_AREAS):
        size = _AREA_PREFIXES[number % len(_AREA_PREFIXES)]
        prefixes = tuple(f"{prefix:03}" for prefix in range(start, start + size))
        codes = tuple(f"{prefix}{last:02}" for prefix in prefixes for last in range(_suffixes(prefix)))
        areas.append(Area(number, prefixes, codes))
        start += size
    return tuple(areas)


def _suffixes(prefix: str) -> int:
    """Return how many codes begin with a prefix: 30 to 89, without regularity."""
    return 30 + int(prefix) * 7919 % 60
