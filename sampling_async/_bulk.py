"""The fan-out: quota IDs into chunks, chunks into parallel bulk invites, and one outcome for every ID."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, Collection, Iterable
from copy import copy
from inspect import isasyncgen
from itertools import chain, repeat
from typing import TYPE_CHECKING, Final, Self, SupportsIndex, TypeAlias, TypeVar

from attrs import evolve, frozen

from sampling_async._errors import (
    ClientClosedError,
    ForbiddenError,
    InvalidRequestError,
    SamplingError,
    ServiceError,
)
from sampling_async._outcomes import InviteOutcome, OutcomeStatus
from sampling_async._policy import MAX_RETRY_AFTER
from sampling_async._protocol import (
    Chunk,
    InviteRequest,
    bulk_invite,
    member_code_of,
    plan_chunks,
    quota_id_of,
)
from sampling_async._replies import BulkAnswer
from sampling_async._scheduler import Gate, JobStream, Permit
from sampling_async._session import Track
from sampling_async._stepwise import Stepwise

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator
    from types import TracebackType

    from sampling_async._calls import Caller
    from sampling_async._errors import Delivery

T = TypeVar("T")

AnyIterable: TypeAlias = Iterable[T] | AsyncIterable[T]
"""What can be given as input: iterable or async iterable."""

_UNREQUESTED_KEPT: Final = 10_000


class ChunkSource:
    """Cuts an input into chunks as they are drawn, and knows what it has taken and not given."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rest: Iterator[Chunk] = iter(())

    async def of_member(
        self, member_code: str, quota_ids: AnyIterable[SupportsIndex]
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of one member; IDs repeated within a chunk are sent once."""
        places: dict[int, int] = {}
        # Visible to `rest` while it fills, so that no ID is lost if the input fails.
        self._rest = (Chunk(member_code, taken) for taken in (places,) if taken)
        source = _aiter(quota_ids)
        try:
            async for value in source:
                quota_id = quota_id_of(value)
                places[quota_id] = places.get(quota_id, 0) + 1
                if len(places) == self._size:
                    chunk = Chunk(member_code, places.copy())
                    places.clear()
                    yield chunk
        finally:
            await _close(source)
        if places:
            chunk = Chunk(member_code, places.copy())
            places.clear()
            yield chunk

    async def of_panel(self, requests: AnyIterable[InviteRequest]) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of many members; an ID repeated within a request is sent once."""
        source = _aiter(requests)
        try:
            async for request in source:
                if not isinstance(request, InviteRequest):
                    raise InvalidRequestError(
                        f"fan_out takes InviteRequest(member_code, quota_ids), not {type(request).__name__}"
                    )
                self._rest = plan_chunks(request, self._size)
                for chunk in self._rest:
                    yield chunk
        finally:
            await _close(source)

    def rest(self) -> Iterator[Chunk]:
        """Return what was taken from the input and not yielded."""
        return self._rest


def _aiter(items: AnyIterable[T]) -> AsyncIterator[T]:
    return aiter(items) if isinstance(items, AsyncIterable) else Stepwise(items)


async def _close(source: object) -> None:
    """Close an async generator: left to the garbage collector, it would end in another task."""
    if isasyncgen(source):
        await source.aclose()


@frozen
class _Answered:
    """A chunk that was run, and what its IDs came to."""

    chunk: Chunk
    answer: BulkAnswer

    def outcomes(self) -> Iterator[InviteOutcome]:
        """Yield an outcome for each place, repeated IDs included."""
        outcomes = self.answer.outcomes
        return chain.from_iterable(repeat(outcomes[id_], times) for id_, times in self.chunk.places.items())


class OutcomeStream:
    """The outcomes of a fan-out, as they finish: an async context manager and, inside it, an async iterator.

    Memory is bounded by the client's `max_concurrency`, not by the input. Leaving the block early, or being
    cancelled in it, stops what runs; what then was taken from the input and not handed over is in `left_over`,
    so that outcomes seen plus `left_over` account for every quota ID taken.

    An exception of the input, or an ID in it that is none, ends the iteration after the outcomes of all chunks
    that were sent.

    Attributes:
        unrequested: The latest answers, at most 10,000, under quota IDs that nobody asked for.
    """

    def __init__(
        self,
        caller: Caller,
        gate: Gate,
        panel_guid: str,
        source: ChunkSource,
        chunks: AsyncGenerator[Chunk, None],
    ) -> None:
        self.unrequested: deque[InviteOutcome] = deque(maxlen=_UNREQUESTED_KEPT)
        self._caller = caller
        self._panel_guid = panel_guid
        self._source = source
        self._jobs = JobStream(gate, chunks, self._invite, window=gate.limit)
        self._current: deque[Iterator[InviteOutcome]] = deque()  # more than one where several tasks read
        self._cut_off: list[tuple[Chunk, Delivery]] = []
        self._stopped_by: SamplingError | None = None
        self._left_over: tuple[InviteOutcome, ...] | None = None

    @property
    def left_over(self) -> tuple[InviteOutcome, ...]:
        """After the block: outcomes of everything taken from the input that was not handed over.

        What had finished is as it finished, what was in flight is `unknown` (`not_sent` if no byte had left),
        the rest is `not_sent`.
        """
        if not self._jobs.left:
            raise RuntimeError("left_over is known when the block has been left")
        if self._left_over is None:
            self._left_over = tuple(self._rest())
        return self._left_over

    def _rest(self) -> Iterator[InviteOutcome]:
        yield from chain.from_iterable(self._current)
        for answered in self._jobs.untaken:
            yield from answered.outcomes()
        for chunk, delivery in self._cut_off:
            yield from _interrupted(chunk, delivery).outcomes()
        for chunk in chain(self._jobs.unstarted, self._source.rest()):
            yield from _interrupted(chunk, "not_sent").outcomes()

    async def __aenter__(self) -> Self:
        await self._jobs.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._jobs.__aexit__(exc_type, exc, traceback)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InviteOutcome:
        while True:
            while self._current and not self._jobs.left:
                for outcome in self._current[0]:
                    return outcome
                self._current.popleft()
            answered = await anext(self._jobs)
            self.unrequested.extend(answered.answer.unrequested)
            self._current.append(answered.outcomes())

    async def _invite(self, chunk: Chunk, permit: Permit) -> _Answered:
        if self._stopped_by is not None:
            return _failed(chunk, self._stopped_by)
        track = Track()
        try:
            call = bulk_invite(self._panel_guid, chunk.member_code, chunk.quota_ids)
            answer = await self._caller.run(call, permit, track)
        except InvalidRequestError:  # of the wrong event loop: the caller's error, not the call's
            self._cut_off.append((chunk, "not_sent"))
            raise
        except SamplingError as exc:
            self._stop(exc)
            return _failed(chunk, exc)
        except BaseException:
            self._cut_off.append((chunk, track.delivery))
            raise
        for outcome in answer.outcomes.values():
            if outcome.error is not None:
                outcome.error.attempts = track.attempts
        return _Answered(chunk, _resent(answer) if track.ambiguous else answer)

    def _stop(self, error: SamplingError) -> None:
        """Send no further chunks after what is true of them all: a refused key, a wait we do not wait for."""
        too_long = error.retry_after is not None and error.retry_after > MAX_RETRY_AFTER
        if self._stopped_by is None and (too_long or isinstance(error, ForbiddenError | ClientClosedError)):
            self._stopped_by = copy(error)
            self._stopped_by.delivery = "not_sent"
            self._stopped_by.attempts = 0


def _failed(chunk: Chunk, error: SamplingError) -> _Answered:
    code, result = (error.result_code, error.result) if isinstance(error, ServiceError) else (None, None)
    status: OutcomeStatus = "unknown" if error.delivery == "unknown" else "not_sent"
    outcomes = {
        quota_id: InviteOutcome(chunk.member_code, quota_id, status, None, code, result, error)
        for quota_id in chunk.places
    }
    return _Answered(chunk, BulkAnswer(outcomes))


def _interrupted(chunk: Chunk, delivery: Delivery) -> _Answered:
    error = SamplingError(
        "interrupted: the fan-out ended before this was answered", endpoint="bulk_invite", delivery=delivery
    )
    return _failed(chunk, error)


_RESENT: Final = "sent again after an attempt that may have worked: an earlier invite may exist"


def _resent(answer: BulkAnswer) -> BulkAnswer:
    """Say what a second answer means after a first attempt that may have worked.

    A rejection proves nothing then: the member may be refused because of the very invite that was lost.
    """
    return evolve(answer, outcomes={id_: _doubted(outcome) for id_, outcome in answer.outcomes.items()})


def _doubted(outcome: InviteOutcome) -> InviteOutcome:
    outcome = evolve(outcome, anomaly="; ".join(filter(None, (outcome.anomaly, _RESENT))))
    if outcome.status != "rejected":
        return outcome
    error = SamplingError(f"rejected when {_RESENT}", endpoint="bulk_invite", delivery="unknown")
    return evolve(outcome, status="unknown", error=error)


def source_of(
    member_code: str, quota_ids: AnyIterable[SupportsIndex], size: int
) -> tuple[ChunkSource, AsyncGenerator[Chunk, None]]:
    """Return the source of one member's chunks.

    A collection is checked whole before anything is sent, and a repeated ID in it is sent once. What can be
    read only once is checked as it is drawn, and repeated IDs are sent once within a chunk.

    Raises:
        InvalidRequestError: The member code, or an ID of a collection, cannot be sent.
    """
    source = ChunkSource(size)
    if isinstance(quota_ids, Collection):
        return source, source.of_panel([InviteRequest(member_code, quota_ids)])
    return source, source.of_member(member_code_of(member_code), quota_ids)
