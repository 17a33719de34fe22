"""Read the names of questions and answers from a file, into which an operator's reference data were saved."""

from __future__ import annotations

import csv
import json
import re
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from sampling_async import InvalidRequestError
from sampling_async._cli._files import text_in
from sampling_async._contract.checks import shown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_COLUMNS: Final = ("question", "question name", "answer", "answer name")
_IDS: Final = re.compile(r"([0-9]+|device_type|region) [0-9]*")
_FORM: Final = '{"1001007": {"name": "Gender", "answers": {"2000246": "Female"}}}'
LABELS_HELP: Final = (
    f"A JSON or CSV file with names of questions and answers, shown in place of IDs: {_FORM}, or rows under"
    f" the columns {', '.join(_COLUMNS)}."
)


def read_labels(file: Path | None) -> dict[tuple[str, str], str]:
    """Return the names that a file has, by question and answer; that of a question by it and an empty text."""
    labels: dict[tuple[str, str], str] = {}
    text = "{}" if file is None else text_in(file).lstrip()
    try:
        for place, question, answer, name in (_json if text.startswith(("{", "[")) else _csv)(text):
            of = f"{place}question {question!r:.30}" + f", answer {answer!r:.30}" * bool(answer)
            _put(labels, question, answer, name, of)
    except ValueError as exc:
        raise InvalidRequestError(f"{file}{exc}") from None
    return labels


def _put(labels: dict[tuple[str, str], str], question: str, answer: str, name: object, of: str) -> None:
    if not _IDS.fullmatch(f"{question} {answer}"):
        raise ValueError(f"{of}: an ID must have digits only (or be the column device_type or region)")
    if not isinstance(name, str | None):
        raise ValueError(f"{of}: the name must be a text, not {shown(name)}")  # noqa: TRY004
    if name and labels.setdefault((question, answer), name) != name:
        raise ValueError(f"{of} has two names: {shown(labels[question, answer])} and {shown(name)}")


def _json(text: str) -> Iterator[tuple[str, str, str, Any]]:
    """Yield a place in the file, a question, an answer or an empty text, and the name."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f" is not JSON: {exc}") from None
    for question, given in _object(document, "").items():
        of = f", question {question!r:.30}"
        known = _object(given, of)
        yield ", ", question, "", known.get("name")
        for answer, name in _object(known.get("answers", {}), f"{of}, answers").items():
            yield ", ", question, answer, name


def _object(value: Any, of: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{of} must be a JSON object, as in {_FORM}, not {shown(value)}")  # noqa: TRY004
    return value


def _csv(text: str) -> Iterator[tuple[str, str, str, Any]]:
    """Yield rows of CSV. The columns are found by their names, such as Question_ID."""
    # Where a comma is in numbers, spreadsheets write semicolons between columns.
    mark = max(",;\t", key=text.partition("\n")[0].count)
    rows = csv.reader(StringIO(text, newline=""), strict=True, delimiter=mark)
    wanted = [each.replace(" ", "") for each in _COLUMNS]
    try:
        names = ["".join(filter(str.isalnum, each.casefold())).removesuffix("id") for each in next(rows, ())]
        if any(names.count(each) != 1 for each in wanted):
            raise ValueError(f", row 1: there must be the columns {', '.join(_COLUMNS)}, each once")
        for number, row in enumerate(rows, 2):
            cells = dict(zip(names, map(str.strip, row), strict=False))
            question, name, answer, answer_name = (cells.get(each, "") for each in wanted)
            if any(cells.values()):
                yield f", row {number}: ", question, "", name
                yield f", row {number}: ", question, answer, answer_name if answer else None
    except csv.Error as exc:
        raise ValueError(f", line {rows.line_num}: this is not CSV: {exc}") from None
