"""Connections to PostgreSQL through psycopg: limits of time, values without types, errors as a StoreError."""

from __future__ import annotations

import re
import time
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.numeric import FloatDumper, Int8Dumper

from sampling_async.notifications._facts import StoreConflictError, StoreError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

T = TypeVar("T")
_EXTRA_SECONDS: Final = 2.0  # the server ends a statement by itself before
_CONFLICTS: Final = {"40001", "40P01"}  # a serialization failure, a deadlock
# Classes of errors: what it cannot do, who, which database, schema, permission.
_PERMANENT: Final = ("0A", "28", "3D", "3F", "42")
# What PgBouncer says of a wrong password or its pg_hba file, without a name, and always in English.
_REFUSED_BY_POOLER: Final = {"SASL authentication failed", "password authentication failed", "login rejected"}
_SETTINGS: Final = """
SELECT set_config('search_path', '"{schema}"', {local}), set_config('statement_timeout', '{limit}', {local}),
    set_config('lock_timeout', '{limit}', {local}),
    set_config('idle_in_transaction_session_timeout', '{seconds:.3f}s', {local}),
    set_config('default_transaction_isolation', 'read committed', {local}),
    set_config('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'on'), {local})
"""


def options_of(dsn: str) -> dict[str, Any] | None:
    """Return the parts of an address; None if it cannot be read."""
    with suppress(psycopg.Error):
        options = dict(conninfo_to_dict(dsn))
        # Values too, without a network: no server is in this folder.
        local = make_conninfo("", **{**options, "host": "/dev/null", "hostaddr": "", "port": ""})
        if psycopg.pq.PGconn.ping(local.encode()) != psycopg.pq.Ping.NO_ATTEMPT:
            return options
    return None


class _UntypedInt(Int8Dumper):
    oid = 0


class _UntypedFloat(FloatDumper):
    oid = 0


class LimitedConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection without a transaction of its own, on which each statement may take only so long."""

    limit: float | None = None
    is_pooled = False
    beginning = b"BEGIN"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._may_copy: dict[str, bool] = {}

    def wait(self, gen: Any, *args: Any, **more: Any) -> Any:
        """Wait for the server as psycopg does, but no longer than the limit."""
        if self.limit is not None:
            gen = _limited(gen, time.monotonic() + self.limit)
        return super().wait(gen, *args, **more)

    def run(self, query: str, values: Sequence[object] = ()) -> psycopg.Cursor[tuple[Any, ...]]:
        """Run a statement, with a `?` for each value."""
        if not self.is_pooled or self.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            return self.execute(_translated(query), values)
        self.begin()
        cursor = self.execute(_translated(query), values)
        self.commit_begun()
        return cursor

    def can_copy_in(self, into: str) -> bool:
        """Return whether `copy_in` works there: it does not where policies decide row by row."""
        table = into.partition(" ")[0]
        if table not in self._may_copy:
            found = self.run("SELECT row_security_active(CAST(? AS regclass))", (table,)).fetchone()
            self._may_copy[table] = found == (False,)
        return self._may_copy[table]

    def copy_in(self, into: str, rows: Iterable[Sequence[object]]) -> None:
        """Insert rows into columns of a table, inside a transaction."""
        with self.cursor() as cursor, cursor.copy(f"COPY {into} FROM STDIN".encode()) as copy:
            for row in rows:
                copy.write_row(row)

    def begin(self) -> None:
        """Begin a transaction."""
        self.execute(self.beginning, prepare=False)  # it may be several statements

    def commit_begun(self) -> None:
        """Store what was done since `begin`."""
        # After an error that somebody has swallowed, the server ends the transaction by undoing it.
        if self.execute("COMMIT").statusmessage != "COMMIT":
            raise psycopg.OperationalError("the transaction was undone")

    def undo(self) -> None:
        """Undo what was done since `begin`; close a connection that is not fit for that."""
        try:
            # While a statement runs that took too long, ROLLBACK would have to wait for it.
            if self.info.transaction_status != psycopg.pq.TransactionStatus.ACTIVE:
                self.execute("ROLLBACK")
                return
        except psycopg.Error:
            pass
        self.close()


def _limited(gen: Generator[Any, Any, T], until: float) -> Generator[Any, Any, T]:
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > until:
                raise psycopg.OperationalError("the server does not respond")
            wanted = gen.send(ready)
    except StopIteration as end:
        return cast("T", end.value)


@lru_cache(maxsize=512)
def _translated(query: str) -> bytes:
    return query.replace("%", "%%").replace("?", "%s").encode()


def new_connection(
    options: Mapping[str, Any], schema: str, *, seconds: float, is_long: bool = False
) -> LimitedConnection:
    """Return a new connection.

    Args:
        options: The parts of the address.
        schema: Where the tables are.
        seconds: How long connecting may take, and each statement.
        is_long: Whether statements may take any time.
    """
    given: dict[str, Any] = {
        "connect_timeout": max(2, round(seconds)),
        "tcp_user_timeout": round(seconds * 1e3),
        "keepalives_idle": 30,
        "target_session_attrs": "read-write",  # of several hosts, the primary
        "application_name": "sampling_async",
        **options,
        "client_encoding": "utf8",
    }
    connection = LimitedConnection.connect(**given, autocommit=True)
    try:
        _check_encoding(connection.info.parameter_status("server_encoding"))
        # Without types the server takes them from the columns, and a statement is the same for all values.
        connection.adapters.register_dumper(int, _UntypedInt)
        connection.adapters.register_dumper(float, _UntypedFloat)
        connection.limit = seconds + _EXTRA_SECONDS
        limit = "0" if is_long else f"{seconds:.3f}s"
        settings = partial(_SETTINGS.format, schema=schema, limit=limit, seconds=seconds)
        if connection.execute("SELECT pg_backend_pid()").fetchone() == (connection.info.backend_pid,):
            connection.execute(settings(local="false").encode())
        else:
            # A pooler: the next transaction may be on another connection to the server, so each says it all.
            connection.beginning = f"BEGIN ISOLATION LEVEL READ COMMITTED; {settings(local='true')}".encode()
            connection.is_pooled = True
            _check_pooler(connection)
        if is_long:
            connection.limit = None
    except BaseException:
        connection.close()
        raise
    return connection


def _check_encoding(encoding: str | None) -> None:
    # Others lack characters, so that one row would take its transaction with it; SQL_ASCII takes any bytes.
    if encoding not in (None, "UTF8"):
        raise psycopg.errors.FeatureNotSupported(
            f"the database is of encoding {encoding}, which cannot hold every text; make one of encoding UTF8:"
            " CREATE DATABASE name ENCODING 'UTF8' TEMPLATE template0"
        )


def _check_pooler(connection: LimitedConnection) -> None:
    connection.prepare_threshold = None  # what is prepared stays with one of its connections to the server
    try:
        connection.begin()
    except psycopg.errors.ProtocolViolation as exc:  # it has answered a statement, and refuses a transaction
        reason = f"a pooler stands before it, which needs pool_mode = transaction or session: {exc}"
        raise psycopg.errors.FeatureNotSupported(reason) from None
    connection.commit_begun()


def _is_refused(exc: psycopg.Error) -> bool:
    """Return whether a server has refused whoever connects; libpq keeps its SQLSTATE to itself then.

    Only a server's text stands behind a colon and two spaces. Its language may be any, but it names the user or
    the database if these are refused, and neither if the server is busy, is starting or is a standby.
    """
    connection = exc.pgconn
    if connection is None:
        return False
    said = connection.error_message.partition(b":  ")[2].decode(errors="replace").strip()
    if connection.needs_password or said in _REFUSED_BY_POOLER:
        return True
    names = [re.escape(name.decode()) for name in (connection.user, connection.db) if name]
    return bool(re.search(rf"[^\w\s]\s?({'|'.join(names)})\s?([^\w\s]|$)", said))


@contextmanager
def failing(what: str, store: str) -> Generator[None]:
    """Raise a StoreError in place of an error of the database, without the values that it may show.

    Args:
        what: What has failed then, as in "cannot be read".
        store: The store, for the text.
    """
    try:
        yield
    except psycopg.Error as exc:
        state = exc.sqlstate or ""
        reason = " ".join((exc.diag.message_primary or str(exc)).split())
        kind = StoreConflictError if state in _CONFLICTS else StoreError
        permanent = state.startswith(_PERMANENT) or (not state and _is_refused(exc))
        error = kind(f"the store {store} {what}: {reason}", permanent=permanent)
    else:
        return
    raise error from None  # the frames of the driver hold the password
