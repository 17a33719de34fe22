"""The tables of a store in SQLite, how a file of an older form gets them, and hits as their rows."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Final

from sampling_async._journal.database import patiently
from sampling_async.notifications._entries import member_key
from sampling_async.notifications._store import StoreError

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from sampling_async.notifications._store import Entry, Hit, SurveyEnd

_APPLICATION: Final = 0x53414E4F
"""Marks a file as a store ("SANO"), so that no other database is written to by mistake."""

_FORM: Final = 3
"""The form of the tables. Form 1 had no `since`, no `served` and no index of dead facts.

Form 2 had no index of members.
"""

_TABLES: Final = f"""
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_FORM};
CREATE TABLE IF NOT EXISTS receipts (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, posted_as TEXT NOT NULL, verdict TEXT NOT NULL,
    peer TEXT NOT NULL, headers TEXT NOT NULL, query TEXT NOT NULL, body BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS facts (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, receipt INTEGER NOT NULL,
    kind TEXT NOT NULL, posted_as TEXT NOT NULL, key TEXT NOT NULL, identity TEXT NOT NULL UNIQUE,
    content TEXT NOT NULL, rank INTEGER, fields TEXT NOT NULL, reason TEXT, verified INTEGER NOT NULL,
    receipts INTEGER NOT NULL DEFAULT 1, differing INTEGER NOT NULL DEFAULT 0, corrects INTEGER,
    standing TEXT NOT NULL DEFAULT 'stands', state TEXT NOT NULL DEFAULT 'pending',
    due REAL NOT NULL DEFAULT 0, owner TEXT, attempts INTEGER NOT NULL DEFAULT 0, error TEXT,
    member TEXT, survey INTEGER, wave INTEGER, quota INTEGER, origin INTEGER, amount INTEGER, label TEXT,
    ended REAL, since REAL NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS facts_key ON facts (key, id);
CREATE INDEX IF NOT EXISTS facts_standing ON facts (key, rank) WHERE standing = 'stands' AND rank NOT NULL;
CREATE INDEX IF NOT EXISTS facts_due ON facts (kind, due, id) WHERE state = 'pending';
CREATE INDEX IF NOT EXISTS facts_pending ON facts (key, id) WHERE state = 'pending';
CREATE INDEX IF NOT EXISTS facts_fallen ON facts (due) WHERE state = 'pending' AND standing != 'stands';
CREATE INDEX IF NOT EXISTS facts_dead ON facts (kind) WHERE state = 'dead';
CREATE INDEX IF NOT EXISTS facts_member ON facts (member, survey) WHERE wave > 0;
CREATE TABLE IF NOT EXISTS invites (
    key TEXT PRIMARY KEY, member TEXT NOT NULL, survey INTEGER NOT NULL, wave INTEGER NOT NULL,
    quota INTEGER NOT NULL, invited REAL NOT NULL, entered REAL
);
CREATE INDEX IF NOT EXISTS invites_member ON invites (member, survey);
CREATE TABLE IF NOT EXISTS secrets (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, secret TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS served (
    id INTEGER PRIMARY KEY CHECK (id = 1), url TEXT NOT NULL
);
"""

COLUMNS: Final = (
    "id, at, receipt, posted_as, kind, fields, reason, verified, receipts, differing, corrects, standing,"
    " state, attempts, error"
)

CLAIM: Final = f"""
UPDATE facts SET due = ?, since = ?, owner = ?, attempts = attempts + 1 WHERE id IN (
    SELECT id FROM (%s) ORDER BY due, id LIMIT ?
) RETURNING {COLUMNS}
"""  # noqa: S608  the columns are constants

# One query for each kind, so that the index finds what is due of it, however much waits of other kinds.
CLAIM_OF_KIND: Final = """
SELECT * FROM (
    SELECT id, due FROM facts AS f WHERE state = 'pending' AND kind = ? AND due <= ? AND NOT EXISTS (
        SELECT 1 FROM facts AS e WHERE e.key = f.key AND e.id < f.id AND e.state = 'pending' AND e.kind IN (%s)
    ) ORDER BY due, id LIMIT ?
)
"""


def make_tables(database: sqlite3.Connection, path: Path, seconds: float) -> None:
    """Create the tables that a file lacks; wait so many seconds for processes that do the same."""

    def make() -> None:
        form = _form_of(database, path)
        if form == _FORM:
            return
        database.execute("BEGIN IMMEDIATE")
        try:
            # Checked under the lock, because another process may have done it meanwhile.
            if _form_of(database, path) == 1:
                database.execute("ALTER TABLE facts ADD COLUMN since REAL NOT NULL DEFAULT 0")
            for statement in _TABLES.split(";"):
                database.execute(statement)
            database.execute("COMMIT")
        except BaseException:
            database.rollback()
            raise

    patiently(make, seconds)


def _form_of(database: sqlite3.Connection, path: Path) -> int:
    """Return the form of the tables in a file; 0 if there are none."""
    tables: int = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    application: int = database.execute("PRAGMA application_id").fetchone()[0]
    form: int = database.execute("PRAGMA user_version").fetchone()[0]
    if tables and application != _APPLICATION:
        raise StoreError(f"{path} is a database of something else; name another file")
    if form > _FORM:
        raise StoreError(
            f"the store {path} was made by a newer version (form {form}); this one reads form {_FORM}"
        )
    return form


# --- Hits as rows

RECEIPTS: Final = "receipts (id, at, posted_as, verdict, peer, headers, query, body)"
FACTS: Final = (
    "facts (at, receipt, kind, posted_as, key, identity, content, rank, fields, reason, verified, due, since,"
    " member, survey, wave, quota, origin, amount, label, ended)"
)
_NO_END: Final = (None,) * 8

MOST_ROWS: Final = 64
"""The most rows of one INSERT."""


@cache
def insertion(into: str, columns: int, rows: int = 1) -> str:
    marks = f"({', '.join('?' * columns)})"
    # FAIL: what was inserted before an error need not be undone by the statement, the transaction will be.
    return f"INSERT OR FAIL INTO {into} VALUES {', '.join([marks] * rows)}"  # noqa: S608  constants and marks


def subject_of(entry: Entry) -> tuple[object, Sequence[str]]:
    """Return what an entry is about, whatever its wave, and the keys of the facts that it may have to do with.

    There are no keys if it may have to do with facts of any wave.
    """
    end = entry.end
    if end is None:
        return entry.key, (entry.key,)
    keys = (entry.key, member_key(end.survey_id, 0, end.member_code)) if end.wave_id else ()
    return (end.member_code, end.survey_id), keys


def receipt_row(number: int, hit: Hit, verdicts: Iterable[str]) -> tuple[object, ...]:
    receipt = hit.receipt
    return (
        number,
        receipt.at,
        receipt.kind.value,
        " ".join(dict.fromkeys(verdicts)) or hit.verdict,
        receipt.peer.encode("ascii", "backslashreplace").decode(),
        json.dumps(receipt.headers),
        json.dumps(receipt.query),
        receipt.body,
    )


def fact_row(receipt: int, at: float, entry: Entry) -> tuple[object, ...]:
    end = entry.end
    return (
        at,
        receipt,
        "" if entry.kind is None else entry.kind.value,
        entry.posted_as.value,
        entry.key,
        entry.identity,
        entry.content,
        entry.rank,
        entry.fields,
        entry.reason,
        int(entry.verified),
        at,  # so that a retry that is due earlier comes before
        at,
        *(_NO_END if end is None else _end_values(end)),
    )


def _end_values(end: SurveyEnd) -> tuple[object, ...]:
    return (
        json.dumps(end.member_code),
        end.survey_id,
        end.wave_id,
        end.quota_id,
        end.original_survey_id,
        end.hundredths,
        None if end.reason is None else json.dumps(end.reason),
        end.at,
    )
