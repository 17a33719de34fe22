"""From an input to jobs: cut as it is drawn, in sizes that suit a goal, and with nothing lost on the way.

What was taken from the input and not handed over can be told at each moment. So nothing that was taken lives
in a generator, which an exception ends, or in a local variable only: it is stored by the same step that takes
it, and steps that change two things at once are one assignment, inside which no signal handler runs.

What a journal knows of already is handed on as answered, without a request.
"""

from __future__ import annotations

from collections import ChainMap, Counter, deque
from collections.abc import AsyncIterable, Callable, Collection, Iterable, Iterator, Mapping
from inspect import isasyncgen
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, SupportsIndex, TypeAlias, TypeVar

import anyio
from attrs import evolve

from sampling_async._errors import InvalidRequestError, SamplingError
from sampling_async._job import Answered, Job, failed
from sampling_async._limit import Line
from sampling_async._protocol import CheckedIDs, Chunk, InviteRequest, cut, member_code_of, quota_id_of
from sampling_async._replies import BulkAnswer
from sampling_async._stepwise import ENTRIES, Turns, pieces

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from sampling_async._journal import Journal
    from sampling_async._outcomes import InviteOutcome

T = TypeVar("T")

AnyIterable: TypeAlias = Iterable[T] | AsyncIterable[T]
"""What can be given as input: iterable or async iterable."""

Goal: TypeAlias = Literal["throughput", "first"]
"""What a bulk is cut for: as few requests as can be, or the last answer as early as can be."""

_IN_PROPORTION: Final = Line(0.0, 1.0)  # what the contract says of the time, until times are known
_NEARLY: Final = 1.05
_MANY: Final = 4096
"""Quota IDs that are checked, counted or put in order in one go; of more, the event loop gets its turns."""

_RECALLED: Final = 1000
"""Quota IDs that a journal is asked about in one go."""


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


async def checked_request(member_code: str, quota_ids: Iterable[SupportsIndex]) -> InviteRequest:
    """Return a request, checked with turns for the event loop where there are many IDs.

    Raises:
        InvalidRequestError: The member code or a quota ID cannot be sent.
    """
    if isinstance(quota_ids, Collection) and len(quota_ids) <= _MANY:
        return InviteRequest(member_code, quota_ids)
    request = InviteRequest(member_code, () if isinstance(quota_ids, Iterable) else quota_ids)
    checked: list[int] = []
    turns, values = Turns(), iter(quota_ids)
    while some := InviteRequest(member_code, tuple(islice(values, _MANY))).quota_ids:
        checked += some
        await turns.step(_MANY)
    return InviteRequest(request.member_code, CheckedIDs(checked))


class Plan:
    """What is left to ask of a request, or to hand on as known.

    Args:
        whole: All of it, as a chunk of any size.
        size: Quota IDs a job.
        known: Where given, what is known of each.
    """

    def __init__(self, whole: Chunk, size: int, known: Mapping[int, InviteOutcome] | None = None) -> None:
        self._whole = whole
        self._size = size
        self._known = known
        self._at = 0
        self._items = iter(whole.places.items())
        self.drawn: Job | None = None

    def draw(self) -> Job | None:
        """Cut off the next job, or return None; until that is None again, `drawn` has it."""
        places = dict(islice(self._items, self._size))
        if not places:
            return None
        job = self._job(places)
        self.drawn, self._at = job, self._at + len(places)
        return job

    def _job(self, places: Mapping[int, int]) -> Job:
        chunk = Chunk(self._whole.member_code, places, self._whole.asked_before)
        if self._known is None:
            return Job(chunk)
        answers = {quota_id: self._known[quota_id] for quota_id in places}
        return Job(chunk, Answered(chunk, BulkAnswer(chunk.member_code, answers)))

    def left(self) -> Iterator[Job]:
        """Yield what was not handed over."""
        if self.drawn is not None:
            yield self.drawn
        rest = dict(islice(self._whole.places.items(), self._at, None))
        if rest:
            yield self._job(rest)


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
        """Close an async generator: left to the garbage collector, it would end in another task."""
        for source in (self._async_iterator, self._items):
            if isasyncgen(source):
                await source.aclose()


