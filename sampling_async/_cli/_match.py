"""The command `match`: a panel in a file against an inventory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path  # noqa: TC003  typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sampling_async import InvalidRequestError, Quotas, from_json
from sampling_async._cli import _rendering as show
from sampling_async._cli._connection import Connection, ended_by_failure, fail
from sampling_async._cli._tally import USAGE
from sampling_async.matching import MatchPolicy, QuestionKinds, QuotaIndex

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sampling_async._cli._panel_files import PanelFile

_SHOWN: Final = 40
_FEW: Final = 5


def match(
    connection: Connection,
    members: Annotated[
        str,
        typer.Argument(
            metavar="PANEL",
            help="A file that ends in .parquet, .csv, .jsonl or .ndjson, a member a row; or a DuckDB query, "
            "SELECT ... Columns are named after the question IDs.",
            show_default=False,
        ),
    ],
    *,
    inventory: Annotated[
        Path | None,
        typer.Option(
            help="An answer of Get Quotas in a file. Default: the service's, now.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(help="The best N quotas of each member.", min=1, metavar="N", show_default=False),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help="The same as lines for a fan-out: who matches none is left out.",
            min=1,
            metavar="N",
            show_default=False,
        ),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(help="N members of each quota, at random.", min=1, metavar="N", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write to a file that ends in .parquet, .csv or .jsonl. Default: stdout.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="What a column is called in the panel; may be given several times.",
            metavar="QUESTION=NAME",
            show_default=False,
        ),
    ] = None,
    bands: Annotated[
        Path | None,
        typer.Option(
            help="What answer IDs of age stand for: a file of JSON, answer ID to first and last year.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    at_least_one: Annotated[
        bool, typer.Option("--at-least-one", help="A layer takes who fits several of its sub-quotas.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes. Default: all cores.", min=1, metavar="N", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines, on a terminal too.")] = False,
) -> None:
    """Match a whole panel with the open quotas: how many members each has, or the best quotas of each.

    Without an option, one row a quota: members that match for certain and
    possibly, completes still needed, and how many of these the certain ones
    fall short of. Further columns of the panel: member_code, device_type,
    exclude_surveys, participations. What is not answered is empty or null.
    """
    try:
        from sampling_async._cli import _panel_files as files  # noqa: PLC0415  numpy, pyarrow: an extra
        from sampling_async.matching import Counts, PanelMatcher, Sample, TopK  # noqa: PLC0415
        from sampling_async.matching.panel._columns import OTHERS  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        fail(f"match needs {exc.name}: python -m pip install 'sampling-async[panel]'", USAGE)
    if sum(each is not None for each in (top, requests, sample)) > 1:
        fail("--top, --requests and --sample: give one of them", USAGE)
    n = top if top is not None else requests
    wanted = TopK(n) if n is not None else Counts() if sample is None else Sample(sample)

    def work() -> None:
        renamed = _renamed(column or [], OTHERS)
        if output is not None:
            files.check_output(output, members)
        index = QuotaIndex(_inventory(connection, inventory), kinds=_kinds(bands), policy=_policy(at_least_one))
        matcher = PanelMatcher(index, wanted)
        names = OTHERS | {str(question_id) for question_id in matcher.questions}
        source = files.opened(members, names, renamed)
        _tell(index, matcher.questions, source.columns)
        followed = _Followed(source)
        results = iter(matcher.run(iter(followed), workers=workers or _cores()))
        if requests is not None:
            results = files.matching_any(results)
        with followed.progress:
            if output is not None:
                files.write(results, matcher.schema, output)
            elif isinstance(wanted, Counts) and not show.as_lines(as_json):
                _show_counts(results, followed)
            else:
                for line in files.lines(results, only_ascii=sys.stdout.isatty()):
                    show.emit(line)
        _tell_end(followed, output)

    ended_by_failure(work)


def _cores() -> int:
    """Return the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _policy(at_least_one: bool) -> MatchPolicy:  # noqa: FBT001  the value of --at-least-one
    return MatchPolicy(subquota_rule="at_least_one" if at_least_one else "exactly_one")


