"""When a service that is away is asked again, in exact numbers."""

from __future__ import annotations

import logging
import math

import anyio
import anyio.lowlevel
import doubles
import httpx
import pytest
from anyio import wait_all_tasks_blocked

from sampling_async import OutagePolicy, RetryPolicy, ServiceError
from sampling_async._pacing.outage import Away, Outage


@pytest.mark.parametrize(("deadline", "slept"), [(3.5, []), (3.6, [0.25]), (4.4, [0.25, 0.5, 1.0])])
async def test_an_outage_is_waited_for_while_the_response_to_another_probe_comes_in_time(deadline, slept):
    """The next probe is sent within 1.5 s and answered within 2 s, or it is too late."""
    probes = Probes(*[0.0] * 9)
    probes.fail(3)
    assert not await probes.outage.over(600.0, 0.0, deadline=deadline)
    assert probes.time.slept == slept


async def test_a_probe_that_is_due_after_the_deadline_is_not_waited_for():
    probes = Probes()
    probes.fail(3, retry_after=20.0)
    assert not await probes.outage.over(600.0, 0.0, deadline=21.0)
    assert probes.time.slept == []
    assert await probes.outage.over(600.0, 0.0, deadline=23.0)
    assert probes.time.slept == [20.0]


async def test_who_cancels_each_probe_gets_through_after_20_seconds():
    """A deadline may be shorter than Get Settings takes."""
    time = doubles.FakeTime()

    async def asks(_seconds: float) -> Away | None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anyio.sleep(1)
        raise ValueError("the caller ended")

    outage = Outage(
        OutagePolicy(failures=1), asks, under_way=2, clock=time.clock, sleep=time.sleep, random=lambda: 1.0
    )
    outage.failed("gone", 0.0)
    for at in (5.0, 5.5, 10.0, 18.0):
        time.now = at
        with pytest.raises(ValueError, match="the caller ended"):
            await outage.over(0.0, 0.0)
        assert not await outage.over(0.0, 0.0)  # no other probe at once
    time.now = 20.0
    assert await outage.over(0.0, 0.0)
    outage.answered(time.now)
    outage.failed("gone", time.now)
    assert outage.began_at == 20.0  # another outage


async def test_a_probe_that_is_answered_during_a_trial_ends_the_outage(caplog):
    caplog.set_level(logging.INFO, "sampling_async.pacing")
    probes = Probes(Away(is_certain=False))
    probes.fail(3, is_certain=False)
    assert not await probes.outage.over(0.0, 0.0)
    probes.time.now = 0.25
    assert not await probes.outage.over(0.0, 0.0)
    answered = probes.outage._send_probe

    async def slow(seconds: float) -> Away | None:
        probes.time.now = 20.0
        assert await probes.outage.over(0.0, 0.0)  # another call, which begins the trial
        return await answered(seconds)

    probes.outage._send_probe = slow
    probes.time.now = 1.0
    assert await probes.outage.over(0.0, 0.0)
    probes.outage.answered(21.0)
    probes.time.now = 22.0
    probes.fail(2)
    assert not probes.outage.is_on
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_after_a_quiet_hour_a_probe_is_sent_before_anything_is_tried():
    probes = Probes(0.0)
    probes.fail(3)
    probes.time.now += 3600
    assert not await probes.outage.over(0.0, 0.0)
    assert len(probes.limits) == 1
    assert probes.outage.is_on


async def test_a_trial_that_fails_goes_on_with_the_same_outage(caplog):
    caplog.set_level(logging.INFO, "sampling_async.pacing")
    probes = Probes(*[Away(is_certain=False)] * 99)
    probes.fail(3, is_certain=False)
    began = probes.outage.began_at
    assert await probes.outage.over(600.0, 0.0)
    assert probes.time.now - began == pytest.approx(20, abs=2)
    assert not probes.outage.is_on
    asked = len(probes.limits)
    await probes.outage.probe_if_stuck(lambda: True)
    assert len(probes.limits) == asked
    probes.fail(1, is_certain=False)
    assert (probes.outage.is_on, probes.outage.began_at) == (True, began)
    probes.outage.answered(probes.time.now)  # a late response to another request
    assert await probes.outage.over(600.0, 0.0)
    assert probes.time.now - began == pytest.approx(40, abs=4)
    probes.outage.answered(probes.time.now)
    probes.outage.answered(probes.time.now)
    assert probes.changes == 4
    assert [record.message.split(",")[0][:27] for record in caplog.records] == [
        "the service is away: 3 fail",
        "the service responds again",
    ]
    probes.fail(2)
    assert not probes.outage.is_on


