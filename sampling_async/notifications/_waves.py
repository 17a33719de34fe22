"""Ends of a member's survey that come now with their wave and now without it, and must be one end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from attrs import evolve

from sampling_async.notifications._entries import member_key
from sampling_async.notifications._understanding import Named

if TYPE_CHECKING:
    import sqlite3

    from sampling_async.notifications._store import Entry, SurveyEnd

_WAVES: Final = """
SELECT key, wave FROM facts WHERE member = ? AND survey = ? AND wave > 0
AND (quota IS NULL OR ? IS NULL OR quota = ?) ORDER BY quota = ? DESC, id DESC LIMIT 1
"""


def in_its_wave(database: sqlite3.Connection, entry: Entry) -> Entry:
    """Return a new entry, of the wave in which the member has an end already if it says none itself.

    An end that says its wave takes in those which came before it without one. Two quotas are two ends. Of
    several waves it is that of the same quota, then the last one.
    """
    end = entry.end
    if end is None:
        return entry
    if end.wave_id:
        _take_in(database, entry.key, end)
        return entry
    if _says_wave(entry.fields):
        return entry
    quota = end.quota_id
    values = (json.dumps(end.member_code), end.survey_id, quota, quota, quota)
    for key, wave in database.execute(_WAVES, values).fetchall():
        return evolve(entry, key=key, identity=_moved(entry.identity, key), end=evolve(end, wave_id=wave))
    return entry


def _take_in(database: sqlite3.Connection, key: str, end: SurveyEnd) -> None:
    without = member_key(end.survey_id, 0, end.member_code)
    rows = database.execute(
        "SELECT id, identity, quota, fields FROM facts WHERE key = ?", (without,)
    ).fetchall()
    # If the wave has an end already, that one has taken in what belongs to it.
    if not rows or database.execute("SELECT 1 FROM facts WHERE key = ?", (key,)).fetchone():
        return
    for _, _, quota, fields in rows:
        if _says_wave(fields) or (None not in (quota, end.quota_id) and quota != end.quota_id):
            return
    database.executemany(
        "UPDATE facts SET key = ?, identity = ?, wave = ? WHERE id = ?",
        [(key, _moved(identity, key), end.wave_id, number) for number, identity, *_ in rows],
    )


def _says_wave(fields: str) -> bool:
    """Return whether there is a wave in fields as JSON: a wave 0 that is told is one of its own."""
    return Named(json.loads(fields)).has_wave


def _moved(identity: str, key: str) -> str:
    if not identity.startswith("["):  # of a correction of a terminate, which is known by its fact
        return identity
    kind, _, more = json.loads(identity)
    return json.dumps([kind, key, more])
