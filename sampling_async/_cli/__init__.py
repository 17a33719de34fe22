"""The command line, `sampling-async`: quotas, invites, recontact lists and settings; a simulator and a demo.

Output is a table on a terminal, and JSON lines in the contract's own names if it is piped. Progress, summaries
and errors go to stderr; with --quiet, warnings and errors only. Address and panel come from SAMPLING_BASE_URL
and SAMPLING_PANEL_GUID, from options, or from a profile. The key comes from SAMPLING_API_KEY, from where the
profile says, or from a hidden prompt. It is never an argument, because `ps` and the shell's history would show
it.

Exit codes:
    0: All is done; every quota ID got a result. `doctor`: no check failed, though some may warn.
    1: Incomplete: some quota IDs ended `not_sent` or `unknown`, pairs of a campaign are pending, or the reader
        of the output went away. Or the result needs a look: a check of `doctor`
        failed, `notifications settings` found another URL at the operator, `outcomes --overdue` or
        `--uninvited` found invites, client and ledger of the `demo` disagree, the process that `top` showed
        went away. Or there was nothing to do: no such survey, no fact to `replay`, no key to
        `profile forget-key`, no pair for a campaign.
    2: Usage: an argument, the address, the panel or the key is missing or cannot be sent, the file of profiles
        or another file breaks a rule, or a profile and an option name two panels.
    3: The service refused (4xx); nothing of the call was done.
    4: Transport or server failure: no response, 5xx, or a response that cannot be read. Or this machine could
        not do it: the disk is full, a file cannot be written, a port is in use.
    5: A ledger or journal is in use by another run; nothing was done. Try again when that run has ended.
    6: A campaign has reached its cap, `--max-invites` or `--max-spend`: pairs are pending because you said so.
    70: A fault of this program, in one line. With `PYTHONDEVMODE=1` in the environment it shows where.
    129: Ended by SIGHUP, as when a terminal is closed; handled like Ctrl-C.
    130: Interrupted by Ctrl-C (SIGINT).
    143: Ended by SIGTERM, which is handled like Ctrl-C.

After the first signal, `bulk-invite` and `fan-out` account for every ID: IDs that were given but not sent are
printed as `not_sent`. That includes the rest of a file, and IDs that a pipe still delivers within a second.
`campaign run` sends no more requests, waits up to ten seconds for those in flight, and writes its files. A
second signal ends the program at once. Until a command has begun, signals are blocked.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from sampling_async._cli._signals import (
    INTERRUPTED,
    hold_signals,
    release_signals,
    terminated_as_interrupted,
)
from sampling_async._contract.extras import install
from sampling_async._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

_NEEDED = {"rich", "typer"}


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


def main() -> None:
    """Run the command line. If typer or rich is missing, say in one line what to install."""
    # A stream that was closed before the program started is None, and libraries do not expect that.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115, PTH123  as long as the program
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, PTH123
    sys.stderr = cast("TextIO", BestEffortStream(sys.stderr or open(os.devnull, "w")))  # noqa: SIM115, PTH123
    with suppress(AttributeError, ValueError):  # not of files of the operating system, as in a test
        # A terminal's encoding may lack characters, and what comes in may be anything.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    with terminated_as_interrupted() as came:
        try:
            hold_signals()
            try:
                _run()
            finally:
                release_signals()
        except KeyboardInterrupt:
            # The signal came before a command had begun, or after it had ended.
            raise SystemExit(128 + came[0] if came else INTERRUPTED) from None
        except SystemExit as exc:
            # SIGTERM and SIGHUP were handled like Ctrl-C; only the exit code differs.
            if came and exc.code == INTERRUPTED:
                raise SystemExit(128 + came[0]) from None
            raise


def _run() -> None:
    try:
        if sys.argv[1:] == ["--version"]:  # without what takes time to load
            sys.stdout.write(f"sampling-async {__version__}\n")
            sys.stdout.flush()
        else:
            _run_app()
    except OSError as exc:
        # Commands report their own failures. This one is of the help, the version or a completion.
        from sampling_async._cli._connection import drop_unwritten  # noqa: PLC0415
        from sampling_async._cli._tally import FAILED  # noqa: PLC0415

        drop_unwritten()
        sys.stderr.write(f"sampling-async: {exc.strerror or type(exc).__name__}\n")
        raise SystemExit(FAILED) from None


def _call(app_for: Callable[[list[str]], Any]) -> None:
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if "--no-color" in arguments[:end]:
        # It may stand anywhere. Libraries know NO_COLOR.
        os.environ["NO_COLOR"] = "1"
        arguments = [each for each in arguments[:end] if each != "--no-color"] + arguments[end:]
    app = app_for(arguments)
    if "--json" not in arguments:
        app(arguments, prog_name="sampling-async")
        return
    # What is wrong in the arguments is JSON too, as the other errors.
    from sampling_async._cli import _rendering as show  # noqa: PLC0415  as the commands, which have loaded it

    show.wanted.errors_as_json = True
    try:
        code = app(arguments, prog_name="sampling-async", standalone_mode=False)
    except Exception as exc:
        # The library has its own copy of click, whose classes have no public place.
        format_message, code = getattr(exc, "format_message", None), getattr(exc, "exit_code", None)
        if format_message is None or code is None:
            raise
        show.print_error(format_message(), code)
    raise SystemExit(code if isinstance(code, int) else 0)


def _run_app() -> None:
    # httpx imports a command line of its own, which takes 45 ms, unless that cannot be imported.
    cast("dict[str, object]", sys.modules).setdefault("httpx._main", None)
    if "_SAMPLING_ASYNC_COMPLETE" in os.environ:
        os.environ["COLUMNS"] = "1000"  # typer wraps a help text there too, and fish takes each line for a word
    try:
        from sampling_async._cli._commands import app_for  # noqa: PLC0415  the extra may not be installed
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in _NEEDED:
            raise
        sys.stderr.write(f"sampling-async needs typer and rich: {install('cli')}\n")
        raise SystemExit(2) from None
    _call(app_for)
