"""A journal of a fan-out on disk: what was sent before it is sent, what was answered when it is.

A process that is killed in the middle is started again with the same input and the same journal. What was
answered is handed over from the journal, what was in flight is `unknown`, and only what was surely not sent
goes out. The file is an SQLite database with two tables that rows are only ever added to. Rows of several
requests are committed together, in a thread, and a commit has reached the disk when it returns.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import anyio.to_thread

from sampling_async._codec import structure, unstructure
from sampling_async._errors import JournalError, SamplingError
from sampling_async._models import Invite
from sampling_async._outcomes import InviteOutcome

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Generator, Iterable

    from sampling_async._protocol import Chunk

T = TypeVar("T")

_APPLICATION: Final = 0x5A3971  # what `file` and SQLite tell this database by
_VERSION: Final = 1
_TABLES: Final = """
CREATE TABLE owner (base_url TEXT NOT NULL, panel_guid TEXT NOT NULL);
CREATE TABLE sent (
    chunk INTEGER PRIMARY KEY, member_code TEXT NOT NULL, lowest INTEGER NOT NULL, highest INTEGER NOT NULL,
    quota_ids TEXT NOT NULL
);
CREATE TABLE answered (chunk INTEGER NOT NULL, outcomes TEXT NOT NULL);
CREATE INDEX sent_to ON sent (member_code, lowest, highest);
CREATE INDEX answered_for ON answered (chunk);
"""
_SENT: Final = "INSERT OR IGNORE INTO sent VALUES (?, ?, ?, ?, ?)"
_ANSWERED: Final = "INSERT INTO answered VALUES (?, ?)"
_RECALL: Final = """
SELECT quota_ids, outcomes FROM sent LEFT JOIN answered USING (chunk)
WHERE member_code = ? AND lowest <= ? AND highest >= ? ORDER BY sent.chunk, answered.rowid
"""


class Journal:
    """Where a fan-out writes down what it does: `client.fan_out(requests, journal=Journal(path))`.

    A member and quota is asked once for all runs with one journal, and for all requests of a run. The file
    holds member codes and invite links (never the key) and is made readable for its owner only.

    Args:
        path: The file; it is made if it is not there. One run uses it at a time.
        resend_unknown: Whether to ask again what may have been processed without its answer being known. A
            second invite may be made.
    """

    def __init__(self, path: str | os.PathLike[str], *, resend_unknown: bool = False) -> None:
        self.path = Path(path)
        self._resend_unknown = resend_unknown
        self._database: sqlite3.Connection | None = None
        self._owner = ("", "")
        self._is_wanted = False
        self._in_use = threading.Lock()
        self._threads: anyio.CapacityLimiter | None = None
        self._lock = anyio.Lock()
        self._pending: list[tuple[str, tuple[object, ...]]] = []
        self._noted = 0
        self._written_rows = 0
        self._chunks = 0
        self._in_flight: set[tuple[str, int]] = set()
        self._settled = anyio.Event()

    def __repr__(self) -> str:
        return f"Journal({str(self.path)!r}, resend_unknown={self._resend_unknown})"

    def claim(self, base_url: str, panel_guid: str) -> None:
        """Say whose journal it is."""
        self._owner = (base_url, panel_guid.lower())

    async def open(self) -> None:
        """Open the file for a run.

        Raises:
            JournalError: It cannot be opened, is something else than a journal, belongs to another service or
                panel, or is in use.
        """
        if self._database is not None:
            raise JournalError("is in use by another fan-out; give each its own", path=self.path)
        self._in_flight.clear()
        self._pending.clear()  # of a run that could not write: what it did not write down it has not sent
        self._noted = self._written_rows = 0
        self._settled = anyio.Event()
        self._lock = anyio.Lock()
        self._threads = anyio.CapacityLimiter(1)  # of our own: those of the host application may all be busy
        self._is_wanted = True
        try:
            await self._in_thread(self._open)
        except BaseException:
            self._is_wanted = False
            # Where asyncio's own cancellation came, the thread may still be at it, and lets go by itself.
            if self._in_use.acquire(blocking=False):
                self._let_go()
                self._in_use.release()
            raise

    def _open(self) -> None:
        import sqlite3  # noqa: PLC0415  for runs with a journal only

        path = self.path.absolute()  # or SQLite takes ":memory:" and the like for something else than a file
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._database = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            self._check(self._database)
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _check(self, database: sqlite3.Connection) -> None:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")  # two runs with one journal would send twice
        tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and database.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
            raise JournalError("is a database of something else; give a path of its own", path=self.path)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        with _transaction(database):
            if not tables:
                database.execute(f"PRAGMA application_id = {_APPLICATION}")
                database.execute(f"PRAGMA user_version = {_VERSION}")
                for statement in filter(str.strip, _TABLES.split(";")):
                    database.execute(statement)
                database.execute("INSERT INTO owner VALUES (?, ?)", self._owner)
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version != _VERSION:
                raise JournalError(
                    f"was written in form {version}, and this version reads {_VERSION}", path=self.path
                )
            if database.execute("SELECT * FROM owner").fetchone() != self._owner:
                raise JournalError(
                    "was written for another service or panel; give each a journal of its own", path=self.path
                )
        self._chunks = database.execute("SELECT coalesce(max(chunk), 0) FROM sent").fetchone()[0]

    async def settled(self, member_code: str, quota_ids: Iterable[int]) -> None:
        """Wait until nothing of this run is under way about these quota IDs."""
        while any((member_code, quota_id) in self._in_flight for quota_id in quota_ids):
            await self._settled.wait()

    async def recall(self, member_code: str, quota_ids: Iterable[int]) -> dict[int, InviteOutcome]:
        """Return what is known of quota IDs: all but those that were surely never sent."""
        asked = set(quota_ids)
        rows: list[tuple[str, str | None]] = []
        with anyio.CancelScope(shield=True):
            async with self._lock:
                if self._pending:
                    await self._write()
                rows = await self._in_thread(self._rows_of, member_code, asked)
        known: dict[int, InviteOutcome] = {}
        for ids, outcomes in rows:
            if outcomes is None:
                known.update((id_, _in_flight(member_code, id_)) for id_ in json.loads(ids))
            else:
                found = (row for row in json.loads(outcomes) if row[0] in asked)
                known.update((row[0], _read(member_code, row)) for row in found)
        return {id_: outcome for id_, outcome in known.items() if id_ in asked and outcome.status != "not_sent"}

    def asks_again(self, outcome: InviteOutcome) -> bool:
        """Return whether to send what is known of already."""
        return self._resend_unknown and outcome.status == "unknown"

    def _rows_of(self, member_code: str, asked: set[int]) -> list[tuple[str, str | None]]:
        assert self._database is not None
        if not asked:
            return []
        return self._database.execute(_RECALL, (member_code, max(asked), min(asked))).fetchall()

    def take_up(self, chunk: Chunk) -> None:
        """Note that a chunk is under way: a later request about the same waits for what it comes to."""
        self._in_flight.update((chunk.member_code, quota_id) for quota_id in chunk.places)

    def settle(self, chunk: Chunk) -> None:
        """Note that a chunk is under way no more."""
        self._in_flight.difference_update((chunk.member_code, quota_id) for quota_id in chunk.places)
        self._settled.set()
        self._settled = anyio.Event()

    def note_sent(self, chunk: Chunk) -> int:
        """Note that a chunk is going to be sent, once `written()` returns; gives its number."""
        self._chunks += 1
        ids = chunk.places
        self._note(_SENT, self._chunks, chunk.member_code, min(ids), max(ids), _compact(list(ids)))
        return self._chunks

    def note_answered(self, number: int, outcomes: Iterable[InviteOutcome]) -> None:
        """Note what a chunk came to."""
        self._note(_ANSWERED, number, _compact([_row(outcome) for outcome in outcomes]))

    def _note(self, statement: str, *values: object) -> None:
        self._pending.append((statement, values))
        self._noted += 1

    async def written(self) -> None:
        """Wait until all that was noted has reached the disk; who comes first writes for all.

        What was noted without waiting is written with the next rows, at the latest when the journal is closed.
        """
        noted = self._noted
        async with self._lock:
            if self._written_rows < noted:
                await self._write()

    async def _write(self) -> None:
        rows = tuple(self._pending)
        await self._in_thread(self._insert, rows)
        del self._pending[: len(rows)]
        self._written_rows += len(rows)

    def _insert(self, rows: Iterable[tuple[str, tuple[object, ...]]]) -> None:
        assert self._database is not None
        with _transaction(self._database):
            for statement, values in rows:
                self._database.execute(statement, values)

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        try:
            return await anyio.to_thread.run_sync(self._alone, function, *args, limiter=self._threads)
        except Exception as exc:
            import sqlite3  # noqa: PLC0415  loaded by now

            if not isinstance(exc, sqlite3.Error | OSError):
                raise
            in_use = getattr(exc, "sqlite_errorcode", None) in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
            reason = "is in use by another run" if in_use else f"cannot be used: {exc}"
            raise JournalError(reason, path=self.path) from exc

    def _alone(self, function: Callable[..., T], *args: object) -> T:
        """Run a function while no other thread uses the database, also one whose caller was cancelled."""
        with self._in_use:
            result = function(*args)
        if not self._is_wanted:
            with self._in_use:
                self._let_go()
        return result

    async def close(self) -> None:
        """Write what is noted and close the file.

        Raises:
            JournalError: It could not be written; the file is closed all the same.
        """
        with anyio.CancelScope(shield=True):
            async with self._lock:
                try:
                    await self._write()
                finally:
                    await self._in_thread(self._let_go)


@contextmanager
def _transaction(database: sqlite3.Connection) -> Generator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _row(outcome: InviteOutcome) -> list[Any]:
    error = outcome.error
    return [
        outcome.quota_id,
        outcome.status,
        None if outcome.invite is None else unstructure(outcome.invite),
        outcome.result_code,
        outcome.result,
        None if error is None else [str(error).removeprefix("bulk_invite: "), error.delivery],
        outcome.anomaly,
    ]


def _read(member_code: str, row: list[Any]) -> InviteOutcome:
    quota_id, status, invite, code, result, error, anomaly = row
    return InviteOutcome(
        member_code,
        quota_id,
        status,
        None if invite is None else structure(Invite, invite),
        code,
        result,
        None if error is None else SamplingError(error[0], endpoint="bulk_invite", delivery=error[1]),
        anomaly,
    )


def _in_flight(member_code: str, quota_id: int) -> InviteOutcome:
    error = SamplingError(
        "sent by a run that ended before an answer was written down", endpoint="bulk_invite", delivery="unknown"
    )
    return InviteOutcome(member_code, quota_id, "unknown", error=error)
