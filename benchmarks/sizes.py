"""What a panel of some size takes: files, memory, processor time, and requests.

    python benchmarks/sizes.py [--members 10000000]

A panel is written, and a campaign is planned for it, with five quotas a member at most. Some pairs are
requested from a simulator, to see what a journal takes. Most is printed for each million members, too. Needs
the dependency groups `bench` and `tests`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Final

from matching.of_planning import PER_MEMBER, planned, write_panels
from speed.remote import fresh

from sampling_async import InviteRequest
from sampling_async.simulator import Simulator

REQUESTED: Final = 2_000
MIB: Final = 2**20


def size(path: Path) -> float:
    """Return the size of a file, with what SQLite keeps beside it, in MiB."""
    return sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*")) / MIB


async def journal_bytes(folder: Path) -> float:
    """Return how many bytes of a journal a requested pair takes."""
    sim = Simulator(seed=1, surveys=60, members=200)
    quota_ids = [quota.quota_id for survey in sim.inventory.surveys for quota in survey.quotas][:PER_MEMBER]
    requests = [InviteRequest(f"x{number:08}", quota_ids) for number in range(REQUESTED)]
    async with sim.client() as client, client.fan_out(requests, journal=folder / "run.journal") as outcomes:
        count = sum([1 async for _ in outcomes])
    return size(folder / "run.journal") * MIB / count


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=10_000_000)
    members = parser.parse_args().members
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        panel, ledger = folder / "panel.parquet", folder / "campaign.ledger"
        fresh(write_panels, {members: panel})
        plan = fresh(planned, panel, ledger)
        rows = {
            "file of the panel": (size(panel), "MiB"),
            "pairs in the plan": (plan["pairs"] / 1e6, "million"),
            "plan: processor time": (plan["seconds"], "s"),
            "ledger of the campaign": (size(ledger), "MiB"),
        }
        print(
            f"| {members:,} members, {plan['quotas']:,} quotas | in all | for each million |\n|---|---:|---:|"
        )
        for what, (value, unit) in rows.items():
            print(f"| {what} | {value:,.0f} {unit} | {value / members * 1e6:,.1f} {unit} |")
        print(f"| plan: peak memory of the process | {plan['mib']:,.0f} MiB | |")
        journal = asyncio.run(journal_bytes(folder))
        print(f"| journal of a plain fan-out: a requested pair | {journal:.0f} bytes | |")


if __name__ == "__main__":
    sys.exit(main())
