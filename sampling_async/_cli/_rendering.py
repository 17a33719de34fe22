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
from contextlib import contextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from attrs import define, evolve, fields
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

from sampling_async import DecodeError, to_json
from sampling_async._cli._tally import code_name
from sampling_async._contract.checks import count_of
from sampling_async._contract.records import QUOTA_COLUMNS, quota_rows, wire_name
from sampling_async._protocol.results import outcome_columns

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from sampling_async import InviteOutcome, OutcomeStatus, OutcomeStream, Quota, Quotas, Setting, Survey
    from sampling_async import Progress as StreamProgress
    from sampling_async._cli._tally import Tally

STYLES: Final[dict[OutcomeStatus, str]] = {
    "invited": "green",
    "rejected": "yellow",
    "not_sent": "magenta",
    "unknown": "red",
}
_SURVEY_COLUMNS: Final = (
    ("Survey", 0),
    ("Wave", 8),
    ("LOI", 3),
    ("IR", 4),
    ("Price", 2),
    ("Cur", 7),
    ("Quotas", 1),
    ("Remaining", 0),
    ("Devices", 6),
    ("Recontact", 5),
)
_WORDS: Final = frozenset({"Figure", "Devices", "Recontact", "last 5 to 10 minutes"})
_MOMENT: Final = 0.1


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
    emit(json.dumps(value, ensure_ascii=sys.stdout.isatty(), separators=(",", ":")).encode())


def emit_head(names: Iterable[str]) -> None:
    """With --csv, write the line of names if there was no row: so an empty result can be read too."""
    if wanted.csv:
        _emit_names(map(wire_name, names))


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
    names = names or " ".join(each.name for each in fields(type(record)))
    return {wire_name(name): _jsonable(getattr(record, name)) for name in names.split()}


def _jsonable(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    return dict(value) if isinstance(value, Mapping) else value


def emit_code(member_code: str) -> None:
    if len(member_code.splitlines()) > 1:
        raise DecodeError(
            "$.MemberCodes", "expected member codes of one line each, found one with a line break; use --json"
        )
    emit((plain(member_code).plain if sys.stdout.isatty() else member_code).encode())


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


def warn(text: str) -> None:
    errors().print(plain(text, "yellow"), soft_wrap=True)


def plain(text: str | None, style: str = "") -> Text:
    """Return text of the service without markup, with control characters replaced by a visible sign."""
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text or "")
    return Text(shown, style=style)


