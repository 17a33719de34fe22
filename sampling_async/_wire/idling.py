"""The time for which idle connections can be reused, as a plain calculation without I/O.

Every server closes idle connections after a time of its own. If a request is sent while the server closes the
connection, the request may have been read or not, and a bulk invite ends `unknown`. So a connection is reused
only while it is certainly open. The client learns this time from connections that the server closed while they
were idle. A connection that stays open for the whole configured time resets what was learned.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final

_REMEMBERED: Final = 16
# Seconds. No server has a shorter idle time, so a connection that is closed sooner has another reason.
_SHORTEST: Final = 0.1
# Servers look for idle connections now and then, and several servers behind one address have different times.
# So only half of the shortest time seen is used.
_OF_THE_SHORTEST: Final = 0.5


class IdleTime:
    """The learned time for which an idle connection can be reused.

    Args:
        seconds: The longest time. Older connections are closed.

    Attributes:
        seconds: The same.
        limit: The greatest age, in seconds, at which a connection is reused.
    """

    __slots__ = ("_closed_after", "_closed_at", "_round_trip", "limit", "seconds")

    def __init__(self, seconds: float) -> None:
        self.limit = self.seconds = seconds
        self._closed_after: deque[float] = deque(maxlen=_REMEMBERED)
        self._closed_at = -inf
        self._round_trip = inf

    def opened_within(self, seconds: float) -> None:
        """Learn the seconds it took to open a connection, which is at least one round trip."""
        self._round_trip = min(self._round_trip, seconds)

    def was_closed(self, after: float, now: float) -> None:
        """Learn that the other side closed a connection.

        Args:
            after: The age of the connection at that time: the seconds since it was last used.
            now: The time, in seconds of any clock.
        """
        if after < _SHORTEST:
            return
        self._closed_at = now
        self._closed_after.append(after)
        shortest = min(self._closed_after)
        # A request arrives half a round trip after it was sent, and a close is seen half a round trip late. The
        # factor 2 doubles that. Example: closes were seen after 3 s and 5 s, and the round trip is 0.1 s. Then
        # the limit is 1.5 s, the smaller of 0.5 * 3 s and 3 s - 0.2 s.
        in_time = shortest - 2 * self._round_trip
        self.limit = max(0.0, min(self.seconds, _OF_THE_SHORTEST * shortest, in_time))

    def was_kept(self, since: float) -> None:
        """Learn that a connection stayed open for the whole time, idle since `since` on the same clock."""
        # If a close was seen during that time, this connection may belong to another server behind the address.
        if since > self._closed_at:
            self._closed_after.clear()
            self.limit = self.seconds
