"""When the next poll is due. No I/O: the end of a poll goes in, seconds come out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sampling_async._contract.errors import ForbiddenError, SamplingError
from sampling_async._pacing.backoff import doubled

if TYPE_CHECKING:
    from collections.abc import Callable

_JITTER: Final = 0.1
_FIRST: Final = 5.0
_LONGEST: Final = 300.0
_REFUSED: Final = 120.0
"""Seconds between polls of a service that refuses the key. Asking more often looks like an attack."""

_HEALED: Final = 2
"""Successes in a row after a refusal, until the usual pace is taken up again."""


class Pace:
    """The pauses between polls.

    Args:
        every: The usual pause, in seconds.
        random: Returns numbers from 0 to 1.

    Attributes:
        failures: The number of polls that failed, in a row.
        soonest: The shortest pause before a poll that was asked for without a hurry.
    """

    def __init__(self, every: float, random: Callable[[], float]) -> None:
        self.failures = 0
        self.soonest = min(every, _FIRST)
        self._every = every
        self._random = random
        self._unhealed = 0

    @property
    def is_usual(self) -> bool:
        """Whether nothing has failed lately."""
        return not self.failures and not self._unhealed

    def after_success(self) -> float:
        """Return the seconds from a success to the next poll."""
        self.failures = 0
        self._unhealed = max(0, self._unhealed - 1)
        return self._jittered(max(self._every, _REFUSED) if self._unhealed else self._every)

    def after_failure(self, error: SamplingError) -> float:
        """Return the seconds from a failure to the next poll."""
        self.failures += 1
        first = self.soonest
        # After a refusal, any failure delays the healing: the successes must come in a row.
        if self._unhealed or isinstance(error, ForbiddenError) or error.permanent:
            self._unhealed, first = _HEALED, max(self._every, _REFUSED)
        longest = max(self._every, _LONGEST)
        pause = self._jittered(doubled(first, self.failures - 1, longest))
        return max(pause, min(error.retry_after or 0.0, longest))

    def _jittered(self, seconds: float) -> float:
        # Many clients may have started at the same moment. They should not poll at the same moments for ever.
        return seconds * (1 - _JITTER + 2 * _JITTER * self._random())
