"""Turns for the event loop during long work: when the clock is read, and when others get their turn."""

from __future__ import annotations

import anyio
import pytest

from sampling_async._pacing import loops
from sampling_async._pacing.loops import LoopYielder, Stepwise, let_go


class Rounds:
    """The clock that the work reads, and the turns that it gives."""

    def __init__(self) -> None:
        self.now, self.readings, self.given = 0.0, 0, 0

    def read(self) -> float:
        self.readings += 1
        return self.now

    async def give(self) -> None:
        self.given += 1


@pytest.fixture
def rounds(monkeypatch):
    made = Rounds()
    monkeypatch.setattr(loops.time, "perf_counter", made.read)
    monkeypatch.setattr(loops.anyio.lowlevel, "checkpoint", made.give)
    return made


@pytest.mark.parametrize("worth", [1, 3, 16, 500])
async def test_the_clock_is_read_once_in_sixteen_steps(rounds, worth):
    turns = LoopYielder()
    assert rounds.readings == 1
    for _ in range(480):
        await (turns.step() if worth == 1 else turns.step(worth))
    # Three steps at a time are 18 when they are enough.
    assert rounds.readings - 1 == {1: 30, 3: 80, 16: 480, 500: 480}[worth]


async def test_fifteen_steps_are_not_enough_to_read_the_clock(rounds):
    turns = LoopYielder()
    for _ in range(15):
        await turns.step()
    assert rounds.readings == 1
    await turns.step()
    assert rounds.readings == 2


@pytest.mark.parametrize(("took", "given"), [(0.0039, 0), (0.004, 0), (0.0041, 2)])
async def test_after_more_than_four_milliseconds_the_loop_goes_round_twice(rounds, took, given):
    turns = LoopYielder()
    rounds.now += took
    await turns.step(16)
    assert rounds.given == given
    await turns.step(16)  # it counts from the turn that was given
    assert rounds.given == given


async def test_time_is_counted_since_the_latest_turn(rounds):
    turns = LoopYielder()
    for _ in range(10):
        rounds.now += 0.003
        await turns.step(16)
    assert rounds.given == 5 * 2


async def test_a_list_is_let_go_of_in_steps(rounds):
    items = [object() for _ in range(9)]
    await let_go(items)
    assert items == []
    assert rounds.readings == 1 + 9


async def test_a_plain_iterable_is_read_with_async_for_and_stays_at_its_end():
    source = Stepwise([1, 2])
    assert [each async for each in source] == [1, 2]
    with pytest.raises(StopAsyncIteration):
        await anext(source)
    await anyio.lowlevel.checkpoint()
