"""The invites in the store of an inbox, and which end of a survey belongs to which of them."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from sampling_async.notifications._sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_JOINED: Final = """
WITH told AS (
    -- A correction may leave out the original survey, and must join the invite of what it corrects.
    -- Wave 0 says that none was told: then the invite is one of the same survey.
    SELECT f.*, coalesce((
        SELECT o.origin FROM facts AS o WHERE o.key = f.key AND o.origin IS NOT NULL ORDER BY o.id LIMIT 1
    ), CASE f.wave WHEN 0 THEN f.survey END) AS via, (
        SELECT o.quota FROM facts AS o WHERE o.key = f.key AND o.quota IS NOT NULL ORDER BY o.id LIMIT 1
    ) AS said_quota, coalesce((
        SELECT min(coalesce(o.ended, o.at)) FROM facts AS o
        WHERE o.key = f.key AND o.kind IN ('completion', 'terminate')
    ), f.ended, f.at) AS first_ended
    FROM facts AS f
    WHERE f.kind IN ('completion', 'terminate', 'reconciliation') AND f.standing = 'stands'
), ends AS MATERIALIZED (
    -- An end belongs to the invite of its member, survey and wave. Of a routed member it is one of the original
    -- survey: that of the quota which it names, else the last one before the end.
    SELECT f.*, CASE
        WHEN f.via IS NULL OR EXISTS (SELECT 1 FROM invites AS i WHERE i.key = f.key) THEN f.key
        ELSE coalesce((
            -- SQLite's ORDER BY does not see `f`.
            SELECT key FROM (
                SELECT i.key, i.quota = f.said_quota AS is_quota, i.invited <= f.first_ended AS is_before,
                    abs(i.invited - f.first_ended) AS apart
                FROM invites AS i WHERE i.member = f.member AND i.survey = f.via
            ) ORDER BY is_quota DESC, is_before DESC, apart LIMIT 1
        ), f.key)
    END AS invite
    FROM told AS f
)
SELECT * FROM (
    SELECT i.key AS invite, coalesce(e.key, i.key) AS key, coalesce(e.survey, i.survey) AS ended_in,
        i.member, i.survey, i.wave, i.quota, i.invited, i.entered, e.kind,
        e.amount, e.label, coalesce(e.ended, e.at) AS ended, e.id AS fact,
        e.key != i.key AND NOT (e.wave = 0 AND e.survey = i.survey) AS routed
    FROM invites AS i LEFT JOIN ends AS e ON e.invite = i.key
    ORDER BY i.rowid, e.kind = 'reconciliation', e.key, e.id
)
UNION ALL
SELECT * FROM (
    SELECT e.invite, e.key, e.survey, e.member, e.survey, e.wave, e.quota, NULL, NULL, e.kind, e.amount,
        e.label, coalesce(e.ended, e.at), e.id, e.via IS NOT NULL AND NOT (e.wave = 0 AND e.via = e.survey)
    FROM ends AS e WHERE NOT EXISTS (SELECT 1 FROM invites AS i WHERE i.key = e.invite)
    ORDER BY e.key, e.kind = 'reconciliation', e.id
)
"""


class InviteStore(SqliteStore):
    """The store of an inbox, as the ledger of outcomes uses it."""

    def add_invites(self, invites: Iterable[tuple[str, str, int, int, int, float]]) -> int:
        """Store invites that are not there yet: key, member, survey, wave, quota and time. Returns how many."""
        before = self._open.total_changes
        self._open.executemany(
            "INSERT INTO invites (key, member, survey, wave, quota, invited) VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (key) DO NOTHING",
            [(key, json.dumps(member), *more) for key, member, *more in invites],
        )
        return self._open.total_changes - before

    def enter(self, member_code: str, quota_id: int, at: float) -> bool:
        """Note when a member was sent to a survey, the first time; False if there is no such invite."""
        cursor = self._open.execute(
            "UPDATE invites SET entered = coalesce(entered, ?) WHERE member = ? AND quota = ?",
            (at, json.dumps(member_code), quota_id),
        )
        return cursor.rowcount > 0

    def joined(self) -> Iterator[Mapping[str, Any]]:
        """Yield invites with their ends, then ends without an invite, as the ledger of outcomes reads them."""
        with self._failing("cannot be read"), closing(self._connected()) as database:
            database.row_factory = sqlite3.Row
            for row in database.execute(_JOINED):
                yield {**row, "member": json.loads(row["member"])}
