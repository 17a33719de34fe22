"""From an input to jobs: cut as it is drawn, in sizes that suit a goal, and with nothing lost on the way.

What was taken from the input and not handed over can be told at each moment. So nothing that was taken lives
in a generator, which an exception ends, or in a local variable only: it is stored by the same step that takes
it, and steps that change two things at once are one assignment, inside which no signal handler runs.

What a journal knows of already is handed on as answered, without a request.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, islice
from math import ceil
from typing import TYPE_CHECKING, Final, Literal, Self, SupportsIndex, TypeAlias, TypeVar

from attrs import frozen

from sampling_async._errors import InvalidRequestError, SamplingError
from sampling_async._inputs import AnyIterable, Input
from sampling_async._job import Answered, Job, failed
from sampling_async._limit import Line
from sampling_async._outcomes import InviteOutcome
from sampling_async._protocol import Chunk, InviteRequest, member_code_of, quota_id_of, request_of
from sampling_async._replies import BulkAnswer
from sampling_async._stepwise import ENTRIES, Turns, pieces

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from sampling_async._journal_run import JournalRun

T = TypeVar("T")

Goal: TypeAlias = Literal["throughput", "first"]
"""What a bulk is cut for: as few requests as can be, or the last answer as early as can be."""

_IN_PROPORTION: Final = Line(0.0, 1.0)  # what the contract says of the time, until times are known
_NEARLY: Final = 1.05
_MANY: Final = 4096
"""Quota IDs that are checked, counted or put in order in one go; of more, the event loop gets its turns."""

_FEW: Final = 128
"""The same, where each of them may have another dict grow."""

_COUNTED: Final = 65_536
"""Requests whose quota IDs are counted beforehand, which takes some milliseconds."""

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
    whole = tuple(checked)
    await turns.step(_MANY)
    checked.clear()
    return request_of(request.member_code, whole)


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
        journal: JournalRun | None = None,
    ) -> None:
        self._input = Input(requests, remaining)
        self._size = size
        self._size_of = size_of
        self._journal = journal
        self._recalling: _Recalling | None = None
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
            if self._recalling is not None:
                await self._recall(self._recalling)
            elif await self._input.read():
                await self._take(self._input.latest)
            else:
                return None

    async def _take(self, request: object) -> None:
        """Plan what to do about a request."""
        if not isinstance(request, InviteRequest):
            self._input.latest = Input.NOTHING
            raise InvalidRequestError(
                f"fan_out takes InviteRequest(member_code, quota_ids), not {type(request).__name__}"
            )
        counted = await _counted(request.quota_ids)
        if self._journal is None:
            plans = deque(self._plan(Chunk(request.member_code, places)) for places in counted)
            self._plans, self._input.latest = plans, Input.NOTHING
        else:
            recalling = _Recalling(request.member_code, counted, self._journal)
            self._recalling, self._input.latest = recalling, Input.NOTHING

    async def _recall(self, recalling: _Recalling) -> None:
        """Plan what to do about the next part of a request, by what the journal knows of it."""
        part = await recalling.next()
        if part is None:
            self._recalling = None
            return
        plans = deque(
            (Plan(part.answered, self._size, part.known), self._plan(part.again), self._plan(part.fresh))
        )
        self._plans, recalling.part = plans, None

    def _plan(self, whole: Chunk) -> Plan:
        size_of = self._size_of
        return Plan(whole, self._size if size_of is None or not whole.places else size_of(len(whole.places)))

    def handed_over(self) -> None:
        """Learn that the job drawn last has another owner."""
        self._plans[0].drawn = None

    def left(self) -> Iterator[Job]:
        """Yield what was taken from the input and not handed over."""
        for plan in self._plans:
            yield from plan.left()
        if self._recalling is not None:
            yield from self._recalling.left()
        request = self._input.latest
        if isinstance(request, InviteRequest):
            whole = Chunk(request.member_code, Counter(request.quota_ids))
            yield Job(whole, None if self._journal is None else _unread(whole))

    async def aclose(self) -> None:
        """Close the input."""
        await self._input.aclose()


class _Recalling:
    """A request on its way through the journal, part by part.

    Args:
        member_code: The member.
        counted: Its quota IDs, each with the number of places it was asked in.
        journal: The journal.

    Attributes:
        part: What the journal knew of the part that was read last, until it is planned.
    """

    def __init__(self, member_code: str, counted: Sequence[Mapping[int, int]], journal: JournalRun) -> None:
        self._member_code = member_code
        self._counted = counted
        self._items = self._places()
        self._read = 0
        self._journal = journal
        self.part: _Part | None = None

    def _places(self) -> Iterator[tuple[int, int]]:
        return chain.from_iterable(places.items() for places in self._counted)

    async def next(self) -> _Part | None:
        """Read on, once nothing of this run is under way about the next quota IDs; None after the last."""
        places = dict(islice(self._items, _RECALLED))
        if not places:
            return None
        try:
            await self._journal.settled(self._member_code, places)
        finally:  # cancelled while it waits, it still finds out what to say of them
            known = await self._journal.recall(self._member_code, places)
            again = {id_ for id_, outcome in known.items() if self._journal.asks_again(outcome)}
            part = _Part.of(self._member_code, places, known, again)
            self.part, self._read = part, self._read + len(places)
        return part

    def left(self) -> Iterator[Job]:
        """Yield what was not planned; of what was not read, the journal may know more."""
        if self.part is not None:
            yield from Plan(self.part.answered, _RECALLED, self.part.known).left()
            yield Job(self.part.again)
            yield Job(self.part.fresh)
        rest = Chunk(self._member_code, dict(islice(self._places(), self._read, None)))
        yield Job(rest, _unread(rest))


@frozen
class _Part:
    """Quota IDs of a request, by what a journal knows of them.

    Attributes:
        answered: Those that need not be asked.
        again: Those that are to be asked again, though they may have an invite.
        fresh: Those that nothing is known of.
        known: What is known.
    """

    answered: Chunk
    again: Chunk
    fresh: Chunk
    known: Mapping[int, InviteOutcome]

    @classmethod
    def of(
        cls,
        member_code: str,
        places: Mapping[int, int],
        known: Mapping[int, InviteOutcome],
        again: AbstractSet[int],
    ) -> Self:
        """Divide quota IDs."""
        kinds: tuple[dict[int, int], ...] = ({}, {}, {})
        for quota_id, times in places.items():
            kind = 2 if quota_id not in known else 1 if quota_id in again else 0
            kinds[kind][quota_id] = times
        answered, asked_again, fresh = kinds
        return cls(
            Chunk(member_code, answered),
            Chunk(member_code, asked_again, asked_before=True),
            Chunk(member_code, fresh),
            known,
        )


def _unread(chunk: Chunk) -> Answered:
    """Return what is known of IDs that the journal was not asked about."""
    error = SamplingError(
        "interrupted before the journal was read: a run before may have asked for this",
        endpoint="bulk_invite",
        delivery="unknown",
    )
    return failed(chunk, error)


async def _counted(quota_ids: tuple[int, ...]) -> Sequence[Mapping[int, int]]:
    """Return how often each quota ID is there, in the order asked; of very many, in several pieces."""
    if len(quota_ids) <= _MANY:
        return (Counter(quota_ids),)
    counted: list[dict[int, int]] = [{}]
    divisor, turns = pieces(len(quota_ids)), Turns()
    piece_of: list[dict[int, dict[int, int]]] = [{} for _ in range(divisor)]  # by the remainder of the ID
    for start in range(0, len(quota_ids), _FEW):
        if len(counted[-1]) > ENTRIES - _FEW:
            counted.append({})
        for quota_id in quota_ids[start : start + _FEW]:
            piece = piece_of[quota_id % divisor].setdefault(quota_id, counted[-1])
            piece[quota_id] = piece.get(quota_id, 0) + 1
        await turns.step(_FEW)
    for pieces_of_some in piece_of:  # to let go of a million entries takes its time, too
        pieces_of_some.clear()
        await turns.step(_MANY)
    return counted


def total_of(requests: object) -> int | None:
    """Return how many quota IDs requests have in all, where they lie there and are not too many."""
    if not isinstance(requests, list | tuple | set | frozenset) or len(requests) > _COUNTED:
        return None
    if not all(isinstance(request, InviteRequest) for request in requests):
        return None  # which is told when the first that is none is drawn
    return sum(len(request.quota_ids) for request in requests)


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


ChunkSource: TypeAlias = MemberSource | PanelSource
