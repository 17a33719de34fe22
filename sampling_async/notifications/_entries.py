"""Notifications as entries for the store: what each is about, and what makes it the same as another.

Ends of a member's survey that come once with their wave and once without it are one end.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING, Final, assert_never

from sampling_async import InvalidRequestError
from sampling_async._contract.checks import text_of
from sampling_async.notifications._bodies import NotUnderstoodError, read_fields
from sampling_async.notifications._facts import Entry, SurveyEnd, fact_key
from sampling_async.notifications._records import (
    Completion,
    InviteNotification,
    QuotaStatus,
    Reconciliation,
    SurveyClosed,
    Terminate,
    UnknownNotification,
)
from sampling_async.notifications._understanding import (
    MEMBER_NAMES,
    TIMES,
    FieldReader,
    hundredths,
    kind_of_fields,
    parse,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sampling_async._contract.checks import Text
    from sampling_async.notifications._access import Signatures
    from sampling_async.notifications._facts import Receipt
    from sampling_async.notifications._records import Fields, Kind, Notification


def stand_in(member_code: str) -> str:
    """Return the code that stands in place of an erased member's: a hash, so that what comes later finds it."""
    return f"erased-{_hash(member_code.encode('utf-8', 'surrogatepass'))[:32]}"


def text_code(member_code: Text) -> str:
    code = text_of(member_code)
    if not isinstance(code, str) or not code:
        what = "empty" if code == "" else type(code).__name__
        raise InvalidRequestError(f"a member code must be a str, and not empty, not {what}")
    return code


def is_code(name: str, value: object, member_code: str) -> bool:
    """Return whether the value of a field is a member code. A code of digits may be an ID or an amount too."""
    if str(value) != member_code:
        return False
    return folded(name) in MEMBER_NAMES or re.fullmatch(r"[\d.,+-]+", member_code) is None


def without_code(fields: str, member_code: str, nobody: str) -> str:
    """Return fields, as JSON, with another member code, and without what may hold the code."""
    return json.dumps(
        {
            name: nobody if is_code(name, value, member_code) else value
            for name, value in json.loads(fields).items()
            if folded(name) not in _LEFT_OUT
        }
    )


def folded(name: str) -> str:
    """Return the name of a field without case and without all that is no letter and no digit."""
    return re.sub(r"[\W_]", "", name.casefold())


_LEFT_OUT: Final = {"encryptedvalue", "additionaldata"}  # a signature over the code, and the query of the link


def _new_key(identity: str, is_without_wave: bool, quota: int | None) -> str:  # noqa: FBT001
    """Return the key of a new fact.

    An end without its wave may be moved into one later, and then another one, of another quota, may come
    without its wave. So the quota is part of the key.
    """
    return fact_key(identity, "without a wave", quota) if is_without_wave else fact_key(identity)


def moved_identity(identity: str, key: str) -> str:
    """Return the identity of a fact that is now about another key."""
    if not identity.startswith("["):  # of a correction of a terminate, which is known by its fact
        return identity
    kind, _, more = json.loads(identity)
    return _identity(kind, key, more)


def said_again_at(identity: str, since: float) -> str:
    """Return the identity of an event that says again, after a moment or a rank, what another one has said."""
    kind, key, more = json.loads(identity)
    return _identity(kind, key, f"{more} after {since}")


def _identity(kind: str, key: str, more: str | int | None) -> str:
    return f'["{kind}", {json.dumps(key)}, {_bounded(more, _MOST_MORE)}]'


def _bounded(value: str | int | None, most: int) -> str:
    """Return JSON, of a long text a hash: PostgreSQL's indexes take at most 2,700 bytes."""
    text = json.dumps(value)
    return text if len(text) <= most else json.dumps(f"sha256 {_hash(text.encode())}")


def member_text(member_code: str) -> str:
    """Return a member code as it is stored, and looked up: as JSON, because that is ASCII for any code."""
    return _bounded(member_code, _MOST_CODE)


def code_of(text: str) -> str:
    """Return the member code of such a text."""
    code = json.loads(text)
    if not isinstance(code, str):
        raise TypeError("this is no member code")
    return code


_MOST_CODE: Final = 1_100  # it may be twice as long in an identity, as JSON in JSON
_MOST_MORE: Final = 300


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DAY: Final = 86_400
AHEAD: Final = 3600.0
"""Seconds that the service's clock may be ahead. A status dated in another year must not silence its quota."""


def read_entries(hit: Receipt, signatures: Signatures) -> Sequence[Entry]:
    """Return the notifications of a hit as entries; what is not understood is an entry too."""
    try:
        items = read_fields(hit.body, hit.query, hit.headers)
    except NotUnderstoodError as exc:
        content = _hash(hit.body, hit.query.encode("utf-8", "surrogatepass"))
        return [_unknown(hit.kind, {}, content, str(exc))]
    return [_entry(hit, fields, signatures) for fields in items]


