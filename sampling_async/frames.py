"""Write outcomes to a file or a database as they come, in constant memory: Parquet, and PostgreSQL by COPY.

    counts = await write_parquet(client.fan_out(requests), "night.parquet")
    counts = await write_postgres(client.fan_out(requests), "postgresql://partner@db/panel")

For data frames of what is in memory, see `BulkInviteResult.to_arrow` and `Quotas.to_arrow`.
"""

from __future__ import annotations

import re
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar, get_args

import anyio

from sampling_async._contract.checks import count_of, require_utf8, text_of, whole_number
from sampling_async._contract.errors import InvalidRequestError
from sampling_async._contract.frames import ROWS
from sampling_async._pacing.threads import join_uncancelled, start
from sampling_async._private_files import make_private
from sampling_async._protocol.results import (
    OUTCOME_COLUMNS,
    OutcomeStatus,
    outcome_batches,
    outcome_columns,
    outcome_schema,
)
from sampling_async.notifications import PostgresStore
from sampling_async.notifications._tables import storable

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable

    from sampling_async import InviteOutcome
    from sampling_async._contract.checks import Text

T = TypeVar("T")

__all__ = ["Outcomes", "write_parquet", "write_postgres"]

Outcomes: TypeAlias = "AsyncIterable[InviteOutcome]"
"""A source of outcomes, such as `client.fan_out(...)`, a run of a campaign, or `journal.outcomes()`."""

_TABLE: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}", re.ASCII)
_SECONDS: Final = 1.0  # after so long, what has come is written with the next outcome
_TYPES: Final = {"string": "text", "int64": "bigint", "float64": "double precision", "bool_": "boolean"}


async def write_parquet(
    outcomes: Outcomes, path: Text, *, replace: bool = False, rows: int = ROWS
) -> dict[OutcomeStatus, int]:
    """Write outcomes to a Parquet file, and return how many have each status. It needs the extra `panel`.

    The columns are those of `BulkInviteResult.to_arrow`. The file holds member codes and links, so only its
    owner can read it. A stream that was not entered yet is entered here, after the file was made, and left at
    the end.

    Until the file is complete, its name ends in `.part`. If the stream fails or is cancelled, the outcomes so
    far are in that file, those of `left_over` too, and a note of the error names it. After a kill, or on a full
    disk, it cannot be read: a `journal=` of the fan-out survives that.

    Args:
        outcomes: Where they come from.
        path: The file.
        replace: Whether to replace a file that is there.
        rows: The most outcomes in memory, and in a row group of the file.

    Raises:
        InvalidRequestError: The file exists, or one that ends in `.part`. Nothing was sent.
        OSError: The file cannot be written.
        ImportError: pyarrow is missing.
    """
    file = _ParquetFile(Path(text_of(path)), replace=replace)
    return await _write(outcomes, file, whole_number(rows, "rows"), seconds=float("inf"))


async def write_postgres(
    outcomes: Outcomes,
    dsn: Text,
    *,
    table: str = "sampling_outcomes",
    schema: str = "public",
    rows: int = ROWS,
    clock: Callable[[], float] = time.monotonic,
) -> dict[OutcomeStatus, int]:
    """Append outcomes to a table of PostgreSQL by COPY, and return how many have each status.

    It needs the extra `postgres`. The table is made if there is none. It has a row for each outcome, with the
    columns of `BulkInviteResult.to_arrow` and `written_at`. An existing table may have further columns, with
    defaults. Rows are committed together: `rows` of them, or those of a second. If the stream fails or is
    cancelled, the outcomes so far are stored before the error is raised, those of `left_over` too. What
    PostgreSQL cannot hold in a text is written as an escape; a NUL in a link as `%00`, which leads there too.

    Args:
        outcomes: Where they come from.
        dsn: The address, as `postgresql://user@host:5432/database`.
        table: The name of the table: small letters, digits and _.
        schema: The schema of the table. One that the address names is not used.
        rows: The most outcomes in memory.
        clock: The clock, in seconds.

    Raises:
        InvalidRequestError: The address or a name cannot be read.
        StoreError: The database cannot be reached or written. If this happens at the start, nothing was sent.
            If the answer to a COMMIT was lost, its outcomes may be in the table: a note says how many.
        ImportError: psycopg is missing.
    """
    address = [dsn]
    del dsn  # it may hold a password, and error reports may show the local variables of this frame
    into = _PostgresTable(PostgresStore(address.pop(), schema=schema), table)
    return await _write(outcomes, into, whole_number(rows, "rows"), seconds=_SECONDS, clock=clock)


class _Sink(Protocol):
    """Where outcomes are written to. Each method is called in a thread."""

    def open(self) -> None: ...

    def write(self, outcomes: list[InviteOutcome]) -> None:
        """Write outcomes, and clear the list as soon as they may be written: they must not be written twice."""

    def close(self, *, complete: bool) -> str:
        """End, opened or not; return what a user should know if it is not complete."""
        ...


