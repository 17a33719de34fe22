"""Blocks end at their deadlines, with one timer for all of them on asyncio, or together."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref

import anyio
import anyio.lowlevel
import pytest
import trio  # noqa: F401  loaded, as in a host that uses both

from sampling_async._pacing.blocks import Blocks


class Loop:
    """The clock of the event loop, and the timers that were set, by hand."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        self.set_for: list[float] = []
        loop = asyncio.get_running_loop()
        call_at = loop.call_at
        monkeypatch.setattr(loop, "time", lambda: self.now)

        def noted(when, callback, *args, context):
            self.set_for.append(when)
            return call_at(when, callback, *args, context=context)

        monkeypatch.setattr(loop, "call_at", noted)


@pytest.mark.parametrize("seconds", [0.005, 0, -1])
async def test_a_block_ends_at_its_deadline(seconds):
    blocks = Blocks()
    with blocks.within(60) as outer, blocks.within(seconds) as scope:
        await anyio.sleep_forever()
    assert (scope.cancelled_caught, outer.cancel_called, len(blocks)) == (True, False, 0)


async def test_a_block_without_a_deadline_ends_by_itself():
    blocks = Blocks()
    with blocks.within(float("inf")) as scope:
        await anyio.lowlevel.checkpoint()
        assert len(blocks) == 1
    assert (scope.cancelled_caught, len(blocks)) == (False, 0)


def test_each_block_ends_where_trio_is_loaded_too():
    """A callback sets the timer again. No task runs then, so anyio cannot tell asyncio from trio."""
    assert "trio" in sys.modules

    async def wait(blocks: Blocks, seconds: float) -> None:
        with blocks.within(seconds):
            await asyncio.sleep(600)

    async def main() -> None:
        blocks = Blocks()
        await asyncio.wait_for(asyncio.gather(*(wait(blocks, seconds) for seconds in (0.01, 0.02, 0.03))), 30)

    # No runner of anyio: these leave a note in the context about which library runs.
    asyncio.run(main())


def test_a_block_begins_on_uvloop_while_the_timer_of_another_is_due():
    """Less than half a millisecond before its time, a timer of uvloop is a plain handle, without `when`."""
    uvloop = pytest.importorskip("uvloop")

    async def wait(blocks: Blocks, seconds: float) -> None:
        with blocks.within(seconds):
            await asyncio.sleep(600)

    async def main() -> None:
        blocks = Blocks()
        await asyncio.wait_for(
            asyncio.gather(*(wait(blocks, seconds) for seconds in (0.0004, 0.01, 0.0004))), 30
        )
        assert len(blocks) == 0

    uvloop.run(main())


async def test_all_blocks_end_together():
    blocks, ended = Blocks(), []

    async def wait(seconds: float) -> None:
        with blocks.within(seconds):
            await anyio.sleep_forever()
        ended.append(seconds)

    async with anyio.create_task_group() as tasks:
        for seconds in (60, float("inf")):
            tasks.start_soon(wait, seconds)
        await anyio.wait_all_tasks_blocked()
        blocks.shut()
        await blocks.end(5)
        assert sorted(ended) == [60, float("inf")]
    await blocks.end(5)
    with blocks.within(60) as late:
        await anyio.sleep_forever()
    assert late.cancelled_caught


async def test_a_block_that_does_not_end_is_not_waited_for_for_long():
    blocks = Blocks()
    with anyio.CancelScope() as around, blocks.within(60):
        with anyio.CancelScope(shield=True):
            await blocks.end(0.005)  # of this very block
        around.cancel()
    assert len(blocks) == 0


@pytest.mark.asyncio
async def test_one_timer_serves_all_blocks(monkeypatch):
    loop, blocks = Loop(monkeypatch), Blocks()
    with blocks.within(60) as first:
        with blocks.within(90) as second:
            pass
        for _ in range(9):
            with blocks.within(70):
                pass
        assert loop.set_for == [60]  # for all eleven
        with blocks.within(30) as third:
            loop.now = 29.9985
            blocks.ring()
            assert not third.cancel_called
            loop.now = 29.9995  # a timer may fire a little early
            blocks.ring()
            assert third.cancel_called
            blocks.ring()
        assert loop.set_for == [60, 30, 30, 60, 60]
        loop.now = 60
        blocks.ring()
    assert [scope.cancel_called for scope in (first, second, third)] == [True, False, True]
    blocks.ring()  # with no block left, no timer is set
    assert loop.set_for == [60, 30, 30, 60, 60]


@pytest.mark.asyncio
async def test_the_timer_does_not_keep_the_blocks_alive(monkeypatch):
    loop, blocks = Loop(monkeypatch), Blocks()
    with blocks.within(60):
        pass
    assert loop.set_for == [60]
    timer, gone = blocks._timer, weakref.ref(blocks)
    del blocks
    gc.collect()
    assert gone() is None
    timer._run()


@pytest.mark.asyncio
async def test_a_handler_that_raises_while_the_timer_is_set_leaves_one(monkeypatch):
    loop, blocks = asyncio.get_running_loop(), Blocks()
    call_at = loop.call_at

    def struck(*_args: object, **_options: object) -> None:
        raise ZeroDivisionError

    with blocks.within(0.02) as first:
        monkeypatch.setattr(loop, "call_at", struck)
        with pytest.raises(ZeroDivisionError), blocks.within(0.001):
            pass
        monkeypatch.setattr(loop, "call_at", call_at)
        with anyio.move_on_after(10):
            await anyio.sleep_forever()
    assert first.cancelled_caught


def test_a_block_that_begins_after_the_end_may_be_in_another_loop():
    blocks = Blocks()

    async def first() -> None:
        with blocks.within(60):
            blocks.shut()

    async def second() -> bool:
        with blocks.within(5) as scope:
            await anyio.lowlevel.checkpoint()
        return scope.cancelled_caught

    asyncio.run(first())
    assert asyncio.run(second())