def new_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Return a table in the house style; columns named in `right` hold numbers."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        is_number = column in right
        table.add_column(
            plain(column), justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
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


def quotas_table(surveys: Iterable[Survey], width: int, currencies: Mapping[int, str] | None = None) -> Table:
    """Return a table of the inventory, one survey a row, as wide as the terminal at most.

    `currencies` are names by ID.
    """
    names = currencies or {}
    rows = [
        (
            str(survey.survey_id),
            str(survey.wave_id),
            str(survey.loi),
            str(survey.ir),
            f"{survey.price.amount:.2f}",
            names.get(survey.price.currency_id) or str(survey.price.currency_id),
            str(len(survey.quotas)),
            f"{survey.estimated_completes_remaining:,}",
            " ".join(str(device) for device in survey.device_type_ids),
            "yes" if survey.is_survey_recontact else "",
        )
        for survey in surveys
    ]
    return fitting_table(rows, _SURVEY_COLUMNS, width)


def quota_table(quotas: Iterable[Quota]) -> Table:
    numbers = ("Quota", "Required", "Remaining", "Layers", "Sub-quotas")
    table = new_table(*numbers, "Questions", right=numbers)
    for quota in quotas:
        parts = [part for layer in quota.layers for part in layer.sub_quotas]
        questions = {each.question_id: None for part in parts for each in part.questions_and_answers}
        table.add_row(
            str(quota.quota_id),
            f"{quota.completes_required:,}",
            f"{quota.estimated_completes_remaining:,}",
            str(len(quota.layers)),
            str(len(parts)),
            " ".join(str(question) for question in questions),
        )
    return table


def inventory_caption(quotas: Quotas) -> Text:
    count = sum(len(survey.quotas) for survey in quotas.surveys)
    recontact = sum(survey.is_survey_recontact for survey in quotas.surveys)
    return Text(
        f"\n{count_of(len(quotas.surveys), 'survey')} ({recontact} recontact), {count_of(count, 'quota')}, "
        f"country {quotas.country_id}. LOI in minutes, IR in percent, currency and devices by ID.\n"
        "One survey with its quotas: sampling-async quotas --survey ID",
        style="dim",
    )


def emit_quotas(quotas: Quotas, surveys: Iterable[Survey]) -> None:
    """Write a row for each quota."""
    for row in quota_rows(quotas, surveys):
        emit_json({wire_name(name): _jsonable(value) for name, value in row.items()})
    emit_head(QUOTA_COLUMNS)


def masked(setting: Setting) -> Setting:
    return evolve(setting, value="<hidden>") if setting.is_secret and setting.value is not None else setting


def setting_pairs(settings: Iterable[Setting]) -> Iterator[tuple[str, Text]]:
    """Yield names and values of settings; secrets are masked, and values that are not set are dim."""
    for setting in map(masked, settings):
        unset = setting.value is None
        yield plain(setting.name).plain, plain("not set" if unset else setting.value, "dim" if unset else "")


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


def outcome_json(outcome: InviteOutcome) -> dict[str, Any]:
    if wanted.csv:
        return {wire_name(name): values[0] for name, values in outcome_columns([outcome]).items()}
    return {
        "MemberCode": outcome.member_code,
        "QuotaID": outcome.quota_id,
        "Status": outcome.status,
        "Invite": None if outcome.invite is None else json.loads(to_json(outcome.invite)),
        "ResultCode": outcome.result_code,
        "Result": outcome.result,
        "Error": None if outcome.error is None else str(outcome.error),
        "Anomaly": outcome.anomaly,
        "Replayed": outcome.replayed,
    }


def outcome_text(outcome: InviteOutcome, *, with_member: bool = False) -> Text:
    line = Text(f"{outcome.status.replace('_', ' '):<9}", style=STYLES[outcome.status])
    if with_member:
        line.append_text(plain(f" {outcome.member_code:<10}"))
    line.append(f"{outcome.quota_id:>10}  ", style="bold")
    if outcome.invite is not None:
        invite = outcome.invite
        line.append(f"{invite.partner_amount:.2f}  {invite.loi} min  ").append_text(plain(invite.url, "cyan"))
    elif outcome.result_code is None and outcome.error is not None:
        line.append_text(plain(str(outcome.error)))
    else:
        line.append_text(plain(code_name(outcome.result_code, outcome.result)))
    if outcome.anomaly:
        line.append_text(plain(f"  ! {outcome.anomaly}", "red"))
    return line


def summary(tally: Tally) -> Iterable[Text]:
    """Yield the lines that close a fan-out: counts by status and by result code, failures, oddities."""
    yield Text(tally.in_words(), style="bold")
    width = len(f"{tally.total:,}")
    for (code, result), count in tally.codes.most_common():
        # IDs without a result code are listed below, by their failures.
        if code is None and tally.failures:
            continue
        yield Text(f"  {count:>{width},}  ").append_text(plain(code_name(code, result)))
    for text, count in tally.failures.most_common():
        yield Text(f"  {count:>{width},}  ", style="red").append_text(plain(text, "red"))
    if tally.statuses["not_sent"]:
        yield Text("  Not sent: safe to send again, after the cause is removed.")
    if tally.statuses["unknown"]:
        yield Text("  Unknown: an invite may exist; sending again may make a second one.")
    if tally.replayed:
        yield Text(f"  {tally.replayed:,} are from the journal of an earlier run.")
    if tally.anomalies:
        yield Text(f"  {count_of(tally.anomalies, 'item')} of responses were odd: see Anomaly.")
    if tally.unrequested:
        yield Text(f"  {count_of(tally.unrequested, 'item')} came for quota IDs that were not in the request.")


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
    return _display(*(known if total_known else open_ended), lines=lines)


def _display(*columns: ProgressColumn, lines: bool) -> Progress:
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


class StreamBar:
    """A display of a stream's own progress."""

    def __init__(self, *, lines: bool = False) -> None:
        self.display = _display(BarColumn(bar_width=24), TextColumn("{task.fields[text]}"), lines=lines)
        self.total: int | None = None  # of quota IDs, if the stream does not know it
        self._task = self.display.add_task("Inviting", total=None, text="")

    @contextmanager
    def follow(self, stream: OutcomeStream) -> Generator[None]:
        """Show the progress of a stream during a block, also while no outcome comes."""
        if self.display.disable:
            yield
            return
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []

        def show() -> None:
            self._show(stream.progress)
            timers[:] = [loop.call_later(_MOMENT, show)]

        show()
        try:
            yield
        finally:
            timers[0].cancel()

    def _show(self, progress: StreamProgress) -> None:
        progress = with_total(progress, self.total)
        self.display.update(
            self._task, completed=progress.answered, total=progress.total, text=progress_text(progress)
        )


def with_total(progress: StreamProgress, total: int | None) -> StreamProgress:
    """Return the progress of a stream with a total that the stream does not know, and the time left for it."""
    if progress.total is not None or total is None:
        return progress
    left = None if progress.per_second is None else max(0, total - progress.answered) / progress.per_second
    return evolve(progress, total=total, seconds_left=left)


def progress_text(progress: StreamProgress) -> str:
    parts = [
        f"{progress.answered:,}" if progress.total is None else f"{progress.answered:,}/{progress.total:,}"
    ]
    if progress.patience_left is not None:
        return f"{parts[0]}  the service is away; waiting up to {_clock_time(progress.patience_left)} for it"
    if progress.per_second is not None:
        parts.append(f"{progress.per_second:,.0f}/s")
    if progress.seconds_left is not None:
        parts.append(f"{_clock_time(progress.seconds_left)} left")
    return "  ".join(parts)


def _clock_time(seconds: float) -> timedelta:
    return timedelta(seconds=ceil(seconds))
