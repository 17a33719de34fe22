"""The rules for values on the wire: misspelled names, scalars and fields that may be missing.

The fast decoder and the careful decoder share these rules.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Final

from sampling_async._contract.records import INT64_MAX

# Correct names, each with the misspelling that some services use.
DRIFTED: Final = {"SurveyID": "SurveyId", "WaveID": "WaveId", "QuotaID": "QuotaId"}


def spelled(fields: dict[str, Any], name: str) -> Any:
    """Return the value of a field by its name, or by the misspelling if the name is not there; else None."""
    return fields.get(name, fields.get(DRIFTED.get(name, name)))


ZEROS: Final = {"WaveID": 0, "PartnerAmount": 0.0, "LOI": 0, "IR": 0}
"""What stands for these fields of an invite where they are null or missing: its link is valid without them."""

NULLS: Final[dict[tuple[str, str], Any]] = {
    ("QuestionAndAnswers", "answer_ids"): (),
    ("QuestionAndAnswers", "is_routable"): False,
    ("RecontactMembers", "member_codes"): (),
    ("Setting", "description"): "",
    ("Survey", "survey_wave_exclusions"): (),
    ("SurveyWaveExclusion", "participation_status_ids"): (),
}
"""Values that nulls stand for, by record and attribute.

For other attributes a null is None if the type allows None, and refused if it does not.
"""

_EXACT_FLOAT_MAX: Final = 2**53  # beyond it, not every whole number is a float


class Mismatch(Exception):  # noqa: N818  never leaves the codec
    """A value breaks a rule. The text names the expected kind and the found kind, never the found value."""


MISSING: Final = "expected a value, but the field is missing"
_FOUND_NULL: Final = ", found null"


def says_absent(rule: str) -> bool:
    """Return whether the rule of a fault says that there is no value at all, and not a wrong one."""
    return rule == MISSING or rule.endswith(_FOUND_NULL)


def mismatch(expected: str, found: object) -> Mismatch:
    return Mismatch(f"expected {expected}, found {_kind(found)}")


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "a whole number"
        case float():
            return "a number with a fraction" if math.isfinite(value) else "a number too large"
        case str():
            return "text" if value else "empty text"
        case list():
            return "an array"
        case _:
            return "an object"


def whole_number(value: Any) -> int:
    if type(value) is float and value.is_integer() and abs(value) <= _EXACT_FLOAT_MAX:
        return int(value)
    if type(value) is not int:
        raise mismatch("a whole number", value)
    if not -INT64_MAX <= value <= INT64_MAX:
        raise Mismatch("expected a whole number of at most 64 bits")
    return value


def number(value: Any) -> float:
    if type(value) not in (int, float) or not -INT64_MAX <= value <= INT64_MAX:
        raise mismatch("a number", value)
    return float(value)


def text(value: Any) -> str:
    if type(value) is not str:
        raise mismatch("text", value)
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise Mismatch("expected text, found half of a surrogate pair")
    return value


def link(value: Any) -> str:
    if value == "":
        raise mismatch("a link", value)
    return text(value)


def boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise mismatch("a boolean", value)
    return value


def answer_values(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    parts = [value] if type(value) is str else value
    if type(parts) is not list:
        raise mismatch("text or an array of texts", value)
    texts = (str(whole_number(part)) if type(part) is int else text(part) for part in parts)
    return tuple(stripped for text in texts for piece in text.split(",") if (stripped := piece.strip()))


# `re` compiles these on first use. To compile them here would be a tenth of this package's import time.
_ISO: Final = (
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[T ]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{0,7}))?"
    r" ?(?:(Z)|([+-])([0-9]{2}):?([0-9]{2}))?"
)
# `fromisoformat` reads these.
_PLAIN_ISO: Final = r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,7})?Z?"
_MS_DATE: Final = r"/Date\((-?[0-9]{1,18})(?:([+-])([0-9]{2})([0-9]{2}))?\)/"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def date_time(value: Any) -> datetime:
    if type(value) is not str:
        raise mismatch("a dateTime", value)
    try:
        if re.fullmatch(_PLAIN_ISO, value):
            return datetime.fromisoformat(value)
        if match := re.fullmatch(_ISO, value):
            *numbers, fraction, utc, sign, hours, minutes = match.groups()
            year, month, day, hour, minute, second = (int(number) for number in numbers)
            micros = int((fraction or "").ljust(6, "0")[:6])
            zone = UTC if utc else _zone(sign, hours, minutes)
            return datetime(year, month, day, hour, minute, second, micros, zone)
        if match := re.fullmatch(_MS_DATE, value):
            millis, sign, hours, minutes = match.groups()
            moment = _EPOCH + timedelta(milliseconds=int(millis))
            return _in_zone(moment, _zone(sign, hours, minutes) or UTC)
    except (ValueError, OverflowError):
        pass  # such as February 30, the year 10000, or a zone of 25 hours
    raise mismatch("a dateTime (2020-01-31T21:19:30.1234567Z, with or without the zone)", value)


def _in_zone(moment: datetime, zone: timezone) -> datetime:
    try:
        return moment.astimezone(zone)
    except OverflowError:  # on the first or the last day that datetime can hold
        return moment


def _zone(sign: str | None, hours: str, minutes: str) -> timezone | None:
    if sign is None:
        return None
    offset = timedelta(hours=int(hours), minutes=int(minutes))
    return timezone(-offset if sign == "-" else offset)


def written_date_time(value: datetime) -> str:
    text = value.isoformat()
    return text.removesuffix("+00:00") + "Z" if text.endswith("+00:00") else text
