"""The spans of time in which somebody waited."""

from __future__ import annotations

from sampling_async._pacing.turns import BusyIntervals


def test_waits_that_overlap_are_one_span():
    waits = BusyIntervals()
    waits.begin("a", 1.0)
    waits.begin("b", 2.0)
    waits.end("a", 3.0)
    waits.end("a", 3.5)  # again
    waits.end("b", 4.0)
    waits.begin("c", 6.0)
    waits.end("c", 7.0)
    assert waits.within(0.0, 9.0) == 4.0
    assert waits.within(1.5, 6.5) == 3.0
    assert waits.within(4.0, 6.0) == 0.0
    assert waits.within(5.0, 5.5) == 0.0


def test_a_span_that_lasts_counts_up_to_the_moment():
    waits = BusyIntervals()
    waits.begin("a", 1.0)
    assert (waits.within(0.0, 3.0), waits.within(2.0, 3.0), waits.within(0.0, 0.5)) == (2.0, 1.0, 0.0)


def test_only_the_latest_waits_are_known():
    waits = BusyIntervals()
    for at in range(300):
        waits.begin("a", at)
        waits.end("a", at + 0.5)
    assert waits.within(0.0, 300.0) == 128.0
    assert waits.within(0.0, 44.0) == 0.0
    assert waits.within(43.0, 45.0) == 0.5
