"""The file of a campaign's ledger, one run at a time: a SQLite database with a lock beside it, and its rows."""

from __future__ import annotations

import os
import sqlite3
import threading
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from attrs import define, field, frozen

from sampling_async._contract.errors import JournalError
from sampling_async._contract.records import hidden
from sampling_async._journal.database import (
    as_written,
    connected,
    connected_to_read,
    failing,
    make_durable,
    transaction,
)
from sampling_async._journal.lock import JournalLock
from sampling_async._private_files import make_private

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager


@frozen
class PlannedQuota:
    """A quota as a campaign counts with it; see `QuotaFill`."""

    id: int
    survey: int
    wave: int
    name: str
    currency: int | None
    room: int
    value: float
    cost: float
    closed: str | None = None


@define
class DueMember:
    id: int  # its number in the ledger
    code: str = field(repr=hidden)
    closed: str | None  # why it gets nothing more; None if it may
    reserves: list[int]  # quotas that may take the place of others, the best first
    turn: int  # which turn it is; a member gets a second one if something was refused
    due: dict[int, int] = field(factory=dict[int, int])  # the tries of each quota that is requested now
    refused: dict[int, int] = field(factory=dict[int, int])  # the last result code of those that were answered
    waiting: set[int] = field(factory=set[int])  # the quotas that were requested and have no outcome yet
    tries: dict[int, int] = field(factory=dict[int, int])
    added: int = 0  # how many pairs were planned for it, reserves included
    was_asked: bool = False  # whether it had a request before


class NewPair(NamedTuple):
    member: int
    quota: int
    rank: int
    certain: bool
    turn: int


class PairEnd(NamedTuple):
    """What became of a pair, for now or for good."""

    state: str
    code: int | None
    reason: str | None
    turn: int
    tries: int
    due: float  # when it is requested again; of an unknown pair, when it was requested
    member: int
    quota: int


class MadeInvite(NamedTuple):
    member: int
    quota: int
    survey: int
    wave: int
    url: str
    partner_amount: float | None
    member_amount: float | None
    loi: int | None
    ir: int | None
    at: float

    def __repr__(self) -> str:
        return f"<MadeInvite of member {self.member} for quota {self.quota}>"


@define
class Notes:
    """What is to be written together, in the order of these fields."""

    pairs: list[NewPair] = field(factory=list[NewPair])
    sent: list[tuple[int, int, str]] = field(factory=list["tuple[int, int, str]"])
    ends: list[PairEnd] = field(factory=list[PairEnd])
    invites: list[MadeInvite] = field(factory=list[MadeInvite])
    answered: list[tuple[int]] = field(factory=list["tuple[int]"])
    closed_quotas: list[tuple[str, int]] = field(factory=list["tuple[str, int]"])
    closed_members: list[tuple[str, int]] = field(factory=list["tuple[str, int]"])
    codes: dict[int, str] = field(factory=dict[int, str])
    moments: list[tuple[Any, ...]] = field(factory=list["tuple[Any, ...]"])
    waits: dict[int, tuple[str, float, float]] = field(factory=dict[int, "tuple[str, float, float]"])


# Marks the file as a ledger ("SANC"), so that no other database is written to by mistake.
_APPLICATION: Final = 0x53414E43
_FORM: Final = 2
# Of each kind, a byte, the group of the new plan; the one before if the new panel has none.
KEPT_GROUPS: Final = " | ".join(
    f"((CASE WHEN excluded.grouped & {byte} THEN excluded.grouped ELSE coalesce(grouped, 0) END) & {byte})"
    for byte in (0xFF << at for at in range(0, 56, 8))
)
LEDGER_NAME: Final = "campaign.ledger"  # of the ledger in the folder of a campaign
_BUSY_SECONDS: Final = 30.0

