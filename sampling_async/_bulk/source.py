"""Turn the input into jobs, on demand: each quota ID of a request once, those in the journal as answered.

At any moment, the quota IDs that were taken from the input and not handed over can be listed (`left`). For this
the state is never in a generator, which an exception ends, nor only in a local variable. The statement that
takes an item also stores it, and a change of two things is one assignment, in which no signal handler runs.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Final, Self, SupportsIndex, TypeAlias

from attrs import frozen

from sampling_async._bulk.asked import Repetition
from sampling_async._bulk.inputs import AnyIterable, Input
from sampling_async._bulk.job import Answered, Job, failed
from sampling_async._bulk.options import PendingChunks
from sampling_async._contract.errors import InvalidRequestError, SamplingError
from sampling_async._pacing.steps import ENTRIES, LoopYielder, pieces
from sampling_async._protocol.requests import Chunk, InviteRequest, member_code_of, quota_id_of, request_of
from sampling_async._protocol.results import InviteOutcome

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from collections.abc import Set as AbstractSet

    from sampling_async._bulk.asked import RequestedPairs
    from sampling_async._contract.checks import Text
    from sampling_async._journal.run import Replay

_COUNTED_AT_ONCE: Final = 4096
"""How many quota IDs are counted before the event loop gets a turn."""

_FEW: Final = 128  # the same, for work in which each quota ID may make a different dict grow

_DISTINCT_AT_ONCE: Final = 2**17
"""The most quota IDs that are compared with each other in one step: a set of 100,000 takes 5 ms, in C."""


def counted(request: InviteRequest) -> Sequence[Chunk] | None:
    """Return the distinct quota IDs of a request, in the order given, each with its number of places.

    Return None for so many IDs that they take too long to count in one step.
    """
    code, quota_ids = request.member_code, request.quota_ids
    # Nearly always no ID is repeated, and nothing is copied.
    if len(quota_ids) <= _DISTINCT_AT_ONCE and len(set(quota_ids)) == len(quota_ids):
        return (Chunk(code, quota_ids),)
    return (Chunk.of(code, Counter(quota_ids)),) if len(quota_ids) <= ENTRIES else None


async def counted_in_steps(request: InviteRequest) -> Sequence[Chunk]:
    """Do the same for a large request, in several chunks and with turns for the event loop."""
    code, quota_ids = request.member_code, request.quota_ids
    # A dict of a million entries blocks the event loop when it grows. So the counts are in several dicts of at
    # most `ENTRIES`, in order. `piece_of` finds the dict of a repeated ID. It is divided by the remainder of
    # the ID, so that each of its dicts is small as well.
    parts: list[dict[int, int]] = [{}]
    divisor, turns = pieces(len(quota_ids)), LoopYielder()
    piece_of: list[dict[int, dict[int, int]]] = [{} for _ in range(divisor)]
    for start in range(0, len(quota_ids), _FEW):
        if len(parts[-1]) > ENTRIES - _FEW:
            parts.append({})
        for quota_id in quota_ids[start : start + _FEW]:
            piece = piece_of[quota_id % divisor].setdefault(quota_id, parts[-1])
            piece[quota_id] = piece.get(quota_id, 0) + 1
        await turns.step(_FEW)
    # Freeing a million entries takes time too, so it is done in steps.
    for pieces_of_some in piece_of:
        pieces_of_some.clear()
        await turns.step(_COUNTED_AT_ONCE)
    chunks: list[Chunk] = []
    for places in parts:
        chunks.append(Chunk.of(code, places))
        places.clear()
        await turns.step(_COUNTED_AT_ONCE)
    return chunks


_RECALLED: Final = 1000
"""How many quota IDs are looked up in the journal at once."""
_LONGEST_READ: Final = 0.002  # seconds in which more requests are read to be looked up together


class Recalling:
    """Quota IDs of one large request, or of several members, that are looked up in the journal part by part.

    Attributes:
        counted: The quota IDs. More may be added until the first part is looked up.
        parts: What was looked up last, until plans for it are made.
    """

    def __init__(self, counted: Sequence[Chunk], replay: Replay) -> None:
        self.counted = counted
        self.parts: Sequence[JournalSplit] = ()
        self._items = self._places()
        self._read = 0
        self._replay = replay

    def _places(self) -> Iterator[tuple[str, int, int]]:
        for whole in self.counted:
            for id_ in whole.quota_ids:
                yield whole.member_code, id_, whole.repeated.get(id_, 1)

    async def next(self) -> Sequence[JournalSplit]:
        """Look up the next part, after all chunks in flight about the same quotas. Return none at the end."""
        some = _by_member(islice(self._items, _RECALLED))
        try:
            for member_code, places in some.items():
                await self._replay.settled(member_code, places)
        finally:
            # This also runs after a cancellation: `left` must report correct outcomes of these quota IDs.
            known = await self._replay.recall(some) if some else {}
            parts = [self._split(code, places, known[code]) for code, places in some.items()]
            self.parts, self._read = parts, self._read + sum(map(len, some.values()))
        return parts

    def _split(
        self, member_code: str, places: Mapping[int, int], known: Mapping[int, InviteOutcome]
    ) -> JournalSplit:
        again = {id_ for id_, outcome in known.items() if self._replay.asks_again(outcome)}
        return JournalSplit.of(member_code, places, known, again)

    def left(self) -> Iterator[Job]:
        """Yield jobs with the quota IDs that are in no plan. Those not looked up yet are `unknown`."""
        for part in self.parts:
            yield from PendingChunks(part.answered, _RECALLED, part.known).left()
            yield Job(part.again)
            yield Job(part.fresh)
        for member_code, places in _by_member(islice(self._places(), self._read, None)).items():
            rest = Chunk.of(member_code, places)
            yield Job(rest, not_looked_up(rest))


def _by_member(places: Iterable[tuple[str, int, int]]) -> dict[str, dict[int, int]]:
    """Return the quota IDs of each member, with their numbers of places."""
    members: dict[str, dict[int, int]] = {}
    for code, quota_id, times in places:
        members.setdefault(code, {})[quota_id] = times
    return members


@frozen
class JournalSplit:
    """Quota IDs of a request, divided by what the journal says about them.

    Attributes:
        answered: IDs with an outcome that is final; they are not sent.
        again: IDs to send again although an invite may exist.
        fresh: IDs that are not in the journal.
        known: The outcomes in the journal, by quota ID.
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
        """Divide quota IDs into the three kinds."""
        if not known:  # as mostly
            return cls(Chunk(member_code, ()), Chunk(member_code, ()), Chunk.of(member_code, places), known)
        kinds: tuple[dict[int, int], ...] = ({}, {}, {})
        for quota_id, times in places.items():
            kind = 2 if quota_id not in known else 1 if quota_id in again else 0
            kinds[kind][quota_id] = times
        answered, asked_again, fresh = kinds
        return cls(
            Chunk.of(member_code, answered),
            Chunk.of(member_code, asked_again, asked_before=True),
            Chunk.of(member_code, fresh),
            known,
        )


