"""From an input to chunks: cut as it is drawn, in sizes that suit a goal, and with nothing lost on the way.

What a journal knows of already is handed on as answered, without a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterable, Callable, Collection, Iterable, Iterator, Mapping
from inspect import isasyncgen
from itertools import chain, islice, repeat
from math import ceil
from typing import TYPE_CHECKING, Any, Final, Literal, SupportsIndex, TypeAlias, TypeVar

import anyio
from attrs import frozen

from sampling_async._errors import InvalidRequestError
from sampling_async._limit import Line
from sampling_async._outcomes import made
from sampling_async._protocol import Chunk, InviteRequest, cut, member_code_of, plan_chunks, quota_id_of
from sampling_async._replies import BulkAnswer
from sampling_async._stepwise import Stepwise

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from sampling_async._journal import Journal
    from sampling_async._outcomes import InviteOutcome

T = TypeVar("T")

AnyIterable: TypeAlias = Iterable[T] | AsyncIterable[T]
"""What can be given as input: iterable or async iterable."""

Goal: TypeAlias = Literal["throughput", "first"]
"""What a bulk is cut for: as few requests as can be, or the last answer as early as can be."""

_IN_PROPORTION: Final = Line(0.0, 1.0)  # what the contract says of the time, until times are known
_NEARLY: Final = 1.05
_END: Final = object()
_AT_ONCE: Final = 1_000


def spread(quota_ids: int, *, slots: int, line: Line | None, largest: int) -> int:
    """Return the chunk size that brings the last answer early: of those within 5 % of the best, few requests.

    Args:
        quota_ids: How many IDs there are to ask, one at least.
        slots: How many requests can run at once.
        line: The seconds a request takes by its number of IDs, where known.
        largest: The largest chunk there may be.
    """
    line = line or _IN_PROPORTION
    sizes = range(1, min(largest, quota_ids) + 1)

    def seconds(size: int) -> float:
        return ceil(ceil(quota_ids / size) / slots) * line(size)

    best = min(map(seconds, sizes))
    largest = max(size for size in sizes if seconds(size) <= best * _NEARLY)
    return ceil(quota_ids / ceil(quota_ids / largest))  # as many requests, of even sizes


@frozen
class Answered:
    """A chunk, and what its IDs came to."""

    chunk: Chunk
    answer: BulkAnswer

    def outcomes(self) -> Iterator[InviteOutcome]:
        """Yield an outcome for each place, repeated IDs included."""
        answers, places = self.answer.answers, self.chunk.places.items()
        repeated = chain.from_iterable(repeat(answers[id_], times) for id_, times in places)
        return made(self.chunk.member_code, repeated)


Job: TypeAlias = Chunk | Answered


class ChunkSource:
    """Cuts an input into chunks as they are drawn, and knows what it has taken and not given.

    Args:
        size: Quota IDs a chunk, at most.
        size_of: Where given, returns the size to cut this many quota IDs of one request into, now.
        remaining: Where given, returns the seconds left of a deadline. After it, nothing more is taken of an
            input that can be read only once; a collection is answered whole.
        journal: Where given, what it knows of is not asked again.
    """

    def __init__(
        self,
        size: int,
        *,
        size_of: Callable[[int], int] | None = None,
        remaining: Callable[[], float] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._size = size
        self._size_of = size_of
        self._remaining = remaining
        self._journal = journal
        self._rest: Iterator[Job] = iter(())

    async def of_member(
        self, member_code: str, quota_ids: AnyIterable[SupportsIndex]
    ) -> AsyncGenerator[Iterator[Job], None]:
        """Yield the chunks of one member, each by itself; IDs repeated within a chunk are sent once."""
        places: dict[int, int] = {}
        # Visible to `rest` while it fills, so that no ID is lost if the input fails.
        self._rest = (Chunk(member_code, taken) for taken in (places,) if taken)
        source = _aiter(quota_ids)
        try:
            while (value := await self._next(source, quota_ids)) is not _END:
                quota_id = quota_id_of(value)
                places[quota_id] = places.get(quota_id, 0) + 1
                if len(places) == self._size:
                    chunk = Chunk(member_code, places.copy())
                    places.clear()
                    yield iter((chunk,))
        finally:
            await _close(source)
        if places:
            chunk = Chunk(member_code, places.copy())
            places.clear()
            yield iter((chunk,))

    async def of_panel(self, requests: AnyIterable[InviteRequest]) -> AsyncGenerator[Iterator[Job], None]:
        """Yield the chunks of many members, those of a request together; an ID repeated in it is sent once."""
        source = _aiter(requests)
        try:
            while (request := await self._next(source, requests)) is not _END:
                if not isinstance(request, InviteRequest):
                    raise InvalidRequestError(
                        f"fan_out takes InviteRequest(member_code, quota_ids), not {type(request).__name__}"
                    )
                self._rest = plan_chunks(request, self._size_for(request.quota_ids))
                if self._journal is not None:
                    await self._recall(request, self._journal)
                yield self._rest
        finally:
            await _close(source)

    async def _recall(self, request: InviteRequest, journal: Journal) -> None:
        """Plan a request by what is known of it, which is read also where the wait for more is cut off."""
        asked = iter(dict.fromkeys(request.quota_ids))
        known: dict[int, InviteOutcome] = {}
        try:
            await journal.settled(request.member_code, request.quota_ids)
        finally:
            while some := tuple(islice(asked, _AT_ONCE)):
                known |= await journal.recall(request.member_code, some)
            self._rest = self._planned(request, known, journal)

    async def _next(self, source: AsyncIterator[Any], items: object) -> Any:
        """Return the next of an input, or `_END`."""
        if self._remaining is None or isinstance(items, Collection):
            return await anext(source, _END)
        remaining = self._remaining()
        if remaining > 0:
            with anyio.move_on_after(remaining):
                return await anext(source, _END)
        return _END

    def _planned(
        self, request: InviteRequest, known: Mapping[int, InviteOutcome], journal: Journal
    ) -> Iterator[Job]:
        """Yield what the journal knows, and chunks of the rest; each chunk is of one kind."""
        places = Counter(request.quota_ids)
        again = {id_: times for id_, times in places.items() if id_ in known and journal.asks_again(known[id_])}
        fresh = {id_: times for id_, times in places.items() if id_ not in known}
        rest = {id_: times for id_, times in places.items() if id_ in known and id_ not in again}
        for chunk in cut(Chunk(request.member_code, rest), self._size):
            yield Answered(chunk, BulkAnswer(request.member_code, {id_: known[id_] for id_ in chunk.places}))
        for left, asked_before in ((again, True), (fresh, False)):
            whole = Chunk(request.member_code, left, asked_before)
            for chunk in cut(whole, self._size_for(left)):
                journal.take_up(chunk)
                yield chunk

    def _size_for(self, quota_ids: Collection[int]) -> int:
        return self._size if self._size_of is None or not quota_ids else self._size_of(len(set(quota_ids)))

    def rest(self) -> Iterator[Job]:
        """Return what was taken from the input and not yielded."""
        return self._rest

    def of(
        self, member_code: str, quota_ids: AnyIterable[SupportsIndex]
    ) -> AsyncGenerator[Iterator[Job], None]:
        """Yield the chunks of one member.

        A collection is checked whole before anything is sent, and a repeated ID in it is sent once. What can be
        read only once is checked as it is drawn, and repeated IDs are sent once within a chunk.

        Raises:
            InvalidRequestError: The member code, or an ID of a collection, cannot be sent.
        """
        if isinstance(quota_ids, Collection):
            return self.of_panel([InviteRequest(member_code, quota_ids)])
        return self.of_member(member_code_of(member_code), quota_ids)


def readable(items: AnyIterable[T], name: str) -> AnyIterable[T]:
    """Return an input, if it can be one.

    Raises:
        InvalidRequestError: It is neither iterable nor async iterable.
    """
    if not isinstance(items, Iterable | AsyncIterable):
        raise InvalidRequestError(f"{name} is an iterable or async iterable, not {type(items).__name__}")
    return items


def _aiter(items: AnyIterable[T]) -> AsyncIterator[T]:
    return aiter(items) if isinstance(items, AsyncIterable) else Stepwise(items)


async def _close(source: object) -> None:
    """Close an async generator: left to the garbage collector, it would end in another task."""
    if isasyncgen(source):
        await source.aclose()
