"""Where a new entry belongs among the facts of a store: to which wave, and which of them are still true.

`run` runs a statement inside a transaction of the store.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from sampling_async.notifications._entries import (
    AHEAD,
    member_key,
    member_text,
    moved_identity,
    rank_at,
    said_again_at,
    stand_in,
    without_code,
)
from sampling_async.notifications._facts import State, Validity, fact_key
from sampling_async.notifications._records import Kind
from sampling_async.notifications._tables import BELIEVED, OVERRULED, is_believed
from sampling_async.notifications._understanding import FieldReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from sampling_async.notifications._facts import Entry, SurveyEnd

_WAVES: Final = """
SELECT key, wave FROM facts WHERE member = ? AND survey = ? AND wave > 0
AND (quota IS NULL OR CAST(? AS BIGINT) IS NULL OR quota = ?)
ORDER BY CASE WHEN quota = ? THEN 0 ELSE 1 END, id DESC LIMIT 1
"""

_AMOUNT: Final = (
    "SELECT amount FROM facts WHERE key = ? AND kind = ? AND standing = 'stands' ORDER BY id DESC LIMIT 1"
)
_LATEST: Final = f"SELECT max({BELIEVED}) FROM facts WHERE key = ? AND kind = ? AND standing = 'stands'"  # noqa: S608


def in_its_wave(run: Callable[..., Any], entry: Entry) -> Entry:
    """Return a new entry; without a wave, it gets that of an earlier end of the same member and survey.

    An end with a wave takes over the earlier ones without a wave. Ends of different quotas stay apart. If the
    member has ends in several waves, the end of the same quota decides, else the last one.
    """
    end = entry.end
    if end is None:
        return entry
    if end.wave_id:
        _take_in(run, entry.key, end)
        return entry
    if _says_wave(entry.fields):
        return entry
    quota = end.quota_id
    values = (member_text(end.member_code), end.survey_id, quota, quota, quota)
    for key, wave in run(_WAVES, values).fetchall():
        identity = moved_identity(entry.identity, key)
        placed = evolve(end, wave_id=wave)
        return evolve(entry, key=key, identity=identity, fact_key=fact_key(identity), end=placed)
    return entry


def about_stand_in(run: Callable[..., Any], entry: Entry) -> Entry:
    """Return a new entry about an erased member in its wave; without the code, if it joins what was erased.

    It joins facts of the same survey and wave. What comes about other surveys keeps the code, and so does what
    repeats or corrects a fact that came with the code after the erasing.
    """
    end = entry.end
    assert end is not None
    nobody = stand_in(end.member_code)
    key, survey = member_key(end.survey_id, end.wave_id, nobody), end.survey_id
    values: tuple[object, ...]
    if end.wave_id:
        query, values = "key IN (?, ?)", (key, member_key(survey, 0, nobody))
    else:
        query, values = "member = ? AND survey = ?", (member_text(nobody), survey)
    if run("SELECT 1 FROM facts WHERE key = ?", (entry.key,)).fetchone() or not (
        run(f"SELECT 1 FROM facts WHERE {query} LIMIT 1", values).fetchone()  # noqa: S608
    ):
        return in_its_wave(run, entry)
    joined = in_its_wave(
        run,
        evolve(
            entry,
            key=key,
            identity=moved_identity(entry.identity, key),
            content="",
            fields=without_code(entry.fields, end.member_code, nobody),
            end=evolve(end, member_code=nobody),
        ),
    )
    if joined.key == key:
        return joined
    assert joined.end is not None
    # The key of a fact is that which it has without the erasing.
    real = member_key(survey, joined.end.wave_id, end.member_code)
    return evolve(joined, fact_key=fact_key(moved_identity(entry.identity, real)))


def _take_in(run: Callable[..., Any], key: str, end: SurveyEnd) -> None:
    without = member_key(end.survey_id, 0, end.member_code)
    rows = run("SELECT id, identity, quota, fields FROM facts WHERE key = ?", (without,)).fetchall()
    # If the wave has an end already, that one has taken in what belongs to it.
    if not rows or run("SELECT 1 FROM facts WHERE key = ?", (key,)).fetchone():
        return
    for _, _, quota, fields in rows:
        if _says_wave(fields) or (None not in (quota, end.quota_id) and quota != end.quota_id):
            return
    for number, identity, *_ in rows:
        change = "UPDATE facts SET key = ?, identity = ?, wave = ? WHERE id = ?"
        run(change, (key, moved_identity(identity, key), end.wave_id, number))


def _says_wave(fields: str) -> bool:
    """Return whether fields, given as JSON, name a wave. A wave 0 that they name is a wave like any other."""
    return FieldReader(json.loads(fields)).has_wave


def said_again(run: Callable[..., Any], entry: Entry, at: float) -> Entry | None:
    """Return an entry whose event is known as another event, if something else was said since; else None.

    These are a closing without its time after an opening, and a completion with an earlier revenue whose time
    is after that of the last one: the revenue was corrected back.
    """
    end, since = entry.end, None
    if entry.undated:
        (since,) = run(
            # Only openings have an even rank.
            "SELECT max(rank) FROM facts WHERE key = ? AND rank = 2 * (rank / 2)"
            " AND rank > (SELECT rank FROM facts WHERE identity = ?)",
            (entry.key, entry.identity),
        ).fetchone()
    elif entry.kind is Kind.COMPLETION and end is not None and end.at is not None:
        (amount,) = run(_AMOUNT, (entry.key, entry.kind)).fetchone()
        if amount != end.hundredths and _side_of_latest(run, entry, at) > 0:
            since = end.at
    if since is None:
        return None
    identity = said_again_at(entry.identity, since)
    return evolve(entry, identity=identity, fact_key=fact_key(entry.fact_key, since))


def placed(run: Callable[..., Any], number: int, entry: Entry, receipt: int, at: float) -> str:
    """Decide which facts of a key are still true, now that there is a new one, and return its verdict."""
    if entry.rank is not None:
        # What is ranked later than now was received while the clock was ahead: it silences nothing.
        (newest,) = run(
            "SELECT max(rank) FROM facts WHERE key = ? AND standing = 'stands' AND rank IS NOT NULL"
            " AND rank <= ? AND id != ?",
            (entry.key, rank_at(at + AHEAD) + 1, number),
        ).fetchone()
        if newest is not None and newest > entry.rank:
            _supersede(run, Validity.STALE, "id = ?", number)
            return Validity.STALE
        _supersede(run, Validity.STALE, "key = ? AND rank IS NOT NULL AND id != ?", entry.key, number)
    elif entry.kind is Kind.COMPLETION:
        first = _first_completion(run, entry.key)
        if first != number:
            if _side_of_latest(run, entry, at) < 0:
                # It was corrected before it came.
                _supersede(run, Validity.STALE, "id = ?", number)
                return Validity.STALE
            run("UPDATE facts SET corrects = ? WHERE id = ?", (first, number))
        for terminate, state in sorted(
            _supersede(run, Validity.OVERRULED, "key = ? AND kind = ?", entry.key, Kind.TERMINATE)
        ):
            # Also one that is being handled now: the new fact waits until its handler has ended.
            if state in (State.HANDLED, State.PENDING):
                _correct_terminate(run, terminate, receipt, at)
    elif entry.kind is Kind.TERMINATE and _first_completion(run, entry.key):
        _supersede(run, Validity.OVERRULED, "id = ?", number)
        return Validity.OVERRULED
    return "new"


def _side_of_latest(run: Callable[..., Any], entry: Entry, at: float) -> int:
    """Return 1 for a completion that was after all others of its key, -1 if one was after it, 0 if in doubt."""
    ended = None if entry.end is None else entry.end.at
    if ended is None or not is_believed(ended, at):
        return 0
    latest: float | None = run(_LATEST, (entry.key, entry.kind)).fetchone()[0]
    return 0 if latest is None else (ended > latest) - (ended < latest)


def _first_completion(run: Callable[..., Any], key: str) -> Any:
    query = "SELECT min(id) FROM facts WHERE key = ? AND kind = ?"
    return run(query, (key, Kind.COMPLETION)).fetchone()[0]


def _correct_terminate(run: Callable[..., Any], number: int, receipt: int, at: float) -> None:
    run(
        "INSERT INTO facts (at, receipt, receipts, kind, posted_as, key, identity, content, fields,"
        " verified, corrects, standing, due, since, fact_key)"
        " SELECT ?, ?, 0, kind, posted_as, key, 'overruled ' || id, content, fields, verified, id, ?, ?, ?,"
        " fact_key || ? FROM facts WHERE id = ?",
        (at, receipt, Validity.OVERRULED, at, at, OVERRULED, number),
    )


def _supersede(
    run: Callable[..., Any], validity: Validity, where: str, *values: object
) -> list[tuple[int, str]]:
    """Mark facts as no longer true, and return their numbers and new states.

    A fact that is being handled stays pending, so that the next one with its key waits for the handler.
    """
    change = (
        "UPDATE facts SET standing = ?, state ="
        " CASE WHEN state IN ('pending', 'dead') AND owner IS NULL THEN 'skipped' ELSE state END"
    )
    # The conditions are those of `placed`, and their values are passed as values.
    query = f"{change} WHERE standing = 'stands' AND {where} RETURNING id, state"
    return run(query, (validity, *values)).fetchall()  # type: ignore[no-any-return]
