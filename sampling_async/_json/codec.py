"""Convert the contract's JSON to records and back.

Reading
    - Names are PascalCase with the acronyms ID, IDs, LOI, IR and URL. `SurveyId`, `WaveId` and `QuotaId` are
      read as `SurveyID`, `WaveID` and `QuotaID`. Unknown fields are ignored.
    - Scalars are strict: no text for a number, no number for text, no null for either, 64 bits for a whole
      number. There are two exceptions, which lose nothing: `7.0` is a whole number, and `1` is a double.
    - Missing or null: SurveyName, MemberAmount -> None; IsRoutable -> False; SurveyWaveExclusions, AnswerIDs,
      AnswerValues, ParticipationStatusIDs -> (); a setting's Description and Value -> "" and None. MemberCodes
      may be null -> (). WaveID, PartnerAmount, LOI and IR of an invite -> 0, see `zeros`. All other fields
      are required, and the URL of an invite is not empty.
    - AnswerValues: a list of strings (or whole numbers), a string, or null. Commas separate values in all of
      them. Blanks around a value and empty values are dropped.
    - dateTime: ISO 8601 with `T` or a blank, 0 to 7 fractional digits (datetime holds 6, the last is cut), with
      a zone (aware) or without (naive), or `/Date(milliseconds+zone)/` (aware).
    - UTF-8 with or without a BOM, UTF-16 and UTF-32 with one. NaN, Infinity and lone surrogates are refused.

Writing
    - The contract's names, lists for tuples, ISO 8601 with `Z` for UTC. SurveyName and MemberAmount are left
      out if they are None.

There are two decoders. The fast decoder reads in C. If it gives up, the careful decoder reads the same body: it
accepts the misspelled names above, and its errors name the place and the fault. Both make equal records. The
careful decoder is imported on first use.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import msgspec

from sampling_async._contract.errors import DecodeError
from sampling_async._contract.records import wire_name
from sampling_async._json import fast, rules

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sampling_async._json.fast import Shared

T = TypeVar("T")

# Bytes that may come before the first character of JSON: a UTF-8 BOM and blanks.
_BLANK: Final = b"\xef\xbb\xbf \t\r\n"


def from_json(cls: type[T], body: bytes | str) -> T:
    """Read a record from the contract's JSON.

    Args:
        cls: The record to read: `Quotas`, `Invite`, `RecontactMembers`, `PartnerSettings` or a part of them.
        body: The JSON as the service sent it, or as `to_json` wrote it.

    Raises:
        DecodeError: The body is not JSON, or breaks the contract; `path` names the place.
    """
    return read(cls, _encoded(body))


def read(cls: type[T], body: bytes, at: str = "$", shared: Shared | None = None) -> T:
    """Read a record that may be a part of a larger body; `at` is its path there, for errors.

    All parts of one inventory share the same `shared`.
    """
    record = fast.read(cls, body, shared)
    return structure(cls, parse(body, at), at) if record is None else record


plain_json: Final = msgspec.json.encode
"""Write numbers, texts, lists and dicts as JSON, fast; records in the names of their fields."""


def json_lines(values: Iterable[object]) -> bytes:
    """Write the same, a line for each value, without a line feed at the end."""
    return msgspec.json.Encoder().encode_lines(values)[:-1]


def from_plain_json(cls: type[T], line: bytes) -> T:
    """Read a record that `plain_json` wrote, in the names of its fields."""
    # A quote inside a text is escaped, so this finds names only. To have msgspec read the names of the fields
    # would leave its cache in the class, where the drafts of the fast decoder would inherit it.
    return read(cls, re.sub(rb'"([a-z_]+)":', _as_on_the_wire, line))


def _as_on_the_wire(name: re.Match[bytes]) -> bytes:
    return b'"%b":' % wire_name(name[1].decode()).encode()


def to_json(record: object) -> bytes:
    """Write a record, or a list or tuple of records, as the contract's JSON (UTF-8)."""
    return json.dumps(unstructure(record), ensure_ascii=False, separators=(",", ":")).encode()


def parse(body: bytes | str, at: str = "$", *, pairs: bool = False, once: bool = False) -> Any:
    """Parse JSON by its content, whatever the Content-Type says.

    With `pairs`, objects are lists of (name, value), repeated names included. With `once`, an object with a
    repeated name is refused: only the last of its values would count.
    """
    text = _encoded(body)
    head = text[:64].lstrip(_BLANK)
    if not head and not text.strip(_BLANK):
        raise DecodeError(at, "expected JSON, found an empty body")
    if head[:1] == b"<":
        raise DecodeError(at, "expected JSON, found HTML or XML (a page of a proxy or of a login?)")
    hook = _as_it_is if pairs else _once if once else None
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
    raise DecodeError(at, rule)


def structure(cls: type[T], value: Any, at: str = "$") -> T:
    from sampling_async._json import careful  # noqa: PLC0415  with cattrs, which is slow to import

    return careful.structure(cls, value, at)


def zeros(invite: dict[str, Any]) -> str | None:
    """Return the fields that an invite, as parsed JSON, lacks and that are read as 0; None if it has all."""
    names = [name for name in rules.ZEROS if rules.spelled(invite, name) is None]
    return f"the invite has no {', '.join(names)}: 0 stands for it" if names else None


def whole_number(value: object) -> int | None:
    """Return a value of parsed JSON as a whole number, by the rules above; None if it is none."""
    try:
        return rules.whole_number(value)
    except rules.Mismatch:
        return None


def unstructure(record: object) -> Any:
    from sampling_async._json import careful  # noqa: PLC0415  with cattrs, which is slow to import

    return careful.unstructure(record)


def _encoded(body: bytes | str) -> bytes:
    # Half surrogates pass here, so that the decoders refuse them with a DecodeError.
    return body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body


class _RepeatedError(Exception):
    """An object has a name twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _RepeatedError
    return found


def _as_it_is(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return pairs


def _refuse_constant(_name: str) -> NoReturn:
    raise ValueError
