"""Which cancellations are stray: not meant for the current task."""

from __future__ import annotations

import asyncio
import sys

import anyio
import pytest

from sampling_async._pacing.cancellation import is_stray


async def test_an_ordinary_error_is_not_a_stray_cancellation():
    assert not is_stray(ValueError())


async def test_a_cancellation_by_a_scope_is_not_stray():
    caught = None
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep_forever()
        except BaseException as exc:
            caught = is_stray(exc)
            raise
    assert caught is False


@pytest.mark.asyncio
async def test_a_cancellation_of_the_task_is_not_stray():
    caught = []

    async def work() -> None:
        try:
            await asyncio.sleep(9)
        except asyncio.CancelledError as exc:
            caught.append(is_stray(exc))
            raise

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert caught == [False]


async def test_a_cancellation_from_elsewhere_is_stray():
    assert is_stray(asyncio.CancelledError())


async def test_no_cancellation_is_stray_without_asyncio(monkeypatch):
    error = asyncio.CancelledError()
    monkeypatch.delitem(sys.modules, "asyncio")
    assert not is_stray(error)