async def test_a_trial_begins_20_seconds_after_the_last_certainty():
    probes = Probes(Away(), *[Away(is_certain=False)] * 9)
    probes.fail(3, is_certain=False)
    for at, is_over in ((0.25, False), (1.0, False), (20.2, False), (20.25, True)):
        probes.time.now = at
        assert await probes.outage.over(0.0, 0.0) is is_over


async def test_another_failure_of_a_probe_lets_a_request_be_tried_each_20_seconds():
    probes = Probes(Away(is_certain=False), Away(), Away(is_certain=False))
    probes.fail(3)
    probes.time.now = 0.25
    assert await probes.outage.over(0.0, 0.0)
    probes.fail(1)
    for at, is_over in ((0.75, False), (20.25, True)):
        probes.time.now = at
        assert await probes.outage.over(0.0, 0.0) is is_over


@pytest.mark.parametrize(("is_certain", "tried_at"), [(True, 0.5), (False, 20.25)])
async def test_a_probe_of_a_stuck_client_reports_how_certain_the_outage_is(is_certain, tried_at):
    probes = Probes(Away(is_certain=is_certain), *[Away(is_certain=False)] * 30)
    probes.fail(2, is_certain=is_certain)
    await probes.outage.probe_if_stuck(lambda: True)
    assert probes.outage.is_on
    assert await probes.outage.over(600.0, 0.0)
    assert probes.time.now == pytest.approx(tried_at, abs=2 * (not is_certain))


async def test_another_caller_probes_if_the_first_is_cancelled():
    """There is no separate task for probes: if the probing caller is cancelled, the next waiter must probe."""
    time, asked = doubles.FakeTime(), 0

    async def asks(_seconds: float) -> Away | None:
        nonlocal asked
        asked += 1
        if asked == 1:
            await anyio.sleep_forever()
        return None

    policy = OutagePolicy(failures=1)
    outage = Outage(policy, asks, under_way=8, clock=time.clock, sleep=time.sleep, random=lambda: 1.0)
    outage.failed("gone", 0.0)
    async with anyio.create_task_group() as others:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outage.over, 600.0, 0.0)
            await wait_all_tasks_blocked()
            others.start_soon(outage.over, 600.0, 0.0)
            await wait_all_tasks_blocked()
            assert (asked, outage.is_on) == (1, True)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(60):
            await wait_all_tasks_blocked()
    assert (asked, outage.is_on) == (2, False)


async def test_an_outage_that_is_closed_during_a_probe_plans_no_other():
    time, asked = doubles.FakeTime(), 0

    async def asks(_seconds: float) -> Away | None:
        nonlocal asked
        asked += 1
        outage.close(wakes=True)
        return 5.0

    policy = OutagePolicy(failures=1)
    outage = Outage(policy, asks, under_way=8, clock=time.clock, sleep=time.sleep, random=lambda: 1.0)
    outage.failed("gone", 0.0)
    assert await outage.over(600.0, 0.0)
    assert asked == 1


# --- In exact numbers


class Probes:
    """An outage whose probes are answered as told: None is a response, a number that of `Away`."""

    def __init__(self, *answers: Away | float | None, random: float = 1.0, **policy: float) -> None:
        self.time = doubles.FakeTime()
        self.limits: list[float] = []
        self.changes = 0
        self._answers = list(answers)
        given = OutagePolicy(**{"failures": 3} | policy)
        self.outage = Outage(
            given, self._ask, under_way=2, clock=self.time.clock, sleep=self.time.sleep, random=lambda: random
        )
        self.outage.on_change = self._changed

    def _changed(self) -> None:
        self.changes += 1

    async def _ask(self, seconds: float) -> Away | None:
        self.limits.append(seconds)
        answer = self._answers.pop(0) if self._answers else None
        return Away(answer) if isinstance(answer, float) else answer

    def fail(self, times: int = 1, **facts: float) -> None:
        for _ in range(times):
            self.outage.failed("gone", self.time.now, **facts)


