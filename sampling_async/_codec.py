"""Bytes to models and back: every rule of naming and coercion, and nothing else.

Reading
    - Names are PascalCase with the acronyms ID, IDs, LOI, IR and URL. `SurveyId`, `WaveId` and `QuotaId` are
      read as `SurveyID`, `WaveID` and `QuotaID`. Unknown fields are ignored.
    - Scalars are strict: no text for a number, no number for text, no null for either, 64 bits for a whole
      number. The two exceptions lose nothing: `7.0` is a whole number, and `1` is a double.
    - Missing or null: SurveyName, MemberAmount -> None; IsRoutable -> False; SurveyWaveExclusions, AnswerIDs,
      AnswerValues, ParticipationStatusIDs -> (); a setting's Description and Value -> "" and None. MemberCodes
      may be null -> (). Everything else must be there.
    - AnswerValues: a list of strings (or whole numbers), a string, null; commas separate values in all of
      them, blanks around a value and empty values are dropped.
    - dateTime: ISO 8601 with `T` or a blank, 0 to 7 fractional digits (datetime holds 6, the last is cut), with
      a zone (aware) or without (naive), or `/Date(milliseconds+zone)/` (aware).
    - UTF-8 with or without a BOM, UTF-16 and UTF-32 with one. NaN, Infinity and lone surrogates are refused.

Writing
    - The contract's names, lists for tuples, ISO 8601 with `Z` for UTC; SurveyName and MemberAmount are left
      out when None.
"""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime, timedelta, timezone
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast, get_args, get_origin

import attrs
from cattrs import BaseValidationError, Converter
from cattrs.errors import AttributeValidationNote, ClassValidationError, IterableValidationError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from sampling_async._errors import DecodeError
from sampling_async._models import (
    Invite,
    Layer,
    Price,
    QuestionAndAnswers,
    Quota,
    Quotas,
    RecontactMembers,
    Setting,
    SubQuota,
    Survey,
    SurveyWaveExclusion,
)
from sampling_async._settings import PartnerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from attrs import AttrsInstance

T = TypeVar("T")

_ACRONYMS: Final = {"id": "ID", "ids": "IDs", "loi": "LOI", "ir": "IR", "url": "URL"}
_DRIFTED: Final = {"SurveyID": "SurveyId", "WaveID": "WaveId", "QuotaID": "QuotaId"}
_RECORDS: Final = (
    Price,
    QuestionAndAnswers,
    SubQuota,
    Layer,
    Quota,
    SurveyWaveExclusion,
    Survey,
    Quotas,
    Invite,
    RecontactMembers,
    Setting,
)
_BLANK: Final = b"\xef\xbb\xbf \t\r\n"
_OMITTED_WHEN_NONE: Final = {"survey_name", "member_amount"}
_INT64_MAX: Final = 2**63 - 1
_EXACT_FLOAT_MAX: Final = 2**53


def from_json(cls: type[T], body: bytes | str) -> T:
    """Read a record from the contract's JSON.

    Args:
        cls: The record to read: `Quotas`, `Invite`, `RecontactMembers`, `PartnerSettings` or a part of them.
        body: The JSON as it came, or as `to_json` wrote it.

    Raises:
        DecodeError: The body is not JSON, or not what the contract says; `path` names the place.
    """
    return structure(cls, parse(body))


def to_json(record: object) -> bytes:
    """Write a record, or a list or tuple of records, as the contract's JSON (UTF-8)."""
    return json.dumps(unstructure(record), ensure_ascii=False, separators=(",", ":")).encode()


def parse(body: bytes | str) -> Any:
    """Parse JSON by content, whatever the body was labelled.

    Raises:
        DecodeError: It is empty, HTML, not JSON, or JSON beyond what JSON allows (NaN, 5,000-digit numbers).
    """
    text = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    head = text[:64].lstrip(_BLANK)
    if not head and not text.strip(_BLANK):
        raise DecodeError("$", "expected JSON, found an empty body")
    if head[:1] == b"<":
        raise DecodeError("$", "expected JSON, found HTML or XML (an answer of a proxy or a login page?)")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as exc:
        rule = f"expected JSON, found a syntax error at character {exc.pos}"
    except UnicodeDecodeError as exc:
        rule = f"expected UTF-8, found other bytes at byte {exc.start}"
    except RecursionError:
        rule = "expected JSON of ordinary depth, found too many nested levels"
    except ValueError:  # NaN and Infinity, or more digits than int() takes
        rule = "expected finite numbers of ordinary length"
    # Raised outside of the handlers: the errors above hold the body.
    raise DecodeError("$", rule)


