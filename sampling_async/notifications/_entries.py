"""What a hit tells, as entries for the store: what each is about, and what makes it the same as another."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from sampling_async.notifications._bodies import NotUnderstoodError, read_fields
from sampling_async.notifications._records import (
    Completion,
    InviteNotification,
    QuotaStatus,
    SurveyClosed,
    Terminate,
)
from sampling_async.notifications._store import Entry
from sampling_async.notifications._understanding import Named, understand

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sampling_async.notifications._records import Fields, Kind, Notification
    from sampling_async.notifications._signatures import Signatures

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def read_entries(kind: Kind, body: bytes, query: str, signatures: Signatures) -> Sequence[Entry]:
    """Return what a hit tells; what is not understood is an entry too.

    Raises:
        ForgedError: A signature in it is wrong, or missing.
    """
    try:
        items = read_fields(body, query)
    except NotUnderstoodError as exc:
        return [_unknown(kind, {}, _hash(body, query.encode("utf-8", "surrogatepass")), str(exc))]
    return [_entry(kind, fields, signatures) for fields in items]


def _entry(kind: Kind, fields: Fields, signatures: Signatures) -> Entry:
    try:
        named = Named(fields)
        record = understand(kind, named)
    except NotUnderstoodError as exc:
        return _unknown(kind, fields, _hash(json.dumps(fields, sort_keys=True).encode()), str(exc))
    verified = signatures.verified(record, named.signature)
    content = named.digest()
    about, identity = _about(record, content)
    key = json.dumps(about)
    return Entry(
        kind=kind,
        posted_as=kind,
        key=key,
        identity=json.dumps([kind, *about, *identity]),
        content=content,
        rank=_rank(record),
        fields=json.dumps(fields),
        verified=verified,
    )


def _about(record: Notification, content: str) -> tuple[list[object], list[object]]:
    """Return what a record is about, and what else makes it the same as another one.

    The former is the key that order is kept for. It is the same for a completion and a terminate of a member.
    """
    match record:
        case Completion():
            # With another revenue it is a correction, and a fact of its own.
            return ["member", record.survey_id, record.wave_id, record.member_code], [str(record.revenue)]
        case Terminate():
            return ["member", record.survey_id, record.wave_id, record.member_code], []
        case QuotaStatus():
            return ["quota", record.quota_id], [_rank(record)]
        case SurveyClosed():
            return ["survey", record.survey_id, record.wave_id], []
        case InviteNotification():
            return ["invite", content], []
        case _:
            raise AssertionError(record)


def _rank(record: Notification) -> int | None:
    """Return the order of a quota's statuses: the time in microseconds. Of the same time, closed is last."""
    if not isinstance(record, QuotaStatus):
        return None
    since = record.at - _EPOCH
    return ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds) * 2 + (not record.is_live)


def _unknown(kind: Kind, fields: Fields, content: str, reason: str) -> Entry:
    key = json.dumps(["unknown", kind, content])
    return Entry(
        kind=None,
        posted_as=kind,
        key=key,
        identity=key,
        content=content,
        fields=json.dumps(fields),
        reason=reason,
    )


def _hash(*parts: bytes) -> str:
    """Return a hash of parts; each one's length is hashed too, so that their borders count."""
    total = hashlib.sha256()
    for part in parts:
        total.update(b"%d:%b" % (len(part), part))
    return total.hexdigest()
