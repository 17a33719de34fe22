"""Convert the contract's JSON to records and back: one `cattrs.Converter` does all of it. Open this file first.

For each record, the converter has a hook that reads and one that writes. Reading depends on what is given:
    - bytes: the fast decoder reads them in C (`fast.py`). If it gives up, the bytes are parsed.
    - parsed JSON: a function that cattrs generates reads it with care. It knows the misspelled names, and its
      DecodeError names the place and the fault.
Both make equal records.

Reading
    - Names are PascalCase with the acronyms ID, IDs, LOI, IR and URL. `SurveyId`, `WaveId` and `QuotaId` are
      read as `SurveyID`, `WaveID` and `QuotaID`. Unknown fields are ignored.
    - Scalars are strict: no text for a number, no number for text, no null for either, 64 bits for a whole
      number. There are two exceptions, which lose nothing: `7.0` is a whole number, and `1` is a double.
    - The table in `rules.py` says which fields may be null or missing, and what that means. All other fields
      are required, and the URL of an invite is not empty.
    - AnswerValues: a list of strings (or whole numbers), a string, or null. Commas separate values in all of
      them. Blanks around a value and empty values are dropped.
    - dateTime: ISO 8601 with `T` or a blank, 0 to 7 fractional digits (datetime holds 6, the last is cut), with
      a zone (aware) or without (naive), or `/Date(milliseconds+zone)/` (aware).
    - UTF-8 with or without a BOM, UTF-16 and UTF-32 with one. NaN, Infinity and lone surrogates are refused.

Writing
    - The contract's names, lists for tuples, ISO 8601 with `Z` for UTC. SurveyName and MemberAmount are left
      out if they are None.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cache, partial
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar, cast, get_args, get_origin

import attrs
import msgspec

from sampling_async._contract.errors import DecodeError, InvalidRequestError
from sampling_async._contract.records import RECORDS, Invite, Quotas, Setting, Survey, wire_name
from sampling_async._contract.settings import PartnerSettings
from sampling_async._contract.structs import WireStruct
from sampling_async._json import fast, rules
from sampling_async._json.fast import Part, UnreadReply, WireReply
from sampling_async._json.rules import DRIFTED, NULLS, OMITTED, READ_BY, SCALARS, ZEROS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attrs import AttrsInstance
    from cattrs import Converter

T = TypeVar("T")
_Hook: TypeAlias = "Callable[[Any, Any], Any]"


# --- What the package uses ---------------------------------------------------------------------------------


@cache
def converter() -> Converter:
    """Return the converter of this package. The first call imports cattrs."""
    return make_converter()


def warm_up() -> None:
    """Make what reads the first responses, so that none of them blocks the event loop for that."""
    fast.warm_up()
    for kind in (Quotas, list[Survey], Invite, WireReply):
        converter().get_structure_hook(kind)


def from_json(cls: type[T], body: bytes | str) -> T:
    """Read a record from the contract's JSON.

    Args:
        cls: The record to read: `Quotas`, `Invite`, `RecontactMembers`, `PartnerSettings` or a part of them.
        body: The JSON as the service sent it, or as `to_json` wrote it.

    Raises:
        DecodeError: The body is not JSON, or breaks the contract; `path` names the place.
        InvalidRequestError: `cls` is a body: the arguments stand in the other order.
    """
    if isinstance(cls, bytes | str):  # the error of cattrs would hold the whole body
        raise InvalidRequestError("from_json takes the class first, then the body: from_json(Quotas, body)")
    return structure(cls, rules.encoded(body))


def to_json(record: object) -> bytes:
    """Write a record, or a list or tuple of records, as the contract's JSON (UTF-8)."""
    return json.dumps(unstructure(record), ensure_ascii=False, separators=(",", ":")).encode()


def structure(cls: type[T], value: Any, at: str = "$") -> T:
    """Read a record from bytes, a `Part` or parsed JSON; `at` is its path in the whole body, for errors."""
    try:
        return converter().structure(value, cls)
    except (DecodeError, ExceptionGroup) as exc:
        path, rule = _fault(exc)
    # Raised outside of the handler: the context of the error would hold the errors above, and they the body.
    raise DecodeError(at + path[1:], rule)


