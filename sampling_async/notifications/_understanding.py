"""Fields as records: names in any spelling, and values in the types that the record needs.

Amounts of money are exact in any decimal context: the operators of `Decimal` round as the context of the thread
or task says, which a host may have changed.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime
from decimal import Context, Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sampling_async._contract.records import INT64_MAX
from sampling_async._json.rules import Mismatch, date_time
from sampling_async.notifications._bodies import NotUnderstoodError
from sampling_async.notifications._records import (
    Completion,
    InviteNotification,
    Kind,
    QuotaStatus,
    Reconciliation,
    SurveyClosed,
    Terminate,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from sampling_async.notifications._records import Fields, Notification

_EXACT: Final = Context(prec=60, traps=[])


def of_hundredths(number: int) -> Decimal:
    return Decimal(f"{number}E-2")


def hundredths(amount: Decimal) -> int:
    return int(_EXACT.scaleb(amount, 2))


def size_of(amount: Decimal) -> Decimal:
    return amount.copy_abs()


def added(one: Decimal, other: Decimal) -> Decimal:
    return _EXACT.add(one, other)


def difference(one: Decimal, other: Decimal) -> Decimal:
    return _EXACT.subtract(one, other)


T = TypeVar("T")
_MOST_DIGITS: Final = 19
_LONGEST_CODE: Final = 1_000
_TRUTH: Final = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_WHOLE: Final = re.compile(r"\s*(-?[0-9]{1,19})(?:\.0{1,9})?\s*", re.ASCII)
_NO_ID: Final = re.compile(
    r"[\W_0]*|-[0-9.,]+|\W*(?:null|none|nil|undefined|nan|n/?a|true|false|yes|no)\W*", re.IGNORECASE
)
"""What services write where there is no ID: no number, one below 0, a zero GUID, or such a word."""

_THIS_CENTURY: Final = re.compile(r"(?<![0-9])20[0-9]{2}(?![0-9])", re.ASCII)
"""A year in which something was reconciled. For no time, services write 1, 1900 or 9999."""

_LOST_PLUS: Final = re.compile(r"(:[0-9]{2}(?:\.[0-9]+)?)\.? +([0-9]{2}:?[0-9]{2})$", re.ASCII)
_SEPARATORS: Final = str.maketrans("", "", " _-.:")

# Names with the same meaning, without case and separators. The first is what known services write.
MEMBER_NAMES: Final = ("uniquecode", "membercode", "memberid", "pid")
_AT: Final = ("datetime", "datetimeutc", "updatedatetimeutc", "updatedatetime")
_UPDATED: Final = ("updatedatetimeutc", "updatedatetime", "datetimeutc", "datetime")
TIMES: Final = frozenset(_UPDATED)
_LIVE: Final = ("islive", "live")
_SIGNATURE: Final = "encryptedvalue"
_WAVE: Final = "waveid"
_RECONCILIATION: Final = "reconciliationid"
_RECONCILED_AT: Final = "reconciliationdatetime"
_AMOUNT: Final = ("reconciliationamount", "amount", "revenue")
_MEMBER_KINDS: Final = {Kind.INVITE, Kind.COMPLETION, Kind.TERMINATE}
_LONGEST_NAME: Final = 40


def _plain_name(name: str) -> str:
    """Return a name without case and separators."""
    return name.casefold().translate(_SEPARATORS)


# Services write the same names again and again. Bounded, also in the length of names: bodies come from outside.
_usual_name: Final = lru_cache(maxsize=256)(_plain_name)


class FieldReader:
    """The fields of one notification, found by names without case and separators.

    `unread` has the values that were there and could not be read, by name.
    """

    def __init__(self, fields: Fields) -> None:
        self.unread: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self._notes: list[str] = []
        for name, value in fields.items():
            key = _usual_name(name) if len(name) <= _LONGEST_NAME else _plain_name(name)
            if self._values.setdefault(key, value) != value:
                raise NotUnderstoodError("a field is there in two spellings, with two values")

    def optional(self, names: str | tuple[str, ...], read: Callable[[Any], T | None]) -> T | None:
        """Return the value of the first name that is there; None if there is none, or it cannot be read."""
        for name in (names,) if isinstance(names, str) else names:
            if (value := self._values.get(name)) is not None and value != "":
                if (found := read(value)) is None:
                    self.unread[name] = value
                return found
        return None

    def needed(self, names: str | tuple[str, ...], read: Callable[[Any], T | None]) -> T:
        """Return the value of the first name that is there; refuse the notification without a readable one."""
        value = self.optional(names, read)
        if value is None:
            name = names if isinstance(names, str) else names[0]
            raise NotUnderstoodError(f"{name} is missing, or is no {read.__name__.strip('_')}")
        return value

    def wave(self) -> int:
        """Return the wave; 0 if there is none, as for older partners."""
        if not self.has_wave:
            self.note("there is no WaveId: it counts as wave 0")
            return 0
        return self.needed(_WAVE, _id)

    def note(self, text: str) -> None:
        self._notes.append(text)

    @property
    def anomaly(self) -> str | None:
        """What was odd about the fields read so far; None if nothing was."""
        return "; ".join([*self._notes, *(f"{name} cannot be read" for name in self.unread)]) or None

    @property
    def signature(self) -> str | None:
        """The field EncryptedValue; None if it is absent or empty, "?" if it is no text."""
        value = self._values.get(_SIGNATURE)
        if value is None or (isinstance(value, str) and not value.strip()):
            return None
        return value.strip() if isinstance(value, str) else "?"

    @property
    def has_wave(self) -> bool:
        return self._values.get(_WAVE) not in (None, "")

    @property
    def reconciliation_id(self) -> str | None:
        """The ID of a reconciliation; None if there is none, or only what services write for none."""
        text = _text_of_id(self._values.get(_RECONCILIATION))
        return None if text is None or _NO_ID.fullmatch(text) else text

    @property
    def reconciled_at(self) -> str | None:
        """The time of a reconciliation, in one spelling if it can be read; None if there is none."""
        value = self._values.get(_RECONCILED_AT)
        moment = _moment(value)
        text = _any_text(value) if moment is None else moment.isoformat()
        return text if text and _THIS_CENTURY.search(text) else None

    @property
    def is_paid(self) -> bool:
        """Whether there is a revenue that is not below 0, or cannot be read."""
        value = self._values.get("revenue")
        return value not in (None, "") and ((revenue := _whole(value)) is None or revenue >= 0)

    def digest(self) -> str:
        """Return a hash of names and values, the same in all spellings and formats; without the signature."""
        pairs = [(name, _canonical(value)) for name, value in self._values.items() if name != _SIGNATURE]
        pairs.sort()
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def kind_of_fields(posted_as: Kind, named: FieldReader) -> Kind:
    """Return the kind of fields that came to the URL of a kind: reconciliations come to URLs of other kinds.

    A completion with a revenue and a reconciliation time, but no ID, stays a completion: none may be lost.
    """
    is_paid = posted_as is Kind.COMPLETION and named.is_paid
    if posted_as in _MEMBER_KINDS and (
        named.reconciliation_id is not None or (named.reconciled_at is not None and not is_paid)
    ):
        return Kind.RECONCILIATION
    return posted_as


def parse(kind: Kind, named: FieldReader) -> Notification:
    return _READERS[kind](named)


def _invite(named: FieldReader) -> InviteNotification:
    record = InviteNotification(
        member_code=named.needed(MEMBER_NAMES, _code),
        survey_id=named.optional("surveyid", _id),
        wave_id=named.optional(_WAVE, _id),
        quota_id=named.optional("quotaid", _id),
        at=named.optional(_AT, _moment),
    )
    if record.survey_id is None and record.quota_id is None:
        raise NotUnderstoodError("an invite names neither a survey nor a quota")
    return record


def _of_survey(named: FieldReader, *at: str) -> dict[str, Any]:
    return {
        "member_code": named.needed(MEMBER_NAMES, _code),
        "survey_id": named.needed("surveyid", _id),
        "wave_id": named.wave(),
        "at": named.optional((*at, *_AT), _moment),
        "quota_id": named.optional("quotaid", _id),
        "survey_ref": named.optional("surveyref", _any_text),
        "additional_data": named.optional("additionaldata", _any_text),
        "is_auto_routed": named.optional("isautorouted", _truth),
        "original_survey_id": named.optional("originalsurveyid", _id),
    }


def _completion(named: FieldReader) -> Completion:
    named.optional(_RECONCILIATION, _text_of_id)  # so that the anomaly names it if it cannot be read
    if named.reconciliation_id is None and named.reconciled_at is not None:
        named.note("reconciliationdatetime is there without an ID: it counts as a completion")
    completion = Completion(**_of_survey(named), revenue=named.needed("revenue", _hundredths))
    if completion.revenue < 0:
        named.note("the revenue is below 0, and nothing says that it is a reconciliation")
    return completion


def _terminate(named: FieldReader) -> Terminate:
    return Terminate(
        **_of_survey(named),
        reason=named.optional("reason", _any_text),
        rejection_id=named.optional("rejectionid", _id),
        rejection_name=named.optional("rejectionname", _any_text),
    )


def _reconciliation(named: FieldReader) -> Reconciliation:
    if named.optional(_RECONCILIATION, _text_of_id) is None and _RECONCILIATION in named.unread:
        raise NotUnderstoodError("reconciliationid cannot be read")
    amount = named.optional(_AMOUNT, _hundredths)
    if amount is None and (unread := next((name for name in _AMOUNT if name in named.unread), None)):
        raise NotUnderstoodError(f"{unread} is no hundredths: without an amount, all would be taken back")
    known_by = named.reconciliation_id or named.reconciled_at
    if known_by is None:
        raise NotUnderstoodError("reconciliationid is missing, and so is reconciliationdatetime")
    return Reconciliation(
        **_of_survey(named, _RECONCILED_AT),
        reconciliation_id=known_by,
        # Some write what is taken back as a number below 0.
        amount=None if amount is None else size_of(amount),
        reason=named.optional("reason", _any_text),
    )


def _survey_closed(named: FieldReader) -> SurveyClosed:
    status = named.optional("status", _any_text)
    if status is not None and status.casefold() != "closed":
        raise NotUnderstoodError("the status of the survey is not Closed")
    return SurveyClosed(
        survey_id=named.needed("surveyid", _id),
        wave_id=named.optional(_WAVE, _id),
        survey_ref=named.optional("surveyref", _any_text),
        at=named.optional(_AT, _moment),
    )


def _quota_status(named: FieldReader) -> QuotaStatus:
    is_live = named.needed(_LIVE, _truth)
    if is_live:
        # Without a time, a status cannot be ordered. An old opening would do harm.
        at: datetime | None = named.needed(_UPDATED, _moment)
    elif (at := named.optional(_UPDATED, _moment)) is None:
        named.note("a closing without its time counts from when it came")
    return QuotaStatus(
        quota_id=named.needed("quotaid", _id),
        is_live=is_live,
        at=at,
        survey_id=named.optional("surveyid", _id),
        wave_id=named.optional(_WAVE, _id),
    )


_READERS: Final[dict[Kind, Callable[[FieldReader], Notification]]] = {
    Kind.INVITE: _invite,
    Kind.COMPLETION: _completion,
    Kind.TERMINATE: _terminate,
    Kind.SURVEY_CLOSED: _survey_closed,
    Kind.QUOTA_STATUS: _quota_status,
    Kind.RECONCILIATION: _reconciliation,
}


# --- Values. Each function returns None for what it cannot read; its name is part of an error's text.


def _any_text(value: Any) -> str | None:
    return value.strip() or None if isinstance(value, str) else _plain(value)


def _text_of_id(value: Any) -> str | None:
    if isinstance(value, bool):
        return str(value)
    return _any_text(int(value) if isinstance(value, float) and value.is_integer() else value)


def _plain(value: Any) -> str | None:
    return str(value) if type(value) is int and abs(value) <= INT64_MAX else None


def _code(value: Any) -> str | None:
    """Read a member code. Blanks stay: they may belong to it. U+FFFD means that a character was lost."""
    text = value if isinstance(value, str) else _plain(value)
    return text if text and len(text) <= _LONGEST_CODE and "\ufffd" not in text else None


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and (match := _WHOLE.fullmatch(value)):
        value = int(match[1])
    elif isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        value = int(value)
    return value if type(value) is int and abs(value) <= INT64_MAX else None


def _id(value: Any) -> int | None:
    number = _whole(value)
    return number if number is not None and number >= 0 else None


def _hundredths(value: Any) -> Decimal | None:
    """Read hundredths of a currency's unit. 12.5 is refused: it may mean units, and money is not guessed."""
    number = _whole(value)
    return None if number is None else of_hundredths(number)


def _truth(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return _TRUTH.get(str(value).strip().casefold()) if isinstance(value, str | int) else None


def _moment(value: Any) -> datetime | None:
    """Read a time as the inventory has it, or in another form of ISO 8601; without a zone it is UTC."""
    text = value.strip() if isinstance(value, str) else ""
    if not text:
        return None
    try:
        try:
            moment = date_time(text)
        except Mismatch:
            # Without seconds, or a day alone; in a form, a plus that was not escaped has become a blank.
            moment = datetime.fromisoformat(_LOST_PLUS.sub(r"\1+\2", text))
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


_BOOLEANS: Final = frozenset({"true", "false"})


def _canonical(value: Any) -> str:
    """Return a value as text, the same for JSON, XML and forms: true and "True" are `true`, 1.0 is `1`."""
    if type(value) is int:
        return str(value)
    if isinstance(value, str):
        text = value.strip()
    elif isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    elif isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return str(int(value))
    else:
        text = "" if value is None else str(value)
    folded = text.casefold()
    return folded if folded in _BOOLEANS else text
