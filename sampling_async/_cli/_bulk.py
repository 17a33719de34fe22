"""The commands `bulk-invite` and `fan-out`: their options, and where their input comes from."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from sampling_async import Goal, InvalidRequestError, Journal, Repeats
from sampling_async._cli import _rendering as show
from sampling_async._cli import _sources
from sampling_async._cli._bulk_run import BulkRun, OutcomePrinter, of_many_members, of_one_member
from sampling_async._cli._connection import ServiceOptions, fail
from sampling_async._cli._options import JSON_LINES, MemberCode, argument, option, takes
from sampling_async._cli._signals import SignalHandler
from sampling_async._cli._sources import Items, Lines, Parser, QuotaIDs, number_of_ids, requests_in
from sampling_async._cli._tally import USAGE, Tally
from sampling_async._contract.checks import count_of

if TYPE_CHECKING:
    from sampling_async._cli._bulk_run import Work

T = TypeVar("T")

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
            "--file",  # Typer 0.27 would call it --FILE, after its metavar
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
    ids = QuotaIDs(_name_of(file), member_code)
    written = Journal(journal) if journal else None
    asked: list[int] | Items[int]
    if not quota_ids or quota_ids == ["-"]:
        asked = _items(file, ids, is_dash=bool(quota_ids))
    elif file is None:
        asked = _sources.parsed(quota_ids)
    else:
        raise InvalidRequestError("give quota IDs as arguments or with --file, not both")
    tally = _bulk(service, of_one_member(member_code, asked, written, goal))
    if ids.of_others and not tally.total:
        fail("no request is for this member; `fan-out` sends the requests of all members", USAGE)
    if ids.of_others:
        others = count_of(ids.of_others, "request")
        show.note(f"sampling-async: skipped {others} of other members; `fan-out` sends all")
    if not tally.total:
        fail("the input has no quota IDs", USAGE)
    raise typer.Exit(tally.exit_code())


@takes(service=ServiceOptions, json=JSON_LINES, csv=True, quiet=True)
def fan_out(
    service: ServiceOptions,
    requests: Annotated[
        Path | None, argument("FILE", "A file of requests; - for stdin. Default: stdin.")
    ] = None,
    *,
    file: Annotated[Path | None, option("FILE", "The file of requests, as an option.", "--file")] = None,
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
    source = _items(path, Lines(_name_of(path), requests_in), is_dash=False, what="requests")
    count = None if path is None else partial(number_of_ids, path)
    work = of_many_members(source, written, goal, repeats, count)
    tally = _bulk(service, work, with_members=True)
    if not tally.total:
        fail("the input has no requests", USAGE)
    raise typer.Exit(tally.exit_code())


def _bulk(service: ServiceOptions, work: Work, *, with_members: bool = False) -> Tally:
    """Run the requests to their end and return the counts of outcomes."""
    tally, signals = Tally(), SignalHandler()
    shown = OutcomePrinter(tally, with_members=with_members)
    service.call(BulkRun(work, shown, signals).run)
    if signals.received:
        fail(signals.in_words, signals.exit_code)
    return tally


def _name_of(file: Path | None) -> str:
    return "stdin" if file is None or str(file) == "-" else str(file)


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
