"""The process of a command: its exit codes by signal, its streams, and signals before a command has begun."""

from __future__ import annotations

import signal
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import FrameType
    from typing import TextIO

INTERRUPTED, TERMINATED = 130, 143
_held: list[set[int]] = []  # the signal mask from before we blocked signals; empty while we do not block them


class BestEffortStream:
    """A stream that ignores errors of writing: a full stderr must not end the work that is reported on it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def hold_signals() -> None:
    """Block SIGINT and SIGTERM until a command is ready to account for its input."""
    if hasattr(signal, "pthread_sigmask"):  # pragma: no branch  there is none on Windows
        _held.append(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM}))


def release_signals() -> None:
    """Unblock signals. Signals that came meanwhile are delivered now."""
    while _held:
        signal.pthread_sigmask(signal.SIG_SETMASK, _held.pop())


@contextmanager
def terminated_as_interrupted() -> Generator[list[int]]:
    """Handle SIGTERM as Ctrl-C would be handled at that moment; yield a list that notes its arrival."""
    came: list[int] = []

    def take(number: int, frame: FrameType | None) -> None:
        came.append(number)
        interrupt = signal.getsignal(signal.SIGINT)
        # SIGINT may be ignored, as in a program that a script runs in the background. SIGTERM still ends it.
        if not callable(interrupt):
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)

    before = signal.getsignal(signal.SIGTERM)
    # SIGTERM is ignored, or has a handler that this program must not replace.
    if before is not signal.SIG_DFL:
        yield came
        return
    signal.signal(signal.SIGTERM, take)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)
