"""The option for a store of notifications: a file, or the address of a PostgreSQL database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

from sampling_async import InvalidRequestError
from sampling_async._cli._options import option
from sampling_async.notifications import PostgresStore, SqlStore
from sampling_async.notifications._stores import store_of

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
