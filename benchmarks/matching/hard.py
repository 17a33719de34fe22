"""A harder inventory than `inventories`, and members for it: hardly two quotas ask the same.

There are 9,500 quotas with 5.4 distinct conditions each, where real responses have 0.4 to 1.3. Answers are
drawn one by one from questions with up to sixty of them, ages go from any year to any other, and postal lists
are a thousand random codes, all that the service shows. To a third of the questions, members give several
answers.
"""

from __future__ import annotations

from itertools import pairwise, product
from random import Random
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from matching.inventories import AGE, COMMON, DMA, FEMALE, GENDER, MALE, POSTAL, Maker, Rows
from sampling_async import QuestionAndAnswers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sampling_async import Quotas

SURVEYS: Final = 2375
BLOCK: Final = 10_000
CODES: Final = 10**5
SHOWN: Final = 1000
ANSWERED: Final = 27 / COMMON
SEVERAL: Final = 3  # every third question may have several answers
MOST: Final = 5  # of them
CROSSED: Final = 0.3


def questions() -> dict[int, tuple[int, ...]]:
    """Return the common questions, each with its answer IDs: twelve to sixty."""
    return {
        1010000 + at: tuple(range(2100000 + 100 * at, 2100000 + 100 * at + 12 + at * 7 % 49))
        for at in range(COMMON)
    }


def takes_several(question_id: int) -> bool:
    """Return whether members may give several answers to a common question."""
    return question_id % SEVERAL == 0


def inventory(*, seed: int = 1) -> Quotas:
    """Return an inventory with four quotas per survey. It is the same each time."""
    return _Maker(Random(seed), questions()).inventory(SURVEYS)


def crossed_inventory(*, seed: int = 1) -> Quotas:
    """Return an inventory in which three layers in ten cross two questions. It is the same each time."""
    return _CrossingMaker(Random(seed), questions()).inventory(SURVEYS)


class _Maker(Maker):
    def _parts(self) -> list[Rows]:
        random = self._random
        kind = random.random()
        if kind < 0.05:
            parts = [(gender, *age) for gender in self._genders() for age in self._ages()]
        elif kind < 0.15:
            parts = [(gender, *other) for gender in self._genders() for other in self._groups()]
        elif kind < 0.2:
            parts = self._ages()
        elif kind < 0.25:
            parts = [self._postal()]
        elif kind < 0.28:
            parts = [self._dma()]
        else:
            parts = self._groups()
        return [random.choice(parts)] if random.random() < 0.55 else parts

    def _ages(self) -> list[Rows]:
        random = self._random
        borders = sorted({*random.sample(range(16, 80), random.randint(2, 5)), 100})
        return [
            (QuestionAndAnswers(AGE, answer_values=(f"{low}-{high - 1}",)),) for low, high in pairwise(borders)
        ]

    def _groups(self) -> list[Rows]:
        random = self._random
        question_id = random.choices(self._names, self._weights)[0]
        answers = self._questions[question_id]
        routable = random.random() < 0.25
        mixed = random.sample(answers, len(answers))
        borders = [0, *sorted(random.sample(range(1, len(answers)), random.randint(1, 5))), len(answers)]
        parts = [tuple(sorted(mixed[first:end])) for first, end in pairwise(borders)]
        return [(QuestionAndAnswers(question_id, part, is_routable=routable),) for part in parts]

    def _postal(self) -> Rows:
        codes = self._random.sample(range(CODES), SHOWN)
        return (QuestionAndAnswers(POSTAL, answer_values=tuple(f"{code:05}" for code in codes)),)


class _CrossingMaker(_Maker):
    def _parts(self) -> list[Rows]:
        random = self._random
        if random.random() >= CROSSED:
            return super()._parts()
        genders = [(row,) for row in self._genders()]
        first, second = random.sample((genders, self._ages(), self._groups(), self._groups()), 2)
        if first[0][0].question_id == second[0][0].question_id:
            return self._parts()
        return [(*one, *other) for one, other in product(first, second)]


def members(number: int, *, seed: int = 2) -> Iterator[dict[int, Any]]:
    """Yield profiles. They are the same each time."""
    random, common = Random(seed), questions()
    for _ in range(number):
        code = random.randrange(CODES)
        profile: dict[int, Any] = {
            AGE: random.randint(16, 90),
            GENDER: random.choice((FEMALE, MALE)),
            POSTAL: f"{code:05}",
            DMA: 500 + code % 200,
        }
        for question_id, answers in common.items():
            if random.random() < ANSWERED:
                several = takes_several(question_id)
                profile[question_id] = (
                    random.sample(answers, random.randint(1, MOST)) if several else random.choice(answers)
                )
        yield profile


def panel(members: int, *, seed: int = 2) -> pa.RecordBatchReader:
    """Return members as a stream of batches, each made when it is needed. It is the same each time.

    Args:
        members: The number of members, a multiple of 10,000.
        seed: The seed of their answers.
    """
    several = [
        pa.list_(pa.int32()) if takes_several(question_id) else pa.int32() for question_id in questions()
    ]
    names = ("member_code", *map(str, (AGE, GENDER, POSTAL, DMA, *questions())))
    kinds = (pa.string(), pa.int32(), pa.int32(), pa.string(), pa.int32(), *several)
    schema = pa.schema(list(zip(names, kinds, strict=True)))
    blocks = (_block(seed, start, schema) for start in range(0, members, BLOCK))
    return pa.RecordBatchReader.from_batches(schema, blocks)


def profiles(batch: pa.RecordBatch) -> Iterator[dict[int, Any]]:
    """Yield the members of a batch as `QuotaIndex.match` takes them."""
    columns = [(int(name), batch.column(name).to_pylist()) for name in batch.schema.names[1:]]
    for at in range(batch.num_rows):
        yield {question_id: answers[at] for question_id, answers in columns if answers[at]}


def _block(seed: int, start: int, schema: pa.Schema) -> pa.RecordBatch:
    random = np.random.default_rng((seed, start))
    code = random.integers(CODES, size=BLOCK)
    columns = [
        pa.array([f"m{number:09}" for number in range(start, start + BLOCK)]),
        pa.array(random.integers(16, 91, BLOCK), pa.int32()),
        pa.array(np.array([FEMALE, MALE])[random.integers(2, size=BLOCK)], pa.int32()),
        pa.array([f"{each:05}" for each in code.tolist()]),
        pa.array(500 + code % 200, pa.int32()),
    ]
    for question_id, answers in questions().items():
        is_given = random.random(BLOCK) < ANSWERED
        most = MOST if takes_several(question_id) else 1
        ends = np.cumsum(np.where(is_given, random.integers(1, most + 1, BLOCK), 0))
        drawn = random.integers(answers[0], answers[-1] + 1, ends[-1])
        if takes_several(question_id):
            starts = pa.array(np.concatenate([[0], ends]), pa.int32())
            columns.append(pa.ListArray.from_arrays(starts, pa.array(drawn, pa.int32())))
        else:
            values = np.zeros(BLOCK, dtype=np.int32)
            values[is_given] = drawn
            columns.append(pa.array(values, mask=~is_given))
    return pa.record_batch(columns, schema=schema)
