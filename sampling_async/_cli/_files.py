"""Files that options name: where they may be, currency rates, age bands, names of questions and answers."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from io import StringIO
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sampling_async import CurrencyRates, InvalidRequestError
from sampling_async._contract.checks import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
# The ending of a file of age bands beside a panel: `panel.bands.json` beside `panel.parquet`.
BANDS_SUFFIX: Final = ".bands.json"
_MOST_BYTES: Final = 2**26
_FORMS: Final = '{"1": 1, "9": {"rate": 0.0064, "name": "JPY"}}, or lines such as 9,0.0064,JPY'
RATES_HELP: Final = (
    "A JSON or CSV file with the worth of one unit of each currency, and optionally its name: "
    f"{_FORMS}. Needed to compare prices in several currencies."
)


def text_in(file: Path) -> str:
    """Return the text of a small file, without a byte order mark."""
    try:
        with file.open("rb") as opened:
            body = opened.read(_MOST_BYTES + 1)
        text = body.decode("utf-8-sig")
    except OSError as exc:
        raise InvalidRequestError(f"{file}: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{file} is not UTF-8") from None
    if len(body) > _MOST_BYTES:
        raise InvalidRequestError(f"{file} is larger than {_MOST_BYTES >> 20} MB")
    return text


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. If it has a name twice, it is refused: one of the values would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise InvalidRequestError(f"{twice!r:.30} is there twice")
    return found


def _parsed(file: Path | None, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequestError(f"{file} is not JSON: {exc}") from None


def read_rates(file: Path | None) -> CurrencyRates | None:
    """Return the rates and names of a file; None without one."""
    if file is None:
        return None
    text = text_in(file)
    is_json = text.lstrip().startswith("{")
    rows = _of_json(_parsed(file, text)) if is_json else _of_csv(text)
    rates: dict[int, float] = {}
    names: dict[int, str] = {}
    twice: list[int] = []
    try:
        for currency, rate, name in rows:
            currency_id = _number(int, currency)
            if currency_id in rates:
                twice.append(currency_id)
            rates[currency_id] = _number(float, rate)
            if name:
                names[currency_id] = name
    except (ValueError, OverflowError, TypeError, KeyError, AttributeError, csv.Error):
        raise InvalidRequestError(
            f"{file}: currency rates must be a JSON object or CSV of currency IDs, each with the worth of one"
            f" unit and optionally its name: {_FORMS}"
        ) from None
    if twice:
        raise InvalidRequestError(f"{file}: currency {twice[0]} is there twice")
    if not rates:
        raise InvalidRequestError(f"{file} has no currency rates: {_FORMS}")
    try:
        return CurrencyRates(rates, names=names)
    except InvalidRequestError as exc:
        raise InvalidRequestError(f"{file}: {exc}") from None


def _number(kind: Callable[[Any], T], given: Any) -> T:
    """Return a number of a file. Python alone takes 1_5 for 15, and true for 1."""
    if isinstance(given, bool) or "_" in str(given):
        raise ValueError(given)
    return kind(given)


def _of_json(document: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for currency, given in document.items():
        yield (
            (currency, given["rate"], given.get("name")) if isinstance(given, dict) else (currency, given, None)
        )


def _of_csv(text: str) -> Iterator[tuple[str, Any, Any]]:
    for at, row in enumerate(row for row in csv.reader(text.splitlines(), strict=True) if any(row)):
        currency, rate, name, *more = (*map(str.strip, row), *("",) * (3 - len(row)))
        if more:  # such as the rest of 0,0064
            raise ValueError(row)
        # A first line without a rate names the columns.
        if at or rate[:1] in ("", *"0123456789.+-"):
            yield currency, rate, name


def bands_file(panel: Path) -> Path:
    return panel.with_name(panel.stem + BANDS_SUFFIX) if panel.name else Path(BANDS_SUFFIX)


def check_place(option: str, output: Path) -> None:
    if output.is_dir():
        raise InvalidRequestError(f"{option} {output} is a folder")
    if not output.absolute().parent.is_dir():
        raise InvalidRequestError(f"{option} {output}: the folder does not exist")


def read_bands(file: Path) -> dict[int, tuple[int, int]]:
    read = _parsed(file, text_in(file))
    try:
        bands: dict[int, tuple[int, int]] | None = {
            _number(int, id_): (_number(index, first), _number(index, last))
            for id_, (first, last) in read.items()
        }
    except (ValueError, OverflowError, TypeError, AttributeError):
        bands = None
    if bands is None or len(bands) < len(read):  # an ID stands there twice, as 7 and 07
        raise InvalidRequestError(
            f"{file}: age bands must be a JSON object of answer IDs, each with first and last year, "
            '{"2006352": [18, 24]}'
        )
    return bands


# --- Names of questions and answers


_LABEL_COLUMNS: Final = ("question", "question name", "answer", "answer name")
_IDS: Final = re.compile(r"([0-9]+|device_type|region) [0-9]*")
_LABEL_FORM: Final = '{"1001007": {"name": "Gender", "answers": {"2000246": "Female"}}}'
LABELS_HELP: Final = (
    f"A JSON or CSV file with names of questions and answers, shown in place of IDs: {_LABEL_FORM}, or rows"
    f" under the columns {', '.join(_LABEL_COLUMNS)}."
)


def read_labels(file: Path | None) -> dict[tuple[str, str], str]:
    """Return the names that a file has, by question and answer; that of a question by it and an empty text."""
    labels: dict[tuple[str, str], str] = {}
    text = "{}" if file is None else text_in(file).lstrip()
    is_json = text.startswith(("{", "["))
    rows = _labels_of_json(_parsed(file, text)) if is_json else _labels_of_csv(text)
    try:
        for place, question, answer, name in rows:
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


def _labels_of_json(document: object) -> Iterator[tuple[str, str, str, Any]]:
    """Yield a place in the file, a question, an answer or an empty text, and the name."""
    for question, given in _object(document, "").items():
        of = f", question {question!r:.30}"
        known = _object(given, of)
        yield ", ", question, "", known.get("name")
        for answer, name in _object(known.get("answers", {}), f"{of}, answers").items():
            yield ", ", question, answer, name


def _object(value: Any, of: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{of} must be a JSON object, as in {_LABEL_FORM}, not {shown(value)}")  # noqa: TRY004
    return value


def _labels_of_csv(text: str) -> Iterator[tuple[str, str, str, Any]]:
    """Yield rows of CSV. The columns are found by their names, such as Question_ID."""
    # Where a comma is in numbers, spreadsheets write semicolons between columns.
    mark = max(",;\t", key=text.partition("\n")[0].count)
    rows = csv.reader(StringIO(text, newline=""), strict=True, delimiter=mark)
    wanted = [each.replace(" ", "") for each in _LABEL_COLUMNS]
    try:
        names = ["".join(filter(str.isalnum, each.casefold())).removesuffix("id") for each in next(rows, ())]
        if any(names.count(each) != 1 for each in wanted):
            raise ValueError(f", row 1: there must be the columns {', '.join(_LABEL_COLUMNS)}, each once")
        for number, row in enumerate(rows, 2):
            cells = dict(zip(names, map(str.strip, row), strict=False))
            question, name, answer, answer_name = (cells.get(each, "") for each in wanted)
            if any(cells.values()):
                yield f", row {number}: ", question, "", name
                yield f", row {number}: ", question, answer, answer_name if answer else None
    except csv.Error as exc:
        raise ValueError(f", line {rows.line_num}: this is not CSV: {exc}") from None