def not_looked_up(chunk: Chunk) -> Answered:
    """Return `unknown` for IDs that were not looked up in the journal: an earlier run may have sent them."""
    error = SamplingError(
        "interrupted before the journal was read: an earlier run may have sent this",
        endpoint="bulk_invite",
        delivery="unknown",
    )
    return failed(chunk, error)


_MANY: Final = 4096
"""How many quota IDs are checked before the event loop gets a turn."""


async def checked_request(member_code: Text, quota_ids: Iterable[SupportsIndex]) -> InviteRequest:
    """Return a checked request. While many IDs are checked, the event loop gets turns.

    Raises:
        InvalidRequestError: The member code or a quota ID cannot be sent.
    """
    if isinstance(quota_ids, Collection) and len(quota_ids) <= _MANY:
        return InviteRequest(member_code, quota_ids)
    # First without IDs: this checks the member code, and raises the right error if `quota_ids` is not iterable.
    request = InviteRequest(member_code, () if isinstance(quota_ids, Iterable) else quota_ids)
    checked: list[int] = []
    turns, values = LoopYielder(), iter(quota_ids)
    while some := InviteRequest(member_code, tuple(islice(values, _MANY))).quota_ids:
        checked += some
        await turns.step(_MANY)
    whole = tuple(checked)
    await turns.step(_MANY)
    # Freeing a long list takes time too. It happens here, after a turn, and not together with the next steps.
    checked.clear()
    return request_of(request.member_code, whole)


