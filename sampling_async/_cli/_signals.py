"""Handle Ctrl-C and SIGTERM in a command that accounts for its input: the first signal ends only the work.

asyncio itself cancels the whole program after Ctrl-C, and does not handle SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Final, Self

import anyio

from sampling_async._cli._process import release_signals

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR: Final = b"\x1b[?25h"


class SignalHandler:
    """A context manager for event loops: the first signal cancels `scope`, the second ends the process."""

    scope: anyio.CancelScope  # the code that does the work enters it

    def __init__(self) -> None:
        self.received = 0  # the number of the first signal
        # Called after the first signal in place of the cancellation, for work that can end by itself. It bounds
        # that by the deadline of `scope`.
        self.on_first_signal: Callable[[], object] | None = None
        self._before: dict[int, Any] = {}  # the handlers to restore at the end

    @property
    def exit_code(self) -> int:
        """The exit code of the signal, by the convention of shells."""
        return 128 + self.received

    @property
    def in_words(self) -> str:
        return "interrupted" if self.received == signal.SIGINT else "terminated by SIGTERM"

    def __enter__(self) -> Self:
        self.scope = anyio.CancelScope()
        self._loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before is signal.SIG_IGN or before is None:  # what was ignored at the start stays so
                continue
            try:
                self._before[number] = signal.signal(number, self._take)
            except ValueError:
                # Python handles signals only in the main thread, and this is another one.
                break
        # Only now, with the handlers in place: a blocked signal is delivered at once.
        release_signals()
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.received:
            end_at_once(number)
        self.received = number
        # The threadsafe variant also wakes the loop, which may be waiting for I/O.
        self._loop.call_soon_threadsafe(self.on_first_signal or self.scope.cancel)


def end_at_once(number: int) -> None:
    """End the process after a second signal, whatever it is doing, such as writing to a pipe nobody reads."""
    if sys.__stderr__ is not None and sys.__stderr__.isatty():
        # A progress display may have hidden the cursor, and os._exit() runs no cleanup.
        os.write(sys.__stderr__.fileno(), _SHOW_CURSOR)
    os._exit(128 + number)