def structure(cls: type[T], value: Any, at: str = "$") -> T:
    """Build a record from parsed JSON; `at` is the path of `value` in the body.

    Raises:
        DecodeError: The value is not what the contract says.
    """
    try:
        return _converter().structure(value, cls)
    except (BaseValidationError, _Mismatch) as exc:
        path, rule = _locate(exc, at)
    raise DecodeError(path, rule)


def unstructure(record: object) -> Any:
    """Return a record, or a list or tuple of records, as what `json.dumps` takes."""
    return _converter().unstructure(record)


def wire_name(attribute: str) -> str:
    """Return the contract's name of a record's attribute: `sub_quota_id` is `SubQuotaID`."""
    return "".join(_ACRONYMS.get(word, word.capitalize()) for word in attribute.split("_"))


class _Mismatch(Exception):  # noqa: N818  never leaves this module
    """A value breaks a rule; says what was expected and what kind of thing was found, not the value."""


def _mismatch(expected: str, found: object) -> _Mismatch:
    return _Mismatch(f"expected {expected}, found {_kind(found)}")


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


def _refuse_constant(_name: str) -> NoReturn:
    raise ValueError


def _locate(error: Exception, at: str) -> tuple[str, str]:
    """Return the path and the rule of the first thing that is wrong."""
    while isinstance(error, ClassValidationError | IterableValidationError):
        inner, note = error.group_exceptions()[0][0]
        at += f".{wire_name(note.name)}" if isinstance(note, AttributeValidationNote) else f"[{note.index}]"
        error = inner
    if isinstance(error, KeyError):
        return at, "expected a value, but the field is missing"
    return at, str(error)


@cache
def _converter() -> Converter:
    converter = Converter(detailed_validation=True)
    for scalar, hook in ((int, _int), (float, _float), (str, _str), (bool, _bool), (datetime, _datetime)):
        converter.register_structure_hook(scalar, hook)
    converter.register_unstructure_hook(datetime, _write_datetime)
    converter.register_structure_hook_factory(_is_tuple, _tuple_hook)
    for record in _RECORDS:
        converter.register_structure_hook(record, _record_hook(record, converter))
        converter.register_unstructure_hook(record, _record_writer(record, converter))
    settings = converter.get_structure_hook(tuple[Setting, ...])
    converter.register_structure_hook(
        PartnerSettings, lambda value, _: PartnerSettings(settings(value, tuple[Setting, ...]))
    )
    converter.register_unstructure_hook(PartnerSettings, lambda value: converter.unstructure(list(value)))
    return converter


def _record_hook(record: type[T], converter: Converter) -> Callable[[Any, Any], T]:
    special = {
        ("QuestionAndAnswers", "answer_values"): _answer_values,
        ("QuestionAndAnswers", "answer_ids"): _or_empty(converter),
        ("QuestionAndAnswers", "is_routable"): _or_false,
        ("RecontactMembers", "member_codes"): _or_empty(converter),
        ("Setting", "description"): _or_blank,
        ("Survey", "survey_wave_exclusions"): _or_empty(converter),
        ("SurveyWaveExclusion", "participation_status_ids"): _or_empty(converter),
    }
    attributes = attrs.fields(attrs.resolve_types(cast("type[AttrsInstance]", record)))
    names = [wire_name(attribute.name) for attribute in attributes]
    drifted = [(name, _DRIFTED[name]) for name in names if name in _DRIFTED]
    plain = make_dict_structure_fn(
        record,
        converter,
        **{  # type: ignore[arg-type]
            attribute.name: override(rename=name, struct_hook=special.get((record.__name__, attribute.name)))
            for attribute, name in zip(attributes, names, strict=True)
        },
    )

    def hook(value: Any, cls: Any) -> T:
        if type(value) is not dict:
            raise _mismatch("an object", value)
        for name, drift in drifted:
            if name not in value and drift in value:
                value = {**value, name: value[drift]}
        return plain(value, cls)

    return hook


