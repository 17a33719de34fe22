# sampling_night.py
import asyncio
import os
from pathlib import Path

from dagster import AssetExecutionContext, DailyPartitionsDefinition, RetryPolicy, asset
from night import request_invites

NIGHTS = Path(os.environ.get("NIGHTS", "/data/nights"))  # a disk that each worker sees


@asset(
    partitions_def=DailyPartitionsDefinition(start_date="2026-01-01", end_offset=1),
    retry_policy=RetryPolicy(max_retries=20, delay=600),
)
def invites(context: AssetExecutionContext) -> dict[str, int]:
    folder = NIGHTS / context.partition_key
    folder.mkdir(exist_ok=True)
    pairs = asyncio.run(request_invites(NIGHTS / "panel.parquet", folder))
    context.add_output_metadata(pairs)
    return pairs
