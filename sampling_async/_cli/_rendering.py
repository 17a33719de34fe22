"""How things look: JSON lines in the contract's own names, and tables, lines and progress for a terminal.

What the service sends is shown as plain text: never as markup (`[pid]` is a placeholder, not a style), and
without the control characters that a terminal would obey.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from datetime import timedelta
from math import ceil
from typing import TYPE_CHECKING, Any, Final, Self

from attrs import evolve
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

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TextIO

    from sampling_async import Invite, InviteOutcome, OutcomeStream, Quota, Quotas, Setting, Survey
    from sampling_async import Progress as Told
    from sampling_async._cli._tally import Tally
    from sampling_async._outcomes import OutcomeStatus

STYLES: Final[dict[OutcomeStatus, str]] = {
    "invited": "green",
    "rejected": "yellow",
    "not_sent": "magenta",
    "unknown": "red",
}
HIDDEN: Final = "<hidden>"
_LINES_AT_ONCE: Final = 100
_MOMENT: Final = 0.1


def as_lines(wanted: bool) -> bool:  # noqa: FBT001  the value of --json
    """Return whether to write JSON lines: asked for, or stdout is not a terminal."""
    return wanted or not sys.stdout.isatty()


def emit(line: bytes) -> None:
    """Write a line to stdout at once, in UTF-8 whatever the locale."""
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def emit_all(records: Iterable[object]) -> None:
    """Write records as lines of the contract's JSON."""
    for record in records:
        emit_json(json.loads(to_json(record)))


def emit_json(value: object) -> None:
    """Write a value as a line of JSON; on a terminal in ASCII, so that nothing in it can steer the terminal."""
    emit(json.dumps(value, ensure_ascii=sys.stdout.isatty(), separators=(",", ":")).encode())


def emit_code(member_code: str) -> None:
    """Write a member code as a line.

    Raises:
        DecodeError: It holds a line break, and would be read as two.
    """
    if len(member_code.splitlines()) > 1:
        raise DecodeError("$.MemberCodes", "expected codes of one line each; read this list with --json")
    emit((plain(member_code).plain if sys.stdout.isatty() else member_code).encode())


def screen() -> Console:
    """Return the terminal on stdout."""
    return Console(highlight=False)


def errors() -> Console:
    """Return the terminal on stderr."""
    return Console(stderr=True, highlight=False)


def plain(text: str | None, style: str = "") -> Text:
    """Return text of the service as it is, with control characters made visible."""
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text or "")
    return Text(shown, style=style)


def new_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Return a table in the house style; columns named in `right` hold numbers."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        is_number = column in right
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    return table


def quotas_table(surveys: Iterable[Survey]) -> Table:
    """Return the inventory, a survey a row."""
    numbers = ("Survey", "Wave", "LOI", "IR", "Price", "Cur", "Quotas", "Remaining")
    table = new_table(*numbers, "Devices", "Recontact", right=numbers)
    for survey in surveys:
        table.add_row(
            str(survey.survey_id),
            str(survey.wave_id),
            str(survey.loi),
            str(survey.ir),
            f"{survey.price.amount:.2f}",
            str(survey.price.currency_id),
            str(len(survey.quotas)),
            f"{survey.estimated_completes_remaining:,}",
            " ".join(str(device) for device in survey.device_type_ids),
            "yes" if survey.is_survey_recontact else "",
        )
    return table


def quota_table(quotas: Iterable[Quota]) -> Table:
    """Return the quotas of a survey, and what a member must match."""
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
    """Return the size of an inventory in words."""
    count = sum(len(survey.quotas) for survey in quotas.surveys)
    recontact = sum(survey.is_survey_recontact for survey in quotas.surveys)
    return Text(
        f"\n{len(quotas.surveys):,} surveys ({recontact} recontact), {count:,} quotas, "
        f"country {quotas.country_id}. LOI in minutes, IR in percent, currency and devices by ID.\n"
        "One survey with its quotas: sampling-async quotas --survey ID",
        style="dim",
    )


def masked(setting: Setting) -> Setting:
    """Return a setting that may be shown: a secret value is replaced."""
    return evolve(setting, value=HIDDEN) if setting.is_secret and setting.value is not None else setting


def setting_pairs(settings: Iterable[Setting]) -> Iterator[tuple[str, Text]]:
    """Yield the settings; secrets are masked, values that are not set are dim."""
    for setting in map(masked, settings):
        unset = setting.value is None
        yield plain(setting.name).plain, plain("not set" if unset else setting.value, "dim" if unset else "")


def print_pairs(pairs: Iterable[tuple[str, Text]]) -> None:
    """Print names and values, a pair a line. A link is never cut into lines of its own, so it can be copied."""
    rows = list(pairs)
    width = max((len(name) for name, _ in rows), default=0)
    console = screen()
    for name, value in rows:
        console.print(Text(f"{name:<{width}}  ", style="bold").append_text(value), soft_wrap=True)


def invite_pairs(invite: Invite) -> Iterator[tuple[str, Text]]:
    """Yield an invite, a field a pair."""
    for name, value in json.loads(to_json(invite)).items():
        yield name, plain(str(value))


