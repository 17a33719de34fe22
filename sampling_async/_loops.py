"""Which event loop runs this, and what time it has: asked so often that the way through anyio is too long."""

from __future__ import annotations

import sys
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


def current_time() -> float:
    """Return the seconds of the event loop's clock."""
    loop = asyncio_loop()
    return anyio.current_time() if loop is None else loop.time()
