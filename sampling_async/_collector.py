"""Python's garbage collector, kept from looking at everything there is while a large inventory is read.

Reading one makes some hundred thousand objects, all alive and without a cycle. Whenever there are a quarter
more objects than before, the collector looks at all of them at once, which stops the event loop for a tenth of
a second. To switch it off, or to change its thresholds, is not for a library to do: its host may rely on them.
So a look at everything that is due while an inventory is read is put off, which leaves all else as it is set;
and not for ever, for the host's own garbage may be waiting for it.
"""

from __future__ import annotations

import gc
import sys
from typing import Final

_PUT_OFF_AT_MOST: Final = 50
"""How often in a row: some ten inventories of 60 MB."""

_has_pauses: Final = (
    sys.implementation.name == "cpython"
    and sys.version_info < (3, 14)  # which collects in steps
    and getattr(sys, "_is_gil_enabled", lambda: True)()  # else freezing takes as long as looking
)


class _Collections:
    """How many looks at everything have been put off since the last one."""

    def __init__(self) -> None:
        self._seen = 0
        self._put_off = 0

    def put_off(self) -> None:
        """Put the next one off, if it is due."""
        if not _has_pauses or gc.get_count()[2] < gc.get_threshold()[2] or gc.get_freeze_count():
            return
        seen = gc.get_stats()[2]["collections"]
        if seen != self._seen:
            self._seen, self._put_off = seen, 0
        if self._put_off < _PUT_OFF_AT_MOST:
            self._put_off += 1
            # Joins the lists of young and old objects, which takes no time, and sets their counters to 0.
            gc.freeze()
            gc.unfreeze()


put_off_a_pause: Final = _Collections().put_off
"""To be called between the parts of an inventory that is read, or compiled."""
