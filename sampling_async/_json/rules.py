"""The rules for the text of JSON and for scalars, and the table of the fields that they read.

The table says where the fields of the wire differ from those of the records. The rule for names is `wire_name`
in `_contract/records.py`. A field that is not in the table has the name and the type of its attribute. If it
may be missing, its attribute has a default. Its null is None if the type allows None, and refused if it does
not. Both decoders read the table.
"""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final, NoReturn

from sampling_async._contract.errors import DecodeError
from sampling_async._contract.records import INT64_MAX

if TYPE_CHECKING:
    from collections.abc import Callable


# Bytes that may come before the first character of JSON: a UTF-8 BOM and blanks.
_BLANK: Final = b"\xef\xbb\xbf \t\r\n"

_EXACT_FLOAT_MAX: Final = 2**53  # beyond it, not every whole number is a float


# --- The text of JSON --------------------------------------------------------------------------------------


def parse(body: bytes | str, *, pairs: bool = False, once: bool = False) -> Any:
    """Parse JSON by its content, whatever the Content-Type says.

    With `pairs`, objects are lists of (name, value), repeated names included. With `once`, an object with a
    repeated name is refused: only the last of its values would count.
    """
    text = encoded(body)
    head = text[:64].lstrip(_BLANK)
    if not head and not text.strip(_BLANK):
        raise DecodeError("$", "expected JSON, found an empty body")
    if head[:1] == b"<":
        raise DecodeError("$", "expected JSON, found HTML or XML (a page of a proxy or of a login?)")
    hook = _as_pairs if pairs else _once if once else None
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=hook)
    except _RepeatedError:
        rule = "expected each name of an object once, found one repeated"
    except json.JSONDecodeError as exc:
        rule = f"expected JSON, found a syntax error at character {exc.pos}"
    except UnicodeDecodeError as exc:
        rule = f"expected UTF-8, found other bytes at byte {exc.start}"
    except RecursionError:
        rule = "expected JSON, found too many nested levels"
    except ValueError:  # NaN, Infinity, or more digits than `int` accepts
        rule = "expected finite numbers, found NaN, Infinity or a number with too many digits"
    # Raised outside of the handlers: the context of the error would hold the errors above, and they the body.
    raise DecodeError("$", rule)


def encoded(body: bytes | str) -> bytes:
    # Half surrogates pass here, so that the decoders refuse them with a DecodeError.
    return body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body


class _RepeatedError(Exception):
    """An object has a name twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _RepeatedError
    return found


def _as_pairs(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return pairs


def _refuse_constant(_name: str) -> NoReturn:
    raise ValueError


# --- Scalars -----------------------------------------------------------------------------------------------


class Mismatch(Exception):  # noqa: N818  never leaves the codec
    """A value breaks a rule. The text names the expected kind and the found kind, never the found value."""


ARRAYS: Final = (list, tuple)
"""An array of parsed JSON is a list. A tuple is one that cattrs made of a record."""

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
        case list() | tuple():
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


def whole_number_or_none(value: object) -> int | None:
    try:
        return whole_number(value)
    except Mismatch:
        return None


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
    if type(parts) not in ARRAYS:
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


SCALARS: Final[dict[type, Callable[[Any], Any]]] = {
    int: whole_number,
    float: number,
    str: text,
    bool: boolean,
    datetime: date_time,
}
"""The rule that reads each type."""

READ_BY: Final[dict[tuple[str, str], Callable[[Any], Any]]] = {
    ("Invite", "url"): link,
    ("QuestionAndAnswers", "answer_values"): answer_values,
}
"""Rules of single fields, by record and attribute."""

DRIFTED: Final = {"SurveyID": "SurveyId", "WaveID": "WaveId", "QuotaID": "QuotaId"}
"""Names, each with the misspelling that some services use. It counts if the name itself is not there."""

NULLS: Final[dict[tuple[str, str], Any]] = {
    ("QuestionAndAnswers", "answer_ids"): (),
    ("QuestionAndAnswers", "is_routable"): False,
    ("RecontactMembers", "member_codes"): (),
    ("Setting", "description"): "",
    ("Survey", "survey_wave_exclusions"): (),
    ("SurveyWaveExclusion", "participation_status_ids"): (),
}
"""What a null stands for, by record and attribute."""

ZEROS: Final = {"WaveID": 0, "PartnerAmount": 0.0, "LOI": 0, "IR": 0}
"""What stands for these fields of an invite where they are null or missing: its link is valid without them."""

OMITTED: Final = frozenset({"survey_name", "member_amount"})
"""Attributes that are not written if they are None."""


def spelled(fields: dict[str, Any], name: str) -> Any:
    """Return the value of a field by its name, or by the misspelling if the name is not there; else None."""
    return fields.get(name, fields.get(DRIFTED.get(name, name)))


def zeros(invite: dict[str, Any]) -> str | None:
    """Return the fields that an invite, as parsed JSON, lacks and that are read as 0; None if it has all."""
    names = [name for name in ZEROS if spelled(invite, name) is None]
    return f"the invite has no {', '.join(names)}: 0 stands for it" if names else None
