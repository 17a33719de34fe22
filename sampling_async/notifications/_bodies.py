"""Bodies of notifications as fields: JSON, XML, forms and multipart. The body decides, not its content type.

Every function raises only `NotUnderstoodError` or `RefusedBodyError`, whatever the bytes are.
"""

from __future__ import annotations

import json
import re
from email.parser import BytesHeaderParser
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import unquote_to_bytes
from xml.parsers import expat

from sampling_async.notifications._decoding import (
    BLANKS,
    MOST_BYTES,
    NotUnderstoodError,
    RefusedBodyError,
    decoded,
    decoded_value,
    uncompressed,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sampling_async.notifications._records import Fields

DEEPEST: Final = 16
MOST_FIELDS: Final = 200
_MOST_ELEMENTS: Final = 60_000
"""More than a body of 1 MiB can hold of notifications, each with all the fields that it needs."""

_MISMATCH: Final = expat.errors.codes[expat.errors.XML_ERROR_TAG_MISMATCH]
_TAGS: Final = re.compile(
    r"<!--(?:.*?-->|.*)|<!\[CDATA\[(?:.*?\]\]>|.*)|<\?(?:.*?\?>|.*)|</?[^\s<>/]+", re.DOTALL
)
# A start tag is one call of expat, in which no other thread runs: so its attributes are counted before.
_MANY_ATTRIBUTES: Final = re.compile(
    rf"<[^<>\"']*+(?:\"[^\"<]*+\"[^<>\"']*+|'[^'<]*+'[^<>\"']*+){{{MOST_FIELDS + 1}}}"
)
# XML has no control characters, but .NET writes them, as references too.
_CONTROLS: Final = re.compile(
    "[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]"
    "|&#(?:x0*(?:[0-8bcef]|1[0-9a-f])|0*(?:[0-8]|1[1245-9]|2[0-9]|3[01]));",
    re.IGNORECASE,
)


def read_xml(text: str) -> Any:
    """Return a document of XML: elements and attributes as fields, repeated ones as a list.

    Names lose their prefixes. An element may be closed by its name in another case. A DOCTYPE is refused.
    """
    if _MANY_ATTRIBUTES.search(text):
        raise NotUnderstoodError(f"an element of the XML has more than {MOST_FIELDS} attributes")
    text = _CONTROLS.sub("\ufffd", text)
    try:
        return _parsed(text)
    except expat.ExpatError as exc:
        if exc.code != _MISMATCH:
            raise NotUnderstoodError("not valid XML") from None
    try:
        # Case of names is ignored, but the names are shown as received.
        names = (match[0][1:] for match in _TAGS.finditer(text) if not match[0].startswith(("<!", "<?", "</")))
        return _parsed(_TAGS.sub(_lowered, text), names)
    except expat.ExpatError:
        raise NotUnderstoodError("not valid XML") from None


def _lowered(match: re.Match[str]) -> str:
    tag = match[0]
    return tag if tag.startswith(("<!", "<?")) else tag.lower()


def _parsed(text: str, names: Iterator[str] | None = None) -> Any:
    reader = _ElementBuilder(names)
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    parser.StartDoctypeDeclHandler = reader.refuse
    parser.Parse(text, True)  # given a text, expat ignores the encoding that it declares
    return reader.root


class _Element:
    def __init__(self, name: str, attributes: dict[str, str]) -> None:
        self.name = name
        # Declarations of namespaces and types (`xmlns`, `xsi:nil`) are no fields.
        self.attributes = [
            (_local(key), value)
            for key, value in attributes.items()
            if not key.lower().startswith(("xmlns", "xsi:"))
        ]
        self.elements: list[tuple[str, Any]] = []
        self.text: list[str] = []

    def value(self) -> Any:
        """Return the text of a leaf; otherwise a dict, with a list for each repeated name."""
        text = "".join(self.text).strip()
        if not self.elements and (text or not self.attributes):
            return text
        fields: dict[str, list[Any]] = {}
        for name, value in [*self.attributes, *self.elements]:
            fields.setdefault(name, []).append(value)
        if len(fields) > MOST_FIELDS:
            raise NotUnderstoodError(f"an element of the XML has more than {MOST_FIELDS} fields")
        return {name: values if len(values) > 1 else values[0] for name, values in fields.items()}


class _ElementBuilder:
    """Builds elements from the events of expat, within bounds."""

    def __init__(self, names: Iterator[str] | None) -> None:
        self._names = names
        self.root: dict[str, Any] | None = None
        self._open: list[_Element] = []
        self._count = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._count += 1
        if len(self._open) >= DEEPEST or self._count > _MOST_ELEMENTS:
            raise NotUnderstoodError("XML is nested too deeply, or has too many elements")
        self._open.append(_Element(_local(next(self._names, name) if self._names else name), attributes))

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


def _local(name: str) -> str:
    return name.rpartition(":")[2]


__all__ = ["MOST_BYTES", "NotUnderstoodError", "RefusedBodyError", "is_compressed", "read_fields"]

_MOST_ITEMS: Final = 20_000
_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_BOUNDARY: Final = re.compile(rb"\s*(--[ -~]{1,200}?)[ \t]*\r?\n")


def is_compressed(body: bytes, headers: Iterable[tuple[str, str]]) -> bool:
    """Return whether a body may become much larger when it is decompressed."""
    return body.startswith(b"\x1f\x8b") or bool(_header(headers, "content-encoding"))


def read_fields(body: bytes, query: str = "", headers: Sequence[tuple[str, str]] = ()) -> Sequence[Fields]:
    """Return the notifications in a body, each as its fields; mostly there is one.

    A list of objects is several notifications. An object with one member that is an object or a list is an
    envelope, and is opened; so is a text that is a document again. If the body is empty, the query string of
    the URL is read as a form. An unknown compression, or too much in it, is a RefusedBodyError.
    """
    coding, content_type = _header(headers, "content-encoding"), _header(headers, "content-type")
    body = uncompressed(body, coding)
    if match := _BOUNDARY.match(body):
        value: Any = _multipart(body, match[1])
    else:
        # Some senders put the character set into the wrong header.
        text = decoded(body, content_type, coding) or decoded(_bytes_of(query))
        value = _document(text) if _is_document(text) else _form(text, content_type)
    items = _opened(value)
    if len(items) > _MOST_ITEMS:
        raise RefusedBodyError(413, f"a list has more than {_MOST_ITEMS:,} notifications")
    return items


def _header(headers: Iterable[tuple[str, str]], name: str) -> str:
    return ", ".join([value for key, value in headers if key == name])


def _is_document(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip(BLANKS)[:1] in ("{", "[", "<", '"')


def _document(text: str) -> Any:
    text = text.strip(BLANKS)
    value = read_xml(text) if text.startswith("<") else _json(text)
    # Nearly all are ASCII without an escape, and have fewer brackets than the deepest one.
    is_plain = text.isascii() and "\\" not in text and text.count("{") + text.count("[") < DEEPEST
    if not is_plain and not _is_plain(value):
        raise NotUnderstoodError("it is nested too deeply, or has half of a character")
    return value


def _opened(value: Any, depth: int = DEEPEST) -> list[Fields]:
    """Return the notifications in a value: unwrap envelopes, and parse texts that are documents."""
    if not depth:
        raise NotUnderstoodError("it is nested too deeply")
    match value:
        case str() if _is_document(value):
            return _opened(_document(value), depth - 1)
        case list() if value:
            return [item for part in value for item in _opened(part, depth - 1)]
        case dict() if len(value) == 1 and (
            isinstance(only := next(iter(value.values())), dict | list) or _is_document(only)
        ):
            return _opened(only, depth - 1)
        case dict() if value:
            return [value]
        case _:
            raise NotUnderstoodError("there are no fields in it")


def _is_plain(value: Any) -> bool:
    """Return whether a value is not nested too deeply, and all its texts can be written as UTF-8."""
    level = [value]
    for _ in range(DEEPEST):
        if any(isinstance(each, str) and _SURROGATES.search(each) for each in level):
            return False
        names = [name for each in level if isinstance(each, dict) for name in each]
        inner = [part for each in level if isinstance(each, dict) for part in each.values()]
        level = [*names, *inner, *(part for each in level if isinstance(each, list) for part in each)]
        if not level:
            return True
    return False


def _json(text: str) -> Any:
    try:
        return _READER.decode(text)
    except NotUnderstoodError:
        raise
    except RecursionError:
        raise NotUnderstoodError("JSON is nested too deeply") from None
    except ValueError:  # also of a number with more than 4,300 digits
        raise NotUnderstoodError("not valid JSON") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_FIELDS:
        raise NotUnderstoodError(f"an object has more than {MOST_FIELDS} fields")
    fields = dict(pairs)
    # `{"Revenue": 100, "Revenue": 900}`: which one is meant is unknown, and money is not guessed.
    if len(fields) < len(pairs) and any(fields[name] != value for name, value in pairs):
        raise NotUnderstoodError("an object has a field twice")
    return fields


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):  # 1e999, which would be no JSON when it is printed
        raise NotUnderstoodError("a number is too large")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise NotUnderstoodError(f"{name} is no JSON")


# Not strict: a line break in a free text is nothing to lose a notification for.
_READER: Final = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite, strict=False
)


