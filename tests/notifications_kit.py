"""Bodies of notifications as services send them, and short ways to post them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sampling_async import _following
from sampling_async.notifications import _app, _handling
from sampling_async.notifications._access import Signatures
from sampling_async.notifications._entries import read_entries
from sampling_async.notifications._facts import Hit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sampling_async.notifications import Fact, HitResponse, Inbox, Kind, SqlStore
    from sampling_async.notifications._facts import Entry, Receipt

SECRET = "a-secret-of-the-tests"
PEER = "198.51.100.7"
MEMBER = {
    "UniqueCode": "m-1",
    "SurveyId": 2401,
    "SurveyRef": "S-2401",
    "WaveId": 77,
    "QuotaID": 1100,
    "DateTime": "2026-11-22 10:00:00",
    "AdditionalData": "invite=1&quota=1100",
}
COMPLETION = {**MEMBER, "Revenue": 150}
TERMINATE = {**MEMBER, "Reason": "SCREENED_OUT"}
CLOSED = {
    "SurveyID": 2401,
    "SurveyRef": "S-2401",
    "Status": "Closed",
    "DateTime": "2026-11-22 10:00:00",
    "WaveId": 77,
}

NOTE_SETTLED = """
import os, sys
from contextlib import contextmanager
from sampling_async.notifications import *
from sampling_async.notifications._stores import store_of
store = store_of(sys.argv[1])
file = os.open(sys.argv[2], os.O_APPEND | os.O_WRONLY | os.O_CREAT)
settled = []
real_settle, real_transaction = store.settle, store.transaction
def settle(owner, result):
    is_stored = real_settle(owner, result)
    if is_stored and result.state == State.HANDLED:
        settled.append(result.fact_id)
    return is_stored
@contextmanager
def transaction():
    settled.clear()
    with real_transaction():
        yield
    os.write(file, b"".join(b"settled %d\\n" % number for number in settled))
store.settle, store.transaction = settle, transaction
"""  # the beginning of a program: what its handlers have settled is in a file once it is in the store


def status(second: int, *, is_live: bool, quota_id: int = 1100) -> dict[str, Any]:
    """Return a quota status of a second of some day."""
    return {
        "QuotaID": quota_id,
        "SurveyID": 2401,
        "WaveID": 77,
        "IsLive": is_live,
        "UpdateDateTimeUTC": f"2026-11-22T10:00:{second:02}.1234567Z",
    }


def encoded(fields: object) -> bytes:
    return fields if isinstance(fields, bytes) else json.dumps(fields).encode()


async def post(inbox: Inbox, kind: Kind | str, fields: object, **more: Any) -> HitResponse:
    """Post fields, or a body, with the right secret."""
    return await inbox.receive(kind, encoded(fields), {}, PEER, **{"secret": SECRET, **more})


def read_again_soon(monkeypatch: Any) -> None:
    """Let a live index read a store again at once after it could not."""
    monkeypatch.setattr(_following, "_RETRY_SECONDS", 0.001)


def wait_for_bodies(monkeypatch: Any, seconds: float) -> None:
    """Let an app wait no longer than this for the body of a request."""
    monkeypatch.setattr(_app, "_BODY_SECONDS", seconds)


def pause_extra_place(monkeypatch: Any, seconds: float) -> None:
    """Let the extra place for handlers pause as long as this."""
    monkeypatch.setattr(_handling, "_EXTRA_SECONDS", seconds)


def entries_of(hit: Receipt) -> Iterator[Entry]:
    """Read a body as an inbox does that checks no signatures."""
    return read_entries(hit, Signatures((), is_required=False))


def received(store: SqlStore, hit: Receipt) -> list[str]:
    """Store a hit inside a transaction, and return what became of its notifications."""
    return store.receive_all([Hit(hit, list(entries_of(hit)))])[0]


async def facts_of(inbox: Inbox) -> list[Fact[Any]]:
    return [fact async for fact in inbox.facts()]
