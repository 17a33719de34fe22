"""The commands: their arguments, and the calls that they make."""

from __future__ import annotations

import json
import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer
from attrs import evolve

from sampling_async import Goal, InvalidRequestError, Journal, Repeats, SamplingClient, __version__, to_json
from sampling_async._cli import _rendering as show
from sampling_async._cli import _sources
from sampling_async._cli._bulk_run import BulkRun, OutcomePrinter, of_many_members, of_one_member
from sampling_async._cli._connection import KEY_VARIABLE, ServiceOptions, fail
from sampling_async._cli._currencies import HELP, read_rates
from sampling_async._cli._help import Command, Group
from sampling_async._cli._options import JSON_LINES, argument, flag, option, takes
from sampling_async._cli._process import release_signals
from sampling_async._cli._signals import SignalHandler
from sampling_async._cli._sources import Items, QuotaIDs, RequestLines, number_of_ids
from sampling_async._cli._tally import INCOMPLETE, USAGE, Tally
from sampling_async._contract.checks import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sampling_async import RecontactStream
    from sampling_async._cli._bulk_run import Work
    from sampling_async._cli._sources import Parser

T = TypeVar("T")

_EXIT_CODES: Final = (
    "[bold]Environment:[/bold] SAMPLING_BASE_URL, SAMPLING_PANEL_GUID, SAMPLING_API_KEY; or "
    "SAMPLING_PROFILE, see `profile`. The key is never an argument; on a terminal, the command asks for a "
    "missing key and does not show it.\n\n"
    "[bold]Exit codes:[/bold] 0 all done - 1 incomplete: some quota IDs not sent or unknown, nothing "
    "found, a check of `doctor` failed, or the reader of the output ended - 2 usage - 3 the service "
    "refused (4xx) - 4 transport or server failure (3 and 4 also if no quota ID was answered) - 5 a ledger "
    "or journal is in use by another run - 6 a campaign has reached its cap - 70 a fault of this program - "
    "130 interrupted (Ctrl-C) - 143 terminated (SIGTERM).\n\n"
    "[bold]Try it:[/bold] sampling-async demo\n"
)

app: Final = typer.Typer(
    cls=Group,
    help=(
        "The command line of External Sampling Services: quotas in, invites out. Tables on a terminal, JSON "
        "lines in a pipe."
    ),
    epilog=_EXIT_CODES,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MemberCode = Annotated[str, argument("MEMBER", "The member's code in your panel.")]
QuotaID = Annotated[int, argument("ID", "A quota ID, as `quotas` shows it.", min=1)]
JournalFile = Annotated[
    Path | None,
    option(
        "FILE",
        "A file that notes what is sent and answered. With the same file, a new run continues an "
        "interrupted one.",
        "--journal",
    ),
]


AimOption = Annotated[
    Goal | None,
    option(
        "throughput|first",
        "throughput: as few requests as possible. first: the last outcome as early as possible. Default: "
        "throughput.",
        "--goal",
    ),
]


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
    version: Annotated[  # noqa: ARG001  it has been shown by now
        bool, flag("Show the version and exit.", "--version", callback=_version, is_eager=True)
    ] = False,
    no_color: Annotated[  # noqa: ARG001  it was heeded before
        bool, flag("Print without colours, as with NO_COLOR. It may stand after a command too.", "--no-color")
    ] = False,
) -> None:
    """Hold what is common to all commands."""
    # The two commands keep signals blocked until they can account for their input; the others need no account.
    # The key may be typed at a prompt, and Ctrl-C must work meanwhile.
    if context.invoked_subcommand not in _ACCOUNTS or KEY_VARIABLE not in os.environ:
        release_signals()


