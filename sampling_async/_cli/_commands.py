"""The commands: what they take, and which call answers them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path  # noqa: TC003  typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sampling_async import InvalidRequestError, Journal, SamplingClient, __version__
from sampling_async._cli import _match, _quota_ids, _simulation, release_signals
from sampling_async._cli import _rendering as show
from sampling_async._cli._bulk_invite import Bulk, OutcomePrinter
from sampling_async._cli._connection import KEY_VARIABLE, Connection, calls_service, ended_by_failure, fail
from sampling_async._cli._signals import Ending
from sampling_async._cli._tally import INCOMPLETE, INTERRUPTED, USAGE, Tally

if TYPE_CHECKING:
    from sampling_async import RecontactStream

_EXIT_CODES: Final = """\
[bold]Environment:[/bold] SAMPLING_BASE_URL, SAMPLING_PANEL_GUID, SAMPLING_API_KEY. The key is never \
an argument; where it is not set and a person is there, it is asked for unseen.

[bold]Exit codes:[/bold] 0 all done - 1 incomplete: some quota IDs not sent or unknown, nothing found, or \
the output's reader went away - 2 usage - 3 the service refused (4xx) - 4 transport or server failure (3 and 4 \
also where no quota ID was answered at all) - 130 interrupted (Ctrl-C) - 143 told to end (SIGTERM).

[bold]Try it:[/bold] sampling-async demo
"""

app: Final = typer.Typer(
    help="The command line of External Sampling Services: quotas in, invites out. Tables on a terminal, JSON "
    "lines where piped.",
    epilog=_EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJSON = Annotated[bool, typer.Option("--json", help="JSON lines, on a terminal too.")]
MemberCode = Annotated[str, typer.Argument(help="The member, by your own code.", show_default=False)]
QuotaID = Annotated[int, typer.Argument(help="A quota ID from `quotas`.", min=1, show_default=False)]


def _example(*commands: str) -> str:
    return "[bold]Example:[/bold]\n\n" + "\n\n".join(f"  {command}" for command in commands)


def _version(wanted: bool) -> None:  # noqa: FBT001  how typer calls it
    if wanted:
        typer.echo(f"sampling-async {__version__}")
        raise typer.Exit


@app.callback()
def sampling_async(
    context: typer.Context,
    *,
    version: Annotated[  # noqa: ARG001  it has been shown by now
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Hold what is common to all commands."""
    if context.invoked_subcommand != "bulk-invite" or KEY_VARIABLE not in os.environ:
        release_signals()  # nothing is to be accounted for, or a person is going to be asked for the key