class MemberSource:
    """Cuts one member's quota IDs into jobs, as they come; IDs repeated within a chunk are sent once.

    Args:
        member_code: The member.
        quota_ids: What to ask.
        size: Quota IDs a chunk, at most.
        remaining: Where given, returns the seconds left of a deadline, after which nothing more is taken.
    """

    def __init__(
        self,
        member_code: str,
        quota_ids: AnyIterable[SupportsIndex],
        *,
        size: int,
        remaining: Callable[[], float] | None = None,
    ) -> None:
        self._member_code = member_code
        self._input = Input(quota_ids, remaining)
        self._size = size
        self._places: dict[int, int] = {}
        self._drawn: Job | None = None

    async def draw(self) -> Job | None:
        """Return the next job, or None after the last."""
        while await self._input.read():
            quota_id = quota_id_of(self._input.latest)
            times = self._places.get(quota_id, 0) + 1
            self._places[quota_id], self._input.latest = times, Input.NOTHING
            if len(self._places) == self._size:
                break
        if not self._places:
            return None
        job = Job(Chunk(self._member_code, self._places))
        self._drawn, self._places = job, {}
        return job

    def handed_over(self) -> None:
        """Learn that the job drawn last has another owner."""
        self._drawn = None

    def left(self) -> Iterator[Job]:
        """Yield what was taken from the input and not handed over."""
        if self._drawn is not None:
            yield self._drawn
        places = dict(self._places)
        if self._input.latest is not Input.NOTHING:
            try:
                quota_id = quota_id_of(self._input.latest)
            except InvalidRequestError:
                pass
            else:
                places[quota_id] = places.get(quota_id, 0) + 1
        if places:
            yield Job(Chunk(self._member_code, places))

    async def aclose(self) -> None:
        """Close the input."""
        await self._input.aclose()