@app.command(cls=Command)
@takes(service=ServiceOptions, json="Print one JSON document, in the form of the service.", csv=True)
def quotas(
    service: ServiceOptions,
    *,
    routables: Annotated[
        bool,
        flag(
            "Include conditions on routable questions, or leave them out.",
            "--routables/--no-routables",
            show_default=False,
        ),
    ] = True,
    survey: Annotated[int | None, option("ID", "Show only this survey, with its quotas.", min=1)] = None,
    currency_rates: Annotated[Path | None, option("FILE", f"{HELP} For the table and --html.")] = None,
    html: Annotated[
        Path | None,
        option("FILE", "Write a page: price by LOI by IR, what a minute is worth. With a panel: see `match`."),
    ] = None,
) -> None:
    """Show the open inventory: surveys and their quotas. In a pipe, each survey is a line of JSON.

    With --csv, each quota is a row.
    """
    rates = read_rates(currency_rates)
    inventory = service.call(lambda client: client.get_quotas(include_routables=routables))
    surveys = tuple(each for each in inventory.surveys if survey in {None, each.survey_id})
    if survey is not None and not surveys:
        fail(f"survey {survey} has no open quotas", INCOMPLETE)
    if html is not None:
        from sampling_async._cli._pages import write_inventory_page  # noqa: PLC0415  only for this

        write_inventory_page(html, surveys, rates=rates)
    if show.wanted.csv:
        show.emit_quotas(inventory, surveys)
    elif show.wanted.json:
        show.emit_all([evolve(inventory, surveys=surveys)])
    elif html is not None:
        return
    elif show.as_lines():
        show.emit_all(surveys)
    else:
        screen = show.screen()
        screen.print(show.quotas_table(surveys, screen.width, rates.names if rates else None))
        if survey is None:
            screen.print(show.inventory_caption(inventory))
        for each in surveys if survey is not None else ():
            screen.print(f"\n[bold]Quotas of survey {each.survey_id}, wave {each.wave_id}[/bold]")
            screen.print(show.quota_table(each.quotas))


@app.command(cls=Command)
@takes(service=ServiceOptions, json=JSON_LINES, csv=True)
def settings(service: ServiceOptions) -> None:
    """Show the panel's settings; the reference data key is masked."""
    found = service.call(lambda client: client.get_settings())
    if show.as_lines():
        show.emit_all(map(show.masked, found))
    else:
        show.print_pairs(show.setting_pairs(found))


@app.command(cls=Command)
@takes(service=ServiceOptions, json=JSON_LINES)
def invite(service: ServiceOptions, member_code: MemberCode, quota_id: QuotaID) -> None:
    """Request an invite of one member to one quota."""
    made = service.call(lambda client: client.generate_invite(member_code, quota_id))
    if show.as_lines():
        show.emit_all([made])
    else:
        show.print_pairs((name, show.plain(str(value))) for name, value in json.loads(to_json(made)).items())


@app.command("bulk-invite", cls=Command)
@takes(service=ServiceOptions, json=JSON_LINES, csv=True, quiet=True)
def bulk_invite(
    service: ServiceOptions,
    member_code: MemberCode,
    quota_ids: Annotated[list[str] | None, argument("IDS", "Quota IDs; - for stdin.")] = None,
    *,
    file: Annotated[
        Path | None,
        option(
            "FILE",
            "Read the quota IDs from a file; - for stdin. If the file holds requests of `match "
            "--requests`, only the lines of this member count.",
        ),
    ] = None,
    journal: JournalFile = None,
    goal: AimOption = None,
) -> None:
    """Request invites of one member to any number of quotas, and show each outcome as it is known.

    Quota IDs come from arguments, a file, or stdin, separated by blanks,
    commas or newlines. Every ID gets one outcome. After an interruption, the
    rest is not_sent; a second signal ends the command at once. A summary
    follows on stderr. With a journal, all IDs are read before the first is
    sent.
    """
    parser, written = QuotaIDs(_name_of(file), member_code), Journal(journal) if journal else None
    asked: list[int] | Items[int]
    if not quota_ids or quota_ids == ["-"]:
        asked = _items(file, parser, is_dash=bool(quota_ids))
    elif file is None:
        asked = _sources.parsed(quota_ids)
    else:
        raise InvalidRequestError("give quota IDs as arguments or with --file, not both")
    tally = _bulk(service, of_one_member(member_code, asked, written, goal))
    if parser.of_others and not tally.total:
        fail("no request is for this member; `fan-out` sends the requests of all members", USAGE)
    if parser.of_others:
        others = count_of(parser.of_others, "request")
        show.note(f"sampling-async: skipped {others} of other members; `fan-out` sends all")
    if not tally.total:
        fail("the input has no quota IDs", USAGE)
    raise typer.Exit(tally.exit_code())


@app.command("fan-out", cls=Command)
@takes(service=ServiceOptions, json=JSON_LINES, csv=True, quiet=True)
def fan_out(
    service: ServiceOptions,
    requests: Annotated[
        Path | None, argument("FILE", "A file of requests; - for stdin. Default: stdin.")
    ] = None,
    *,
    file: Annotated[Path | None, option("FILE", "The file of requests, as an option.")] = None,
    journal: JournalFile = None,
    goal: AimOption = None,
    repeats: Annotated[
        Repeats,
        option(
            "once|ask",
            "A pair of member and quota that comes again. once: it is not sent again and gets the outcome "
            "of the first. ask: it is sent again, which may make a second invite.",
        ),
    ] = "once",
) -> None:
    """Request invites of many members, each to its own quotas, and show each outcome as it is known.

    Requests are lines of JSON with MemberCode and QuotaIDs, as `match
    --requests` writes them. They are read while they are sent. Every ID gets
    one outcome. After an interruption, the rest is not_sent; a second signal
    ends the command at once. A summary follows on stderr.
    """
    written = Journal(journal) if journal else None
    if requests is not None and file is not None:
        raise InvalidRequestError("give the requests as an argument or with --file, not both")
    path = requests or file
    source = _items(path, RequestLines(_name_of(path)), is_dash=False, what="requests")
    count = None if path is None else partial(number_of_ids, path)
    work = of_many_members(source, written, goal, repeats, count)
    tally = _bulk(service, work, with_members=True)
    if not tally.total:
        fail("the input has no requests", USAGE)
    raise typer.Exit(tally.exit_code())


