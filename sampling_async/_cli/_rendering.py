"""Output: JSON lines in the contract's own names, and tables, lines and progress for a terminal.

Text from the service is never read as markup (`[pid]` is a placeholder, not a style), and control characters,
which a terminal would obey, are replaced.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import stat
import sys
from collections.abc import Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from decimal import Decimal
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Final

from attrs import define, fields
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from sampling_async import to_json
from sampling_async._contract.records import wire_name
from sampling_async._private_files import written_whole

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
    from pathlib import Path

_ROOM: Final = 80  # columns in which the numbers of all tables stand whole
_WORDS: Final = frozenset({"Figure", "Devices", "Recontact", "last 5 to 10 minutes"})


@define
class Wanted:
    """What the options --json, --csv and --quiet of the command say."""

    json: bool = False
    csv: bool = False
    quiet: bool = False
    errors_as_json: bool = False  # whether --json is among the arguments, even if they cannot be parsed
    columns: tuple[str, ...] = ()  # of the table of CSV that is being written

    def set(self, *, json: bool, csv: bool, quiet: bool) -> None:
        self.json, self.csv, self.quiet, self.columns = json, csv, quiet, ()


wanted: Final = Wanted()


def as_lines() -> bool:
    """Return whether to write lines of JSON or CSV: if the user wants them, or stdout is not a terminal."""
    return wanted.json or wanted.csv or not sys.stdout.isatty()


def emit(line: bytes) -> None:
    """Write a line to stdout and flush it, in UTF-8 whatever the locale."""
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def emit_all(records: Iterable[object]) -> None:
    """Write records as lines of the contract's JSON."""
    for record in records:
        emit_json(json.loads(to_json(record)))


def emit_json(value: object) -> None:
    """Write a value as a line of JSON; on a terminal in ASCII, so that no text can control the terminal.

    With --csv, it is a row of CSV instead: lists become texts with blanks between the items.
    """
    if wanted.csv:
        assert isinstance(value, Mapping)
        _emit_names(value)
        _emit_cells(_cell(value.get(name)) for name in wanted.columns)
        return
    text = json.dumps(value, ensure_ascii=sys.stdout.isatty(), separators=(",", ":"))
    emit(text.encode(errors="backslashreplace"))  # half of a surrogate pair is an escape of JSON then


def emit_head(names: Iterable[str]) -> None:
    """With --csv, write the line of names if there was no row: so an empty result can be read too."""
    if wanted.csv:
        _emit_names(map(wire_name, names))


def emit_rows(rows: Iterable[Mapping[str, Any]], names: Iterable[str]) -> None:
    """Write rows that have these columns."""
    for row in rows:
        emit_json(row)
    emit_head(names)


def _emit_names(names: Iterable[str]) -> None:
    if not wanted.columns:
        wanted.columns = tuple(names)
        _emit_cells(wanted.columns)


