"""Which store is meant by a path, by the address of a database, or by a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, cast

from sampling_async import InvalidRequestError
from sampling_async._contract.checks import shown, text_of
from sampling_async.notifications._postgres import PostgresStore, is_dsn
from sampling_async.notifications._sql import SqlStore
from sampling_async.notifications._sqlite import SqliteStore

if TYPE_CHECKING:
    from sampling_async._contract.checks import Text
    from sampling_async.notifications._store import Store

AnyStore: TypeAlias = "Store | Text"
"""A store, the path of a SQLite file, or the address of a PostgreSQL database."""


def store_of(store: AnyStore) -> Store:
    """Return a store.

    Raises:
        InvalidRequestError: It is none, or the address of the database cannot be read.
    """
    text = text_of(cast("Text", store))
    if isinstance(text, str):
        text = text.strip() or text
        return PostgresStore(text) if is_dsn(text) else SqliteStore(text)
    if isinstance(store, type) or not callable(getattr(store, "receive_all", None)):
        raise InvalidRequestError(
            f"store must be a path, or a subclass of Store such as SqliteStore, not {shown(store)}; or the"
            " address of a database, as postgresql://user@host/database"
        )
    return cast("Store", store)


def sql_store_of(store: AnyStore) -> SqlStore:
    """Return a store of SQLite or PostgreSQL which nobody else uses, not yet open.

    Raises:
        InvalidRequestError: It is another one.
    """
    made = store_of(store)
    if not isinstance(made, SqlStore):
        raise InvalidRequestError(
            f"this needs a SqliteStore or a PostgresStore, or its path or address, not {shown(store)}"
        )
    return made.copy()
