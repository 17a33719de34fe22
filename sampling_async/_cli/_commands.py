"""The program: its commands, which are loaded when they are needed, and their help with examples to copy."""

from __future__ import annotations

import os
from contextlib import suppress
from copy import copy
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, metadata
from inspect import cleandoc
from shutil import get_terminal_size
from textwrap import indent
from typing import TYPE_CHECKING, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from sampling_async import __version__
from sampling_async._cli._connection import CONNECTION, KEY_VARIABLE, ended_by_failure
from sampling_async._cli._options import SHOWN, beyond, flag, is_plain, takes
from sampling_async._cli._signals import release_signals
from sampling_async._cli._tally import EXIT_CODES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Function = Callable[..., None]

_TABLES_FROM: Final = 72
_MOST_CELLS: Final = 100_000
_ENDLESS: Final = frozenset({"timeout", "patience"})  # options for which `inf` means: wait for ever

_WITH_CONNECTION: Final = "quotas"
_HEADING: Final = "Connection, after each command that calls the service"
_DEFAULT_PAGE: Final = "howto/command-line"
PAGES: Final[Mapping[str, str]] = {
    "campaign": "howto/campaigns",
    "demo": "tutorial",
    "doctor": "howto/doctor",
    "erase": "howto/erase",
    "match": "howto/panels",
    "notifications": "howto/notifications",
    "outcomes": "howto/notifications",
    "profile": "howto/profiles",
    "simulate": "howto/testing",
    "top": "howto/seeing",
}
"""The pages about commands, by their name or that of their group."""

