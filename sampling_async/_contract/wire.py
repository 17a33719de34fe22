"""Names and numbers as the contract writes them."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

INT64_MAX: Final = 2**63 - 1

Int64: TypeAlias = Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)]
"""A whole number. Whoever creates a record may give any int: only msgspec heeds the bounds, when it reads."""

Double: TypeAlias = Annotated[float, Meta(gt=-(2.0**63), lt=2.0**63)]
"""A number with or without a fraction, likewise."""

Link: TypeAlias = Annotated[str, Meta(min_length=1)]
"""A text that is not empty, likewise."""

_ACRONYMS: Final = {"id": "ID", "ids": "IDs", "loi": "LOI", "ir": "IR", "url": "URL"}


def wire_name(attribute: str) -> str:
    """Return the contract's name of an attribute: `SubQuotaID` for `sub_quota_id`."""
    return "".join(_ACRONYMS.get(word, word.capitalize()) for word in attribute.split("_"))
