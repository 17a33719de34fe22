"""The tables of a store, hits as their rows, and rows as facts."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from sampling_async.notifications._bodies import NotUnderstoodError
from sampling_async.notifications._entries import member_key, member_text
from sampling_async.notifications._facts import Fact, State, StoreError, Validity
from sampling_async.notifications._records import Kind, UnknownNotification
from sampling_async.notifications._understanding import FieldReader, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sampling_async.notifications._facts import Entry, Hit, SurveyEnd
    from sampling_async.notifications._records import Notification

FORM: Final = 1
"""The form of the tables: a later version may have others."""

ROOMS: Final = """
CREATE TABLE IF NOT EXISTS rooms (
    service TEXT NOT NULL, holder TEXT NOT NULL, quota BIGINT NOT NULL, survey BIGINT NOT NULL,
    pairs BIGINT NOT NULL, until DOUBLE PRECISION NOT NULL, PRIMARY KEY (service, holder, quota)
)
"""
"""The table of rooms that campaigns share; a store that was made before has none."""

# In what SQLite and PostgreSQL have in common, but for what stands in braces.
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS receipts (
    {id}, at DOUBLE PRECISION NOT NULL, posted_as TEXT NOT NULL, verdict TEXT NOT NULL,
    peer TEXT NOT NULL, headers TEXT NOT NULL, query TEXT NOT NULL, body {bytes} NOT NULL
);
CREATE TABLE IF NOT EXISTS facts (
    {id}, at DOUBLE PRECISION NOT NULL, receipt BIGINT NOT NULL,
    kind TEXT NOT NULL, posted_as TEXT NOT NULL, key TEXT NOT NULL, identity TEXT NOT NULL UNIQUE,
    content TEXT NOT NULL, rank BIGINT, fields TEXT NOT NULL, reason TEXT, verified INTEGER NOT NULL,
    receipts BIGINT NOT NULL DEFAULT 1, differing BIGINT NOT NULL DEFAULT 0, corrects BIGINT,
    standing TEXT NOT NULL DEFAULT 'stands', state TEXT NOT NULL DEFAULT 'pending',
    due DOUBLE PRECISION NOT NULL, owner TEXT, attempts BIGINT NOT NULL DEFAULT 0, error TEXT,
    member TEXT, survey BIGINT, wave BIGINT, quota BIGINT, origin BIGINT, amount BIGINT, label TEXT,
    ended DOUBLE PRECISION, since DOUBLE PRECISION NOT NULL DEFAULT 0, fact_key TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS facts_key ON facts (key, id);
CREATE INDEX IF NOT EXISTS facts_standing ON facts (key, rank)
    WHERE standing = 'stands' AND rank IS NOT NULL;
CREATE INDEX IF NOT EXISTS facts_due ON facts (kind, due, id) WHERE state = 'pending';
CREATE INDEX IF NOT EXISTS facts_pending ON facts (key, id) WHERE state = 'pending';
CREATE INDEX IF NOT EXISTS facts_fallen ON facts (due) WHERE state = 'pending' AND standing != 'stands';
CREATE INDEX IF NOT EXISTS facts_dead ON facts (kind) WHERE state = 'dead';
CREATE INDEX IF NOT EXISTS facts_member ON facts (member, survey) WHERE member IS NOT NULL;
CREATE INDEX IF NOT EXISTS facts_unknown ON facts (receipt) WHERE kind = '';
CREATE TABLE IF NOT EXISTS invites (
    key TEXT PRIMARY KEY, member TEXT NOT NULL, survey BIGINT NOT NULL, wave BIGINT NOT NULL,
    quota BIGINT NOT NULL, invited DOUBLE PRECISION NOT NULL, entered DOUBLE PRECISION{rowid}
);
CREATE INDEX IF NOT EXISTS invites_member ON invites (member, survey);
CREATE INDEX IF NOT EXISTS invites_entered ON invites (entered) WHERE entered IS NOT NULL;
CREATE TABLE IF NOT EXISTS links (
    member TEXT NOT NULL, quota BIGINT NOT NULL, survey BIGINT NOT NULL, wave BIGINT NOT NULL,
    state TEXT NOT NULL, owner TEXT, asked DOUBLE PRECISION NOT NULL, until DOUBLE PRECISION NOT NULL,
    changed DOUBLE PRECISION NOT NULL, code INTEGER, invite TEXT, entered DOUBLE PRECISION,
    PRIMARY KEY (member, quota)
);
CREATE INDEX IF NOT EXISTS links_changed ON links (changed);
CREATE TABLE IF NOT EXISTS erased (member TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS secrets (
    {id}, kind TEXT NOT NULL, secret TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS served (
    id INTEGER PRIMARY KEY CHECK (id = 1), url TEXT NOT NULL
)
"""

