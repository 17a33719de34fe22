"""Check the options of a bulk in one place for all methods, and choose the sizes of its chunks."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from attrs import frozen

from sampling_async._bulk.asked import RequestedPairs
from sampling_async._bulk.job import Answered, Job
from sampling_async._contract.checks import number_above_0, whole_number
from sampling_async._contract.errors import Endpoint, InvalidRequestError
from sampling_async._pacing.latency import Line
from sampling_async._protocol.requests import MAX_QUOTA_IDS, InviteRequest
from sampling_async._protocol.results import Listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sampling_async._bulk.job import EarlierOutcomes
    from sampling_async._pacing.gate import Gate
    from sampling_async._protocol.requests import Chunk
    from sampling_async._protocol.results import InviteOutcome

Goal: TypeAlias = Literal["throughput", "first"]
"""The goal of a bulk: as few requests as possible, or the last response as early as possible."""

# Before any response, the only hint is the contract: the time of a request grows with its number of quota IDs.
_IN_PROPORTION: Final = Line(0.0, 1.0)
_NEARLY: Final = 1.05  # chunk sizes whose time is within 5 % of the best one count as equally good


def spread(quota_ids: int, *, slots: int, line: Line | None, largest: int) -> int:
    """Return the chunk size for an early last response; of nearly equal sizes, the one with fewest requests.

    `slots` requests can run at once, and `line` gives the seconds of one by its number of IDs, if known.
    """
    # Requests run in waves of `slots`, and each wave takes `line(size)`. Example: 100 IDs, 8 slots, and a line
    # of 0.5 + 0.01 * n seconds. Size 50 is one wave of 1 s, size 13 is one wave of 0.63 s, size 12 is two waves
    # of 0.62 s each. So 13 is best. Size 16 (0.66 s) is within 5 % and needs 7 requests in place of 8: it wins.
    # The 7 requests then get even sizes, ceil(100 / 7) = 15.
    line = line or _IN_PROPORTION
    sizes = range(1, min(largest, quota_ids) + 1)

    def seconds(size: int) -> float:
        return ceil(ceil(quota_ids / size) / slots) * line(size)

    best = min(map(seconds, sizes))
    largest = max(size for size in sizes if seconds(size) <= best * _NEARLY)
    # The same number of requests, with even sizes.
    return ceil(quota_ids / ceil(quota_ids / largest))


class PendingChunks:
    """Quota IDs of one request that are still to become jobs of at most `size` IDs each.

    If their outcomes are all `known`, the jobs send nothing.
    """

    def __init__(
        self,
        whole: Chunk,
        size: int,
        known: Mapping[int, InviteOutcome] | None = None,
        repetition: EarlierOutcomes | None = None,
    ) -> None:
        self._whole = whole
        self._size = size
        self._known = known
        self._repetition = repetition
        self._at = 0
        self.drawn: Job | None = None  # the job that was drawn last, until it is handed over

    def draw(self) -> Job | None:
        """Return the next job, or None at the end. The job stays in `drawn` until it is handed over."""
        if self._at >= len(self._whole.quota_ids):
            return None
        chunk = self._whole.part(self._at, self._at + self._size)
        job = self._job(chunk)
        # One assignment: each quota ID is either in `drawn` or beyond `_at`, never in both and never lost.
        self.drawn, self._at = job, self._at + len(chunk.quota_ids)
        return job

    def _job(self, chunk: Chunk) -> Job:
        if self._repetition is not None:
            return Job(chunk, repetition=self._repetition.part(chunk.quota_ids))
        if self._known is None:
            return Job(chunk)
        answers = Listed(tuple([self._known[quota_id] for quota_id in chunk.quota_ids]))
        return Job(chunk, Answered.of(chunk, answers))

    def left(self) -> Iterator[Job]:
        """Yield jobs with the quota IDs that were not handed over."""
        if self.drawn is not None:
            yield self.drawn
        rest = self._whole.part(self._at, len(self._whole.quota_ids))
        if rest.quota_ids:
            yield self._job(rest)


BULK: Final[Endpoint] = "bulk_invite"
Repeats: TypeAlias = Literal["once", "ask"]
"""Whether a pair of member and quota that comes again in a fan-out is sent once, or sent again."""

_LEAST_SHARE: Final = 1e-6


@frozen
class BulkOptions:
    """The options of one bulk invite or fan-out."""

    size: int  # the most quota IDs in a chunk
    # the best chunk size now, for a number of quota IDs; None: always `size`
    size_of: Callable[[int], int] | None
    share: float  # its share of the permits, compared with other bulks
    until: float  # the deadline, by the gate's clock; `inf` for none


def options_of(gate: Gate, until: float, *, chunk_size: int, goal: Goal | None, weight: float) -> BulkOptions:
    size = whole_number(chunk_size, "chunk_size", most=MAX_QUOTA_IDS)
    share = number_above_0(weight, "weight", "a share")
    if goal not in ("throughput", "first", None):
        raise InvalidRequestError(f'goal must be "throughput" or "first", not {goal!r}')
    if not _LEAST_SHARE <= share <= 1 / _LEAST_SHARE:
        raise InvalidRequestError(
            f"weight must be a share from {_LEAST_SHARE} to {1 / _LEAST_SHARE:.0f}, not {weight!r}"
        )
    is_first = goal == "first" or (goal is None and until < inf)
    return BulkOptions(size, _spreading(gate, size) if is_first else None, share, until)


def asked_pairs(repeats: Repeats, *, has_journal: bool) -> RequestedPairs | None:
    """Return what remembers the pairs of a fan-out, if it is needed: a journal remembers them itself."""
    if repeats not in ("once", "ask"):
        raise InvalidRequestError(f'repeats must be "once" or "ask", not {repeats!r}')
    if repeats == "ask" and has_journal:
        raise InvalidRequestError(
            'a journal sends each pair once, so repeats cannot be "ask" with it; leave one of the two out'
        )
    return None if has_journal or repeats == "ask" else RequestedPairs()


def _spreading(gate: Gate, largest: int) -> Callable[[int], int]:
    bulk = gate.kind(BULK)

    # Example: the limit is 8, and 3 bulk requests run. So 5 permits are free, and 100 quota IDs are cut for 5
    # parallel requests. If others wait for a permit that a bulk could have, none is free.
    def size_of(quota_ids: int) -> int:
        free = min(bulk.adaptive.limit - len(bulk.held), gate.maximum - gate.running)
        return spread(quota_ids, slots=max(1, free), line=bulk.adaptive.latency.line, largest=largest)

    return size_of


_COUNTED: Final = 65_536
"""The largest number of requests whose quota IDs are counted in advance; it takes some milliseconds."""


def total_of(requests: object) -> int | None:
    """Return the number of quota IDs in all requests; None if it is not known in advance."""
    if not isinstance(requests, list | tuple | set | frozenset) or len(requests) > _COUNTED:
        return None
    if not all(isinstance(request, InviteRequest) for request in requests):
        # Not an error here: it is raised when the first invalid item is drawn.
        return None
    return sum(len(request.quota_ids) for request in requests)
