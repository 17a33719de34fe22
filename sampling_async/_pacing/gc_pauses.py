"""Delay full garbage collections while a large inventory is read: 94 to 430 ms of stalls become 5 to 12 ms.

Reading an inventory makes some hundred thousand objects, all in use and without a cycle, and a full collection
visits all objects at once. A library must not switch the collector off, or change its thresholds: its host may
depend on them. So only a collection that is due meanwhile is delayed, a limited number of times, because it may
have to free objects of the host.
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")

# Delays in a row: enough for about ten inventories of 60 MB.
_PUT_OFF_AT_MOST: Final = 50

_has_pauses: Final = (
    sys.implementation.name == "cpython"
    and sys.version_info < (3, 14)  # 3.14 collects in small steps
    and getattr(sys, "_is_gil_enabled", lambda: True)()  # without the GIL, freezing visits all objects as well
)


class _Collections:
    """The number of full collections that were delayed since the last one."""

    def __init__(self) -> None:
        self._seen = 0
        self._put_off = 0
        self._is_frozen = False  # whether the host had frozen objects at the time of that collection

    def put_off(self) -> None:
        if not _has_pauses or gc.get_count()[2] < gc.get_threshold()[2]:
            return
        seen = gc.get_stats()[2]["collections"]
        if seen != self._seen:
            self._seen, self._put_off, self._is_frozen = seen, 0, False
        # If the host has frozen objects itself, `unfreeze` would undo that, so nothing is done. To count them
        # takes long if there are many, so that they are counted once.
        self._is_frozen = self._is_frozen or gc.get_freeze_count() > 0
        if self._put_off < _PUT_OFF_AT_MOST and not self._is_frozen:
            self._put_off += 1
            # Freezing joins the lists of young and old objects, which takes no time, and sets the counters of
            # the generations to 0. Unfreezing puts all objects into the oldest generation.
            gc.freeze()
            gc.unfreeze()


defer_full_gc: Final = _Collections().put_off
"""Delay a full collection that is due. Call it between the parts of an inventory that is read or compiled."""


def with_gc_deferred(items: Iterable[T]) -> Iterator[T]:
    """Yield items, of each of which objects are made that are no garbage; see `defer_full_gc`."""
    for item in items:
        defer_full_gc()
        yield item
