"""Streams of the async client as iterators, and input that is read in the thread of its owner."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeGuard, TypeVar

from sampling_async._bulk.inputs import PromptItems
from sampling_async._contract.errors import ClientClosedError

if TYPE_CHECKING:
    from types import TracebackType

    from sampling_async._bulk.stream import OutcomeStream as AsyncOutcomeStream
    from sampling_async._bulk.stream import Progress
    from sampling_async._calls.recontact import RecontactStream as AsyncRecontactStream
    from sampling_async._contract.checks import Text
    from sampling_async._protocol.results import InviteOutcome
    from sampling_async.sync._loop import LoopThread

T = TypeVar("T")
Item_co = TypeVar("Item_co", covariant=True)

_MOST_REQUESTS: Final = 64
"""The most finished requests that are taken from the event loop at once."""

_QUICK: Final = 0.002  # seconds: while reading takes less, twice as many items are read at once


def read_whole(given: object) -> object:
    """Return an argument, or a tuple of its items if it is an iterator: it may belong to this thread."""
    return tuple(given) if _is_read_once(given) else given


def pulled(given: object, most: int) -> object:
    """Return an argument, or `PulledItems` if it is an iterator."""
    return PulledItems(given, most) if _is_read_once(given) else given


def _is_read_once(given: object) -> TypeGuard[Iterable[Any]]:
    return isinstance(given, Iterable) and not isinstance(given, Collection | AsyncIterable)


class PulledItems(PromptItems[T]):
    """The items of an iterator, read in the thread that works with the stream, and taken in the event loop.

    An iterator may belong to its thread, as a cursor of SQLite does, and may call the client itself. What was
    read and not taken is in the `left_over` of the stream.

    Args:
        items: The iterator.
        most: The most items to read at once.
    """

    def __init__(self, items: Iterable[T], most: int) -> None:
        self._items = items
        self._most = most
        # Of the thread that reads.
        self._iterator: Iterator[T] | None = None
        self._at_once = 1
        self._fresh: deque[T] = deque()
        self._has_ended = False
        self._error: Exception | None = None
        # Of the event loop.
        self._arrived: deque[T] = deque()
        self._is_over = False
        self._waiting: asyncio.Future[None] | None = None  # for items
        self._wish: asyncio.Future[None] | None = None  # done when items are needed

    def read(self) -> None:
        """Read some items. An exception of the iterator is raised by the stream, after the items before it."""
        began = time.perf_counter()
        try:
            self._iterator = self._iterator or iter(self._items)
            before = len(self._fresh)
            # In C, so that no signal handler can raise while an item is in neither of the two.
            self._fresh.extend(islice(self._iterator, self._at_once))
            self._has_ended = len(self._fresh) - before < self._at_once
        except Exception as exc:  # noqa: BLE001  raised by the stream
            self._error, self._has_ended = exc, True
        is_quick = time.perf_counter() - began < _QUICK
        self._at_once = min(self._most, 2 * self._at_once) if is_quick else max(1, self._at_once // 2)

    def read_ahead(self) -> Iterable[T]:
        """Return the items that were read, and not taken."""
        return [*self._arrived, *self._fresh]

    def next_wish(self) -> asyncio.Future[None]:
        """Take what was read. Return a future that is done when more is needed."""
        self._arrived.extend(self._fresh)
        self._fresh.clear()
        self._is_over = self._has_ended
        self._wish = asyncio.get_running_loop().create_future()
        if self._waiting is not None and not self._waiting.done():
            is_served = self._arrived or self._is_over
            (self._waiting if is_served else self._wish).set_result(None)
        return self._wish

    def __next__(self) -> T:
        if not self._arrived:
            raise StopIteration
        return self._arrived.popleft()

    async def __anext__(self) -> T:
        while not self._arrived:
            if self._is_over:
                error, self._error = self._error, None
                raise error or StopAsyncIteration
            self._waiting = asyncio.get_running_loop().create_future()
            if self._wish is not None and not self._wish.done():
                self._wish.set_result(None)
            await self._waiting
        return self._arrived.popleft()


class AsyncStream(Protocol[Item_co]):
    """A stream of the async client."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> object: ...

    def next_now(self) -> Item_co | None:
        """Return an item, or None if there is none now."""