def unstructure(record: object) -> Any:
    return converter().unstructure(record)


def write(record: WireStruct) -> bytes:
    return msgspec.json.encode(unstructure(record))


def write_lines(records: Sequence[T], cls: type[T]) -> bytes:
    """Write Structs of a kind, a line for each, without a line feed at the end."""
    rows = converter().unstructure(records, list.__class_getitem__(cls))
    return msgspec.json.Encoder().encode_lines(rows)[:-1]


plain_json: Final = msgspec.json.encode
"""Write numbers, texts, lists, dicts and Structs as JSON, fast."""


# --- The converter -----------------------------------------------------------------------------------------


def make_converter() -> Converter:
    """Return a new `cattrs.Converter` of all records, under the contract's names.

    Use it if records are parts of attrs classes of your own. Its `structure` reads a record, a list of records
    or an attrs class from parsed JSON, or from bytes of JSON. Its `unstructure` makes what `json.dumps` takes.
    The names of your classes stay as they are. Scalars are as strict in them as in the records: `"false"` is no
    bool, and `7.9` no int.

    Each call makes another converter, so hooks that you register change nothing in the client. Your hook for a
    part of a record counts in the whole record too, which then takes more time to read.

    `structure` raises a `DecodeError` for a record that breaks the contract. In a class of your own, it is
    inside of cattrs' `ClassValidationError`.
    """
    # cattrs takes 15 ms to import, and a process that only matches members needs none.
    from cattrs import Converter  # noqa: PLC0415
    from cattrs.fns import identity  # noqa: PLC0415

    converter = Converter()
    for kind, rule in SCALARS.items():
        converter.register_structure_hook(kind, _scalar_hook(kind, rule))
    # The last factory is asked first.
    converter.register_structure_hook_factory(attrs.has, _class_hook)
    converter.register_structure_hook_factory(_is_wire, _wire_hook)
    converter.register_structure_hook_factory(lambda cls: cls is WireReply, _reply_hook)
    converter.register_structure_hook_factory(lambda cls: cls is PartnerSettings, _settings_hook)
    converter.register_structure_hook_factory(lambda cls: cls in RECORDS, _record_hook)
    converter.register_structure_hook_factory(_is_array, _array_hook)
    converter.register_unstructure_hook(datetime, rules.written_date_time)
    converter.register_unstructure_hook_factory(lambda cls: cls is PartnerSettings, _settings_writer)
    converter.register_unstructure_hook_func(_is_wire, identity)
    converter.register_unstructure_hook_factory(_is_record, _record_writer)
    return converter


def _hook_of(decode: Callable[..., Any], careful: _Hook, *, once: bool = False) -> _Hook:
    """Return a hook that gives bytes to a decoder, and what that gives up to the careful function."""

    def hook(value: Any, cls: Any) -> Any:
        if type(value) is bytes:
            found = decode(value)
            return careful(rules.parse(value, once=once), cls) if found is None else found
        if type(value) is Part:
            found = decode(value.body, value.shared)
            return careful(rules.parse(value.body), cls) if found is None else found
        return careful(value, cls)

    return hook


def _gives_up(*_: object) -> None:
    """Decode nothing: the careful function reads instead."""


def _record_hook(record: type[T], converter: Converter) -> _Hook:
    @cache
    def generated() -> _Hook:
        return _careful_hook(record, converter)

    def careful(value: Any, cls: Any) -> T:
        # Not generated before it is needed: for all records, that takes 12 ms, and most bodies need none.
        found: T = generated()(value, cls)
        return found

    is_fast = _are_ours(_within(record) - {record}, converter)
    return _hook_of(partial(fast.read, record) if is_fast else _gives_up, careful)


def _careful_hook(record: type[T], converter: Converter) -> _Hook:
    from cattrs.gen import make_dict_structure_fn  # noqa: PLC0415  as in `make_converter`

    overrides = _overrides(record, converter)
    plain = make_dict_structure_fn(record, converter, **overrides)
    drifted = [(name, DRIFTED[name]) for name in map(wire_name, overrides) if name in DRIFTED]
    zeros = ZEROS if record is Invite else {}

    def careful(value: Any, cls: Any) -> T:
        if type(value) is not dict:
            raise DecodeError("$", str(rules.mismatch("an object", value)))
        # A misspelled name counts only if the correct one is missing. The body is copied, not changed.
        for name, drift in drifted:
            if name not in value and drift in value:
                value = {**value, name: value[drift]}
        for name, zero in zeros.items():
            if value.get(name) is None:
                value = {**value, name: zero}
        try:
            return plain(value, cls)
        except ExceptionGroup as exc:
            path, rule = _fault(exc)
        raise DecodeError(path, rule)  # outside of the handler, as in `structure`

    return careful


