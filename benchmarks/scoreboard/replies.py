"""Responses of the service, made by hand for transports without a simulator."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx
from peers.common import Address

if TYPE_CHECKING:
    from collections.abc import Iterable

NOWHERE = Address(
    "http://localhost", "1f0c3a52-7d16-4b9e-9d3f-6a1c2b3d4e5f", "9e107d9d-372b-4b68-a8b8-5d3c1a2f4e6d"
)
"""An address for clients whose transport uses no network."""

SETTINGS = b'[{"Name":"Qualified URL","Description":"","Value":"https://panel.example/?m=[pid]"}]'


def invite(quota_id: int) -> dict[str, object]:
    """Return an invite in the form of the contract."""
    url = f"https://entry.example/survey?quota={quota_id}"
    return {
        "SurveyID": 1,
        "WaveID": 1,
        "QuotaID": quota_id,
        "MemberAmount": 0.0,
        "PartnerAmount": 1.0,
        "URL": url,
        "LOI": 10,
        "IR": 50,
    }


def bulk(quota_ids: Iterable[int]) -> bytes:
    """Return the body of a bulk invite in which every ID is invited."""
    items = [
        {"QuotaID": quota_id, "Invite": invite(quota_id), "ResultCode": 1, "Result": "SUCCESS"}
        for quota_id in quota_ids
    ]
    return json.dumps({"Invites": items}).encode()


def ok(body: bytes) -> httpx.Response:
    """Return a 200."""
    return httpx.Response(200, content=body, headers={"Content-Type": "application/json"})
