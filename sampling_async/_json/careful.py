"""The careful decoder: cattrs reads known misspellings too, and errors name the place and the fault."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, get_args, get_origin

import attrs
from cattrs import BaseValidationError, Converter
from cattrs.errors import AttributeValidationNote, ClassValidationError, IterableValidationError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from sampling_async._contract.errors import DecodeError
from sampling_async._contract.records import RECORDS, Invite, QuestionAndAnswers, Setting, wire_name
from sampling_async._contract.settings import PartnerSettings
from sampling_async._json.rules import (
    DRIFTED,
    MISSING,
    NULLS,
    ZEROS,
    Mismatch,
    answer_values,
    boolean,
    date_time,
    link,
    mismatch,
    number,
    text,
    whole_number,
    written_date_time,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from attrs import AttrsInstance

T = TypeVar("T")

_OMITTED_WHEN_NONE: Final = {"survey_name", "member_amount"}


def structure(cls: type[T], value: Any, at: str) -> T:
    try:
        return _converter().structure(value, cls)
    except (BaseValidationError, Mismatch) as exc:
        path, rule = _locate(exc, at)
    # Raised outside of the handler: the context of the error would hold the errors above, and they the body.
    raise DecodeError(path, rule)


def unstructure(record: object) -> Any:
    return _converter().unstructure(record)


def _locate(error: Exception, at: str) -> tuple[str, str]:
    # cattrs nests one group of exceptions for each level of the body. Each step goes into the first exception
    # and adds its field or index to the path.
    while isinstance(error, ClassValidationError | IterableValidationError):
        inner, note = error.group_exceptions()[0][0]
        at += f".{wire_name(note.name)}" if isinstance(note, AttributeValidationNote) else f"[{note.index}]"
        error = inner
    if isinstance(error, KeyError):
        return at, MISSING
    return at, str(error)


@cache
def _converter() -> Converter:
    converter = Converter(detailed_validation=True)
    scalars = {int: whole_number, float: number, str: text, bool: boolean, datetime: date_time}
    for scalar, rule in scalars.items():
        converter.register_structure_hook(scalar, _hook(rule))
    converter.register_unstructure_hook(datetime, written_date_time)
    # The order matters: a record's hook looks up the hooks of its fields when it is made. So scalars and tuples
    # are first, and `RECORDS` lists inner records before outer ones.
    converter.register_structure_hook_factory(_is_tuple, _tuple_hook)
    for record in RECORDS:
        converter.register_structure_hook(record, _record_hook(record, converter))
        converter.register_unstructure_hook(record, _record_writer(record, converter))
    settings = converter.get_structure_hook(tuple[Setting, ...])
    converter.register_structure_hook(
        PartnerSettings, lambda value, _: PartnerSettings(settings(value, tuple[Setting, ...]))
    )
    converter.register_unstructure_hook(PartnerSettings, lambda value: converter.unstructure(list(value)))
    return converter


def _record_hook(record: type[T], converter: Converter) -> Callable[[Any, Any], T]:
    attributes = attrs.fields(attrs.resolve_types(cast("type[AttrsInstance]", record)))
    names = [wire_name(attribute.name) for attribute in attributes]
    drifted = [(name, DRIFTED[name]) for name in names if name in DRIFTED]
    fallbacks = ZEROS if record is Invite else {}
    plain = make_dict_structure_fn(
        record,
        converter,
        **{  # type: ignore[arg-type]
            attribute.name: override(rename=name, struct_hook=_special(record, attribute.name, converter))
            for attribute, name in zip(attributes, names, strict=True)
        },
    )

    def hook(value: Any, cls: Any) -> T:
        if type(value) is not dict:
            raise mismatch("an object", value)
        # A misspelled name counts only if the correct one is missing. The body is copied, not changed.
        for name, drift in drifted:
            if name not in value and drift in value:
                value = {**value, name: value[drift]}
        for name, fallback in fallbacks.items():
            if value.get(name) is None:
                value = {**value, name: fallback}
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
            raise mismatch("an array", value)
        return tuple(hook(value, items))

    return structure_tuple


def _hook(rule: Callable[[Any], T]) -> Callable[[Any, Any], T]:
    return lambda value, _: rule(value)


def _special(record: type, attribute: str, converter: Converter) -> Callable[[Any, Any], Any] | None:
    """Return the hook of an attribute that is not read like its type, or None if it is."""
    if (record, attribute) == (QuestionAndAnswers, "answer_values"):
        return _hook(answer_values)
    if (record, attribute) == (Invite, "url"):
        return _hook(link)
    place = record.__name__, attribute
    if place not in NULLS:
        return None
    return lambda value, cls: NULLS[place] if value is None else converter.structure(value, cls)
