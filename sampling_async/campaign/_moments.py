"""What happened when: counts and latencies by interval, small enough to be kept for weeks."""

from __future__ import annotations

import json
from collections import Counter
from math import floor, log
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Mapping

SLOT: Final = 10
"""Seconds in an interval of the ledger."""

_BRIEF: Final = 5.0
"""Seconds: waits that are closer together are one."""

_FINEST: Final = 0.001
_RATIO: Final = 1.1
"""A latency is kept to within 10 %: 0.1 s is in the interval from 0.097 to 0.107 s."""


def class_of(seconds: float) -> int:
    """Return the class of a latency: all of one class are within 10 %."""
    return 0 if seconds <= _FINEST else floor(log(seconds / _FINEST, _RATIO)) + 1


def seconds_of(class_: int) -> float:
    """Return the middle of a class of latencies."""
    return _FINEST * _RATIO ** (class_ - 0.5) if class_ else _FINEST


def percentile(latencies: Mapping[int, int], percent: int) -> float | None:
    """Return what `percent` percent of the latencies do not exceed; None if there are none."""
    total = sum(latencies.values())
    wanted = -(-total * percent // 100)
    for class_ in sorted(latencies):
        wanted -= latencies[class_]
        if wanted <= 0:
            return seconds_of(class_)
    return None


@define
class _Slot:
    requests: int = 0
    invited: int = 0
    rejected: int = 0
    failed: int = 0
    latencies: Counter[int] = field(factory=Counter[int])
    limit: float | None = None


class Moments:
    """The intervals of one run, until they are written.

    Args:
        run: The number of the run.
    """

    def __init__(self, run: int) -> None:
        self._run = run
        self._slots: dict[int, _Slot] = {}
        self._changed: set[int] = set()
        self._latest = 0

    def _at(self, now: float) -> _Slot:
        # A clock that is set back must not change intervals that were written.
        at = self._latest = max(self._latest, int(now // SLOT) * SLOT)
        self._changed.add(at)
        return self._slots.setdefault(at, _Slot())

    def add(self, now: float, latency: float, *, invited: int, rejected: int, failed: int) -> None:
        """Add a request."""
        slot = self._at(now)
        slot.requests += 1
        slot.invited += invited
        slot.rejected += rejected
        slot.failed += failed
        slot.latencies[class_of(latency)] += 1

    def note_limit(self, now: float, limit: float) -> None:
        """Note the client's limit."""
        self._at(now).limit = limit

    def taken(self) -> list[tuple[Any, ...]]:
        """Return the rows that have changed since the last call."""
        changed = sorted(self._changed)
        self._changed.clear()
        rows = [
            (
                self._run,
                at,
                (slot := self._slots[at]).requests,
                slot.invited,
                slot.rejected,
                slot.failed,
                json.dumps(slot.latencies),
                slot.limit,
            )
            for at in changed
        ]
        # Only the last one may still change.
        for at in changed[:-1]:
            del self._slots[at]
        return rows


@define
class _Wait:
    number: int
    began: float
    ended: float


class WaitLog:
    """The waits of a run. Those of one kind that follow each other closely are one.

    Args:
        last: The number of the last wait of the runs before.
    """

    def __init__(self, last: int) -> None:
        self._last = last
        self._latest: dict[str, _Wait] = {}

    def extend(self, kind: str, began: float, ended: float) -> _Wait:
        """Add a wait, or make the latest one of its kind longer; return it."""
        wait = self._latest.get(kind)
        if wait is None or began - wait.ended > _BRIEF:
            self._last += 1
            wait = self._latest[kind] = _Wait(self._last, began, ended)
        wait.ended = max(wait.ended, ended)
        return wait
