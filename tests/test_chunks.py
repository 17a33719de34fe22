"""Cutting an input: sizes for a goal."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampling_async._chunks import spread
from sampling_async._limit import Line


@pytest.mark.parametrize(
    ("quota_ids", "slots", "line", "size"),
    [
        (100, 8, None, 13),  # 8 requests instead of one
        (100, 1, None, 100),
        (3, 8, None, 1),
        (1, 8, None, 1),
        (1000, 8, None, 63),  # two full rounds of smaller chunks, not one of 8 and one of 2
        (800, 8, None, 100),
        (100, 8, Line(10.0, 0.001), 100),  # where IDs hardly count, more requests are only more load
        (100, 8, Line(1.0, 0.01), 17),
    ],
)
def test_chunks_are_spread_over_the_slots(quota_ids, slots, line, size):
    assert spread(quota_ids, slots=slots, line=line, largest=100) == size


@given(st.integers(1, 3000), st.integers(1, 64), st.integers(1, 100), st.floats(0, 10), st.floats(0.0001, 1))
def test_no_size_brings_the_last_answer_much_earlier(quota_ids, slots, largest, a, b):
    line = Line(a, b)

    def seconds(size: int) -> float:
        return ceil(ceil(quota_ids / size) / slots) * line(size)

    size = spread(quota_ids, slots=slots, line=line, largest=largest)
    assert 1 <= size <= largest
    assert seconds(size) <= 1.0501 * min(seconds(other) for other in range(1, largest + 1))
