"""The output `Counts`: how many members match each quota."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import frozen

from sampling_async.matching.panel._arrow import arrow, pa
from sampling_async.matching.panel._collectors import count_of, known_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sampling_async.matching.panel._collectors import Collector
    from sampling_async.matching.panel._kernel import Kernel
    from sampling_async.matching.panel._plan import Source


@frozen
class Counts:
    """The number of members who match each quota, which shows whether it can be filled.

    There is one row for each quota, best rank first: `quota_id`, `survey_id`, `needed` (completes still
    wanted), `certain` (members who certainly match), `possible` (further members who may match), and
    `shortfall` (completes that are still wanted if each certain member gives one).
    """

    @property
    def schema(self) -> Any:
        """The Arrow schema of the output."""
        return pa.schema([(name, pa.int64()) for name in _COUNTS])

    def collector(self, source: Source) -> Collector:
        """Return a collector that counts members."""
        return _Counting(source)

    def merged(self, table: Any, source: Source) -> Any:
        """Return the counts of a whole panel: the sums of the counts of its parts."""
        certain, possible = np.zeros((2, len(source.quota_ids)), dtype=np.int64)
        table, at = known_rows(table, source)
        # `add.at`, because a quota occurs once in each part: `certain[at] += ...` would add only one of them.
        np.add.at(certain, at, table.column("certain").to_numpy())
        np.add.at(possible, at, table.column("possible").to_numpy())
        return _counts(source, certain, possible)


_COUNTS: Final = ("quota_id", "survey_id", "needed", "certain", "possible", "shortfall")


def _counts(source: Source, certain: NDArray[np.int64], possible: NDArray[np.int64]) -> Any:
    shortfall = np.maximum(source.needed - certain, 0)
    columns = (source.quota_ids, source.survey_ids, source.needed, certain, possible, shortfall)
    return pa.record_batch([arrow(column) for column in columns], names=_COUNTS)


class _Counting:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._may = np.zeros(len(source.quota_ids), dtype=np.int64)
        self._not_certain = np.zeros(len(source.quota_ids), dtype=np.int64)

    def begin(self, batch: Any, first: int) -> Any:  # noqa: ARG002
        return batch

    def add(self, kernel: Kernel, members: slice) -> None:  # noqa: ARG002
        for block in kernel.plan.blocks:
            # `certain` has rows of the unsure quotas only: in all others, each member who may match does. So
            # count those that are not certain, and subtract at the end.
            possible, certain = kernel.block(block)
            may = count_of(possible)
            self._may[block.quotas] += may
            does = count_of(certain)
            self._not_certain[block.quotas[block.unsure]] += may[block.unsure] - does

    def end(self) -> Any:
        return _counts(self._source, self._may - self._not_certain, self._not_certain)
