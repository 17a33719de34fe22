"""The records as pydantic sees them: read and written by the codec, so in the contract's names.

pydantic asks a class what it is, so FastAPI can take and return records. Nothing of pydantic is imported
before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from sampling_async._contract.errors import DecodeError
from sampling_async._contract.records import RECORDS, wire_name
from sampling_async._json.codec import structure, unstructure

if TYPE_CHECKING:
    from attrs import AttrsInstance


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
