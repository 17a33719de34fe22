"""Pages that commands write, beside the report of a campaign. They need the extra `panel`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sampling_async._cli import _rendering as show
from sampling_async._cli._connection import fail
from sampling_async._cli._tally import USAGE
from sampling_async._contract.extras import install
from sampling_async._private_files import written_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sampling_async import CurrencyRates, Survey
    from sampling_async.campaign import CampaignComparison
    from sampling_async.campaign._inventory_page import Fits


def write_inventory_page(
    output: Path,
    surveys: Sequence[Survey],
    fits: Fits | None = None,
    *,
    members: int = 0,
    rates: CurrencyRates | None = None,
) -> None:
    """Write the page of an inventory, with what a panel fits, if there is one."""

    def page() -> str:
        from sampling_async.campaign._inventory_page import inventory_page  # noqa: PLC0415  needs Jinja2

        return inventory_page(surveys, fits, members=members, currency_rates=rates)

    _write(output, page)


def write_comparison_page(output: Path, comparison: CampaignComparison) -> None:
    """Write the page of several campaigns side by side."""

    def page() -> str:
        from sampling_async.campaign._report import comparison_page  # noqa: PLC0415  likewise

        return comparison_page(comparison)

    _write(output, page)


def _write(output: Path, page: Callable[[], str]) -> None:
    try:
        text = page()
    except ModuleNotFoundError as exc:
        fail(f"the page needs {exc.name}: {install('panel')}", USAGE)
    with written_whole(output) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    show.note(f"Page: {output}")
