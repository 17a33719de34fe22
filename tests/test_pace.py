"""The rate at which attempts may begin, in exact numbers; test_limit.py holds how it does against gateways."""

from __future__ import annotations

import math

import pytest

from sampling_async._pacing.pace import NEXT_TO_NOTHING, Pace, _between


def measured(rate: float) -> Pace:
    """Return a pace whose rate was measured at a refusal at 0 s."""
    pace = Pace()
    pace.refused(-100.0)
    pace._rate, pace.is_measured, pace._refused_at, pace._next_at = rate, True, 0.0, 0.0
    return pace


def accept(pace: Pace, count: int, *, begin: float, gap: float = 0.0) -> None:
    for number in range(count):
        pace.answered(begin + number * gap)


def test_the_first_refusal_sets_ten_a_second_if_too_few_were_accepted_before():
    pace = Pace()
    accept(pace, 7, begin=0.0, gap=0.1)
    pace.refused(5.0)
    assert (pace.rate, pace.is_measured) == (10.0, False)
    assert pace.wait(5.0) == pytest.approx(0.1)


def test_eight_accepted_attempts_have_seven_gaps_and_make_a_guess_no_measurement():
    pace = Pace()
    accept(pace, 20, begin=-100.0)  # only the latest eight count
    accept(pace, 8, begin=0.0, gap=0.1)
    pace.refused(0.8)
    assert (pace.rate, pace.is_measured) == (pytest.approx(7 / 0.8), False)


def test_after_a_guess_eight_accepted_attempts_make_a_measurement():
    pace = Pace()
    pace.refused(5.0)
    accept(pace, 8, begin=5.1, gap=0.1)
    assert pace.rate == pytest.approx(20)
    pace.refused(6.0)
    assert (pace.rate, pace.is_measured) == (pytest.approx(0.85 * 7 / 0.9), True)


def test_after_a_measurement_all_accepted_since_the_refusal_count():
    pace = measured(100)
    accept(pace, 40, begin=0.1)
    pace.refused(0.5)
    assert pace._rate == pytest.approx(40 / 0.5)


def test_a_measurement_never_raises_the_rate():
    pace = measured(100)
    accept(pace, 40, begin=0.1)
    rate = pace.rate
    pace.refused(0.1)
    assert pace._rate == rate


def test_attempts_that_were_all_accepted_at_once_give_a_rate_too():
    pace = Pace()
    accept(pace, 8, begin=1.0)
    pace.refused(1.0)
    assert pace.rate == pytest.approx(7e6)


@pytest.mark.parametrize(
    ("accepted", "rate"), [(0, 85), (10, 92.5), (20, 100), (70, 100 * (1 + 1 / 9)), (170, 200), (320, 500)]
)
def test_a_measured_rate_grows_slowly_at_first_and_ever_faster_later(accepted, rate):
    pace = measured(100)
    accept(pace, accepted, begin=0.0)
    assert pace.rate == pytest.approx(rate)


@pytest.mark.parametrize(("accepted", "rate"), [(0, 0.85), (1, 0.95), (10, 1.85), (50, 5.85)])
def test_a_low_rate_grows_by_a_tenth_with_each_accepted_attempt(accepted, rate):
    pace = measured(1)
    accept(pace, accepted, begin=0.0)
    assert pace.rate == pytest.approx(rate)


@pytest.mark.parametrize(("accepted", "rate"), [(0, 10), (4, 15), (8, 20), (80, 110)])
def test_a_guessed_rate_is_doubled_by_every_eight_accepted_attempts(accepted, rate):
    pace = Pace()
    pace.refused(0.0)
    accept(pace, accepted, begin=0.0)
    assert pace.rate == pytest.approx(rate)


def test_a_measured_rate_falls_a_little_and_a_guessed_one_by_much():
    pace, guess = measured(100), Pace()
    accept(pace, 7, begin=0.1)
    before = pace.rate
    pace.refused(1.0)
    assert pace._rate == pytest.approx(0.85 * before)
    assert pace.is_measured
    guess.refused(0.0)
    guess.refused(0.1)
    assert guess.rate == pytest.approx(3.0)


def test_a_guess_falls_to_one_in_five_seconds_but_to_one_a_second_if_any_attempt_was_accepted():
    pace = Pace()
    for second in range(9):
        pace.refused(float(second))
    assert pace.rate == 0.2
    accept(pace, 1, begin=9.0)
    pace.refused(9.1)
    assert pace.rate == 1.0


def test_a_measured_rate_may_fall_below_one_a_second():
    pace = measured(1)
    accept(pace, 1, begin=0.5)
    pace.refused(1.0)
    assert pace._rate == pytest.approx(0.95 * 0.85)


def test_further_refusals_of_the_same_attempts_change_nothing():
    pace = Pace()
    pace.refused(0.0)
    for _ in range(20):
        pace.refused(0.1, is_news=False)
    assert (pace.rate, pace.wait(0.0)) == (10.0, pytest.approx(0.1))


def test_a_refusal_never_brings_the_next_attempt_forward():
    pace = Pace()
    pace.refused(0.0)
    for _ in range(30):
        pace.begin(0.0)
    due = pace.wait(0.0)
    accept(pace, 8, begin=0.0, gap=0.01)
    pace.refused(0.1)
    assert pace.wait(0.0) >= due > 3