# Lines of 56 columns at most, so that they fit a narrow terminal.
EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = {
    "quotas": (
        "sampling-async quotas",
        "sampling-async quotas --json > quotas.json",
        "sampling-async quotas --html inventory.html",
        "sampling-async quotas --no-routables \\\n  | jq '.Quotas[].QuotaID'",
    ),
    "settings": (
        "sampling-async settings",
        "sampling-async settings \\\n  | jq -r 'select(.Name==\"Qualified URL\").Value'",
    ),
    "invite": ("sampling-async invite MEMBER-1 1100042",),
    "bulk-invite": (
        "sampling-async bulk-invite MEMBER-1 1100042 1100043",
        "sampling-async quotas | jq '.Quotas[].QuotaID' \\\n  | sampling-async bulk-invite MEMBER-1",
        "sampling-async bulk-invite MEMBER-1 \\\n  --file quota-ids.txt > outcomes.jsonl",
    ),
    "fan-out": (
        "sampling-async match panel.csv --requests 20 \\\n  --output requests.jsonl",
        "sampling-async fan-out requests.jsonl \\\n  --journal run.journal > outcomes.jsonl",
        "sampling-async match panel.csv --requests 20 \\\n  | sampling-async fan-out > outcomes.jsonl",
    ),
    "recontact": (
        "sampling-async recontact 1100042 > members.txt",
        'sampling-async recontact 1100042 \\\n  --after "$(tail -n 1 members.txt)" >> members.txt',
    ),
    "match": (
        "sampling-async match panel.parquet",
        (
            "sampling-async match panel.csv \\\n"
            "  --inventory quotas.json --top 20 \\\n"
            "  --column 1001538=age --column member_code=id \\\n"
            "  --output best.parquet"
        ),
        (
            "sampling-async match --requests 20 \\\n"
            "  \"SELECT * FROM 'panels/*.parquet' WHERE active\" \\\n"
            "  > requests.jsonl"
        ),
    ),
    "campaign run": (
        "sampling-async campaign panel.parquet --out night \\\n  --dry-run",
        "sampling-async campaign run --out night --yes",
        (
            "sampling-async campaign run panel.csv \\\n"
            "  --column member_code=id --allocate 3 \\\n"
            "  --max-invites 20000 --hours 22:00-06:00 \\\n"
            "  --zone Europe/Berlin --out night"
        ),
    ),
    "campaign top-up": (
        "sampling-async campaign top-up night --yes",
        "sampling-async campaign top-up night new-panel.csv",
    ),
    "campaign pause": ('sampling-async campaign pause night \\\n  --reason "maintenance"',),
    "campaign resume": ("sampling-async campaign resume night",),
    "campaign limit": (
        "sampling-async campaign limit night \\\n  --invites-per-minute 600",
        "sampling-async campaign limit night --max-invites none",
    ),
    "campaign status": (
        "sampling-async campaign status night",
        "sampling-async campaign status night --json | jq .Pending",
    ),
    "campaign report": (
        "sampling-async campaign report night",
        "sampling-async campaign report night \\\n  --notifications notifications.db",
    ),
    "campaign settle": ("sampling-async campaign settle night \\\n  --notifications notifications.db",),
    "campaign compare": (
        "sampling-async campaign compare nights/*",
        "sampling-async campaign compare monday tuesday \\\n  --html nights.html",
    ),
    "doctor": (
        "sampling-async doctor",
        "sampling-async doctor --profile us --quiet",
        "sampling-async doctor --json \\\n  | jq '.Checks[] | select(.Verdict==\"fail\")'",
    ),
    "top": (
        "sampling-async top --out night",
        "sampling-async top night.sock",
        "sampling-async top night.sock --once --json | jq .limit",
    ),
    "notifications serve": (
        "sampling-async notifications serve \\\n  --store notifications.db",
        (
            "sampling-async notifications serve \\\n"
            "  --store notifications.db --port 8090 \\\n"
            "  --public-url https://partner.example/events"
        ),
    ),
    "notifications show": (
        "sampling-async notifications show \\\n  --store notifications.db",
        (
            "sampling-async notifications show --kind completion \\\n"
            "  --store notifications.db | jq .Fields.Revenue"
        ),
    ),
    "notifications tail": ("sampling-async notifications tail \\\n  --store notifications.db",),
    "notifications dead": ("sampling-async notifications dead \\\n  --store notifications.db",),
    "notifications replay": (
        "sampling-async notifications replay \\\n  --store notifications.db",
        "sampling-async notifications replay 17 18 \\\n  --store notifications.db",
    ),
    "notifications prune": (
        "sampling-async notifications prune \\\n  --store notifications.db --older-than 30",
    ),
    "notifications settings": (
        (
            "sampling-async notifications settings \\\n"
            "  --store notifications.db \\\n"
            "  --public-url https://partner.example/events"
        ),
        "sampling-async notifications settings \\\n  --store notifications.db --json > urls.json",
    ),
    "outcomes": (
        "sampling-async outcomes --store notifications.db \\\n  --invites outcomes.jsonl",
        "sampling-async outcomes --store notifications.db \\\n  --overdue 24",
        "sampling-async outcomes --store notifications.db \\\n  --output outcomes.parquet",
    ),
    "profile add": (
        "sampling-async profile add us",
        (
            "sampling-async profile add us \\\n"
            "  --base-url https://sampling.example \\\n"
            "  --panel 6f0c2b1e-3f0a-4a52-9b87-8d5a0d7a4c11"
        ),
    ),
    "erase": (
        "sampling-async erase m-17 --store notifications.db",
        "sampling-async erase - --store notifications.db \\\n  --ledger night/campaign.ledger < code.txt",
    ),
    "profile list": ("sampling-async profile list", "sampling-async profile list | jq -r .Profile"),
    "profile show": ("sampling-async profile show us",),
    "profile set-key": (
        "sampling-async profile set-key us",
        "pass show sampling/us \\\n  | sampling-async profile set-key us",
    ),
    "profile forget-key": ("sampling-async profile forget-key us",),
    "simulate": (
        "sampling-async simulate",
        "sampling-async simulate --members panel.jsonl",
        "sampling-async simulate --port 0 \\\n  --latency-base 0.05 --workers 4",
        "sampling-async simulate --panels 5 --profiles panels.toml",
        "sampling-async simulate --faults faults.json",
        "sampling-async simulate --notify urls.json",
    ),
    "demo": ("sampling-async demo", "sampling-async demo --faults"),
}


