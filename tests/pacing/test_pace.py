"""The rate at which attempts may begin, in exact numbers; test_limit.py holds how it does against gateways."""

from __future__ import annotations

import math

import pytest

from sampling_async._pacing.limit import NEXT_TO_NOTHING, Pace


def measured(rate: float, *, hold: float = 0.0) -> Pace:
    """Return a pace whose rate was measured twice, the last time at a refusal at 0 s that asked to wait."""
    pace = Pace()
    pace.refused(-100.0)
    pace._rate, pace._is_measured, pace._is_sure, pace._refused_at, pace._next_at = rate, True, True, 0.0, 0.0
    pace._highest, pace._in_a_row = rate, 0
    pace._stretches.clear()
    pace.held(hold)
    return pace


def accept(pace: Pace, count: int, *, begin: float, gap: float = 0.0) -> None:
    for number in range(count):
        pace.begin(begin + number * gap)
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
    # Between the rate of the latest eight, which a burst allowed, and of all since the refusal.
    assert pace._rate == pytest.approx(math.sqrt((7 / 0.9) * 7 / 0.9))
    assert (pace.rate, pace.is_measured) == (pytest.approx(0.9 * 7 / 0.9), True)


def test_the_first_measurement_is_between_the_latest_rate_and_that_since_the_refusal():
    pace = Pace()
    pace.refused(0.0)
    pace.held(1.0)
    accept(pace, 8, begin=1.0, gap=0.15)
    accept(pace, 8, begin=2.2, gap=0.01)
    pace.refused(2.3)
    assert pace._rate == pytest.approx(math.sqrt(70 * 16 / 1.8))  # 70, and 8.9 a second with half of the hold


def test_after_a_measurement_all_let_through_since_the_first_attempt_count_and_not_the_hold():
    pace = measured(100, hold=10.0)
    accept(pace, 40, begin=10.0)
    rate = pace.rate
    pace.refused(10.5)
    assert pace._rate == pytest.approx(0.97 * math.sqrt(rate * 40 / 0.5))


def test_attempts_that_are_under_way_count_as_let_through():
    pace = measured(100)
    accept(pace, 30, begin=1.0)
    for _ in range(11):
        pace.begin(1.0)
    rate = pace.rate
    pace.refused(1.5)  # one of the eleven
    assert pace._rate == pytest.approx(0.97 * math.sqrt(rate * 40 / 0.5))


def test_a_measurement_never_raises_the_rate():
    pace = measured(100)
    accept(pace, 40, begin=0.1)
    rate = pace.rate
    pace.refused(0.1)
    assert pace._rate == pytest.approx(0.97 * rate)


def test_attempts_that_were_all_accepted_at_once_give_a_rate_too():
    pace = Pace()
    accept(pace, 8, begin=1.0)
    pace.refused(1.0)
    assert pace.rate == pytest.approx(7e6)


@pytest.mark.parametrize(
    ("accepted", "rate"), [(0, 90), (10, 95), (20, 100), (50, 100 * (1 + 1 / 64)), (140, 200), (260, 900)]
)
def test_a_measured_rate_grows_slowly_at_first_and_ever_faster_later(accepted, rate):
    pace = measured(100)
    accept(pace, accepted, begin=0.0)
    assert pace.rate == pytest.approx(rate)


@pytest.mark.parametrize(("accepted", "rate"), [(1, 90 + 10 / 320), (320, 100), (3380, 112.5)])
def test_after_a_dear_refusal_the_limit_is_tried_later(accepted, rate):
    """A hold of one second at 100 a second costs 100 attempts: 300 more until 100, 6,000 more until 200."""
    pace = measured(100, hold=1.0)
    accept(pace, accepted, begin=1.0)
    assert pace.rate == pytest.approx(rate, rel=1e-3)


def test_a_pause_of_the_client_is_no_cost_of_a_refusal():
    pace = measured(100)
    accept(pace, 20, begin=3600.0)
    assert pace.rate == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize(("accepted", "rate"), [(0, 0.9), (1, 0.93), (10, 1.2), (50, 2.4)])
