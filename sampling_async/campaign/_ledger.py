"""The ledger of a campaign: one SQLite file with its plan, every outcome, and the limits that hold.

Nothing here uses an event loop, and one thread at a time may use a ledger. Other processes may read the file
and change the limits while a run writes it.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from attrs import define, field, frozen

from sampling_async._contract.errors import InvalidRequestError, JournalError
from sampling_async._contract.records import hidden
from sampling_async._journal.lock import JournalLock
from sampling_async._protocol.requests import member_code_of
from sampling_async.campaign._limits import Limits

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

_APPLICATION: Final = 0x53414E43
"""Marks the file as ours ("SANC"), so that no other database is written to by mistake."""

_FORM: Final = 1
_BUSY_SECONDS: Final = 30.0
_BRIEF: Final = 0.01

_TABLES: Final = f"""
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_FORM};
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE quotas (
    id INTEGER PRIMARY KEY, survey INTEGER NOT NULL, wave INTEGER NOT NULL, name TEXT NOT NULL,
    currency INTEGER, room INTEGER NOT NULL, value REAL NOT NULL, cost REAL NOT NULL, closed TEXT
);
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

_WINDOW: Final = """
SELECT m.id, m.code, m.closed, m.reserves, p.quota, p.plan, p.tries,
    p.state = 'pending' AND p.turn = :turn AND p.due <= :now
FROM members AS m JOIN pairs AS p ON p.member = m.id
WHERE m.id IN (
    SELECT DISTINCT member FROM pairs
    WHERE state = 'pending' AND turn = :turn AND member > :after AND due <= :now
    ORDER BY member LIMIT :count
) ORDER BY m.id, p.plan, p.rank
"""

_END: Final = """
UPDATE pairs SET state = ?, code = ?, reason = ?, turn = ?, tries = ?, due = ?
WHERE member = ? AND quota = ? AND plan = ?
"""

IN_FLIGHT: Final = """
SELECT r.member, q.value FROM requests AS r, json_each(r.quotas) AS q
JOIN pairs AS p ON p.member = r.member AND p.quota = q.value AND p.plan = ? AND p.state = 'pending'
"""

KILLED: Final = "the process ended before the response came"
REPLANNED: Final = "planned anew"


class LedgerError(JournalError):
    """The ledger of a campaign cannot be opened, read or written, or belongs to something else.

    The text contains no member code and no invite link.

    Attributes:
        path: The ledger's file.
    """

    def __str__(self) -> str:
        return f"the ledger {self.path} {self.args[0]}"


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
class Member:
    """A member whose turn it is.

    Attributes:
        id: Its number in the ledger.
        code: The member code.
        closed: Why it gets nothing more; None if it may.
        due: The quotas to ask for now, each with how often that was tried.
        reserves: The quotas that may take the place of others, the best first.
        turn: Which turn it is; a member gets a second one if something was refused.
        waiting: The quotas that were asked for and have no outcome yet.
        added: How many pairs were planned for it, reserves included.
        was_asked: Whether it was asked for before.
    """

    id: int
    code: str = field(repr=hidden)
    closed: str | None
    reserves: list[int]
    turn: int
    due: dict[int, int] = field(factory=dict[int, int])
    waiting: set[int] = field(factory=set[int])
    tries: dict[int, int] = field(factory=dict[int, int])
    added: int = 0
    was_asked: bool = False


class NewPair(NamedTuple):
    """A pair to be planned."""

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
    due: float
    member: int
    quota: int


class MadeInvite(NamedTuple):
    """An invite as it is kept."""

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


