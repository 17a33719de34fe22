"""Take pictures of what is written after several nights: a report with completes, a comparison, an inventory.

    python docs/pictures/nights.py

It simulates four nights, and takes what `report.py` takes.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from report import take

from sampling_async._cli._simulation import write_panel
from sampling_async.campaign import Campaign, Summary, compare
from sampling_async.campaign._inventory_page import inventory_page
from sampling_async.campaign._report import comparison_page
from sampling_async.matching import Allocate, Counts, PanelMatcher, QuestionKinds, QuotaIndex
from sampling_async.matching.panel._files import opened
from sampling_async.notifications import Inbox, OutcomeLedger
from sampling_async.simulator import AGE_BANDS, Fault, Notifying, Simulator

KINDS: Final = QuestionKinds.default().with_age(1001538, AGE_BANDS)
DAY: Final = 86_400.0
NIGHTS: Final = 4


async def night(folder: Path, number: int) -> Summary:
    """Run a campaign, let its invites end, and write its files."""
    now = [datetime(2026, 11, 20 + number, 22, tzinfo=UTC).timestamp()]
    # The later ones end in fewer completes, and in the last one members have had enough.
    notifying = Notifying(completes=0.32 - 0.03 * number, survey_seconds=900, late=0.6, late_seconds=40_000)
    simulator = Simulator(5, surveys=60, members=800 + 150 * number, clock=lambda: now[0], notifying=notifying)
    if number == NIGHTS - 1:
        simulator.faults.add(Fault.refusal(39).on("bulk_invite", probability=0.2))
    write_panel(simulator.members.values(), folder / "panel.jsonl")
    ledger = OutcomeLedger(folder / "store.db", clock=lambda: now[0])
    inbox = Inbox(folder / "store.db", secrets="a-secret-of-these-nights", clock=lambda: now[0])
    async with simulator.client() as client, inbox:
        campaign = Campaign(
            client,
            folder / "panel.jsonl",
            ledger=folder / "campaign.ledger",
            allocate=Allocate(3),
            kinds=KINDS,
            wall_clock=lambda: now[0],
        )
        await campaign.plan()
        async with campaign.run() as run:
            await ledger.invited([outcome async for outcome in run])
        for _ in range(24):
            now[0] += DAY / 24
            await simulator.notifications.deliver(inbox, everything=False)
    return await campaign.write(folder, outcomes=ledger, title=f"Night of {20 + number} November")


def page_of_inventory(panel: Path) -> str:
    """Return the page of an inventory, and of what a panel fits."""
    surveys = Simulator(7, surveys=250, members=1).inventory.surveys
    matcher = PanelMatcher(QuotaIndex(surveys, kinds=KINDS), Counts())
    names = frozenset(map(str, matcher.questions))
    rows = matcher.run(opened(str(panel), names, {}).batches).read_all().to_pylist()
    fits = {row["quota_id"]: (row["certain"], row["possible"]) for row in rows}
    return inventory_page(surveys, fits, members=len(panel.read_text().splitlines()))


def main() -> None:
    """Write the pictures."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for n in range(NIGHTS):
            (folder / str(n)).mkdir()
        nights = {f"{20 + n} November": asyncio.run(night(folder / str(n), n)) for n in range(NIGHTS)}
        (folder / "compare.html").write_text(comparison_page(compare(nights), title="Four nights"))
        (folder / "inventory.html").write_text(page_of_inventory(folder / "0" / "panel.jsonl"))
        take(folder / "0" / "report.html", "ends")
        take(folder / "compare.html", "compare")
        take(folder / "inventory.html", "inventory")


if __name__ == "__main__":
    main()
