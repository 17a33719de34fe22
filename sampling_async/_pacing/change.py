"""Wait for a change that another task makes, on asyncio and on trio. Depends on anyio."""

from __future__ import annotations

import anyio

from sampling_async._pacing.loops import asyncio_loop


class Change:
    """Something that changes many times. Tasks wait for the next change, and `notify` wakes all of them.

    There is an event only while a task waits, so `notify` costs next to nothing otherwise. A task that was
    woken must look again whether the change is the one that it needs, and must wait again if it is not.
    """

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    async def wait(self) -> None:
        """Wait for the next change."""
        self._event = self._event or anyio.Event()
        await self._event.wait()

    def notify(self) -> None:
        """Wake the tasks that wait now. Call it after the change, in the event loop of these tasks."""
        if self._event is not None:
            # Set before it is forgotten: a signal handler may raise in between, and an event that is forgotten
            # and not set would leave its tasks waiting.
            self._event.set()
            self._event = None


class Turn:
    """Something that happens once, and one task waits for it, on asyncio and on trio.

    On asyncio it is a bare future, which costs a third of an event. Only one task may wait: if it is cancelled,
    the future is too.
    """

    __slots__ = ("_event", "_future")

    def __init__(self) -> None:
        loop = asyncio_loop()
        self._future = None if loop is None else loop.create_future()
        self._event = anyio.Event() if loop is None else None

    async def wait(self) -> None:
        """Wait until it has happened."""
        if self._event is not None:
            await self._event.wait()
        else:
            assert self._future is not None
            await self._future

    def set(self) -> None:
        """Note that it has happened, and wake the task. It may be called again, and after a cancellation."""
        if self._event is not None:
            self._event.set()
        elif self._future is not None and not self._future.done():
            self._future.set_result(None)
