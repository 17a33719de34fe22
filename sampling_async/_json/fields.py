"""The table: where the fields of the wire differ from those of the records.

The rule for names is `wire_name` in `_contract/records.py`. A field that is in no table below has the name and
the type of its attribute. If it may be missing, its attribute has a default. Its null is None if the type
allows None, and refused if it does not. Both decoders read these tables.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from sampling_async._json.rules import answer_values, boolean, date_time, link, number, text, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

SCALARS: Final[dict[type, Callable[[Any], Any]]] = {
    int: whole_number,
    float: number,
    str: text,
    bool: boolean,
    datetime: date_time,
}
"""The rule that reads each type."""

READ_BY: Final[dict[tuple[str, str], Callable[[Any], Any]]] = {
    ("Invite", "url"): link,
    ("QuestionAndAnswers", "answer_values"): answer_values,
}
"""Rules of single fields, by record and attribute."""

DRIFTED: Final = {"SurveyID": "SurveyId", "WaveID": "WaveId", "QuotaID": "QuotaId"}
"""Names, each with the misspelling that some services use. It counts if the name itself is not there."""

NULLS: Final[dict[tuple[str, str], Any]] = {
    ("QuestionAndAnswers", "answer_ids"): (),
    ("QuestionAndAnswers", "is_routable"): False,
    ("RecontactMembers", "member_codes"): (),
    ("Setting", "description"): "",
    ("Survey", "survey_wave_exclusions"): (),
    ("SurveyWaveExclusion", "participation_status_ids"): (),
}
"""What a null stands for, by record and attribute."""

ZEROS: Final = {"WaveID": 0, "PartnerAmount": 0.0, "LOI": 0, "IR": 0}
"""What stands for these fields of an invite where they are null or missing: its link is valid without them."""

OMITTED: Final = frozenset({"survey_name", "member_amount"})
"""Attributes that are not written if they are None."""


def spelled(fields: dict[str, Any], name: str) -> Any:
    """Return the value of a field by its name, or by the misspelling if the name is not there; else None."""
    return fields.get(name, fields.get(DRIFTED.get(name, name)))


def zeros(invite: dict[str, Any]) -> str | None:
    """Return the fields that an invite, as parsed JSON, lacks and that are read as 0; None if it has all."""
    names = [name for name in ZEROS if spelled(invite, name) is None]
    return f"the invite has no {', '.join(names)}: 0 stands for it" if names else None