def _record_writer(record: type, converter: Converter) -> Callable[[Any], dict[str, Any]]:
    from cattrs.gen import make_dict_unstructure_fn  # noqa: PLC0415  as in `make_converter`

    return make_dict_unstructure_fn(record, converter, **_overrides(record, converter))


def _overrides(record: type, converter: Converter) -> dict[str, Any]:
    """Return for each attribute what the tables say about it."""
    from cattrs.gen import override  # noqa: PLC0415  as in `make_converter`

    def hook_of(place: tuple[str, str]) -> _Hook | None:
        if place in READ_BY:
            return _rule_hook(READ_BY[place])
        if place in NULLS:
            return lambda value, cls: NULLS[place] if value is None else converter.structure(value, cls)
        return None

    return {
        name: override(
            rename=wire_name(name),
            struct_hook=hook_of((record.__name__, name)),
            omit_if_default=name in OMITTED,
        )
        for name in _types_of(record)
    }


def _array_hook(cls: Any, converter: Converter) -> _Hook:
    item, make = _plain(get_args(cls)[0]), list if get_origin(cls) is list else tuple
    read = converter.get_structure_hook(item)
    is_fast = item not in SCALARS and _are_ours(_within(item), converter)

    def careful(value: Any, _: object) -> Any:
        if type(value) not in rules.ARRAYS:
            raise DecodeError("$", str(rules.mismatch("an array", value)))
        items: list[Any] = []
        try:
            for each in value:
                items.append(read(each, item))  # noqa: PERF401  their number says which one is wrong
            return make(items)
        except Exception as exc:  # noqa: BLE001  a hook of a user may raise anything
            path, rule = _fault(exc)
        raise DecodeError(f"$[{len(items)}]{path[1:]}", rule)

    def decode(body: bytes) -> Any:
        found = fast.read_many(item, body)
        return None if found is None else make(found)

    whole = _hook_of(decode if is_fast else _gives_up, careful)

    def hook(value: Any, _: object) -> Any:
        if type(value) is not Part:
            return whole(value, cls)
        found = fast.read_part(item, value) if is_fast else None
        if found is None:
            # Its bounds are guessed, so it may be no array at all: its items will be read one by one.
            raise DecodeError("$", "expected whole records")
        return found

    return hook


def _settings_hook(_: object, converter: Converter) -> _Hook:
    settings = tuple[Setting, ...]
    read = converter.get_structure_hook(settings)
    return lambda value, _: PartnerSettings(read(value, settings))


def _settings_writer(_: object, converter: Converter) -> Callable[[Any], list[Any]]:
    return lambda settings: [converter.unstructure(each) for each in settings]


def _reply_hook(_: object, converter: Converter) -> _Hook:
    """Return the hook of a bulk response. Its careful function does not read the items."""

    def careful(value: Any, _: object) -> UnreadReply:
        if type(value) is not dict:
            raise DecodeError("$", "expected an object with Invites")
        if type(value.get("Invites")) is not list:
            raise DecodeError("$.Invites", "expected an array of results")
        return UnreadReply(value["Invites"])

    is_fast = _are_ours(_within(Invite), converter)
    return _hook_of(fast.read_bulk if is_fast else _gives_up, careful, once=True)


def _wire_hook(cls: type[T]) -> _Hook:
    def careful(value: Any, _: object) -> T:
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError:
            pass
        raise DecodeError("$", f"expected {cls.__name__}")  # the text of msgspec's error may show a value

    return _hook_of(partial(fast.read, cls), careful)


def _class_hook(cls: type[AttrsInstance], converter: Converter) -> _Hook:
    """Return the hook of an attrs class that is none of our records."""
    return _hook_of(_gives_up, converter.gen_structure_attrs_fromdict(cls))


