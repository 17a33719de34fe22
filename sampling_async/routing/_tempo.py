"""How many quotas to ask for at once: few enough that nobody wastes invites, enough to end in time."""

from __future__ import annotations

from math import ceil, log
from typing import Final

_SHARE: Final = 0.1  # of the newest measurement in the averages
_FIRST_SECONDS: Final = 0.5  # of a request, before any was measured
_FIRST_REFUSED: Final = 0.1  # the share of refusals, likewise
_TOO_LATE: Final = 0.01  # the share of clicks that may end without a link because there was no time
_MOST_UNUSED: Final = 1.0  # invites a click, on average, that are not used
_DEVIATIONS: Final = 2.0
_MOST: Final = 10


class Tempo:
    """How long requests take, and how many of their quotas are refused, as measured."""

    def __init__(self) -> None:
        self._mean = _FIRST_SECONDS
        self._deviation = 0.0
        self._refused = _FIRST_REFUSED
        self._is_measured = False

    def ended(self, seconds: float, asked: int, refused: int) -> None:
        """Record a request that had a response."""
        if not self._is_measured:
            self._is_measured, self._mean, self._deviation = True, seconds, seconds / 2
        self._deviation += _SHARE * (abs(seconds - self._mean) - self._deviation)
        self._mean += _SHARE * (seconds - self._mean)
        self._refused += _SHARE * (refused / asked - self._refused)

    @property
    def usual(self) -> float:
        """The seconds that nearly all requests need."""
        return self._mean + _DEVIATIONS * self._deviation

    def has_time(self, seconds: float) -> bool:
        """Return whether a request has a fair chance to end within some seconds."""
        return seconds >= self._mean - self._deviation

    def most(self, seconds: float) -> int:
        """Return for how many quotas to ask at once, if some seconds are left for all requests of a click.

        Example: a fifth is refused. With time for one request, three quotas leave 0.8 % without a link, but
        that would waste 1.4 invites on average, so it is two. With time for three requests it is one at a time.
        """
        refused = min(max(self._refused, 0.001), 0.95)
        requests = max(1, int(seconds / self.usual))
        needed = ceil(log(_TOO_LATE) / log(refused) / requests)
        return max(1, min(needed, int((1 + _MOST_UNUSED) / (1 - refused)), _MOST))
