"""Python's garbage collector, kept from looking again and again at records that are here to stay.

Reading a large inventory makes some hundred thousand objects, all alive and without a cycle. The collector
looks at each of them several times, in the end at all of them at once, which stops the event loop for a tenth
of a second, and again whenever a quarter more have come. To switch it off, or to change its thresholds, is not for a
library to do: its host may rely on them.
"""

from __future__ import annotations

import gc
import sys


def spare_the_young() -> None:
    """Put all objects that are young among the old ones, unseen; the collector goes on as it is set.

    Freezing and thawing does this, in no time: lists are joined. Garbage in cycles that was young is found when
    the old are looked at. Where the host has frozen objects for good, nothing is done.
    """
    if _is_cheap and gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()


_is_cheap = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()
