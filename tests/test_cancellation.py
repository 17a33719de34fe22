"""Which cancellations are stray: not meant for the current task."""

from __future__ import annotations

import asyncio
import sys

import anyio
import anyio.lowlevel
import pytest

from sampling_async._pacing.background import Background, is_foreign_cancellation


async def test_an_ordinary_error_is_not_a_stray_cancellation():
    assert not is_foreign_cancellation(ValueError())


async def test_a_cancellation_by_a_scope_is_not_stray():
    caught = None
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep_forever()
        except BaseException as exc:
            caught = is_foreign_cancellation(exc)
            raise
    assert caught is False


@pytest.mark.asyncio
async def test_a_cancellation_of_the_task_is_not_stray():
    caught = []

    async def work() -> None:
        try:
            await asyncio.sleep(9)
        except asyncio.CancelledError as exc:
            caught.append(is_foreign_cancellation(exc))
            raise

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert caught == [False]


async def test_a_cancellation_from_elsewhere_is_stray():
    assert is_foreign_cancellation(asyncio.CancelledError())


async def test_no_cancellation_is_stray_without_asyncio(monkeypatch):
    error = asyncio.CancelledError()
    monkeypatch.delitem(sys.modules, "asyncio")
    assert not is_foreign_cancellation(error)


class EndsSlowly(Background):
    """Work that takes a moment to end after it was cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.has_ended = False

    @property
    def _has_more(self) -> bool:
        return False

    async def _work(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.02)
            self.has_ended = True


@pytest.mark.asyncio
async def test_cancellations_while_the_work_ends_are_raised_after_its_end():
    work = EndsSlowly()

    async def host() -> None:
        async with work:
            await anyio.lowlevel.checkpoint()

    task = asyncio.create_task(host())
    await asyncio.sleep(0.005)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.has_ended


def test_work_that_was_not_entered_has_nothing_to_end():
    work = EndsSlowly()
    anyio.run(work.__aexit__, None, None, None)
    assert work.left
