"""Handle Ctrl-C, SIGTERM and SIGHUP: blocked until a command has begun, then the first ends only its work.

SIGHUP comes when a terminal is closed or a connection to it is lost. asyncio itself cancels the whole program
after Ctrl-C, and does not handle the others.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import FrameType

    import anyio

INTERRUPTED, TERMINATED, HUNG_UP = 130, 143, 129
_TERMINATING: Final = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}  # Windows has no SIGHUP
_SIGNALS: Final = (signal.SIGINT, *_TERMINATING)
_SHOW_CURSOR: Final = b"\x1b[?25h"
_held: list[set[int]] = []  # the signal mask from before we blocked signals; empty while we do not block them


def hold_signals() -> None:
    """Block these signals until a command is ready to account for its input."""
    if hasattr(signal, "pthread_sigmask"):  # pragma: no branch  there is none on Windows
        _held.append(signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS))


def release_signals() -> None:
    """Unblock signals. Signals that came meanwhile are delivered now."""
    while _held:
        signal.pthread_sigmask(signal.SIG_SETMASK, _held.pop())


@contextmanager
def terminated_as_interrupted() -> Generator[list[int]]:
    """Handle SIGTERM and SIGHUP as Ctrl-C would be at that moment; yield a list that notes what came."""
    came: list[int] = []

    def take(number: int, frame: FrameType | None) -> None:
        came.append(number)
        interrupt = signal.getsignal(signal.SIGINT)
        # SIGINT may be ignored, as in a program that a script runs in the background. The others still end it.
        if not callable(interrupt):
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)

    # One that is ignored, as by nohup, or has a handler already, stays as it is.
    taken = [number for number in _TERMINATING if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, take)
    try:
        yield came
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


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
        name = signal.Signals(self.received).name
        return "interrupted" if self.received == signal.SIGINT else f"terminated by {name}"

    def __enter__(self) -> Self:
        # Not needed before: the program has not loaded them when it blocks signals.
        import asyncio  # noqa: PLC0415

        import anyio  # noqa: PLC0415

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
