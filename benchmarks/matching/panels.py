"""A panel of any size: the members of `inventories.members`, as Arrow record batches made by NumPy.

They are not the same members, but each answer is as frequent. One row is one member. One column has the answers
to one question, and its name is the question ID. Null means: no answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from matching.inventories import AGE, ANSWERED, AREAS, DMA, FEMALE, GENDER, MALE, POSTAL, questions

if TYPE_CHECKING:
    from collections.abc import Iterator

CODE: Final = "member_code"
BLOCK: Final = 65_536
_COMMON: Final = questions()
_SCHEMA: Final = pa.schema(
    [
        (CODE, pa.string()),
        (str(AGE), pa.int32()),
        (str(GENDER), pa.int32()),
        (str(POSTAL), pa.string()),
        (str(DMA), pa.int32()),
        *((str(question_id), pa.int32()) for question_id in _COMMON),
    ]
)


def panel(members: int, *, seed: int = 2, rows: int = BLOCK) -> pa.RecordBatchReader:
    """Return members as a stream. Each batch is made when it is needed, and is not kept.

    With the same seed, a member is the same in every panel, whatever the size of the panel and of its batches.

    Args:
        members: The number of members.
        seed: The seed of their answers.
        rows: The largest size of a batch. Members are made in blocks of 65,536, and a batch is in one block.
    """
    return pa.RecordBatchReader.from_batches(_SCHEMA, _batches(members, seed, rows))


def profiles(batch: pa.RecordBatch) -> Iterator[dict[int, Any]]:
    """Yield the members of a batch as `QuotaIndex.match` takes them."""
    columns = [(int(name), batch.column(name).to_pylist()) for name in batch.schema.names if name != CODE]
    for at in range(batch.num_rows):
        yield {question_id: answers[at] for question_id, answers in columns if answers[at] is not None}


def _batches(members: int, seed: int, rows: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, members, BLOCK):
        block = _block(seed, start)
        if members - start < BLOCK:  # a small panel must not keep the memory of the rows that are cut off
            block = block.take(np.arange(members - start))
        for first in range(0, block.num_rows, rows):
            yield block.slice(first, rows)


def _block(seed: int, start: int) -> pa.RecordBatch:
    random = np.random.default_rng((seed, start))
    area, last = random.integers(AREAS, size=BLOCK), random.integers(100, size=BLOCK)
    columns = [
        _texts(b"m", np.arange(start, start + BLOCK), 9),
        pa.array(random.integers(16, 91, BLOCK, dtype=np.int32)),
        pa.array(np.array([FEMALE, MALE], dtype=np.int32)[random.integers(2, size=BLOCK)]),
        _texts(b"", (100 + area) * 100 + last, 5),
        pa.array((500 + area // 2).astype(np.int32)),
        *(_answers(random, answers[0], len(answers)) for answers in _COMMON.values()),
    ]
    return pa.record_batch(columns, schema=_SCHEMA)


def _answers(random: np.random.Generator, first: int, number: int) -> pa.Array:
    """Return answers to a common question. One draw of 16 bits decides whether there is one, and which.

    The values under nulls have no meaning.
    """
    drawn = random.integers(2**64, size=BLOCK // 4, dtype=np.uint64).view(np.uint16)
    limit = round(ANSWERED * 2**16)
    answers = drawn.astype(np.uint32)
    answers *= number
    answers //= limit
    answers += first
    given = np.packbits(drawn < limit, bitorder="little")
    return pa.Array.from_buffers(pa.int32(), BLOCK, [pa.py_buffer(given), pa.py_buffer(answers)])


def _texts(prefix: bytes, numbers: np.ndarray, digits: int) -> pa.Array:
    """Return numbers as texts with a prefix and a fixed number of digits."""
    size = len(prefix) + digits
    letters = np.empty((BLOCK, size), dtype=np.uint8)
    letters[:, : len(prefix)] = np.frombuffer(prefix, dtype=np.uint8)
    left = numbers
    for place in range(size - 1, len(prefix) - 1, -1):
        left, letters[:, place] = np.divmod(left, 10)
    letters[:, len(prefix) :] += ord("0")
    ends = np.arange(0, BLOCK * size + 1, size, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), BLOCK, [None, pa.py_buffer(ends), pa.py_buffer(letters)])
