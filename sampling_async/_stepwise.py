"""Reading a plain iterable with `async for`, without an async generator to be closed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")


class Stepwise(AsyncIterator[T]):
    """Lets an iterable be read with `async for`. Not a generator: left suspended, that would need closing."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)

    async def __anext__(self) -> T:
        for item in self._items:
            return item
        raise StopAsyncIteration