def _renamed(columns: list[str], others: frozenset[str]) -> dict[str, str]:
    renamed: dict[str, str] = {}
    for each in columns:
        question, equals, name = each.partition("=")
        question = question.strip()
        if not equals or not name or not (question.isdecimal() or question in others):
            raise InvalidRequestError(
                f"--column is QUESTION=NAME, as 1001538=age or member_code=id, not {each!r}"
            )
        renamed[name] = question
    return renamed


def _kinds(bands: Path | None) -> QuestionKinds:
    kinds = QuestionKinds.default()
    if bands is None:
        return kinds
    (question_id,) = kinds.age
    try:
        read = json.loads(bands.read_bytes())
        return kinds.with_age(
            question_id, {int(id_): (int(first), int(last)) for id_, (first, last) in read.items()}
        )
    except OSError as exc:
        raise InvalidRequestError(f"{bands}: {exc.strerror}") from None
    except (ValueError, TypeError, AttributeError):
        raise InvalidRequestError(
            f'{bands}: bands are JSON of answer ID to first and last year, {{"2006351": [18, 24]}}'
        ) from None


def _inventory(connection: Connection, file: Path | None) -> Quotas:
    if file is None:
        return connection.call(lambda client: client.get_quotas())
    try:
        return from_json(Quotas, file.read_bytes())
    except OSError as exc:
        raise InvalidRequestError(f"{file}: {exc.strerror}") from None


class _Followed:
    """A panel as it is read: counts members, and moves the bar."""

    def __init__(self, source: PanelFile) -> None:
        self._batches = source.batches
        self.members = 0
        self.progress = show.progress_bar(total_known=source.members is not None, lines=True)
        self._task = self.progress.add_task("Matching", total=source.members)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self.members += len(batch)
            self.progress.advance(self._task, len(batch))
            yield batch


def _tell(index: QuotaIndex, questions: tuple[int, ...], columns: tuple[str, ...]) -> None:
    """Say on stderr what is odd about the inventory, and what the panel lacks."""
    console = show.errors()
    if index.diagnostics:
        first = index.diagnostics[0]
        console.print(
            show.plain(
                f"{len(index.diagnostics):,} oddities in the inventory count as possible; the first: quota"
                f" {first.quota_id}, {first.message}",
                "yellow",
            ),
            soft_wrap=True,
        )
    missing = [str(question_id) for question_id in questions if str(question_id) not in columns]
    if missing and len(missing) == len(questions):
        raise InvalidRequestError(
            f"no column of the panel is a question that is asked, such as {missing[0]}: name columns after"
            " question IDs, or give --column QUESTION=NAME"
        )
    if missing:
        shown = ", ".join(missing[:_FEW]) + (", ..." if len(missing) > _FEW else "")
        console.print(
            show.plain(
                f"{len(missing):,} of {len(questions):,} questions have no column in the panel, so that nobody"
                f" has answered them: {shown}",
                "yellow",
            ),
            soft_wrap=True,
        )


def _show_counts(batches: Iterator[Any], followed: _Followed) -> None:
    rows = [row for batch in batches for row in batch.to_pylist()]
    followed.progress.stop()
    numbers = ("Quota", "Survey", "Needed", "Certain", "Possible", "Shortfall")
    table = show.new_table(*numbers, right=numbers)
    for row in rows[:_SHOWN]:
        cells = [f"{row[name.lower()]:,}" for name in numbers[2:]]
        cells[-1] = f"[red]{cells[-1]}[/red]" if row["shortfall"] else "[dim]0[/dim]"
        table.add_row(str(row["quota_id"]), str(row["survey_id"]), *cells)
    screen = show.screen()
    screen.print(table)
    if len(rows) > _SHOWN:
        screen.print(f"[dim]and {len(rows) - _SHOWN:,} more: pipe, or give --output FILE[/dim]")
    enough = sum(not row["shortfall"] for row in rows)
    screen.print(
        f"\n{followed.members:,} members, {len(rows):,} quotas: {enough:,} can be filled with certain"
        f" members, [bold]{len(rows) - enough:,}[/bold] fall short of {sum(row['shortfall'] for row in rows):,}"
        " completes.",
        soft_wrap=True,
    )


def _tell_end(followed: _Followed, output: Path | None) -> None:
    if output is not None:
        show.errors().print(show.plain(f"{followed.members:,} members matched: {output}"), soft_wrap=True)
