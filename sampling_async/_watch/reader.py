"""Readers of changes: what leads from the state a reader knows to the current one; and when to poll."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, Self

from sampling_async._contract.errors import ForbiddenError, SamplingError
from sampling_async._pacing.loops import Notifier
from sampling_async._pacing.patience import doubled
from sampling_async._pacing.steps import LoopYielder
from sampling_async._watch.changes import SYNCED, Change, Key, applied, differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from sampling_async._contract.records import Survey

_JITTER: Final = 0.1
_FIRST: Final = 5.0
_LONGEST: Final = 300.0
_REFUSED: Final = 120.0
"""Seconds between polls of a service that refuses the key. Asking more often looks like an attack."""

_HEALED: Final = 2  # successes in a row after a refusal, until the usual pace is taken up again


class PollSchedule:
    """The pauses between polls, usually `every` seconds."""

    def __init__(self, every: float, random: Callable[[], float]) -> None:
        self.failures = 0  # polls that failed, in a row
        self.soonest = min(every, _FIRST)  # the shortest pause before a poll that was requested without a hurry
        self._every = every
        self._random = random
        self._unhealed = 0

    @property
    def is_usual(self) -> bool:
        return not self.failures and not self._unhealed

    def after_success(self) -> float:
        self.failures = 0
        self._unhealed = max(0, self._unhealed - 1)
        return self._jittered(max(self._every, _REFUSED) if self._unhealed else self._every)

    def after_failure(self, error: SamplingError) -> float:
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


class Listener(Protocol):
    """Somebody who is called in the same turn of the event loop in which something changes."""

    def moved(self, keys: Iterable[Key]) -> None:
        """Record which surveys look different now."""

    def ended(self) -> None:
        """Record that nothing will change any longer."""


class Board:
    """What is shown now, and the readers to notify."""

    def __init__(self) -> None:
        self.view: Mapping[Key, Survey] | None = None  # None before the first inventory
        self.version = 0  # how many inventories there have been
        self.since = 0.0  # when the poll began that gave it, by the clock of the watch
        self.is_over = False
        # makes the error to raise at the end; None if the end is an ordinary one
        self.failure: Callable[[], RuntimeError] | None = None
        self._listeners: dict[Listener, None] = {}

    def add(self, listener: Listener) -> None:
        self._listeners[listener] = None

    def remove(self, listener: Listener) -> None:
        self._listeners.pop(listener, None)

    def moved(self, keys: Iterable[Key]) -> None:
        for listener in self._listeners:
            listener.moved(keys)

    def end(self, failure: Callable[[], RuntimeError] | None) -> None:
        """Notify all listeners that nothing will change any longer. It may be called several times."""
        if not self.is_over:
            self.is_over, self.failure = True, failure
        for listener in self._listeners:
            listener.ended()


class QuotaChanges:
    """The changes of an inventory, in an `async with` block and an `async for` loop.

    The first inventory comes as `survey_opened` and `quota_opened`, followed by one `synced`. After that, each
    change comes when it is known. Changes that were not read are merged: a quota that opened and closed
    meanwhile is left out, and a price that went from 1 to 2 to 3 is one change from 1 to 3. So a slow reader
    takes no more memory than the inventory, and always ends at the current state.

    One task reads it. The loop ends when the block of the watch is left.

    Raises:
        RuntimeError: While iterating: the block is not open, or an unexpected error has ended the watch.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._known: dict[Key, Survey] = {}  # what the reader knows
        self._due: dict[Key, None] = {}  # the surveys that may look different from that
        self._batch: deque[Change] = deque()  # the changes of one survey, which are being read
        self._batch_key: Key = (0, 0)
        self._target: Survey | None = None  # what the survey was when these changes were found
        self._read: list[Change] = []  # those of them that were read
        self._turns = LoopYielder()
        self._is_synced = False
        self._is_entered = False
        self._is_open = False
        self._news = Notifier()

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise RuntimeError("a reader of changes is entered once; make another one")
        self._is_entered = self._is_open = True
        self._due = dict.fromkeys(self._board.view or ())
        self._board.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_open = False
        self._board.remove(self)
        self.ended()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        while self._is_open:
            # Before a change is taken: nothing is lost if this is cancelled.
            await self._turns.step()
            if self._batch:
                self._look_again()
            if self._batch:
                return self._taken()
            if self._due:
                self._find()
            elif self._board.view is not None and not self._is_synced:
                self._is_synced = True
                return SYNCED
            elif self._board.is_over:
                if self._board.failure is not None:
                    raise self._board.failure()
                raise StopAsyncIteration
            else:
                await self._news.wait()
        raise RuntimeError("read changes inside their block: async with watch.changes() as changes")

    def moved(self, keys: Iterable[Key]) -> None:
        """Record which surveys look different now."""
        view = self._board.view or {}
        for key in keys:
            # A survey that has come and gone without being read is no change.
            if key in view or key in self._known or (self._batch and key == self._batch_key):
                self._due[key] = None
            else:
                self._due.pop(key, None)
        self.ended()

    def ended(self) -> None:
        """Wake the reader."""
        self._news.notify()

    def _now(self, key: Key) -> Survey | None:
        view = self._board.view
        assert view is not None
        return view.get(key)

    def _find(self) -> None:
        key = next(iter(self._due))
        self._batch_key, self._target, self._read = key, self._now(key), []
        self._batch.extend(differences(key, self._known.get(key), self._target))
        del self._due[key]
        if not self._batch:
            self._knows(key, self._target)

    def _taken(self) -> Change:
        change = self._batch.popleft()
        self._read.append(change)
        if not self._batch:
            self._knows(self._batch_key, self._target)
        return change

    def _look_again(self) -> None:
        """Drop the changes that were found and not read, if the survey has changed once more."""
        key = self._batch_key
        if self._now(key) is self._target:
            return
        known = self._known.get(key)
        for change in self._read:
            known = applied(known, change)
        self._knows(key, known)
        self._batch.clear()
        self._due[key] = None

    def _knows(self, key: Key, survey: Survey | None) -> None:
        if survey is None:
            self._known.pop(key, None)
        else:
            self._known[key] = survey
