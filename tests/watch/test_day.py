"""A day in fast motion: quotas open, close and fill, notifications come late and out of order, outages pass.

At each moment the live index is compared with what the service knew: what was open when the newest poll was
answered, without what notifications have closed since.
"""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random

import anyio
import anyio.lowlevel
import pytest
from watch_kit import HandClock, settle

from sampling_async import OutagePolicy, RetryPolicy
from sampling_async.matching import LiveIndex
from sampling_async.notifications import HandlerPolicy, Inbox, QuotaStatus, SurveyClosed, Validity
from sampling_async.simulator import Fault, Latency, Notifying, Simulator

STEPS, STEP = 32, 15.0


class Truth:
    """What was open at which time, by the simulator's own account."""

    def __init__(self, sim: Simulator, clock: HandClock) -> None:
        self.sim = sim
        self.clock = clock
        self.states: list[tuple[float, frozenset[int]]] = []
        self.note()

    def note(self) -> frozenset[int]:
        listed = self.sim.inventory.surveys
        now = frozenset(quota.quota_id for survey in listed for quota in survey.quotas)
        self.states.append((self.clock(), now))
        return now

    def during(self, first: float, last: float) -> list[frozenset[int]]:
        """Return the states of a stretch of time, the one that it began with included."""
        before = [state for when, state in self.states if when <= first][-1:]
        return before + [state for when, state in self.states if first < when <= last]


async def until(is_so) -> None:
    with anyio.fail_after(60):
        while not is_so():
            await anyio.lowlevel.checkpoint()


async def run_a_day(  # noqa: PLR0915  a day is a list of what happens
    tmp_path, seed: int
) -> tuple[int, int, set[str]]:
    clock, random = HandClock(), Random(seed)
    sim = Simulator(
        seed,
        surveys=300,
        clock=clock,
        sleep=clock.sleep,
        latency=Latency(a=0.5),
        notifying=Notifying(late=0.5, late_seconds=100.0, repeated=0.1),
    )
    inbox = Inbox(
        tmp_path / "inbox.db", secrets="a-secret-of-the-day", clock=clock, handling=HandlerPolicy(poll=0.0001)
    )
    truth = Truth(sim, clock)
    all_ids, member = sorted(truth.states[0][1]), next(iter(sim.members))
    of_survey = {
        survey.survey_id: [quota.quota_id for quota in survey.quotas] for survey in sim.inventory.surveys
    }
    checked, behind, seen = 0, 0, set[str]()
    options = {"outage": OutagePolicy(first_pause=1, longest_pause=10), "retry": RetryPolicy(max_attempts=1)}
    async with (
        sim.client(clock=clock, sleep=clock.sleep, random=random.random, **options) as client,
        client.watch_quotas(60, wall_clock=clock) as watch,
        LiveIndex(watch) as live,
        inbox,
        live.follow(inbox) as followed,
    ):
        await clock.advance(1)
        await live.ready()
        closings: dict[int, float] = {}  # when a closing came, by quota
        last = 0
        for step in range(STEPS):
            # The world moves.
            for quota_id in random.sample(all_ids, 6):
                if quota_id in truth.states[-1][1]:
                    sim.close_quota(quota_id)
                else:
                    sim.open_quota(quota_id, remaining=5)
            filled = random.choice(sorted(truth.note()))
            sim.open_quota(filled, remaining=0)
            truth.note()
            if step == 12:
                sim.faults.add(Fault.status(503), Fault.html())
            if step == 22:
                sim.faults.clear()
            # Notifications that are due come, late ones out of order.
            await sim.notifications.deliver(inbox, everything=False)
            async for fact in inbox.facts(QuotaStatus, SurveyClosed, after=last):
                last = fact.id
                note, came = fact.notification, fact.received_at.timestamp()
                if isinstance(note, SurveyClosed):
                    closings.update(dict.fromkeys(of_survey[note.survey_id], came))
                elif fact.validity is Validity.STANDS and not note.is_live:
                    closings[note.quota_id] = came
            await until(lambda: followed.after == last)  # noqa: B023
            await settle()
            # Time moves, and polls run in it.
            await clock.advance(STEP)
            await until(lambda: live.age == watch.age)
            # What the index says is what the service said.
            since = watch.since
            assert since is not None
            began = since.timestamp()
            shown = frozenset(live.index.quota_ids)
            closed = {quota_id for quota_id, when in closings.items() if when > began}
            # Told in the very moment in which the poll began: before it or after it, who knows.
            tied = {quota_id for quota_id, when in closings.items() if when == began}
            candidates = truth.during(began, began + 1)
            assert any((state - closed) ^ shown <= tied - closed for state in candidates), step
            assert live.age == watch.age == pytest.approx(clock() - began, abs=0.001)
            checked += 1
            seen.add(live.status)
            is_true = shown == truth.states[-1][1]
            behind += not is_true
            # It is right, or it says how old it is.
            assert is_true or live.age > 0
        # The world rests, and all notifications are in: then the index is right.
        await sim.notifications.deliver(inbox)
        await clock.advance(400)
        await until(lambda: live.age == watch.age)
        assert frozenset(live.index.quota_ids) == truth.note()
        assert sim.eligible(member, next(iter(live.index.quota_ids))) is not None
        assert watch.since > datetime.fromtimestamp(clock() - 120, UTC)
    return checked, behind, seen


async def test_the_index_is_right_or_says_how_old_it_is(tmp_path):
    checked, behind, seen = await run_a_day(tmp_path, 1)
    assert checked == STEPS
    assert behind < checked
    assert seen == {"ready", "stale"}
