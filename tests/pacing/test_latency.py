"""Percentiles in little memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampling_async._pacing.latency import LatencyHistogram


def of(values: list[float]) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for value in values:
        histogram.add(value, 0.0)
    return histogram


def test_without_attempts_there_are_no_percentiles():
    assert LatencyHistogram().percentiles(0.0) is None


@given(st.lists(st.floats(1e-4, 900.0), min_size=1, max_size=200))
def test_a_percentile_is_within_five_percent(values):
    found = of(values).percentiles(0.0)
    assert found is not None
    assert found.count == len(values)
    assert found.longest == max(values)
    ordered = sorted(values)
    for share, told in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        rank = next(at for at in range(1, len(values) + 1) if at >= share * len(values))
        assert told == pytest.approx(ordered[rank - 1], rel=0.05)


@pytest.mark.parametrize("extreme", [0.0, 1e-9, 1e6])
def test_extremes_are_in_the_outer_buckets(extreme):
    found = of([extreme]).percentiles(0.0)
    assert found is not None
    assert found.longest == extreme
    assert found.p99 <= found.longest


def test_only_the_last_minutes_count():
    histogram = LatencyHistogram()
    histogram.add(1.0, 0.0)
    histogram.add(2.0, 299.0)
    histogram.add(4.0, 301.0)  # a new generation
    told = histogram.percentiles(302.0)
    assert told is not None
    assert (told.count, told.longest) == (3, 4.0)
    told = histogram.percentiles(601.5)  # the first one is dropped
    assert told is not None
    assert (told.count, told.longest) == (1, 4.0)
    assert histogram.percentiles(5000.0) is None


def test_asking_changes_nothing():
    """Another thread than that of the event loop may ask."""
    histogram = LatencyHistogram()
    histogram.add(1.0, 0.0)
    assert histogram.percentiles(5000.0) is None
    told = histogram.percentiles(301.0)
    assert told is not None
    assert told.count == 1
    histogram.add(2.0, 302.0)
    told = histogram.percentiles(302.0)
    assert told is not None
    assert (told.count, told.longest) == (2, 2.0)


def test_after_five_minutes_a_generation_is_old_and_after_ten_it_is_gone():
    histogram = LatencyHistogram()
    histogram.add(9.0, 100.0)
    histogram.add(4.0, 400.0)  # a new generation
    recent, old, last = histogram.percentiles(699.0), histogram.percentiles(700.0), histogram.percentiles(999.0)
    assert recent is not None
    assert old is not None
    assert (recent.count, recent.longest) == (2, 9.0)
    assert (old.count, old.longest) == (1, 4.0)
    assert old == last
    assert histogram.percentiles(1000.0) is None


def test_an_attempt_is_gone_after_ten_minutes_however_the_others_are_spread():
    histogram = LatencyHistogram()
    histogram.add(30.0, 0.0)
    for now in (599.0, 601.0, 650.0):
        histogram.add(1.0, now)
    told = histogram.percentiles(660.0)
    assert told is not None
    assert (told.count, told.longest) == (3, 1.0)


def counted(*adds: tuple[float, float], at: float) -> tuple[int, float] | None:
    """Add durations at their times, and return the count and the longest."""
    histogram = LatencyHistogram()
    for seconds, now in adds:
        histogram.add(seconds, now)
    told = histogram.percentiles(at)
    return None if told is None else (told.count, told.longest)


def test_a_generation_is_counted_from_its_first_attempt_whatever_the_clock_says():
    """The clock of a client has any start."""
    assert counted((9.0, 1000.0), (4.0, 1100.0), at=1599.0) == (2, 9.0)
    assert counted((9.0, 1000.0), (4.0, 1100.0), at=1600.0) is None
    assert counted((9.0, 1000.0), (4.0, 1350.0), at=1351.0) == (2, 9.0)


@pytest.mark.parametrize("later", [600.0, 700.0, 5000.0])
def test_after_a_pause_of_ten_minutes_nothing_older_counts(later):
    assert counted((9.0, 0.0), (0.5, later), at=later) == (1, 0.5)
    assert counted((9.0, 0.0), (0.5, later), at=later + 450.0) == (1, 0.5)


def test_extremes_count_as_the_shortest_and_the_longest_that_are_distinguished():
    short, long = of([1e-6, 1e-6, 1.0]).percentiles(0.0), of([2000.0, 5000.0]).percentiles(0.0)
    assert short is not None
    assert long is not None
    assert short.p50 < 1e-4
    assert 900 < long.p50 < 1000
