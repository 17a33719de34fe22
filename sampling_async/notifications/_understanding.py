"""Fields as records: names in any spelling, and values in the types that the record needs."""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sampling_async._contract.wire import INT64_MAX
from sampling_async.notifications._bodies import NotUnderstoodError
from sampling_async.notifications._money import of_hundredths
from sampling_async.notifications._records import (
    Completion,
    InviteNotification,
    Kind,
    QuotaStatus,
    SurveyClosed,
    Terminate,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from decimal import Decimal

    from sampling_async.notifications._records import Fields, Notification

T = TypeVar("T")
_MOST_DIGITS: Final = 19
_LONGEST_CODE: Final = 1_000
_TRUTH: Final = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_WHOLE: Final = re.compile(r"\s*(-?[0-9]{1,19})(?:\.0{1,9})?\s*", re.ASCII)
_MILLISECONDS: Final = re.compile(r"/Date\((-?[0-9]{1,15})(?:[+-][0-9]{4})?\)/", re.ASCII)
_SEPARATORS: Final = str.maketrans("", "", " _-.:")

# Names that say the same, each without case and separators. The first is what the services known so far write.
_MEMBER: Final = ("uniquecode", "membercode", "memberid", "pid")
_AT: Final = ("datetime", "datetimeutc", "updatedatetimeutc", "updatedatetime")
_UPDATED: Final = ("updatedatetimeutc", "updatedatetime", "datetimeutc", "datetime")
_LIVE: Final = ("islive", "live")
_SIGNATURE: Final = "encryptedvalue"


class Named:
    """The fields of one notification, found by names without case and separators.

    Raises:
        NotUnderstoodError: Two fields have the same name in different spellings, and different values.
    """

    def __init__(self, fields: Fields) -> None:
        self._values: dict[str, Any] = {}
        for name, value in fields.items():
            key = str(name).casefold().translate(_SEPARATORS)
            if self._values.setdefault(key, value) != value:
                raise NotUnderstoodError("a field is there in two spellings, with two values")

    def optional(self, names: str | tuple[str, ...], read: Callable[[Any], T | None]) -> T | None:
        """Return the value of the first name that is there; None if there is none, or it cannot be read."""
        for name in (names,) if isinstance(names, str) else names:
            if (value := self._values.get(name)) is not None and value != "":
                return read(value)
        return None

    def needed(self, names: str | tuple[str, ...], read: Callable[[Any], T | None]) -> T:
        """Return the value of the first name that is there.

        Raises:
            NotUnderstoodError: There is no such value, or it cannot be read.
        """
        value = self.optional(names, read)
        if value is None:
            name = names if isinstance(names, str) else names[0]
            raise NotUnderstoodError(f"{name} is missing, or is no {read.__name__.strip('_')}")
        return value

    @property
    def signature(self) -> str | None:
        """The field EncryptedValue, or None if it is absent or empty."""
        return self.optional(_SIGNATURE, _any_text)

    def digest(self) -> str:
        """Return a hash of names and values, the same in all spellings and formats; without the signature."""
        pairs = sorted((name, _canonical(value)) for name, value in self._values.items() if name != _SIGNATURE)
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def understand(kind: Kind, named: Named) -> Notification:
    """Return the fields of a notification as the record of its kind.

    Raises:
        NotUnderstoodError: A field that the record needs is missing, or has no readable value.
    """
    return _READERS[kind](named)


def _invite(named: Named) -> InviteNotification:
    record = InviteNotification(
        member_code=named.needed(_MEMBER, _code),
        survey_id=named.optional("surveyid", _id),
        wave_id=named.optional("waveid", _id),
        quota_id=named.optional("quotaid", _id),
        at=named.optional(_AT, _moment),
    )
    if record.survey_id is None and record.quota_id is None:
        raise NotUnderstoodError("an invite names neither a survey nor a quota")
    return record


def _completion(named: Named) -> Completion:
    return Completion(
        member_code=named.needed(_MEMBER, _code),
        survey_id=named.needed("surveyid", _id),
        wave_id=named.needed("waveid", _id),
        revenue=named.needed("revenue", _hundredths),
        at=named.optional(_AT, _moment),
        quota_id=named.optional("quotaid", _id),
        survey_ref=named.optional("surveyref", _any_text),
        additional_data=named.optional("additionaldata", _any_text),
        is_auto_routed=named.optional("isautorouted", _truth),
        original_survey_id=named.optional("originalsurveyid", _id),
    )


def _terminate(named: Named) -> Terminate:
    return Terminate(
        member_code=named.needed(_MEMBER, _code),
        survey_id=named.needed("surveyid", _id),
        wave_id=named.needed("waveid", _id),
        reason=named.optional("reason", _any_text),
        at=named.optional(_AT, _moment),
        quota_id=named.optional("quotaid", _id),
        survey_ref=named.optional("surveyref", _any_text),
        additional_data=named.optional("additionaldata", _any_text),
        rejection_id=named.optional("rejectionid", _id),
        rejection_name=named.optional("rejectionname", _any_text),
        is_auto_routed=named.optional("isautorouted", _truth),
        original_survey_id=named.optional("originalsurveyid", _id),
    )


def _survey_closed(named: Named) -> SurveyClosed:
    status = named.optional("status", _any_text)
    if status is not None and status.casefold() != "closed":
        raise NotUnderstoodError("the status of the survey is not Closed")
    return SurveyClosed(
        survey_id=named.needed("surveyid", _id),
        wave_id=named.optional("waveid", _id),
        survey_ref=named.optional("surveyref", _any_text),
        at=named.optional(_AT, _moment),
    )


def _quota_status(named: Named) -> QuotaStatus:
    return QuotaStatus(
        quota_id=named.needed("quotaid", _id),
        is_live=named.needed(_LIVE, _truth),
        at=named.needed(_UPDATED, _moment),
        survey_id=named.optional("surveyid", _id),
        wave_id=named.optional("waveid", _id),
    )


_READERS: Final[dict[Kind, Callable[[Named], Notification]]] = {
    Kind.INVITE: _invite,
    Kind.COMPLETION: _completion,
    Kind.TERMINATE: _terminate,
    Kind.SURVEY_CLOSED: _survey_closed,
    Kind.QUOTA_STATUS: _quota_status,
}


# --- Values. Each function returns None for what it cannot read; its name is part of an error's text.


def _any_text(value: Any) -> str | None:
    return value.strip() or None if isinstance(value, str) else _plain(value)


def _plain(value: Any) -> str | None:
    return str(value) if type(value) is int and abs(value) <= INT64_MAX else None


def _code(value: Any) -> str | None:
    """Read a member code. It is not stripped of blanks: they may belong to it."""
    text = value if isinstance(value, str) else _plain(value)
    return text if text and len(text) <= _LONGEST_CODE else None


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
    """Read a date and time; without a zone it is UTC."""
    if not isinstance(value, str):
        return None
    try:
        if match := _MILLISECONDS.fullmatch(value.strip()):
            return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=int(match[1]))
        moment = datetime.fromisoformat(value.strip())
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def _canonical(value: Any) -> str:
    """Return a value as text, the same for JSON, XML and forms: true and "True" are `true`, 1.0 is `1`."""
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        value = int(value)
    text = "" if value is None else str(value)
    return text.strip().casefold() if text.strip().casefold() in ("true", "false") else text.strip()