class Command(TyperCommand):
    """A command whose help ends with its examples, and whose failure is one line on stderr and an exit code."""

    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and refuse numbers that no option or argument can mean."""
        written, *_ = self.make_parser(ctx).parse_args(list(args))
        rest = super().parse_args(ctx, args)
        # A shell that asks how the line may go on gets no errors.
        params: list[Any] = [] if ctx.resilient_parsing else list(self.params)
        for each in params:
            given = ctx.params.get(each.name)
            values = given if isinstance(given, list | tuple) else (given,)
            text = str(written.get(each.name))
            if not is_plain(text) and any(type(value) in {int, float} for value in values):
                raise typer.BadParameter(f"{text[:SHOWN]!r} is not a plain number", ctx=ctx, param=each)
            for value in values:
                # An ID and a seed may be as large as the service and the generators take them.
                is_count = each.metavar == "N" and each.name != "seed"
                if each.name in _ENDLESS and value is not None and value > 1:
                    continue
                if isinstance(value, int | float) and (wrong := beyond(value, is_count=is_count)):
                    raise typer.BadParameter(f"{value} {wrong}", ctx=ctx, param=each)
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and end the program if that fails."""
        return ended_by_failure(partial(super().invoke, ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, then the examples unwrapped: wrapping would break a pipe in the middle."""
        # Each paragraph as one line, so that it wraps at the terminal's width, not at the source's.
        self.help = "\n\n".join(" ".join(each.split()) for each in cleandoc(self.help or "").split("\n\n"))
        # On a narrow terminal a table would cut the names of options, so the help is plain text there.
        if get_terminal_size().columns < _TABLES_FROM:
            self.rich_markup_mode = None
        connection = connection_options(self)
        for each in connection:
            each.hidden = True
        try:
            super().format_help(ctx, formatter)
        finally:
            for each in connection:
                each.hidden = False
        formatter.write("" if self.rich_markup_mode else "\n")
        # The path without the program: "notifications serve".
        name = " ".join(ctx.command_path.split()[1:])
        examples = EXAMPLES[name]
        formatter.write(typer.style(" Example:" if len(examples) == 1 else " Examples:", bold=True) + "\n")
        for example in examples:
            formatter.write("\n" + indent(example, "   ") + "\n")
        formatter.write("\n")
        if connection:
            formatter.write(" Connection options, such as --profile: sampling-async -h\n")
        formatter.write(f" More: {page_of(name)}\n")


class Group(TyperGroup):
    """A group of commands, and the program itself."""

    def main(self, *args: Any, **more: Any) -> Any:
        """Run the program; a size of the terminal that nothing could be read on is ignored."""
        for name, least in (("COLUMNS", 20), ("LINES", 2)):
            with suppress(ValueError):
                if least <= int(os.environ.get(name, least)) < _MOST_CELLS:
                    continue
            del os.environ[name]
        return super().main(*args, **more)

    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; that of the program has the connection options, which many commands take."""
        is_narrow = get_terminal_size().columns < _TABLES_FROM
        shared = connection_options(self.commands[_WITH_CONNECTION]) if ctx.parent is None else []
        own = self.params
        if not is_narrow:
            copies = [copy(each) for each in shared]
            for each in copies:
                each.rich_help_panel = _HEADING
            self.params = [*own, *copies]
        try:
            super().format_help(ctx, formatter)
        finally:
            self.params = own
        if shared and is_narrow:
            with formatter.section(_HEADING):
                formatter.write_dl([each.get_help_record(ctx) for each in shared])
        name = " ".join(ctx.command_path.split()[1:])
        formatter.write(f"{chr(10) * is_narrow} More: {page_of(name)}\n")


class CommandGroup(typer.Typer):
    """The commands of a group, each with options as `takes` adds them."""

    def __init__(self, help_text: str, cls: type[Group] = Group) -> None:
        super().__init__(cls=cls, help=help_text, no_args_is_help=True, rich_markup_mode="rich")

    def takes(self, name: str | None = None, **options: Any) -> Callable[[Function], Function]:
        """Add a command with these options."""
        return lambda function: self.command(name, cls=Command)(takes(**options)(function))


def connection_options(command: Any) -> list[Any]:
    """Return the options of a command that say how the service is called."""
    return [each for each in command.params if getattr(each, "rich_help_panel", None) == CONNECTION]


def page_of(command: str) -> str:
    """Return where the page about a command is: its path in the repository, or its address if there is one."""
    group = command.partition(" ")[0]
    page = f"{PAGES.get(command, PAGES.get(group, _DEFAULT_PAGE))}.html"
    with suppress(PackageNotFoundError):
        for each in metadata("sampling-async").get_all("Project-URL") or ():
            label, _, address = each.partition(", ")
            if label == "Documentation" and not address.rstrip("/").endswith(".example"):  # which is nowhere
                return f"{address.rstrip('/')}/{page}"
    return f"docs/{page.removesuffix('.html')}.md"


def _no_type(**_: Any) -> str:
    return ""


def _without_types(params: Any) -> Any:
    """Leave out the types of --help and of the options for completion: they take no value."""
    for each in params:
        # An argument's type, such as <path>, says less than its name.
        if each.param_type_name == "argument" and hasattr(each, "display_type_rich"):
            each.display_type_rich = _no_type
        if each.name in {"help", "install_completion", "show_completion"}:
            each.metavar = ""
    return params


# --- The program

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
