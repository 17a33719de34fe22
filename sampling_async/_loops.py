"""Which event loop runs this, what time it has, and what is made for it.

All of it is asked so often that the way through anyio is too long: it finds out anew each time which library
runs, and that takes longer than making the scope or event it was asked for.
"""

from __future__ import annotations

import sys
from functools import cache
from math import inf
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    import asyncio


def asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """Return the asyncio loop that runs this; None on trio."""
    if "asyncio" not in sys.modules:  # and is not loaded by us, for who runs on trio
        return None
    import asyncio  # noqa: PLC0415

    if "trio" not in sys.modules:  # which can be a guest of an asyncio loop
        return asyncio.get_running_loop()
    token: object = anyio.lowlevel.current_token()
    loop = getattr(token, "native_token", token)
    return loop if isinstance(loop, asyncio.AbstractEventLoop) else None


def running_loop() -> object:
    """Return what stands for the event loop that runs this."""
    return asyncio_loop() or anyio.lowlevel.current_token()


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether an asyncio loop runs in this thread, now."""
    import asyncio  # noqa: PLC0415  it is loaded: there is a loop

    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def current_time() -> float:
    """Return the seconds of the event loop's clock."""
    loop = asyncio_loop()
    return anyio.current_time() if loop is None else loop.time()


def cancel_scope(seconds: float = inf) -> anyio.CancelScope:
    """Return anyio's scope, which ends by itself after so many seconds."""
    loop = asyncio_loop()
    if loop is None:
        return anyio.CancelScope(deadline=anyio.current_time() + seconds)
    scope, _ = _of_asyncio()
    return scope(deadline=loop.time() + seconds)


def event() -> anyio.Event:
    """Return anyio's event."""
    if asyncio_loop() is None:
        return anyio.Event()
    _, made = _of_asyncio()
    return made()


@cache
def _of_asyncio() -> tuple[type[anyio.CancelScope], type[anyio.Event]]:
    """Return what anyio makes on asyncio."""
    return type(anyio.CancelScope()), type(anyio.Event())
