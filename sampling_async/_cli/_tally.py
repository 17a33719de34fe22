"""Count outcomes by status, by result code and by failure: the summary of a run, and its exit code."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Final, get_args

from attrs import define, field
from rich.text import Text

from sampling_async import (
    InvalidRequestError,
    JournalError,
    OutcomeStatus,
    ResultCode,
    SamplingError,
    ServiceError,
)
from sampling_async._cli import _rendering as show
from sampling_async._cli._signals import HUNG_UP, INTERRUPTED, TERMINATED
from sampling_async._contract.checks import count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sampling_async import InviteOutcome

STATUSES: Final[tuple[OutcomeStatus, ...]] = get_args(OutcomeStatus)

DONE, INCOMPLETE, USAGE, REFUSED, FAILED, IN_USE, CAPPED, FAULTY = 0, 1, 2, 3, 4, 5, 6, 70
EXIT_CODES: Final = {
    DONE: "all done",
    INCOMPLETE: "incomplete: some quota IDs not sent or unknown, nothing found, a check of `doctor` failed, "
    "or the reader of the output ended",
    USAGE: "usage",
    REFUSED: "the service refused (4xx)",
    FAILED: "transport or server failure (3 and 4 also if no quota ID was answered)",
    IN_USE: "a ledger or journal is in use by another run",
    CAPPED: "a campaign has reached its cap",
    FAULTY: "a fault of this program",
    INTERRUPTED: "interrupted (Ctrl-C)",
    TERMINATED: "terminated (SIGTERM)",
    HUNG_UP: "terminated (SIGHUP)",
}
"""The exit codes, as the help has them. The docstring of the package says more about each."""

_ANSWERED: Final = frozenset({"invited", "rejected"})
_KEPT_FAILURES: Final = 20


def exit_code_of(error: SamplingError) -> int:
    if isinstance(error, InvalidRequestError):
        return USAGE
    if isinstance(error, JournalError) and error.in_use:
        return IN_USE
    # With unknown delivery the service may have acted, so this is not a refusal, whatever the status.
    if error.delivery == "unknown":
        return FAILED
    if isinstance(error, ServiceError) and 400 <= error.status < 500:  # noqa: PLR2004
        return REFUSED
    return FAILED


def code_name(code: int | None, result: str | None) -> str:
    """Return a result code with its name: this package's name of the number, or else the service's."""
    if code is None:
        return result or "no result code"
    return f"{code} {ResultCode.name_of(code) or result or 'UNKNOWN'}"


@define
class Tally:
    statuses: Counter[OutcomeStatus] = field(factory=Counter[OutcomeStatus])
    # By result code and its name; None for outcomes without a code.
    codes: Counter[tuple[int | None, str | None]] = field(factory=Counter[tuple[int | None, str | None]])
    failures: Counter[str] = field(factory=Counter[str])  # why IDs are `not_sent` or `unknown`, by text
    anomalies: int = 0
    replayed: int = 0  # from a journal of an earlier run
    unrequested: int = 0  # items that no request named, as far as they are known
    _answered: int = 0  # in this run
    _exit_codes: set[int] = field(factory=set[int])
    _clock: Callable[[], float] = time.perf_counter
    _started: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._started = self._clock()

    def add(self, outcome: InviteOutcome) -> None:
        self.statuses[outcome.status] += 1
        code = outcome.result_code
        self.codes[code, None if code is None else ResultCode.name_of(code) or outcome.result] += 1
        self.anomalies += outcome.anomaly is not None
        self.replayed += outcome.replayed
        self._answered += outcome.status in _ANSWERED and not outcome.replayed
        if outcome.error is not None:
            text = str(outcome.error)
            # Texts can differ in details without end; only the first ones are kept.
            if text in self.failures or len(self.failures) < _KEPT_FAILURES:
                self.failures[text] += 1
            self._exit_codes.add(exit_code_of(outcome.error))

    @property
    def total(self) -> int:
        return self.statuses.total()

    def exit_code(self) -> int:
        """Return the exit code of the counts: that of the failure if no ID got a result at all."""
        if not self.statuses["not_sent"] + self.statuses["unknown"]:
            return DONE
        # With some results, or with failures of several kinds, no single failure stands for the whole run.
        answered = self.statuses["invited"] + self.statuses["rejected"]
        if answered or len(self._exit_codes) != 1:
            return INCOMPLETE
        return next(iter(self._exit_codes))

    def in_words(self) -> str:
        seconds = self._clock() - self._started
        # What the service gave: not what was given up, nor what is from a journal.
        rate = self._answered / max(seconds, 1e-9)
        counts = ", ".join(f"{self.statuses[status]:,} {status.replace('_', ' ')}" for status in STATUSES)
        ids = "quota ID" if self.total == 1 else "quota IDs"
        return f"{self.total:,} {ids} in {seconds:.1f} s ({rate:,.0f}/s)\n{counts}"

    def summary(self) -> Iterable[Text]:
        """Yield the lines that close a fan-out: counts by status and by result code, failures, oddities."""
        yield Text(self.in_words(), style="bold")
        width = len(f"{self.total:,}")
        for (code, result), count in self.codes.most_common():
            # IDs without a result code are listed below, by their failures.
            if code is None and self.failures:
                continue
            yield Text(f"  {count:>{width},}  ").append_text(show.plain(code_name(code, result)))
        for text, count in self.failures.most_common():
            yield Text(f"  {count:>{width},}  ", style="red").append_text(show.plain(text, "red"))
        if self.statuses["not_sent"]:
            yield Text("  Not sent: safe to send again, after the cause is removed.")
        if self.statuses["unknown"]:
            yield Text("  Unknown: an invite may exist; sending again may make a second one.")
        if self.replayed:
            yield Text(f"  {self.replayed:,} are from the journal of an earlier run.")
        if self.anomalies:
            yield Text(f"  {count_of(self.anomalies, 'item')} of responses were odd: see Anomaly.")
        if self.unrequested:
            yield Text(
                f"  {count_of(self.unrequested, 'item')} came for quota IDs that were not in the request."
            )
