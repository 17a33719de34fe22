"""Reading what users give: item by item, from iterables of both kinds, with turns for the event loop."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from inspect import isasyncgen
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

import anyio

from sampling_async._errors import InvalidRequestError
from sampling_async._stepwise import Turns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

T = TypeVar("T")

AnyIterable: TypeAlias = Iterable[T] | AsyncIterable[T]
"""What can be given as input: iterable or async iterable."""


class Input(Generic[T]):
    """Reads an input item by item, without keeping the event loop to itself.

    Args:
        items: Iterable or async iterable.
        remaining: Where given, returns the seconds left of a deadline, after which nothing more is read.

    Attributes:
        latest: The item that was read last; its user puts `NOTHING` there when it has it.
    """

    NOTHING: Final = object()

    def __init__(self, items: AnyIterable[T], remaining: Callable[[], float] | None) -> None:
        self.latest: Any = Input.NOTHING
        self._items = items
        self._remaining = remaining
        self._iterator: Iterator[T] | None = None
        self._async_iterator: AsyncIterator[T] | None = None
        self._turns = Turns()

    async def read(self) -> bool:
        """Read the next item into `latest`; False if there is none, or no time."""
        await self._turns.step()
        remaining = None if self._remaining is None else self._remaining()
        if remaining is not None and remaining <= 0:
            return False
        if self._iterator is not None:
            for self.latest in self._iterator:  # noqa: B020  one step takes it and stores it
                return True
            return False
        if self._async_iterator is None:
            self._open()
            return await self.read()
        await self._read_async(self._async_iterator, remaining)
        return self.latest is not Input.NOTHING

    def _open(self) -> None:
        if isinstance(self._items, AsyncIterable):
            self._async_iterator = aiter(self._items)
        else:
            self._iterator = iter(self._items)

    async def _read_async(self, source: AsyncIterator[T], remaining: float | None) -> None:
        if remaining is None:
            self.latest = await anext(source, Input.NOTHING)
            return
        with anyio.move_on_after(remaining):
            self.latest = await anext(source, Input.NOTHING)

    async def aclose(self) -> None:
        """Close it."""
        await _close(self._async_iterator)
        await _close(self._items)


async def _close(source: object) -> None:
    """Close an async generator: left to the garbage collector, it would end in another task."""
    if isasyncgen(source):
        await source.aclose()


def readable(items: AnyIterable[T], name: str) -> AnyIterable[T]:
    """Return an input, if it can be one.

    Raises:
        InvalidRequestError: It is neither iterable nor async iterable.
    """
    if not isinstance(items, Iterable | AsyncIterable):
        raise InvalidRequestError(f"{name} is an iterable or async iterable, not {type(items).__name__}")
    return items