class Ledger:
    """One use of a campaign's ledger.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.plan = 0
        self._database: sqlite3.Connection | None = None
        self._lock = JournalLock(self.path)
        self._file: os.stat_result | None = None
        self._lock_file: os.stat_result | None = None
        self._is_gone = False
        self._turn = threading.Lock()

    def __repr__(self) -> str:
        return f"<Ledger {self.path}>"

    # --- Opening and closing

    def open(self, *, make: bool = False) -> None:
        """Open the file; with `make`, make it if there is none.

        Raises:
            LedgerError: It does not exist, cannot be opened, or is something else.
        """
        if self._database is not None:
            return
        with self._failing("cannot be opened"):
            if make:
                # SQLite would make the file as the umask says. It gives -wal and -shm the mode of the file.
                with suppress(FileExistsError):
                    os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            elif not self.path.is_file():
                raise LedgerError("does not exist", path=self.path)
            database = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?mode=rw",
                uri=True,
                timeout=_BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                self._check(database)
                # WAL: others may read while a run writes. FULL: what was committed survives a loss of power.
                _use_wal(database)
                database.execute("PRAGMA synchronous = FULL")
            except BaseException:
                database.close()
                raise
            self._database, self._file = database, self.path.stat()
            self._must_be_wanted()
            self.plan = int(self.fact("plan") or 0)

    def _check(self, database: sqlite3.Connection) -> None:
        tables = "SELECT count(*) FROM sqlite_master"
        if not database.execute(tables).fetchone()[0]:
            database.execute("BEGIN IMMEDIATE")
            # Another process may have been quicker.
            if not database.execute(tables).fetchone()[0]:
                for statement in _TABLES.split(";"):
                    database.execute(statement)
            database.execute("COMMIT")
        application = database.execute("PRAGMA application_id").fetchone()[0]
        form = database.execute("PRAGMA user_version").fetchone()[0]
        if application != _APPLICATION:
            raise LedgerError("is a database of something else; name another file", path=self.path)
        if form != _FORM:
            raise LedgerError(f"has form {form}, and this version reads form {_FORM}", path=self.path)

    def close(self, *, removed: bool = False) -> None:
        """Close the file, and release it for other runs.

        Args:
            removed: Whether to remove it before it is released, so that nobody else can be using it.
        """
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
        """Take the ledger for a run, which writes outcomes; there is one at a time.

        Raises:
            LedgerError: Another run has it.
        """
        try:
            self._lock.take()
        except JournalError:
            raise LedgerError("is in use by another run of the campaign", path=self.path) from None
        except OSError as exc:
            raise LedgerError(f"cannot be locked: {exc.strerror}", path=self.path) from None
        with suppress(OSError):
            self._lock_file = self._lock.path.stat()
        self._must_be_wanted()
        if self._database is not None:
            # Until now others could change it, or remove it.
            self.must_be_in_place()
            self.plan = int(self.fact("plan") or 0)

    def must_be_in_place(self) -> None:
        """Check that the run still has the file.

        What is written to a file that was removed or replaced is lost in the end. The child of a fork does not
        have it: if its parent ends, another run may begin.

        Raises:
            LedgerError: The run does not have it any more.
        """
        if self._lock_file is not None and not self._lock.is_held:
            raise LedgerError("is not that of this process, which was forked from its run", path=self.path)
        for path, file in ((self.path, self._file), (self._lock.path, self._lock_file)):
            with suppress(OSError):
                if file is None or os.path.samestat(file, path.stat()):
                    continue
            raise LedgerError("was removed or replaced, or its lock file was", path=self.path)

    def _must_be_wanted(self) -> None:
        """Give up what was opened in a thread that a cancelled task has left behind."""
        if self._is_gone:
            self.close()
            raise LedgerError("is no longer needed: its user stopped waiting", path=self.path)

    def unlock(self) -> None:
        """Release the ledger for other runs."""
        self._lock_file = None
        self._lock.release()

    def is_running(self) -> bool:
        """Return whether a run has the ledger now."""
        return self._lock.is_held or self._lock.is_taken()

    @property
    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            raise LedgerError("is not open", path=self.path)
        return self._database

    @contextmanager
    def _failing(self, what: str) -> Generator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else exc
            raise LedgerError(f"{what}: {reason}", path=self.path) from exc

    @contextmanager
    def _writing(self) -> Generator[sqlite3.Connection]:
        """Write together what this block writes."""
        with self._turn, self._failing("cannot be written"):
            database = self._open
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                if database.in_transaction:  # after some errors SQLite has rolled back by itself
                    database.execute("ROLLBACK")
                raise

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._turn, self._failing("cannot be read"):
            return self._open.execute(query, *values).fetchall()

    # --- Facts and limits

    def fact(self, name: str) -> str | None:
        """Return a fact that was noted, or None."""
        rows = self._rows("SELECT value FROM facts WHERE name = ?", (name,))
        return rows[0][0] if rows else None

    def note(self, **facts: object) -> None:
        """Note facts, each by its name."""
        with self._writing() as database:
            _note(database, facts)

    def limits(self) -> Limits:
        """Return the limits that hold."""
        return self._limits_of(self.fact("limits"))

    def _limits_of(self, text: str | None) -> Limits:
        try:
            return Limits() if text is None else Limits.from_json(text)
        except (InvalidRequestError, TypeError, ValueError) as exc:
            raise LedgerError(f"holds limits that cannot be used: {exc}", path=self.path) from exc

    def set_limits(self, limits: Limits) -> None:
        """Set the limits. A run of another process heeds them within a second."""
        self.note(limits=limits.to_json())

    def change_limits(self, **changes: Any) -> Limits:
        """Change some limits and return all.

        Raises:
            InvalidRequestError: A limit is unknown, or its value is not possible.
        """
        with self._writing() as database:
            found = database.execute("SELECT value FROM facts WHERE name = 'limits'").fetchone()
            limits = self._limits_of(None if found is None else found[0]).changed(**changes)
            _note(database, {"limits": limits.to_json()})
        return limits

    # --- The plan

    @contextmanager
    def planning(self) -> Generator[Planning]:
        """Write a plan. It is there as a whole when the block ends, or not at all."""
        with self._writing() as database:
            self.plan += 1
            try:
                planning = Planning(database, self.plan)
                yield planning
                planning.end()
                _note(database, {"plan": self.plan})
            except BaseException:
                self.plan -= 1
                raise

    def quotas(self) -> list[PlannedQuota]:
        """Return the quotas."""
        query = "SELECT id, survey, wave, name, currency, room, value, cost, closed FROM quotas ORDER BY id"
        return [PlannedQuota(*row) for row in self._rows(query)]

    def counts(self) -> list[tuple[int, str, int]]:
        """Return the number of pairs of each quota and state."""
        return [
            (quota, state, count)
            for quota, state, count in self._rows(
                "SELECT quota, state, count(*) FROM pairs GROUP BY quota, state"
            )
        ]

    def earlier(self) -> dict[int, int]:
        """Return the number of pairs of each quota that may be invites of earlier plans."""
        query = (
            "SELECT quota, count(*) FROM pairs"
            " WHERE plan < ? AND state IN ('invited', 'unknown') GROUP BY quota"
        )
        return dict(self._rows(query, (self.plan,)))

    def delivered(self) -> Iterator[tuple[str, int, str, int | None]]:
        """Yield member code, survey, state and code of all pairs that were asked for."""
        yield from self._rows(
            "SELECT m.code, q.survey, p.state, p.code FROM pairs AS p JOIN members AS m ON m.id = p.member"
            " JOIN quotas AS q ON q.id = p.quota WHERE p.state NOT IN ('pending', 'skipped')"
        )

    def open_invites(self, since: float) -> list[tuple[int, int, int]]:
        """Return quota, survey and number of the invites that may still end in a complete.

        Pairs whose outcome is unknown count too: nobody knows when, or whether, they were made.
        """
        return [
            (quota, survey, count)
            for quota, survey, count in self._rows(
                "SELECT quota, survey, count(*) FROM invites WHERE at >= ? GROUP BY quota, survey"
                " UNION ALL SELECT p.quota, q.survey, count(*)"
                " FROM pairs AS p JOIN quotas AS q ON q.id = p.quota"
                " WHERE p.state = 'unknown' GROUP BY p.quota, q.survey",
                (since,),
            )
        ]

    def open_of_members(self, since: float) -> list[tuple[str, int]]:
        """Return member codes, each with its number of invites that may still end in a complete."""
        query = (
            "SELECT m.code, count(*) FROM members AS m JOIN pairs AS p ON p.member = m.id"
            " LEFT JOIN invites AS i ON i.member = p.member AND i.quota = p.quota"
            " WHERE p.state = 'unknown' OR p.state = 'invited' AND i.at >= ? GROUP BY m.id"
        )
        return [(code, count) for code, count in self._rows(query, (since,))]

    # --- A run

    def begin_run(self, now: float) -> int:
        """Note that a run begins, and end what the one before left: what was in flight is unknown.

        Returns:
            The number of the run.
        """
        with self._writing() as database:
            self._end_lost(database)
            # What could not be sent is asked for again at once: this may be another day. A refusal stays one.
            database.execute(
                "UPDATE pairs SET state = 'pending', tries = 0, due = 0"
                " WHERE plan = ? AND code IS NULL AND (state = 'not_sent' OR state = 'pending' AND tries)",
                (self.plan,),
            )
            # A run that was killed has no end of its own. The last of its moments is the closest.
            database.execute(
                "UPDATE runs SET reason = ?, ended = max(began, coalesce((SELECT max(slot) FROM moments"
                " WHERE run = runs.id), began)) WHERE ended IS NULL",
                (KILLED,),
            )
            number = database.execute("INSERT INTO runs (began) VALUES (?)", (now,)).lastrowid
        assert number is not None
        return number

    def end_lost(self) -> None:
        """End what a run that was killed has left: what was in flight is unknown. The ledger must be locked."""
        with self._writing() as database:
            self._end_lost(database)

    def _end_lost(self, database: sqlite3.Connection) -> None:
        lost = database.execute(IN_FLIGHT, (self.plan,)).fetchall()
        database.executemany(
            "UPDATE pairs SET state = 'unknown', reason = ? WHERE member = ? AND quota = ? AND plan = ?",
            [(KILLED, member, quota, self.plan) for member, quota in lost],
        )
        database.execute("DELETE FROM requests")

    def end_run(self, run: int, now: float, reason: str) -> None:
        """Note that a run has ended, and why."""
        with self._writing() as database:
            database.execute("UPDATE runs SET ended = ?, reason = ? WHERE id = ?", (now, reason, run))

    def last_request(self) -> int:
        """Return the number of the last request."""
        return int(self.fact("requests") or 0)

    def last_wait(self) -> int:
        """Return the number of the last wait."""
        return int(self._rows("SELECT coalesce(max(id), 0) FROM waits")[0][0])

    def spent(self) -> float:
        """Return what the invites so far cost at most."""
        query = (
            "SELECT coalesce(sum(max(q.cost, coalesce(i.member_amount, 0))), 0.0)"
            " FROM invites AS i JOIN quotas AS q ON q.id = i.quota"
        )
        return float(self._rows(query)[0][0])

    def doubtful(self) -> float:
        """Return what the pairs cost whose outcome is unknown, if all of them are invites."""
        query = (
            "SELECT coalesce(sum(q.cost), 0.0) FROM pairs AS p JOIN quotas AS q ON q.id = p.quota"
            " WHERE p.state = 'unknown'"
        )
        return float(self._rows(query)[0][0])

    def asked(self) -> int:
        """Return how many members were asked for."""
        query = "SELECT count(DISTINCT member) FROM pairs WHERE state NOT IN ('pending', 'skipped')"
        return int(self._rows(query)[0][0])

    def pending(self, now: float) -> tuple[int, float] | None:
        """Return the turn to go on with, and when its first pair is due; None if no pair is pending."""
        rows = self._rows(
            "SELECT turn, min(due) FROM pairs WHERE state = 'pending' GROUP BY turn"
            " ORDER BY max(min(due), ?), turn LIMIT 1",
            (now,),
        )
        return rows[0] if rows else None

    def window(self, turn: int, after: int, now: float, count: int) -> list[Member]:
        """Return the next members whose turn it is, with all their pairs that are due."""
        members: dict[int, Member] = {}
        values = {"turn": turn, "after": after, "now": now, "count": count}
        for id_, code, closed, reserves, quota, plan, tries, is_due in self._rows(_WINDOW, values):
            member = members.get(id_)
            if member is None:
                member = members[id_] = Member(id_, code, closed, json.loads(reserves), turn)
            if plan != self.plan:
                continue
            member.added += 1
            if quota in member.reserves:
                member.reserves.remove(quota)
            if is_due:
                member.due[quota] = tries
            else:
                member.was_asked = True
        return [*members.values()]

    def write(self, notes: Iterable[Notes], requests: int) -> None:
        """Write notes. They are on disk when this returns.

        Args:
            notes: The notes, in their order.
            requests: The number of the last request.
        """
        with self._writing() as database:
            for each in notes:
                self._write(database, each)
            _note(database, {"requests": requests})

    def _write(self, database: sqlite3.Connection, notes: Notes) -> None:
        plan = self.plan
        many = database.executemany
        many(
            "INSERT INTO pairs (member, quota, rank, certain, turn, plan) VALUES (?, ?, ?, ?, ?, ?)",
            [(*pair, plan) for pair in notes.pairs],
        )
        many("INSERT INTO requests VALUES (?, ?, ?)", notes.sent)
        many(_END, [(*end, plan) for end in notes.ends])
        many("INSERT INTO invites VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", notes.invites)
        many("DELETE FROM requests WHERE id = ?", notes.answered)
        many("UPDATE quotas SET closed = ? WHERE id = ?", notes.closed_quotas)
        many("UPDATE members SET closed = ? WHERE id = ?", notes.closed_members)
        many("INSERT OR REPLACE INTO codes VALUES (?, ?)", notes.codes.items())
        many("INSERT OR REPLACE INTO moments VALUES (?, ?, ?, ?, ?, ?, ?, ?)", notes.moments)
        many("INSERT OR REPLACE INTO waits VALUES (?, ?, ?, ?)", [(id_, *w) for id_, w in notes.waits.items()])

    def error(self, reason: str) -> LedgerError:
        """Return an error about this ledger."""
        return LedgerError(reason, path=self.path)

    # --- What others read

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query, for summaries."""
        return self._rows(query, values)

    def read_on(self, query: str, *values: Any) -> Iterator[Sequence[tuple[Any, ...]]]:
        """Yield the rows of a query, some thousand at a time, so that memory does not grow with them."""
        with self._failing("cannot be read"):
            cursor = self._open.execute(query, values)
            while some := cursor.fetchmany(10_000):
                yield some