def test_a_low_rate_grows_by_three_hundredths_with_each_accepted_attempt(accepted, rate):
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
    assert pace._rate == pytest.approx(0.9 * before)
    assert pace.is_measured
    guess.refused(0.0)
    accept(guess, 1, begin=0.1)
    before = guess.rate
    guess.refused(0.2)
    assert guess.rate == pytest.approx(0.3 * before)


def test_a_guess_falls_to_one_a_second():
    pace = Pace()
    for second in range(9):
        pace.refused(float(second))
        accept(pace, 1, begin=second + 0.5)
    pace.refused(9.1)
    assert pace.rate == 1.0


def test_a_measured_rate_may_fall_below_one_a_second():
    pace = measured(1)
    accept(pace, 1, begin=0.5)
    pace.refused(1.0)
    assert pace._rate == pytest.approx(0.93 * 0.9)


def test_further_refusals_of_the_same_attempts_change_nothing():
    pace = Pace()
    pace.refused(0.0)
    for _ in range(20):
        pace.refused(0.1, is_news=False)
    assert (pace.rate, pace.wait(0.0)) == (10.0, pytest.approx(0.1))


def test_a_refusal_never_brings_the_next_attempt_forward():
    pace = Pace()
    pace.refused(0.0)
    pace._rate = 0.25
    accept(pace, 8, begin=0.0)
    due = pace.wait(0.0)
    pace.refused(0.0)  # the rate is a high one now
    assert pace.wait(0.0) >= due > 1


def test_the_lateness_of_a_timer_is_made_up_for_by_two_milliseconds_at_most():
    pace = Pace()
    pace.refused(0.0)
    pace.begin(0.101)
    assert pace.wait(0.101) == pytest.approx(0.099)
    pace.begin(0.205)
    assert pace.wait(0.205) == pytest.approx(0.098)


def test_of_a_short_gap_a_tenth_is_made_up_for_at_most():
    pace = measured(100 / 0.9)
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


def stretches(
    pace: Pace,
    count: int,
    *,
    accepted: int,
    now: float,
    gap: float = 0.1,
    refused: int = 1,
    hold: float = 0.0,
) -> float:
    """Let so many attempts be accepted before each refusal; return the time."""
    for _ in range(count):
        pace.held(now + hold)
        now += hold
        accept(pace, accepted, begin=now, gap=gap)
        now += accepted * gap
        for number in range(refused):
            pace.begin(now)
            pace.refused(now, is_news=number == 0)
    return now


def tried_without_a_rate(rate: float = 20, gap: float = 0.1) -> tuple[Pace, float]:
    """Return a pace that 20 accepted attempts before each refusal brought to a trial, and the time."""
    pace = measured(rate)
    now = stretches(pace, 4, accepted=20, now=0.0, gap=gap)
    assert pace.rate < rate
    now = stretches(pace, 1, accepted=20, now=now, gap=gap)
    return pace, now


def test_if_the_rate_has_fallen_within_five_refusals_it_is_tried_without():
    pace, now = tried_without_a_rate()
    assert (pace.rate, pace.is_measured, pace.wait(now)) == (math.inf, False, 0.0)


def test_it_stays_so_while_the_stretches_are_as_long_as_before():
    pace, now = tried_without_a_rate()
    for accepted in (20, 0, 35, 14, 25, 3, 20, 20):  # one may be short by chance
        now = stretches(pace, 1, accepted=accepted, now=now, gap=0.01)
        assert pace.rate == math.inf
    assert pace.spares_limit  # few are refused


def test_the_rate_is_back_after_two_stretches_that_are_much_shorter():
    pace, now = tried_without_a_rate()
    before = pace._rate
    now = stretches(pace, 1, accepted=2, now=now)
    assert pace.rate == math.inf
    stretches(pace, 1, accepted=2, now=now)
    assert 0.8 * before < pace._rate < before
    assert pace.is_measured


def test_a_trial_that_fails_doubles_the_refusals_until_the_next():
    pace, now = tried_without_a_rate(1e6, gap=1e-9)
    for needed in (10, 20, 20):
        now = stretches(pace, 2, accepted=0, now=now, refused=16)
        assert pace.rate < math.inf
        assert pace._needed == needed
        now = stretches(pace, needed - 2, accepted=1, now=now)
        assert pace.rate < math.inf
        now = stretches(pace, 1, accepted=1, now=now)
        assert pace.rate == math.inf


