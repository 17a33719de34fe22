# night.py
from pathlib import Path

from attrs import asdict

from sampling_async import SamplingClient
from sampling_async.campaign import Campaign


async def request_invites(panel: Path, folder: Path) -> dict[str, int]:
    """Run the campaign of a night, or what is left of it."""
    async with SamplingClient.from_env() as client:
        campaign = Campaign(client, panel, ledger=folder / "campaign.ledger")
        await campaign.plan()  # or the plan that is in the ledger
        async with campaign.run() as run:
            async for _ in run:
                pass
        if run.reason:
            raise RuntimeError(run.reason)  # the scheduler tries again later
        await campaign.write(folder)
    return asdict(run.pairs)