async def test_it_takes_failures_in_a_row_and_a_response_starts_the_count_again():
    probes = Probes()
    assert probes.outage.cause == ""
    probes.fail(2)
    probes.outage.answered(0.0)
    probes.fail(2)
    assert (probes.outage.is_on, probes.changes) == (False, 0)
    probes.fail()
    assert (probes.outage.is_on, probes.changes, probes.outage.cause) == (True, 1, "gone")
    probes.fail(9)
    assert probes.changes == 1


async def test_a_refusal_among_failures_starts_the_count_again():
    bad_gateway, refused = httpx.Response(502), httpx.Response(400, json={"ResultCode": 16})
    service = doubles.Service(bad_gateway, bad_gateway, refused, bad_gateway, bad_gateway, bad_gateway)
    options = {"outage": OutagePolicy(failures=3), "retry": RetryPolicy(max_attempts=1)}
    async with doubles.client(service, **options) as client:
        breakers = []
        for _ in range(6):
            with pytest.raises(ServiceError):
                await client.generate_invite("m", 5)
            breakers.append(client.snapshot().breaker)
    assert breakers == ["closed"] * 5 + ["open"]


async def test_after_an_outage_the_count_of_failures_starts_again():
    probes = Probes()
    probes.fail(3)
    assert await probes.outage.over(600.0, 0.0)
    assert (probes.outage.is_on, probes.changes, probes.outage.answered_at) == (False, 2, probes.time.now)
    probes.fail(2)
    assert not probes.outage.is_on
    probes.fail()
    assert probes.outage.is_on


async def test_attempts_from_before_the_end_of_an_outage_say_nothing_and_those_from_its_moment_do():
    probes = Probes()
    probes.fail(3)
    assert await probes.outage.over(600.0, 0.0)
    for _ in range(9):
        probes.outage.failed("gone", probes.time.now - 0.001)
    assert not probes.outage.is_on
    probes.fail(3)
    assert probes.outage.is_on


@pytest.mark.parametrize(
    ("answers", "random", "retry_after", "slept"),
    [
        ([0.0] * 5, 1.0, 0.0, [0.25, 0.5, 1.0, 1.5, 1.5, 1.5]),
        ([0.0], 0.0, 0.0, [0.125, 0.25]),  # drawn from their half up
        ([7.0, 0.1], 1.0, 20.0, [20.0, 7.0, 1.0]),  # as long as the service asked
        ([], 1.0, 3600.0, [60.0]),  # and a minute at most
    ],
)
async def test_pauses_double_up_to_the_longest_unless_the_service_asks_for_longer_ones(
    answers, random, retry_after, slept
):
    probes = Probes(*answers, random=random)
    probes.fail(3, retry_after=retry_after)
    assert await probes.outage.over(600.0, 0.0)
    assert probes.time.slept == pytest.approx(slept)


async def test_each_fourth_probe_may_take_as_long_as_it_likes():
    probes = Probes(*[0.0] * 8)
    probes.fail(3)
    assert await probes.outage.over(600.0, 0.0)
    assert probes.limits == [2.0, 2.0, 2.0, math.inf] * 2 + [2.0]


async def test_the_time_away_counts_from_the_failure_that_began_it():
    probes = Probes()
    assert probes.outage.away_for() == 0.0
    probes.time.now = 5.0
    probes.fail(3)
    probes.time.now = 9.0
    assert probes.outage.away_for() == 4.0
    assert await probes.outage.over(600.0, 0.0)
    assert probes.outage.away_for() == 0.0


async def test_patience_counts_from_the_later_of_the_wait_and_the_outage():
    probes = Probes(*[0.0] * 99)
    probes.time.now = 100.0
    probes.fail(3)
    assert not await probes.outage.over(10.0, 3.0)
    assert probes.time.now == pytest.approx(110.0)
    assert not await probes.outage.over(10.0, 108.0)
    assert probes.time.now == pytest.approx(118.0)


async def test_without_patience_a_probe_is_sent_if_it_is_due():
    probes = Probes()
    probes.fail(3)
    assert not await probes.outage.over(0.0, 0.0)
    assert (probes.limits, probes.time.slept) == ([], [])
    probes.time.now = 0.25
    assert await probes.outage.over(0.0, 0.0)
    assert len(probes.limits) == 1


