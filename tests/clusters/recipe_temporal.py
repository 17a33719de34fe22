"""A campaign as one activity of a Temporal workflow: another attempt goes on from the ledger."""

import asyncio
from datetime import timedelta
from pathlib import Path

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():  # workflows do not use them
    from attrs import asdict

    from sampling_async import SamplingClient
    from sampling_async.campaign import Campaign

BEAT = 5  # seconds


async def beat(seen):
    """Say that the activity is alive. Only so does it notice a cancellation."""
    while True:
        activity.heartbeat(seen())
        await asyncio.sleep(BEAT)


@activity.defn
async def ask(panel: str, folder: str) -> dict[str, int]:
    run = None
    beating = asyncio.create_task(beat(lambda: run and asdict(run.pairs)))  # while the panel is matched, too
    try:
        async with SamplingClient.from_env() as client:
            # The folder exists already, on storage that the next attempt sees.
            campaign = Campaign(client, panel, ledger=Path(folder, "campaign.ledger"))
            await campaign.plan()  # or the plan that is in the ledger
            async with campaign.run() as run:  # a cancellation leaves it, and what is pending stays pending
                async for _ in run:
                    pass
            if run.reason:
                raise ApplicationError(run.reason)  # Temporal tries again later, and goes on
            await campaign.write(folder)
    finally:
        beating.cancel()
    return asdict(run.pairs)


@workflow.defn
class AskForAPanel:
    @workflow.run
    async def run(self, panel: str, folder: str) -> dict[str, int]:
        return await workflow.execute_activity(
            ask,
            args=[panel, folder],
            schedule_to_close_timeout=timedelta(hours=20),  # all attempts, pauses included
            heartbeat_timeout=timedelta(minutes=1),
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
            retry_policy=RetryPolicy(
                initial_interval=timedelta(minutes=1),
                maximum_interval=timedelta(minutes=10),
                non_retryable_error_types=["InvalidRequestError"],  # the panel cannot be used
            ),
        )


async def main():
    client = await Client.connect("localhost:7233")
    # Only workers that see the folder of the ledger take from this queue.
    async with Worker(client, task_queue="campaigns", workflows=[AskForAPanel], activities=[ask]):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
