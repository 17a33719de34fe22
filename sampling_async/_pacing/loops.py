"""The current event loop and its clock, on asyncio and on trio."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    import asyncio


def asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running asyncio loop; None on trio."""
    # asyncio takes long to import, and a program on trio may never need it.
    if "asyncio" not in sys.modules:
        return None
    import asyncio  # noqa: PLC0415

    if "trio" not in sys.modules:
        return asyncio.get_running_loop()
    # In its guest mode trio runs inside an asyncio loop. Then `get_running_loop` finds the asyncio loop, but
    # this task belongs to trio. The token of anyio is that of the library that runs the task.
    token: object = anyio.lowlevel.current_token()
    loop = getattr(token, "native_token", token)
    return loop if isinstance(loop, asyncio.AbstractEventLoop) else None


def running_loop() -> object:
    """Return an object that identifies the running event loop, on asyncio or trio."""
    return asyncio_loop() or anyio.lowlevel.current_token()


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether an asyncio loop is running in the current thread."""
    import asyncio  # noqa: PLC0415  it is loaded: there is a loop

    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def current_time() -> float:
    """Return the time of the event loop's clock, in seconds."""
    loop = asyncio_loop()
    return anyio.current_time() if loop is None else loop.time()
