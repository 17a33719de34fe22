"""Blocks end at their deadlines, with one timer for all of them on asyncio, or together."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from contextvars import ContextVar

import anyio
import anyio.lowlevel
import pytest
import trio  # noqa: F401  loaded, as in a host that uses both

from sampling_async._pacing.blocks import DeadlineScopes


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


@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize("seconds", [0.005, 0, -1])
async def test_a_block_ends_at_its_deadline(seconds, is_ours):
    blocks = DeadlineScopes()
    with blocks.within(60, is_ours=is_ours) as outer, blocks.within(seconds, is_ours=is_ours) as scope:
        await anyio.sleep_forever()
    assert (scope.cancelled_caught, outer.cancel_called, len(blocks)) == (True, False, 0)
    await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("is_ours", [False, True])
async def test_a_block_without_a_deadline_ends_by_itself(is_ours):
    blocks = DeadlineScopes()
    with blocks.within(float("inf"), is_ours=is_ours) as scope:
        await anyio.lowlevel.checkpoint()
        assert len(blocks) == 1
    assert (scope.cancelled_caught, len(blocks)) == (False, 0)
    scope.cancel()  # it has ended, so nothing happens
    await anyio.lowlevel.checkpoint()


def test_each_block_ends_where_trio_is_loaded_too():
    """A callback sets the timer again. No task runs then, so anyio cannot tell asyncio from trio."""
    assert "trio" in sys.modules

    async def wait(blocks: DeadlineScopes, seconds: float) -> None:
        with blocks.within(seconds):
            await asyncio.sleep(600)

    async def main() -> None:
        blocks = DeadlineScopes()
        await asyncio.wait_for(asyncio.gather(*(wait(blocks, seconds) for seconds in (0.01, 0.02, 0.03))), 30)

    # No runner of anyio: these leave a note in the context about which library runs.
    asyncio.run(main())


def test_a_block_begins_on_uvloop_while_the_timer_of_another_is_due():
    """Less than half a millisecond before its time, a timer of uvloop is a plain handle, without `when`."""
    uvloop = pytest.importorskip("uvloop")

    async def wait(blocks: DeadlineScopes, seconds: float) -> None:
        with blocks.within(seconds):
            await asyncio.sleep(600)

    async def main() -> None:
        blocks = DeadlineScopes()
        await asyncio.wait_for(
            asyncio.gather(*(wait(blocks, seconds) for seconds in (0.0004, 0.01, 0.0004))), 30
        )
        assert len(blocks) == 0

    uvloop.run(main())


@pytest.mark.parametrize("is_ours", [False, True])
async def test_all_blocks_end_together(is_ours):
    blocks, ended = DeadlineScopes(), []

    async def wait(seconds: float) -> None:
        with blocks.within(seconds, is_ours=is_ours):
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
    with blocks.within(60, is_ours=is_ours) as late:
        await anyio.sleep_forever()
    assert late.cancelled_caught
    await anyio.lowlevel.checkpoint()


async def test_a_block_that_does_not_end_is_not_waited_for_for_long():
    blocks = DeadlineScopes()
    with anyio.CancelScope() as around, blocks.within(60):
        with anyio.CancelScope(shield=True):
            await blocks.end(0.005)  # of this very block
        around.cancel()
    assert len(blocks) == 0


@pytest.mark.asyncio
async def test_a_block_whose_task_is_over_is_not_waited_for():
    blocks = DeadlineScopes()

    async def interrupted() -> None:
        blocks.within(60, is_ours=True).__enter__()  # a signal handler raises before the block is left

    await asyncio.create_task(interrupted())
    assert len(blocks) == 1
    with anyio.move_on_after(0) as waited:
        await blocks.end(5)
        assert len(blocks) == 0
    assert not waited.cancelled_caught


@pytest.mark.asyncio
async def test_one_timer_serves_all_blocks(monkeypatch):
    loop, blocks = Loop(monkeypatch), DeadlineScopes()
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
    loop, blocks = Loop(monkeypatch), DeadlineScopes()
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
    loop, blocks = asyncio.get_running_loop(), DeadlineScopes()
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


# --- Blocks around our own code, which asyncio's own cancellation ends


async def ended_by(cancel, *, ends_late: bool = False) -> tuple[bool, int]:
    """Wait in a block that something cancels; return whether it was caught, and what is left requested."""
    blocks = DeadlineScopes()

    async def wait() -> tuple[bool, int]:
        with blocks.within(60, is_ours=True) as scope:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                if ends_late:
                    raise ZeroDivisionError from None
                raise
        return scope.cancelled_caught, asyncio.current_task().cancelling()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    (scope,) = blocks._deadlines
    cancel(scope, task)
    return await task


@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize("cancels", [False, True])
async def test_a_failure_inside_a_block_comes_out_of_it(is_ours, cancels):
    with pytest.raises(ZeroDivisionError):
        with DeadlineScopes().within(600, is_ours=is_ours) as scope:
            if cancels:
                scope.cancel()
            raise ZeroDivisionError


@pytest.mark.asyncio
async def test_the_timer_does_not_hold_the_data_of_the_task_that_set_it():
    class Data: ...

    blocks, of_request = DeadlineScopes(), ContextVar[Data]("of_request")

    async def request() -> weakref.ref[Data]:
        data = Data()
        of_request.set(data)
        with blocks.within(600, is_ours=True):
            await asyncio.sleep(0)
        return weakref.ref(data)

    data = await asyncio.create_task(request())
    await asyncio.sleep(0)
    gc.collect()
    assert blocks._timer is not None
    assert data() is None


@pytest.mark.asyncio
async def test_the_request_of_a_block_is_taken_back():
    assert await ended_by(lambda scope, _: [scope.cancel(), scope.cancel()]) == (True, 0)


@pytest.mark.asyncio
async def test_a_cancellation_by_others_passes_through_a_block():
    with pytest.raises(asyncio.CancelledError):
        await ended_by(lambda _, task: task.cancel())


@pytest.mark.asyncio
@pytest.mark.parametrize("order", [1, -1])
async def test_who_cancels_the_task_at_the_same_time_is_heeded(order):
    def both(scope, task):
        for cancel in (scope.cancel, task.cancel)[::order]:
            cancel()

    with pytest.raises(asyncio.CancelledError):
        await ended_by(both)


@pytest.mark.asyncio
async def test_a_failure_during_the_cancellation_comes_out_and_nothing_is_left_requested():
    with pytest.raises(ZeroDivisionError):
        await ended_by(lambda scope, _: scope.cancel(), ends_late=True)


@pytest.mark.asyncio
async def test_earlier_requests_that_the_task_did_not_heed_are_not_taken_back():
    async def deaf() -> int:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            with DeadlineScopes().within(0.001, is_ours=True) as scope:
                await asyncio.sleep(600)
        assert scope.cancelled_caught
        return asyncio.current_task().cancelling()

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == 1


@pytest.mark.asyncio
async def test_a_scope_around_a_block_is_heeded_and_cancels_it_no_more_than_itself():
    for ours_first in (False, True):
        blocks = DeadlineScopes()
        with anyio.CancelScope() as around:
            with blocks.within(60, is_ours=True) as scope:
                for cancelled in (scope, around) if ours_first else (around, scope):
                    asyncio.get_running_loop().call_soon(cancelled.cancel)
                await asyncio.sleep(600)
            await asyncio.sleep(600)
        assert around.cancelled_caught
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0)


def test_a_block_that_begins_after_the_end_may_be_in_another_loop():
    blocks = DeadlineScopes()

    async def first() -> None:
        with blocks.within(60):
            blocks.shut()

    async def second() -> bool:
        with blocks.within(5) as scope:
            await anyio.lowlevel.checkpoint()
        return scope.cancelled_caught

    asyncio.run(first())
    assert asyncio.run(second())


@pytest.mark.parametrize("is_ours", [False, True])
async def test_a_block_without_time_is_cancelled_from_its_beginning(is_ours):
    blocks = DeadlineScopes()
    with blocks.within(0, is_ours=is_ours) as scope:
        assert scope.cancel_called
        await anyio.sleep_forever()


async def test_foreign_code_in_a_block_is_cancelled_again_if_it_goes_on():
    blocks, cancelled = DeadlineScopes(), 0
    with blocks.within(60) as scope:
        scope.cancel()
        for _ in range(3):
            try:
                await anyio.lowlevel.checkpoint()
            except anyio.get_cancelled_exc_class():
                cancelled += 1
    assert cancelled == 3


@pytest.mark.asyncio
async def test_our_own_code_is_cancelled_once_and_within_a_shield():
    blocks, reached = DeadlineScopes(), []
    with blocks.within(60, is_ours=True) as scope:
        scope.cancel()
        with anyio.CancelScope(shield=True):
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                reached.append("cancelled")
            await asyncio.sleep(0)
            reached.append("went on")
    assert reached == ["cancelled", "went on"]


@pytest.mark.parametrize("is_ours", [False, True])
async def test_the_end_waits_for_the_last_block(is_ours):
    blocks, left, slow = DeadlineScopes(), [], anyio.Event()

    async def wait(name: str) -> None:
        with blocks.within(60, is_ours=is_ours):
            try:
                await anyio.sleep_forever()
            finally:
                if name == "slow":
                    with anyio.CancelScope(shield=True):
                        await slow.wait()
                left.append(name)

    async def end() -> None:
        await blocks.end(60)
        left.append("all")

    async with anyio.create_task_group() as tasks:
        for name in ("quick", "slow"):
            tasks.start_soon(wait, name)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(end)
        await anyio.wait_all_tasks_blocked()
        assert left == ["quick"]
        slow.set()
    assert left == ["quick", "slow", "all"]


@pytest.mark.parametrize("is_noted", [False, True])
async def test_a_handler_that_raises_at_the_beginning_of_a_block_leaves_nothing(is_noted, monkeypatch):
    blocks, enter = DeadlineScopes(), DeadlineScopes.enter

    def interrupted(self, scope, until) -> None:
        if is_noted:
            enter(self, scope, until)
        raise KeyboardInterrupt

    monkeypatch.setattr(DeadlineScopes, "enter", interrupted)
    with pytest.raises(KeyboardInterrupt), blocks.within(60):
        pass
    assert len(blocks) == 0
    await anyio.lowlevel.checkpoint()
