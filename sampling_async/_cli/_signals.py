"""What Ctrl-C and SIGTERM do to a command that has an account to give: the first ends the work only.

asyncio's own way with Ctrl-C cancels all of a program, and knows nothing of SIGTERM, which is what systemd and
Kubernetes send.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Final, Self

import anyio

from sampling_async._cli import release_signals

if TYPE_CHECKING:
    from types import FrameType, TracebackType

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR: Final = b"\x1b[?25h"


class Ending:
    """A block, inside an event loop, in which the first signal cancels `scope` and the second ends the process.

    A signal that the program was started to ignore is ignored here too.

    Attributes:
        scope: What is cancelled; to be entered by who does the work.
        came: The number of the signal that came; 0 for none.
    """

    scope: anyio.CancelScope

    def __init__(self) -> None:
        self.came = 0
        self._before: dict[int, Any] = {}  # the handlers that were there

    @property
    def exit_code(self) -> int:
        """The exit code that the signal stands for, as shells count them."""
        return 128 + self.came

    def __enter__(self) -> Self:
        self.scope = anyio.CancelScope()
        self._loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before is signal.SIG_IGN or before is None:
                continue
            try:
                self._before[number] = signal.signal(number, self._take)
            except ValueError:  # not the main thread, where there are no signals
                break
        release_signals()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.came:
            end_at_once(number)
        self.came = number
        self._loop.call_soon_threadsafe(self.scope.cancel)  # which wakes the loop up, too


def end_at_once(number: int) -> None:
    """End the process for a second signal, whatever it is doing: writing to who does not read, say."""
    if sys.__stderr__ is not None and sys.__stderr__.isatty():
        os.write(sys.__stderr__.fileno(), _SHOW_CURSOR)  # which a progress display has hidden
    os._exit(128 + number)
