"""Telling a cancellation that is meant for this task from one that merely came along."""

from __future__ import annotations

import sys

import anyio


def is_stray(exc: BaseException) -> bool:
    """Return whether an exception is an asyncio cancellation that nobody asked of this task.

    Awaiting a future or task that was cancelled elsewhere raises the same CancelledError as being cancelled.
    Taken for the real thing, it would end this task without a word to anybody.
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
    return task is None or not (task.cancelling() or anyio.get_current_task().has_pending_cancellation())