def _scalar_hook(kind: type, rule: Callable[[Any], Any]) -> _Hook:
    read = _rule_hook(rule)

    def hook(value: Any, cls: Any) -> Any:
        if cls is kind:
            return read(value, cls)
        # A class that derives from a scalar, such as a StrEnum, is made of one.
        return value if type(value) is cls else cls(read(value, cls))

    return hook


def _rule_hook(rule: Callable[[Any], Any]) -> _Hook:
    def hook(value: Any, _: object) -> Any:
        try:
            return rule(value)
        except rules.Mismatch as exc:
            fault = str(exc)
        raise DecodeError("$", fault)

    return hook


def _fault(error: Exception) -> tuple[str, str]:
    """Return the path and the rule of an error that a hook raised."""
    from cattrs.errors import AttributeValidationNote, IterableValidationNote  # noqa: PLC0415  as above

    path = "$"
    # cattrs makes a group of errors for each class, and notes at each error where it was. The first counts.
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
        for note in getattr(error, "__notes__", ()):
            if isinstance(note, AttributeValidationNote):
                path += f".{wire_name(note.name)}"
            elif isinstance(note, IterableValidationNote):
                path += f"[{note.index}]"
    if isinstance(error, DecodeError):
        return path + error.path[1:], error.rule
    return path, rules.MISSING if isinstance(error, KeyError) else str(error)


# --- Kinds of types ----------------------------------------------------------------------------------------


def _is_record(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, RECORDS)


def _is_wire(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, WireStruct)


def _is_array(cls: Any) -> bool:
    """Return whether a type is a list, a tuple of any length or a Sequence of what the converter knows."""
    origin, (item, *others) = get_origin(cls), get_args(cls) or (None,)
    item = _plain(item)
    is_array = origin in {list, Sequence} or (origin is tuple and others == [...])
    return is_array and isinstance(item, type) and (item in SCALARS or item in RECORDS or _is_wire(item))


def _types_of(record: type) -> dict[str, Any]:
    attributes = attrs.fields(attrs.resolve_types(cast("type[AttrsInstance]", record)))
    return {attribute.name: attribute.type for attribute in attributes}


def _plain(hint: Any) -> Any:
    """Return a type without annotations. Who resolves the types of a class first decides whether it has any."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _within(hint: Any) -> set[Any]:
    """Return a type and those inside of it, at any depth."""
    hint = _plain(hint)
    args = [each for each in get_args(hint) if each not in (NoneType, ...)]
    parts = _types_of(hint).values() if hint in RECORDS else args
    # cattrs itself reads a union.
    return (set() if NoneType in get_args(hint) else {hint}).union(*map(_within, parts))


def _are_ours(types: Iterable[Any], converter: Converter) -> bool:
    """Return whether the hooks of types are from here. The fast decoder knows nothing of others."""
    return all(getattr(converter.get_structure_hook(each), "__module__", "") == __name__ for each in types)


# --- The records as pydantic sees them ---------------------------------------------------------------------


def describe_to_pydantic() -> None:
    """Let pydantic read and write the records of the contract."""
    for record in RECORDS:
        record.__get_pydantic_core_schema__ = classmethod(_core_schema)


def _core_schema(record: type[AttrsInstance], _source: object, handler: Any) -> Any:
    from pydantic_core import PydanticCustomError, core_schema  # noqa: PLC0415  whoever calls this has it

    def validated(value: Any, _inner: object) -> Any:
        if isinstance(value, record):
            return value
        try:
            return structure(record, value)
        except DecodeError as exc:
            # The text of a template may not hold braces.
            raise PydanticCustomError("sampling_record", "{rule}", {"rule": str(exc)}) from None

    attrs.resolve_types(record)
    fields = {
        wire_name(each.name): core_schema.typed_dict_field(
            handler.generate_schema(each.type), required=each.default is attrs.NOTHING
        )
        for each in attrs.fields(record)
    }
    # The inner schema only describes: JSON Schema, and with it OpenAPI, is made from it.
    described = core_schema.typed_dict_schema(fields, ref=f"{record.__module__}.{record.__qualname__}")
    return core_schema.no_info_wrap_validator_function(
        validated, described, serialization=core_schema.plain_serializer_function_ser_schema(unstructure)
    )
