"""Waits that double with each failure, and never overflow."""

from __future__ import annotations

from math import inf

import pytest

from sampling_async import RetryPolicy, TransportError
from sampling_async._pacing.patience import doubled
from sampling_async.notifications import HandlerPolicy

MANY = 10**6


def test_a_wait_doubles_up_to_its_longest():
    assert [doubled(0.25, times, 20.0) for times in range(9)] == [0.25, 0.5, 1, 2, 4, 8, 16, 20, 20]


@pytest.mark.parametrize(
    ("first", "longest", "wait"), [(0.0, 20.0, 0.0), (0.25, 20.0, 20.0), (1e308, 5.0, 5.0), (1e308, inf, inf)]
)
def test_any_number_of_doublings_has_an_end(first, longest, wait):
    assert doubled(first, MANY, longest) == wait


@pytest.mark.parametrize("failures", [1_024, 1_025, 1_100, 100_000])
def test_a_call_that_failed_often_waits_for_the_longest_backoff(failures):
    assert RetryPolicy().backoff([TransportError()] * failures, lambda: 1.0) == 20.0
    assert RetryPolicy(cap=inf).backoff([TransportError()] * failures, lambda: 0.5) < inf


def test_a_handler_that_failed_often_waits_for_its_longest_wait():
    assert HandlerPolicy(longest_wait=60.0).wait(MANY, 1.0) == 60.0
