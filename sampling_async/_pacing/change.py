"""Wait for a change that another task makes, on asyncio and on trio. Depends on anyio."""

from __future__ import annotations

import anyio


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
