"""Which store is meant by a path, by the address of a database, or by a store; and one operation in it."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar, cast

from sampling_async import InvalidRequestError
from sampling_async._contract.checks import shown, text_of
from sampling_async.notifications._facts import StoreConflictError
from sampling_async.notifications._postgres import PostgresStore, is_dsn
from sampling_async.notifications._sql import SqlStore
from sampling_async.notifications._sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from sampling_async._contract.checks import Text

T = TypeVar("T")
_TRIES: Final = 8
_LONGEST_PAUSE: Final = 0.05
AnyStore: TypeAlias = "SqlStore | Text"
"""A store, the path of a SQLite file, or the address of a PostgreSQL database."""


def store_of(store: AnyStore) -> SqlStore:
    """Return a store.

    Raises:
        InvalidRequestError: It is none, or the address of the database cannot be read.
    """
    text = text_of(cast("Text", store))
    if isinstance(text, str):
        text = text.strip() or text
        return PostgresStore(text) if is_dsn(text) else SqliteStore(text)
    if not isinstance(store, SqlStore):
        raise InvalidRequestError(
            f"store must be a path, a SqliteStore or a PostgresStore, not {shown(store)}; or the address of a"
            " database, as postgresql://user@host/database"
        )
    return store


def in_transaction(store: SqlStore, operation: Callable[[SqlStore], T]) -> T:
    """Run an operation in a transaction of an open store; after a conflict again, some times."""
    for _ in range(_TRIES - 1):
        try:
            with store.transaction():
                return operation(store)
        except StoreConflictError:
            time.sleep(random.uniform(0, _LONGEST_PAUSE))  # noqa: S311  no secret
    with store.transaction():
        return operation(store)


def run_once(store: SqlStore, operation: Callable[[SqlStore], T]) -> T:
    """Open a store that nobody else uses, run one operation in a transaction, and close it."""
    store.open()
    try:
        return in_transaction(store, operation)
    finally:
        store.close()
