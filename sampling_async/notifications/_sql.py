"""The store in a database of SQL: what SQLite and PostgreSQL have in common.

The statements are in the part of SQL that both read, with `?` where a value stands.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sampling_async._contract.checks import moment_of, whole_id
from sampling_async._contract.records import INT64_MAX
from sampling_async._journal.database import as_written
from sampling_async.notifications._entries import member_text, stand_in
from sampling_async.notifications._facts import Backlog, DamagedStoreError, State
from sampling_async.notifications._joining import about_stand_in, in_its_wave, placed, said_again
from sampling_async.notifications._records import Kind
from sampling_async.notifications._tables import (
    CLAIM,
    CLAIM_OF_KIND,
    COLUMNS,
    FACTS,
    MOST_ROWS,
    RECEIPTS,
    fact_of,
    fact_row,
    insertion,
    receipt_row,
    storable,
    subject_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import datetime

    from sampling_async.notifications._facts import Entry, Fact, Hit, Settled, StoreError
    from sampling_async.notifications._records import Notification

_log: Final = logging.getLogger("sampling_async.notifications")
_PAGE: Final = 1_000
# One process at a time receives, so that facts get their IDs in the order in which they can be read: whoever
# reads on after an ID misses none, and the facts of a key are decided about one after the other.
_RECEIVING: Final = "facts"
_STEP_SECONDS: Final = 60.0  # the largest step of a clock that is corrected in small steps


class SqlStore(ABC):
    """What `SqliteStore` and `PostgresStore` have in common. Each says how it connects and locks.

    Every method is called in one thread, and may block. Each that writes is called inside the block of
    `transaction()`, but for `open`, `close` and `prune`.
    """

    _INSERT: ClassVar[str] = "INSERT"
    _SKIP_LOCKED: ClassVar[str] = ""

    def __init__(self) -> None:
        self._claimed_at = inf

    @abstractmethod
    def open(self) -> None:
        """Open the store; make it if there is none."""

    @abstractmethod
    def close(self) -> None:
        """Close the store."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """Return a block whose writes are on the disk when it ends; if it raises, nothing of them stays."""

    @abstractmethod
    def copy(self) -> SqlStore:
        """Return a store of the same database that is not open."""

    @abstractmethod
    def lock(self, *keys: str) -> None:
        """Wait until no other transaction holds one of these keys, and hold them until this one ends."""

    @abstractmethod
    def run(self, query: str, values: Sequence[object] = ()) -> Any:
        """Run a statement inside `transaction()`, and return its cursor."""

    @abstractmethod
    def reading(
        self, what: str, *, is_long: bool = False, writes: bool = False
    ) -> AbstractContextManager[Callable[..., Any]]:
        """Return a block with a function that runs a statement, each in a transaction of its own.

        Args:
            what: What has failed if it raises, as in "cannot be read".
            is_long: Whether the statements may take longer than others.
            writes: Whether they change something after all.
        """

    def in_parts(self, query: str) -> Iterator[Any]:
        """Yield cursors that together have the rows of a query, for a result that is too large for memory."""
        with self.reading("cannot be read", is_long=True) as run:
            yield run(query)

    @abstractmethod
    def failing(self, what: str) -> AbstractContextManager[None]:
        """Return a block that raises errors of the database as a StoreError: `what`, as in `cannot be read`."""

    @abstractmethod
    def error(self, reason: str) -> StoreError:
        """Return an error that names the store: `reason`, as in `is not open`."""

    def as_written(self) -> AbstractContextManager[None]:
        """Return a block that says that the store is damaged if its values cannot be used."""
        return as_written(lambda reason: DamagedStoreError(str(self.error(reason)), permanent=True), "inbox")

    @abstractmethod
    def _receipt_numbers(self, count: int) -> Iterable[int]:
        """Return the numbers of new receipts."""

    def execute(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        """Run a statement inside `transaction()`, and return its rows. A `?` stands for each value.

        Write it in the part of SQL that SQLite and PostgreSQL have in common.
        """
        cursor = self.run(query, values)
        return [] if cursor.description is None else cursor.fetchall()

    def check_writable(self) -> None:
        """Write something that changes nothing, so that a full disk or a read-only database raises."""
        self.run("DELETE FROM served WHERE id < 0")  # a standby refuses it, although there is no such row

    # --- Secrets

    def secrets(self, fresh: Mapping[Kind, str]) -> Mapping[Kind, Sequence[str]]:
        """Return the secrets of the kinds' URLs, the newest first; store `fresh` for kinds without one."""
        self.lock("secrets")  # two processes may make them at once
        known = self._secrets()
        for kind, secret in fresh.items():
            if kind not in known:
                self.run("INSERT INTO secrets (kind, secret) VALUES (?, ?)", (kind, secret))
        return self._secrets()

    def rotate(self, fresh: Mapping[Kind, str], *, keep: int = 2) -> None:
        """Add new secrets as the newest, and drop all but the newest `keep` of each kind."""
        self.lock("secrets")
        for kind, secret in fresh.items():
            self.run("INSERT INTO secrets (kind, secret) VALUES (?, ?)", (kind, secret))
            self.run(
                "DELETE FROM secrets WHERE kind = ? AND id NOT IN"
                " (SELECT id FROM secrets WHERE kind = ? ORDER BY id DESC LIMIT ?)",
                (kind, kind, keep),
            )

    def _secrets(self) -> dict[Kind, list[str]]:
        known: dict[Kind, list[str]] = {}
        with self.as_written():
            for kind, secret in self.run("SELECT kind, secret FROM secrets ORDER BY id DESC"):
                known.setdefault(Kind(kind), []).append(secret)
        return {kind: known[kind] for kind in Kind if kind in known}

    # --- Where it is served

    def keep_url(self, url: str) -> None:
        """Store the public URL of this store's inbox."""
        self.run(
            "INSERT INTO served (id, url) VALUES (1, ?) ON CONFLICT (id) DO UPDATE SET url = excluded.url",
            (storable(url),),
        )

    def url(self) -> str | None:
        """Return the URL stored last; None if there is none."""
        row = self.run("SELECT url FROM served").fetchone()
        return None if row is None else str(row[0])

    # --- What comes in

    def receive_all(self, hits: Sequence[Hit]) -> list[list[str]]:
        """Store hits with their notifications, in their order.

        Returns:
            For each entry of each hit `new`, `repeated`, `differs`, `stale` or `overruled`.
        """
        self.lock(_RECEIVING)
        # The event loop runs beside this thread only while the database works, and after each statement this
        # thread waits for the loop. So notifications that no other one has to do with are inserted together.
        subjects = [[(entry, *subject_of(entry)) for entry in hit.entries] for hit in hits]
        known = self._known({key for entries in subjects for *_, keys in entries for key in keys})
        erased = self._erased(hit.entries for hit in hits)
        seen: set[object] = set()
        fresh: list[tuple[object, ...]] = []
        receipts: list[tuple[object, ...]] = []
        became: list[list[str]] = []
        numbers = self._receipt_numbers(len(hits))
        for number, hit, entries in zip(numbers, hits, subjects, strict=True):
            verdicts: list[str] = []
            for entry, subject, keys in entries:
                is_new = keys and subject not in seen and known.isdisjoint(keys)
                if is_new and not (erased and entry.member_code in erased):
                    fresh.append(fact_row(number, hit.receipt.at, entry))
                    verdicts.append("new")
                else:
                    self.insert(FACTS, fresh)
                    fresh.clear()
                    verdicts.append(self._join(number, hit.receipt.at, entry, erased))
                seen.add(subject)
            receipts.append(receipt_row(number, hit.without(erased), verdicts))
            became.append(verdicts)
        self.insert(FACTS, fresh)
        self.insert(RECEIPTS, receipts)
        return became

    def _erased(self, entries: Iterable[Sequence[Entry]]) -> set[str]:
        """Return the codes of members that were erased. It is one statement if there was never any."""
        if self.run("SELECT 1 FROM erased LIMIT 1").fetchone() is None:
            return set()
        codes = {code for some in entries for entry in some if (code := entry.member_code) is not None}
        query = "SELECT 1 FROM erased WHERE member = ?"
        return {code for code in codes if self.run(query, (member_text(stand_in(code)),)).fetchone()}

    def _join(self, receipt: int, at: float, entry: Entry, erased: set[str]) -> str:
        """Enter an entry that may have to do with facts that are stored."""
        place = about_stand_in if entry.member_code in erased else in_its_wave
        with self.as_written():
            return self._enter(receipt, at, place(self.run, entry))

    def _known(self, keys: Iterable[str]) -> set[str]:
        """Return the keys that there are facts of."""
        known, left = set[str](), list(keys)
        while left:
            # The last key again, up to one of few sizes: one statement for all, that stays compiled.
            size = min(1 << (len(left) - 1).bit_length(), 2 * MOST_ROWS)
            part, left = left[:size], left[size:]
            part += part[-1:] * (size - len(part))
            # Each key is looked up in the index. With IN, PostgreSQL reads the whole table until it has counted
            # it: of a new store, a third more is stored in a second this way.
            query = (
                f"SELECT column1 FROM (VALUES {', '.join(['(?)'] * size)}) AS given"
                " WHERE (SELECT count(*) FROM facts WHERE key = column1) > 0"
            )
            known.update(key for (key,) in self.run(query, part).fetchall())
        return known

    def insert(self, into: str, rows: Sequence[Sequence[object]], *, on_conflict: str = "") -> int:
        """Insert rows into columns of a table, many with one statement, and return how many were inserted."""
        begin = count = 0
        while left := len(rows) - begin:
            # Of few sizes, so that their statements stay compiled.
            size = min(1 << left.bit_length() - 1, MOST_ROWS)
            part = rows[begin : begin + size]
            query = f"{insertion(self._INSERT, into, len(part[0]), size)} {on_conflict}"
            count += self.run(query, [value for row in part for value in row]).rowcount
            begin += size
        return count

    def _enter(self, receipt: int, at: float, entry: Entry) -> str:
        number = self._entered(receipt, at, entry)
        if number is None and (again := said_again(self.run, entry, at)) is not None:
            entry = again
            number = self._entered(receipt, at, entry)
        if number is not None:
            return placed(self.run, number, entry, receipt, at)
        ((content,),) = self.run(
            "UPDATE facts SET receipts = receipts + 1,"
            # Of an erased member the content is not known.
            " differing = differing + CASE WHEN content IN (?, '') THEN 0 ELSE 1 END,"
            # A repetition may be signed where the first one was not.
            " verified = CASE WHEN 1 = ? THEN 1 ELSE verified END WHERE identity = ? RETURNING content",
            (entry.content, int(entry.verified), entry.identity),
        ).fetchall()
        return "repeated" if content in {entry.content, ""} else "differs"

    def _entered(self, receipt: int, at: float, entry: Entry) -> int | None:
        """Insert a fact and return its number; None if its event is known."""
        row = fact_row(receipt, at, entry)
        insert = f"{insertion(self._INSERT, FACTS, len(row))} ON CONFLICT (identity) DO NOTHING RETURNING id"
        found = self.run(insert, row).fetchall()
        return found[0][0] if found else None

    def prune(self, before: datetime) -> int:
        """Delete the receipts of hits before a time, and return how many.

        Facts stay, because a repetition may come late; so do the bodies of what was not understood. The file
        keeps its size, and its free space is reused. This may run while an inbox is open.

        Raises:
            InvalidRequestError: `before` has no time zone.
            StoreError: The store cannot be read or written.
        """
        count, moment = 0, moment_of(before, "before")
        with self.reading("cannot be pruned", is_long=True, writes=True) as run:
            # In small transactions, so that other writers get a turn.
            while deleted := run(
                "DELETE FROM receipts WHERE id IN (SELECT id FROM receipts AS r WHERE at < ? AND NOT EXISTS"
                " (SELECT 1 FROM facts AS f WHERE f.kind = '' AND f.receipt = r.id) ORDER BY id LIMIT ?)",
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
        """Lease facts that are due to a handler, at most one of each key, in the order of arrival.

        At most `most` are leased to `owner`, a process, until `until`; then they are due again. `kinds` are
        those with a handler; None stands for what was not understood. With `only`, facts of these kinds are
        leased now; facts of the others still keep the order of their keys.
        """
        # Facts superseded while being handled need no handler any more, once their lease is over.
        self.run(
            "UPDATE facts SET state = 'skipped', owner = NULL WHERE id IN (SELECT id FROM facts"
            " WHERE state = 'pending' AND standing != 'stands' AND corrects IS NULL AND due <= ?"
            f" {self._SKIP_LOCKED})",
            (now,),
        )
        if now < self._claimed_at:
            # The clock was set back. Facts received, leased or delayed before that would wait until it
            # reaches their times again. A small step changes no leases: their owners may still prolong them.
            self.run(
                "UPDATE facts SET due = ?, since = ? WHERE id IN (SELECT id FROM facts"
                " WHERE state = 'pending' AND since > ? AND (owner IS NULL OR (owner != ? AND since > ?))"
                f" {self._SKIP_LOCKED})",
                (now, now, now, owner, now + _STEP_SECONDS),
            )
        self._claimed_at = now
        names, leased = _names(kinds), _names(kinds if only is None else only)
        of_kind = CLAIM_OF_KIND.format(marks=_marks(kinds), skip_locked=self._SKIP_LOCKED)
        query = CLAIM.format(of_kinds=" UNION ALL ".join([of_kind] * len(leased)))
        values = [value for name in leased for value in (name, now, *names, most)]
        rows = self.run(query, (*values, most, until, now, owner)).fetchall()
        return list(self._undamaged(sorted(rows)))

    def _undamaged(self, rows: Iterable[Sequence[Any]]) -> Iterator[Fact[Notification]]:
        """Yield rows as facts; one that is damaged becomes dead, so that it keeps no others waiting."""
        for row in rows:
            try:
                yield self._fact(self.run, row)
            except DamagedStoreError as exc:
                _log.error("%s: it is dead", exc)
                change = "UPDATE facts SET state = 'dead', owner = NULL, error = ? WHERE id = ?"
                self.run(change, (storable(str(exc)), exc.fact_id))

    def _fact(self, run: Callable[..., Any], row: Sequence[Any]) -> Fact[Notification]:
        number = int(row[0])

        def damaged(reason: str) -> DamagedStoreError:
            what = f"{reason}; it is in fact {number}, and after={number} reads on behind it"
            exc = DamagedStoreError(str(self.error(what)), permanent=True)
            exc.fact_id = number
            return exc

        with as_written(damaged, "inbox"):
            return fact_of(row, partial(_body, run))

    def extend(self, owner: str, fact_ids: Iterable[int], until: float) -> None:
        """Prolong leases."""
        for number in fact_ids:
            # The lease is as long as before, so it begins so long before its new end.
            self.run(
                "UPDATE facts SET since = ? - (due - since), due = ?"
                " WHERE id = ? AND owner = ? AND state = 'pending'",
                (until, until, number, owner),
            )

    def release(self, owner: str) -> None:
        """End all leases of an owner, without counting their last attempt."""
        self.run(
            "UPDATE facts SET due = 0, since = 0, owner = NULL, attempts = attempts - 1"
            " WHERE owner = ? AND state = 'pending'",
            (owner,),
        )

    def settle(self, owner: str, settled: Settled) -> bool:
        """Store the result of an attempt; return False if the lease now belongs to another owner."""
        cursor = self.run(
            "UPDATE facts SET"
            " state = CASE WHEN ? = 'handled' OR standing = 'stands' OR corrects IS NOT NULL THEN ?"
            " ELSE 'skipped' END, due = ?,"
            " owner = NULL, error = ?, attempts = attempts - ? WHERE id = ? AND owner = ?",
            # Not numbered (`?1`): Python 3.12.0 to 3.12.3 warn of that, as if they were names.
            (
                *(settled.state, settled.state, settled.due),
                *(settled.error and storable(settled.error), int(not settled.counts), settled.fact_id, owner),
            ),
        )
        return bool(cursor.rowcount == 1)

    def replay(self, fact_ids: Iterable[int] | None = None) -> int:
        """Make facts due again: those named, or all dead ones. Returns how many.

        Facts that are being handled need no replay, and are skipped.
        """
        change = (
            "UPDATE facts SET state = 'pending', due = 0, since = 0, attempts = 0"
            " WHERE (standing = 'stands' OR corrects IS NOT NULL) AND owner IS NULL"
        )
        if fact_ids is None:
            return int(self.run(f"{change} AND state = 'dead'").rowcount)
        asked = (whole_id(each, "the ID of a fact") for each in fact_ids)
        return sum(self.run(f"{change} AND id = ?", (at,)).rowcount for at in asked if 0 < at <= INT64_MAX)

    # --- Reading

    def backlog(self) -> Sequence[Backlog]:
        """Return how many facts of each kind wait for their handlers, or are dead; no kinds without any."""
        with self.reading("cannot be read") as run:
            # The index has counts and IDs. The time of the oldest fact is looked up once for each kind.
            rows = run(
                "SELECT kind, pending, dead, (SELECT at FROM facts WHERE id = first) FROM ("
                "SELECT kind, sum(pending) AS pending, sum(dead) AS dead, min(first) AS first FROM ("
                " SELECT kind, count(*) AS pending, 0 AS dead, min(id) AS first FROM facts"
                " WHERE state = 'pending' GROUP BY kind UNION ALL"
                " SELECT kind, 0, count(*), NULL FROM facts WHERE state = 'dead' GROUP BY kind"
                ") AS each GROUP BY kind) AS of_kind"
            ).fetchall()
        with self.as_written():
            return [
                Backlog(
                    kind=Kind(kind) if kind else None,
                    pending=int(pending),  # PostgreSQL's sum of whole numbers is a Decimal
                    dead=int(dead),
                    oldest_at=None if at is None else float(at),
                )
                for kind, pending, dead, at in rows
            ]

    def last_id(self) -> int:
        """Return the ID of the newest fact; 0 if there is none."""
        with self.reading("cannot be read") as run:
            return int(run("SELECT coalesce(max(id), 0) FROM facts").fetchone()[0])

    def facts(
        self, *, kinds: Iterable[Kind | None] | None = None, after: int = 0, state: State | None = None
    ) -> Iterator[Fact[Notification]]:
        """Yield the facts with a higher ID than `after`, in the order of arrival; a damaged one raises.

        It reads in pages over a separate connection, so that writers do not wait.
        """
        conditions, values = ["id > ?"], list[Any]([after])
        if kinds is not None:
            values += _names(kinds)
            conditions.append(f"kind IN ({_marks(values[1:])})")
        if state is not None:
            conditions.append("state = ?")
            values.append(state)
        query = f"SELECT {COLUMNS} FROM facts WHERE {' AND '.join(conditions)} ORDER BY id LIMIT {_PAGE}"
        with self.reading("cannot be read") as run:
            while True:
                rows = run(query, values).fetchall()
                for row in rows:
                    yield self._fact(run, row)
                if len(rows) < _PAGE:
                    return
                values[0] = rows[-1][0]


def _names(kinds: Iterable[Kind | None]) -> list[str]:
    return ["" if kind is None else str(kind) for kind in kinds]


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _body(run: Callable[..., Any], receipt: int) -> bytes:
    row = run("SELECT body FROM receipts WHERE id = ?", (receipt,)).fetchone()
    return bytes(row[0]) if row else b""
