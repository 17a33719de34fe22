"""Bodies of notifications as services send them, and short ways to post them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sampling_async.notifications import Fact, HitResponse, Inbox, Kind

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


async def facts_of(inbox: Inbox) -> list[Fact[Any]]:
    return [fact async for fact in inbox.facts()]
