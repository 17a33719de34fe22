"""Read an async generator one item ahead of its consumer."""

from __future__ import annotations

from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Generic, TypeVar

from sampling_async._pacing.background import Background
from sampling_async._pacing.change import Change

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

Item = TypeVar("Item")


class ReadAhead(Background, Generic[Item]):
    """An async generator that runs in a separate task, one item ahead of its consumer.

    An exception of the generator is raised after the items before it, without an ExceptionGroup around it.
    """

    def __init__(self, items: AsyncGenerator[Item, None]) -> None:
        super().__init__()
        self._items = items
        self._ready: deque[Item] = deque()  # holds one item at most
        self._taken = Change()  # the consumer took that item

    @property
    def _has_more(self) -> bool:
        return bool(self._ready)

    async def next(self) -> Item | None:
        """Return the next item, or None after the last. No item is lost if this is cancelled."""
        self._must_be_inside()
        while not self._ready:
            if self._finished:
                self._end()
                return None
            await self._progress.wait()
        # Notify before the item is taken: a signal handler may raise in between, and the item must not be lost.
        self._taken.notify()
        return self._ready.popleft()

    async def _work(self) -> None:
        try:
            async with aclosing(self._items) as items:
                async for item in items:
                    self._ready.append(item)
                    self._progress.notify()
                    while self._ready:
                        await self._taken.wait()
        except BaseException as exc:  # noqa: BLE001  raised by _end
            self._keep(exc)
