"""Arrow tables, which data frames read, and the small tables that notebooks show.

pyarrow is an extra without types: it is imported when it is used.
"""

from __future__ import annotations

from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from sampling_async._contract.extras import install

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ROWS: Final = 10_000
"""How many rows the batches of a table have."""


def arrow() -> Any:
    """Import pyarrow; an ImportError says what to install."""
    try:
        return import_module("pyarrow")
    except ModuleNotFoundError as exc:
        raise ImportError(f"pyarrow is missing: {install('panel')}", name=exc.name) from exc


def utc_times() -> Any:
    """Return the type of a column of times with a zone."""
    return arrow().timestamp("us", tz="UTC")


def batch_of(schema: Any, columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return columns as a RecordBatch."""
    arrays = [_array(columns[each.name], each.type) for each in schema]
    return arrow().RecordBatch.from_arrays(arrays, schema=schema)


def _array(values: Sequence[Any], kind: Any) -> Any:
    pa = arrow()
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([value and in_utf8(value) for value in values], kind)


def in_utf8(text: str) -> str:
    """Return a text without what UTF-8 cannot hold: a member code may have a lone surrogate."""
    return text.encode("utf-8", "replace").decode()


def table_of(schema: Any, batches: Iterable[Any]) -> Any:
    """Return batches as a Table."""
    return arrow().Table.from_batches(batches, schema)


def stream_of(schema: Any, batches: Iterable[Any], requested: object) -> object:
    """Return batches as a stream of the Arrow C interface, which reads one after the other."""
    return arrow().RecordBatchReader.from_batches(schema, batches).__arrow_c_stream__(requested)


def html_table(title: str, head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a table for a notebook; texts are escaped, and numbers stand at the right."""
    names = "".join(f"<th>{escape(str(each))}</th>" for each in head)
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    caption = f"<caption>{escape(title)}</caption>"
    return f"<table>{caption}<thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f'<td style="text-align: right">{value:,}</td>'
    return f'<td style="text-align: left">{escape(in_utf8(str(value)))}</td>'
