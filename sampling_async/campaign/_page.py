"""What the sections of a page are made of: tables, lists and legends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from attrs import frozen

from sampling_async.campaign._markup import Html, count, join, tag

Row: TypeAlias = Sequence[str]
"""The cells of a row, from the left."""

_TEXTS: Final = {kind: kind for kind in "bwxt"}  # a cell is a number else: most are, and a page has thousands


@frozen
class Column:
    """A column of a table.

    Attributes:
        heading: What is above it.
        kind: The class of its cells: `n` numbers, `b` bars, `t` times, `w` and `x` texts, `x` the longer ones.
    """

    heading: str
    kind: str = ""


def section(title: str, *content: str) -> Html:
    """Return a section with its heading."""
    return tag("section", tag("h2", title), *content)


def nothing(text: str) -> Html:
    """Return the sentence that stands where there is nothing to show."""
    return tag("p", text, class_="soft")


def terms(kind: str, entries: Iterable[tuple[str, str]]) -> Html:
    """Return terms, each with what it is."""
    return tag("dl", *(tag("div", tag("dt", term), tag("dd", text)) for term, text in entries), class_=kind)


def key(entries: Iterable[Html]) -> Html:
    """Return a legend."""
    return tag("ul", *(tag("li", entry) for entry in entries), class_="key")


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Iterable[Row],
    *,
    foot: Row | None = None,
    kind: str | None = None,
) -> Html:
    """Return a table that scrolls in its own box where it is wider than the page.

    Args:
        caption: What it shows.
        columns: Its columns.
        rows: Their cells; the first one names the row.
        foot: The row of sums.
        kind: Its class.
    """
    headings = tag(
        "tr", *(tag("th", *_heading(column), scope="col", class_=column.kind or None) for column in columns)
    )
    body = (_row(columns, row) for row in rows)
    sums = tag("tfoot", _row(columns, foot)) if foot else ""
    content = tag(
        "table", tag("caption", caption), tag("thead", headings), tag("tbody", *body), sums, class_=kind
    )
    return tag("div", content, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _heading(column: Column) -> Iterable[str]:
    # A bar is the picture of the number beside it.
    yield column.heading or Html('<span class="unseen">Bar</span>')


def _row(columns: Sequence[Column], cells: Row) -> Html:
    shown = (
        tag("th", cell, scope="row", class_=column.kind or None)
        if not place
        else tag("td", cell, class_=_TEXTS.get(column.kind))
        for place, (column, cell) in enumerate(zip(columns, cells, strict=True))
    )
    return join(Html("\n"), tag("tr", *shown))


def number_of(number: int, noun: str) -> str:
    """Return a number with its noun: `1 run`, `2 runs`."""
    return f"{count(number)} {noun}" if number == 1 else f"{count(number)} {noun}s"
