"""Bodies of notifications as fields: JSON, XML and forms. The content type is not believed, the body is.

Every function raises only `NotUnderstoodError`, whatever the bytes are.
"""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import parse_qsl
from xml.parsers import expat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sampling_async.notifications._records import Fields

MOST_BYTES: Final = 1 << 20
"""The size of a body that is read, 1 MiB. A longer one is refused with 413."""

_DEEPEST: Final = 16
_MOST_FIELDS: Final = 200
_MOST_ITEMS: Final = 1_000
# Byte order marks, blanks, and the zeros of UTF-16: all that may stand before the first character of a body.
_BEFORE: Final = b"\xef\xbb\xbf\xff\xfe\x00 \t\r\n"
_SURROGATES: Final = re.compile("[\ud800-\udfff]")


class NotUnderstoodError(ValueError):
    """A body is not what it should be. The text is the reason, without any value of the body."""


def read_fields(body: bytes, query: str = "") -> Sequence[Fields]:
    """Return the notifications in a body, each as its fields; mostly there is one.

    A list of objects is several notifications. An object with one member that is an object or a list is an
    envelope, and is opened. If the body is empty, the query string of the URL is read as a form.

    Args:
        body: At most 1 MiB, in any encoding.
        query: The query string, without its question mark.

    Raises:
        NotUnderstoodError: The body is no JSON, XML or form, or has no fields in a form that can be read.
    """
    first = body.lstrip(_BEFORE)[:1]
    if first in (b"{", b"["):
        value = _json(body)
    elif first == b"<":
        value = _xml(body)
    else:
        value = _form(body if first else _bytes_of(query))
    if not _is_plain(value):
        raise NotUnderstoodError("it is nested too deeply, or has half of a character")
    return _opened(value)


def _is_plain(value: Any) -> bool:
    """Return whether a value is not nested too deeply, and all its texts can be written as UTF-8."""
    level = [value]
    for _ in range(_DEEPEST):
        if any(isinstance(each, str) and _SURROGATES.search(each) for each in level):
            return False
        names = [name for each in level if isinstance(each, dict) for name in each]
        inner = [part for each in level if isinstance(each, dict) for part in each.values()]
        level = [*names, *inner, *(part for each in level if isinstance(each, list) for part in each)]
        if not level:
            return True
    return False


def _json(body: bytes) -> Any:
    try:
        return json.loads(body, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite)
    except NotUnderstoodError:
        raise
    except RecursionError:
        raise NotUnderstoodError("JSON is nested too deeply") from None
    except ValueError:  # also of an encoding, and of a number with more than 4,300 digits
        raise NotUnderstoodError("not valid JSON") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > _MOST_FIELDS:
        raise NotUnderstoodError(f"an object has more than {_MOST_FIELDS} fields")
    fields = dict(pairs)
    # `{"Revenue": 100, "Revenue": 900}`: which one is meant is a guess, and guesses are not for money.
    if len(fields) < len(pairs):
        raise NotUnderstoodError("an object has a field twice")
    return fields


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):  # 1e999, which would be no JSON when it is printed
        raise NotUnderstoodError("a number is too large")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise NotUnderstoodError(f"{name} is no JSON")


def _form(body: bytes) -> dict[str, str]:
    if not body:
        raise NotUnderstoodError("an empty body")
    try:
        text = body.decode("utf-8-sig").strip()
        pairs = parse_qsl(
            text, keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=_MOST_FIELDS
        )
    except ValueError:
        raise NotUnderstoodError("neither JSON nor XML nor a form") from None
    return _object([(name, value) for name, value in pairs])


def _bytes_of(query: str) -> bytes:
    try:
        return query.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise NotUnderstoodError("the query has half of a character") from None


class _Element:
    """An open element of an XML document: its text, and the elements in it."""

    def __init__(self, name: str, attributes: dict[str, str]) -> None:
        self.name = name
        self.attributes = [(_local(key), value) for key, value in attributes.items()]
        self.elements: list[tuple[str, Any]] = []
        self.text: list[str] = []

    def value(self) -> Any:
        """Return the text of a leaf; otherwise a dict, with a list for each name that stands more than once."""
        text = "".join(self.text).strip()
        if not self.elements and (text or not self.attributes):
            return text
        fields: dict[str, list[Any]] = {}
        for name, value in [*self.attributes, *self.elements]:
            fields.setdefault(name, []).append(value)
        return {name: values if len(values) > 1 else values[0] for name, values in fields.items()}


class _Reader:
    """Builds elements from the events of expat, within bounds."""

    def __init__(self) -> None:
        self.root: dict[str, Any] | None = None
        self._open: list[_Element] = []
        self._count = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._count += 1
        if len(self._open) >= _DEEPEST or self._count > _MOST_FIELDS * _MOST_ITEMS:
            raise NotUnderstoodError("XML is nested too deeply, or has too many elements")
        self._open.append(_Element(_local(name), attributes))

    def text(self, data: str) -> None:
        self._open[-1].text.append(data)

    def end(self, _name: str) -> None:
        element = self._open.pop()
        if self._open:
            self._open[-1].elements.append((element.name, element.value()))
        else:
            self.root = {element.name: element.value()}

    def refuse(self, *_: object) -> NoReturn:
        # Entities are declared in a DOCTYPE: without one there are no bombs of entities and no files to fetch.
        raise NotUnderstoodError("XML with a DOCTYPE is not read")


def _xml(body: bytes) -> Any:
    reader = _Reader()
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    parser.StartDoctypeDeclHandler = reader.refuse
    try:
        parser.Parse(body.lstrip(b" \t\r\n"), True)
    except NotUnderstoodError:
        raise
    except (expat.ExpatError, ValueError, LookupError):  # the latter two of encodings that Python does not know
        raise NotUnderstoodError("not valid XML") from None
    return reader.root


def _local(name: str) -> str:
    """Return a name without its namespace; expat puts a blank between the two."""
    return name.rpartition(" ")[2]


def _opened(value: Any) -> Sequence[Fields]:
    for _ in range(_DEEPEST):
        match value:
            case list() if len(value) == 1:
                value = value[0]
            case dict() if len(value) == 1 and isinstance(only := next(iter(value.values())), dict | list):
                value = only
            case _:
                break
    items = value if isinstance(value, list) else [value]
    if len(items) > _MOST_ITEMS:
        raise NotUnderstoodError(f"a list has more than {_MOST_ITEMS:,} notifications")
    if not items or not all(isinstance(item, dict) and item for item in items):
        raise NotUnderstoodError("there are no fields in it")
    return items