class Planning:
    """A plan while it is written."""

    def __init__(self, database: sqlite3.Connection, plan: int) -> None:
        self._database = database
        self._plan = plan
        # What is left of an earlier plan would be asked for beside the new one.
        database.execute("UPDATE pairs SET state = 'skipped', reason = ? WHERE state = 'pending'", (REPLANNED,))
        database.execute("UPDATE members SET closed = NULL, reserves = '[]'")

    def check(self, codes: Sequence[str], first: int, name: str) -> None:
        """Refuse a panel in which two members have the same code, or one has a code that cannot be sent.

        Args:
            codes: The next codes.
            first: The place of the first of them in the panel.
            name: What to call the panel.

        Raises:
            InvalidRequestError: A code was there before or cannot be sent. The text names the row only.
        """
        execute = self._database.execute
        execute("CREATE TEMP TABLE IF NOT EXISTS seen (code TEXT PRIMARY KEY) WITHOUT ROWID")
        for at, code in enumerate(codes):
            try:
                member_code_of(code)
            except InvalidRequestError as exc:
                raise InvalidRequestError(f"{name}: row {first + at}: {exc}") from None
            if execute("INSERT OR IGNORE INTO seen VALUES (?)", (code,)).rowcount == 0:
                raise InvalidRequestError(
                    f"{name}: row {first + at} has the member code of an earlier row; each member must have "
                    "one row"
                )

    def end(self) -> None:
        """Forget what was only needed for the plan."""
        self._database.execute("DROP TABLE IF EXISTS temp.seen")

    def add_quotas(self, quotas: Iterable[PlannedQuota]) -> None:
        """Add quotas, or replace what an earlier plan knew of them."""
        self._database.executemany(
            "INSERT OR REPLACE INTO quotas VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(q.id, q.survey, q.wave, q.name, q.currency, q.room, q.value, q.cost, q.closed) for q in quotas],
        )

    def add_members(self, members: Sequence[tuple[str, Sequence[int], int, Sequence[int]]]) -> None:
        """Add members: the code, the quotas, how many of these are certain, and the reserves."""
        self._database.executemany(
            "INSERT INTO members (code, reserves) VALUES (?, ?)"
            " ON CONFLICT (code) DO UPDATE SET reserves = excluded.reserves",
            [(code, json.dumps(list(reserves))) for code, _, _, reserves in members],
        )
        numbers = dict(
            self._database.execute(
                "SELECT code, id FROM members WHERE code IN (SELECT value FROM json_each(?))",
                (json.dumps([code for code, *_ in members]),),
            ).fetchall()
        )
        self._database.executemany(
            "INSERT INTO pairs (member, quota, plan, rank, certain) VALUES (?, ?, ?, ?, ?)",
            [
                (numbers[code], quota, self._plan, rank, rank < certain)
                for code, quotas, certain, _ in members
                for rank, quota in enumerate(quotas)
            ],
        )

    def invited(self) -> int:
        """Return how many invites earlier plans have made, or may have made."""
        query = "SELECT count(*) FROM pairs WHERE state IN ('invited', 'unknown')"
        return int(self._database.execute(query).fetchone()[0])

    def note(self, **facts: object) -> None:
        """Note facts, each by its name."""
        _note(self._database, facts)


def _use_wal(database: sqlite3.Connection) -> None:
    # SQLite does not wait for others who are opening a new file at this moment.
    until = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(_BRIEF)
        else:
            return


def _note(database: sqlite3.Connection, facts: dict[str, object]) -> None:
    database.executemany(
        "INSERT OR REPLACE INTO facts VALUES (?, ?)", [(name, str(value)) for name, value in facts.items()]
    )
