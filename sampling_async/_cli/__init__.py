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
    130: Interrupted by Ctrl-C; what was left over has been printed.
"""

from __future__ import annotations

import os
import sys

_NEEDED = {"rich", "typer"}


def main() -> None:
    """Run the command line; say in one line what to install where typer and rich are missing."""
    # A stream that was closed from outside is None, which nothing expects.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115, PTH123  as long as the program
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115, PTH123
    try:
        _run()
    except KeyboardInterrupt:  # before a command has begun
        raise SystemExit(130) from None


def _run() -> None:
    try:
        from sampling_async._cli._commands import app  # noqa: PLC0415  the extra may not be installed
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in _NEEDED:
            raise
        sys.stderr.write('sampling-async needs typer and rich: pip install "sampling-async[cli]"\n')
        raise SystemExit(2) from None
    app(prog_name="sampling-async")