def _record_writer(record: type[T], converter: Converter) -> Callable[[T], dict[str, Any]]:
    return make_dict_unstructure_fn(
        record,
        converter,
        **{  # type: ignore[arg-type]
            attribute.name: override(
                rename=wire_name(attribute.name), omit_if_default=attribute.name in _OMITTED_WHEN_NONE
            )
            for attribute in attrs.fields(cast("type[AttrsInstance]", record))
        },
    )


def _is_tuple(cls: Any) -> bool:
    return get_origin(cls) is tuple


def _tuple_hook(cls: Any, converter: Converter) -> Callable[[Any, Any], tuple[Any, ...]]:
    items: Any = list.__class_getitem__(get_args(cls)[0])
    hook = converter.get_structure_hook(items)

    def structure_tuple(value: Any, _: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _mismatch("an array", value)
        return tuple(hook(value, items))

    return structure_tuple


def _or_empty(converter: Converter) -> Callable[[Any, Any], tuple[Any, ...]]:
    def hook(value: Any, cls: Any) -> tuple[Any, ...]:
        return () if value is None else converter.structure(value, cls)

    return hook


def _or_blank(value: Any, cls: Any) -> str:
    return "" if value is None else _str(value, cls)


def _or_false(value: Any, cls: Any) -> bool:
    return False if value is None else _bool(value, cls)


def _int(value: Any, _: Any) -> int:
    if type(value) is float and value.is_integer() and abs(value) <= _EXACT_FLOAT_MAX:
        return int(value)
    if type(value) is not int:
        raise _mismatch("a whole number", value)
    if not -_INT64_MAX <= value <= _INT64_MAX:
        raise _Mismatch("expected a whole number of at most 64 bits")
    return value


def _float(value: Any, _: Any) -> float:
    if type(value) not in (int, float) or not -_INT64_MAX <= value <= _INT64_MAX:
        raise _mismatch("a number", value)
    return float(value)


def _str(value: Any, _: Any) -> str:
    if type(value) is not str:
        raise _mismatch("text", value)
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise _Mismatch("expected text, found half of a surrogate pair")
    return value


def _bool(value: Any, _: Any) -> bool:
    if type(value) is not bool:
        raise _mismatch("a boolean", value)
    return value


def _answer_values(value: Any, _: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    parts = [value] if type(value) is str else value
    if type(parts) is not list:
        raise _mismatch("text or an array of texts", value)
    texts = (str(_int(part, int)) if type(part) is int else _str(part, str) for part in parts)
    return tuple(stripped for text in texts for piece in text.split(",") if (stripped := piece.strip()))


# Compiled when first used, by `re` itself: compiling is a tenth of this package's import time.
_ISO: Final = (
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[T ]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{0,7}))?"
    r" ?(?:(Z)|([+-])([0-9]{2}):?([0-9]{2}))?"
)
_MS_DATE: Final = r"/Date\((-?[0-9]{1,18})(?:([+-])([0-9]{2})([0-9]{2}))?\)/"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _datetime(value: Any, _: Any) -> datetime:
    if type(value) is not str:
        raise _mismatch("a dateTime", value)
    try:
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
        pass  # a 30th of February, a year 10000, a zone of 25 hours
    raise _mismatch("a dateTime (2020-01-31T21:19:30.1234567Z, with or without the zone)", value)


def _in_zone(moment: datetime, zone: timezone) -> datetime:
    try:
        return moment.astimezone(zone)
    except OverflowError:  # the first and the last day there is
        return moment


def _zone(sign: str | None, hours: str, minutes: str) -> timezone | None:
    if sign is None:
        return None
    offset = timedelta(hours=int(hours), minutes=int(minutes))
    return timezone(-offset if sign == "-" else offset)


def _write_datetime(value: datetime) -> str:
    text = value.isoformat()
    return text.removesuffix("+00:00") + "Z" if text.endswith("+00:00") else text
