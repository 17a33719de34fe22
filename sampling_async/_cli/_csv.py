"""Rows as CSV."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class CSVRows:
    """Rows of one table. The first one says what the columns are."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] | None = None

    def lines(self, row: Mapping[str, object]) -> Iterator[str]:
        """Yield the line of a row, and before the first one that of the names."""
        yield from self.head(row)
        yield _line([_cell(row.get(name)) for name in self._names or ()])

    def head(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the line of names, if it was not there yet."""
        if self._names is None:
            self._names = tuple(names)
            yield _line(self._names)


def _line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return " ".join(map(_cell, value))
    return json.dumps(value)
