"""The command line, `sampling-async`: quotas, invites, recontact lists and settings; a simulator and a demo.

Tables on a terminal, JSON lines in the contract's own names where the output is piped. Progress, summaries and
errors go to stderr. Address and panel come from SAMPLING_BASE_URL and SAMPLING_PANEL_GUID or from options; the
key comes from SAMPLING_API_KEY or a hidden prompt, never from an argument, where `ps` and the shell's history
would show it.

Exit codes:
    0: All is done; every quota ID was answered.
    1: Incomplete: some quota IDs ended `not_sent` or `unknown`, the reader of the output went away, or, in the
        demo, client and ledger disagree.
    2: Usage: an argument, the address, the panel or the key is missing or cannot be sent.
    3: The service refused (4xx); nothing of the call was done.
    4: Transport or server failure: no answer, 5xx, an answer that cannot be read.
    130: Interrupted by Ctrl-C (SIGINT).
    143: Told to end by SIGTERM, which is taken as Ctrl-C is.

After the first signal `bulk-invite` accounts for every ID: what it was given and did not ask is printed as
`not_sent`. So is the rest of a file, and what still comes of a pipe within a second. A second signal ends the
program at once. Until a command has begun, signals are held back.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import FrameType

INTERRUPTED, TERMINATED = 130, 143
_NEEDED = {"rich", "typer"}
_held: list[set[int]] = []
"""The signals that were held back before we did, if we do."""


def main() -> None:
    """Run the command line; say in one line what to install where typer and rich are missing."""
    # A stream that was closed from outside is None, which nothing expects.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115, PTH123  as long as the program
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115, PTH123
    with _terminated_as_interrupted() as came:
        try:
            _hold_signals()
            try:
                _run()
            finally:
                release_signals()
        except KeyboardInterrupt:  # where a command has not begun, or has ended
            raise SystemExit(TERMINATED if came else INTERRUPTED) from None
        except SystemExit as exc:
            if came and exc.code == INTERRUPTED:
                raise SystemExit(TERMINATED) from None
            raise


def _hold_signals() -> None:
    """Hold back what ends the program until somebody is there to account for what it was given."""
    if hasattr(signal, "pthread_sigmask"):  # pragma: no branch  there is none on Windows
        _held.append(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM}))


def release_signals() -> None:
    """Hold back nothing any more; what came meanwhile comes now."""
    while _held:
        signal.pthread_sigmask(signal.SIG_SETMASK, _held.pop())


@contextmanager
def _terminated_as_interrupted() -> Generator[list[int]]:
    """Have SIGTERM do what Ctrl-C would do at that moment; gives where it is noted."""
    came: list[int] = []

    def take(number: int, frame: FrameType | None) -> None:
        came.append(number)
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):  # ignored, as for a program that a script has put into the background
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)

    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL:  # it is ignored, or somebody else's
        yield came
        return
    signal.signal(signal.SIGTERM, take)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)


def _run() -> None:
    try:
        from sampling_async._cli._commands import app  # noqa: PLC0415  the extra may not be installed
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in _NEEDED:
            raise
        sys.stderr.write('sampling-async needs typer and rich: pip install "sampling-async[cli]"\n')
        raise SystemExit(2) from None
    app(prog_name="sampling-async")
