"""Detect a fork of this process.

After a fork, parent and child have the same sockets, and bytes that one of them reads are lost for the other.
So an object keeps the count of forks from the time it was made, and is not used if the count has changed.
"""

from __future__ import annotations

import os
from contextlib import suppress


class _Forks:
    """The number of forks that led to this process; reading it is six times as fast as `os.getpid`."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def note(self) -> None:
        self.count += 1


forks = _Forks()

with suppress(AttributeError):  # Windows has no forks
    os.register_at_fork(after_in_child=forks.note)
