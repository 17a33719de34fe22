"""Long work in steps: turns for the event loop, and dicts that do not take long to grow."""

from __future__ import annotations

import time
from typing import Any, Final

import anyio.lowlevel

# Seconds of work after which other tasks must get a turn.
_LONG: Final = 0.004

ENTRIES: Final = 2**16
"""The most entries of one dict. To grow a dict of a million entries takes 30 ms, and nothing else runs then."""

# The most entries of each of several dicts that fill at the same rate: they all grow at the same moment.
_ENTRIES_ALIKE: Final = 2**12

# Steps between two readings of the clock: reading it takes as long as a small step.
_EACH: Final = 16


def pieces(entries: int) -> int:
    """Return the number of dicts for a number of entries, so that no dict takes long to grow.

    An entry belongs to the dict whose number is the remainder of its key: `key % pieces(entries)`.
    """
    return 1 + entries // _ENTRIES_ALIKE


class LoopYielder:
    """Turns for the event loop every few milliseconds, during work that does not await anything else."""

    __slots__ = ("_since", "_steps")

    def __init__(self) -> None:
        self._steps = 0
        self._since = time.perf_counter()

    async def step(self, steps: int = 1) -> None:
        """Count steps of the work as done, and let the event loop go round if it is time.

        This is a good place to be cancelled: no step is half done.
        """
        self._steps += steps
        if self._steps < _EACH:
            return
        self._steps = 0
        if time.perf_counter() - self._since > _LONG:
            # The first round handles timers and the network. The second one runs the tasks that these woke.
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            self._since = time.perf_counter()


async def let_go(items: list[Any]) -> None:
    """Forget objects one by one. To release a whole inventory at once would block the event loop."""
    turns = LoopYielder()
    while items:
        items.pop()
        await turns.step(_EACH)