class PanelSource:
    """Cuts requests into jobs as they are drawn; an ID repeated in a request is sent once.

    Args:
        requests: What to ask.
        size: Quota IDs a chunk, at most.
        size_of: Where given, returns the size to cut this many quota IDs of one request into, now.
        remaining: Where given, returns the seconds left of a deadline, after which nothing more is taken.
        journal: Where given, what it knows of is not asked again.
    """

    def __init__(
        self,
        requests: AnyIterable[InviteRequest],
        *,
        size: int,
        size_of: Callable[[int], int] | None = None,
        remaining: Callable[[], float] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._input = Input(requests, remaining)
        self._size = size
        self._size_of = size_of
        self._journal = journal
        self._recalled: list[dict[int, InviteOutcome | None]] = []  # of the request that was taken last
        self._plans: deque[Plan] = deque()

    async def draw(self) -> Job | None:
        """Return the next job, or None after the last."""
        while True:
            while self._plans:
                job = self._plans[0].draw()
                if job is None:
                    self._plans.popleft()
                    continue
                if self._journal is not None and job.answered is None:
                    self._journal.take_up(job.chunk)
                return job
            if not await self._input.read():
                return None
            await self._take(self._input.latest)

    async def _take(self, request: object) -> None:
        """Plan what to do about a request."""
        if not isinstance(request, InviteRequest):
            self._input.latest = Input.NOTHING
            raise InvalidRequestError(
                f"fan_out takes InviteRequest(member_code, quota_ids), not {type(request).__name__}"
            )
        plans: deque[Plan] = deque()
        self._recalled = []
        for places in await _counted(request.quota_ids):
            if self._journal is None:
                plans.append(Plan(Chunk(request.member_code, places), self._size_for(places)))
            else:
                plans += await self._planned(request.member_code, places, self._journal)
        self._plans, self._input.latest = plans, Input.NOTHING

    async def _planned(self, member_code: str, places: Mapping[int, int], journal: Journal) -> list[Plan]:
        """Divide what the journal knows, what it says to ask again, and the rest."""
        self._recalled.append({})
        answered: dict[int, int] = {}
        again: dict[int, int] = {}
        fresh: dict[int, int] = {}
        known: dict[int, InviteOutcome] = {}
        ids, turns = iter(places), Turns()
        while some := tuple(islice(ids, _RECALLED)):
            known |= await self._recall(member_code, some, journal)
            for quota_id in some:
                outcome = known.get(quota_id)
                asks_again = outcome is not None and journal.asks_again(outcome)
                kind = fresh if outcome is None else again if asks_again else answered
                kind[quota_id] = places[quota_id]
            await turns.step(_RECALLED)
        return [
            Plan(Chunk(member_code, answered), self._size, known),
            Plan(Chunk(member_code, again, asked_before=True), self._size_for(again)),
            Plan(Chunk(member_code, fresh), self._size_for(fresh)),
        ]

    async def _recall(
        self, member_code: str, quota_ids: tuple[int, ...], journal: Journal
    ) -> Mapping[int, InviteOutcome]:
        """Return what is known of some quota IDs, once nothing of this run is under way about them."""
        known: Mapping[int, InviteOutcome] = {}
        try:
            await journal.settled(member_code, quota_ids)
        finally:  # cancelled while it waits, it still finds out what to say of them
            known = await journal.recall(member_code, quota_ids)
            self._recalled[-1].update((quota_id, known.get(quota_id)) for quota_id in quota_ids)
        return known

    def _size_for(self, quota_ids: Collection[int]) -> int:
        return self._size if self._size_of is None or not quota_ids else self._size_of(len(quota_ids))

    def handed_over(self) -> None:
        """Learn that the job drawn last has another owner."""
        self._plans[0].drawn = None

    def left(self) -> Iterator[Job]:
        """Yield what was taken from the input and not handed over."""
        for plan in self._plans:
            yield from plan.left()
        request = self._input.latest
        if isinstance(request, InviteRequest):
            yield from self._left_of(request)

    def _left_of(self, request: InviteRequest) -> Iterator[Job]:
        """Yield what is known of a request that was taken and not planned."""
        whole = Chunk(request.member_code, Counter(request.quota_ids))
        if self._journal is None:
            yield Job(whole)
            return
        unread = SamplingError(
            "interrupted before the journal was read: a run before may have asked for this",
            endpoint="bulk_invite",
            delivery="unknown",
        )
        recalled = ChainMap(*self._recalled)
        for chunk in cut(whole, self._size):
            answers = {
                **Job(chunk).account().answer.answers,
                **{id_: outcome for id_, outcome in recalled.items() if outcome and id_ in chunk.places},
                **failed(_without(chunk, recalled), unread).answer.answers,
            }
            yield Job(chunk, Answered(chunk, BulkAnswer(chunk.member_code, answers)))

    async def aclose(self) -> None:
        """Close the input."""
        await self._input.aclose()


def _without(chunk: Chunk, quota_ids: Collection[int]) -> Chunk:
    return evolve(chunk, places={id_: times for id_, times in chunk.places.items() if id_ not in quota_ids})


async def _counted(quota_ids: tuple[int, ...]) -> Sequence[Mapping[int, int]]:
    """Return how often each quota ID is there, in the order asked; of very many, in several pieces."""
    if len(quota_ids) <= _MANY:
        return (Counter(quota_ids),)
    counted: list[dict[int, int]] = [{}]
    divisor, turns = pieces(len(quota_ids)), Turns()
    piece_of: list[dict[int, dict[int, int]]] = [{} for _ in range(divisor)]  # by the remainder of the ID
    for start in range(0, len(quota_ids), _MANY):
        if len(counted[-1]) > ENTRIES - _MANY:
            counted.append({})
        for quota_id in quota_ids[start : start + _MANY]:
            piece = piece_of[quota_id % divisor].setdefault(quota_id, counted[-1])
            piece[quota_id] = piece.get(quota_id, 0) + 1
        await turns.step(_MANY)
    return counted


def source_of(
    member_code: str,
    quota_ids: AnyIterable[SupportsIndex],
    *,
    size: int,
    size_of: Callable[[int], int] | None,
    remaining: Callable[[], float] | None,
) -> ChunkSource:
    """Return what cuts one member's quota IDs.

    A collection is answered whole, whatever the deadline, and a repeated ID in it is sent once. It is checked
    before anything is sent: at once, or, where it is large, when the first of it is drawn. What can be read
    only once is checked as it is drawn, repeated IDs are sent once within a chunk, and nothing more is taken
    of it after the deadline.

    Raises:
        InvalidRequestError: The member code, or an ID of a collection, cannot be sent.
    """
    if not isinstance(quota_ids, Collection):
        return MemberSource(member_code_of(member_code), quota_ids, size=size, remaining=remaining)
    if len(quota_ids) <= _MANY:
        return PanelSource([InviteRequest(member_code, quota_ids)], size=size, size_of=size_of)
    return PanelSource(_checked(member_code_of(member_code), quota_ids), size=size, size_of=size_of)


async def _checked(member_code: str, quota_ids: Iterable[SupportsIndex]) -> AsyncGenerator[InviteRequest, None]:
    yield await checked_request(member_code, quota_ids)


def readable(items: AnyIterable[T], name: str) -> AnyIterable[T]:
    """Return an input, if it can be one.

    Raises:
        InvalidRequestError: It is neither iterable nor async iterable.
    """
    if not isinstance(items, Iterable | AsyncIterable):
        raise InvalidRequestError(f"{name} is an iterable or async iterable, not {type(items).__name__}")
    return items


ChunkSource: TypeAlias = MemberSource | PanelSource
