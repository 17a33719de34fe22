"""Distinguish a cancellation of the current task from a stray one."""

from __future__ import annotations

import sys

import anyio


def is_stray(exc: BaseException) -> bool:
    """Return whether an exception is an asyncio cancellation that is not meant for the current task.

    If a task awaits a future or another task, and that is cancelled, the same CancelledError is raised as for a
    cancellation of the task itself. Such a stray cancellation must be reported as a failure. Otherwise it would
    end the current task silently.
    """
    if "asyncio" not in sys.modules:
        return False
    import asyncio  # noqa: PLC0415  a third of this package's import time, and some hosts run trio

    if not isinstance(exc, asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # trio runs, and its cancellations are of another kind
        return True
    # Two ways to cancel this task: `Task.cancel` of asyncio, which `cancelling` counts, and a scope of anyio.
    return task is None or not (task.cancelling() or anyio.get_current_task().has_pending_cancellation())
