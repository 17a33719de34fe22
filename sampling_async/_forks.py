"""Whether this process came about by a fork since something was made.

Both processes have the same sockets then, and what one of them reads is lost to the other. Only what is made
anew belongs to one alone.
"""

from __future__ import annotations

import os
from contextlib import suppress


class _Forks:
    """Counts those that this process came about by; asking for its number takes six times as long."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def note(self) -> None:
        self.count += 1


forks = _Forks()

with suppress(AttributeError):  # Windows knows no forks
    os.register_at_fork(after_in_child=forks.note)
