"""The adaptive limit: numbers in, limit out."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampling_async._pacing.latency import LatencyLine, Line
from sampling_async._pacing.limit import AdaptiveLimit, Pace

if TYPE_CHECKING:
    from collections.abc import Callable


def answered(limit: AdaptiveLimit, seconds: float, *, ids: int = 100, running: int = 99, **changes) -> None:
    facts = {"patience": 65.0, "callers": math.inf, "generation": limit.generation, "among": running} | changes
    limit.answered_in(seconds, quota_ids=ids, running=running, **facts)


@pytest.mark.parametrize(("maximum", "start"), [(1, 1), (4, 4), (8, 8), (64, 8)])
def test_the_limit_starts_low(maximum, start):
    assert AdaptiveLimit(maximum).limit == start


def test_overload_halves_the_limit_once_per_generation():
    limit = AdaptiveLimit(8)
    limit.overloaded(0)
    limit.overloaded(0)  # this attempt was started before the cut
    assert (limit.limit, limit.generation) == (4, 1)
    limit.overloaded(1)
    assert limit.limit == 2
    for generation in range(2, 9):
        limit.overloaded(generation)
    assert limit.limit == 1


def test_after_an_outage_the_limit_is_one_and_earlier_attempts_do_not_count():
    limit = AdaptiveLimit(8)
    limit.overloaded(0)
    limit.start_again()
    assert (limit.limit, limit.generation) == (1, 2)
    answered(limit, 10.0, generation=1)
    assert limit.limit == 1
    answered(limit, 10.0)
    assert limit.limit == 2


def test_a_late_response_of_a_service_that_takes_milliseconds_lowers_the_limit_too():
    limit = AdaptiveLimit(8)
    answered(limit, 0.01, patience=0.1)
    for _ in range(2):
        answered(limit, 0.08, patience=0.1, among=8)
    assert limit.limit == 2


def test_a_fast_response_raises_the_limit_by_one():
    limit = AdaptiveLimit(64)
    for _ in range(8):
        answered(limit, 10.0)
    assert limit.limit == 16
    for _ in range(100):
        answered(limit, 10.0)
    assert limit.limit == 64


def test_a_slower_response_raises_the_limit_less_or_not_at_all():
    limit = AdaptiveLimit(64)
    answered(limit, 10.0)
    for _ in range(8):
        answered(limit, 19.0)
    assert limit.limit == 9
    for _ in range(16):
        answered(limit, 19.0)
    assert limit.limit == 11
    for _ in range(100):
        answered(limit, 29.0)
    assert limit.limit == 11


def test_a_late_response_lowers_the_limit_to_what_the_service_works_on():
    limit = AdaptiveLimit(8)
    answered(limit, 10.0)
    answered(limit, 80.0, among=8)
    assert limit.limit == 8  # one slow response may be chance
    answered(limit, 80.0, among=8)  # the service seems to work on one at a time
    assert limit.limit == 2


@pytest.mark.parametrize(("scatter", "least"), [(0.3, 7), (0.5, 5), (0.8, 3)])
def test_varying_response_times_are_no_overload(scatter, least):
    random, limit, seen = Random(1), AdaptiveLimit(8), []
    for _ in range(2000):
        answered(limit, 5.0 * random.lognormvariate(0, scatter), among=limit.limit)
        seen.append(limit.limit)
    assert sum(seen) / len(seen) > least


def test_a_response_time_far_from_the_timeout_is_no_overload():
    limit = AdaptiveLimit(16)
    answered(limit, 0.001)
    answered(limit, 3.0)
    assert limit.limit == 10


def test_time_that_grows_with_the_ids_is_no_overload():
    limit = AdaptiveLimit(8)
    for _ in range(3):
        answered(limit, 6.0, ids=10)
        answered(limit, 60.0, ids=100)
    assert limit.limit == 8
    answered(limit, 60.0, ids=10, among=8)
    answered(limit, 60.0, ids=10, among=8)
    assert limit.limit == 1


def test_a_limit_that_is_not_used_does_not_grow():
    limit = AdaptiveLimit(64)
    for _ in range(50):
        answered(limit, 10.0, running=3)
    limit.answered(0, running=3)
    assert limit.limit == 8


@pytest.mark.parametrize(("running", "limit"), [(4, 9), (3, 8)])
def test_half_of_the_limit_must_be_used_for_it_to_grow(running, limit):
    adaptive = AdaptiveLimit(64)
    answered(adaptive, 1.0, running=running)
    assert adaptive.limit == limit


def test_other_calls_raise_the_limit_slowly():
    limit = AdaptiveLimit(64)
    for _ in range(9):
        limit.answered(0, running=8)
    assert limit.limit == 9


def test_attempts_started_before_a_cut_do_not_raise_the_limit():
    limit = AdaptiveLimit(8)
    limit.overloaded(0)
    for _ in range(50):
        answered(limit, 10.0, generation=0)
    assert limit.limit == 4


@given(
    st.lists(
        st.tuples(st.sampled_from(["overloaded", "answered", "slow"]), st.integers(0, 50), st.floats(0, 1000))
    ),
    st.integers(1, 100),
)
def test_it_stays_between_one_and_its_maximum(events, maximum):
    limit = AdaptiveLimit(maximum)
    for kind, running, seconds in events:
        if kind == "overloaded":
            limit.overloaded(limit.generation)
        elif kind == "answered":
            limit.answered(limit.generation, running)
        else:
            answered(limit, seconds, ids=running + 1, running=running)
        assert 1 <= limit.limit <= maximum


# --- The line of latencies


def learned(*points: tuple[int, float], alone: bool = False) -> Line:
    latency = LatencyLine()
    for ids, seconds in points:
        latency.add(ids, seconds, alone=alone)
    assert latency.line is not None
    return latency.line


def test_there_is_no_line_before_the_first_response():
    assert LatencyLine().line is None


def test_the_line_goes_through_the_shortest_times():
    line = learned((10, 1.5), (10, 9.0), (100, 10.5), (100, 70.0), (50, 5.5))
    assert (line.a, line.b, line(20)) == pytest.approx((0.5, 0.1, 2.5))


def test_a_single_short_time_is_averaged_in():
    assert learned((100, 10.0), (100, 1.0)).b == pytest.approx(0.091)
    assert learned((100, 10.0), *[(100, 1.0)] * 99).b == pytest.approx(0.01, rel=0.01)


def test_with_one_number_of_ids_the_time_is_taken_as_proportional():
    assert learned((100, 10.0)) == Line(0.0, 0.1)


def test_neither_coefficient_of_the_line_is_negative():
    assert learned((10, 0.5), (100, 20.0)).a == 0
    line = learned((10, 8.0), (100, 4.0))
    assert (line.a, line.b) == (6.0, 0.0)


def test_a_longer_time_is_measured_only_when_nothing_else_ran():
    assert learned((100, 10.0), (100, 50.0)).b == 0.1
    assert learned((100, 10.0), *[(100, 50.0)] * 99, alone=True).b == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("running", "among", "is_learned"), [(1, 1, True), (2, 1, False), (2, 2, False), (1, 2, False)]
)
def test_a_longer_time_is_measured_if_nothing_else_ran_from_the_start_to_the_end(running, among, is_learned):
    limit = AdaptiveLimit(8)
    for seconds in (1.0, 50.0):
        answered(limit, seconds, running=running, among=among)
    assert limit.latency.line is not None
    assert (limit.latency.line(100) > 1.0) is is_learned


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0.001, 500)), min_size=1))
def test_the_line_is_never_negative(points):
    line = learned(*points)
    assert line.a >= -1e-9
    assert line.b >= 0


# --- The pace


def allowed(pace: Pace, rate: float, burst: int, attempts: int, *, seconds: float = 0.002) -> tuple[int, float]:
    """Send attempts through a rate-limiting gateway; return how many it refused, and the total time."""
    now, level, last, refused, left = 0.0, 0.0, 0.0, 0, attempts
    while left:
        now += pace.wait(now)
        pace.begin(now)
        level, last = max(0.0, level - rate * (now - last)), now
        now += seconds
        if level > burst:
            refused += 1
            pace.refused(now)
        else:
            level += 1
            left -= 1
            pace.answered(now)
    return refused, now


def answered_a_second(is_refused: Callable[[int], bool]) -> float:
    """Make 3,000 attempts, refused independently of the pace; return how many per second succeed."""
    pace, now, answered = Pace(), 0.0, 0
    for number in range(3000):
        now += pace.wait(now)
        pace.begin(now)
        now += 0.01
        if is_refused(number):
            pace.refused(now)
        else:
            answered += 1
            pace.answered(now)
    return answered / now


def test_there_is_no_pace_until_a_refusal():
    pace = Pace()
    for _ in range(100):
        pace.begin(1.0)
        pace.answered(1.0)
    assert (pace.rate, pace.wait(1.0)) == (math.inf, 0.0)


@pytest.mark.parametrize(("rate", "burst"), [(2, 5), (20, 5), (20, 20), (200, 5), (20, 1)])
def test_the_pace_finds_the_allowed_rate_and_keeps_to_it(rate, burst):
    refused, seconds = allowed(Pace(), rate, burst, 600)
    assert seconds <= 600 / rate / 0.9
    assert refused <= (0.06 if rate > 2 else 0.1) * 600


def test_the_pace_grows_when_the_rate_limit_is_gone():
    pace = Pace()
    allowed(pace, 20, 5, 600)
    now = 1000.0
    for _ in range(400):
        now += pace.wait(now) + 0.001
        pace.begin(now)
        pace.answered(now)
    assert pace.rate > 100


@pytest.mark.parametrize(("share", "least"), [(0.01, 60), (0.02, 50), (0.05, 30), (0.1, 10), (0.3, 5)])
@pytest.mark.parametrize("seed", range(3))
def test_refusals_by_chance_do_not_bring_the_pace_down_to_zero(share, least, seed):
    """One of several nodes behind a load balancer refuses everything; 100 attempts a second could succeed."""
    random = Random(seed)
    assert answered_a_second(lambda _: random.random() < share) > least


def test_a_pace_without_a_rate_does_not_count_as_measured():
    """Otherwise the limit would not be halved, and the next guess would count as a measurement."""
    pace, random, now, was_measured = Pace(), Random(1), 0.0, False
    while not (was_measured and pace.rate == math.inf):
        now += pace.wait(now)
        pace.begin(now)
        now += 0.01
        was_measured |= pace.is_measured
        if random.random() < 0.1:
            pace.refused(now)
        else:
            pace.answered(now)
    assert not pace.is_measured


def test_a_rate_limit_after_random_refusals_is_found_soon():
    """20 a second are allowed; the earlier refusals did not depend on the rate."""
    pace, random, now, level, last, refused = Pace(), Random(1), 0.0, 0.0, 0.0, 0
    for number in range(2000):
        now += pace.wait(now)
        pace.begin(now)
        level, last = max(0.0, level - 20 * (now - last)), now
        now += 0.002
        if random.random() < 0.1 if number < 1000 else level > 5:
            refused += number >= 1000
            pace.refused(now)
        else:
            level += 1
            pace.answered(now)
    assert refused < 100


def test_the_pace_is_suspended_if_refusals_do_not_depend_on_the_rate():
    """One of three nodes behind a load balancer refuses everything, at any rate."""
    assert answered_a_second(lambda number: number % 3 == 0) > 10


def test_the_pace_never_stops_completely():
    pace, now = Pace(), 0.0
    for _ in range(100):
        now += pace.wait(now)
        pace.begin(now)
        pace.refused(now)
    assert pace.wait(now) <= 5.0


def test_idle_time_is_not_saved_up_for_a_burst():
    pace = Pace()
    pace.refused(0.0)
    pace.begin(100.0)
    assert pace.wait(100.0) == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(
    ("ratios", "limit"),
    [
        ((3.0, 3.0), 8),  # not slower than three times
        ((2.0, 4.0), 8 + 1 / 8),  # the one before was not slower than twice
        ((2.0,), 8 + 1 / 8),
        ((2.001, 4.0), 4),
    ],
)
def test_ratios_on_the_line_are_on_the_side_of_the_service(ratios, limit):
    adaptive = AdaptiveLimit(99)
    answered(adaptive, 1.0, patience=1.0, running=1)
    assert adaptive._limit == 8
    for ratio in ratios:
        answered(adaptive, ratio, patience=1.0, among=8, running=8)
    assert adaptive._limit == pytest.approx(limit, rel=1e-3)


def test_a_response_within_a_twentieth_of_the_time_limit_is_never_slow():
    adaptive = AdaptiveLimit(99)
    answered(adaptive, 0.001, patience=20.0)
    for _ in range(2):
        answered(adaptive, 1.0, patience=20.0)
    assert adaptive.limit == 8 + 3


@pytest.mark.parametrize(("callers", "limit"), [(0.3, 3), (2.0, 11), (0.5, 3), (30.0, 11)])
def test_a_response_is_slow_after_a_quarter_of_the_time_that_callers_have(callers, limit):
    """Half a second is enough, if they have more; what is long for the service is not long for a time limit."""
    adaptive = AdaptiveLimit(99)
    answered(adaptive, 0.1, ids=1, patience=60.0, callers=callers)
    for _ in range(2):
        answered(adaptive, 0.5, ids=1, patience=60.0, callers=callers, running=8)
    assert adaptive.limit == limit


def test_it_does_not_grow_by_responses_that_take_half_of_the_time_that_callers_have():
    adaptive = AdaptiveLimit(99)
    answered(adaptive, 1.0, ids=1, patience=1.0, running=1)
    for callers, limit in ((3.1, 8.125), (2.9, 8.125)):
        answered(adaptive, 1.5, ids=1, patience=1.0, callers=callers, running=8)
        assert adaptive._limit == limit


def test_above_what_was_too_much_it_grows_by_one_with_each_full_set_of_responses():
    adaptive = AdaptiveLimit(99)
    adaptive.overloaded(0, is_careful=True)
    assert adaptive._limit == 4
    for _ in range(4):
        answered(adaptive, 1.0)
    assert adaptive._limit == pytest.approx(5.0, abs=0.1)
    adaptive.start_again()
    for _ in range(3):
        answered(adaptive, 1.0)
    assert adaptive._limit == 4  # up to there, each response opens a place


def test_below_one_the_limit_is_a_share_of_the_time():
    """Eight shares do not go below one attempt together; one client does not go below one."""
    adaptive, alone = AdaptiveLimit(8, shares=8), AdaptiveLimit(8)
    rests = []
    for generation in range(6):
        alone.overloaded(generation, is_careful=True)
        adaptive.overloaded(generation, is_careful=True)
        rests.append(adaptive.rest(0.1))
    assert rests == pytest.approx([0.1, 0.3, 0.7, 0.7, 0.7, 0.7])
    assert (alone.limit, alone.rest(0.1)) == (1, 0.0)
    assert adaptive.rest(0.5) == 1.0  # somebody tries once a second
    assert adaptive.limit == 1
    adaptive.overloaded(adaptive.generation)  # a refusal raises nothing
    assert adaptive.rest(0.1) == pytest.approx(0.7)
    rests = []
    for _ in range(4):
        answered(adaptive, 0.1, callers=1.0, running=1)
        rests.append(adaptive.rest(0.1))
    assert rests == pytest.approx([0.3, 0.1, 0.0, 0.0])
    assert adaptive.limit == 2


def test_below_one_it_grows_with_any_response():
    """Beside another kind of calls, no time is measured anew: the service would look slow for ever."""
    adaptive = AdaptiveLimit(8, shares=8)
    answered(adaptive, 0.1, callers=1.0)
    for _ in range(3):
        adaptive.overloaded(adaptive.generation, is_careful=True)
    for _ in range(12):
        answered(adaptive, 0.9, callers=1.0, running=1, among=3)
    assert (adaptive.limit, adaptive.rest(1.0)) == (1, 0.0)


def test_a_refusal_that_lowers_nothing_is_no_sign_of_late_responses():
    adaptive = AdaptiveLimit(99)
    adaptive.start_again()
    for _ in range(20):
        adaptive.overloaded(adaptive.generation, 1.0)
        answered(adaptive, 2.0, callers=3.0, running=9)
    assert adaptive.limit > 1


def test_what_is_always_long_for_callers_grows_once_they_have_borne_it_for_a_while():
    adaptive = AdaptiveLimit(99)
    adaptive.start_again()
    for number in range(20):
        assert adaptive.limit == (1 if number <= 16 else 2 if number == 17 else adaptive.limit)
        answered(adaptive, 2.0, callers=3.0, running=9)
    assert adaptive.limit == 3
    adaptive.overloaded(adaptive.generation, is_careful=True)
    for _ in range(16):
        answered(adaptive, 2.0, callers=3.0, running=9)
    assert adaptive.limit == 1


@pytest.mark.parametrize(("callers", "limit"), [(math.inf, 11), (4.0, 11), (3.9, 8), (1.9, 8)])
def test_it_grows_fast_by_responses_within_a_quarter_of_the_time_that_callers_have(callers, limit):
    adaptive = AdaptiveLimit(99)
    for _ in range(3):
        answered(adaptive, 1.0, ids=1, patience=1.0, callers=callers)
    assert adaptive.limit == limit


@pytest.mark.parametrize(("shares", "limit"), [(1, 8), (2, 4), (3, 2), (8, 1), (100, 1)])
def test_shares_begin_with_their_part(shares, limit):
    assert AdaptiveLimit(64, shares).limit == limit


def test_a_rest_keeps_attempts_from_beginning_and_leaves_no_rate():
    pace = Pace()
    pace.begin(1.0)
    pace.rest(3.0)
    assert (pace.wait(1.5), pace.wait(2.9, 0.25), pace.wait(3.0)) == (1.5, pytest.approx(0.1), 0.0)
    pace.begin(3.0)
    assert (pace.delays, pace.rate, pace.wait(3.0)) == (False, math.inf, 0.0)


def test_a_rest_is_as_long_as_the_longest_and_ends_with_an_outage():
    pace = Pace()
    pace.rest(3.0)
    pace.rest(2.0)
    assert pace.wait(1.0) == 2.0
    pace.end_rest()
    assert pace.wait(1.0) == 0.0


def test_a_share_counts_what_the_others_are_probably_let_through():
    rates = []
    for shares in (1, 4):
        pace = Pace(shares)
        allowed(pace, 20, 5, 200)
        now, before = 1000.0, pace.rate
        for _ in range(200):
            now += pace.wait(now)
            pace.begin(now)
            pace.answered(now)
        rates.append(pace.rate / before)
    assert rates[1] > 10 * rates[0]


def test_a_longer_time_is_measured_by_a_quarter_of_the_difference():
    line = LatencyLine()
    line.add(100, 1.0, alone=True)
    line.add(100, 11.0, alone=True)  # the moving average is 2 s now
    assert line.line == Line(0.0, pytest.approx(1.25 / 100))
