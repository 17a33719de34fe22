"""Stores of notifications: the option that names one, and the command `erase`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, TypeAlias

import anyio
import typer

from sampling_async import InvalidRequestError, Journal
from sampling_async._cli import _rendering as show
from sampling_async._cli._options import argument, option, takes
from sampling_async._cli._tally import DONE, INCOMPLETE
from sampling_async._contract.checks import count_of
from sampling_async.notifications import PostgresStore, SqlStore, erase_member
from sampling_async.notifications._stores import sql_store_of

STORE: TypeAlias = Annotated[
    str,
    option(
        "FILE|ADDRESS",
        "What keeps the notifications: a file, or a PostgreSQL database as postgresql://user@host/database.",
        "--store",
    ),
]


def store_at(address: str) -> SqlStore:
    """Return the store of a file or an address, not open."""
    try:
        return sql_store_of(address)
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


@takes(quiet=True)
def erase(
    member: Annotated[str, argument("MEMBER", "The member code; - to read it from stdin.")],
    *,
    store: Annotated[
        list[str] | None,
        option("FILE|ADDRESS", "A store of notifications, outcomes and links; may be given again.", "--store"),
    ] = None,
    ledger: Annotated[
        list[Path] | None, option("FILE", "The ledger of a campaign; may be given again.", "--ledger")
    ] = None,
    journal: Annotated[
        list[Path] | None, option("FILE", "The journal of a fan-out; may be given again.", "--journal")
    ] = None,
) -> None:
    """Erase a member from stores of notifications, ledgers of campaigns, journals.

    Revenue, dates and IDs stay, under a code that nobody has. Exit code 1
    says that a notification which was not understood may name the member.
    """
    if not (store or ledger or journal):
        raise InvalidRequestError("name what to erase the member from: --store, --ledger, --journal")
    code = sys.stdin.readline().rstrip("\n") if member == "-" else member
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
