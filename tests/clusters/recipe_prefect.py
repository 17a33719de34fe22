"""A campaign as one task of a Prefect flow: a retry goes on from the ledger."""

import asyncio
from pathlib import Path

from attrs import asdict
from prefect import flow, task

from sampling_async import SamplingClient
from sampling_async.campaign import Campaign


@task(retries=20, retry_delay_seconds=600)
async def ask(panel: str, folder: str) -> dict[str, int]:
    async with SamplingClient.from_env() as client:
        # The folder exists already, on storage that the next attempt sees.
        campaign = Campaign(client, panel, ledger=Path(folder, "campaign.ledger"))
        await campaign.plan()  # or the plan that is in the ledger
        async with campaign.run() as run:
            async for _ in run:
                pass
        if run.reason:
            raise RuntimeError(run.reason)  # Prefect tries again later, and goes on
        await campaign.write(folder)
    return asdict(run.pairs)


@flow
async def ask_for_a_panel(panel: str, folder: str) -> dict[str, int]:
    return await ask(panel, folder)  # one task, and not one for each member


if __name__ == "__main__":
    asyncio.run(ask_for_a_panel("panel.parquet", "night"))
