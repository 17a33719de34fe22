"""XML of notifications as fields, within bounds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NoReturn
from xml.parsers import expat

from sampling_async.notifications._decoding import NotUnderstoodError

if TYPE_CHECKING:
    from collections.abc import Iterator

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

    Names lose their prefixes. An element may be closed by its name in another case.

    Raises:
        NotUnderstoodError: It is not well-formed, has a DOCTYPE, or exceeds a bound.
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
        # Names are read without case, but shown as they came.
        names = (match[0][1:] for match in _TAGS.finditer(text) if not match[0].startswith(("<!", "<?", "</")))
        return _parsed(_TAGS.sub(_lowered, text), names)
    except expat.ExpatError:
        raise NotUnderstoodError("not valid XML") from None


def _lowered(match: re.Match[str]) -> str:
    tag = match[0]
    return tag if tag.startswith(("<!", "<?")) else tag.lower()


def _parsed(text: str, names: Iterator[str] | None = None) -> Any:
    reader = _Reader(names)
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    parser.StartDoctypeDeclHandler = reader.refuse
    parser.Parse(text, True)  # a text, for which expat overlooks what encoding it declares
    return reader.root


class _Element:
    """An open element of an XML document: its text, and the elements in it."""

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
        """Return the text of a leaf; otherwise a dict, with a list for each name that stands more than once."""
        text = "".join(self.text).strip()
        if not self.elements and (text or not self.attributes):
            return text
        fields: dict[str, list[Any]] = {}
        for name, value in [*self.attributes, *self.elements]:
            fields.setdefault(name, []).append(value)
        if len(fields) > MOST_FIELDS:
            raise NotUnderstoodError(f"an element of the XML has more than {MOST_FIELDS} fields")
        return {name: values if len(values) > 1 else values[0] for name, values in fields.items()}


class _Reader:
    """Builds elements from the events of expat, within bounds.

    Args:
        names: The names of the elements, in the order of their start tags; by default those that expat gives.
    """

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
    """Return a name without its prefix."""
    return name.rpartition(":")[2]
