"""The common parts of the outputs: the protocol of collectors, and functions that several of them use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sampling_async.matching.panel._kernel import Kernel
    from sampling_async.matching.panel._plan import Block, Source


class Collector(Protocol):
    """Builds an output from the rows of one chunk of members after the other."""

    def begin(self, batch: Any, first: int) -> Any:
        """Begin a batch whose first member has this place in the panel; return the batch, perhaps reordered."""

    def add(self, kernel: Kernel, members: slice) -> Any | None:
        """Add the rows of some members of the batch; return a record batch if one is ready."""

    def end(self) -> Any | None:
        """Return the rest of the output as a record batch, if there is a rest."""


def count_of(rows: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return how many members are in each row."""
    count: NDArray[np.int64] = np.bitwise_count(rows).sum(axis=1, dtype=np.int64)
    return count


def split(kernel: Kernel, block: Block) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the members who certainly match the quotas of a block, and the others who may match them."""
    # The kernel returns certain rows for the unsure quotas only; for all others, both rows are the same.
    possible, some_certain = kernel.block(block)
    certain = possible.copy()
    certain[block.unsure] = some_certain
    # `certain` is a subset of `possible`, so that "exclusive or" is the difference.
    return certain, possible ^ certain


def places_of(table: Any, source: Source) -> NDArray[np.intp]:
    """Return the place in the source of each row's quota."""
    # The source is in the order of rank, not of IDs, so search by a sorted index.
    order = np.argsort(source.quota_ids)
    quota_ids = table.column("quota_id").to_numpy()
    places: NDArray[np.intp] = order[np.searchsorted(source.quota_ids, quota_ids, sorter=order)]
    return places