_TABLES: Final = f"""
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_FORM};
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE quotas (
    id INTEGER PRIMARY KEY, survey INTEGER NOT NULL, wave INTEGER NOT NULL, name TEXT NOT NULL,
    currency INTEGER, room INTEGER NOT NULL, closed TEXT
);
CREATE TABLE terms (
    quota INTEGER NOT NULL, plan INTEGER NOT NULL, value REAL NOT NULL, cost REAL NOT NULL,
    PRIMARY KEY (quota, plan)
) WITHOUT ROWID;
CREATE TABLE members (
    id INTEGER PRIMARY KEY, code TEXT NOT NULL UNIQUE, reserves TEXT NOT NULL, closed TEXT
);
CREATE TABLE pairs (
    member INTEGER NOT NULL, quota INTEGER NOT NULL, plan INTEGER NOT NULL, rank INTEGER NOT NULL,
    certain INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'pending', turn INTEGER NOT NULL DEFAULT 1,
    tries INTEGER NOT NULL DEFAULT 0, due REAL NOT NULL DEFAULT 0, code INTEGER, reason TEXT,
    PRIMARY KEY (member, quota, plan)
) WITHOUT ROWID;
CREATE INDEX pairs_pending ON pairs (turn, member) WHERE state = 'pending';
CREATE TABLE invites (
    member INTEGER NOT NULL, quota INTEGER NOT NULL, survey INTEGER NOT NULL, wave INTEGER NOT NULL,
    url TEXT NOT NULL, partner_amount REAL, member_amount REAL, loi INTEGER, ir INTEGER, at REAL NOT NULL
);
CREATE INDEX invites_pair ON invites (member, quota);
CREATE TABLE requests (id INTEGER PRIMARY KEY, member INTEGER NOT NULL, quotas TEXT NOT NULL);
CREATE TABLE codes (code INTEGER PRIMARY KEY, result TEXT NOT NULL);
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, began REAL NOT NULL, ended REAL, reason TEXT NOT NULL DEFAULT ''
);
CREATE TABLE moments (
    run INTEGER NOT NULL, slot INTEGER NOT NULL, requests INTEGER NOT NULL, invited INTEGER NOT NULL,
    rejected INTEGER NOT NULL, failed INTEGER NOT NULL, latencies TEXT NOT NULL, "limit" REAL,
    PRIMARY KEY (run, slot)
) WITHOUT ROWID;
CREATE TABLE waits (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, began REAL NOT NULL, ended REAL NOT NULL
);
"""


# Made when it is missing: ledgers from before it go on, and one that is only read counts as without it.
_SETTLED: Final = """
TABLE IF NOT EXISTS settled (
    member INTEGER NOT NULL, quota INTEGER NOT NULL, kind TEXT NOT NULL, fact INTEGER NOT NULL,
    at REAL NOT NULL, PRIMARY KEY (member, quota)
) WITHOUT ROWID
"""


def is_ledger(path: Path) -> bool:
    """Return whether a file is the ledger of a campaign; False also if it is no database that can be read."""
    with suppress(sqlite3.Error, OSError), closing(connected_to_read(path, _BUSY_SECONDS)) as database:
        return bool(database.execute("PRAGMA application_id").fetchone()[0] == _APPLICATION)
    return False


class LedgerError(JournalError):
    """The ledger of a campaign cannot be opened, read or written, or belongs to something else.

    The text contains no member code and no invite link.

    Attributes:
        path: The ledger's file.
    """

    def __str__(self) -> str:
        return f"the ledger {self.path} {self.args[0]}"