def _bulk(service: ServiceOptions, work: Work, *, with_members: bool = False) -> Tally:
    """Run the requests to their end and return the counts of outcomes."""
    tally, signals = Tally(), SignalHandler()
    shown = OutcomePrinter(tally, as_lines=show.as_lines(), with_members=with_members)
    service.call(BulkRun(work, shown, signals).run)
    if signals.received:
        fail(signals.in_words, signals.exit_code)
    return tally


def _name_of(file: Path | None) -> str:
    return _sources.STDIN if file is None or str(file) == "-" else str(file)


def _items(file: Path | None, parser: Parser[T], *, is_dash: bool, what: str = "quota IDs") -> Items[T]:
    if file is not None and str(file) != "-":
        if file.is_dir():
            raise InvalidRequestError(f"{file} is a folder, not a file")
        # Not is_file(), which is false for a FIFO.
        if not file.exists():
            raise InvalidRequestError(f"{file}: the file does not exist")
        return Items(lambda: file.open("rb", buffering=0), parser)
    if file is None and not is_dash and _sources.stdin_is_terminal():
        ways = "as arguments, with --file," if what == "quota IDs" else "as a file,"
        raise InvalidRequestError(f"give {what} {ways} or through a pipe")
    return Items(_sources.stdin_source, parser)


@app.command(cls=Command)
@takes(service=ServiceOptions, json="Print JSON lines instead of plain text.", csv=True)
def recontact(
    service: ServiceOptions,
    quota_id: QuotaID,
    *,
    max_results: Annotated[
        int | None, option("N", "Member codes per page. Default: set by the service.", min=1)
    ] = None,
    after: Annotated[str | None, option("MEMBER", "Resume after this member code.")] = None,
    limit: Annotated[int | None, option("N", "Stop after this many member codes.", min=1)] = None,
) -> None:
    """List the members that a recontact survey wants back for a quota, one per line."""

    async def work(client: SamplingClient) -> None:
        async with client.stream_recontact_members(quota_id, max_results=max_results, after=after) as codes:
            await _follow_codes(codes, limit)

    service.call(work)


async def _follow_codes(codes: RecontactStream, limit: int | None) -> None:
    count = 0
    try:
        async for code in codes:
            if show.wanted.json or show.wanted.csv:
                show.emit_json({"MemberCode": code})
            else:
                show.emit_code(code)
            count += 1
            if count == limit:
                return
        show.emit_head(["member_code"])
    except BaseException as exc:
        # Cancellation by Ctrl-C counts too: codes that were printed need not be read again.
        if count and not isinstance(exc, BrokenPipeError):
            typer.echo(
                f"{count_of(count, 'member code')} printed; resume with --after <the last code printed>",
                err=True,
            )
        raise


def app_for(arguments: Sequence[str] | None = None) -> typer.Typer:
    """Return the command line with the part that arguments name, since each loads what nobody else needs."""
    # After an option of the program itself, such as --help, and after mistakes, all are needed.
    named = arguments[0] if arguments and not arguments[0].startswith("-") else None
    for name in _PARTS if named is None or named not in {*_PARTS, *_HERE} else {named} - _HERE:
        part = import_module(f"sampling_async._cli.{_PARTS[name]}")
        if name in _GROUPS:
            app.add_typer(part.app, name=name)
        else:
            app.command(name, cls=Command)(getattr(part, name))
    return app


# The commands above; and in modules of their own, the others, in the order of the help.
_HERE: Final = {"quotas", "settings", "invite", "bulk-invite", "fan-out", "recontact"}
_PARTS: Final = {
    "match": "_match",
    "campaign": "_campaign",
    "doctor": "_doctor",
    "top": "_top",
    "simulate": "_simulation",
    "demo": "_simulation",
    "outcomes": "_outcomes",
    "notifications": "_notifications",
    "erase": "_erase",
    "profile": "_profile",
}
_GROUPS: Final = {"campaign", "notifications", "profile"}
