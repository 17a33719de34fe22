"""Turns for the event loop: reading a plain iterable with `async for`, and long work done in steps."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

import anyio.lowlevel

T = TypeVar("T")

_LONG: Final = 0.004
"""Seconds of work after which others must have their turn."""

ENTRIES: Final = 2**16
"""What one dict may hold: of a million it takes 30 ms to grow, in which nothing else can run."""

_ENTRIES_ALIKE: Final = 2**12
"""What each of several dicts may hold that fill up at the same pace, for they all grow at the same moment."""

_EACH: Final = 16
"""How many steps go by between two looks at the clock, which takes as long as a small step."""


def pieces(entries: int) -> int:
    """Return into how many dicts to divide so many entries by a remainder, so that growing takes no time."""
    return 1 + entries // _ENTRIES_ALIKE


class Stepwise(AsyncIterator[T]):
    """Lets an iterable be read with `async for`. Not a generator: left suspended, that would need closing."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)

    async def __anext__(self) -> T:
        for item in self._items:
            return item
        raise StopAsyncIteration


class Turns:
    """Lets the event loop go round now and then during work that awaits nothing else: a few ms at a time."""

    __slots__ = ("_since", "_steps")

    def __init__(self) -> None:
        self._steps = 0
        self._since = time.perf_counter()

    async def step(self, steps: int = 1) -> None:
        """Say that so many steps of the work are done. Cancelled here, nothing is under way."""
        self._steps += steps
        if self._steps < _EACH:
            return
        self._steps = 0
        if time.perf_counter() - self._since > _LONG:
            await anyio.lowlevel.checkpoint()  # timers, and what came over the network
            await anyio.lowlevel.checkpoint()  # and the tasks that were woken by it
            self._since = time.perf_counter()