def _form(text: str, content_type: str) -> dict[str, str]:
    if not text:
        raise NotUnderstoodError("an empty body")
    pieces = [piece for piece in text.split("&") if piece]
    if not any("=" in piece for piece in pieces):
        raise NotUnderstoodError("neither JSON nor XML nor a form")
    pairs = (piece.partition("=") for piece in pieces[: MOST_FIELDS + 1])
    return _object(
        [(_unquoted(name, content_type), _unquoted(value, content_type)) for name, _, value in pairs]
    )


def _unquoted(text: str, content_type: str) -> str:
    raw = unquote_to_bytes(text.replace("+", " ").encode("utf-8", "surrogatepass"))
    return decoded_value(raw, content_type)


def _multipart(body: bytes, delimiter: bytes) -> dict[str, str]:
    """Return the fields of multipart/form-data. The first line is the delimiter of the parts."""
    pairs: list[tuple[str, str]] = []
    pieces = re.split(rb"(?:\r?\n|\A\s*)" + re.escape(delimiter), body, maxsplit=MOST_FIELDS + 2)
    for piece in pieces[1:]:
        if piece.startswith(b"--"):
            break
        part = BytesHeaderParser().parsebytes(piece.lstrip(b" \t").removeprefix(b"\r").removeprefix(b"\n"))
        name = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        if isinstance(name, str) and isinstance(content, bytes):
            pairs.append((name, decoded_value(content, part.get_content_charset())))
    if not pairs:
        raise NotUnderstoodError("multipart without a field")
    return _object(pairs)


def _bytes_of(query: str) -> bytes:
    try:
        return query.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise NotUnderstoodError("the query has half of a character") from None
