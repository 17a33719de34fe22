"""The program: its help, and the modules of its commands, which are loaded when they are needed."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Final

import typer

from sampling_async import __version__
from sampling_async._cli._connection import KEY_VARIABLE
from sampling_async._cli._help import Command, Group
from sampling_async._cli._options import flag
from sampling_async._cli._signals import release_signals
from sampling_async._cli._tally import EXIT_CODES

if TYPE_CHECKING:
    from collections.abc import Sequence

_EPILOG: Final = (
    "[bold]Environment:[/bold] SAMPLING_BASE_URL, SAMPLING_PANEL_GUID, SAMPLING_API_KEY; or "
    "SAMPLING_PROFILE, see `profile`. The key is never an argument; on a terminal, the command asks for a "
    "missing key and does not show it.\n\n"
    f"[bold]Exit codes:[/bold] {' - '.join(f'{code} {meaning}' for code, meaning in EXIT_CODES.items())}.\n\n"
    "[bold]Try it:[/bold] sampling-async demo\n"
)

app: Final = typer.Typer(
    cls=Group,
    help=(
        "The command line of External Sampling Services: quotas in, invites out. Tables on a terminal, JSON "
        "lines in a pipe."
    ),
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# The commands that account for all of their input, even after a signal.
_ACCOUNTS: Final = {"bulk-invite", "fan-out"}


def _version(wanted: bool) -> None:  # noqa: FBT001  how typer calls it
    if wanted:
        typer.echo(f"sampling-async {__version__}")
        raise typer.Exit


@app.callback()
def sampling_async(
    context: typer.Context,
    *,
    version: bool = flag(  # noqa: ARG001  it has been shown by now
        "Show the version and exit.", "--version", callback=_version, is_eager=True
    ),
    no_color: bool = flag(  # noqa: ARG001  it was heeded before
        "Print without colours, as with NO_COLOR. It may stand after a command too.", "--no-color"
    ),
) -> None:
    """Hold what is common to all commands."""
    # The two commands keep signals blocked until they can account for their input; the others need no account.
    # The key may be typed at a prompt, and Ctrl-C must work meanwhile.
    if context.invoked_subcommand not in _ACCOUNTS or KEY_VARIABLE not in os.environ:
        release_signals()


def app_for(arguments: Sequence[str] | None = None) -> typer.Typer:
    """Return the command line with the part that arguments name, since each loads what nobody else needs."""
    # After an option of the program itself, such as --help, and after mistakes, all are needed.
    named = arguments[0] if arguments else None
    for name in [named] if named in _PARTS else _PARTS:
        part = import_module(f"sampling_async._cli.{_PARTS[name]}")
        if hasattr(part, "app"):
            app.add_typer(part.app, name=name)
        else:
            app.command(name, cls=Command)(getattr(part, name.replace("-", "_")))
    return app


# The module of each command or group, in the order of the help.
_PARTS: Final = {
    "quotas": "_service",
    "settings": "_service",
    "invite": "_service",
    "bulk-invite": "_bulk",
    "fan-out": "_bulk",
    "recontact": "_service",
    "match": "_match",
    "campaign": "_campaign",
    "doctor": "_doctor",
    "top": "_top",
    "simulate": "_simulation",
    "demo": "_simulation",
    "outcomes": "_stores",
    "notifications": "_notifications",
    "erase": "_stores",
    "profile": "_profile",
}
