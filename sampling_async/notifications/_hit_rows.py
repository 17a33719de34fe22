"""Hits as rows of the tables in SQLite."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Final

from sampling_async.notifications._entries import member_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sampling_async.notifications._store import Entry, Hit, SurveyEnd

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
