"""What the other commands about campaigns do with the ledgers of folders: show them, change limits, report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from sampling_async import InvalidRequestError
from sampling_async._cli import _campaign_view as view
from sampling_async._cli import _rendering as show
from sampling_async._cli._campaign_run import ledger_in, ledger_of_outcomes, saved_in, title_of
from sampling_async._cli._pages import write_comparison_page
from sampling_async._pacing.threads import CancelFlag
from sampling_async.campaign import LESSONS, Limits, compare
from sampling_async.campaign._files import write_files
from sampling_async.campaign._ledger import with_ledger
from sampling_async.campaign._summing import summary_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sampling_async._cli._campaign_options import Settings
    from sampling_async.campaign import Summary
    from sampling_async.campaign._ledger import CampaignLedger

T = TypeVar("T")


def _in_ledger(folder: Path, work: Callable[[CampaignLedger], T], *, reads: bool = True) -> T:
    """Do something with the ledger of a campaign, which must have a plan."""

    def planned(ledger: CampaignLedger) -> T:
        if not ledger.plan:
            raise InvalidRequestError(f"the ledger in {folder} has no plan: making it was cut off")
        return work(ledger)

    return with_ledger(ledger_in(folder), planned, reads=reads)


def change_limits(folder: Path, changes: dict[str, Any]) -> None:
    """Change limits, if there is any change, and show those that hold."""

    def change(ledger: CampaignLedger) -> tuple[Limits, bool]:
        limits = ledger.change_limits(**changes) if changes else ledger.limits()
        return limits, ledger.is_running()

    limits, is_running = _in_ledger(folder, change, reads=not changes)
    if show.as_lines():
        show.emit_json({**show.fields_of(limits), "Running": is_running})
    else:
        view.show_limits(limits, is_running=is_running)


def show_status(folder: Path) -> None:
    summary = _in_ledger(folder, lambda ledger: summary_of(ledger, LESSONS))
    if show.as_lines():
        show.emit_json(view.summary_json(summary))
    else:
        view.show_summary(summary, show.screen())


def show_comparison(folders: Sequence[Path], html: Path | None, given: Settings) -> None:
    """Show several campaigns side by side, and write the page of that."""

    def summary(ledger: CampaignLedger) -> Summary:
        return summary_of(ledger, LESSONS, ledger_of_outcomes(given.over(saved_in(ledger).settings)))

    summaries: dict[str, Summary] = {}
    seen: set[Path] = set()
    for folder in folders:
        whole = folder.resolve()
        if whole in seen:
            raise InvalidRequestError(f"{folder} is given twice")
        seen.add(whole)
        name = str(folder) if whole.name in summaries else whole.name
        found = _in_ledger(folder, summary)
        if found.started_at is None:
            show.note(f"Left out: {folder} was only planned, and nothing was requested")
        else:
            summaries[name] = found
    if not summaries:
        raise InvalidRequestError("none of these campaigns has requested anything yet")
    comparison = compare(summaries)
    if html is not None:
        write_comparison_page(html, comparison)
    rows = view.comparison_json(comparison.to_dict())
    if show.wanted.csv:
        for night in rows["Nights"]:
            show.emit_json({name: value for name, value in night.items() if name != "Codes"})
    elif show.as_lines():
        show.emit_json(rows)
    else:
        view.show_comparison(comparison)


def write_report(folder: Path, out: Path, given: Settings) -> None:
    """Write the files of a campaign into a folder; what is not given is as the run had it."""

    def write(ledger: CampaignLedger) -> Summary:
        settings = given.over(saved_in(ledger).settings)
        partitions, kind = settings.partition or (), settings.format or "parquet"
        title, outcomes = title_of(folder), ledger_of_outcomes(settings)
        return write_files(
            ledger,
            LESSONS,
            out,
            CancelFlag(),
            partitions=partitions,
            kind=kind,
            title=title,
            outcomes=outcomes,
        )

    if ends := view.ends_text(_in_ledger(folder, write)):
        show.note(ends)
    show.note(f"Files: {out} (invites, pairs, summary.json, report.html)")