class MemberSource:
    """A source that cuts one member's quota IDs into jobs as they arrive from an iterator.

    An ID repeated within a chunk is sent once.

    Args:
        member_code: The member.
        quota_ids: The quota IDs.
        size: The most quota IDs in a chunk.
        remaining: Returns the seconds left of a deadline, after which nothing more is read. None: no deadline.
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
            # One assignment: the ID is either in `_places` or in `latest`, never in both and never lost.
            self._places[quota_id], self._input.latest = times, Input.NOTHING
            if len(self._places) == self._size:
                break
        if not self._places:
            return None
        job = Job(Chunk.of(self._member_code, self._places))
        self._drawn, self._places = job, {}
        return job

    def draw_now(self) -> None:
        """Return nothing: to fill a chunk takes many items."""

    def handed_over(self) -> None:
        """Forget the job that was drawn last: another object owns it now."""
        self._drawn = None

    def left(self) -> Iterator[Job]:
        """Yield jobs with the quota IDs that were taken from the input and not handed over."""
        if self._drawn is not None:
            yield self._drawn
        places = dict(self._places)
        for item in self._input.unstored():
            # An invalid ID has no outcome. The user gets its error from the iteration.
            with suppress(InvalidRequestError):
                quota_id = quota_id_of(item)
                places[quota_id] = places.get(quota_id, 0) + 1
        if places:
            yield Job(Chunk.of(self._member_code, places))

    async def aclose(self) -> None:
        """Close the input."""
        await self._input.aclose()


class FanOutSource:
    """A source that cuts requests of many members into jobs. An ID repeated in a request is sent once.

    Args:
        requests: The requests.
        size: The most quota IDs in a chunk.
        size_of: Returns the best chunk size now, for a number of quota IDs of one request. None: always `size`.
        remaining: Returns the seconds left of a deadline, after which nothing more is read. None: no deadline.
        replay: The journal, if any. Quota IDs with an outcome in it are not sent again.
        asked: The pairs requested before, if repetitions are not sent and there is no journal.
    """

    def __init__(
        self,
        requests: AnyIterable[InviteRequest],
        *,
        size: int,
        size_of: Callable[[int], int] | None = None,
        remaining: Callable[[], float] | None = None,
        replay: Replay | None = None,
        asked: RequestedPairs | None = None,
    ) -> None:
        self._input = Input(requests, remaining)
        self._size = size
        self._size_of = size_of
        self._replay = replay
        self._asked = asked
        self._recalling: Recalling | None = None
        self._plans: deque[PendingChunks] = deque()

    async def draw(self) -> Job | None:
        """Return the next job, or None after the last."""
        while (job := self._planned()) is None:
            if self._recalling is not None:
                await self._recall(self._recalling)
            elif self._input.latest is not Input.NOTHING or await self._input.read():
                request = self._checked(self._input.latest)
                if self._asked is not None and self._asked.needs_index(request.member_code):
                    await self._asked.make_index(request.member_code)
                self._take(request, counted(request) or await counted_in_steps(request))
            elif not await self._take_rest():
                return None
        return job

    def draw_now(self) -> Job | None:
        """Draw the next job, from the latest request or from one more, if that takes no wait."""
        job = self._planned()
        is_free = self._recalling is None and self._input.latest is Input.NOTHING
        if job is None and is_free and self._input.read_now():
            request = self._checked(self._input.latest)
            # A request that takes a wait stays in `latest`, where `draw` finds it.
            if not self._takes_long(request.member_code) and (chunks := counted(request)):
                self._take(request, chunks)
                job = self._planned()
        return job

    def _takes_long(self, member_code: str) -> bool:
        if self._replay is not None:
            return self._replay.knows(member_code)
        return self._asked is not None and self._asked.needs_index(member_code)

    def _planned(self) -> Job | None:
        while self._plans:
            job = self._plans[0].draw()
            if job is None:
                self._plans.popleft()
                continue
            # From here on, a later request about the same quotas waits for the outcomes of this job.
            if self._asked is not None:
                if job.repetition is None:
                    self._asked.take_up(job, job.chunk.quota_ids)
            elif self._replay is not None and job.answered is None:
                self._replay.take_up(job.chunk)
            return job
        return None

    def _checked(self, request: object) -> InviteRequest:
        if isinstance(request, InviteRequest):
            return request
        self._input.latest = Input.NOTHING
        raise InvalidRequestError(
            "fan_out takes requests of the form InviteRequest(member_code, quota_ids), not "
            f"{type(request).__name__}"
        )

    def _take(self, request: InviteRequest, chunks: Sequence[Chunk]) -> None:
        """Make plans for the latest request, or begin to look it up in the journal."""
        if self._replay is None or not self._replay.knows(request.member_code):
            plans = deque(plan for chunk in chunks for plan in self._plans_of(chunk))
            self._plans, self._input.latest = plans, Input.NOTHING
            return
        recalling = Recalling(chunks, self._replay)
        self._recalling, self._input.latest = recalling, Input.NOTHING
        self._add_more(recalling, self._replay)

    def _add_more(self, recalling: Recalling, replay: Replay) -> None:
        """Add the next requests, if they are at hand: one look-up of many costs little more than one of one."""
        members = {chunk.member_code for chunk in recalling.counted}
        ids = sum(len(chunk.quota_ids) for chunk in recalling.counted)
        # An input may take its time for each item, and nothing else runs meanwhile.
        until = time.perf_counter() + _LONGEST_READ
        while ids < _RECALLED and time.perf_counter() < until and self._input.read_ahead():
            request = self._input.latest
            # What cannot be added stays in `latest`, for `draw`. A second request about a member must see the
            # outcomes of the first one.
            if not isinstance(request, InviteRequest) or ids + len(request.quota_ids) > _RECALLED:
                return
            if request.member_code in members or replay.is_in_flight(request.member_code):
                return
            more = counted(request) or ()
            recalling.counted, self._input.latest = (*recalling.counted, *more), Input.NOTHING
            members.add(request.member_code)
            ids += len(request.quota_ids) or 1

    async def _take_rest(self) -> bool:
        """Make plans for what the journal has and the input had not; return False if there is no more."""
        rest = await self._replay.rest() if self._replay is not None and self._input.is_over else {}
        for code, known in rest.items():
            self._plans.append(PendingChunks(Chunk.of(code, dict.fromkeys(known, 1)), self._size, known))
        return bool(rest)

    async def _recall(self, recalling: Recalling) -> None:
        """Make plans for the next part, from its outcomes in the journal."""
        parts = await recalling.next()
        if not parts:
            self._recalling = None
            return
        self._plans, recalling.parts = deque(chain.from_iterable(map(self._plans_of_split, parts))), ()

    def _plans_of_split(self, part: JournalSplit) -> Iterator[PendingChunks]:
        if part.known:
            yield PendingChunks(part.answered, self._size, part.known)
            yield self._plan(part.again)
        yield self._plan(part.fresh)

    def _plans_of(self, whole: Chunk) -> tuple[PendingChunks, ...]:
        """Return the plans for quota IDs of a request: those requested before, and the others."""
        earlier = {} if self._asked is None else self._asked.earlier(whole.member_code, whole.quota_ids)
        if self._asked is None or not earlier:
            return (self._plan(whole),)
        places = Counter(whole.each_place())
        fresh = Chunk.of(whole.member_code, {id_: places[id_] for id_ in whole.quota_ids if id_ not in earlier})
        again = Chunk.of(whole.member_code, {id_: places[id_] for id_ in earlier})
        repetition = Repetition(self._asked, whole.member_code, earlier)
        return PendingChunks(again, self._size, repetition=repetition), self._plan(fresh)

    def _plan(self, whole: Chunk) -> PendingChunks:
        size_of, quota_ids = self._size_of, len(whole.quota_ids)
        return PendingChunks(whole, self._size if size_of is None or not quota_ids else size_of(quota_ids))

    def handed_over(self) -> None:
        """Forget the job that was drawn last: another object owns it now."""
        self._plans[0].drawn = None

    def left(self) -> Iterator[Job]:
        """Yield jobs with the quota IDs that were taken from the input and not handed over."""
        for plan in self._plans:
            yield from plan.left()
        if self._recalling is not None:
            yield from self._recalling.left()
        for request in self._input.unstored():
            if not isinstance(request, InviteRequest):
                continue
            whole = Chunk.of(request.member_code, Counter(request.quota_ids))
            if self._replay is not None:
                yield Job(whole, not_looked_up(whole))
            else:
                yield from chain.from_iterable(plan.left() for plan in self._plans_of(whole))

    async def aclose(self) -> None:
        """Close the input."""
        await self._input.aclose()


def source_of(
    member_code: Text,
    quota_ids: AnyIterable[SupportsIndex],
    *,
    size: int,
    size_of: Callable[[int], int] | None,
    remaining: Callable[[], float] | None,
) -> ChunkSource:
    """Return the source for one member's quota IDs.

    A collection gets an outcome for every ID, even after the deadline, and a repeated ID in it is sent once. It
    is checked before anything is sent, and if it is large, when the first job is drawn. Of an iterator nothing
    is read after the deadline, and a repeated ID is sent once within a chunk.

    Raises:
        InvalidRequestError: The member code, or an ID of a collection, cannot be sent.
    """
    if not isinstance(quota_ids, Collection):
        return MemberSource(member_code_of(member_code), quota_ids, size=size, remaining=remaining)
    if len(quota_ids) <= _MANY:
        return FanOutSource([InviteRequest(member_code, quota_ids)], size=size, size_of=size_of)
    return FanOutSource(_checked(member_code_of(member_code), quota_ids), size=size, size_of=size_of)


async def _checked(member_code: str, quota_ids: Iterable[SupportsIndex]) -> AsyncGenerator[InviteRequest, None]:
    yield await checked_request(member_code, quota_ids)


ChunkSource: TypeAlias = MemberSource | FanOutSource
