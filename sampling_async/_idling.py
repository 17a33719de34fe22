"""How long unused connections are good for: numbers in, a number of seconds out.

Servers close connections that nobody uses, each after a time of its own. A request that crosses such a close on
its way may have been read, or not: a bulk invite ends `unknown`. So a connection is used again only while it
surely is open. How long that is shows in connections that are closed unused; one that outlives the time it was
to be kept for shows the contrary.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final

_REMEMBERED: Final = 16
_SHORTEST: Final = 0.1  # seconds; no server's time is less, so what is closed sooner is so for another reason
_OF_THE_SHORTEST: Final = 0.5  # servers look around now and then, and no two of theirs have the same time


class IdleTime:
    """Learns how long a connection may lie unused and still be sent a request.

    Args:
        seconds: The longest; what is older is closed.

    Attributes:
        seconds: The same.
        limit: Up to which age, in seconds, a connection is used again.
    """

    __slots__ = ("_closed_after", "_closed_at", "_round_trip", "limit", "seconds")

    def __init__(self, seconds: float) -> None:
        self.limit = self.seconds = seconds
        self._closed_after: deque[float] = deque(maxlen=_REMEMBERED)
        self._closed_at = -inf
        self._round_trip = inf

    def opened_within(self, seconds: float) -> None:
        """Learn how long it took to open a connection: that is a round trip at least."""
        self._round_trip = min(self._round_trip, seconds)

    def was_closed(self, after: float, now: float) -> None:
        """Learn that the other side closed a connection.

        Args:
            after: Its age then: the seconds since it was used last.
            now: When, in seconds of any clock.
        """
        if after < _SHORTEST:
            return
        self._closed_at = now
        self._closed_after.append(after)
        shortest = min(self._closed_after)
        # A request that leaves now arrives half a round trip later, and a close is seen as late.
        in_time = shortest - 2 * self._round_trip
        self.limit = max(0.0, min(self.seconds, _OF_THE_SHORTEST * shortest, in_time))

    def was_kept(self, since: float) -> None:
        """Learn that a connection stayed open for all of its time, unused since a moment of the same clock."""
        if since > self._closed_at:  # else it speaks of another time, or of another server behind the address
            self._closed_after.clear()
            self.limit = self.seconds
