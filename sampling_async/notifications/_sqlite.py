"""The store in a SQLite file, which several processes may share."""

from __future__ import annotations

import os
import sqlite3
from contextlib import ExitStack, closing, contextmanager, suppress
from math import inf
from os.path import samestat
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sampling_async._contract.checks import file_path
from sampling_async._contract.records import safe_repr
from sampling_async._journal.database import (
    connected,
    connected_to_read,
    failing,
    make_durable,
    patiently,
    transaction,
)
from sampling_async._private_files import make_private
from sampling_async.notifications._facts import StoreError
from sampling_async.notifications._sql import SqlStore
from sampling_async.notifications._tables import FORM, make_tables, require_known

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Iterable, Sequence
    from contextlib import AbstractContextManager

_BUSY_SECONDS: Final = 5.0
_OWN: Final = {"id": "id INTEGER PRIMARY KEY", "bytes": "BLOB", "rowid": ""}
_APPLICATION: Final = 0x53414E4F
"""Marks a file as a store ("SANO"), so that no other database is written to by mistake."""


class SqliteStore(SqlStore):
    """Keeps notifications in a SQLite file, made readable to its owner only.

    A transaction is on the disk when it ends (WAL, `synchronous=FULL`), so that what was acknowledged survives
    a kill of the process and a loss of power. Several processes of one machine may use the file at once; it
    must not be on a network file system. Beside the file there are two more while it is open, with the endings
    `-wal` and `-shm`.

    Args:
        path: The file. It is made if there is none; its folder must be there.
    """

    # FAIL: what was inserted before an error need not be undone by the statement, the transaction will be.
    _INSERT: ClassVar[str] = "INSERT OR FAIL"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = file_path(path, "the path of a store")
        self._database: sqlite3.Connection | None = None
        self._file: os.stat_result | None = None

    @safe_repr
    def __repr__(self) -> str:
        return f"<SqliteStore {self.path}>"

    def copy(self) -> SqliteStore:
        """Return a store of the same file that is not open."""
        return SqliteStore(self.path)

    # --- Opening and closing

    def open(self) -> None:
        if sqlite3.sqlite_version_info < (3, 35):
            raise StoreError(f"SQLite 3.35 or newer is needed, and Python has {sqlite3.sqlite_version}")
        with self.failing("cannot be opened"):
            with suppress(FileExistsError):
                make_private(self.path)
            database = self._connected()
            try:
                patiently(lambda: self._make_tables(database), _BUSY_SECONDS)
                make_durable(database, _BUSY_SECONDS)
            except BaseException:
                database.close()
                raise
            self._database, self._file = database, self.path.stat()

    def _make_tables(self, database: sqlite3.Connection) -> None:
        if self._form(database) == FORM:
            return
        with transaction(database):
            # Read again under the lock, because another process may have done it meanwhile.
            if self._form(database) == FORM:
                return
            make_tables(database.execute, **_OWN)
            database.execute(f"PRAGMA application_id = {_APPLICATION}")
            database.execute(f"PRAGMA user_version = {FORM}")

    def _form(self, database: sqlite3.Connection) -> int:
        """Return the form of the tables in the file; 0 if there are none."""
        tables: int = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        application: int = database.execute("PRAGMA application_id").fetchone()[0]
        form = database.execute("PRAGMA user_version").fetchone()[0]
        if tables and application != _APPLICATION:
            raise StoreError(f"{self.path} is a database of something else; name another file")
        return require_known(form, f"the store {self.path}")

    def close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with suppress(sqlite3.Error):
                database.close()

    def _connected(self) -> sqlite3.Connection:
        return connected(self.path, _BUSY_SECONDS)

    def failing(self, what: str) -> AbstractContextManager[None]:
        return failing(what, self.error)

    def error(self, reason: str) -> StoreError:
        return StoreError(f"the store {self.path} {reason}")

    # --- Statements

    @contextmanager
    def transaction(self) -> Generator[None]:
        database = self._open
        with self.failing("cannot be written"):
            self._must_be_in_place()
            try:
                with transaction(database):
                    yield
            except BaseException:
                self._claimed_at = inf  # what a claim has mended is undone too
                raise

    def _must_be_in_place(self) -> None:
        if self._file is None or not samestat(self._file, self.path.stat()):
            raise self.error("was replaced while it was open: what it gets would be lost")

    def lock(self, *keys: str) -> None:
        """Do nothing: transactions of SQLite run one after the other."""

    def check_writable(self) -> None:
        # SQLite writes the page also if the number is the same, and a full disk is seen.
        self.run(f"PRAGMA user_version = {FORM}")

    def run(self, query: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        """Run a statement inside `transaction()`, and return its cursor."""
        return self._open.execute(query, values)

    @contextmanager
    def reading(
        self, what: str, *, is_long: bool = False, writes: bool = False
    ) -> Generator[Callable[..., Any]]:
        """Return a block with a function that runs a statement on a connection of its own."""
        del is_long  # SQLite has no limit
        with self.failing(what), ExitStack() as blocks:
            database = blocks.enter_context(closing(connected_to_read(self.path, _BUSY_SECONDS)))
            self._form(database)  # refused if it is of something else, or newer
            if writes:
                database = blocks.enter_context(closing(self._connected()))
            yield database.execute

    def _receipt_numbers(self, count: int) -> Iterable[int]:
        # The newest fact names the newest receipt that facts name: a number that was erased is not used again.
        query = "SELECT max(coalesce((SELECT max(id) FROM receipts), 0), coalesce((SELECT receipt FROM facts"
        last: int = self.run(f"{query} ORDER BY id DESC LIMIT 1), 0))").fetchone()[0]
        return range(last + 1, last + 1 + count)

    @property
    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            raise self.error("is not open")
        return self._database
