"""Cut the quota IDs of a request into jobs, in chunk sizes that suit the goal."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from sampling_async._bulk.job import Answered, Job
from sampling_async._pacing.limit import Line
from sampling_async._protocol.answers import Listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sampling_async._bulk.asked import Repetition
    from sampling_async._protocol.chunk import Chunk
    from sampling_async._protocol.outcomes import InviteOutcome

Goal: TypeAlias = Literal["throughput", "first"]
"""The goal of a bulk: as few requests as possible, or the last response as early as possible."""

# Before any response, the only hint is the contract: the time of a request grows with its number of quota IDs.
_IN_PROPORTION: Final = Line(0.0, 1.0)
_NEARLY: Final = 1.05
"""Chunk sizes whose time is within 5 % of the best one count as equally good."""


def spread(quota_ids: int, *, slots: int, line: Line | None, largest: int) -> int:
    """Return the chunk size for an early last response; of nearly equal sizes, the one with fewest requests.

    Args:
        quota_ids: The number of IDs to send, at least one.
        slots: How many requests can run at once.
        line: The seconds of a request by its number of IDs, if known.
        largest: The largest allowed chunk.
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


class Plan:
    """Quota IDs of one request that are still to become jobs.

    Args:
        whole: All of the quota IDs, as a chunk of any size.
        size: Quota IDs in one job.
        known: The outcome of each quota ID, if they are all known and the jobs send nothing.
        repetition: What is known of the quota IDs, if the fan-out has asked for all of them before.

    Attributes:
        drawn: The job that was drawn last, until it is handed over.
    """

    def __init__(
        self,
        whole: Chunk,
        size: int,
        known: Mapping[int, InviteOutcome] | None = None,
        repetition: Repetition | None = None,
    ) -> None:
        self._whole = whole
        self._size = size
        self._known = known
        self._repetition = repetition
        self._at = 0
        self.drawn: Job | None = None

    def draw(self) -> Job | None:
        """Return the next job, or None at the end. The job stays in `drawn` until it is handed over."""
        chunk = self._whole.part(self._at, self._at + self._size)
        if not chunk.quota_ids:
            return None
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
