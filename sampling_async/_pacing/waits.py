"""The spans of time in which somebody waited."""

from __future__ import annotations

from collections import deque
from math import fsum
from typing import Final

_KEPT: Final = 256


class Waits:
    """The spans of time in which somebody waited. Where several wait at once, that is one span.

    The latest 256 spans are known.
    """

    __slots__ = ("_ended", "_since", "_waiting")

    _since: float  # of the span that lasts

    def __init__(self) -> None:
        self._ended: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._waiting: set[object] = set()

    def begin(self, who: object, now: float) -> None:
        """Note that somebody waits from now on."""
        if not self._waiting:
            self._since = now
        self._waiting.add(who)

    def end(self, who: object, now: float) -> None:
        """Note that somebody waits no more; without effect for those who did not wait."""
        if who not in self._waiting:
            return
        self._waiting.discard(who)
        if not self._waiting:
            self._ended.append((self._since, now))

    def within(self, first: float, last: float) -> float:
        """Return the seconds between two moments in which somebody waited."""
        spans = [*self._ended, *([(self._since, last)] if self._waiting else [])]
        return fsum(max(0.0, min(end, last) - max(begin, first)) for begin, end in spans)