def test_the_lateness_of_a_timer_is_made_up_for_by_two_milliseconds_at_most():
    pace = Pace()
    pace.refused(0.0)
    pace.begin(0.101)
    assert pace.wait(0.101) == pytest.approx(0.099)
    pace.begin(0.205)
    assert pace.wait(0.205) == pytest.approx(0.098)


def test_of_a_short_gap_a_tenth_is_made_up_for_at_most():
    pace = measured(100 / 0.85)
    assert pace.rate == pytest.approx(100)
    pace.begin(0.0)
    assert pace.wait(0.0) == pytest.approx(0.01)
    pace.begin(0.012)
    assert pace.wait(0.012) == pytest.approx(0.009)


def test_a_wait_of_next_to_nothing_is_none():
    pace = Pace()
    pace._next_at = 1.0
    assert pace.wait(1.0 - NEXT_TO_NOTHING / 2) == 0.0
    assert pace.wait(1.0 - 3 * NEXT_TO_NOTHING) == pytest.approx(3 * NEXT_TO_NOTHING, rel=0.01)
    assert pace.wait(2.0) == 0.0


# --- Refusals that have another cause than the rate


def slower(pace: Pace, refusals: int, *, attempts: int, now: float = 0.0) -> float:
    """Let one of so many attempts be refused, again and again; return the time."""
    for _ in range(refusals):
        for _ in range(attempts):
            pace.begin(now)
            now += 1.0
        accept(pace, attempts - 1, begin=now)
        pace.refused(now)
    return now


def test_after_eleven_refusals_that_going_slower_did_not_change_there_is_no_rate_for_200_attempts():
    pace = Pace()
    now = slower(pace, 10, attempts=3)
    assert pace.rate < math.inf
    now = slower(pace, 1, attempts=3, now=now)
    assert (pace.rate, pace.is_measured) == (math.inf, False)
    for number in range(199):
        pace.begin(now)
        if number % 3 == 0:  # as many as before: these do not count
            pace.refused(now)
    assert pace.rate == math.inf
    pace.begin(now)
    pace.refused(now)
    assert pace.rate == 10.0


def test_the_time_without_a_rate_doubles_with_each_and_ends_at_20_000_attempts():
    pace, now, periods = Pace(), 0.0, []
    for _ in range(10):
        now = slower(pace, 11, attempts=3, now=now)
        periods.append(pace._free_until - pace._begun_count)
        pace._begun_count = pace._free_until
    assert periods == [200, 400, 800, 1600, 3200, 6400, 12800, 20000, 20000, 20000]


@pytest.mark.parametrize(("attempts", "refusals", "is_free"), [(15, 12, True), (16, 8, True), (16, 9, False)])
def test_the_rate_counts_again_if_more_than_half_of_sixteen_attempts_without_it_are_refused(
    attempts, refusals, is_free
):
    pace = Pace()
    now = slower(pace, 11, attempts=3)
    for _ in range(attempts):
        pace.begin(now)
    for _ in range(refusals):
        pace.refused(now)
    assert (pace.rate == math.inf) is is_free
    if not is_free:
        assert pace._free_next == 200


def test_after_a_time_without_a_rate_seven_accepted_attempts_are_too_few_for_a_measurement():
    pace = Pace()
    now = slower(pace, 11, attempts=3)
    for _ in range(16):
        pace.begin(now)
    accept(pace, 7, begin=now)
    for _ in range(9):
        pace.refused(now + 1.0)
    assert pace.rate == 10.0


def test_only_ten_stretches_between_refusals_are_compared():
    pace = Pace()
    pace._marks.extend((2 * at, at, 10.0) for at in range(12))
    assert len(pace._marks) == 11


def test_if_most_attempts_are_refused_the_rate_stays():
    pace = Pace()
    now = 0.0
    for _ in range(40):
        pace.begin(now)
        pace.refused(now)
        now += 1.0
    assert pace.rate == 0.2


def test_a_stretch_is_told_by_the_share_of_refusals_and_the_mean_rate_after_its_first_mark():
    stretch = _between([(100, 7, 999.0), (110, 8, 20.0), (120, 9, 40.0)])
    assert (stretch.refused, stretch.rate) == (0.1, 30.0)


@pytest.mark.parametrize(
    ("rate", "refused", "begun", "helps_not"),
    [
        (8.0, 7, 20, True),  # four fifths of the rate, and seven tenths of the share of refusals
        (8.1, 7, 20, False),
        (8.0, 6, 20, False),
        (8.0, 10, 20, True),  # half of the attempts are refused
        (8.0, 11, 20, False),
    ],
)
def test_going_slower_does_not_help_if_the_rate_fell_by_a_fifth_and_refusals_by_three_tenths_at_most(
    rate, refused, begun, helps_not
):
    pace = Pace()
    # Half of the attempts are refused at 10 a second, and then at another rate.
    pace._marks.extend((2 * at, at, 10.0) for at in range(6))
    pace._marks.extend((10 + begun * at / 5, 5 + refused * at / 5, rate) for at in range(1, 6))
    assert pace._slowing_does_not_help() is helps_not
