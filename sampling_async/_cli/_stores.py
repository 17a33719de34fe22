"""Stores of notifications: the option that names one, and the commands `outcomes` and `erase`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import typer
from rich.text import Text

from sampling_async import DecodeError, InvalidRequestError, Invite, InviteOutcome, Journal, from_json
from sampling_async._cli import _rendering as show
from sampling_async._cli._files import each_once
from sampling_async._cli._options import argument, flag, option, takes
from sampling_async._cli._sources import Lines
from sampling_async._cli._tally import DONE, INCOMPLETE
from sampling_async._contract.checks import count_of
from sampling_async._private_files import written_whole
from sampling_async._protocol.requests import member_code_of, quota_id_of
from sampling_async.notifications import (
    OutcomeLedger,
    OutcomeRow,
    PostgresStore,
    QuotaFunnel,
    SqlStore,
    SurveyEnding,
    erase_member,
)
from sampling_async.notifications._stores import store_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence


_AT_ONCE: Final = 5_000
_BLOCK: Final = 2**20  # bytes of a file of outcomes that are read at once
# Where a file of SQLite says whose it is.
_HEADER: Final = 100
_APPLICATION: Final = slice(68, 72)
_ENTERED: Final = ("Entered", 4)
_COLUMNS: Final = (
    ("Survey", 5),
    ("Wave", 6),
    ("Quota", 0),
    ("Invited", 0),
    _ENTERED,
    ("Completed", 0),
    ("Terminated", 1),
    ("Open", 2),
    ("Uninvited", 3),
    ("Revenue", 0),
)

STORE: Final = option(
    "FILE|ADDRESS",
    "What keeps the notifications: a file, or a PostgreSQL database as postgresql://user@host/database.",
    "--store",
    default=...,
)


def store_at(address: str) -> SqlStore:
    """Return the store of a file or an address, not open."""
    try:
        return store_of(address)
    except ImportError as exc:
        raise InvalidRequestError(str(exc)) from None


def is_new(address: str) -> bool:
    """Return whether an address is that of a file which is not there. A database is asked later."""
    store = store_at(address)
    return not isinstance(store, PostgresStore) and not Path(address).is_file()


def existing_store(address: str) -> SqlStore:
    """Return a store that must be there already."""
    if is_new(address):
        raise InvalidRequestError(f"{address}: no such store; `notifications serve --store FILE` makes one")
    return store_at(address)


# --- What became of invites


@takes(json="JSON lines, on a terminal too.", csv=True, quiet=True)
def outcomes(
    *,
    store: str = STORE,
    invites: list[Path] | None = option(
        "FILE",
        "Record the invites in a file first: what `fan-out` or `bulk-invite` wrote, a journal, or the"
        " ledger of a campaign.",
    ),
    rows: bool = flag("Each invite with its end, instead of quotas.", "--rows"),
    overdue: float | None = option(
        "HOURS", "Only invites without an end after so many hours; exit code 1 if there are any.", min=0
    ),
    uninvited: bool = flag("Only completes without an invite; exit code 1 if there are any.", "--uninvited"),
    output: Path | None = option("FILE", "Write all rows to a Parquet file."),
) -> None:
    """Show what became of invites: a funnel by quota, and the revenue.

    Invites are joined with the completions, terminates and reconciliations of
    a store. Invites from a file get the time of the file. Revenue is in the
    currency of its survey, which no notification names.
    """
    if output is not None and show.wanted.csv:
        raise InvalidRequestError("--output writes a Parquet file, --csv to stdout: give one of them")
    if invites and is_new(store):
        show.note(f"{store} is a new store: it has no notifications yet")
    ledger = OutcomeLedger(store_at(store))
    for file in invites or ():
        count = _record(ledger, file)
        show.note(f"New invites from {file}: {count:,}")
    existing_store(store)
    if output is not None:
        table = ledger.read_arrow()
        with written_whole(output) as unfinished:
            # The table has needed the extra already.
            import_module("pyarrow.parquet").write_table(table, unfinished)
        _tell_of_currencies(table.column("survey_id").unique().to_pylist())
        show.note(f"Rows written to {output}: {table.num_rows:,}")
        return
    if rows or uninvited or overdue is not None:
        if uninvited:
            found = anyio.run(ledger.uninvited)
        else:
            found = list(ledger.read_rows()) if overdue is None else anyio.run(ledger.overdue, overdue)
        _show_rows(found)
        raise typer.Exit(INCOMPLETE if found and not rows else DONE)
    _show_funnel(ledger.read_funnel())


def _record(ledger: OutcomeLedger, file: Path) -> int:
    at = datetime.fromtimestamp(file.stat().st_mtime, UTC)

    async def record() -> int:
        batch, count = list[InviteOutcome](), 0
        async for outcome in _outcomes_in(file):
            batch.append(outcome)
            if len(batch) == _AT_ONCE:
                count += await ledger.invited(batch, at=at)
                batch = []
        return count + await ledger.invited(batch, at=at)

    return anyio.run(record)


async def _outcomes_in(file: Path) -> AsyncIterator[InviteOutcome]:
    with file.open("rb") as lines:
        start = lines.read(_HEADER)
        if start.startswith(b"SQLite format 3"):
            found = Journal(file).outcomes()
            if start[_APPLICATION] == b"SANC":
                from sampling_async.campaign import Campaign  # noqa: PLC0415  needs the extra `panel`

                found = Campaign(None, ledger=file).invites()
            async for outcome in found:
                yield outcome
            return
        lines.seek(0)
        parser, block = Lines(str(file), _invites_in), start
        while block:
            block = lines.read(_BLOCK)
            for outcome in parser.feed(block):
                yield outcome


def _invites_in(line: bytes) -> list[InviteOutcome]:
    """Parse a line that is an outcome; return it if it is an invite."""
    try:
        fields = json.loads(line, object_pairs_hook=each_once)
        if fields["Invite"] is None:
            return []
        invite = from_json(Invite, json.dumps(fields["Invite"]))
        member_code, quota_id = member_code_of(fields["MemberCode"]), quota_id_of(fields["QuotaID"])
    except (ValueError, KeyError, TypeError, RecursionError, DecodeError):
        raise InvalidRequestError(
            "no outcome as `fan-out` or `bulk-invite` writes it; of a campaign, give its ledger"
        ) from None
    return [InviteOutcome(member_code, quota_id, "invited", invite)]


def _tell_of_currencies(survey_ids: Iterable[int]) -> None:
    """Say that amounts of several surveys may not add; no notification has a currency."""
    if len({*survey_ids}) > 1:
        show.note(
            "Revenue is in the currency of each survey's price. Notifications name no currency, so add only"
            " surveys that pay in the same one; `campaign report` has the sum of each currency"
        )


def _show_rows(rows: Sequence[OutcomeRow]) -> None:
    _tell_of_currencies(row.survey_id for row in rows if row.revenue)
    if show.as_lines():
        show.emit_rows(map(show.fields_of, rows), show.names_of(OutcomeRow))
        return
    if not rows:
        show.screen().print(Text("None.", "dim"))
        return
    table = show.new_table("Member", "Survey", "Quota", "Ending", "Reason", "Revenue", right=["Revenue"])
    for row in rows:
        quota = "" if row.quota_id is None else str(row.quota_id)
        ending = row.ending if row.invited_at else f"{row.ending}, no invite"
        cells = (str(row.survey_id), quota, ending, show.plain(row.reason), f"{row.revenue:,.2f}")
        table.add_row(show.plain(row.member_code), *cells)
    show.screen().print(table)


def _show_funnel(funnel: list[QuotaFunnel]) -> None:
    paid = {row.survey_id for row in funnel if row.revenue}
    _tell_of_currencies(paid)
    if show.as_lines():
        show.emit_rows(map(show.fields_of, funnel), show.names_of(QuotaFunnel))
        return
    screen = show.screen()
    # Entries are known only if somebody recorded them; else a column of zeros would say that nobody entered.
    has_entries = any(row.entered for row in funnel)
    cells = [
        (
            str(row.survey_id),
            str(row.wave_id),
            "" if row.quota_id is None else str(row.quota_id),
            f"{row.invited:,}",
            *([f"{row.entered:,}"] if has_entries else []),
            *(f"{count:,}" for count in (row.completed, row.terminated, row.open, row.uninvited)),
            f"{row.revenue:,.2f}",
        )
        for row in funnel
    ]
    columns = [column for column in _COLUMNS if has_entries or column != _ENTERED]
    screen.print(show.fitting_table(cells, columns, screen.width))
    total = sum((row.revenue for row in funnel), Decimal(0))
    reasons = sum((Counter(row.reasons) for row in funnel), Counter[str]())
    text = f"{sum(row.invited for row in funnel):,} invited, {sum(row.completed for row in funnel):,} completed"
    condition = ", if all surveys pay in one currency" if len(paid) > 1 else ""
    screen.print(Text(f"\n{text}, revenue {total:,.2f}{condition}", style="bold"))
    if taken_back := sum(row.reconciled for row in funnel):
        screen.print(Text(f"  {taken_back:,}  {SurveyEnding.RECONCILED}: revenue was taken back"))
    for reason, count in reasons.most_common():
        screen.print(
            Text(f"  {count:,}  ").append_text(
                show.plain(f"{SurveyEnding.TERMINATED}: {reason or 'no reason'}")
            )
        )


# --- A member is erased


@takes(quiet=True)
def erase(
    member: str = argument("MEMBER", "The member code; - to read it from stdin."),
    *,
    store: list[str] | None = option(
        "FILE|ADDRESS", "A store of notifications, outcomes and links; may be given again.", "--store"
    ),
    ledger: list[Path] | None = option("FILE", "The ledger of a campaign; may be given again.", "--ledger"),
    journal: list[Path] | None = option("FILE", "The journal of a fan-out; may be given again.", "--journal"),
) -> None:
    """Erase a member from stores of notifications, ledgers of campaigns, journals.

    Revenue, dates and IDs stay, under a code that nobody has. Exit code 1
    says that a notification which was not understood may name the member.
    """
    if not (store or ledger or journal):
        raise InvalidRequestError("name what to erase the member from: --store, --ledger, --journal")
    # PowerShell writes a byte order mark: with it, the code would be that of nobody.
    code = sys.stdin.readline().lstrip("\ufeff").rstrip("\r\n") if member == "-" else member
    if not code:
        raise InvalidRequestError("the member code is empty")
    is_unclear = False
    for address in store or ():
        opened = existing_store(address)
        erased = erase_member(opened, code)
        show.note(
            f"{opened!r}: {count_of(erased.facts, 'fact')} ({erased.unhandled:,} were not handled),"
            f" {count_of(erased.invites, 'invite')}, {count_of(erased.links, 'link')},"
            f" {count_of(erased.receipts, 'receipt')}"
        )
        if erased.unclear:
            is_unclear = True
            typer.echo(f"not understood, look at them: facts {', '.join(map(str, erased.unclear))}", err=True)
    for path in ledger or ():
        # Needs the extra `panel`.
        from sampling_async.campaign import erase_from_ledger  # noqa: PLC0415

        show.note(f"{path}: {'erased' if erase_from_ledger(path, code) else 'no such member'}")
    for path in journal or ():
        show.note(f"{path}: {count_of(anyio.run(Journal(path).erase, code), 'note')} of requests and responses")
    raise typer.Exit(INCOMPLETE if is_unclear else DONE)