COLUMNS: Final = (
    "id, at, receipt, posted_as, kind, fields, reason, verified, receipts, differing, corrects, standing,"
    " state, attempts, error, fact_key"
)

CLAIM: Final = f"""
WITH picked AS MATERIALIZED (SELECT id FROM ({{of_kinds}}) AS found ORDER BY due, id LIMIT ?)
UPDATE facts SET due = ?, since = ?, owner = ?, attempts = attempts + 1 WHERE id IN (SELECT id FROM picked)
RETURNING {COLUMNS}
"""

# One query for each kind, so that the index finds what is due of it, however much waits of other kinds.
CLAIM_OF_KIND: Final = """
SELECT * FROM (
    SELECT id, due FROM facts AS f WHERE state = 'pending' AND kind = ? AND due <= ? AND NOT EXISTS (
        SELECT 1 FROM facts AS e
        WHERE e.key = f.key AND e.id < f.id AND e.state = 'pending' AND e.kind IN ({marks})
    ) ORDER BY due, id LIMIT ? {skip_locked}
) AS of_kind
"""


def make_tables(run: Callable[..., Any], **own: str) -> None:
    """Create the tables of a store, in its transaction. `own` is what stands in braces, for this database."""
    for statement in (*_TABLES.split(";"), ROOMS):
        run(statement.format(**own))


_BEFORE, _AFTER = 30 * 86_400, 86_400
BELIEVED: Final = f"CASE WHEN ended BETWEEN at - {_BEFORE} AND at + {_AFTER} THEN ended END"
"""When a survey ended, as far as it can be true: some services write the first or last possible moment."""


def is_believed(ended: float, at: float) -> bool:
    """Return whether what was received at a moment can have ended at another one, as `BELIEVED` does."""
    return at - _BEFORE <= ended <= at + _AFTER


OVERRULED: Final = "-overruled"
"""What the key of a correction of a terminate has behind the key of that terminate."""


def require_known(form: object, store: object, lowest: int = 0) -> int:
    """Return the form of a store; refuse one that this version does not know."""
    if type(form) is not int or form < lowest:
        raise StoreError(
            f"{store} says that its form is {form!r:.60}, and not a number from 1 to {FORM}: somebody has"
            " changed it; bring back a copy of the store, or name another one",
            permanent=True,
        )
    if form > FORM:
        raise StoreError(
            f"{store} was made by a newer version (form {form}); this one reads form {FORM}",
            permanent=True,
        )
    return form


# --- Hits as rows

RECEIPTS: Final = "receipts (id, at, posted_as, verdict, peer, headers, query, body)"
FACTS: Final = (
    "facts (at, receipt, kind, posted_as, key, identity, content, rank, fields, reason, verified, due, since,"
    " fact_key, member, survey, wave, quota, origin, amount, label, ended)"
)
_NO_END: Final = (None,) * 8

MOST_ROWS: Final = 64
"""The most rows of one INSERT."""


@cache
def insertion(insert: str, into: str, columns: int, rows: int = 1) -> str:
    marks = f"({', '.join('?' * columns)})"
    return f"{insert} INTO {into} VALUES {', '.join([marks] * rows)}"


def storable(text: str) -> str:
    """Return a text that every database takes: PostgreSQL takes no zero."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


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
        " ".join(dict.fromkeys(verdicts)) or storable(hit.verdict),
        storable(receipt.peer),
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
        storable(entry.reason),
        int(entry.verified),
        at,  # so that a retry that is due earlier comes before
        at,
        entry.fact_key,
        *(_NO_END if end is None else _end_values(end)),
    )


def _end_values(end: SurveyEnd) -> tuple[object, ...]:
    return (
        member_text(end.member_code),
        end.survey_id,
        end.wave_id,
        end.quota_id,
        end.original_survey_id,
        end.hundredths,
        None if end.reason is None else json.dumps(end.reason),
        end.at,
    )


def fact_of(row: Sequence[Any], body_of: Callable[[int], bytes]) -> Fact[Notification]:
    number, at, receipt, posted_as, kind, fields_json, reason, verified, receipts, differing, *rest = row
    corrects, validity, state, attempts, error, key = rest
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
        key=key,
    )