class BlockingStream(Iterator[Item_co]):
    """A stream of the async client as a context manager and, inside it, an iterator.

    One call into the event loop brings all items that have come. An item that was brought, but not returned to
    you yet, counts as not received.
    """

    def __init__(
        self,
        loop: LoopThread,
        stream: AsyncStream[Item_co],
        fill: Callable[[], Awaitable[bool]],
        items: PulledItems[Any] | None = None,
    ) -> None:
        self._loop = loop
        self._stream = stream
        self._fill = fill
        self._input = items
        self._filling: asyncio.Future[bool] | None = None
        self._lock = threading.RLock()  # several threads may read one stream
        # Taken from the stream, but a signal handler raised before they were returned.
        self._interrupted: list[Item_co] = []
        self._received: Item_co | None = None  # the latest
        self._is_inside = self._is_closed = False  # closed with the client

    def __enter__(self) -> Self:
        self._loop.call(self._enter)
        return self

    async def _enter(self) -> None:
        await self._stream.__aenter__()
        self._is_inside, self._loop.open[self] = True, self._close

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_inside:
            self._loop.leave(partial(self._leave, exc_type, exc, traceback))

    async def _close(self) -> None:
        self._is_closed = True
        await self._leave()

    async def _leave(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        try:
            await self._stream.__aexit__(exc_type, exc, traceback)
        finally:
            self._is_inside = False
            self._loop.open.pop(self, None)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item_co:
        item, before = None, self._received
        try:
            with self._lock:
                if self._interrupted:
                    item = self._interrupted[0]
                    del self._interrupted[0]
                while item is None and (item := self._stream.next_now()) is None:
                    # At the end, once more: a call that a second signal left alone may have brought some.
                    if not self._bring() and (item := self._stream.next_now()) is None:
                        raise StopIteration  # noqa: TRY301  as iterators end
                self._received = item
                return item
        except BaseException:
            self._received = before
            if item is not None and item not in self._interrupted:
                self._interrupted.append(item)
            raise

    def _bring(self) -> bool:
        """Wait for items or, if more input is needed first, read some of it; return False at the end."""
        if not self._is_inside:
            if self._is_closed:
                raise ClientClosedError("the client was closed during the block", delivery="unknown")
            raise RuntimeError("a stream gives items inside its block: with client.fan_out(...) as outcomes")
        more = self._loop.call(self._step)
        if more is None and self._input is not None:
            self._input.read()
        return more is not False

    async def _step(self) -> bool | None:
        """Wait for items and return True, or return False at the end, or None if more input is needed."""
        if self._input is None:
            return await self._fill()
        # If this is cancelled, the task goes on, and what it brings is there for the next call.
        if self._filling is None:
            self._filling = asyncio.ensure_future(self._fill())
            # Marks an exception as seen, or asyncio logs it: nobody may ask for it.
            self._filling.add_done_callback(lambda task: task.cancelled() or task.exception())
        filling = self._filling
        waited: set[asyncio.Future[Any]] = {filling, self._input.next_wish()}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not filling.done():
            return None
        if self._filling is filling:  # or a step after this one, whose wait was ended twice, has got it too
            self._filling = None
        return filling.result()


class OutcomeStream(BlockingStream["InviteOutcome"]):
    """The outcomes of a fan-out, as they finish: a context manager and, inside it, an iterator.

    It behaves as `sampling_async.OutcomeStream` does. An iterator that is the input is read in the thread that
    takes the outcomes, some items ahead of what is sent. If you leave the block early, or Ctrl-C does, these
    items are in `left_over` too.
    """

    def __init__(self, loop: LoopThread, stream: AsyncOutcomeStream, items: PulledItems[Any] | None) -> None:
        super().__init__(loop, stream, partial(stream.fill, most=_MOST_REQUESTS), items)
        self._outcomes = stream

    @property
    def progress(self) -> Progress:
        """The progress so far, computed at each access; any thread may ask."""
        return self._outcomes.progress

    @property
    def is_entered(self) -> bool:
        """Whether the block was entered. A stream can be entered once."""
        return self._outcomes.is_entered

    @property
    def left_over(self) -> tuple[InviteOutcome, ...]:
        """After the block: the outcomes of all quota IDs taken from the input that you have not received."""
        return *self._interrupted, *self._outcomes.left_over

    @property
    def unrequested(self) -> deque[InviteOutcome]:
        """The latest outcomes for quota IDs that were not requested, at most 10,000."""
        return self._outcomes.unrequested

    @property
    def paused(self) -> bool:
        """Whether sending is paused, because of an outage of the service; see `OutagePolicy`."""
        return self._outcomes.paused

    def outcome_of(self, member_code: Text, quota_id: int) -> InviteOutcome | None:
        """Return the outcome of a pair that this fan-out has requested, as known now, or None."""
        return self._outcomes.outcome_of(member_code, quota_id)


class RecontactStream(BlockingStream[str]):
    """Member codes of a recontact quota, read one page ahead: see `stream_recontact_members`."""

    def __init__(self, loop: LoopThread, stream: AsyncRecontactStream) -> None:
        super().__init__(loop, stream, stream.fill)
        self._after = stream.last_taken

    @property
    def last_taken(self) -> str | None:
        """The last member code that you received, to resume with `after=`; before that, the given `after`."""
        return self._received or self._after
