"""The store in a SQLite file, which several processes may share."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sampling_async import InvalidRequestError
from sampling_async._contract.checks import moment_of, shown
from sampling_async._contract.records import INT64_MAX, safe_repr
from sampling_async._journal.database import connected, failing, make_durable, transaction
from sampling_async._private_files import make_private
from sampling_async.notifications._bodies import NotUnderstoodError
from sampling_async.notifications._entries import in_its_wave
from sampling_async.notifications._records import Kind, UnknownNotification
from sampling_async.notifications._store import Backlog, Fact, Hit, Settled, State, Store, StoreError, Validity
from sampling_async.notifications._tables import (
    CLAIM,
    CLAIM_OF_KIND,
    COLUMNS,
    FACTS,
    MOST_ROWS,
    RECEIPTS,
    fact_row,
    insertion,
    make_tables,
    receipt_row,
    subject_of,
)
from sampling_async.notifications._understanding import FieldReader, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from sampling_async.notifications._records import Notification
    from sampling_async.notifications._store import Entry, Receipt

_BUSY_SECONDS: Final = 5.0
_PAGE: Final = 1_000
_STEP_SECONDS: Final = 60.0  # the largest step of a clock that is corrected in small steps


class SqliteStore(Store):
    """Keeps notifications in a SQLite file, made readable to its owner only.

    A transaction is on the disk when it ends (WAL, `synchronous=FULL`), so that what was acknowledged survives
    a kill of the process and a loss of power. Several processes of one machine may use the file at once; it
    must not be on a network file system. Beside the file there are two more while it is open, with the endings
    `-wal` and `-shm`.

    Args:
        path: The file. It is made if there is none; its folder must be there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._database: sqlite3.Connection | None = None
        self._claimed_at = inf

    @safe_repr
    def __repr__(self) -> str:
        return f"<SqliteStore {self.path}>"

    # --- Opening and closing

    def open(self) -> None:
        if sqlite3.sqlite_version_info < (3, 35):
            raise StoreError(f"SQLite 3.35 or newer is needed, and Python has {sqlite3.sqlite_version}")
        with self._failing("cannot be opened"):
            with suppress(FileExistsError):
                make_private(self.path)
            database = self._connected()
            try:
                make_tables(database, self.path, _BUSY_SECONDS)
                make_durable(database, _BUSY_SECONDS)
            except BaseException:
                database.close()
                raise
            self._database = database

    def close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with suppress(sqlite3.Error):
                database.close()

    @contextmanager
    def transaction(self) -> Generator[None]:
        with self._failing("cannot be written"), transaction(self._open):
            yield

    @property
    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            raise self._error("is not open")
        return self._database

    def _connected(self) -> sqlite3.Connection:
        return connected(self.path, _BUSY_SECONDS)

    def _failing(self, what: str) -> AbstractContextManager[None]:
        return failing(what, self._error)

    def _error(self, reason: str) -> StoreError:
        return StoreError(f"the store {self.path} {reason}")

    # --- Secrets

    def secrets(self, fresh: Mapping[Kind, str]) -> Mapping[Kind, Sequence[str]]:
        known = self._secrets()
        for kind, secret in fresh.items():
            if kind not in known:
                self._open.execute("INSERT INTO secrets (kind, secret) VALUES (?, ?)", (kind, secret))
        return self._secrets()

    def rotate(self, fresh: Mapping[Kind, str], *, keep: int = 2) -> None:
        for kind, secret in fresh.items():
            self._open.execute("INSERT INTO secrets (kind, secret) VALUES (?, ?)", (kind, secret))
            self._open.execute(
                "DELETE FROM secrets WHERE kind = ? AND id NOT IN"
                " (SELECT id FROM secrets WHERE kind = ? ORDER BY id DESC LIMIT ?)",
                (kind, kind, keep),
            )

    def _secrets(self) -> dict[Kind, list[str]]:
        known: dict[Kind, list[str]] = {}
        for kind, secret in self._open.execute("SELECT kind, secret FROM secrets ORDER BY id DESC"):
            known.setdefault(Kind(kind), []).append(secret)
        return {kind: known[kind] for kind in Kind if kind in known}

    # --- Where it is served

    def keep_url(self, url: str) -> None:
        """Store the public URL of this store's inbox."""
        self._open.execute("INSERT OR REPLACE INTO served (id, url) VALUES (1, ?)", (url,))

    def url(self) -> str | None:
        """Return the URL stored last; None if there is none."""
        row = self._open.execute("SELECT url FROM served").fetchone()
        return None if row is None else str(row[0])

    # --- What comes in

    def receive(self, receipt: Receipt, entries: Sequence[Entry], verdict: str = "") -> Sequence[str]:
        number = self._next_receipt()
        verdicts = [self._enter(number, receipt.at, in_its_wave(self._open, entry)) for entry in entries]
        self._insert(RECEIPTS, [receipt_row(number, Hit(receipt, entries, verdict), verdicts)])
        return verdicts

    def receive_all(self, hits: Sequence[Hit]) -> None:
        # The event loop runs beside this thread only while SQLite works, and after each statement this thread
        # waits for the loop. So notifications that no other one has to do with are inserted together.
        subjects = [[(entry, *subject_of(entry)) for entry in hit.entries] for hit in hits]
        known = self._known({key for entries in subjects for *_, keys in entries for key in keys})
        seen: set[object] = set()
        fresh: list[tuple[object, ...]] = []
        receipts: list[tuple[object, ...]] = []
        for number, (hit, entries) in enumerate(zip(hits, subjects, strict=True), self._next_receipt()):
            verdicts: list[str] = []
            for entry, subject, keys in entries:
                if keys and subject not in seen and known.isdisjoint(keys):
                    fresh.append(fact_row(number, hit.receipt.at, entry))
                    verdicts.append("new")
                else:
                    self._insert(FACTS, fresh)
                    fresh.clear()
                    verdicts.append(self._enter(number, hit.receipt.at, in_its_wave(self._open, entry)))
                seen.add(subject)
            receipts.append(receipt_row(number, hit, verdicts))
        self._insert(FACTS, fresh)
        self._insert(RECEIPTS, receipts)

    def _next_receipt(self) -> int:
        number: int = self._one("SELECT coalesce(max(id), 0) + 1 FROM receipts")
        return number

    def _known(self, keys: Iterable[str]) -> set[str]:
        """Return the keys that there are facts of."""
        query = "SELECT value FROM json_each(?) WHERE EXISTS (SELECT 1 FROM facts WHERE key = value)"
        return {key for (key,) in self._open.execute(query, (json.dumps(list(keys)),))}

    def _insert(self, into: str, rows: Sequence[tuple[object, ...]]) -> None:
        """Insert rows, many with one statement."""
        begin = 0
        while left := len(rows) - begin:
            # Of few sizes, so that their statements stay compiled.
            size = min(1 << left.bit_length() - 1, MOST_ROWS)
            part = rows[begin : begin + size]
            self._open.execute(insertion(into, len(part[0]), size), [value for row in part for value in row])
            begin += size

    def _enter(self, receipt: int, at: float, entry: Entry) -> str:
        row = fact_row(receipt, at, entry)
        cursor = self._open.execute(f"{insertion(FACTS, len(row))} ON CONFLICT (identity) DO NOTHING", row)
        if cursor.rowcount == 0:
            ((content,),) = self._open.execute(
                # A repetition may be signed where the first one was not.
                "UPDATE facts SET receipts = receipts + 1, differing = differing + (content != ?),"
                " verified = max(verified, ?) WHERE identity = ? RETURNING content",
                (entry.content, entry.verified, entry.identity),
            ).fetchall()
            return "repeated" if content == entry.content else "differs"
        assert cursor.lastrowid is not None
        return self._place(cursor.lastrowid, entry, receipt, at)

    def _place(self, number: int, entry: Entry, receipt: int, at: float) -> str:
        """Decide which facts of a key are still true, now that there is a new one."""
        if entry.rank is not None:
            newest = self._one(
                "SELECT max(rank) FROM facts"
                " WHERE key = ? AND standing = 'stands' AND rank NOT NULL AND id != ?",
                entry.key,
                number,
            )
            if newest is not None and newest > entry.rank:
                self._supersede(Validity.STALE, "id = ?", number)
                return Validity.STALE
            self._supersede(Validity.STALE, "key = ? AND rank NOT NULL AND id != ?", entry.key, number)
        elif entry.kind is Kind.COMPLETION:
            first = self._one("SELECT min(id) FROM facts WHERE key = ? AND kind = ?", entry.key, entry.kind)
            if first != number:
                self._open.execute("UPDATE facts SET corrects = ? WHERE id = ?", (first, number))
            self._correct_terminate(entry.key, receipt, at)
            self._supersede(Validity.OVERRULED, "key = ? AND kind = ?", entry.key, Kind.TERMINATE)
        elif entry.kind is Kind.TERMINATE and self._one(
            "SELECT min(id) FROM facts WHERE key = ? AND kind = ?", entry.key, Kind.COMPLETION
        ):
            self._supersede(Validity.OVERRULED, "id = ?", number)
            return Validity.OVERRULED
        return "new"

    def _correct_terminate(self, key: str, receipt: int, at: float) -> None:
        self._open.execute(
            "INSERT INTO facts (at, receipt, receipts, kind, posted_as, key, identity, content, fields,"
            " verified, corrects, standing, due, since)"
            " SELECT ?, ?, 0, kind, posted_as, key, 'overruled ' || id, content, fields, verified, id, ?, ?, ?"
            # Also one that is being handled now: the new fact waits until its handler has ended.
            " FROM facts WHERE key = ? AND kind = ? AND standing = 'stands'"
            " AND (state = 'handled' OR (state = 'pending' AND owner IS NOT NULL))",
            (at, receipt, Validity.OVERRULED, at, at, key, Kind.TERMINATE),
        )

    def _supersede(self, validity: Validity, where: str, *values: object) -> None:
        # A fact that is being handled stays pending, so that the next one with its key waits for the handler.
        change = (
            "UPDATE facts SET standing = ?, state ="
            " CASE WHEN state = 'pending' AND owner IS NULL THEN 'skipped' ELSE state END"
        )
        # The conditions are those of the callers above, and their values are passed as values.
        self._open.execute(f"{change} WHERE standing = 'stands' AND {where}", (validity, *values))

    def _one(self, query: str, *values: object) -> Any:
        return self._open.execute(query, values).fetchone()[0]

    def prune(self, before: datetime) -> int:
        """Delete the receipts of hits before a time, and return how many.

        Facts stay, because a repetition may come late; so do the bodies of what was not understood. The file
        keeps its size, and its free space is reused. This may run while an inbox is open.

        Raises:
            InvalidRequestError: `before` has no time zone.
            StoreError: The store cannot be read or written.
        """
        count, moment = 0, moment_of(before, "before")
        with self._failing("cannot be pruned"), closing(self._connected()) as database:
            database.execute(
                "CREATE TEMP TABLE kept AS SELECT DISTINCT receipt FROM main.facts WHERE kind = ''"
            )
            database.execute("CREATE INDEX temp.kept_receipt ON kept (receipt)")
            # In small transactions, so that other writers get a turn.
            while deleted := database.execute(
                "DELETE FROM receipts WHERE id IN (SELECT id FROM receipts WHERE at < ?"
                " AND id NOT IN (SELECT receipt FROM temp.kept) ORDER BY id LIMIT ?)",
                (moment, _PAGE),
            ).rowcount:
                count += deleted
        return count

    # --- Handlers

    def claim(
        self,
        owner: str,
        kinds: Sequence[Kind | None],
        now: float,
        until: float,
        most: int,
        *,
        only: Sequence[Kind | None] | None = None,
    ) -> Sequence[Fact[Notification]]:
        # Facts superseded while being handled need no handler any more, once their lease is over.
        self._open.execute(
            "UPDATE facts SET state = 'skipped', owner = NULL"
            " WHERE state = 'pending' AND standing != 'stands' AND corrects IS NULL AND due <= ?",
            (now,),
        )
        if now < self._claimed_at:
            # The clock was set back. Facts received, leased or delayed before that would wait until it
            # reaches their times again. A small step changes no leases: their owners may still prolong them.
            self._open.execute(
                "UPDATE facts SET due = ?, since = ? WHERE state = 'pending' AND since > ?"
                " AND (owner IS NULL OR (owner != ? AND since > ?))",
                (now, now, now, owner, now + _STEP_SECONDS),
            )
        self._claimed_at = now
        names, leased = _names(kinds), _names(kinds if only is None else only)
        of_kinds = " UNION ALL ".join([CLAIM_OF_KIND % _marks(kinds)] * len(leased))
        values = [value for name in leased for value in (name, now, *names, most)]
        rows = self._open.execute(CLAIM % of_kinds, (until, now, owner, *values, most)).fetchall()
        return [_fact(row, partial(_body, self._open)) for row in sorted(rows)]

    def extend(self, owner: str, fact_ids: Iterable[int], until: float) -> None:
        self._open.executemany(
            # The lease is as long as before, so it begins so long before its new end.
            "UPDATE facts SET since = ? - (due - since), due = ?"
            " WHERE id = ? AND owner = ? AND state = 'pending'",
            [(until, until, number, owner) for number in fact_ids],
        )

    def release(self, owner: str) -> None:
        self._open.execute(
            "UPDATE facts SET due = 0, since = 0, owner = NULL, attempts = attempts - 1"
            " WHERE owner = ? AND state = 'pending'",
            (owner,),
        )

    def settle(self, owner: str, settled: Settled) -> bool:
        cursor = self._open.execute(
            "UPDATE facts SET"
            " state = CASE WHEN ? = 'handled' OR standing = 'stands' OR corrects IS NOT NULL THEN ?"
            " ELSE 'skipped' END, due = ?,"
            " owner = NULL, error = ?, attempts = attempts - ? WHERE id = ? AND owner = ?",
            # Not numbered (`?1`): Python 3.12.0 to 3.12.3 warn of that, as if they were names.
            (
                *(settled.state, settled.state, settled.due, settled.error),
                *(not settled.counts, settled.fact_id, owner),
            ),
        )
        return cursor.rowcount == 1

    def replay(self, fact_ids: Iterable[int] | None = None) -> int:
        """Make facts due again: those named, or all dead ones. Returns how many.

        Facts that are being handled need no replay, and are skipped.
        """
        change = (
            "UPDATE facts SET state = 'pending', due = 0, since = 0, attempts = 0"
            " WHERE (standing = 'stands' OR corrects IS NOT NULL) AND owner IS NULL"
        )
        if fact_ids is None:
            return self._open.execute(f"{change} AND state = 'dead'").rowcount
        numbers = (number for number in fact_ids if number <= INT64_MAX)  # no other number is an ID
        return sum(self._open.execute(f"{change} AND id = ?", (number,)).rowcount for number in numbers)

    # --- Reading

    def backlog(self) -> Sequence[Backlog]:
        """Return how many facts of each kind wait for their handlers, or are dead; no kinds without any."""
        with self._failing("cannot be read"), closing(self._connected()) as database:
            # The index has counts and IDs. The time of the oldest fact is looked up once for each kind.
            rows = database.execute(
                "SELECT kind, pending, dead, (SELECT at FROM facts WHERE id = first) FROM ("
                "SELECT kind, sum(pending) AS pending, sum(dead) AS dead, min(first) AS first FROM ("
                " SELECT kind, count(*) AS pending, 0 AS dead, min(id) AS first FROM facts"
                " WHERE state = 'pending' GROUP BY kind UNION ALL"
                " SELECT kind, 0, count(*), NULL FROM facts WHERE state = 'dead' GROUP BY kind"
                ") GROUP BY kind)"
            ).fetchall()
        return [
            Backlog(kind=Kind(kind) if kind else None, pending=pending, dead=dead, oldest_at=at)
            for kind, pending, dead, at in rows
        ]

    def last_id(self) -> int:
        """Return the ID of the newest fact; 0 if there is none."""
        with self._failing("cannot be read"), closing(self._connected()) as database:
            newest: int = database.execute("SELECT coalesce(max(id), 0) FROM facts").fetchone()[0]
            return newest

    def facts(
        self, *, kinds: Iterable[Kind | None] | None = None, after: int = 0, state: State | None = None
    ) -> Iterator[Fact[Notification]]:
        """Yield the facts with a higher ID than `after`, in the order of arrival.

        It reads in pages over a separate connection, so that writers do not wait.
        """
        conditions = ["id > ?"]
        values: list[Any] = [after]
        if kinds is not None:
            wanted = list(kinds)
            conditions.append(f"kind IN ({_marks(wanted)})")
            values += _names(wanted)
        if state is not None:
            conditions.append("state = ?")
            values.append(state)
        query = f"SELECT {COLUMNS} FROM facts WHERE {' AND '.join(conditions)} ORDER BY id LIMIT {_PAGE}"  # noqa: S608
        with self._failing("cannot be read"), closing(self._connected()) as database:
            while True:
                rows = database.execute(query, values).fetchall()
                for row in rows:
                    yield _fact(row, partial(_body, database))
                if len(rows) < _PAGE:
                    return
                values[0] = rows[-1][0]


