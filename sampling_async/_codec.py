"""Bytes to models and back.

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

Two lanes read: the fast one in C, and where it gives up, the slow one, which reads drifted spellings and says
what is wrong where. Both give equal records; both are loaded when first used.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from sampling_async._errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from weakref import WeakValueDictionary

    from sampling_async._fastlane import Shared, WireItem

T = TypeVar("T")

_BLANK: Final = b"\xef\xbb\xbf \t\r\n"


def from_json(cls: type[T], body: bytes | str) -> T:
    """Read a record from the contract's JSON.

    Args:
        cls: The record to read: `Quotas`, `Invite`, `RecontactMembers`, `PartnerSettings` or a part of them.
        body: The JSON as it came, or as `to_json` wrote it.

    Raises:
        DecodeError: The body is not JSON, or not what the contract says; `path` names the place.
    """
    return read(cls, _encoded(body))


def read(cls: type[T], body: bytes, at: str = "$", shared: Shared | None = None) -> T:
    """Read a record that may be a part of something larger; `at` is its path there.

    Raises:
        DecodeError: As for `from_json`.
    """
    from sampling_async import _fastlane  # noqa: PLC0415

    record = _fastlane.read(cls, body, shared)
    return structure(cls, parse(body, at), at) if record is None else record


def read_many(cls: type[T], body: bytes, shared: Shared) -> Sequence[T] | None:
    """Read a list of records; None if one of them is not plainly as the contract says."""
    from sampling_async import _fastlane  # noqa: PLC0415

    return _fastlane.read_many(cls, body, shared)


def warm_up() -> None:
    """Load the fast lane and make it ready, so that the first answer does not hold up the event loop."""
    from sampling_async import _fastlane  # noqa: PLC0415

    _fastlane.warm_up()


def new_shared(surveys: WeakValueDictionary[bytes, Any] | None = None) -> Shared:
    """Return what `read` is to be given for all parts of one inventory; `surveys` are those read before."""
    from sampling_async import _fastlane  # noqa: PLC0415

    return _fastlane.Shared(surveys)


def bulk_items(body: bytes) -> list[WireItem] | None:
    """Read the items of a bulk reply; None if one of them is not as the contract says."""
    from sampling_async import _fastlane  # noqa: PLC0415

    return _fastlane.read_bulk(body)


def plain_json(value: object) -> bytes:
    """Write numbers, texts, lists and dicts as JSON, fast."""
    import msgspec  # noqa: PLC0415

    return msgspec.json.encode(value)


def to_json(record: object) -> bytes:
    """Write a record, or a list or tuple of records, as the contract's JSON (UTF-8)."""
    return json.dumps(unstructure(record), ensure_ascii=False, separators=(",", ":")).encode()


def parse(body: bytes | str, at: str = "$", *, pairs: bool = False) -> Any:
    """Parse JSON by content, whatever the body was labelled.

    Args:
        body: The JSON.
        at: Its path, where it is a part of something larger.
        pairs: Give objects as lists of their names and values, repeated names included.

    Raises:
        DecodeError: It is empty, HTML, not JSON, or JSON beyond what JSON allows (NaN, 5,000-digit numbers).
    """
    text = _encoded(body)
    head = text[:64].lstrip(_BLANK)
    if not head and not text.strip(_BLANK):
        raise DecodeError(at, "expected JSON, found an empty body")
    if head[:1] == b"<":
        raise DecodeError(at, "expected JSON, found HTML or XML (an answer of a proxy or a login page?)")
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_as_it_is if pairs else None)
    except json.JSONDecodeError as exc:
        rule = f"expected JSON, found a syntax error at character {exc.pos}"
    except UnicodeDecodeError as exc:
        rule = f"expected UTF-8, found other bytes at byte {exc.start}"
    except RecursionError:
        rule = "expected JSON of ordinary depth, found too many nested levels"
    except ValueError:  # NaN and Infinity, or more digits than int() takes
        rule = "expected finite numbers of ordinary length"
    # Raised outside of the handlers: the errors above hold the body.
    raise DecodeError(at, rule)


def structure(cls: type[T], value: Any, at: str = "$") -> T:
    """Build a record from parsed JSON; `at` is the path of `value` in the body.

    Raises:
        DecodeError: The value is not what the contract says.
    """
    from sampling_async import _slowlane  # noqa: PLC0415

    return _slowlane.structure(cls, value, at)


def unstructure(record: object) -> Any:
    """Return a record, or a list or tuple of records, as what `json.dumps` takes."""
    from sampling_async import _slowlane  # noqa: PLC0415

    return _slowlane.unstructure(record)


def _encoded(body: bytes | str) -> bytes:
    return body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body


def _as_it_is(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return pairs


def _refuse_constant(_name: str) -> NoReturn:
    raise ValueError