async def test_a_probe_that_is_due_is_sent_without_a_pause():
    probes = Probes()
    probes.fail(3)
    probes.time.now = 0.25
    assert await probes.outage.over(600.0, 0.0)
    assert probes.time.slept == []


async def test_a_probe_of_a_stuck_client_that_fails_counts_with_its_retry_after():
    probes = Probes(20.0)
    probes.fail(2)
    await probes.outage.probe_if_stuck(lambda: True)
    assert probes.outage.is_on
    assert probes.outage.cause == "gone"
    assert await probes.outage.over(600.0, 0.0)
    assert probes.time.slept == pytest.approx([0.25, 20.0])


async def test_one_failure_is_a_suspicion():
    probes = Probes()
    probes.fail()
    await probes.outage.probe_if_stuck(lambda: True)
    assert len(probes.limits) == 1


async def test_no_probe_is_sent_if_all_is_well_after_the_pause_before_it():
    probes = Probes()

    async def answered(_: float) -> None:
        probes.outage.answered(probes.time.now)

    sleep, probes.outage._sleep = probes.outage._sleep, answered
    probes.fail(2)
    await probes.outage.probe_if_stuck(lambda: True)
    probes.outage._sleep = sleep
    probes.fail(2)
    answers = [False, True]
    await probes.outage.probe_if_stuck(answers.pop)
    assert (probes.limits, answers) == ([], [])


@pytest.mark.parametrize("answer", [None, Away(is_certain=False)])
async def test_a_probe_of_a_stuck_client_that_is_answered_or_fails_otherwise_ends_the_suspicion(answer):
    probes = Probes(answer)
    probes.fail(2)
    await probes.outage.probe_if_stuck(lambda: True)
    assert not probes.outage.is_on
    probes.fail(2)
    assert not probes.outage.is_on


async def test_no_probe_is_sent_without_a_suspicion_or_if_attempts_can_begin():
    probes = Probes()
    await probes.outage.probe_if_stuck(lambda: True)
    probes.fail(2)
    await probes.outage.probe_if_stuck(lambda: False)
    assert (probes.limits, probes.time.slept) == ([], [])


async def test_the_log_says_when_a_service_goes_why_and_when_it_is_back(caplog):
    caplog.set_level(logging.INFO)
    probes = Probes(0.0)
    probes.time.now = 100.0
    probes.fail(3)
    assert await probes.outage.over(600.0, 100.0)
    away, back = (record.getMessage() for record in caplog.records)
    assert away == (
        "the service is away: 3 failures in a row; the last failure: gone. Until it responds, only Get "
        "Settings is sent; fan-outs and bulks wait up to 600 s for it (OutagePolicy.patience, --patience)"
    )
    assert back == "the service responds again, after 0.8 s"


async def test_closing_ends_the_pause_before_a_probe_and_the_waits_for_it():
    outage = Outage(
        OutagePolicy(failures=1),
        lambda _: pytest.fail("a probe of a closed client"),
        under_way=8,
        clock=lambda: 0.0,
        sleep=lambda _: anyio.sleep_forever(),
        random=lambda: 1.0,
    )
    outage.failed("gone", 0.0)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(outage.over, 600.0, 0.0)
            await wait_all_tasks_blocked()
            outage.close(wakes=True)


async def test_a_closed_outage_does_not_begin_again():
    probes = Probes()
    probes.outage.close(wakes=False)
    probes.fail(9)
    assert not probes.outage.is_on


async def test_who_runs_out_of_patience_before_the_next_probe_is_due_sends_none():
    probes = Probes()
    probes.fail(3)  # the first probe is due after 0.25 s
    assert not await probes.outage.over(0.1, 0.0)
    assert probes.limits == []


async def test_a_client_that_is_closed_during_the_pause_sends_no_probe():
    probes = Probes()
    probes.fail(3)

    async def closes(seconds: float) -> None:
        probes.time.now += seconds
        probes.outage.close(wakes=False)

    probes.outage._sleep = closes
    await probes.outage.over(600.0, 0.0)
    assert probes.limits == []


@pytest.mark.parametrize(("under_way", "failures"), [(1, 2), (2, 2), (3, 3), (5, 5), (64, 5)])
def test_an_outage_takes_as_many_failures_as_run_at_once_from_two_to_five(under_way, failures):
    assert OutagePolicy().enough(under_way) == failures
    assert OutagePolicy(failures=7).enough(under_way) == 7
