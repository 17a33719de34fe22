"""Count outcomes: by status, by result code and by failure, and say what the counts come to."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Final, get_args

from attrs import define, field

from sampling_async import InvalidRequestError, ResultCode, SamplingError, ServiceError
from sampling_async._cli import INTERRUPTED as INTERRUPTED  # noqa: PLC0414  with the others here
from sampling_async._outcomes import OutcomeStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from sampling_async import InviteOutcome

STATUSES: Final[tuple[OutcomeStatus, ...]] = get_args(OutcomeStatus)

DONE, INCOMPLETE, USAGE, REFUSED, FAILED = 0, 1, 2, 3, 4
"""The exit codes, see the package's docstring."""

_KEPT_FAILURES: Final = 20


def exit_code_of(error: SamplingError) -> int:
    """Return the exit code a failed call stands for."""
    if isinstance(error, InvalidRequestError):
        return USAGE
    if error.delivery == "unknown":
        return FAILED  # it may have been done all the same, so it was not refused
    if isinstance(error, ServiceError) and 400 <= error.status < 500:  # noqa: PLR2004
        return REFUSED
    return FAILED


def code_name(code: int | None, result: str | None) -> str:
    """Return a result code with its name, the one of this package where it knows the number."""
    if code is None:
        return result or "no result code"
    return f"{code} {ResultCode.name_of(code) or result or 'UNKNOWN'}"


@define
class Tally:
    """What outcomes have come to so far.

    Attributes:
        statuses: How many ended how.
        codes: How many the service answered with which result code, and its name; None where it gave none.
        failures: Why IDs are `not_sent` or `unknown`: the error's text and how many IDs it befell; at most 20
            texts.
        anomalies: How many outcomes have something odd about them.
        replayed: How many are from a journal of a run before.
        unrequested: How many answers nobody asked for came, as far as they are known.
    """

    statuses: Counter[OutcomeStatus] = field(factory=Counter[OutcomeStatus])
    codes: Counter[tuple[int | None, str | None]] = field(factory=Counter[tuple[int | None, str | None]])
    failures: Counter[str] = field(factory=Counter[str])
    anomalies: int = 0
    replayed: int = 0
    unrequested: int = 0
    _exit_codes: set[int] = field(factory=set[int])
    _clock: Callable[[], float] = time.perf_counter
    _started: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._started = self._clock()

    def add(self, outcome: InviteOutcome) -> None:
        """Count an outcome."""
        self.statuses[outcome.status] += 1
        code = outcome.result_code
        self.codes[code, None if code is None else ResultCode.name_of(code) or outcome.result] += 1
        self.anomalies += outcome.anomaly is not None
        self.replayed += outcome.replayed
        if outcome.error is not None:
            self._add_failure(outcome.error)

    def _add_failure(self, error: SamplingError) -> None:
        text = str(error)
        if text in self.failures or len(self.failures) < _KEPT_FAILURES:
            self.failures[text] += 1
        self._exit_codes.add(exit_code_of(error))

    @property
    def total(self) -> int:
        """How many outcomes were counted."""
        return self.statuses.total()

    @property
    def seconds(self) -> float:
        """Seconds since the counting began."""
        return self._clock() - self._started

    def rate(self) -> float:
        """Return the outcomes a second."""
        return self.total / max(self.seconds, 1e-9)

    def exit_code(self) -> int:
        """Return the exit code the counts stand for: that of the failure, where no ID was answered at all."""
        if not self.statuses["not_sent"] + self.statuses["unknown"]:
            return DONE
        answered = self.statuses["invited"] + self.statuses["rejected"]
        if answered or len(self._exit_codes) != 1:
            return INCOMPLETE
        return next(iter(self._exit_codes))

    def in_words(self) -> str:
        """Say the counts in two lines."""
        counts = ", ".join(f"{self.statuses[status]:,} {status.replace('_', ' ')}" for status in STATUSES)
        return f"{self.total:,} quota IDs in {self.seconds:.1f} s ({self.rate():,.0f}/s)\n{counts}"