def outcome_json(outcome: InviteOutcome) -> dict[str, Any]:
    """Return an outcome in the contract's names for a bulk result item, and ours for what it does not know."""
    invite = outcome.invite
    return {
        "MemberCode": outcome.member_code,
        "QuotaID": outcome.quota_id,
        "Status": outcome.status,
        "Invite": None if invite is None else json.loads(to_json(invite)),
        "ResultCode": outcome.result_code,
        "Result": outcome.result,
        "Error": None if outcome.error is None else str(outcome.error),
        "Anomaly": outcome.anomaly,
        "Replayed": outcome.replayed,
    }


def outcome_text(outcome: InviteOutcome) -> Text:
    """Return an outcome as a line for a terminal."""
    line = Text(f"{outcome.status.replace('_', ' '):<9}", style=STYLES[outcome.status])
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


class OutcomePage:
    """Prints outcomes on a terminal, many at a time: above a live bar each print draws all anew.

    Args:
        progress: The bar; above it while there is one, since two consoles on one screen would write into each
            other.
    """

    def __init__(self, progress: Progress) -> None:
        self._console = screen() if progress.disable else progress.console
        self._lines: list[Text] = []
        self._printed_at = 0.0

    def add(self, outcome: InviteOutcome) -> None:
        """Take an outcome, and print when there are many or the last print was a moment ago."""
        self._lines.append(outcome_text(outcome))
        if len(self._lines) >= _LINES_AT_ONCE or time.monotonic() - self._printed_at > _MOMENT:
            self.flush()

    def flush(self) -> None:
        """Print what has not been printed."""
        if self._lines:
            self._console.print(Text("\n").join(self._lines), soft_wrap=True)
            self._lines.clear()
        self._printed_at = time.monotonic()


def summary(tally: Tally) -> Iterable[Text]:
    """Yield the lines that close a fan-out: counts by status and by result code, failures, what is odd."""
    yield Text(tally.in_words(), style="bold")
    width = len(f"{tally.total:,}")
    for (code, result), count in tally.codes.most_common():
        if code is None and tally.failures:
            continue  # said below, by their failures
        yield Text(f"  {count:>{width},}  ").append_text(plain(code_name(code, result)))
    for text, count in tally.failures.most_common():
        yield Text(f"  {count:>{width},}  ", style="red").append_text(plain(text, "red"))
    if tally.statuses["not_sent"]:
        yield Text("  Not sent: safe to send again, once the cause is mended.")
    if tally.statuses["unknown"]:
        yield Text("  Unknown: an invite may exist; sending again may make a second one.")
    if tally.replayed:
        yield Text(f"  {tally.replayed:,} are from the journal, of a run before.")
    if tally.anomalies:
        yield Text(f"  {tally.anomalies:,} answers were odd: see Anomaly.")
    if tally.unrequested:
        yield Text(f"  {tally.unrequested:,} answers came under quota IDs nobody asked for.")


def print_summary(tally: Tally) -> None:
    """Print the closing summary on stderr."""
    console = errors()
    for line in summary(tally):
        console.print(line, soft_wrap=True)


def _is_file(stream: TextIO) -> bool:
    """Return whether a stream leads into a file, or into nothing, and not to a screen or another program."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # no real stream, as under a test
        return False
    return stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not stream.isatty())


class RateColumn(ProgressColumn):
    """The things done a second, on the average of the whole run."""

    def render(self, task: Task) -> Text:
        """Return the rate, or nothing before there is one."""
        seconds = task.elapsed or 0.0
        return Text(f"{task.completed / seconds:,.0f}/s" if seconds > 0 and task.completed else "", "cyan")


def progress_bar(*, total_known: bool, lines: bool = False) -> Progress:
    """Return a progress display on stderr; gone when it ends.

    It is off where stderr is no terminal, and where lines of JSON may come out on the same screen: there
    directly, or through a pipe whose reader prints them.
    """
    known = (BarColumn(bar_width=24), MofNCompleteColumn(), RateColumn(), TimeRemainingColumn())
    open_ended = (TextColumn("{task.completed:,.0f}"), RateColumn(), TimeElapsedColumn())
    return _display(*(known if total_known else open_ended), lines=lines)


def _display(*columns: ProgressColumn, lines: bool) -> Progress:
    console = errors()
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal or (lines and not _is_file(sys.stdout)),
        redirect_stdout=False,
        redirect_stderr=True,
    )


class StreamBar:
    """A progress display that shows what a stream says of itself: a context manager; gone when it ends."""

    def __init__(self, *, lines: bool = False) -> None:
        self.display = _display(BarColumn(bar_width=24), TextColumn("{task.fields[told]}"), lines=lines)
        self._task = self.display.add_task("Inviting", total=None, told="")
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        self.display.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.display.stop()

    def follow(self, stream: OutcomeStream) -> None:
        """Show how far a stream has come, if that was not shown a moment ago."""
        now = time.monotonic()
        if not self.display.disable and now - self._shown_at > _MOMENT:
            self._shown_at, told = now, stream.progress
            self.display.update(self._task, completed=told.answered, total=told.total, told=progress_text(told))


def progress_text(told: Told) -> str:
    """Return in words how far a stream has come."""
    parts = [f"{told.answered:,}" if told.total is None else f"{told.answered:,}/{told.total:,}"]
    if told.per_second is not None:
        parts.append(f"{told.per_second:,.0f}/s")
    if told.seconds_left is not None:
        parts.append(f"{timedelta(seconds=ceil(told.seconds_left))} left")
    return "  ".join(parts)