async def _write(
    outcomes: Outcomes,
    sink: _Sink,
    rows: int,
    *,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[OutcomeStatus, int]:
    counts: dict[OutcomeStatus, int] = dict.fromkeys(get_args(OutcomeStatus), 0)
    unwritten: list[InviteOutcome] = []
    stream: Any = outcomes
    entered: Any = None
    try:
        await _joined(sink.open)
        async with AsyncExitStack() as blocks:
            if isinstance(outcomes, AbstractAsyncContextManager) and not getattr(outcomes, "is_entered", False):
                stream = entered = await blocks.enter_async_context(outcomes)
            began = clock()
            async for outcome in stream:
                counts[outcome.status] += 1
                unwritten.append(outcome)
                if len(unwritten) >= rows or clock() - began > seconds:
                    await _joined(_flush, sink, unwritten)
                    began = clock()
        await _joined(_flush, sink, unwritten)
        await _joined(lambda: sink.close(complete=True))
    except BaseException as exc:
        unwritten += getattr(entered, "left_over", ())
        with anyio.CancelScope(shield=True):
            exc.add_note(await _joined(_ended_early, sink, unwritten))
        raise
    return counts


async def _joined(function: Callable[..., T], *values: Any) -> T:
    # A thread that is left behind would write beside the next one.
    return await join_uncancelled(start(function, *values))


def _flush(sink: _Sink, unwritten: list[InviteOutcome]) -> None:
    # Cleared in the thread: after a cancellation, what is written must not be written again.
    if unwritten:
        sink.write(unwritten)


def _ended_early(sink: _Sink, unwritten: list[InviteOutcome]) -> str:
    lost = ""
    try:
        _flush(sink, unwritten)
    except Exception as exc:  # noqa: BLE001  the error that ended the writing is raised already
        lost = f"{count_of(len(unwritten), 'outcome')} could not be written ({type(exc).__name__}); "
    try:
        return lost + sink.close(complete=False)
    except Exception as exc:  # noqa: BLE001  likewise
        return f"{lost}what was written could not be closed ({type(exc).__name__})"


class _ParquetFile:
    def __init__(self, path: Path, *, replace: bool) -> None:
        if not path.name or path.is_dir():
            raise InvalidRequestError(f"{path} is a folder; name a file")
        require_utf8(path)
        self._path, self._replace = path, replace
        self._part = path.with_name(f"{path.name}.part")
        self._writer: Any = None
        self._is_empty = True

    def open(self) -> None:
        if self._path.exists() and not self._replace:
            raise InvalidRequestError(f"{self._path} already exists; name another file, or give replace=True")
        schema, parquet = outcome_schema(), import_module("pyarrow.parquet")
        try:
            make_private(self._part)
        except FileExistsError:
            raise InvalidRequestError(
                f"{self._part} is of a run that ended early, and may hold invites; move it away"
            ) from None
        self._writer = parquet.ParquetWriter(self._part, schema)

    def write(self, outcomes: list[InviteOutcome]) -> None:
        self._is_empty = False
        for batch in outcome_batches(outcomes, len(outcomes)):
            self._writer.write_batch(batch)
        outcomes.clear()

    def close(self, *, complete: bool) -> str:
        if self._writer is None:
            return "nothing was written"
        self._writer.close()
        if complete:
            self._part, self._is_empty = self._part.replace(self._path), False
        elif self._is_empty:
            self._part.unlink()  # it would stand in the way of the next try
            return "nothing was written"
        else:
            try:
                import_module("pyarrow.parquet").read_metadata(self._part)
            except Exception:  # noqa: BLE001  whatever pyarrow raises
                return f"{self._part} has no end and cannot be read"
        return f"what came before is in {self._part}"


class _PostgresTable:
    def __init__(self, store: PostgresStore, table: str) -> None:
        if not isinstance(table, str) or not _TABLE.fullmatch(table):
            raise InvalidRequestError(f"table must be small letters, digits and _, not {table!r:.60}")
        self._store, self._table = store, f'"{table}"'  # it may be a word of SQL: order
        self._is_empty = True
        self._unsure = 0

    def open(self) -> None:
        columns = ", ".join(f"{name} {_TYPES[kind]}" for name, kind in OUTCOME_COLUMNS.items())
        with self._store.connection() as connection:
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {self._table}"
                f" ({columns}, written_at timestamptz NOT NULL DEFAULT now())"
            )
            # One that was there may lack columns, or have others. That is better known before anything is sent.
            nothing = ", ".join(f"NULL::{_TYPES[kind]}" for kind in OUTCOME_COLUMNS.values())
            connection.execute(
                f"INSERT INTO {self._table} ({', '.join(OUTCOME_COLUMNS)}) SELECT {nothing} WHERE false"
            )

    def write(self, outcomes: list[InviteOutcome]) -> None:
        columns, count = outcome_columns(outcomes), len(outcomes)
        copy = f"COPY {self._table} ({', '.join(columns)}) FROM STDIN"
        # A new connection each time: one that is kept may be lost between two bulks.
        with self._store.connection() as connection:
            with connection.cursor() as cursor, cursor.copy(copy) as rows:
                for row in zip(*columns.values(), strict=True):
                    rows.write_row(list(map(_storable, columns, row)))
            # The answer to the COMMIT that follows may be lost: then they must not be written a second time.
            outcomes.clear()
            self._unsure += count
        self._unsure -= count
        self._is_empty = False

    def close(self, *, complete: bool) -> str:  # noqa: ARG002  what is written is stored already
        known = "nothing was written" if self._is_empty else f"what came before is in the table {self._table}"
        if not self._unsure:
            return known
        unsure = f"{count_of(self._unsure, 'outcome')} may have been written to {self._table}, or not"
        return unsure if self._is_empty else f"{unsure}; {known}"


def _storable(name: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    # PostgreSQL takes no NUL. In a link %00 stands for it, for all who read links.
    return storable(value.replace("\0", "%00") if name == "url" else value)
