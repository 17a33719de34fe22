"""The idle time: how long unused connections are reused, learned from earlier ones."""

from __future__ import annotations

import pytest

from sampling_async._wire.engine import IdleTime


def idle(round_trip: float = 0.0, seconds: float = 4.0) -> IdleTime:
    made = IdleTime(seconds)
    made.opened_within(round_trip)
    return made


def test_the_idle_time_is_the_configured_one_at_first():
    assert IdleTime(4.0).limit == 4.0


@pytest.mark.parametrize(
    ("closed_after", "round_trip", "limit"),
    [
        (0.5, 0.0, 0.25),
        (0.5, 0.1, 0.25),
        (
            0.25,
            0.1,
            0.05,
        ),  # a request sent after 0.1 s would arrive too late at a server that closes after 0.25 s
        (0.2, 0.1, 0.0),
        (0.0, 0.0, 4.0),  # the server failed or was restarted: this says nothing about its idle time
        (0.09, 0.0, 4.0),
        (0.1, 0.0, 0.05),
        (60.0, 0.0, 4.0),
    ],
)
def test_a_close_shortens_the_idle_time_so_that_requests_arrive_in_time(closed_after, round_trip, limit):
    learned = idle(round_trip)
    learned.was_closed(closed_after, now=100.0)
    assert learned.limit == pytest.approx(limit)


def test_the_idle_time_follows_the_shortest_of_the_latest_closes():
    learned = idle()
    for after in (1.0, 0.4, 3.0):
        learned.was_closed(after, now=1.0)
    assert learned.limit == 0.2
    for _ in range(16):
        learned.was_closed(2.0, now=2.0)
    assert learned.limit == 1.0


def test_the_fastest_connect_is_taken_as_the_round_trip_time():
    learned = idle(0.1)
    learned.opened_within(3.0)  # a packet was lost
    learned.was_closed(0.5, now=1.0)
    assert learned.limit == 0.25


def test_a_connection_that_outlives_the_idle_time_restores_it_if_none_closed_meanwhile():
    learned = idle()
    learned.was_closed(0.5, now=10.0)
    learned.was_kept(since=9.0)
    assert learned.limit == 0.25
    learned.was_kept(since=11.0)
    assert learned.limit == 4.0
    learned.was_closed(1.0, now=20.0)
    assert learned.limit == 0.5


def test_a_connection_that_is_idle_since_the_close_of_another_one_says_nothing():
    learned = idle()
    learned.was_closed(1.0, now=100.0)
    learned.was_kept(since=100.0)
    assert learned.limit == 0.5
    learned.was_kept(since=100.1)
    assert learned.limit == 4.0