def _entry(hit: Receipt, fields: Fields, signatures: Signatures) -> Entry:
    try:
        named = FieldReader(fields)
        kind = kind_of_fields(hit.kind, named)
        record = parse(kind, named)
    except NotUnderstoodError as exc:
        return _unknown(hit.kind, fields, _hash(json.dumps(fields, sort_keys=True).encode()), str(exc))
    verified = signatures.verified(record, named.signature, has_wave=named.has_wave)
    content = named.digest()
    key, more = _about(record, named, content, hit.at)
    identity, end = _identity(kind, key, more), _end(record)
    is_without_wave = end is not None and not named.has_wave
    return Entry(
        kind=kind,
        posted_as=hit.kind,
        key=key,
        identity=identity,
        fact_key=_new_key(identity, is_without_wave, None if end is None else end.quota_id),
        content=content,
        rank=_rank(record, came=hit.at, latest=hit.at + AHEAD),
        fields=json.dumps(fields),
        verified=verified,
        end=end,
        undated=isinstance(record, QuotaStatus) and record.at is None,
    )


def member_key(survey_id: int, wave_id: int, member_code: str) -> str:
    """Return the key of all notifications about a member in a survey and wave; in ASCII for any code."""
    return f'["member", {survey_id}, {wave_id}, {member_text(member_code)}]'


def _end(record: Notification) -> SurveyEnd | None:
    if not isinstance(record, Completion | Terminate | Reconciliation):
        return None
    amount = record.revenue if isinstance(record, Completion) else getattr(record, "amount", None)
    return SurveyEnd(
        member_code=record.member_code,
        survey_id=record.survey_id,
        wave_id=record.wave_id,
        quota_id=record.quota_id,
        original_survey_id=record.original_survey_id,
        hundredths=None if amount is None else hundredths(amount),
        reason=None if isinstance(record, Completion) else record.reason,
        at=None if record.at is None else record.at.timestamp(),
    )


def _about(record: Notification, named: FieldReader, content: str, came: float) -> tuple[str, str | int | None]:
    """Return the key of a record, and what else two records of one key must share to be the same.

    Facts of one key are handled in order. All ends and reconciliations of a member's survey have one key.
    """
    match record:
        case Completion():
            # With another revenue it is a correction, which is another fact.
            return member_key(record.survey_id, record.wave_id, record.member_code), str(record.revenue)
        case Terminate():
            return member_key(record.survey_id, record.wave_id, record.member_code), None
        case Reconciliation():
            member = member_key(record.survey_id, record.wave_id, record.member_code)
            return member, record.reconciliation_id
        case QuotaStatus():
            when = _unclear_time(named, came) if record.at is None else _rank(record, came=came, latest=inf)
            return json.dumps(["quota", record.quota_id]), when
        case SurveyClosed():
            # A survey may open and close several times.
            when = _unclear_time(named, came) if record.at is None else record.at.isoformat()
            return json.dumps(["survey", record.survey_id, record.wave_id]), when
        case InviteNotification():
            return json.dumps(["invite", content]), None
        case UnknownNotification():
            raise AssertionError(record)  # `_unknown` makes its entry
        case _:
            assert_never(record)


def _unclear_time(named: FieldReader, came: float) -> str:
    """Return what distinguishes closings without a readable time: its text, and the day of receipt.

    Not the text alone: some services write the same for any time.
    """
    texts = [named.unread[name] for name in sorted(TIMES & named.unread.keys())]
    return json.dumps([*texts, int(came // _DAY)])


def _rank(record: Notification, *, came: float, latest: float) -> int | None:
    """Return the order of a quota's statuses: the time in microseconds. Of the same time, closed is last.

    Without a time, the time of receipt counts. A time after `latest` (seconds since 1970) counts as `latest`.
    """
    if not isinstance(record, QuotaStatus):
        return None
    if record.at is None:
        return rank_at(came) + 1
    since = record.at - _EPOCH
    moment = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return int(min(moment, latest * 1_000_000)) * 2 + (not record.is_live)


def rank_at(moment: float) -> int:
    """Return the rank of an opening at a moment, in seconds since 1970. A closing has 1 more."""
    return int(moment * 1_000_000) * 2


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
    """Return a hash of parts and their lengths, so that ("ab", "c") and ("a", "bc") differ."""
    total = hashlib.sha256()
    for part in parts:
        total.update(b"%d:%b" % (len(part), part))
    return total.hexdigest()