def store_of(store: Store | str | os.PathLike[str]) -> Store:
    if isinstance(store, str | os.PathLike):
        return SqliteStore(store)
    if isinstance(store, type) or not callable(getattr(store, "receive_all", None)):
        raise InvalidRequestError(
            f"store must be a path, or a subclass of Store such as SqliteStore, not {shown(store)}"
        )
    return store


def _names(kinds: Iterable[Kind | None]) -> list[str]:
    return ["" if kind is None else str(kind) for kind in kinds]


def _marks(kinds: Sequence[Kind | None]) -> str:
    return ", ".join("?" * len(kinds))


def _body(database: sqlite3.Connection, receipt: int) -> bytes:
    row = database.execute("SELECT body FROM receipts WHERE id = ?", (receipt,)).fetchone()
    return bytes(row[0]) if row else b""


def _fact(row: Sequence[Any], body_of: Callable[[int], bytes]) -> Fact[Notification]:
    number, at, receipt, posted_as, kind, fields_json, reason, verified, receipts, differing, *rest = row
    corrects, validity, state, attempts, error = rest
    fields = json.loads(fields_json)
    notification: Notification
    anomaly = None
    try:
        if not kind:
            raise NotUnderstoodError(reason)  # noqa: TRY301
        named = FieldReader(fields)
        notification = parse(Kind(kind), named)
        anomaly = named.anomaly
    except NotUnderstoodError as exc:  # or another version has understood it
        notification = UnknownNotification(kind=Kind(posted_as), body=body_of(receipt), reason=str(exc))
    return Fact(
        id=number,
        notification=notification,
        fields=fields,
        received_at=datetime.fromtimestamp(at, UTC),
        receipts=receipts,
        differing=differing,
        verified=bool(verified),
        anomaly=anomaly,
        posted_as=Kind(posted_as),
        corrects=corrects,
        validity=Validity(validity),
        state=State(state),
        attempts=attempts,
        error=error,
    )