def _emit_cells(cells: Iterable[str]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    line = text.getvalue()
    emit((plain(line).plain if sys.stdout.isatty() else line).encode())


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return " ".join(map(_cell, value))
    return json.dumps(value)


def fields_of(record: Any, names: str = "") -> dict[str, Any]:
    """Return attributes of a record for JSON, by the contract's names; times are ISO 8601, amounts floats."""
    return {
        wire_name(name): jsonable(getattr(record, name)) for name in names.split() or names_of(type(record))
    }


def names_of(cls: type[Any]) -> list[str]:
    return [each.name for each in fields(cls)]


def jsonable(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    return dict(value) if isinstance(value, Mapping) else value


def screen() -> Console:
    return Console(highlight=False)


def errors() -> Console:
    """Return a rich console on stderr, for warnings, which --quiet does not silence."""
    return Console(stderr=True, highlight=False)


def stderr_console() -> Console:
    """Return a rich console on stderr for progress, notes and summaries: silent with --quiet."""
    return Console(stderr=True, highlight=False, quiet=wanted.quiet)


def print_error(message: str, code: int, **known: object) -> None:
    """Print a line on stderr that says what went wrong: JSON if --json was given."""
    line = f"sampling-async: {message}"
    if wanted.errors_as_json:
        more = {name: value for name, value in known.items() if value is not None}
        line = json.dumps({"Error": message, "ExitCode": code, **more})
    sys.stderr.write(f"{line}\n")


def note(text: str) -> None:
    """Print a note on stderr, unless --quiet was given. It is never cut, so a command in it can be copied."""
    stderr_console().print(plain(text), soft_wrap=True)


def write_page(output: Path, page: str) -> None:
    with written_whole(output) as unfinished:
        unfinished.write_text(page, encoding="utf-8")
    note(f"Page: {output}")


def warn(text: str) -> None:
    errors().print(plain(text, "yellow"), soft_wrap=True)


def plain(text: str | None, style: str = "") -> Text:
    """Return text of the service without markup, with control characters replaced by a visible sign."""
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text or "")
    return Text(shown, style=style)


def new_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Return a table in the house style; columns named in `right` hold numbers."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    # On a narrow terminal numbers are folded too: rich would cut their last digits off.
    has_room = get_terminal_size().columns >= _ROOM
    for column in columns:
        is_number = column in right
        is_whole = is_number and has_room
        table.add_column(
            plain(column), justify="right" if is_number else "left", no_wrap=is_whole, overflow="fold"
        )
    return table


def fitting_table(rows: Sequence[Sequence[str]], columns: Sequence[tuple[str, int]], width: int) -> Table:
    """Return a table that cuts no number: if it is too wide, columns of high numbers are left out, 0 never."""
    widths = [max([len(name), *(len(row[at]) for row in rows)]) + 2 for at, (name, _) in enumerate(columns)]
    # Each width includes two blanks after the cell. The last column does not need them: hence `width + 2`.
    kept = list(range(len(columns)))
    while sum(widths[at] for at in kept) > width + 2 and any(columns[at][1] for at in kept):
        kept.remove(max(kept, key=lambda at: columns[at][1]))
    names = [columns[at][0] for at in kept]
    table = new_table(*names, right=[name for name in names if name not in _WORDS])
    for row in rows:
        table.add_row(*(Text(row[at]) for at in kept))  # not markup
    left_out = [name for name, _ in columns if name not in names]
    if left_out:
        table.caption = plain(f"Not shown, because the terminal is narrow: {', '.join(left_out)}")
        table.caption_justify = "left"
    return table


def print_pairs(pairs: Iterable[tuple[str, Text]]) -> None:
    """Print names and values, one pair a line; if a pair is too long for that, each value under its name."""
    rows = list(pairs)
    width = max((len(name) for name, _ in rows), default=0)
    console = screen()
    fits = all(width + 2 + len(value) <= console.width for _, value in rows)
    for name, value in rows:
        between = f"{name:<{width}}  " if fits else f"{name}\n  "
        # Not wrapped by this program, so a link can be copied.
        console.print(Text(between, style="bold").append_text(value), soft_wrap=True)


def stdout_is_file() -> bool:
    """Return whether stdout leads into a file or the null device, not to a screen or another program."""
    try:
        mode = os.fstat(sys.stdout.fileno()).st_mode
    except (OSError, ValueError):
        # Not a stream of the operating system, as in a test.
        return False
    # A character device that is no terminal is, for example, /dev/null.
    return stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not sys.stdout.isatty())


class RateColumn(ProgressColumn):
    """The number of things done each second, as the average of the whole run."""

    def render(self, task: Task) -> Text:
        seconds = task.elapsed or 0.0
        return Text(f"{task.completed / seconds:,.0f}/s" if seconds > 0 and task.completed else "", "cyan")


def progress_bar(*, total_known: bool, lines: bool = False) -> Progress:
    """Return a progress display on stderr, which disappears at its end."""
    known = (BarColumn(bar_width=24), MofNCompleteColumn(), RateColumn(), TimeRemainingColumn())
    open_ended = (TextColumn("{task.completed:,.0f}"), RateColumn(), TimeElapsedColumn())
    return display(*(known if total_known else open_ended), lines=lines)


def display(*columns: ProgressColumn, lines: bool) -> Progress:
    # Off where lines of JSON may appear on the same screen: directly, or through a pipe.
    console = stderr_console()
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *columns,
        console=console,
        transient=True,
        disable=console.quiet or not console.is_terminal or (lines and not stdout_is_file()),
        redirect_stdout=False,
        redirect_stderr=True,
    )


@asynccontextmanager
async def redrawn(draw: Callable[[], object], every: float) -> AsyncGenerator[None]:
    """Call a function now, and again and again while a block is open."""

    async def repeat() -> None:
        while True:
            draw()
            await asyncio.sleep(every)

    # A plain task: a task group would raise the failures of the block in a group.
    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        failure = None if task.cancelled() else task.exception()
    if failure is not None:  # of the block itself, that would matter more
        raise failure