def test_after_a_long_time_without_a_rate_two_refusals_are_enough():
    pace, now = tried_without_a_rate()
    began = now
    now = stretches(pace, 10, accepted=20, now=now, gap=0.01)
    per_second = 200 / (now - began)
    for _ in range(4):
        now = stretches(pace, 1, accepted=0, now=now, refused=16)
    assert pace.rate < math.inf
    assert pace._highest <= per_second
    now = stretches(pace, 1, accepted=1, now=now)
    assert pace.rate == math.inf


@pytest.mark.parametrize(("accepted", "is_tried"), [(20, True), (40, True), (130, False), (400, False)])
def test_where_refusals_are_dear_it_is_tried_without_a_rate_only_if_they_cost_much(accepted, is_tried):
    """A second costs some 12 to 20 attempts."""
    pace = measured(20, hold=1.0)
    stretches(pace, 5, accepted=accepted, now=0.0, hold=1.0)
    assert pace._rate < 0.9 * 20
    assert (pace.rate == math.inf) is is_tried


def test_a_rate_that_does_not_fall_is_never_given_up():
    """A limit of 20 a second with a burst: each refusal comes when the rate is above it."""
    pace, now = measured(20), 0.0
    for _ in range(40):
        pace._rate = 20.0
        now = stretches(pace, 1, accepted=100, now=now, gap=0.05)
        assert pace.is_measured


def test_what_is_known_of_stretches_is_bounded():
    pace = measured(20)
    stretches(pace, 100, accepted=100, now=0.0, gap=0.05)
    assert len(pace._stretches) <= 20


# --- Storms


def storm(pace: Pace, seconds: float, *, now: float = 0.0) -> tuple[float, list[float]]:
    """Refuse all attempts for so long; return the time, and the pauses between them."""
    end, pauses = now + seconds, []
    while now < end:
        pauses.append(pace.wait(now))
        now += pauses[-1]
        pace.begin(now)
        pace.refused(now)
    return now, pauses


@pytest.mark.parametrize("make", [Pace, lambda: measured(100)])
def test_in_a_storm_one_a_second_is_sent_and_the_rate_stays_known(make):
    pace = make()
    pace.refused(0.0)
    known = pace._rate
    _, pauses = storm(pace, 600.0)
    assert pauses[1:8] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0])
    assert len(pauses) <= 606
    assert (pace._rate, pace.is_measured, pace.spares_limit) == (known, False, True)


@pytest.mark.parametrize("seconds", [0.5, 4.0, 600.0])
def test_after_a_storm_the_rate_is_the_old_one_within_seconds_of_whatever_results(seconds):
    pace = measured(100)
    now, _ = storm(pace, seconds)
    known = pace._rate
    accept(pace, 1, begin=now + 1.0)
    assert pace.rate == 4.0
    pace.begin(now + 1.2)
    assert pace.rate == pytest.approx(8.0)
    pace.begin(now + 3.0)
    assert pace.rate >= 0.9 * known
    assert pace.is_measured


def test_a_storm_that_begins_again_while_the_rate_climbs_is_a_storm_again():
    pace = measured(100)
    now, _ = storm(pace, 4.0)
    for _ in range(3):
        accept(pace, 1, begin=now)
        now, pauses = storm(pace, 4.0, now=now + 0.01)
        assert max(pauses) == pytest.approx(1.0)
    accept(pace, 1, begin=now)
    pace.begin(now + 3.0)
    assert pace.rate > 0.9**9 * 100


def test_turns_that_were_not_waited_for_do_not_add_up():
    pace = Pace()
    storm(pace, 10.0)
    for number in range(100):
        pace.begin(20.0 + number * 0.25)
        pace.refused(20.0 + number * 0.25)
    assert pace.wait(44.75) <= 1.0


def test_an_attempt_may_begin_soon_after_the_latest_if_the_rate_is_not_heeded():
    pace = Pace()
    now, _ = storm(pace, 10.0)
    assert pace.wait(now, 0.25) == 0.25
    pace.begin(now + 0.25)
    assert pace.wait(now + 0.25, 0.25) == 0.25