class LedgerFile:
    """The file of a ledger, for one user of it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.plan = 0  # the number of the latest plan
        self._database: sqlite3.Connection | None = None
        self._lock = JournalLock(self.path)
        self._file: os.stat_result | None = None
        self._lock_file: os.stat_result | None = None
        self._is_gone = False
        self._turn = threading.Lock()

    def __repr__(self) -> str:
        return f"<Ledger {self.path}>"

    def open(self, *, make: bool = False, reads: bool = False) -> None:
        """Open the file; with `make`, make it if there is none; with `reads`, change nothing."""
        if self._database is not None:
            return
        with self._failing("cannot be opened"):
            if make:
                with suppress(FileExistsError):
                    make_private(self.path)
            elif not self.path.is_file():
                raise LedgerError("does not exist: call plan() first", path=self.path)
            database = (connected_to_read if reads else connected)(self.path, _BUSY_SECONDS)
            try:
                is_made = self._check(database, reads=reads)
                if not reads:
                    make_durable(database, _BUSY_SECONDS)
            except BaseException:
                database.close()
                raise
            self._database, self._file = database, self.path.stat()
            self._abandon_if_closed()
        if is_made:
            self._read_plan()

    def _read_plan(self) -> None:
        with self.as_written():
            self.plan = int(self.fact("plan") or 0)

    def _check(self, database: sqlite3.Connection, *, reads: bool) -> bool:
        """Return whether it has tables; make them if there are none, unless it is only read."""
        tables = "SELECT count(*) FROM sqlite_master"
        if not database.execute(tables).fetchone()[0]:
            if reads:
                return False
            with transaction(database):
                # Another process may have been quicker.
                if not database.execute(tables).fetchone()[0]:
                    for statement in _TABLES.split(";"):
                        database.execute(statement)
        application = database.execute("PRAGMA application_id").fetchone()[0]
        form = database.execute("PRAGMA user_version").fetchone()[0]
        if application != _APPLICATION:
            raise LedgerError("is a database of something else; name another file", path=self.path)
        if form != _FORM:
            raise LedgerError(f"has form {form}, and this version reads form {_FORM}", path=self.path)
        has_settled = "SELECT count(*) FROM sqlite_master WHERE name = 'settled'"
        if not reads:
            database.execute(f"CREATE {_SETTLED}")
        elif not database.execute(has_settled).fetchone()[0]:
            database.execute("PRAGMA query_only = OFF")
            database.execute(f"CREATE TEMP {_SETTLED}")
            database.execute("PRAGMA query_only = ON")
        return True

    def close(self, *, removed: bool = False) -> None:
        """Close the file, and release it for other runs; with `removed`, remove it before."""
        with self._turn:
            self._is_gone = True
            database, self._database = self._database, None
            if database is not None:
                with suppress(sqlite3.Error):
                    database.close()
            if removed:
                self.path.unlink(missing_ok=True)
            self.unlock()

    def lock(self) -> None:
        """Take the ledger for a run, which writes outcomes; there is one at a time."""
        try:
            self._lock.take()
        except JournalError:
            raise LedgerError("is in use by another run of the campaign", path=self.path, in_use=True) from None
        except OSError as exc:
            raise LedgerError(f"cannot be locked: {exc.strerror}", path=self.path) from None
        with suppress(OSError):
            self._lock_file = self._lock.path.stat()
        self._abandon_if_closed()
        if self._database is not None:
            # Until now others could remove it, or make another plan.
            self.must_be_in_place()
            self._read_plan()

    def must_be_in_place(self) -> None:
        """Check that the run still has the file.

        What is written to a file that was removed or replaced is lost in the end. The child of a fork does not
        have it: if its parent ends, another run may begin.
        """
        if self._lock_file is not None and not self._lock.is_held:
            raise LedgerError("is not that of this process, which was forked from its run", path=self.path)
        for path, file in ((self.path, self._file), (self._lock.path, self._lock_file)):
            with suppress(OSError):
                if file is None or os.path.samestat(file, path.stat()):
                    continue
            raise LedgerError("was removed or replaced, or its lock file was", path=self.path)

    def _abandon_if_closed(self) -> None:
        """Give up what was opened in a thread that a cancelled task has left behind."""
        if self._is_gone:
            self.close()
            raise LedgerError("is no longer needed: its user stopped waiting", path=self.path)

    def unlock(self) -> None:
        self._lock_file = None
        self._lock.release()

    def is_running(self) -> bool:
        """Return whether a run has the ledger now."""
        return self._lock.is_held or self._lock.is_taken()

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._database is None:
            raise LedgerError("is not open", path=self.path)
        return self._database

    def _failing(self, what: str) -> AbstractContextManager[None]:
        return failing(what, self.error)

    @contextmanager
    def _writing(self) -> Generator[sqlite3.Connection]:
        """Write together what this block writes."""
        with self._turn, self._failing("cannot be written"), transaction(self._connection):
            yield self._connection

    def fact(self, name: str) -> str | None:
        rows = self._rows("SELECT value FROM facts WHERE name = ?", (name,))
        return rows[0][0] if rows else None

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._turn, self._failing("cannot be read"):
            return self._connection.execute(query, *values).fetchall()

    def as_written(self) -> AbstractContextManager[None]:
        """Return a block that says that the ledger is damaged if its values cannot be used."""
        return as_written(self.error, "campaign")

    def error(self, reason: str) -> LedgerError:
        return LedgerError(reason, path=self.path)
