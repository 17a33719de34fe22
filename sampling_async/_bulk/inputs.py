"""Read the user's input item by item, from iterables and async iterables, with turns for the event loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from inspect import isasyncgen
from math import inf
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar

import anyio

from sampling_async._contract.errors import InvalidRequestError
from sampling_async._pacing.steps import LoopYielder

T = TypeVar("T")

AnyIterable: TypeAlias = Iterable[T] | AsyncIterable[T]
"""The accepted types of input: iterable or async iterable."""


class PromptItems(AsyncIterator[T]):
    """An async iterator that has most of its items without a wait, so that a task can take them in passing."""

    def __iter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> T:
        """Return the next item; raise StopIteration if that takes a wait."""

    def read_ahead(self) -> Iterable[T]:
        """Return the items of the user's input that were read, and not returned yet."""
        return ()


class Input(Generic[T]):
    """A reader that takes an input item by item and gives the event loop regular turns.

    Args:
        items: Iterable or async iterable.
        remaining: Returns the seconds left of a deadline, after which nothing more is read. None: no deadline.

    Attributes:
        latest: The item that was read last. The caller sets it to `NOTHING` in the same statement that stores
            the item elsewhere.
        is_over: Whether all items were read; not after a deadline.
    """

    NOTHING: Final = object()

    def __init__(self, items: AnyIterable[T], remaining: Callable[[], float] | None) -> None:
        self.latest: Any = Input.NOTHING
        self.is_over = False
        self._items = items
        self._remaining = remaining
        self._async_iterator: AsyncIterator[T] | None = None
        self._prompt: Iterator[T] | None = None  # for the items that need no wait
        self._turns = LoopYielder()
        self._raised: Exception | None = None  # by the input, when it was read ahead

    async def read(self) -> bool:
        """Read the next item into `latest`. Return False at the end of the input, or after the deadline."""
        await self._turns.step()
        self._raise()
        remaining = None if self._remaining is None else self._remaining()
        if remaining is not None and remaining <= 0:
            return False
        if self._prompt is None and self._async_iterator is None:
            self._open()
        if self._async_iterator is not None:
            is_in_time = await self._read_async(self._async_iterator, remaining)
        else:
            assert self._prompt is not None
            is_in_time = True
            self._read_next(self._prompt)
        self.is_over = is_in_time and self.latest is Input.NOTHING
        return self.latest is not Input.NOTHING

    def read_now(self) -> bool:
        """Read the next item into `latest`, if no wait is needed for it. Return False if there is none.

        The caller gives the event loop its turns: nobody may read many items by this alone.
        """
        self._raise()
        if self._prompt is None or (self._remaining is not None and self._remaining() <= 0):
            return False
        return self._read_next(self._prompt)

    def read_ahead(self) -> bool:
        """Do the same. An error of the input is raised by the next read: what was read before comes first."""
        try:
            return self.read_now()
        except Exception as exc:  # noqa: BLE001  of the user's iterator
            self._raised = exc
            return False

    def unstored(self) -> list[Any]:
        """Return what was taken from the user's input, and is stored nowhere else."""
        latest = [] if self.latest is Input.NOTHING else [self.latest]
        return [*latest, *self._items.read_ahead()] if isinstance(self._items, PromptItems) else latest

    def _raise(self) -> None:
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def _read_next(self, iterator: Iterator[T]) -> bool:
        # The loop takes an item and stores it in one step, in which no signal handler can run. With
        # `self.latest = next(...)` an item could be lost between the call and the assignment.
        try:
            for self.latest in iterator:
                return True
        except StopAsyncIteration as exc:  # it would end the outcomes as if all was well
            raise RuntimeError("the input raised StopAsyncIteration") from exc
        return False

    def _open(self) -> None:
        if isinstance(self._items, AsyncIterable):
            self._async_iterator = aiter(self._items)
            self._prompt = self._items if isinstance(self._items, PromptItems) else None
        else:
            self._prompt = iter(self._items)

    async def _read_async(self, source: AsyncIterator[T], remaining: float | None) -> bool:
        """Read the next item, if there is one; return False if that takes too long."""
        if remaining is None or remaining == inf:
            self.latest = await anext(source, Input.NOTHING)
            return True
        with anyio.move_on_after(remaining) as scope:
            self.latest = await anext(source, Input.NOTHING)
        return not scope.cancelled_caught

    async def aclose(self) -> None:
        """Close the input, if it is an async generator."""
        await _close(self._async_iterator)
        await _close(self._items)


async def _close(source: object) -> None:
    """Close an async generator. The garbage collector would run its last steps in another task."""
    if isasyncgen(source):
        await source.aclose()


def readable(items: AnyIterable[T], name: str) -> AnyIterable[T]:
    """Return an input unchanged, after a check of its type.

    Raises:
        InvalidRequestError: The input is neither iterable nor async iterable.
    """
    if not isinstance(items, Iterable | AsyncIterable):
        raise InvalidRequestError(
            f"{name} must be an iterable or an async iterable, not {type(items).__name__}"
        )
    return items
