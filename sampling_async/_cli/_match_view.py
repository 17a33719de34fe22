"""The output of `match` on a terminal: the first rows, a sum, and how to get all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sampling_async._cli import _rendering as show

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.table import Table

    from sampling_async._cli._match_run import Followed
    from sampling_async.matching import QuotaIndex

SHOWN: Final = 40
_QUOTAS: Final = 5
_UNKNOWN_BAND: Final = "is in no known band"


def show_counts(batches: Iterator[Any], followed: Followed) -> None:
    """Show how many members each quota has."""
    rows = [row for batch in batches for row in batch.to_pylist()]
    numbers = ("Quota", "Survey", "Needed", "Certain", "Possible", "Shortfall")
    table = show.new_table(*numbers, right=numbers)
    for row in rows[:SHOWN]:
        cells = [f"{row[name.lower()]:,}" for name in numbers[2:]]
        cells[-1] = f"[red]{cells[-1]}[/red]" if row["shortfall"] else "[dim]0[/dim]"
        table.add_row(str(row["quota_id"]), str(row["survey_id"]), *cells)
    enough = sum(not row["shortfall"] for row in rows)
    _show(
        table,
        len(rows),
        followed,
        f"{followed.members:,} members, {len(rows):,} quotas: {enough:,} can be filled with certain members,"
        f" [bold]{len(rows) - enough:,}[/bold] need {sum(row['shortfall'] for row in rows):,}"
        " more completes.",
    )


def show_best(batches: Iterator[Any], followed: Followed, *, as_requests: bool) -> None:
    """Show the best quotas of the first members, and how many members match any."""
    table = show.new_table("Member", "Quotas", "Certain", "The best", right=("Quotas", "Certain"))
    count = certain = possible = 0
    for batch in batches:
        # Only the rows that are shown become Python objects; all others are just counted below.
        for row in batch.slice(0, max(SHOWN - count, 0)).to_pylist():
            ids = [str(quota_id) for quota_id in row["quota_ids"]]
            best = " ".join(ids[:_QUOTAS]) + (" ..." if len(ids) > _QUOTAS else "")
            table.add_row(show.plain(row["member_code"]), str(len(ids)), str(row["certain"]), best)
        for many, of_certain in zip(
            batch.column("quota_ids").value_lengths().to_pylist(),
            batch.column("certain").to_pylist(),
            strict=True,
        ):
            certain += of_certain > 0
            possible += many > 0 and not of_certain
        count += len(batch)
    told = (
        f"{followed.members:,} members: {certain:,} match a quota for certain, {possible:,} possibly,"
        f" {followed.members - certain - possible:,} none."
    )
    if as_requests:
        told += "\nTo request these invites: pipe into sampling-async fan-out"
    _show(table, count, followed, told)


def show_sample(batches: Iterator[Any], followed: Followed) -> None:
    """Show the first members that were drawn, and how many quotas have any."""
    table = show.new_table("Quota", "Member", "Match", right=("Quota",))
    count, quotas = 0, set[int]()
    for batch in batches:
        for row in batch.slice(0, max(SHOWN - count, 0)).to_pylist():
            match = "certain" if row["certain"] else "[dim]possible[/dim]"
            table.add_row(str(row["quota_id"]), show.plain(row["member_code"]), match)
        quotas.update(batch.column("quota_id").to_pylist())
        count += len(batch)
    _show(
        table,
        count,
        followed,
        f"{count:,} members drawn from {followed.members:,}, for {len(quotas):,} quotas.",
    )


def _show(table: Table, rows: int, followed: Followed, told: str) -> None:
    # Two displays on one screen would write into each other, so the bar ends before the table begins.
    followed.progress.stop()
    screen = show.screen()
    screen.print(table)
    if rows > SHOWN:
        screen.print(f"[dim]and {rows - SHOWN:,} more; a pipe or --output FILE gets all[/dim]")
    screen.print(f"\n{told}")


def tell_oddities(index: QuotaIndex) -> None:
    """Report oddities of the inventory on stderr."""
    if index.diagnostics:
        first = index.diagnostics[0]
        way_out = "; give the age bands with --bands FILE" if first.message.endswith(_UNKNOWN_BAND) else ""
        _warn(
            f"the inventory has {len(index.diagnostics):,} oddities, which count as possible; the first: "
            f"quota {first.quota_id}, {first.message}{way_out}",
        )


def tell_missing(first: Sequence[str], missing: int, questions: int) -> None:
    """Report on stderr the questions for which the panel has no column."""
    shown = ", ".join(first) + (", ..." if missing > len(first) else "")
    _warn(
        f"the panel has no column for {missing:,} of {questions:,} questions, so they count as not answered: "
        f"{shown}",
    )


def tell_written(members: int, output: Path) -> None:
    """Report on stderr where the results are."""
    show.note(f"{members:,} members matched: {output}")


def _warn(text: str) -> None:
    show.errors().print(show.plain(text, "yellow"), soft_wrap=True)
