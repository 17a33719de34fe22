"""Notifications as the service posts them: fields, spellings and formats."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from urllib.parse import urlencode
from xml.sax.saxutils import escape

from attrs import field, frozen

from sampling_async._contract.records import hidden

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

NotificationKind: TypeAlias = Literal[
    "invite", "completion", "terminate", "survey_closed", "quota_status", "reconciliation"
]
"""The kinds of notifications, named as in `sampling_async.notifications.Kind`."""

KINDS: Final[tuple[NotificationKind, ...]] = (
    "invite",
    "completion",
    "terminate",
    "survey_closed",
    "quota_status",
)
"""The kinds that have a URL. A reconciliation goes to that of completions."""


@frozen
class Posting:
    """One notification that the simulator sends, or has sent.

    Attributes:
        number: The place in the order of what caused them, from 0.
        kind: The kind.
        fields: The fields, in the service's usual spelling.
        at: When it is due, in seconds of the simulator's clock.
        is_forged: Whether it is not from the service: it goes to a wrong URL, or has a wrong signature.
    """

    number: int
    kind: NotificationKind
    fields: Mapping[str, Any] = field(repr=hidden)
    at: float
    is_forged: bool = False


def signed(fields: Mapping[str, Any], secret: str) -> dict[str, Any]:
    """Return fields of a member's status with EncryptedValue: an HMAC over survey, wave and member."""
    message = f"{fields['SurveyId']}{fields['WaveId']}{fields['UniqueCode']}"
    value = hmac.new(secret.encode(), message.encode(), hashlib.sha256).hexdigest()
    return {**fields, "EncryptedValue": value}


def plain_body(fields: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return fields as JSON, with the content type."""
    return json.dumps(fields).encode(), "application/json; charset=utf-8"


def drifted_body(fields: Mapping[str, Any], random: Random) -> tuple[bytes, str]:
    """Return fields in another spelling and format than usual; the content type need not fit."""
    respell = random.choice(_SPELLINGS)
    respelled = {respell(name): value for name, value in fields.items()}
    content_type = random.choice(("application/json", "text/plain", "application/octet-stream"))
    match random.randrange(7):
        case 0:
            return json.dumps(_texts(respelled), indent=2).encode(), content_type
        case 1:
            return json.dumps({"Notification": respelled}).encode("utf-16"), content_type
        case 2:
            parts = "".join(f"<{key}>{escape(text)}</{key}>" for key, text in _texts(respelled).items())
            return f'<?xml version="1.0"?>\n<Notification>{parts}</Notification>'.encode(), "application/xml"
        case 3:
            return json.dumps(respelled).encode() + b"\0" * random.randrange(
                1, 9
            ), f"{content_type}; charset=utf-16"
        case 4:
            return json.dumps(json.dumps(respelled)).encode(), content_type
        case 5:
            return f"{urlencode(_texts(respelled))}&".encode(), content_type
        case _:
            return urlencode(_texts(respelled)).encode(), "application/x-www-form-urlencoded"


def _texts(fields: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in fields.items()}


def _in_snake_case(name: str) -> str:
    """Return SurveyId as survey_id, and QuotaID as quota_id."""
    parts = [
        f"_{letter}" if letter.isupper() and name[at].islower() else letter
        for at, letter in enumerate(name[1:])
    ]
    return (name[0] + "".join(parts)).lower()


_SPELLINGS: Final[tuple[Callable[[str], str], ...]] = (
    str.lower,
    str.upper,
    _in_snake_case,
    lambda name: name[0].lower() + name[1:],
    lambda name: name.replace("ID", "Id"),
)