@app.command(
    epilog=_example(
        "sampling-async quotas",
        "sampling-async quotas --no-routables | jq '.Quotas\\[].QuotaID'",
    )
)
@calls_service
def quotas(
    connection: Connection,
    *,
    routables: Annotated[
        bool,
        typer.Option(
            "--routables/--no-routables", help="Conditions on routable questions too.", show_default=False
        ),
    ] = True,
    survey: Annotated[
        int | None,
        typer.Option(help="This survey only, with its quotas.", min=1, metavar="ID", show_default=False),
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Show the open inventory: surveys and their quotas."""
    inventory = connection.call(lambda client: client.get_quotas(include_routables=routables))
    surveys = [each for each in inventory.surveys if survey in {None, each.survey_id}]
    if survey is not None and not surveys:
        fail(f"survey {survey} has no open quotas", INCOMPLETE)
    if show.as_lines(as_json):
        ended_by_failure(lambda: show.emit_all(surveys))
        return
    screen = show.screen()
    screen.print(show.quotas_table(surveys))
    if survey is None:
        screen.print(show.inventory_caption(inventory))
    for each in surveys if survey is not None else ():
        screen.print(f"\n[bold]Quotas of survey {each.survey_id}, wave {each.wave_id}[/bold]")
        screen.print(show.quota_table(each.quotas))


@app.command(epilog=_example("sampling-async settings", "sampling-async settings | jq -r .Name"))
@calls_service
def settings(connection: Connection, *, as_json: AsJSON = False) -> None:
    """Show the panel's settings; the reference data key is masked."""
    found = connection.call(lambda client: client.get_settings())
    if show.as_lines(as_json):
        ended_by_failure(lambda: show.emit_all(map(show.masked, found)))
    else:
        show.print_pairs(show.setting_pairs(found))


@app.command(epilog=_example("sampling-async invite MEMBER-1 1100042"))
@calls_service
def invite(
    connection: Connection, member_code: MemberCode, quota_id: QuotaID, *, as_json: AsJSON = False
) -> None:
    """Ask an invite of one member to one quota."""
    made = connection.call(lambda client: client.generate_invite(member_code, quota_id))
    if show.as_lines(as_json):
        ended_by_failure(lambda: show.emit_all([made]))
    else:
        show.print_pairs(show.invite_pairs(made))


@app.command(
    "bulk-invite",
    epilog=_example(
        "sampling-async bulk-invite MEMBER-1 1100042 1100043",
        "sampling-async quotas | jq '.Quotas\\[].QuotaID' | sampling-async bulk-invite MEMBER-1",
        "sampling-async bulk-invite MEMBER-1 --file quota-ids.txt > outcomes.jsonl",
    ),
)
@calls_service
def bulk_invite(
    connection: Connection,
    member_code: MemberCode,
    quota_ids: Annotated[
        list[str] | None, typer.Argument(help="Quota IDs; - for stdin.", show_default=False)
    ] = None,
    *,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Read the quota IDs from a file; - for stdin.",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            help="Write down what is sent and answered; given again, go on where a run was ended.",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Ask invites of one member to any number of quotas; outcomes are shown as they finish.

    Quota IDs are arguments, a file, or stdin, separated by blanks, commas or
    newlines. Every ID gets one outcome, also when interrupted: the rest is
    not_sent then. A second signal ends at once. A summary closes on stderr.
    With a journal, all IDs are read before the first is sent.
    """
    asked = ended_by_failure(lambda: _asked(quota_ids or [], file))
    tally, ending = Tally(), Ending()
    shown = OutcomePrinter(tally, as_lines=show.as_lines(as_json))
    bulk = Bulk(member_code, asked, None if journal is None else Journal(journal), shown, ending)
    connection.call(bulk.run)
    if ending.came:
        fail("interrupted" if ending.exit_code == INTERRUPTED else "told to end", ending.exit_code)
    if not tally.total and not quota_ids:
        fail("no quota IDs came in", USAGE)
    raise typer.Exit(tally.exit_code())


def _asked(quota_ids: list[str], file: Path | None) -> list[int] | _quota_ids.QuotaIDs:
    """Return the quota IDs of whichever source was given: a list, or a stream."""
    if quota_ids and quota_ids != ["-"]:
        if file is not None:
            raise InvalidRequestError("give quota IDs as arguments or with --file, not both")
        return _quota_ids.parsed(quota_ids)
    if file is not None and str(file) != "-":
        if not file.exists() or file.is_dir():  # not is_file(): it may be a FIFO
            raise InvalidRequestError("--file names no file that is there")
        return _quota_ids.QuotaIDs(partial(_quota_ids.file_source, file))
    if not quota_ids and _quota_ids.stdin_is_terminal():
        raise InvalidRequestError("give quota IDs as arguments, with --file, or piped into stdin")
    return _quota_ids.QuotaIDs(_quota_ids.stdin_source)


@app.command(
    epilog=_example(
        "sampling-async recontact 1100042 > members.txt",
        'sampling-async recontact 1100042 --after "$(tail -n 1 members.txt)" >> members.txt',
    )
)
@calls_service
def recontact(
    connection: Connection,
    quota_id: QuotaID,
    *,
    max_results: Annotated[
        int | None,
        typer.Option(
            help="Member codes a page. Default: the service's.", min=1, metavar="N", show_default=False
        ),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(help="Resume after this member code.", metavar="MEMBER_CODE", show_default=False),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Stop after so many member codes.", min=1, metavar="N", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines instead of plain text.")] = False,
) -> None:
    """List the members wanted back for a quota of a recontact survey, one a line."""

    async def work(client: SamplingClient) -> None:
        async with client.stream_recontact_members(quota_id, max_results=max_results, after=after) as codes:
            await _follow_codes(codes, limit, as_json=as_json)

    connection.call(work)


async def _follow_codes(codes: RecontactStream, limit: int | None, *, as_json: bool) -> None:
    count = 0
    try:
        async for code in codes:
            if as_json:
                show.emit_json({"MemberCode": code})
            else:
                show.emit_code(code)
            count += 1
            if count == limit:
                return
    except BaseException as exc:
        if count and not isinstance(exc, BrokenPipeError):
            typer.echo(f"{count:,} member codes printed; resume with --after <the last code printed>", err=True)
        raise


app.command(
    epilog=_example(
        "sampling-async match panel.parquet",
        "sampling-async match panel.csv --inventory quotas.json --column 1001538=age --column member_code=id "
        "--top 20 --output best.parquet",
        "sampling-async match \"SELECT * FROM 'panels/*.parquet' WHERE active\" --requests 20 > requests.jsonl",
    )
)(calls_service(_match.match))
app.command(
    epilog=_example(
        "sampling-async simulate", "sampling-async simulate --port 0 --latency-base 0.05 --workers 4"
    )
)(_simulation.simulate)
app.command(epilog=_example("sampling-async demo", "sampling-async demo --faults"))(_simulation.demo)
