"""The file of `--currency-rates`: what one unit of each currency is worth, and what it is called."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING, Any, Final

from sampling_async import CurrencyRates, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FORMS: Final = '{"1": 1, "9": {"rate": 0.0064, "name": "JPY"}}, or lines such as 9,0.0064,JPY'
HELP: Final = (
    "A JSON or CSV file with the worth of one unit of each currency, and optionally its name: "
    f"{_FORMS}. Needed to compare prices in several currencies."
)


def read_rates(file: Path | None) -> CurrencyRates | None:
    """Return the rates and names of a file; None without one."""
    if file is None:
        return None
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as exc:
        raise InvalidRequestError(f"{file}: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{file} is not UTF-8") from None
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
