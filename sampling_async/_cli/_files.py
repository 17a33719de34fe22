"""Files that options name: where they may be, currency rates, age bands."""

from __future__ import annotations

import csv
import json
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sampling_async import CurrencyRates, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def read_rates(file: Path | None) -> CurrencyRates | None:
    """Return the rates and names of a file; None without one."""
    if file is None:
        return None
    text = text_in(file)
    rates: dict[int, float] = {}
    names: dict[int, str] = {}
    try:
        for currency, rate, name in _of_json(text) if text.lstrip().startswith("{") else _of_csv(text):
            if int(currency) in rates:
                raise InvalidRequestError(f"{file}: currency {int(currency)} is there twice")
            rates[int(currency)] = float(rate)
            if name:
                names[int(currency)] = name
    except (ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError, csv.Error):
        raise InvalidRequestError(
            f"{file}: currency rates must be a JSON object or CSV of currency IDs, each with the worth of one"
            f" unit and optionally its name: {_FORMS}"
        ) from None
    try:
        return CurrencyRates(rates, names=names)
    except InvalidRequestError as exc:
        raise InvalidRequestError(f"{file}: {exc}") from None


def _of_json(text: str) -> Iterator[tuple[str, Any, Any]]:
    for currency, given in json.loads(text).items():
        yield (
            (currency, given["rate"], given.get("name")) if isinstance(given, dict) else (currency, given, None)
        )


def _of_csv(text: str) -> Iterator[tuple[str, Any, Any]]:
    rows = [row for row in csv.reader(text.splitlines(), strict=True) if any(row)]
    # A first line without numbers names the columns.
    for row in rows[1:] if rows and not rows[0][0].strip().isdecimal() else rows:
        currency, rate, *rest = (cell.strip() for cell in row)
        yield currency, rate, rest[0] if rest else None


def bands_file(panel: Path) -> Path:
    return panel.with_name(panel.stem + BANDS_SUFFIX) if panel.name else Path(BANDS_SUFFIX)


def check_place(option: str, output: Path) -> None:
    if output.is_dir():
        raise InvalidRequestError(f"{option} {output} is a folder")
    if not output.absolute().parent.is_dir():
        raise InvalidRequestError(f"{option} {output}: the folder does not exist")


def read_bands(file: Path) -> dict[int, tuple[int, int]]:
    try:
        read: Any = json.loads(file.read_bytes())
    except OSError as exc:
        raise InvalidRequestError(f"{file}: {exc.strerror}") from None
    except (ValueError, RecursionError):
        read = None
    try:
        return {int(id_): (index(first), index(last)) for id_, (first, last) in read.items()}
    except (ValueError, OverflowError, TypeError, AttributeError):
        raise InvalidRequestError(
            f"{file}: age bands must be a JSON object of answer IDs, each with first and last year, "
            '{"2006352": [18, 24]}'
        ) from None
